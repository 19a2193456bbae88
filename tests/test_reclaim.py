"""Rounds of reclaim: two strikes, a limit, and nobody who asked again."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from metis import reclaim
from metis.engine import COLLECTED_AT_ONCE, Engine
from metis.errors import StoreBusy, StoreUnavailable
from metis.evidence import Lookout
from metis.model import Holding, Owner, Pod
from metis.reclaim import Reclaimer, Report, Rules
from metis.store.history import Selection
from metis.store.store import Store, run_store
from metis.verdicts import Evidence, Namespaces, Sandboxes
from tests.runtime import FakeRuntime, running
from tests.store.databases import (
    InlineDatabase,
    check_invariants,
    inline_database,
    owner,
    want,
)

BLOCK = "10.1.0.0/24"
RULES = Rules(interval=60, grace=300, limit=100)
PAST_GRACE = RULES.grace + 1


@dataclass
class Node:
    """A reclaimer, what is below it, and the owners that live.

    Attributes:
      alive: container ids whose network namespaces are there.
      hidden: whether the directory of the namespaces cannot be seen.
      list_taken_ms: when the evidence was taken; None for the moment of the look.
      during: called in the middle of a look, once.
    """

    engine: Engine
    store: Store
    database: InlineDatabase
    rules: Rules = RULES
    alive: set[str] = field(default_factory=set)
    hidden: bool = False
    list_taken_ms: int | None = None
    during: list[str] = field(default_factory=list)
    reclaimer: Reclaimer = field(init=False)

    def __post_init__(self) -> None:
        self.reclaimer = Reclaimer(self.engine, self.store, self.rules, self.look)

    async def look(self, holdings: Collection[Holding]) -> Evidence:
        taken_ms = self.list_taken_ms or self.engine.now_ms()
        paths = {one.netns_path for one in holdings if one.netns_path}
        present = {path for path in paths if path.rpartition("/")[2] in self.alive}
        namespaces = Namespaces(frozenset(present), frozenset(paths - present))
        if self.hidden:
            namespaces = Namespaces(untold=dict.fromkeys(paths, "it is hidden"))
        while self.during:
            await self.add(self.during.pop())
        return Evidence(
            taken_ms, self.store.boot_id, namespaces, Sandboxes(silence="?")
        )

    async def add(
        self, *containers: str, cidr: str = BLOCK, netns: str | None = None
    ) -> None:
        """An ADD each; the namespace is named after the container."""
        for name in containers:
            await self.engine.allocate(
                owner(name),
                [want(cidr)],
                Pod(f"pod-{name}", "shop"),
                netns_path=f"/run/netns/{name}" if netns is None else netns,
            )

    async def round(self, limit: int | None = None) -> Report:
        return await self.reclaimer.make_round(limit)

    async def rounds(self, number: int) -> Report:
        """Rounds an interval apart; the report of the last."""
        report = await self.round()
        for _ in range(number - 1):
            await trio.sleep(self.rules.interval)
            report = await self.round()
        return report

    @property
    def owners(self) -> set[str]:
        rows = self.database.connection.execute(
            "SELECT container_id FROM ip_addresses WHERE container_id > ''"
        )
        return {row[0] for row in rows}

    async def reasons(self) -> dict[str, str]:
        """Of everybody who lost an address, by container id."""
        page = await self.store.list_history(Selection())
        return {one.container_id: one.reason for one in page.entries if one.ended_at}


@asynccontextmanager
async def open_node(
    rules: Rules = RULES, cooldown_ms: int = 60_000
) -> AsyncIterator[Node]:
    database = inline_database()
    async with run_store(database, cooldown_ms=cooldown_ms) as store:
        node = Node(Engine(store), store, database, rules)
        yield node
        check_invariants(database.connection)


def released(report: Report) -> set[str]:
    return {one.holding.owner.container_id for one in report.findings if one.released}


async def test_fifty_lost_containers_of_sixty_are_freed_and_the_others_kept(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    lost = {f"c{number}" for number in range(1, 51)}
    async with open_node() as node:
        await node.add(*(f"c{number}" for number in range(1, 61)))
        node.alive = {f"c{number}" for number in range(51, 61)}
        await trio.sleep(PAST_GRACE)
        async with trio.open_nursery() as nursery:  # as after a restart
            nursery.start_soon(node.reclaimer.run)
            await trio.sleep(RULES.interval * 1.5)
            assert len(node.owners) == 60  # a first strike frees nobody
            await trio.sleep(RULES.interval)
            nursery.cancel_scope.cancel()
        assert node.owners == node.alive
        assert set(await node.reasons()) == lost
        assert (await node.reasons())["c7"] == (
            "reclaimed: its network namespace /run/netns/c7 is gone"
        )
        (usage,) = (await node.store.capacity("default")).values()
        assert (usage.owned, usage.cooling) == (10, 50)
    lines = [
        record for record in caplog.records if "was taken back" in record.getMessage()
    ]
    assert {vars(line)["container"] for line in lines} == lost
    told = vars(lines[0])
    assert told["address"] == "10.1.0.2"
    assert told["pod"] == "shop/pod-c1"
    assert told["reason"] == "its network namespace /run/netns/c1 is gone"
    assert lines[0].levelno == logging.WARNING


@pytest.mark.parametrize("at_once", [1, 2, 7])
async def test_of_many_owners_some_are_read_looked_at_and_judged_at_once(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(reclaim, "READ_AT_ONCE", at_once)
    looks: list[int] = []
    async with open_node() as node:
        look = node.look

        async def counted(holdings: Collection[Holding]) -> Evidence:
            looks.append(len(holdings))
            await trio.sleep(1)
            return await look(holdings)

        node.reclaimer = Reclaimer(node.engine, node.store, RULES, counted)
        await node.add(*(f"c{number}" for number in range(7)))
        node.alive = {"c0", "c3", "c6"}
        await trio.sleep(PAST_GRACE)
        explained = await node.reclaimer.explain()
        assert len(explained.findings) == 7
        assert max(looks) <= max(at_once, 2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.reclaimer.run)
            await trio.sleep(2.5 * RULES.interval + 2 * len(looks))
            nursery.cancel_scope.cancel()
        assert node.owners == node.alive


async def test_the_first_round_comes_after_an_interval(
    autojump_clock: MockClock,
) -> None:
    looks: list[float] = []
    async with open_node() as node, trio.open_nursery() as nursery:

        async def look(holdings: Collection[Holding]) -> Evidence:
            looks.append(trio.current_time())
            return Evidence(node.engine.now_ms())

        reclaimer = Reclaimer(node.engine, node.store, RULES, look)
        nursery.start_soon(reclaimer.run)
        await trio.sleep(RULES.interval * 3.5)
        nursery.cancel_scope.cancel()
    assert looks == [60, 120, 180]


async def test_a_brand_new_allocation_survives_a_list_that_is_older(
    autojump_clock: MockClock,
) -> None:
    rules = Rules(interval=60, grace=0, limit=100)
    async with open_node(rules) as node:
        node.list_taken_ms = node.engine.now_ms()
        await trio.sleep(1)
        await node.add("c9")
        report = await node.rounds(3)
        assert node.owners == {"c9"}
    (finding,) = report.findings
    assert "after this was looked at" in finding.verdict.reason


async def test_nobody_goes_within_the_grace_period(autojump_clock: MockClock) -> None:
    async with open_node() as node:
        await node.add("c1")
        await node.rounds(5)  # 240 s
        assert node.owners == {"c1"}
        await trio.sleep(RULES.interval)
        assert [one.strikes for one in (await node.round()).findings] == [1]


async def test_two_strikes_must_be_an_interval_apart(
    autojump_clock: MockClock,
) -> None:
    async with open_node() as node:
        await node.add("c1")
        await trio.sleep(PAST_GRACE)
        for seconds, strikes, wait_ms in ((0, 1, 60_000), (20, 2, 40_000)):
            await trio.sleep(seconds)
            (finding,) = (await node.round()).findings
            assert (finding.strikes, finding.wait_ms) == (strikes, wait_ms)
            assert not finding.released
        await trio.sleep(39.999)
        assert not released(await node.round())
        await trio.sleep(0.001)
        assert released(await node.round()) == {"c1"}


async def test_a_sign_of_life_between_two_rounds_clears_the_strike(
    autojump_clock: MockClock,
) -> None:
    async with open_node() as node:
        await node.add("c1")
        await trio.sleep(PAST_GRACE)
        await node.round()
        for hide in (False, True):
            await trio.sleep(RULES.interval)
            if hide:
                node.hidden = True
            else:
                node.alive = {"c1"}
            assert [one.strikes for one in (await node.round()).findings] == [0]
            node.alive, node.hidden = set(), False
            await trio.sleep(RULES.interval)
            assert [one.strikes for one in (await node.round()).findings] == [1]
        assert node.owners == {"c1"}
        await trio.sleep(RULES.interval)
        assert released(await node.round()) == {"c1"}


async def test_a_repeated_add_between_two_rounds_clears_the_strike(
    autojump_clock: MockClock,
) -> None:
    rules = Rules(interval=60, grace=1, limit=100)
    async with open_node(rules) as node:
        await node.add("c1")
        await trio.sleep(30)
        await node.round()
        await trio.sleep(30)
        await node.add("c1")
        await trio.sleep(30)
        (finding,) = (await node.round()).findings
        assert (finding.strikes, finding.released) == (1, False)
        await trio.sleep(60)
        assert released(await node.round()) == {"c1"}


async def test_an_add_in_the_middle_of_a_round_keeps_its_address(
    autojump_clock: MockClock,
) -> None:
    async with open_node() as node:
        await node.add("c1", "c2")
        await trio.sleep(PAST_GRACE)
        await node.round()
        await trio.sleep(RULES.interval)
        node.during = ["c1"]
        report = await node.round()
        assert released(report) == {"c2"}
        assert node.owners == {"c1"}
        kept = [one for one in report.findings if not one.released]
        assert [one.verdict.gone for one in kept] == [False]
        assert "in this very moment" in kept[0].verdict.reason


async def test_a_container_that_comes_back_lives_where_it_says_now(
    autojump_clock: MockClock,
) -> None:
    """As podman starts one again: the same id, another namespace."""
    async with open_node() as node:
        await node.add("c1", netns="/run/netns/former")
        node.alive = {"c1"}
        await trio.sleep(PAST_GRACE)
        await node.round()
        await node.add("c1")
        await trio.sleep(PAST_GRACE)
        (finding,) = (await node.rounds(2)).findings
        assert finding.verdict.reason == "its network namespace /run/netns/c1 is there"


async def test_a_call_that_began_before_is_served_after(
    autojump_clock: MockClock,
) -> None:
    """Reclaim is no DEL: nobody said that a call of the owner is not wanted."""
    async with open_node() as node:
        await node.add("c1")
        await trio.sleep(PAST_GRACE)
        began = node.engine.now_ms()
        assert released(await node.rounds(2)) == {"c1"}
        await node.engine.allocate(owner("c1"), [want(BLOCK)], Pod(), started_ms=began)
        assert node.owners == {"c1"}


async def test_above_the_limit_nothing_goes_and_it_is_said(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    rules = Rules(interval=60, grace=1, limit=6)
    async with open_node(rules) as node:
        await node.add(*(f"c{number}" for number in range(7)))
        await trio.sleep(60)
        report = await node.rounds(2)
        assert not released(report)
        assert len(node.owners) == 7
        assert report.held_back == (
            "7 addresses of 7 owners that are gone would be taken back at once, the "
            "limit is 6: nothing is (c0, c1, c2, c3, c4 and 2 more). If they are gone "
            "indeed, 'metis reclaim --limit 7' lets them go"
        )
        assert report.held_back in caplog.messages
        assert (await node.round(limit=6)).held_back
        assert len(released(await node.round(limit=7))) == 7


async def test_a_strike_counts_again_once_the_limit_allows_it(
    autojump_clock: MockClock,
) -> None:
    rules = Rules(interval=60, grace=1, limit=1)
    async with open_node(rules) as node:
        await node.add("c1", "c2")
        await trio.sleep(60)
        assert (await node.rounds(2)).held_back
        await node.engine.deallocate(owner("c1"))
        assert released(await node.round()) == {"c2"}


async def test_a_limit_of_zero_only_tells(autojump_clock: MockClock) -> None:
    async with open_node(Rules(interval=60, grace=1, limit=0)) as node:
        await node.add("c1")
        await trio.sleep(60)
        assert "1 addresses of 1 owners" in (await node.rounds(3)).held_back
        assert node.owners == {"c1"}


async def test_many_go_in_steps(autojump_clock: MockClock) -> None:
    many = 2 * COLLECTED_AT_ONCE + 1
    async with open_node(Rules(interval=60, grace=1, limit=many)) as node:
        await node.add(*(f"c{number:03d}" for number in range(many)))
        await trio.sleep(60)
        await node.round()
        await trio.sleep(60)
        node.database.groups.clear()
        assert len(released(await node.round())) == many
        assert len(node.database.groups) == 3


async def test_what_is_freed_wakes_who_waits(autojump_clock: MockClock) -> None:
    small = "10.2.0.0/29"  # five addresses for pods
    async with open_node(Rules(interval=5, grace=1, limit=100), cooldown_ms=0) as node:
        await node.add(*(f"c{number}" for number in range(5)), cidr=small)
        node.alive = {f"c{number}" for number in range(1, 5)}
        await trio.sleep(5)
        await node.round()
        await trio.sleep(5)
        await node.engine.deallocate(owner("c1"))
        node.database.connection.execute(
            "UPDATE ip_addresses SET release_at = ? WHERE release_at IS NOT NULL",
            (node.engine.now_ms() + 8000,),
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(node.add, "w1", cidr=small))
            await trio.sleep(1)
            assert "w1" not in node.owners
            assert released(await node.round()) == {"c0"}
            await trio.sleep(1)
            assert "w1" in node.owners


async def test_dual_stack_goes_as_a_whole_or_not_at_all(
    autojump_clock: MockClock,
) -> None:
    async with open_node(Rules(interval=60, grace=100, limit=2)) as node:
        who = Owner("default", "c1", "eth0")
        await node.engine.allocate(
            who, [want(BLOCK)], Pod(), netns_path="/run/netns/c1"
        )
        await trio.sleep(60)
        await node.engine.allocate(
            who, [want("fd00:1::/64")], Pod(), netns_path="/run/netns/c1"
        )
        await trio.sleep(60)
        assert {one.verdict.gone for one in (await node.round()).findings} == {False}
        await trio.sleep(60)
        assert {one.strikes for one in (await node.round()).findings} == {1}
        await trio.sleep(60)
        report = await node.round()
        assert [one.released for one in report.findings] == [True, True]
        assert not node.owners


async def test_a_dry_run_tells_all_and_changes_nothing(
    autojump_clock: MockClock,
) -> None:
    async with open_node(Rules(interval=60, grace=1, limit=1)) as node:
        await node.add("c1", "c2", "c3")
        node.alive = {"c3"}
        await trio.sleep(60)
        for _ in range(3):
            report = await node.reclaimer.explain()
            assert [
                (one.verdict.gone, one.strikes, one.wait_ms) for one in report.findings
            ] == [(True, 0, 60_000), (True, 0, 60_000), (False, 0, 0)]
            assert not report.held_back
            await trio.sleep(60)
        await node.round()
        await trio.sleep(15)
        (first, *_) = (await node.reclaimer.explain()).findings
        assert (first.strikes, first.wait_ms) == (1, 45_000)
        await trio.sleep(45)
        report = await node.reclaimer.explain()
        assert "the limit is 1" in report.held_back
        assert report.findings[0].wait_ms == 0
        assert not (await node.reclaimer.explain(limit=2)).held_back
        assert node.owners == {"c1", "c2", "c3"}


@pytest.mark.parametrize(
    "failure", [StoreBusy("locked"), StoreUnavailable("the disk is full")]
)
async def test_rounds_outlive_a_database_that_fails(
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
    failure: Exception,
) -> None:
    async with open_node(Rules(interval=60, grace=1, limit=100)) as node:
        await node.add("c1")
        await trio.sleep(10)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.reclaimer.run)
            await trio.sleep(70)
            node.database.failures = [failure]
            await trio.sleep(60)
            assert node.owners == {"c1"}
            assert f"the next will try: {failure}" in caplog.text
            await trio.sleep(60)  # with its strikes as they were
            assert not node.owners
            nursery.cancel_scope.cancel()


async def test_rounds_do_not_run_into_each_other(autojump_clock: MockClock) -> None:
    async with open_node() as node:
        looking = 0

        async def look(holdings: Collection[Holding]) -> Evidence:
            nonlocal looking
            looking += 1
            assert looking == 1
            await trio.sleep(10)
            looking -= 1
            return Evidence(node.engine.now_ms())

        reclaimer = Reclaimer(node.engine, node.store, RULES, look)
        async with trio.open_nursery() as nursery:
            for round_ in (reclaimer.make_round, reclaimer.explain):
                nursery.start_soon(round_)
                nursery.start_soon(round_)
        assert trio.current_time() == pytest.approx(40)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_whatever_the_runtime_lists_no_pod_that_lives_loses_its_address(
    data: st.DataObject,
) -> None:
    """Pods of whom nothing but the runtime's word can tell, and a list that lies."""
    pods = [f"c{number}" for number in range(6)]
    alive = set(data.draw(st.lists(st.sampled_from(pods), unique=True)))
    lists = data.draw(st.lists(st.lists(st.sampled_from([*pods, "former"]))))
    silent = data.draw(st.sets(st.sampled_from(pods)))

    async def main() -> None:
        runtime = FakeRuntime(*alive, "another")
        async with open_node() as node, running(runtime) as transport:
            lookout = Lookout(node.engine.now_ms, node.store.boot_id, transport)
            reclaimer = Reclaimer(node.engine, node.store, RULES, lookout.look)
            await node.add(*pods, netns="")
            await trio.sleep(PAST_GRACE)
            runtime.vague = silent
            for runtime.listed in lists:
                await reclaimer.make_round()
                assert node.owners >= alive
                await trio.sleep(RULES.interval)
            runtime.listed, runtime.vague = None, set()
            await reclaimer.make_round()
            await trio.sleep(RULES.interval)
            await reclaimer.make_round()
            assert node.owners == alive

    trio.run(main, clock=MockClock(autojump_threshold=0))
