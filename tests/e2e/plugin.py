"""The plugin itself as a process, for what no main plugin hands on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

from tests.e2e.ipam import Config

Process = subprocess.Popen[bytes]


def delegate(ipam: Config, version: str = "1.0.0") -> Config:
    """The configuration with which ptp hands on to its IPAM plugin."""
    return {"cniVersion": version, "name": "pods", "type": "ptp", "ipam": ipam}


class Plugin:
    """The installed plugin as a runtime starts it, with one configuration."""

    def __init__(self, program: Path, config: Config) -> None:
        self._program = program
        self._config = config

    def start(self, command: str, container: str, **more: object) -> Process:
        """Start one call.

        Args:
          command: the verb.
          container: its id.
          more: keys that the runtime adds to the configuration.
        """
        process = subprocess.Popen(
            [self._program],
            env={
                "CNI_COMMAND": command,
                "CNI_CONTAINERID": container,
                "CNI_NETNS": "/run/netns/absent",
                "CNI_IFNAME": "eth0",
                "CNI_PATH": str(self._program.parent),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(self._config | more).encode())
        process.stdin.close()
        process.stdin = None
        return process

    def call(self, command: str, container: str, **more: object) -> Any:
        """One call; what it printed, which is an error if it failed."""
        return finished(self.start(command, container, **more))

    def add_many(self, names: Sequence[str]) -> dict[str, str]:
        """ADDs at once; addresses by container."""
        processes = [self.start("ADD", name) for name in names]
        return dict(zip(names, map(added, processes), strict=True))


def finished(process: Process) -> Any:
    """What a call printed; nothing is an empty object."""
    stdout, stderr = process.communicate()
    answer = json.loads(stdout) if stdout else {}
    assert (process.returncode == 0) == ("code" not in answer), (answer, stderr)
    return answer


def added(process: Process) -> str:
    """The address that an ADD was given, which it must be."""
    answer = finished(process)
    assert "ips" in answer, answer
    return str(ip_interface(answer["ips"][0]["address"]).ip)
