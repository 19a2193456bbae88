"""`metis install`: what it is told, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from metis.cli import install as module
from metis.cli.main import cli
from metis.cni.install import Installed
from metis.config import DEFAULT_SOCKET_PATH
from metis.errors import InstallError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path, dict[str, Any]]]:
    """What was to be installed, instead of an installation."""
    calls: list[tuple[str, Path, dict[str, Any]]] = []

    def install(cni_dir: Path, **options: Any) -> Path:
        calls.append(("ordinary", cni_dir, options))
        return cni_dir / "bin" / "metis"

    def install_self_contained(cni_dir: Path, **options: Any) -> Installed:
        calls.append(("self-contained", cni_dir, options))
        return Installed(cni_dir / "bin" / "metis", "/opt/cni/metis/tree")

    monkeypatch.setattr(module, "install", install)
    monkeypatch.setattr(module, "install_self_contained", install_self_contained)
    return calls


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["install", *map(str, arguments)])


def test_the_plugin_is_installed_for_the_default_socket(
    asked: list[Any], tmp_path: Path
) -> None:
    done = run("--cni-dir", tmp_path)
    assert done.output == f"installed {tmp_path}/bin/metis\n"
    assert asked == [("ordinary", tmp_path, {"socket_path": DEFAULT_SOCKET_PATH})]


def test_a_plugin_for_a_host_is_told_apart_from_one_for_this_place(
    asked: list[Any],
) -> None:
    assert "--self-contained brings it along" in run("--cni-dir", "/host/x").stderr
    assert run("--cni-dir", "/opt/../x/").stderr == ""
    assert run("--self-contained", "--cni-dir", "/host/x").stderr == ""


def test_the_directory_is_taken_from_the_environment(
    asked: list[Any], tmp_path: Path
) -> None:
    done = CliRunner().invoke(cli, ["install"], env={"CNI_DIR": str(tmp_path)})
    assert done.exit_code == 0
    assert asked[0][1] == tmp_path


def test_a_self_contained_plugin_tells_where_it_will_run_from(
    asked: list[Any], tmp_path: Path
) -> None:
    done = run(
        *("--self-contained", "--cni-dir", tmp_path, "--socket-path", "/run/s.sock"),
        *("--runtime-dir", "/opt/cni"),
    )
    assert done.output == (
        f"installed {tmp_path}/bin/metis, which runs from /opt/cni/metis/tree\n"
    )
    options = {"socket_path": "/run/s.sock", "runtime_dir": "/opt/cni"}
    assert asked == [("self-contained", tmp_path, options)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--runtime-dir", "/opt/cni"], "--runtime-dir is for --self-contained alone"),
        (["--self-contained", "--runtime-dir", ""], "it is empty"),
        (["--socket-path", ""], "it is empty"),
        (["--cni-dir", ""], "it is empty"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], said: str, asked: list[Any], tmp_path: Path
) -> None:
    done = run("--cni-dir", tmp_path, *arguments)
    assert done.exit_code == 2
    assert said in done.output
    assert asked == []


def test_a_failure_is_one_line(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise InstallError("the plugin does not work")

    monkeypatch.setattr(module, "install", refuse)
    done = run("--cni-dir", tmp_path)
    assert done.exit_code == 1
    assert done.output == "Error: the plugin does not work\n"
