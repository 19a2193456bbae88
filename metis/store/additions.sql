-- What metis adds to the original's schema, to a new database and to one that
-- the original made alike. None of it is seen by the original's statements; the
-- trigger, which they fire, changes nothing but what is ours.
-- (Columns that tables lack are added by metis/store/schema.py, because ALTER
-- TABLE knows no IF NOT EXISTS.)

-- Free rows of a block by the end of their cooldown. NULL sorts first, so the
-- head of the index is the lowest never-used address, else the one that has
-- been free for longest, however many rows are cooling behind it.
CREATE INDEX IF NOT EXISTS metis_ip_addresses_by_release
  ON ip_addresses (cidr_block_id, release_at, id) WHERE is_allocated = FALSE;

-- The same for the parts of a block from which ranges are served: never-used
-- addresses in their order, then by the end of their cooldown. Rows of a block
-- that is only ever served as a whole are not in it.
CREATE INDEX IF NOT EXISTS metis_ip_addresses_by_key
  ON ip_addresses (cidr_block_id, release_at, sort_key)
  WHERE is_allocated = FALSE AND sort_key IS NOT NULL;

-- How far such a part has rows with a sort_key: so many from its first address.
CREATE TABLE IF NOT EXISTS metis_windows (
  cidr_block_id INTEGER NOT NULL REFERENCES cidr_blocks (id) ON DELETE CASCADE,
  first_key BLOB NOT NULL,
  last_key BLOB NOT NULL,
  seeded_ips INTEGER NOT NULL,
  PRIMARY KEY (cidr_block_id, first_key, last_key)
) WITHOUT ROWID;

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
-- cooling gets it again, and so does its pod, even later, where addresses are
-- sticky. A note counts only while release_at is that of the address: the
-- original, which may use the row meanwhile, leaves notes alone.
CREATE TABLE IF NOT EXISTS metis_former_owners (
  address_id INTEGER PRIMARY KEY REFERENCES ip_addresses (id) ON DELETE CASCADE,
  container_id TEXT NOT NULL,
  interface_name TEXT NOT NULL,
  release_at INTEGER NOT NULL,
  pod_name TEXT,
  pod_namespace TEXT
);

CREATE INDEX IF NOT EXISTS metis_former_owners_by_owner
  ON metis_former_owners (container_id, interface_name);

CREATE INDEX IF NOT EXISTS metis_former_owners_by_pod
  ON metis_former_owners (pod_namespace, pod_name) WHERE pod_name IS NOT NULL;

-- Who had which address, from when to when, and why it ended. Whoever has one now
-- stands in ip_addresses alone. The order of the ids is that of the ends.
CREATE TABLE IF NOT EXISTS metis_history (
  id INTEGER PRIMARY KEY,
  network TEXT NOT NULL,
  address TEXT NOT NULL,
  container_id TEXT NOT NULL,
  interface_name TEXT NOT NULL,
  pod_name TEXT,
  pod_namespace TEXT,
  given_at INTEGER,
  ended_at INTEGER NOT NULL,
  reason TEXT NOT NULL
);

-- What only we write of an owner goes when somebody else gives its row another,
-- or none: the original leaves it, and it would be the former owner's. Whatever we
-- do ourselves gives the row another allocation_id.
CREATE TRIGGER IF NOT EXISTS metis_ip_addresses_of_another
AFTER UPDATE OF container_id ON ip_addresses FOR EACH ROW
WHEN NEW.container_id IS NOT OLD.container_id
  AND NEW.allocation_id IS NOT NULL AND NEW.allocation_id IS OLD.allocation_id
BEGIN
  UPDATE ip_addresses
  SET allocation_id = NULL, boot_id = NULL, netns_path = NULL, given_at = NULL,
    updated_at = NEW.updated_at
  WHERE id = NEW.id;
END;

-- The same for a row that nobody has any more. An older metis gives the row another
-- allocation_id as we do, and knows none of the others: whoever got it next would live
-- in the former owner's namespace and boot, and be gone with him.
CREATE TRIGGER IF NOT EXISTS metis_ip_addresses_of_nobody
AFTER UPDATE OF container_id ON ip_addresses FOR EACH ROW
WHEN NEW.container_id IS NULL
  AND coalesce(NEW.boot_id, NEW.netns_path, NEW.given_at) IS NOT NULL
BEGIN
  UPDATE ip_addresses
  SET boot_id = NULL, netns_path = NULL, given_at = NULL, updated_at = NEW.updated_at
  WHERE id = NEW.id;
END;

-- Until when no address without an owner is given, after records were lost. At
-- most one row.
CREATE TABLE IF NOT EXISTS metis_caution (until_ms INTEGER NOT NULL);

-- Owners that were deleted in this boot, and when the call to do so arrived. The
-- order of the ids is that of the deletions, so the oldest are found first.
CREATE TABLE IF NOT EXISTS metis_deleted_owners (
  id INTEGER PRIMARY KEY,
  network TEXT NOT NULL,
  container_id TEXT NOT NULL,
  interface_name TEXT NOT NULL,
  deleted_at INTEGER NOT NULL,
  UNIQUE (container_id, interface_name, network)
);
