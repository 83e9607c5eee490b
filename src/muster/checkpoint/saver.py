"""Save training state, sharded and in the background, and commit it.

Each rank stages a copy of its share and continues training; the host's replicator writes it as one shard file under the
attempt's and step's final prefix, computing the checksum on the way, while a thread of the rank waits for its
answer (and writes the file itself where there is no replicator). The ranks then exchange sizes and
checksums (small collectives on a group of their own), and rank 0 writes the commit marker. One save at a time:
overlapping ones would interleave their collectives and deadlock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypedDict

import torch
import torch.distributed as dist

from muster.checkpoint import exchange
from muster.checkpoint.claim import Claim
from muster.checkpoint.handover import Handover, ReplicatorLost
from muster.checkpoint.staging import Staging
from muster.checkpoint_format import manifest as manifests
from muster.checkpoint_format import shards
from muster.checkpoint_format.draft import CheckpointDraft, WrittenShard
from muster.checkpoint_format.fences import NonceOf, unbound
from muster.checkpoint_format.shard_file import StoredFile, write_shard
from muster.checkpoint_format.tensor_index import shard_file
from muster.core import typed_json
from muster.core.errors import MusterError
from muster.core.protocols import Store
from muster.core.typed_json import JsonObject
from muster.core.types import Layout
from muster.storage import uris
from muster.storage.store import blobs

#: The fence is taken while the ranks restart; a save waits no longer for one that does not come than this.
FENCE_WAIT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Saved:
    """How a save ended; the same on every rank, except the times."""

    step: int
    committed: bool
    reason: str = ""
    """Why it is not committed."""
    stall_ns: int = 0
    """How long ``save`` held its caller."""
    duration_ns: int = 0
    bytes: int = 0
    """All ranks."""


@dataclass
class _Job:
    step: int
    extra: JsonObject
    begun_ns: int
    problem: str | None = None
    stall_ns: int = 0
    thread: threading.Thread | None = None
    result: Saved | None = None
    removed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    waited_for: bool = False
    """A later save was deferred because of this one, and the deferral was logged."""


class Saver:
    """Checkpoints of one attempt. Every rank makes one and calls it in the same order.

    Rank 0 begins to take the folder's fence when the Saver is made, and no rank writes before it has it.
    ``on_event(kind, step=..., **detail)`` gets the ``checkpoint.*`` events on rank 0, always from the caller's thread
    (in ``save``, ``poll``, ``finish``). A save that fails is an event, not an exception: training continues. So with a
    full disk, a bucket that is away, and a fence that can therefore not be taken.
    ``handover``: to the host's replicator, which writes this rank's files; None: a thread of this process does.

    Raises (``save``, ``poll``, ``finish`` and ``claimed``):
        ConflictError: a newer attempt, or another copy of the run, holds the folder (rank 0).
        AccessError, BackendError: the folder cannot be written (``claimed`` alone, rank 0).
    """

    def __init__(
        self,
        directory_uri: str,
        *,
        run_id: str,
        attempt: int,
        layout: Layout,
        keep_last: int,
        asynchronous: bool,
        group: dist.ProcessGroup | None,
        store: Store,
        on_event: Callable[..., None],
        handover: Handover | None = None,
        keep_best: int = 0,
        nonce_of: NonceOf = unbound,
    ) -> None:
        self.directory = directory_uri
        self.run_id, self.attempt, self.layout = run_id, attempt, layout
        self.keep_last, self.keep_best, self.asynchronous = keep_last, keep_best, asynchronous
        self.tier = "disk" if uris.is_local(directory_uri) else "bucket"
        self._group, self._store, self._on_event = group, store, on_event
        self.rank = exchange.rank_of(group)
        self._staging: Staging | None = None
        self._job: _Job | None = None
        self._committed_step: int | None = None
        self._tidied = False
        self._failed: list[str] = []
        """Folders of failed saves, which may exist in part."""
        self._handover = handover
        self._entered = False
        """Every rank knows that the fence is this attempt's."""
        self._rebuilt: list[str] = []
        """What was wrong with fences that were written again, still to be said."""
        self._claim: Claim | None = None
        self._nonce_of = nonce_of
        if self.rank == 0:
            claim = partial(manifests.claim, store, directory_uri, run_id=run_id, attempt=attempt)
            self._claim = Claim(partial(claim, on_rebuilt=self._rebuilt.append, nonce_of=nonce_of))

    def claimed(self) -> None:
        """Wait until older attempts can commit nothing more (rank 0; the others return at once)."""
        if self._claim is not None:
            self._claim.wait()

    def prepare(self, state: Mapping[str, torch.Tensor]) -> None:
        """Plan and allocate now, so that the first save stalls no longer than the others. Collective."""
        if self._staging is None:
            self._staging = Staging(state, self._group, shared=self._handover is not None)

    def save(self, step: int, state: Mapping[str, torch.Tensor], extra: JsonObject) -> None:
        """Save ``state`` as of ``step``; ``extra`` holds small JSON values. Collective.

        Waits for the save before (``busy``: it need not be called then), copies, and returns while the bytes are
        written (at once when asynchronous, else when committed). Saving the same step again does nothing.
        """
        begun_ns = time.monotonic_ns()
        self._check_fence(wait_s=FENCE_WAIT_S)
        self._join()
        self._collect()
        if step == self._committed_step:
            return
        job = _Job(step=step, extra=dict(extra), begun_ns=begun_ns)
        self._emit("checkpoint.begun", step, uri=self._uri(step))
        try:
            self.prepare(state)
            assert self._staging is not None
            self._staging.copy(state)
        except (MusterError, RuntimeError, MemoryError) as error:
            job.problem = f"rank {self.rank}: {error}"
        self._job = job
        if self.asynchronous:
            job.thread = threading.Thread(target=self._run, args=(job,), name=f"checkpoint-{step}", daemon=True)
            job.thread.start()
        else:
            self._run(job)
        job.stall_ns = time.monotonic_ns() - begun_ns
        if not self.asynchronous:
            self.poll()

    def poll(self) -> Saved | None:
        """Collect a save that is done, emitting its events; None while it runs or where there is none."""
        self._check_fence()
        return self._collect()

    def finish(self) -> Saved | None:
        """Wait for the running save and collect it; None where there is none."""
        self._join()
        self._check_fence(wait_s=FENCE_WAIT_S)
        return self._collect()

    def defer(self, step: int) -> None:
        """``step`` is due while another save is under way: it will be saved after that one. Said once a save."""
        job = self._job
        if self.rank == 0 and job is not None and not job.waited_for:
            job.waited_for = True
            under_way_s = (time.monotonic_ns() - job.begun_ns) / 1e9
            reason = f"that of step {job.step} has been under way for {under_way_s:.1f} s"
            self._on_event("run.message", step=step, text=f"the save of step {step} is deferred: {reason}")

    def _check_fence(self, *, wait_s: float = 0.0) -> None:
        if self._claim is not None:
            self._claim.check(wait_s=wait_s)
        while self._rebuilt:
            self._on_event("fence.rebuilt", reason=self._rebuilt.pop(0))

    def _join(self) -> None:
        if self._job is not None and self._job.thread is not None:
            self._job.thread.join()

    def _collect(self) -> Saved | None:
        job = self._job
        if job is None or job.result is None:
            return None
        if job.thread is not None:
            job.thread.join()
        self._job = None
        done = job.result
        uri = self._uri(job.step)
        if done.committed:
            self._committed_step = job.step
            figures = {"bytes": done.bytes, "duration_ns": done.duration_ns, "stall_ns": job.stall_ns}
            self._emit("checkpoint.committed", job.step, uri=uri, **figures)
        else:
            self._emit("checkpoint.failed", job.step, uri=uri, reason=done.reason)
        for removed in job.removed:
            self._on_event("checkpoint.removed", step=job.step, uri=removed)
        for note in job.notes:
            self._on_event("run.message", step=job.step, text=note)
        return replace(done, stall_ns=job.stall_ns)

    def abandon(self) -> None:
        """The ranks' group is broken: give up the save under way without waiting for its bytes.

        Its thread fails at the next exchange, before the marker; one that was past it has committed.
        """
        if self._job is not None and self._collect() is None:
            job, self._job = self._job, None
            self._emit("checkpoint.failed", job.step, uri=self._uri(job.step), reason="its world came to an end")

    @property
    def busy(self) -> bool:
        """A save has begun and is not collected yet."""
        return self._job is not None

    def _run(self, job: _Job) -> None:
        """Write, exchange, commit: the background thread's whole life. Never raises."""
        try:
            job.result = self._write_and_commit(job)
        except BaseException as error:  # noqa: BLE001 (a thread's edge; torch's CheckpointException is a BaseException)
            job.result = Saved(step=job.step, committed=False, reason=f"rank {self.rank}: {_words(error)}")

    def _write_and_commit(self, job: _Job) -> Saved:
        report: _Report = {}
        if not self._entered:
            problem = exchange.gather(self._fence(), self._group)[0]
            if problem is not None:
                return Saved(step=job.step, committed=False, reason=f"the folder could not be claimed: {problem}")
            self._entered = True
        if job.problem is None:
            try:
                report = self._write_shard(job)
            except (MusterError, OSError) as error:
                job.problem = f"rank {self.rank}: {_words(error)}"
        if job.problem is not None:
            report["problem"] = job.problem
        reports = exchange.gather(report, self._group)
        verdict: _Verdict = {}
        if self.rank == 0:
            try:
                verdict = self._commit(job, reports)
            except (MusterError, OSError) as error:
                verdict = {"problem": _words(error)}
        verdict = exchange.gather(verdict, self._group)[0]
        if self.rank == 0 and "problem" not in verdict:
            self._tidy(job)
        return Saved(
            step=job.step,
            committed="problem" not in verdict,
            reason=verdict.get("problem", ""),
            duration_ns=time.monotonic_ns() - job.begun_ns,
            bytes=verdict.get("bytes", 0),
        )

    def _fence(self) -> str | None:
        """Rank 0: take the fence, or say why it cannot be had; None: it is ours."""
        try:
            if self._claim is not None:
                self._claim.again()
        except Exception as error:  # noqa: BLE001 (the other ranks wait for an answer in any case)
            return _words(error)
        return None

    def _write_shard(self, job: _Job) -> _Report:
        """This rank's file; nothing where it has nothing to write."""
        staging = self._staging
        assert staging is not None
        if not staging.local_chunks:
            return {}
        draft = self._draft(job.step)
        preamble = shards.preamble(draft.header(self.rank, staging.local_chunks, {}))
        name = shard_file(self.rank)
        report: _Report = {}
        if self._handover is not None and staging.fd is not None:
            try:
                stored = self._handover.write(uris.join(draft.uri, name), preamble, staging.fd, staging.buffer.numel())
                return {"file": typed_json.encode(stored).decode()}
            except ReplicatorLost as error:
                # A replicator that resumes later still writes: never into a file that may be committed.
                name = f"own-{name}"
                text = f"the replicator did not write rank {self.rank}'s share, so the rank did: {_words(error)}"
                report["note"] = text
        data = memoryview(staging.buffer.numpy().data)
        stored = write_shard(uris.join(draft.uri, name), (preamble, data))
        return {"file": typed_json.encode(stored).decode(), **report}

    def _commit(self, job: _Job, reports: list[_Report]) -> _Verdict:
        """Rank 0: the index, then the marker."""
        job.notes += [report["note"] for report in reports if "note" in report]
        problems = [report["problem"] for report in reports if "problem" in report]
        if problems:
            self._leave_behind(job)
            return {"problem": problems[0]}
        assert self._staging is not None
        draft = self._draft(job.step)
        written = [
            WrittenShard(
                file=typed_json.decode(StoredFile, reports[rank]["file"]),
                begin=len(shards.preamble(draft.header(rank, chunks, {}))),
                tensors=chunks,
            )
            for rank, chunks in enumerate(self._staging.chunks)
            if chunks
        ]
        try:
            manifest = draft.finish(self._store, written, extra=job.extra)
        except (MusterError, OSError):
            self._leave_behind(job)
            raise
        manifests.commit(self._store, manifest, on_rebuilt=self._rebuilt.append, nonce_of=self._nonce_of)
        return {"bytes": manifest.bytes}

    def _tidy(self, job: _Job) -> None:
        """Rank 0, after a commit: old versions and, once, what older attempts left. A failure is a note."""
        store, folder, run_id, attempt = self._store, self.directory, self.run_id, self.attempt
        self._failed = [uri for uri in self._failed if uri != self._uri(job.step)]  # tried again, and done
        self._sweep(job)
        try:
            job.removed += manifests.prune(
                store, folder, keep_last=self.keep_last, keep_best=self.keep_best, run_id=run_id, attempt=attempt
            )
            if not self._tidied:
                job.removed += manifests.remove_orphans(store, folder, run_id=run_id, attempt=attempt)
                self._tidied = True
        except (MusterError, OSError) as error:
            job.notes.append(f"old checkpoints could not be removed: {_words(error)}")

    def _leave_behind(self, job: _Job) -> None:
        """Rank 0: a save failed before its marker was tried. What it wrote takes the room that the next one needs."""
        self._failed.append(self._uri(job.step))
        if self.tier == "disk":  # a bucket is not full, and may be away: after the next commit
            self._sweep(job)

    def _sweep(self, job: _Job) -> None:
        for uri in list(self._failed):
            try:
                blobs.remove_tree(uri)
                self._failed.remove(uri)
            except (MusterError, OSError) as error:
                job.notes.append(f"what a save that failed has written could not be removed: {_words(error)}")

    def _draft(self, step: int) -> CheckpointDraft:
        return CheckpointDraft(
            directory=self.directory, run_id=self.run_id, step=step, attempt=self.attempt, layout=self.layout
        )

    def _uri(self, step: int) -> str:
        return self._draft(step).uri

    def _emit(self, kind: str, step: int, **detail: object) -> None:
        if self.rank == 0:
            self._on_event(kind, step=step, tier=self.tier, **detail)


class _Report(TypedDict, total=False):
    """A rank's word to rank 0."""

    problem: str
    file: str
    """A StoredFile, encoded."""
    note: str


class _Verdict(TypedDict, total=False):
    """Rank 0's word to all."""

    problem: str
    bytes: int


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
