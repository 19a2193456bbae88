"""Clients that ask a daemon for addresses and give them back, until told to stop."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import trio

import metis
from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamStub,
    AllocatePodIpRequest,
    DeallocatePodIpRequest,
    IpConfig,
)
from metis.cni.direct import open_direct
from metis.errors import StoreBusy
from metis.rpc.channel import Channel

CIDR = "10.9.0.0/21"

COOLDOWN = 0.2
"""Rest of an address in seconds: short, so that addresses come round."""


@dataclass
class Churn:
    """What the clients were told: who has which address.

    Attributes:
      held: the address of each container that has one.
      deleted: containers that gave theirs back.
      calls: how many there were.
      busy: there were more than a hundred.
      stopped: set to end it.
    """

    held: dict[str, str] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    calls: int = 0
    busy: trio.Event = field(default_factory=trio.Event)
    stopped: trio.Event = field(default_factory=trio.Event)

    async def over(self, socket_path: str, name: str) -> None:
        """Call a daemon over and over; every third container stays."""
        async with metis.open_channel(metis.UnixTransport(socket_path)) as channel:
            number = 0
            while not self.stopped.is_set():
                await self._turn(channel, f"{name}-{number}", stays=number % 3 == 0)
                number += 1

    async def direct(self, db_path: str, name: str) -> None:
        """The same by opening the database for each call, as without a daemon."""
        number = 0
        while not self.stopped.is_set():
            with contextlib.suppress(StoreBusy):  # the plugin would try again
                async with open_direct(db_path, COOLDOWN) as channel:
                    await self._turn(channel, f"{name}-{number}", stays=number % 3 == 0)
            number += 1

    async def _turn(self, channel: Channel, container: str, *, stays: bool) -> None:
        self.held[container] = await add(channel, container)
        self.calls += 1
        if not stays:
            del self.held[container]  # nobody knows, until it is answered
            await delete(channel, container)
            self.deleted.add(container)
            self.calls += 1
        if self.calls > 100:
            self.busy.set()


async def add(channel: Channel, container: str) -> str:
    """Ask for an address."""
    config = IpConfig(
        interface_name="eth0", container_id=container, initial_pod_cidr=CIDR
    )
    answer = await AdaptiveIpamStub(channel).allocate_pod_ip(
        AllocatePodIpRequest(ipv4_config=config), timeout=120
    )
    assert answer.ipv4 is not None
    return answer.ipv4.ip_address


async def delete(channel: Channel, container: str) -> None:
    """Give back what a container has."""
    await AdaptiveIpamStub(channel).deallocate_pod_ip(
        DeallocatePodIpRequest(interface_name="eth0", container_id=container),
        timeout=120,
    )
