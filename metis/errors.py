"""The exceptions that cross module borders.

Lower modules translate what they meet (SQLite, the operating system, HTTP/2)
into these once, at their own border; `metis.service` turns them into gRPC
statuses and `metis.cni.plugin` turns statuses into CNI codes. Pure: this
module imports nothing of the project.
"""

from __future__ import annotations


class MetisError(Exception):
    """Base of every error that metis raises on purpose."""


class InvalidRequest(MetisError, ValueError):
    """The caller asked for something that can never be granted as asked.

    The message names the offending value and what would be right.
    """


class PoolExhausted(MetisError):
    """No address of the family is free on the network now.

    Attributes:
      network: name of the network.
      family: "ipv4" or "ipv6".
      owned: addresses held by a pod.
      cooling: released addresses whose cooldown has not ended.
      reserved: addresses that no pod ever gets (network, gateway, broadcast).
      next_free_ms: stored time (`metis.clock`) at which the next cooling
        address becomes free, or None when nothing is cooling.
      wait_ms: milliseconds from now until next_free_ms, or None.
      place: which entry of the request lacks an address, from 0.
      ranges: from which ranges it was to be, where the request names some.
    """

    def __init__(
        self,
        network: str,
        family: str,
        *,
        owned: int,
        cooling: int,
        reserved: int,
        next_free_ms: int | None,
        wait_ms: int | None,
        place: int = 0,
        ranges: str = "",
    ) -> None:
        self.network = network
        self.family = family
        self.owned = owned
        self.cooling = cooling
        self.reserved = reserved
        self.next_free_ms = next_free_ms
        self.wait_ms = wait_ms
        self.place = place
        self.ranges = ranges
        if owned + cooling + reserved == 0:
            state = "the network has no CIDR block of this family"
        else:
            state = f"{owned} owned, {cooling} cooling, {reserved} reserved"
        when = (
            "no address is cooling"
            if wait_ms is None
            else f"the next is free in {max(wait_ms, 0) / 1000:.1f} s"
        )
        where = f" in {ranges}" if ranges else ""
        super().__init__(
            f"no {family} address is free on network {network!r}{where}: "
            f"{state}; {when}"
        )


class AddressTaken(MetisError):
    """The address that was asked for by name is another owner's now.

    Held, or cooling after another owner; asking again later may help.
    """


class OwnerDeleted(MetisError):
    """The owner was deleted after this call began, so nobody waits for its answer.

    A runtime that gives up on an ADD sends the DEL while the ADD still runs. A
    call that begins after the DEL is served.
    """


class NotAllocated(MetisError):
    """The owner holds no address on the network."""


class StoreError(MetisError):
    """The database failed in a way that a retry will not mend.

    Seen by callers as an internal fault: the message says which operation and
    what SQLite answered.
    """


class StoreBusy(StoreError):
    """The database is passing through a state that ends by itself.

    Another process holds the write lock, or a schema change is under way.
    Worth a retry within the caller's deadline.
    """


class StoreUnavailable(StoreError):
    """The database cannot be read or written here and now.

    A read-only file or directory, a full disk, an input/output error, a store
    that is closing. Nothing was written.
    """


class StoreDamaged(StoreError):
    """The file is a database of ours in which something is broken.

    Found by SQLite as it reads. Opening it anew heals it as far as that can be
    done, so a call that is made again may be served.
    """


class StoreIncompatible(StoreError):
    """The file is not a database that this version may touch.

    A newer schema version, or not a database at all. The file is left as it is.
    """


class InstallError(MetisError):
    """The plugin was not installed; whatever was there before is untouched."""


class TransportError(MetisError, OSError):
    """A listener cannot be opened, or a peer cannot be reached.

    The message names the address (socket path, host and port) and the reason.
    """


class AddressInUse(TransportError):
    """Somebody else serves at the address already."""


def sole_error(error: BaseException) -> BaseException:
    """The one exception inside nested groups; the error itself when there are more.

    A nursery puts even a single failure into a group. Where a caller was
    promised the failure itself, the border unpacks it with this.
    """
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
