"""What the tests of the bench did, how often: a table at the end of the run."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass
class Counts:
    """What one test did; the fixture `counts`.

    Attributes:
      done: how often, by what it was: "kill -9 of the daemon".
    """

    done: Counter[str] = field(default_factory=Counter)

    def add(self, what: str, number: int = 1) -> None:
        """Note that something was done.

        Args:
          what: words that stand for the same in every test.
          number: how often; 0 notes that it never was, which a report must say.
        """
        self.done[what] += number


@dataclass
class Tally:
    """The counts of a whole run.

    Attributes:
      full: whether the counts are the whole ones.
      seed: what every random choice of the run follows from.
      tests: counts by the test's name.
      seconds: how long each test took, by its name.
    """

    full: bool
    seed: int
    tests: dict[str, Counts] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def of(self, test: str) -> Counts:
        """The counts of one test."""
        return self.tests.setdefault(test, Counts())

    @property
    def total(self) -> Counter[str]:
        """All tests together."""
        total: Counter[str] = Counter()
        for counts in self.tests.values():
            total.update(counts.done)
        return total

    def table(self) -> list[str]:
        """The lines of the table."""
        total = self.total
        if not total:
            return []
        width = max(map(len, total))
        return [
            f"{what:<{width}}  {number:>10,}" for what, number in sorted(total.items())
        ]

    def write(self, path: Path) -> None:
        """Write all of it as JSON."""
        path.write_text(
            json.dumps(
                {
                    "full": self.full,
                    "seed": self.seed,
                    "total": dict(sorted(self.total.items())),
                    "tests": {
                        name: {
                            "seconds": round(seconds, 1),
                            "counts": dict(self.of(name).done),
                        }
                        for name, seconds in sorted(self.seconds.items())
                    },
                },
                indent=2,
            )
            + "\n"
        )


TALLY = pytest.StashKey[Tally]()
"""Where the session's configuration keeps it."""
