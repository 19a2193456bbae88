"""`metis reclaim`: take back what pods hold that are gone, or say who is and why."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import click

from metis.api.metis.v1 import NodeStub, ReclaimRequest, ReclaimResponse, Verdict
from metis.cli.options import run_reported, socket_path_option
from metis.cli.output import NULL, Page, output_option, print_pages
from metis.rpc.channel import open_channel
from metis.rpc.transport import UnixTransport

ROUND_SECONDS = 30.0
"""Until the daemon must have looked at the node, in seconds. It gives a directory 5
and the container runtime 10."""

HIGHEST_LIMIT = 2**32 - 1
"""What the field of the message holds (uint32)."""

HEADERS = (
    "network",
    "address",
    "container_id",
    "interface_name",
    "pod_namespace",
    "pod_name",
    "verdict",
    "strikes",
    "goes_in",
    "reason",
)


@click.command("reclaim")
@click.option(
    "--dry-run", is_flag=True, help="Explain every verdict and change nothing."
)
@click.option(
    "--limit",
    type=click.IntRange(min=1, max=HIGHEST_LIMIT),
    metavar="N",
    help="Most addresses that may go at once, in place of the daemon's own limit.",
)
@output_option
@socket_path_option
def command(dry_run: bool, limit: int | None, output: str, socket_path: str) -> None:
    """Take back the addresses of pods that are gone without a DEL.

    One round of what the daemon does by itself, by the same rules: an address goes
    when two rounds, an interval apart, have found its owner gone. Prints every
    address that is held with the verdict on its owner, and a summary on stderr.
    The exit status is 1 when more would go than the limit allows, and nothing went.
    """
    request = ReclaimRequest(dry_run=dry_run, limit=limit or 0)

    async def run() -> None:
        async with open_channel(UnixTransport(socket_path)) as channel:
            answer = await NodeStub(channel).reclaim(request, timeout=ROUND_SECONDS)
        await print_pages(_page(answer), output)
        for line in summary(answer):
            click.echo(line, err=True)
        if answer.held_back and not dry_run:
            raise click.ClickException(answer.held_back)
        if answer.held_back:
            click.echo(answer.held_back, err=True)

    run_reported(run)


def summary(answer: ReclaimResponse) -> list[str]:
    """What an answer amounts to, a line for each kind of verdict that there is."""
    freed = [one for one in answer.verdicts if one.released]
    gone = [one for one in answer.verdicts if one.gone and not one.released]
    waiting = [one for one in gone if one.wait_ms]
    kept = [one for one in answer.verdicts if not one.gone]
    lines = [f"{_addresses(len(kept) + answer.left_out)} kept"]
    if waiting:
        soonest = min(one.wait_ms for one in waiting)
        lines.append(
            f"{_addresses(len(waiting))} of owners that are gone: a later round must "
            f"find so too, in {_seconds(soonest)} at the earliest"
        )
    if len(gone) > len(waiting):
        lines.append(f"{_addresses(len(gone) - len(waiting))} may go in the next round")
    if freed:
        lines.append(f"{_addresses(len(freed))} taken back")
    if answer.left_out:
        lines.append(f"{_addresses(answer.left_out)} did not fit into the answer")
    return lines


async def _page(answer: ReclaimResponse) -> AsyncIterator[Page]:
    yield Page(HEADERS, [_row(verdict) for verdict in answer.verdicts])


def _row(verdict: Verdict) -> Sequence[str]:
    return (
        verdict.network,
        verdict.ip_address,
        verdict.container_id,
        verdict.interface_name,
        verdict.pod_namespace or NULL,
        verdict.pod_name or NULL,
        _word(verdict),
        str(verdict.strikes),
        _seconds(verdict.wait_ms) if verdict.gone and not verdict.released else NULL,
        verdict.reason,
    )


def _word(verdict: Verdict) -> str:
    if verdict.released:
        return "freed"
    return "gone" if verdict.gone else "kept"


def _seconds(milliseconds: int) -> str:
    """A time to wait, rounded up: never too early."""
    return f"{-(-milliseconds // 1000)}s"


def _addresses(number: int) -> str:
    return "1 address" if number == 1 else f"{number} addresses"
