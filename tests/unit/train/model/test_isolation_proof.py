"""The self-test at start sees what a comparison of neighbours alone does not, and finds a way that is right."""

from types import SimpleNamespace

import pytest
import torch
from fakes.small_model import CPU, LLAMA, build, spec_of

from muster.core.errors import RunFailed
from muster.train.data_feed.batch import make_batch
from muster.train.distributed.reduce import local
from muster.train.model import attention
from muster.train.model.attention import Attention, attention_arguments, ways
from muster.train.model.attention_isolation_check import prove_isolation
from muster.train.model.model_with_loss import ModelWithLoss

pytestmark = pytest.mark.usefixtures("group")
GPT2 = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2,
    "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
RIGHT = attention.document_attention


def scaled(query, key, value, bounds, scale):
    return RIGHT(query, key, value, bounds, 2 * scale)


def without_gradient_of_keys(query, key, value, bounds, scale):
    return RIGHT(query, key.detach(), value, bounds, scale)


@pytest.mark.parametrize(("kernel", "what"), [(scaled, "logits"), (without_gradient_of_keys, "gradients")])
def test_a_kernel_that_computes_something_else_ends_the_run(kernel, what, monkeypatch):
    monkeypatch.setattr(attention, "document_attention", kernel)
    with pytest.raises(RunFailed, match=f"attention document is not right for llama: {what} differ by") as caught:
        build(spec_of())
    assert caught.value.hint == "set model.attention: eager"


def test_a_model_that_counts_positions_from_the_rows_start_is_not_packed(monkeypatch):
    """Its documents' logits do not depend on their neighbours at all."""
    right = ModelWithLoss._arguments

    def arguments(self, batch, hidden):
        result = right(self, batch, hidden)
        return {**result, "position_ids": torch.arange(batch.input_ids.shape[1])[None]}

    assert build(spec_of(GPT2)).proof.unpacked is None
    monkeypatch.setattr(ModelWithLoss, "_arguments", arguments)
    proof = build(spec_of(GPT2)).proof
    assert "logits differ by" in proof.unpacked and proof.alone is None


def test_dropout_is_off_in_the_test_and_on_behind_it():
    built = build(spec_of({**GPT2, "embd_pdrop": 0.5, "resid_pdrop": 0.5}, lora={"dropout": 0.25}))
    assert built.proof.unpacked is None and built.module.training
    rates = {part.p for part in built.module.modules() if isinstance(part, torch.nn.Dropout)}
    assert rates >= {0.5, 0.25} and all(p.grad is None for p in built.module.parameters())


def test_a_model_with_masks_of_its_own_is_packed_by_masks():
    config = {**LLAMA, "model_type": "falcon", "new_decoder_architecture": True, "alibi": False}
    built = build(spec_of(config))
    assert built.proof.unpacked is None and built.proof.way == built.attention.way == "masks"
    assert "tested to separate documents by masks" in str(built.attention)


def test_segments_are_told_where_kernels_take_them(monkeypatch):
    cuda, varlen = torch.device("cuda"), Attention("varlen", "")
    monkeypatch.setattr(attention, "installed", lambda name: name == "mamba_ssm")
    assert ways(varlen, cuda) == ["positions", "segments"] and ways(varlen, CPU) == ["positions"]
    ids = torch.zeros(2, 4, dtype=torch.int64)
    batch = make_batch(ids, ids, ids, [3, 1, 2, 2], CPU)
    told = attention_arguments(batch, Attention("sdpa", "", way="segments"), SimpleNamespace(), torch.float32)
    assert told["seq_idx"].tolist() == [[0, 0, 0, 1, 2, 2, 3, 3]] and told["seq_idx"].dtype == torch.int32
    assert told["cu_seqlens"] is told["cu_seq_lens_q"] is batch.cu_seqlens


def test_weights_that_are_one_number_do_not_hide_a_wrong_kernel(monkeypatch):
    """As zeros before training: they are noise in the test, and themselves behind it."""
    module = build(spec_of()).module
    outputs = [local(weight.detach()) for name, weight in module.named_parameters() if "o_proj" in name]
    for weight in outputs:
        weight.zero_()
    assert prove_isolation(module, CPU, sequence_length=32).unpacked is None
    assert len(outputs) == 2 and not any(weight.any() for weight in outputs)
    monkeypatch.setattr(attention, "document_attention", scaled)
    with pytest.raises(RunFailed, match="attention document is not right for llama"):
        prove_isolation(module, CPU, sequence_length=32)
