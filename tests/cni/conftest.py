"""No call is logged where the machine's own plugin logs, or pauses between tries."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from metis.cni import client, log
from metis.config import DEFAULT_CNI_LOG_PATH


@pytest.fixture(autouse=True, scope="session")
def no_log_of_the_machine() -> Iterator[None]:
    """Calls in process that name no log, or fail before theirs is known, have none."""
    append = log.append

    def append_elsewhere(path: str, line: bytes) -> None:
        append(os.devnull if path == DEFAULT_CNI_LOG_PATH else path, line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "append", append_elsewhere)
        yield


@pytest.fixture(autouse=True)
def no_pauses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing happens between two tries that a test would wait for, in slow time."""
    if not {"autojump_clock", "mock_clock"} & set(request.fixturenames):
        monkeypatch.setattr(client, "CONNECT_PAUSE", 0.0)
