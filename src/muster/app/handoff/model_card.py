"""A model card: what was trained on what, and what it scored, from a run's file and events. Markdown for the hub."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence

from muster.config.spec import RunSpec
from muster.core.event_details.training import Eval
from muster.core.redact import redact
from muster.data.weights.model_files import hub_id
from muster.report.render.document import Document
from muster.report.run_view import RunView


def model_card(
    spec: RunSpec,
    seen: RunView,
    document: Document,
    *,
    step: int,
    kind: str,
    licence: Mapping[str, str] | None = None,
    note: str = "",
) -> str:
    """The card of the checkpoint of ``step``; ``kind``: model, merged or adapter. ``licence``: the base's, as metadata;
    ``note``: how it is loaded. Paths of this machine, and what looks like a secret, are not in it."""
    lines = [
        *_header(spec, kind, licence or {}), "",
        f"# {spec.name}", "",
        _sentence(spec, kind, step), "", *([f"{note[0].upper()}{note[1:]}.", ""] if note else []),
        "## What it scored", "", *_scores(seen.evals, step), "",
        "## Trained on", "", *_sources(spec), "",
        "## How", "", *_figures(spec, document), "",
        f"Trained with Muster {document.version or ''} as run `{document.run_id}`.",
    ]  # fmt: skip
    return redact("\n".join(lines)) + "\n"


def _header(spec: RunSpec, kind: str, licence: Mapping[str, str]) -> Iterator[str]:
    """The hub's metadata (https://huggingface.co/docs/hub/model-cards#model-card-metadata)."""
    yield "---"
    yield f"library_name: {'peft' if kind == 'adapter' else 'transformers'}"
    yield "pipeline_tag: text-generation"
    yield "tags: [muster]"
    if (base := _public(spec.model.source if spec.model else None)) is not None:
        yield f"base_model: {json.dumps(base)}"
    yield from (f"{key}: {json.dumps(value)}" for key, value in licence.items())
    sources = spec.data.sources if spec.data is not None else []
    sets = list(dict.fromkeys(str(source.model_dump()["name"]) for source in sources if source.type == "hub"))
    if sets:
        yield f"datasets: {json.dumps(sets)}"
    yield "---"


def _sentence(spec: RunSpec, kind: str, step: int) -> str:
    assert spec.model is not None
    config = spec.model.config
    made = f"a new {config.get('model_type', 'causal language')} model" if isinstance(config, dict) else "a new model"
    base = f"`{_named(spec.model.source)}`" if spec.model.source else made
    lora = spec.model.lora
    adapters = f" by LoRA adapters of rank {lora.rank}{' (merged)' if kind == 'merged' else ''}" if lora else ""
    return f"Made from {base}{adapters}: the checkpoint of step {step:,}."


def _scores(evals: Mapping[int, Eval], step: int) -> Iterator[str]:
    """Held-out figures before training and of this checkpoint; of the nearest evaluation before it, which is named."""
    before = evals.get(0)
    at = max((each for each in evals if 0 < each <= step), default=None)
    if at is None:
        yield "Nothing was measured on held-out data."
        return
    where = f"step {at:,}" if at == step else f"step {at:,}, the last evaluation before it"
    yield f"On held-out data, after {where}:"
    yield ""
    yield f"| figure |{' before |' if before else ''} after |"
    yield f"|---|{'---:|' if before else ''}---:|"
    for label, name, form in (
        ("loss (per supervised token)", "loss", "{:.4f}"),
        ("execution accuracy", "execution_accuracy", "{:.1%}"),
        ("queries equal to gold", "query_match", "{:.1%}"),
        ("questions asked", "questions", "{:,}"),
    ):
        values = [getattr(each, name) for each in ([before] if before else []) + [evals[at]]]
        if values[-1] is not None:
            cells = ["-" if value is None else form.format(value) for value in values]
            yield f"| {label} | {' | '.join(cells)} |"


def _sources(spec: RunSpec) -> Iterator[str]:
    sources = spec.data.sources if spec.data is not None else []
    for source in sources:
        given = source.model_dump()
        name, path = given.get("name"), given.get("path")
        words = [f"`{_named(str(path))}`"] if path else [] if name else ["rows that Muster generates"]
        if name:
            parts = (given.get(key) for key in ("subset", "split", "revision"))
            words = [f"[{name}](https://huggingface.co/datasets/{name})", *(str(part) for part in parts if part)]
        words += [f"weight {source.weight:g}"] if len(sources) > 1 else []
        words += [f"at most {source.limit:,} rows"] if source.limit else []
        yield f"* {source.type}: {', '.join(words)}"


def _figures(spec: RunSpec, document: Document) -> Iterator[str]:
    training, optimizer = spec.training, spec.training.optimizer
    hosts = document.host_time.hosts.values()
    machines = ", ".join(sorted({host.machine for host in hosts if host.machine})) or "hosts without a machine type"
    rows: Sequence[tuple[str, str]] = (
        ("steps", f"{document.steps:,}"),
        ("tokens", f"{document.tokens:,}"),
        ("batch", f"{training.global_batch_size} sequences of {training.sequence_length} tokens"),
        ("optimizer", f"{optimizer.name}, learning rate {optimizer.learning_rate:g}, {optimizer.schedule}"),
        ("precision", f"{spec.model.dtype if spec.model else ''}, seed {training.seed}"),
        ("hardware", f"{len(hosts)} hosts ({machines}), {sum(host.gpus for host in hosts)} ranks"),
        ("time", f"{document.wall_s / 3600:.2f} hours, {document.interruptions} interruptions"),
        ("cost", f"${document.cost.usd:,.2f}" if document.cost.usd else ""),
    )
    yield "| | |"
    yield "|---|---|"
    for label, value in rows:
        if value:
            yield f"| {label} | {value} |"


def _named(place: str) -> str:
    """A hub id, or the last part of a path: the rest is this machine's business."""
    return _public(place) or os.path.basename(place.rstrip("/"))


def _public(source: str | None) -> str | None:
    """A hub id; None: a path."""
    return None if source is None else hub_id(source)
