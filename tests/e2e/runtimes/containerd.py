"""containerd with its CRI plugin, started for one scenario, and a CRI client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from cri_api.v1 import api_pb2 as cri
from cri_api.v1.api_pb2_grpc import ImageServiceStub, RuntimeServiceStub

from tests.e2e.image import NAME as IMAGE
from tests.e2e.ipam import Config
from tests.e2e.network import output
from tests.e2e.waiting import until

# The score of a process can only be raised in a container, not lowered. A
# network of its own per handler is containerd's way to have more than one.
CONFIG = """\
version = 2
root = "{directory}/root"
state = "{directory}/state"
disabled_plugins = ["io.containerd.internal.v1.restart"]

[debug]
level = "warn"

[grpc]
address = "{socket}"

[plugins."io.containerd.internal.v1.opt"]
path = "{directory}/opt"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{image}"
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{plugins}"
conf_dir = "{default_network}"
"""

HANDLER = """
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{name}]
runtime_type = "io.containerd.runc.v2"
cni_conf_dir = "{network}"
"""

DEFAULT_HANDLER = "runc"

CALL_SECONDS = 120.0
"""Until any one call of the CRI must have answered, as the kubelet has it."""

STOP_SECONDS = 60.0
"""Until a containerd that was told to stop must have ended."""


@dataclass(frozen=True)
class Pod:
    """A pod that runs: its sandbox, and how it was asked for."""

    sandbox_id: str
    config: cri.PodSandboxConfig = field(compare=False)


class Containerd:
    """One containerd; start it, use it through the CRI, stop it."""

    def __init__(
        self, directory: Path, plugin_directory: Path, networks: Mapping[str, Config]
    ) -> None:
        """Write the configuration.

        Args:
          directory: receives everything that this containerd keeps.
          plugin_directory: where all CNI plugins are.
          networks: network list by runtime handler; one is DEFAULT_HANDLER's.
        """
        directory.mkdir()
        text = CONFIG.format(
            directory=directory,
            socket=directory / "containerd.sock",
            image=IMAGE,
            plugins=plugin_directory,
            default_network=directory / DEFAULT_HANDLER,
        )
        for handler, network in networks.items():
            (directory / handler).mkdir()
            path = directory / handler / f"{network['name']}.conflist"
            path.write_text(json.dumps(network))
            text += HANDLER.format(name=handler, network=directory / handler)
        self._config_path = directory / "config.toml"
        self._config_path.write_text(text)
        self.socket_path = directory / "containerd.sock"
        self.log_path = directory / "containerd.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._channel = grpc.insecure_channel(f"unix:{self.socket_path}")
        self._runtime = RuntimeServiceStub(self._channel)
        self._images = ImageServiceStub(self._channel)

    def start(self, image: Path) -> None:
        """Start it, wait until its CRI plugin serves, and load the image."""
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                ["containerd", "--config", self._config_path],
                env=dict(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until("containerd's CRI plugin serves", self._is_ready)
        output(
            *("ctr", "--address", str(self.socket_path), "--namespace", "k8s.io"),
            *("images", "import", str(image)),
        )
        # The CRI plugin hears of new images some moments later.
        wanted = cri.ImageStatusRequest(image=cri.ImageSpec(image=IMAGE))
        until(
            "the CRI plugin knows the image",
            lambda: self._images.ImageStatus(
                wanted, timeout=CALL_SECONDS
            ).image.ByteSize(),
        )

    def close(self) -> None:
        """Remove every pod that is left, and stop."""
        if self._process is None:
            return
        try:
            for pod in self._runtime.ListPodSandbox(
                cri.ListPodSandboxRequest(), timeout=CALL_SECONDS
            ).items:
                self.stop(pod.id)
                self.remove(pod.id)
        finally:
            self._channel.close()
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
                raise

    def power_off(self) -> None:
        """Kill it; what it started goes on, and what it wrote stays."""
        assert self._process is not None
        process, self._process = self._process, None
        process.kill()
        process.wait()

    def run(self, name: str, handler: str = DEFAULT_HANDLER) -> Pod:
        """Start a pod; it has its network when this returns.

        Args:
          name: of the pod.
          handler: the runtime handler, which tells the network.

        Raises:
          grpc.RpcError: containerd could not.
        """
        wanted = _pod(name, handler)
        answer = self._runtime.RunPodSandbox(wanted, timeout=CALL_SECONDS)
        return Pod(answer.pod_sandbox_id, wanted.config)

    @contextmanager
    def abandoned(self, name: str) -> Iterator[None]:
        """Start a pod, and give up on it at the end of the body of a `with`."""
        wanted = _pod(name, DEFAULT_HANDLER)
        call = self._runtime.RunPodSandbox.future(wanted, timeout=CALL_SECONDS)
        try:
            yield
            assert not call.done(), "nobody has held it up"
        finally:
            call.cancel()

    def addresses(self, pod: Pod) -> list[str]:
        """The pod's addresses, the primary one first."""
        network = self._runtime.PodSandboxStatus(
            cri.PodSandboxStatusRequest(pod_sandbox_id=pod.sandbox_id),
            timeout=CALL_SECONDS,
        ).status.network
        return [network.ip, *(ip.ip for ip in network.additional_ips)]

    def start_container(self, pod: Pod) -> str:
        """Start a container of the image in the pod; returns its id."""
        container_id: str = self._runtime.CreateContainer(
            cri.CreateContainerRequest(
                pod_sandbox_id=pod.sandbox_id,
                config=cri.ContainerConfig(
                    metadata=cri.ContainerMetadata(name="main"),
                    image=cri.ImageSpec(image=IMAGE),
                ),
                sandbox_config=pod.config,
            ),
            timeout=CALL_SECONDS,
        ).container_id
        self._runtime.StartContainer(
            cri.StartContainerRequest(container_id=container_id), timeout=CALL_SECONDS
        )
        return container_id

    def execute(self, container_id: str, *command: str) -> str:
        """Run a command that must succeed inside a container; returns its output."""
        done: Any = self._runtime.ExecSync(
            cri.ExecSyncRequest(container_id=container_id, cmd=command, timeout=90),
            timeout=CALL_SECONDS,
        )
        assert done.exit_code == 0, (
            f"{command} ended with {done.exit_code}: {done.stdout!r}{done.stderr!r}"
        )
        return str(done.stdout, "utf-8")

    def stop(self, sandbox_id: str) -> None:
        """Stop a pod: its containers end and its network goes."""
        self._runtime.StopPodSandbox(
            cri.StopPodSandboxRequest(pod_sandbox_id=sandbox_id), timeout=CALL_SECONDS
        )

    def remove(self, sandbox_id: str) -> None:
        """Remove a stopped pod."""
        self._runtime.RemovePodSandbox(
            cri.RemovePodSandboxRequest(pod_sandbox_id=sandbox_id),
            timeout=CALL_SECONDS,
        )

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log_path.read_text()
        try:
            status = self._runtime.Status(
                cri.StatusRequest(), timeout=CALL_SECONDS
            ).status
        except grpc.RpcError:
            return False
        return all(condition.status for condition in status.conditions)


def _pod(name: str, handler: str) -> cri.RunPodSandboxRequest:
    """What asks for a pod."""
    config = cri.PodSandboxConfig(
        metadata=cri.PodSandboxMetadata(
            name=name, namespace="e2e", uid=f"uid-{name}", attempt=0
        ),
        linux=cri.LinuxPodSandboxConfig(),
    )
    return cri.RunPodSandboxRequest(config=config, runtime_handler=handler)
