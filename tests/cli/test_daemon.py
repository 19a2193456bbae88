"""`metis daemon`: flags, signals, the service manager, and clear refusals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import tempfile
from pathlib import Path

import apsw
import pytest

from tests.cli.conftest import START_TIMEOUT, StartDaemon, run_metis


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


def test_a_daemon_that_is_refused_touches_nothing_of_the_first(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = start_daemon()
    other = tmp_path / "other" / "db"
    done = run_metis(
        *("daemon", "--db-path", other, "--socket-path", daemon.socket_path)
    )
    assert done.returncode == 1
    assert f"another server holds {daemon.socket_path}.lock" in done.stderr
    assert not other.parent.exists()
    assert daemon.told() == []
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
    "empty path": (["--db-path", ""], "'--db-path': it is empty: write the path"),
    "name": (["--allow-uid", "alice"], "'alice' is not a uid: write the user's number"),
    "no uid": (["--allow-uid", "4294967295"], "'4294967295' is not a uid: write the"),
    "interval": (["--reclaim-interval", "60"], "'60' is not a duration"),
    "short interval": (
        ["--reclaim-interval", "1ms"],
        "'1ms' is too short: write 100ms",
    ),
    "grace": (["--reclaim-grace", "-5m"], "'-5m' is not a duration"),
    "limit": (["--reclaim-limit", "-1"], "-1 is not in the range x>=0"),
    "runtime": (["--cri-socket", "run/c.sock"], "it must be the absolute path of"),
    "huge uid": (["--allow-uid", "1" * 5000], "is not a uid"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_wrong_flag_is_named(tmp_path: Path, case: str) -> None:
    flags, expected = REFUSALS[case]
    paths = ["--db-path", str(tmp_path / "db"), "--socket-path", str(tmp_path / "s")]
    done = run_metis("daemon", *paths, *flags)
    assert done.returncode == 2
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
    assert not list(tmp_path.glob("db-*"))


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


@pytest.mark.parametrize("flag", ["--db-path", "--socket-path"])
def test_a_link_to_where_others_may_write_is_refused(tmp_path: Path, flag: str) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    (tmp_path / "link").symlink_to("shared")
    paths = {"--db-path": tmp_path / "db", "--socket-path": tmp_path / "s"}
    paths[flag] = tmp_path / "link" / "x"
    done = run_metis("daemon", *(word for pair in paths.items() for word in pair))
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert f"Invalid value for '{flag}'" in last
    assert f"the link '{tmp_path}/link' leads to 'shared'" in last
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.parametrize("command", ["health", "admin cidr-blocks list"])
def test_the_other_commands_refuse_such_a_link_as_well(
    tmp_path: Path, command: str
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    (tmp_path / "link").symlink_to("shared")
    done = run_metis(*command.split(), "--socket-path", tmp_path / "link" / "s")
    assert done.returncode == 2
    assert "Invalid value for '--socket-path'" in done.stderr.splitlines()[-1]


def test_a_directory_where_anybody_may_replace_files_is_told_once(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)
    _, stderr = start_daemon().end(signal.SIGTERM)
    tmp_path.chmod(0o700)
    assert stderr.count(f"directory={tmp_path}\n") == 1
    assert "WARNING metis.daemon" in stderr
    _, stderr = start_daemon().end(signal.SIGTERM)
    assert "directory=" not in stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_users_who_are_given_are_served_and_no_others(
    start_daemon: StartDaemon,
) -> None:
    with tempfile.TemporaryDirectory(prefix="metis-test-") as name:
        Path(name).chmod(0o711)
        path = Path(name) / "s"
        daemon = start_daemon(
            *("--socket-path", str(path), "--allow-uid", "1001", "--allow-uid", "1002")
        )
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        first_words = {uid: first_word(path, uid) for uid in (0, 1001, 1002, 1003)}
        status, stderr = daemon.end(signal.SIGTERM)
    assert status == 0
    assert first_words.pop(1003) == b""
    assert all(first_words.values())
    refusals = [line for line in stderr.splitlines() if "uid=" in line]
    assert len(refusals) == 1
    assert f" uid=1003 pid={os.getpid()} " in refusals[0]


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How a client begins (RFC 9113 section 3.4), with empty SETTINGS."""


def first_word(path: Path, uid: int) -> bytes:
    """What a daemon answers to the preface of a user; nothing when it hangs up."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(START_TIMEOUT)
        os.seteuid(uid)
        try:
            sock.connect(str(path))
        finally:
            os.seteuid(0)
        with contextlib.suppress(ConnectionError):
            sock.sendall(PREFACE)
            return sock.recv(1)
    return b""


def test_the_watchdog_is_fed_while_another_process_holds_the_write_lock(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon(WATCHDOG_USEC="50000")
    daemon.wait_for("WATCHDOG=1")
    holder = apsw.Connection(str(daemon.db_path))
    holder.set_busy_timeout(60_000)
    holder.execute("BEGIN IMMEDIATE")
    daemon.told()
    for _ in range(5):
        daemon.wait_for("WATCHDOG=1")
    holder.execute("ROLLBACK")
    holder.close()
    status, stderr = daemon.end(signal.SIGTERM)
    assert (status, "Traceback" in stderr) == (0, False)


def test_a_daemon_that_a_watchdog_aborts_tells_where_it_was(
    start_daemon: StartDaemon,
) -> None:
    status, stderr = start_daemon().end(signal.SIGABRT)
    assert status == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in stderr
    assert "/trio/_core/_run.py" in stderr


def test_a_watchdog_that_waits_for_another_process_is_not_fed(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon(WATCHDOG_USEC="2", WATCHDOG_PID=str(os.getpid()))
    assert run_metis("health", "--socket-path", daemon.socket_path).returncode == 0
    assert daemon.end(signal.SIGTERM)[0] == 0
    assert "STOPPING=1" in (told := daemon.told())
    assert "WATCHDOG=1" not in told


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


def test_the_runtime_s_socket_may_be_written_as_the_kubelet_has_it(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon("--cri-socket", "unix:///run/none/containerd.sock")
    path = ("--socket-path", daemon.socket_path)
    done = run_metis("reclaim", "--dry-run", *path)
    assert (done.returncode, done.stderr) == (0, "0 addresses kept\n")
