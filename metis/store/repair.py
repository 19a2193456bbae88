"""Repair: what can be done about a broken rule, rule by rule.

Nothing is guessed. An owner keeps what it has, unless another owner of the same
address asked later; what is free and of no use goes; what was counted is counted
again. What is left alone is named, for somebody who knows more.

Pure: synchronous functions of a connection, inside the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import apsw

from metis.model import CIDRBlock, Owner
from metis.store import caution, row_rules, seeding
from metis.store.blocks import DRAINING
from metis.store.holdings import held_rows, take_back
from metis.store.invariants import violations
from metis.store.violations import Kind, Violation

REPAIRED = "repaired"
"""Reason of an end for the history: somebody else has the address as well."""

_ROUNDS = 3
"""How often the rules are gone through: what was mended may break one that comes
before it, as an address that nobody has any more may lie outside its block."""


def repair(
    connection: apsw.Connection, now_ms: int, cooldown_ms: int
) -> list[Violation]:
    """Mend every violation that can be mended.

    Nothing is written where SQLite itself finds the file damaged, but for an index
    alone: a page that is not what it seems can take its neighbours with it.

    Args:
      connection: with a transaction begun.
      now_ms: the stored time.
      cooldown_ms: how long an address rests that somebody loses, in milliseconds.

    Returns:
      What was mended, in order; `Violation.mend` says how.
    """
    done: list[Violation] = []
    found = violations(connection, now_ms)
    if any(violation.kind is Kind.FILE for violation in found):
        return []
    for _ in range(_ROUNDS):
        for kind in Kind:
            # What was mended may have brought this about, or have mended it as well.
            mendable = [one for one in found if one.kind is kind and one.mend]
            for violation in mendable:
                _MENDERS[kind](connection, now_ms, cooldown_ms, violation)
            if mendable:
                done += mendable
                found = violations(connection, now_ms)
    return done


def _make_index_anew(
    connection: apsw.Connection, _now: int, _cooldown: int, _violation: Violation
) -> None:
    connection.execute("REINDEX")


def _delete(
    connection: apsw.Connection, _now: int, _cooldown: int, violation: Violation
) -> None:
    """Delete a row that refers to nothing."""
    if violation.table == "metis_windows":  # which has no row ids
        connection.execute(
            "DELETE FROM metis_windows"
            " WHERE cidr_block_id NOT IN (SELECT id FROM cidr_blocks)"
        )
        return
    connection.execute(
        f"DELETE FROM {violation.table} WHERE rowid = ?",  # noqa: S608  # SQLite's name
        (violation.row_id,),
    )


def _set_block(
    connection: apsw.Connection, now_ms: int, _cooldown: int, violation: Violation
) -> None:
    """Set a column of a block; OR IGNORE, because another may be called so already."""
    connection.execute(
        f"UPDATE OR IGNORE cidr_blocks SET {violation.table} = ?, updated_at = ?"  # noqa: S608  # a column that metis.store.block_rules names
        " WHERE id = ?",
        (violation.value, now_ms, violation.row_id),
    )


def _mend_row(
    connection: apsw.Connection, now_ms: int, cooldown_ms: int, violation: Violation
) -> None:
    """Mend the columns of an address; see `metis.store.row_rules`."""
    if violation.table == row_rules.DELETED:
        connection.execute("DELETE FROM ip_addresses WHERE id = ?", (violation.row_id,))
        return
    bound = {
        "id": violation.row_id,
        "now_ms": now_ms,
        "release_at": now_ms + cooldown_ms,
        "value": violation.value,
    }
    connection.execute(
        f"UPDATE OR IGNORE ip_addresses SET {_SETTINGS[violation.table]},"  # noqa: S608  # a text of this module
        " updated_at = :now_ms WHERE id = :id",
        bound,
    )


_NO_OWNER = (
    "container_id = NULL, interface_name = NULL, pod_name = NULL,"
    " pod_namespace = NULL, allocated_at = NULL, given_at = NULL,"
    " allocation_id = NULL, boot_id = NULL, netns_path = NULL"
)

_SETTINGS = {
    "is_allocated": "is_allocated = (container_id IS NOT NULL), release_at ="
    " CASE WHEN container_id IS NULL THEN :release_at END",
    "container_id": f"is_allocated = FALSE, release_at = :release_at, {_NO_OWNER}",
    "owner": f"release_at = max(coalesce(release_at, 0), :release_at), {_NO_OWNER}",
    "release_at": "release_at = CASE WHEN is_allocated THEN NULL ELSE :release_at END",
    "allocated_at": "allocated_at = :now_ms",
    "given_at": "given_at = NULL",
    "updated_at": "updated_at = :now_ms",
    "address": "address = :value, sort_key = NULL",
    "sort_key": "sort_key = NULL",
}
"""What repair sets in a row, by the column that is wrong in it."""


def _mend_time(
    connection: apsw.Connection, now_ms: int, cooldown_ms: int, violation: Violation
) -> None:
    if violation.table != "cidr_blocks":
        _mend_row(connection, now_ms, cooldown_ms, violation)
        return
    connection.execute(
        "UPDATE cidr_blocks SET created_at = ?1, updated_at = ?1 WHERE id = ?2",
        (now_ms, violation.row_id),
    )


def _take_from(
    connection: apsw.Connection, now_ms: int, cooldown_ms: int, violation: Violation
) -> None:
    """Take an address from the owner of two that asked for it first."""
    connection.execute(
        "UPDATE ip_addresses SET interface_name = coalesce(interface_name, '?')"
        " WHERE id = ?",
        (violation.row_id,),
    )
    (row,) = connection.execute(
        "SELECT b.network, a.container_id, a.interface_name FROM ip_addresses AS a"
        " JOIN cidr_blocks AS b ON b.id = a.cidr_block_id WHERE a.id = ?",
        (violation.row_id,),
    ).fetchall()
    owner = Owner(*map(str, row))
    rows = [r for r in held_rows(connection, owner) if r.row_id == violation.row_id]
    take_back(connection, now_ms, rows, cooldown_ms, REPAIRED)


def _drain(
    connection: apsw.Connection, now_ms: int, _cooldown: int, violation: Violation
) -> None:
    connection.execute(
        "UPDATE cidr_blocks SET state = ?, updated_at = ? WHERE id = ?",
        (DRAINING, now_ms, violation.row_id),
    )


def _drop_window(
    connection: apsw.Connection, _now: int, _cooldown: int, violation: Violation
) -> None:
    """Forget how far a part of a block is filled: rows that are there stay."""
    first, _, last = str(violation.value).partition("-")
    connection.execute(
        "DELETE FROM metis_windows"
        " WHERE cidr_block_id = ? AND first_key = ? AND last_key = ?",
        (violation.row_id, bytes.fromhex(first), bytes.fromhex(last)),
    )


def _fill_from_gap(
    connection: apsw.Connection, now_ms: int, cooldown_ms: int, violation: Violation
) -> None:
    """Set `seeded_ips` to the first address of a block without a row.

    Nobody knows whose the address was, so it rests before somebody gets it.
    """
    caution.begin(connection, now_ms, now_ms + cooldown_ms)
    ((cidr, seeded_ips),) = cast(
        "list[tuple[str, int]]",
        connection.execute(
            "SELECT cidr, seeded_ips FROM cidr_blocks WHERE id = ?",
            (violation.row_id,),
        ).fetchall(),
    )
    block = CIDRBlock.parse(cidr)
    gap = next(
        (
            offset
            for offset in range(min(max(seeded_ips, 0), block.size))
            if not seeding.has_row(connection, violation.row_id, block, offset)
        ),
        0,
    )
    connection.execute(
        "UPDATE cidr_blocks SET seeded_ips = ?, updated_at = ? WHERE id = ?",
        (gap, now_ms, violation.row_id),
    )


def _mend_note(
    connection: apsw.Connection, _now: int, _cooldown: int, violation: Violation
) -> None:
    table = violation.table
    if not violation.row_id:
        connection.execute(
            f"DELETE FROM {table} WHERE rowid < (SELECT max(rowid) FROM {table})"  # noqa: S608  # a name of metis.store.invariants
        )
    elif violation.mend == "deleted":
        _delete(connection, _now, _cooldown, violation)
    else:
        connection.execute(
            "UPDATE metis_history SET given_at = ended_at WHERE id = ?",
            (violation.row_id,),
        )


def _count(
    connection: apsw.Connection, now_ms: int, _cooldown: int, violation: Violation
) -> None:
    connection.execute(
        "UPDATE cidr_blocks SET allocated_ips = ?, updated_at = ? WHERE id = ?",
        (violation.value, now_ms, violation.row_id),
    )


_MENDERS: dict[Kind, Callable[[apsw.Connection, int, int, Violation], None]] = {
    Kind.INDEX: _make_index_anew,
    Kind.REFERENCE: _delete,
    Kind.BLOCK: _set_block,
    Kind.ADDRESS: _mend_row,
    Kind.OUTSIDE: _mend_row,
    Kind.ROW: _mend_row,
    Kind.TIME: _mend_time,
    Kind.TWICE: _take_from,
    Kind.DELETING: _drain,
    Kind.OVERLAP: _drain,
    Kind.WINDOW: _drop_window,
    Kind.FILLED: _fill_from_gap,
    Kind.NOTE: _mend_note,
    Kind.COUNTER: _count,
}
"""Who mends what; the rules that are missing here are never mended."""
