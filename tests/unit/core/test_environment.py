"""Environment variables: every one that the code names is listed, and what they mean when they are absent."""

import re
from pathlib import Path

from muster.core import environment, processes

SOURCE = Path(__file__).parents[3] / "src" / "muster"


def test_every_variable_that_the_code_names_is_listed():
    named = {name for path in SOURCE.rglob("*.py") for name in re.findall(r"\bMUSTER_[A-Z_]+\b", path.read_text())}
    assert named == {variable.name for variable in environment.VARIABLES}


def test_defaults_and_values():
    empty = environment.read({"MUSTER_HOME": "", "MUSTER_NICE": ""})
    assert (empty.home, empty.bind, empty.nice) == (Path.home() / ".muster", "127.0.0.1", 0)
    assert empty.watchdog_pid is None and not empty.term_ignored and not empty.drill
    given = {"MUSTER_HOME": "/runs", "MUSTER_MEMORY_DIR": "/ram", "MUSTER_TERM": "ignored", "MUSTER_WATCHDOG": "7"}
    found = environment.read(given)
    assert (found.home, found.memory_root) == (Path("/runs"), Path("/ram"))
    assert found.term_ignored and found.watchdog_pid == 7


def test_settings_of_the_gpu_libraries_reach_the_ranks():
    """What the user says to flash-attn, NCCL, cuBLAS and torch."""
    given = {
        "FLASH_ATTENTION_DETERMINISTIC": "1", "NCCL_DEBUG": "INFO", "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CUDA_VISIBLE_DEVICES": "1", "PYTORCH_ALLOC_CONF": "backend:native", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "1",
    }  # fmt: skip
    found = processes.environment({**given, "OTHER": "x"}, run_id="r", run_dir="/d", extra={})
    assert {name: value for name, value in found.items() if not name.startswith("MUSTER_")} == given
