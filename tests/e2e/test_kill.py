"""kill -9 of a busy daemon: what it acknowledged is there, and nothing twice."""

from __future__ import annotations

import apsw
import grpc

from tests.e2e import ledger
from tests.e2e.daemon import Daemon
from tests.e2e.load import Acknowledged, Ipam, Load

NETWORK = "pods"
SUBNETS = ("10.104.0.0/19", "fd00:104::/64")

KILLS = 3
"""Times that the daemon is killed on one database."""

ANSWERS = 400
"""Calls that are answered before each kill."""


def test_after_kill_9_under_load_every_acknowledged_address_is_there_once(
    daemon: Daemon,
) -> None:
    rounds: list[Acknowledged] = []
    for number in range(KILLS):
        load = Load(daemon.socket_path, NETWORK, *SUBNETS, name=f"kill{number}")
        load.wait_for(ANSWERS)

        daemon.kill()

        codes = {error.code() for error in load.join()}
        # CANCELLED is how grpcio names a stream that the transport took along.
        assert codes <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
        assert daemon.socket_path.is_socket(), "the dead daemon's socket stays"
        rounds.append(load.acknowledged)
        daemon.start()

        held = ledger.read(daemon)
        for acknowledged in rounds:
            check(held, acknowledged)
    # Nothing has cooled down meanwhile, so nothing can have been given twice.
    given = [address for acknowledged in rounds for address in acknowledged.given]
    assert len(given) == len(set(given))

    # A repeated ADD finds what the first one got, before the kill.
    ipam = Ipam(daemon.socket_path, NETWORK, *SUBNETS)
    for acknowledged in rounds:
        container, addresses = next(iter(acknowledged.added.items()))
        assert ipam.add(container) == addresses
    ipam.close()

    daemon.stop()
    database = apsw.Connection(str(daemon.db_path), flags=apsw.SQLITE_OPEN_READONLY)
    assert database.pragma("integrity_check") == "ok"
    assert not database.pragma("foreign_key_check")
    database.close()


def check(held: ledger.Ledger, acknowledged: Acknowledged) -> None:
    """The ledger has all that was acknowledged, and nobody unheard of."""
    holders = held.held_by
    for container, addresses in acknowledged.added.items():
        assert holders.get(container) == addresses
    assert not holders.keys() & acknowledged.deleted.keys()
    cooling = held.cooling_addresses
    for addresses in acknowledged.deleted.values():
        assert addresses <= cooling
    for container, addresses in acknowledged.deleting.items():
        # Both or neither: two families are one transaction.
        assert holders.get(container, addresses) == addresses
        assert container in holders or addresses <= cooling
    for container in acknowledged.adding:
        assert len(holders.get(container, SUBNETS)) == len(SUBNETS)
