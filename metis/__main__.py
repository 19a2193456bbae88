"""The program `metis`: CNI plugin, command line, or a word about itself.

Imports as little as the way it is started needs: a runtime starts the plugin
for every pod.
"""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Be what the environment and the arguments ask for.

    CNI_COMMAND in the environment makes this the plugin (CNI specification,
    section 2). Without it and without arguments, somebody wants to know what
    this is: told on stderr, as plugins do, with stdin untouched. Everything
    else is the command line.

    Returns:
      The exit status; the command line exits by itself.
    """
    if os.environ.get("CNI_COMMAND"):
        from metis.cni.plugin import main as plugin

        return plugin()
    if len(sys.argv) < 2:
        import contextlib

        from metis import __version__
        from metis.cni.protocol import about_text

        with contextlib.suppress(OSError):
            os.write(2, about_text(__version__).encode())
        return 0
    from metis.cli.main import cli

    cli()
    return 0


if __name__ == "__main__":
    sys.exit(main())
