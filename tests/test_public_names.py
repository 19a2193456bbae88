"""The names that an embedder may rely on, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import metis

PUBLIC = {
    "AddressInUse",
    "AddressTaken",
    "Daemon",
    "DaemonConfig",
    "InvalidRequest",
    "MemoryTransport",
    "MetisError",
    "NotAllocated",
    "PoolExhausted",
    "StoreBusy",
    "StoreDamaged",
    "StoreError",
    "StoreIncompatible",
    "StoreUnavailable",
    "TcpTransport",
    "TransportError",
    "UnixTransport",
    "__version__",
    "open_channel",
    "serve",
}


def test_the_public_names_are_these_and_all_of_them_load() -> None:
    assert set(metis.__all__) == PUBLIC
    assert set(dir(metis)) >= PUBLIC
    for name in PUBLIC:
        assert getattr(metis, name) is not None


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sreve'"):
        metis.sreve  # noqa: B018  # the access is the test


def test_importing_the_package_loads_neither_trio_nor_sqlite() -> None:
    code = (
        "import sys, metis; "
        "print(sorted({'trio', 'apsw', 'grpclib', 'click'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.decode().strip() == "[]"
