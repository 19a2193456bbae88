"""One call as a process: standard output, exit status, log, and nothing else."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from grpclib import GRPCError, Status

from metis.api.adaptiveipam.v1 import DeallocatePodIpRequest
from metis.cni.origin import Origin
from metis.cni.plugin import run
from metis.cni.protocol import version_text
from tests.cni.calls import config, environ
from tests.cni.fakes import FakeIpam, Unreachable, reach
from tests.cni.process import Process


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "cni.log"


def test_version_is_answered_without_stdin_configuration_or_log() -> None:
    process = Process()
    process.call({"CNI_COMMAND": "VERSION"}, AssertionError("stdin was read"))
    assert process.stdout == [version_text()]
    assert (process.status, process.stderr) == (0, [])


def test_version_that_nobody_reads_fails() -> None:
    def write(_text: str) -> None:
        raise BrokenPipeError

    assert run({"CNI_COMMAND": "VERSION"}, read=bytes, write=write, complain=print) == 1


def test_an_add_prints_its_result_and_logs_a_line(log: Path) -> None:
    process = Process(reach(FakeIpam()))
    variables = environ("ADD", CNI_ARGS="K8S_POD_NAME=web;K8S_POD_NAMESPACE=shop")
    result = process.call(variables, config(logFile=str(log)))
    assert result["ips"] == [{"address": "10.240.0.2/22", "gateway": "10.240.0.1"}]
    assert (process.status, process.stderr) == (0, [])
    (line,) = log.read_text().splitlines()
    assert " verb=ADD container=c1 interface=eth0 pod=shop/web " in line
    assert " address=10.240.0.2/22 " in line
    assert line.endswith(" outcome=ok")


def test_the_program_s_name_makes_it_the_main_plugin(log: Path) -> None:
    process = Process(reach(FakeIpam()))
    fields = config(type="ours", logFile=str(log))
    assert "interfaces" in process.call(environ(), fields, program="ours")
    assert "interfaces" not in process.call(environ(), fields, program="metis")


@pytest.mark.parametrize("command", ["DEL", "CHECK", "STATUS"])
def test_other_verbs_print_nothing_when_all_is_well(command: str, log: Path) -> None:
    process = Process(reach(FakeIpam()))
    fields = config("1.1.0", prevResult={}, logFile=str(log))
    assert process.call(environ(command), fields) is None
    assert (process.status, process.stderr) == (0, [])
    assert f"verb={command}" in log.read_text()


def test_a_failure_is_an_error_object_in_the_configuration_s_version(log: Path) -> None:
    daemon = FakeIpam()
    daemon.failure = GRPCError(Status.RESOURCE_EXHAUSTED, "no address is free")
    process = Process(reach(daemon))
    answer = process.call(environ(), config("0.4.0", logFile=str(log)))
    assert answer["cniVersion"] == "0.4.0"
    assert (answer["code"], answer["msg"]) == (11, "no address is free")
    assert process.status == 1
    assert 'outcome="11: no address is free"' in log.read_text()


@pytest.mark.parametrize(
    ("variables", "stdin", "code"),
    [
        # In the order of the checks; every call has all later faults, too.
        ({"CNI_COMMAND": "ADD"}, b"{", 4),
        (environ(CNI_IFNAME="/"), b"{", 4),
        (environ(), OSError("gone"), 5),
        (environ("FROB"), b"{", 6),
        (environ("FROB"), {"cniVersion": "9"}, 7),
        (environ("FROB"), config("9"), 4),
        (environ("GC"), config("1.0.0", ipam=[]), 1),
        (environ("CHECK"), config("x", ipam=[]), 6),
        (environ(), config("9", ipam=[]), 1),
        (environ(CNI_ARGS="?"), config(ipam=[]), 7),
        (environ(CNI_ARGS="?", CNI_NETNS="/proc/self/ns/net"), config(), 4),
        (environ(CNI_NETNS="/proc/self/ns/net"), config(), 8),
        (environ(), config(), 11),
    ],
)
def test_checks_come_in_the_order_of_the_skeleton(
    variables: dict[str, str], stdin: Any, code: int, log: Path
) -> None:
    process = Process()
    if isinstance(stdin, dict):
        stdin = {**stdin, "logFile": str(log)}
    answer = process.call(variables, stdin)
    assert (answer["code"], process.status) == (code, 1)
    assert set(answer) <= {"cniVersion", "code", "msg", "details"}


def test_a_module_that_is_gone_is_explained(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trio", None)
    process = Process(reach(FakeIpam()))
    told = process.call(environ(), config(logFile=str(log)))
    assert (process.status, told["code"]) == (1, 999)
    assert "trio" in told["msg"]
    assert "`metis install`" in told["details"]


@pytest.mark.parametrize(
    "problem",
    [
        KeyboardInterrupt(),
        SystemExit(3),
        RuntimeError("first line\nsecond line"),
        MemoryError(),
        ExceptionGroup("several", [ValueError("x")]),
    ],
)
def test_whatever_happens_is_one_line_on_stdout_and_a_traceback_in_the_log(
    problem: BaseException, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: Any) -> None:
        raise problem

    monkeypatch.setattr("metis.cni.verbs.allocate_request", fail)
    process = Process()
    answer = process.call(environ(), config(logFile=str(log)))
    assert (answer["code"], process.status) == (999, 1)
    assert type(problem).__name__ in answer["msg"]
    assert "\n" not in answer["msg"]
    assert str(log) in answer["details"]
    (line,) = log.read_text().splitlines()
    assert "Traceback" in line


def test_a_result_is_never_followed_by_an_error_object(log: Path) -> None:
    daemon, stdout = FakeIpam(), list[str]()

    def write(text: str) -> None:
        stdout.append(text)
        raise KeyboardInterrupt  # the moment after the write

    status = run(
        environ(),
        read=lambda: json.dumps(config(logFile=str(log))).encode(),
        write=write,
        complain=print,
        open_channel=reach(daemon),
    )
    assert status == 1  # the runtime sends DEL, and the address is free already
    assert len(stdout) == 1
    assert isinstance(daemon.asked[-1], DeallocatePodIpRequest)


def test_an_interrupt_while_reading_stdin_is_answered() -> None:
    process = Process()
    assert process.call(environ(), KeyboardInterrupt())["code"] == 999
    assert process.status == 1


@pytest.mark.parametrize("place", ["absent/cni.log", ".", "pipe", "a\0b", "\ud800"])
def test_a_log_that_cannot_be_written_fails_no_call(place: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    process = Process(reach(FakeIpam()))
    fields = config(logFile=f"{tmp_path}/{place}")
    assert process.call(environ(), fields)["ips"]
    assert process.status == 0
    (complaint,) = process.stderr
    assert complaint.startswith("metis: the log ")
    assert complaint.isprintable()


def test_an_error_that_nobody_reads_is_still_logged(log: Path) -> None:
    def write(_text: str) -> None:
        raise BrokenPipeError

    status = run(
        environ("STATUS"),
        read=lambda: json.dumps(config("1.1.0", logFile=str(log))).encode(),
        write=write,
        complain=print,
        open_channel=Unreachable(),
    )
    assert status == 1
    assert "no daemon is there" in log.read_text()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A link of root's that leads to where others may write."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    link = tmp_path / "link"
    link.symlink_to("shared")
    return link


@pytest.mark.parametrize("command", ["ADD", "DEL", "STATUS"])
@pytest.mark.parametrize("key", ["dbPath", "daemonSocket"])
def test_a_link_to_where_others_may_write_is_refused_before_it_is_followed(
    elsewhere: Path, log: Path, key: str, command: str
) -> None:
    ipam = FakeIpam()
    process = Process(reach(ipam))
    fields = config("1.1.0", logFile=str(log), **{key: str(elsewhere / "x")})
    answer = process.call(environ(command), fields)
    assert answer["code"] == 7
    assert answer["msg"].startswith(f"{key} is '{elsewhere}/x': the link '{elsewhere}'")
    assert "and others may write to '" in answer["msg"]
    assert ipam.asked == []
    assert os.listdir(elsewhere) == []
    assert " outcome=" in log.read_text()


def test_a_resolv_conf_by_such_a_link_is_refused(elsewhere: Path, log: Path) -> None:
    (elsewhere / "resolv.conf").write_text("nameserver 10.0.0.1")
    fields = config(logFile=str(log))
    fields["ipam"]["resolvConf"] = str(elsewhere / "resolv.conf")
    answer = Process(reach(FakeIpam())).call(environ(), fields)
    assert answer["code"] == 7
    assert answer["msg"].startswith("resolvConf is ")


@pytest.mark.parametrize("version", ["1.1.0", "7.0.0"])
def test_a_log_by_such_a_link_is_refused_and_not_written_to(
    elsewhere: Path, version: str
) -> None:
    process = Process(reach(FakeIpam()))
    path = elsewhere / "cni.log"
    answer = process.call(environ(), config(version, logFile=str(path)))
    assert process.status == 1
    if version == "1.1.0":
        assert answer["code"] == 7
        assert answer["msg"].startswith(f"logFile is '{path}': the link ")
    assert os.listdir(elsewhere) == []
    assert process.stderr == []


def test_a_log_by_such_a_link_does_not_stop_a_del(elsewhere: Path) -> None:
    ipam = FakeIpam()
    process = Process(reach(ipam))
    process.call(environ("DEL"), config(logFile=str(elsewhere / "cni.log")))
    assert process.status == 0
    assert len(ipam.asked) == 1
    [complaint] = process.stderr
    assert complaint.startswith("metis: logFile is ")
    assert os.listdir(elsewhere) == []


def test_a_call_tells_when_it_began_if_its_process_does(log: Path) -> None:
    daemon = FakeIpam()
    process = Process(reach(daemon))
    origin = Origin("boot-1", 4_711)
    process.call(environ(), config(logFile=str(log)), read_origin=lambda: origin)
    process.call(environ(), config(logFile=str(log)))
    told = [(one.boot_id, one.started_boottime_ms) for one in daemon.asked]
    assert told == [("boot-1", 4_711), ("", 0)]
