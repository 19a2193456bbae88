"""Databases with owners, what a kill leaves of them, and how they are broken."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import apsw

from metis.errors import PoolExhausted
from metis.model import Pod
from metis.store import holdings, sql
from metis.store.database import Database, connect
from metis.store.rebuilding import Claim
from metis.store.transactions import run_group, run_read
from tests.store.databases import ManualClock, check_invariants, owner, want

CIDR = "10.0.0.0/22"
COOLDOWN_MS = 60_000
PAGE = 4096


@dataclass
class Place:
    """A database, a clock, and who has which address by the answers that were given."""

    directory: Path
    clock: ManualClock = field(default_factory=ManualClock)
    owners: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.directory / "metis.sqlite"

    @property
    def damaged(self) -> list[Path]:
        """What was set aside, each by its main file."""
        return sorted(
            each
            for each in self.directory.iterdir()
            if ".damaged-" in each.name
            and not each.name.endswith(("-wal", "-shm", ".report"))
        )

    def connect(
        self,
        *,
        thorough: bool = True,
        evidence: Callable[[], Sequence[Claim]] | None = None,
    ) -> Database:
        return connect(
            str(self.path),
            self.clock,
            COOLDOWN_MS,
            "NORMAL",
            thorough=thorough,
            evidence=evidence,
        )

    @contextmanager
    def opened(
        self,
        *,
        thorough: bool = True,
        evidence: Callable[[], Sequence[Claim]] | None = None,
    ) -> Iterator[Database]:
        database = self.connect(thorough=thorough, evidence=evidence)
        try:
            yield database
        finally:
            database._close()

    def add(self, database: Database, container: str) -> str | None:
        """One ADD; its address, or None where there is none now."""
        work = functools.partial(
            sql.allocate,
            owner=owner(container),
            wanted=[want(CIDR)],
            pod=Pod(container, "ns"),
            residence=holdings.Residence(self.clock.boot_id(), ""),
        )
        (answer,) = run_group(database._writer, database.clock, [work])
        if isinstance(answer, PoolExhausted):
            return None
        assert isinstance(answer, tuple), answer
        address: str = answer[0].address
        return address

    def give(self, database: Database, containers: Sequence[str]) -> None:
        for container in containers:
            address = self.add(database, container)
            assert address is not None
            self.owners[container] = address

    def take(self, database: Database, container: str) -> None:
        """One DEL."""
        work = functools.partial(
            sql.release,
            owner=owner(container),
            cooldown_ms=COOLDOWN_MS,
            deleted_at=database.clock.now_ms(),
        )
        run_group(database._writer, database.clock, [work])
        del self.owners[container]

    def kill(self, database: Database, target: Path) -> Place:
        """A copy of the files as they are now, as a kill would leave them."""
        target.mkdir()
        for each in self.directory.iterdir():
            if each.name.startswith("metis.sqlite"):
                shutil.copy(each, target)
        for name in ("metis.sqlite.opening", "metis.sqlite.users"):
            (target / name).unlink()
        return Place(target, self.clock, dict(self.owners))

    # what must hold

    def check_nobody_is_robbed(self, database: Database) -> None:
        """Within one cooldown no address that had an owner goes to another."""
        held = {address: name for name, address in self.owners.items()}
        for number in range(30):
            name = f"new-{number}"
            address = self.add(database, name)
            assert held.get(address or "", name) == name
        run_read(database._readers[0], database.clock, check)

    def check_it_waits(self, database: Database) -> None:
        """No address without an owner is given before a cooldown has passed."""
        assert self.add(database, "impatient") is None
        self.clock.advance(COOLDOWN_MS - 1)
        assert self.add(database, "impatient") is None
        self.clock.advance(1)
        assert self.add(database, "impatient") is not None

    def check_all_are_there(self, database: Database) -> None:
        """Every owner has its address, and nobody else has any."""
        assert self.holders(database) == self.owners

    def holders(self, database: Database) -> dict[str, str]:
        """Who has which address by the database."""
        query = (
            "SELECT container_id, address FROM ip_addresses"
            " WHERE is_allocated = TRUE AND container_id > ''"
        )
        rows = database._writer.execute(query)
        return {str(name): str(address) for name, address in rows}


def check(connection: apsw.Connection, _now_ms: int) -> None:
    check_invariants(connection)


def names(count: int, prefix: str = "c") -> list[str]:
    """Container ids as runtimes make them."""
    return [f"{prefix}{number:04d}" + "f" * 59 for number in range(count)]


def zero_page(path: Path, number: int) -> None:
    """Blank one page of a file, from 1."""
    with path.open("r+b") as file:
        file.seek((number - 1) * PAGE)
        file.write(b"\0" * PAGE)
