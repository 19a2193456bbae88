"""What owners were promised, call by call; and what must be found afterwards.

A call that was answered counts. One that failed was done whole or not at all, and
nobody knows which, until the next answer about its owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import apsw

from metis.model import Allocation, Owner
from tests.store.databases import check_invariants


@dataclass
class Promises:
    """Of every owner, the sets of addresses that it may hold.

    Attributes:
      sure: who holds what, as far as the last call about it was answered.
      unsure: owners whose last call failed, with how many addresses they hold if it
        was done; those in `sure` are theirs if it was not.
      cooling: addresses given back by a call that was answered, with the end of
        their cooldown in stored time, and after whom they cool.
    """

    sure: dict[Owner, frozenset[str]] = field(default_factory=dict)
    unsure: dict[Owner, int] = field(default_factory=dict)
    cooling: dict[tuple[str, str], tuple[int, Owner]] = field(default_factory=dict)
    answered: int = 0
    failed: int = 0

    def given(self, owner: Owner, got: Iterable[Allocation]) -> None:
        """An ADD was answered."""
        self.answered += 1
        self.unsure.pop(owner, None)
        self.sure[owner] = frozenset(one.address for one in got)
        for address in self.sure[owner]:
            self.cooling.pop((owner.network, address), None)
        self.check()

    def not_given(self, owner: Owner, wanted: int) -> None:
        """An ADD failed."""
        self.failed += 1
        self.unsure[owner] = wanted
        self.sure.setdefault(owner, frozenset())

    def taken(self, owner: Owner, released: Iterable[Allocation], end_ms: int) -> None:
        """A DEL was answered, or a GC that took back what somebody held.

        Args:
          owner: whose addresses.
          released: what it was told to be.
          end_ms: when their cooldown ends at the earliest.
        """
        self.answered += 1
        addresses = frozenset(one.address for one in released)
        if owner not in self.unsure:
            assert addresses == self.sure.get(owner, frozenset())
        self.unsure.pop(owner, None)
        self.sure[owner] = frozenset()
        for address in addresses:
            self.cooling[owner.network, address] = end_ms, owner

    def not_taken(self, owner: Owner) -> None:
        """A DEL failed."""
        self.failed += 1
        self.unsure[owner] = 0
        self.sure.setdefault(owner, frozenset())

    def check(self) -> None:
        """No address was promised to two owners."""
        seen: dict[tuple[str, str], Owner] = {}
        for owner, addresses in self.sure.items():
            if owner in self.unsure:
                continue
            for address in addresses:
                key = owner.network, address
                assert key not in seen, f"{address}: {seen[key]} and {owner}"
                seen[key] = owner

    def check_given(self, owner: Owner, got: Sequence[Allocation], now_ms: int) -> None:
        """What is given is nobody else's, nor cooling after somebody else."""
        for one in got:
            key = owner.network, one.address
            end_ms, former = self.cooling.get(key, (0, owner))
            assert former == owner or end_ms <= now_ms, (
                f"{one.address} goes to {owner} {end_ms - now_ms} ms before the "
                f"cooldown after {former} ends"
            )
        self.given(owner, got)

    def check_held(self, owner: Owner, held: Iterable[Allocation]) -> None:
        """What an owner is found to hold is what it was promised."""
        found = frozenset(one.address for one in held)
        sure = self.sure.get(owner, frozenset())
        if owner not in self.unsure:
            assert found == sure, f"{owner} holds {set(found)}, promised: {set(sure)}"
        else:
            whole = found == sure or len(found) == self.unsure[owner]
            assert whole, f"{owner} holds {set(found)}, had {set(sure)}"

    def check_file(self, connection: apsw.Connection) -> None:
        """The database is whole, and holds what was promised and nothing else."""
        assert connection.pragma("integrity_check") == "ok"
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        check_invariants(connection)
        found: dict[Owner, set[str]] = {owner: set() for owner in self.sure}
        for network, container, interface, address in connection.execute(
            "SELECT b.network, a.container_id, a.interface_name, a.address"
            " FROM ip_addresses AS a JOIN cidr_blocks AS b ON b.id = a.cidr_block_id"
            " WHERE a.is_allocated = TRUE AND a.container_id <> ''"
        ):
            owner = Owner(network, container, interface)
            assert owner in found, f"{owner} holds {address} and never asked"
            found[owner].add(address)
        for owner, addresses in found.items():
            sure = self.sure[owner]
            if owner not in self.unsure:
                assert addresses == sure, f"{owner}: {addresses}, promised: {sure}"
            else:
                whole = addresses == sure or len(addresses) == self.unsure[owner]
                assert whole, f"{owner} holds {addresses}, had {sure}"
        for (network, address), (end_ms, _) in self.cooling.items():
            rows = connection.execute(
                "SELECT a.is_allocated, coalesce(a.release_at, 0) FROM ip_addresses"
                " AS a JOIN cidr_blocks AS b ON b.id = a.cidr_block_id"
                " WHERE a.address = ? AND b.network = ?",
                (address, network),
            ).fetchall()
            assert any(taken or int(end or 0) >= end_ms for taken, end in rows), (
                f"the cooldown of {address} until {end_ms} is gone: {rows}"
            )
