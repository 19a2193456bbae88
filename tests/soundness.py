"""After every test, all invariants hold in every database that it touched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from metis.clock import SystemClock
from metis.errors import StoreIncompatible
from metis.store.reading import check_file

MARK = "damages_database"
MARK_LINE = f"{MARK}(why): what it leaves behind breaks an invariant on purpose"

MOVED_ASIDE = ".damaged-"

_MAGIC = b"SQLite format 3\0"
"""How the file of a database begins."""


def databases_below(directory: Path) -> Iterator[Path]:
    """Every database file in a directory, or in one below it."""
    for path in directory.rglob("*"):
        # What was moved aside because it was damaged stays so (metis.store.healing).
        if path.is_file() and not path.is_symlink() and MOVED_ASIDE not in path.name:
            # Nobody has it open any more: the test is over.
            with path.open("rb") as file:
                if file.read(len(_MAGIC)) == _MAGIC:
                    yield path


def damages(item: pytest.Item) -> bool:
    """Whether a test leaves a damaged database behind on purpose; it says why."""
    mark = item.get_closest_marker(MARK)
    if mark is None:
        return False
    (why,) = mark.args
    assert isinstance(why, str), f"{item}: say why in the mark {MARK}"
    return True


def check_files(directory: Path) -> None:
    """See that every invariant holds in the databases of a directory."""
    for path in databases_below(directory):
        check_database(path)


def check_database(path: Path) -> None:
    """See that every invariant holds in a database, if it is one of ours."""
    with contextlib.suppress(StoreIncompatible):
        findings = check_file(str(path), SystemClock())
        assert not findings.violations, f"{path}: {findings.violations}"
