"""The plugin as a runtime sees it, without a process of its own."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

from metis.cni.client import OpenChannel
from metis.cni.plugin import run
from tests.cni.calls import Config
from tests.cni.fakes import Unreachable
from tests.unhurried import UNHURRIED

UNLOGGED = 'metis.config.DEFAULT_CNI_LOG_PATH = "/dev/null"'
"""Keeps a program that imported `metis.config` from the machine's own log, which is
where calls are logged that fail before they name another one."""

MAIN = f"""
import sys, metis.config
{UNLOGGED}
from metis.__main__ import main
sys.exit(main())
"""

METIS = [sys.executable, "-c", MAIN]
"""The program `metis`, as `python -m metis` has it."""

UNHURRIED_METIS = [sys.executable, "-c", UNHURRIED + MAIN]
"""The same, with patience for whom it asks: a test, or a database that is busy."""


@dataclass
class Process:
    """What a runtime sees of the plugin, without a process."""

    channel: OpenChannel = field(default_factory=Unreachable)
    stdout: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)
    status: int = -1

    def call(
        self,
        variables: dict[str, str],
        stdin: bytes | Config | BaseException,
        **options: Any,
    ) -> Any:
        """Run it; the object on standard output, or None."""
        self.stdout.clear()

        def read() -> bytes:
            if isinstance(stdin, BaseException):
                raise stdin
            return json.dumps(stdin).encode() if isinstance(stdin, dict) else stdin

        self.status = run(
            variables,
            read=read,
            write=self.stdout.append,
            complain=self.stderr.append,
            open_channel=self.channel,
            **options,
        )
        assert len(self.stdout) <= 1
        return json.loads(self.stdout[0]) if self.stdout else None
