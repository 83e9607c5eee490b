"""Details of training; its events come from rank 0 unless stated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from muster.core.event_detail import Detail, OpenDetail
from muster.core.typed_json import Count, Record


@dataclass(frozen=True, kw_only=True)
class DataPrepared(OpenDetail):
    kind: ClassVar = "data.prepared"
    doc: ClassVar = "Tokens are ready."
    fingerprint: Annotated[str, "of the prepared data"]
    tokens: Annotated[int, "in it"]
    sequences: Annotated[int, "in it"]
    cached: Annotated[bool, "was there already"]
    questions: Annotated[int | None, "held-out rows that are asked and scored"] = None
    questions_left_out: Annotated[
        int | None, "held-out rows that cannot be: their gold query fails, returns nothing"
    ] = None
    questions_left_out_why: Annotated[str | None, "how many for which reason, and the first of them"] = None
    weights_bytes: Annotated[int | None, "of the model's files from the hub; 0: it did not say"] = None
    weights_s: Annotated[float | None, "until they were here"] = None


@dataclass(frozen=True, kw_only=True)
class ModelReady(OpenDetail):
    kind: ClassVar = "model.ready"
    doc: ClassVar = "What will train."
    parameters: Annotated[int, "count"]
    trainable_parameters: Annotated[int, "count"]
    attention: Annotated[str, "kernel chosen and why"]
    compiled: Annotated[bool | None, "whether its layers and loss are compiled"] = None
    flops_per_token: Annotated[float | None, "CAUSAL, fwd+bwd"] = None
    peak_flops: Annotated[float | None, "per rank that MFU divides by"] = None
    peak_source: Annotated[str | None, "where from"] = None


@dataclass(frozen=True, kw_only=True)
class RankPace(Record):
    """One rank's newest steps, by its own clock; medians, in microseconds. ``late``: how long it takes from the end of
    a step's sums to its arrival at the next ones, waits for other ranks left out."""

    rank: Count
    steps: Annotated[Count, "steps that these figures are of"]
    last: Annotated[Count, "in how many of them it came last"]
    ahead_us: Annotated[Count, "how much earlier than the last one it came"]
    ahead_spread_us: Annotated[Count, "robust standard deviation of that"]
    late_us: Annotated[Count, "from the end of the sums to its arrival at the next"]
    wait_us: Annotated[Count, "of the step, inside collectives"]
    data_us: Annotated[Count, "of late_us: it waited for its batch"]
    stall_us: Annotated[Count, "of late_us: a snapshot or save held it"]
    gap_us: Annotated[Count, "of late_us: its thread was on no processor"]
    tokens: Annotated[Count, "of its own micro-batches, padding excluded"]


@dataclass(frozen=True, kw_only=True)
class Step(Detail):
    """A loop of the user's own (``command:``) may leave any of the first seven but ``step_ns`` null: unknown, never
    zero."""

    kind: ClassVar = "step"
    doc: ClassVar = "An optimizer step was applied by every rank."
    loss: Annotated[float | None, "mean over the step's supervised tokens, or pairs of preferences, all ranks"]
    grad_norm: Annotated[float | None, "global norm before clipping"]
    learning_rate: Annotated[float | None, "as applied"]
    step_ns: Annotated[int, "wall time of the step, the previous step's end to this one's"]
    tokens: Annotated[int | None, "tokens of the global batch, padding excluded"]
    supervised_tokens: Annotated[int | None, "tokens that count in the loss"]
    padding_tokens: Annotated[int | None, "positions without a document, zero-weight rounds included"]
    data_wait_ns: Annotated[int | None, "time the loop waited for its batch"] = None
    stall_ns: Annotated[int | None, "time a snapshot or save held the loop"] = None
    tokens_per_s: Annotated[float | None, "tokens / step time, all ranks"] = None
    model_flops: Annotated[float | None, "FLOPs of the step by the CAUSAL convention (docs/mfu.md)"] = None
    mfu: Annotated[float | None, "model_flops / (step time x peak x ranks)"] = None
    tflops_per_rank: Annotated[float | None, "model_flops / step time / ranks / 1e12"] = None
    memory_bytes: Annotated[int | None, "peak on this rank: CUDA allocator, or resident set on CPU"] = None
    rows: Annotated[int | None, "sequences of the global batch"] = None
    padding_rounds: Annotated[int | None, "zero-weight micro-batches of this step, all ranks"] = None
    expert_load_max: Annotated[
        float | None, "tokens of the busiest expert over the mean of its layer, in the layer where that is most"
    ] = None
    expert_idle_share: Annotated[float | None, "share of the experts of all layers that got no token"] = None
    expert_entropy: Annotated[float | None, "entropy of the experts' load over that of an even one, mean of layers"] = (
        None
    )
    units: Annotated[int | None, "of preferences: pairs, or labelled answers, of the step"] = None
    accuracy: Annotated[float | None, "of preferences: share of pairs whose better answer has the higher reward"] = None
    margin: Annotated[float | None, "mean reward of better answers less that of worse ones"] = None
    rewards_chosen: Annotated[float | None, "mean reward of better answers"] = None
    rewards_rejected: Annotated[float | None, "mean reward of worse answers"] = None
    logps_chosen: Annotated[float | None, "mean log-probability of better answers, summed over tokens"] = None
    logps_rejected: Annotated[float | None, "mean log-probability of worse answers, summed over tokens"] = None
    skipped: Annotated[bool, "true: its update was left out on every rank; tokens are 0, loss and norm null"] = False
    skipped_tokens: Annotated[int | None, "tokens of the batch that was left out"] = None
    state_hash: Annotated[
        str | None,
        "64 bits over the state after this step, equal in any layout, where asked for; null: a peer was lost",
    ] = None
    replica_hashes: Annotated[
        tuple[str, ...], "one hash a replica, where they are not all `state_hash`: silent corruption of a copy"
    ] = ()
    snapshot_step: Annotated[int | None, "newest step that the hosts' own memory holds"] = None
    peer_step: Annotated[
        int | None, "newest step of which every rank knows that another host's memory holds it too"
    ] = None
    comm_ns: Annotated[int | None, "time rank 0 was inside collectives, others' lateness included; absent: unknown"] = (
        None
    )
    host_gap_ns: Annotated[
        int | None, "time rank 0's thread was on no processor, other waits left out; absent: unknown"
    ] = None
    compute_ns: Annotated[
        int | None, "processor time of rank 0's thread, snapshots and saves left out; absent: unknown"
    ] = None
    pace: Annotated[
        tuple[RankPace, ...], "where one rank keeps coming last: each rank's newest steps, of more than 64 a choice"
    ] = ()


@dataclass(frozen=True, kw_only=True)
class StragglerNamed(Detail):
    kind: ClassVar = "straggler.named"
    doc: ClassVar = (
        "The supervisor's: one rank makes all others wait, step after step. Written once an attempt for a rank and "
        "cause; it names no host where the work itself is uneven."
    )
    cause: Annotated[str, "loader, host, processor, snapshot or tokens"]
    evidence: Annotated[str, "one sentence with values"]
    lag_ns: Annotated[int, "what it costs a step: the median of how much later than the others it comes"]
    step_ns: Annotated[int, "a step's time, waits included"]
    last: Annotated[int, "in how many steps it came last"]
    steps: Annotated[int, "of how many"]
    usd_per_day: Annotated[float | None, "what the waiting costs, all hosts; absent: no price is known"] = None


@dataclass(frozen=True, kw_only=True)
class BaselineRate(Detail):
    kind: ClassVar = "baseline_rate"
    doc: ClassVar = "The rate of these ranks with fault tolerance off and no checkpoints: what goodput divides by."
    tokens_per_s: Annotated[float, "all ranks, median of the steps"]
    world_size: Annotated[int, "ranks"]
    steps: Annotated[int, "measured after warm-up"]
    spread: Annotated[float | None, "robust standard deviation / median"] = None
    mfu: Annotated[float | None, "of the median step"] = None
    first_step: Annotated[int | None, "first step without fault tolerance; `step` is the last"] = None


@dataclass(frozen=True, kw_only=True)
class Eval(OpenDetail):
    kind: ClassVar = "eval"
    doc: ClassVar = "Held-out figures after `step`."
    loss: Annotated[float | None, "held-out, mean per supervised token, or pair of preferences"] = None
    execution_accuracy: Annotated[float | None, "share of questions whose rows equal the gold query's"] = None
    query_match: Annotated[float | None, "share of queries equal to gold after normalising"] = None
    questions: Annotated[int | None, "asked"] = None
    baseline_accuracy: Annotated[float | None, "majority-template baseline on the same questions"] = None
    duration_ns: Annotated[int | None, "time it took"] = None
    timeouts: Annotated[int | None, "queries stopped"] = None
    accuracy: Annotated[float | None, "of preferences: share of pairs whose better answer has the higher reward"] = None
    margin: Annotated[float | None, "mean reward of better answers less that of worse ones"] = None
    rewards_chosen: Annotated[float | None, "mean reward of better answers"] = None
    rewards_rejected: Annotated[float | None, "mean reward of worse answers"] = None
    logps_chosen: Annotated[float | None, "mean log-probability of better answers, summed over tokens"] = None
    logps_rejected: Annotated[float | None, "mean log-probability of worse answers, summed over tokens"] = None


@dataclass(frozen=True, kw_only=True)
class Generation(Detail):
    kind: ClassVar = "generation"
    doc: ClassVar = "One generation, shown."
    prompt: Annotated[str, "text"]
    completion: Annotated[str, "text"]
    expected: Annotated[str | None, "gold text"] = None
    correct: Annotated[bool | None, "bool"] = None
    rows: Annotated[tuple[tuple[str, ...], ...] | None, "what it returned"] = None


@dataclass(frozen=True, kw_only=True)
class ChipsUsage(Detail):
    kind: ClassVar = "chips.usage"
    doc: ClassVar = "What the TPUs of a rank's host do, where a step ends: every 10 s at most. From every rank."
    memory_bytes: Annotated[tuple[int, ...], "of each chip, in use (JAX)"] = ()
    memory_peak_bytes: Annotated[tuple[int, ...], "of each chip, the most so far"] = ()
    memory_limit_bytes: Annotated[tuple[int, ...], "of each chip, what programs may use"] = ()
    busy: Annotated[tuple[float, ...], "of each chip: share of the time in which it computed (libtpu)"] = ()
    tensorcore: Annotated[tuple[float, ...], "of each TensorCore: share of what it can do (libtpu)"] = ()


@dataclass(frozen=True, kw_only=True)
class TraceWritten(Detail):
    kind: ClassVar = "trace.written"
    doc: ClassVar = "A rank's answer to `muster profile`: a trace of some steps; `step` is the last. From any rank."
    request: Annotated[str, "which it answers"]
    first_step: Annotated[int | None, "the first one in it; null: none began"] = None
    file: Annotated[str | None, "name in the run's folder; null: none was written"] = None
    bytes: Annotated[int | None, "size of the file"] = None
    write_ns: Annotated[int | None, "time that the rank stood still to write it"] = None
    problem: Annotated[str | None, "why there is none"] = None


DETAILS: tuple[type[Detail], ...] = (
    DataPrepared, ModelReady, Step, StragglerNamed, BaselineRate, Eval, Generation, ChipsUsage, TraceWritten,
)  # fmt: skip
