"""The examples run as they stand and print what their readers will see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_the_embedding_example_allocates_and_stops_cleanly() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / "embedded.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    *allocations, last = done.stdout.splitlines()
    assert {line.split()[2] for line in allocations} == {
        "10.240.0.2",
        "10.240.0.3",
        "10.240.0.4",
    }
    assert last == "container-0 gave its address back"
