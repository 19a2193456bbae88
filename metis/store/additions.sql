-- What metis adds to the original's schema, to a new database and to one that
-- the original made alike. None of it is seen by the original's statements.
-- (The column cidr_blocks.seeded_ips is added by metis/store/schema.py, because
-- ALTER TABLE knows no IF NOT EXISTS.)

-- Free rows of a block by the end of their cooldown. NULL sorts first, so the
-- head of the index is the lowest never-used address, else the one that has
-- been free for longest, however many rows are cooling behind it.
CREATE INDEX IF NOT EXISTS metis_ip_addresses_by_release
  ON ip_addresses (cidr_block_id, release_at, id) WHERE is_allocated = FALSE;

-- The blocks of a network, oldest first.
CREATE INDEX IF NOT EXISTS metis_cidr_blocks_by_network
  ON cidr_blocks (network, ip_family, id);

-- The clock of stored times: CLOCK_BOOTTIME plus offset_ms, fixed by whoever
-- opens the database first after a boot. It holds the current boot alone.
CREATE TABLE IF NOT EXISTS metis_boot (
  boot_id TEXT PRIMARY KEY,
  offset_ms INTEGER NOT NULL
);

-- Who gave an address back last. An owner that comes back while its address is
-- cooling gets it again. A note counts only while release_at is that of the
-- address: the original, which may use the row meanwhile, leaves notes alone.
CREATE TABLE IF NOT EXISTS metis_former_owners (
  address_id INTEGER PRIMARY KEY REFERENCES ip_addresses (id) ON DELETE CASCADE,
  container_id TEXT NOT NULL,
  interface_name TEXT NOT NULL,
  release_at INTEGER NOT NULL
);

CREATE INDEX IF NOT EXISTS metis_former_owners_by_owner
  ON metis_former_owners (container_id, interface_name);
