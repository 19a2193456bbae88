"""libcni itself, through a small Go program (tests/e2e/libcni/main.go)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.ipam import Config
from tests.e2e.network import output

GOPATH = Path("/usr/share/gocode")
"""Where Debian's golang-*-dev packages put their sources."""

SOURCE = Path(__file__).parents[1] / "libcni" / "main.go"


class CNIError(Exception):
    """libcni answered with an error; the text is libcni's.

    Attributes:
      code: of the error object of the plugin, or 0 when libcni had none.
      message: its msg, or empty.
    """

    def __init__(self, text: str, code: int, message: str) -> None:
        super().__init__(text)
        self.code = code
        self.message = message


@dataclass(frozen=True)
class Attachment:
    """One interface of one container, as a runtime names it."""

    container_id: str
    netns: Path
    interface_name: str = "eth0"


@dataclass(frozen=True)
class Libcni:
    """libcni with one network list.

    Attributes:
      driver: the built program.
      config_path: file of the network list.
      plugin_directory: where the plugins are.
      cache: where libcni keeps results between calls.
    """

    driver: Path
    config_path: Path
    plugin_directory: Path
    cache: Path

    def add(
        self, attachment: Attachment, *, ip: str = "", ips: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """ADD through the whole list; returns the last plugin's result.

        Args:
          attachment: who gets an interface.
          ip: an address to ask for in CNI_ARGS.
          ips: addresses to ask for by the capability of that name, which a plugin
            of the list must have.
        """
        capabilities = json.dumps({"ips": ips} if ips else {})
        asked = ("-ip", ip, "-capabilities", capabilities)
        result: dict[str, Any] = self._call("ADD", attachment, *asked)
        return result

    def check(self, attachment: Attachment) -> None:
        """CHECK through the whole list, against the result of the ADD."""
        self._call("CHECK", attachment)

    def delete(self, attachment: Attachment) -> None:
        """DEL through the whole list, last plugin first."""
        self._call("DEL", attachment)

    def validate(self) -> None:
        """Ask every plugin of the list whether it speaks the list's version."""
        self._run("VALIDATE")

    def _call(self, verb: str, attachment: Attachment, *options: str) -> Any:
        return self._run(
            *options,
            *("-id", attachment.container_id, "-netns", str(attachment.netns)),
            *("-ifname", attachment.interface_name),
            *("-pod", f"pod-{attachment.container_id}", verb),
        )

    def _run(self, *arguments: str) -> Any:
        done = subprocess.run(
            [
                *(str(self.driver), "-conf", str(self.config_path)),
                *("-cache", str(self.cache), "-path", str(self.plugin_directory)),
                *arguments,
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        answer = json.loads(done.stdout)
        if done.returncode:
            raise CNIError(
                answer["error"], answer.get("code", 0), answer.get("msg", "")
            )
        return answer


MakeLibcni = Callable[[Config], Libcni]
"""From a network list, which every plugin of it must accept."""


def build_driver(directory: Path) -> Path:
    """Build the program from Debian's sources alone; no module is downloaded."""
    driver = directory / "libcni-driver"
    environment = {
        **os.environ,
        "GO111MODULE": "off",
        "GOPATH": str(GOPATH),
        "GOFLAGS": "",
        "GOCACHE": str(directory / "cache"),
    }
    output("go", "build", "-o", str(driver), str(SOURCE), environment=environment)
    return driver
