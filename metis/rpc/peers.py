"""Who is at the other end of a Unix socket, and whether it may be there.

The kernel tells the uid and the pid of whoever connected, as of that moment
(SO_PEERCRED, unix(7)). Nothing that the peer says or does later changes them, so
this holds whatever the mode of the socket file lets through.

Touches: that option of sockets that were accepted; the log.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import struct
from collections.abc import Collection
from dataclasses import dataclass

import trio

log = logging.getLogger("metis.rpc")

ROOT = 0
"""The uid to which the kernel forbids nothing anyway."""

NOBODY_KNOWN = -1
"""In place of a uid that the kernel does not tell; no peer ever has it."""

WARNING_SECONDS = 10.0
"""Least time between two warnings: whoever connects in a loop shall fill neither the
log nor the disk below it."""

_UCRED = struct.Struct("iII")
"""struct ucred: pid, uid, gid (unix(7))."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A process, when it connected.

    Attributes:
      uid: its effective uid, as the daemon's user namespace has it.
      pid: its number, as the daemon's pid namespace has it; 0 where that has none.
    """

    uid: int
    pid: int


def peer_of(sock: socket.socket) -> Peer:
    """Who connected to an accepted Unix socket."""
    try:
        data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    except OSError:
        return Peer(NOBODY_KNOWN, 0)
    pid, uid, _ = _UCRED.unpack(data)
    return Peer(uid, pid)


class Doorkeeper:
    """Lets in root, the user of this process, and the uids that it is given.

    Args:
      place: where the door is, for the log.
      allowed_uids: who else may come in.
    """

    def __init__(self, place: str, allowed_uids: Collection[int] = ()) -> None:
        self._place = place
        self._uids = frozenset({ROOT, os.geteuid(), *allowed_uids})
        self._next_warning = -math.inf
        self._unmentioned = 0

    def admits(self, sock: socket.socket) -> bool:
        """Whether the peer of a socket may be served; logs it if not."""
        peer = peer_of(sock)
        if peer.uid in self._uids:
            return True
        self._warn(peer)
        return False

    def _warn(self, peer: Peer) -> None:
        now = trio.current_time()
        if now < self._next_warning:
            self._unmentioned += 1
            return
        log.warning(
            "a connection was refused: its user is not allowed",
            extra={
                "address": self._place,
                "uid": peer.uid,
                "pid": peer.pid,
                "unmentioned": self._unmentioned,
            },
        )
        self._next_warning = now + WARNING_SECONDS
        self._unmentioned = 0
