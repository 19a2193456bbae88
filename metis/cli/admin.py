"""`metis admin`: look at the daemon's tables."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import click

from metis.api.admin.v1 import (
    AdminStub,
    AdminTableDumpResponse,
    ListCidrBlocksRequest,
    ListIpAddressesRequest,
)
from metis.cli.options import RPC_TIMEOUT, run_reported, socket_path_option
from metis.cli.output import Page, output_option, print_pages
from metis.rpc.channel import Channel, open_channel
from metis.rpc.transport import UnixTransport

FetchPage = Callable[[Channel, str, str], Awaitable[AdminTableDumpResponse]]
"""Fetch one page: (channel, filter, page token) -> page."""


@click.group("admin")
def command() -> None:
    """Look at the daemon's tables."""


@command.group("cidr-blocks")
def cidr_blocks() -> None:
    """CIDR blocks: where addresses come from."""


@command.group("ip-addresses")
def ip_addresses() -> None:
    """Addresses: who holds which, and which are cooling."""


filter_option = click.option(
    "--filter",
    "filter_",
    default="",
    metavar="COLUMN=VALUE[ AND ...]",
    help="Only rows with these values; NULL selects what is not set.",
)


@cidr_blocks.command("list")
@output_option
@filter_option
@socket_path_option
def list_cidr_blocks(output: str, filter_: str, socket_path: str) -> None:
    """List CIDR blocks with their counters."""

    async def fetch(
        channel: Channel, filter_: str, token: str
    ) -> AdminTableDumpResponse:
        return await AdminStub(channel).list_cidr_blocks(
            ListCidrBlocksRequest(filter=filter_, page_token=token),
            timeout=RPC_TIMEOUT,
        )

    run_reported(lambda: _dump(socket_path, fetch, filter_, output))


@ip_addresses.command("list")
@output_option
@filter_option
@socket_path_option
def list_ip_addresses(output: str, filter_: str, socket_path: str) -> None:
    """List addresses with their owners.

    Only addresses that were set up appear: a block is filled in steps as it is
    used.
    """

    async def fetch(
        channel: Channel, filter_: str, token: str
    ) -> AdminTableDumpResponse:
        return await AdminStub(channel).list_ip_addresses(
            ListIpAddressesRequest(filter=filter_, page_token=token),
            timeout=RPC_TIMEOUT,
        )

    run_reported(lambda: _dump(socket_path, fetch, filter_, output))


async def _dump(socket_path: str, fetch: FetchPage, filter_: str, output: str) -> None:
    """Fetch all pages and print them as they come."""
    async with open_channel(UnixTransport(socket_path)) as channel:
        await print_pages(_pages(channel, fetch, filter_), output)


async def _pages(
    channel: Channel, fetch: FetchPage, filter_: str
) -> AsyncIterator[Page]:
    token = ""
    while True:
        page = await fetch(channel, filter_, token)
        yield Page(page.headers, [row.values for row in page.rows])
        token = page.next_page_token
        if not token:
            return
