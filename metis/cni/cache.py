"""Who must have an address, by the cache that libcni keeps of every attachment.

containerd, CRI-O and podman call plugins through libcni, which writes the result of
each ADD into a file and removes it after the DEL. When the database has lost records,
these files are the node's own memory of who has which address.

Only what came from this database counts, and only where the network namespace of the
attachment may still be there. The files are read as what they are: other programs'
files in a directory that others write to, bounded in size and number, any of which
may be cut or nonsense.

May touch: that directory, and the names of network namespaces.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from typing import Any

from metis.config import DEFAULT_DB_PATH, DEFAULT_SOCKET_PATH
from metis.errors import InvalidRequest
from metis.model import DEFAULT_NETWORK, CIDRBlock, Owner, Pod
from metis.store.rebuilding import Claim

log = logging.getLogger("metis.store")

PLUGIN = "metis"
"""The type by which configurations name the plugin."""

MOST_FILES = 16_384
"""Most files that are read; a node has a few hundred attachments."""

MOST_BYTES = 1 << 20
"""Largest file that is read; a usual one has 2 KiB."""

_KIND = "cniCacheV1"
_PROC = re.compile(r"/proc/.*")


def claims(directory: str, db_path: str, socket_path: str = "") -> list[Claim]:
    """Who must have an address of a database. Blocks.

    Args:
      directory: where libcni keeps its files; empty for nowhere.
      db_path: the database.
      socket_path: where its daemon serves; an attachment whose configuration names
        that socket, or the default for it, got its address from there. Empty where
        there is no daemon.
    """
    if not directory:
        return []
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []  # as a rule, since no runtime has been here
    if len(names) > MOST_FILES:
        log.warning("of %d files in %s %d are read", len(names), directory, MOST_FILES)
    found: list[Claim] = []
    for name in names[:MOST_FILES]:
        path = os.path.join(directory, name)
        try:
            data, mtime = _read(path)
            if data is not None:
                found += _claims_of(json.loads(data), mtime, db_path, socket_path)
        except (OSError, ValueError, RecursionError, InvalidRequest) as error:
            log.warning("%s tells nothing: %s", path, error)
    return found


def _read(path: str) -> tuple[bytes | None, float]:
    """A file and when it was written; None for what is no file."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None, 0.0
        with os.fdopen(os.dup(descriptor), "rb") as file:
            data = file.read(MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it is longer than {MOST_BYTES} bytes")
    return data, status.st_mtime


def _claims_of(
    cached: object, mtime: float, db_path: str, socket_path: str
) -> Iterator[Claim]:
    """The claims of one attachment.

    Raises:
      ValueError, InvalidRequest: it makes no sense.
    """
    entry = _object(cached)
    if entry.get("kind") != _KIND:
        return
    config = _json_of_base64(entry.get("config"))
    ipam = _ipam_of(config)
    if ipam is None or not _is_served_here(ipam, db_path, socket_path):
        return
    owner = Owner(
        _text(ipam.get("network")) or DEFAULT_NETWORK,
        _text(entry.get("containerId")),
        _text(entry.get("ifName")),
    )
    result = _object(entry.get("result"))
    namespace = _namespace(entry, result, owner.interface_name)
    if _is_gone(namespace, mtime):
        return
    subnets = [*_subnets(ipam), *_subnets(_object(entry.get("capabilityArgs") or {}))]
    pod = _pod(entry.get("cniArgs"))
    for text in _addresses(result, owner.interface_name):
        address, _, _ = text.partition("/")
        prefix = CIDRBlock.parse(text)
        fitting = [one for one in subnets if one.offset_of(address) is not None]
        if subnets and not fitting:
            continue  # another plugin's, of the same attachment
        block = fitting[0] if fitting else prefix
        offset = block.offset_of(address)
        if offset is not None:
            yield Claim(owner, pod, block, block.address_at(offset), namespace)


def _ipam_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The section for us in a configuration, or in a list of them."""
    plugins = config.get("plugins")
    for each in plugins if isinstance(plugins, list) else [config]:
        plugin = _object(each)
        ipam = plugin.get("ipam")
        if isinstance(ipam, dict):
            types = (_text(ipam.get("type")), _text(plugin.get("type")))
            if PLUGIN in map(os.path.basename, types):
                return ipam
    return None


def _is_served_here(ipam: Mapping[str, Any], db_path: str, socket_path: str) -> bool:
    database = _text(ipam.get("dbPath")) or DEFAULT_DB_PATH
    if os.path.realpath(database) == os.path.realpath(db_path):
        return True
    socket = _text(ipam.get("daemonSocket")) or DEFAULT_SOCKET_PATH
    return bool(socket_path) and (
        os.path.realpath(socket) == os.path.realpath(socket_path)
    )


def _subnets(section: Mapping[str, Any]) -> list[CIDRBlock]:
    """Every subnet of a section's ranges, in either form, that can be read."""
    entries: list[Any] = [section]
    for key in ("ranges", "ipRanges"):
        sets = section.get(key)
        for one in sets if isinstance(sets, list) else []:
            entries += one if isinstance(one, list) else []
    found = []
    for entry in entries:
        subnet = entry.get("subnet") if isinstance(entry, dict) else None
        if isinstance(subnet, str):
            found.append(CIDRBlock.parse(subnet))
    return found


def _addresses(result: Mapping[str, Any], interface_name: str) -> Iterator[str]:
    """The addresses of a result, whatever its version, as ADDRESS/PREFIX."""
    interfaces = result.get("interfaces")
    for each in _list(result.get("ips")):
        entry = _object(each)
        place = entry.get("interface")
        if isinstance(interfaces, list) and type(place) is int:
            if not 0 <= place < len(interfaces):
                continue
            interface = _object(interfaces[place])
            if interface.get("name") != interface_name or not interface.get("sandbox"):
                continue
        yield _text(entry.get("address"))
    for key in ("ip4", "ip6"):  # the shape of 0.1.0 and 0.2.0
        if result.get(key) is not None:
            yield _text(_object(result[key]).get("ip"))


def _namespace(
    entry: Mapping[str, Any], result: Mapping[str, Any], interface_name: str
) -> str:
    """The path of the attachment's network namespace; empty where none is told."""
    for each in _list(result.get("interfaces")):
        interface = _object(each)
        if interface.get("name") == interface_name and interface.get("sandbox"):
            return _text(interface["sandbox"])
    return _text(entry.get("netns"))


def _is_gone(namespace: str, mtime: float) -> bool:
    """Whether a network namespace is gone, for certain.

    A path by way of a process tells nothing, since its id may be another's now. A
    directory that is empty, or not there, may be one that we cannot see; but what
    is from before this boot is gone with it.
    """
    if not namespace.startswith("/") or _PROC.fullmatch(os.path.realpath(namespace)):
        return False
    if os.path.lexists(namespace):
        return False
    try:
        if os.listdir(os.path.dirname(namespace)):
            return True
    except OSError:
        pass
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return mtime < booted


def _pod(arguments: object) -> Pod:
    """The pod's names out of CNI_ARGS, as libcni keeps them: pairs of texts."""
    names: dict[str, str] = {}
    for pair in arguments if isinstance(arguments, list) else []:
        if isinstance(pair, list) and len(pair) == 2:
            key, value = pair
            if isinstance(key, str) and isinstance(value, str):
                names[key] = value
    try:
        return Pod(names.get("K8S_POD_NAME", ""), names.get("K8S_POD_NAMESPACE", ""))
    except InvalidRequest:
        return Pod()  # whoever it is, it has its address


def _json_of_base64(value: object) -> Mapping[str, Any]:
    try:
        return _object(json.loads(base64.b64decode(_text(value), validate=True)))
    except binascii.Error as error:
        raise ValueError(f"its config is no base64: {error}") from None


def _object(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.40} is not an object")
    return value


def _list(value: object) -> list[Any]:
    """A list, or nothing as the empty one."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.40} is not a list")
    return value


def _text(value: object) -> str:
    """A text, or nothing as the empty one."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is not a text")
    return value
