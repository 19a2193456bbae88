"""The plugin itself as a process, for what no main plugin hands on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

from tests.e2e.ipam import Config

Process = subprocess.Popen[bytes]

ADD_TRIES = 5
STATUS_TRIES = 20

NO_ANSWER = "cannot be used ("
"""What is said (with code 11, 50 for a STATUS) where neither the daemon nor a database
that is well answered in time: both have seconds, which a busy machine may take away."""


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
        """One call; what it printed, which is an error if it failed.

        STATUS, which has 0.4 s, is asked again where there was no answer in time.
        """
        for _ in range(STATUS_TRIES if command == "STATUS" else 1):
            answer = finished(self.start(command, container, **more))
            if NO_ANSWER not in answer.get("msg", ""):
                break
        return answer

    def start_many(self, names: Sequence[str]) -> dict[str, Process]:
        """ADDs at once; processes by container."""
        return {name: self.start("ADD", name) for name in names}

    def added_many(self, processes: Mapping[str, Process]) -> dict[str, str]:
        """The address that each container was given, which it must be in the end.

        Who was told that there was no answer in time asks again, as runtimes do.
        """
        given: dict[str, str] = {}
        for _ in range(ADD_TRIES):
            late = []
            for name, process in processes.items():
                answer = finished(process)
                if NO_ANSWER in answer.get("msg", ""):
                    late.append(name)
                else:
                    given[name] = address_of(answer)
            if not late:
                return given
            processes = self.start_many(late)
        raise AssertionError(f"no answer in time, {ADD_TRIES} times: {late}")


def finished(process: Process) -> Any:
    """What a call printed; nothing is an empty object."""
    stdout, stderr = process.communicate()
    answer = json.loads(stdout) if stdout else {}
    assert (process.returncode == 0) == ("code" not in answer), (answer, stderr)
    return answer


def added(process: Process) -> str:
    """The address that an ADD was given, which it must be."""
    return address_of(finished(process))


def address_of(answer: Config) -> str:
    """The address in the result of an ADD, which no error may be."""
    assert "ips" in answer, answer
    return str(ip_interface(answer["ips"][0]["address"]).ip)
