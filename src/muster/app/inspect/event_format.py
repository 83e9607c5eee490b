"""Events as plain lines: one per step, in the terms of the field; None for events that are not printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from muster.core.events import Event


def line(event: Event) -> str | None:
    """One line about the event, or None."""
    render = _RENDER.get(event.kind)
    return render(event, event.detail) if render else None


def step_line(step: int | None, detail: Mapping[str, Any]) -> str:
    """``step 12  loss 2.3451  time 0.18 s  ...``; what is unknown is left out."""
    seconds = detail["step_ns"] / 1e9
    words = [f"step {step}"]
    if detail["loss"] is not None:
        words.append(f"loss {detail['loss']:.4f}")
    if detail.get("skipped"):
        words.append("left out")
    words.append(f"time {seconds:.3f} s")
    if "tflops_per_rank" in detail:
        words.append(f"{detail['tflops_per_rank']:.4g} TFLOP/s/GPU")
    if seconds > 0 and detail["tokens"] is not None:
        words.append(f"{detail['tokens'] / seconds:,.0f} tokens/s")
    if detail["grad_norm"] is not None:
        words.append(f"grad_norm {detail['grad_norm']:.3f}")
    if detail["learning_rate"] is not None:
        words.append(f"lr {detail['learning_rate']:.2e}")
    if "memory_bytes" in detail:
        words.append(f"memory {detail['memory_bytes'] / 2**30:.2f} GiB")
    if detail.get("mfu") is not None:
        words.append(f"MFU {detail['mfu']:.1%}")
    if detail["tokens"] is not None:
        words.append(token_split(detail))
    return "  ".join(words)


def step_figures(detail: Mapping[str, Any]) -> list[str]:
    """Loss, tokens/s and MFU of a step, where they are known: for a line that is redrawn."""
    words = []
    if detail.get("loss") is not None:
        words.append(f"loss {detail['loss']:.4f}")
    if detail.get("tokens") and detail.get("step_ns"):
        words.append(f"{detail['tokens'] / detail['step_ns'] * 1e9:,.0f} tokens/s")
    if detail.get("mfu") is not None:
        words.append(f"MFU {detail['mfu']:.1%}")
    return words


def token_split(detail: Mapping[str, Any]) -> str:
    """Shares of the step's positions: supervised / context / padding."""
    tokens, supervised, padding = detail["tokens"], detail["supervised_tokens"], detail["padding_tokens"]
    whole = max(1, tokens + padding)
    shares = (supervised / whole, (tokens - supervised) / whole, padding / whole)
    return "supervised/context/padding " + "/".join(f"{share:.0%}" for share in shares)


def eval_line(step: int | None, detail: Mapping[str, Any]) -> str:
    """Held-out figures in one line."""
    words = [f"eval after step {step}"]
    if detail.get("loss") is not None:
        words.append(f"held-out loss {detail['loss']:.4f}")
    if detail.get("execution_accuracy") is not None:
        words.append(f"execution accuracy {detail['execution_accuracy']:.3f} of {detail.get('questions', '?')}")
    if detail.get("query_match") is not None:
        words.append(f"query match {detail['query_match']:.3f}")
    if detail.get("baseline_accuracy") is not None:
        words.append(f"majority baseline {detail['baseline_accuracy']:.3f}")
    return "  ".join(words)


def one_line(text: object, width: int = 100) -> str:
    """``text`` on one line, cut to ``width``."""
    flat = " ".join(str(text).split())
    return flat if len(flat) <= width else flat[: width - 3] + "..."


def _model(_: Event, detail: Mapping[str, Any]) -> str:
    return (
        f"model: {detail['parameters']:,} parameters, {detail['trainable_parameters']:,} train; "
        f"attention: {detail['attention']}"
    )


def _data(_: Event, detail: Mapping[str, Any]) -> str:
    cached = " (cached)" if detail.get("cached") else ""
    return f"data: {detail['tokens']:,} tokens in {detail['sequences']:,} sequences{cached}"


def _attempt(event: Event, detail: Mapping[str, Any]) -> str:
    resumed = detail.get("resume_step", -1)
    where = f", resumes after step {resumed}" if isinstance(resumed, int) and resumed > 0 else ""
    layout = " x ".join(f"{axis} {size}" for axis, size in detail["layout"].items() if size != 1) or "one rank"
    return f"attempt {event.attempt}: {detail['world_size']} ranks ({layout}) on {', '.join(detail['hosts'])}{where}"


_RENDER: Mapping[str, Callable[[Event, Mapping[str, Any]], str]] = {
    "step": lambda event, detail: step_line(event.step, detail),
    "eval": lambda event, detail: eval_line(event.step, detail),
    "model.ready": _model,
    "data.prepared": _data,
    "attempt.started": _attempt,
    "run.message": lambda _, detail: f"note: {detail['text']}",
    "run.restarted": lambda _, detail: detail["reason"],
    "incident.detected": lambda _, detail: (
        f"incident {detail['incident_id']}: {detail['incident']}: {detail['evidence']}"
    ),
    "incident.decided": lambda _, detail: (
        f"decision on {detail['incident_id']}: {detail['action']}: {detail['reason']}"
    ),
    "incident.resolved": lambda _, detail: f"recovered from {detail['incident_id']} in {detail['lost_ns'] / 1e9:.2f} s",
    "termination.notice": lambda _, detail: f"notice: {detail['notice']} ({detail['source']})",
    "checkpoint.committed": lambda event, detail: f"checkpoint of step {event.step} in {detail['uri']}",
    "checkpoint.failed": lambda _, detail: f"checkpoint not written: {detail['reason']}",
    "checkpoint.rejected": lambda _, detail: f"checkpoint passed over: {detail['uri']}: {detail['reason']}",
    "checkpoint.restored": lambda event, detail: (
        f"restored step {event.step} from {detail['tier']} on rank {event.rank}"
    ),
    "host.lost": lambda event, detail: f"{event.host} is lost: {detail['evidence']}",
    "host.readmitted": lambda event, detail: f"{event.host} may be used again: {detail['reason']}",
    "run.finished": lambda _, detail: f"{detail['outcome']}: {detail['reason']}",
}
