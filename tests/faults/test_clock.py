"""Clocks that step, boots that end, namespaces that vanish, and lists that lie.

Of the four, only the end of a boot may take an address from somebody, or end its rest
early: then nobody is left alive who could have it, or send to it.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from grpclib import GRPCError, Status
from trio.testing import MockClock

from metis import reclaim
from metis.engine import Engine
from metis.errors import PoolExhausted
from metis.evidence import Lookout
from metis.model import Holding, Pod
from metis.reclaim import Reclaimer, Rules
from metis.store.history import Selection
from metis.store.store import Store, open_store, run_store
from metis.verdicts import Evidence, Verdict
from tests.faults.counts import Counts
from tests.runtime import FakeRuntime, running
from tests.store.databases import (
    ManualClock,
    check_invariants,
    inline_database,
    owner,
    want,
)

DAY_MS = 86_400_000

COOLDOWN_MS = 60_000

ONLY = want("10.0.0.1/32")
"""A block of one address: whoever gets any gets that one."""


@dataclass
class Life:
    """One address from owner to owner, with a fault at one point of it.

    At every point a stranger asks for it, and is told how long it rests still.
    """

    path: str
    fault: Callable[[ManualClock], None]
    at: int
    clock: ManualClock = field(default_factory=ManualClock)
    point: int = 0
    offers: int = 0
    free_at_ms: int = 0
    is_held: bool = False

    async def run(self) -> None:
        await self._open(self._first)
        await self._open(self._second)  # after a restart
        await self._open(self._third)

    async def _open(self, work: Callable[[Store], Awaitable[None]]) -> None:
        self._pass()
        async with open_store(
            self.path, clock=self.clock, release_cooldown=COOLDOWN_MS / 1000
        ) as store:
            await work(store)

    async def _first(self, store: Store) -> None:
        await self._add(store, "c1")
        await self._offer(store)
        await self._delete(store, "c1")
        await self._offer(store)

    async def _second(self, store: Store) -> None:
        await self._offer(store)
        self._let_pass(COOLDOWN_MS // 2)
        await self._offer(store)
        async with open_store(  # a plugin without a daemon, or beside one
            self.path, clock=self.clock, release_cooldown=COOLDOWN_MS / 1000
        ) as direct:
            await self._offer(direct)
            self._let_pass(COOLDOWN_MS // 2 - 1)
            await self._offer(direct)
            self._let_pass(1)
            await self._add(direct, "c2")
        await self._offer(store)

    async def _third(self, store: Store) -> None:
        await self._offer(store)
        await self._delete(store, "c2")
        self._let_pass(COOLDOWN_MS - 1)
        await self._offer(store)
        self._let_pass(1)
        await self._add(store, "c3")

    def _pass(self) -> None:
        """A point at which the fault may come."""
        if self.point == self.at:
            self.fault(self.clock)
        self.point += 1

    def _let_pass(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds)

    async def _add(self, store: Store, name: str) -> None:
        self._pass()
        assert self.clock.boottime >= self.free_at_ms
        (got,) = await store.allocate(owner(name), [ONLY], Pod())
        assert got.address == "10.0.0.1"
        self.is_held = True

    async def _delete(self, store: Store, name: str) -> None:
        self._pass()
        released = await store.release(owner(name), deleted_at=store.clock.now_ms())
        assert bool(released) == self.is_held
        if self.is_held:
            self.free_at_ms = self.clock.boottime + COOLDOWN_MS
        self.is_held = False

    async def _offer(self, store: Store) -> None:
        """A stranger asks, who must not get it: it is held, or rests."""
        self._pass()
        self.offers += 1
        rest_ms = self.free_at_ms - self.clock.boottime
        with pytest.raises(PoolExhausted) as caught:
            await store.allocate(owner("stranger"), [ONLY], Pod())
        assert caught.value.wait_ms == (None if self.is_held else rest_ms)


def step(milliseconds: int) -> Callable[[ManualClock], None]:
    def fault(clock: ManualClock) -> None:
        clock.walltime += milliseconds

    return fault


POINTS = 17
"""Points of a life at which a fault may come; the test sees that there are as many."""


@pytest.mark.parametrize("milliseconds", [-DAY_MS, -COOLDOWN_MS, COOLDOWN_MS, DAY_MS])
async def test_a_stepped_wall_clock_changes_no_cooldown(
    tmp_path: Path, counts: Counts, milliseconds: int
) -> None:
    for at in range(POINTS):
        life = Life(str(tmp_path / f"{at}.sqlite"), step(milliseconds), at)
        await life.run()
        assert life.point == POINTS
        assert life.offers >= 8
        counts.add("clock: wall clock stepped")


@pytest.mark.parametrize("milliseconds", [-DAY_MS, 0, DAY_MS])
@pytest.mark.parametrize("rest_ms", [0, 1, COOLDOWN_MS // 2, COOLDOWN_MS])
async def test_after_a_reboot_owners_are_gone_and_no_rest_is_longer_than_one(
    tmp_path: Path, counts: Counts, milliseconds: int, rest_ms: int
) -> None:
    """The boot ends while c1 holds its address, c2's cools and c3's is free."""
    clock = ManualClock()
    path = str(tmp_path / "metis.sqlite")
    block = want("10.0.0.0/29")

    async def get(store: Store, name: str) -> str:
        (got,) = await store.allocate(owner(name), [block], Pod())
        return got.address

    async with open_store(
        path, clock=clock, release_cooldown=COOLDOWN_MS / 1000
    ) as store:
        held = await get(store, "c1")
        cooling = await get(store, "c2")
        await store.release(owner("c2"))
        clock.advance(COOLDOWN_MS - rest_ms)
        never_used = {f"10.0.0.{number}" for number in range(4, 7)}
    clock.boot, clock.boottime = "boot-2", 10
    clock.walltime += milliseconds
    counts.add("clock: boots ended")
    async with open_store(
        path, clock=clock, release_cooldown=COOLDOWN_MS / 1000
    ) as store:
        assert await store.held(owner("c1")) == ()
        assert {await get(store, f"n{number}") for number in range(3)} == never_used
        got = [await get(store, "n3")]
        left_ms = min(max(rest_ms - milliseconds, 0), COOLDOWN_MS)
        if left_ms:
            with pytest.raises(PoolExhausted) as caught:
                await get(store, "n4")
            assert caught.value.wait_ms == left_ms
            clock.advance(left_ms)
        got.append(await get(store, "n4"))
        assert set(got) == {held, cooling}
        page = await store.list_history(Selection())
        ended = {one.container_id: one.reason for one in page.entries if one.reason}
        assert ended == {"c1": "rebooted", "c2": "deleted"}


RULES = Rules(interval=60, grace=300, limit=100)

TIMELINES = 400
"""Lives of a node with a runtime that lies, in a full run."""

ROUNDS = 12


LISTS = (
    "honest", "empty", "stale", "truncated", "duplicated", "reordered", "erroneous",
)  # fmt: skip


@dataclass
class Truth:
    """The node as it is: whose namespace and sandbox there are.

    Attributes:
      directory: of the network namespaces, with files in place of mounts.
      history: what an honest list said in every round so far.
    """

    directory: Path
    runtime: FakeRuntime
    alive: set[str] = field(default_factory=set)
    history: list[list[str]] = field(default_factory=list)

    def netns(self, name: str) -> str:
        """Of a pod; every third one's is not told."""
        return "" if int(name[1:]) % 3 == 0 else str(self.directory / name)

    def born(self, name: str) -> None:
        self.alive.add(name)
        self.runtime.sandboxes.add(name)
        (self.directory / name).touch()

    def died(self, name: str) -> None:
        self.alive.discard(name)
        self.runtime.sandboxes.discard(name)
        (self.directory / name).unlink(missing_ok=True)

    def lie(self, chance: random.Random) -> str:
        """Have the runtime list something; what kind of lie it is."""
        honest = sorted(self.runtime.sandboxes)
        self.history.append(honest)
        kind = chance.choice(LISTS)
        lists = {
            "empty": [],
            "stale": chance.choice(self.history),
            "truncated": honest[: chance.randrange(len(honest) + 1)],
            "duplicated": honest * 2,
            "reordered": chance.sample(honest, len(honest)),
        }
        self.runtime.listed = lists.get(kind)
        is_error = kind == "erroneous"
        self.runtime.failure = GRPCError(Status.UNKNOWN, "later") if is_error else None
        return kind

    @contextmanager
    def no_namespaces(self, chance: random.Random) -> Iterator[str]:
        """Have the files of the namespaces gone for a moment, or some of them."""
        kind = chance.choice(["there", "there", "empty", "moved"])
        names = [one.name for one in self.directory.iterdir()]
        aside = self.directory.with_name("aside")
        if kind == "empty":
            for name in names:
                (self.directory / name).unlink()
        elif kind == "moved":
            self.directory.rename(aside)
        yield kind
        if kind == "empty":
            for name in names:
                (self.directory / name).touch()
        elif kind == "moved":
            aside.rename(self.directory)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


async def test_whatever_lists_and_namespaces_say_no_live_owner_loses_its_address(
    directory: Path,
    mock_clock: MockClock,
    counts: Counts,
    scaled: Callable[[int], int],
    seed: str,
) -> None:
    chance = random.Random(seed)  # noqa: S311  # a load, not a secret
    for number in range(scaled(TIMELINES)):
        place = directory / str(number) / "netns"
        place.mkdir(parents=True)
        await Timeline(place, mock_clock, chance, counts).run()


class Timeline:
    """Pods come and go, some without a DEL, and rounds look at lies meanwhile."""

    def __init__(
        self, place: Path, clock: MockClock, chance: random.Random, counts: Counts
    ) -> None:
        self.clock = clock
        self.chance = chance
        self.counts = counts
        self.database = inline_database()
        self.truth = Truth(place, FakeRuntime("another"))
        self.born = 0

    async def run(self) -> None:
        (self.truth.directory / "another").touch()  # other containers' namespaces
        async with (
            run_store(self.database, cooldown_ms=COOLDOWN_MS) as store,
            running(self.truth.runtime) as transport,
        ):
            engine = Engine(store)

            def reclaimer() -> Reclaimer:
                lookout = Lookout(engine.now_ms, store.boot_id, transport)
                return Reclaimer(engine, store, RULES, lookout.look)

            rounds = reclaimer()
            for _ in range(ROUNDS):
                await self._live(engine)
                if self.chance.random() < 0.1:
                    rounds = reclaimer()  # the daemon was restarted
                await self._lie_to(rounds)
                self.clock.jump(self.chance.choice([5, 60, 200]))
            await self._settle(engine, reclaimer())
        check_invariants(self.database.connection)

    async def _live(self, engine: Engine) -> None:
        for _ in range(self.chance.randrange(3)):
            await self._begin(engine)
        for name in sorted(self.truth.alive):
            if self.chance.random() < 0.1:
                self.truth.died(name)

    async def _begin(self, engine: Engine) -> None:
        name = f"c{self.born}"
        self.born += 1
        self.truth.born(name)
        await engine.allocate(
            owner(name),
            [want("10.0.0.0/24")],
            Pod(f"pod-{name}", "shop"),
            netns_path=self.truth.netns(name),
        )

    async def _lie_to(self, rounds: Reclaimer) -> None:
        lie = self.truth.lie(self.chance)
        with self.truth.no_namespaces(self.chance) as namespaces:
            await rounds.make_round()
        self.counts.add(f"reclaim: lists that were {lie}")
        self.counts.add(f"reclaim: namespaces that were {namespaces}")
        assert self.owners >= self.truth.alive

    async def _settle(self, engine: Engine, rounds: Reclaimer) -> None:
        """Nobody lies any more: two rounds, and whoever is gone is."""
        self.truth.runtime.listed = self.truth.runtime.failure = None
        for _ in range(3):  # of whom some are seen in the directory of namespaces
            await self._begin(engine)
        self.clock.jump(RULES.grace + 1)
        before = self.owners
        await rounds.make_round()
        assert self.owners == before
        self.clock.jump(RULES.interval)
        await rounds.make_round()
        assert self.owners == self.truth.alive
        gone = len(before - self.truth.alive)
        self.counts.add("reclaim: addresses of owners that were gone, freed", gone)

    @property
    def owners(self) -> set[str]:
        rows = self.database.connection.execute(
            "SELECT container_id FROM ip_addresses WHERE container_id > ''"
        )
        return {str(container) for (container,) in rows}


def believing_lists(holding: Holding, evidence: Evidence, _: int) -> Verdict:
    listed = evidence.sandboxes.named
    return Verdict(holding.owner.container_id not in listed, "it is not listed")


def believing_directories(holding: Holding, evidence: Evidence, _: int) -> Verdict:
    there = evidence.namespaces.present
    return Verdict(holding.netns_path not in there, "nothing is there")


@pytest.mark.parametrize("judge", [believing_lists, believing_directories])
async def test_a_planted_credulity_is_found(
    directory: Path,
    mock_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    judge: Callable[[Holding, Evidence, int], Verdict],
) -> None:
    monkeypatch.setattr(reclaim, "judge", judge)
    chance = random.Random("planted")  # noqa: S311  # a load, not a secret

    async def timelines() -> None:
        for number in range(20):
            place = directory / str(number) / "netns"
            place.mkdir(parents=True)
            await Timeline(place, mock_clock, chance, Counts()).run()

    with pytest.raises(ExceptionGroup) as caught:
        await timelines()
    assert caught.group_contains(AssertionError)
