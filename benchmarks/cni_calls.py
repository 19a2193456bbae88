"""The section `cni`: whole CNI calls beside a bare interpreter and host-local.

Everything takes turns call by call: an interpreter, then each plugin's verbs for
one container. Both forms of the plugin that `metis install` writes are measured,
each beside a bare start of the very interpreter that it runs on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cni_processes import (
    WARM_UP_RUNS,
    Run,
    burst_seconds,
    cni_environment,
    run_once,
    with_previous_result,
)
from benchmarks.databases import NAME
from benchmarks.goals import BURST
from benchmarks.grpc_load import unused_tag
from benchmarks.measures import cpu_seconds, median
from benchmarks.series import Rounds
from benchmarks.servers import Server, metis_daemon, metis_program
from benchmarks.settings import Settings

HOST_LOCAL = Path("/usr/lib/cni/host-local")
"""Where Debian's containernetworking-plugins puts it."""

PACKAGE = "containernetworking-plugins"

VERBS = ("VERSION", "ADD", "CHECK", "DEL")

BARE = ("-I", "-S", "-c", "pass")
"""What an interpreter is given to do nothing with nothing imported."""

SELF_CONTAINED = "--self-contained"


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plugin under measurement.

    Attributes:
      name: in the series.
      program: its path.
      config: what it reads.
      verbs: that it is called with.
      interpreter: the command of a bare start of what it runs on; empty for none.
    """

    name: str
    program: str
    config: bytes
    verbs: Sequence[str]
    interpreter: Sequence[str] = ()


class CallFailedError(Exception):
    """A CNI process ended with an error: its time is none that counts."""


def measure(settings: Settings) -> Rounds:
    """Processes call by call in turn; for the whole, as many as BURST at once, too."""
    series = Rounds()
    with tempfile.TemporaryDirectory(prefix="metis-bench-") as name:
        directory = Path(name)
        with metis_daemon(directory) as server:
            plugins = _plugins(directory, server, whole=settings.whole)
            for number in range(settings.rounds):
                _round(series, plugins, server, settings.processes)
                if not settings.whole:
                    continue
                for plugin in plugins[number % 2 :] + plugins[: number % 2]:
                    seconds, served = burst_seconds(
                        plugin.program, plugin.config, BURST
                    )
                    if served != BURST:
                        raise CallFailedError(
                            f"{plugin.name}: {served} of {BURST} ADDs at once served"
                        )
                    series.add(f"cni/{plugin.name}/burst/seconds", seconds)
    return series


def _plugins(directory: Path, server: Server, *, whole: bool) -> list[Plugin]:
    """Install the plugin, for the whole in every form there is, and find host-local."""
    # A block of its own for each, so that each finds its addresses as it left them.
    plugins = []
    offered = subprocess.run(
        [metis_program(), "install", "--help"], check=True, stdout=subprocess.PIPE
    ).stdout.decode()
    for number, (name, flag) in enumerate(
        (("metis", ""), ("self-contained", SELF_CONTAINED))
    ):
        if flag and not (whole and flag in offered):
            continue
        cni_dir = directory / name
        cni_dir.mkdir()
        command = [metis_program(), "install", "--cni-dir", str(cni_dir)]
        if flag:
            command.append(flag)
        if "--socket-path" in offered:
            command += ["--socket-path", server.socket]
        installed = subprocess.run(command, check=False, capture_output=True)
        if installed.returncode:
            raise CallFailedError(
                f"metis install {flag}: {installed.stderr.decode().strip()[-500:]}"
            )
        program = cni_dir / "bin" / "metis"
        config = _config(
            "metis",
            name=f"bench-{name}",
            subnet=f"10.{240 + number}.0.0/16",
            daemonSocket=server.socket,
            dbPath=str(directory / NAME),
            logFile=str(directory / f"{name}.log"),
        )
        # The ordinary launcher begins with a shell, and becomes this interpreter.
        python = interpreter_of(program.read_bytes()) if flag else sys.executable
        interpreter = (python, *BARE)
        plugins.append(Plugin(name, str(program), config, VERBS, interpreter))
    if HOST_LOCAL.exists():
        config = _config(
            "host-local",
            name="bench",
            subnet="10.245.0.0/16",
            dataDir=str(directory / "host-local"),
        )
        plugins.append(
            Plugin("host-local", str(HOST_LOCAL), config, ("ADD", "CHECK", "DEL"))
        )
    return plugins


def interpreter_of(launcher: bytes) -> str:
    """The interpreter of a script's first line.

    Args:
      launcher: the file, which begins with "#!".

    Raises:
      ValueError: it does not.
    """
    first = launcher.split(b"\n", 1)[0]
    if not first.startswith(b"#!"):
        raise ValueError(f"the launcher begins with {first[:40]!r} and not with '#!'")
    return os.fsdecode(first[2:].split()[0])


def _config(plugin: str, *, name: str, subnet: str, **ipam: Any) -> bytes:
    """A configuration as ptp passes it to its IPAM plugin."""
    ranges = [[{"subnet": subnet}]]
    return json.dumps(
        {
            "cniVersion": "1.0.0",
            "name": name,
            "type": "ptp",
            "ipam": {"type": plugin, "ranges": ranges, **ipam},
        }
    ).encode()


def _round(
    series: Rounds, plugins: Sequence[Plugin], server: Server, count: int
) -> None:
    """Note the medians of `count` turns."""
    runs: dict[str, list[Run]] = {}
    daemon: dict[str, list[float]] = {}
    tag = unused_tag()
    for i in range(-WARM_UP_RUNS, count):
        for plugin in plugins:
            turn: dict[str, Run] = {}
            used: dict[str, float] = {}
            if plugin.interpreter:
                name = f"cni/{plugin.name} interpreter"
                turn[name] = run_once(list(plugin.interpreter), {}, b"")
            _calls(turn, used, plugin, server, f"{tag}-{i + WARM_UP_RUNS}")
            if i < 0:
                continue
            for name, run in turn.items():
                runs.setdefault(name, []).append(run)
            for name, cpu_ms in used.items():
                daemon.setdefault(name, []).append(cpu_ms)
    _note(series, runs, daemon)


def _calls(
    turn: dict[str, Run],
    used: dict[str, float],
    plugin: Plugin,
    server: Server,
    container_id: str,
) -> None:
    """Call every verb for one container, CHECK with the result of its ADD."""
    previous = b""
    for verb in plugin.verbs:
        stdin = plugin.config
        if verb == "CHECK":
            stdin = with_previous_result(stdin, previous)
        cpu = cpu_seconds(server.pid)
        run = run_once(
            [plugin.program],
            cni_environment(verb, container_id, plugin.program),
            stdin,
        )
        if run.exit_status:
            raise CallFailedError(
                f"{plugin.name} {verb} ended with {run.exit_status}: "
                f"{run.output.decode(errors='replace').strip()[:500]}"
            )
        name = f"cni/{plugin.name}/{verb}"
        turn[name] = run
        if plugin.interpreter:
            used[name] = (cpu_seconds(server.pid) - cpu) * 1e3
        if verb == "ADD":
            previous = run.output


def _note(
    series: Rounds,
    runs: Mapping[str, Sequence[Run]],
    daemon: Mapping[str, Sequence[float]],
) -> None:
    for name, measured in runs.items():
        series.add(f"{name}/wall_ms", median(run.wall_ms for run in measured))
        series.add(f"{name}/cpu_ms", median(run.cpu_ms for run in measured))
    for name, used in daemon.items():
        series.add(f"{name}/daemon_cpu_ms", median(used))
