"""The yardstick: grpclib on asyncio with a handler that returns a constant.

Same generated service, same messages, no store, no rules: what a gRPC server
in pure Python costs before it does anything. `python -m benchmarks.bare_server
SOCKET`.
"""

from __future__ import annotations

import asyncio
import sys

from grpclib.server import Server

from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamBase,
    AllocatePodIpRequest,
    AllocatePodIpResponse,
    DeallocatePodIpRequest,
    DeallocatePodIpResponse,
    PodIp,
)


class Constant(AdaptiveIpamBase):
    """Gives everybody the same address."""

    async def allocate_pod_ip(
        self, message: AllocatePodIpRequest
    ) -> AllocatePodIpResponse:
        """Answer at once."""
        return AllocatePodIpResponse(
            ipv4=PodIp(ip_address="10.240.0.2", cidr="10.240.0.0/20")
        )

    async def deallocate_pod_ip(
        self, message: DeallocatePodIpRequest
    ) -> DeallocatePodIpResponse:
        """Answer at once."""
        return DeallocatePodIpResponse()


async def main(path: str) -> None:
    """Serve until killed; says "ready" on stdout once it does."""
    server = Server([Constant()])
    await server.start(path=path)
    print("ready", flush=True)
    await server.wait_closed()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
