"""Allocation against a model: any order of calls, every address foretold."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from metis.errors import InvalidRequest, PoolExhausted
from metis.model import CIDRBlock, Family, Owner, Pod, Wanted
from metis.store.blocks import add_block
from metis.store.sql import allocate, held, release
from metis.store.usage import usage
from tests.store.databases import START_MS, check_invariants, memory_connection

COOLDOWN_MS = 1_000

BLOCKS = {
    Family.IPV4: ["10.0.0.0/29", "10.0.1.4/30", "10.0.0.0/30", "10.0.2.1/32"],
    Family.IPV6: ["fd00::/126", "fd00:1::/127", "fd00::/125", "fd00:2::9/128"],
}

owners = st.builds(
    Owner,
    # Few enough that they come back, and more than a small pool serves.
    st.sampled_from(["net-a", "net-a", "net-b"]),
    st.sampled_from(["c1", "c2", "c3", "c4"]),
    st.just("eth0"),
) | st.just(Owner("net-a", "c1", "net1"))


def wanted_of(family: Family) -> st.SearchStrategy[Wanted]:
    blocks = st.sampled_from([CIDRBlock.parse(cidr) for cidr in BLOCKS[family]])
    return st.builds(Wanted, st.just(family), st.none() | blocks)


wanted_lists = st.one_of(
    st.tuples(wanted_of(Family.IPV4)),
    st.tuples(wanted_of(Family.IPV6)),
    st.tuples(wanted_of(Family.IPV4), wanted_of(Family.IPV6)),
)


@dataclass
class ModelAddress:
    """An address of the model; `order` is its place among those of its block."""

    text: str
    order: int
    owner: Owner | None = None
    former: Owner | None = None
    release_at: int | None = None


@dataclass
class ModelBlock:
    """A block of the model, with all the addresses that a pod may get."""

    range: CIDRBlock
    ready: bool = True
    addresses: list[ModelAddress] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.addresses = [
            ModelAddress(self.range.address_at(offset), offset)
            for offset in range(self.range.size)
            if not self.range.is_reserved(offset)
        ]

    def free(self, now_ms: int) -> list[ModelAddress]:
        """What it would give, in the order in which it would."""
        free = [
            address
            for address in self.addresses
            if address.owner is None and (address.release_at or 0) <= now_ms
        ]
        return sorted(free, key=lambda a: (a.release_at or 0, a.order))


class Allocations(RuleBasedStateMachine):
    """Small pools on two networks, both families, and a clock that only runs on."""

    @initialize()
    def start(self) -> None:
        self.now_ms = START_MS
        self.connection = memory_connection(COOLDOWN_MS)
        self.blocks: dict[tuple[str, Family], list[ModelBlock]] = {}
        self.add_block("net-a", Family.IPV4, 0)
        self.add_block("net-a", Family.IPV6, 0)

    @rule(owner=owners, wanted=wanted_lists)
    def allocate(self, owner: Owner, wanted: tuple[Wanted, ...]) -> None:
        expected = self._foretell(owner, wanted)
        if not isinstance(expected, list):
            before = self._rows()
            with pytest.raises(expected), self.connection:
                allocate(self.connection, self.now_ms, owner, wanted, Pod())
            assert self._rows() == before
            return
        with self.connection:
            got = allocate(self.connection, self.now_ms, owner, wanted, Pod())
        assert [allocation.address for allocation in got] == expected
        assert [allocation.family for allocation in got] == [
            want.family for want in wanted
        ]

    @rule(owner=owners)
    def release(self, owner: Owner) -> None:
        with self.connection:
            got = release(self.connection, self.now_ms, owner, COOLDOWN_MS)
        mine = self._held(owner)
        assert [allocation.address for allocation in got] == [a.text for _, a in mine]
        for _, address in mine:
            address.owner, address.former = None, owner
            address.release_at = self.now_ms + COOLDOWN_MS

    @rule(owner=owners, wanted=wanted_lists)
    def come_back(self, owner: Owner, wanted: tuple[Wanted, ...]) -> None:
        self.release(owner)
        self.allocate(owner, wanted)

    @rule(wanted=wanted_lists, network=st.sampled_from(["net-a", "net-b"]))
    def allocate_to_everybody(self, wanted: tuple[Wanted, ...], network: str) -> None:
        for container in ("c1", "c2", "c3", "c4"):
            self.allocate(Owner(network, container, "eth0"), wanted)

    @rule(milliseconds=st.sampled_from([0, 1, 400, COOLDOWN_MS]))
    def let_time_pass(self, milliseconds: int) -> None:
        self.now_ms += milliseconds

    @rule(
        network=st.sampled_from(["net-a", "net-b"]),
        family=st.sampled_from(list(Family)),
        number=st.integers(0, 3),
    )
    def add_block(self, network: str, family: Family, number: int) -> None:
        block = CIDRBlock.parse(BLOCKS[family][number])
        added = self._add(self.blocks.setdefault((network, family), []), block)
        try:
            with self.connection:
                add_block(self.connection, self.now_ms, network, block)
        except InvalidRequest:
            assert not added
        else:
            assert added

    @rule(
        cidr=st.sampled_from(list(itertools.chain(*BLOCKS.values()))),
        ready=st.booleans(),
    )
    def set_state(self, cidr: str, ready: bool) -> None:
        with self.connection:
            self.connection.execute(
                "UPDATE cidr_blocks SET state = ? WHERE cidr = ?",
                ("Ready" if ready else "Draining", cidr),
            )
        for blocks in self.blocks.values():
            for block in blocks:
                if block.range.cidr == cidr:
                    block.ready = ready

    @rule(owner=owners)
    def look_at_what_is_held(self, owner: Owner) -> None:
        got = held(self.connection, owner)
        assert [a.address for a in got] == [a.text for _, a in self._held(owner)]

    @rule(
        network=st.sampled_from(["net-a", "net-b"]),
        family=st.sampled_from(list(Family)),
        position=st.integers(1, 4),
    )
    def count(self, network: str, family: Family, position: int) -> None:
        got = usage(self.connection, self.now_ms, network, family, position)
        blocks = self.blocks.get((network, family), [])
        addresses = [address for block in blocks for address in block.addresses]
        assert got.owned == sum(address.owner is not None for address in addresses)
        ends = sorted(
            max(address.release_at or 0, self.now_ms)
            for block in blocks
            if block.ready
            for address in block.addresses
            if address.owner is None
        )
        assert got.cooling == sum(end > self.now_ms for end in ends)
        expected = ends[position - 1] if len(ends) >= position else None
        assert got.next_free_ms == expected

    @invariant()
    def the_database_is_sound(self) -> None:
        check_invariants(self.connection)

    def _foretell(
        self, owner: Owner, wanted: tuple[Wanted, ...]
    ) -> list[str] | type[Exception]:
        """The answer that a call must get; the model takes it over."""
        mine = dict(reversed(self._held(owner)))
        added: list[tuple[list[ModelBlock], ModelBlock]] = []
        picked: list[ModelAddress] = []
        answer: list[str] = []
        failure: type[Exception] | None = None
        for want in wanted:
            if want.family in mine:
                answer.append(mine[want.family].text)
                continue
            blocks = self.blocks.setdefault((owner.network, want.family), [])
            if want.block is not None:
                count = len(blocks)
                if not self._add(blocks, want.block):
                    failure = InvalidRequest
                    break
                if len(blocks) > count:
                    added.append((blocks, blocks[-1]))
            ready = [block for block in blocks if block.ready]
            free = [
                *(a for b in ready for a in b.addresses if self._comes_back(owner, a)),
                *(a for b in ready for a in b.free(self.now_ms)),
            ]
            if free:
                picked.append(free[0])
                answer.append(free[0].text)
            else:
                failure = PoolExhausted
        if failure is not None:
            for blocks, block in added:
                blocks.remove(block)
            return failure
        for address in picked:
            address.owner, address.release_at = owner, None
        return answer

    def _comes_back(self, owner: Owner, address: ModelAddress) -> bool:
        """Whether an owner may have an address again that cools after it."""
        cools = address.owner is None and (address.release_at or 0) > self.now_ms
        return cools and address.former == owner

    def _held(self, owner: Owner) -> list[tuple[Family, ModelAddress]]:
        return [
            (family, address)
            for family in Family
            for block in self.blocks.get((owner.network, family), [])
            for address in block.addresses
            if address.owner == owner
        ]

    @staticmethod
    def _add(blocks: list[ModelBlock], block: CIDRBlock) -> bool:
        if any(present.range == block for present in blocks):
            return True
        if any(present.range.overlaps(block) for present in blocks):
            return False
        blocks.append(ModelBlock(block))
        return True

    def _rows(self) -> list[tuple[object, ...]]:
        return [
            *self.connection.execute("SELECT * FROM cidr_blocks ORDER BY id"),
            *self.connection.execute("SELECT * FROM ip_addresses ORDER BY id"),
        ]


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None
)
