"""Trees: one installation at a time, and none is removed that somebody runs from."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from metis.cni import trees
from metis.cni.launcher import bundled_launcher
from metis.errors import InstallError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "metis"
    path.mkdir()
    return path


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(trees, "SETTLING_SECONDS", 0.0)
    return tmp_path / "launcher"


def planted(directory: Path, name: str) -> Path:
    """A tree whose interpreter is a program that waits for its standard input."""
    tree = directory / name
    tree.mkdir()
    shutil.copy("/bin/cat", tree / "python")
    return tree


def test_names_tell_the_version_and_never_come_again() -> None:
    names = {trees.new_name() for _ in range(20)}
    assert len(names) == 20
    assert all(name.startswith("0.") for name in names)


def test_a_launcher_tells_its_tree(program: Path) -> None:
    name = trees.new_name()
    program.write_text(bundled_launcher(f"/opt/cni/metis/{name}/python"))
    assert trees.used_by(program) == name


@pytest.mark.parametrize(
    "text", ["", "#!/bin/sh\n", "#!/usr/bin/python3 -I\n", "\x7fELF", "#!\n"]
)
def test_another_program_has_no_tree(text: str, program: Path) -> None:
    program.write_text(text)
    assert trees.used_by(program) is None


def test_no_program_has_no_tree(program: Path) -> None:
    assert trees.used_by(program) is None


def test_trees_go_unless_the_launcher_or_a_process_uses_them(
    directory: Path, program: Path
) -> None:
    used, running, unused = (
        planted(directory, f"0.1.0-{n}") for n in ("aaaaaa", "bbbbbb", "cccccc")
    )
    half = directory / "0.1.0-dddddd"  # of an installation that was cut off
    (half / "modules").mkdir(parents=True)
    other = planted(directory, "somebody's")
    program.write_text(bundled_launcher(f"/opt/cni/metis/{used.name}/python"))

    process = subprocess.Popen([running / "python"], stdin=subprocess.PIPE)
    try:
        trees.remove_unused(directory, program)
        assert set(directory.iterdir()) == {used, running, other}
    finally:
        process.communicate()
    trees.remove_unused(directory, program)
    assert set(directory.iterdir()) == {used, other}
    assert unused.name not in os.listdir(directory)


@pytest.mark.parametrize(
    ("age", "waited"), [(0.25, [0.75]), (5.0, [0.0]), (-3600.0, [1.0])]
)
def test_nothing_is_removed_from_under_who_has_just_read_the_launcher_before(
    age: float,
    waited: list[float],
    directory: Path,
    program: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last case is a clock that was set back: the wait has a bound."""
    monkeypatch.setattr(trees, "SETTLING_SECONDS", 1.0)
    tree = planted(directory, "0.1.0-aaaaaa")
    program.write_text(bundled_launcher("/opt/cni/metis/0.1.0-bbbbbb/python"))
    renamed = program.stat().st_ctime
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        assert tree.exists()
        slept.append(round(seconds, 3))

    monkeypatch.setattr(time, "time", lambda: renamed + age)
    monkeypatch.setattr(time, "sleep", sleep)
    trees.remove_unused(directory, program)
    assert slept == waited
    assert not tree.exists()


def test_the_directory_is_made_for_everybody_to_read(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with trees.locked(tmp_path / "metis"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "metis").stat().st_mode & 0o7777 == 0o755


def test_an_installation_waits_for_another_and_says_so_when_it_never_ends(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "LOCK_SECONDS", 0.0)
    with (
        trees.locked(directory),
        pytest.raises(InstallError, match=r"metis/lock for 0 s"),
        trees.locked(directory),
    ):
        pass
    with trees.locked(directory):
        pass


def test_the_lock_is_the_holder_s_alone(directory: Path) -> None:
    """Nothing that was started meanwhile keeps it."""
    with trees.locked(directory):
        child = subprocess.Popen(
            ["/bin/sh", "-c", "echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            close_fds=False,
        )
    try:
        assert child.stdout is not None
        child.stdout.readline()  # what it was not to inherit is closed by now
        with (directory / trees.LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        child.communicate()
