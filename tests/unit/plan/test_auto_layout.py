"""``parallelism: auto``: the fastest layout that fits, and why."""

import pytest
from planning import job, option

from muster.app.planning.auto_layout import laid_out
from muster.app.planning.calibrate import cpu
from muster.app.planning.hardware import CPU
from muster.catalog import offers
from muster.config import load
from muster.core.errors import NoPlanError, RunFileError
from muster.core.layout import Layout
from muster.plan.auto_layout import compare_layouts, reason
from muster.plan.constants import DEFAULT, ON_CPU
from muster.plan.memory import CUDA

SETTING = {"micro_batch_size": 1, "activation_checkpointing": "none"}


def choices(work, where=None, nodes=1, overhead=CUDA, constants=DEFAULT, **setting):
    where = where or option()
    return compare_layouts(work, where, nodes, overhead=overhead, constants=constants, **{**SETTING, **setting})


def this_cpu(ranks, memory_bytes=8 << 30):
    chip = cpu(50e9 / ranks, origin="here", memory_bytes=memory_bytes)
    return offers.this_machine(chip, gpus=ranks, memory_bytes=memory_bytes, usd_per_hour=0.0)


def test_ranks_of_a_cpu_hold_a_model_that_fits_whole():
    best = choices(job("1B"), this_cpu(2, 64 << 30), overhead=CPU, constants=ON_CPU)[0]
    assert best.layout == Layout(dp_replicate=2) and best.fits
    assert "plain data parallel" in best.title


def test_what_does_not_fit_whole_is_sharded_and_the_reason_says_so():
    found = choices(job("1B"), this_cpu(2, 18 << 30), overhead=CPU, constants=ON_CPU)
    assert found[0].layout.dp_shard * found[0].layout.tp == 2 and found[0].fits
    assert not next(each for each in found if each.layout.dp_replicate == 2).fits
    assert "dp_replicate 2 (plain data parallel) would be faster and need" in reason(found, this_cpu(2, 18 << 30))


def test_a_model_too_large_for_one_gpu_is_not_replicated():
    found = choices(job("8B"), activation_checkpointing="full")
    assert found[0].fits and found[0].layout.dp_shard > 1
    times = [each.step_s for each in found if each.fits]
    assert found[0].step_s <= min(times) * 1.02


def test_nothing_fits():
    with pytest.raises(NoPlanError, match=r"no layout of these ranks fits: .* needs .* GB"):
        reason(choices(job("405B")), option())


def test_the_sum_over_replicas_hides_behind_the_backward_pass_but_its_last_part():
    """Eight whole 1B models on one machine: less than the whole sum is exposed, and never less than a layer's."""
    found = {each.layout: each.step_s for each in choices(job("1B", global_batch_size=512), micro_batch_size=8)}
    unhidden = {
        each.layout: each.step_s
        for each in choices(job("1B", global_batch_size=512), micro_batch_size=8, constants=ON_CPU)
    }
    assert found[Layout(dp_replicate=8)] < unhidden[Layout(dp_replicate=8)]


RUN = """
name: auto
model: {config: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
                 num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 512}, dtype: float32}
data: {sources: [{type: random, rows: 64}]}
training: {steps: 6, sequence_length: 64}
resources: {device: cpu, ranks_per_host: 2}
parallelism: auto
"""


def test_auto_in_a_run_file_becomes_a_layout(tmp_path):
    spec, why = laid_out(load.loads(RUN).spec, tmp_path)
    assert spec.parallelism.axes | {"dp_replicate": 2, "dp_shard": 1} == spec.parallelism.axes
    assert not spec.parallelism.auto and why.startswith("parallelism: auto takes dp_replicate 2")


def test_a_layout_that_is_given_stays(tmp_path):
    loaded = load.loads(RUN, ["parallelism.tp=2"])
    assert laid_out(loaded.spec, tmp_path) == (loaded.spec, None)


def test_auto_and_an_axis_are_refused():
    with pytest.raises(RunFileError, match="chooses the layout, and tp is given too"):
        load.loads(RUN.replace("parallelism: auto", "parallelism: {auto: true, tp: 2}"))
    with pytest.raises(RunFileError, match="parallelism"):
        load.loads(RUN.replace("parallelism: auto", "parallelism: fast"))
