"""Trying a plugin: which answers will do, and what is said of the others."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from metis.cni import trial
from metis.cni.survey import survey
from metis.errors import InstallError


def shell(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


def test_the_versions_of_another_release_will_do() -> None:
    trial.ask_version(shell("""echo '{"supportedVersions":["9.9.9","1.0.0"]}'"""))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("""echo '{"supportedVersions":["9.9.9"]}'""", "status 0"),
        ("""echo '{"supportedVersions":"1.0.0"}'""", "status 0"),
        ("""echo '{"supportedVersions":["1.0.0"]}'; exit 3""", "status 3"),
        ("""echo '["1.0.0"]'""", "status 0"),
        ("kill -9 $$", "status -9"),
        ("printf 'one\\ntwo\\n\\377' >&2", r"and \\xff"),
    ],
)
def test_every_other_answer_is_told(script: str, said: str) -> None:
    with pytest.raises(InstallError, match=f"does not work: VERSION .*{said}"):
        trial.ask_version(shell(script))


def test_nothing_but_the_variables_of_the_call_is_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METIS_TEST", "1")
    seen = tmp_path / "seen"
    answer = """echo '{"supportedVersions":["1.0.0"]}'"""
    trial.ask_version(shell(f"tr '\\0' '\\n' </proc/self/environ >{seen}; {answer}"))
    assert "CNI_COMMAND=VERSION" in seen.read_text()
    assert "METIS_TEST" not in seen.read_text()


def test_an_add_is_made_on_a_database_of_its_own(tmp_path: Path) -> None:
    trial.ask_for_an_address([sys.executable], survey().search_path, str(tmp_path))
    assert (tmp_path / "metis.sqlite").exists()
    assert "verb=ADD" in (tmp_path / "metis.log").read_text()


def test_an_interpreter_without_the_modules_is_told(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match=f"{tmp_path} does not work: an ADD .*metis"):
        trial.ask_for_an_address([sys.executable], [str(tmp_path)], str(tmp_path))


def test_a_root_directory_can_be_entered_by_root_if_it_is_there(
    tmp_path: Path,
) -> None:
    assert trial.can_enter("/") == (os.geteuid() == 0)
    assert not trial.can_enter(str(tmp_path / "absent"))
