"""Installing: the launcher is whole, works, and depends on nothing around it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from metis.cni import install as module
from metis.cni import launcher, trees, trial
from metis.cni import survey as survey_module
from metis.cni.install import install, install_self_contained, runtime_directory
from metis.cni.protocol import version_text
from metis.cni.survey import Survey, survey
from metis.config import DEFAULT_SOCKET_PATH
from metis.errors import InstallError


@pytest.fixture(scope="module")
def found() -> Survey:
    return survey()


@pytest.fixture(autouse=True)
def surveyed(found: Survey, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare every installation the half second of importing everything."""
    monkeypatch.setattr(module, "survey", lambda: found)


def pretend(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have another launcher written."""
    monkeypatch.setattr(launcher, "launcher", lambda *_: script)


def answer(program: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program], env=environ, capture_output=True, text=True, check=False
    )


def test_the_installed_plugin_answers_in_an_empty_environment(tmp_path: Path) -> None:
    program = install(tmp_path)
    assert program == tmp_path / "bin" / "metis"
    assert program.stat().st_mode & 0o7777 == 0o755
    done = answer(program, CNI_COMMAND="VERSION")
    assert (done.returncode, done.stdout, done.stderr) == (0, version_text(), "")


def test_without_a_command_the_installed_program_is_the_command_line(
    tmp_path: Path,
) -> None:
    program = install(tmp_path)
    done = answer(program)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("CNI plugin metis")
    told = subprocess.run(
        [program, "--version"], env={}, capture_output=True, text=True, check=False
    )
    assert "version" in told.stdout


def test_the_runtime_s_environment_leads_it_nowhere_else(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    trap.mkdir()
    for name in ("metis", "json", "sitecustomize"):
        (trap / f"{name}.py").write_text("raise SystemExit('trapped')")
    program = install(tmp_path)
    done = answer(
        program,
        CNI_COMMAND="VERSION",
        PYTHONPATH=str(trap),
        PYTHONHOME=str(trap),
        PYTHONSTARTUP=str(trap / "metis.py"),
    )
    assert (done.returncode, done.stdout) == (0, version_text())


def test_a_second_installation_replaces_the_first(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "metis").write_text("#!/bin/false\n")
    (tmp_path / "bin" / "bridge").write_text("somebody else's")
    before = (tmp_path / "bin" / "metis").stat().st_ino
    install(tmp_path)
    assert (tmp_path / "bin" / "metis").stat().st_ino != before
    assert sorted(p.name for p in (tmp_path / "bin").iterdir()) == ["bridge", "metis"]


def test_the_socket_s_path_is_fixed(tmp_path: Path) -> None:
    assert DEFAULT_SOCKET_PATH in install(tmp_path).read_text()
    text = install(tmp_path, socket_path="/run/metis.sock").read_text()
    assert "/run/metis.sock" in text
    assert DEFAULT_SOCKET_PATH not in text


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("metis.sock", "'metis.sock': it must be an absolute path"),
        ("", "'': it must be an absolute path"),
        ("/run/me\0tis", "must be an absolute path without control characters"),
        ("/run/me\ntis", "must be an absolute path without control characters"),
        ("/" + "s" * 107, "has 108 bytes.*may have 107"),
    ],
)
def test_a_socket_s_path_that_will_not_do_is_named(
    path: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(InstallError, match=said):
        install(tmp_path, socket_path=path)
    assert list(tmp_path.iterdir()) == []


def test_a_socket_behind_a_link_that_others_may_move_is_refused(tmp_path: Path) -> None:
    everybody_s = tmp_path / "everybody's"
    everybody_s.mkdir()
    everybody_s.chmod(0o1777)
    link = tmp_path / "link"
    link.symlink_to(everybody_s)
    with pytest.raises(InstallError, match=r"the socket's path .* others may write to"):
        install(tmp_path, socket_path=f"{link}/s.sock")


def test_a_missing_directory_is_named_and_not_made(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    with pytest.raises(InstallError, match="absent is not a directory"):
        install(absent)
    assert not absent.exists()


def test_a_directory_in_the_plugin_s_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "bin" / "metis").mkdir(parents=True)
    with pytest.raises(InstallError, match="bin/metis is a directory"):
        install(tmp_path)


def test_a_file_in_the_place_of_bin_is_named(tmp_path: Path) -> None:
    (tmp_path / "bin").write_text("")
    with pytest.raises(InstallError, match="bin"):
        install(tmp_path)


def test_a_file_system_that_refuses_is_named() -> None:
    with pytest.raises(InstallError, match="/proc/self/bin/metis cannot be installed"):
        install(Path("/proc/self"))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("#!/bin/sh\necho boom >&2; exit 3\n", "status 3 and boom"),
        ("#!/bin/sh\necho '{}'\n", "status 0 and {}"),
        (
            '#!/bin/sh\necho \'{"code":999,"msg":"a","details":"b"}\'; exit 1\n',
            "1 and a b",
        ),
        ('#!/bin/sh\necho \'{"supportedVersions":["9.9"]}\'\n', "status 0 and .*9.9"),
        ("#!/bin/sh\nexit 0\n", "status 0"),
        ("#!/absent\n", "No such file"),
    ],
)
def test_a_launcher_that_does_not_work_leaves_everything_as_it_was(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "metis").write_text("the old one")
    pretend(script, monkeypatch)
    with pytest.raises(InstallError, match=said):
        install(tmp_path)
    assert [p.name for p in (tmp_path / "bin").iterdir()] == ["metis"]
    assert (tmp_path / "bin" / "metis").read_text() == "the old one"


def test_a_launcher_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend("#!/bin/sh\nexec sleep 60\n", monkeypatch)
    monkeypatch.setattr(trial, "TIMEOUT", 0.1)
    with pytest.raises(InstallError, match="did not answer VERSION within"):
        install(tmp_path)
    assert list((tmp_path / "bin").iterdir()) == []


def test_a_plugin_that_lacks_what_only_direct_mode_needs_is_not_installed(
    found: Survey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VERSION alone would not notice: the search path leads to half a package."""
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    (shadow / "apsw.py").write_text("raise ImportError('the half of it')")
    search_path: Sequence[str] = [str(shadow), *found.search_path]
    broken = Survey(found.interpreter, search_path, [], [], [], [])
    monkeypatch.setattr(module, "survey", lambda: broken)
    with pytest.raises(InstallError, match=r"an ADD without daemon .*the half of it"):
        install(tmp_path)
    assert list((tmp_path / "bin").iterdir()) == []


def test_an_environment_that_cannot_import_metis_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "h2.py").write_text("raise ImportError('h2 is broken here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(module, "survey", survey_module.survey)
    with pytest.raises(InstallError, match=r"import all of metis: .*broken here"):
        install(tmp_path)


def test_launchers_that_were_cut_off_are_removed_once_they_are_old(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "bin"
    directory.mkdir()
    old, young, other = (directory / n for n in (".metis-old", ".metis-new", ".x-old"))
    for path in (old, young, other):
        path.write_text("half of a launcher")
    for path in (old, other):
        os.utime(path, (0, 0))
    install(tmp_path)
    names = {path.name for path in directory.iterdir()}
    assert names == {".metis-new", ".x-old", "metis"}


def test_an_ordinary_installation_removes_trees_that_nobody_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "SETTLING_SECONDS", 0.0)
    used, unused = (tmp_path / "metis" / f"0.1.0-{n}" for n in ("aaaaaa", "bbbbbb"))
    for tree in (used, unused):
        tree.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "metis").write_text(f"#!{used}/python -IScimport metis_start\n")
    install(tmp_path)
    assert used.exists()
    assert not unused.exists()
    install(tmp_path)
    assert not used.exists()
    assert [p.name for p in (tmp_path / "metis").iterdir()] == [trees.LOCK]


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("/host/opt/cni", "/opt/cni"),
        ("/host/opt/cni/", "/opt/cni"),
        ("/opt/cni", "/opt/cni"),
        ("/hosts/cni", "/hosts/cni"),
    ],
)
def test_a_container_s_view_of_the_host_is_taken_off(here: str, there: str) -> None:
    assert runtime_directory(Path(here)) == there


def test_a_relative_directory_of_the_runtime_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match=r"'opt/cni'.*absolute path"):
        install_self_contained(tmp_path, runtime_dir="opt/cni")
    assert not (tmp_path / "metis").exists()


def test_a_path_too_long_for_a_first_line_is_named_before_anything_is_written(
    tmp_path: Path,
) -> None:
    runtime_dir = "/" + "d" * 100
    with pytest.raises(InstallError, match="no more than 102 fit into the first line"):
        install_self_contained(tmp_path, runtime_dir=runtime_dir)
    assert [p.name for p in (tmp_path / "metis").iterdir()] == [trees.LOCK]
