"""Which address of which set: what the runtime asks for by name.

Pure. There are three ways (CONVENTIONS.md of the specification), merged as
host-local merges them:

    args.cni.ips         in the configuration
    runtimeConfig.ips    in the configuration, under the capability `ips`
    IP=                  in CNI_ARGS, one address

Each is for the first set that could give it and has not been asked yet. Where
`args` and CNI_ARGS ask for the same address of a pod, `args` decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from metis.cni import fields
from metis.cni.fields import Configuration, invalid, members, section
from metis.cni.protocol import shown
from metis.cni.ranges import RangeSet

ARGS = "args.cni.ips"
CAPABILITY = "runtimeConfig.ips"
VARIABLE = "IP= in CNI_ARGS"


def configured_requests(
    config: Configuration, runtime: Configuration
) -> list[tuple[str, str]]:
    """The addresses that a configuration asks for, each with its place.

    Args:
      config: the whole configuration.
      runtime: its `runtimeConfig` object.

    Raises:
      CNIError: code 7 for one that is no address.
    """
    args = section(section(config, "args", "args"), "cni", "args.cni")
    return [
        (place, fields.address_of_prefixed(fields.text_at(member, place), place))
        for value, where in ((args.get("ips"), ARGS), (runtime.get("ips"), CAPABILITY))
        for place, member in members(value, where)
    ]


def with_requests(
    sets: Sequence[RangeSet],
    configured: Sequence[tuple[str, str]],
    variable: Sequence[str],
) -> tuple[RangeSet, ...]:
    """The sets, with the addresses that each one is asked for.

    Args:
      sets: those of the configuration.
      configured: from `configured_requests`.
      variable: from `metis.cni.environment.parse_args`.

    Raises:
      CNIError: code 7, naming an address that no set can give.
    """
    asked = list(sets)
    by_args: set[int] = set()
    for where, address in configured:
        place = _place(asked, address, where)
        if place is None:
            raise _left_over(asked, address, where)
        asked[place] = replace(asked[place], requested=address)
        if where.startswith(ARGS):
            by_args.add(place)
    for address in variable:
        place = _place(asked, address, VARIABLE)
        if place is not None:
            asked[place] = replace(asked[place], requested=address)
        elif not any(asked[i].spans(address) for i in by_args):
            raise _left_over(asked, address, VARIABLE)
    return tuple(asked)


def _place(sets: Sequence[RangeSet], address: str, where: str) -> int | None:
    """The set that an address is for: one that has it already, or a free one."""
    for i, one in enumerate(sets):
        if one.requested == address:
            return i
    for i, one in enumerate(sets):
        if one.requested or not one.spans(address):
            continue
        if one.sets_aside(address):
            raise invalid(
                f"the requested address {shown(address)} ({where}) is the gateway or "
                f"excluded in {one}",
                "no pod gets it: ask for another one",
            )
        return i
    return None


def _left_over(sets: Sequence[RangeSet], address: str, where: str) -> Exception:
    holding = [one for one in sets if one.spans(address)]
    if holding:
        return invalid(
            f"the requested address {shown(address)} ({where}) is one too many: "
            f"{holding[0]} gives one, and {shown(holding[0].requested)} is asked for",
            "each set of ranges gives one address",
        )
    return invalid(
        f"the requested address {shown(address)} ({where}) is in no range of the "
        "configuration",
        f"it must be in {' or in '.join(map(str, sets))}",
    )
