"""What launchers share whose runs live in a store: the intent in a folder here, the home there, a mailbox to hosts.

The store is a bucket, or the disk of a host that is reached by SSH. Hosts of such a run accept no connections, so a
question or a command is an object in the home (``mailbox``). GKE dials its pods through the cluster's API server and
replaces ``ask``, ``mirror`` and ``exec``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from muster.backends import code_bundle, mailbox, run_home
from muster.backends.letters import ASK, RUN, Command, Outcome, box_of
from muster.backends.mailbox import Box
from muster.backends.protocols import Terminal
from muster.catalog import offers as catalogue
from muster.catalog.offers import Option
from muster.config.spec import RunSpec
from muster.core.clock import SystemClock
from muster.core.errors import BackendError, ConflictError, MusterError, UsageError
from muster.core.processes import read_plain
from muster.core.protocols import Clock, Store
from muster.core.typed_json import Unreadable, decode, encode
from muster.core.types import JobHandle, JobState, JobStatus, Offer
from muster.protocol import codec
from muster.protocol.client import FromClient, SupervisorStatus
from muster.protocol.lease import EndRecord
from muster.protocol.pipes import FROM_POD, AskInPod
from muster.storage import run_registry
from muster.storage.home import HOME_FILE, Home
from muster.storage.job_record import SUBMISSION
from muster.storage.store import open_store
from muster.transport.secure_session import read_token

ASK_S = 30.0
"""A question through the home takes seconds, however little its asker waits elsewhere."""
COMMAND_S = 600.0
"""For a command on a host (``muster exec``)."""
RESUME_LATER, STOPPED_BY_USER = 75, 130


class Placed(Protocol):
    """What every back end's own placement has."""

    @property
    def spec(self) -> RunSpec: ...
    @property
    def home(self) -> str: ...


P = TypeVar("P", bound=Placed)


@dataclass(kw_only=True)
class BucketLauncher(Generic[P]):
    """A launcher's half that does not depend on where its hosts come from."""

    name: str
    store: Store | None = None
    """None: the home's own, when first needed."""
    clock: Clock = field(default_factory=SystemClock)
    _opened: Store | None = field(default=None, repr=False)
    attach = None
    steps = None
    revive = None

    # ------------------------------------------------------------ what each back end has of its own

    def sold(self) -> Sequence[Option]:
        """The catalogue's rows that can be asked for here."""
        return catalogue.catalogue()

    def placed(self, spec: RunSpec, run_id: str, run_dir: str | None) -> P:
        """Where the run goes. Raises UsageError: no such machine."""
        raise NotImplementedError

    def code_dir(self, run_id: str) -> str:
        """Where hosts have the user's own code."""
        raise NotImplementedError

    def box_of_host(self, run_id: str, placement: P, host: int) -> str:
        """The mailbox of a host that runs. Raises UsageError: there is no such host; BackendError: it is not up."""
        raise NotImplementedError

    # ------------------------------------------------------------ before and at the start

    def offers(self, spec: RunSpec) -> list[Offer]:
        """The catalogue's rows for the run file's machine, accelerator and mode; availability is not asked."""
        asked = spec.resources
        mode = asked.provisioning_model.removesuffix("_queued") if asked.provisioning_model else None
        return [
            option.offer
            for option in self.sold()
            if option.offer.backend == self.name
            and asked.machine in (None, option.offer.machine)
            and asked.accelerator in (None, option.offer.accelerator)
            and mode in (None, option.offer.mode)
        ]

    def begin(self, local: Path, run_id: str, home: str) -> None:
        """As ``run_home.begin``; a folder whose home is another's, or cannot be written, does not name it: ending that
        run would end the other.

        Raises:
            ConflictError: another run is in the folder, or lives in the home.
            MusterError: the home cannot be written.
        """
        if run_registry.existing_id(local) not in (None, run_id):
            raise ConflictError(f"{local} holds another run", hint="choose another run_dir")
        named = (local / HOME_FILE).exists()
        try:
            run_home.begin(local, run_id, home, self.store)
        except MusterError:
            if not named:
                (local / HOME_FILE).unlink(missing_ok=True)
            raise

    def record(self, local: Path, run_id: str, number: int) -> None:
        """What was submitted from this folder, for later commands."""
        record = {"version": 1, "run_id": run_id, "backend": self.name, SUBMISSION: number, "run_dir": str(local)}
        run_registry.replace_text(local / "job.json", json.dumps(record) + "\n")

    # ------------------------------------------------------------ the run's folder, and its home

    @property
    def remote(self) -> BucketLauncher[P]:
        """The run's folder is where its hosts are; this machine holds the intent alone."""
        return self

    def home(self, run_id: str) -> Home | None:
        """The run's home, as the folder on this machine names it; None: only its hosts see it."""
        local = local_dir(run_id)
        return run_home.open_of(local, self.store) if local is not None else None

    def mirror(self, run_id: str, folder: Path) -> int:
        """Bring the run's events to ``folder``, the local run folder's ``events``; returns how many bytes were new."""
        home = self.home(run_id)
        return home.mirror(folder.parent) if home is not None else 0

    def known(self, run_id: str) -> tuple[Path, P] | None:
        """The run's folder on this machine, and where the run is; None: it was never submitted from here. Of a run of
        another version what is needed to end it.

        Raises:
            BackendError: it was, and its run file is gone: where its machines are is not known.
        """
        local = local_dir(run_id)
        if local is None or not (local / HOME_FILE).exists():
            return None
        return local, self.placed(
            run_home.spec_to_end(local), run_id, read_plain(local / HOME_FILE, most=1 << 10).decode().strip()
        )

    # ------------------------------------------------------------ inside

    def ask(
        self, run_id: str, message: FromClient, *, timeout_s: float = 5.0, resolved: str | None = None
    ) -> SupervisorStatus:
        """Carry a question to the run's supervisor, through the mailbox; ``resolved`` replaces the run file before it.

        Raises:
            BackendError: no supervisor holds the run, or it has not answered.
        """
        home, known = self.home(run_id), self.known(run_id)
        if home is None or known is None or run_home.holder_of(home) is None:
            raise BackendError(f"no host supervises {run_id} now", hint=f"muster status {run_id}")
        question = AskInPod(message=codec.encode(message).decode(), timeout_s=timeout_s)
        if resolved is not None:
            shipped, code = code_bundle.pack(RunSpec.model_validate_json(resolved), self.code_dir(run_id))
            text = shipped.model_dump_json(indent=1) + "\n"
            packed = base64.b64encode(code).decode() if code is not None else None
            question = replace(question, resolved=text, code=packed)
            run_home.publish(home, text, code)
        text = codec.encode(question).decode()
        reply = self.carry(run_id, mailbox.SUPERVISOR, ASK, text, timeout_s=max(ASK_S, timeout_s))
        try:
            answer = codec.reader_of(FROM_POD)(reply.encode())
        except Unreadable as error:
            raise BackendError(f"the answer cannot be read: {error}", hint="do hosts have this version?") from error
        if not isinstance(answer, SupervisorStatus):
            raise BackendError("the host answered another question")
        return answer

    def exec(self, run_id: str, argv: Sequence[str], terminal: Terminal, *, host: int | None = None) -> int:
        """Run a command on a host to its end, without input; its output comes then. Returns its exit code.

        Raises:
            UsageError: a terminal is asked for, or there is no such host.
            BackendError: the host does not answer.
        """
        home, known = self.home(run_id), self.known(run_id)
        if home is None or known is None:
            raise BackendError(f"{run_id} was never submitted", hint=f"muster status {run_id}")
        if terminal.tty:
            raise UsageError(
                "no terminal is opened on a host of this run: a command's output comes at its end",
                hint="a command without a terminal: muster exec ... < /dev/null (on Vertex AI also vertex.web_access)",
            )
        to, command = (
            self.box_of_host(run_id, known[1], host or 0),
            encode(Command(argv=tuple(argv), timeout_s=COMMAND_S)),
        )
        outcome = decode(Outcome, self.carry(run_id, to, RUN, command.decode(), timeout_s=COMMAND_S + ASK_S).encode())
        terminal.out(base64.b64decode(outcome.out))
        terminal.err(base64.b64decode(outcome.err))
        return outcome.code

    def carry(self, run_id: str, to: str, kind: str, text: str, *, timeout_s: float) -> str:
        """Bring a question to the supervisor, or a command to a host, and return the answer. Raises BackendError."""
        home, local, name = self.home(run_id), local_dir(run_id), to if kind == ASK else box_of(to)
        assert home is not None and local is not None  # it was submitted
        token = read_token(str(local / "token"))
        box = Box(store=self.opened(), home=home.uri, name=name, run_id=run_id, token=token, clock=self.clock)
        return box.send(kind, text, timeout_s=timeout_s)

    # ------------------------------------------------------------ below

    def handle(self, run_id: str, local: Path, job_id: str, warnings: Sequence[str] = ()) -> JobHandle:
        return JobHandle(
            run_id=run_id, backend=self.name, job_id=job_id, run_dir=str(local), warnings=tuple(warnings)
        )  # fmt: skip

    def opened(self) -> Store:
        self._opened = self.store or self._opened or open_store()
        return self._opened


def local_dir(run_id: str) -> Path | None:
    """The run's folder on this machine; None: it has none."""
    try:
        return run_registry.find(run_id, any_format=True).path
    except UsageError:
        return None


def ended_with(end: EndRecord, tasks: Mapping[str, str] | None = None) -> JobStatus:
    """The run's own end."""
    state, verb = {
        0: (JobState.SUCCEEDED, "finished"),
        STOPPED_BY_USER: (JobState.STOPPED, "stopped"),
        RESUME_LATER: (JobState.PREEMPTED, "saved, to be continued by muster submit"),
    }.get(end.exit_code, (JobState.FAILED, "failed"))
    return JobStatus(state=state, reason=f"{verb}: {end.reason}", exit_code=end.exit_code, tasks=tasks or {})
