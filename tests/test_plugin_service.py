"""Calls of the plugin in the daemon: what is answered there, and what is not."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from grpclib import GRPCError, Status

import metis
from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamStub,
    AllocatePodIpRequest,
    CheckPodIpRequest,
    DeallocatePodIpRequest,
)
from metis.api.metis.v1 import PluginStub, RunRequest, RunResponse, UndoRequest
from metis.cni import spool
from metis.cni.protocol import version_text
from metis.health import HealthService
from metis.model import Owner
from metis.plugin_service import MAX_STDIN_BYTES, PluginService
from metis.rpc.local import LocalChannel
from tests.cni.calls import config, environ
from tests.cni.fakes import FakeIpam, FakeNode
from tests.store.databases import ManualClock


class Place:
    """A service over fakes, and the messages of a relay for it."""

    def __init__(self, directory: Path) -> None:
        self.ipam, self.node = FakeIpam(), FakeNode()
        self.db_path = str(directory / "metis.sqlite")
        self.log_path = str(directory / "cni.log")
        channel = LocalChannel([self.ipam, self.node, HealthService([])])
        self.service = PluginService(channel, self.db_path, ManualClock(), "boot-1")

    def message(
        self,
        command: str = "ADD",
        *,
        own_netns: bool = False,
        stdin: bytes | None = None,
        **changes: Any,
    ) -> RunRequest:
        ours = {"daemonSocket": "/s", "dbPath": self.db_path, "logFile": self.log_path}
        fields = config("1.1.0", **{**ours, **changes})
        return RunRequest(
            environment=[f"{k}={v}".encode() for k, v in environ(command).items()],
            stdin=json.dumps(fields).encode() if stdin is None else stdin,
            program="metis",
            socket_path="/s",
            stat=b"1 (a) b) S " + b"0 " * 18 + b"200 0",
            own_netns=own_netns,
        )

    async def refusal(self, message: RunRequest) -> GRPCError:
        with pytest.raises(GRPCError) as caught:
            await self.service.run(message)
        assert self.ipam.asked == []
        return caught.value


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def test_an_add_is_answered_with_all_that_is_to_be_written(place: Place) -> None:
    response = await place.service.run(place.message(logLevel="loud"))
    assert response.status == 0
    result = json.loads(response.stdout)
    assert result["ips"] == [{"address": "10.240.0.2/22", "gateway": "10.240.0.1"}]
    assert response.stderr.startswith(b"metis: logLevel is 'loud'")
    assert response.stderr.endswith(b"\n")
    assert response.log_path == place.log_path
    assert b" address=10.240.0.2/22 " in response.log_line
    assert response.allocation_id == "a1"
    assert response.passed_over == ""
    (asked,) = place.ipam.asked
    assert (asked.boot_id, asked.started_boottime_ms) == ("boot-1", 2010)


async def test_an_error_is_an_answer_and_nothing_to_undo(place: Place) -> None:
    place.ipam.failure = GRPCError(Status.RESOURCE_EXHAUSTED, "no address is free")
    response = await place.service.run(place.message())
    assert (response.status, response.allocation_id) == (1, "")
    assert json.loads(response.stdout)["code"] == 11
    assert b'outcome="11: no address is free"' in response.log_line


async def test_version_has_no_log(place: Place) -> None:
    message = RunRequest(environment=[b"CNI_COMMAND=VERSION"])
    assert await place.service.run(message) == RunResponse(
        stdout=version_text().encode()
    )


async def test_a_call_that_the_level_leaves_out_has_no_line(place: Place) -> None:
    response = await place.service.run(place.message("DEL", logLevel="error"))
    assert (response.log_line, response.log_path) == (b"", "")


async def test_the_relay_s_own_namespace_is_refused_as_the_plugin_s(
    place: Place,
) -> None:
    response = await place.service.run(place.message(own_netns=True))
    assert json.loads(response.stdout)["code"] == 8
    assert place.ipam.asked == []


@pytest.mark.parametrize(
    "changes",
    [
        {"daemonSocket": "/other"},
        {"dbPath": "/other"},
        {"logFile": "/\ud800"},
        {"ipam": {"type": "metis", "resolvConf": "/etc/resolv.conf"}},
    ],
)
@pytest.mark.parametrize("command", ["ADD", "DEL"])
async def test_what_is_another_s_is_not_done_here(
    place: Place, command: str, changes: Any
) -> None:
    if command == "DEL" and "ipam" in changes:
        return  # which gives nobody a dns
    refused = await place.refusal(place.message(command, **changes))
    assert refused.status is Status.FAILED_PRECONDITION
    assert "by itself" in str(refused.message)


@pytest.mark.parametrize("key", ["logFile", "dbPath", "daemonSocket"])
async def test_where_links_lead_is_not_told_by_the_daemon(
    place: Place, tmp_path: Path, key: str
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (tmp_path / "link").symlink_to(shared / "secret")
    changes: Any = {key: str(tmp_path / "link")}
    refused = await place.refusal(place.message("ADD", **changes))
    assert refused.status is Status.FAILED_PRECONDITION
    assert "secret" not in str(refused.message)


async def test_an_owner_whose_del_was_kept_is_not_served_here(place: Place) -> None:
    spool.keep(place.db_path, Owner("default", "c1", "eth0"))
    refused = await place.refusal(place.message())
    assert "a DEL of this container waits" in str(refused.message)
    await place.service.run(place.message("STATUS"))


async def test_a_large_configuration_is_not_decoded(place: Place) -> None:
    refused = await place.refusal(place.message(stdin=bytes(MAX_STDIN_BYTES + 1)))
    assert refused.status is Status.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("status", [Status.UNAVAILABLE, Status.DEADLINE_EXCEEDED])
@pytest.mark.parametrize("command", ["ADD", "DEL", "STATUS"])
async def test_without_an_answer_the_call_is_passed_over(
    place: Place, command: str, status: Status
) -> None:
    place.ipam.failure = place.node.failure = GRPCError(status, "the store is closed")
    response = await place.service.run(place.message(command))
    assert response == RunResponse(passed_over="the store is closed")


async def test_a_call_that_takes_too_long_is_passed_over(
    place: Place, autojump_clock: trio.testing.MockClock
) -> None:
    place.ipam.hangs = True
    response = await place.service.run(place.message())
    assert "deadline" in response.passed_over
    assert trio.current_time() == pytest.approx(10.0)


async def test_an_unforeseen_error_is_an_answer_with_a_traceback(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("metis.cni.verbs.allocate_request", fail)
    response = await place.service.run(place.message())
    told = json.loads(response.stdout)
    assert (told["code"], told["msg"]) == (999, "RuntimeError: first line")
    assert b"Traceback" in response.log_line


async def test_a_call_that_nobody_waits_for_is_given_up(place: Place) -> None:
    place.ipam.hangs = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(place.service.run, place.message())
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert [type(one) for one in place.ipam.asked] == [AllocatePodIpRequest]


async def test_what_nobody_read_is_given_back(place: Place) -> None:
    undo = UndoRequest(run=place.message(), allocation_id="a7", problem="broken pipe")
    response = await place.service.undo(undo)
    (asked,) = place.ipam.asked
    assert isinstance(asked, DeallocatePodIpRequest)
    assert (asked.container_id, asked.only_allocation_id) == ("c1", "a7")
    assert (response.status, response.stdout) == (1, b"")
    assert (
        b'outcome="5: the result cannot be written to stdout: broken pipe"'
        in response.log_line
    )
    assert b"address=" not in response.log_line


async def test_what_cannot_be_given_back_here_is_passed_over(place: Place) -> None:
    undo = UndoRequest(run=place.message(), allocation_id="a7", problem="broken pipe")
    place.ipam.failure = GRPCError(Status.UNAVAILABLE, "it is stopping")
    response = await place.service.undo(undo)
    assert response == RunResponse(passed_over="it is stopping")
    with pytest.raises(GRPCError) as caught:
        await place.service.undo(UndoRequest(allocation_id="a7"))
    assert caught.value.status is Status.INVALID_ARGUMENT


async def test_an_undo_takes_no_longer_than_its_caller_waits(
    place: Place, autojump_clock: trio.testing.MockClock
) -> None:
    place.ipam.hangs = True
    undo = UndoRequest(run=place.message(), allocation_id="a7", problem="broken pipe")
    response = await place.service.undo(undo)
    assert response.status == 1
    assert trio.current_time() == pytest.approx(2.0)


async def test_the_daemon_serves_it(tmp_path: Path) -> None:
    place, transport = Place(tmp_path), metis.MemoryTransport()
    settings = metis.DaemonConfig(db_path=place.db_path, socket_path="/s")
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(metis.serve, settings, transport=transport))
        async with metis.open_channel(transport) as channel:
            plugin = PluginStub(channel)
            given = await plugin.run(place.message())
            undone = await plugin.undo(
                UndoRequest(
                    run=place.message(),
                    allocation_id=given.allocation_id,
                    problem="broken pipe",
                )
            )
            held = CheckPodIpRequest(interface_name="eth0", container_id="c1")
            with pytest.raises(GRPCError) as caught:
                await AdaptiveIpamStub(channel).check_pod_ip(held)
        nursery.cancel_scope.cancel()
    assert json.loads(given.stdout)["ips"][0]["address"] == "10.240.0.2/22"
    assert undone.status == 1
    assert caught.value.status is Status.NOT_FOUND
