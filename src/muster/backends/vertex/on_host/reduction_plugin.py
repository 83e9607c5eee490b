"""Does the NCCL of this image still load Reduction Server's plugin? ``python -m
muster.backends.vertex.on_host.reduction_plugin`` in the image says so; hosts of a job with reducers say it at start.

A plugin that is too old is no error for NCCL: it looks for its symbols, finds none, and uses plain sockets.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

LIBRARY = "libnccl-net.so"
FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib", "/usr/local/lib", "/usr/local/nvidia/lib64")
"""Where the package ``google-reduction-server`` or a loader may have it, after ``LD_LIBRARY_PATH``."""
LOADED = range(6, 13)
"""Versions of plugin symbols that NCCL looks for (its source of 2026-06, src/plugin/net)."""
# A name in the table of dynamic symbols ends with a zero, and so does the one before it.
_SYMBOL = re.compile(rb"\0nccl(?:Net|CollNet)Plugin_v(\d{1,2})\0")


def versions(library: Path) -> list[int]:
    """Of the plugin symbols in a shared library. Raises OSError."""
    data = library.read_bytes()
    found = set[int]()
    at = 0
    while match := _SYMBOL.search(data, at):
        found.add(int(match[1]))
        at = match.end() - 1  # its zero begins the next name
    return sorted(found)


def find(folders: Iterable[str]) -> Path | None:
    return next((Path(one) / LIBRARY for one in folders if one and (Path(one) / LIBRARY).is_file()), None)


def verdict(library: Path | None) -> tuple[bool, str]:
    """(whether NCCL loads it, in a sentence)."""
    if library is None:
        missing = f"no {LIBRARY} in this image: gradients go over plain TCP, and the reducers do nothing"
        return False, f"{missing}; the package is google-reduction-server (docs/how-to/vertex.md)"
    try:
        there = versions(library)
    except OSError as error:
        return False, f"{library} cannot be read: {error.strerror}"
    if fitting := [one for one in there if one in LOADED]:
        return True, f"{library} has the symbols v{fitting[-1]}, which NCCL loads"
    have = ", ".join(f"v{one}" for one in there) or "none"
    return False, (
        f"{library} has the symbols {have}, and NCCL looks for v{LOADED[0]} to v{LOADED[-1]}: gradients go over plain "
        "TCP, and the reducers do nothing"
    )


def of_this_machine() -> tuple[bool, str]:
    return verdict(find([*os.environ.get("LD_LIBRARY_PATH", "").split(":"), *FOLDERS]))


if __name__ == "__main__":
    fits, sentence = of_this_machine()
    print(sentence)
    sys.exit(0 if fits else 1)
