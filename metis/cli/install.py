"""`metis install`: put the plugin where the runtime looks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from metis.cli.options import reported_errors
from metis.cni.install import install

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
def command(cni_dir: Path) -> None:
    """Put the CNI plugin into CNI_DIR/bin.

    The file appears whole or not at all, so this is safe while a runtime
    starts pods.
    """
    with reported_errors():
        click.echo(f"installed {install(cni_dir)}")
