"""Options for thorough runs, patience on busy machines, a check after every test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, settings

from tests import soundness, unhurried
from tests.soundness import check_database, check_files, damages
from tests.store import databases

# How long an example takes says how busy the machine is. What the environment chose
# already, as on a CI service, stays.
settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unhurried")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("metis")
    group.addoption(
        "--conformance",
        choices=["some", "program"],
        default="some",
        help="carry out every conformance case through the installed program, too, "
        "instead of those alone where the process matters",
    )
    group.addoption(
        "--fuzz-examples",
        type=int,
        default=0,
        help="inputs for the fuzzing of the plugin in process, 100000 for a thorough "
        "run; from 1000 on, 500 of them go through the installed program as well",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", soundness.MARK_LINE)
    config.addinivalue_line("markers", unhurried.MARK_LINE)


@pytest.fixture(autouse=True)
def no_hurry(request: pytest.FixtureRequest) -> Iterator[None]:
    """No deadline strikes because the machine is busy (see tests.unhurried)."""
    with pytest.MonkeyPatch.context() as patch:
        if not unhurried.in_real_time(request.node):
            patch.setattr(trio, "run", unhurried.run)
            if request.node.get_closest_marker("trio"):  # whose `run` was read before
                mark = pytest.mark.trio(run=unhurried.run)
                request.node.add_marker(mark, append=False)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Check what a test leaves behind, once its own daemons have ended."""
    made, databases.MADE[:] = databases.MADE[:], []
    yield
    fixtures = getattr(item, "funcargs", {})
    if damages(item):
        return
    for connection in made:
        databases.check_connection(connection)
    if "tmp_path" in fixtures:
        check_files(fixtures["tmp_path"])
    for fixture in fixtures.values():  # a daemon that serves several tests
        if hasattr(fixture, "db_path") and os.path.isfile(fixture.db_path):
            check_database(Path(fixture.db_path))
