"""Random values by (seed, name), and parts that fit together whatever the number of ranks."""

from itertools import pairwise

import pytest
import torch
from fakes.small_model import CPU, LLAMA, build, process_group, spec_of, whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from muster.train.model import weights
from muster.train.model.weights import local_ranges, normal, uniform

pytestmark = pytest.mark.usefixtures("group")


@pytest.mark.parametrize("draw", [normal, uniform])
@pytest.mark.parametrize("shape", [(10, 3), (7,), (5, 2, 4)])
def test_parts_are_cut_from_one_whole(draw, shape, monkeypatch):
    monkeypatch.setattr(weights, "BLOCK_NUMEL", 12)
    whole = draw("a", shape, tuple(slice(0, size) for size in shape), 0.5, seed=1, device=CPU)
    assert whole.shape == shape
    for cuts in ([0, 1, 4, 5, shape[0]], [0, 2, 2, shape[0]]):
        parts = [
            draw("a", shape, (slice(a, b), *(slice(0, n) for n in shape[1:])), 0.5, seed=1, device=CPU)
            for a, b in pairwise(cuts)
        ]
        assert torch.equal(torch.cat(parts), whole)
    if len(shape) > 1:
        inner = draw("a", shape, (slice(1, 4), slice(1, 2), *(slice(0, n) for n in shape[2:])), 0.5, seed=1, device=CPU)
        assert torch.equal(inner, whole[1:4, 1:2])


def test_values_depend_on_seed_and_name_and_have_the_wanted_spread():
    ranges = (slice(0, 200), slice(0, 50))
    first = normal("a", (200, 50), ranges, 0.3, seed=1, device=CPU)
    assert float(first.std()) == pytest.approx(0.3, rel=0.05) and abs(float(first.mean())) < 0.01
    assert not torch.equal(first, normal("a", (200, 50), ranges, 0.3, seed=2, device=CPU))
    assert not torch.equal(first, normal("b", (200, 50), ranges, 0.3, seed=1, device=CPU))
    spread = uniform("a", (200, 50), ranges, 0.3, seed=1, device=CPU)
    assert -0.3 <= float(spread.min()) < -0.29 and 0.29 < float(spread.max()) < 0.3


@pytest.mark.parametrize(
    ("placements", "expected"),
    [
        ((Shard(0), Replicate()), [(0, 4), (4, 7)]),  # 7 rows over 2: 4 and 3
        ((Shard(1), Shard(0)), None),
    ],
)
def test_ranges_are_those_that_dtensor_uses(placements, expected):
    """Every rank of a 2 x 2 mesh, against PyTorch's own arithmetic."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    torch.distributed.destroy_process_group()
    try:
        for rank in range(4):
            with process_group(4, rank):
                mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
                shape, offset = compute_local_shape_and_global_offset(torch.Size((7, 6)), mesh, placements)
                tensor = DTensor.from_local(
                    torch.zeros(shape), mesh, placements, run_check=False, shape=torch.Size((7, 6)), stride=(6, 1)
                )
                found = [(part.start, part.stop) for part in local_ranges(tensor)]
                assert found == [(at, at + size) for at, size in zip(offset, shape, strict=True)]
                if expected:
                    assert found[0] == expected[rank // 2]
    finally:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)


def test_what_is_no_matrix_gets_the_models_own_first_values():
    built = build(spec_of({**LLAMA, "model_type": "gemma2", "head_dim": 8}))
    values = dict(built.module.model.named_parameters())
    # Gemma's norms multiply by 1 + weight: ones would double every layer.
    assert torch.count_nonzero(whole(values["model.norm.weight"])) == 0
    built = build(spec_of())
    assert torch.equal(whole(dict(built.module.model.named_parameters())["model.norm.weight"]), torch.ones(32))
    built = build(spec_of({**LLAMA, "model_type": "qwen2"}))
    bias = whole(dict(built.module.model.named_parameters())["model.layers.0.self_attn.q_proj.bias"])
    assert bias.shape == (32,) and torch.count_nonzero(bias) == 0


@pytest.mark.parametrize("rope", [None, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}])
def test_rotary_frequencies_are_recomputed(rope):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {**LLAMA, "vocab_size": 50}
    if rope:
        rope = {**rope, "high_freq_factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
        config["rope_parameters"] = rope
    built = build(spec_of(config))
    keys = dict(config)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(keys.pop("model_type"), **keys))
    found, expected = (dict(model.named_buffers()) for model in (built.module.model, plain))
    assert expected.keys() == found.keys() and expected
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
