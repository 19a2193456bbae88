"""Fixtures: namespaces, a node that ends as it began, a daemon, the plugins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e import isolation
from tests.e2e.daemon import METIS, Daemon
from tests.e2e.image import BUSYBOX, write_image
from tests.e2e.ipam import Config
from tests.e2e.network import named_netns, output
from tests.e2e.requirements import PLUGINS, require, unmet
from tests.e2e.runtimes.libcni import (
    GOPATH,
    Attachment,
    Libcni,
    MakeLibcni,
    build_driver,
)
from tests.e2e.traces import remove_bridges, traces
from tests.e2e.waiting import until
from tests.soundness import MARK_LINE, damages


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARK_LINE)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Run the session again in namespaces of its own, instead of here."""
    if isolation.inside() or config.option.collectonly or not isolation.possible():
        return None
    return isolation.run_again(config.invocation_params.args)


@pytest.fixture(scope="session", autouse=True)
def namespaces() -> None:
    """Nothing of any scenario ever happens on the machine itself."""
    if not isolation.inside():
        unmet("end-to-end tests make namespaces: run them as root, with util-linux")
    require("iproute2", "ip")


@pytest.fixture(autouse=True)
def node(namespaces: None) -> Iterator[None]:
    """The node of one scenario, which must end as it began."""
    before = traces()
    yield
    remove_bridges(keep=before)
    try:
        until("nothing is left behind", lambda: not traces() - before)
    except TimeoutError:
        pytest.fail(f"left behind: {sorted(traces() - before)}")


@pytest.fixture(autouse=True)
def sound_databases(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """After every scenario all invariants hold in every database of it."""
    yield
    if not damages(request.node):
        for path in tmp_path.rglob("*.sqlite"):
            output(str(METIS), "check", "--db-path", str(path))


@pytest.fixture
def daemon(node: None, tmp_path: Path) -> Iterator[Daemon]:
    """A daemon that serves on an empty database, and stops cleanly in the end.

    What it logged is shown when the test fails.
    """
    daemon = Daemon(tmp_path)
    daemon.start()
    yield daemon
    print(daemon.log_path.read_text())
    if daemon.running:
        daemon.stop()


@pytest.fixture
def plugin_directory(tmp_path: Path) -> Path:
    """One directory with the reference plugins and ours, which metis installed.

    Ours is installed for the daemon of the scenario, which is so asked by the relay.
    """
    require("containernetworking-plugins", PLUGINS / "ptp", PLUGINS / "bridge")
    root = tmp_path / "cni"
    root.mkdir()
    socket_path = Daemon(tmp_path).socket_path
    output(
        *(str(METIS), "install", "--cni-dir", str(root)),
        *("--socket-path", str(socket_path)),
    )
    directory = root / "bin"
    for plugin in PLUGINS.iterdir():
        (directory / plugin.name).symlink_to(plugin)
    return directory


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Archive of the busybox image, `image.NAME`."""
    require("busybox-static", BUSYBOX)
    archive = tmp_path_factory.mktemp("image") / "image.tar"
    write_image(archive)
    return archive


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Go program around libcni, built once."""
    require("golang-go", "go")
    require(
        "golang-github-appc-cni-dev",
        GOPATH / "src/github.com/containernetworking/cni/libcni",
    )
    return build_driver(tmp_path_factory.mktemp("go"))


@pytest.fixture
def libcni(driver: Path, plugin_directory: Path, tmp_path: Path) -> MakeLibcni:
    """Makes libcni with a network list, and has it validate the list."""

    def make(network: Config) -> Libcni:
        config_path = tmp_path / f"{network['name']}.conflist"
        config_path.write_text(json.dumps(network))
        libcni = Libcni(driver, config_path, plugin_directory, tmp_path / "cache")
        libcni.validate()
        return libcni

    return make


@pytest.fixture
def pods() -> Iterator[tuple[Attachment, Attachment]]:
    """Two containers with a network namespace each."""
    with ExitStack() as stack:
        first, second = (
            Attachment(name, stack.enter_context(named_netns(name)))
            for name in ("one", "two")
        )
        yield first, second
