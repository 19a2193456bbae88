"""What a reboot means for addresses: every owner of a former boot is gone.

A container does not outlive the kernel that runs it, and neither do the node's
records of its connections (conntrack), which are what a cooldown waits for. So the
addresses are free at once, and are given after all others that are free: whoever
still sends to a former owner has had the longest time to give up.

Whoever shows that it lives is of this boot, whatever its record says.

Pure: synchronous functions of a connection, inside the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Callable

import apsw

from metis.store import history
from metis.store.holdings import NOBODYS

REBOOTED = "rebooted"
"""Reason of an end for the history."""

_OF_A_FORMER_BOOT = "is_allocated = TRUE AND container_id > '' AND boot_id <> :boot_id"

_NOTE_IN_HISTORY = f"{history.RECORD_WHERE}{_OF_A_FORMER_BOOT} ORDER BY a.id"

_NOTE_FORMER_OWNERS = f"""
INSERT OR REPLACE INTO metis_former_owners
SELECT id, container_id, coalesce(interface_name, ''), :now_ms, pod_name, pod_namespace
FROM ip_addresses WHERE {_OF_A_FORMER_BOOT}
"""  # noqa: S608  # made of constants

_RECOUNT = f"""
UPDATE cidr_blocks SET updated_at = :now_ms, allocated_ips = max(0, allocated_ips
  - (SELECT count(*) FROM ip_addresses
     WHERE cidr_block_id = cidr_blocks.id AND {_OF_A_FORMER_BOOT}))
"""  # noqa: S608  # as above

_RELEASE = f"""
UPDATE ip_addresses SET {NOBODYS}, release_at = :now_ms, updated_at = :now_ms
WHERE {_OF_A_FORMER_BOOT}
"""  # noqa: S608  # as above

_NAMESPACES = f"""
SELECT DISTINCT netns_path FROM ip_addresses
WHERE {_OF_A_FORMER_BOOT} AND typeof(netns_path) = 'text'
"""  # noqa: S608  # as above

_KEEP = f"""
UPDATE ip_addresses SET boot_id = :boot_id
WHERE {_OF_A_FORMER_BOOT} AND netns_path = :path
"""  # noqa: S608  # as above

_ADOPT = """
UPDATE ip_addresses SET boot_id = CASE
  WHEN allocation_id IS NULL OR coalesce(allocated_at, :booted_ms) >= :booted_ms
    THEN :boot_id
  ELSE coalesce((SELECT boot_id FROM metis_boot), :boot_id) END
WHERE is_allocated = TRUE AND container_id > '' AND boot_id IS NULL
"""


def keep(
    connection: apsw.Connection, boot_id: str, is_there: Callable[[str], bool]
) -> None:
    """Let those owners be of the present boot whose network namespace is there.

    They live, so it is only the id that is another one: a process whose /proc shows
    another boot than that of its neighbours (LXC and systemd-nspawn have it so) shall
    not take a reboot to have been where none was.

    Args:
      connection: with a transaction begun.
      boot_id: the kernel's id of the present boot.
      is_there: whether there is a path that no reboot leaves behind.
    """
    bound = {"boot_id": boot_id}
    for row in connection.execute(_NAMESPACES, bound).fetchall():
        path = str(row[0])
        if is_there(path):
            connection.execute(_KEEP, {**bound, "path": path})


def release(connection: apsw.Connection, now_ms: int, boot_id: str) -> int:
    """Free what owners of former boots hold.

    Args:
      connection: with a transaction begun.
      now_ms: the stored time.
      boot_id: the kernel's id of the present boot.

    Returns:
      How many addresses were freed.
    """
    bound = {"boot_id": boot_id, "now_ms": now_ms, "reason": REBOOTED}
    for statement in (_NOTE_IN_HISTORY, _NOTE_FORMER_OWNERS, _RECOUNT):
        connection.execute(statement, bound)
    connection.execute(_RELEASE, bound)
    return connection.changes()


def adopt(connection: apsw.Connection, boot_id: str, booted_ms: int) -> None:
    """Note the boot of owners of whom it is not known.

    An older metis, which gave ids to allocations, served in the boot whose clock the
    database has. The original is taken to have served in the present one: what it
    gave is free after the next reboot that metis sees, and none too early. It leaves
    the ids of former owners in the rows that it gives, so a row with an id is only
    then of a former boot if it was given before this one began.

    Args:
      connection: with a transaction begun; the clock is still the one that it had.
      boot_id: the kernel's id of the present boot.
      booted_ms: when that began by the wall clock, in milliseconds.
    """
    connection.execute(_ADOPT, {"boot_id": boot_id, "booted_ms": booted_ms})
