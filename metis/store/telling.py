"""What is said of a database that was healed: one line for each thing to know.

Pure: values in, text out.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from metis.store.rebuilding import Report
from metis.store.salvage import Found

_MOST_NAMED = 20
_MOST_CONFLICTS = 100
"""How many addresses and conflicts are named, of any number."""


def of_healing(
    path: str, wrong: str, founds: Sequence[Found], report: Report, aside: str
) -> list[str]:
    """Tell of a database that was made anew.

    Args:
      path: the database.
      wrong: what was wrong with the one before, in words.
      founds: what it told.
      report: what the new one has.
      aside: where the old one is.
    """
    lines = [
        f"database {path} is damaged: {wrong}",
        f"what there was of it is kept as {aside}",
    ]
    for found in founds:
        count = len(found.problems)
        lines.append(
            f"{found.source} told of {len(found.blocks)} blocks and {found.owners} "
            f"owners; {count or 'no'} places in it could not be read"
            + (f", first: {found.problems[0]}" if count else "")
        )
    freed = f", of whom {report.freed} are gone by a reboot" if report.freed else ""
    lines.append(
        f"it is made anew with {report.blocks} blocks and {report.owners} owners{freed}"
    )
    return lines + of_owners(report.adopted, report.conflicts)


def of_owners(adopted: Sequence[str], conflicts: Sequence[str]) -> list[str]:
    """Tell of owners whom the node knows, and of those that sources disagree about."""
    lines = list(conflicts[:_MOST_CONFLICTS])
    if adopted:
        more = ", ..." if len(adopted) > _MOST_NAMED else ""
        lines.append(
            f"{len(adopted)} addresses have owners by the evidence of the node: "
            + ", ".join(adopted[:_MOST_NAMED])
            + more
        )
    return lines


def of_caution(cooldown_ms: int, walltime_ms: int) -> str:
    """Tell until when addresses wait.

    Args:
      cooldown_ms: how long.
      walltime_ms: the time of day, in milliseconds since the Unix epoch.
    """
    try:
        until = datetime.datetime.fromtimestamp(
            (walltime_ms + cooldown_ms) / 1000, datetime.UTC
        ).isoformat(timespec="seconds")
    except (OverflowError, ValueError):
        until = "the end of time"
    return f"addresses without an owner wait for one cooldown, until {until}"
