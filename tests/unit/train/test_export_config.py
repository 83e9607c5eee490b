"""config.json of an export, read with the names of transformers 4 and by the installed transformers."""

import json
from types import SimpleNamespace

import pytest
import torch
from fakes.hub_tokenizer import make_hub_tokenizer
from fakes.small_model import spec_of
from transformers import AutoConfig

from muster.data.prepare import stop_ids_of
from muster.data.tokenizer import Encoder, find_template, install_template
from muster.train.export.config_files import copy_tokenizer, with_old_names, write_config, write_generation_config
from muster.train.export.verification import different_ids, training_ids

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 512}
#: The rope keys of a base as the hub has it, and as transformers 4 saves it.
BASES = {
    "qwen3": {"rope_theta": 1e6, "rope_scaling": None},
    "llama": {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}},
    "phi3": {"rope_theta": 2e4, "rope_scaling": LONG, "original_max_position_embeddings": 64, "pad_token_id": 0},
    "olmo2": {"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "glm4": {"rope_theta": 2e4, "partial_rotary_factor": 0.25},
    "gpt_neox": {"rotary_emb_base": 20_000, "rotary_pct": 0.5},
}


def sources_of(base, config, tokenizer=None, template=None, stops=()):
    spec = spec_of(None, source=str(base))
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"chat_template": template})})
    folder = SimpleNamespace(path=base)
    return SimpleNamespace(spec=spec, config=config, model=object(), folder=folder, tokenizer=tokenizer, stop_ids=stops)


def written(base, tmp_path, dtype=torch.bfloat16):
    """config.json of an export of a model of ``base``, and what transformers read of the base and of it."""
    source, folder = tmp_path / "base", tmp_path / "out"
    for each in (source, folder):
        each.mkdir()
    (source / "config.json").write_text(json.dumps(base))
    config = AutoConfig.from_pretrained(source)
    read = json.loads(json.dumps(config.get_text_config().rope_parameters))
    write_config(folder, sources_of(source, config), dtype)
    return json.loads((folder / "config.json").read_text()), read, AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("kind", BASES)
def test_one_set_of_rope_parameters_is_where_transformers_4_looks(kind, tmp_path):
    out, read, again = written({"model_type": kind, **SMALL, **BASES[kind]}, tmp_path)
    assert {key: out[key] for key in BASES[kind]} == BASES[kind]
    assert out["rope_parameters"] == read == again.rope_parameters and again.dtype == torch.bfloat16
    assert out["torch_dtype"] == out["dtype"] == "bfloat16"


def test_a_base_that_transformers_5_saved(tmp_path):
    rope = {"rope_theta": 5e5, **LLAMA3, "original_max_position_embeddings": 64}
    out, read, again = written({"model_type": "llama", **SMALL, "rope_parameters": rope}, tmp_path)
    assert out["rope_theta"] == 5e5
    assert out["rope_scaling"] == {key: value for key, value in rope.items() if key != "rope_theta"}
    assert read == again.rope_parameters == rope


def test_sets_by_kind_of_layer_have_no_form_at_the_top(tmp_path):
    """Gemma 3: transformers 4 has other names for them, and a set at the top would be taken for all layers."""
    base = {"model_type": "gemma3_text", **SMALL, "rope_theta": 2e6, "rope_local_base_freq": 2e4}
    out, read, again = written(base, tmp_path)
    assert set(read) == {"full_attention", "sliding_attention"} and out["rope_parameters"] == read
    assert not {"rope_theta", "rope_scaling", "rope_local_base_freq"} & out.keys()
    assert again.rope_parameters == read


def test_a_section_for_text_has_its_own(tmp_path):
    text = {"model_type": "qwen2", **SMALL, "rope_theta": 3e5}
    base = {"model_type": "llava", "text_config": text, "vision_config": {"model_type": "clip_vision_model"}}
    out, _, _ = written(base, tmp_path)
    assert out["text_config"]["rope_theta"] == 3e5 and "rope_theta" not in out


@pytest.mark.parametrize(("stops", "named"), [((7, 1), [7, 1]), ((7,), 7), ((1,), 1)])
def test_generation_ends_at_what_the_data_taught(stops, named, tmp_path):
    base, folder = tmp_path / "base", tmp_path / "out"
    base.mkdir()
    folder.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL, "eos_token_id": 1}))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "top_k": 7}))
    sources = sources_of(base, AutoConfig.from_pretrained(base), tmp_path / "none", stops=stops)
    write_config(folder, sources, torch.float32)
    write_generation_config(folder, sources)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == generation["eos_token_id"] == named
    assert generation["top_k"] == 7


def test_the_stop_tokens_of_data_outlive_it(tmp_path):
    assert stop_ids_of(tmp_path) == ()
    (tmp_path / "data.json").write_text(json.dumps({"folder": "/gone", "stop_ids": [7, 1]}))
    assert stop_ids_of(tmp_path) == (7, 1)


def test_a_part_that_is_not_there_stays_none(tmp_path):
    """An empty section would be read as one of default size."""
    assert with_old_names({"vision_config": None}, {}) == {"vision_config": None}


@pytest.mark.parametrize("before, after", [(1, "{end}"), ([1, 5], ["{end}", 1, 5]), ([5], "{end}")])
def test_generation_ends_where_a_turn_does_and_where_a_base_with_several_ends_did(before, after, tmp_path):
    base, folder = tmp_path / "base", tmp_path / "out"
    run = make_hub_tokenizer(tmp_path / "run", "PreTrainedTokenizerFast")
    install_template(run, find_template("chatml"))
    end = Encoder(run).eos_id
    after = [end if each == "{end}" else each for each in after] if isinstance(after, list) else end
    base.mkdir()
    folder.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL, "eos_token_id": 1}))
    generation = {"eos_token_id": before, "temperature": 0.5, "do_sample": True}
    (base / "generation_config.json").write_text(json.dumps(generation))
    sources = sources_of(base, AutoConfig.from_pretrained(base), run, "chatml")
    write_config(folder, sources, torch.float32)
    write_generation_config(folder, sources)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == generation["eos_token_id"] == after
    assert generation["temperature"] == 0.5


def test_a_class_that_cuts_otherwise_than_the_file_is_not_exported(tmp_path):
    """Llama 2's way: tokenizer.json puts a blank before every text, transformers 5 only before the first."""
    base = make_hub_tokenizer(tmp_path / "base", "LlamaTokenizer")
    file = json.loads((base / "tokenizer.json").read_text())
    blank = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, blank]}
    (base / "tokenizer.json").write_text(json.dumps({**file, "normalizer": prepend, "pre_tokenizer": None}))
    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({**config, "legacy": False}))
    install_template(base, find_template("chatml"))
    assert "has the ids" in different_ids(base, training_ids(base, None))
    (tmp_path / "out").mkdir()
    copy_tokenizer(base, tmp_path / "out")
    assert different_ids(tmp_path / "out", training_ids(base, None)) is None


@pytest.mark.parametrize("name, written", [("TokenizersBackend", "PreTrainedTokenizerFast"), ("Qwen2Tokenizer",) * 2])
def test_the_class_is_one_that_transformers_4_has(name, written, tmp_path):
    base = make_hub_tokenizer(tmp_path / "base", "Qwen2Tokenizer")
    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": name}))
    (tmp_path / "out").mkdir()
    copy_tokenizer(base, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["tokenizer_class"] == written
