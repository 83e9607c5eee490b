"""Stored layouts and the model's: the values are transformers' own, in whole and in any part, there and back."""

import json
import time
from pathlib import Path

import pytest
import torch
from fakes.small_model import LLAMA, spec_of
from safetensors.torch import load_file, save_file

from muster.core.errors import CheckpointError, UsageError
from muster.train.model import pretrained
from muster.train.model.causal_lm import on_meta, read_config
from muster.train.model.conversion import Fp8, Made, Mxfp4, plan_loading, plan_publishing

BASE = {key: value for key, value in LLAMA.items() if key != "model_type"} | {"vocab_size": 50, "pad_token_id": 0}
#: More experts than ten: ``experts.10`` must not come before ``experts.2``.
MIXTURE = {"num_local_experts": 12, "num_experts": 12, "n_routed_experts": 12, "num_experts_per_tok": 2}
LATENT = {
    **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    **{"num_key_value_heads": 4, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "first_k_dense_replace": 1,
}
FAMILIES = {
    "mixtral": MIXTURE,
    "qwen3_moe": {**MIXTURE, "moe_intermediate_size": 16, "decoder_sparse_step": 1, "head_dim": 8},
    "deepseek_v3": MIXTURE | LATENT,
    "gpt_oss": {**MIXTURE, "head_dim": 8},
    "gpt_neox": {},
    "olmo_hybrid": {
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 8},
        "linear_value_head_dim": 8,
    },
    "hrm_text": {"num_key_value_heads": 4, "head_dim": 8},
    "inkling2_text": MIXTURE | {"head_dim": 8, "moe_intermediate_size": 16},
}


def saved(folder, family, keys):
    """A folder that transformers wrote, and the model that it wrote."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**BASE, **keys}), dtype=torch.float32)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(folder)
    return model


def empty_model(folder):
    config = read_config(spec_of(None, source=str(folder)), folder, 1)
    return on_meta(config, torch.float32)


def ranges_of(shape):
    """The parts of three ranks, along each dimension."""
    for dim, size in enumerate(shape):
        step = -(-size // 3)
        for start in range(0, size, step):
            ranges = [slice(0, each) for each in shape]
            ranges[dim] = slice(start, min(size, start + step))
            yield tuple(ranges)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_loaded_in_parts_and_published_as_it_was(family, tmp_path):
    wanted = {name: value.detach() for name, value in saved(tmp_path, family, FAMILIES[family]).state_dict().items()}
    folder, model = pretrained.open_folder(tmp_path), empty_model(tmp_path)
    views = pretrained.found_views(model, folder)
    for name, value in wanted.items():
        assert views[name].shape == tuple(value.shape)
        for ranges in ranges_of(value.shape):
            part = torch.empty(value[ranges].shape)
            views[name].copy(ranges, part)
            assert torch.equal(part, value[ranges].float()), (name, ranges)
    named = {name for name, _ in (*model.named_parameters(), *model.named_buffers())} & wanted.keys()
    held = {name: Made(lambda value=wanted[name]: value, tuple(wanted[name].shape)) for name in named}
    stored = load_file(tmp_path / "model.safetensors")
    for loaded in ((), folder.files):
        published = plan_publishing(model, held, loaded)
        assert published.keys() == stored.keys()
        assert all(torch.equal(view.whole(), stored[name].float()) for name, view in published.items())


def test_names_of_a_model_of_128_experts_are_planned_in_a_second(tmp_path):
    keys = {"num_hidden_layers": 48, "num_experts": 128, "moe_intermediate_size": 16, "head_dim": 8}
    model = on_meta(read_config(spec_of({**BASE, **keys, "model_type": "qwen3_moe"}), None, 50), torch.float32)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    held = {name: Made(lambda: None, shape) for name, shape in shapes.items()}
    stored = dict(plan_publishing(model, held, ()))
    assert len(stored) == 18_867
    began = time.process_time()
    plan = plan_loading(model, stored, shapes)
    assert time.process_time() - began < 4, "1 s on an idle machine"
    assert plan.views.keys() == shapes.keys() and not plan.unknown


def test_experts_in_mxfp4_are_what_transformers_makes_of_them():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 5, 4, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 5, 4), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    view = Mxfp4(Made(lambda: blocks, tuple(blocks.shape)), Made(lambda: scales, tuple(scales.shape)))
    assert view.shape == tuple(expected.shape) == (3, 128, 5)
    for ranges in (*ranges_of(expected.shape), (slice(1, 2), slice(37, 101), slice(2, 4))):
        part = torch.empty(expected[ranges].shape)
        view.copy(ranges, part)
        assert torch.equal(part, expected[ranges]), ranges


@pytest.mark.parametrize(("shape", "blocks"), [((256, 384), (2, 3)), ((8, 12), (2, 3)), ((200, 300), (2, 3))])
def test_matrices_in_float8_are_multiplied_by_the_scales_of_their_blocks(shape, blocks):
    torch.manual_seed(0)
    weight, scales = torch.randn(shape).to(torch.float8_e4m3fn), torch.rand(blocks) + 0.5
    rows, columns = (
        torch.arange(size) // (128 if size > 100 else size // count) for size, count in zip(shape, blocks, strict=True)
    )
    expected = weight.float() * scales[rows][:, columns]
    view = Fp8(Made(lambda: weight, shape), Made(lambda: scales, blocks))
    for ranges in ranges_of(shape):
        part = torch.empty(expected[ranges].shape)
        view.copy(ranges, part)
        assert torch.equal(part, expected[ranges])


def test_a_folder_of_gpt_oss_in_mxfp4_is_loaded(tmp_path):
    model = saved(tmp_path, "gpt_oss", {**FAMILIES["gpt_oss"], "hidden_size": 32, "intermediate_size": 32})
    wanted, tensors = model.state_dict(), load_file(tmp_path / "model.safetensors")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 130, (experts, rows, columns // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wanted[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    loaded = empty_model(tmp_path).to_empty(device="cpu")
    pretrained.load(loaded, pretrained.open_folder(tmp_path))
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in wanted.items())
    assert not hasattr(loaded.config, "quantization_config"), "an export would name it"


def test_other_quantisations_are_refused_in_one_line(tmp_path):
    saved(tmp_path, "llama", {})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UsageError, match=r"model: weights quantised by gptq are not trained"):
        empty_model(tmp_path)


def test_an_expert_of_another_shape_is_an_error_and_not_repeated(tmp_path):
    saved(tmp_path, "mixtral", MIXTURE)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if ".experts.3.w2" in name)
    save_file({**tensors, name: tensors[name][:1].clone()}, path)
    model = empty_model(tmp_path).to_empty(device="cpu")
    with pytest.raises(CheckpointError, match=r"experts.3.w2.weight has shape \[1, 48\], unlike its neighbours"):
        pretrained.load(model, pretrained.open_folder(Path(tmp_path)))
