"""A new database made of what is known: from the old one, and from the node.

Any source that says that an address has an owner is believed, since an owner too many
is found out later (`metis reclaim`) and one too few is two pods with one address.

Pure: synchronous functions of a connection, inside the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import apsw

from metis.model import CIDRBlock, Owner, Pod
from metis.store import caution, reboot, seeding
from metis.store.blocks import insert_block, read_blocks
from metis.store.salvage import Found, FoundBlock, FoundRow


@dataclass(frozen=True, slots=True)
class Claim:
    """Somebody who must have an address, by evidence outside of the database.

    Attributes:
      owner: who.
      pod: its names, where they are known.
      block: the block of the address, as far as the evidence tells.
      address: in canonical form.
      netns_path: of the owner's network namespace; empty where it is not known.
    """

    owner: Owner
    pod: Pod
    block: CIDRBlock
    address: str
    netns_path: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What a rebuilt database has.

    Attributes:
      blocks: how many blocks.
      owners: how many addresses with an owner.
      freed: of those, how many had their owner in a former boot.
      adopted: addresses that have an owner by the evidence of the node alone.
      conflicts: addresses that several sources give to several owners, in words.
      cautious_until: until when addresses without an owner wait, in stored time;
        None for not at all.
    """

    blocks: int
    owners: int
    freed: int
    adopted: tuple[str, ...]
    conflicts: tuple[str, ...]
    cautious_until: int | None


def rebuild(
    connection: apsw.Connection,
    founds: Sequence[Found],
    *,
    now_ms: int,
    cautious_until: int | None,
    claims: Sequence[Claim] = (),
) -> Report:
    """Fill a new database with what was found.

    Rows that say no more than a new one would are left out: they are made again
    when they are needed. Counters are counted.

    Args:
      connection: to a database that is whole and empty, in a write transaction.
      founds: what the sources tell, the best first.
      now_ms: the stored time.
      cautious_until: until when every address without an owner waits, in stored
        time; None where nothing is missing.
      claims: who must have an address besides.
    """
    boot_id = _boot_id(connection)
    conflicts: list[str] = []
    block_ids = _insert_blocks(connection, now_ms, founds)
    rows = _merged(founds, boot_id, claims, conflicts)
    latest = now_ms if cautious_until is None else cautious_until
    new_ids: dict[tuple[str, str], int] = {}
    former = _former_owners(founds)
    for (network, address), (block, row) in rows.items():
        note = former.get((network, address))
        if not (
            row.is_allocated
            or (row.release_at or 0) > latest
            or (note is not None and note[2] == row.release_at)
        ):
            continue
        new_ids[network, address] = _insert_row(
            connection, now_ms, block_ids[network, block.cidr], row
        )
    for place, note in former.items():
        row_id = new_ids.get(place)
        if row_id is not None and not rows[place][1].is_allocated:
            connection.execute(
                "INSERT OR IGNORE INTO metis_former_owners VALUES (?, ?, ?, ?, ?, ?)",
                (row_id, note[0], note[1], max(note[2], latest), *note[3:]),
            )
    _insert_notes(connection, founds, boot_id)
    _count(connection)
    freed = reboot.release(connection, now_ms, boot_id)
    adopted, disputed = adopt(connection, now_ms, claims)
    if cautious_until is not None:
        caution.begin(connection, now_ms, cautious_until)
    blocks, owners = connection.execute(
        "SELECT (SELECT count(*) FROM cidr_blocks), count(*) FROM ip_addresses"
        " WHERE is_allocated = TRUE AND container_id > ''"
    ).fetchall()[0]
    return Report(
        int(str(blocks)),
        int(str(owners)) + freed,
        freed,
        tuple(adopted),
        (*conflicts, *disputed),
        cautious_until,
    )


def adopt(
    connection: apsw.Connection, now_ms: int, claims: Iterable[Claim]
) -> tuple[list[str], list[str]]:
    """Make those the owners of addresses who must have them.

    Each counts as given now in this boot, so that it is found out and freed like
    any other when it is gone.

    Args:
      connection: with a write transaction begun.
      now_ms: the stored time.
      claims: who must have which.

    Returns:
      The addresses that have their owner only now, and in words those that had
      another one. He keeps his if there is evidence for him as well.
    """
    claims = list(claims)
    claimants = _claimants(claims)
    boot_id = _boot_id(connection)
    adopted: list[str] = []
    disputed: list[str] = []
    for claim in claims:
        block_id = _block_for(connection, now_ms, claim)
        key = claim.owner.container_id, claim.owner.interface_name
        place = claim.owner.network, claim.address
        row = connection.execute(
            "SELECT container_id, interface_name, is_allocated FROM ip_addresses"
            " WHERE address = ? AND cidr_block_id = ?",
            (claim.address, block_id),
        ).fetchone()
        if row is not None and row[2]:
            holder = str(row[0]), str(row[1])
            if holder == key:
                continue
            where = f"{claim.address} of network {claim.owner.network!r}"
            if not row[0] or holder in claimants[place]:
                who = f"container {row[0]}" if row[0] else "nobody: it is reserved"
                disputed.append(
                    f"{where} stays with {who}, though container {key[0]} has it by "
                    "the evidence of the node"
                )
                continue
            disputed.append(
                f"{where} goes to container {key[0]}, who has it by the evidence of "
                f"the node, and not to container {row[0]}, of whom there is none"
            )
        connection.execute(
            "DELETE FROM ip_addresses WHERE address = ? AND cidr_block_id = ?",
            (claim.address, block_id),
        )
        _insert_row(
            connection,
            now_ms,
            block_id,
            FoundRow(
                0,
                0,
                claim.address,
                claim.owner.container_id,
                claim.owner.interface_name,
                claim.pod.name or None,
                claim.pod.namespace or None,
                is_allocated=True,
                allocated_at=now_ms,
                boot_id=boot_id,
                netns_path=claim.netns_path or None,
                given_at=now_ms,
            ),
        )
        adopted.append(claim.address)
    _count(connection)
    return adopted, disputed


def recount(connection: apsw.Connection, now_ms: int) -> list[str]:
    """Correct what blocks count of their rows, and tell which were wrong.

    Args:
      connection: with a write transaction begun.
      now_ms: the stored time.
    """
    wrong = connection.execute(
        "SELECT b.id, b.cidr, b.network, b.allocated_ips, coalesce(a.rows, 0)"
        " FROM cidr_blocks AS b LEFT JOIN (SELECT cidr_block_id, count(*) AS rows"
        " FROM ip_addresses WHERE is_allocated = TRUE GROUP BY cidr_block_id) AS a"
        " ON a.cidr_block_id = b.id WHERE b.allocated_ips IS NOT coalesce(a.rows, 0)"
    ).fetchall()
    for block_id, *_, rows in wrong:
        connection.execute(
            "UPDATE cidr_blocks SET allocated_ips = ?, updated_at = ? WHERE id = ?",
            (rows, now_ms, block_id),
        )
    return [
        f"block {cidr} of network {network!r} counted {counted} addresses, "
        f"and has {rows}"
        for _, cidr, network, counted, rows in wrong
    ]


def _boot_id(connection: apsw.Connection) -> str:
    row = connection.execute("SELECT boot_id FROM metis_boot").fetchone()
    return "" if row is None else str(row[0])


def _insert_blocks(
    connection: apsw.Connection, now_ms: int, founds: Sequence[Found]
) -> dict[tuple[str, str], int]:
    """Make every block that was found, oldest first; their ids by place."""
    ids: dict[tuple[str, str], int] = {}
    for found in founds:
        for _, block in sorted(found.blocks.items()):
            place = block.network, block.range.cidr
            if place not in ids:
                insert_block(connection, now_ms, block.network, block.range)
                ids[place] = connection.last_insert_rowid()
                connection.execute(
                    "UPDATE cidr_blocks SET state = ?, updated_at = ? WHERE id = ?",
                    (block.state, now_ms, ids[place]),
                )
    return ids


def _merged(
    founds: Sequence[Found],
    boot_id: str,
    claims: Sequence[Claim],
    conflicts: list[str],
) -> dict[tuple[str, str], tuple[CIDRBlock, FoundRow]]:
    """One row for each address of a network: an owner's, if any source has one.

    Of two owners the one whom the node knows as such has it, else the later one.
    """
    claimants = _claimants(claims)
    merged: dict[tuple[str, str], tuple[CIDRBlock, FoundRow]] = {}
    for found in founds:
        for row in found.rows.values():
            block = _block_of(founds, found, row)
            if block is None:
                found.problems.append(f"{row.address} lies in no block that is known")
                continue
            if row.container_id and row.boot_id is None:
                of_boot = found.boot[0] if found.boot else boot_id
                row = replace(row, boot_id=of_boot)
            place = block.network, row.address
            if place not in merged:
                merged[place] = block.range, row
                continue
            _, other = merged[place]
            if not row.container_id:
                continue
            mine = row.container_id, row.interface_name
            theirs = other.container_id, other.interface_name
            if not other.container_id:
                merged[place] = block.range, row
            elif mine != theirs:
                claimed = claimants.get(place, ())
                mine_is_better = (mine in claimed, row.allocated_at or 0) > (
                    theirs in claimed,
                    other.allocated_at or 0,
                )
                better, worse = (row, other) if mine_is_better else (other, row)
                merged[place] = block.range, better
                conflicts.append(
                    f"{row.address} of network {block.network!r} is by one source "
                    f"container {worse.container_id}'s, and goes to container "
                    f"{better.container_id}"
                )
    return merged


def _claimants(
    claims: Iterable[Claim],
) -> dict[tuple[str, str], set[tuple[str, str]]]:
    """Who has an address by the evidence of the node: network and address to owners."""
    found: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for claim in claims:
        key = claim.owner.container_id, claim.owner.interface_name
        found.setdefault((claim.owner.network, claim.address), set()).add(key)
    return found


def _block_of(
    founds: Sequence[Found], found: Found, row: FoundRow
) -> FoundBlock | None:
    """The block of a row: the one that it names, in whatever source that stands.

    Where it stands in none, or cannot be its block, any that has the address.
    """
    for one in (found, *founds):
        block = one.blocks.get(row.block_id)
        if block is not None and block.range.offset_of(row.address) is not None:
            return block
    for one in (found, *founds):
        for block in one.blocks.values():
            if block.range.offset_of(row.address) is not None:
                return block
    return None


def _former_owners(
    founds: Sequence[Found],
) -> dict[tuple[str, str], tuple[Any, ...]]:
    """Notes of who had an address last, by its place."""
    notes: dict[tuple[str, str], tuple[Any, ...]] = {}
    for found in founds:
        for row_id, *note in found.former:
            row = found.rows.get(row_id)
            block = None if row is None else _block_of(founds, found, row)
            if row is not None and block is not None and all(note[:3]):
                notes.setdefault((block.network, row.address), tuple(note))
    return notes


def _insert_row(
    connection: apsw.Connection, now_ms: int, block_id: int, row: FoundRow
) -> int:
    container = row.container_id or ("" if row.is_allocated else None)
    allocated_at, given_at = row.allocated_at, row.given_at
    if row.container_id:  # at some time, and none to come
        allocated_at = min(now_ms if allocated_at is None else allocated_at, now_ms)
        given_at = None if given_at is None else min(given_at, now_ms)
    connection.execute(
        "INSERT INTO ip_addresses (address, cidr_block_id, container_id,"
        " interface_name, pod_name, pod_namespace, is_allocated, release_at,"
        " allocated_at, updated_at, allocation_id, boot_id, netns_path, given_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            row.address,
            block_id,
            container,
            row.interface_name or None,
            row.pod_name,
            row.pod_namespace,
            row.is_allocated,
            row.release_at,
            allocated_at,
            now_ms,
            row.allocation_id,
            row.boot_id,
            row.netns_path,
            given_at,
        ),
    )
    return connection.last_insert_rowid()


def _insert_notes(
    connection: apsw.Connection, founds: Sequence[Found], boot_id: str
) -> None:
    """Keep who was deleted in this boot, and the history of the best source."""
    for found in reversed(founds):  # the best source's stand
        if found.boot is None or found.boot[0] == boot_id:
            connection.executemany(
                "INSERT OR REPLACE INTO metis_deleted_owners"
                " (network, container_id, interface_name, deleted_at)"
                " VALUES (?, ?, ?, ?)",
                [note for note in found.deleted if None not in note],
            )
    fullest = max(founds, key=lambda found: len(found.history), default=None)
    if fullest is not None:
        connection.executemany(
            "INSERT OR IGNORE INTO metis_history (network, address, container_id,"
            " interface_name, pod_name, pod_namespace, given_at, ended_at, reason)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            fullest.history,
        )


def _count(connection: apsw.Connection) -> None:
    connection.execute(
        "UPDATE cidr_blocks SET allocated_ips = (SELECT count(*) FROM ip_addresses"
        " WHERE cidr_block_id = cidr_blocks.id AND is_allocated = TRUE)"
    )


def _block_for(connection: apsw.Connection, now_ms: int, claim: Claim) -> int:
    """The block of a claim; it is made if the network has none for the address."""
    network = claim.owner.network
    blocks = read_blocks(connection, network, claim.block.family)
    same = [one for one in blocks if one.range == claim.block]
    for one in same + blocks:
        if one.range.offset_of(claim.address) is not None:
            if one.seeded_ips is None:
                seeding.keep_frontier(connection, now_ms, one.id, one.range)
            return one.id
    block = claim.block
    if any(one.range.overlaps(block) for one in blocks):
        block = CIDRBlock.parse(f"{claim.address}/{block.family.bits}")
    insert_block(connection, now_ms, network, block)
    return connection.last_insert_rowid()
