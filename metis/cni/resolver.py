"""Reading the resolv.conf that a configuration names.

May touch that file. A pod without the name service that it was to have is worse
than none: what cannot be read fails the ADD, before anything is taken.
"""

from __future__ import annotations

import os
import stat

from metis.cni.dns import DNS, parse_resolv_conf
from metis.cni.protocol import INVALID_CONFIGURATION, IO_FAILURE, CNIError, shown

MAX_BYTES = 65_536
"""Largest file that is read. Resolvers look at a few lines; this bounds what a
wrong path can put into memory and into a result."""


def read_resolv_conf(path: str) -> DNS:
    """Read a resolv.conf.

    Raises:
      CNIError: code 5 when the file cannot be read, 7 when it is no such file.
    """
    try:
        # Not blocking: a path that is a pipe must not hold the pod up.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _refused(path, "is not a file")
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(MAX_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CNIError(
            IO_FAILURE, f"ipam.resolvConf {shown(path)} cannot be read: {error}"
        ) from error
    if len(data) > MAX_BYTES:
        raise _refused(path, f"has more than {MAX_BYTES} bytes")
    try:
        return parse_resolv_conf(data.decode())
    except UnicodeDecodeError:
        raise _refused(path, "is not a text in UTF-8") from None


def _refused(path: str, why: str) -> CNIError:
    return CNIError(
        INVALID_CONFIGURATION,
        f"ipam.resolvConf {shown(path)} {why}",
        "it must name a file like /etc/resolv.conf",
    )
