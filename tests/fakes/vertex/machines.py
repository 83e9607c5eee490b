"""Vertex AI's machines: accelerators of each, where they are offered, what is counted against quota."""

from __future__ import annotations

from collections import Counter
from typing import Any

GPUS: dict[str, tuple[str, int]] = {
    **{f"a3-highgpu-{n}g": ("NVIDIA_H100_80GB", n) for n in (1, 2, 4, 8)},
    "a3-megagpu-8g": ("NVIDIA_H100_MEGA_80GB", 8),
    "a3-ultragpu-8g": ("NVIDIA_H200_141GB", 8),
    "a4-highgpu-8g": ("NVIDIA_B200", 8),
    "a4x-highgpu-4g": ("NVIDIA_GB200", 4),
    **{f"a2-highgpu-{n}g": ("NVIDIA_TESLA_A100", n) for n in (1, 2, 4, 8)},
    "a2-megagpu-16g": ("NVIDIA_TESLA_A100", 16),
    **{f"a2-ultragpu-{n}g": ("NVIDIA_A100_80GB", n) for n in (1, 2, 4, 8)},
    **{f"g2-standard-{cores}": ("NVIDIA_L4", 1) for cores in (4, 8, 12, 16, 32)},
    **{f"g2-standard-{12 * n}": ("NVIDIA_L4", n) for n in (2, 4, 8)},
    **{f"g4-standard-{48 * n}": ("NVIDIA_RTX_PRO_6000", n) for n in (1, 2, 4, 8)},
}
"""Machine -> accelerator and how many of it: no other number is accepted."""
#: Chips are asked for by the machine and the slice's topology (``MachineSpec.tpuTopology``), never as accelerators.
TPUS = {*(f"ct5lp-hightpu-{n}t" for n in (1, 4, 8)), *(f"ct6e-standard-{n}t" for n in (1, 4, 8))}
WITHOUT = ("e2-standard-", "n1-standard-", "n1-highcpu-", "n1-highmem-", "n2-standard-", "n2-highcpu-")
OFFERED = {
    "NVIDIA_H100_80GB": {
        "us-west1", "us-central1", "us-east4", "us-east5", "europe-west4", "asia-southeast1", "asia-northeast1",
    },
    "NVIDIA_B200": {"us-west2", "us-central1", "us-east1", "us-south1"},
    "NVIDIA_GB200": {"us-central1"},
    "NVIDIA_L4": {
        "us-west1", "us-central1", "us-east1", "us-east4", "northamerica-northeast2", "europe-west4", "asia-south1",
        "asia-southeast1", "asia-northeast3", "me-central2",
    },
}  # fmt: skip
"""Accelerator -> regions, as documented in 2026; one that is not here is offered wherever Vertex AI is."""
OFFERED["NVIDIA_H100_MEGA_80GB"] = OFFERED["NVIDIA_H100_80GB"] | {
    "us-west4", "europe-west1", "australia-southeast1",
}  # fmt: skip
FLEX = {"NVIDIA_L4", "NVIDIA_TESLA_A100", "NVIDIA_A100_80GB", "NVIDIA_H100_80GB", "NVIDIA_H200_141GB", "NVIDIA_B200"}
"""What flex-start takes; of the H100 the larger variant is not named there."""
A100_40GB = {"us-central1", "europe-west4", "asia-southeast1"}
SMALL_MEMORY = 0.6
"""Of a small machine's memory, what is left to a container: GKE and system agents take up to two fifths."""


def unsupported(machine: dict[str, Any], region: str) -> str | None:
    """Google's refusal of this machine, accelerator and number in this region."""
    name = machine.get("machineType", "")
    accelerator, count = machine.get("acceleratorType"), machine.get("acceleratorCount", 0)
    if name in GPUS:
        wrong = (accelerator, count) != GPUS[name] or region not in OFFERED.get(GPUS[name][0], {region})
    elif name in TPUS:
        wrong = bool(accelerator) or not machine.get("tpuTopology")
    else:
        wrong = not name.startswith(WITHOUT) or bool(accelerator)
    return f"Machine type {name} is not supported." if wrong else None


def cores(machine: str) -> int:
    """Of a machine without accelerators, by its name; none are counted of the others."""
    return int(machine.rpartition("-")[2]) if machine.startswith(WITHOUT) else 0


def memory_left(machine: str) -> int:
    """Bytes that a container may use on a machine without accelerators before the kernel ends it."""
    gb_a_core = {"n1-standard-": 3.75, "n1-highcpu-": 0.9, "n1-highmem-": 6.5, "n2-highcpu-": 1.0}
    whole_gb = cores(machine) * next((gb for name, gb in gb_a_core.items() if machine.startswith(name)), 4.0)
    return int(whole_gb * (SMALL_MEMORY if cores(machine) <= 8 else 0.9) * (1 << 30))


def demand(spec: dict[str, Any]) -> Counter[str]:
    """Quota metrics -> how much of each the job needs. Spot and flex-start draw on the preemptible ones."""
    strategy = spec.get("scheduling", {}).get("strategy", "STANDARD")
    kind = "preemptible_" if strategy in ("SPOT", "FLEX_START") else ""
    needed: Counter[str] = Counter()
    for pool in filter(None, spec["workerPoolSpecs"]):
        machine, replicas = pool["machineSpec"], int(pool.get("replicaCount", "1"))
        if accelerator := machine.get("acceleratorType"):
            name = accelerator.removeprefix("NVIDIA_").removeprefix("TESLA_").lower()
            name = {"h100_80gb": "h100", "h100_mega_80gb": "h100_mega", "h200_141gb": "h200"}.get(name, name)
            needed[f"custom_model_training_{kind}nvidia_{name}_gpus"] += machine["acceleratorCount"] * replicas
        else:
            needed[f"custom_model_training_{kind}cpus"] += cores(machine["machineType"]) * replicas
    return needed


def default_limit(metric: str, region: str) -> int:
    """What a project that asked for nothing may have: of nearly every GPU none."""
    if metric.endswith("cpus"):
        return 2200
    return 8 if metric == "custom_model_training_nvidia_a100_gpus" and region in A100_40GB else 0
