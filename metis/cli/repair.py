"""`metis repair`: mend what `metis check` complains about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import apsw
import click

from metis.cli.change import change
from metis.cli.check import print_lines
from metis.cli.options import db_path_option, release_cooldown_option, reported_errors
from metis.clock import SystemClock
from metis.errors import StoreDamaged
from metis.store.invariants import Findings, examine
from metis.store.reading import check_file
from metis.store.repair import repair
from metis.store.violations import HEALED, Kind, Violation


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What was mended, and what was found afterwards."""

    done: list[Violation]
    left: Findings


@click.command("repair", short_help="Mend what `metis check` complains about.")
@click.option(
    "--dry-run", is_flag=True, help="Say what would be done, and change nothing."
)
@release_cooldown_option
@db_path_option
def command(dry_run: bool, release_cooldown: float, db_path: str) -> None:
    """Mend what `metis check` complains about, as far as that needs no guess.

    One transaction, also beside a running daemon. Prints what was done, then what
    is left; the exit status is 0 when nothing is, and always with --dry-run.
    """
    with reported_errors():
        try:
            found = check_file(db_path, SystemClock()).violations
        except StoreDamaged as error:
            found = (Violation(Kind.FILE, str(error), HEALED),)
        if dry_run:
            _print_plan(found)
        elif found:
            is_damaged = any(one.kind is Kind.FILE for one in found)
            work = partial(_repair, cooldown_ms=round(release_cooldown * 1000))
            # Whoever opens a damaged file heals it; what is left is mended then.
            outcome = change(db_path, work, release_cooldown, thorough=is_damaged)
            _print_outcome(outcome, [one for one in found if one.kind is Kind.FILE])
        else:
            click.echo("all invariants hold: nothing is to be done")


def _repair(connection: apsw.Connection, now_ms: int, cooldown_ms: int) -> _Outcome:
    done = repair(connection, now_ms, cooldown_ms)
    return _Outcome(done, examine(connection, now_ms))


def _print_outcome(outcome: _Outcome, damage: list[Violation]) -> None:
    left = outcome.left.violations
    if not any(one.kind is Kind.FILE for one in left):
        for violation in damage:
            click.echo(f"{violation.kind}: {violation.words}: healed")
    for violation in outcome.done:
        click.echo(f"{violation.kind}: {violation.words}: {violation.mend}")
    print_lines("left alone: ", left)
    click.echo(f"{len(outcome.done)} repairs; {len(left) or 'no'} violations are left")
    if left:
        raise SystemExit(1)


def _print_plan(found: Sequence[Violation]) -> None:
    for violation in found:
        plan = f"would be {violation.mend}" if violation.mend else "would be left alone"
        click.echo(f"{violation.kind}: {violation.words}: {plan}")
    if not found:
        click.echo("all invariants hold: nothing would be done")
