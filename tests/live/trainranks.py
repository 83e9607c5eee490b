"""Real ranks for tests: ``run_rank`` in forked processes, with a link that kills or gives orders at a chosen point.

A fork server of multiprocessing imports torch once for the whole test session.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from ports import free_port

from muster.config.spec import RunSpec
from muster.core import event_log
from muster.core.events import Event
from muster.core.types import Layout
from muster.protocol.ranks import Command, RankContext, Restore

TIMEOUT_S = 120.0
#: What ``multiprocessing.popen_forkserver`` reports of a child whose fork server ended without a word; no rank says so.
FORK_SERVER_GONE = 255


@dataclass(frozen=True, kw_only=True)
class Script:
    """What happens to one attempt besides training."""

    kill_step: int | None = None
    """SIGKILL of ``kill_rank`` in this step, before its second micro-batch's end (or its first one's)."""
    kill_rank: int = 0
    kill_in_save: str | None = None
    """``data``: SIGKILL in the middle of a shard file; ``marker``: with all data written, before the commit."""
    kill_save_step: int = 0
    """The first save that ``kill_in_save`` concerns."""
    order_step: int | None = None
    order: Command | None = None
    order_rank: int = 0
    unit_per_layer: bool = False
    """One FSDP unit a decoder layer, as large models have it."""
    reduce_every_round: bool = False
    stage_order: tuple[int, bool, bool] | None = None
    """Chunks of each pipeline stage, whether gradients of weights come apart, and whether chunks are placed in a V: the
    ranks check that it is so."""
    exact_range_bits: int | None = None
    slow_snapshots: tuple[int, float] | None = None
    """(rank, seconds that each of its snapshots takes longer); no state counts as small."""
    snapshot_dir: str | None = None
    restore: Restore | None = None


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    codes: list[int | None]
    events: list[Event] = field(repr=False)
    state_hash: str | None
    errors: list[str] = field(repr=False)

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    @property
    def losses(self) -> dict[int, float]:
        return {event.step: event.detail["loss"] for event in self.of("step") if event.step is not None}

    @property
    def norms(self) -> dict[int, float]:
        return {event.step: event.detail["grad_norm"] for event in self.of("step") if event.step is not None}


def small(cache: Path, **changes: Any) -> dict[str, Any]:
    """A run file of a few seconds: ``changes`` are dotted keys with ``__`` for dots."""
    found: dict[str, Any] = {
        "name": "small",
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 96,
                "max_position_embeddings": 256,
            },
            "tokenizer": {"vocab_size": 256},
            "dtype": "float32",
        },
        "data": {
            "sources": [{"type": "text2sql", "level": 1, "rows": 300, "heldout_rows": 10}],
            "cache_dir": str(cache),
            "workers": 1,
        },
        "training": {
            "steps": 6,
            "sequence_length": 96,
            "global_batch_size": 6,
            "micro_batch_size": 1,
            "deterministic": True,
            "loss_chunk_tokens": 64,
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 1.0},
        },
        "evaluation": {"samples": 0, "num_sequences": 0, "at_start": False},
        "checkpoint": {"every_steps": 0},
        "resources": {"device": "cpu", "threads_per_rank": 1},
        "output": {"tensorboard": False, "peak_tflops": 1.0},
    }
    for key, value in changes.items():
        place = found
        *path, last = key.split("__")
        for name in path:
            place = place.setdefault(name, {})
        place[last] = value
    return found


def prepared_run(run_dir: Path, spec: Mapping[str, Any]) -> RunSpec:
    """The run's folder with its resolved file and its data."""
    from muster.data.prepare import prepare

    run_dir.mkdir(parents=True, exist_ok=True)
    checked = RunSpec.model_validate(spec)
    (run_dir / "resolved.json").write_text(checked.model_dump_json())
    prepare(checked, run_dir=run_dir)
    return checked


def run_attempt(
    run_dir: Path,
    spec: Mapping[str, Any],
    *,
    ranks: int,
    attempt: int = 1,
    layout: Mapping[str, int] | None = None,
    script: Script | None = None,
) -> Outcome:
    """One attempt from start to end, each rank a process; never raises for what the ranks do."""
    prepared_run(run_dir, spec)
    context = server()
    port = free_port()
    script = script or Script()
    wanted = Layout(**(layout or {"dp_shard": ranks}))
    processes = []
    for rank in range(ranks):
        given = RankContext(
            run_id="test",
            run_dir=str(run_dir),
            attempt=attempt,
            host="h0",
            rank=rank,
            local_rank=rank,
            world_size=ranks,
            local_world_size=ranks,
            layout=wanted,
            master_addr="127.0.0.1",
            master_port=port,
            snapshot_dir=script.snapshot_dir,
            restore=script.restore,
        )
        process = context.Process(target=_rank, args=(given, script))
        process.start()
        processes.append(process)
    _await(processes)
    hashes = run_dir / f"state.a{attempt}.json"
    logs = [(run_dir / f"rank-{rank}.a{attempt}.log").read_text() for rank in range(ranks)]
    return Outcome(
        codes=[process.exitcode for process in processes],
        events=[event for name, event in event_log.read(run_dir / "events") if name == f"h0.{attempt}.jsonl"],
        state_hash=json.loads(hashes.read_text())["hash"] if hashes.exists() else None,
        errors=logs,
    )


def _await(processes: Sequence[Any]) -> None:
    """All ranks' ends; as an agent would, the rest are killed when one died by a signal or an error."""
    deadline = time.monotonic() + TIMEOUT_S
    while any(process.exitcode is None for process in processes):
        time.sleep(0.01)
        broken = any(process.exitcode not in (None, 0, 130, 75) for process in processes)
        if broken or time.monotonic() > deadline:
            time.sleep(0.3)  # the others' own last words
            for process in processes:
                if process.exitcode is None:
                    process.kill()
    for process in processes:
        process.join()
    lost = [rank for rank, process in enumerate(processes) if process.exitcode == FORK_SERVER_GONE]
    assert not lost, f"ranks {lost}: multiprocessing's fork server ended before them, so their exit codes are not known"


def _rank(context: RankContext, script: Script) -> None:
    log = os.open(
        Path(context.run_dir) / f"rank-{context.rank}.a{context.attempt}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        from muster.rank import worker
        from muster.train import components

        _install(components, worker, context, script)
        code = worker.run_rank(context, _link(context, script))
    except BaseException:  # noqa: BLE001 (a process's edge: the log has it)
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _install(components: Any, worker: Any, context: RankContext, script: Script) -> None:
    if script.unit_per_layer:
        components.build_model = functools.partial(components.build_model, whole_below=0)
    if script.reduce_every_round:
        components.LOCAL_GRADIENTS_SHARE = 0.0
    if script.exact_range_bits is not None:
        from muster.train.distributed import fixed_point

        fixed_point.RANGE_BITS = script.exact_range_bits
    if script.slow_snapshots is not None:
        _slow_snapshots(context.rank, *script.slow_snapshots)
    if script.stage_order is not None:
        _check_order(components, script.stage_order)
    run_phases = worker.run_phases

    def and_hash(run: Any) -> Any:
        ended = run_phases(run)
        _write_hash(run, context)
        return ended

    worker.run_phases = and_hash
    if script.kill_in_save and context.rank == script.kill_rank:
        _die_in_save(script)


def _check_order(components: Any, wanted: tuple[int, bool, bool]) -> None:
    pipeline_of = components.pipeline_of

    def checked(found: Any) -> Any:
        pipeline = pipeline_of(found)
        schedule = pipeline.stage.schedule
        assert (schedule.chunks, schedule.split_backward, schedule.v) == wanted
        assert len(found.built.module.stage.chunks) == wanted[0]
        return pipeline

    components.pipeline_of = checked


def _slow_snapshots(rank: int, slow_rank: int, seconds: float) -> None:
    from muster.core import intervals
    from muster.train.state.snapshot import Snapshots

    intervals.SNAPSHOT_SMALL_BYTES = 0
    save = Snapshots.save

    def slower(self: Any, *args: Any, **kwargs: Any) -> None:
        save(self, *args, **kwargs)
        time.sleep(seconds if rank == slow_rank else 0)

    Snapshots.save = slower  # type: ignore[method-assign]


def _die_in_save(script: Script) -> None:
    from muster.checkpoint import saver

    write, commit = saver.Saver._write_shard, saver.Saver._commit

    def torn(self: Any, job: Any) -> Any:
        """Half of the file is there, then the process is gone."""
        found = write(self, job)
        if job.step >= script.kill_save_step:
            (path,) = Path(self.directory).glob(f"step-{job.step:08d}.a*/rank-{self.rank:05d}.*")
            os.truncate(path, path.stat().st_size // 2)
            _die()
        return found

    def uncommitted(self: Any, job: Any, reports: Any) -> Any:
        if job.step >= script.kill_save_step:
            _die()
        return commit(self, job, reports)

    if script.kill_in_save == "data":
        saver.Saver._write_shard = torn  # type: ignore[method-assign]
    else:
        saver.Saver._commit = uncommitted  # type: ignore[method-assign]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _link(context: RankContext, script: Script) -> Any:
    from muster.rank.standalone_client import StandaloneClient

    class ScriptedLink(StandaloneClient):
        beats = 0
        given = False

        def beat(self, step: int) -> None:
            if step == script.kill_step and context.rank == script.kill_rank:
                self.beats += 1
                if self.beats >= 1:
                    _die()

        def next_command(self) -> Command | None:
            due = script.order is not None and context.rank == script.order_rank
            if due and not self.given and self.step >= (script.order_step or 0):
                self.given = True
                return script.order
            return None

        step = 0

        def emit(self, kind: str, *, step: int | None = None, phase: str | None = None, **detail: Any) -> None:
            if kind == "step" and step is not None:
                self.step = step
            super().emit(kind, step=step, phase=phase, **detail)

    return ScriptedLink(context)


def _write_hash(run: Any, context: RankContext) -> None:
    import torch
    from torch.distributed.tensor import DTensor

    digest = hashlib.sha256()
    for name, tensor in sorted(run.state.sharded().items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(name.encode())
        digest.update(whole.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    if context.rank == 0:
        path = Path(context.run_dir) / f"state.a{context.attempt}.json"
        path.write_text(json.dumps({"hash": digest.hexdigest(), "step": run.state.step}))


@functools.cache
def server() -> Any:
    """The fork server, with everything imported that a rank needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["muster.rank.worker", "transformers.models.llama.modeling_llama", "torch.distributed.fsdp", "peft"]
    )
    for_ranks = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    before = {name: os.environ.get(name) for name in for_ranks}
    os.environ.update(for_ranks)
    forkserver.ensure_running()  # it takes the environment along; other tests keep theirs
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    return context


Reference = Callable[[Path], dict[int, float]]
