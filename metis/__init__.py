"""Node-local addresses for pods: a Trio daemon over SQLite, and its CNI plugin.

The names below are the whole public interface for a program that embeds the
daemon. They are loaded on first use, because the CNI plugin is started once
for every pod and must not pay for what it does not touch.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

TYPE_CHECKING = False  # what type checkers take for true, without importing typing
if TYPE_CHECKING:
    from metis.config import DaemonConfig as DaemonConfig
    from metis.daemon import Daemon as Daemon
    from metis.daemon import serve as serve
    from metis.errors import AddressInUse as AddressInUse
    from metis.errors import AddressTaken as AddressTaken
    from metis.errors import InvalidRequest as InvalidRequest
    from metis.errors import MetisError as MetisError
    from metis.errors import NotAllocated as NotAllocated
    from metis.errors import PoolExhausted as PoolExhausted
    from metis.errors import StoreBusy as StoreBusy
    from metis.errors import StoreDamaged as StoreDamaged
    from metis.errors import StoreError as StoreError
    from metis.errors import StoreIncompatible as StoreIncompatible
    from metis.errors import StoreUnavailable as StoreUnavailable
    from metis.errors import TransportError as TransportError
    from metis.rpc.channel import open_channel as open_channel
    from metis.rpc.transport import MemoryTransport as MemoryTransport
    from metis.rpc.transport import TcpTransport as TcpTransport
    from metis.rpc.transport import UnixTransport as UnixTransport

_HOME = {
    "DaemonConfig": "metis.config",
    "Daemon": "metis.daemon",
    "serve": "metis.daemon",
    "AddressInUse": "metis.errors",
    "AddressTaken": "metis.errors",
    "InvalidRequest": "metis.errors",
    "MetisError": "metis.errors",
    "NotAllocated": "metis.errors",
    "PoolExhausted": "metis.errors",
    "StoreBusy": "metis.errors",
    "StoreDamaged": "metis.errors",
    "StoreError": "metis.errors",
    "StoreIncompatible": "metis.errors",
    "StoreUnavailable": "metis.errors",
    "TransportError": "metis.errors",
    "open_channel": "metis.rpc.channel",
    "MemoryTransport": "metis.rpc.transport",
    "TcpTransport": "metis.rpc.transport",
    "UnixTransport": "metis.rpc.transport",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> object:
    """Load a public name from its module (PEP 562)."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'metis' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
