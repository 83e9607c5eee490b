"""Safetensors folders: good ones give their values, bad ones one clear line."""

import json
import os

import pytest
import torch
from fakes.small_model import LLAMA, build, spec_of, whole
from safetensors.torch import load_file, save_file

from muster.core.errors import CheckpointError
from muster.train.model.pretrained import open_folder

pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture
def folder(tmp_path):
    """A saved Llama: bfloat16 file, tied head."""
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = {**LLAMA, "vocab_size": 50, "tie_word_embeddings": True}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(keys.pop("model_type"), **keys), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    return tmp_path


def load(folder, **model):
    return build(spec_of(None, source=str(folder), **model))


def values(built):
    return {name: whole(parameter) for name, parameter in built.module.model.named_parameters()}


def rewrite(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path)


def test_values_are_those_of_the_file_in_the_master_dtype(folder):
    held = load_file(folder / "model.safetensors")
    found = values(load(folder))
    assert held.keys() == found.keys()
    for name, value in found.items():
        assert value.dtype == torch.float32 and torch.equal(value, held[name].float()), name


def test_tied_embeddings_stay_one_parameter(folder):
    model = load(folder).module.model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_several_files_with_an_index(folder):
    expected = values(load(folder))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for part, chosen in enumerate((names[:5], names[5:])):
        save_file({name: tensors[name] for name in chosen}, folder / f"part-{part}.safetensors")
        weight_map |= dict.fromkeys(chosen, f"part-{part}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = values(load(folder))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"part-1.safetensors is missing"):
        load(folder)


def test_files_of_the_inner_model_without_its_prefix(folder):
    expected = values(load(folder))

    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite(folder, strip)
    found = values(load(folder))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def truncate(folder):
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def scramble(folder):
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0no json at all.." + b"\0" * 64)


def empty(folder):
    (folder / "model.safetensors").write_bytes(b"")


def absent(folder):
    (folder / "model.safetensors").unlink()


def index_of_nonsense(folder):
    (folder / "model.safetensors.index.json").write_text("{nonsense")


def index_without_map(folder):
    (folder / "model.safetensors.index.json").write_text("[]")


def lacking(folder):
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def surplus(folder):
    rewrite(folder, lambda tensors: tensors.update({"model.layers.7.mlp.up_proj.weight": torch.zeros(2)}))


def misshapen(folder):
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))


@pytest.mark.parametrize(
    ("damage", "kind", "said"),
    [
        (truncate, CheckpointError, r"model.safetensors is corrupt or truncated"),
        (scramble, CheckpointError, r"model.safetensors is corrupt or truncated"),
        (empty, CheckpointError, r"model.safetensors is corrupt or truncated"),
        (absent, CheckpointError, r"holds neither model.safetensors nor"),
        (index_of_nonsense, CheckpointError, r"index.json is unreadable"),
        (index_without_map, CheckpointError, r"index.json is unreadable"),
        (lacking, CheckpointError, r"lacks model.layers.1.mlp.up_proj.weight"),
        (surplus, CheckpointError, r"holds model.layers.7.mlp.up_proj.weight, which LlamaForCausalLM does not have"),
        (misshapen, CheckpointError, r"model.norm.weight has shape \[31\], the model's is \[32\]"),
    ],
)
def test_damage_is_one_clear_line(folder, damage, kind, said):
    damage(folder)
    with pytest.raises(kind, match=said) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_headers_alone_are_read_to_open_a_folder(folder):
    assert set(open_folder(folder).files) == set(load_file(folder / "model.safetensors"))
