"""The runtime's list, and everything that is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from grpclib import GRPCError, Status
from trio.testing import MockClock

import metis
from metis.api.runtime.v1 import ListPodSandboxResponse, PodSandboxStatusRequest
from metis.cri import CRI_SECONDS, MOST_ASKED, ask_runtime
from metis.verdicts import Sandboxes
from tests.runtime import FakeRuntime, running


async def test_whoever_is_listed_is_named_and_whoever_is_not_is_asked_for() -> None:
    runtime = FakeRuntime("c1", "c2")
    async with running(runtime) as transport:
        told = await ask_runtime(transport, ["c2", "c3"])
    assert told == Sandboxes(frozenset({"c1", "c2"}), frozenset({"c3"}))
    assert runtime.asked == ["c3"]


async def test_a_list_that_is_cut_doubled_or_in_another_order_hides_nobody() -> None:
    runtime = FakeRuntime("c1", "c2", "c3")
    async with running(runtime) as transport:
        for listed in (["c3"], ["c2", "c2"], ["c3", "c2", "c1"], ["former", ""]):
            runtime.listed = listed
            told = await ask_runtime(transport, ["c1", "c2", "c3", "c4"])
            assert not told.silence
            assert told.named >= {"c1", "c2", "c3"}
            assert told.unknown == {"c4"}


async def test_an_empty_list_is_none_and_nobody_is_asked_for() -> None:
    runtime = FakeRuntime("c1")
    runtime.listed = []
    async with running(runtime) as transport:
        told = await ask_runtime(transport, ["c1", "c2"])
    assert told == Sandboxes(silence="the runtime lists no container at all")
    assert not runtime.asked


async def test_a_container_without_an_id_makes_no_list() -> None:
    runtime = FakeRuntime()
    runtime.listed = ["", ""]
    async with running(runtime) as transport:
        assert (await ask_runtime(transport, ["c1"])).silence


async def test_an_error_is_no_list() -> None:
    runtime = FakeRuntime("c1")
    runtime.failure = GRPCError(Status.UNAVAILABLE, "server is not initialized yet")
    async with running(runtime) as transport:
        told = await ask_runtime(transport, ["c2"])
    assert told == Sandboxes(
        silence="the runtime does not tell its containers: "
        "server is not initialized yet (UNAVAILABLE)"
    )


async def test_a_runtime_that_speaks_another_cri_is_no_list() -> None:
    class Original(FakeRuntime):
        def __mapping__(self) -> dict[str, object]:  # type: ignore[override]  # serves nothing
            return {}

    async with running(Original("c1")) as transport:
        told = await ask_runtime(transport, ["c2"])
    assert "UNIMPLEMENTED" in told.silence


async def test_no_runtime_is_no_list(tmp_path: Path) -> None:
    path = tmp_path / "containerd.sock"
    told = await ask_runtime(metis.UnixTransport(str(path)), ["c1"])
    assert str(path) in told.silence
    assert not told.named | told.unknown


async def test_a_runtime_that_hangs_is_given_up(autojump_clock: MockClock) -> None:
    runtime = FakeRuntime("c1")
    runtime.hangs = True
    async with running(runtime) as transport:
        told = await ask_runtime(transport, ["c2"])
    assert told == Sandboxes(silence="the runtime did not answer within 10 s")
    assert trio.current_time() == pytest.approx(CRI_SECONDS)


async def test_an_answer_that_is_no_answer_is_about_one_container_alone() -> None:
    runtime = FakeRuntime("c1")
    runtime.vague = {"c2"}
    async with running(runtime) as transport:
        told = await ask_runtime(transport, ["c2", "c3"])
    assert told == Sandboxes(frozenset({"c1"}), frozenset({"c3"}))


async def test_so_many_are_asked_for_and_no_more(mock_clock: MockClock) -> None:
    runtime = FakeRuntime("c1")
    async with running(runtime) as transport:
        told = await ask_runtime(transport, [f"g{n}" for n in range(MOST_ASKED + 5)])
    assert len(runtime.asked) == len(told.unknown) == MOST_ASKED


async def test_a_list_beyond_four_mebibytes_is_read() -> None:
    runtime = FakeRuntime()
    runtime.listed = [f"{number:01000d}" for number in range(6000)]
    async with running(runtime) as transport:
        assert len((await ask_runtime(transport, [])).named) == 6000


def test_the_numbers_are_those_of_the_cri() -> None:
    """Bytes that the published stubs of runtime.v1 made, with fields left out here."""
    answer = ListPodSandboxResponse.parse(
        b"\n2\n\x02c1"
        b"\x12\x12\n\x05web-0\x12\x01u\x1a\x04shop \x03"
        b"\x18\x01 \x07"
        b"*\x06\n\x01a\x12\x01b2\x06\n\x01c\x12\x01d:\x04runc"
    )
    (sandbox,) = answer.items
    assert (sandbox.id, sandbox.state, sandbox.created_at) == ("c1", 1, 7)
    metadata = sandbox.metadata
    assert metadata is not None
    assert (metadata.name, metadata.namespace) == ("web-0", "shop")
    assert (metadata.uid, metadata.attempt) == ("u", 3)
    assert bytes(PodSandboxStatusRequest(pod_sandbox_id="c1")) == b"\n\x02c1"
