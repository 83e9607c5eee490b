"""Steps in JAX against the torch trainer's, from the same initial values on the same batches."""

from dataclasses import dataclass
from functools import cache, partial

import jax
import numpy as np
import pytest
import torch

from muster.config.spec import RunSpec
from muster.core.errors import UsageError
from muster.core.types import Layout
from muster.train.data_feed.batch import make_batch
from muster.train.distributed.device_mesh import make_meshes
from muster.train.distributed.reduce import FloatReducer, ReduceGroups
from muster.train.model.causal_lm import build_model
from muster.train.model.loss import loss_sum
from muster.train.optim.learning_rate import learning_rate
from muster.train.optim.optimizer import clip_scale, decays_weight, make_optimizer
from muster.train.state.training_state import TrainingState
from muster.train_jax.arrays import leaves_of, to_device, to_host, zeros_like
from muster.train_jax.batches import batch_arrays, check_rows, own_rows, rows_over_all, step_arrays
from muster.train_jax.components import decays_of, model_of
from muster.train_jax.engine import padded
from muster.train_jax.generate import complete
from muster.train_jax.host_model import build_host_model
from muster.train_jax.layout import mesh_of, split_dimensions
from muster.train_jax.model import row_losses
from muster.train_jax.step import Scalars, State, make_step

pytestmark = pytest.mark.usefixtures("world_of_one")
CPU = torch.device("cpu")
VOCABULARY, ROWS, LENGTH, ROUNDS = 61, 8, 48, 2  # a vocabulary that no number of chips divides
CHUNK = 24  # tokens of a chip: its rows are several chunks on 1, 2 and 8 chips


def spec_of(**model) -> RunSpec:
    return RunSpec.model_validate({
        "name": "steps",
        "model": {
            "config": {
                "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
            },
            "tokenizer": {"kind": "word"}, "dtype": "float32", **model,
        },
        "data": {"sources": [{"type": "text2sql", "level": 1}]},
        "training": {
            "steps": 50, "sequence_length": LENGTH, "global_batch_size": ROWS * ROUNDS, "micro_batch_size": ROWS,
            "loss_chunk_tokens": 96,
            "optimizer": {"learning_rate": 2e-3, "warmup_steps": 5, "weight_decay": 0.1},
        },
    })  # fmt: skip


def batches_of(step):
    """Packed documents of several lengths, some without a target, and none in the second document of a row."""
    numbers = np.random.default_rng(step)
    made = []
    for _ in range(ROUNDS):
        ids = torch.from_numpy(numbers.integers(0, VOCABULARY, (ROWS, LENGTH)))
        cut = int(numbers.integers(5, LENGTH - 5))
        labels = ids * 3 % VOCABULARY  # something that can be learned
        labels[:, cut - 3 : cut + 1] = -100
        positions = torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)]).repeat(ROWS, 1)
        made.append(make_batch(ids, labels, positions, [cut, LENGTH - cut] * ROWS, CPU))
    return made, sum(batch.supervised for batch in made)


@dataclass
class Course:
    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]


def by_torch(spec, steps, vocabulary=VOCABULARY) -> Course:
    mesh = make_meshes(Layout(dp_replicate=1, dp_shard=1, tp=1), "cpu")
    built = build_model(spec, device=CPU, vocab_size=vocabulary, mesh=mesh, seed=spec.training.seed)
    reducer = FloatReducer(built.module, ReduceGroups(), accumulate_locally=True)
    named = built.named_trainable()
    optimizer = make_optimizer(named, spec.training.optimizer, elementwise=False)
    losses, norms = [], []
    for step in range(1, steps + 1):
        batches, supervised = batches_of(step)
        reducer.begin(micro_batches=ROUNDS)
        for number, batch in enumerate(batches, start=1):
            reducer.before_forward(last=number == ROUNDS)
            loss = loss_sum(built.module, batch, chunk_tokens=96, scale=1.0 / supervised)
            loss.backward()
            reducer.add_loss(loss)
        total, norm, fault = reducer.finish()
        scale = clip_scale(norm, spec.training.optimizer.max_grad_norm)
        rate = learning_rate(spec.training.optimizer, step=step, total_steps=50)
        optimizer.step(step=step, learning_rate=rate, scale=scale, skip=fault)
        losses.append(float(total))
        norms.append(float(norm))
    return Course(losses, norms, TrainingState(named, optimizer).local_tensors())


def with_tp(spec, tp):
    return spec.model_copy(update={"parallelism": spec.parallelism.model_copy(update={"tp": tp})})


def by_jax(spec, steps, *, chips, slices=1, tp=1, then=None, spoil=None, vocabulary=VOCABULARY) -> Course:
    """``then``: tensor parallel of the second half of the steps, by way of the host's tensors."""
    spec = with_tp(spec, tp)
    mesh = mesh_of(jax.devices()[:chips], slices=slices, tp=tp)
    hosts = make_meshes(Layout(dp_replicate=1, dp_shard=1, tp=1), "cpu").shard
    host = build_host_model(spec, vocab_size=vocabulary, hosts=hosts, chips=chips // slices, seed=spec.training.seed)
    trained, frozen, settings = host.trained(), host.frozen(), spec.training.optimizer
    leaves = leaves_of(trained, mesh)
    arrays = to_device(leaves, trained)
    state = State(arrays, zeros_like(arrays), zeros_like(arrays))
    decays = decays_of(leaves, {name: decays_weight(value, settings) for name, value in trained.items()})
    apply = make_step(model_of(spec, host, mesh), settings, decays, chunk_tokens=CHUNK, state=state)
    fixed = to_device(leaves_of(frozen, mesh), frozen)
    losses, norms = [], []
    optimizer = make_optimizer(trained, settings, elementwise=False)
    on_host = (trained, optimizer.moments["exp_avg"], optimizer.moments["exp_avg_sq"])

    def to_hosts():
        for values, tensors in zip(state, on_host, strict=True):
            to_host(leaves, values, tensors)

    for step in range(1, steps + 1):
        if then is not None and step == steps // 2 + 1:
            to_hosts()
            mesh = mesh_of(jax.devices()[:chips], slices=slices, tp=then)
            leaves = leaves_of(trained, mesh)
            state = State(*(to_device(leaves, tensors) for tensors in on_host))
            apply = make_step(model_of(spec, host, mesh), settings, decays, chunk_tokens=CHUNK, state=state)
            fixed = to_device(leaves_of(frozen, mesh), frozen)
        batches, supervised = batches_of(step)
        rate = learning_rate(settings, step=step, total_steps=50)
        scale = spoil if spoil is not None else 1.0 / supervised
        scalars = Scalars.of(scale=scale, learning_rate=rate, step=step, settings=settings)
        state, (own, norm) = apply(state, fixed, step_arrays(batches, mesh), scalars)
        losses.append(float(own_rows(own).sum()))
        norms.append(float(norm))
    to_hosts()
    return Course(losses, norms, TrainingState(trained, optimizer).local_tensors())


def differ(found: Course, wanted: Course) -> tuple[float, float, float]:
    losses = max(abs(a - b) for a, b in zip(found.losses, wanted.losses, strict=True))
    norms = max(abs(a - b) / b for a, b in zip(found.norms, wanted.norms, strict=True))
    assert found.state.keys() == wanted.state.keys()
    values = max(float((found.state[name] - value).abs().max()) for name, value in wanted.state.items())
    return losses, norms, values


@cache
def fifty_steps_by_torch() -> Course:
    return by_torch(spec_of(), 50)


SLOW = {"marks": pytest.mark.slow}


@pytest.mark.parametrize(
    ("chips", "slices", "tp"),
    [
        (1, 1, 1), (8, 2, 1), (2, 1, 2), pytest.param(8, 2, 2, **SLOW), pytest.param(8, 1, 2, **SLOW),
        pytest.param(8, 1, 1, **SLOW), pytest.param(2, 1, 1, **SLOW), pytest.param(2, 2, 1, **SLOW),
    ],
)  # fmt: skip
def test_fifty_steps_are_the_torch_trainers(chips, slices, tp):
    wanted = fifty_steps_by_torch()
    assert wanted.losses[-1] < 0.8 * wanted.losses[0], "something is learned"
    losses, norms, values = differ(by_jax(spec_of(), 50, chips=chips, slices=slices, tp=tp), wanted)
    assert losses <= 1e-5 and norms <= 1e-3 and values <= 1e-3, (losses, norms, values)


def test_vocabulary_and_head_are_split_and_a_run_goes_on_without_tensor_parallel():
    spec = spec_of()
    config = {**spec.model.config, "tie_word_embeddings": False, "attention_bias": True}
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"config": config})})
    found = by_jax(spec, 8, chips=8, tp=2, then=1, vocabulary=64)
    assert {*found.state} >= {"model.lm_head.weight"}
    losses, norms, values = differ(found, by_torch(spec, 8, vocabulary=64))
    assert losses <= 1e-5 and norms <= 1e-3 and values <= 1e-3, (losses, norms, values)


def test_answers_are_the_same_with_tensor_parallel():
    answers = []
    for tp in (1, 2):
        mesh, spec = mesh_of(jax.devices()[:4], tp=tp), with_tp(spec_of(), tp)
        hosts = make_meshes(Layout(dp_replicate=1, dp_shard=1, tp=1), "cpu").shard
        host = build_host_model(spec, vocab_size=64, hosts=hosts, chips=4, seed=spec.training.seed)
        trained = {name: value.mul_(8) for name, value in ((n, v.detach()) for n, v in host.trained().items())}
        prompts, real = padded([[7, 8, 9], [5], [3, 2]], 4, 4, 0)
        given = to_device(leaves_of(trained, mesh), trained), rows_over_all(prompts, mesh), rows_over_all(real, mesh)
        answers.append(own_rows(complete(model_of(spec, host, mesh), *given, new=6, stops=(), pad=0), axis=0))
    assert answers[0].shape == (4, 6) and len({*answers[0].ravel().tolist()}) > 3
    np.testing.assert_array_equal(*answers)


def test_tensor_parallel_that_does_not_divide_is_refused():
    with pytest.raises(UsageError, match="tp 3 does not divide the 8 chips of a host"):
        mesh_of(tp=3)
    spec, mesh = with_tp(spec_of(), 4), mesh_of(tp=4)
    hosts = make_meshes(Layout(dp_replicate=1, dp_shard=1, tp=1), "cpu").shard
    host = build_host_model(spec, vocab_size=VOCABULARY, hosts=hosts, chips=8, seed=spec.training.seed)
    with pytest.raises(UsageError, match="tp 4 does not divide num_key_value_heads 2"):
        model_of(spec, host, mesh)


@pytest.mark.parametrize(
    ("name", "shape", "parts", "split"),
    [
        ("model.layers.0.self_attn.k_proj.weight", (64, 32), 4, (1, 0)),
        ("model.layers.0.mlp.down_proj.weight", (64, 32), 4, (0, 1)),
        ("model.layers.0.mlp.down_proj.weight", (63, 32), 4, (1, 1)),
        ("model.layers.0.mlp.down_proj.weight", (63, 36), 4, (None, 1)),
        ("model.embed_tokens.weight", (61, 32), 4, (1, None)),
        ("lm_head.weight", (62, 32), 4, (1, 0)),
        ("model.layers.0.self_attn.q_norm.weight", (8,), 4, (0, None)),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight", (4, 32), 4, (0, None)),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_B.default.weight", (32, 4), 4, (1, 0)),
        ("base_model.model.model.layers.0.mlp.down_proj.base_layer.weight", (64, 32), 4, (0, 1)),
        ("base_model.model.model.layers.0.mlp.down_proj.lora_A.default.weight", (4, 32), 4, (0, 1)),
    ],
)
def test_what_is_of_heads_mlp_or_vocabulary_is_split_within_a_group(name, shape, parts, split):
    assert split_dimensions(name, shape, parts, 2) == split


def test_a_first_step_begins_with_the_same_bits_on_both():
    found, wanted = by_jax(spec_of(), 0, chips=2), by_torch(spec_of(), 0)
    assert all(torch.equal(found.state[name], value) for name, value in wanted.state.items())


def test_adapters_are_trained_and_nothing_else():
    spec = spec_of(lora={"rank": 4, "alpha": 8.0, "targets": "all-linear", "dropout": 0.0})
    wanted = by_torch(spec, 10)
    for tp in (1, 2):
        found = by_jax(spec, 10, chips=2, tp=tp)
        assert differ(found, wanted)[0] <= 1e-5
        assert all("lora_" in name for name in found.state)


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_trained_beside_adapters_is_the_same_with_tensor_parallel(tied):
    spec = spec_of(lora={"rank": 4, "alpha": 8.0, "targets": "all-linear", "dropout": 0.0, "train_embeddings": True})
    config = {**spec.model.config, "tie_word_embeddings": tied}
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"config": config})})
    found = by_jax(spec, 4, chips=4, tp=2, vocabulary=64)
    losses, norms, values = differ(found, by_torch(spec, 4, vocabulary=64))
    assert losses <= 1e-5 and norms <= 1e-3 and values <= 1e-3, (losses, norms, values)
    whole = [name for name in found.state if "lora_" not in name]
    assert any("embed_tokens" in name for name in whole) and any("lm_head" in name for name in whole) is not tied


@pytest.mark.slow
def test_bfloat16_stays_near_the_torch_trainer():
    """Two implementations round differently; the state is float32 on both."""
    spec = spec_of(dtype="bfloat16")
    losses, _, values = differ(by_jax(spec, 10, chips=2), by_torch(spec, 10))
    assert losses <= 5e-3 and values <= 2e-2, (losses, values)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_nothing(recompute):
    spec = spec_of()
    training = spec.training.model_copy(update={"activation_checkpointing": recompute})
    again = by_jax(spec.model_copy(update={"training": training}), 5, chips=2)
    assert differ(again, by_jax(spec, 5, chips=2))[0] <= 1e-6


def test_an_update_that_is_not_finite_is_left_out_as_a_whole():
    before, after = by_jax(spec_of(), 0, chips=2), by_jax(spec_of(), 1, chips=2, spoil=float("inf"))
    assert not np.isfinite(after.losses[0])
    assert all(torch.equal(after.state[name], value) for name, value in before.state.items())


@pytest.mark.slow
def test_the_same_steps_on_the_same_chips_are_the_same_bits():
    one, other = by_jax(spec_of(), 3, chips=8), by_jax(spec_of(), 3, chips=8)
    assert all(torch.equal(one.state[name], value) for name, value in other.state.items())


@pytest.mark.parametrize(("chips", "chunks"), [(1, 16), (8, 2)])
def test_logits_are_cut_by_the_rows_of_one_chip(chips, chunks):
    mesh, spec = mesh_of(jax.devices()[:chips]), spec_of()
    hosts = make_meshes(Layout(dp_replicate=1, dp_shard=1, tp=1), "cpu").shard
    host = build_host_model(spec, vocab_size=VOCABULARY, hosts=hosts, chips=chips, seed=spec.training.seed)
    trained = host.trained()
    parameters = to_device(leaves_of(trained, mesh), trained)
    batch = batch_arrays(batches_of(1)[0][0], ROWS, mesh)
    whole, cut = (partial(row_losses, model_of(spec, host, mesh), chunk_tokens=tokens) for tokens in (0, CHUNK))
    program = jax.make_jaxpr(cut)(parameters, batch)
    loops = [step.params["length"] for step in program.eqns if step.primitive.name == "scan"]
    assert loops[1:] == [chunks], "the first is over the layers"
    found, wanted = (np.asarray(jax.jit(losses)(parameters, batch)) for losses in (cut, whole))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_rows_that_cannot_be_shared_out_are_refused():
    with pytest.raises(UsageError, match="micro_batch_size 6 cannot be shared out to the 8 chips"):
        check_rows(6, mesh_of())


@pytest.mark.parametrize(
    ("name", "shape", "parts", "dimension"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (64, 32), 8, 1),
        ("model.layers.0.self_attn.o_proj.weight", (64, 32), 8, 0),
        ("model.layers.0.mlp.down_proj.weight", (63, 32), 8, 1),
        ("model.norm.weight", (64,), 8, 0),
        ("model.layers.0.self_attn.q_norm.weight", (6,), 4, None),
    ],
)
def test_a_parameter_is_split_where_the_chips_divide_it(name, shape, parts, dimension):
    assert split_dimensions(name, shape, parts) == (dimension, None)
