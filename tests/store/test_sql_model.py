"""Allocation against a model: any order of calls, every address foretold."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from metis.errors import InvalidRequest, PoolExhausted
from metis.model import Allocation, CIDRBlock, Family, Owner, Pod, Wanted
from metis.ranges import AddressRange, AddressSet
from metis.store import seeding
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


PODS = {name: Pod(f"p{name}", "ns") for name in ("1", "2")}
"""The pods; a container is of the one whose number it has, modulo 2."""


def wanted_of(family: Family) -> st.SearchStrategy[Wanted]:
    blocks = st.sampled_from([CIDRBlock.parse(cidr) for cidr in BLOCKS[family]])
    return st.builds(Wanted, st.just(family), st.none() | blocks)


def parse_set(*ranges: tuple[str, str, str, str]) -> AddressSet:
    """A set of (subnet, first, last, excluded)."""
    return AddressSet(
        tuple(
            AddressRange.parse(subnet, first, last, exclude=gap.split())
            for subnet, first, last, gap in ranges
        )
    )


SETS = {
    Family.IPV4: [
        parse_set(("10.0.0.0/29", "10.0.0.4", "10.0.0.5", "")),
        parse_set(("10.0.0.0/29", "", "", "10.0.0.3"), ("10.0.1.4/30", "", "", "")),
        parse_set(
            ("10.0.2.1/32", "", "", ""), ("10.0.0.0/29", "10.0.0.2", "10.0.0.3", "")
        ),
        parse_set(("10.0.0.0/29", "", "", "")),
        parse_set(
            ("10.0.3.0/29", "10.0.3.6", "", ""), ("10.0.3.0/29", "", "10.0.3.2", "")
        ),
        parse_set(("10.0.0.0/30", "", "", ""), ("10.0.1.4/30", "", "", "")),
    ],
    Family.IPV6: [
        parse_set(
            ("fd00::/126", "fd00::3", "", ""), ("fd00:3::/125", "", "fd00:3::4", "")
        ),
        parse_set(("fd00:3::/125", "fd00:3::5", "fd00:3::6", "")),
        parse_set(("fd00:1::/127", "", "", ""), ("fd00:2::9/128", "", "", "")),
    ],
}
"""Parts of blocks, blocks with gaps, whole ones and alternatives."""


def wanted_out_of(family: Family) -> st.SearchStrategy[Wanted]:
    return st.builds(Wanted.out_of, st.sampled_from(SETS[family]))


def are_disjoint(wanted: tuple[Wanted, ...]) -> bool:
    first, second = (want.ranges for want in wanted)
    assert first is not None
    assert second is not None
    pairs = itertools.product(first.alternatives, second.alternatives)
    return not any(one.overlaps(other) for one, other in pairs)


wanted_lists: st.SearchStrategy[tuple[Wanted, ...]] = st.one_of(
    st.tuples(wanted_of(Family.IPV4)),
    st.tuples(wanted_of(Family.IPV6)),
    st.tuples(wanted_of(Family.IPV4), wanted_of(Family.IPV6)),
    st.tuples(wanted_out_of(Family.IPV4)),
    st.tuples(wanted_out_of(Family.IPV6), wanted_out_of(Family.IPV4)),
    st.tuples(wanted_out_of(Family.IPV4), wanted_out_of(Family.IPV4)).filter(
        are_disjoint
    ),
)


@dataclass
class ModelAddress:
    """An address of the model.

    `order` is its place among those of its block, `row` among the rows that the
    database has made, as long as it has made one.
    """

    text: str
    order: int
    row: int | None = None
    owner: Owner | None = None
    pod: Pod | None = None
    former: Owner | None = None
    former_pod: Pod | None = None
    release_at: int | None = None

    def is_free(self, now_ms: int) -> bool:
        return self.owner is None and (self.release_at or 0) <= now_ms


@dataclass
class ModelBlock:
    """A block of the model, with all the addresses that a pod may get."""

    range: CIDRBlock
    rows: itertools.count[int]
    ready: bool = True
    addresses: list[ModelAddress] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.addresses = [
            ModelAddress(self.range.address_at(offset), offset)
            for offset in range(self.range.size)
            if not self.range.is_reserved(offset)
        ]

    def next_of_all(self, now_ms: int) -> ModelAddress | None:
        """What it gives when it is served as a whole."""
        if not any(a.row is not None and self._is_new(a) for a in self.addresses):
            self._make_rows(self.addresses)
        free = [a for a in self.addresses if a.row is not None and a.is_free(now_ms)]
        return min(free, key=lambda a: (a.release_at or 0, a.row or 0), default=None)

    def next_of(self, one: AddressRange, now_ms: int) -> ModelAddress | None:
        """What it gives of a range."""
        if one.is_whole:
            return self.next_of_all(now_ms)
        for first, last in one.windows:
            window = self.addresses_in(one, first, last)
            if not any(a.row is not None and self._is_new(a) for a in window):
                self._make_rows(window)
            for address in window:
                if self._is_new(address):
                    return address
        free = [a for a in self.addresses_in(one) if a.is_free(now_ms)]
        return min(free, key=lambda a: (a.release_at or 0, a.order), default=None)

    def addresses_in(
        self, one: AddressRange, first: int = 0, last: int = 1 << 32
    ) -> list[ModelAddress]:
        return [
            a
            for a in self.addresses
            if first <= a.order <= last and one.contains(a.order)
        ]

    def _make_rows(self, addresses: list[ModelAddress]) -> None:
        for address in addresses:
            if address.row is None:
                address.row = next(self.rows)

    @staticmethod
    def _is_new(address: ModelAddress) -> bool:
        return address.owner is None and address.release_at is None


class Allocations(RuleBasedStateMachine):
    """Small pools on two networks, both families, and a clock that only runs on."""

    @initialize()
    def start(self) -> None:
        self.now_ms = START_MS
        self.connection = memory_connection(COOLDOWN_MS)
        self.rows = itertools.count()
        self.ids: set[str] = set()
        self.blocks: dict[tuple[str, Family], list[ModelBlock]] = {}
        self.add_block("net-a", Family.IPV4, 0)
        self.add_block("net-a", Family.IPV6, 0)

    @rule(owner=owners, wanted=wanted_lists, sticky=st.booleans())
    def allocate(self, owner: Owner, wanted: tuple[Wanted, ...], sticky: bool) -> None:
        pod = PODS[str(1 + int(owner.container_id[1:]) % 2)]
        before, untouched = copy.deepcopy((self.blocks, self.rows)), self._rows()
        expected = self._foretell(owner, wanted, pod, sticky)
        if not isinstance(expected, list):
            self.blocks, self.rows = before
            with pytest.raises(expected), self.connection:
                self._allocate(owner, wanted, pod, sticky)
            assert self._rows() == untouched
            return
        with self.connection:
            got = self._allocate(owner, wanted, pod, sticky)
        assert [allocation.address for allocation in got] == expected
        assert [allocation.family for allocation in got] == [
            want.family for want in wanted
        ]
        ids = {allocation.allocation_id for allocation in got}
        assert len(ids) == 1
        assert not ids & self.ids
        self.ids |= ids

    def _allocate(
        self, owner: Owner, wanted: tuple[Wanted, ...], pod: Pod, sticky: bool
    ) -> tuple[Allocation, ...]:
        return allocate(self.connection, self.now_ms, owner, wanted, pod, sticky=sticky)

    @rule(owner=owners)
    def release(self, owner: Owner) -> None:
        with self.connection:
            got = release(self.connection, self.now_ms, owner, COOLDOWN_MS)
        mine = self._held(owner)
        assert [allocation.address for allocation in got] == [a.text for _, a in mine]
        for _, address in mine:
            address.owner, address.former = None, owner
            address.former_pod, address.pod = address.pod, None
            address.release_at = self.now_ms + COOLDOWN_MS

    @rule(owner=owners, wanted=wanted_lists)
    def come_back(self, owner: Owner, wanted: tuple[Wanted, ...]) -> None:
        self.release(owner)
        self.allocate(owner, wanted, sticky=False)

    @rule(owner=owners, wanted=wanted_lists)
    def come_back_as_another_container(
        self, owner: Owner, wanted: tuple[Wanted, ...]
    ) -> None:
        self.release(owner)
        other = 1 + (int(owner.container_id[1:]) + 1) % 4
        again = Owner(owner.network, f"c{other}", owner.interface_name)
        self.allocate(again, wanted, sticky=True)

    @rule(wanted=wanted_lists, network=st.sampled_from(["net-a", "net-b"]))
    def allocate_to_everybody(self, wanted: tuple[Wanted, ...], network: str) -> None:
        for container in ("c1", "c2", "c3", "c4"):
            self.allocate(Owner(network, container, "eth0"), wanted, sticky=False)

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
        number=st.none() | st.integers(0, 5),
    )
    def count(
        self, network: str, family: Family, position: int, number: int | None
    ) -> None:
        if number is not None:
            self._count_set(
                network, family, position, SETS[family][number % len(SETS[family])]
            )
            return
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

    def _count_set(
        self, network: str, family: Family, position: int, ranges: AddressSet
    ) -> None:
        got = usage(self.connection, self.now_ms, network, family, position, ranges)
        blocks = self.blocks.get((network, family), [])
        ends: list[int] = []
        for one in ranges.alternatives:
            block = next((b for b in blocks if b.range == one.block), None)
            if block is None:
                block = ModelBlock(one.block, itertools.count())
            elif not block.ready:
                continue
            ends += [
                max(address.release_at or 0, self.now_ms)
                for address in block.addresses_in(one)
                if address.owner is None
            ]
        ends.sort()
        expected = ends[position - 1] if len(ends) >= position else None
        if got.next_free_ms != expected:  # it may hope, until it has tried
            assert got.next_free_ms is not None
            assert expected is None or got.next_free_ms < expected
            assert not self._was_tried(network, family, ranges)

    def _was_tried(self, network: str, family: Family, ranges: AddressSet) -> bool:
        """Whether every part of the set's blocks has been filled as such."""
        windows = {
            (
                seeding.key_of(block.address_at(first)),
                seeding.key_of(block.address_at(last)),
                block.cidr,
            )
            for one in ranges.alternatives
            if not one.is_whole
            for block in [one.block]
            for first, last in one.windows
        }
        filled = self.connection.execute(
            "SELECT w.first_key, w.last_key, b.cidr FROM metis_windows AS w"
            " JOIN cidr_blocks AS b ON b.id = w.cidr_block_id"
            " WHERE b.network = ? AND b.ip_family = ?",
            (network, family),
        )
        return windows <= set(filled.fetchall())

    def _foretell(
        self, owner: Owner, wanted: tuple[Wanted, ...], pod: Pod, sticky: bool
    ) -> list[str] | type[Exception]:
        """The answer that a call must get; the model takes it over."""
        answer: list[str] = []
        failure: type[Exception] | None = None
        for want in wanted:
            mine = [
                address
                for family, address in self._held(owner)
                if self._is_of(want, family, address)
            ]
            try:
                found = mine[0] if mine else self._next(owner, want, pod, sticky)
            except InvalidRequest:
                return InvalidRequest
            if found is None:
                failure = PoolExhausted
                continue
            if not mine:
                found.owner, found.pod, found.release_at = owner, pod, None
            answer.append(found.text)
        return failure or answer

    def _next(
        self, owner: Owner, want: Wanted, pod: Pod, sticky: bool
    ) -> ModelAddress | None:
        """What an owner gets that does not hold it already."""
        blocks = self.blocks.setdefault((owner.network, want.family), [])
        if want.block is not None and not self._add(blocks, want.block):
            raise InvalidRequest
        former = self._former(owner, want, pod if sticky else None, blocks)
        if former is not None:
            return former
        if want.ranges is None:
            ready = (block.next_of_all(self.now_ms) for block in blocks if block.ready)
            return next((address for address in ready if address), None)
        for one in want.ranges.alternatives:
            if all(present.range != one.block for present in blocks):
                self._drop_idle(blocks, one.block)
            if not self._add(blocks, one.block):
                raise InvalidRequest
            block = next(block for block in blocks if block.range == one.block)
            found = block.next_of(one, self.now_ms) if block.ready else None
            if found is not None:
                return found
        return None

    def _former(
        self, owner: Owner, want: Wanted, pod: Pod | None, blocks: list[ModelBlock]
    ) -> ModelAddress | None:
        """What an owner or its pod had, in the order in which it is preferred."""
        mine: list[tuple[tuple[int, int, int], ModelAddress]] = []
        for number, block in enumerate(blocks):
            for address in block.addresses:
                if address.owner or address.former is None or not block.ready:
                    continue
                if want.ranges and not any(
                    one.block == block.range and one.contains(address.order)
                    for one in want.ranges.alternatives
                ):
                    continue
                row, end = address.row or 0, address.release_at or 0
                if address.former == owner and end > self.now_ms:
                    mine.append(((-1 << 62, number, row), address))
                elif (address.former_pod, address.former.interface_name) == (
                    pod,
                    owner.interface_name,
                ):
                    mine.append(((-end, row, 0), address))
        return min(mine, default=(None, None), key=lambda pair: pair[0])[1]

    @staticmethod
    def _is_of(want: Wanted, family: Family, address: ModelAddress) -> bool:
        if want.ranges is None:
            return family is want.family
        return want.ranges.spans(address.text)

    def _held(self, owner: Owner) -> list[tuple[Family, ModelAddress]]:
        held = [
            (family, address)
            for family in Family
            for block in self.blocks.get((owner.network, family), [])
            for address in block.addresses
            if address.owner == owner
        ]
        return sorted(held, key=lambda pair: (pair[0], pair[1].row or 0))

    def _add(self, blocks: list[ModelBlock], block: CIDRBlock) -> bool:
        if any(present.range == block for present in blocks):
            return True
        if any(present.range.overlaps(block) for present in blocks):
            return False
        blocks.append(ModelBlock(block, self.rows))
        return True

    def _drop_idle(self, blocks: list[ModelBlock], wanted: CIDRBlock) -> None:
        blocks[:] = [
            block
            for block in blocks
            if not block.range.overlaps(wanted)
            or not all(address.is_free(self.now_ms) for address in block.addresses)
        ]

    def _rows(self) -> list[tuple[object, ...]]:
        return [
            *self.connection.execute("SELECT * FROM cidr_blocks ORDER BY id"),
            *self.connection.execute("SELECT * FROM ip_addresses ORDER BY id"),
        ]


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None
)
