"""`metis restore`: bring a backup back into the database."""

from __future__ import annotations

import os
from functools import partial

import click

from metis.cli.change import change
from metis.cli.options import db_path_option, release_cooldown_option, reported_errors
from metis.errors import InvalidRequest
from metis.store.merging import Report, merge, read_backup
from metis.store.reading import read_file


@click.command("restore", short_help="Bring a backup back into the database.")
@click.argument("file", type=click.Path())
@release_cooldown_option
@db_path_option
def command(file: str, release_cooldown: float, db_path: str) -> None:
    """Bring what FILE says back into the database, also while a daemon uses it.

    Who has an address now keeps it. Who had one by FILE has it again, unless it
    has another now, lost it since, or somebody else has it. All other addresses
    rest for one cooldown, because somebody may have them of whom neither knows.
    """
    with reported_errors():
        if os.path.realpath(db_path) == os.path.realpath(file):
            raise InvalidRequest(f"{file!r} is the database itself: name a backup")
        saved = read_file(file, read_backup)
        work = partial(merge, saved=saved, cooldown_ms=round(release_cooldown * 1000))
        report = change(db_path, work, release_cooldown, thorough=True)
        _print_report(report, file, release_cooldown)


def _print_report(report: Report, file: str, cooldown: float) -> None:
    for block in report.blocks:
        click.echo(f"added: {block}")
    for owner in report.owners:
        click.echo(f"restored: {owner}")
    for words in report.left:
        click.echo(f"not restored: {words}")
    click.echo(
        f"{report.kept} owned addresses stay as they are; of {file} came "
        f"{len(report.blocks)} blocks, {len(report.owners)} owners and "
        f"{report.history} ends of history; {len(report.left)} others did not. "
        f"Addresses without an owner rest for {cooldown:g} s."
    )
