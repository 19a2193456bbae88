"""`metis demo`: what a new user sees first."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.cli.conftest import run_metis


def test_the_demo_shows_every_rule_and_leaves_nothing_behind() -> None:
    before = set(Path(tempfile.gettempdir()).glob("metis-demo-*"))
    done = run_metis("demo")
    assert done.returncode == 0, done.stderr
    answers = {
        tuple(cells[0].split()): cells[1]
        for line in done.stdout.splitlines()
        if len(cells := [cell.strip() for cell in line.split("│")[1:-1]]) == 4
    }
    assert answers["ADD", "web-0"] == "10.88.0.2/29 fd00:88::2/64"
    assert answers["CHECK", "web-0"] == "ok"
    assert answers["DEL", "web-1"] == "ok"
    # The address that cooled down, for the call that waited for it.
    assert answers["ADD", "db-2"] == "10.88.0.3/29 fd00:88::7/64"
    assert answers["ADD", "db-3"].startswith("code 11: no ipv4 address is free")
    assert answers["DEL", "db-3"] == "ok"
    assert "10.88.0.6" in done.stdout
    assert set(Path(tempfile.gettempdir()).glob("metis-demo-*")) == before
