"""The goals, and by how much each is met or not. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.series import Quantity, Series

LEVELS = (1, 8, 32, 128)
"""Calls under way at a time, as the goals name them."""

BLOCKS = ("/24", "/20", "/16", "/8")
"""Sizes of a pool in which a call costs the same."""

FIRST_BLOCKS = (*BLOCKS, "/64")
"""Blocks whose first allocate is measured; the /64 is IPv6."""

COOLING = (0, 20_000, 60_000)
"""Addresses in cooldown with which a call costs the same."""

FULL_POOL = 65_536
"""Allocations after which memory is read."""

LARGE_DATABASE = 100_000
"""Rows of the database that a start has to open."""

BURST = 64
"""CNI ADD processes started at once."""

IDLE_SECONDS = 30.0
"""How long an idle daemon is watched."""


LEAST_MISSING = 0.001
"""What is missing at least when a goal is not met, so that nobody reads 0 %."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A limit to what was measured.

    Attributes:
      what: the row's name in the table.
      quantity: what is held against the limit.
      limit: in the unit of the quantity.
      at_least: whether more is better.
      unit: for people; empty for a ratio.
    """

    what: str
    quantity: Quantity
    limit: float
    at_least: bool = False
    unit: str = ""

    def row(self, series: Series) -> list[str]:
        """Name, goal, measured, verdict."""
        bound = "at least" if self.at_least else "at most"
        value = self.quantity.value(series)
        return [
            self.what,
            f"{bound} {figure(self.limit, self.unit)}",
            "-" if value is None else figure(value, self.unit),
            self.verdict(value),
        ]

    def verdict(self, value: float | None) -> str:
        """Met, or by how much not."""
        if value is None:
            return "not measured"
        missing = 1 - value / self.limit if self.at_least else value / self.limit - 1
        if missing <= 0:
            return "met"
        if missing >= 1:
            return f"not met, {missing + 1:.1f} times the limit"
        return f"not met, by {max(missing, LEAST_MISSING):.1%}"


def figure(value: float, unit: str = "") -> str:
    """Three digits that count, and the unit."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}{' ' if unit else ''}{unit}"


def _load(level: int, figure_name: str, server: str = "metis") -> str:
    return f"load/{server}/AllocatePodIP/{level}/{figure_name}"


def _against_bare(level: int, figure_name: str) -> Quantity:
    return Quantity(_load(level, figure_name), _load(level, figure_name, "bare"))


_RATES = dict(zip(LEVELS, (0.9, 1.0, 1.15, 1.25), strict=True))
_TAILS = dict(zip(LEVELS, (2.0, 2.5, 2.0, 2.0), strict=True))
_CPU = dict(zip(LEVELS, (1.1, 1.0, 0.85, 0.8), strict=True))

GOALS = (
    *(
        Goal(
            f"allocations/s to the bare server, concurrency {level}",
            _against_bare(level, "per_second"),
            _RATES[level],
            at_least=True,
        )
        for level in LEVELS
    ),
    *(
        Goal(
            f"p99 to p50 of an allocation, concurrency {level}",
            Quantity(_load(level, "p99_ms"), _load(level, "p50_ms")),
            _TAILS[level],
        )
        for level in LEVELS
    ),
    *(
        Goal(
            f"CPU of an allocation to the bare server, concurrency {level}",
            _against_bare(level, "server_cpu_us"),
            _CPU[level],
        )
        for level in LEVELS
    ),
    Goal(
        "a new connection per call to a kept one, calls/s, concurrency 32",
        Quantity(
            "connections/metis/anew/32/per_second",
            "connections/metis/kept/32/per_second",
        ),
        0.6,
        at_least=True,
    ),
    *(
        Goal(
            f"allocate p50 with {count:,} addresses in cooldown to none",
            Quantity(f"flat/cooling/{count}/p50_ms", "flat/cooling/0/p50_ms"),
            1.1,
        )
        for count in COOLING[1:]
    ),
    *(
        Goal(
            f"allocate p50 in a {block} to a /24",
            Quantity(f"flat/block/{block}/p50_ms", "flat/block//24/p50_ms"),
            1.1,
        )
        for block in BLOCKS[1:]
    ),
    *(
        Goal(
            f"first allocate of a {block} to a /24",
            Quantity(f"flat/first/{block}/ms", "flat/first//24/ms"),
            3.0,
        )
        for block in FIRST_BLOCKS[1:]
    ),
    Goal(
        f"CPU of the idle daemon in {IDLE_SECONDS:.0f} s",
        Quantity("footprint/idle/cpu_ms"),
        5.0,
        unit="ms",
    ),
    Goal("resident memory, idle", Quantity("footprint/idle/rss_mib"), 36.0, unit="MiB"),
    Goal(
        f"resident memory after {FULL_POOL:,} allocations",
        Quantity("footprint/full/rss_mib"),
        60.0,
        unit="MiB",
    ),
    Goal(
        f"start to serving with {LARGE_DATABASE:,} rows",
        Quantity("footprint/start/large/wall_ms"),
        400.0,
        unit="ms",
    ),
    *(
        Goal(
            f"embedded, {words}: allocations/s at concurrency 64",
            Quantity(f"embedded/{name}/per_second"),
            8000.0,
            at_least=True,
            unit="/s",
        )
        for name, words in (
            ("memory", "over the memory transport"),
            ("engine", "the engine called directly"),
        )
    ),
    *(
        Goal(what, Quantity(f"cni/{plugin}/{over}", f"cni/{under}"), limit)
        for plugin, form in (("metis", ""), ("self-contained", ", self-contained"))
        for what, over, under, limit in (
            (
                f"CNI ADD{form} to a bare interpreter",
                "ADD/wall_ms",
                f"{plugin} interpreter/wall_ms",
                1.35,
            ),
            (
                f"CNI ADD{form} to host-local's",
                "ADD/wall_ms",
                "host-local/ADD/wall_ms",
                3.0,
            ),
            (
                f"{BURST} CNI ADDs at once{form} to host-local's",
                "burst/seconds",
                "host-local/burst/seconds",
                1.5,
            ),
        )
    ),
)
"""Every goal, in the order of the table."""
