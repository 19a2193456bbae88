"""What a reboot means for addresses: every owner of a former boot is gone.

A container does not outlive the kernel that runs it, and neither do the node's
records of its connections (conntrack), which are what a cooldown waits for. So the
addresses are free at once, and are given after all others that are free: whoever
still sends to a former owner has had the longest time to give up.

Pure: synchronous functions of a connection, inside the caller's transaction.
"""

from __future__ import annotations

import apsw

REBOOTED = "rebooted"
"""Reason of an end for the history."""

_OF_A_FORMER_BOOT = "is_allocated = TRUE AND container_id > '' AND boot_id <> :boot_id"

_NOTE_IN_HISTORY = f"""
INSERT INTO metis_history (network, address, container_id, interface_name, pod_name,
  pod_namespace, given_at, ended_at, reason)
SELECT b.network, a.address, a.container_id, coalesce(a.interface_name, ''),
  a.pod_name, a.pod_namespace, min(coalesce(a.given_at, a.allocated_at), :now_ms),
  :now_ms, :reason
FROM ip_addresses AS a CROSS JOIN cidr_blocks AS b ON b.id = a.cidr_block_id
WHERE {_OF_A_FORMER_BOOT} ORDER BY a.id
"""  # noqa: S608  # both parts are constants of this module

_NOTE_FORMER_OWNERS = f"""
INSERT OR REPLACE INTO metis_former_owners
SELECT id, container_id, coalesce(interface_name, ''), :now_ms, pod_name, pod_namespace
FROM ip_addresses WHERE {_OF_A_FORMER_BOOT}
"""  # noqa: S608  # as above

_RECOUNT = f"""
UPDATE cidr_blocks SET updated_at = :now_ms, allocated_ips = allocated_ips
  - (SELECT count(*) FROM ip_addresses
     WHERE cidr_block_id = cidr_blocks.id AND {_OF_A_FORMER_BOOT})
"""  # noqa: S608  # as above

_RELEASE = f"""
UPDATE ip_addresses SET is_allocated = FALSE, container_id = NULL,
  interface_name = NULL, pod_name = NULL, pod_namespace = NULL, allocated_at = NULL,
  given_at = NULL, allocation_id = NULL, boot_id = NULL, netns_path = NULL,
  release_at = :now_ms, updated_at = :now_ms
WHERE {_OF_A_FORMER_BOOT}
"""  # noqa: S608  # as above

_ADOPT = """
UPDATE ip_addresses SET boot_id = CASE
  WHEN allocation_id IS NULL THEN :boot_id
  ELSE coalesce((SELECT boot_id FROM metis_boot), :boot_id) END
WHERE is_allocated = TRUE AND container_id > '' AND boot_id IS NULL
"""


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


def adopt(connection: apsw.Connection, boot_id: str) -> None:
    """Note the boot of owners of whom it is not known.

    An older metis, which gave ids to allocations, served in the boot whose clock the
    database has. The original is taken to have served in the present one: what it
    gave is free after the next reboot that metis sees, and none too early.
    """
    connection.execute(_ADOPT, {"boot_id": boot_id})
