"""The rules about CIDR blocks: their columns, their counters, and each other.

Pure: synchronous functions of a connection; they write nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import apsw

from metis.model import CIDRBlock
from metis.store.blocks import DELETING, DRAINING, READY, parsed
from metis.store.violations import LATEST_MS, Kind, Shape, Violation

_STATES = (READY, DRAINING, DELETING)

_BLOCKS = """
SELECT id, cidr, network, ip_family, total_ips, state, seeded_ips,
  created_at NOT BETWEEN 0 AND :latest OR updated_at NOT BETWEEN 0 AND :latest
FROM blocks ORDER BY id
"""

_COUNTERS = """
SELECT b.id, b.cidr, b.network, b.allocated_ips, coalesce(taken.count, 0) AS counted
FROM blocks AS b LEFT JOIN (
  SELECT cidr_block_id, count(*) AS count FROM rows WHERE is_allocated = TRUE
  GROUP BY cidr_block_id) AS taken ON taken.cidr_block_id = b.id
WHERE b.allocated_ips IS NOT counted
"""

_IN_DELETING = """
SELECT b.id, b.cidr, b.network, count(*), min(a.address) FROM blocks AS b
CROSS JOIN rows AS a ON a.cidr_block_id = b.id
WHERE b.state = :deleting AND (a.is_allocated = TRUE AND a.container_id > ''
  OR a.is_allocated = FALSE AND a.release_at > :now_ms)
GROUP BY b.id
"""
"""`release_at > NULL` is not true: without a stored time nothing is cooling."""


@dataclass(frozen=True, slots=True)
class Read:
    """A row of cidr_blocks whose range can be read."""

    id: int
    range: CIDRBlock
    network: str
    state: str
    is_original: bool

    def __str__(self) -> str:
        return f"block {self.range.cidr} of network {self.network!r}"


def broken(
    connection: apsw.Connection, shape: Shape, now_ms: int | None
) -> Iterator[Violation]:
    """The rules about blocks that are broken."""
    readable = []
    for (
        block_id,
        cidr,
        network,
        family,
        total,
        state,
        seeded,
        bad_time,
    ) in connection.execute(shape.with_tables + _BLOCKS, {"latest": LATEST_MS}):
        is_original = shape.is_original or seeded is None
        where = f"block {cidr} of network {network!r}"
        block = parsed(cidr) if isinstance(cidr, str) else None
        if block is None:
            words = f"block {cidr!r} of network {network!r} is no range of addresses"
            yield Violation(Kind.BLOCK, words, is_warning=is_original)
            continue
        readable.append(Read(block_id, block, network, state, is_original))
        for column, value, right in (
            ("cidr", cidr, block.cidr),
            ("ip_family", family, str(block.family)),
            ("total_ips", total, block.total_ips),
            ("state", state, state if state in _STATES else DRAINING),
        ):
            if value != right:
                yield Violation(
                    Kind.BLOCK,
                    f"{where} has the {column} {value!r} in place of {right!r}",
                    "" if is_original else f"{column} set to {right!r}",
                    column,
                    block_id,
                    right,
                    is_original,
                )
        if bad_time:
            words = f"{where} was made or changed at no time"
            yield Violation(Kind.TIME, words, "set to now", "cidr_blocks", block_id)
    yield from _overlaps(readable)
    bound = {"deleting": DELETING, "now_ms": now_ms}
    for block_id, cidr, network, count, address in connection.execute(
        shape.with_tables + _IN_DELETING, bound
    ):
        yield Violation(
            Kind.DELETING,
            f"block {cidr} of network {network!r} is Deleting, but {count} of its"
            f" addresses are owned or cooling, {address} the first",
            "set to Draining",
            row_id=block_id,
        )
    for block_id, cidr, network, counter, count in connection.execute(
        shape.with_tables + _COUNTERS
    ):
        yield Violation(
            Kind.COUNTER,
            f"block {cidr} of network {network!r} counts {counter} allocated"
            f" addresses, and has {count}",
            f"set to {count}",
            row_id=block_id,
            value=count,
        )


def _overlaps(blocks: list[Read]) -> Iterator[Violation]:
    """Pairs of blocks of one network that share addresses.

    Where one of the two gives none any more, nothing can be given twice.
    """
    networks = defaultdict(list)
    for block in blocks:
        networks[block.network, block.range.family].append(block)
    for of_network in networks.values():
        reach: list[Read] = []  # those that go on where the next one begins
        for block in sorted(of_network, key=lambda block: block.range.first):
            reach = [one for one in reach if _end(one.range) > block.range.first]
            for other in reach:
                yield _overlap(*sorted((block, other), key=lambda one: one.id))
            reach.append(block)


def _overlap(older: Read, newer: Read) -> Violation:
    both_give = older.state == newer.state == READY
    is_warning = older.is_original or newer.is_original or not both_give
    contained = older.range.first <= newer.range.first and (
        _end(newer.range) <= _end(older.range)
    )
    return Violation(
        Kind.OVERLAP,
        f"{newer} ({newer.state}) shares addresses with the older {older.range.cidr}"
        f" ({older.state})",
        "set to Draining" if contained and not is_warning else "",
        row_id=newer.id,
        is_warning=is_warning,
    )


def _end(block: CIDRBlock) -> int:
    return block.first + block.size
