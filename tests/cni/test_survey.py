"""The survey: what the plugin needs is found where this environment has it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import apsw
import pytest
import trio

from metis.cni import survey as module
from metis.cni.survey import ROOT, Survey, survey
from metis.errors import InstallError


@pytest.fixture(scope="module")
def found() -> Survey:
    return survey()


def test_the_search_path_has_the_standard_library_and_every_dependency(
    found: Survey,
) -> None:
    assert found.search_path[0] == os.path.dirname(os.__file__)
    for needed in (ROOT, str(Path(trio.__file__).parents[1])):
        assert needed in found.search_path


def test_the_search_path_has_nothing_that_nobody_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root's plugin imports from each of these directories."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    search_path = survey().search_path
    assert str(tmp_path) not in search_path
    assert os.path.dirname(sys.executable) not in search_path


def test_a_dependency_is_found_by_the_environment_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(
        Path(trio.__file__).parent,
        tmp_path / "trio",
        ignore=shutil.ignore_patterns("_tests", "__pycache__"),
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    found = survey()
    assert str(tmp_path) in found.search_path
    assert str(tmp_path / "trio") in found.packages
    # It is byte-compiled by now, whatever the variable says.
    assert list((tmp_path / "trio" / "__pycache__").glob("__init__.*.pyc"))


def test_an_archive_is_no_place_to_run_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROOT", str(tmp_path / "metis.pyz"))
    with pytest.raises(InstallError, match=r"metis\.pyz, which is no directory"):
        survey()


def test_packages_extensions_and_libraries_are_all_there(found: Survey) -> None:
    names = {os.path.basename(path) for path in found.packages}
    assert {"metis", "trio", "h2", "apsw", "typing_extensions.py"} <= names
    assert not names & {"pytest", "grpc", "google"}
    assert os.path.realpath(apsw.__file__) in found.extensions
    libraries = [os.path.basename(path) for path in found.libraries]
    assert any(name.startswith(("ld-", "ld64")) for name in libraries)
    assert any(name.startswith("libc.") for name in libraries)
    for path in (*found.extensions, *found.libraries, *found.metadata):
        assert os.path.isfile(path), path
    assert any("betterproto2" in path for path in found.metadata)


def test_the_interpreter_is_the_program_itself(found: Survey) -> None:
    assert found.interpreter == os.path.realpath(sys.executable)


def test_a_survey_that_takes_too_long_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TIMEOUT", 0.01)
    with pytest.raises(InstallError, match="did not import metis within"):
        survey()
