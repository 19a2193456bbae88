"""Options that make the ordinary run a thorough one."""

from __future__ import annotations

import pytest


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
