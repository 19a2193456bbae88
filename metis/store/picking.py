"""The next free address of a network: of its blocks, or of a set of ranges.

A block that is served as a whole gives its never-used rows in order, then the
one that has been free for longest. A range that is a part of a block (or has
gaps) does the same within its windows: their rows carry a sort_key, so that the
first never-used one is found in O(log n) however large the block is.

Pure: synchronous functions of a connection, inside the caller's transaction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import apsw

from metis.model import CIDRBlock
from metis.ranges import AddressSet
from metis.store import seeding
from metis.store.blocks import Block, block_of, ready

Picked: TypeAlias = tuple[Block, int, str]
"""(block, row id, address) of an address that may be given."""

_NOT_SPENT_ELSEWHERE = """
      AND NOT EXISTS (
        SELECT 1 FROM ip_addresses AS other
        JOIN cidr_blocks AS block ON block.id = other.cidr_block_id
        WHERE other.address = a.address AND other.cidr_block_id <> ?1
          AND block.network = ?2
          AND (other.container_id <> '' OR other.release_at > ?3))
"""
"""Where the original let blocks overlap: an address that somebody holds in another
block of the network, or that cools there, is passed over."""


def _queries(select: str, order: str) -> tuple[str, str]:
    """A query for one free row of a block, without overlapping blocks and with."""
    head = (
        "SELECT id, address, release_at FROM ip_addresses AS a"
        " WHERE cidr_block_id = ?1 AND is_allocated = FALSE"
    )
    tail = f"{order} LIMIT 1"
    return " ".join((head, select, tail)), " ".join(
        (head, select, _NOT_SPENT_ELSEWHERE, tail)
    )


FIRST_FREE = _queries("", "ORDER BY release_at, id")
"""The head of metis_ip_addresses_by_release: never used, else free for longest."""

FIRST_NEVER_USED_OF_WINDOW = _queries(
    "AND release_at IS NULL AND sort_key IS NOT NULL"
    " AND sort_key >= ?4 AND sort_key <= ?5",
    "ORDER BY sort_key",
)
"""One look-up in metis_ip_addresses_by_key."""

FREE_FOR_LONGEST_OF_WINDOW = _queries(
    "AND release_at <= ?3 AND sort_key IS NOT NULL"
    " AND sort_key >= ?4 AND sort_key <= ?5",
    "ORDER BY release_at, sort_key",
)
"""The same index, past those that have been free for longer in other windows."""


def pick(
    connection: apsw.Connection, now_ms: int, network: str, blocks: list[Block]
) -> Picked | None:
    """The next address of a network's blocks; None when none is free."""
    for block in ready(blocks):
        search = _Search(
            connection, now_ms, network, block, _overlapping(block, blocks)
        )
        picked = search.whole(block.range.reserved_offsets)
        if picked is not None:
            return block, *picked
    return None


def pick_of_set(
    connection: apsw.Connection,
    now_ms: int,
    network: str,
    blocks: list[Block],
    ranges: AddressSet,
) -> Picked | None:
    """The next address of a set; None when none is free in any alternative.

    The block of an alternative is added to the network when its turn comes.

    Raises:
      InvalidRequest: it overlaps another of the network in part.
    """
    for one in ranges.alternatives:
        block = block_of(connection, now_ms, network, blocks, one.block, replacing=True)
        if not ready([block]):
            continue
        at = one.gateway_offset
        if at is not None and not block.range.is_reserved(at):
            address = block.range.address_at(at)
            seeding.set_aside(connection, now_ms, block.id, address)
        search = _Search(
            connection, now_ms, network, block, _overlapping(block, blocks)
        )
        if one.is_whole:
            picked = search.whole(one.reserved_offsets)
        else:
            picked = search.windows(one.windows)
        if picked is not None:
            return block, *picked
    return None


@dataclass(slots=True)
class _Search:
    """A search for a free address of one block."""

    connection: apsw.Connection
    now_ms: int
    network: str
    block: Block
    overlapping: list[CIDRBlock]

    def whole(self, reserved: Sequence[int]) -> tuple[int, str] | None:
        """(row id, address) of the next address of all of the block.

        Args:
          reserved: offsets that no pod may get.
        """
        block, seeded_ips = self.block, self.block.seeded_ips
        while True:
            found = self._first(FIRST_FREE)
            row_id, address, release_at = found or (0, "", math.inf)
            grows = (seeded_ips or 0) < seeding.ROTATION
            if release_at is not None and (grows or release_at > self.now_ms):
                stop = seeding.extend(
                    self.connection,
                    self.now_ms,
                    block.id,
                    block.range,
                    seeded_ips,
                    reserved,
                )
                if stop is not None:
                    seeded_ips = stop
                    continue
                if release_at > self.now_ms:
                    return None
            if not self._is_refused(address, reserved):
                return row_id, address
            seeding.reserve(self.connection, self.now_ms, block.id, address)

    def windows(self, windows: Sequence[tuple[int, int]]) -> tuple[int, str] | None:
        """(row id, address) of the next address of parts of the block.

        Args:
          windows: offsets of their first and last addresses.
        """
        while True:
            found = self._next_of_windows(
                [
                    (
                        self.block.range.address_at(first),
                        self.block.range.address_at(last),
                    )
                    for first, last in windows
                ]
            )
            if found is None or not self._is_refused(found[1], ()):
                return found
            seeding.reserve(self.connection, self.now_ms, self.block.id, found[1])

    def _next_of_windows(
        self, windows: Sequence[tuple[str, str]]
    ) -> tuple[int, str] | None:
        for limit in (seeding.ROTATION, math.inf):
            for first, last in windows:
                found = self._never_used(first, last, limit)
                if found is not None:
                    return found
            released = [
                row
                for first, last in windows
                if (row := self._first(FREE_FOR_LONGEST_OF_WINDOW, first, last))
            ]
            if released:
                return min(released, key=lambda row: cast("int", row[2]))[:2]
        return None

    def _never_used(
        self, first: str, last: str, limit: float
    ) -> tuple[int, str] | None:
        """The first never-used address of a window, which grows up to a limit."""
        while True:
            found = self._first(FIRST_NEVER_USED_OF_WINDOW, first, last)
            if found is not None:
                return found[:2]
            if not seeding.extend_window(
                self.connection, self.now_ms, self.block.id, first, last, limit
            ):
                return None

    def _first(
        self, queries: tuple[str, str], *window: str
    ) -> tuple[int, str, int | None] | None:
        """(row id, address, release_at) of the row that a query finds."""
        if window or self.overlapping:
            keys = map(seeding.key_of, window)
            bound = (self.block.id, self.network, self.now_ms, *keys)
        else:
            bound = (self.block.id,)
        row = self.connection.execute(queries[bool(self.overlapping)], bound).fetchone()
        return cast("tuple[int, str, int | None] | None", row)

    def _is_refused(self, address: str, reserved: Sequence[int]) -> bool:
        """Whether a free row may never be given, though it looks free.

        Rows of the original can lie outside their block or be reserved by our rule;
        where its blocks overlap, an address must be reserved in none of them.
        """
        offset = self.block.range.offset_of(address)
        if offset is None or offset in reserved:
            return True
        return any(
            (offset := other.offset_of(address)) is not None
            and other.is_reserved(offset)
            for other in self.overlapping
        )


def _overlapping(block: Block, blocks: list[Block]) -> list[CIDRBlock]:
    """The ranges of the other blocks that share an address with a block."""
    return [
        other.range
        for other in blocks
        if other is not block and other.range.overlaps(block.range)
    ]
