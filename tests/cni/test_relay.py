"""The relay: what it asks, what it takes for an answer, and who goes on without one."""

from __future__ import annotations

import itertools
import os
import posix
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

import metis
from metis.api.metis.v1 import PluginBase, RunRequest, RunResponse, UndoRequest
from metis.cni import log, relay
from metis.cni.environment import read_environment
from metis.cni.protocol import CNIError
from metis.cni.relay import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    RST_STREAM,
    SETTINGS,
    Relay,
    Unanswered,
    frame,
    opening,
)
from metis.rpc.limits import MAX_MESSAGE_BYTES
from metis.rpc.server import serve
from tests.cni.calls import environ
from tests.cni.relaying import Script, standing_in

SOON = (60.0, 120.0)


def message(data: bytes) -> bytes:
    return b"\0" + len(data).to_bytes(4) + data


def whole_message(said: bytes) -> bytes | None:
    return relay.whole_message(bytearray(said), bytearray())


def answered(data: bytes = b"x") -> bytes:
    """A whole answer, as a server of gRPC gives it."""
    return (
        frame(SETTINGS, 0, 0, b"")
        + frame(HEADERS, END_HEADERS, 1, b"\x88")
        + frame(DATA, 0, 1, message(data))
        + frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x88")
    )


# What it says ------------------------------------------------------------------------


@given(st.binary(max_size=100), st.sampled_from([0, 16_378, 16_379, 16_380, 50_000]))
def test_its_opening_is_one_grpc_call(start: bytes, more: int) -> None:
    sent = start + bytes(more)
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    server.initiate_connection()
    events = server.receive_data(opening(b"Run", sent))
    (request,) = [e for e in events if isinstance(e, h2.events.RequestReceived)]
    assert dict(request.headers or ()) == {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/metis.v1.Plugin/Run",
        b":authority": b"localhost",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
    }
    body = b"".join(
        e.data or b"" for e in events if isinstance(e, h2.events.DataReceived)
    )
    assert body == message(sent)
    assert any(isinstance(e, h2.events.StreamEnded) for e in events)
    assert server.remote_settings.initial_window_size >= MAX_MESSAGE_BYTES
    assert server.remote_settings.enable_push == 0


@given(st.integers(1, 15), st.binary(max_size=300), st.sampled_from([0, 70_000]))
def test_fields_are_written_as_they_are_read(
    number: int, data: bytes, more: int
) -> None:
    value = data + bytes(more)
    assert relay.fields(relay.field(number, value)) == {number: value}


def test_its_request_is_a_run_request() -> None:
    variables = environ("ADD", CNI_ARGS="\udcff=", HOME="/root")
    with standing_in(variables, lambda: b"{}"):
        call = Relay("/opt/cni/bin/ours", "/run/s", 1)
        call.stdin = b"{}"
        request = RunRequest.parse(call.request(posix.environ))
    assert b"CNI_ARGS=\xff=" in request.environment
    assert len(request.environment) == 6
    assert (request.stdin, request.program) == (b"{}", "ours")
    assert request.socket_path == "/run/s"
    assert relay.read_stat().startswith(b"%d (" % os.getpid())
    assert not request.own_netns


def test_it_knows_the_namespace_that_it_runs_in() -> None:
    with standing_in(environ("ADD", CNI_NETNS="/proc/self/ns/net"), bytes):
        request = Relay("metis", "", 1).request(posix.environ)
    assert RunRequest.parse(request).own_netns
    assert not relay.is_own_netns("/proc/1/ns/absent")
    assert not relay.is_own_netns("a\0b")


# What it takes for an answer ---------------------------------------------------------


@given(
    st.builds(
        RunResponse,
        status=st.integers(0, 1),
        stdout=st.binary(),
        log_path=st.text(st.characters(exclude_categories=["Cs"])),
    )
)
def test_an_answer_is_read_as_protobuf(response: RunResponse) -> None:
    found = relay.fields(bytes(response))
    assert (1 in found) == bool(response.status)
    assert found.get(2, b"") == response.stdout
    assert found.get(5, b"").decode() == response.log_path


@given(st.binary(max_size=64))
def test_junk_in_place_of_a_response_is_refused_or_read(data: bytes) -> None:
    try:
        found = relay.fields(data)
    except (ValueError, IndexError):
        return
    assert sum(map(len, found.values())) <= len(data)


def test_a_number_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="number"):
        relay.fields(b"\x08" + b"\xff" * 1_000_000)
    assert relay.fields(b"\x08" + b"\xff" * 9 + b"\x01") == {1: b""}


@pytest.mark.parametrize("size", [0, 1, 16_000, 1_000_000])
def test_an_answer_may_come_in_any_pieces(size: int) -> None:
    data = bytes(size)
    body = message(data)
    frames = [
        frame(DATA, 0, 1, body[at : at + 16_384]) for at in range(0, len(body), 16_384)
    ]
    whole = b"".join(frames) + frame(DATA, END_STREAM, 1, b"")
    assert whole_message(whole) == data
    for cut in {0, 5, 9, len(whole) // 2, len(whole) - 1}:
        assert whole_message(whole[:cut]) is None


def test_frames_that_say_nothing_about_the_call_are_passed_over() -> None:
    noise = (
        frame(SETTINGS, 0, 0, b"\0\4\0\0\0\0")  # a window of nothing
        + frame(6, 0, 0, bytes(8))  # PING
        + frame(8, 0, 0, b"\0\0\1\0")
        + frame(0xFA, 0xFF, 1, b"of a later time")
        + frame(GOAWAY, 0, 0, b"\0\0\0\1\0\0\0\0")  # but not this call
        + frame(RST_STREAM, 0, 3, bytes(4))
    )
    assert whole_message(noise + answered()) == b"x"


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x88"),  # trailers only
        frame(RST_STREAM, 0, 1, bytes(4)),
        frame(GOAWAY, 0, 0, bytes(8)),
        frame(DATA, END_STREAM, 1, b""),
        frame(DATA, END_STREAM, 1, b"\1\0\0\0\1x"),  # compressed
        frame(DATA, END_STREAM, 1, message(b"x")[:-1]),
        frame(DATA, END_STREAM, 1, message(b"x") * 2),
        frame(DATA, END_STREAM | PADDED, 1, b"\0" + message(b"x")),
        frame(DATA, 0, 1, bytes(16_385)),
    ],
)
def test_whatever_else_ends_the_call_is_no_answer(said: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"call|frame|message"):
        whole_message(said)
    with (
        Script(tmp_path / "s", [said], hangs=True) as server,
        pytest.raises(Unanswered) as caught,
    ):
        relay.ask(server.path, b"Run", b"", SOON)
    assert str(caught.value) == ""  # whoever asks next finds out


def test_a_server_that_answers_byte_by_byte_is_understood(tmp_path: Path) -> None:
    said = answered(relay.field(2, b"hello"))
    pieces = [bytes((byte,)) for byte in said]
    with Script(tmp_path / "s", pieces, hangs=True) as server:
        answer = relay.ask(server.path, b"Run", b"question", SOON)
    assert answer == {2: b"hello"}
    assert server.heard.endswith(message(b"question"))


def test_a_server_that_never_stops_is_left(tmp_path: Path) -> None:
    noise = frame(6, 0, 0, bytes(8)) * 4096
    with (
        Script(tmp_path / "s", [noise] * 1000, hangs=False) as server,
        pytest.raises(Unanswered),
    ):
        relay.ask(server.path, b"Run", b"", SOON)


class Verbose(PluginBase):
    """Answers with more than the windows that a connection begins with."""

    async def run(self, message: RunRequest) -> RunResponse:
        return RunResponse(stdout=bytes(1_000_000) + message.stdin)


async def test_a_long_answer_is_had_whole(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    async with trio.open_nursery() as nursery:
        await nursery.start(serve, [Verbose()], metis.UnixTransport(path))
        request = relay.field(2, bytes(50_000))
        answer = await trio.to_thread.run_sync(
            partial(relay.ask, path, b"Run", request, SOON)
        )
        nursery.cancel_scope.cancel()
    assert len(answer[2]) == 1_050_000


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_junk_is_refused_or_waited_for(pieces: list[bytes]) -> None:
    received, body = bytearray(), bytearray()
    for piece in pieces:
        received += piece
        try:
            assert relay.whole_message(received, body) is None
        except ValueError:
            return


def test_nobody_there_is_no_answer(tmp_path: Path) -> None:
    for path in (str(tmp_path / "absent"), "x" * 200, "a\0b"):
        with pytest.raises(Unanswered) as caught:
            relay.ask(path, b"Run", b"", SOON)
        assert str(caught.value) == ""


def test_a_connection_that_is_closed_is_no_answer(tmp_path: Path) -> None:
    for number, pieces in enumerate(([], [answered()[:-3]])):
        with (
            Script(tmp_path / str(number), pieces, hangs=False) as server,
            pytest.raises(Unanswered),
        ):
            relay.ask(server.path, b"Run", b"", SOON)


def test_a_daemon_that_hangs_is_told_from_one_that_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "waits_its_turn", lambda _peer: False)
    with (
        Script(tmp_path / "1", [], hangs=True) as server,
        pytest.raises(Unanswered, match=r"no answer within 0\.01 s"),
    ):
        relay.ask(server.path, b"Run", b"", (0.01, 1.0))
    settings = frame(SETTINGS, 0, 0, b"")
    with (
        Script(tmp_path / "2", [settings], hangs=True) as server,
        pytest.raises(Unanswered, match="did not answer in time"),
    ):
        relay.ask(server.path, b"Run", b"", (60.0, 0.01))


def test_a_daemon_that_waits_for_a_processor_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_its_turn = threading.Event()

    def speak() -> Iterator[bytes]:
        has_its_turn.wait()
        yield answered(relay.field(2, b"hello"))

    def waits(_peer: object) -> bool:
        has_its_turn.set()
        return True

    monkeypatch.setattr(relay, "waits_its_turn", waits)
    with Script(tmp_path / "s", speak(), hangs=True) as server:
        answer = relay.ask(server.path, b"Run", b"", (0.01, 120.0))
    assert answer == {2: b"hello"}


def test_a_daemon_that_never_has_its_turn_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "waits_its_turn", lambda _peer: True)
    with (
        Script(tmp_path / "s", [], hangs=True) as server,
        pytest.raises(Unanswered, match="did not answer in time"),
    ):
        relay.ask(server.path, b"Run", b"", (0.01, 0.05))


@pytest.mark.parametrize(
    ("then", "state", "waits"),
    [
        ("while True: pass", b"R", True),
        ("signal.pause()", b"S", False),
        ("os.kill(os.getpid(), signal.SIGSTOP)", b"T", False),
    ],
)
def test_one_that_wants_a_processor_is_told_from_one_that_hangs(
    then: str, state: bytes, waits: bool, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")
    code = f"""
import os, signal, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print(flush=True)
{then}
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, path], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(path)
                while relay.read_stat(process.pid).rpartition(b") ")[2][:1] != state:
                    os.sched_yield()
                assert relay.waits_its_turn(peer) is waits
        finally:
            process.kill()


def test_a_daemon_that_says_a_little_all_the_time_is_left_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(relay, "time", SimpleNamespace(monotonic=seconds.__next__))
    said = itertools.repeat(frame(6, 0, 0, bytes(8)))
    with (
        Script(tmp_path / "s", said, hangs=False) as server,
        pytest.raises(Unanswered, match="did not answer in time"),
    ):
        relay.ask(server.path, b"Run", b"", (1.0, 5.0))


def test_a_large_request_is_not_sent() -> None:
    with pytest.raises(Unanswered):
        relay.ask("/absent", b"Run", bytes(relay.MAX_REQUEST_BYTES + 1), SOON)
    assert len(opening(b"Run", bytes(relay.MAX_REQUEST_BYTES))) < 65_535


# Before it asks ----------------------------------------------------------------------

given_or_not = st.sampled_from([None, "", "a1"])


@given(
    st.sampled_from(["ADD", "DEL", "CHECK", "GC", "STATUS"]),
    *[given_or_not] * 4,
)
def test_it_reads_stdin_where_no_variable_is_missing(
    command: str, container: Any, interface: Any, netns: Any, path: Any
) -> None:
    variables = environ(
        command,
        CNI_CONTAINERID=container,
        CNI_IFNAME=interface,
        CNI_NETNS=netns,
        CNI_PATH=path,
    )
    raw = {os.fsencode(k): os.fsencode(v) for k, v in variables.items()}
    try:
        read_environment(variables)
    except CNIError:
        assert not relay.is_complete(raw)
    else:
        assert relay.is_complete(raw)


def test_a_command_that_nobody_knows_needs_all_variables() -> None:
    raw = {os.fsencode(k): os.fsencode(v) for k, v in environ("FROB").items()}
    assert relay.is_complete(raw)
    assert not relay.is_complete({**raw, b"CNI_NETNS": b""})


def test_a_standard_input_without_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix, "read", lambda _fd, size: bytes(size))
    with pytest.raises(OSError, match="more than"):
        relay.read_stdin()


# Afterwards --------------------------------------------------------------------------


def test_a_log_that_is_small_and_private_gets_its_line(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path / "cni.log")
    assert relay.append(path, b"one\n")
    assert relay.append(path, b"two\n")
    assert Path(os.fsdecode(path)).read_bytes() == b"one\ntwo\n"
    assert os.stat(path).st_mode & 0o777 == log.MODE


def test_a_log_that_wants_more_is_left_to_who_knows(tmp_path: Path) -> None:
    (tmp_path / "wide").touch(0o644)
    (tmp_path / "full").touch(0o600)
    os.truncate(tmp_path / "full", relay.MAX_LOG_BYTES)
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    (tmp_path / "last").symlink_to("full")
    os.mkfifo(tmp_path / "pipe")
    for name in (
        "wide",
        "full",
        "link/cni.log",
        "last",
        "pipe",
        "absent/cni.log",
        "a\0b",
    ):
        assert not relay.append(os.fsencode(tmp_path / name), b"line\n"), name
    assert relay.MAX_LOG_BYTES == log.MAX_LOG_BYTES
    assert os.stat(tmp_path / "full").st_size == log.MAX_LOG_BYTES
    assert os.listdir(tmp_path / "there") == []


def test_an_undo_request_is_one() -> None:
    undo = relay.field(1, relay.field(3, b"ours")) + relay.field(2, b"a1")
    found = UndoRequest.parse(undo + relay.field(3, b"broken"))
    assert found.run is not None
    assert (found.run.program, found.allocation_id) == ("ours", "a1")
    assert found.problem == "broken"
