"""The programs of a host that serve no rank directly: setup, data preparation, trackers, preemption notices."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from muster.agent.host_event_log import HostLog
from muster.agent.host_identity import HostIdentity
from muster.agent.ranks.program_output import ProgramOutput
from muster.agent.ranks.rank_process import Worker, end_child, on_exit
from muster.agent.ranks.setup_program import steps_of
from muster.agent.ranks.tracker_program import TrackerProgram
from muster.config.spec import RunSpec
from muster.core.errors import AccessError, UsageError
from muster.core.typed_json import Unreadable
from muster.protocol.codec import reader_of
from muster.protocol.pipes import PREEMPTION_NOTICES, PREPARATION, DataFailed, DataPrepared, Preparing
from muster.protocol.to_supervisor import HostPreparing, StartFailed
from muster.protocol.values import RankEvent
from muster.transport.connections import ConnectionPool

#: Data preparation that failed for another reason than the run file's is tried again after this long: a disk that was
#: full, a hub that did not answer.
RETRY_S = 10.0
#: Data preparation that was killed is restarted this often: what it has done is in the cache.
PREPARE_KILLS = 1
#: A preparation that takes longer says in the run's log each while how far it is, or which host it waits for.
NOTE_S = 60.0
#: In the host's folder in memory: the digest of the setup that this host has had. A new host has none.
SETUP_DONE = "setup.done"
SETUP = "muster.agent.ranks.setup_program"
SETUP_PATIENCE_S = 10.0
_decode_notice = reader_of(PREEMPTION_NOTICES)


class Programs:
    """``prepared``: whether the data is there."""

    def __init__(
        self,
        *,
        identity: HostIdentity,
        hub: ConnectionPool,
        log: HostLog,
        spec: Callable[[], RunSpec],
        exit_reason: Callable[[], str | None],
        on_set_up: Callable[[], None],
        on_prepared: Callable[[], None],
        living: Callable[[], list[Worker]],
        on_failure: Callable[[StartFailed | None], None],
        on_progress: Callable[[HostPreparing], None],
        on_notice: Callable[[str], None],
        tell: Callable[[RankEvent], None],
    ) -> None:
        """``on_set_up``: the host has had its setup. ``on_progress``: the preparation moves.

        ``living``: the ranks here, which a restarted agent's preparation must not end. ``on_failure``: the data
        cannot be prepared; None: now it was. ``on_notice``: this host is being preempted; who says so. ``tell``: logs
        an event, and has it shown where the run is watched."""
        self._identity, self._hub, self._log, self._spec = identity, hub, log, spec
        self._exit_reason, self._on_prepared = exit_reason, on_prepared
        self._living, self._on_failure, self._on_notice = living, on_failure, on_notice
        self.prepared = False
        self._on_set_up = on_set_up
        self._setup = HostSetup(identity=identity, hub=hub, on_failure=on_failure, on_note=log.note)
        self._trackers = TrackerProgram(
            host=identity.host, hub=hub, spec=spec, living=living, tell=tell, start=self._start_trackers
        )
        self._on_progress = on_progress
        self._prepare: subprocess.Popen[bytes] | None = None
        self._prepare_kills, self._noted_s = 0, 0.0
        self._result: DataPrepared | DataFailed | None = None
        self._failure: StartFailed | None = None
        """Why the data is not there, as it was told last."""
        self._retry_s = math.inf
        """When preparation that has failed is tried again."""
        self._preemption_watcher: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """The setup, then data preparation."""
        self._setup.run(self._spec(), self._after_setup)
        if self._identity.metadata_url is not None:
            self._start_preemption_watcher(self._identity.metadata_url)

    def prepare_again(self) -> None:
        """The run file changed."""
        self.prepared, self._failure = False, None
        self._setup.run(self._spec(), self._after_setup)

    def _after_setup(self) -> None:
        self._on_set_up()
        self._start_prepare()

    def on_start(self) -> None:
        """An attempt starts. Where preparation has failed it is tried again now, and what comes of it is told."""
        failed, self._failure = self._failure is not None, None
        if failed and self._prepare is None:
            self._start_prepare()

    def due_s(self) -> float:
        """When ``watch`` has something to do."""
        return min(self._retry_s, self._trackers.retry_s)

    def watch(self) -> None:
        """Call it in every turn of the loop."""
        if time.monotonic() >= self._retry_s:
            self._start_prepare()
        self._trackers.watch()

    def shutdown(self) -> None:
        """End them. At the end of the run trackers get what they lack, in a bounded time; nothing else waits long."""
        self._trackers.shutdown(self._exit_reason() or "")
        self._setup.shutdown()
        end_child(self._prepare)
        end_child(self._preemption_watcher)

    def _start_trackers(self) -> subprocess.Popen[bytes]:
        identity = self._identity
        return identity.start_program(
            "trackers", "muster.trackers.main", "--run-dir", str(identity.run_dir), "--run-id", identity.run_id,
            "--writer", self._log.writer, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=identity.variables(self._spec()),
        )  # fmt: skip

    # ------------------------------------------------------------ data preparation

    def _start_prepare(self) -> None:
        self._retry_s = math.inf
        if self._spec().data is None:
            self.prepared = True
            return
        arguments = ("--run-dir", str(self._identity.run_dir))
        try:
            env = self._identity.variables(self._spec())
        except AccessError as error:
            self._fail(StartFailed(reason=str(error), exit_code=error.exit_code, hint=error.hint))
            return
        child = self._prepare = self._identity.start_program(
            "prepare", "muster.data", *arguments, stdout=subprocess.PIPE, env=env
        )
        self._result, self._noted_s = None, time.monotonic()
        output = ProgramOutput(self._hub, child, lambda line: self._on_line(child, line))
        on_exit(self._hub, child.pid, lambda: self._on_prepare_exit(child, output))

    def _on_line(self, child: subprocess.Popen[bytes], line: bytes) -> None:
        """What the preparation says; lines that packages print are nothing to us."""
        try:
            said = reader_of(PREPARATION)(line)
        except Unreadable:
            return
        if child is not self._prepare:
            return
        if not isinstance(said, Preparing):
            self._result = said
            return
        self._on_progress(HostPreparing(activity=said.activity, done=said.done, total=said.total))
        if time.monotonic() - self._noted_s >= NOTE_S:
            self._noted_s = time.monotonic()
            share = f": {said.done / said.total:.0%}" if said.done and said.total else ""
            self._log.note(f"{self._identity.host}: {said.activity}{share}")

    def _on_prepare_exit(self, child: subprocess.Popen[bytes], output: ProgramOutput) -> None:
        host = self._identity.host
        output.close()
        code, result = child.wait(), self._result
        if child is not self._prepare:
            return  # of an earlier run file: another one has begun
        self._prepare = None
        if code < 0 and self._prepare_kills < PREPARE_KILLS and self._exit_reason() is None:
            self._prepare_kills += 1
            self._log.note(f"data preparation on {host} was ended by signal {-code} and is restarted")
            self._start_prepare()
            return
        if code == 0 and isinstance(result, DataPrepared):
            found = {"fingerprint": result.fingerprint, "tokens": result.tokens, "sequences": result.sequences}
            self._log.write("data.prepared", {**found, "cached": result.cached, **result.more})
            self.prepared, self._failure = True, None
            self._on_failure(None)
            self._on_prepared()
        elif isinstance(result, DataFailed):
            self._fail(StartFailed(reason=result.error, exit_code=result.exit_code, hint=result.hint))
        else:
            reason = f"data preparation ended with code {code}; see logs/prepare-{host}.log"
            hint = "code -9 without a user's kill is lack of memory" if code == -9 else None
            self._fail(StartFailed(reason=reason, hint=hint))

    def _fail(self, failure: StartFailed) -> None:
        told, self._failure = self._failure, failure
        if failure.exit_code != UsageError.exit_code:
            self._retry_s = time.monotonic() + RETRY_S
        if failure == told:
            return
        if self._living():
            self._log.note(f"{failure.reason}: the ranks on {self._identity.host} go on, it is tried again")
        else:
            self._on_failure(failure)

    # ------------------------------------------------------------ preemption notices of the cloud

    def _start_preemption_watcher(self, url: str) -> None:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "muster.agent.preemption_watcher", url],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._preemption_watcher = child
        ProgramOutput(self._hub, child, self._on_preemption)  # it ends where no metadata server is

    def _on_preemption(self, line: bytes) -> None:
        try:
            notice = _decode_notice(line)
        except Unreadable as error:
            self._log.note(f"a notice of the preemption watcher: {error}")
            return
        if notice.notice == "preempted":
            self._on_notice("the metadata server: preempted")
        else:
            source = f"the metadata server: {notice.value}"
            self._log.write("termination.notice", {"notice": notice.notice, "source": source, "grace_s": 60.0})


class HostSetup:
    """Once on a host: a restarted agent finds it done."""

    def __init__(
        self,
        *,
        identity: HostIdentity,
        hub: ConnectionPool,
        on_failure: Callable[[StartFailed | None], None],
        on_note: Callable[[str], None],
    ) -> None:
        self._identity, self._hub, self._on_failure, self._on_note = identity, hub, on_failure, on_note
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, spec: RunSpec, then: Callable[[], None]) -> None:
        """Call ``then`` once it is done: at once where there is nothing to do. A failure is told, not tried again."""
        memory, identity = self._identity.memory, self._identity
        digest = _digest(spec) if steps_of(spec) else ""
        if not digest or (memory.exists(SETUP_DONE) and memory.read(SETUP_DONE) == digest.encode()):
            then()
            return
        try:
            env = identity.variables(spec)
        except AccessError as error:
            self._on_failure(StartFailed(reason=str(error), exit_code=error.exit_code, hint=error.hint))
            return
        began = time.monotonic()
        child = self._child = identity.start_program(
            "setup", SETUP, "--run-dir", str(identity.run_dir), "--log", str(identity.log_path("setup")),
            "--done", str(memory.path(SETUP_DONE)), "--digest", digest, stdout=subprocess.PIPE, env=env,
        )  # fmt: skip
        on_exit(self._hub, child.pid, lambda: self._on_exit(child, then, began))

    def _on_exit(self, child: subprocess.Popen[bytes], then: Callable[[], None], began: float) -> None:
        assert child.stdout is not None
        out, code = child.stdout.read(1 << 16), child.wait()
        child.stdout.close()
        if child is not self._child:
            return  # the run file has changed meanwhile, or the agent ends
        self._child = None
        if code == 0:
            self._on_note(f"setup on {self._identity.host} took {time.monotonic() - began:.1f} s")
            self._on_failure(None)
            then()
            return
        failed = None
        with contextlib.suppress(Unreadable, IndexError):
            failed = reader_of(PREPARATION)(out.strip().splitlines()[-1])
        reason = f"setup ended with code {code}; see logs/setup-{self._identity.host}.log"
        hint = None
        if isinstance(failed, DataFailed):
            reason, hint = failed.error, failed.hint
        self._on_failure(
            StartFailed(reason=f"{self._identity.host}: {reason}", exit_code=UsageError.exit_code, hint=hint)
        )

    def shutdown(self) -> None:
        """End it with its programs; never waits long."""
        child, self._child = self._child, None
        if child is not None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(SETUP_PATIENCE_S)


def _digest(spec: RunSpec) -> str:
    """Of what it runs, and in which code."""
    script = b""
    if isinstance(spec.setup, str):
        with contextlib.suppress(OSError):
            script = (Path(spec.workdir or "/") / spec.setup).read_bytes()
    words = json.dumps([spec.setup, spec.workdir]).encode()
    return hashlib.sha256(words + script).hexdigest()
