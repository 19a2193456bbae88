"""`metis check` and `metis repair`, as somebody calls them on a node."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import apsw
import pytest
import trio

import metis
from tests.cli.churn import add
from tests.cli.conftest import DaemonProcess, StartDaemon, run_metis


def fill(daemon: DaemonProcess, *containers: str) -> None:
    async def run() -> None:
        transport = metis.UnixTransport(str(daemon.socket_path))
        async with metis.open_channel(transport) as channel:
            for container in containers:
                await add(channel, container)

    trio.run(run)


def execute(path: Path, statements: str) -> None:
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(60_000)
    connection.execute(statements)
    connection.close()


@pytest.fixture
def stopped(start_daemon: StartDaemon) -> Path:
    """The database of a daemon that has ended, with two owners."""
    daemon = start_daemon()
    fill(daemon, "a", "b")
    daemon.end(signal.SIGTERM)
    return daemon.db_path


BREAK = (
    "UPDATE cidr_blocks SET allocated_ips = 77;"
    "UPDATE ip_addresses SET interface_name = '' WHERE container_id = 'b'"
)


def test_all_is_well_beside_a_running_daemon(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    fill(daemon, "a")
    done = run_metis("check", "--db-path", daemon.db_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "1 blocks, 256 addresses: all invariants hold\n"
    done = run_metis("repair", "--db-path", daemon.db_path)
    assert done.stdout == "all invariants hold: nothing is to be done\n"
    fill(daemon, "b")


@pytest.mark.damages_database("rules are broken to see what the commands say")
def test_each_violation_is_a_line_and_the_status_is_1(stopped: Path) -> None:
    execute(stopped, BREAK)
    done = run_metis("check", "--db-path", stopped)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines() == [
        "counter: block 10.9.0.0/21 of network 'default' counts 77 allocated addresses,"
        " and has 4",
        "row: address 10.9.0.3 of 10.9.0.0/21, network 'default', has an owner without"
        " an interface (container 'b', interface '')",
        "1 blocks, 256 addresses: 2 violations",
    ]
    done = run_metis("check", "-o", "json", "--db-path", stopped)
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert [(one["kind"], one["repair"]) for one in answer["violations"]] == [
        ("counter", "set to 4"),
        ("row", "left alone"),
    ]
    assert (answer["blocks"], answer["addresses"]) == (1, 256)


@pytest.mark.damages_database("rules are broken to see what the commands say")
def test_repair_says_what_it_does_or_would_do_and_what_is_left(stopped: Path) -> None:
    execute(stopped, BREAK)
    before = stopped.read_bytes()
    done = run_metis("repair", "--dry-run", "--db-path", stopped)
    assert done.returncode == 0
    assert [line.rpartition(": ")[2] for line in done.stdout.splitlines()] == [
        "would be set to 4",
        "would be left alone",
    ]
    assert stopped.read_bytes() == before
    done = run_metis("repair", "--db-path", stopped)
    assert done.returncode == 1
    first, second, last = done.stdout.splitlines()
    assert first.startswith("counter: block 10.9.0.0/21")
    assert first.endswith("and has 4: set to 4")
    assert second.startswith("left alone: row: address 10.9.0.3")
    assert last == "1 repairs; 1 violations are left"
    execute(stopped, "UPDATE ip_addresses SET interface_name = 'e' WHERE id = 4")
    assert run_metis("check", "--db-path", stopped).returncode == 0


def test_repair_beside_a_running_daemon_is_what_it_goes_on_with(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon()
    fill(daemon, "a")
    execute(daemon.db_path, "UPDATE cidr_blocks SET allocated_ips = 77")
    done = run_metis("repair", "--db-path", daemon.db_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("1 repairs; no violations are left\n")
    fill(daemon, "b")
    done = run_metis("check", "--db-path", daemon.db_path)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("command", ["check", "repair", "backup", "restore"])
def test_a_file_that_is_not_there_is_named_and_not_made(
    tmp_path: Path, command: str
) -> None:
    path = tmp_path / "none.sqlite"
    arguments = {
        "backup": (tmp_path / "copy", "--db-path", path),
        "restore": (path, "--db-path", tmp_path / "live"),
    }.get(command, ("--db-path", path))
    done = run_metis(command, *arguments)
    assert done.returncode == 1
    assert done.stderr == (
        f"Error: database {str(path)!r} does not exist: name one that is there\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_newer_version_is_named_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "newer.sqlite"
    execute(path, "PRAGMA user_version = 2; CREATE TABLE t (c)")
    before = path.read_bytes()
    for command in ("check", "repair"):
        done = run_metis(command, "--db-path", path)
        assert done.returncode == 1
        assert "its schema has version 2" in done.stderr
        assert "Traceback" not in done.stderr
    assert path.read_bytes() == before


@pytest.mark.damages_database("no database at all")
def test_what_is_damaged_is_named_by_check_and_healed_by_repair(tmp_path: Path) -> None:
    path = tmp_path / "metis.sqlite"
    path.write_bytes(b"\xff" * 8192)
    (tmp_path / "metis.sqlite.users").touch()  # it was one
    files = set(tmp_path.iterdir())
    done = run_metis("check", "--db-path", path)
    assert done.returncode == 1
    assert "file is not a database: `metis repair` heals it" in done.stderr
    assert set(tmp_path.iterdir()) == files
    done = run_metis("repair", "--dry-run", "--db-path", path)
    assert "would be healed, once nobody else has the file open" in done.stdout
    assert set(tmp_path.iterdir()) == files
    done = run_metis("repair", "--db-path", path)
    assert done.returncode == 0, done.stderr
    assert "file is not a database: healed" in done.stdout
    assert run_metis("check", "--db-path", path).returncode == 0


def test_a_file_that_never_was_a_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "passwd"
    path.write_text("root:x:0:0:root:/root:/bin/bash\n")
    for command in (
        ("check",),
        ("repair",),
        ("repair", "--dry-run"),
        ("daemon", "--socket-path", tmp_path / "metis.sock"),
    ):
        done = run_metis(*command, "--db-path", path)
        assert done.returncode != 0
        assert f"'{path}' is no database, and nothing beside it tells" in done.stderr
    assert path.read_text() == "root:x:0:0:root:/root:/bin/bash\n"
    assert not [one for one in tmp_path.iterdir() if one.name.startswith("passwd.")]


def test_a_wrong_flag_is_a_matter_of_usage() -> None:
    for command in ("check", "repair", "backup", "restore"):
        assert run_metis(command, "--no-such-flag").returncode == 2
