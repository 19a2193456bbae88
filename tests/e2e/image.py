"""A container image with a static busybox in it, made without a registry.

An archive in the OCI image layout, which `podman load` and `ctr images import`
both read: one layer, its configuration, a manifest and an index.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path

NAME = "localhost/metis-e2e:1"

BUSYBOX = Path("/bin/busybox")
"""From Debian's busybox-static; it needs no library of the image."""

APPLETS = ("ip", "ping", "sh", "sleep")

REST = ["/bin/sleep", "1000000"]
"""What a container does unless told otherwise: nothing, for days."""

_OCI = "application/vnd.oci.image"
_ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}


def write_image(archive: Path) -> None:
    """Write the image as an archive."""
    layer = _layer()
    config = _json(
        {
            "architecture": _ARCHITECTURE.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Cmd": REST, "Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{_OCI}.manifest.v1+json",
            "config": _descriptor("config.v1+json", config),
            "layers": [_descriptor("layer.v1.tar", layer)],
        }
    )
    names = {
        "org.opencontainers.image.ref.name": NAME,  # podman
        "io.containerd.image.name": NAME,  # containerd
    }
    index = _json(
        {
            "schemaVersion": 2,
            "manifests": [
                {**_descriptor("manifest.v1+json", manifest), "annotations": names}
            ],
        }
    )
    with tarfile.open(archive, "w") as tar:
        _add(tar, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        _add(tar, "index.json", index)
        for blob in (layer, config, manifest):
            _add(tar, "blobs/" + _digest(blob).replace(":", "/"), blob)


def _layer() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        _add(tar, "bin/busybox", BUSYBOX.read_bytes(), mode=0o755)
        for applet in APPLETS:
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
    return file.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))


def _descriptor(kind: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": f"{_OCI}.{kind}", "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def _json(value: object) -> bytes:
    return json.dumps(value).encode()
