"""Probes of the machine and its libraries: versions, a fork beside flash-attn, NCCL with one rank."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from gpu_hour.finding import Findings

PACKAGES = ("torch", "transformers", "triton", "flash-attn", "flash-attn-3", "torchao", "peft", "pydantic", "numpy")
QUERY = "name,driver_version,memory.total,memory.used,persistence_mode,compute_mode,power.limit"
#: Played by a folder: what transformers looks for, and imports once torch says that CUDA is there.
STUB = {
    "flash_attn/__init__.py": '__version__ = "2.8.3"\n'
    "flash_attn_func = flash_attn_varlen_func = flash_attn_with_kvcache = None\n",
    "flash_attn/bert_padding.py": "index_first_axis = pad_input = unpad_input = None\n",
    "flash_attn/layers/__init__.py": "",
    "flash_attn/layers/rotary.py": "apply_rotary_emb = None\n",
    "flash_attn/ops/triton/rotary.py": "apply_rotary = None\n",
    "flash_attn-2.8.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: flash_attn\nVersion: 2.8.3\n",
    "flash_attn-2.8.3.dist-info/RECORD": "flash_attn/__init__.py,,\n",
    "flash_attn-2.8.3.dist-info/top_level.txt": "flash_attn\n",
}
#: The fork server's own imports, then a fork; the child says whether CUDA can be used there.
FORK = """
import os, sys
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # as the agent sets it: its pool would be a thread before the fork
import torch
from muster.config.spec import RunSpec
from muster.rank import fork_check, fork_server
spec = RunSpec.model_validate({"name": "fork", "model": {"config": {"model_type": "llama"}},
    "data": {"sources": [{"type": "random"}]}, "training": {"steps": 1}})
fork_server._import_everything(spec)
why = fork_check.why_not()
if why:
    sys.exit(why)
pid = os.fork()
if pid == 0:
    words = "bad_fork" if torch.cuda._is_in_bad_fork() else "clean"
    if len(sys.argv) > 1:
        try:
            torch.cuda.set_device(0); torch.ones(1, device="cuda").item(); words += " cuda"
        except Exception as error:
            words += f" {type(error).__name__}: {error}".replace("\\n", " ")[:200]
    print(words, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""


def machine(found: Findings, *, smoke: bool) -> None:
    """Versions, driver, limits; the GPU's name in the catalogue; what torch's own attention takes."""
    import torch
    from torch.nn.attention import varlen

    from muster.catalog.devices import bf16_peak

    cuda = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if cuda else None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    takes = list(inspect.signature(varlen.varlen_attn).parameters)
    found.figures = {
        "python": sys.version.split()[0],
        "packages": {each: version_of(each) for each in PACKAGES},
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,  # type: ignore[no-untyped-call]
        "nvidia_smi": said(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]),
        "device": name,
        "capability": torch.cuda.get_device_capability() if cuda else None,
        "cpus": len(os.sched_getaffinity(0)),
        "dev_shm_gb": round(shutil.disk_usage("/dev/shm").free / 1e9, 1),
        "memlock_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "varlen_attn": takes,
        "compiler": shutil.which("gcc") or shutil.which("cc"),
    }
    found.claim("torch sees a GPU", cuda or (None if smoke else False), name)
    if cuda:
        peak = bf16_peak(name or "")
        found.claim("the catalogue knows this GPU, so that a run has an MFU", peak is not None, name)
        found.claim("Triton has the C compiler that it needs", found.figures["compiler"] is not None)
    found.claim("varlen_attn takes enable_gqa (without it, it must not be passed)", "enable_gqa" in takes)
    found.claim("/dev/shm has 16 GB free: snapshots of a small model", found.figures["dev_shm_gb"] >= 16)


def fork(found: Findings, *, smoke: bool) -> None:
    """A fork of the fork server's imports, with a stub flash-attn in the way; with and without NVML's answer."""
    use_cuda = [] if smoke else ["cuda"]
    expected = "clean" if smoke else "clean cuda"
    for name, stub, nvml in (("plain", False, False), ("flash_attn", True, False), ("flash_attn_nvml", True, True)):
        if smoke and not nvml:
            continue
        with tempfile.TemporaryDirectory() as folder:
            for path, text in STUB.items() if stub else ():
                (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
                (Path(folder) / path).write_text(text)
            places = [os.environ.get("PYTHONPATH", ""), folder]
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
            env.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
            if nvml:
                env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
            found.figures[name] = said([sys.executable, "-c", FORK, *use_cuda], env=env)
    mended = found.figures["flash_attn_nvml"]
    found.claim("beside flash-attn, PYTORCH_NVML_BASED_CUDA_CHECK=1 keeps a fork clean", mended == expected, mended)
    if smoke:
        return
    found.claim("a rank can be forked without flash-attn", found.figures["plain"] == expected, found.figures["plain"])
    bare = found.figures["flash_attn"]
    found.claim("flash-attn poisons a fork without that variable", bare != expected, bare)


def nccl(found: Findings, *, smoke: bool) -> None:
    """Muster's own groups with one rank: integer and double sums, memory of a communicator, abort."""
    import torch
    import torch.distributed as dist

    from muster.plan.memory import CUDA
    from muster.train.distributed import process_groups

    store = dist.TCPStore("127.0.0.1", 0, 1, True)  # type: ignore[attr-defined]
    device = torch.device("cpu" if smoke else "cuda")
    make = process_groups.gloo_group if smoke else process_groups.nccl_group
    held: list[int] = []
    groups: list[dist.ProcessGroup] = []
    for number in (1, 2):
        prefix = dist.PrefixStore(f"g{number}", store)
        group = make(prefix, rank=0, size=1, timeout=timedelta(seconds=60))
        before = 0 if smoke else torch.cuda.mem_get_info()[0]
        sums: dict[str, bool] = {}
        for dtype in (torch.int64, torch.float64, torch.float32, torch.bfloat16):
            tensor = torch.full((1 << 16,), 3, dtype=dtype, device=device)
            process_groups.all_reduce(tensor, group).wait()
            sums[str(dtype).removeprefix("torch.")] = bool((tensor == 3).all())
        found.figures[f"sums_{number}"] = sums
        groups.append(group)
        if not smoke:
            torch.cuda.synchronize()
            held.append(before - torch.cuda.mem_get_info()[0])
    everything = all(all(found.figures[f"sums_{number}"].values()) for number in (1, 2))
    found.claim("int64, float64, float32 and bfloat16 are summed", everything, found.figures["sums_1"])
    if smoke:
        return
    found.figures["communicator_mib"] = [round(each / 2**20, 1) for each in held]
    planned = 2 * CUDA.communicator_bytes + CUDA.nccl_bytes
    near = abs(sum(held) - planned) <= 0.1 * planned
    found.claim("two communicators hold what the plan counts, within a tenth", near, f"{held} bytes, {planned} planned")
    backend: Any = groups[0]._get_backend(device)
    found.figures["error_before"] = str(backend.get_error())
    backend.abort()
    found.figures["error_after"] = str(backend.get_error())
    found.claim("abort returns, and get_error answers after it", True, found.figures["error_after"])


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def said(command: list[str], env: dict[str, str] | None = None) -> str | None:
    """The last line of a program's output, or of its complaint; None: there is no such program."""
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90, check=False)
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired:
        return "no end within 90 s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return lines[-1] if lines else ""
