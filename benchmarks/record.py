"""The figures of a run as a JSON file.

schema    1; a file of another one is refused
machine   cpus, architecture, kernel, system, python, versions by package:
          no host names, no paths
settings  how often everything was measured (`benchmarks.settings.Settings`)
series    name -> one value a round (`benchmarks.series`); the last part of a
          name is the figure and its unit: per_second, p50_ms, server_cpu_us,
          rss_mib, seconds; "share" is a part of one
guard     name -> value: what the guard holds later runs against, the medians
          of several quick runs; empty when the run was not recorded
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.series import Series
from benchmarks.settings import Settings

SCHEMA = 1

DIGITS = 5
"""Digits that are kept of a figure; noise is far above."""

RECORDED = Path(__file__).with_name("recorded.json")
"""The figures that docs/performance.md tells and the guard compares with."""


@dataclass(frozen=True, slots=True)
class Record:
    """A run; see the module for the parts."""

    machine: Mapping[str, object]
    settings: Mapping[str, object]
    series: Series
    guard: Mapping[str, float] = field(default_factory=dict)

    def as_text(self) -> str:
        """The file: the same for the same figures, and a line for each."""
        series = {
            name: [_rounded(value) for value in values]
            for name, values in self.series.items()
        }
        guard = {name: _rounded(value) for name, value in self.guard.items()}
        parts = [
            f' "schema": {SCHEMA}',
            _part("machine", self.machine),
            _part("settings", self.settings),
            _part("series", series),
            _part("guard", guard),
        ]
        return "{\n" + ",\n".join(parts) + "\n}\n"


def of_run(
    machine: Mapping[str, object],
    settings: Settings,
    series: Series,
    guard: Mapping[str, float] | None = None,
) -> Record:
    """The record of a run that was just made."""
    return Record(machine, asdict(settings), series, guard or {})


def read(path: Path) -> Record:
    """Read a file that was recorded.

    Raises:
      ValueError: there is none, or it is something else; says what to do.
    """
    try:
        document = json.loads(path.read_text())
        schema = document["schema"]
        record = Record(
            document["machine"],
            document["settings"],
            document["series"],
            document["guard"],
        )
    except FileNotFoundError:
        raise ValueError(
            f"{path.name} is missing: record it with `nox -s bench -- --record`"
        ) from None
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path.name} is not a record of figures: {error!r}"
        ) from error
    if schema != SCHEMA:
        raise ValueError(
            f"{path.name} has schema {schema!r}, and this program writes {SCHEMA}: "
            "record it anew with `nox -s bench -- --record`"
        )
    return record


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _part(name: str, values: Mapping[str, object]) -> str:
    lines = (
        f"  {json.dumps(key)}: {json.dumps(value)}"
        for key, value in sorted(values.items())
    )
    return f' "{name}": {{\n' + ",\n".join(lines) + "\n }"
