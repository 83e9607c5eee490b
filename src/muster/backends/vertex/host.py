"""The first program of each host of a custom job (``python -m muster.backends.vertex.host``).

It claims the run for its job, so that of two jobs one trains; fetches the run's files, checked by the digest in its
arguments, and the secrets, each of one version; meets the other hosts; and keeps the agent and, where it is due, the
supervisor (``backends/host``) until the run is over.

What Vertex AI makes of a container's exit (Google's pages on the training service, "common errors" and "restarts", read
2026-11-22; a worker's exit 1 ended the job in vertex-ai-samples, pull request 1504):

=========  ==================  ========================================================================================
code       of which host       what follows
=========  ==================  ========================================================================================
0          the first           the job SUCCEEDED; all other hosts are shut down, perhaps in the middle of a write
0          another             not documented: done, not started again, paid for until the job ends
6, 134     any                 (SIGABRT) the whole job is tried again, up to three times: every host again, memory lost
11, 139    any                 (SIGSEGV) the same
137        any                 the kernel's kill for memory: all hosts are shut down, nothing is tried again
any other  any                 the job FAILED, code 3: all hosts are shut down; 75 means nothing here
=========  ==================  ========================================================================================
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import string
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from muster.backends import code_bundle, run_folder
from muster.backends.google.http import Http
from muster.backends.google.metadata import MachineHttp
from muster.backends.google.request_log import Request, RequestLogFile
from muster.backends.google.secret_manager import SecretManager, variables
from muster.backends.google.session import Session
from muster.backends.host.children import Children, RealChildren
from muster.backends.host.loop import HostProgram
from muster.backends.host.place import Place, Program, say, two_programs
from muster.backends.host.run_state import RunState
from muster.backends.host.state import SUPERVISOR, Exit, LeaveAt, Outcome, Rules, State
from muster.backends.letters import Letters
from muster.backends.log_forwarder import LogForwarder
from muster.backends.vertex import reducers
from muster.backends.vertex.custom_job import HOST_DIR
from muster.backends.vertex.on_host import presence, reduction_plugin
from muster.backends.vertex.on_host.meeting import VARIABLE, Meeting, Seat, meet, own_address, seat
from muster.backends.vertex.on_host.presence import HostRecord
from muster.backends.vertex.placement import START_TIMEOUT_S, Placement, place
from muster.catalog.vertex import SPOT
from muster.config.spec import RunSpec
from muster.core import environment, processes
from muster.core.clock import SystemClock
from muster.core.errors import AccessError, BackendError, MusterError
from muster.core.protocols import Clock, Store
from muster.storage.store import open_store
from muster.storage.store.patient import start_thread
from muster.transport.listening import listen_on, raise_soft_limit
from muster.transport.secure_session import run_token

JOB, PROJECT = "CLOUD_ML_JOB_ID", "CLOUD_ML_PROJECT_ID"
"""Set by Vertex: the job's number, and the project's, which nothing else tells a host: it runs in one of Google's."""
OVER, FAILED = 0, 1
"""Exit codes, for any end of the run: its home says how it ended, so the job's state says nothing; or that could
not be written, and a failed job is all that is left to be seen."""
SETTLED_S, PREPARE_S = 900.0, 3600.0
"""A job that has worked for so long is not ended by a host that comes back and cannot read something; for this long."""
RETRY_S = 20.0
LEAVE_EARLY_S = 120.0
"""Before the job's timeout, in addition to the run's own grace: Vertex ends a job there without notice."""
OTHERS_S = 90.0
"""For how long the chief waits for the last writes of the others."""


Found = TypeVar("Found")


@dataclass(kw_only=True)
class Host:
    given: argparse.Namespace
    environ: Mapping[str, str]
    store: Store = field(default_factory=open_store)
    http: Http = field(default_factory=MachineHttp)
    children: Children = field(default_factory=RealChildren)
    clock: Clock = field(default_factory=SystemClock)
    mark: str = field(default_factory=lambda: "".join(random.choices(string.ascii_lowercase + string.digits, k=5)))
    """Of this start: memory, disk and machine may be others than the last one's."""
    record: HostRecord | None = None

    def run(self) -> int:
        """With what the container ends, once the run is over; never before, but where this host cannot begin."""
        try:
            held = self._claim()
            if held is None:
                say("another job works for this run: nothing is started here")
                return OVER
            found = self._prepared(held)
        except MusterError as error:
            say(f"error: {error}" + (f" (hint: {error.hint})" if error.hint else ""))
            self._tell("failed", str(error))
            return FAILED
        return found.serve()

    def _claim(self) -> Request | None:
        job = self.environ.get(JOB, "")
        if not job:
            raise BackendError(f"{JOB} is not set", hint="this is not a worker of Vertex AI")
        log = RequestLogFile(store=self.store, home=self.given.home)
        return self._patiently(
            lambda: log.claim(self.given.nonce, job, self.clock.wall_ns()),
            run_folder.PATIENCE_S,
            silent_s=SETTLED_S,
        )

    def _prepared(self, held: Request) -> VertexPlace:
        """Everything that the programs need. A job that has worked for long is patient; a new one fails soon, before it
        costs much.

        Raises:
            MusterError: something cannot be read, or is not what was submitted.
        """
        index = seat(self.environ.get(VARIABLE), hosts=None).index
        self.record = HostRecord(index=index, host=f"host-{index}-{self.mark}", state="up")
        settled = self.clock.wall_ns() - held.owner_began_wall_ns > SETTLED_S * 1e9
        return self._patiently(lambda: self._prepare(held), PREPARE_S if settled else 0.0)

    def _patiently(self, look: Callable[[], Found], limit_s: float, *, silent_s: float = 0.0) -> Found:
        """``silent_s``: for how long, where that is longer, of what does not answer at all: this may be a host that
        comes back to a run, and its end would be the run's."""
        began_ns = self.clock.monotonic_ns()
        while True:
            try:
                return look()
            except (AccessError, BackendError) as error:
                longest_s = limit_s if isinstance(error, AccessError) else max(limit_s, silent_s)
                if self.clock.monotonic_ns() - began_ns >= longest_s * 1e9:
                    raise
                say(f"{error}; again in {RETRY_S:.0f} s")
                self.clock.sleep(RETRY_S)

    def _prepare(self, held: Request) -> VertexPlace:
        given = self.given
        files = run_folder.get(self.store, given.home, given.run_file_sha256)
        placement = place(RunSpec.model_validate_json(files.resolved), run_id=given.run_id, run_dir=given.home)
        mine = seat(self.environ.get(VARIABLE), hosts=placement.hosts)
        own = self.environ.get("MUSTER_BIND") or own_address()
        host = f"host-{mine.index}-{self.mark}"
        self.record = HostRecord(index=mine.index, host=host, address=own, state="up")
        token, values = self._secrets(placement.spec)
        base = given.run_dir / given.run_id
        folder = base / self.mark
        run_folder.place_both(
            folder, base / code_bundle.FOLDER, token=token, secrets=values, run_id=given.run_id, backend="vertex",
            files=files, submission=given.submission, home=given.home,
        )  # fmt: skip
        self._tell("up")
        say(f"{host} at {own}: {_shared_memory()}")
        if reducers.count(placement):
            loads, sentence = reduction_plugin.of_this_machine()
            say(sentence if loads else f"warning: {sentence}")
        return VertexPlace(
            home=RunState(run_dir=folder / "supervisor", job=given.nonce, brings_events=mine.index <= 1),
            token=run_token(folder / "supervisor"),
            reasons={"notice": "SIGTERM from Vertex AI: the job is taken away",
                     "time": "the custom job's time is nearly up"},
            host=self, request=held, placement=placement, seat=mine, own=own, folder=folder, secrets=values,
        )  # fmt: skip

    def _secrets(self, spec: RunSpec) -> tuple[str, dict[str, str]]:
        """The run's token, and what its ranks find in their environment."""
        manager = SecretManager(session=Session(http=self.http, clock=self.clock))

        def read(version: str) -> str:
            ours = version.split("/")[1] == spec.resources.project
            return manager.value(version, project=self.environ.get(PROJECT) if ours else None)

        named = variables(spec.secrets, self.given.hugging_face_secret)
        return read(self.given.token_secret), {name: read(version) for name, version in named.items()}

    def _tell(self, state: Literal["up", "left", "failed"], said: str = "") -> None:
        """For people and the chief; a home that does not answer is no reason to do anything else."""
        if self.record is not None:
            record = replace(self.record, state=state, said=said, wall_ns=self.clock.wall_ns())
            with contextlib.suppress(MusterError, OSError):
                presence.tell(self.store, self.given.home, self.given.nonce, record)


def rules(index: int, *, whole_job_goes: bool) -> Rules:
    """Vertex AI ends a job by a host's exit, so nothing here ends before the run does. ``whole_job_goes``: a notice
    means the job, else one machine."""
    return Rules(rank=index, continues="waits", notice_scope="run" if whole_job_goes else "host")


@dataclass(kw_only=True)
class VertexPlace(Place):
    host: Host
    request: Request
    """The one that its job owns."""
    placement: Placement
    seat: Seat
    own: str
    folder: Path
    """Of two run folders, the agent's and the supervisor's: each brings home what its own programs write."""
    secrets: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"host-{self.seat.index}-{self.host.mark}"

    def serve(self) -> int:
        """Until the run is over; the container's exit code."""
        if len(self.seat.peers) > 1:
            start_thread(self._meet, "meeting")
        given, host, spec = self.host.given, self.host, self.placement.spec
        programs = self._programs()
        letters = Letters(
            store=host.store,
            home=given.home,
            run_id=given.run_id,
            token=self.token,
            index=self.seat.index,
            children=host.children,
            env=programs[SUPERVISOR].env,
            run_dir=self.folder / "supervisor",
            holds=self._holds,
        )
        name = self.name
        forwarders = [
            LogForwarder(run_dir=self.folder / part, host=name, writer=name) for part in ("host", "supervisor")
        ]
        program = HostProgram(
            place=self,
            rules=rules(self.seat.index, whole_job_goes=self.placement.mode == SPOT or self.placement.hosts == 1),
            programs=programs,
            services=[*forwarders, letters],
            children=host.children,
            clock=host.clock,
        )
        left_s = (self.request.owner_began_wall_ns - host.clock.wall_ns()) / 1e9 + self.placement.timeout_s
        program.post(LeaveAt(at_s=program.now_s() + left_s - spec.recovery.grace_s - LEAVE_EARLY_S))
        return program.run()

    def leave(self, ended: Exit, state: State) -> int:
        given, host = self.host.given, self.host
        host._tell("left")
        if self.seat.chief:
            for one in presence.wait_for_others(
                host.store, given.home, given.nonce, limit_s=OTHERS_S, clock=host.clock
            ):
                say(f"{one.host} did not say that it has left: ending without it")
        return OVER if ended.outcome is Outcome.RUN_ENDED else FAILED

    def _programs(self) -> dict[str, Program]:
        given = self.host.given
        env = {
            **self.host.environ,
            "MUSTER_RUN_ID": given.run_id,
            "MUSTER_BIND": self.own,
        }
        hub = {"HF_TOKEN": self.secrets["HF_TOKEN"]} if "HF_TOKEN" in self.secrets else {}
        return two_programs(self.folder, name=self.name, run_id=given.run_id, env=env, home=self.home, more=hub)

    def _holds(self) -> bool:
        """Whether the supervisor of this host holds the run."""
        return self.home.is_held_by(self.host.children.pid(SUPERVISOR))

    def _meet(self) -> None:
        """See that the hosts reach each other, and say so; agents and supervisor find each other by the lease."""
        chief, boot = self.seat.peers[0], f"{processes.boot_id()}-{self.host.mark}"
        try:
            if self.seat.chief:
                with listen_on(self.own, chief.port) as listener:
                    Meeting(token=self.token, log=say).serve(listener)
                return
            met = meet(
                chief,
                self.token,
                index=self.seat.index,
                own=self.own,
                boot=boot,
                clock=SystemClock(),
                limit_s=START_TIMEOUT_S,
            )
            say("the first host reaches this one" if met.reached else f"warning: not reached: {met.reason}")
        except (MusterError, OSError) as error:
            say(f"warning: the hosts have not met: {error}")


def _shared_memory() -> str:
    """Snapshots live there, and nothing says how large it is."""
    with contextlib.suppress(OSError):
        return f"/dev/shm has {shutil.disk_usage('/dev/shm').free / 1e9:.1f} GB"
    return "there is no /dev/shm"


def arguments() -> argparse.ArgumentParser:
    """As ``custom_job`` writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("run-id", "home", "submission", "nonce", "run-file-sha256", "token-secret"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--hugging-face-secret")
    parser.add_argument("--run-dir", type=Path, default=Path(HOST_DIR))
    return parser


def main() -> int:
    processes.forgive_outputs()
    raise_soft_limit()
    try:
        return Host(given=arguments().parse_args(), environ=environment.inherited()).run()
    except Exception as error:  # noqa: BLE001 (the process's edge: its code decides about the whole job)
        say(f"error: {type(error).__name__}: {error}")
        traceback.print_exc()
        return FAILED


if __name__ == "__main__":
    raise SystemExit(main())
