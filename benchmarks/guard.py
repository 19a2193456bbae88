"""Whether anything has become dearer since the figures were recorded.

Only quantities that say the same on any machine and on a busy one: ratios of CPU
time (which a neighbour cannot take away, as he can wall time) and of resident memory,
each to a yardstick of the same round, on one CPU (`benchmarks.one_cpu`); never calls
per second, latencies or their tails. Each is the median of interleaved rounds. One
that looks worse is measured again before it is believed, and its best is what counts:
what has become dearer is dearer every time. More is worse in every one of them. Pure
but for `again`, which measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from benchmarks.series import Quantity, Series

TOLERANCE = 0.20
"""How much worse than recorded is too much; see GUARDED for why it is not less."""

TRIES = 3
"""How often a quantity is measured again before the guard believes that it is worse."""


@dataclass(frozen=True, slots=True)
class Guarded:
    """A quantity that may not grow, and the section that measures it."""

    name: str
    section: str
    quantity: Quantity


def _call(operation: str, level: int) -> Guarded:
    end = f"{operation}/{level}/server_cpu_us"
    return Guarded(
        f"CPU of {operation} at concurrency {level}, to the bare server",
        "cpu",
        Quantity(f"cpu/metis/{end}", f"cpu/bare/{end}"),
    )


def _cni(verb: str) -> Guarded:
    return Guarded(
        f"CPU of a CNI {verb} process, to a bare interpreter",
        "cni",
        Quantity(f"cni/metis/{verb}/cpu_ms", "cni/metis interpreter/cpu_ms"),
    )


GUARDED = (
    *(
        _call(operation, level)
        for operation in ("AllocatePodIP", "DeallocatePodIP")
        for level in (1, 32)
    ),
    Guarded(
        "CPU of an allocation with 20,000 addresses in cooldown, to none",
        "flat",
        Quantity("flat/cooling/20000/cpu_us", "flat/cooling/0/cpu_us"),
    ),
    Guarded(
        "CPU of an allocation in a /8, to a /24",
        "flat",
        Quantity("flat/block//8/cpu_us", "flat/block//24/cpu_us"),
    ),
    Guarded(
        "CPU of the first allocate of a /8, to a /24",
        "flat",
        Quantity("flat/first//8/cpu_us", "flat/first//24/cpu_us"),
    ),
    Guarded(
        "resident memory of the idle daemon, to the bare server's",
        "footprint",
        Quantity("footprint/idle/rss_mib", "footprint/bare/rss_mib"),
    ),
    Guarded(
        "CPU of a start on an empty database, to the bare server's",
        "footprint",
        Quantity("footprint/start/empty/cpu_ms", "footprint/bare/start_cpu_ms"),
    ),
    *(
        Guarded(
            f"CPU of an embedded allocation, {words}, to a call over bare h2",
            "embedded",
            Quantity(
                f"embedded/{name}/turn_cpu_us", f"embedded/{name}/exchange_cpu_us"
            ),
        )
        for name, words in (("memory", "memory transport"), ("engine", "engine alone"))
    ),
    *map(_cni, ("VERSION", "ADD", "CHECK", "DEL")),
    Guarded(
        "CPU of the daemon for a CNI ADD, to a bare interpreter",
        "cni",
        Quantity("cni/metis/ADD/daemon_cpu_ms", "cni/metis interpreter/cpu_ms"),
    ),
)
"""What the guard looks at."""


SECTIONS = tuple(sorted({guarded.section for guarded in GUARDED}))
"""The sections that measure it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the guard says of one quantity.

    Attributes:
      name: of the quantity.
      recorded: what it was; None when it was never recorded.
      measured: the best of now; None when it could not be measured.
      measurements: how often it was measured.
    """

    name: str
    recorded: float | None
    measured: float | None
    measurements: int = 1

    @property
    def holds(self) -> bool:
        """Whether it is known and not too much worse."""
        return (
            self.recorded is not None
            and self.measured is not None
            and not is_worse(self.measured, self.recorded)
        )

    def row(self) -> list[str]:
        """Name, recorded, measured, change, how often measured, and the verdict."""
        if self.recorded is None or self.measured is None:
            missing = "not recorded" if self.recorded is None else "not measured"
            return [
                self.name,
                *map(_number, (self.recorded, self.measured)),
                "",
                "",
                missing,
            ]
        return [
            self.name,
            _number(self.recorded),
            _number(self.measured),
            f"{self.measured / self.recorded - 1:+.0%}",
            str(self.measurements),
            "holds" if self.holds else "WORSE",
        ]


HEADERS = ("quantity", "recorded", "measured", "change", "measurements", "verdict")


def is_worse(measured: float, recorded: float) -> bool:
    """Whether a quantity has grown by more than the tolerance."""
    return measured > recorded * (1 + TOLERANCE)


def values(series: Series) -> dict[str, float]:
    """The guarded quantities of a series, by name; those that were measured."""
    found = {guarded.name: guarded.quantity.value(series) for guarded in GUARDED}
    return {name: value for name, value in found.items() if value is not None}


def judge(
    recorded: Mapping[str, float],
    series: Series,
    again: Callable[[Set[str]], Series],
) -> list[Verdict]:
    """Hold what was measured against what was recorded.

    Args:
      recorded: the guarded quantities by name, as `values` gave them.
      series: what was measured now.
      again: measures the sections that are named anew.
    """
    best = values(series)
    measurements = dict.fromkeys(best, 1)
    for _ in range(TRIES):
        doubtful = {
            guarded
            for guarded in GUARDED
            if guarded.name in best
            and guarded.name in recorded
            and is_worse(best[guarded.name], recorded[guarded.name])
        }
        if not doubtful:
            break
        anew = again({guarded.section for guarded in doubtful})
        for guarded in doubtful:
            value = guarded.quantity.value(anew)
            if value is not None:
                best[guarded.name] = min(best[guarded.name], value)
                measurements[guarded.name] += 1
    return [
        Verdict(
            guarded.name,
            recorded.get(guarded.name),
            best.get(guarded.name),
            measurements.get(guarded.name, 0),
        )
        for guarded in GUARDED
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
