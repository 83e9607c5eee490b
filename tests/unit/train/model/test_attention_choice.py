"""Which kernel is chosen, and that every refusal gives its reason."""

from dataclasses import replace

import pytest
import torch
from fakes.small_model import LLAMA

from muster.core.errors import UsageError
from muster.train.model.attention import Needs, choose_attention, needs_of

PLAIN = Needs(
    window=None,
    softcap=False,
    sinks=False,
    head_dim=64,
    dropout=False,
    own_kernels=True,
    sdpa=True,
    flash=True,
    flex=True,
)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("needs", "kernel", "said"),
    [
        (PLAIN, "document", "best available"),
        (replace(PLAIN, window=16), "sdpa", "sliding window of 16"),
        (replace(PLAIN, dropout=True), "sdpa", "dropout"),
        (replace(PLAIN, own_kernels=False), "sdpa", "registered kernels"),
        (replace(PLAIN, softcap=True), "eager", "caps its attention scores"),
        (replace(PLAIN, sinks=True), "eager", "sinks"),
        (replace(PLAIN, own_kernels=False, sdpa=False), "eager", "does not support"),
    ],
)
def test_auto_on_cpu(needs, kernel, said):
    chosen = choose_attention("auto", needs, CPU, torch.float32)
    assert chosen.kernel == kernel
    assert said in str(chosen) and "\n" not in str(chosen)


@pytest.mark.parametrize(
    ("needs", "dtype", "kernel"),
    [
        (PLAIN, torch.bfloat16, "varlen"),
        (PLAIN, torch.float32, "flex"),
        (replace(PLAIN, head_dim=512), torch.bfloat16, "flex"),
        (replace(PLAIN, window=64), torch.bfloat16, "varlen"),
        (replace(PLAIN, softcap=True), torch.bfloat16, "flex"),
        (replace(PLAIN, flex=False), torch.float32, "sdpa"),
    ],
)
def test_auto_on_cuda_without_flash_attention_packages(needs, dtype, kernel):
    chosen = choose_attention("auto", needs, CUDA, dtype)
    assert chosen.kernel == kernel
    assert "flash_attn is not installed" in chosen.reason


@pytest.mark.parametrize("wanted", ["flash_attention_3", "flash_attention_2", "varlen", "flex"])
def test_a_cuda_kernel_on_cpu_is_refused_with_one_that_fits(wanted):
    with pytest.raises(UsageError, match=f"{wanted} cannot be used: it needs CUDA") as caught:
        choose_attention(wanted, PLAIN, CPU, torch.float32)
    assert "document" in (caught.value.hint or "")


def needs(**config):
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = {**LLAMA, "vocab_size": 20, **config}
    with torch.device("meta"):
        return needs_of(
            AutoModelForCausalLM.from_config(AutoConfig.for_model(keys.pop("model_type"), **keys)), sequence_length=32
        )


def test_needs_are_read_from_the_model():
    assert needs() == replace(PLAIN, head_dim=8)
    assert needs(model_type="mistral", sliding_window=16).window == 16
    assert needs(model_type="mistral", sliding_window=4096).window is None, "no window where sequences are shorter"
    assert needs(model_type="qwen2", sliding_window=16, use_sliding_window=False).window is None
    gemma = needs(model_type="gemma2", head_dim=8, sliding_window=16)
    assert gemma.softcap and gemma.window == 16
    assert needs(attention_dropout=0.1).dropout
