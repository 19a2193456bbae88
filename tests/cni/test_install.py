"""Installing: the launcher is whole, works, and depends on nothing around it."""

from __future__ import annotations

import site
import subprocess
import sys
from pathlib import Path

import pytest

from metis.cni import install as module
from metis.cni.install import InstallError, install, launcher
from metis.cni.protocol import version_text


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


@pytest.mark.parametrize(
    "name",
    ["blank in it", "quote's blank", "both \"of' them", "dollar $HOME", "l" * 200],
)
def test_an_interpreter_that_no_shebang_can_name_is_started_by_the_shell(
    name: str, tmp_path: Path
) -> None:
    directory = tmp_path / name
    directory.mkdir()
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    program = tmp_path / "ipam-of-ours"
    program.write_text(launcher(str(python)))
    program.chmod(0o755)
    done = answer(program, CNI_COMMAND="VERSION")
    assert (done.returncode, done.stdout, done.stderr) == (0, version_text(), "")
    assert program.read_text().startswith("#!/bin/sh\n")
    done = answer(program)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("CNI plugin metis")
    told = subprocess.run(
        [program, "--version"], env={}, capture_output=True, text=True, check=False
    )
    assert "version" in told.stdout


def test_the_shell_form_keeps_the_program_s_name(tmp_path: Path) -> None:
    python = tmp_path / "echo arguments"
    python.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; print(sys.argv[4:])" "$@"\n'
    )
    python.chmod(0o755)
    program = tmp_path / "ipam-of-ours"
    program.write_text(launcher(str(python)))
    program.chmod(0o755)
    assert answer(program).stdout == f"[{str(program)!r}]\n"


def test_the_interpreter_is_the_running_one_unresolved() -> None:
    assert launcher(sys.executable).startswith(f"#!{sys.executable} -I\n")


def test_a_relative_interpreter_is_refused() -> None:
    with pytest.raises(InstallError, match=r"'python3'.*absolute"):
        launcher("python3")


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
        ("#!/bin/sh\nexit 0\n", "status 0"),
        ("#!/absent\n", "No such file"),
    ],
)
def test_a_launcher_that_does_not_work_leaves_everything_as_it_was(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "metis").write_text("the old one")
    monkeypatch.setattr(module, "launcher", lambda _python: script)
    with pytest.raises(InstallError, match=said):
        install(tmp_path)
    assert [p.name for p in (tmp_path / "bin").iterdir()] == ["metis"]
    assert (tmp_path / "bin" / "metis").read_text() == "the old one"


def test_a_launcher_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "launcher", lambda _: "#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(module, "VERIFY_TIMEOUT", 0.1)
    with pytest.raises(InstallError, match="did not answer VERSION within"):
        install(tmp_path)
    assert list((tmp_path / "bin").iterdir()) == []


def test_a_package_in_site_packages_is_found_without_being_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = str(Path(module.__file__).parents[2])
    monkeypatch.setattr(site, "getsitepackages", list)
    assert f"sys.path.insert(0, {root!r})" in launcher("/usr/bin/python3")
    monkeypatch.setattr(site, "getsitepackages", lambda: [root])
    assert "sys.path" not in launcher("/usr/bin/python3")
