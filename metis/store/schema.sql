-- The database, version 1: the same two tables, indexes and rules as the
-- original (a Go program of the same contract), so that either program can take
-- over a file from the other, and what metis adds to them (additions.sql).
--
-- All times are milliseconds since the Unix epoch, as `metis.clock` tells them;
-- the defaults and triggers below, which know only the wall clock, are for
-- statements that set no time themselves. unixepoch('subsec') needs SQLite 3.42.

CREATE TABLE cidr_blocks (
  -- Age of the block: the oldest Ready one with a free address is used first.
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  -- '10.240.0.0/20', canonical when metis wrote it. The original kept host bits
  -- ('10.240.0.5/20'), so ranges are compared parsed, never as text.
  cidr TEXT NOT NULL,
  -- The network that is served from the block: 'default'.
  network TEXT NOT NULL,
  -- 'ipv4' or 'ipv6'.
  ip_family TEXT NOT NULL,
  -- Addresses of the whole block, reserved ones included: 4096. At most
  -- 2^63 - 1, which is what a large IPv6 block says.
  total_ips INTEGER NOT NULL,
  -- Rows of ip_addresses in this block with is_allocated TRUE: owned + reserved.
  allocated_ips INTEGER DEFAULT 0,
  -- 'Ready' gives addresses; 'Draining' and 'Deleting' give none, but what is
  -- held in them stays held.
  state TEXT NOT NULL DEFAULT 'Ready',
  created_at INTEGER DEFAULT (CAST(unixepoch('subsec') * 1000 AS INTEGER)),
  updated_at INTEGER DEFAULT (CAST(unixepoch('subsec') * 1000 AS INTEGER)),
  -- Ours. How far the block has rows: every address from the network address up
  -- to this offset, not included, has been seeded. NULL when the original made
  -- the block; then it is found out from the rows.
  seeded_ips INTEGER,
  UNIQUE (cidr, network)
);

CREATE TABLE ip_addresses (
  -- Order in which never-used addresses are given.
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  -- '10.240.0.2', 'fd00:10::2': the canonical text (RFC 5952).
  address TEXT NOT NULL,
  cidr_block_id INTEGER NOT NULL REFERENCES cidr_blocks (id) ON DELETE CASCADE,
  -- The owner: container id and interface name, with the network of the block.
  -- NULL while nobody has the address. '' with is_allocated TRUE: reserved, no
  -- pod ever gets it (network address, gateway, broadcast).
  container_id TEXT,
  -- The pod's Kubernetes names, for people; NULL when the caller sent none.
  pod_name TEXT,
  pod_namespace TEXT,
  -- 'eth0'
  interface_name TEXT,
  -- TRUE: owned or reserved. FALSE: free, or cooling until release_at.
  is_allocated BOOLEAN DEFAULT FALSE,
  -- End of the cooldown of a released address; NULL when it was never used, and
  -- while it is allocated.
  release_at INTEGER,
  -- When the owner got it, or asked for it again last; NULL while nobody has it.
  allocated_at INTEGER,
  updated_at INTEGER DEFAULT (CAST(unixepoch('subsec') * 1000 AS INTEGER)),
  -- Ours. Names the call that gave the address or found it held last; no two
  -- calls have the same. NULL while nobody has the address.
  allocation_id TEXT,
  -- Ours. The address as 4 or 16 bytes, which sort as numbers do. NULL until a
  -- request that is served from a part of the block has come across the row.
  sort_key BLOB,
  -- Ours. The boot in which the owner got it, and the path of the owner's network
  -- namespace where the runtime told one: evidence of whether it still lives.
  boot_id TEXT,
  netns_path TEXT,
  -- Ours. When the owner got it, however often it has asked again since.
  given_at INTEGER,
  UNIQUE (address, cidr_block_id)
);

-- The original picks by this one: the lowest free row.
CREATE INDEX idx_ip_addresses_free
  ON ip_addresses (cidr_block_id, id) WHERE is_allocated = FALSE;

-- What an owner holds.
CREATE INDEX idx_ip_addresses_owner
  ON ip_addresses (container_id, interface_name);

-- updated_at follows every UPDATE. The WHEN spares a statement that has set the
-- column itself (all of ours) a second UPDATE of the same row.
CREATE TRIGGER trg_cidr_blocks_updated_at
AFTER UPDATE ON cidr_blocks FOR EACH ROW WHEN NEW.updated_at IS OLD.updated_at
BEGIN
  UPDATE cidr_blocks
  SET updated_at = CAST(unixepoch('subsec') * 1000 AS INTEGER)
  WHERE id = NEW.id;
END;

CREATE TRIGGER trg_ip_addresses_updated_at
AFTER UPDATE ON ip_addresses FOR EACH ROW WHEN NEW.updated_at IS OLD.updated_at
BEGIN
  UPDATE ip_addresses
  SET updated_at = CAST(unixepoch('subsec') * 1000 AS INTEGER)
  WHERE id = NEW.id;
END;

PRAGMA user_version = 1;
