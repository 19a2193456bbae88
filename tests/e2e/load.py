"""Clients that keep a daemon busy and remember what it acknowledged."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from metis.api.adaptiveipam.v1 import (
    AllocatePodIpRequest,
    AllocatePodIpResponse,
    DeallocatePodIpRequest,
    DeallocatePodIpResponse,
    IpConfig,
)

SERVICE = "/adaptiveipam.v1.AdaptiveIpam/"
INTERFACE = "eth0"

CLIENTS = 32
"""Calls in flight; the writer then has several in one transaction."""

CHANNELS = 4
"""Connections that the clients share."""

CALL_SECONDS = 120.0
"""Until a call must have answered, as long as the daemon lives."""


class Ipam:
    """The three-word client of one network of a daemon, through grpcio."""

    def __init__(self, socket_path: Path, network: str, *subnets: str) -> None:
        self._channel = grpc.insecure_channel(
            f"unix:{socket_path}",
            # Else all channels of a process share one connection.
            options=[("grpc.use_local_subchannel_pool", 1)],
        )
        self._network = network
        self._subnets = subnets
        self._allocate = self._channel.unary_unary(
            f"{SERVICE}AllocatePodIP",
            request_serializer=bytes,
            response_deserializer=AllocatePodIpResponse.parse,
        )
        self._deallocate = self._channel.unary_unary(
            f"{SERVICE}DeallocatePodIP",
            request_serializer=bytes,
            response_deserializer=DeallocatePodIpResponse.parse,
        )

    def add(self, container_id: str) -> frozenset[str]:
        """One address from each subnet.

        Raises:
          grpc.RpcError: the call failed, or nobody serves.
        """
        request = AllocatePodIpRequest(network=self._network)
        for subnet in self._subnets:
            config = IpConfig(
                interface_name=INTERFACE,
                container_id=container_id,
                initial_pod_cidr=subnet,
            )
            if ":" in subnet:
                request.ipv6_config = config
            else:
                request.ipv4_config = config
        answer = self._allocate(request, timeout=CALL_SECONDS)
        return frozenset(ip.ip_address for ip in (answer.ipv4, answer.ipv6) if ip)

    def delete(self, container_id: str) -> None:
        """Give back what the container has.

        Raises:
          grpc.RpcError: the call failed, or nobody serves.
        """
        self._deallocate(
            DeallocatePodIpRequest(
                network=self._network,
                interface_name=INTERFACE,
                container_id=container_id,
            ),
            timeout=CALL_SECONDS,
        )

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


@dataclass
class Acknowledged:
    """What the daemon told its clients; the rest of their calls may be either way.

    Attributes:
      added: addresses of containers whose ADD was answered and whose DEL was
        never sent.
      deleting: of containers whose DEL was sent and not answered.
      deleted: of containers whose DEL was answered.
      adding: containers whose ADD was sent and not answered.
    """

    added: dict[str, frozenset[str]] = field(default_factory=dict)
    deleting: dict[str, frozenset[str]] = field(default_factory=dict)
    deleted: dict[str, frozenset[str]] = field(default_factory=dict)
    adding: set[str] = field(default_factory=set)

    @property
    def given(self) -> list[str]:
        """Every address that was ever acknowledged, once for each time."""
        return [
            address
            for containers in (self.added, self.deleting, self.deleted)
            for addresses in containers.values()
            for address in addresses
        ]


class Load:
    """Clients that add, and delete every third container, until a call fails.

    Each dictionary of `acknowledged` is changed by single operations, which the
    interpreter keeps whole among threads; read it after `join`.
    """

    def __init__(
        self, socket_path: Path, network: str, *subnets: str, name: str
    ) -> None:
        self.acknowledged = Acknowledged()
        self._name = name
        self._ipams = [Ipam(socket_path, network, *subnets) for _ in range(CHANNELS)]
        self._progress = threading.Semaphore(0)
        self._threads = ThreadPoolExecutor(CLIENTS)
        self._running: list[Future[grpc.RpcError]] = [
            self._threads.submit(self._client, number) for number in range(CLIENTS)
        ]

    def wait_for(self, answers: int) -> None:
        """Wait until so many calls more were answered.

        Raises:
          TimeoutError: the daemon has stopped answering.
        """
        for _ in range(answers):
            if not self._progress.acquire(timeout=CALL_SECONDS):
                raise TimeoutError(f"no answer for {CALL_SECONDS} s")

    def join(self) -> list[grpc.RpcError]:
        """Wait until every client has met its error; returns the errors."""
        errors = [client.result(CALL_SECONDS * 2) for client in self._running]
        self._threads.shutdown()
        for ipam in self._ipams:
            ipam.close()
        return errors

    def _client(self, number: int) -> grpc.RpcError:
        ipam = self._ipams[number % CHANNELS]
        done = self.acknowledged
        try:
            for turn in range(1_000_000):
                container = f"{self._name}-{number}-{turn}"
                done.adding.add(container)
                done.added[container] = ipam.add(container)
                done.adding.remove(container)
                self._progress.release()
                if turn % 3 == 0:
                    done.deleting[container] = done.added.pop(container)
                    ipam.delete(container)
                    done.deleted[container] = done.deleting.pop(container)
                    self._progress.release()
        except grpc.RpcError as error:
            return error
        raise AssertionError("the load ended by itself: it was meant to be cut off")
