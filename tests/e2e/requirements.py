"""What a test needs of the machine, and what happens when it is not there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

PLUGINS = Path("/usr/lib/cni")
"""Where Debian's containernetworking-plugins are."""


def require(package: str, *needed: str | Path) -> None:
    """Skip the test, or fail it in CI, unless the machine has all of `needed`.

    Args:
      package: the Debian package that brings them.
      needed: names of programs on PATH, or paths of files.
    """
    missing = [
        str(one)
        for one in needed
        if not (one.exists() if isinstance(one, Path) else shutil.which(one))
    ]
    if missing:
        unmet(f"{', '.join(missing)} not found: apt-get install {package}")


def unmet(reason: str) -> None:
    """Skip the test for the reason, or fail it in CI, where nothing may be missing."""
    if os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail(f"{reason} (CI skips nothing)")
    pytest.skip(reason)
