"""Which paths of this machine are a bucket that is mounted with Cloud Storage FUSE.

Such a mount replaces no object conditionally: ``link(2)`` is refused, locks reach no other machine, and a modification
time or an inode is not the object's generation. What is renewed by one winner goes to the bucket itself. (A symbolic
link under a free name has one winner: ``store.link_lease``.)
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

MOUNTS = Path("/proc/self/mountinfo")
#: Bucket names, by Google's rules for them.
_BUCKET = re.compile(r"^[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]$")
#: Sources of a mount that shows all buckets as folders.
_ALL_BUCKETS = ("_", "gcsfuse")
_OCTAL = re.compile(r"\\([0-7]{3})")


class _Mount(NamedTuple):
    root: str
    """What of the file system is shown here (a folder, where a folder of it was bound)."""
    point: str
    kind: str
    source: str


def uri_of_mounted(path: str | os.PathLike[str], *, mounts: Path | None = None) -> str | None:
    """``gs://BUCKET/...`` of a path on a mounted bucket, None of any other; the path need not exist.

    Right unless only a folder of the bucket was mounted (``--only-dir``), which a mount does not show: say it to users,
    do not write there. The GKE driver's mounts are of kind ``fuse``, the program's own of kind ``fuse.gcsfuse``.
    """
    real = os.path.realpath(path)
    mount = _mount_of(real, mounts or MOUNTS)
    if mount is None or mount.kind not in ("fuse", "fuse.gcsfuse"):
        return None
    inside = os.path.relpath(real, mount.point)
    shown = [part for part in (mount.root.strip("/"), "" if inside == "." else inside) if part]
    if mount.source in _ALL_BUCKETS and mount.kind == "fuse.gcsfuse":
        return f"gs://{'/'.join(shown)}"
    return f"gs://{'/'.join([mount.source, *shown])}" if _BUCKET.match(mount.source) else None


def points(*, mounts: Path | None = None) -> list[str]:
    """Where something is mounted, as this process sees it; nothing where the system does not say."""
    try:
        lines = (mounts or MOUNTS).read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return []
    return [_plain(fields[4]) for line in lines if len(fields := line.partition(" - ")[0].split(" ")) >= 5]


def _mount_of(real: str, mounts: Path) -> _Mount | None:
    """The mount that a path without links lies on; of several at one point, the last one hides the others."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return None
    found: _Mount | None = None
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, of_file_system = left.split(" "), right.split(" ")
        if len(fields) < 5 or len(of_file_system) < 2:
            continue
        mount = _Mount(_plain(fields[3]), _plain(fields[4]), of_file_system[0], _plain(of_file_system[1]))
        if _is_below(real, mount.point) and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _plain(text: str) -> str:
    """The kernel writes spaces and backslashes as octal numbers."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
