"""`metis history`: who had which address, from when to when, and why it ended."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator

import click

from metis.api.metis.v1 import HistoryEntry, ListHistoryRequest, NodeStub
from metis.cli.options import RPC_TIMEOUT, Given, run_reported, socket_path_option
from metis.cli.output import NULL, Page, output_option, print_pages, shown_time
from metis.rpc.channel import Channel, open_channel
from metis.rpc.transport import UnixTransport

HEADERS = (
    "network",
    "address",
    "container_id",
    "interface_name",
    "pod_namespace",
    "pod_name",
    "given_at",
    "ended_at",
    "reason",
)


class Moment(click.ParamType[int]):
    """A time in RFC 3339, given to the command as milliseconds since the epoch."""

    name = "time"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Read "2026-01-31T12:00:00Z"; without a zone it is UTC."""
        try:
            moment = datetime.datetime.fromisoformat(str(value))
        except ValueError:
            self.fail(
                f"{value!r} is not a time: write it like 2026-01-31T12:00:00Z",
                param,
                ctx,
            )
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=datetime.UTC)
        ms = round(moment.timestamp() * 1000)
        if ms <= 0:
            self.fail(f"{value!r} lies before 1970, as no address does", param, ctx)
        return ms


@click.command("history")
@click.option("--ip", "ip_address", type=Given(), metavar="A", help="Of this address.")
@click.option(
    "--at",
    "at_ms",
    type=Moment(),
    help="Only who had an address at this time, for example 2026-01-31T12:00:00Z.",
)
@click.option("--pod", type=Given(), metavar="NAMESPACE/NAME", help="Of this pod.")
@click.option("--container", type=Given(), metavar="ID", help="Of this container.")
@click.option("--network", type=Given(), metavar="NAME", help="On this network.")
@output_option
@socket_path_option
def command(
    ip_address: str | None,
    at_ms: int | None,
    pod: str | None,
    container: str | None,
    network: str | None,
    output: str,
    socket_path: str,
) -> None:
    """Tell who had which address, from when to when, and why it ended.

    What is held now comes first, and has no end; what ended follows, the latest
    first. Ends are kept for 30 days, and 100,000 of them at the most.
    """
    namespace, _, name = (pod or "").partition("/")
    if pod and (not namespace or not name or "/" in name):
        raise click.BadParameter(
            f"{pod!r} does not name a pod: write NAMESPACE/NAME", param_hint="--pod"
        )
    request = ListHistoryRequest(
        ip_address=ip_address or "",
        network=network or "",
        container_id=container or "",
        pod_name=name,
        pod_namespace=namespace,
        at_ms=at_ms or 0,
    )

    async def run() -> None:
        async with open_channel(UnixTransport(socket_path)) as channel:
            await print_pages(_pages(channel, request), output)

    run_reported(run)


async def _pages(channel: Channel, request: ListHistoryRequest) -> AsyncIterator[Page]:
    while True:
        answer = await NodeStub(channel).list_history(request, timeout=RPC_TIMEOUT)
        yield Page(HEADERS, [_row(entry) for entry in answer.entries])
        request.page_token = answer.next_page_token
        if not request.page_token:
            return


def _row(entry: HistoryEntry) -> list[str]:
    return [
        entry.network,
        entry.ip_address,
        entry.container_id,
        entry.interface_name,
        entry.pod_namespace or NULL,
        entry.pod_name or NULL,
        shown_time(entry.given_at_ms),
        shown_time(entry.ended_at_ms),
        entry.reason or NULL,
    ]
