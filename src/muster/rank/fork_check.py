"""Whether a fork of this process could use CUDA.

CUDA works in a forked process only if its parent never opened it. Any package may do so while it is imported, so one
child is forked to look before ranks are.
"""

from __future__ import annotations

import os
import sys

import torch

from muster.core.errors import BackendError

#: Packages that transformers or peft import where they are installed, and that have kernels of their own.
SUSPECTS = (
    "flash_attn", "flash_attn_interface", "bitsandbytes", "torchao", "xformers", "apex", "deepspeed", "auto_gptq",
    "awq", "hqq", "kernels", "liger_kernel", "transformer_engine", "optimum", "eetq", "fbgemm_gpu",
)  # fmt: skip


def check() -> None:
    """Fork a child that looks, and wait for it.

    Raises:
        BackendError: the child cannot use CUDA; it names what may have opened it.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) == 0:
        return
    found = ", ".join(name for name in SUSPECTS if name in sys.modules) or "none of those that are known to"
    raise BackendError(
        f"a package opened CUDA while it was imported ({found}): no rank forked from this process could use a GPU",
        hint="uninstall or update it; PYTORCH_NVML_BASED_CUDA_CHECK must not be 0",
    )
