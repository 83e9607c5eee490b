"""Events as plain lines: one per step, in the terms of the field; None for events that are not printed."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from muster.core import resolved_file
from muster.core.event_detail import Detail
from muster.core.event_details import attempts, checkpoints, hosts, incidents, run, training
from muster.core.events import Event

if TYPE_CHECKING:
    from muster.config.spec import RunSpec

LINE_WIDTH = 120
RECENT_STEPS = 50
"""Steps that say how long the rest will take."""


def line(event: Event) -> str | None:
    """One line about the event, or None."""
    if event.kind in _TEXT_BY_KIND:
        cls, text = _TEXT_BY_KIND[event.kind]
        return text.format(event=event, detail=event.read(cls))
    render = _RENDER.get(event.kind)
    return render(event) if render else None


class Narrator:
    """``line`` for the events of one run, as they follow each other.

    Of steps every ``log_every_steps``-th of the run file and the last are shown, with the run's number of steps and the
    time to go. What a decision or the end of a run says for its reason is not said in full again where the line of its
    incident has just said it. Without ``run_dir`` every step is shown.
    """

    def __init__(self, run_dir: Path | None = None) -> None:
        self.run_dir = run_dir
        self._spec: RunSpec | None = None
        self._data: training.DataPrepared | None = None
        self._ends_ns: deque[int] = deque(maxlen=RECENT_STEPS)
        """Of the newest attempt's last steps."""
        self._said = ""

    def __call__(self, event: Event) -> str | None:
        """One line about the event, or None."""
        if event.kind == training.Step.kind:
            return self._step(event)
        if event.kind == attempts.AttemptStarted.kind:
            self._spec = None  # a corrected run file may have another number of steps
            self._ends_ns.clear()
        elif event.kind == training.DataPrepared.kind:
            self._data = event.read(training.DataPrepared)
        text = line(event)
        if event.kind == incidents.IncidentDetected.kind:
            self._said = event.read(incidents.IncidentDetected).evidence
        elif text and self._said and event.kind in (incidents.IncidentDecided.kind, run.RunFinished.kind):
            return text.replace(self._said, "as above")
        return text

    def _step(self, event: Event) -> str | None:
        if self._spec is None and self.run_dir is not None:
            from muster.config.spec import RunSpec

            with contextlib.suppress(OSError, ValueError):
                self._spec = RunSpec.model_validate_json(resolved_file.read(self.run_dir))
        self._ends_ns.append(event.wall_ns)
        step, spec = event.step, self._spec
        total = None if spec is None else total_steps(spec, self._data)
        if spec is not None and step is not None and step % spec.output.log_every_steps and step != total:
            return None
        gaps, eta_s = len(self._ends_ns) - 1, None
        if total is not None and step is not None and gaps > 0:
            eta_s = (total - step) * (self._ends_ns[-1] - self._ends_ns[0]) / 1e9 / gaps
        return step_line(step, event.read(training.Step), total=total, eta_s=eta_s)


def total_steps(spec: RunSpec, data: training.DataPrepared | None) -> int | None:
    """Steps of the whole run, as soon as they are known."""
    settings = spec.training
    if settings.steps is not None or settings.epochs is None or data is None:
        return settings.steps
    return math.ceil(data.sequences * settings.epochs / settings.global_batch_size)


def step_line(step: int | None, detail: training.Step, *, total: int | None = None, eta_s: float | None = None) -> str:
    """``step  12/400  loss  2.3451    8,812 tokens/s    0.180 s  ...`` in columns.

    What is unknown is left out, and what comes last where there is more than ``LINE_WIDTH`` takes.
    """
    seconds = detail.step_ns / 1e9
    count = f"step {step}" if total is None else f"step {step:>{len(str(total))}}/{total}"
    parts = [count]
    if detail.loss is not None:
        parts.append(f"loss {detail.loss:7.4f}")
    parts += _preference_parts(detail)
    if detail.skipped:
        parts.append("left out")
    if seconds > 0 and detail.tokens is not None:
        parts.append(f"{detail.tokens / seconds:7,.0f} tokens/s")
    parts.append(f"{seconds:7.3f} s")
    if eta_s is not None:
        parts.append(f"ETA {short_time(eta_s):>6}")
    if detail.grad_norm is not None:
        parts.append(f"grad_norm {detail.grad_norm:6.3f}")
    if detail.learning_rate is not None:
        parts.append(f"lr {detail.learning_rate:.2e}")
    if detail.mfu is not None:
        parts.append(f"MFU {detail.mfu:5.1%}")
    elif detail.tflops_per_rank is not None:
        parts.append(f"{detail.tflops_per_rank:.4g} TFLOP/s/GPU")
    if detail.expert_load_max is not None:
        parts.append(f"experts {detail.expert_load_max:.1f}x")
    if detail.memory_bytes is not None:
        parts.append(f"{detail.memory_bytes / 2**30:.2f} GiB")
    while len(text := "  ".join(parts)) > LINE_WIDTH:
        parts.pop()
    return text


def _preference_parts(detail: training.Step) -> list[str]:
    accuracy = [] if detail.accuracy is None else [f"accuracy {detail.accuracy:4.0%}"]
    return accuracy + ([] if detail.margin is None else [f"margin {detail.margin:7.4f}"])


def short_time(seconds: float) -> str:
    """``12 s``, ``14 min``, ``3.2 h``, ``2.5 d``."""
    for unit, size, digits in (("d", 86_400, 1), ("h", 3600, 1), ("min", 60, 0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def step_figures(detail: training.Step | None) -> list[str]:
    """Loss, tokens/s and MFU of a step, where they are known: for a line that is redrawn."""
    parts: list[str] = []
    if detail is None:
        return parts
    if detail.loss is not None:
        parts.append(f"loss {detail.loss:.4f}")
    if detail.tokens and detail.step_ns:
        parts.append(f"{detail.tokens / detail.step_ns * 1e9:,.0f} tokens/s")
    if detail.mfu is not None:
        parts.append(f"MFU {detail.mfu:.1%}")
    return parts


def eval_line(step: int | None, detail: training.Eval) -> str:
    """Held-out figures in one line."""
    of = "?" if detail.questions is None else detail.questions
    figures = (
        f"{label} {figure} of {of}" if label == "execution accuracy" else f"{label} {figure}"
        for label, figure in eval_figures(detail)
    )
    return "  ".join((f"eval after step {step}", *figures))


def eval_figures(detail: training.Eval) -> Iterator[tuple[str, str]]:
    """(label, figure) of those that the evaluation has, in the order of a table."""
    for label, value, form in (
        ("held-out loss", detail.loss, "{:.4f}"),
        ("accuracy of pairs", detail.accuracy, "{:.3f}"),
        ("margin", detail.margin, "{:.4f}"),
        ("execution accuracy", detail.execution_accuracy, "{:.3f}"),
        ("query match", detail.query_match, "{:.3f}"),
        ("majority baseline", detail.baseline_accuracy, "{:.3f}"),
    ):
        if value is not None:
            yield label, form.format(value)


def sample_lines(detail: training.Generation) -> Iterator[str]:
    """A question, what was written for it, and what was expected."""
    mark = {True: "right", False: "wrong", None: ""}[detail.correct]
    yield f"  prompt   {one_line(detail.prompt, 200)}"
    yield f"  wrote    {one_line(detail.completion, 200)}  {mark}".rstrip()
    if detail.correct is False and detail.expected:
        yield f"  expected {one_line(detail.expected, 200)}"


def one_line(text: object, width: int = 100) -> str:
    """``text`` on one line, cut to ``width``."""
    flat = " ".join(str(text).split())
    return flat if len(flat) <= width else flat[: width - 3] + "..."


def _model(event: Event) -> str:
    detail = event.read(training.ModelReady)
    counts = f"{detail.parameters:,} parameters, {detail.trainable_parameters:,} train"
    return f"model: {counts}; attention: {detail.attention}"


def _data(event: Event) -> str:
    detail = event.read(training.DataPrepared)
    cached = " (cached)" if detail.cached else ""
    left_out = detail.questions_left_out
    why = f"; {left_out:,} held-out questions left out: {detail.questions_left_out_why}" if left_out else ""
    return f"data: {detail.tokens:,} tokens in {detail.sequences:,} sequences{cached}{why}"


def _trace(event: Event) -> str:
    detail = event.read(training.TraceWritten)
    if detail.problem is not None:
        return f"no trace of rank {event.rank}: {detail.problem}"
    return f"trace of rank {event.rank}, steps {detail.first_step} to {event.step}: {detail.file}"


def _attempt(event: Event) -> str:
    detail = event.read(attempts.AttemptStarted)
    resumed = detail.resume_step or -1
    where = f", resumes after step {resumed}" if resumed > 0 else ""
    layout = " x ".join(f"{axis} {size}" for axis, size in detail.layout.items() if size != 1) or "one rank"
    return f"attempt {event.attempt}: {detail.world_size} ranks ({layout}) on {', '.join(detail.hosts)}{where}"


def _detected(event: Event) -> str:
    detail = event.read(incidents.IncidentDetected)
    part_of = f" (part of {detail.part_of})" if detail.part_of else ""
    return f"incident {detail.incident_id}{part_of}: {detail.incident}: {detail.evidence}"


def _resolved(event: Event) -> str:
    detail = event.read(incidents.IncidentResolved)
    return f"recovered from {detail.incident_id} in {detail.lost_ns / 1e9:.2f} s"


def _waiting(event: Event) -> str:
    detail = event.read(run.RunWaiting)
    needed = f" ({detail.needed_hosts} are needed)" if detail.needed_hosts else ""
    return f"waiting for hosts; chosen so far: {', '.join(detail.hosts) or 'none'}{needed}"


def _host_check(event: Event) -> str | None:
    """Nothing where nothing is wrong."""
    detail = event.read(hosts.HostCheck)
    if detail.verdict not in ("incomplete", "reset", "drain", "replace"):
        return None
    found = "; ".join(detail.findings[:3])
    command = f"; to take it out: {detail.command}" if detail.command else ""
    return f"check of {event.host} ({detail.node or 'its machine'}): {detail.verdict}: {found}{command}"


_TEXTS: Mapping[type[Detail], str] = {
    attempts.AttemptAdopted: "attempt {event.attempt} continues under a new supervisor",
    attempts.AttemptAbandoned: "{detail.reason}",
    run.RunMessage: "note: {detail.text}",
    run.RunRestarted: "{detail.reason}",
    run.RunHeld: "held for {detail.hold_s:.0f} s: muster restart {event.run_id}",
    run.ConnectionRefused: "{detail.who} was refused: {detail.reason}",
    run.RunFinished: "{detail.outcome}: {detail.reason}",
    incidents.IncidentDecided: "decision on {detail.incident_id}: {detail.action}: {detail.reason}",
    hosts.TerminationNotice: "notice: {detail.notice} ({detail.source})",
    hosts.HostLost: "{event.host} is lost: {detail.evidence}",
    hosts.HostSetAside: "{event.host} cannot start and is set aside: {detail.reason}",
    hosts.HostReadmitted: "{event.host} may be used again: {detail.reason}",
    checkpoints.CheckpointCommitted: "checkpoint of step {event.step} in {detail.uri}",
    checkpoints.CheckpointFailed: "checkpoint not written: {detail.reason}",
    checkpoints.CheckpointRejected: "checkpoint passed over: {detail.uri}: {detail.reason}",
    checkpoints.CheckpointRestored: "restored step {event.step} from {detail.tier} on rank {event.rank}",
    checkpoints.FenceRebuilt: "repaired: {detail.reason}",
    checkpoints.MemoryLost: "{event.host}: {detail.reason}",
    checkpoints.SnapshotInterval: "{detail.reason}",
    checkpoints.SnapshotRejected: "snapshot passed over: step {detail.copy.step} of rank {detail.copy.rank} on "
    "{detail.copy.host} ({detail.copy.tier}): {detail.reason}",
}
"""The texts of kinds that need no more than their fields."""
_TEXT_BY_KIND = {cls.kind: (cls, text) for cls, text in _TEXTS.items()}
_RENDER: Mapping[str, Callable[[Event], str | None]] = {
    training.Step.kind: lambda event: step_line(event.step, event.read(training.Step)),
    training.Eval.kind: lambda event: eval_line(event.step, event.read(training.Eval)),
    training.ModelReady.kind: _model,
    training.DataPrepared.kind: _data,
    training.TraceWritten.kind: _trace,
    attempts.AttemptStarted.kind: _attempt,
    run.RunWaiting.kind: _waiting,
    incidents.IncidentDetected.kind: _detected,
    incidents.IncidentResolved.kind: _resolved,
    hosts.HostCheck.kind: _host_check,
}
