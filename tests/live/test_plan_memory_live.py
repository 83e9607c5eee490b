"""Real ranks of the trainer against the closed form, and the closed form against the trace. The wide sweep is
``benchmarks/plan_memory.py``."""

import importlib.util
import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.live
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def benchmark(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name",
    ["fp32 wide tied", "bf16 wide", "bf16 lora embeddings", pytest.param("bf16 wide x2", marks=pytest.mark.soak)],
)
def test_ranks_grow_as_predicted(name, monkeypatch):
    """Within 10 % of the growth above the process after its imports."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the resident set's high-water mark cannot be reset here")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(128 * 1024))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import plan_memory  # children find rank_main by this name

    ((_, ranks, layout, changes),) = [each for each in plan_memory.configurations() if each[0] == name]
    raw = plan_memory.spec_of(changes)
    estimate = plan_memory.predicted(raw, layout, ranks)
    growth, baseline = plan_memory.measured(raw, layout, ranks)
    assert growth > plan_memory.GIB or growth > 5 * baseline, "grows too little to say anything"
    assert estimate.total_bytes == pytest.approx(growth, rel=0.10)


def test_the_trace_agrees_with_the_closed_form():
    """8B on 8 ranks without weights: within 5 %."""
    plan_trace = benchmark("plan_trace")
    from muster.catalog import rows
    from muster.core.types import Layout
    from muster.plan.workload import Setting

    shape = rows.find_model("meta-llama/Llama-3.1-8B").shape
    setting = Setting(layout=Layout(dp_shard=8), micro_batch_size=1, activation_checkpointing="full")
    found = plan_trace.traced(shape, setting)
    assert plan_trace.closed(shape, setting).total_bytes == pytest.approx(found["peak_bytes"], rel=0.05)
    assert found["kinds"]["optimizer"] == pytest.approx(8.03e9 * 8 / 8, rel=0.01)
