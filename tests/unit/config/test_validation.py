"""Rules across keys, knobs without effect, and what the machine lacks: each with the case beside it that is right."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from muster.config import load
from muster.config.compatibility import REFUSALS, Refusal, cells
from muster.config.spec import CheckpointSpec, RunSpec
from muster.core.errors import Problem, RunFileError
from muster.core.flops import ModelShape
from muster.plan.workload import workload

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
GOOD = """\
name: demo
model:
  config:
    {model_type: llama, hidden_size: 64, num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 4096}
  tokenizer: {kind: word}
  dtype: float32
data:
  sources: [{type: text2sql}]
training: {steps: 100}
resources: {device: cpu, ranks_per_host: 4}
"""


def problems(*overrides: str, environment: bool = False) -> list[Problem]:
    try:
        load.loads(GOOD, overrides, environment=environment)
    except RunFileError as error:
        return list(error.problems)
    return []


def check(*overrides: str, environment: bool = False) -> list[str]:
    return [f"{problem.key}: {problem.message}" for problem in problems(*overrides, environment=environment)]


WRONG = {
    "no model": (["model=null"], "model: is missing"),
    "no data": (["data=null"], "data: is missing"),
    "command beside model": (["command=[x]"], "model: cannot be combined with `command`"),
    "empty command": (["command=[]"], "command: is empty"),
    "a token as an argument": (
        ["model=null", "data=null", "command=[train.py, --hub-token, abcdefgh]"],
        "command.2: looks like a secret",
    ),
    "source and config": (
        ["model.source=a/b", "model.config={model_type: a}"],
        "needs either `source` or `config`: both",
    ),
    "neither source nor config": (["model.config=null"], "needs either `source` or `config`: neither"),
    "config without tokenizer": (["model.tokenizer=null"], "has no tokenizer"),
    "new vocabulary on old weights": (["model.config=null", "model.source=a/b"], "does not fit the weights"),
    "config without model_type": (["model.config={hidden_size: 64}"], "has no `model_type`"),
    "no LoRA targets": (["model.lora={targets: []}"], "nothing would train"),
    "hidden size": (["model.config.hidden_size=65"], "hidden_size = 65 is not a multiple"),
    "heads and kv heads": (["model.config.num_key_value_heads=3"], "is not a multiple of num_key_value_heads = 3"),
    "heads over tp": (["parallelism.tp=4"], "num_key_value_heads = 2 does not divide into tp = 4"),
    "context": (["training.sequence_length=8192"], "longer than the model's context of 4096"),
    "split without packing": (["data.packing=false", "data.on_overlong=split"], "`split` needs `packing: true`"),
    "split of chats": (
        ["data.on_overlong=split", "data.sources=[{type: hub, name: a, format: chat}]"],
        "later pieces would lose their prompt",
    ),
    "no roles": (["data.train_on=[]"], "no token would be supervised"),
    "kind of file": (["data.sources=[{type: file, path: x.xls}]"], "is not a supported kind of file"),
    "steps and epochs": (["training.epochs=1", "training.steps=9"], "cannot be combined with `steps`"),
    "neither steps nor epochs": (["training.steps=null"], "does not say how long"),
    "micro-batch": (["training.global_batch_size=5", "training.micro_batch_size=2"], "2 does not divide"),
    "warm-up": (["training.optimizer.warmup_steps=101"], "101 is more than steps = 100"),
    "warm-up share": (["training.optimizer.warmup_steps=1.5"], "a number above 0 and below 1"),
    "betas": (["training.optimizer.betas=[0.9, 1.0]"], "item 1 must be in [0, 1)"),
    "coarser master": (["model.master_dtype=bfloat16"], "coarser than dtype"),
    "flash on CPU": (["model.attention=flash_attention_2", "model.dtype=bfloat16"], "needs CUDA"),
    "exact in bfloat16": (["training.exact=true", "model.dtype=bfloat16"], "needs model.dtype: float32"),
    "stages of another family": (
        ["parallelism.pp=2", "resources.ranks_per_host=2", "model.config.model_type=granite"],
        "granite is not known to start in the middle of its layers",
    ),
    "more stages than layers": (
        ["parallelism.pp=4", "resources.ranks_per_host=4", "model.config.num_hidden_layers=2"],
        "2 layers do not make 4 stages",
    ),
    "more chunks than layers": (
        [
            "parallelism={pp: 2, pp_schedule: interleaved}",
            "resources.ranks_per_host=2",
            "model.config.num_hidden_layers=3",
        ],
        "3 layers do not make 2 stages of 2 chunks each",
    ),
    "gradients of weights apart, cast": (
        ["parallelism={pp: 2, dp_shard: 1, pp_schedule: zero_bubble}", "model.dtype=bfloat16"],
        "FSDP casts float32 weights to bfloat16",
    ),
    "chunks of one": (["parallelism.pp_chunks=1"], "a whole number of at least 2"),
    "an order that is none": (["parallelism.pp_schedule=gpipe"], "1f1b, interleaved"),
    "exact with a tied embedding on two stages": (
        ["parallelism.pp=2", "training.exact=true", "model.dtype=float32", "model.config.tie_word_embeddings=true"],
        "cannot hold with pp = 2 and an embedding tied to the head",
    ),
    "exact with dropout in stages": (
        ["parallelism.pp=2", "training.exact=true", "model.dtype=float32", "model.config.attention_dropout=0.1"],
        "cannot hold with pp = 2 and attention_dropout",
    ),
    "exact with 8 bit": (["training.exact=true", "training.optimizer.name=adamw_8bit"], "cannot hold with adamw_8bit"),
    "local steps of one replica": (["training.local_steps=10"], "is of replicas, and there is one"),
    "cp and the length": (
        ["parallelism.cp=4", "training.sequence_length=100"],
        "100 does not divide into the 2 x cp = 8 chunks",
    ),
    "auto and an axis": (["parallelism={auto: true, tp: 2}"], "chooses the layout, and tp is given too"),
    "dp_shard 0": (["parallelism.dp_shard=0"], "must be -1"),
    "too many": (["parallelism.dp_shard=8"], "= 8, but there are 4 ranks"),
    "tp over ranks": (["parallelism.tp=2", "resources.ranks_per_host=3"], "= 2 does not divide 3 ranks"),
    "replicas": (["parallelism.dp_replicate=3"], "= 3 does not divide 4 ranks"),
    "trace after the end": (["training.profile.trace_step=101"], "after the last one, 100"),
    "scheme": (["checkpoint.dir=ftp://x"], "the scheme ftp:// is not known"),
    "remote run_dir": (["run_dir=gs://b/x"], "must be a folder of this machine"),
    "no receiver": (["metrics.otlp=collector:4318"], "'collector:4318' is no http:// or https:// address"),
    "nothing to copy": (
        ["checkpoint.replicate_snapshots=true", "checkpoint.snapshot_every_steps=0"],
        "nothing to copy",
    ),
    "policy": (["recovery.policy=brave"], "is not a policy"),
    "min_hosts": (["resources.min_hosts=2"], "2 is more than hosts = 1"),
    "no moment": (["limits.deadline=tomorrow"], "is not an ISO 8601 time"),
    "no zone": (["limits.deadline=2999-01-01T00:00:00"], "has no zone"),
    "past": (["limits.deadline=2001-01-01T00:00:00Z"], "is in the past"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_work_is_refused_with_the_reason(name: str):
    overrides, words = WRONG[name]
    found = check(*overrides)
    assert any(words in each for each in found), found


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["parallelism.tp=2"],
        ["parallelism.dp_replicate=2", "parallelism.dp_shard=2"],
        ["training.global_batch_size=7"],  # ranks need not divide the batch
        ["training.exact=true"],
        ["training.local_steps=10", "training.outer.dtype=int8", "parallelism.dp_replicate=2"],
        ["parallelism=auto"],
        ["limits.deadline=2999-01-01T00:00:00+02:00"],
        ["data.on_overlong=split", "data.sources=[{type: file, path: x.txt, format: text}]"],
        ["model=null", "data=null", "training.steps=null", "command=[x]"],
        ["model.config=null", "model.tokenizer=null", "model.source=a/b"],
    ],
)
def test_what_works_is_not_refused(overrides: list[str]):
    assert check(*overrides) == []


NO_EFFECT = {
    "training.optimizer.min_lr_fraction=0.5": ["training.optimizer.schedule=constant"],
    "training.deterministic=false": ["training.exact=true"],
    "training.compile=true": ["training.steps=10"],
    "check.network=true": ["resources.device=tpu", "resources.ranks_per_host=null"],
    "training.outer.learning_rate=0.5": [],
    "training.profile.memory_step=5": [],
    "training.optimizer.name=adamw_8bit": ["model.lora={}"],
    "parallelism.reshard_after_forward=false": ["resources.ranks_per_host=1"],
    "parallelism.pp_schedule=interleaved": [],
    "parallelism.pp_chunks=3": ["parallelism.pp=2", "resources.ranks_per_host=2"],
    "parallelism.pp_chunks=2": [
        "parallelism.pp=2",
        "parallelism.dp_shard=1",
        "parallelism.pp_schedule=zbv",
        "resources.ranks_per_host=2",
    ],
    "model.revision=main": [],
    "model.master_dtype=float32": [],
    "model.master_dtype=bfloat16": ["model.lora={}"],
    "data.sources.0.weight=2": [],
    "data.heldout_fraction=0.2": [],
    "data.workers=2": ["data.sources=[{type: random}]"],
    "data.sources.0.format=text": [],
    "evaluation.num_questions=5": ["data.sources=[{type: random}]"],
    "evaluation.query_timeout_s=1": [],
    "evaluation.every_steps=500": [],
    "checkpoint.every_steps=500": [],
    "checkpoint.replicate_snapshots=true": [],
    "resources.provisioning_model=spot": [],
    "resources.accelerator=B200": [],
    "limits.max_usd=5": [],
    "recovery.warm_standby=true": ["recovery.policy=none"],
}


@pytest.mark.parametrize("knob", NO_EFFECT)
def test_a_knob_without_effect_is_reported_with_the_reason(knob: str):
    key = knob.partition("=")[0]
    found = load.loads(GOOD, [*NO_EFFECT[knob], knob], environment=False).warnings
    assert [each for each in found if each.key == key and each.message.startswith("has no effect: ")], found


def test_defaults_are_never_reported_and_neither_is_what_works():
    assert load.loads(GOOD, environment=False).warnings == ()
    works = ["training.optimizer.min_lr_fraction=0.5", "evaluation.num_questions=5", "evaluation.query_timeout_s=1"]
    assert load.loads(GOOD, works, environment=False).warnings == ()


# ---------------------------------------------------------------- this machine


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.sources=[{type: file, path: nowhere.jsonl}]"], "no file nowhere.jsonl"),
        (["data.sources=[{type: file, path: 'nowhere-*.jsonl'}]"], "no file nowhere-*.jsonl"),
        (["model.config=nowhere/config.json"], "no file nowhere/config.json"),
        (["model.config=null", "model.tokenizer=null", "model.source=./nowhere"], "no folder ./nowhere"),
        (["model.tokenizer=./nowhere"], "no folder ./nowhere"),
        (["recovery.policy=nowhere.py"], "no file nowhere.py"),
        (["run_dir=/proc/nowhere/run"], "run_dir: cannot write in"),
        (["output.tracker=trackio"], "trackio is not installed"),
    ],
)
def test_what_is_missing_here(overrides: list[str], words: str):
    if "/proc" in overrides[0] and os.access("/proc", os.W_OK):
        overrides, words = ["run_dir=/dev/null/run"], "run_dir: "
    found = check(*overrides, environment=True)
    assert any(words in each for each in found), found


IN_AN_IMAGE = """
name: its-own-script
command: [/opt/of-the-image/train.py]
resources: {hosts: 1, device: cuda, ranks_per_host: 8, image: "us-docker.pkg.dev/example-project/muster/own:1"}
"""


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (["backend=gke"], True),
        (["backend=slurm", "resources.image=null", "slurm.container.image=docker.io#own/image:1"], True),
        (["backend=slurm", "resources.image=null"], False),
        (["backend=gce", "gce.image=projects/example-project/global/images/own"], True),
        (["backend=gce"], False),
        (["backend=gke", "resources.image=null"], False),
        (["backend=gke", "command=[of-the-image/train.py]"], False),
        (["backend=local"], False),
    ],
)
def test_a_script_of_the_image_need_not_be_here(overrides: list[str], found: bool):
    problems: tuple[object, ...] = ()
    try:
        load.loads(IN_AN_IMAGE, overrides, environment=True)
    except RunFileError as error:
        problems = tuple(error.problems)
    assert any("no file " in str(each) for each in problems) is not found, problems


def test_a_model_folder_is_looked_into(tmp_path: Path):
    model = ["model.config=null", "model.tokenizer=null", f"model.source={tmp_path}"]
    assert any("holds no config.json" in each for each in check(*model, environment=True))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 128}')
    assert any("holds no *.safetensors" in each for each in check(*model, environment=True))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert any("longer than the model's context of 128" in each for each in check(*model, environment=True))
    assert check(*model, "training.sequence_length=128", environment=True) == []


def test_cuda_is_asked_for_where_there_is_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("muster.backends.local.run_file_rules.has_gpu", lambda: False)
    assert any("no NVIDIA GPU" in each for each in check("resources.device=cuda", environment=True))
    assert check("resources.device=cuda", "backend=gke", environment=True) == []


def test_a_trainer_without_its_packages_is_refused_before_anything_starts(monkeypatch):
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("torch", "tokenizers") else there(name)
    )
    (found,) = [each for each in check(environment=True) if each.startswith("backend:")]
    assert "needs torch, tokenizers: not installed" in found
    assert not [
        each for each in check("model=null", "data=null", "command=[-m, this]", environment=True) if "torch" in each
    ]


def test_bfloat16_weights_in_full_training_are_doubted_with_figures():
    bf16 = ["model.dtype=bfloat16", "model.master_dtype=bfloat16"]
    (doubt,) = load.loads(GOOD, bf16, environment=False).warnings
    assert (
        doubt.key == "model.master_dtype"
        and "at a learning rate of 1e-5 only 15.6 % of them had moved" in doubt.message
    )
    (unused,) = load.loads(GOOD, [*bf16, "model.lora={}"], environment=False).warnings
    assert "has no effect: adapters and their moments are float32" in unused.message
    shape = ModelShape.from_config({"model_type": "llama", "num_hidden_layers": 2, "intermediate_size": 96, **SIZES})
    planned = [
        workload(load.loads(GOOD, [*bf16, *more], environment=False).spec, shape) for more in ([], ["model.lora={}"])
    ]
    assert [work.master_bytes for work in planned] == [2, 4], "memory is counted as it is trained"


@pytest.mark.parametrize(
    ("given", "run_dir", "uri"),
    [
        (None, "gs://b/runs/x", "gs://b/runs/x/checkpoints"),
        (None, "gs://b/runs/x/", "gs://b/runs/x/checkpoints"),
        (None, "memory://", "memory://checkpoints"),
        (None, Path("/runs/x"), "/runs/x/checkpoints"),
        ("s3://elsewhere", "gs://b/runs/x", "s3://elsewhere"),
    ],
)
def test_where_checkpoints_are(given, run_dir, uri):
    assert RunSpec(name="a", checkpoint=CheckpointSpec(dir=given)).checkpoint_uri(run_dir) == uri


#: How a run file asks for what is no axis.
ASKED = {
    "lora": ["model.lora={}"],
    "float8": ["training.precision=fp8", "resources.device=cuda", "model.dtype=bfloat16"],
    "compile": ["training.compile=true"],
    "experts": ["model.config.model_type=mixtral", "model.config.num_local_experts=4"],
    "exact": ["training.exact=true"],
    "split_backward": ["parallelism.pp=2", "parallelism.dp_shard=1", "parallelism.pp_schedule=zero_bubble"],
    "local_steps": ["training.local_steps=2", "parallelism.dp_replicate=2"],
    "dora": ["model.lora={dora: true}"],
    "objective": ["training.objective=dpo"],
    "quantised": ["model.config.quantization_config={quant_method: mxfp4}"],
}


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda each: f"{each.refused}-{each.other}")
def test_what_the_table_refuses_is_refused_and_each_of_the_two_alone_is_not(refusal: Refusal) -> None:
    one, other = (ASKED.get(name, [f"parallelism.{name}=2"]) for name in (refusal.refused, refusal.other))
    both, *alone = (
        [p for p in problems(*given) if refusal.reason in p.message] for given in ([*one, *other], one, other)
    )
    assert [(each.key, each.hint) for each in both] == [(refusal.key, refusal.hint)] and alone == [[], []]


def test_the_share_of_refused_cells_only_falls() -> None:
    table = list(cells())
    assert sum(refusal is not None for *_, refusal in table) <= 13 and len(table) == 65
    assert len({frozenset((each.refused, each.other)) for each in REFUSALS}) == len(REFUSALS)


def test_adapters_beside_tp_divide_among_the_ranks_that_cut_them() -> None:
    def of(*given: str) -> list[str]:
        found = problems("resources.ranks_per_host=6", "parallelism.tp=2", *given)
        return [each.message for each in found if each.key == "model.lora.rank"]

    assert of("model.lora={rank: 16}") == ["16 does not divide among the 3 ranks that cut an adapter with tp = 2"]
    assert of("model.lora={rank: 12}") == of("model.lora={rank: 16}", "parallelism.dp_replicate=3") == []
