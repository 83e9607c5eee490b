"""Meshes and tensor-parallel plans of many ranks, without those ranks."""

import pytest
import torch
from fakes.small_model import CPU, LLAMA, build, process_group, spec_of
from torch.distributed.tensor import Replicate, Shard

from muster.core.errors import UsageError
from muster.core.types import Layout
from muster.train.distributed.device_mesh import make_meshes
from muster.train.model.attention_isolation_check import Proof


@pytest.fixture(autouse=True)
def no_forward_pass(monkeypatch):
    """The ranks are not there, so what would be gathered from them is not either."""
    proof = Proof(leak=0.0, control=1.0, own_head=True)
    monkeypatch.setattr("muster.train.model.causal_lm.prove_isolation", lambda *_, **__: proof)


@pytest.mark.parametrize("rank", range(8))
def test_data_rank_counts_replicas_then_shards_and_tp_neighbours_share_it(rank):
    with process_group(8, rank):
        meshes = make_meshes(Layout(dp_replicate=2, dp_shard=2, tp=2), "cpu")
        assert meshes.data_rank == rank // 2
        assert meshes.replicate is not None and meshes.replicate.size() == 2
        assert meshes.shard.mesh_dim_names == ("dp_shard",)


def test_a_group_that_spans_one_replica():
    with process_group(2, 1):
        meshes = make_meshes(Layout(dp_replicate=3, dp_shard=2), "cpu", replica=2)
        assert meshes.data_rank == 5 and meshes.replicate is None


def test_tensor_parallel_and_fsdp_cut_different_dimensions():
    layout = Layout(dp_shard=2, tp=2)
    with process_group(4):
        built = build(spec_of({**LLAMA, "model_type": "qwen3", "head_dim": 8}), layout=layout)
        found = {
            name.removeprefix("model.layers.0."): (p.device_mesh.mesh_dim_names, p.placements)
            for name, p in built.module.model.named_parameters()
        }
        both = ("dp_shard", "tp")
        assert found["self_attn.q_proj.weight"] == (both, (Shard(1), Shard(0)))
        assert found["self_attn.o_proj.weight"] == (both, (Shard(0), Shard(1)))
        assert found["self_attn.q_norm.weight"] == (both, (Shard(0), Replicate()))
        assert found["input_layernorm.weight"] == (("dp_shard",), (Shard(0),))
        assert found["model.embed_tokens.weight"] == (("dp_shard",), (Shard(0),))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**LLAMA, "hidden_size": 30, "num_attention_heads": 3, "num_key_value_heads": 3}, "heads 3 is not"),
        ({**LLAMA, "num_key_value_heads": 1}, "num_key_value_heads 1"),
        ({**LLAMA, "intermediate_size": 49}, "intermediate_size 49"),
        ({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4}, "ships no tensor-parallel plan"),
        ({**LLAMA, "model_type": "phi3", "pad_token_id": 0}, "not supported"),
    ],
)
def test_what_tensor_parallel_cannot_cut(config, said):
    with process_group(2), pytest.raises(UsageError, match=said):
        build(spec_of(config), layout=Layout(tp=2))


def test_a_dimension_that_would_be_cut_twice_is_refused():
    biased = {**LLAMA, "model_type": "qwen2"}
    with process_group(4), pytest.raises(UsageError, match=r"q_proj.bias .* cannot be sharded by tp and by dp_shard"):
        build(spec_of(biased), layout=Layout(dp_shard=2, tp=2))
    with process_group(2):
        build(spec_of(biased), layout=Layout(tp=2))


def test_lora_and_tensor_parallel():
    with process_group(2), pytest.raises(UsageError, match="cannot be combined"):
        build(spec_of(lora={"rank": 2}), layout=Layout(tp=2))


def test_no_rank_holds_the_whole_model():
    with process_group(4):
        built = build(spec_of(), layout=Layout(dp_shard=4))
        held = sum(parameter.to_local().numel() for parameter in built.module.parameters())
        assert built.num_parameters / 4 <= held < built.num_parameters / 3
        assert all(parameter.device == CPU for parameter in built.module.parameters())
        assert not torch.isnan(next(iter(built.module.parameters())).to_local()).any()
