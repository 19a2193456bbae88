"""The result of an ADD as JSON, in the shape of each protocol version.

Pure. Section 5, "ADD Success", and the same section of the older versions of
the specification:

    0.1.0, 0.2.0          ip4 and ip6, each with its own routes; dns
    0.3.0, 0.3.1, 0.4.0   ips with `version`, routes, dns
    1.0.0, 1.1.0          ips without it, routes; numbers on routes from 1.1.0;
                          dns only where there is something in it

A delegate leaves out `interfaces` and `ips[].interface` (section 5, "Delegated
plugins (IPAM)"): its caller makes the interface and knows its place.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from metis.cni.dns import DNS
from metis.cni.messages import PodAddress
from metis.cni.spec import Request
from metis.model import Family

_BY_FAMILY = ("0.1.0", "0.2.0")
_WITH_IP_VERSION = ("0.3.0", "0.3.1", "0.4.0")
_WITH_ROUTE_NUMBERS = ("1.1.0",)

_KEY = {Family.IPV4: "ip4", Family.IPV6: "ip6"}
_IP_VERSION = {Family.IPV4: "4", Family.IPV6: "6"}


def result_text(request: Request, addresses: Sequence[PodAddress], dns: DNS) -> str:
    """The result of an ADD.

    Routes of a family that the pod has no address of are left out: nothing
    could reach their gateway, and main plugins fail on them. The shapes of 0.1.0
    and 0.2.0 have room for the first address of each family.

    Args:
      request: the call.
      addresses: what it got, in the order of its sets; at least one.
      dns: how the pod resolves names.
    """
    first: dict[Family, PodAddress] = {}
    for one in addresses:
        first.setdefault(one.family, one)
    gateways = {family: one.gateway for family, one in first.items()}
    body: dict[str, Any] = {"cniVersion": request.version}
    if request.version in _BY_FAMILY:
        for family, one in first.items():
            entry = {"ip": str(one), "gateway": one.gateway}
            routes = _routes(request, {family: one.gateway})
            body[_KEY[family]] = entry | ({"routes": routes} if routes else {})
    else:
        if request.main:
            body["interfaces"] = [
                {"name": request.env.interface, "sandbox": request.env.netns}
            ]
        body["ips"] = [
            {
                **_ip_fields(request, one.family),
                "address": str(one),
                "gateway": one.gateway,
            }
            for one in addresses
        ]
        routes = _routes(request, gateways)
        if routes:
            body["routes"] = routes
    if dns.members() or request.version in _BY_FAMILY + _WITH_IP_VERSION:
        body["dns"] = dns.members()
    return json.dumps(body, indent=4)


def _ip_fields(request: Request, family: Family) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if request.version in _WITH_IP_VERSION:
        fields["version"] = _IP_VERSION[family]
    if request.main:
        fields["interface"] = 0  # the only entry of `interfaces`
    return fields


def _routes(request: Request, gateways: dict[Family, str]) -> list[dict[str, Any]]:
    """The routes of the families in `gateways`.

    A main plugin says where each leads; a delegate hands on what is configured
    and leaves the rest to its caller.
    """
    routes = []
    for route in request.routes:
        family = route.destination.family
        if family not in gateways:
            continue
        fields: dict[str, Any] = {"dst": route.destination.cidr}
        gateway = route.gateway or (gateways[family] if request.main else None)
        if gateway is not None:
            fields["gw"] = gateway
        if request.version in _WITH_ROUTE_NUMBERS:
            fields |= dict(route.numbers)
        routes.append(fields)
    return routes
