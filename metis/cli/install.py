"""`metis install`: put the plugin where the runtime looks for it."""

from __future__ import annotations

from pathlib import Path

import click

from metis.cli.options import reported_errors
from metis.cni.install import install

DEFAULT_CNI_DIR = "/host/opt/cni"
"""Where the original finds the host's CNI directory from inside its container."""


@click.command("install")
@click.option(
    "--cni-dir",
    envvar="CNI_DIR",
    default=DEFAULT_CNI_DIR,
    show_default=True,
    show_envvar=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory whose bin/ receives the plugin.",
)
def command(cni_dir: Path) -> None:
    """Put the CNI plugin into CNI_DIR/bin.

    The file appears whole or not at all, so this is safe while a runtime
    starts pods.
    """
    with reported_errors():
        click.echo(f"installed {install(cni_dir)}")
