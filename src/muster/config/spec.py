"""The run file as a value: every key, its type, default and meaning.

``RunSpec`` is what ``config.load`` returns once the whole file has been checked. Pydantic supplies the
type checks and the JSON schema for editors; rules across several keys are in ``config.validation``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from muster.config.backends import BACKENDS
from muster.config.objectives import OBJECTIVES, ObjectiveTraits
from muster.config.sections.gce import Gce
from muster.config.sections.notify import Notify
from muster.config.sections.outer import Outer
from muster.config.sections.parallelism import Parallelism
from muster.config.sections.resources import Resources
from muster.config.sections.section import Fraction, MemberOf, NotNegative, Positive, Section, SectionOf
from muster.config.sections.slurm import Slurm
from muster.config.sections.sources import SOURCE_TYPES, Source
from muster.config.sections.ssh import Ssh
from muster.config.sections.vertex import Vertex
from muster.core.heartbeat_timing import HeartbeatTiming
from muster.core.optimizers import OPTIMIZERS, OptimizerTraits

# ---------------------------------------------------------------- model


class Lora(Section):
    """Train low-rank adapters (PEFT) and leave the base frozen."""

    rank: Positive = 16
    alpha: Annotated[float, Field(gt=0)] = 32.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the linear modules that get an adapter, or all of the decoder layers: experts too, never routers."""
    rslora: bool = False
    """Scale by ``alpha / sqrt(rank)`` in place of ``alpha / rank``: for high ranks."""
    dora: bool = False
    """Train the length of each row of an adapted matrix apart from its direction: of linear modules, not of experts."""
    train_embeddings: bool | None = None
    """Train the whole input embedding and output head too: tokens that the base never saw need it. Default: where
    ``data.chat_template`` is set. Each of their parameters takes 4 bytes and its optimizer state."""


class TrainedTokenizer(Section):
    """Train a small tokenizer on the run's own training text (from-scratch models)."""

    vocab_size: Annotated[int, Field(ge=64, le=1_000_000)] = 512
    kind: Literal["word", "bpe"] = "word"


class Model(Section):
    """Which causal language model, and how it is held."""

    source: str | None = None
    """Hugging Face hub id, local folder with weights (config.json, *.safetensors), or a run of this machine (its id or
    its folder): what it trained, exported when this one is submitted, LoRA merged."""
    config: dict[str, Any] | str | None = None
    """Instead of ``source``: a transformers config (inline, or a path to a config.json); random weights."""
    revision: str | None = None
    """Hub revision of ``source`` and its tokenizer; of a run ``best`` (the lowest held-out loss) or a step."""
    tokenizer: str | TrainedTokenizer | None = None
    """Hub id or folder; default: that of ``source``. A mapping trains a small one from the data."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute precision. Master weights and optimizer state are float32 unless ``master_dtype`` says not."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of trained weights and their moments. bfloat16 rounds away most small updates. Adapters (``lora``) are always
    float32."""
    attention: Literal["auto", "flash_attention_3", "flash_attention_2", "varlen", "flex", "sdpa", "document"] = "auto"
    """Kernel for packed attention; ``auto`` takes the best one present and says which."""
    lora: Lora | None = None
    weights: Literal["hub", "bucket"] = "hub"
    """Where hosts on GKE read the weights of ``source``: each from the hub, or from a copy that the run makes once in
    its bucket (a ``gs://`` source is read there anyway)."""

    @property
    def trained_dtype(self) -> Literal["float32", "bfloat16"]:
        """Of the trained parameters and their moments."""
        return self.master_dtype if self.lora is None else "float32"


# ---------------------------------------------------------------- data


#: Names that ``data.chat_template`` may have: the templates that ship.
CHAT_TEMPLATES = ("chatml", "llama3")


class Data(Section):
    """What is trained on, how it becomes tokens, and which tokens count."""

    sources: Annotated[list[Annotated[Source, SectionOf(SOURCE_TYPES)]], Field(min_length=1)]
    train_on: Literal["completions", "all"] | list[str] = "completions"
    """Which tokens are supervised: completions (assistant turns), all of them, or a list of chat roles."""
    chat_template: str | None = None
    """How chats become text: ``chatml``, ``llama3``, a Jinja file, or ``from MODEL`` (a folder or hub id); default: the
    tokenizer's own. Special tokens that the tokenizer lacks are added, and the model's embedding grows by them."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """Whether chats are asked with thinking, where the template has a switch for it: ``auto``: an answer with reasoning
    is, one without is not (an empty think block is then the prompt's); ``on``: all; ``off``: none, reasoning is left
    out."""
    packing: bool = True
    """Several documents share a sequence, kept apart by attention; false pads each row to the length."""
    on_overlong: Literal["drop", "split", "truncate"] = "drop"
    """Rows longer than the sequence: dropped, split (plain text), or cut (chats never are); always counted."""
    workers: NotNegative = 0
    """Tokenising processes; 0: one per core."""
    cache_dir: str | None = None
    """Folder of prepared data; default ``~/.cache/muster/data``."""
    heldout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Share of the rows kept for evaluation where a source has no held-out part of its own."""

    @property
    def chat_template_file(self) -> str | None:
        """The file that ``chat_template`` names, if it names one."""
        given = self.chat_template
        return None if given is None or given in CHAT_TEMPLATES or given.startswith("from ") else given


# ---------------------------------------------------------------- training


class Optimizer(Section):
    """How gradients change the weights."""

    name: Annotated[str, MemberOf(OPTIMIZERS)] = "adamw"
    learning_rate: Annotated[float, Field(gt=0)] = 2e-5
    betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled (AdamW's), on matrices and embeddings; on vectors only with ``decay_norms_and_biases``."""
    decay_norms_and_biases: bool = False
    """Let ``weight_decay`` act on parameters of one dimension too: norms' scales and biases. torch.optim.AdamW without
    groups does that; most recipes do not."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: NotNegative | Annotated[float, Field(gt=0, lt=1)] = 0
    """Steps until the learning rate is at its peak, or the share of all steps that this takes: 0.1."""
    min_lr_fraction: Fraction = 0.1
    """Learning rate at the last step, as a share of the peak."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Clip to this global norm; null: no clipping (the norm is still reported)."""

    def warmup_of(self, total_steps: int) -> int:
        """Steps of the warm-up in a run of so many: a share is rounded."""
        return self.warmup_steps if isinstance(self.warmup_steps, int) else round(self.warmup_steps * total_steps)

    @property
    def traits(self) -> OptimizerTraits:
        """What is known of the optimizer ``name``."""
        return OPTIMIZERS.get(self.name)


class Objective(Section):
    """What is learned from rows of preferences, in the place of the next token."""

    name: Annotated[str, MemberOf(OBJECTIVES)]
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly a difference of log-probabilities counts; ipo: its tau."""
    loss: Literal["sigmoid", "hinge", "ipo", "robust", "sigmoid_norm", "apo_zero"] = "sigmoid"
    """Of dpo: what is made of the difference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Of dpo with loss sigmoid or robust: share of the pairs whose order is taken to be wrong."""
    gamma: Annotated[float, Field(ge=0)] = 0.5
    """Of simpo: by how much the better answer should be ahead."""
    desirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """Of kto: what a good answer counts."""
    undesirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """Of kto: what a bad answer counts."""

    @property
    def traits(self) -> ObjectiveTraits:
        """What is known of the objective ``name``."""
        return OBJECTIVES.get(self.name)


#: Layers are compiled once, in tens of seconds; shorter runs do not gain that back.
COMPILE_PAYS_AFTER_STEPS = 50


class Profile(Section):
    """One profiler trace or memory snapshot."""

    trace_step: NotNegative | None = None
    """Write a Chrome trace of this step."""
    memory_step: NotNegative | None = None
    """Write a memory snapshot after this step (CUDA)."""


class Training(Section):
    """How long, in which pieces, with which numerics."""

    steps: Positive | None = None
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Instead of ``steps``."""
    sequence_length: Annotated[int, Field(ge=8)] = 2048
    global_batch_size: Positive = 16
    """Sequences a step, over all ranks: fixed, however many ranks share it."""
    micro_batch_size: Positive = 1
    """Sequences a rank holds at once."""
    seed: NotNegative = 0
    objective: Annotated[str, MemberOf(OBJECTIVES)] | Objective | None = None
    """Learn from preferences (rows with a better and a worse answer): its name, or a mapping with its settings.
    Default: learn the next token."""
    optimizer: Optimizer = Optimizer()
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    compile: bool | Literal["auto"] = "auto"
    """torch.compile, per decoder layer, static shapes, and of the loss. auto: on a GPU, where its compiler is
    installed, in runs of 50 steps or more."""
    precision: Literal["bf16", "fp8", "mxfp8"] = "bf16"
    """Of the matrices inside layers, by torchao. fp8: float8 with a scale for each row, on H100 and newer; mxfp8: with
    one for each 32 elements, on B200 and newer. ``model.dtype`` stays bfloat16, and so do weights, head and attention.
    Neither has run on a GPU."""
    loss_chunk_tokens: NotNegative = 1024
    """Tokens per piece of the cross-entropy, so that the whole batch's logits never exist; 0: all at once."""
    router_z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the mean squared logarithm of a router's summed exponentials, which keeps its logits small: mixtures of
    experts whose weights all train. (The auxiliary loss of the experts' load counts as the model's config says.)"""
    deterministic: bool = False
    """Deterministic kernels: a resume on the same layout continues bit for bit."""
    exact: bool = False
    """Sum gradients, norm and loss in 64-bit fixed point: bit for bit at any number of ranks."""
    gc_every_steps: NotNegative = 50
    """Collect garbage explicitly every N steps, on all ranks at once; 0: leave it to Python."""
    local_steps: NotNegative = 0
    """Steps that each replica (``parallelism.dp_replicate``) makes by itself between two meetings: little traffic
    over slow links (DiLoCo). 0: gradients are summed over replicas in each step."""
    outer: Outer = Outer()
    state_hash_every_steps: NotNegative = 0
    """Hash the whole training state every N steps, into one number that is equal in any layout; 0: never."""
    profile: Profile = Profile()

    @property
    def preference(self) -> Objective | None:
        """The objective with its settings; None: the next token."""
        return Objective(name=self.objective) if isinstance(self.objective, str) else self.objective

    @property
    def preference_rows(self) -> Literal["pairs", "labelled"] | None:
        """What the objective learns from; None: the next token."""
        return None if self.preference is None else self.preference.traits.rows

    def compiles_on(self, device: str) -> bool:
        """Whether to compile on this type of device, as far as the run file decides that."""
        if self.compile != "auto":
            return self.compile
        return device == "cuda" and (self.steps is None or self.steps >= COMPILE_PAYS_AFTER_STEPS)


class Evaluation(Section):
    """What is measured on held-out data while training."""

    every_steps: NotNegative = 0
    """0: only at the end (and at the start, where ``at_start``)."""
    at_start: bool = True
    num_sequences: NotNegative = 128
    """Held-out sequences whose loss is taken; 0: none."""
    num_questions: NotNegative = 0
    """Text-to-SQL questions that are answered and run; 0: none."""
    final_num_questions: NotNegative | None = None
    """The same at the end of the run; default: as ``questions``."""
    samples: NotNegative = 3
    """Generations shown."""
    max_new_tokens: Positive = 128
    query_timeout_s: Annotated[float, Field(gt=0)] = 2.0


class CheckpointSpec(Section):
    """When training state is written, where, and how much of it is kept."""

    every_steps: NotNegative | Literal["auto"] = 100
    """0: only at the end and on notice. auto: from measured stall and failure rate."""
    dir: str | None = None
    """Folder or URI (``gs://``, ``s3://``, ``memory://``); default: ``checkpoints`` in the run's folder."""
    keep_last: Positive = 2
    keep_best: NotNegative = 0
    """Besides, those with the lowest held-out loss: of saves at the step of an evaluation."""
    asynchronous: bool = True
    resume: bool = True
    """Continue from the newest committed checkpoint found in ``dir``."""
    snapshot_every_steps: NotNegative | Literal["auto"] = "auto"
    """In-memory snapshot held by the host's agent every N steps; 0: none. auto: as often as takes about 1 % of the
    time, measured (1.5 % at most: an interval is changed once it is wrong by that factor), and more often where
    failures are frequent; every step where a rank's state is 64 MiB at most, and in a loop of your own (``command``).
    1: no applied step is redone but what a lost host had not handed on."""
    replicate_snapshots: bool | None = None
    """A second host holds a copy of each snapshot; default: where there are several hosts, and no other replica
    (``dp_replicate``) holds the same state on another one."""

    def uri(self, run_dir: str | Path) -> str:
        """Where a run's checkpoints are: ``dir``, else a folder below ``run_dir`` (a path or a URI)."""
        home = str(run_dir)
        return self.dir or f"{home if home.endswith('://') else home.rstrip('/') + '/'}checkpoints"


class Recovery(Section):
    """What happens when something breaks."""

    policy: str = "default"
    """``default``, ``conservative``, ``none`` (a failure ends the run), or a Python file of yours."""
    max_restarts_without_progress: NotNegative = 3
    """Restarts allowed since the last step that was new."""
    heartbeat_timeout_s: Annotated[float, Field(gt=0)] = 3.0
    """Silence of a host after which it counts as lost."""
    step_timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Time without a step that counts as a hang; default: 10 times the median step, at least 30 s."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Time for ranks to reach their first step. With `command`, it starts at the script's first muster.run call."""
    warm_standby: bool | Literal["imports"] = True
    """Keep warm processes that take over without imports. One that waits takes a tiny model's first steps too; on GPUs
    with a CUDA context on the device of its place, unless less than 2 GiB of it are free then. ``imports``: neither."""
    keep_hosts_after_failure_s: Annotated[float, Field(ge=0)] = 0.0
    """How long hosts stay warm after a failure of the user's own code (``muster restart``)."""
    grace_s: Annotated[float, Field(gt=0)] = 30.0
    """Time to save after a notice or a stop."""
    on_nonfinite_step: Literal["stop", "skip"] = "stop"
    """A step with non-finite numbers is repeated once; if it is non-finite again, the run stops, or the update is
    skipped: at most 10 steps a run, never two in a row."""
    baseline_steps: NotNegative = 0
    """Steps at the run's beginning without snapshots and saves: their rate is the baseline of goodput and of the cost
    of fault tolerance. 200 are enough; a failure during them loses them. 0: none."""

    @property
    def timing(self) -> HeartbeatTiming:
        """Every time that follows from ``heartbeat_timeout_s``."""
        return HeartbeatTiming(self.heartbeat_timeout_s)


class Check(Section):
    """When a host's hardware is looked at, and what is held against it."""

    mode: Literal["auto", "passive", "full", "off"] = "auto"
    """Before ranks use a host. passive: what the machine tells of itself, within 2 s, while the imports run. full: its
    GPUs are loaded as well, 30 s. auto: nothing without GPUs, full where the run is long enough to be worth it (8 hours
    of hosts: docs/how-to/check.md), else passive."""
    network: bool = False
    """Before the first step of its first attempt the ranks of all hosts measure their network with each other, by
    NCCL (gloo without GPUs), within a minute or so: the event ``network.measured``. Not with `command`, nor on TPUs."""
    xid_ignore: list[Positive] = Field(default_factory=list)
    """Xid numbers of the GPU driver that are noted and never cost a host; they override the table."""
    xid_fatal: list[Positive] = Field(default_factory=list)
    """Xid numbers after which a host is replaced at once; they win over ``xid_ignore``."""
    take_out: bool = True
    """A machine that is to be drained or replaced is kept from other work where the run's account may do that: drained
    in Slurm, cordoned on GKE (docs/how-to/check.md). Where it may not, the command is logged."""


class Limits(Section):
    """What the run may cost. The plan keeps them at the 90th percentile; the supervisor saves and ends a run (exit code
    130) before it breaks one."""

    max_usd: Annotated[float, Field(gt=0)] | None = None
    """Of hosts from purchase to release."""
    deadline: str | None = None
    """ISO 8601 moment with a zone."""
    max_hours: Annotated[float, Field(gt=0)] | None = None
    """In which hosts are held."""


class Output(Section):
    """What is shown and logged."""

    log_every_steps: Positive = 1
    tensorboard: bool | None = None
    """Default: where it is installed."""
    tracker: Literal["none", "wandb", "mlflow", "trackio"] = "none"
    json_logs: bool = False
    """On GKE: each line of a pod's output as JSON, with its severity, run and process as Cloud Logging reads them."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """Peak per GPU that MFU divides by; default: the data sheet's; on a CPU there is no MFU without it."""


class Metrics(Section):
    """The run's figures for other systems, from its supervisor. docs/how-to/metrics.md lists them."""

    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Of a page for Prometheus. 0: any free one (``muster metrics RUN`` finds it). Default: no page. On GKE the
    cluster's collector is configured to read it (``PodMonitoring``), and 0 is 9464."""
    bind: str = "127.0.0.1"
    """Address on which it is served; on GKE always the pod's."""
    otlp: str | None = None
    """An OpenTelemetry receiver to which they are sent every 15 s, as in http://collector:4318 (OTLP over HTTP)."""
    cloud_monitoring: bool = False
    """Sent to Google's Cloud Monitoring of ``resources.project`` once a minute, by the account of the machine that
    supervises the run (Vertex AI, Compute Engine); on GKE ``port`` brings them there."""


class RunSpec(Section):
    """A whole run file, checked."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    backend: Annotated[str, MemberOf(BACKENDS)] = "local"
    run_dir: str | None = None
    """Where this run lives; default ``~/.muster/runs/RUN_ID`` (or ``$MUSTER_HOME/runs``)."""
    model: Model | None = None
    data: Data | None = None
    training: Training = Training()
    parallelism: Parallelism = Parallelism()
    evaluation: Evaluation = Evaluation()
    checkpoint: CheckpointSpec = CheckpointSpec()
    recovery: Recovery = Recovery()
    check: Check = Check()
    resources: Resources = Resources()
    limits: Limits = Limits()
    output: Output = Output()
    metrics: Metrics = Metrics()
    notify: Notify = Notify()
    ssh: Ssh = Ssh()
    slurm: Slurm = Slurm()
    vertex: Vertex = Vertex()
    gce: Gce = Gce()
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of the ranks and of data preparation, the same on every back end."""
    secrets: dict[str, str] = Field(default_factory=dict)
    """Variables of the same whose values stand nowhere in clear: name -> ``env`` (the same variable where you submit),
    ``env:OTHER`` or ``file:PATH`` (mode 0600); on Vertex AI Secret Manager's name of a version."""
    workdir: str | None = None
    """Folder that is packed and shipped with the run: ``command`` starts there, and finds its script and modules. In a
    git tree without what ``.gitignore`` names."""
    setup: list[list[str]] | str | None = None
    """What each host runs once, before its ranks start: programs with their arguments, as in ``[[pip, install, -r,
    requirements.txt]]``, or an executable script."""
    setup_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Of all of it, on one host."""
    command: list[str] | None = None
    """Instead of ``model`` and ``data``: run this torchrun-style script under the same agents."""

    def checkpoint_uri(self, run_dir: str | Path) -> str:
        """Where the checkpoints of the run in ``run_dir`` are."""
        return self.checkpoint.uri(run_dir)

    @property
    def replicas_survive(self) -> bool:
        """Whether a replica's ranks can keep their processes when another replica is lost: JAX's processes are one
        group, and end together."""
        return self.resources.device != "tpu"

    @property
    def unmeasured_network(self) -> str:
        """Why the ranks of such a run measure no network even with ``check.network``; empty: they do."""
        if self.command is not None:
            return "ranks of a script of one's own measure no network"
        if self.resources.device == "tpu":
            return "the chips' network is not measured, and the hosts' own says nothing of it"
        return ""

    @property
    def rank_axes(self) -> dict[str, int]:
        """``parallelism.axes`` of ranks: on TPUs a rank drives all chips of a host, and ``tp`` is within it."""
        return self.parallelism.axes | ({"tp": 1} if self.resources.device == "tpu" else {})

    @property
    def trains_embeddings(self) -> bool:
        """Whether adapters are trained together with the whole embedding and head."""
        lora = self.model.lora if self.model is not None else None
        if lora is None:
            return False
        has_template = self.data is not None and self.data.chat_template is not None
        return has_template if lora.train_embeddings is None else lora.train_embeddings
