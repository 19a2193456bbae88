"""Options, counts and namespaces of the fault bench; see CONTRIBUTING.md."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import pytest_runtest_teardown
from tests.e2e import isolation
from tests.faults.counts import TALLY, Counts, Tally
from tests.soundness import MARK_LINE

__all__ = ["pytest_runtest_teardown"]  # the check after every test, as elsewhere

TENTH = 10
"""What counts are divided by in a run that is not a full one."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults")
    group.addoption(
        "--full", action="store_true", help="whole counts, instead of a tenth of each"
    )
    group.addoption(
        "--counts", type=Path, metavar="FILE", help="write the counts as JSON"
    )
    group.addoption(
        "--seed",
        type=int,
        default=secrets.randbits(32),
        help="what all random choices follow from; every run prints its own",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Run the session again where mounts are its own, if that may be done."""
    if isolation.inside() or config.option.collectonly or not isolation.possible():
        return None
    return isolation.run_again(config.invocation_params.args)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARK_LINE)
    option = config.option
    config.stash[TALLY] = Tally(option.full, option.seed)


def pytest_report_header(config: pytest.Config) -> str:
    tally = config.stash[TALLY]
    extent = "whole counts" if tally.full else "a tenth of the counts"
    return f"faults: {extent}, --seed {tally.seed}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> object:
    report = yield
    if call.when == "call":
        item.config.stash[TALLY].seconds[item.nodeid] = call.duration
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    tally = config.stash[TALLY]
    lines = tally.table()
    if lines:
        terminalreporter.section(f"what was done (--seed {tally.seed})")
        for line in lines:
            terminalreporter.write_line(line)
    if config.option.counts:
        tally.write(config.option.counts)


@pytest.fixture
def counts(request: pytest.FixtureRequest) -> Counts:
    """What the test did how often; `counts.add("kill -9 of the daemon")`."""
    return request.config.stash[TALLY].of(request.node.nodeid)


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Whether whole counts are asked for."""
    return request.config.stash[TALLY].full


@pytest.fixture
def scaled(full: bool) -> Callable[[int], int]:
    """Makes a whole count the count of this run, at least 1."""
    return lambda count: count if full else max(count // TENTH, 1)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> str:
    """What the random choices of this test follow from, for `random.Random`."""
    return f"{request.config.stash[TALLY].seed} {request.node.nodeid}"
