"""Network configurations with metis in the `ipam` key, as people write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.daemon import Daemon

Config = dict[str, Any]

EVERYWHERE = {"4": "0.0.0.0/0", "6": "::/0"}


def metis_ipam(daemon: Daemon, log: Path, *subnets: str, network: str = "") -> Config:
    """The `ipam` key: one address from each subnet, and a default route for each.

    Args:
      daemon: who gives the addresses.
      log: where the plugin logs.
      subnets: CIDR blocks, one a family.
      network: name of the network, or empty to leave it to metis.
    """
    config: Config = {
        "type": "metis",
        "ranges": [[{"subnet": subnet}] for subnet in subnets],
        "routes": [
            {"dst": EVERYWHERE["6" if ":" in subnet else "4"]} for subnet in subnets
        ],
        "daemonSocket": str(daemon.socket_path),
        # Where the plugin goes when the daemon does not answer in time.
        "dbPath": str(daemon.db_path),
        "releaseCooldown": daemon.cooldown,
        "logFile": str(log),
    }
    if network:
        config["network"] = network
    return config


def conflist(name: str, version: str, *plugins: Config) -> Config:
    """A network configuration list."""
    return {"cniVersion": version, "name": name, "plugins": list(plugins)}
