"""Network namespaces, and what can be seen and reached from inside one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

NETNS = Path("/run/netns")
"""Where ip-netns(8) keeps named namespaces."""

WITHOUT_DAD = "echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad"
"""No duplicate address detection on new interfaces (RFC 4862 section 5.4).

It takes up to 2 s for every address. The pods of containerd and podman keep it.
"""


def output(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """What a command prints; it must succeed.

    Args:
      command: the program and its arguments.
      environment: all of its environment variables, or None for our own.

    Raises:
      AssertionError: it failed; the message has all that it said.
    """
    done = _run(command, environment)
    assert done.returncode == 0, (
        f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}"
    )
    return done.stdout


def failure(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """What a command says that must fail; the arguments are those of `output`.

    Raises:
      AssertionError: it succeeded.
    """
    done = _run(command, environment)
    assert done.returncode, f"{command} succeeded: {done.stdout}{done.stderr}"
    return done.stderr


def _run(
    command: Sequence[str], environment: Mapping[str, str] | None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def interfaces() -> set[str]:
    """Names of the interfaces of this network namespace."""
    return {link["ifname"] for link in json.loads(output("ip", "-j", "link"))}


def namespaces() -> set[str]:
    """Names of the network namespaces of this session."""
    return {path.name for path in NETNS.iterdir()}


@contextmanager
def named_netns(name: str) -> Iterator[Path]:
    """A network namespace with nothing but its loopback interface, until exit.

    A veth of the host side whose end is in there goes with it.
    """
    output("ip", "netns", "add", name)
    try:
        output("ip", "-n", name, "link", "set", "lo", "up")
        output("nsenter", f"--net={NETNS / name}", "sh", "-c", WITHOUT_DAD)
        yield NETNS / name
    finally:
        output("ip", "netns", "del", name)


def addresses_in(netns: Path, interface: str) -> set[str]:
    """Global addresses of an interface, each as ADDRESS/PREFIX."""
    [link] = json.loads(
        output("ip", "-n", netns.name, "-j", "addr", "show", "dev", interface)
    )
    return {
        f"{entry['local']}/{entry['prefixlen']}"
        for entry in link["addr_info"]
        if entry["scope"] == "global"
    }


def ping(netns: Path, address: str) -> None:
    """Send one echo request from inside `netns`; the answer must come."""
    # The first packet may wait for neighbour discovery: 3 tries of 1 s (arp(7)).
    output("nsenter", f"--net={netns}", "ping", "-n", "-c", "1", "-w", "60", address)
