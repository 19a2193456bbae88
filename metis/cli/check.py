"""`metis check`: whether all invariants hold in a database."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import click

from metis.cli.options import db_path_option, reported_errors
from metis.cli.output import output_option
from metis.clock import SystemClock
from metis.errors import StoreDamaged
from metis.store.invariants import Findings
from metis.store.reading import check_file
from metis.store.violations import Violation

MOST_LINES = 20
"""Most lines about one rule: the rest is counted. JSON has them all."""


@click.command("check")
@output_option
@db_path_option
def command(output: str, db_path: str) -> None:
    """Say whether all invariants hold in a database.

    Reads the file by itself, also beside a running daemon, and changes nothing.
    Prints a line for each violation; the exit status is 0 when there are none.
    """
    with reported_errors():
        try:
            findings = check_file(db_path, SystemClock())
        except StoreDamaged as error:
            raise StoreDamaged(f"{error}: `metis repair` heals it") from None
        if output == "json":
            click.echo(json.dumps(_as_json(db_path, findings), indent=2))
        else:
            print_findings(findings)
    if findings.violations:
        raise SystemExit(1)


def print_findings(findings: Findings) -> None:
    """Print what was found, the violations last."""
    print_lines("warning: ", findings.warnings)
    print_lines("", findings.violations)
    counts = f"{findings.blocks} blocks, {findings.addresses} addresses"
    if findings.violations:
        click.echo(f"{counts}: {len(findings.violations)} violations")
    else:
        click.echo(f"{counts}: all invariants hold")


def print_lines(prefix: str, found: Sequence[Violation]) -> None:
    """Print a line for each, up to MOST_LINES of a rule."""
    printed: Counter[str] = Counter()
    for violation in found:
        printed[violation.kind] += 1
        if printed[violation.kind] <= MOST_LINES:
            click.echo(f"{prefix}{violation.kind}: {violation.words}")
    for kind, count in printed.items():
        if count > MOST_LINES:
            click.echo(f"{prefix}{kind}: and {count - MOST_LINES} more")


def _as_json(path: str, findings: Findings) -> dict[str, object]:
    return {
        "database": path,
        "blocks": findings.blocks,
        "addresses": findings.addresses,
        "violations": [_entry(one) for one in findings.violations],
        "warnings": [_entry(one) for one in findings.warnings],
    }


def _entry(violation: Violation) -> dict[str, str]:
    return {
        "kind": violation.kind,
        "violation": violation.words,
        "repair": violation.mend or "left alone",
    }
