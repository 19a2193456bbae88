"""docs/faults.md names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "faults.md"


def named() -> list[tuple[str, str]]:
    """Every test that the page names, with the file that it says it is in."""
    found: list[tuple[str, str]] = []
    for line in PAGE.read_text().splitlines():
        if not line.startswith("| ") or line.startswith("| reported"):
            continue
        file = ""
        for word in re.findall(r"`([^`]+)`", line.rpartition(" | ")[2]):
            if "/" in word:
                file = word
            else:
                found.append((file, word))
    return found


@pytest.mark.parametrize(("file", "name"), sorted(set(named())))
def test_a_test_that_is_named_is_there(file: str, name: str) -> None:
    assert f"def {name}(" in (ROOT / file).read_text()


def test_every_fault_has_a_test() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    for row in rows:
        if not row.startswith("| reported"):
            assert "`tests/" in row.rpartition(" | ")[2], row
