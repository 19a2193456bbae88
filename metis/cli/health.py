"""`metis health`: ask a daemon whether it serves."""

from __future__ import annotations

import click

from metis.api.grpc.health.v1 import (
    HealthCheckRequest,
    HealthCheckResponseServingStatus,
    HealthStub,
)
from metis.cli.options import RPC_TIMEOUT, run_reported, socket_path_option
from metis.rpc.channel import open_channel
from metis.rpc.transport import UnixTransport


@click.command("health")
@socket_path_option
@click.option(
    "--service",
    default="",
    help="Full name of one service; the whole server when left out.",
)
def command(socket_path: str, service: str) -> None:
    """Ask a daemon whether it serves.

    Prints the status; the exit status is 0 for SERVING alone.
    """

    async def ask() -> None:
        async with open_channel(UnixTransport(socket_path)) as channel:
            answer = await HealthStub(channel).check(
                HealthCheckRequest(service=service), timeout=RPC_TIMEOUT
            )
        status = HealthCheckResponseServingStatus(answer.status)
        if status is not HealthCheckResponseServingStatus.SERVING:
            raise click.ClickException(f"the daemon at {socket_path} is {status.name}")
        click.echo(status.name)

    run_reported(ask)
