from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from benchmarks import cni_calls, sampling
from benchmarks.__main__ import missing_yardstick, parsed


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["lode"], "'lode' is not a section: it must be one of load, cpu"),
        (["--guard"], "--guard compares quick runs with quick runs"),
        (["--guard", "--quick", "load"], "--guard measures what it needs"),
        (["--record", "--quick"], "--record measures everything"),
        (["--record", "cni"], "--record measures what it needs"),
        (["--record", "--guard", "--quick"], "--guard and --record are different"),
        (["--write-docs", "load"], "--write-docs tells what is recorded"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--rounds", "x"], "invalid int value: 'x'"),
        (["--other-pid", "1"], "--other-pid belongs to --compare SOCKET"),
        (["--compare", "/nowhere"], "--compare /nowhere: it must be the Unix socket"),
        (["--json", "/nowhere/x"], "--json /nowhere/x: /nowhere is not a directory"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_a_wrong_flag_is_told(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(argv)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_daemon_to_compare_with_is_a_socket_and_a_process(tmp_path: Path) -> None:
    path = tmp_path / "other.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        args = parsed(["--compare", str(path), "--other-pid", str(os.getpid())])
    assert args.compare == path


def test_a_yardstick_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "metis"
    monkeypatch.setattr("benchmarks.__main__.metis_program", lambda: str(program))
    assert "metis is missing" in missing_yardstick({"load"}, strict=False)
    program.touch()
    assert missing_yardstick({"load"}, strict=True) == ""
    monkeypatch.setattr(cni_calls, "HOST_LOCAL", tmp_path / "host-local")
    assert "containernetworking-plugins" in missing_yardstick({"cni"}, strict=True)
    assert missing_yardstick({"cni"}, strict=False) == ""
    assert "containernetworking-plugins" in capsys.readouterr().err


def test_a_missing_profiler_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(sampling.SamplerError, match="py-spy is missing"):
        sampling.program()


def test_a_launcher_tells_its_interpreter() -> None:
    launcher = b"#!/opt/cni/metis/python -IScimport metis_start\n# more\n"
    assert cni_calls.interpreter_of(launcher) == "/opt/cni/metis/python"


def test_a_launcher_without_an_interpreter_is_refused() -> None:
    with pytest.raises(ValueError, match="begins with"):
        cni_calls.interpreter_of(b"\x7fELF")
