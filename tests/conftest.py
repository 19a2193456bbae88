"""Options that make the ordinary run a thorough one, and a check after every test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.soundness import MARK_LINE, check_database, check_files, damages
from tests.store import databases


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
    config.addinivalue_line("markers", MARK_LINE)


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
