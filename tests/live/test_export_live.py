"""Export: a Hugging Face folder that a fresh process loads, whole, merged and as an adapter."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fakes.hub_tokenizer import make_hub_tokenizer  # noqa: E402

from muster.checkpoint.saver import Saver  # noqa: E402
from muster.config.spec import RunSpec, TrainedTokenizer  # noqa: E402
from muster.core.errors import CheckpointError, UsageError  # noqa: E402
from muster.core.types import Layout  # noqa: E402
from muster.data.tokenizer import Encoder, find_template, install_template, train  # noqa: E402
from muster.storage.store import open_store  # noqa: E402
from muster.train.export import hf_folder as exporting  # noqa: E402
from muster.train.model import lora, weights  # noqa: E402
from muster.train.model.causal_lm import on_meta, read_config  # noqa: E402

pytestmark = pytest.mark.live
TINY = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
STORIES = Path(__file__).parents[2].parent / "shared" / "data" / "models" / "stories260k"


def run_spec(model, **data):
    sources = [{"type": "random", "rows": 8}]
    return RunSpec.model_validate({"name": "tiny", "model": model, "data": {"sources": sources, **data}}, strict=False)


def make_run(run_dir, model, *, change=0.02, chat_template=None, tokenizer=None):
    """A run's folder with a committed checkpoint of a model whose trained tensors differ from its start."""
    spec = run_spec(model, chat_template=chat_template)
    run_dir.mkdir(parents=True)
    vocabulary = 1
    if tokenizer is not None:
        Encoder(tokenizer).save(run_dir / "tokenizer")
        if chat_template is not None:
            install_template(run_dir / "tokenizer", find_template(chat_template))
        vocabulary = Encoder(run_dir / "tokenizer").vocab_size
    (run_dir / "resolved.json").write_text(spec.model_dump_json())
    source = Path(spec.model.source) if spec.model.source else None
    config = read_config(spec, source, vocabulary)
    made = on_meta(config, torch.float32)
    if spec.model.lora:
        lora.add_adapters(made, spec.model.lora, torch.float32, embeddings=spec.trains_embeddings)
    made.to_empty(device="cpu")
    made.tie_weights()
    weights.initialise(made, seed=0, device=torch.device("cpu"))
    lora.initialise(made, lora.adapter_names(made), seed=0, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    state = {}
    for name, parameter in made.named_parameters():
        if not parameter.requires_grad:
            continue
        noise = torch.randn(parameter.shape, generator=generator) * change
        state[f"model.{name}"] = parameter.detach() + noise
        state[f"optimizer.exp_avg.{name}"] = noise
    save(run_dir, 3, state)
    return state


def save(run_dir, step, state):
    saver = Saver(
        str(run_dir / "checkpoints"),
        run_id="r",
        attempt=0,
        layout=Layout(),
        keep_last=5,
        asynchronous=False,
        group=None,
        store=open_store(),
        on_event=lambda kind, **detail: None,
    )
    saver.save(step, state, {})


def program(*argv):
    done = subprocess.run(
        [sys.executable, "-P", "-m", "muster.train.export.hf_folder", *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_a_whole_model(tmp_path):
    state = make_run(tmp_path / "run", {"config": TINY, "dtype": "float32"})
    code, found = program("--run-dir", tmp_path / "run", "--out", tmp_path / "out")
    assert code == 0, found
    assert found["step"] == 3 and found["kind"] == "model"
    assert found["checked"]["relative_difference"] < 1e-5
    assert found["checked"]["agreement"] == 1.0

    from safetensors.torch import load_file

    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {f"model.{name}" for name in stored} == {name for name in state if name.startswith("model.")}
    assert all(torch.equal(tensor, state[f"model.{name}"]) for name, tensor in stored.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    mask = os.umask(0)
    os.umask(mask)
    for path in (tmp_path / "out").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask, path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_mixture_whose_buffer_follows_the_load_of_its_experts(tmp_path):
    keys = {
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    config = {**TINY, "model_type": "deepseek_v3", **keys, **heads, "num_key_value_heads": 4, "num_experts_per_tok": 2}
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    state = make_run(tmp_path / "run", {"config": config, "dtype": "float32"})
    state[f"model.{bias}"] = torch.tensor([0.1, -0.1, 0.3, -0.3])
    save(tmp_path / "run", 4, state)
    code, found = program("--run-dir", tmp_path / "run", "--out", tmp_path / "out")
    assert code == 0, found
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[bias], state[f"model.{bias}"])


@pytest.mark.parametrize("dora", [False, True])
def test_lora_merged_and_as_an_adapter(tmp_path, monkeypatch, dora):
    pytest.importorskip("peft")
    if STORIES.is_dir():
        base = STORIES
    else:
        from transformers import AutoConfig, AutoModelForCausalLM

        base = tmp_path / "base"
        keys = dict(TINY)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(keys.pop("model_type"), **keys)).save_pretrained(base)
    make_run(
        tmp_path / "run", {"source": str(base), "dtype": "float32", "lora": {"rank": 4, "alpha": 8.0, "dora": dora}}
    )
    found = exporting.export(tmp_path / "run", tmp_path / "merged")
    assert found.kind == "merged"
    assert found.checked["relative_difference"] < 1e-4
    assert found.checked["missing"] == found.checked["unexpected"] == []
    monkeypatch.setattr(exporting, "MAX_FILE_BYTES", 2_000)  # of a model: peft reads no adapter in several files
    adapter = exporting.export(tmp_path / "run", tmp_path / "adapter", merge_lora=False)
    assert adapter.kind == "adapter" and not adapter.note
    assert adapter.checked["relative_difference"] < 1e-5
    assert adapter.checked["effect"] > 0.01  # without the adapter the logits are others
    assert adapter.bytes < found.bytes
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base) and settings["use_dora"] == dora
    targets = settings["target_modules"]
    assert isinstance(targets, list) and targets == sorted(targets) and any("q_proj" in name for name in targets)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_adapters_of_experts_merged_and_as_an_adapter(tmp_path, family):
    """Each is reloaded by transformers, and peft, in a process of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = {
        **TINY, "model_type": family, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "head_dim": 8, "pad_token_id": 0,
    }  # fmt: skip
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(keys.pop("model_type"), **keys)).save_pretrained(base)
    settings = {"rank": 4, "alpha": 8.0, "rslora": True}
    state = make_run(tmp_path / "run", {"source": str(base), "dtype": "float32", "lora": settings})
    assert any(".experts.lora_B." in name for name in state) and not any(".gate." in name for name in state)
    merged = exporting.export(tmp_path / "run", tmp_path / "merged")
    assert merged.checked["relative_difference"] < 1e-4
    adapter = exporting.export(tmp_path / "run", tmp_path / "adapter", merge_lora=False)
    assert adapter.checked["relative_difference"] < 1e-4 and adapter.checked["effect"] > 0.01
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["use_rslora"]


@pytest.mark.parametrize("tied", [False, True])
def test_lora_with_tokens_that_a_chat_template_added(tmp_path, tied):
    """Merged and as an adapter that peft loads by itself; generation ends where a turn ends."""
    peft = pytest.importorskip("peft")
    from transformers import AutoConfig, AutoModelForCausalLM

    base, run_dir = tmp_path / "base", tmp_path / "run"
    requested = TrainedTokenizer(kind="bpe", vocab_size=260)
    size = train(lambda: ["some words"], requested, base).vocab_size
    keys = {**TINY, "vocab_size": size, "tie_word_embeddings": tied}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(keys.pop("model_type"), **keys)).save_pretrained(base)
    (base / "README.md").write_text("---\nlanguage: [en]\nlicense: apache-2.0\n---\n# A base\n")
    (base / "LICENSE").write_text("Apache License\n")
    model = {"source": str(base), "dtype": "float32", "lora": {"rank": 4, "alpha": 8.0}}
    make_run(run_dir, model, chat_template="chatml", tokenizer=base)
    merged = exporting.export(run_dir, tmp_path / "merged")
    assert merged.checked["relative_difference"] < 1e-4
    ending = Encoder(run_dir / "tokenizer").fast.token_to_id("<|im_end|>")
    assert json.loads((tmp_path / "merged" / "generation_config.json").read_text())["eos_token_id"] == ending
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["vocab_size"] == size + 2
    adapter = exporting.export(run_dir, tmp_path / "adapter", merge_lora=False)
    assert adapter.checked["relative_difference"] < 1e-5
    assert adapter.lines()[-1] == adapter.note
    assert f"has {size + 2} tokens, its base {size}: load it by peft's AutoPeftModelForCausalLM" in adapter.note
    for folder, note in ((merged.folder, ""), (adapter.folder, adapter.note[1:])):
        assert (folder / "LICENSE").read_text() == "Apache License\n"
        card = (folder / "README.md").read_text()
        assert card.startswith('---\nlicense: "apache-2.0"\n---\n') and note in card
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert loaded.get_input_embeddings().weight.shape[0] == size + 2


@pytest.mark.parametrize("kind, name", [("qwen3", "Qwen2Tokenizer"), ("llama", "LlamaTokenizer")])
def test_a_chat_of_the_export_has_the_ids_of_training_and_ends(tmp_path, kind, name):
    """Of a base as the hub has it; once more of an export as the source; and the check can fail."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from muster.core.clock import SystemShell
    from muster.train.export import verification
    from muster.train.export.sources import open_sources, read_spec, reference_model

    base = make_hub_tokenizer(tmp_path / "base", name)
    tokenizer = (base / "tokenizer_config.json").read_bytes()
    keys = {**TINY, "vocab_size": Encoder(base).vocab_size, "model_type": kind}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(keys.pop("model_type"), **keys)).save_pretrained(base)
    make_run(tmp_path / "run", {"source": str(base), "dtype": "float32"}, chat_template="llama3", tokenizer=base)
    first = exporting.export(tmp_path / "run", tmp_path / "first").folder
    make_run(tmp_path / "next", {"source": str(first), "dtype": "float32"}, tokenizer=first)
    second = exporting.export(tmp_path / "next", tmp_path / "second").folder
    end = Encoder(tmp_path / "run" / "tokenizer").eos_id
    for folder in (first, second):
        for file in ("config.json", "generation_config.json"):
            assert json.loads((folder / file).read_text())["eos_token_id"] == end

    manifest = exporting.choose_checkpoint(read_spec(tmp_path / "run"), tmp_path / "run", None)
    reader = exporting.ShardReader(exporting.open_checkpoint(manifest))
    reference = reference_model(open_sources(read_spec(tmp_path / "run"), tmp_path / "run", reader))
    ids = verification.training_ids(tmp_path / "run" / "tokenizer", end)
    arguments = {"base": None, "dtype": "float32", "shell": SystemShell(), "ids": ids}
    generation = json.loads((first / "generation_config.json").read_text())
    (first / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": 1}))
    with pytest.raises(CheckpointError, match=f"generation ends at 1, not at {end}"):
        verification.verify(first, reference, **arguments)
    (first / "tokenizer_config.json").write_bytes(tokenizer)
    with pytest.raises(CheckpointError, match="tokenizer is not that of training"):
        verification.verify(first, reference, **arguments)


def test_an_adapter_that_does_nothing_is_refused(tmp_path):
    pytest.importorskip("peft")
    model = {"config": TINY, "dtype": "float32", "lora": {"rank": 4}}
    make_run(tmp_path / "run", model, change=0.0)
    with pytest.raises(CheckpointError, match="zero"):
        exporting.export(tmp_path / "run", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    # The same base, random and drawn again from the seed, with an adapter that does something.
    make_run(tmp_path / "trained", model)
    assert exporting.export(tmp_path / "trained", tmp_path / "out").checked["relative_difference"] < 1e-4
    with pytest.raises(UsageError, match="not stored anywhere"):
        exporting.export(tmp_path / "trained", tmp_path / "adapter", merge_lora=False)


def test_many_files_and_half_precision(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "MAX_FILE_BYTES", 20_000)
    make_run(tmp_path / "run", {"config": {**TINY, "tie_word_embeddings": True}, "dtype": "bfloat16"})
    found = exporting.export(tmp_path / "run")
    assert found.folder == tmp_path / "run" / "exports" / "step-00000003-model"
    assert len(list(found.folder.glob("model-*-of-*.safetensors"))) > 1
    index = json.loads((found.folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == found.bytes
    assert "lm_head.weight" not in index["weight_map"]
    assert 0 < found.checked["relative_difference"] < 0.05


def test_what_cannot_be_exported(tmp_path):
    with pytest.raises(UsageError, match=r"resolved\.json"):
        exporting.export(tmp_path / "none")
    state = make_run(tmp_path / "run", {"config": TINY, "dtype": "float32"})
    with pytest.raises(CheckpointError, match="no committed checkpoint of step 9") as caught:
        exporting.export(tmp_path / "run", tmp_path / "out", checkpoint=9)
    assert "3" in caught.value.hint
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(UsageError, match="already exists"):
        exporting.export(tmp_path / "run", tmp_path / "taken")
    save(tmp_path / "run", 5, {**state, "model.strange.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match="strange"):
        exporting.export(tmp_path / "run", tmp_path / "out", verify=False)
    lacking = {name: tensor for name, tensor in state.items() if "layers.1.mlp.up_proj" not in name}
    save(tmp_path / "run", 6, lacking)
    with pytest.raises(CheckpointError, match="up_proj"):
        exporting.export(tmp_path / "run", tmp_path / "out", verify=False)
    shard = next((tmp_path / "run" / "checkpoints" / "step-00000003.a0").glob("*.shard"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    code, found = program("--run-dir", tmp_path / "run", "--out", tmp_path / "out", "--step", "3")
    assert code == 1 and "checksum" in found["error"]
    assert not (tmp_path / "out").exists()


def test_the_check_can_fail(tmp_path):
    """A folder whose weights were changed after the export is caught by the same comparison."""
    from safetensors.torch import load_file, save_file

    from muster.core.clock import SystemShell
    from muster.train.export import verification
    from muster.train.export.sources import open_sources, read_spec, reference_model

    make_run(tmp_path / "run", {"config": TINY, "dtype": "float32"})
    folder = exporting.export(tmp_path / "run", tmp_path / "out", verify=False).folder
    spec = read_spec(tmp_path / "run")
    manifest = exporting.choose_checkpoint(spec, tmp_path / "run", None)
    reader = exporting.ShardReader(exporting.open_checkpoint(manifest))
    reference = reference_model(open_sources(spec, tmp_path / "run", reader))
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    stored[name] = stored[name] + 0.01
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="differ from the training state"):
        verification.verify(folder, reference, base=None, dtype="float32", shell=SystemShell(), ids=None)
    del stored[name]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="missing"):
        verification.verify(folder, reference, base=None, dtype="float32", shell=SystemShell(), ids=None)
