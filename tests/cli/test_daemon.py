"""`metis daemon`: flags, signals, the service manager, and clear refusals."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
from pathlib import Path

import pytest

from tests.cli.conftest import StartDaemon, run_metis


def test_it_tells_when_it_is_ready_and_stops_cleanly(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    assert stat.S_IMODE(daemon.socket_path.stat().st_mode) == 0o600
    status, stderr = daemon.end(signal.SIGTERM)
    daemon.wait_for("STOPPING=1")
    assert status == 0
    assert not daemon.socket_path.exists()
    assert "INFO metis.daemon serving address=" in stderr
    assert "signal=SIGTERM" in stderr
    assert stderr.splitlines()[-1].endswith("stopped")


def test_an_interrupt_is_a_clean_stop_too(start_daemon: StartDaemon) -> None:
    status, stderr = start_daemon().end(signal.SIGINT)
    assert status == 0
    assert "Traceback" not in stderr


def test_logs_can_be_one_json_object_a_line(start_daemon: StartDaemon) -> None:
    _, stderr = start_daemon("--log-format", "json", "-v").end(signal.SIGTERM)
    events = [json.loads(line) for line in stderr.splitlines()]
    assert {"serving", "stopping", "stopped"} <= {event["message"] for event in events}
    assert all({"time", "level", "logger"} <= set(event) for event in events)


def test_a_second_daemon_refuses_a_live_socket(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    done = run_metis(
        *("daemon", "--db-path", daemon.db_path, "--socket-path", daemon.socket_path)
    )
    assert done.returncode == 1
    assert str(daemon.socket_path) in done.stderr
    assert "Traceback" not in done.stderr
    assert run_metis("health", "--socket-path", daemon.socket_path).returncode == 0


def test_a_dead_socket_is_replaced(start_daemon: StartDaemon) -> None:
    first = start_daemon()
    first.end(signal.SIGKILL)
    assert first.socket_path.exists()
    second = start_daemon()
    assert run_metis("health", "--socket-path", second.socket_path).returncode == 0


REFUSALS = {
    "flag": (["--release-cooldwn", "1m"], "No such option '--release-cooldwn'"),
    "duration": (["--release-cooldown", "1 minute"], "'1 minute' is not a duration"),
    "negative": (["--release-cooldown=-1s"], "'-1s' is not a duration"),
    "level": (["--synchronous", "OFF"], "'OFF' is not one of"),
    "format": (["--log-format", "xml"], "'xml' is not one of 'text', 'json'"),
    "empty path": (["--db-path", ""], "db_path is ''"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_wrong_flag_is_named(tmp_path: Path, case: str) -> None:
    flags, expected = REFUSALS[case]
    paths = ["--db-path", str(tmp_path / "db"), "--socket-path", str(tmp_path / "s")]
    done = run_metis("daemon", *paths, *flags)
    assert done.returncode in {1, 2}
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def occupy_with_a_file(path: Path) -> None:
    path.write_text("mine")


def occupy_with_a_directory(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("occupy", [occupy_with_a_file, occupy_with_a_directory])
def test_what_is_no_socket_is_left_alone(tmp_path: Path, occupy: object) -> None:
    assert callable(occupy)
    path = tmp_path / "s"
    occupy(path)
    done = run_metis("daemon", "--db-path", tmp_path / "db", "--socket-path", path)
    assert done.returncode == 1
    assert str(path) in done.stderr
    assert "Traceback" not in done.stderr
    assert path.is_dir() or path.read_text() == "mine"


def test_a_socket_path_too_long_is_told_with_its_length(tmp_path: Path) -> None:
    path = tmp_path / ("s" * 120)
    done = run_metis("daemon", "--db-path", tmp_path / "db", "--socket-path", path)
    assert done.returncode == 1
    assert str(len(str(path))) in done.stderr
    assert "107" in done.stderr


def test_a_database_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    apsw = pytest.importorskip("apsw")
    path = tmp_path / "db"
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA user_version = 7; CREATE TABLE future (x)")
    connection.close()
    before = path.read_bytes()
    done = run_metis("daemon", "--db-path", path, "--socket-path", tmp_path / "s")
    assert done.returncode == 1
    assert str(path) in done.stderr
    assert "7" in done.stderr
    assert path.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"db"}


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    # A file where a directory should be stops root too, unlike permissions.
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = run_metis(
        *("daemon", "--db-path", blocked / "db", "--socket-path", tmp_path / "s")
    )
    assert done.returncode == 1
    assert str(blocked) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_service_manager_that_is_gone_does_not_stop_it(tmp_path: Path) -> None:
    from metis.cli.sd_notify import sd_notify

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
        assert sd_notify("READY=1") is False
        patch.delenv("NOTIFY_SOCKET")
        assert sd_notify("READY=1") is False


def test_the_service_manager_may_listen_in_the_abstract_namespace() -> None:
    from metis.cli.sd_notify import sd_notify

    name = f"metis-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NOTIFY_SOCKET", "@" + name)
            assert sd_notify("READY=1", "STATUS=ok") is True
        assert receiver.recv(100) == b"READY=1\nSTATUS=ok"
