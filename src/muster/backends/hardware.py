"""This machine's GPUs, by ``nvidia-smi``."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from muster.core.errors import BackendError
from muster.core.protocols import Shell


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU that a run could use."""

    index: int
    uuid: str
    name: str
    memory_bytes: int


def gpus(shell: Shell, environ: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves visible; none where there is no working driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = shell.run(
            ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"], timeout_s=20
        )
    except BackendError:
        return []
    all_gpus = [_gpu(line) for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return _visible([gpu for gpu in all_gpus if gpu is not None], environ.get("CUDA_VISIBLE_DEVICES"))


def shares(all_gpus: Sequence[Gpu], hosts: int, each: int) -> list[str]:
    """``CUDA_VISIBLE_DEVICES`` of every host, where several share this machine: consecutive GPUs, none of them twice.

    By UUID: CUDA may count in another order than ``nvidia-smi``.
    """
    return [",".join(gpu.uuid for gpu in all_gpus[host * each : (host + 1) * each]) for host in range(hosts)]


def _gpu(line: str) -> Gpu | None:
    fields = [word.strip() for word in line.split(",")]
    if len(fields) != 4 or not fields[0].isdigit():
        return None
    mebibytes = int(fields[3]) if fields[3].isdigit() else 0  # "[N/A]" on machines with unified memory
    return Gpu(index=int(fields[0]), uuid=fields[1], name=fields[2], memory_bytes=mebibytes << 20)


def _visible(all_gpus: list[Gpu], visible: str | None) -> list[Gpu]:
    """CUDA's own rule: in the order given, up to the first invalid name."""
    if visible is None:
        return all_gpus
    chosen: list[Gpu] = []
    for word in (word.strip() for word in visible.split(",")):
        match = [gpu for gpu in all_gpus if word and (str(gpu.index) == word or gpu.uuid.startswith(word))]
        if len(match) != 1:
            break
        chosen.append(match[0])
    return chosen
