"""The environment variables of the fork server, and so of every rank."""

from __future__ import annotations

from collections.abc import Mapping

from muster.config.spec import RunSpec

#: A rank says itself why it ends. Otherwise NCCL's watchdog ends it by SIGABRT, without last words: a broken GPU would
#: look like a crash of the program, and a survivor of a lost host like a failure of its own. Nothing waits for the
#: watchdog: the agents detect lost and silent ranks. Names and meanings from ProcessGroupNCCL.hpp of torch 2.13 and its
#: watchdog's run loop; on a GPU one rank ran with them, and the watchdog never had to act.
SPEAK_FOR_THEMSELVES = {
    # 0: the watchdog notes an error and leaves it. Its default (3) takes the process down; 2 would abort by itself,
    # before the breaker is asked.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # The watchdog rethrows CUDA errors in a thread that catches nothing: the process would end.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
#: In addition to these: lets a rank of a healthy replica survive the abort of the groups that cross replicas.
SURVIVE_ABORTS = {
    # A thread that ends the process where the watchdog is stuck. The agent detects hangs itself.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # On an error the watchdog asks every group of the process for a dump, and then sleeps four times the wait below,
    # holding what the next collective needs.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}

#: For Muster's own trainer on GPUs. Supervised tokens differ in number from batch to batch, and with them the sizes of
#: what is allocated: segments that grow are not left in pieces that fit nothing (torchtitan sets it too).
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
_OLDER_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # still obeyed

#: ``torch.cuda.is_available()`` asks the driver's library instead of opening CUDA, in a process that will fork: others
#: ask while they are imported (transformers does where flash-attn is installed), and a fork could not use CUDA then.
#: On an H100 it was not enough with flash-attn or torchao (``rank/fork_check.py``).
ASK_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

#: Calls of collectives that torch's flight recorder holds, for the evidence of a hang. Of one all_reduce on gloo it
#: takes 2 to 6 microseconds of processor time (13 to 18 without it; torch 2.13, one rank).
RECORDED_CALLS = 256


def fork_server_environment(
    spec: RunSpec, given: Mapping[str, str], *, cores: int, hosts_here: int = 1
) -> dict[str, str]:
    """``given`` plus what ranks need; this machine's hosts share its cores, and the user's NCCL settings stay."""
    ranks_here = (spec.resources.ranks_per_host or 1) * hosts_here
    threads = spec.resources.threads_per_rank or max(1, cores // ranks_here)
    return {
        **_nccl(spec, given),
        **_allocator(spec, given),
        **ASK_NVML,
        "TORCH_FR_BUFFER_SIZE": str(RECORDED_CALLS),
        **given,
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": "1",  # its pool would be a thread before the fork
        "TOKENIZERS_PARALLELISM": "false",
    }


def opens_contexts(spec: RunSpec) -> bool:
    """Whether standbys are to hold a CUDA context on their local rank's GPU: Muster's own trainer, on GPUs."""
    return spec.resources.on_gpus and spec.recovery.warm_standby is True and spec.command is None


def _nccl(spec: RunSpec, given: Mapping[str, str]) -> dict[str, str]:
    """NCCL's settings for Muster's own trainer; a user's program keeps torch's defaults."""
    if spec.command is not None:
        return {}
    settings = SPEAK_FOR_THEMSELVES | (SURVIVE_ABORTS if spec.parallelism.dp_replicate > 1 else {})
    older = {name.removeprefix("TORCH_") for name in settings} & given.keys()  # NCCL_..., still obeyed
    return {name: value for name, value in settings.items() if name.removeprefix("TORCH_") not in older}


def _allocator(spec: RunSpec, given: Mapping[str, str]) -> dict[str, str]:
    wanted = spec.command is None and spec.resources.on_gpus and _OLDER_ALLOCATOR not in given
    return ALLOCATOR if wanted else {}
