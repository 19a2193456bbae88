"""The service manager's notification socket (sd_notify(3)), without libsystemd."""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger("metis.daemon")

NOTIFY_SECONDS = 0.5
"""How long a service manager may let its queue be full, before it is not told: the
whole daemon waits meanwhile."""


def sd_notify(*assignments: str) -> bool:
    """Tell the service manager about the state of this process.

    Args:
      assignments: lines such as "READY=1" or "STATUS=serving".

    Returns:
      Whether a service manager listens and was told. Never raises: a daemon
      does not stop because nobody listens to it.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]  # Linux abstract namespace (unix(7))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(NOTIFY_SECONDS)
            sock.connect(address)
            sock.send("\n".join(assignments).encode())
    except OSError as error:
        log.warning("service manager was not told", extra={"error": error})
        return False
    return True
