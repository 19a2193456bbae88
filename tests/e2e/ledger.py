"""What the database holds, as `metis admin` shows it, and whether it adds up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tests.e2e.daemon import Daemon

NULL = "NULL"
TRUE = "true"

Row = dict[str, str]


@dataclass(frozen=True)
class Holding:
    """One address that somebody holds."""

    network: str
    container_id: str
    interface_name: str
    address: str


@dataclass(frozen=True)
class Ledger:
    """The two tables at one moment; see `read`."""

    blocks: tuple[Row, ...]
    owned: tuple[Row, ...]
    cooling: tuple[Row, ...]
    reserved: tuple[Row, ...]

    @property
    def holdings(self) -> set[Holding]:
        """Who holds what."""
        network = {block["id"]: block["network"] for block in self.blocks}
        return {
            Holding(
                network[row["cidr_block_id"]],
                row["container_id"],
                row["interface_name"],
                row["address"],
            )
            for row in self.owned
        }

    @property
    def held_by(self) -> dict[str, frozenset[str]]:
        """Addresses by the container that holds them."""
        held: dict[str, set[str]] = {}
        for row in self.owned:
            held.setdefault(row["container_id"], set()).add(row["address"])
        return {container: frozenset(its) for container, its in held.items()}

    @property
    def cooling_addresses(self) -> set[str]:
        """Addresses that rest after their release."""
        return {row["address"] for row in self.cooling}


def read(daemon: Daemon) -> Ledger:
    """Read both tables of a daemon at rest, and see that they add up.

    Every counter equals its rows, no address of a network stands in the
    database twice, nobody holds two addresses of one family on one interface,
    and every row is either free, cooling, reserved or owned by somebody named.

    Raises:
      AssertionError: they do not; the message has the rows.
    """
    blocks = daemon.table("cidr-blocks")
    rows = daemon.table("ip-addresses")
    taken = [row for row in rows if row["is_allocated"] == TRUE]
    reserved = [row for row in taken if row["container_id"] in ("", NULL)]
    owned = [row for row in taken if row not in reserved]
    cooling = [row for row in rows if row not in taken and row["release_at"] != NULL]

    block_of = {block["id"]: block for block in blocks}
    for block in blocks:
        count = sum(row["cidr_block_id"] == block["id"] for row in taken)
        assert int(block["allocated_ips"]) == count, f"{block} counts {count} rows"
    assert not _repeated(
        (block_of[row["cidr_block_id"]]["network"], row["address"]) for row in rows
    )
    assert not _repeated(
        (
            block_of[row["cidr_block_id"]]["network"],
            block_of[row["cidr_block_id"]]["ip_family"],
            row["container_id"],
            row["interface_name"],
        )
        for row in owned
    )
    for row in owned:
        assert row["interface_name"] not in ("", NULL), row
    return Ledger(tuple(blocks), tuple(owned), tuple(cooling), tuple(reserved))


def owners(daemon: Daemon) -> set[str]:
    """The containers that hold an address; the daemon may be at work meanwhile.

    Both tables are not of one moment then, so they need not add up.
    """
    rows = daemon.table("ip-addresses")
    taken = {row["container_id"] for row in rows if row["is_allocated"] == TRUE}
    return taken - {"", NULL}


def _repeated(keys: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [key for key, times in Counter(keys).items() if times > 1]
