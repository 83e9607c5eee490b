"""Which kernel is chosen, and that every refusal gives its reason."""

import inspect
from dataclasses import replace

import pytest
import torch
from fakes.small_model import LLAMA

from muster.core.errors import RunFailed, UsageError
from muster.train.model import attention
from muster.train.model.attention import choose_attention, newer_flash
from muster.train.model.attention_needs import Needs, needs_of

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
        (PLAIN, torch.float32, "flex"),
        (replace(PLAIN, head_dim=512), torch.bfloat16, "flex"),
        (replace(PLAIN, softcap=True), torch.bfloat16, "flex"),
        (replace(PLAIN, flex=False), torch.float32, "sdpa"),
    ],
)
def test_auto_on_cuda_without_flash_attention_packages(needs, dtype, kernel):
    chosen = choose_attention("auto", needs, CUDA, dtype)
    assert chosen.kernel == kernel
    assert "flash_attn is not installed" in chosen.reason


@pytest.mark.parametrize("needs", [PLAIN, replace(PLAIN, window=64)])
def test_auto_on_cuda_takes_torchs_own_kernel_whatever_is_installed(needs, monkeypatch):
    monkeypatch.setattr(attention, "installed", lambda module: True)
    assert choose_attention("auto", needs, CUDA, torch.bfloat16).kernel == "varlen"
    capped = choose_attention("auto", replace(needs, softcap=True), CUDA, torch.bfloat16)
    assert capped.kernel == "flash_attention_2" and "caps its attention scores" in capped.reason


@pytest.mark.parametrize(
    ("major", "there", "needs", "deterministic", "flash"),
    [
        (9, ["flash_attn_interface", "flash_attn.cute"], PLAIN, True, "FA3"),
        (9, ["flash_attn.cute"], PLAIN, False, None),
        (10, ["flash_attn_interface", "flash_attn.cute"], PLAIN, False, "FA4"),
        (10, ["flash_attn.cute"], PLAIN, True, None),
        (10, ["flash_attn.cute"], replace(PLAIN, window=64), False, None),
        (10, ["flash_attn.cute"], replace(PLAIN, head_dim=192), False, None),
        (8, ["flash_attn_interface", "flash_attn.cute"], PLAIN, False, None),
        (9, [], PLAIN, False, None),
    ],
)
def test_the_flash_attention_that_torch_is_switched_to(monkeypatch, major, there, needs, deterministic, flash):
    monkeypatch.setattr(attention, "installed", there.__contains__)
    assert newer_flash(needs, major=major, deterministic=deterministic) == flash


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(attention, "installed", lambda module: module != "flash_attn")


def test_the_switch_is_torchs_own_and_said(hopper, monkeypatch):
    given = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", given.append)
    chosen = choose_attention("auto", PLAIN, CUDA, torch.bfloat16)
    assert given == ["FA3"] and chosen.name == "varlen with FA3" and str(chosen).startswith("varlen with FA3 (")
    assert choose_attention("varlen", PLAIN, CUDA, torch.bfloat16).flash is None, "what is asked for stays as it is"
    assert given == ["FA3"]


def test_a_package_that_torch_cannot_switch_to_costs_only_speed(hopper, capsys):
    chosen = choose_attention("auto", PLAIN, CUDA, torch.bfloat16)  # no such module is there
    assert chosen.kernel == "varlen" and chosen.flash is None
    assert "FA3 cannot be: No module named 'flash_attn_interface'" in capsys.readouterr().err


def older_varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    """As torch 2.11 has it: heads that share keys need no word."""
    return torch.zeros_like(query)


@pytest.mark.parametrize("key_heads", [2, 4])
def test_varlen_attention_of_a_torch_that_knows_no_groups(monkeypatch, key_heads):
    import torch.nn.attention.varlen

    attention._varlen_names_groups.cache_clear()
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", older_varlen_attn)
    query, key = torch.ones(1, 4, 6, 8), torch.ones(1, key_heads, 6, 8)
    bounds = torch.tensor([0, 6], dtype=torch.int32)
    output, _ = attention._varlen(None, query, key, key, None, cu_seq_lens_q=bounds, max_length_q=6)
    assert output.shape == (1, 6, 4, 8)
    attention._varlen_names_groups.cache_clear()
    monkeypatch.undo()
    knows = "enable_gqa" in inspect.signature(torch.nn.attention.varlen.varlen_attn).parameters  # torch 2.11 does not
    assert attention._grouped(4, 2) == ({"enable_gqa": True} if knows else {})
    assert attention._grouped(4, 4) == ({"enable_gqa": False} if knows else {})


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


@pytest.mark.parametrize(
    "asked", [{"dropout": 0.1}, {"softcap": 30.0}, {"s_aux": torch.zeros(4)}, {"mask": torch.ones(1)}]
)
def test_a_kernel_drops_nothing_in_silence(asked):
    mask = asked.pop("mask", None)
    query = torch.zeros(1, 4, 6, 8)
    bounds = torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(RunFailed, match="attention kernel document would drop"):
        attention._document(None, query, query, query, mask, cu_seq_lens_q=bounds, **asked)
    attention._document(None, query, query, query, None, cu_seq_lens_q=bounds, dropout=0.0, softcap=None, s_aux=None)
