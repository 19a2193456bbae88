"""Who waits, how long and in which order: the engine on a clock that jumps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from metis.engine import (
    COLLECTED_AT_ONCE,
    DEFAULT_CAPACITY_WAIT,
    Engine,
    EngineStatistics,
)
from metis.errors import (
    AddressTaken,
    InvalidRequest,
    NotAllocated,
    OwnerDeleted,
    PoolExhausted,
    StoreBusy,
    StoreUnavailable,
)
from metis.model import CIDRBlock, Family, IPUsage, Owner, Pod, Wanted
from metis.ranges import AddressRange, AddressSet
from metis.store.store import Store, run_store
from metis.store.transactions import Work
from metis.waiting import ANSWER_MARGIN
from tests.store.databases import (
    IPV4,
    IPV6,
    START_MS,
    InlineDatabase,
    check_invariants,
    inline_database,
    owner,
    want,
)


@dataclass
class Desk:
    """An engine, what is below it, and a log of who was served when."""

    engine: Engine
    store: Store
    database: InlineDatabase
    nursery: trio.Nursery
    served: list[tuple[str, float]] = field(default_factory=list)
    refused: list[tuple[str, float, Exception]] = field(default_factory=list)

    async def allocate(
        self,
        who: Owner,
        *wanted: Wanted,
        patience: float | None = None,
        scope: trio.CancelScope | None = None,
    ) -> None:
        """Allocate, and write the outcome into the log."""
        deadline = None if patience is None else trio.current_time() + patience
        with scope or trio.CancelScope():
            try:
                await self.engine.allocate(who, wanted, Pod(), deadline=deadline)
            except PoolExhausted as error:
                self.refused.append((who.container_id, self.now, error))
            else:
                self.served.append((who.container_id, self.now))

    async def queue(
        self,
        who: Owner,
        *wanted: Wanted,
        patience: float | None = None,
        scope: trio.CancelScope | None = None,
    ) -> None:
        """Start to allocate, and return when the call waits or is over."""

        async def allocate() -> None:
            await self.allocate(who, *wanted, patience=patience, scope=scope)

        self.nursery.start_soon(allocate)
        await settle()

    def cool(self, address: str, seconds: float, network: str = "default") -> None:
        """Have an address rest until `seconds`, whoever owns it now."""
        self._update(address, network, None, START_MS + round(seconds * 1000))

    def own(self, address: str, network: str = "default") -> None:
        """Take an address away, as another process may."""
        self._update(address, network, "another", None)

    def _update(
        self, address: str, network: str, container: str | None, release_at: int | None
    ) -> None:
        self.database.connection.execute(
            "UPDATE ip_addresses SET is_allocated = ?1 IS NOT NULL, container_id = ?1,"
            " interface_name = iif(?1 IS NULL, NULL, 'eth0'), pod_name = NULL,"
            " pod_namespace = NULL, allocated_at = iif(?1 IS NULL, NULL, 1),"
            " release_at = ?2 WHERE address = ?3"
            " AND cidr_block_id IN (SELECT id FROM cidr_blocks WHERE network = ?4)",
            (container, release_at, address, network),
        )
        self.database.connection.execute(
            "UPDATE cidr_blocks SET allocated_ips = (SELECT count(*) FROM ip_addresses"
            " WHERE cidr_block_id = cidr_blocks.id AND is_allocated = TRUE)"
        )
        self.database.connection.execute(
            "UPDATE cidr_blocks SET allocated_ips = (SELECT count(*) FROM ip_addresses"
            " AS a WHERE a.cidr_block_id = cidr_blocks.id AND a.is_allocated = TRUE)"
        )

    @property
    def now(self) -> float:
        """Seconds since the test began."""
        return round(trio.current_time(), 3)


async def settle() -> None:
    """Let every task run until it waits, without letting time jump."""
    for _ in range(30):
        await trio.lowlevel.checkpoint()


@asynccontextmanager
async def desk(cooldown: float = 60) -> AsyncIterator[Desk]:
    """A desk; leaving it waits for every call and checks what must hold."""
    database = inline_database()
    async with run_store(database, cooldown_ms=round(cooldown * 1000)) as store:
        engine = Engine(store)
        async with trio.open_nursery() as nursery:
            yield Desk(engine, store, database, nursery)
        assert engine.statistics() == EngineStatistics({})
    check_invariants(database.connection)


async def fill(desk: Desk, cidr: str, network: str = "default") -> list[str]:
    """Let containers x0, x1, ... own every address of a block."""
    addresses: list[str] = []
    while True:
        who = owner(f"x{len(addresses)}", network)
        try:
            (got,) = await desk.engine.allocate(who, [want(cidr)], Pod())
        except PoolExhausted:
            return addresses
        addresses.append(got.address)


async def test_a_free_address_is_given_at_once(autojump_clock: MockClock) -> None:
    async with desk() as d:
        got = await d.engine.allocate(owner("c1"), [want("10.0.0.0/24")], Pod())
        assert got[0].address == "10.0.0.2"
        assert await d.engine.check(owner("c1")) == got
        assert await d.engine.deallocate(owner("c1")) == got
        assert await d.engine.deallocate(owner("c1")) == ()
        with pytest.raises(NotAllocated, match=r"'c1' holds no address .* 'eth0'"):
            await d.engine.check(owner("c1"))
        assert d.now == 0


async def test_a_waiting_call_is_served_when_the_cooldown_ends(
    autojump_clock: MockClock,
) -> None:
    async with desk(cooldown=5) as d:
        await fill(d, "10.0.0.0/30")
        await d.engine.deallocate(owner("x0"))
        await d.queue(owner("c1"), IPV4)
        assert d.engine.statistics() == EngineStatistics({("default", Family.IPV4): 1})
    assert d.served == [("c1", 5.0)]


async def test_what_comes_too_late_is_refused_at_once_with_counts(
    autojump_clock: MockClock,
) -> None:
    async with desk(cooldown=60) as d:
        await fill(d, "10.0.0.0/29")
        await d.engine.deallocate(owner("x0"))
        await trio.sleep(1)
        await d.allocate(owner("c1"), IPV4)
    ((_, when, error),) = d.refused
    assert when == 1.0
    assert str(error) == (
        "no ipv4 address is free on network 'default': 4 owned, 1 cooling, 3 reserved; "
        "the next is free in 59.0 s"
    )
    assert isinstance(error, PoolExhausted)
    assert error.next_free_ms == START_MS + 60_000


async def test_when_nothing_cools_the_answer_comes_at_once(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        await fill(d, "10.0.0.0/30")
        writes = len(d.database.groups)
        await d.allocate(owner("c1"), IPV4)
        assert len(d.database.groups) == writes + 1
    ((_, when, error),) = d.refused
    assert when == 0
    assert "1 owned, 0 cooling, 3 reserved; no address is cooling" in str(error)


@pytest.mark.parametrize(
    ("patience", "cooldown", "is_served"),
    [
        (4, 4 - ANSWER_MARGIN, True),
        (4, 4 - ANSWER_MARGIN + 0.01, False),
        (None, DEFAULT_CAPACITY_WAIT - ANSWER_MARGIN, True),
        (None, DEFAULT_CAPACITY_WAIT - ANSWER_MARGIN + 0.01, False),
        (30, 20, True),
        (-1, 0.5, False),
    ],
)
async def test_waiting_ends_a_margin_before_the_deadline(
    autojump_clock: MockClock, patience: float | None, cooldown: float, is_served: bool
) -> None:
    async with desk(cooldown) as d:
        await fill(d, "10.0.0.0/30")
        await d.engine.deallocate(owner("x0"))
        await d.allocate(owner("c1"), IPV4, patience=patience)
    if is_served:
        assert d.served == [("c1", round(cooldown, 3))]
    else:
        assert [when for _, when, _ in d.refused] == [0]


async def test_waiting_calls_are_served_in_the_order_in_which_they_came(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        first, second, third, *_ = await fill(d, "10.0.0.0/29")
        d.cool(third, 1)
        d.cool(first, 2)
        d.cool(second, 3)
        for number in range(5):
            await d.queue(owner(f"c{number}"), IPV4)
    assert d.served == [("c0", 1.0), ("c1", 2.0), ("c2", 3.0)]
    assert [(who, when) for who, when, _ in d.refused] == [("c3", 0.0), ("c4", 0.0)]


async def test_addresses_that_become_free_together_serve_all_who_wait(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        addresses = await fill(d, "10.0.0.0/28")
        for address in addresses:
            d.cool(address, 4)
        writes = len(d.database.groups)
        for number in range(len(addresses)):
            await d.queue(owner(f"c{number}"), IPV4)
        await trio.sleep(2)
        # Whoever waits leaves the writer alone: one try each, none of the rest.
        assert len(d.database.groups) == writes + 2
    assert [when for _, when in d.served] == [4.0] * len(addresses)
    assert [who for who, _ in d.served] == [f"c{n}" for n in range(len(addresses))]


async def test_of_calls_that_come_together_those_without_a_prospect_go_at_once(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        first, second, *_ = await fill(d, "10.0.0.0/29")
        d.cool(first, 5)
        d.cool(second, 6)
        for number in range(6):
            d.nursery.start_soon(d.allocate, owner(f"c{number}"), IPV4)
    assert [when for _, when in d.served] == [5.0, 6.0]
    assert [when for _, when, _ in d.refused] == [0.0] * 4


async def test_whoever_is_pushed_back_counts_anew(autojump_clock: MockClock) -> None:
    async with desk() as d:
        await fill(d, "fd00::1/128")
        first, second, *_ = await fill(d, "10.0.0.0/29")
        d.cool("fd00::1", 3)
        d.cool(second, 0)
        await d.queue(owner("dual"), IPV4, IPV6)
        await d.allocate(owner("taker"), IPV4)
        d.cool(first, 6)
        await d.queue(owner("four"), IPV4)
    assert d.served == [("taker", 0.0), ("dual", 6.0)]
    assert [(who, when) for who, when, _ in d.refused] == [("four", 3.0)]


async def test_nobody_overtakes_at_the_moment_of_release(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        first, second, *_ = await fill(d, "10.0.0.0/29")
        d.cool(first, 5)
        d.cool(second, 6)
        await d.queue(owner("early"), IPV4)
        await trio.sleep_until(5)
        await d.queue(owner("late"), IPV4)
    assert d.served == [("early", 5.0), ("late", 6.0)]


async def test_whoever_repeats_a_served_call_does_not_wait(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        first, second, *_ = await fill(d, "10.0.0.0/29")
        d.cool(second, 5)
        await d.queue(owner("c1"), IPV4)
        await d.queue(owner("x0"), IPV4)
        assert d.served == [("x0", 0.0)]
        got = await d.engine.allocate(owner("x0"), [want("10.0.0.0/29")], Pod())
        assert got[0].address == first
    assert d.served == [("x0", 0.0), ("c1", 5.0)]


async def test_whoever_comes_back_to_its_address_does_not_wait(
    autojump_clock: MockClock,
) -> None:
    async with desk(cooldown=60) as d:
        first, *_ = await fill(d, "10.0.0.0/29")
        d.cool(first, 5)
        await d.queue(owner("c1"), IPV4)
        given_back = await d.engine.deallocate(owner("x3"))
        await d.queue(owner("x3"), IPV4)
        assert d.served == [("x3", 0.0)]
        assert await d.engine.check(owner("x3")) == given_back
    assert d.served == [("x3", 0.0), ("c1", 5.0)]


async def test_whoever_asks_for_an_address_by_name_does_not_wait(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        first, second, *_ = await fill(d, "10.0.0.0/29")
        d.cool(first, 5)
        await d.queue(owner("c1"), IPV4)
        with pytest.raises(AddressTaken, match="held by another owner"):
            await d.engine.allocate(
                owner("c2"), [Wanted(Family.IPV4, address=second)], Pod()
            )
        assert d.now == 0
    assert d.served == [("c1", 5.0)]


async def test_whoever_brings_a_new_block_does_not_wait_and_helps_who_does(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        first, second, *_ = await fill(d, "10.0.0.0/29")
        d.cool(first, 5)
        d.cool(second, 5)
        await d.queue(owner("c0"), want("10.0.0.0/29"))
        await d.queue(owner("c1"), want("10.0.0.0/29"))
        await d.queue(owner("c2"), want("10.0.1.0/24"))
    assert sorted(d.served) == [("c0", 0.0), ("c1", 0.0), ("c2", 0.0)]
    assert d.served[0][0] == "c2"


async def test_a_claim_that_lapses_on_the_way_leads_into_the_line(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk() as d:
        first, second, *_ = await fill(d, "10.0.0.0/29")
        d.cool(first, 5)
        d.cool(second, 6)
        await d.queue(owner("c0"), IPV4)

        async def claims(
            _: Owner, wanted: Sequence[Wanted], __: Pod | None
        ) -> frozenset[int]:
            return frozenset(range(len(wanted)))

        monkeypatch.setattr(d.store, "assured", claims)
        await d.queue(owner("c1"), IPV4)
        assert d.engine.statistics().waiting == {("default", Family.IPV4): 2}
    assert d.served == [("c0", 5.0), ("c1", 6.0)]


async def test_whoever_waits_is_not_held_up_for_a_family_that_it_holds(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        await d.engine.allocate(owner("both"), [want("fd00::/126")], Pod())
        (four, *_), (six, *_) = (
            await fill(d, "10.0.0.0/29"),
            await fill(d, "fd00::/126"),
        )
        d.cool(four, 1)
        d.cool(six, 8)
        # One after the other, but before either of them stands in a line.
        d.nursery.start_soon(d.allocate, owner("six"), IPV6)
        await trio.lowlevel.checkpoint()
        d.nursery.start_soon(d.allocate, owner("both"), IPV4, IPV6)
    assert d.served == [("both", 1.0), ("six", 8.0)]


async def test_networks_do_not_hold_up_one_another(autojump_clock: MockClock) -> None:
    async with desk() as d:
        for address in await fill(d, "10.0.0.0/26", "full"):
            d.cool(address, 8, "full")
        for number in range(50):
            await d.queue(owner(f"w{number}", "full"), IPV4)
        assert sum(d.engine.statistics().waiting.values()) == 50
        for number in range(100):
            await d.allocate(owner(f"c{number}", "other"), want("10.1.0.0/24"))
            await d.engine.deallocate(owner(f"c{number}", "other"))
        assert [when for _, when in d.served] == [0.0] * 100
    assert {when for _, when in d.served[100:]} == {8.0}
    assert len(d.served) == 150


async def test_a_line_for_ipv6_holds_up_no_ipv4(autojump_clock: MockClock) -> None:
    async with desk() as d:
        await fill(d, "fd00::1/128")
        d.cool("fd00::1", 5)
        await d.queue(owner("six"), IPV6)
        await d.allocate(owner("four"), want("10.0.0.0/24"))
        assert d.served == [("four", 0.0)]
    assert d.served == [("four", 0.0), ("six", 5.0)]


async def test_dual_stack_leaves_to_others_what_it_cannot_use_yet(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        await fill(d, "fd00::1/128")
        d.cool("fd00::1", 5)
        await d.store.add_block("default", CIDRBlock.parse("10.0.0.1/32"))
        await d.queue(owner("dual"), IPV4, IPV6)
        await d.allocate(owner("four"), IPV4)
        assert d.served == [("four", 0.0)]
    ((who, when, error),) = d.refused
    assert (who, when) == ("dual", 5.0)
    assert isinstance(error, PoolExhausted)
    assert error.family == "ipv4"


async def test_dual_stack_waits_until_both_are_free_and_takes_neither_before(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        await fill(d, "fd00::1/128")
        await fill(d, "10.0.0.1/32", "other")
        d.cool("fd00::1", 4)
        await d.store.add_block("default", CIDRBlock.parse("10.0.0.1/32"))
        await d.engine.allocate(owner("four"), [IPV4], Pod())
        d.cool("10.0.0.1", 2)
        await d.queue(owner("dual"), IPV4, IPV6)
        await trio.sleep(3)
        assert await d.store.held(owner("dual")) == ()
    assert d.served == [("dual", 4.0)]


async def test_dual_stack_keeps_its_place_when_it_changes_lines(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        first, second, *_ = await fill(d, "10.0.0.0/29")
        await fill(d, "fd00::1/128")
        d.cool(first, 1)
        d.cool("fd00::1", 4)
        await d.queue(owner("dual"), IPV4, IPV6)  # waits for IPv6, the longer wait
        await d.queue(owner("quick"), IPV4)
        d.cool(second, 6)
        await trio.sleep(2)
        await d.queue(owner("four"), IPV4)
        assert d.engine.statistics().waiting == {
            ("default", Family.IPV4): 1,
            ("default", Family.IPV6): 1,
        }
        d.cool("10.0.0.4", 7)
        await trio.sleep(3)  # the turn of IPv6 came; now IPv4 lacks
        assert d.engine.statistics().waiting == {("default", Family.IPV4): 2}
    assert d.served == [("quick", 1.0), ("dual", 6.0), ("four", 7.0)]


async def test_dual_stack_does_not_overtake_in_the_line_of_its_other_family(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        await fill(d, "10.0.0.1/32")
        await fill(d, "fd00::1/128")
        await d.store.add_block("default", CIDRBlock.parse("fd00::2/128"))
        await d.engine.allocate(owner("y"), [IPV6], Pod())
        d.cool("fd00::1", 5)
        d.cool("fd00::2", 6)
        d.cool("10.0.0.1", 5)
        await d.queue(owner("six"), IPV6)
        await d.queue(owner("dual"), IPV4, IPV6)
    assert d.served == [("six", 5.0), ("dual", 6.0)]


async def test_dual_stack_follows_an_earlier_call_into_the_other_line(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        four = await fill(d, "10.0.0.0/29")
        six = await fill(d, "fd00::/125")
        for address, end in ((four[0], 3), (four[1], 4), (six[0], 2)):
            d.cool(address, end)
        await d.queue(owner("dual-0"), IPV4, IPV6)  # IPv4 is the longer wait
        await d.queue(owner("dual-1"), IPV4, IPV6)
        await d.queue(owner("six"), IPV6)
        assert d.engine.statistics().waiting == {
            ("default", Family.IPV4): 2,
            ("default", Family.IPV6): 1,
        }
        d.cool(six[1], 6)
        d.cool(six[2], 7)
        await trio.sleep(5)
        assert d.engine.statistics().waiting == {("default", Family.IPV6): 2}
    assert d.served == [("six", 2.0), ("dual-0", 6.0), ("dual-1", 7.0)]


async def test_what_a_call_holds_already_does_not_make_it_wait(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        _, second, *_ = await fill(d, "10.0.0.0/29")
        d.cool(second, 5)
        await d.queue(owner("c1"), IPV4)
        await d.allocate(owner("x0"), IPV4, want("fd00::/64"))
        assert d.served == [("x0", 0.0)]


async def test_a_release_without_cooldown_wakes_who_waits(
    autojump_clock: MockClock,
) -> None:
    async with desk(cooldown=0) as d:
        first, *_ = await fill(d, "10.0.0.0/29")
        d.cool(first, 8)
        await d.queue(owner("c1"), IPV4)
        await trio.sleep(2)
        await d.engine.deallocate(owner("x3"))
    assert d.served == [("c1", 2.0)]


async def test_a_new_block_serves_all_who_wait_when_it_is_announced(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        for address in await fill(d, "10.0.0.0/28"):
            d.cool(address, 8)
        for number in range(5):
            await d.queue(owner(f"c{number}"), IPV4)
        await trio.sleep(1)
        await d.store.add_block("default", CIDRBlock.parse("10.0.1.0/24"))
        d.engine.announce("default", Family.IPV4)
        d.engine.announce("other", Family.IPV4)
        for number in range(5, 30):  # far more than there are cooling
            await d.queue(owner(f"c{number}"), IPV4)
    assert d.served == [(f"c{number}", 1.0) for number in range(30)]


async def test_an_announcement_that_helps_nobody_leaves_the_order_alone(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        first, second, *_ = await fill(d, "10.0.0.0/29")
        d.cool(first, 4)
        d.cool(second, 5)
        await d.queue(owner("c0"), IPV4)
        await d.queue(owner("c1"), IPV4)
        for _ in range(3):
            await trio.sleep(1)
            d.engine.announce("default", Family.IPV4)
    assert d.served == [("c0", 4.0), ("c1", 5.0)]


@pytest.mark.parametrize("who_leaves", [0, 1, 2])
async def test_whoever_gives_up_lets_the_next_go_on(
    autojump_clock: MockClock, who_leaves: int
) -> None:
    async with desk() as d:
        first, second, third, *_ = await fill(d, "10.0.0.0/29")
        for address, seconds in ((first, 3), (second, 4), (third, 5)):
            d.cool(address, seconds)
        scopes = [trio.CancelScope() for _ in range(3)]
        for number, scope in enumerate(scopes):
            await d.queue(owner(f"c{number}"), IPV4, scope=scope)
        await trio.sleep(1)
        scopes[who_leaves].cancel()
    rest = [number for number in range(3) if number != who_leaves]
    assert d.served == [(f"c{rest[0]}", 3.0), (f"c{rest[1]}", 4.0)]
    assert d.refused == []


async def test_when_another_process_takes_the_address_the_first_is_told(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        first, *_ = await fill(d, "10.0.0.0/29")
        d.cool(first, 3)
        await d.queue(owner("c1"), IPV4)
        await trio.sleep(1)
        d.own(first)
    ((who, when, error),) = d.refused
    assert (who, when) == ("c1", 3.0)
    assert "5 owned, 0 cooling, 3 reserved" in str(error)


async def test_when_another_process_takes_the_address_the_last_is_told_in_time(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        first, second, *_ = await fill(d, "10.0.0.0/29")
        d.cool(first, 3)
        d.cool(second, 30)
        await d.queue(owner("c0"), IPV4, patience=40)
        d.cool(second, 4)
        await d.queue(owner("c1"), IPV4)
        d.cool(second, 31)
        d.own(first)
    assert d.served == [("c0", 31.0)]
    ((who, when, error),) = d.refused
    assert (who, when) == ("c1", DEFAULT_CAPACITY_WAIT - ANSWER_MARGIN)
    assert "4 owned, 1 cooling, 3 reserved; the next is free in 22.1 s" in str(error)


async def test_whoever_comes_while_the_first_tries_waits_to_count(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        first, second, *_ = await fill(d, "10.0.0.0/29")
        d.cool(first, 3)
        d.cool(second, 4)
        await d.queue(owner("c0"), IPV4)
        await trio.sleep(1)
        d.database.failures = [StoreBusy("locked")] * 4
        await trio.sleep_until(3.05)
        assert d.served == []
        await d.queue(owner("c1"), IPV4)
        await d.queue(owner("c2"), IPV4)
    assert [who for who, _ in d.served] == ["c0", "c1"]
    assert d.served[1][1] == 4.0
    ((who, when, _),) = d.refused
    assert who == "c2"
    assert when == d.served[0][1]


async def test_whoever_cannot_count_because_the_line_moves_stays_in_it(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk() as d:
        first, *_ = await fill(d, "10.0.0.0/29")
        d.cool(first, 8)
        usage, counts = d.store.usage, []

        async def usage_while_the_first_tries(
            network: str,
            family: Family,
            position: int = 1,
            ranges: AddressSet | None = None,
        ) -> IPUsage:
            counted = await usage(network, family, position, ranges)
            counts.append(position)
            d.engine.announce(network, family)
            await settle()
            return counted

        monkeypatch.setattr(d.store, "usage", usage_while_the_first_tries)
        await d.queue(owner("c0"), IPV4, patience=20)
        d.nursery.start_soon(d.allocate, owner("c1"), IPV4)
    assert d.served == [("c0", 8.0)]
    assert [when for _, when, _ in d.refused] == [8.0]
    assert counts == [2, 2, 2]


@pytest.mark.parametrize("failures", [1, 2, 5])
async def test_a_busy_database_is_tried_again(
    autojump_clock: MockClock, failures: int
) -> None:
    async with desk() as d:
        d.database.failures = [StoreBusy("locked") for _ in range(failures)]
        await d.allocate(owner("c1"), want("10.0.0.0/24"))
        assert 0 < d.now < 1
        d.database.failures = [StoreBusy("locked") for _ in range(failures)]
        assert await d.engine.deallocate(owner("c1")) != ()
    assert [who for who, _ in d.served] == ["c1"]


async def test_a_database_busy_until_the_deadline_is_told_before_it(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        d.database.failures = [StoreBusy("locked") for _ in range(100)]
        for change in (
            d.engine.allocate(owner("c1"), [want("10.0.0.0/24")], Pod(), deadline=3),
            d.engine.deallocate(owner("c1"), deadline=6),
        ):
            with pytest.raises(StoreBusy, match="locked"):
                await change
        assert 5.5 < d.now < 6 - ANSWER_MARGIN
        assert len(d.database.groups) < 50
        d.database.failures = []


@pytest.mark.parametrize("error", [StoreUnavailable("full"), InvalidRequest("bad")])
async def test_other_errors_surface_at_once(
    autojump_clock: MockClock, error: Exception
) -> None:
    async with desk() as d:
        d.database.failures = [error]
        with pytest.raises(Exception, match=str(error)):
            await d.engine.allocate(owner("c1"), [want("10.0.0.0/24")], Pod())
        assert d.now == 0


async def test_a_call_that_is_busy_in_its_turn_keeps_its_turn(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        first, second, *_ = await fill(d, "10.0.0.0/29")
        d.cool(first, 3)
        d.cool(second, 3)
        await d.queue(owner("c0"), IPV4)
        await d.queue(owner("c1"), IPV4)
        await trio.sleep(1)
        d.database.failures = [StoreBusy("locked")] * 3
    assert [who for who, _ in d.served] == ["c0", "c1"]
    assert all(3 < when < 4 for _, when in d.served)


def out_of(*arguments: str, address: str | None = None) -> Wanted:
    """An address out of a set of one range."""
    return Wanted.out_of(AddressSet((AddressRange.parse(*arguments),)), address)


LOW = out_of("10.0.0.0/24", "10.0.0.10", "10.0.0.11")
HIGH = out_of("10.0.0.0/24", "10.0.0.20", "10.0.0.21")


async def test_each_set_of_ranges_has_a_line_of_its_own(
    autojump_clock: MockClock,
) -> None:
    async with desk(cooldown=5) as d:
        for number in range(2):
            await d.allocate(owner(f"low-{number}"), LOW)
        await d.engine.deallocate(owner("low-0"))
        await d.queue(owner("c0"), LOW)
        assert d.engine.statistics().waiting == {("default", Family.IPV4): 1}
        await d.allocate(owner("c1"), HIGH)
        await d.allocate(owner("c2"), LOW)
    assert d.served[2:] == [("c1", 0.0), ("c0", 5.0)]
    ((who, when, error),) = d.refused
    assert (who, when) == ("c2", 0.0)
    assert "in 10.0.0.10-10.0.0.11 of 10.0.0.0/24: " in str(error)


async def test_one_of_two_sets_of_a_family_can_be_waited_for(
    autojump_clock: MockClock,
) -> None:
    async with desk(cooldown=5) as d:
        for number in range(2):
            await d.allocate(owner(f"low-{number}"), LOW)
        await d.engine.deallocate(owner("low-0"))
        await d.queue(owner("c0"), HIGH, LOW)
        await d.allocate(owner("c1"), HIGH)
    assert d.served[2:] == [("c1", 0.0), ("c0", 5.0)]


async def test_a_del_ends_the_calls_of_its_owner_that_wait(
    autojump_clock: MockClock,
) -> None:
    async with desk(cooldown=5) as d:
        await fill(d, "10.0.0.0/29")
        for number in range(2):
            await d.engine.deallocate(owner(f"x{number}"))
        ended: list[float] = []

        async def give_up() -> None:
            with pytest.raises(OwnerDeleted, match=r"'c1' was deleted .* 'eth0'"):
                await d.engine.allocate(owner("c1"), [IPV4], Pod())
            ended.append(d.now)

        d.nursery.start_soon(give_up)
        await settle()
        await d.queue(owner("c2"), IPV4)
        await trio.sleep(1)
        assert await d.engine.deallocate(owner("c1")) == ()
        await settle()
        assert ended == [1.0]
        assert d.engine.statistics().waiting == {("default", Family.IPV4): 1}
    assert d.served == [("c2", 5.0)]


async def test_a_del_ends_a_call_that_is_being_written_and_takes_its_address(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk() as d:
        gate, write, events = trio.Event(), d.database.write, []

        async def write_at_the_gate(group: Sequence[Work[object]]) -> list[object]:
            events.append("writing")
            await gate.wait()
            return await write(group)

        async def allocate() -> None:
            with pytest.raises(OwnerDeleted):
                await d.engine.allocate(owner("c1"), [want("10.0.0.0/24")], Pod())
            events.append("ended")

        async def deallocate() -> None:
            (released,) = await d.engine.deallocate(owner("c1"))
            events.append(released.address)

        monkeypatch.setattr(d.database, "write", write_at_the_gate)
        d.nursery.start_soon(allocate)
        await settle()
        d.nursery.start_soon(deallocate)
        await settle()
        assert events == ["writing"]
        gate.set()
        await settle()
        assert sorted(events) == ["10.0.0.2", "ended", "writing", "writing"]
        assert await d.store.held(owner("c1")) == ()


async def deleted_meanwhile(d: Desk, who: Owner, *wanted: Wanted) -> None:
    """Start a call that a DEL is to end; return when it waits or is over."""

    async def allocate() -> None:
        with pytest.raises(OwnerDeleted):
            await d.engine.allocate(who, wanted, Pod())

    d.nursery.start_soon(allocate)
    await settle()


def held_up(d: Desk, monkeypatch: pytest.MonkeyPatch) -> trio.Event:
    """Let nothing be written until the gate that is returned is set."""
    gate, write = trio.Event(), d.database.write

    async def write_at_the_gate(group: Sequence[Work[object]]) -> list[object]:
        await gate.wait()
        return await write(group)

    monkeypatch.setattr(d.database, "write", write_at_the_gate)
    return gate


async def test_a_call_that_was_busy_while_its_owner_was_deleted_leaves_nothing(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        d.database.failures = [StoreBusy("locked")]
        async with trio.open_nursery() as d.nursery:
            await deleted_meanwhile(d, owner("c1"), want("10.0.0.0/24"))
            # In the same millisecond, so that the record of it bars nothing.
            assert await d.engine.deallocate(owner("c1")) == ()
            assert d.now == 0
        assert await d.store.held(owner("c1")) == ()


async def test_a_call_that_looked_while_its_owner_was_deleted_leaves_nothing(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk(cooldown=5) as d:
        await fill(d, "10.0.0.0/29")
        await d.engine.deallocate(owner("x0"))
        await d.queue(owner("c0"), IPV4)  # behind whom others look first
        gate, assured = trio.Event(), d.store.assured

        async def assured_at_the_gate(
            who: Owner, wanted: Sequence[Wanted], sticky_pod: Pod | None = None
        ) -> frozenset[int]:
            await gate.wait()
            return await assured(who, wanted, sticky_pod)

        monkeypatch.setattr(d.store, "assured", assured_at_the_gate)
        async with trio.open_nursery() as d.nursery:
            await deleted_meanwhile(d, owner("c1"), want("10.0.1.0/24"))
            assert await d.engine.deallocate(owner("c1")) == ()
            gate.set()
        assert await d.store.held(owner("c1")) == ()


async def test_a_call_that_a_del_of_before_ended_leaves_nothing(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk() as d:
        gate = held_up(d, monkeypatch)
        async with trio.open_nursery() as d.nursery:
            await deleted_meanwhile(d, owner("c1"), want("10.0.0.0/24"))
            kept_at = d.engine.now_ms() + 1
            await trio.sleep(1)
            d.nursery.start_soon(
                partial(d.engine.deallocate, owner("c1"), arrived_ms=kept_at)
            )
            await settle()
            gate.set()
        assert await d.store.held(owner("c1")) == ()


async def test_a_call_whose_del_was_given_up_leaves_nothing(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk() as d:
        gate = held_up(d, monkeypatch)
        async with trio.open_nursery() as d.nursery:
            await deleted_meanwhile(d, owner("c1"), want("10.0.0.0/24"))
            with trio.move_on_after(1):
                await d.engine.deallocate(owner("c1"))
            gate.set()
        assert await d.store.held(owner("c1")) == ()


async def test_an_allocation_that_began_before_its_del_is_refused(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        await d.engine.deallocate(owner("c1"))
        deleted_at = d.engine.now_ms()
        for started_ms in (deleted_at - 5_000, deleted_at):
            with pytest.raises(OwnerDeleted, match="after this call for 'eth0' began"):
                await d.engine.allocate(
                    owner("c1"), [want("10.0.0.0/24")], Pod(), started_ms=started_ms
                )
        assert await d.store.held(owner("c1")) == ()
        got = await d.engine.allocate(
            owner("c1"), [want("10.0.0.0/24")], Pod(), started_ms=deleted_at + 1
        )
        with pytest.raises(OwnerDeleted):  # the late one is refused all the same
            await d.engine.allocate(
                owner("c1"), [IPV4], Pod(), started_ms=deleted_at - 5_000
            )
        assert await d.engine.check(owner("c1")) == got


async def test_whoever_tells_no_start_begins_on_arrival(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        block = want("10.0.0.0/24")
        first = await d.engine.allocate(owner("c1"), [block], Pod())
        await d.engine.deallocate(owner("c1"))
        assert await d.engine.allocate(owner("c1"), [block], Pod()) == first
        assert d.now == 0


async def test_a_del_that_arrived_earlier_ends_only_what_began_before(
    autojump_clock: MockClock,
) -> None:
    async with desk(cooldown=5) as d:
        await fill(d, "10.0.0.0/30")
        await d.engine.deallocate(owner("x0"))
        await d.queue(owner("c1"), IPV4)
        await d.engine.deallocate(owner("c1"), arrived_ms=d.engine.now_ms() - 1)
    assert d.served == [("c1", 5.0)]


async def test_a_del_that_arrived_earlier_takes_nothing_that_was_got_since(
    autojump_clock: MockClock,
) -> None:
    async with desk(cooldown=5) as d:
        await fill(d, "10.0.0.0/30")
        await trio.sleep(1)
        assert not await d.engine.deallocate(
            owner("x0"), arrived_ms=d.engine.now_ms() - 2000
        )
        assert len(await d.engine.check(owner("x0"))) == 1
        assert await d.engine.deallocate(owner("x0"), arrived_ms=d.engine.now_ms() - 1)


async def test_an_allocation_is_given_back_unless_the_owner_asked_again(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        block = want("10.0.0.0/24")
        (first,) = await d.engine.allocate(owner("c1"), [block], Pod())
        (again,) = await d.engine.allocate(owner("c1"), [block], Pod())
        assert first.address == again.address
        assert await d.engine.give_back(owner("c1"), first.allocation_id) == ()
        assert await d.engine.check(owner("c1")) == (again,)
        assert await d.engine.give_back(owner("c1"), again.allocation_id) == (again,)
        # No record is left: whoever began before may still be served.
        assert await d.engine.allocate(owner("c1"), [block], Pod(), started_ms=1)


async def test_giving_back_wakes_who_waits(autojump_clock: MockClock) -> None:
    async with desk(cooldown=0) as d:
        first, *_ = await fill(d, "10.0.0.0/29")
        d.cool(first, 8)
        await d.queue(owner("c1"), IPV4)
        (held,) = await d.store.held(owner("x3"))
        await d.engine.give_back(owner("x3"), held.allocation_id)
    assert d.served == [("c1", 0.0)]


async def test_garbage_is_collected_in_steps(autojump_clock: MockClock) -> None:
    async with desk() as d:
        addresses = await fill(d, "10.0.0.0/24")
        writes = len(d.database.groups)
        collected = await d.engine.collect_garbage("default", set())
        assert len(collected) == len(addresses)
        assert len(d.database.groups) - writes == -(-253 // COLLECTED_AT_ONCE)


async def test_garbage_is_all_that_is_not_on_the_list_and_helps_who_waits(
    autojump_clock: MockClock,
) -> None:
    async with desk(cooldown=3) as d:
        addresses = await fill(d, "10.0.0.0/24")
        await fill(d, "10.0.0.0/29", "other")
        d.cool(addresses[0], 8)
        await d.queue(owner("c1"), IPV4)
        kept = {("x1", "eth0"), ("x2", "net1")}
        collected = await d.engine.collect_garbage("default", kept)
        gone = {(who.container_id, held.address) for who, held in collected}
        assert gone == {
            (f"x{number}", address)
            for number, address in enumerate(addresses)
            if number > 1
        }
        assert await d.engine.check(owner("x1"))
        assert await d.engine.check(owner("x1", "other"))
        assert await d.engine.collect_garbage("default", kept) == []
        usage = (await d.engine.capacity("default"))[Family.IPV4]
        assert (usage.owned, usage.cooling, usage.reserved) == (1, 252, 3)
    assert d.served == [("c1", 3.0)]


async def test_what_was_allocated_after_the_list_was_taken_stays(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        await d.engine.allocate(owner("old"), [want("10.0.0.0/24")], Pod())
        taken_ms = d.engine.now_ms()
        await trio.sleep(0.001)
        await d.engine.allocate(owner("new"), [IPV4], Pod())
        collected = await d.engine.collect_garbage("default", set(), taken_ms=taken_ms)
        assert [who.container_id for who, _ in collected] == ["old"]
        assert await d.engine.check(owner("new"))
        with pytest.raises(OwnerDeleted):
            await d.engine.allocate(owner("old"), [IPV4], Pod(), started_ms=taken_ms)
        assert await d.engine.allocate(owner("old"), [IPV4], Pod())


async def test_a_sticky_pod_gets_what_it_had_and_does_not_wait(
    autojump_clock: MockClock,
) -> None:
    pod = Pod("web-0", "shop")
    async with desk(cooldown=60) as d:
        (had,) = await d.engine.allocate(owner("s1"), [want("10.0.0.0/29")], pod)
        first, *_ = await fill(d, "10.0.0.0/29")
        await d.engine.deallocate(owner("s1"))
        d.cool(first, 5)
        await d.queue(owner("c1"), IPV4)
        (got,) = await d.engine.allocate(owner("s2"), [IPV4], pod, sticky=True)
        assert got.address == had.address
        assert d.now == 0
    assert d.served == [("c1", 5.0)]


async def test_a_moment_of_another_boot_or_of_the_future_tells_nothing(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        await trio.sleep(2)
        assert d.engine.stored_ms(1_500, "boot-1") == START_MS + 1_500
        assert d.engine.stored_ms(9_500, "boot-1") == START_MS + 2_000
        assert d.engine.stored_ms(1_500, "boot-0") is None
        assert d.engine.stored_ms(0, "boot-1") is None


TIMES = st.sampled_from([0.0, 0.5, 1.0, 2.0, 2.5, 4.0, 11.0, 20.0])


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(TIMES, min_size=1, max_size=8),
    ends=st.lists(TIMES, max_size=5),
)
def test_whoever_comes_earlier_gets_what_is_free_earlier(
    arrivals: list[float], ends: list[float]
) -> None:
    left = sorted(ends)
    expected = []
    for number, when in enumerate(sorted(arrivals)):
        if left and left[0] <= when + DEFAULT_CAPACITY_WAIT - ANSWER_MARGIN:
            expected.append((f"c{number}", max(when, left.pop(0))))

    async def main() -> None:
        async with desk() as d:
            addresses = await fill(d, "10.0.0.0/29")
            for address, end in zip(addresses, ends, strict=False):
                d.cool(address, end)
            for number, when in enumerate(sorted(arrivals)):
                await trio.sleep_until(when)
                await d.queue(owner(f"c{number}"), IPV4)
        assert d.served == expected
        assert len(d.served) + len(d.refused) == len(arrivals)

    trio.run(main, clock=MockClock(autojump_threshold=0))


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(TIMES, st.sampled_from(["four", "six", "dual"])),
        min_size=1,
        max_size=8,
    ),
    ends4=st.lists(TIMES, max_size=5),
    ends6=st.lists(TIMES, max_size=5),
)
def test_calls_for_the_same_families_are_served_in_the_order_of_arrival(
    arrivals: list[tuple[float, str]], ends4: list[float], ends6: list[float]
) -> None:
    kinds = {"four": (IPV4,), "six": (IPV6,), "dual": (IPV4, IPV6)}

    async def main() -> None:
        async with desk() as d:
            four = await fill(d, "10.0.0.0/29")
            six = await fill(d, "fd00::/125")
            for address, end in zip(four + six, ends4, strict=False):
                d.cool(address, end)
            for address, end in zip(six, ends6, strict=False):
                d.cool(address, end)
            for number, (when, kind) in enumerate(sorted(arrivals)):
                await trio.sleep_until(when)
                await d.queue(owner(f"{kind}-{number}"), *kinds[kind])
        for kind in kinds:
            order = [who for who, _ in d.served if who.startswith(kind)]
            assert order == sorted(order)
        assert len(d.served) + len(d.refused) == len(arrivals)
        # Nobody waits longer than it may.
        ends = d.served + [(who, when) for who, when, _ in d.refused]
        for who, when in ends:
            came, _ = sorted(arrivals)[int(who[-1])]
            assert came <= when <= came + DEFAULT_CAPACITY_WAIT - ANSWER_MARGIN

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def test_all_that_waits_is_seen_by_nobody_once_it_is_over(
    autojump_clock: MockClock,
) -> None:
    async with desk() as d:
        first, *_ = await fill(d, "10.0.0.0/29")
        d.cool(first, 3)
        await d.queue(owner("c1"), IPV4)
        assert d.engine.statistics().waiting == {("default", Family.IPV4): 1}
    assert d.engine._lines == {}
    assert d.engine._calls == {}
