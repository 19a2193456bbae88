"""Bringing a saved state back into a database that has gone on since.

The present always wins: who owns an address now keeps it. What the saved state says
besides is taken over only where nothing speaks against it, and every address without
an owner rests once more, because between the two states somebody may have got it of
whom neither knows. So it never makes two owners.

All of it is one transaction of the database in use, and no copy of pages: between
reading who owns what now and writing, nobody else may write. Whoever serves from the
database meanwhile sees the state before or the state after, and its clock, its
records of deleted owners and its history are those that it had.

Pure: synchronous functions of a connection, inside the caller's transaction.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import apsw

from metis.errors import StoreDamaged
from metis.model import CIDRBlock
from metis.store import caution, salvage, seeding
from metis.store.blocks import Block, insert_block, read_blocks
from metis.store.history import MOST_ENTRIES
from metis.store.invariants import violations
from metis.store.salvage import Found, FoundBlock, FoundRow
from metis.store.violations import Kind

_DAMAGE = (Kind.FILE, Kind.INDEX)
"""Rules that are SQLite's own. Those of ours may be broken in a backup: what it says
is weighed piece by piece."""

_ENDED = (
    "network", "address", "container_id", "interface_name", "pod_name",
    "pod_namespace", "given_at", "ended_at", "reason",
)  # fmt: skip

Ended: TypeAlias = tuple[Any, ...]
"""An entry of the history: the columns of _ENDED."""

Key: TypeAlias = tuple[str, ...]
"""An owner as network, container and interface, and what it has."""


@dataclass(slots=True)
class Report:
    """What a merge did, in words; an owner is named with its address.

    Attributes:
      kept: how many owned addresses there were, which stay as they are.
      blocks: blocks that were added.
      owners: who has its address again.
      left: what was not taken over, and why.
      history: how many entries of the history were taken over.
      until_ms: until when addresses without an owner rest, in stored time.
    """

    kept: int = 0
    blocks: list[str] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    history: int = 0
    until_ms: int = 0


def read_backup(connection: apsw.Connection) -> Found:
    """Read a saved state out of a file in which SQLite finds nothing wrong.

    Raises:
      StoreDamaged: it does.
    """
    damage = [one for one in violations(connection) if one.kind in _DAMAGE]
    if damage:
        raise StoreDamaged(f"it is damaged: {damage[0].words}")
    return salvage.read(connection, "the backup")


def merge(
    connection: apsw.Connection, now_ms: int, saved: Found, cooldown_ms: int
) -> Report:
    """Take over of a saved state what nothing in the database speaks against.

    Args:
      connection: with a transaction begun.
      now_ms: the stored time.
      saved: the state.
      cooldown_ms: how long addresses without an owner rest, in milliseconds.
    """
    merging = _Merging(connection, now_ms, saved.boot[0] if saved.boot else "")
    report = merging.report
    for _, block in sorted(saved.blocks.items()):
        merging.take_block(block)
    owned = [row for row in saved.rows.values() if row.container_id]
    owned.sort(key=lambda row: (row.allocated_at or 0, row.id), reverse=True)
    for row in owned:
        block_or_none = saved.blocks.get(row.block_id)
        if block_or_none is not None:
            merging.take_owner(block_or_none, row)
    merging.take_history(saved.history)
    report.left += saved.problems
    caution.begin(connection, now_ms, now_ms + cooldown_ms)
    report.until_ms = caution.until(connection)
    return report


@dataclass(slots=True)
class _Merging:
    connection: apsw.Connection
    now_ms: int
    saved_boot: str
    report: Report = field(default_factory=Report)
    boot_id: str = ""
    held: defaultdict[Key, set[str]] = field(default_factory=lambda: defaultdict(set))
    ended: list[Ended] = field(default_factory=list)
    ends: dict[Key, tuple[int, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read who owns what now, and who lost what when."""
        rows: Any = self.connection.execute(
            "SELECT b.network, a.container_id, a.interface_name, b.ip_family, a.address"
            " FROM ip_addresses AS a CROSS JOIN cidr_blocks AS b"
            " ON b.id = a.cidr_block_id"
            " WHERE a.is_allocated = TRUE AND a.container_id > ''"
        )
        for *key, address in rows:
            self.report.kept += 1
            self.held[tuple(key)].add(address)
        boots: Any = self.connection.execute("SELECT boot_id FROM metis_boot")
        self.boot_id = next((boot_id for (boot_id,) in boots), "")
        query = f"SELECT {', '.join(_ENDED)} FROM metis_history ORDER BY id"  # noqa: S608  # names of this module
        self.ended = self.connection.execute(query).fetchall()
        for network, address, container, interface, *_, ended_at, reason in self.ended:
            end = self.ends.get((network, container, interface, address), (0, ""))
            self.ends[network, container, interface, address] = max(
                end, (ended_at, reason)
            )

    def take_block(self, saved: FoundBlock) -> None:
        """Add a block, unless the network has it, or has something in its place."""
        where = f"block {saved.range.cidr} of network {saved.network!r}"
        for present in read_blocks(self.connection, saved.network, saved.range.family):
            if present.range == saved.range:
                return
            if present.range.overlaps(saved.range):
                self.report.left.append(
                    f"{where}: it shares addresses with {present.range.cidr}, "
                    "which the network has now"
                )
                return
        insert_block(self.connection, self.now_ms, saved.network, saved.range)
        self.connection.execute(
            "UPDATE cidr_blocks SET state = ?, updated_at = ? WHERE id = ?",
            (saved.state, self.now_ms, self.connection.last_insert_rowid()),
        )
        self.report.blocks.append(where)

    def take_owner(self, saved: FoundBlock, row: FoundRow) -> None:
        """Let an owner have its address again, unless something speaks against it."""
        network, owner = saved.network, (row.container_id, row.interface_name)
        held = self.held.get((network, *owner, saved.range.family), set())
        if row.address in held:
            return
        who = (
            f"{row.address} of network {network!r}: container {owner[0]!r},"
            f" interface {owner[1]!r}"
        )
        block = self._block(network, saved.range, row.address)
        reason = self._objection(network, row, held)
        if block is None:
            reason = reason or "no block has it for pods"
        if block is None or reason:
            self.report.left.append(f"{who}: {reason}")
            return
        self._own(block, row)
        self.report.owners.append(who)

    def _objection(self, network: str, row: FoundRow, held: set[str]) -> str:
        """What speaks against an owner; empty for nothing."""
        if held:
            return f"it has {', '.join(sorted(held))} now"
        boot = row.boot_id or (self.saved_boot if row.allocation_id else "")
        if boot not in ("", self.boot_id):
            return "it is of a boot that has ended"
        spent = self.connection.execute(
            "SELECT a.container_id FROM ip_addresses AS a"
            " CROSS JOIN cidr_blocks AS b ON b.id = a.cidr_block_id"
            " WHERE a.address = ? AND b.network = ? AND a.is_allocated = TRUE",
            (row.address, network),
        ).fetchone()
        if spent is not None:
            return (
                f"container {spent[0]!r} has it now" if spent[0] else "it is reserved"
            )
        since = row.allocated_at or 0
        key = network, row.container_id, row.interface_name
        ended_at, reason = self.ends.get((*key, row.address), (0, ""))
        if ended_at > since:
            return f"it has lost it since ({reason})"
        deleted = self.connection.execute(
            "SELECT 1 FROM metis_deleted_owners WHERE network = ? AND container_id = ?"
            " AND interface_name = ? AND deleted_at > ?",
            (*key, since),
        )
        return "" if deleted.fetchone() is None else "it was deleted since"

    def _block(self, network: str, saved: CIDRBlock, address: str) -> Block | None:
        """The block of which the network gives an address to pods now."""
        for block in read_blocks(self.connection, network, saved.family):
            offset = block.range.offset_of(address)
            if offset is not None and (
                # A configuration may name another gateway than the first address.
                block.range == saved or not block.range.is_reserved(offset)
            ):
                return block
        return None

    def _own(self, block: Block, row: FoundRow) -> None:
        if block.seeded_ips is None:
            seeding.keep_frontier(self.connection, self.now_ms, block.id, block.range)
        self.connection.execute(
            "INSERT INTO ip_addresses (address, cidr_block_id) VALUES (?, ?)"
            " ON CONFLICT (address, cidr_block_id) DO NOTHING",
            (row.address, block.id),
        )
        allocated_at = min(row.allocated_at or self.now_ms, self.now_ms)
        self.connection.execute(
            "UPDATE ip_addresses SET is_allocated = TRUE, release_at = NULL,"
            " container_id = ?, interface_name = ?, pod_name = ?, pod_namespace = ?,"
            " allocated_at = ?, given_at = ?, allocation_id = ?, boot_id = ?,"
            " netns_path = ?, updated_at = ? WHERE address = ? AND cidr_block_id = ?",
            (
                row.container_id,
                row.interface_name,
                row.pod_name,
                row.pod_namespace,
                allocated_at,
                min(row.given_at or allocated_at, allocated_at),
                row.allocation_id,
                self.boot_id,
                row.netns_path,
                self.now_ms,
                row.address,
                block.id,
            ),
        )
        seeding.count(self.connection, self.now_ms, block.id, 1)

    def take_history(self, saved: list[Ended]) -> None:
        """Take over what is missing in the history, whose ids are in order of ends."""
        missing = set(saved) - set(self.ended)
        if not missing:
            return
        self.report.history = len(missing)
        entries = sorted({*self.ended, *missing}, key=lambda entry: int(entry[-2]))
        self.connection.execute("DELETE FROM metis_history")
        self.connection.executemany(
            f"INSERT INTO metis_history ({', '.join(_ENDED)})"  # noqa: S608  # names of this module
            f" VALUES ({', '.join('?' * len(_ENDED))})",
            entries[-MOST_ENTRIES:],
        )
