"""Export: a Hugging Face folder from a run's checkpoint, made and checked in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from muster.app.inspect.home_view import bring
from muster.app.inspect.report import report
from muster.app.inspect.status import spec_of
from muster.app.planning.source_run import weights_of
from muster.config.spec import RunSpec
from muster.config.validation import looks_local
from muster.core.errors import AccessError, BackendError, ConflictError, MusterError, UsageError, install_command
from muster.core.event_details.training import Eval
from muster.core.processes import run_visibly
from muster.core.redact import redact
from muster.core.typed_json import JsonObject, parse_object, text, texts, whole
from muster.data.hub import translate
from muster.data.weights.model_files import hub_id, licence_of
from muster.report.render.document import Document
from muster.report.run_view import RunView, run_view
from muster.storage import run_registry
from muster.storage.run_registry import RunDir


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A folder that was written, reloaded and compared."""

    folder: Path
    lines: tuple[str, ...]
    """Messages about it."""
    step: int
    kind: str
    """model, merged or adapter."""
    note: str = ""
    """How to load an adapter that does not simply load on its base."""
    url: str | None = None
    """Where it is on the hub."""


def export(
    reference: str,
    *,
    out: Path | None = None,
    step: int | None = None,
    best: bool = False,
    merge: bool = True,
    push: str | None = None,
    public: bool = False,
    base: str | None = None,
    verify: bool = True,
) -> Exported:
    """Write the folder; with ``verify`` reload it in a fresh process, compare logits and ids.

    ``best``: of the checkpoint with the lowest held-out loss; default: the newest. ``push``: a repository of the hub
    that it goes to with a model card, private unless ``public``; without ``out`` the folder is not kept then. ``base``:
    the hub's id that an adapter names.

    Raises:
        UsageError: both ``step`` and ``best``, or a ``base`` of a merged model.
        UsageError: no such run, the folder is taken, or the trainer is not installed.
        MusterError: nothing to export, or the comparison failed.
        AccessError, BackendError: the hub refuses, or is out of reach. Asked before anything is exported.
    """
    if best and step is not None:
        raise UsageError("--best and --step name different checkpoints", hint="give one of them")
    if base is not None and merge:
        raise UsageError(f"--base {base} is for an adapter, and this export is merged", hint="add --adapter")
    run = run_registry.find(reference)
    if importlib.util.find_spec("torch") is None:
        raise UsageError("muster export needs torch", hint=install_command("train"))
    bring(run, spec_of(run).backend, "events")
    bring(run, spec_of(run).backend, "outputs")
    hub = open_repository(push, public=public) if push is not None else None
    if hub is not None and out is None:
        with tempfile.TemporaryDirectory(prefix="push-", dir=run.path) as folder:
            found = _exported(run, Path(folder) / "export", step, best=best, merge=merge, base=base, verify=verify)
            return _pushed(hub, str(push), run, found, kept=False)
    found = _exported(run, out, step, best=best, merge=merge, base=base, verify=verify)
    return found if hub is None else _pushed(hub, str(push), run, found, kept=True)


def with_weights(spec: RunSpec, tell: Callable[[str], None]) -> RunSpec:
    """Where ``model.source`` names a run, what that trained: exported into its folder, unless it is there already.

    Raises:
        UsageError, MusterError: as ``export``, or as ``weights_of``.
    """
    weights = weights_of(spec)
    if weights is None:
        return spec
    run, folder = weights.run, weights.folder
    if not folder.is_dir():
        tell(f"model.source: exporting {run.run_id}, {folder.name}")
        export(str(run.path), step=weights.step)
    tell(f"model.source: {run.run_id}, {folder.name}: {folder}")
    return weights.source_of(spec)


def _pushed(hub: Any, repo: str, run: RunDir, found: Exported, *, kept: bool) -> Exported:
    """With its card, on the hub. The card stays in a folder that is kept."""
    result = report(str(run.path))
    seen, document = run_view(each.event for each in result.ledger.events), result.document
    licence = licence_of(found.folder)
    card = model_card(spec_of(run), seen, document, step=found.step, kind=found.kind, licence=licence, note=found.note)
    (found.folder / CARD).write_text(card)
    replaced, unnamed = _without_local_base(found)
    url = push(hub, found.folder, repo, message=f"Step {found.step} of {run.run_id}", replaced=replaced)
    found = replace(found, lines=(*found.lines, *unnamed))
    lines = (*found.lines, f"pushed to {url}") if kept else (
        f"step {found.step} ({found.kind}), pushed to {url}", *([found.note] if found.note else []), *unnamed,
    )  # fmt: skip
    return replace(found, lines=lines, url=url)


def _without_local_base(found: Exported) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The adapter's settings for the hub, without a path of this machine, and a line about it; nothing of others."""
    path = found.folder / "adapter_config.json"
    settings = parse_object(path.read_bytes()) if found.kind == "adapter" else {}
    if not looks_local(text(settings, "base_model_name_or_path")):
        return {}, ()
    data = json.dumps({**settings, "base_model_name_or_path": None}, indent=2).encode()
    return {path.name: data}, ("on the hub the adapter names no base, a folder of this machine: --base ORG/NAME does",)


def _exported(
    run: RunDir, out: Path | None, step: int | None, *, best: bool, merge: bool, base: str | None, verify: bool
) -> Exported:
    argv = [sys.executable, "-P", "-m", "muster.train.export.hf_folder", "--run-dir", str(run.path)]
    if out is not None:
        argv += ["--out", os.path.abspath(os.path.expanduser(out))]
    if step is not None:
        argv += ["--step", str(step)]
    if best:
        argv.append("--best")
    if not verify:
        argv.append("--no-verify")
    if not merge:
        argv += ["--adapter", *(["--base", base] if base else [])]
    code, printed = run_visibly(argv)
    record: JsonObject = {}
    for line in reversed(printed.splitlines()):
        try:
            record = parse_object(line)
            break
        except ValueError:
            continue
    if code != 0 or "folder" not in record:
        reason = text(record, "error", default=f"the export ended with code {code}")
        error = MusterError(reason, hint=text(record, "hint") or None)
        error.exit_code = whole(record, "exit_code", default=1) or 1
        raise error
    return Exported(
        folder=Path(text(record, "folder")),
        lines=tuple(texts(record, "lines")),
        step=whole(record, "step"),
        kind=text(record, "kind"),
        note=text(record, "note"),
    )


# ----------------
# An exported folder onto the Hugging Face hub: all of it in one commit, or nothing. The token is huggingface_hub's own
# matter: ``HF_TOKEN``, or ``hf auth login``.


CARD = "README.md"


def open_repository(repo: str, *, public: bool) -> Any:
    """The hub's client, with a repository that takes our files: made, private unless ``public``, or there already.

    Raises:
        UsageError: huggingface_hub is not installed, or ``repo`` is no name.
        AccessError: no token, or none that may write there.
        BackendError: the hub cannot be reached.
    """
    try:
        from huggingface_hub import HfApi, get_token
    except ImportError as error:
        raise UsageError("--push needs huggingface_hub", hint=install_command("data")) from error
    if repo.count("/") != 1 or not all(repo.split("/")):
        raise UsageError(f"--push {repo!r} names no repository", hint="--push OWNER/NAME")
    if get_token() is None:
        raise AccessError("--push needs a token of the Hugging Face hub", hint="`hf auth login`, or HF_TOKEN")
    api = HfApi()
    try:
        api.create_repo(repo, private=not public, exist_ok=True)
    except Exception as error:
        raise _told(error, repo) from error
    return api


def push(api: Any, folder: Path, repo: str, *, message: str, replaced: Mapping[str, bytes] | None = None) -> str:
    """Every file of the folder, in one commit, those of ``replaced`` with these bytes; its address.

    Raises:
        AccessError, BackendError: as ``open_repository``.
        ConflictError: another writer wrote there at this moment.
    """
    from huggingface_hub import CommitOperationAdd

    files = sorted(path for path in folder.rglob("*") if path.is_file())
    contents: dict[str, Path | bytes] = {path.relative_to(folder).as_posix(): path for path in files}
    add = [CommitOperationAdd(name, content) for name, content in {**contents, **(replaced or {})}.items()]
    try:
        commit = api.create_commit(repo, add, commit_message=message)
    except Exception as error:
        raise _told(error, repo) from error
    return str(commit.commit_url)


def _told(error: Exception, repo: str) -> Exception:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (409, 412):
        return ConflictError(f"{repo} was changed on the hub at this moment", hint="the same command again")
    if status == 403:
        return AccessError(f"the token may not write to {repo}", hint="a token with write access to that owner")
    if isinstance(error, RuntimeError) and error.__cause__ is not None:  # of one file's upload; it says which
        return BackendError(f"{repo}: {error} {error.__cause__}".splitlines()[0][:300], hint="the same command again")
    return translate(error, f"the repository {repo}")


# ----------------
# A model card: what was trained on what, and what it scored, from a run's file and events. Markdown for the hub


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
