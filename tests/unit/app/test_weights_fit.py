"""Config and index say whether a model's weights load, before hosts are paid for: nothing else is fetched."""

import json

import pytest
from fakes.model_hub import model_hub

from muster.app.planning.model_shape import weights_problems
from muster.config.spec import RunSpec
from muster.core.errors import BackendError

pytest.importorskip("transformers")
pytestmark = pytest.mark.loads("muster.train.fits")
CONFIG = {
    "model_type": "mixtral", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1,
}  # fmt: skip
LAYER = ("input_layernorm", "post_attention_layernorm", *(f"self_attn.{kind}_proj" for kind in "qkvo"))
EXPERTS = ("block_sparse_moe.gate", *(f"block_sparse_moe.experts.{n}.w{k}" for n in range(2) for k in (1, 2, 3)))
NAMES = [
    *(f"{name}.weight" for name in ("model.embed_tokens", "model.norm", "lm_head")),
    *(f"model.layers.0.{name}.weight" for name in (*LAYER, *EXPERTS)),
]


def spec(source):
    return RunSpec.model_validate(
        {"name": "r", "model": {"source": source}, "data": {"sources": [{"type": "random", "rows": 8}]}}, strict=False
    )


def index(names):
    return json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}).encode()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with model_hub() as hub:
        files = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in (("ENDPOINT", hub.url), ("HUGGINGFACE_CO_URL_TEMPLATE", files)):
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        yield hub


def repository(names, **config):
    return {"config.json": json.dumps({**CONFIG, **config}).encode(), "model.safetensors.index.json": index(names)}


def test_published_names_are_found_by_transformers_table(hub):
    hub.repos["org/right"] = repository(NAMES)
    assert weights_problems(spec("org/right")) == []
    hub.repos["org/wrong"] = repository([*NAMES[:-1], "model.layers.0.block_sparse_moe.experts.1.w4.weight"])
    [problem] = weights_problems(spec("org/wrong"))
    assert problem.key == "model.source" and "w4.weight, which MixtralForCausalLM does not have" in problem.message
    assert problem.message.startswith("org/wrong ")
    assert not any(name in asked for asked in hub.asked for name in ("00001", "tokenizer"))


def test_the_header_of_one_file_is_read(hub, tmp_path):
    import torch
    from safetensors.torch import save_file

    save_file({name: torch.zeros(1) for name in NAMES if name != "model.norm.weight"}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    [problem] = weights_problems(spec(str(tmp_path)))
    assert problem.message.startswith(f"{tmp_path} lacks model.norm.weight")


def test_what_is_not_known_here_is_left_to_the_hosts(hub, monkeypatch):
    def unreachable(*_):
        raise BackendError("the hub cannot be reached")

    monkeypatch.setattr("muster.data.hub.fetch_model_files", unreachable)
    assert weights_problems(spec("org/right")) == []
    assert weights_problems(spec("gs://bucket/model")) == []
