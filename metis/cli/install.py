"""`metis install`: put the plugin where the runtime looks for it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from metis.cli.options import SafePath, reported_errors
from metis.cni.install import install, install_self_contained, runtime_directory
from metis.config import DEFAULT_SOCKET_PATH

DEFAULT_CNI_DIR = "/host/opt/cni"
"""Where the original finds the host's CNI directory from inside its container."""


class Directory(click.Path):
    """A directory. An empty name is not taken for the present one, as Path("") is."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:  # as click.Path has it
        """Pass the path on, if it is one."""
        if str(value) == "":
            self.fail("it is empty: write a directory, such as /opt/cni", param, ctx)
        return super().convert(value, param, ctx)


@click.command("install")
@click.option(
    "--cni-dir",
    envvar="CNI_DIR",
    default=DEFAULT_CNI_DIR,
    show_default=True,
    show_envvar=True,
    type=Directory(path_type=Path, file_okay=False),
    help="Directory that exists, whose bin/ receives the plugin.",
)
@click.option(
    "--socket-path",
    type=SafePath(),
    default=DEFAULT_SOCKET_PATH,
    show_default=True,
    help="Unix socket of the daemon, which the plugin asks.",
)
@click.option(
    "--self-contained",
    is_flag=True,
    help="Put the interpreter, all modules and libraries into CNI_DIR/metis, for a "
    "host that has none of them.",
)
@click.option(
    "--runtime-dir",
    type=Directory(path_type=str),
    help="With --self-contained, what the runtime calls CNI_DIR.  "
    "[default: CNI_DIR without a leading /host]",
)
def command(
    cni_dir: Path, socket_path: str, self_contained: bool, runtime_dir: str | None
) -> None:
    """Put the CNI plugin into CNI_DIR/bin.

    The file appears whole and tried or not at all, so this is safe while a runtime
    starts pods.
    """
    if runtime_dir is not None and not self_contained:
        raise click.UsageError("--runtime-dir is for --self-contained alone")
    with reported_errors():
        if not self_contained:
            click.echo(f"installed {install(cni_dir, socket_path=socket_path)}")
            if runtime_directory(cni_dir) != os.path.abspath(cni_dir):
                click.echo(
                    f"It runs {sys.executable}, which the host has to have in that "
                    "place, too; --self-contained brings it along.",
                    err=True,
                )
            return
        done = install_self_contained(
            cni_dir, socket_path=socket_path, runtime_dir=runtime_dir
        )
        click.echo(f"installed {done.program}, which runs from {done.tree}")
