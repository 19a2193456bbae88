"""Which address, and for whom: the rules of allocation as SQL.

Every function is synchronous, takes a connection and the stored time in
milliseconds, and runs inside a transaction that the caller has begun, so its
writes stand or fall as one. Pure: no clock, no thread, no commit.

A row of `ip_addresses` is in one of four states:

  never used  is_allocated FALSE, release_at NULL
  cooling     is_allocated FALSE, release_at in the future; free once it passed
  owned       is_allocated TRUE, container_id names the owner
  reserved    is_allocated TRUE, container_id empty

and `cidr_blocks.allocated_ips` counts the last two. A block gets its rows in
batches, from the network address upwards, when the rows it has do not suffice
(see `metis.store.seeding`).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

import apsw

from metis.errors import InvalidRequest, PoolExhausted
from metis.model import Allocation, Owner, Pod, Wanted
from metis.ranges import check_disjoint
from metis.store import claims, deletions, seeding
from metis.store.blocks import Block, block_of, read_blocks
from metis.store.holdings import (
    NOWHERE,
    Held,
    Residence,
    give,
    held_rows,
    renew,
    take_back,
)
from metis.store.picking import Picked, pick, pick_of_set
from metis.store.usage import shortage

_ALLOCATION_ID_BYTES = 8
"""Random bytes of an allocation id. It is compared only with those of the same
owner, so 2^64 of them are for ever."""

DELETED = "deleted"
GIVEN_BACK = "given back"
"""Reasons of an end for the history: a DEL, and an ADD that nobody waited for."""

_IS_KNOWN = """
SELECT EXISTS (SELECT 1 FROM ip_addresses
    WHERE container_id = ?1 AND interface_name = ?2)
  OR EXISTS (SELECT 1 FROM metis_former_owners
    WHERE container_id = ?1 AND interface_name = ?2)
  OR EXISTS (SELECT 1 FROM metis_deleted_owners
    WHERE container_id = ?1 AND interface_name = ?2)
"""
"""Whether anything is known of an owner, on whatever network. As a rule there is
nothing, and one look saves three."""


def held(connection: apsw.Connection, owner: Owner) -> tuple[Allocation, ...]:
    """What an owner holds, whatever the state of its block; IPv4 first."""
    return tuple(row.allocation for row in held_rows(connection, owner))


def allocate(
    connection: apsw.Connection,
    now_ms: int,
    owner: Owner,
    wanted: Sequence[Wanted],
    pod: Pod,
    *,
    sticky: bool = False,
    started_ms: int | None = None,
    residence: Residence = NOWHERE,
) -> tuple[Allocation, ...]:
    """Give an owner the addresses that it asks for.

    What it holds already is answered as it is, so a repeated call takes nothing
    and a call whose other half was missing adds only that. An address to which
    it has a claim (`metis.store.claims`) comes before the next free one.

    Args:
      connection: with a transaction begun; an error leaves it to be rolled back.
      now_ms: the stored time.
      owner: who gets them.
      wanted: one entry a family, or one entry a set of ranges.
      pod: kept with the rows for people, and for its claim where it is sticky.
      sticky: whether the pod is to get what it had last.
      started_ms: when the call began, in stored time; None lets it be of any age.
      residence: where the owner lives.

    Returns:
      One allocation for each entry of `wanted`, in its order. All have the same
      allocation id, which no other call has.

    Raises:
      InvalidRequest: nothing is wanted, two entries could be given the same
        address, a block overlaps another in part, or an address is requested
        that the owner can never get.
      OwnerDeleted: the owner was deleted after the call began.
      AddressTaken: a requested address is another owner's.
      PoolExhausted: an entry has nothing free; of several, the one that stays so
        for longest.
    """
    _check_wanted(wanted)
    key = (owner.container_id, owner.interface_name)
    (is_known,) = connection.execute(_IS_KNOWN, key).fetchall()[0]
    if is_known and started_ms is not None:
        deletions.check(connection, owner, started_ms)
    rows = held_rows(connection, owner) if is_known else []
    allocation_id = secrets.token_bytes(_ALLOCATION_ID_BYTES).hex()
    found: list[Allocation] = []
    shortages = []
    for place, want in enumerate(wanted):
        if rows and (row := _answering(rows, want)) is not None:
            _check_held(row.allocation, want)
            found.append(renew(connection, now_ms, row, allocation_id, residence))
            continue
        blocks = _blocks_for(connection, now_ms, owner.network, want)
        picked = None
        if is_known or sticky or want.address is not None:
            picked = _claimed(
                connection, now_ms, owner, blocks, want, pod if sticky else None
            )
        picked = picked or _picked(connection, now_ms, owner.network, blocks, want)
        if picked is None:
            shortages.append(shortage(connection, now_ms, owner.network, want, place))
        else:
            found.append(
                give(connection, now_ms, owner, pod, allocation_id, *picked, residence)
            )
    if shortages:
        raise max(shortages, key=_wait_for)
    return tuple(found)


def assured(
    connection: apsw.Connection,
    now_ms: int,
    owner: Owner,
    wanted: Sequence[Wanted],
    sticky_pod: Pod | None = None,
) -> frozenset[int]:
    """Places of the entries for which a call need not wait behind others.

    What an owner holds, asks for by name or has a claim to can be nobody else's,
    and a block that the network does not have yet brings addresses of its own.

    Args:
      connection: a reader will do.
      now_ms: the stored time.
      owner: who calls.
      wanted: what it asks for.
      sticky_pod: the owner's pod, where it is to get what it had last.
    """
    rows = held_rows(connection, owner)
    places = set()
    for place, want in enumerate(wanted):
        blocks = read_blocks(connection, owner.network, want.family)
        if (
            want.address is not None
            or _answering(rows, want) is not None
            or _brings_block(blocks, want)
            or claims.find_former(connection, now_ms, owner, blocks, want, sticky_pod)
        ):
            places.add(place)
    return frozenset(places)


def release(
    connection: apsw.Connection,
    now_ms: int,
    owner: Owner,
    cooldown_ms: int,
    *,
    deleted_at: int | None = None,
    allocated_until: int | None = None,
    only_allocation_id: str = "",
) -> tuple[Allocation, ...]:
    """Take back all that an owner holds; it rests for the cooldown.

    Args:
      connection: with a transaction begun.
      now_ms: the stored time.
      owner: whose addresses.
      cooldown_ms: rest in milliseconds before another owner may get them.
      deleted_at: when the owner was deleted, in stored time, to be kept against
        calls that began before; None keeps nothing.
      allocated_until: of what it holds only what it got, or asked for last, until
        this stored time; None for all.
      only_allocation_id: of what it holds only what has this id; empty for all.

    Returns:
      What was released; empty when nothing was held, which is no error.
    """
    rows = [
        row
        for row in held_rows(connection, owner)
        if only_allocation_id in ("", row.allocation.allocation_id)
        and (allocated_until is None or row.allocated_at <= allocated_until)
    ]
    reason = GIVEN_BACK if only_allocation_id else DELETED
    take_back(connection, now_ms, rows, cooldown_ms, reason)
    if deleted_at is not None:
        deletions.record(connection, now_ms, owner, deleted_at)
    return tuple(row.allocation for row in rows)


def _check_wanted(wanted: Sequence[Wanted]) -> None:
    """Refuse a request of which two entries could be given the same address."""
    if len(wanted) == 1:
        return
    sets = [want.ranges for want in wanted if want.ranges is not None]
    if sets and len(sets) == len(wanted):
        check_disjoint(sets)
    elif sets or not wanted or len({want.family for want in wanted}) < len(wanted):
        raise InvalidRequest(
            f"{[str(want.family) for want in wanted]} is wanted: "
            "ask for one address of ipv4, one of ipv6, or one of each"
        )


def _answering(rows: Sequence[Held], want: Wanted) -> Held | None:
    """What an owner holds that is what it asks for."""
    for row in rows:
        held_already = row.allocation
        if want.ranges is not None:
            if want.ranges.spans(held_already.address):
                return row
        elif held_already.family is want.family:
            return row
    return None


def _check_held(held_already: Allocation, want: Wanted) -> None:
    """Refuse an owner that holds an address and asks for another by name."""
    if want.address not in (None, held_already.address):
        raise InvalidRequest(
            f"address {want.address!r} is requested, but the owner holds "
            f"{held_already.address!r}: release that one first"
        )


def _blocks_for(
    connection: apsw.Connection, now_ms: int, network: str, want: Wanted
) -> list[Block]:
    """The blocks of a network, that of a request in the original's form among them."""
    blocks = read_blocks(connection, network, want.family)
    if want.block is not None:
        block_of(connection, now_ms, network, blocks, want.block)
    unknown = [block for block in blocks if block.seeded_ips is None]
    if unknown and (want.address or want.ranges):  # which may get rows ahead
        for block in unknown:
            seeding.keep_frontier(connection, now_ms, block.id, block.range)
        blocks = read_blocks(connection, network, want.family)
    return blocks


def _claimed(
    connection: apsw.Connection,
    now_ms: int,
    owner: Owner,
    blocks: list[Block],
    want: Wanted,
    sticky_pod: Pod | None,
) -> Picked | None:
    """An address to which the owner has a claim, if there is one."""
    if want.address is not None:
        return claims.find_requested(
            connection, now_ms, owner, blocks, want, want.address
        )
    return claims.find_former(connection, now_ms, owner, blocks, want, sticky_pod)


def _picked(
    connection: apsw.Connection,
    now_ms: int,
    network: str,
    blocks: list[Block],
    want: Wanted,
) -> Picked | None:
    """The next free address of what is asked for, if there is one."""
    if want.ranges is None:
        return pick(connection, now_ms, network, blocks)
    return pick_of_set(connection, now_ms, network, blocks, want.ranges)


def _brings_block(blocks: list[Block], want: Wanted) -> bool:
    """Whether a request is for a block that the network does not have."""
    if want.ranges is not None:
        wanted = {one.block for one in want.ranges.alternatives}
    else:
        wanted = set() if want.block is None else {want.block}
    return not wanted <= {block.range for block in blocks}


def _wait_for(found: PoolExhausted) -> float:
    return math.inf if found.wait_ms is None else found.wait_ms
