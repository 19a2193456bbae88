"""`metis.paths`: links out of root's hands are refused, plain paths are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from metis.errors import InvalidRequest
from metis.paths import exposed_directory_of, refuse_exposed_links


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that stands for "/", since what tests may use lies below /tmp.

    Directories above it count as nobody else's.
    """
    real = os.lstat

    def lstat(path: str | Path) -> os.stat_result:
        status = real(path)
        if tmp_path.is_relative_to(path):
            return os.stat_result((status.st_mode & ~0o022, *status[1:]))
        return status

    monkeypatch.setattr("metis.paths.os.lstat", lstat)
    for name, mode in {
        "etc": 0o755,
        "tmp": 0o1777,
        "open": 0o777,
        "run": 0o755,
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    (tmp_path / "var").mkdir()
    (tmp_path / "var/run").symlink_to("../run")
    return tmp_path


def test_a_plain_path_is_taken_wherever_it_is(root: Path) -> None:
    (root / "tmp/file").touch()
    for path in ("tmp/file", "tmp/absent", "open/a/b", "etc/db", "../x", "file/x"):
        refuse_exposed_links("dbPath", str(root / path))
    refuse_exposed_links("dbPath", "/tmp/metis/db.sqlite")


def test_a_link_between_root_s_own_places_is_taken(root: Path) -> None:
    (root / "etc/metis").symlink_to(root / "run")
    (root / "run/db").symlink_to("elsewhere")
    for path in ("var/run/metis.sock", "etc/metis/x", "etc/metis/db", "run/db"):
        refuse_exposed_links("dbPath", str(root / path))


def test_the_link_of_every_linux_from_var_run_to_run_is_taken() -> None:
    refuse_exposed_links("daemonSocket", "/var/run/metis.sock")


LINKS = {
    "to a file in a shared directory": ("etc/db", "tmp/db", "etc/db"),
    "to the shared directory": ("etc/shared", "tmp", "etc/shared/db"),
    "far below it": ("etc/deep", "tmp/a/b", "etc/deep/c/db"),
    "to one without a sticky bit": ("etc/shared", "open", "etc/shared/db"),
    "through it and out again": ("etc/odd", "tmp/a/../../etc", "etc/odd/db"),
    "that lies in it": ("tmp/link", "etc", "tmp/link/db"),
    "that lies below it": ("tmp/a/link", "etc", "tmp/a/link/db"),
    "of the file, that lies in it": ("open/db", "etc/db", "open/db"),
}


@pytest.mark.parametrize("case", LINKS)
def test_a_link_that_others_may_move_is_refused_with_what_is_wrong(
    root: Path, case: str
) -> None:
    link, target, path = LINKS[case]
    (root / "tmp/a/b").mkdir(parents=True)
    (root / link).symlink_to(root / target)
    shared = root / ("open" if "open" in f"{link} {target}" else "tmp")
    with pytest.raises(InvalidRequest) as caught:
        refuse_exposed_links("dbPath", str(root / path))
    assert str(caught.value) == (
        f"dbPath is '{root / path}': the link '{root / link}' leads to "
        f"'{root / target}', and others may write to '{shared}': write the path of a "
        "place that root alone may write to, or one without a link"
    )


def test_a_link_to_a_link_is_followed_to_its_end(root: Path) -> None:
    (root / "etc/first").symlink_to("second")
    (root / "etc/second").symlink_to("../tmp")
    with pytest.raises(InvalidRequest, match=r"the link '.*/etc/first'.*/tmp'"):
        refuse_exposed_links("dbPath", str(root / "etc/first/db"))


def test_a_link_behind_one_that_is_harmless_is_seen(root: Path) -> None:
    (root / "run/shared").symlink_to(root / "tmp")
    with pytest.raises(InvalidRequest, match="others may write to"):
        refuse_exposed_links("dbPath", str(root / "var/run/shared/db"))


def test_a_relative_path_is_judged_from_where_the_process_is(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "etc/shared").symlink_to("../tmp")
    monkeypatch.chdir(root / "run")
    refuse_exposed_links("dbPath", "db")
    with pytest.raises(InvalidRequest, match=r"dbPath is '\.\./etc/shared/db'"):
        refuse_exposed_links("dbPath", "../etc/shared/db")


def test_what_cannot_be_followed_is_left_to_whoever_opens_it(root: Path) -> None:
    (root / "etc/round").symlink_to("round")
    (root / "etc/file").touch()
    for path in ("etc/round/db", "etc/file/db", "etc/absent/db", "etc/" + "x" * 300):
        refuse_exposed_links("dbPath", str(root / path))
    for path in ("", ".", "/", "a\0b", "\udcff"):
        refuse_exposed_links("dbPath", path)


def test_a_link_that_leads_nowhere_yet_is_judged_by_where_that_is(root: Path) -> None:
    (root / "etc/later").symlink_to(root / "tmp/absent/db")
    with pytest.raises(InvalidRequest, match="others may write to"):
        refuse_exposed_links("dbPath", str(root / "etc/later"))


def test_a_directory_is_exposed_when_others_may_replace_what_is_in_it(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "d"
    path = str(directory / "db")
    assert exposed_directory_of(path) is None  # it does not exist
    directory.mkdir()
    for mode, exposed in {
        0o700: False,
        0o775: False,
        0o1777: False,
        0o777: True,
    }.items():
        directory.chmod(mode)
        assert exposed_directory_of(path) == (str(directory) if exposed else None)
