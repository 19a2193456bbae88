"""`metis backup`: a copy of the database in one file."""

from __future__ import annotations

import click

from metis.cli.options import db_path_option, reported_errors
from metis.store.backup import back_up


@click.command("backup")
@click.argument("file", type=click.Path(dir_okay=True))
@click.option("--force", is_flag=True, help="Replace FILE when it is there already.")
@db_path_option
def command(file: str, force: bool, db_path: str) -> None:
    """Copy the database into FILE, also while a daemon uses it.

    FILE (mode 0600) appears whole or not at all, and needs no other file beside it.
    """
    with reported_errors():
        size = back_up(db_path, file, force=force)
        click.echo(f"{file}: {size} bytes of {db_path}")
