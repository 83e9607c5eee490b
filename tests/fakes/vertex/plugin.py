"""A network plugin of some age, and what NCCL says when it loads it."""

from __future__ import annotations

import subprocess
from pathlib import Path

LOADED = range(6, 13)
"""Versions of plugin symbols that today's NCCL looks for."""


def build(folder: Path, versions: tuple[int, ...]) -> Path:
    """A real ``libnccl-net.so`` that exports the symbols of these versions; needs a C compiler."""
    source, library = folder / "plugin.c", folder / "libnccl-net.so"
    source.write_text("".join(f"int nccl{kind}Plugin_v{n};\n" for n in versions for kind in ("Net", "CollNet")))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def log(versions: tuple[int, ...], host: str = "workerpool0-0") -> list[str]:
    """NCCL's lines at NCCL_DEBUG=INFO: a plugin that is too old is no error, there is just another network."""
    lines = []
    for number in reversed(LOADED):
        if number in versions:
            lines += [f"NET/Plugin: Loaded net plugin Reduction Server (v{number})", "Using network Reduction Server"]
            break
        lines.append(f"NET/Plugin: Failed to find ncclNetPlugin_v{number} symbol.")
    else:
        lines.append("Using network Socket")
    return [f"{host}:7:91 [0] NCCL INFO {line}" for line in lines]
