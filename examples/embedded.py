"""An address service inside another Trio program, beside its other tasks.

Run it: `python examples/embedded.py`. It keeps its database in a temporary
directory and opens no socket.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import trio

import metis
from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamStub,
    AllocatePodIpRequest,
    DeallocatePodIpRequest,
    IpConfig,
)


async def other_work() -> None:
    """Stand for whatever else the program does."""
    await trio.sleep_forever()


async def allocate(stub: AdaptiveIpamStub, container_id: str) -> None:
    """Give one container an address and say which."""
    answer = await stub.allocate_pod_ip(
        AllocatePodIpRequest(
            ipv4_config=IpConfig(
                interface_name="eth0",
                container_id=container_id,
                initial_pod_cidr="10.240.0.0/24",
            )
        ),
        timeout=5,
    )
    if answer.ipv4 is not None:
        print(f"{container_id} has {answer.ipv4.ip_address} of {answer.ipv4.cidr}")


async def main(directory: Path) -> None:
    """Serve, use the service from a few tasks, and stop it."""
    transport = metis.MemoryTransport()
    config = metis.DaemonConfig(db_path=str(directory / "addresses.sqlite"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other_work)
        await nursery.start(partial(metis.serve, config, transport=transport))
        async with metis.open_channel(transport) as channel:
            stub = AdaptiveIpamStub(channel)
            async with trio.open_nursery() as callers:
                for number in range(3):
                    callers.start_soon(allocate, stub, f"container-{number}")
            await stub.deallocate_pod_ip(
                DeallocatePodIpRequest(
                    container_id="container-0", interface_name="eth0"
                ),
                timeout=5,
            )
            print("container-0 gave its address back")
        # Cancelling whatever holds the daemon stops it in order.
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        trio.run(main, Path(name))
