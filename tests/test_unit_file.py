"""scripts/metis.service: systemd takes it, the page shows it, the daemon can work."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from metis.config import DEFAULT_DB_PATH, DEFAULT_SOCKET_PATH, DaemonConfig
from metis.store.writer import DRAIN_SECONDS

ROOT = Path(__file__).resolve().parent.parent
UNIT = ROOT / "scripts" / "metis.service"
PAGE = ROOT / "docs" / "daemon.md"

PROGRAM = "/opt/metis/bin/metis"
"""Where the page has people install the program."""

OWN_MOUNTS = {
    "BindPaths",
    "BindReadOnlyPaths",
    "DynamicUser",
    "ExecPaths",
    "InaccessiblePaths",
    "MountAPIVFS",
    "MountFlags",
    "MountImages",
    "NoExecPaths",
    "PrivateDevices",
    "PrivateIPC",
    "PrivateMounts",
    "PrivateNetwork",
    "PrivateTmp",
    "ProcSubset",
    "ProtectControlGroups",
    "ProtectHome",
    "ProtectHostname",
    "ProtectKernelLogs",
    "ProtectKernelModules",
    "ProtectKernelTunables",
    "ProtectProc",
    "ProtectSystem",
    "ReadOnlyPaths",
    "ReadWritePaths",
    "RootDirectory",
    "RootImage",
    "TemporaryFileSystem",
}
"""Settings for which systemd gives a service a mount namespace, or a network, of its
own (systemd.exec(5))."""


def settings() -> dict[str, dict[str, str]]:
    """The unit's settings, by section. Neither key nor section comes twice."""
    found: dict[str, dict[str, str]] = {}
    section: dict[str, str] | None = None
    for line in UNIT.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            assert line.endswith("]")
            assert line not in found
            section = found[line] = {}
            continue
        key, equals, value = line.partition("=")
        assert section is not None
        assert equals
        assert value
        assert key.isalnum()
        assert key not in section
        section[key] = value
    return found


def test_the_page_shows_the_file() -> None:
    assert f"```ini\n{UNIT.read_text()}```\n" in PAGE.read_text()
    assert "scripts/metis.service" in PAGE.read_text()


def test_systemd_is_told_all_that_it_can_do_for_the_daemon() -> None:
    unit = settings()
    assert list(unit) == ["[Unit]", "[Service]", "[Install]"]
    service = unit["[Service]"]
    assert (service["Type"], service["Restart"]) == ("notify", "always")
    assert service["ExecStart"] == f"{PROGRAM} daemon"
    assert int(service["WatchdogSec"]) >= 10  # a busy disk is not a dead daemon
    directory = f"/var/lib/{service['StateDirectory']}"
    assert {
        str(Path(path).parent) for path in (DEFAULT_DB_PATH, DEFAULT_SOCKET_PATH)
    } == {directory}
    assert service["StateDirectoryMode"] == "0700"
    assert service["UMask"] == "0077"
    stop = DaemonConfig().shutdown_grace + DRAIN_SECONDS
    assert int(service["TimeoutStopSec"]) > stop


def test_the_daemon_sees_the_network_namespaces_of_pods_and_the_runtime_s_socket() -> (
    None
):
    service = settings()["[Service]"]
    assert not OWN_MOUNTS & set(service)
    assert "AF_UNIX" in service["RestrictAddressFamilies"].split()
    assert "CAP_SYS_PTRACE" in service["CapabilityBoundingSet"].split()


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="this machine has no systemd"
)
def test_systemd_has_nothing_to_complain_of(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace(PROGRAM, sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", copy],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
