"""A state machine of the engine: any order of calls and faults, against a model.

A real engine on a real file, with Trio's clock and the kernel's in the hands of the
machine. After every step the database says what the model says, and nobody waits
while an address is free.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import apsw
import hypothesis
import pytest
import trio
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)
from trio.testing import MockClock, wait_all_tasks_blocked

from metis.clock import StoredClock
from metis.engine import Engine
from metis.errors import (
    InvalidRequest,
    MetisError,
    NotAllocated,
    OwnerDeleted,
    PoolExhausted,
)
from metis.model import Allocation, CIDRBlock, Family, Owner, Pod, Wanted
from metis.ranges import AddressRange, AddressSet
from metis.store import (
    database,
    deletions,
    garbage,
    holdings,
    picking,
    reboot,
    sql,
)
from metis.store.database import Database
from metis.store.holdings import held_rows
from metis.store.store import Store, run_store
from metis.store.transactions import Work, run_group
from metis.waiting import ANSWER_MARGIN, Line
from tests.faults.counts import Counts
from tests.faults.model import Expected, Model
from tests.store.databases import START_MS, ManualClock, check_invariants

T = TypeVar("T")

COOLDOWN_MS = 1_000

STEPS = 50
"""Steps of one example, after which a machine begins anew."""

STEPS_IN_ALL = 10_000
"""Steps of a full run, at least."""

DAY_MS = 86_400_000


def parse_set(*ranges: tuple[str, str, str, str]) -> AddressSet:
    """A set of (subnet, first, last, excluded)."""
    return AddressSet(
        tuple(
            AddressRange.parse(subnet, first, last, exclude=gaps.split())
            for subnet, first, last, gaps in ranges
        )
    )


BLOCKS = {
    Family.IPV4: ["10.0.0.0/29", "10.0.1.4/30", "10.0.0.0/30", "10.0.2.1/32"],
    Family.IPV6: ["fd00::/126", "fd00:1::/127", "fd00::/125", "fd00:2::9/128"],
}
"""Blocks of networks that are served in the original's form."""

SETS = {
    Family.IPV4: [
        parse_set(("10.8.0.0/28", "10.8.0.4", "10.8.0.6", "")),
        parse_set(("10.8.0.0/28", "10.8.0.9", "10.8.0.11", "10.8.0.10")),
        parse_set(("10.8.1.0/29", "", "", "10.8.1.3"), ("10.8.2.0/30", "", "", "")),
        parse_set(("10.8.1.0/28", "", "", "")),
    ],
    Family.IPV6: [
        parse_set(("fd08::/125", "", "", "")),
        parse_set(("fd08:1::/124", "fd08:1::4", "fd08:1::5", "")),
    ],
}
"""Sets of the network that is served from ranges; a block is served as a whole by
all that name it, or in parts."""

RANGED = "net-r"

PODS = {
    f"c{number}": Pod(f"p{number % 3}", "ns") if number else Pod()
    for number in range(6)
}
PODS_OF_WAITERS = {f"w{number}": Pod() for number in range(4)}

POD_OF = PODS | PODS_OF_WAITERS

containers = st.sampled_from(list(PODS) * 3 + list(PODS_OF_WAITERS))
plain_owners = st.builds(
    Owner,
    st.sampled_from(["net-a", "net-a", "net-b"]),
    containers,
    st.sampled_from(["eth0", "eth0", "net1"]),
)
ranged_owners = st.builds(Owner, st.just(RANGED), containers, st.just("eth0"))
owners = plain_owners | ranged_owners
networks = st.sampled_from(["net-a", "net-b", RANGED])


def plain(family: Family) -> st.SearchStrategy[Wanted]:
    blocks = [CIDRBlock.parse(cidr) for cidr in BLOCKS[family]]
    addresses = [b.address_at(offset) for b in blocks for offset in range(b.size)]
    return st.one_of(
        st.just(Wanted(family)),
        st.builds(Wanted, st.just(family), st.sampled_from(blocks)),
        st.builds(Wanted, st.just(family), st.just(blocks[0])),
        st.builds(
            Wanted,
            st.just(family),
            st.none() | st.just(blocks[0]),
            st.sampled_from(addresses),
        ),
    )


def ranged(family: Family) -> st.SearchStrategy[Wanted]:
    sets = st.sampled_from(SETS[family])
    return sets.flatmap(
        lambda one: st.builds(
            Wanted.out_of,
            st.just(one),
            st.none()
            | st.none()
            | st.sampled_from(
                [
                    part.block.address_at(offset)
                    for part in one.alternatives
                    for offset in range(part.first, part.last + 1)
                ]
            ),
        )
    )


Call = tuple[Owner, tuple[Wanted, ...]]

calls: st.SearchStrategy[Call] = st.one_of(
    st.tuples(plain_owners, st.tuples(plain(Family.IPV4))),
    st.tuples(plain_owners, st.tuples(plain(Family.IPV6))),
    st.tuples(plain_owners, st.tuples(plain(Family.IPV4), plain(Family.IPV6))),
    st.tuples(ranged_owners, st.tuples(ranged(Family.IPV4))),
    st.tuples(ranged_owners, st.tuples(ranged(Family.IPV6), ranged(Family.IPV4))),
    st.tuples(
        ranged_owners,
        st.just(tuple(Wanted.out_of(one) for one in SETS[Family.IPV4][:2])),
    ),
)

single_calls: st.SearchStrategy[Call] = st.one_of(
    st.tuples(
        plain_owners,
        st.sampled_from([(Wanted(Family.IPV4),), (Wanted(Family.IPV6),)]),
    ),
    st.tuples(
        ranged_owners,
        st.sampled_from([*SETS[Family.IPV4], *SETS[Family.IPV6]]).map(
            lambda one: (Wanted.out_of(one),)
        ),
    ),
)
"""Calls that may stand in a line."""

PATIENCE_MS = [5, 605, 2_005, 20_005]
"""How long a call waits. All else happens at multiples of 10 ms, so that nothing
ends in the very moment in which something else becomes free."""


ROUNDING = 1e-9
"""Seconds by which time passes a moment, so that no timer for it is rounded past
it; too few to ever come to a millisecond."""


class SteeredClock(ManualClock):
    """The kernel's clocks: since boot they follow Trio's, the wall is set apart."""

    def __init__(self) -> None:
        super().__init__()
        self.booted_at = -5.0
        self.wall_ahead_ms = START_MS

    def boottime_ms(self) -> int:
        return round((trio.current_time() - self.booted_at) * 1000)

    def walltime_ms(self) -> int:
        return self.wall_ahead_ms + round(trio.current_time() * 1000)


@dataclass
class FileDatabase:
    """A database on a file, without threads: time stands still while it works."""

    inner: Database
    clock: StoredClock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = self.inner.clock

    def write_at_once(self, group: Sequence[Work[object]]) -> list[object] | None:
        return self.inner.write_at_once(group)

    async def write(self, group: Sequence[Work[object]]) -> list[object]:
        await trio.lowlevel.checkpoint()
        return run_group(self.inner._writer, self.clock, group)

    async def read(self, work: Work[T]) -> T:
        await trio.lowlevel.checkpoint()
        return self.inner._read(work)

    async def keep_log_short(self) -> None:
        """It never is long."""


@dataclass
class Waiting:
    """A call that was begun and has not been looked at since it ended."""

    owner: Owner
    wanted: tuple[Wanted, ...]
    pod: Pod
    sticky: bool
    started_ms: int
    patience_ends_ms: int
    number: int
    is_over: bool = False
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    @property
    def key(self) -> tuple[str, Family, AddressSet | None]:
        (want,) = self.wanted
        return self.owner.network, want.family, want.ranges


@dataclass
class Node:
    """A store and its engine, and what ends them."""

    engine: Engine
    store: Store
    stop: trio.Event
    stopped: trio.Event


@dataclass
class Host:
    """What machines have in common: one Trio run, its clock and its nursery."""

    clock: MockClock
    nursery: trio.Nursery
    steps: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)

    def note(self, what: str, answer: object) -> None:
        """Count an answer by its kind."""
        kind = type(answer).__name__ if isinstance(answer, Exception) else "served"
        self.answers[f"{what}: {'cancelled' if answer is None else kind}"] += 1


HOST: list[Host] = []
"""The host of the run: hypothesis makes the machines itself, without arguments."""


class Nodes(RuleBasedStateMachine):
    """One node's database, who calls, and what may go wrong with its clock."""

    def __init__(self) -> None:
        super().__init__()
        self.host = HOST[-1]
        self.directory = tempfile.TemporaryDirectory()
        self.path = str(Path(self.directory.name) / "metis.sqlite")
        self.clock = SteeredClock()
        self.model = Model(COOLDOWN_MS, 0)
        self.waiting: list[Waiting] = []
        self.ended: list[tuple[Waiting, object]] = []
        self.begun = 0
        self.ids: dict[Owner, list[str]] = {}
        self.node = trio.from_thread.run(self._open)
        self.looking = apsw.Connection(self.path)
        self.model.now_ms = trio.from_thread.run_sync(self.node.engine.now_ms)
        self._run(partial(self._add_block, "net-a", CIDRBlock.parse("10.0.0.0/29")))
        self._run(partial(self._add_block, "net-a", CIDRBlock.parse("fd00::/126")))

    def teardown(self) -> None:
        self.looking.close()
        trio.from_thread.run(self._close)
        self.directory.cleanup()

    # What callers do

    @rule(
        call=calls,
        sticky=st.booleans(),
        late=st.none() | st.none() | st.sampled_from([0, 10, 500, 3_000]),
        direct=st.integers(0, 4).map(lambda number: number == 0),
    )
    def add(self, call: Call, sticky: bool, late: int | None, direct: bool) -> None:
        self._run(partial(self._add, *call, sticky, late, direct))

    @rule(call=single_calls, number=st.integers(2, 6))
    def add_for_many(self, call: Call, number: int) -> None:
        """So that pools are spent, which is when the rules matter."""
        owner, wanted = call
        for container in list(PODS)[:number]:
            who = Owner(owner.network, container, owner.interface_name)
            self._run(partial(self._add, who, wanted, False, None, False))

    @rule(
        call=single_calls,
        sticky=st.booleans(),
        patience_ms=st.sampled_from(PATIENCE_MS),
    )
    def add_and_wait(self, call: Call, sticky: bool, patience_ms: int) -> None:
        self._run(partial(self._begin, *call, sticky, patience_ms))

    @rule(
        call=single_calls,
        cooling=st.integers(1, 3),
        tens=st.sampled_from([0, 1, 40]),
        waiting=st.lists(st.sampled_from(PATIENCE_MS), min_size=1, max_size=4),
    )
    def wait_for_what_cools(
        self, call: Call, cooling: int, tens: int, waiting: list[int]
    ) -> None:
        """Have a full pool of which some is given back, and a line for it."""
        owner, wanted = call
        everybody = [Owner(owner.network, f"c{n}", "eth0") for n in range(6)]
        for who in everybody:
            self._run(partial(self._add, who, wanted, False, None, False))
        holders = [who for who in everybody if self.model.held(who)]
        for who in holders[:cooling]:
            self._run(partial(self._delete, who, False, None))
            self._run(partial(self._advance, tens * 10))
        for number, patience_ms in enumerate(waiting):
            who = Owner(owner.network, f"w{number}", owner.interface_name)
            self._run(partial(self._begin, who, wanted, False, patience_ms))

    @precondition(lambda self: self.waiting)
    @rule(number=st.integers(0, 100))
    def cancel_a_waiting_call(self, number: int) -> None:
        self._run(partial(self._cancel, number))

    @rule(
        owner=owners, direct=st.booleans(), late=st.sampled_from([None, None, 0, 400])
    )
    def delete(self, owner: Owner, direct: bool, late: int | None) -> None:
        self._run(partial(self._delete, owner, direct, late))

    @rule(owner=owners, number=st.integers(0, 2), direct=st.booleans())
    def give_back(self, owner: Owner, number: int, direct: bool) -> None:
        self._run(partial(self._give_back, owner, number, direct))

    @rule(
        network=networks,
        kept=st.lists(st.tuples(containers, st.sampled_from(["eth0", "net1"]))),
        others=st.booleans(),
        age_ms=st.sampled_from([None, None, 0, 400, 5_000, -400]),
        direct=st.booleans(),
    )
    def collect_garbage(
        self,
        network: str,
        kept: list[tuple[str, str]],
        others: bool,
        age_ms: int | None,
        direct: bool,
    ) -> None:
        """A list may be empty, name strangers, and be old or of the future."""
        names = {*kept, ("stranger", "eth0")} if others else set(kept)
        self._run(partial(self._collect, network, names, age_ms, direct))

    @rule(owner=owners, direct=st.booleans())
    def check(self, owner: Owner, direct: bool) -> None:
        self._run(partial(self._check, owner, direct))

    # What happens to the node

    @rule(
        network=st.sampled_from(["net-a", "net-b"]),
        cidr=st.sampled_from([*BLOCKS[Family.IPV4], *BLOCKS[Family.IPV6]]),
    )
    def add_block(self, network: str, cidr: str) -> None:
        self._run(partial(self._add_block, network, CIDRBlock.parse(cidr)))

    @rule(network=networks, number=st.integers(0, 10), ready=st.booleans())
    def drain_block(self, network: str, number: int, ready: bool) -> None:
        self._run(partial(self._drain, network, number, ready))

    @rule(tens=st.sampled_from([0, 1, 40, 60, 100, 100, 1_000]))
    def let_time_pass(self, tens: int) -> None:
        self._run(partial(self._advance, tens * 10))

    @rule(milliseconds=st.sampled_from([-DAY_MS, -1_000, 1_000, DAY_MS]))
    def step_the_wall_clock(self, milliseconds: int) -> None:
        self.clock.wall_ahead_ms += milliseconds
        self._run(self._settle)

    @rule()
    def restart(self) -> None:
        self._run(partial(self._restart, None))

    @rule(wall_step=st.sampled_from([-DAY_MS, 0, 10_000, DAY_MS]))
    def reboot(self, wall_step: int) -> None:
        self._run(partial(self._restart, wall_step))

    # How it is done, within the Trio run

    def _run(self, step: Callable[[], Awaitable[None]]) -> None:
        name = getattr(step, "func", step).__name__.strip("_")
        self.host.steps[name] += 1
        trio.from_thread.run(step)
        trio.from_thread.run(self._settle)
        self._compare()

    async def _open(self) -> Node:
        inner = database.connect(self.path, self.clock, COOLDOWN_MS, "NORMAL")

        async def keep(*, task_status: trio.TaskStatus[Node]) -> None:
            async with run_store(FileDatabase(inner), cooldown_ms=COOLDOWN_MS) as store:
                node = Node(Engine(store), store, trio.Event(), stopped)
                task_status.started(node)
                await node.stop.wait()
            inner._close()
            stopped.set()

        stopped = trio.Event()
        node: Node = await self.host.nursery.start(keep)
        return node

    async def _close(self, node: Node | None = None) -> None:
        node = node or self.node
        if node is self.node:
            for call in self.waiting:
                call.scope.cancel()
            await wait_all_tasks_blocked()
        node.stop.set()
        await node.stopped.wait()

    async def _restart(self, wall_step: int | None) -> None:
        await self._close()
        self.waiting.clear()
        self.ended.clear()
        if wall_step is not None:
            self.clock.boot = f"boot-{int(self.clock.boot[5:]) + 1}"
            self.clock.booted_at = trio.current_time() - 0.02
            self.clock.wall_ahead_ms += wall_step
        self.node = await self._open()
        now_ms = self.node.engine.now_ms()
        if wall_step is None:
            assert now_ms == self.model.now_ms
        else:
            assert now_ms == self.clock.walltime_ms()
            self.model.reboot(now_ms)

    async def _with_engine(
        self, direct: bool, work: Callable[[Engine], Awaitable[T]]
    ) -> T | Exception:
        """Ask the daemon's engine, or one of a plugin without a daemon."""
        node = await self._open() if direct else self.node
        try:
            return await work(node.engine)
        except MetisError as error:
            return error
        finally:
            if direct:
                await self._close(node)

    async def _add(
        self,
        owner: Owner,
        wanted: tuple[Wanted, ...],
        sticky: bool,
        late: int | None,
        direct: bool,
    ) -> None:
        direct = direct and not self.waiting  # whom no other process tells anything
        pod, now_ms = POD_OF[owner.container_id], self.model.now_ms
        started_ms = None if late is None else now_ms - late
        expected = self.model.expect(
            owner,
            wanted,
            pod,
            sticky=sticky,
            started_ms=now_ms + 1 if started_ms is None else started_ms,
        )
        if self._is_behind(owner, wanted, pod, sticky):
            expected.error = PoolExhausted
        got = await self._with_engine(
            direct,
            lambda engine: engine.allocate(
                owner,
                wanted,
                pod,
                deadline=trio.current_time(),
                sticky=sticky,
                started_ms=started_ms,
            ),
        )
        self.host.note("an ADD", got)
        if expected.error is not None:
            assert type(got) is expected.error, (got, expected)
        else:
            self._given(owner, pod, got, expected)

    def _given(self, owner: Owner, pod: Pod, got: object, expected: Expected) -> None:
        assert isinstance(got, tuple), (got, expected)
        (allocation_id,) = {one.allocation_id for one in got}
        assert all(allocation_id not in known for known in self.ids.values())
        self.ids.setdefault(owner, []).append(allocation_id)
        self.model.give(owner, pod, got, expected)

    def _is_behind(
        self, owner: Owner, wanted: Sequence[Wanted], pod: Pod, sticky: bool
    ) -> bool:
        """Whether somebody waits for what this call is not sure to get."""
        keys = {call.key for call in self.waiting}
        return any(
            (owner.network, want.family, want.ranges) in keys
            and not self.model.is_assured(owner, want, pod, sticky)
            for want in wanted
        )

    async def _begin(
        self,
        owner: Owner,
        wanted: tuple[Wanted, ...],
        sticky: bool,
        patience_ms: int,
    ) -> None:
        now_ms = self.model.now_ms
        self.begun += 1
        call = Waiting(
            owner,
            wanted,
            POD_OF[owner.container_id],
            sticky,
            now_ms + 1,
            now_ms + patience_ms,
            self.begun,
        )
        ahead = self._is_behind(owner, wanted, call.pod, sticky)
        deadline = trio.current_time() + patience_ms / 1000 + ANSWER_MARGIN
        engine = self.node.engine

        async def allocate() -> None:
            answer: object = None
            with call.scope:
                try:
                    answer = await engine.allocate(
                        owner, wanted, call.pod, deadline=deadline, sticky=sticky
                    )
                except MetisError as error:
                    answer = error
            self.ended.append((call, answer))

        if not ahead:  # it goes before those who wait, if anybody does
            self.waiting.insert(0, call)
        else:
            self.waiting.append(call)
        self.host.nursery.start_soon(allocate)
        await self._settle()
        if call in self.waiting:
            self.waiting.remove(call)
            self.waiting.append(call)

    async def _cancel(self, number: int) -> None:
        call = self.waiting[number % len(self.waiting)]
        call.scope.cancel()
        await self._settle()
        assert call not in self.waiting

    async def _delete(self, owner: Owner, direct: bool, late: int | None) -> None:
        arrived_ms = None if late is None else self.model.now_ms - late
        for call in () if direct else self.waiting:
            if call.owner == owner and call.started_ms <= (arrived_ms or math.inf):
                call.is_over = True
        got = await self._with_engine(
            direct, lambda engine: engine.deallocate(owner, arrived_ms=arrived_ms)
        )
        self._released(got, self.model.delete(owner, arrived_ms))

    async def _give_back(self, owner: Owner, number: int, direct: bool) -> None:
        known = self.ids.get(owner, ["0" * 16])
        allocation_id = known[-1 - number % len(known)]
        got = await self._with_engine(
            direct, lambda engine: engine.give_back(owner, allocation_id)
        )
        self._released(got, self.model.give_back(owner, allocation_id))

    def _released(self, got: object, expected: set[str]) -> None:
        assert isinstance(got, tuple), got
        released: tuple[Allocation, ...] = got
        assert {one.address for one in released} == expected

    async def _collect(
        self,
        network: str,
        kept: set[tuple[str, str]],
        age_ms: int | None,
        direct: bool,
    ) -> None:
        taken_ms = None if age_ms is None else self.model.now_ms - age_ms
        got = await self._with_engine(
            direct,
            lambda engine: engine.collect_garbage(network, kept, taken_ms=taken_ms),
        )
        taken_at = self.model.now_ms if taken_ms is None else taken_ms
        expected = self.model.collect(network, kept, taken_at)
        assert isinstance(got, list), got
        assert {(owner, one.address) for owner, one in got} == expected

    async def _check(self, owner: Owner, direct: bool) -> None:
        got = await self._with_engine(direct, lambda engine: engine.check(owner))
        expected = {a.text for _, a in self.model.held(owner)}
        if expected:
            self._released(got, expected)
        else:
            assert type(got) is NotAllocated

    async def _add_block(self, network: str, block: CIDRBlock) -> None:
        added = self.model.add_block(network, block)
        try:
            await self.node.store.add_block(network, block)
        except InvalidRequest:
            assert not added
        else:
            assert added
            self.node.engine.announce(network, block.family)

    async def _drain(self, network: str, number: int, ready: bool) -> None:
        blocks = [
            block
            for (of, _), blocks in self.model.blocks.items()
            if of == network
            for block in blocks
        ]
        if not blocks:
            return
        block = blocks[number % len(blocks)]
        block.ready = ready
        self.looking.execute(
            "UPDATE cidr_blocks SET state = ? WHERE cidr = ? AND network = ?",
            ("Ready" if ready else "Draining", block.range.cidr, network),
        )
        self.node.engine.announce(network, block.range.family)

    async def _advance(self, milliseconds: int) -> None:
        """Let time pass, and stop wherever something ends."""
        end_ms = self.model.now_ms + milliseconds
        while self.model.now_ms < end_ms:
            moments = {call.patience_ends_ms for call in self.waiting}
            if moments:
                moments |= {a.release_at or 0 for _, _, a in self.model.addresses()}
            next_ms = min((m for m in moments if m > self.model.now_ms), default=end_ms)
            next_ms = min(next_ms, end_ms)
            self.host.clock.jump((next_ms - self.model.now_ms) / 1000 + ROUNDING)
            self.model.now_ms = next_ms
            await self._settle()
        assert self.node.engine.now_ms() == end_ms

    async def _settle(self) -> None:
        """Let every call go as far as it can, and look at those that have ended."""
        await wait_all_tasks_blocked()
        while self.ended:
            call, answer = self.ended.pop(0)
            assert not call.is_over or answer is None or type(answer) is OwnerDeleted
            waited = self.model.now_ms >= call.started_ms
            self.host.note("an ADD that waited" if waited else "an ADD", answer)
            first = next(c for c in self.waiting if c.key == call.key)
            expected = self.model.expect(
                call.owner,
                call.wanted,
                call.pod,
                sticky=call.sticky,
                started_ms=call.started_ms,
            )
            if isinstance(answer, PoolExhausted):
                # Either it is not its turn, or nothing is there for it.
                assert call is not first or expected.error is PoolExhausted, answer
            elif isinstance(answer, OwnerDeleted) and call.is_over:
                pass
            elif isinstance(answer, Exception):
                assert type(answer) is expected.error, (answer, expected)
            elif answer is not None:
                assert expected.error is None, (answer, expected)
                assert call is first, f"{call} overtook {first}"
                self._given(call.owner, call.pod, answer, expected)
            self.waiting.remove(call)
        for call in self.waiting:
            assert call.patience_ends_ms > self.model.now_ms, f"{call} still waits"
            if call is next(c for c in self.waiting if c.key == call.key):
                expected = self.model.expect(
                    call.owner,
                    call.wanted,
                    call.pod,
                    sticky=call.sticky,
                    started_ms=call.started_ms,
                )
                assert expected.error is not None, f"{call} waits, but {expected}"

    def _compare(self) -> None:
        """The database says what the model says, and is sound."""
        check_invariants(self.looking)
        blocks = self.looking.execute("SELECT network, cidr, state FROM cidr_blocks")
        assert sorted(blocks) == sorted(
            (network, block.range.cidr, "Ready" if block.ready else "Draining")
            for (network, _), blocks in self.model.blocks.items()
            for block in blocks
        )
        rows = self.looking.execute(
            "SELECT b.network, b.cidr, a.address, a.container_id, a.interface_name,"
            " a.release_at, a.allocation_id, a.allocated_at, a.boot_id"
            " FROM ip_addresses AS a JOIN cidr_blocks AS b ON b.id = a.cidr_block_id"
            " WHERE a.container_id IS NOT '' AND"
            " (a.is_allocated = TRUE OR a.release_at IS NOT NULL)"
        )
        assert sorted(rows, key=str) == sorted(
            (
                (
                    network,
                    block.range.cidr,
                    a.text,
                    a.owner.container_id if a.owner else None,
                    a.owner.interface_name if a.owner else None,
                    a.release_at,
                    a.allocation_id or None,
                    a.allocated_at or None,
                    self.clock.boot if a.owner else None,
                )
                for network, block, a in self.model.addresses()
                if a.owner or a.release_at is not None
            ),
            key=str,
        )


async def run_machines(
    clock: MockClock, seed: str, examples: int, *phases: Phase
) -> Host:
    """Run so many machines of STEPS steps, and tell what they did."""
    run = partial(
        run_state_machine_as_test,
        hypothesis.seed(seed)(Nodes),
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, *phases],
        ),
    )
    async with trio.open_nursery() as nursery:
        host = Host(clock, nursery)
        HOST.append(host)
        try:
            await trio.to_thread.run_sync(run)
        finally:
            HOST.pop()
    return host


async def test_whatever_is_done_in_whatever_order_the_model_foretells_it(
    mock_clock: MockClock, counts: Counts, scaled: Callable[[int], int], seed: str
) -> None:
    examples = scaled(STEPS_IN_ALL) // STEPS
    host = await run_machines(mock_clock, seed, examples, Phase.shrink)
    for step, number in host.steps.items():
        counts.add(f"state machine: {step.replace('_', ' ')}", number)
    for answer, number in host.answers.items():
        counts.add(f"state machine: {answer}", number)
    counts.add("state machine: steps in all", sum(host.steps.values()))


def shorter_cooldown(patch: pytest.MonkeyPatch) -> None:
    def take_back(
        connection: apsw.Connection,
        now_ms: int,
        rows: Sequence[holdings.Held],
        cooldown_ms: int,
        reason: str,
    ) -> None:
        holdings.take_back(connection, now_ms, rows, cooldown_ms - 1, reason)

    patch.setattr(sql, "take_back", take_back)


def lowest_address_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(picking, "FIRST_FREE", picking._queries("", "ORDER BY id"))


def late_calls_served(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(deletions, "check", lambda *_: None)


def young_allocations_collected(patch: pytest.MonkeyPatch) -> None:
    owners_besides = garbage.owners_besides

    def everybody(connection: apsw.Connection, now_ms: int, **of: Any) -> list[Owner]:
        return owners_besides(connection, now_ms, **{**of, "taken_at": 1 << 62})

    patch.setattr(garbage, "owners_besides", everybody)
    patch.setattr(
        garbage,
        "held_rows",
        lambda *given: [replace(row, allocated_at=0) for row in held_rows(*given)],
    )


def nobody_woken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Line, "wake_first", lambda _: None)


def turns_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "_line_ahead", lambda *_: None)


def owners_survive_a_reboot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reboot, "release", lambda *_: 0)


@pytest.mark.parametrize(
    "plant",
    [
        shorter_cooldown,
        lowest_address_first,
        late_calls_served,
        young_allocations_collected,
        nobody_woken,
        turns_forgotten,
        owners_survive_a_reboot,
    ],
)
async def test_a_planted_fault_is_found(
    mock_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    plant(monkeypatch)
    with pytest.raises(ExceptionGroup) as caught:
        await run_machines(mock_clock, "planted", 100)
    assert caught.group_contains(AssertionError)
