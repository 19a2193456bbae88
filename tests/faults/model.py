"""The rules of docs/addresses.md over plain lists: what an answer may be.

Written from the documentation and not from the SQL. Where that leaves a choice (of
addresses given back in the same millisecond) the model allows each of them, and
takes over the one that was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from metis.errors import AddressTaken, InvalidRequest, OwnerDeleted, PoolExhausted
from metis.model import Allocation, CIDRBlock, Family, Owner, Pod, Wanted
from metis.ranges import AddressRange

Network = tuple[str, Family]


@dataclass(eq=False)
class Address:
    """One address that a pod may get; times are stored times in milliseconds.

    Attributes:
      offset: where it stands in its block.
      release_at: the end of the last cooldown; None when it was never used.
      former: who gave it back last, and for which pod.
    """

    text: str
    offset: int
    owner: Owner | None = None
    pod: Pod | None = None
    allocation_id: str = ""
    allocated_at: int = 0
    release_at: int | None = None
    former: Owner | None = None
    former_pod: Pod | None = None

    def is_free(self, now_ms: int) -> bool:
        return self.owner is None and (self.release_at or 0) <= now_ms


@dataclass(eq=False)
class Block:
    """A CIDR block with all its addresses for pods."""

    range: CIDRBlock
    ready: bool = True
    addresses: list[Address] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.addresses = [
            Address(self.range.address_at(offset), offset)
            for offset in range(self.range.size)
            if not self.range.is_reserved(offset)
        ]

    def next(self, now_ms: int, part: AddressRange | None = None) -> set[str]:
        """What may be given next, of all of it or of a part: one of these."""
        own = [a for a in self.addresses if part is None or part.contains(a.offset)]
        free = [a for a in own if a.is_free(now_ms)]
        fresh = [a for a in free if a.release_at is None]
        if fresh:
            return {fresh[0].text}
        longest = min((a.release_at or 0 for a in free), default=0)
        return {a.text for a in free if a.release_at == longest}


@dataclass
class Expected:
    """What a call must answer: an error, or one out of each set.

    `blocks` is what the networks have afterwards, if it succeeds.
    """

    error: type[Exception] | None
    choices: list[set[str]]
    blocks: dict[Network, list[Block]]


@dataclass
class Model:
    """Networks, their blocks, and who was deleted when."""

    cooldown_ms: int
    now_ms: int
    blocks: dict[Network, list[Block]] = field(default_factory=dict)
    deleted: dict[Owner, int] = field(default_factory=dict)

    def addresses(self) -> Iterator[tuple[str, Block, Address]]:
        for (network, _), blocks in self.blocks.items():
            for block in blocks:
                for address in block.addresses:
                    yield network, block, address

    def held(self, owner: Owner) -> list[tuple[Family, Address]]:
        return [
            (block.range.family, address)
            for network, block, address in self.addresses()
            if network == owner.network and address.owner == owner
        ]

    def expect(
        self,
        owner: Owner,
        wanted: Sequence[Wanted],
        pod: Pod,
        *,
        sticky: bool,
        started_ms: int,
    ) -> Expected:
        """What a call must answer that is tried now."""
        if started_ms <= self.deleted.get(owner, -1):
            return Expected(OwnerDeleted, [], {})
        changed: dict[Network, list[Block]] = {}
        choices: list[set[str]] = []
        for want in wanted:
            key = owner.network, want.family
            blocks = changed.setdefault(key, list(self.blocks.get(key, ())))
            try:
                choices.append(self._choices(owner, want, pod, sticky, blocks))
            except (InvalidRequest, AddressTaken) as error:
                return Expected(type(error), [], {})
        return Expected(None if all(choices) else PoolExhausted, choices, changed)

    def is_assured(self, owner: Owner, want: Wanted, pod: Pod, sticky: bool) -> bool:
        """Whether an entry need not wait behind other calls."""
        blocks = self.blocks.get((owner.network, want.family), [])
        if want.ranges is not None:
            named = {one.block for one in want.ranges.alternatives}
        else:
            named = set() if want.block is None else {want.block}
        return (
            want.address is not None
            or self._held_for(owner, want) is not None
            or not named <= {block.range for block in blocks}
            or bool(self._had(owner, want, pod, sticky, blocks))
        )

    def give(
        self, owner: Owner, pod: Pod, got: Sequence[Allocation], expected: Expected
    ) -> None:
        """A call was answered with one out of each set of `expected`."""
        self.blocks.update(expected.blocks)
        for one, choices in zip(got, expected.choices, strict=True):
            assert one.address in choices, f"{one.address}, not one of {choices}"
            address = self._find(owner.network, one)
            if address.owner != owner:
                address.owner, address.pod, address.release_at = owner, pod, None
            address.allocated_at = self.now_ms
            address.allocation_id = one.allocation_id

    def delete(self, owner: Owner, arrived_ms: int | None) -> set[str]:
        """A DEL that arrived now or earlier; returns what it releases."""
        deleted_at = self.now_ms if arrived_ms is None else arrived_ms
        released = [a for _, a in self.held(owner) if a.allocated_at <= deleted_at]
        self._release(released)
        self.deleted[owner] = max(deleted_at, self.deleted.get(owner, 0))
        return {a.text for a in released}

    def give_back(self, owner: Owner, allocation_id: str) -> set[str]:
        """What nobody learned of; returns what is released."""
        mine = [a for _, a in self.held(owner) if a.allocation_id == allocation_id]
        self._release(mine)
        return {a.text for a in mine}

    def collect(
        self, network: str, kept: Set[tuple[str, str]], taken_at: int
    ) -> set[tuple[Owner, str]]:
        """A GC with a list that was taken at a time; returns what is released."""
        gone = [
            (address.owner, address)
            for of, _, address in self.addresses()
            if of == network
            and address.owner is not None
            and (address.owner.container_id, address.owner.interface_name) not in kept
            and address.allocated_at <= taken_at
        ]
        self._release(address for _, address in gone)
        for owner, _ in gone:
            self.deleted[owner] = max(taken_at, self.deleted.get(owner, 0))
        return {(owner, address.text) for owner, address in gone}

    def add_block(self, network: str, block: CIDRBlock) -> bool:
        """Add a block; False where it overlaps another."""
        blocks = self.blocks.setdefault((network, block.family), [])
        return self._has(blocks, block)

    def reboot(self, now_ms: int) -> None:
        """Every owner is gone, and free at once; no cooldown is longer than one."""
        self.now_ms = now_ms
        self.deleted.clear()
        for _, _, address in self.addresses():
            if address.release_at is not None:
                address.release_at = min(address.release_at, now_ms + self.cooldown_ms)
        self._release((a for _, _, a in self.addresses() if a.owner), rest_ms=0)

    def _release(
        self, addresses: Iterator[Address] | Sequence[Address], rest_ms: int = -1
    ) -> None:
        rest_ms = self.cooldown_ms if rest_ms < 0 else rest_ms
        for address in addresses:
            address.former, address.former_pod = address.owner, address.pod
            address.owner, address.pod, address.allocation_id = None, None, ""
            address.allocated_at = 0
            address.release_at = self.now_ms + rest_ms

    def _find(self, network: str, one: Allocation) -> Address:
        for block in self.blocks[network, one.family]:
            if block.range.cidr == one.cidr:
                for address in block.addresses:
                    if address.text == one.address:
                        return address
        raise AssertionError(f"{one} is of no block of {network}")

    def _held_for(self, owner: Owner, want: Wanted) -> Address | None:
        for family, address in self.held(owner):
            if want.ranges is None:
                if family is want.family:
                    return address
            elif want.ranges.spans(address.text):
                return address
        return None

    def _choices(
        self, owner: Owner, want: Wanted, pod: Pod, sticky: bool, blocks: list[Block]
    ) -> set[str]:
        """What may answer an entry; empty when nothing is free."""
        held = self._held_for(owner, want)
        if held is not None:
            if want.address not in (None, held.text):
                raise InvalidRequest
            return {held.text}
        if want.block is not None and not self._has(blocks, want.block):
            raise InvalidRequest
        if want.address is not None:
            return {self._requested(owner, want, want.address, blocks)}
        had = self._had(owner, want, pod, sticky, blocks)
        if had:
            return had
        if want.ranges is None:
            each = (block.next(self.now_ms) for block in blocks if block.ready)
            return next((choices for choices in each if choices), set())
        for one in want.ranges.alternatives:
            block = self._replacing(blocks, one.block)
            choices = block.next(self.now_ms, one) if block.ready else set()
            if choices:
                return choices
        return set()

    def _requested(
        self, owner: Owner, want: Wanted, text: str, blocks: list[Block]
    ) -> str:
        """An address that is asked for by name."""
        ready = [block for block in blocks if block.ready]
        if want.ranges is not None:
            one = want.ranges.range_for(text)
            one.check_for_pods(text)
            block = self._replacing(blocks, one.block)
            ready = [block] if block.ready else []
        for block in ready:
            for address in block.addresses:
                if address.text == text:
                    mine = address.former == owner
                    if not address.is_free(self.now_ms) and (address.owner or not mine):
                        raise AddressTaken
                    return text
        raise InvalidRequest

    def _had(
        self, owner: Owner, want: Wanted, pod: Pod, sticky: bool, blocks: list[Block]
    ) -> set[str]:
        """What an owner, or its pod, gave back and gets again."""
        back: list[Address] = []
        for block in blocks:
            for address in block.addresses:
                if address.owner or address.former is None or not block.ready:
                    continue
                if want.ranges is None or any(
                    one.block == block.range and one.contains(address.offset)
                    for one in want.ranges.alternatives
                ):
                    back.append(address)
        mine = {
            a.text for a in back if a.former == owner and not a.is_free(self.now_ms)
        }
        if mine or not (sticky and pod.name):
            return mine
        of_pod = [
            a
            for a in back
            if a.former_pod == pod
            and a.former is not None
            and a.former.interface_name == owner.interface_name
        ]
        latest = max((a.release_at or 0 for a in of_pod), default=0)
        return {a.text for a in of_pod if a.release_at == latest}

    def _replacing(self, blocks: list[Block], wanted: CIDRBlock) -> Block:
        """The block of a range; it takes the place of others that are idle."""
        if all(block.range != wanted for block in blocks):
            blocks[:] = [
                block
                for block in blocks
                if not block.range.overlaps(wanted)
                or not all(a.is_free(self.now_ms) for a in block.addresses)
            ]
        if not self._has(blocks, wanted):
            raise InvalidRequest
        return next(block for block in blocks if block.range == wanted)

    @staticmethod
    def _has(blocks: list[Block], wanted: CIDRBlock) -> bool:
        """Whether a block is there, or could be added and was."""
        if any(block.range == wanted for block in blocks):
            return True
        if any(block.range.overlaps(wanted) for block in blocks):
            return False
        blocks.append(Block(wanted))
        return True
