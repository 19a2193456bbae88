"""The command group `metis`.

Every command lives in a module of its own that is imported when the command is
called, so that `metis health` does not pay for SQLite.
"""

from __future__ import annotations

import importlib

import click

import metis

_COMMANDS = {
    "admin": "metis.cli.admin",
    "backup": "metis.cli.backup",
    "check": "metis.cli.check",
    "daemon": "metis.cli.daemon",
    "demo": "metis.cli.demo",
    "health": "metis.cli.health",
    "history": "metis.cli.history",
    "install": "metis.cli.install",
    "reclaim": "metis.cli.reclaim",
    "repair": "metis.cli.repair",
    "restore": "metis.cli.restore",
}


class LazyGroup(click.Group):
    """A group whose commands are attributes named `command` of modules."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands, in order."""
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command and return the command."""
        home = _COMMANDS.get(cmd_name)
        if home is None:
            return None
        command: click.Command = importlib.import_module(home).command
        return command


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 88},
)
@click.version_option(metis.__version__, prog_name="metis")
def cli() -> None:
    """Give the pods of a node their IP addresses.

    With CNI_COMMAND in its environment this program is the CNI plugin and takes
    no arguments; see `metis install`.
    """
