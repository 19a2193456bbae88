"""`metis backup` and `metis restore`, while a daemon serves and others write."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import apsw
import pytest
import trio
from click.testing import CliRunner
from grpclib import GRPCError, Status

import metis
from metis.cli.main import cli
from metis.store import changing, salvage
from metis.store.reading import read_file
from tests.cli.churn import COOLDOWN, Churn, add
from tests.cli.conftest import StartDaemon, run_metis
from tests.cli.test_check import execute, fill

ROUNDS = 2
CLIENTS = 4

SERVED = ("--release-cooldown", f"{COOLDOWN}s")
LONG = ("--release-cooldown", "1h")


async def run(*arguments: str | Path) -> tuple[int, str]:
    """Run a command beside the test's own tasks; its status and what it said."""
    done = await trio.to_thread.run_sync(lambda: run_metis(*arguments))
    return done.returncode, done.stdout + done.stderr


def owners(path: Path) -> dict[str, list[str]]:
    """Who has what, read out of the file."""
    found: dict[str, list[str]] = {}
    for row in read_file(str(path), salvage.read).rows.values():
        if row.container_id:
            found.setdefault(row.container_id, []).append(row.address)
    return found


def boot(path: Path) -> object:
    return read_file(
        str(path), lambda c: c.execute("SELECT * FROM metis_boot").fetchall()
    )


def test_a_daemon_can_be_backed_up_checked_and_listed_while_all_write(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """By its own clients, and by others that open the file for every call."""
    daemon = start_daemon(*SERVED)
    at = ("--db-path", daemon.db_path)
    churn = Churn()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                nursery.start_soon(churn.over, str(daemon.socket_path), f"s{number}")
            nursery.start_soon(churn.direct, str(daemon.db_path), "direct")
            for number in range(ROUNDS):
                for command in (
                    ("backup", tmp_path / f"copy-{number}.sqlite", *at),
                    ("check", *at),
                    ("admin", "ip-addresses", "list", "--socket-path",
                     daemon.socket_path),
                    ("repair", "--dry-run", *at),
                ):  # fmt: skip
                    status, said = await run(*command)
                    assert status == 0, (command, said)
            await churn.busy.wait()
            churn.stopped.set()

    trio.run(main)
    held = owners(daemon.db_path)
    assert {name: [address] for name, address in churn.held.items()} == held
    for number in range(ROUNDS):
        copy = tmp_path / f"copy-{number}.sqlite"
        assert run_metis("check", "--db-path", copy).returncode == 0
    status, _ = daemon.end(signal.SIGTERM)
    assert status == 0
    assert run_metis("check", *at).returncode == 0


def test_a_restore_under_load_loses_nothing_and_gives_nothing_twice(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = start_daemon(*SERVED)
    fill(daemon, "first", "second")
    clock = boot(daemon.db_path)
    copy = tmp_path / "copy.sqlite"
    assert run_metis("backup", copy, "--db-path", daemon.db_path).returncode == 0
    churn = Churn()
    statuses: list[tuple[int, str]] = []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                nursery.start_soon(churn.over, str(daemon.socket_path), f"s{number}")
            nursery.start_soon(churn.direct, str(daemon.db_path), "direct")
            for _ in range(ROUNDS):
                statuses.append(
                    await run("restore", copy, "--db-path", daemon.db_path, *SERVED)
                )
                statuses.append(
                    await run("backup", "--force", copy, "--db-path", daemon.db_path)
                )
            await churn.busy.wait()
            churn.stopped.set()

    trio.run(main)
    assert [status for status, _ in statuses] == [0] * 2 * ROUNDS, statuses
    fill(daemon, "afterwards")
    held = owners(daemon.db_path)
    assert {name: [address] for name, address in churn.held.items()}.items() <= (
        held.items()
    )
    assert set(held) == {*churn.held, "first", "second", "afterwards"}
    assert boot(daemon.db_path) == clock
    done = run_metis("check", "--db-path", daemon.db_path)
    assert done.returncode == 0, done.stdout


def test_after_a_restore_the_daemon_goes_on_with_what_came_back(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = start_daemon(*LONG)
    fill(daemon, "lost", "kept")
    had = owners(daemon.db_path)
    copy = tmp_path / "copy.sqlite"
    run_metis("backup", copy, "--db-path", daemon.db_path)
    # As a file that was rebuilt of little: nobody knows of "lost" any more.
    execute(
        daemon.db_path,
        "UPDATE ip_addresses SET is_allocated = FALSE, container_id = NULL,"
        " interface_name = NULL, allocated_at = NULL WHERE container_id = 'lost';"
        "UPDATE cidr_blocks SET allocated_ips = allocated_ips - 1",
    )
    done = run_metis("restore", copy, "--db-path", daemon.db_path, *LONG)
    assert done.returncode == 0, done.stderr
    restored, summary = done.stdout.splitlines()
    assert restored == (
        f"restored: {had['lost'][0]} of network 'default': container 'lost',"
        " interface 'eth0'"
    )
    assert summary.startswith("1 owned addresses stay as they are; of ")
    assert "rest for 3600 s" in summary
    assert owners(daemon.db_path) == had

    async def ask(container: str) -> str:
        transport = metis.UnixTransport(str(daemon.socket_path))
        async with metis.open_channel(transport) as channel:
            return await add(channel, container)

    assert trio.run(ask, "lost") == had["lost"][0]
    with pytest.raises(GRPCError, match="no ipv4 address is free") as refused:
        trio.run(ask, "new")
    assert refused.value.status is Status.RESOURCE_EXHAUSTED
    execute(  # a cooldown later, which has its end moved here
        daemon.db_path,
        "UPDATE metis_caution SET until_ms = 1;"
        "UPDATE ip_addresses SET release_at = 1 WHERE is_allocated = FALSE",
    )
    assert trio.run(ask, "new") not in {one for mine in had.values() for one in mine}


def test_a_daemon_that_begins_after_a_restore_serves_what_came_back(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = start_daemon()
    fill(daemon, "a", "b")
    had = owners(daemon.db_path)
    copy = tmp_path / "copy.sqlite"
    run_metis("backup", copy, "--db-path", daemon.db_path)
    daemon.end(signal.SIGTERM)
    daemon.db_path.unlink()
    done = run_metis("restore", copy, "--db-path", daemon.db_path, *SERVED)
    assert done.returncode == 0, done.stderr
    assert "came 1 blocks, 2 owners" in done.stdout
    again = start_daemon(*SERVED)
    fill(again, "a", "b", "c")
    now = owners(again.db_path)
    assert {name: now[name] for name in had} == had
    assert len(now) == 3


def test_a_backup_takes_no_place_of_what_is_no_file(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """As /dev/null is none, which everybody needs."""
    daemon = start_daemon()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for name in ("pipe", "link"):
        done = run_metis(
            *("backup", "--force", tmp_path / name, "--db-path", daemon.db_path)
        )
        assert done.returncode == 1
        assert f"'{tmp_path / name}' is not a regular file" in done.stderr
    assert pipe.is_fifo()
    assert (tmp_path / "link").is_symlink()
    for command in (("check",), ("repair",), ("backup", tmp_path / "copy")):
        done = run_metis(*command, "--db-path", "")
        assert done.returncode == 2
        assert "'--db-path': it is empty" in done.stderr


@pytest.mark.damages_database("the file is overwritten")
def test_a_database_that_cannot_be_read_is_moved_aside_and_restored(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = start_daemon()
    fill(daemon, "a", "b")
    had = owners(daemon.db_path)
    copy = tmp_path / "copy.sqlite"
    run_metis("backup", copy, "--db-path", daemon.db_path)
    daemon.end(signal.SIGTERM)
    daemon.db_path.write_bytes(b"\xff" * 65536)
    done = run_metis("restore", copy, "--db-path", daemon.db_path)
    assert done.returncode == 0, done.stderr
    assert owners(daemon.db_path) == had
    assert run_metis("check", "--db-path", daemon.db_path).returncode == 0


@pytest.mark.damages_database("the backup is cut")
def test_of_a_backup_that_is_damaged_nothing_is_taken(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = start_daemon()
    fill(daemon, "a")
    copy = tmp_path / "copy.sqlite"
    run_metis("backup", copy, "--db-path", daemon.db_path)
    os.truncate(copy, copy.stat().st_size // 2)
    done = run_metis("restore", copy, "--db-path", daemon.db_path)
    assert done.returncode == 1
    assert str(copy) in done.stderr
    assert "malformed" in done.stderr or "damaged" in done.stderr
    done = run_metis("restore", daemon.db_path, "--db-path", daemon.db_path)
    assert done.returncode == 1
    assert "is the database itself" in done.stderr
    fill(daemon, "b")


def test_a_lock_that_is_never_given_up_is_waited_for_in_vain(
    start_daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start_daemon()
    fill(daemon, "a")
    copy = tmp_path / "copy.sqlite"
    run_metis("backup", copy, "--db-path", daemon.db_path)
    monkeypatch.setattr(changing, "PATIENCE_SECONDS", 0.0)
    holder = apsw.Connection(str(daemon.db_path))
    holder.set_busy_timeout(60_000)
    holder.execute("BEGIN IMMEDIATE")
    done = CliRunner().invoke(
        cli, ["restore", str(copy), "--db-path", str(daemon.db_path)]
    )
    assert done.exit_code == 1
    assert "locked" in done.output
    holder.execute("ROLLBACK")
    holder.close()
    fill(daemon, "b")
