"""The verbs against a fake daemon: what is asked, answered, and given back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio
from grpclib import GRPCError, Status
from trio.testing import MockClock

from metis.api.adaptiveipam.v1 import (
    AddressRange,
    AddressSet,
    AllocatePodIpRequest,
    AllocatePodIpResponse,
    CheckPodIpRequest,
    DeallocatePodIpRequest,
    IpConfig,
    PodIp,
)
from metis.cni.client import OpenChannel
from metis.cni.environment import REQUIRED
from metis.cni.protocol import CNIError
from metis.cni.spec import Request
from metis.cni.verbs import VERBS, perform
from tests.cni.calls import NETNS, Config, config, environ, ipam, request
from tests.cni.fakes import FakeIpam, Unreachable, reach

V4 = PodIp(ip_address="10.240.0.2", cidr="10.240.0.0/22")
V6 = PodIp(ip_address="fd00:10::2", cidr="fd00:10::/64")
BOTH = ipam(ranges=[[{"subnet": "10.240.0.0/22"}], [{"subnet": "fd00:10::/64"}]])


def discard(_text: str) -> None:
    """A standard output that nobody looks at."""


def broken(_text: str) -> None:
    raise BrokenPipeError("nobody reads")


async def failure(
    asked: Request, channel: OpenChannel, emit: Any = discard
) -> CNIError:
    with pytest.raises(CNIError) as caught:
        await perform(asked, emit, channel)
    return caught.value


def checked(result: Config, fields: Config | None = None) -> Request:
    return request("CHECK", config("1.0.0", ipam=fields or ipam(), prevResult=result))


def previous(*addresses: str) -> Config:
    return {"ips": [{"address": address} for address in addresses]}


def test_every_command_has_a_verb() -> None:
    assert set(VERBS) == set(REQUIRED)


async def test_add_asks_for_every_family_and_prints_the_result() -> None:
    daemon, printed = FakeIpam(), list[str]()
    args = "K8S_POD_NAME=web;K8S_POD_NAMESPACE=shop"
    asked = request("ADD", config(ipam=BOTH), environ("ADD", CNI_ARGS=args))
    addresses = await perform(asked, printed.append, reach(daemon))
    assert addresses == ("10.240.0.2/22", "fd00:10::2/64")
    assert daemon.asked == [
        AllocatePodIpRequest(
            network="default",
            ipv4_config=IpConfig(
                interface_name="eth0",
                container_id="c1",
                initial_pod_cidr="10.240.0.0/22",
            ),
            ipv6_config=IpConfig(
                interface_name="eth0",
                container_id="c1",
                initial_pod_cidr="fd00:10::/64",
            ),
            pod_name="web",
            pod_namespace="shop",
            sets=[
                AddressSet(alternatives=[AddressRange(subnet="10.240.0.0/22")]),
                AddressSet(alternatives=[AddressRange(subnet="fd00:10::/64")]),
            ],
            netns_path=NETNS,
        )
    ]
    assert [entry["address"] for entry in json.loads("".join(printed))["ips"]] == [
        "10.240.0.2/22",
        "fd00:10::2/64",
    ]


async def test_add_asks_for_one_family_where_one_is_configured() -> None:
    daemon = FakeIpam()
    only_v6 = ipam(subnet="fd00:10::/64", network="blue")
    await perform(request("ADD", config(ipam=only_v6)), discard, reach(daemon))
    (message,) = daemon.asked
    assert message.ipv4_config is None
    assert message.network == "blue"


async def test_add_without_ranges_takes_ipv4_from_what_the_network_has() -> None:
    daemon = FakeIpam()
    await perform(request("ADD", config(ipam=None)), discard, reach(daemon))
    (message,) = daemon.asked
    assert message.ipv4_config.initial_pod_cidr == ""
    assert message.ipv6_config is None


@pytest.mark.parametrize("own", ["/proc/self/ns/net", "/proc/thread-self/ns/net"])
async def test_add_to_the_host_s_own_namespace_takes_nothing(own: str) -> None:
    daemon = FakeIpam()
    asked = request("ADD", None, environ("ADD", CNI_NETNS=own))
    error = await failure(asked, reach(daemon))
    assert error.code == 8
    assert own in error.details
    assert daemon.asked == []


async def test_add_to_the_host_s_own_namespace_can_be_wanted() -> None:
    variables = environ("ADD", CNI_NETNS="/proc/self/ns/net", CNI_NETNS_OVERRIDE="true")
    asked = request("ADD", None, variables)
    assert await perform(asked, discard, reach(FakeIpam())) == ("10.240.0.2/22",)


@pytest.mark.parametrize("path", ["/absent", "/dev/null", "/proc/self/ns/mnt", "a\0b"])
async def test_a_namespace_that_cannot_be_looked_at_stops_nothing(path: str) -> None:
    asked = request("ADD", None, environ("ADD", CNI_NETNS=path))
    assert await perform(asked, discard, reach(FakeIpam()))


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (Status.INVALID_ARGUMENT, 7),
        (Status.RESOURCE_EXHAUSTED, 11),
        (Status.UNAVAILABLE, 11),
        (Status.DEADLINE_EXCEEDED, 11),
        (Status.CANCELLED, 11),
        (Status.ABORTED, 11),
        (Status.INTERNAL, 999),
        (Status.UNKNOWN, 999),
        (Status.UNIMPLEMENTED, 999),
        (Status.PERMISSION_DENIED, 999),
    ],
)
@pytest.mark.parametrize("command", ["ADD", "DEL", "CHECK"])
async def test_a_status_becomes_a_code_with_the_daemon_s_words(
    command: str, status: Status, code: int
) -> None:
    daemon = FakeIpam()
    daemon.failure = GRPCError(status, "no address is free: 3 owned, 2 cooling")
    asked = request(command, config(prevResult=previous("10.240.0.2/22")))
    error = await failure(asked, reach(daemon))
    assert error.code == code
    assert error.message == "no address is free: 3 owned, 2 cooling"
    assert status.name in error.details
    assert asked.socket_path in error.details


async def test_a_status_without_words_is_named() -> None:
    daemon = FakeIpam()
    daemon.failure = GRPCError(Status.UNAVAILABLE)
    assert "UNAVAILABLE" in (await failure(request(), reach(daemon))).message


@pytest.mark.parametrize(
    "answer",
    [
        AllocatePodIpResponse(),
        AllocatePodIpResponse(ipv4=V4),
        AllocatePodIpResponse(ipv4=V4, ipv6=PodIp(ip_address="::2", cidr="x")),
        AllocatePodIpResponse(ipv4=V4, ipv6=V4),
        AllocatePodIpResponse(
            ipv4=V4, ipv6=PodIp(ip_address="fd00:11::2", cidr="fd00:10::/64")
        ),
        AllocatePodIpResponse(ipv4=V4, ipv6=PodIp(ip_address="x", cidr="fd00::/64")),
    ],
)
async def test_an_answer_that_is_no_address_a_family_is_given_back(
    answer: AllocatePodIpResponse,
) -> None:
    daemon = FakeIpam()
    daemon.answer = answer
    error = await failure(request("ADD", config(ipam=BOTH)), reach(daemon))
    assert error.code == 999
    assert isinstance(daemon.asked[-1], DeallocatePodIpRequest)


async def test_an_address_that_nobody_reads_of_is_given_back() -> None:
    daemon = FakeIpam()
    asked = request("ADD", config(ipam=ipam(network="blue")))
    error = await failure(asked, reach(daemon), broken)
    assert error.code == 5
    assert "stdout" in error.message
    assert daemon.asked[1:] == [
        DeallocatePodIpRequest(
            network="blue",
            interface_name="eth0",
            container_id="c1",
            only_allocation_id="a1",
        )
    ]


async def test_an_address_of_an_original_daemon_is_given_back_whatever_it_is() -> None:
    daemon = FakeIpam()
    daemon.answer = AllocatePodIpResponse(ipv4=V4)
    assert (await failure(request(), reach(daemon), broken)).code == 5
    assert daemon.asked[-1].only_allocation_id == ""


async def test_an_interrupted_add_gives_its_address_back() -> None:
    daemon = FakeIpam()

    def interrupted(_text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await perform(request("ADD"), interrupted, reach(daemon))
    assert isinstance(daemon.asked[-1], DeallocatePodIpRequest)


async def test_an_add_that_cannot_give_back_ends_all_the_same(
    autojump_clock: MockClock,
) -> None:
    daemon = FakeIpam()

    def broken_daemon(_text: str) -> None:
        daemon.hangs = True
        raise BrokenPipeError("nobody reads")

    start = trio.current_time()
    error = await failure(request("ADD"), reach(daemon), broken_daemon)
    assert error.code == 5
    assert trio.current_time() - start <= 3


async def test_del_names_the_owner_and_prints_nothing() -> None:
    daemon = FakeIpam()
    args = "K8S_POD_NAME=web;K8S_POD_NAMESPACE=shop"
    variables = environ("DEL", CNI_ARGS=args, CNI_NETNS="")
    asked = request("DEL", config(ipam=ipam(network="blue", ranges="?")), variables)
    assert await perform(asked, broken, reach(daemon)) == ()
    assert daemon.asked == [
        DeallocatePodIpRequest(
            network="blue",
            interface_name="eth0",
            container_id="c1",
            pod_name="web",
            pod_namespace="shop",
        )
    ]


async def test_del_for_nothing_succeeds() -> None:
    daemon = FakeIpam()
    daemon.failure = GRPCError(Status.NOT_FOUND, "nothing held")
    assert await perform(request("DEL"), discard, reach(daemon)) == ()


async def test_del_from_the_host_s_own_namespace_still_frees() -> None:
    # A process id in the path may have been given to somebody else since.
    daemon = FakeIpam()
    variables = environ("DEL", CNI_NETNS="/proc/self/ns/net")
    assert await perform(request("DEL", None, variables), discard, reach(daemon)) == ()
    assert len(daemon.asked) == 1


async def test_check_names_the_owner_and_prints_nothing() -> None:
    daemon = FakeIpam()
    daemon.held = [V4]
    asked = checked(previous("10.240.0.2/22"))
    assert await perform(asked, broken, reach(daemon)) == ("10.240.0.2",)
    assert daemon.asked == [
        CheckPodIpRequest(network="default", interface_name="eth0", container_id="c1")
    ]


@pytest.mark.parametrize(
    ("result", "held"),
    [
        (previous("10.240.0.2/22", "fd00:10::2/64"), [V4, V6]),
        (previous("10.240.0.2/22", "192.0.2.9/24"), [V4]),  # a later plugin's
        (previous("10.240.0.2/22"), [V4]),  # before IPv6 was configured
        (previous("FD00:10:0::2/64"), [V6]),
        ({"ip4": {"ip": "10.240.0.2/22"}, "ip6": {"ip": "fd00:10::2/64"}}, [V4, V6]),
        (previous("10.240.0.2/22"), []),  # an original daemon: existence alone
        ({}, []),
    ],
)
async def test_check_is_content_when_everything_held_is_in_the_previous_result(
    result: Config, held: list[PodIp]
) -> None:
    daemon = FakeIpam()
    daemon.held = held
    assert len(await perform(checked(result, BOTH), discard, reach(daemon))) == len(
        held
    )


async def test_check_of_nothing_held_is_code_100() -> None:
    daemon = FakeIpam()
    daemon.failure = GRPCError(Status.NOT_FOUND, "c1 eth0 holds no address")
    error = await failure(checked(previous("10.240.0.2/22")), reach(daemon))
    assert (error.code, error.message) == (100, "c1 eth0 holds no address")


async def test_check_of_a_family_no_longer_held_is_code_100() -> None:
    daemon = FakeIpam()
    daemon.held = [V4]
    asked = checked(previous("10.240.0.2/22", "fd00:10::2/64"), BOTH)
    error = await failure(asked, reach(daemon))
    assert error.code == 100
    assert "fd00:10::2" in error.message
    assert "no ipv6 address" in error.message


@pytest.mark.parametrize(
    ("result", "held", "named"),
    [
        (previous("10.240.0.3/22"), [V4], ["10.240.0.2", "10.240.0.3"]),
        (previous("10.240.0.2/22"), [V4, V6], ["fd00:10::2", "10.240.0.2"]),
        ({}, [V4], ["10.240.0.2", "no address"]),
        (previous("10.240.0.2/22"), [PodIp(ip_address="junk")], ["junk"]),
    ],
)
async def test_check_of_another_address_is_code_101_and_names_both(
    result: Config, held: list[PodIp], named: list[str]
) -> None:
    daemon = FakeIpam()
    daemon.held = held
    error = await failure(checked(result, BOTH), reach(daemon))
    assert error.code == 101
    for text in named:
        assert text in error.message


@pytest.mark.parametrize("command", ["ADD", "DEL", "CHECK"])
async def test_a_daemon_that_is_away_is_tried_three_times_100_ms_apart(
    command: str, autojump_clock: MockClock
) -> None:
    away = Unreachable()
    start = trio.current_time()
    error = await failure(request(command, config(prevResult={})), away)
    assert error.code == 11
    assert "nobody listens at" in error.message
    assert [round(time - start, 6) for time in away.tries] == [0.0, 0.1, 0.2]


async def test_a_daemon_that_comes_back_meanwhile_serves(
    autojump_clock: MockClock,
) -> None:
    daemon = FakeIpam()
    assert await perform(request(), discard, Unreachable(2, reach(daemon)))
    assert len(daemon.asked) == 1


async def test_a_daemon_that_hangs_is_given_up_after_ten_seconds(
    autojump_clock: MockClock,
) -> None:
    daemon = FakeIpam()
    daemon.hangs = True
    start = trio.current_time()
    error = await failure(request("ADD"), reach(daemon))
    assert error.code == 11
    assert 10 <= trio.current_time() - start <= 11


MANY = ipam(
    ranges=[
        [
            {
                "subnet": "10.240.0.0/22",
                "rangeStart": "10.240.0.10",
                "rangeEnd": "10.240.0.20",
                "gateway": "10.240.3.254",
                "exclude": ["10.240.0.12/31"],
            },
            {"subnet": "10.241.0.0/24"},
        ],
        [{"subnet": "10.9.0.0/24"}],
        [{"subnet": "fd00:10::/64"}],
    ]
)


async def test_add_asks_for_one_address_a_set_and_gets_them_in_order() -> None:
    daemon, printed = FakeIpam(), list[str]()
    fields = config(
        ipam=MANY | {"sticky": True}, runtimeConfig={"ips": ["10.9.0.77/24"]}
    )
    addresses = await perform(request("ADD", fields), printed.append, reach(daemon))
    assert addresses == ("10.240.0.2/22", "10.9.0.77/24", "fd00:10::2/64")
    (message,) = daemon.asked
    assert message.sticky
    assert message.requested_ips == []
    assert message.sets == [
        AddressSet(
            alternatives=[
                AddressRange(
                    subnet="10.240.0.0/22",
                    range_start="10.240.0.10",
                    range_end="10.240.0.20",
                    gateway="10.240.3.254",
                    exclude=["10.240.0.12/31"],
                ),
                AddressRange(subnet="10.241.0.0/24"),
            ]
        ),
        AddressSet(
            alternatives=[AddressRange(subnet="10.9.0.0/24")],
            requested_ip="10.9.0.77",
        ),
        AddressSet(alternatives=[AddressRange(subnet="fd00:10::/64")]),
    ]
    # For a daemon that does not know sets: the first of each family.
    assert message.ipv4_config.initial_pod_cidr == "10.240.0.0/22"
    assert message.ipv6_config.initial_pod_cidr == "fd00:10::/64"
    ips = json.loads("".join(printed))["ips"]
    assert [entry["gateway"] for entry in ips] == [
        "10.240.3.254",
        "10.9.0.1",
        "fd00:10::1",
    ]


async def test_without_ranges_a_requested_address_stands_beside_the_families() -> None:
    daemon = FakeIpam()
    variables = environ("ADD", CNI_ARGS="IP=10.240.0.2")
    asked = request("ADD", config(ipam=ipam()), variables)
    assert await perform(asked, discard, reach(daemon)) == ("10.240.0.2/22",)
    assert daemon.asked[0].requested_ips == ["10.240.0.2"]
    assert daemon.asked[0].sets == []


def only(**changes: Any) -> Config:
    return config(ipam=ipam(ranges=[[{"subnet": "10.240.0.0/22", **changes}]]))


@pytest.mark.parametrize(
    ("fields", "args", "named"),
    [
        (config(ipam=ipam(sticky=True)), "", "ipam.sticky, which is true"),
        (config(ipam=ipam()), "IP=10.240.0.9", "'10.240.0.9'"),
        (config(), "IP=10.240.0.9", "'10.240.0.9'"),
        (config(ipam=MANY), "", "ipam.ranges[0][0].rangeStart, which is '10.240.0.10'"),
        (only(rangeEnd="10.240.0.9"), "", "ipam.ranges[0][0].rangeEnd"),
        (only(gateway="10.240.0.9"), "", "ipam.ranges[0][0].gateway"),
        (only(exclude=["10.240.0.9"]), "", "ipam.ranges[0][0].exclude"),
        (
            config(
                ipam=ipam(subnet="10.9.0.0/24", ranges=[[{"subnet": "10.8.0.0/24"}]])
            ),
            "",
            "ipam.ranges[0][0], which is a second ipv4 set",
        ),
    ],
)
async def test_what_an_original_daemon_cannot_do_is_named_and_its_address_given_back(
    fields: Config, args: str, named: str
) -> None:
    daemon = FakeIpam()
    daemon.original = True
    asked = request("ADD", fields, environ("ADD", CNI_ARGS=args))
    error = await failure(asked, reach(daemon))
    assert error.code == 2
    assert named in error.message
    assert isinstance(daemon.asked[-1], DeallocatePodIpRequest)


@pytest.mark.parametrize(
    "fields", [config(), config(ipam=BOTH), only(gateway="10.240.0.1"), only(mtu=1)]
)
async def test_what_an_original_daemon_can_do_it_does(fields: Config) -> None:
    daemon, printed = FakeIpam(), list[str]()
    daemon.original = True
    assert await perform(request("ADD", fields), printed.append, reach(daemon))
    assert json.loads("".join(printed))["ips"][0] == {
        "address": "10.240.0.2/22",
        "gateway": "10.240.0.1",
    }


@pytest.mark.parametrize(
    "ips",
    [
        [V4],
        [V4, V6, V6],
        [V6, V4],
        [V4, PodIp(ip_address="fd00:10::2", cidr="fd00:10::/64", gateway="gate")],
    ],
)
async def test_an_answer_that_is_not_one_address_a_set_is_given_back(
    ips: list[PodIp],
) -> None:
    daemon = FakeIpam()
    daemon.answer = AllocatePodIpResponse(ips=ips, allocation_id="a7")
    error = await failure(request("ADD", config(ipam=BOTH)), reach(daemon))
    assert error.code == 999
    assert daemon.asked[-1].only_allocation_id == "a7"


async def test_an_address_held_from_before_the_ranges_changed_is_fine() -> None:
    daemon = FakeIpam()
    old = PodIp(ip_address="10.1.0.9", cidr="10.1.0.0/24", gateway="10.1.0.254")
    daemon.answer = AllocatePodIpResponse(ips=[old], allocation_id="a")
    printed = list[str]()
    assert await perform(request(), printed.append, reach(daemon)) == ("10.1.0.9/24",)
    assert json.loads("".join(printed))["ips"][0]["gateway"] == "10.1.0.254"


async def test_dns_comes_from_the_resolv_conf_that_is_configured(
    tmp_path: Path,
) -> None:
    path = tmp_path / "resolv.conf"
    path.write_text("nameserver 10.0.0.53\nsearch a.example\n")
    printed = list[str]()
    asked = request("ADD", config(ipam=ipam(resolvConf=str(path))))
    await perform(asked, printed.append, reach(FakeIpam()))
    assert json.loads("".join(printed))["dns"] == {
        "nameservers": ["10.0.0.53"],
        "search": ["a.example"],
    }


async def test_a_resolv_conf_that_cannot_be_read_fails_before_anything_is_taken(
    tmp_path: Path,
) -> None:
    daemon = FakeIpam()
    fields = config(ipam=ipam(resolvConf=str(tmp_path / "absent")))
    error = await failure(request("ADD", fields), reach(daemon))
    assert error.code == 5
    assert "absent" in error.message
    assert daemon.asked == []
    assert await perform(request("DEL", fields), discard, reach(daemon)) == ()
