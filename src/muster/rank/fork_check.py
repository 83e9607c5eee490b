"""Whether ranks can be forked from this process.

A fork has the calling thread alone: a lock that another thread held stays locked forever. And CUDA works in a forked
process only if its parent never opened it. Any package may do either while it is imported: pandas starts threads
(pyarrow's allocator; transformers imports it where scikit-learn is installed), flash-attn opens CUDA.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

#: Packages that transformers or peft import where they are installed, and that have kernels of their own.
SUSPECTS = (
    "flash_attn", "flash_attn_interface", "bitsandbytes", "torchao", "xformers", "apex", "deepspeed", "auto_gptq",
    "awq", "hqq", "kernels", "liger_kernel", "transformer_engine", "optimum", "eetq", "fbgemm_gpu",
)  # fmt: skip
#: Threads, by the names that the kernel knows them by, that a fork may leave behind: jemalloc takes its locks before a
#: fork, and its child goes on without threads (``background_thread_postfork_child`` in its background_thread.c).
HARMLESS = frozenset({"jemalloc_bg_thd"})


def why_not(*, on_gpus: bool = True) -> str | None:
    """What speaks against a fork of this process; None: ranks can be forked.

    ``on_gpus``: ranks use them; then one child is forked to look for CUDA.
    """
    if names := threads():
        return f"imported packages run threads ({', '.join(names)})"
    if not on_gpus:
        return None
    import torch

    pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) == 0:
        return None
    found = ", ".join(name for name in SUSPECTS if name in sys.modules) or "none of those that are known to"
    return f"a package opened CUDA while it was imported ({found})"


def threads() -> list[str]:
    """Names of the other threads of this process that a fork must not leave behind."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != os.getpid():
            try:
                found.append((task / "comm").read_text().strip())
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                continue
    return sorted(name for name in found if name not in HARMLESS)
