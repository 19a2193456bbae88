"""What a run was made on, in so far as it explains the figures.

No host names, users or paths: the record is published.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata

PACKAGES = ("trio", "h2", "hpack", "grpclib", "betterproto2", "apsw", "grpcio")
"""Packages whose version moves the figures."""


def machine() -> dict[str, object]:
    """CPUs, kernel, system, Python and versions."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", "Linux"),
        "python": f"{platform.python_implementation()} {sys.version.split()[0]}",
        "versions": {name: metadata.version(name) for name in PACKAGES},
    }


def in_words(told: Mapping[str, object]) -> str:
    """A machine as one line."""
    versions = told.get("versions")
    named = versions if isinstance(versions, dict) else {}
    return (
        f"{told.get('cpus')} CPUs ({told.get('architecture')}), {told.get('system')}, "
        f"kernel {told.get('kernel')}, {told.get('python')}; "
        + ", ".join(f"{name} {version}" for name, version in named.items())
    )
