"""What only a CUDA build of torch can show, without a driver: for ``./setup.sh gpu-check``, else skipped."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from muster.agent.ranks.rank_environment import ASK_NVML, SPEAK_FOR_THEMSELVES, SURVIVE_ABORTS

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from gpu_hour import machine

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this torch is a CPU build")

#: What torch asks NVML for when ``PYTORCH_NVML_BASED_CUDA_CHECK`` is set (torch/cuda/__init__.py).
NVML = "int nvmlInit(void) { return 0; } int nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return 0; }"


@pytest.fixture
def flash_attn(tmp_path: Path) -> Path:
    """A folder with a flash-attn that transformers finds, and asks torch for CUDA because of it."""
    for path, text in machine.STUB.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def forked(*, paths: list[Path], **more: str) -> str | None:
    """What a child says that is forked after the fork server's imports."""
    source = Path(__file__).parents[3] / "src"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (source, *paths))), **more}
    return machine.said([sys.executable, "-c", machine.FORK], env=env)


def test_the_fork_servers_imports_leave_cuda_alone() -> None:
    assert forked(paths=[]) == "clean"


def test_flash_attn_would_open_cuda_and_nvml_keeps_it_closed(flash_attn: Path) -> None:
    bare = forked(paths=[flash_attn]) or ""
    assert "opened CUDA" in bare, f"else the stub is not what transformers looks for: {bare}"
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to play a driver's library with")
    (flash_attn / "nvml.c").write_text(NVML)
    library = flash_attn / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, flash_attn / "nvml.c"], check=True)
    assert forked(paths=[flash_attn], LD_LIBRARY_PATH=str(flash_attn), **ASK_NVML) == "clean"


def test_varlen_attention_is_called_as_this_torch_takes_it() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from muster.train.model.attention import register

    register()
    query, key = torch.zeros(1, 4, 20, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 20, 64, dtype=torch.bfloat16)
    bounds = torch.tensor([0, 20], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="'CPU' backend"):  # the kernel itself; no TypeError on the way
        ALL_ATTENTION_FUNCTIONS["muster_varlen"](
            torch.nn.Identity(), query, key, key, None,
            cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=20, max_length_k=20,
        )  # fmt: skip


def test_a_product_of_half_precision_is_added_to_a_float32_sum_in_its_kernel() -> None:
    """The words of its own check: a sum in the result's type may go in, not only one in the matrices' type."""
    library = (Path(torch.__file__).parent / "lib" / "libtorch_cuda.so").read_bytes()
    assert b"self dtype must match either out_dtype or mat1 dtype" in library


def test_nccls_variables_are_known_to_this_torch() -> None:
    library = (Path(torch.__file__).parent / "lib" / "libtorch_cuda.so").read_bytes()
    unknown = [name for name in SPEAK_FOR_THEMSELVES | SURVIVE_ABORTS if name.encode() not in library]
    assert not unknown


def test_nccl_has_what_process_groups_call() -> None:
    options = dist.ProcessGroupNCCL.Options()
    assert hasattr(options, "_timeout")
    for name in ("abort", "get_error", "_set_sequence_number_for_group"):
        assert hasattr(dist.ProcessGroupNCCL, name), name
