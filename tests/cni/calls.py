"""Environments and configurations of plugin calls, as runtimes make them."""

from __future__ import annotations

import json
from typing import Any

from metis.cni.environment import read_environment
from metis.cni.spec import Request, decode_configuration, read_request

Config = dict[str, Any]

NETNS = "/run/netns/absent"


def environ(command: str = "ADD", **changes: str | None) -> dict[str, str]:
    """The variables of a call; None leaves one out."""
    variables: dict[str, str | None] = {
        "CNI_COMMAND": command,
        "CNI_CONTAINERID": "c1",
        "CNI_NETNS": NETNS,
        "CNI_IFNAME": "eth0",
        "CNI_PATH": "/opt/cni/bin",
        **changes,
    }
    return {key: value for key, value in variables.items() if value is not None}


def config(version: str | None = "1.0.0", **changes: Any) -> Config:
    """A configuration in which metis is a delegate of ptp; None leaves a key out."""
    fields = {
        "cniVersion": version,
        "name": "podnet",
        "type": "ptp",
        "ipam": {
            "type": "metis",
            "ranges": [[{"subnet": "10.240.0.0/22"}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
        **changes,
    }
    return {key: value for key, value in fields.items() if value is not None}


def ipam(**fields: Any) -> Config:
    """An `ipam` section and nothing around it."""
    return {"type": "metis", **fields}


def request(
    command: str = "ADD",
    fields: Config | None = None,
    variables: dict[str, str] | None = None,
) -> Request:
    """The request of a call, through all three steps."""
    env = read_environment(variables or environ(command))
    stdin = json.dumps(config() if fields is None else fields).encode()
    return read_request(env, decode_configuration(stdin))
