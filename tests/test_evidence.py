"""What is seen of network namespaces, and what only looks as if it were gone."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from grpclib import GRPCError, Status
from trio.testing import MockClock

from metis.evidence import (
    LOOK_SECONDS,
    LOOKERS,
    MOST_DIRECTORIES,
    Lookout,
    look_at_namespaces,
)
from metis.model import Family, Holding, Owner, Pod
from metis.verdicts import Namespaces
from tests.runtime import FakeRuntime, running


async def look(
    *paths: str | Path, proven: set[tuple[int, int]] | None = None
) -> Namespaces:
    return await look_at_namespaces(
        list(map(str, paths)),
        trio.CapacityLimiter(1),
        set() if proven is None else proven,
    )


async def test_a_path_is_there_or_missing_where_its_directory_has_others(
    tmp_path: Path,
) -> None:
    here, gone = tmp_path / "here", tmp_path / "gone"
    here.touch()
    assert await look(here, gone) == Namespaces(
        frozenset({str(here)}), frozenset({str(gone)})
    )


UNPROVEN = "no owner's namespace was ever seen in its directory"


async def test_in_a_directory_of_others_nothing_is_missing(tmp_path: Path) -> None:
    (tmp_path / "another").touch()
    path = str(tmp_path / "a")
    assert await look(path) == Namespaces(untold={path: UNPROVEN})


async def test_a_directory_is_known_by_what_was_once_seen_in_it(
    tmp_path: Path,
) -> None:
    directory, path = tmp_path / "netns", tmp_path / "netns" / "a"
    directory.mkdir()
    (directory / "another").touch()
    path.touch()
    proven: set[tuple[int, int]] = set()
    assert (await look(path, proven=proven)).present == {str(path)}
    path.unlink()
    assert (await look(path, proven=proven)).missing == {str(path)}

    directory.rename(tmp_path / "former")  # as when something is mounted there
    directory.mkdir()
    (directory / "another").touch()
    seen = await look(path, proven=proven)
    assert seen == Namespaces(untold={str(path): UNPROVEN})


async def test_a_dangling_link_is_there(tmp_path: Path) -> None:
    """It may lead to where it can be seen from another mount namespace alone."""
    link = tmp_path / "link"
    link.symlink_to("/proc/0/ns/net")
    assert (await look(link)).present == {str(link)}


async def test_an_empty_directory_tells_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "netns")
    assert await look(path) == Namespaces(untold={path: "its directory is empty"})


async def test_a_directory_that_is_not_there_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    path = str(tmp_path / "netns" / "a")
    seen = await look(path, tmp_path / "other" / "b")
    assert not seen.present | seen.missing
    assert seen.untold[path] == "its directory: No such file or directory"


async def test_a_directory_that_cannot_be_read_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").touch()
    paths = [str(tmp_path / "here"), str(tmp_path / "gone")]

    def refuse(*_: object, **__: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refuse)
        seen = await look(*paths)
    assert seen == Namespaces(
        untold=dict.fromkeys(paths, "its directory: Permission denied")
    )


async def test_a_name_that_cannot_be_looked_at_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "here").touch()
    path = str(tmp_path / ("n" * 300))
    assert await look(path) == Namespaces(untold={path: "File name too long"})


@pytest.mark.parametrize(
    "path",
    [
        f"/proc/{os.getpid()}/ns/net",
        "/proc/0/ns/net",
        "/proc/self/ns/net",
        "/host/proc/4711/ns/net",
        "/proc/1/task/1/ns/net",
    ],
)
async def test_a_process_id_tells_nothing_either_way(path: str) -> None:
    assert await look(path) == Namespaces(untold={path: "it is named by a process id"})


async def test_a_link_to_a_process_tells_nothing_either(tmp_path: Path) -> None:
    (tmp_path / "ns").symlink_to(f"/proc/{os.getpid()}/ns")
    for name in ("net", "gone"):
        path = str(tmp_path / "ns" / name)
        seen = await look(path)
        assert seen == Namespaces(untold={path: "it is named by a process id"})


async def test_a_directory_is_the_same_by_every_name(tmp_path: Path) -> None:
    """As /var/run/netns and /run/netns are."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "here").touch()
    (tmp_path / "var").mkdir()
    (tmp_path / "var" / "run").symlink_to("../run")
    seen = await look(
        tmp_path / "run" / "here",
        tmp_path / "var" / "run" / "here",
        tmp_path / "var" / "run" / "gone",
    )
    assert len(seen.present) == 2
    assert seen.missing == {str(tmp_path / "var" / "run" / "gone")}


@pytest.mark.parametrize("path", ["netns/a", "/run/netns/", "/run/..", "/run/a\0b"])
async def test_what_is_no_path_of_a_file_tells_nothing(path: str) -> None:
    assert (await look(path)).untold[path] == "it is no absolute path of a file"


async def test_no_path_is_not_looked_at() -> None:
    assert await look("") == Namespaces()


async def test_so_many_directories_are_looked_at_and_no_more(tmp_path: Path) -> None:
    paths = []
    for number in range(MOST_DIRECTORIES + 2):
        directory = tmp_path / f"{number:03d}"
        directory.mkdir()
        (directory / "here").touch()
        paths.append(directory / "here")
    seen = await look(*paths)
    assert len(seen.present) == MOST_DIRECTORIES
    assert len(seen.untold) == 2


@pytest.fixture
def hang(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[str], tuple[threading.Semaphore, threading.Event]]:
    """Let opening what is below a path hang, and tell so, until the event is set."""
    opened = os.open

    def install(below: str) -> tuple[threading.Semaphore, threading.Event]:
        hanging, released = threading.Semaphore(0), threading.Event()

        def open_(path: str, *args: int, **kwargs: int) -> int:
            if str(path).startswith(below):
                hanging.release()
                released.wait(120)
            return opened(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", open_)
        return hanging, released

    return install


async def test_a_mount_that_hangs_holds_up_nobody_and_keeps_one_thread(
    tmp_path: Path,
    hang: Callable[[str], tuple[threading.Semaphore, threading.Event]],
    mock_clock: MockClock,
) -> None:
    (tmp_path / "here").touch()
    hung, here = str(tmp_path / "hung" / "a"), str(tmp_path / "here")
    hanging, released = hang(str(tmp_path / "hung"))
    lookers = trio.CapacityLimiter(LOOKERS)

    async def let_time_pass(number: int) -> None:
        """Once one more hangs, and the other has been looked at."""
        await trio.to_thread.run_sync(hanging.acquire)
        await trio.testing.wait_all_tasks_blocked()
        while lookers.borrowed_tokens > number:
            await trio.lowlevel.checkpoint()
        mock_clock.jump(LOOK_SECONDS)

    try:
        for number in range(1, 3):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(let_time_pass, number)
                seen = await look_at_namespaces([hung, here], lookers, set())
            assert seen == Namespaces(
                frozenset({here}), untold={hung: "no answer within 5 s"}
            )
            assert lookers.borrowed_tokens == number
    finally:
        released.set()


async def test_where_no_thread_can_be_had_nothing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "a")

    def start_no_thread(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(trio.to_thread, "run_sync", start_no_thread)
    assert await look(path) == Namespaces(untold={path: "can't start new thread"})


def holding(container: str, path: str = "", namespace: str = "shop") -> Holding:
    return Holding(
        Owner("default", container, "eth0"),
        Pod(container, namespace),
        Family.IPV4,
        "10.1.0.2",
        netns_path=path,
    )


async def test_all_evidence_is_as_old_as_its_oldest_part(tmp_path: Path) -> None:
    here, gone = tmp_path / "here", tmp_path / "gone"
    here.touch()
    times = iter(range(100, 200))
    runtime = FakeRuntime("c1")
    holdings = [
        holding("c1", str(here)),
        holding("c2", str(here)),
        holding("c3", str(gone)),
        holding("c4"),
        holding("box", namespace=""),
    ]
    async with running(runtime) as transport:
        lookout = Lookout(lambda: next(times), "boot-1", transport)
        seen = await lookout.look(holdings)
    assert (seen.taken_ms, seen.boot_id) == (100, "boot-1")
    assert seen.namespaces.present == {str(here)}
    assert seen.namespaces.missing == {str(gone)}
    assert seen.sandboxes.named == {"c1"}
    # Whoever has its namespace needs no asking; nor would others' runtimes know.
    assert runtime.asked == ["c3", "c4"]


async def test_without_a_socket_the_runtime_is_silent() -> None:
    seen = await Lookout(lambda: 1, "boot-1").look([holding("c1")])
    assert seen.sandboxes.silence == "no CRI socket is configured"


async def test_a_runtime_that_fails_does_not_hide_the_namespaces(
    tmp_path: Path,
) -> None:
    (tmp_path / "here").touch()
    here, gone = str(tmp_path / "here"), str(tmp_path / "gone")
    runtime = FakeRuntime()
    runtime.failure = GRPCError(Status.INTERNAL, "broken")
    async with running(runtime) as transport:
        seen = await Lookout(lambda: 1, "boot-1", transport).look(
            [holding("c1", here), holding("c2", gone)]
        )
    assert seen.namespaces.missing == {gone}
    assert "broken (INTERNAL)" in seen.sandboxes.silence


async def test_a_runtime_that_cannot_be_asked_is_told_of_once_until_it_can(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where its path is misspelled: nothing else would show it."""
    runtime = FakeRuntime("c1")
    failure = GRPCError(Status.UNAVAILABLE, "not initialized yet")
    told = []
    async with running(runtime) as transport:
        lookout = Lookout(lambda: 1, "boot-1", transport)
        for fails in (True, True, False, True):
            runtime.failure = failure if fails else None
            await lookout.look([])
            told.append(len(caplog.records))
        runtime.failure = None
        runtime.sandboxes.clear()  # a node without pods is no failure
        await lookout.look([])
    assert told == [1, 1, 1, 2]
    assert len(caplog.records) == 2
    assert "not initialized yet" in str(vars(caplog.records[0])["reason"])
