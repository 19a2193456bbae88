"""How much is measured: everything, or what a guard needs in a minute or so."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.goals import COOLING, FIRST_BLOCKS, IDLE_SECONDS, LEVELS


@dataclass(frozen=True, slots=True)
class Settings:
    """Rounds and counts of a run.

    Attributes:
      rounds: how often each figure is taken, everything in turn; the median counts.
      calls: gRPC calls of each operation at each concurrency.
      warm_up: calls before them that are not counted.
      levels: calls under way at a time.
      cooling: addresses in cooldown while allocations are timed.
      blocks: sizes of pools in which allocations are timed, the first one too.
      first_times: how many first allocates of each size, in a round.
      flat_calls: allocations timed in each pool, in a round; a /24 has 253.
      processes: CNI calls of each verb, in a round.
      embedded_calls: allocations without a socket.
      whole: whether to measure what takes long: memory of a full pool, idle CPU,
        a large database, new connections, where the CPU goes.
      idle_seconds: how long an idle daemon is watched.
      sampling_seconds: how long the daemon is sampled under load.
    """

    rounds: int
    calls: int
    warm_up: int
    levels: tuple[int, ...]
    cooling: tuple[int, ...]
    blocks: tuple[str, ...]
    first_times: int
    flat_calls: int
    processes: int
    embedded_calls: int
    whole: bool
    idle_seconds: float = IDLE_SECONDS
    sampling_seconds: float = 20.0


FULL = Settings(
    rounds=5,
    calls=2000,
    warm_up=100,
    levels=LEVELS,
    cooling=COOLING,
    blocks=FIRST_BLOCKS,
    first_times=9,
    flat_calls=200,
    processes=20,
    embedded_calls=20_000,
    whole=True,
)

QUICK = Settings(
    rounds=3,
    calls=500,
    warm_up=100,
    levels=(1, 32),
    cooling=(0, 20_000),
    blocks=("/24", "/8"),
    first_times=9,
    flat_calls=200,
    processes=20,
    embedded_calls=3000,
    whole=False,
)
"""The same measurements with fewer calls, and no yardstick left out."""
