"""The plugin in a process that stays: one call a line, and one answer a line.

A fresh process costs a third of a second, most of it imports. This one is the whole
plugin, direct mode included, without that; each call says when it began, which the
plugin otherwise learns from the kernel's record of its process.
"""

from __future__ import annotations

import json
import sys
from functools import partial

from metis.clock import SystemClock
from metis.cni import client, direct, verbs  # imported before the first call
from metis.cni.origin import Origin
from metis.cni.plugin import _open_direct, run

LOADED = (client, direct, verbs)


def main() -> None:
    """Answer calls until standard input ends."""
    boot_id = SystemClock().boot_id()
    for line in sys.stdin:
        request = json.loads(line)
        written: list[str] = []
        complaints: list[str] = []
        status = run(
            request["environment"],
            read=json.dumps(request["configuration"]).encode,
            write=written.append,
            complain=complaints.append,
            open_direct=_open_direct,
            read_origin=partial(Origin, boot_id, request["started_boottime_ms"]),
        )
        answer = {"status": status, "stdout": "".join(written), "stderr": complaints}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
