"""Real captures of other people's machines: at hand on some machines, never part of the repository."""

from pathlib import Path

import pytest

ORACLES = Path(__file__).resolve().parents[5] / "shared" / "data" / "oracles"


def capture(name: str) -> str:
    """The text, or the test is skipped."""
    path = ORACLES / name
    if not path.exists():
        pytest.skip(f"no capture {path.name} at hand")
    return path.read_text()


XID_119 = "gpu_health/components_accelerator_nvidia_xid__dmesg-with-xid-119.log"
SMI_4090 = "gpu_health/pkg_nvidia-query__nvidia-smi-query.535.154.05.out.0.valid"
SMI_H100 = "gpu_health/pkg_nvidia-query__nvidia-smi-query.535.161.08.out.0.valid"
IBSTAT_ACTIVE = "gpu_health/pkg_nvidia-query_infiniband__ibstat.47.0.h100.all.active.0"
IBSTAT_DOWN = "gpu_health/pkg_nvidia-query_infiniband__ibstat.47.0.h100.some.down.0"
CATALOGUE = "gpu_health/nvidia_xid_catalog.csv"
ALL_GATHER = "nccl/nccl_allgather.log"
ALL_REDUCE = "nccl/nccl_allreduce.log"
