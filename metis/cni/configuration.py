"""Readers for what stands in a network configuration: routes, prevResult, our keys.

Pure. Every reader refuses what it cannot use with code 7, naming the place, the
value and what would be right; keys that nobody here reads are tolerated, as the
specification wants it (section 1, "Plugin configuration objects").
"""

from __future__ import annotations

from dataclasses import dataclass

from metis.cni import fields
from metis.cni.fields import Configuration, invalid, members, object_at
from metis.cni.protocol import shown
from metis.config import parse_duration
from metis.errors import InvalidRequest
from metis.model import DEFAULT_NETWORK, CIDRBlock, checked_name

ROUTE_NUMBERS = ("mtu", "advmss", "priority", "table", "scope")
"""Numbers that a route may carry since 1.1.0 (section 5, "ADD Success")."""

MAX_SOCKET_PATH_BYTES = 107
"""Linux's sun_path less the terminating zero, unix(7)."""


@dataclass(frozen=True, slots=True)
class Route:
    """A route of the configuration, to be handed on with the address.

    Attributes:
      destination: where it leads.
      gateway: the next hop as text, or None where the configuration has none.
      numbers: those of ROUTE_NUMBERS that are set, in that order.
    """

    destination: CIDRBlock
    gateway: str | None = None
    numbers: tuple[tuple[str, int], ...] = ()


def ipam_section(config: Configuration) -> Configuration:
    """The `ipam` object; empty when there is none."""
    return fields.section(config, "ipam", "ipam")


def network(ipam: Configuration) -> str:
    """The network whose addresses are used, `ipam.network`.

    Not the configuration's `name`: several configurations may share a network,
    and the original always uses the default one.
    """
    value = fields.text(ipam, "network", "ipam.network") or DEFAULT_NETWORK
    try:
        return checked_name("network", value)
    except InvalidRequest as error:
        raise invalid(f"ipam.network: {error}") from None


def routes(ipam: Configuration) -> tuple[Route, ...]:
    """The routes of a configuration, in order."""
    return tuple(
        _route(object_at(entry, where), where)
        for where, entry in members(ipam.get("routes"), "ipam.routes")
    )


def previous_addresses(config: Configuration) -> tuple[str, ...]:
    """The addresses of prevResult in canonical form, whatever version it is in.

    Section 2, "CHECK": the runtime must pass the result of the ADD.
    """
    if config.get("prevResult") is None:
        raise invalid("CHECK needs prevResult: the result of the ADD")
    result = object_at(config["prevResult"], "prevResult")
    found = [
        _prefixed_address(object_at(entry, where), "address", where)
        for where, entry in members(result.get("ips"), "prevResult.ips")
    ]
    for key in ("ip4", "ip6"):  # the shape of 0.1.0 and 0.2.0
        if result.get(key) is not None:
            where = f"prevResult.{key}"
            found.append(_prefixed_address(object_at(result[key], where), "ip", where))
    return tuple(found)


def setting(config: Configuration, key: str) -> object:
    """A value of ours, which may stand in `ipam` or beside it; `ipam` wins."""
    ipam = config.get("ipam")
    if isinstance(ipam, dict) and ipam.get(key) is not None:
        value: object = ipam[key]
        return value
    return config.get(key)


def path_setting(config: Configuration, key: str, default: str) -> str:
    """A setting that names a file; absent and empty mean the default."""
    value = setting(config, key)
    if value is None or value == "":
        return default
    if not isinstance(value, str) or "\0" in value or not fields.is_encodable(value):
        raise invalid(f"{key} is {shown(value)}: write the path of a file")
    return value


def socket_setting(config: Configuration, key: str, default: str) -> str:
    """A setting that names a Unix socket."""
    path = path_setting(config, key, default)
    if len(path.encode()) > MAX_SOCKET_PATH_BYTES:
        raise invalid(
            f"{key} {shown(path)} is {len(path.encode())} bytes long: "
            f"a socket path has at most {MAX_SOCKET_PATH_BYTES}"
        )
    return path


def boolean_setting(config: Configuration, key: str) -> bool:
    """A setting that is true or false; absent means false."""
    return fields.boolean(setting(config, key), key)


def duration_setting(config: Configuration, key: str, default: float) -> float:
    """A setting that is a Go duration; in seconds."""
    value = setting(config, key)
    if value is None or value == "":
        return default
    if not isinstance(value, str):
        raise invalid(f"{key} is {shown(value)}: write a text like '1m' or '500ms'")
    try:
        return parse_duration(value)
    except InvalidRequest as error:
        raise invalid(f"{key}: {error}") from None


def _route(entry: Configuration, where: str) -> Route:
    destination = fields.text(entry, "dst", f"{where}.dst")
    if not destination:
        raise invalid(f"{where} has no dst: write ADDRESS/PREFIX, '0.0.0.0/0'")
    gateway = fields.text(entry, "gw", f"{where}.gw")
    numbers = []
    for key in ROUTE_NUMBERS:
        value = entry.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise invalid(f"{where}.{key} is {shown(value)}: write a number from 0 up")
        numbers.append((key, value))
    return Route(
        fields.block(destination, f"{where}.dst"),
        fields.address(gateway, f"{where}.gw") if gateway else None,
        tuple(numbers),
    )


def _prefixed_address(entry: Configuration, key: str, where: str) -> str:
    """The address of "ADDRESS/PREFIX"."""
    text = fields.text(entry, key, f"{where}.{key}") or ""
    return fields.address(text.partition("/")[0], f"{where}.{key}")
