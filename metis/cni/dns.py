"""The `dns` of a result: from the configuration, or from a resolv.conf.

Section 5, "ADD Success", `dns`. Pure: the file is a text that somebody else
read.
"""

from __future__ import annotations

from dataclasses import dataclass

from metis.cni import fields
from metis.cni.fields import Configuration, section


@dataclass(frozen=True, slots=True)
class DNS:
    """How a pod resolves names; what is empty is left to others."""

    nameservers: tuple[str, ...] = ()
    domain: str = ""
    search: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def members(self) -> dict[str, str | list[str]]:
        """The object of a result, without what is empty."""
        found: dict[str, str | list[str]] = {}
        if self.nameservers:
            found["nameservers"] = list(self.nameservers)
        if self.domain:
            found["domain"] = self.domain
        if self.search:
            found["search"] = list(self.search)
        if self.options:
            found["options"] = list(self.options)
        return found


def configured_dns(config: Configuration) -> DNS:
    """The `dns` object of a configuration (section 1, `dns`).

    Raises:
      CNIError: code 7.
    """
    found = section(config, "dns", "dns")
    return DNS(
        fields.texts(found.get("nameservers"), "dns.nameservers"),
        fields.text(found, "domain", "dns.domain") or "",
        fields.texts(found.get("search"), "dns.search"),
        fields.texts(found.get("options"), "dns.options"),
    )


def parse_resolv_conf(text: str) -> DNS:
    """Read resolv.conf(5) as host-local reads it.

    Lines of other keywords and without a value mean nothing. The last domain
    counts; nameservers, search domains and options add up.
    """
    nameservers: list[str] = []
    domain = ""
    search: list[str] = []
    options: list[str] = []
    for line in text.split("\n"):
        keyword, *values = line.split() or [""]
        if not values or keyword[0] in "#;":
            continue
        match keyword:
            case "nameserver":
                nameservers.append(values[0])
            case "domain":
                domain = values[0]
            case "search":
                search += values
            case "options":
                options += values
    return DNS(tuple(nameservers), domain, tuple(search), tuple(options))
