"""The program `metis` as a process: as the plugin, and when nobody asks it to be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import trio

import metis
from metis.api.adaptiveipam.v1 import DeallocatePodIpRequest
from metis.cni.protocol import about_text, version_text
from metis.health import HealthService
from metis.rpc.server import serve
from tests.cni.calls import Config, config, environ, ipam
from tests.cni.fakes import FakeIpam
from tests.cni.process import METIS, UNHURRIED_METIS


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "cni.log"


def start(
    variables: dict[str, str], stdin: bytes, *program: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*program, *METIS],
        env=variables,
        input=stdin.decode(errors="surrogateescape"),
        errors="surrogateescape",
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_program_answers_version() -> None:
    done = start({"CNI_COMMAND": "VERSION"}, b"")
    assert (done.returncode, done.stdout, done.stderr) == (0, version_text(), "")


def test_version_imports_nothing_heavy() -> None:
    code = (
        "import sys; from metis.__main__ import main; main();"
        "print(sorted({name.partition('.')[0] for name in sys.modules}), "
        "file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"CNI_COMMAND": "VERSION"},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(json.loads(done.stderr.replace("'", '"')))
    assert done.stdout == version_text()
    assert "metis" in loaded
    heavy = {"trio", "anyio", "grpclib", "h2", "betterproto2", "apsw", "click", "rich"}
    assert not loaded & (heavy | {"asyncio", "dataclasses", "json"})


@pytest.mark.parametrize("variables", [{}, {"CNI_COMMAND": ""}])
def test_without_a_command_the_program_tells_what_it_is(
    variables: dict[str, str],
) -> None:
    read_end, write_end = os.pipe()  # whoever read it would wait for ever
    try:
        done = subprocess.run(
            METIS,
            env=variables,
            stdin=read_end,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    finally:
        os.close(read_end)
        os.close(write_end)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == about_text(metis.__version__)


def test_without_a_command_arguments_are_the_command_line_s() -> None:
    done = subprocess.run(
        [*METIS, "--version"], env={}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert metis.__version__ in done.stdout


@pytest.mark.parametrize("stdin", [b"{", b"\xff", b"[" * 100_000])
def test_the_program_answers_junk_with_an_error_object(stdin: bytes) -> None:
    done = start(environ(), stdin)
    assert done.returncode == 1
    assert json.loads(done.stdout)["code"] == 6
    assert "Traceback" not in done.stderr


def test_the_program_answers_an_environment_that_is_no_text() -> None:
    done = start(environ(CNI_CONTAINERID="\udcff"), b"{}")
    assert done.returncode == 1
    assert json.loads(done.stdout)["code"] == 4


@pytest.fixture
def socket_path(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "s.sock")
    yield path
    assert not os.path.exists(path)


def reached_at(socket_path: str, log: Path) -> Config:
    """The daemon of a test, and nothing of the machine's instead of it."""
    return ipam(daemonSocket=socket_path, dbPath="/dev/null/a", logFile=str(log))


async def test_the_program_does_its_job_over_a_real_socket(
    socket_path: str, log: Path
) -> None:
    daemon = FakeIpam()
    fields = config(ipam=reached_at(socket_path, log))
    async with trio.open_nursery() as nursery:
        await nursery.start(
            serve, [daemon, HealthService([])], metis.UnixTransport(socket_path)
        )
        done = await trio.run_process(
            UNHURRIED_METIS,
            env=environ(),
            stdin=json.dumps(fields).encode(),
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
        nursery.cancel_scope.cancel()
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["ips"][0]["address"] == "10.240.0.2/22"
    assert len(daemon.asked) == 1
    assert "outcome=ok" in await trio.Path(log).read_text()


@pytest.mark.parametrize("closed", [False, True])
async def test_an_add_whose_reader_went_away_gives_its_address_back(
    closed: bool, socket_path: str, log: Path
) -> None:
    """The orphan of a main plugin that was killed: its stdout is a broken pipe."""
    daemon = FakeIpam()
    fields = config(ipam=reached_at(socket_path, log))
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = UNHURRIED_METIS
    if closed:
        command = ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *command]
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve, [daemon], metis.UnixTransport(socket_path)))
        done = await trio.run_process(
            command,
            env=environ(),
            stdin=json.dumps(fields).encode(),
            stdout=write_end,
            capture_stderr=True,
            check=False,
        )
        nursery.cancel_scope.cancel()
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, b"")
    assert isinstance(daemon.asked[-1], DeallocatePodIpRequest)
    assert 'outcome="5: ' in await trio.Path(log).read_text()


def test_a_closed_stderr_takes_nothing_away(tmp_path: Path) -> None:
    fields = config(logFile=str(tmp_path), daemonSocket="/absent", dbPath="/dev/null/a")
    stdin = json.dumps(fields).encode()
    done = start(environ(), stdin, "/bin/sh", "-c", 'exec "$@" 2>&-', "sh")
    assert done.returncode == 1
    assert json.loads(done.stdout)["code"] == 11


def test_a_broken_installation_is_told_as_an_error_object(tmp_path: Path) -> None:
    (tmp_path / "dataclasses.py").write_text(
        "raise ImportError('half of it is missing')"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from metis.__main__ import main; raise SystemExit(main())",
        ],
        env=environ() | {"PYTHONPATH": str(tmp_path)},
        input="{}",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert answer["code"] == 999
    assert answer["msg"] == "ImportError: half of it is missing"
    assert "`metis install`" in answer["details"]
