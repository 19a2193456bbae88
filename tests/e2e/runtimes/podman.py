"""podman on its CNI back end, with a configuration and a storage of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.e2e.ipam import Config
from tests.e2e.network import failure, output

# crun refuses hybrid control groups; without limits of its own podman asks for
# more than a container inside a container may have; the journal is the
# machine's.
CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_backend = "cni"
cni_plugin_dirs = ["{plugins}"]
network_config_dir = "{networks}"
"""

STORAGE_CONF = """\
[storage]
driver = "overlay"
graphroot = "{graph}"
runroot = "{run}"
"""


class Podman:
    """One podman with one network."""

    def __init__(
        self, directory: Path, plugin_directory: Path, network: Config
    ) -> None:
        """Write the configuration.

        Args:
          directory: receives everything that this podman keeps.
          plugin_directory: where all CNI plugins are.
          network: network list; containers join it under its name.
        """
        networks = directory / "networks"
        networks.mkdir(parents=True)
        (networks / f"{network['name']}.conflist").write_text(json.dumps(network))
        containers_conf = directory / "containers.conf"
        containers_conf.write_text(
            CONTAINERS_CONF.format(plugins=plugin_directory, networks=networks)
        )
        self._network: str = network["name"]
        self._graph = directory / "graph"
        # conmon hands it on as an option, which may have 50 characters at most;
        # a longer one makes every clean-up after a container fail unseen.
        self._run = Path(tempfile.mkdtemp(prefix="podman-", dir="/run"))
        storage_conf = directory / "storage.conf"
        storage_conf.write_text(STORAGE_CONF.format(graph=self._graph, run=self._run))
        self._command = ("podman", "--tmpdir", str(directory / "tmp"))
        self._environment = {
            **os.environ,
            "CONTAINERS_CONF": str(containers_conf),
            "CONTAINERS_STORAGE_CONF": str(storage_conf),
        }

    def __call__(self, *arguments: str) -> str:
        """Run a podman command that must succeed; returns what it prints."""
        return output(*self._command, *arguments, environment=self._environment)

    def run(self, name: str, image: str, *options: str) -> str:
        """Start a container on the network and leave it running.

        Args:
          name: of the container.
          image: of the container.
          options: more of them for `podman run`.

        Returns:
          The container's id.
        """
        return self(*self._to_run(name, image, options)).strip()

    def refused(self, name: str, image: str, *options: str) -> str:
        """Have podman fail to start a container; returns what it says."""
        return failure(
            *self._command,
            *self._to_run(name, image, options),
            environment=self._environment,
        )

    def addresses(self, name: str) -> set[str]:
        """The container's addresses as podman knows them."""
        [container] = json.loads(self("inspect", "--type", "container", name))
        seen: dict[str, Any] = container["NetworkSettings"]["Networks"][self._network]
        return {seen["IPAddress"], seen["GlobalIPv6Address"]} - {""}

    def _to_run(
        self, name: str, image: str, options: tuple[str, ...]
    ) -> tuple[str, ...]:
        run = ("run", "--detach", "--name", name, "--network", self._network)
        return (*run, *options, image)

    def close(self) -> None:
        """Remove every container that is left, and unmount the storage."""
        self("rm", "--all", "--force", "--time", "0")
        # podman mounts the directory on itself and leaves it so for the next run.
        subprocess.run(
            ["umount", self._graph / "overlay"], stderr=subprocess.DEVNULL, check=False
        )
        shutil.rmtree(self._run)
