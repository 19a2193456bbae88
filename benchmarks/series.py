"""Figures by name, a value a round, and the quantities made of them.

A series is `{"load/metis/AllocatePodIP/32/p50_ms": [8.1, 8.0, 8.3]}`: the parts of
the name are section, what was measured, how, and the figure with its unit; the
values stand in the order of the rounds. A ratio is taken round by round, because
what disturbs a machine disturbs both sides of one round, and then its median.
Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Series = Mapping[str, Sequence[float]]


class Rounds(dict[str, list[float]]):
    """A series that is being measured."""

    def add(self, name: str, value: float) -> None:
        """Note the value of one more round."""
        self.setdefault(name, []).append(value)

    def extend(self, other: Series) -> None:
        """Take over what was measured elsewhere."""
        for name, values in other.items():
            self.setdefault(name, []).extend(values)


@dataclass(frozen=True, slots=True)
class Quantity:
    """A figure, or the ratio of two.

    Attributes:
      over: the name of the figure.
      under: the name of the figure that it is divided by; empty for none.
    """

    over: str
    under: str = ""

    def rounds(self, series: Series) -> list[float]:
        """One value a round; empty when it was not measured.

        Raises:
          ValueError: a ratio of figures that were not measured together.
        """
        over = list(series.get(self.over, ()))
        if not self.under or not over:
            return over
        under = series.get(self.under, ())
        if not under:
            return []
        if len(over) != len(under):
            raise ValueError(
                f"{self.over} has {len(over)} rounds and {self.under} {len(under)}: "
                "a ratio needs both in every round"
            )
        return [a / b for a, b in zip(over, under, strict=True)]

    def value(self, series: Series) -> float | None:
        """The median of the rounds, or None when it was not measured."""
        rounds = self.rounds(series)
        return statistics.median(rounds) if rounds else None


def median_of(series: Series, name: str) -> float | None:
    """The median of a figure, or None when it was not measured."""
    return Quantity(name).value(series)


def spread(values: Iterable[float]) -> float:
    """How far the values lie apart, as a part of their median: 0.1 is 10 %."""
    known = list(values)
    return (max(known) - min(known)) / statistics.median(known)
