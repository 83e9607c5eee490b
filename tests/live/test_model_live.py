"""FSDP2 on 1, 2 and 4 gloo ranks gives the loss and gradients of a plain transformers model on one process.

The reference knows nothing of packing, sharding or chunks: it runs every document by itself through the
model as transformers builds it, with eager attention and plain cross-entropy.
"""

from __future__ import annotations

import math
import multiprocessing
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from model_ranks import MICRO_BATCHES, MIXTRAL, QWEN, main, micro_batch, spec_of, supervised_tokens
from safetensors.torch import load_file

pytestmark = pytest.mark.live

STORIES = Path(__file__).parents[3] / "shared" / "data" / "models" / "stories260k"
LORA = {"lora": {"rank": 4, "alpha": 8.0}}
CASES: dict[str, dict] = {
    "one": {"layout": {}, "generate": True},
    "one-unit": {"layout": {}, "whole_below": 10**9},
    "one-bf16": {"layout": {}, "model": {"dtype": "bfloat16"}},
    "one-lora": {"layout": {}, "model": LORA},
    "one-qwen": {"layout": {}, "config": QWEN},
    "two": {"layout": {"dp_shard": 2}, "generate": True},
    "two-unit": {"layout": {"dp_shard": 2}, "whole_below": 10**9},
    "two-selective": {"layout": {"dp_shard": 2}, "training": {"activation_checkpointing": "selective"}},
    "two-full": {"layout": {"dp_shard": 2}, "training": {"activation_checkpointing": "full"}},
    "two-compiled": {"layout": {"dp_shard": 2}, "training": {"compile": True}, "generate": True},
    "two-lock-step": {"layout": {"dp_shard": 2}, "generate": "in lock-step"},
    "two-sdpa": {"layout": {"dp_shard": 2}, "model": {"attention": "sdpa"}},
    "two-bf16": {"layout": {"dp_shard": 2}, "model": {"dtype": "bfloat16"}},
    "two-lora": {"layout": {"dp_shard": 2}, "model": LORA},
    "two-tp": {"layout": {"tp": 2}, "generate": True},
    "two-tp-qwen": {"layout": {"tp": 2}, "config": QWEN},
    "two-tp-full": {"layout": {"tp": 2}, "training": {"activation_checkpointing": "full"}},
    "two-tp-compiled": {"layout": {"tp": 2}, "training": {"compile": True}, "generate": True},
    "two-tp-lora": {"layout": {"tp": 2}, "model": LORA},
    "two-cp-qwen": {"layout": {"cp": 2}, "config": QWEN},
    "four-tp": {"layout": {"dp_shard": 2, "tp": 2}},
    "four-tp-cp": {"layout": {"tp": 2, "cp": 2}},
}
MIXTURES: dict[str, dict] = {
    f"{name}-mixtral{kind}": {"layout": layout, "config": MIXTRAL, **more}
    for kind, more in (("", {}), ("-lora", {"model": LORA}))
    for name, layout in (("one", {}), ("two", {"dp_shard": 2}), ("three", {"dp_shard": 3}))
}
MIXTURES["two-mixtral-full"] = {**MIXTURES["two-mixtral"], "training": {"activation_checkpointing": "full"}}
MIXTURES["two-mixtral-selective"] = {**MIXTURES["two-mixtral"], "training": {"activation_checkpointing": "selective"}}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict[str, torch.Tensor]]:
    """Every case run once; all cases of a world size share their ranks, and imports are done once."""
    folder = tmp_path_factory.mktemp("model")
    cases = CASES | MIXTURES
    if STORIES.is_dir():
        source = {"model": {"source": str(STORIES)}}
        cases |= {"stories-one": {"layout": {}, **source}, "stories-two": {"layout": {"dp_shard": 2}, **source}}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["model_ranks", "transformers.models.llama.modeling_llama", "peft"])
    for world in sorted({math.prod(case["layout"].values()) for case in cases.values()}):
        mine = {name: case for name, case in cases.items() if math.prod(case["layout"].values()) == world}
        store = str(folder / f"store-{world}")
        ranks = [context.Process(target=main, args=(rank, world, store, mine, str(folder))) for rank in range(world)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(240)
        codes = [rank.exitcode for rank in ranks]
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
        assert codes == [0] * world, f"ranks of world {world} ended with {codes}"
    return {name: load_file(folder / f"{name}.safetensors") for name in cases}


def reference(case: dict, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Loss and gradients by plain transformers, document by document."""
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = spec_of(case)
    if spec.model.source:
        config = AutoConfig.from_pretrained(spec.model.source)
    else:
        keys = {"vocab_size": 96, **spec.model.config}
        config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    if spec.model.lora:
        from peft import LoraConfig, inject_adapter_in_model

        given = spec.model.lora
        inject_adapter_in_model(
            LoraConfig(r=given.rank, lora_alpha=given.alpha, target_modules="all-linear", task_type="CAUSAL_LM"), model
        )
    missing, unexpected = model.load_state_dict(parameters, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    total = 0.0
    scale = 1.0 / supervised_tokens()
    for index in range(MICRO_BATCHES):
        batch = micro_batch(index)
        bounds = batch.cu_seqlens.tolist()
        ids, labels = batch.input_ids.flatten(), batch.labels.flatten()
        for start, end in pairwise(bounds):
            logits = model(input_ids=ids[None, start:end], use_cache=False).logits[0]
            loss = scale * torch.nn.functional.cross_entropy(logits, labels[start:end], reduction="sum")
            loss.backward()
            total += float(loss.detach())
    found = {f"gradient.{n}": p.grad for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    return {"loss": torch.tensor(total, dtype=torch.float64), **found}


@pytest.fixture(scope="module")
def references(results) -> dict[str, dict[str, torch.Tensor]]:
    """One for each distinct model, from the parameters that a single rank holds."""
    found = {}
    for name in ("one", "one-lora", "one-qwen", "stories-one"):
        if name in results:
            case = CASES.get(name) or {"model": {"source": str(STORIES)}}
            prefix = "parameter."
            held = {key.removeprefix(prefix): value for key, value in results[name].items() if key.startswith(prefix)}
            found[name] = reference(case, held)
    return found


def of_reference(name: str) -> str:
    kind = "lora" if "lora" in name else "qwen" if "qwen" in name else ""
    return "stories-one" if name.startswith("stories") else f"one-{kind}" if kind else "one"


@pytest.mark.parametrize("name", [*CASES, "stories-one", "stories-two"])
def test_loss_and_gradients_are_those_of_the_plain_model(name, results, references):
    if name not in results:
        pytest.skip(f"no {STORIES}")
    found, expected = results[name], references[of_reference(name)]
    half = "bf16" in name
    assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=2e-3 if half else 2e-6)
    gradients = {key for key in found if key.startswith("gradient.")}
    assert {key for key in expected if key.startswith("gradient.")} == gradients
    for key in sorted(gradients):
        largest = expected[key].abs().max()
        error = (found[key] - expected[key]).abs().max()
        assert largest > 0, key
        assert error <= (0.06 if half else 2e-5) * largest, f"{key}: {error:.3g} of {largest:.3g}"


@pytest.mark.parametrize("name", [name for name in MIXTURES if not name.startswith("one")])
def test_a_mixture_has_the_same_gradients_on_any_number_of_ranks(name, results):
    """Experts are cut along their second dimension, or along their first where ranks do not divide that. One rank's
    gradients are compared with transformers' in ``test_experts``."""
    expected, found = results["one-mixtral-lora" if "lora" in name else "one-mixtral"], results[name]
    assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=2e-6)
    gradients = [key for key in expected if key.startswith("gradient.")]
    assert any(".experts." in key for key in gradients)
    for key in gradients:
        largest = expected[key].abs().max()
        assert (found[key] - expected[key]).abs().max() <= 2e-5 * largest, key


@pytest.mark.parametrize("name", ["two", "two-lock-step", "two-tp", "two-compiled", "two-tp-compiled"])
def test_generation_under_fsdp_is_that_of_one_rank_and_leaves_no_trace(name, results):
    assert torch.equal(results[name]["generated"], results["one"]["generated"])
    assert results["one"]["loss_after_generation"] > 0
    assert torch.isclose(
        results[name]["loss_after_generation"], results["one"]["loss_after_generation"], rtol=1e-5, atol=0
    )


def test_recomputation_changes_no_bit(results):
    for name, plain in (("two-selective", "two"), ("two-full", "two"), ("two-tp-full", "two-tp")):
        for key, value in results[plain].items():
            if key.startswith("gradient.") or key == "loss":
                assert torch.equal(results[name][key], value), (name, key)


def test_one_graph_serves_all_layers_and_all_document_bounds(results):
    for name in ("two-compiled", "two-tp-compiled"):
        assert results[name]["graphs"].tolist() == [1, 0], "graphs, graph breaks"
    assert results["two"]["graphs"].tolist() == [0, 0]


def test_a_real_model_has_its_known_loss_on_a_real_text():
    """Weights, rotary positions, tied head and labels: the loss of transformers' own loading (uniform: 6.24)."""
    text = STORIES.parents[1] / "corpora" / "tiny_shakespeare.txt"
    if not text.is_file() or not STORIES.is_dir():
        pytest.skip(f"no {text} or no {STORIES}")
    import torch.distributed as dist
    from tokenizers import Tokenizer
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from muster.core.types import Layout
    from muster.train.data_feed.batch import make_batch
    from muster.train.distributed.device_mesh import make_meshes
    from muster.train.model.causal_lm import build_model
    from muster.train.model.loss import loss_sum

    cpu, length, rows = torch.device("cpu"), 256, 16
    tokens = Tokenizer.from_file(str(STORIES / "tokenizer.json")).encode(text.read_text()[:20_000]).ids
    ids = torch.tensor(tokens[: rows * length]).view(rows, length)
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    batch = make_batch(ids, labels, torch.arange(length).repeat(rows, 1), [length] * rows, cpu)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        spec = spec_of({"model": {"source": str(STORIES)}})
        built = build_model(spec, device=cpu, vocab_size=512, mesh=make_meshes(Layout(), "cpu"), seed=0)
        with torch.no_grad():
            loss = float(loss_sum(built.module, batch, chunk_tokens=512, scale=1.0 / batch.supervised))
    finally:
        dist.destroy_process_group()
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(STORIES)
        expected = float(torch.nn.functional.cross_entropy(plain(ids).logits.flatten(0, 1), labels.flatten()))
    assert loss == pytest.approx(expected, rel=1e-5)
    assert 3.0 < loss < 5.0
