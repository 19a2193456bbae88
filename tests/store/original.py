"""A database as the original makes it: its schema, its seeding, its mistakes."""

from __future__ import annotations

import ipaddress

import apsw

SCHEMA = """
CREATE TABLE cidr_blocks (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  cidr TEXT NOT NULL,
  network TEXT NOT NULL,
  ip_family TEXT NOT NULL,
  total_ips INTEGER NOT NULL,
  allocated_ips INTEGER DEFAULT 0,
  state TEXT NOT NULL DEFAULT 'Ready',
  created_at INTEGER DEFAULT (CAST(unixepoch('subsec') * 1000 AS INTEGER)),
  updated_at INTEGER DEFAULT (CAST(unixepoch('subsec') * 1000 AS INTEGER)),
  UNIQUE (cidr, network));
CREATE TABLE ip_addresses (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  address TEXT NOT NULL,
  cidr_block_id INTEGER NOT NULL REFERENCES cidr_blocks (id) ON DELETE CASCADE,
  container_id TEXT, pod_name TEXT, pod_namespace TEXT, interface_name TEXT,
  is_allocated BOOLEAN DEFAULT FALSE,
  release_at INTEGER, allocated_at INTEGER,
  updated_at INTEGER DEFAULT (CAST(unixepoch('subsec') * 1000 AS INTEGER)),
  UNIQUE (address, cidr_block_id));
CREATE INDEX idx_free ON ip_addresses (cidr_block_id, id) WHERE is_allocated = FALSE;
CREATE INDEX idx_owner ON ip_addresses (container_id, interface_name);
CREATE TRIGGER touch_cidr_blocks AFTER UPDATE ON cidr_blocks BEGIN
  UPDATE cidr_blocks SET updated_at = CAST(unixepoch('subsec') * 1000 AS INTEGER)
  WHERE id = OLD.id; END;
CREATE TRIGGER touch_ip_addresses AFTER UPDATE ON ip_addresses BEGIN
  UPDATE ip_addresses SET updated_at = CAST(unixepoch('subsec') * 1000 AS INTEGER)
  WHERE id = OLD.id; END;
PRAGMA user_version = 1;
"""

IPV6_STEP = 64
"""How many addresses of an IPv6 block the original seeds at a time, from the
network address upwards, without looking where the block ends."""


def create(connection: apsw.Connection) -> None:
    """Make an empty database of the original."""
    connection.execute(SCHEMA)


def add_block(
    connection: apsw.Connection,
    cidr: str,
    *,
    network: str = "default",
    reserves: bool = False,
) -> int:
    """Add a block as the original does: as it is spelled, host bits included.

    IPv4 gets a row for each address from the spelled one to the end of the
    block, IPv6 its first IPV6_STEP; only a network's first block reserves.
    """
    interface = ipaddress.ip_interface(cidr)
    total = interface.network.num_addresses
    family = "ipv4" if interface.version == 4 else "ipv6"
    connection.execute(
        "INSERT INTO cidr_blocks (cidr, network, ip_family, total_ips)"
        " VALUES (?, ?, ?, ?)",
        (cidr, network, family, min(total, 2**63 - 1)),
    )
    block_id = connection.last_insert_rowid()
    first = interface.ip
    if interface.version == 4:
        count = total - (int(first) - int(interface.network.network_address))
    else:
        count = IPV6_STEP
    connection.executemany(
        "INSERT INTO ip_addresses (address, cidr_block_id) VALUES (?, ?)",
        [(str(first + number), block_id) for number in range(count)],
    )
    if reserves:
        reserved = (0, 1, total - 1)
        for number in reserved:
            own(connection, block_id, str(first + number), "")
    return block_id


def own(
    connection: apsw.Connection, block_id: int, address: str, container: str
) -> None:
    """Make a container the owner of an address; reserve it when there is none."""
    connection.execute(
        "UPDATE ip_addresses SET is_allocated = TRUE, container_id = ?,"
        " interface_name = 'eth0', allocated_at = 1"
        " WHERE address = ? AND cidr_block_id = ?",
        (container, address, block_id),
    )
    connection.execute(
        "UPDATE cidr_blocks SET allocated_ips = allocated_ips + 1 WHERE id = ?",
        (block_id,),
    )


def pick(connection: apsw.Connection, network: str, container: str) -> str | None:
    """Allocate as the original does: the lowest free row of the oldest block."""
    row = connection.execute(
        "SELECT a.cidr_block_id, a.address FROM ip_addresses AS a"
        " JOIN cidr_blocks AS b ON b.id = a.cidr_block_id"
        " WHERE b.network = ? AND b.state = 'Ready' AND a.is_allocated = FALSE"
        " AND (a.release_at IS NULL OR a.release_at <= unixepoch('subsec') * 1000)"
        " ORDER BY b.id, a.id LIMIT 1",
        (network,),
    ).fetchone()
    if row is None:
        return None
    own(connection, row[0], row[1], container)
    return str(row[1])
