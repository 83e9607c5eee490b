"""Meshes and tensor-parallel plans of many ranks, without those ranks."""

import pytest
import torch
from fakes.small_model import CPU, LLAMA, build, process_group, spec_of
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from muster.core.errors import UsageError
from muster.core.types import Layout
from muster.train.data_feed.batch import make_batch
from muster.train.distributed.device_mesh import make_meshes
from muster.train.model.attention_isolation_check import Proof
from muster.train.model.loss import loss_sum
from muster.train.model.tensor_parallel import SharedInput


@pytest.fixture(autouse=True)
def no_forward_pass(monkeypatch):
    """The ranks are not there, so what would be gathered from them is not either."""
    proof = Proof(leak=0.0, control=1.0, own_head=True)
    monkeypatch.setattr("muster.train.model.causal_lm.prove_isolation", lambda *_, **__: proof)


@pytest.mark.parametrize("rank", range(8))
def test_data_rank_counts_replicas_then_shards_and_tp_neighbours_share_it(rank):
    with process_group(4, rank % 4):
        meshes = make_meshes(Layout(dp_replicate=2, dp_shard=2, tp=2), "cpu", replica=rank // 4)
        assert meshes.data_rank == rank // 2
        assert meshes.shard.mesh_dim_names == ("dp_shard",)


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


def test_an_adapter_whose_rank_does_not_divide_is_refused():
    with process_group(6), pytest.raises(UsageError, match="cannot be sharded by tp and by dp_shard"):
        build(spec_of({**LLAMA, "hidden_size": 96}, lora={"rank": 4}), layout=Layout(dp_shard=3, tp=2))


def test_no_rank_holds_the_whole_model():
    with process_group(4):
        built = build(spec_of(), layout=Layout(dp_shard=4))
        held = sum(parameter.to_local().numel() for parameter in built.module.parameters())
        assert built.num_parameters / 4 <= held < built.num_parameters / 3
        assert all(parameter.device == CPU for parameter in built.module.parameters())
        assert not torch.isnan(next(iter(built.module.parameters())).to_local()).any()


@pytest.mark.parametrize(
    ("model_type", "kind", "calls"),
    [
        ("llama", "none", 4),
        ("llama", "selective", 5),
        ("llama", "full", 5),
        ("gemma2", "none", 4),
        ("gemma2", "full", 6),  # its norm of the last sum reads that sum again
    ],
)
def test_the_gradient_of_an_input_that_several_matrices_read_is_reduced_once(model_type, kind, calls):
    """As the plan counts (``plan/step_time.py``): a layer's two sums of outputs and two of inputs' gradients."""
    config = {**LLAMA, "model_type": model_type, "head_dim": 8, "pad_token_id": 0}
    with process_group(2):
        module = build(spec_of(config, training={"activation_checkpointing": kind}), layout=Layout(tp=2)).module
        ids = torch.arange(64).view(2, 32) % 50
        batch = make_batch(ids, ids, torch.arange(32).expand(2, 32), [32, 32], CPU)
        for _ in range(2):
            with CommDebugMode() as seen:
                loss_sum(module, batch, chunk_tokens=0, scale=1.0).backward()
            assert seen.get_comm_counts()[torch.ops.c10d_functional.all_reduce] == 2 * calls
        hooks = {hook for part in module.modules() for hook in part._forward_pre_hooks.values()}
        shared = [hook for hook in hooks if isinstance(hook, SharedInput)]
        assert len(shared) == 4 and all(hook._local is hook._shared is None for hook in shared), "it holds activations"


def test_matrices_that_read_different_tensors_share_nothing():
    with process_group(2):
        meshes = make_meshes(Layout(tp=2), "cpu")
        shared = SharedInput(meshes.tp, 3)
        first, other = torch.ones(2), torch.zeros(2)
        made = [shared(torch.nn.Identity(), (each,))[0] for each in (first, first, other, other, first)]
        assert made[0] is made[1] and made[2] is made[3] and len({id(each) for each in made}) == 3
        assert [float(each.to_local().sum()) for each in made] == [2, 2, 0, 0, 2]
