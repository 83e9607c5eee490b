"""``python -m muster.backends.gce.host --role host|supervisor``: what systemd keeps alive on a run's machine.

It fetches the run's files by the digest in the machine's metadata, reads the run's token and secrets with the machine's
own account, and keeps the agent (or the supervisor) running until the run has ended; questions from outside come
through the run's home (``letters``). On the supervisor's machine it asks for hosts and replaces lost ones
(``provision``), and when the run is over it removes everything, itself last. It holds no state: killed, or after a
reboot, it does the same again. Exit code 0: the run is over, and systemd lets it rest.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from muster.backends import run_folder
from muster.backends.gce import machine as machines
from muster.backends.gce import teardown
from muster.backends.gce.compute import Compute
from muster.backends.gce.journal import JournalFile
from muster.backends.gce.machine import HOST, SUPERVISOR, Machine
from muster.backends.gce.placement import RUNS, place, stem_of, supervisor_of
from muster.backends.gce.provision import Hosts
from muster.backends.gce.reason import Useless
from muster.backends.google import metadata
from muster.backends.google.metadata import MachineHttp
from muster.backends.google.secret_manager import SecretManager, variables
from muster.backends.google.session import Session
from muster.backends.host.children import RealChildren
from muster.backends.host.run_state import RunState
from muster.backends.letters import Letters
from muster.backends.run_home import RUN_ID
from muster.config.spec import RunSpec
from muster.core import environment, processes, resolved_file
from muster.core.clock import SystemClock
from muster.core.errors import MusterError
from muster.core.protocols import Store
from muster.storage import run_secrets, uris
from muster.storage.store import open_store

MEMORY = Path("/run/muster")
"""On tmpfs: the run's token is on no disk."""
LOOK_S = 5.0
PROVISION_S = 10.0
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
LIVED_S = 600.0
"""A program that lived this long before it ended starts again without a pause."""
CONFIG_ERRORS = (2, 3)
"""Exit codes of a supervisor whose run file or plan cannot be used: starting it again cannot help."""
CONFIG_TRIES, IN_A_ROW_S = 3, 600.0
"""So many within that time are believed; one may be a home that was read while it was written."""
PROJECT = "project/project-id"
AGAIN = 75
"""The run saved itself because its machines were about to go, and wants to go on."""
LINGER_S = 45.0
"""After the run's end hosts bring home the last of their logs."""
GONE_WITHIN_S = 3600.0
LEAVE_S = 100.0
"""Of the 110 s that the unit has to stop in: a Spot machine has 30 s after its notice, others 120."""


@dataclass(kw_only=True)
class Keeper:
    """One program of the run, kept alive until the run has ended."""

    machine: Machine
    argv: Sequence[str]
    environ: Mapping[str, str]
    state: RunState
    clear: Callable[[], None] = lambda: None
    """Once the run is over: what this machine has to see to."""
    look_s: float = LOOK_S
    _child: subprocess.Popen[bytes] | None = None
    _goes: bool = False
    _early: int = 0
    """Ends in a row of a program that had just been started."""
    _config_errors: list[float] = field(default_factory=list)
    """When the supervisor ended with one of ``CONFIG_ERRORS``."""
    _ended_s: float = field(default=-LONGEST_PAUSE_S)
    _began_s: float = 0.0

    @property
    def runs(self) -> bool:
        """Whether the program is running."""
        return self._child is not None

    @property
    def up_s(self) -> float:
        """For how long; 0: it is not running."""
        return time.monotonic() - self._began_s if self._child is not None else 0.0

    def run(self) -> int:
        """0: the run has ended; 75: this machine is to go."""
        signal.signal(signal.SIGTERM, self._go)
        while not self._goes:
            if self._child is None and time.monotonic() - self._ended_s >= self._pause_s():
                ended = self._ended()
                if ended == AGAIN and self.machine.role == SUPERVISOR:
                    # Its hosts were taken from it, and others come: the run goes on where it was saved.
                    self.state.withdraw_end(AGAIN)
                elif ended is not None and ended != AGAIN:
                    self.clear()
                    return 0
                self._start()
            self._wait(self.look_s)
        self._leave()
        return 75

    def _pause_s(self) -> float:
        return min(LONGEST_PAUSE_S, SHORTEST_PAUSE_S * 2 ** max(0, self._early - 1)) if self._early else 0.0

    def _start(self) -> None:
        began = time.monotonic()
        self._child = subprocess.Popen(self.argv, stdin=subprocess.DEVNULL, env=dict(self.environ))
        self._began_s = began

    def _wait(self, seconds: float) -> None:
        if self._child is None:
            time.sleep(min(seconds, 1.0))
            return
        try:
            code = self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return
        self._child, self._ended_s = None, time.monotonic()
        self._early = 0 if self._ended_s - self._began_s >= LIVED_S else self._early + 1
        print(f"the {self.machine.role}'s program ended with code {code}", flush=True)
        if code:
            self.state.ship(self.machine.writer if self.machine.role == HOST else SUPERVISOR, 6.0)
        if self.machine.role == SUPERVISOR and code in CONFIG_ERRORS:
            self._believe(code)

    def _believe(self, code: int) -> None:
        """End the run where its supervisor refused it several times: else its machines are billed without limit."""
        recent = [at_s for at_s in self._config_errors if self._ended_s - at_s < IN_A_ROW_S]
        self._config_errors = [*recent, self._ended_s]
        if len(self._config_errors) >= CONFIG_TRIES:
            what = "run file" if code == 2 else "plan"
            self.state.end(code, f"the supervisor cannot use this run's {what}: exit code {code}, {CONFIG_TRIES} times")

    def _ended(self) -> int | None:
        try:
            return self.state.ended()
        except (MusterError, OSError):
            return None

    def _go(self, _number: int, _frame: FrameType | None) -> None:
        self._goes = True

    def _leave(self) -> None:
        """The machine shuts down: a host's agent saves, and a supervisor's state is in the home already."""
        if self._child is None:
            return
        if self.machine.role == HOST:
            self._child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(LEAVE_S)
        self._child.kill()
        self._child.wait()


def prepare(machine: Machine, store: Store, session: Session) -> dict[str, str]:
    """Put everything that the run's programs read into place; returns their environment.

    Raises:
        MusterError: a file is not what was submitted, or a secret cannot be read.
    """
    files = run_folder.get(store, machine.home, machine.files)
    run_folder.place(
        machine.run_dir, run_id=machine.run_id, backend="gce", files=files, submission=machine.submission,
        home=machine.home,
    )  # fmt: skip
    secrets = SecretManager(session=session)
    MEMORY.mkdir(mode=0o700, exist_ok=True)
    token = MEMORY / f"{machine.run_id}.token"
    _write_private(token, secrets.access(machine.token_secret))
    spec = RunSpec.model_validate_json(resolved_file.read(machine.run_dir, patient=True))
    if machine.role == HOST:
        named = variables(spec.secrets, machine.hugging_face_secret)
        run_secrets.write(machine.run_dir, {name: secrets.value(version) for name, version in named.items()})
    environ = {
        **environment.inherited(),
        "HOME": RUNS,
        "MUSTER_HOME": f"{RUNS}/home",
        "MUSTER_RUN_ID": machine.run_id,
        "MUSTER_RUN_DIR": str(machine.run_dir),
        "MUSTER_BIND": machine.address,
        "MUSTER_TOKEN_FILE": str(token),
        "MUSTER_POD": machine.writer,
    }
    if machine.role == SUPERVISOR:
        environ["MUSTER_JOBSET"] = supervisor_of(machine.run_id)
    return environ


def provisioned(machine: Machine, store: Store, session: Session) -> tuple[Hosts, Callable[[], None]]:
    """What asks for this run's hosts, and what removes everything at the run's end."""
    spec = RunSpec.model_validate_json(run_folder.get(store, machine.home, machine.files).resolved)
    placement = replace(
        place(spec, run_id=machine.run_id, run_dir=machine.home),
        submission=machine.submission, files_sha256=machine.files,
    )  # fmt: skip
    file = JournalFile(store=store, home=machine.home)
    compute = Compute(session=session, project=placement.project)

    def clear() -> None:
        time.sleep(LINGER_S)
        print("the run is over: its machines are removed", flush=True)
        try:
            file.close()
            SecretManager(session=session).delete(placement.token_secret)
        except MusterError as error:  # a secret costs cents, and the account may not be allowed to
            print(f"not all is removed: {error}", flush=True)
        stem, own = placement.stem, machine.name
        for left in teardown.remove(compute, stem, session.clock, patience_s=GONE_WITHIN_S, spared=own):
            print(f"still there: {left}", flush=True)

    return Hosts(placement=placement, compute=compute, file=file, log=_say), clear


class Fate(enum.Enum):
    """What a machine that starts finds of its run."""

    NEEDED = enum.auto()
    """As far as the home says."""
    SUPERSEDED = enum.auto()
    """The run lives in a later submission, which has asked for machines."""
    OVER = enum.auto()
    """It was taken back, or has ended."""


def fate(machine: Machine, store: Store) -> Fate:
    """What has become of this machine's run; NEEDED where the home does not say.

    A request whose answer was lost may be carried out minutes after that; and a supervisor's machine that is killed
    while it clears up after its run finds no secret any more. A journal is there, and open, before any machine is asked
    for. Where a run has its home by name, that may be another run's by now.
    """
    try:
        journal, _ = JournalFile(store=store, home=machine.home).read()
        if journal is None or (journal.closed and journal.submission == machine.submission):
            return Fate.OVER
        if store.get(uris.join(machine.home, RUN_ID)).data.decode().strip() != machine.run_id:
            return Fate.OVER
        later = int(journal.submission) > int(machine.submission)
        asked = bool(journal.supervisor_zone or journal.turns)  # one that failed before lets this run heal
        return Fate.SUPERSEDED if later and asked else Fate.NEEDED
    except (MusterError, OSError, ValueError):
        return Fate.NEEDED


def leave(
    machine: Machine, found: Fate, session: Session, project: Callable[[], str] = lambda: metadata.read(PROJECT)
) -> int:
    """Go, as a run that is over or superseded has it. The supervisor's machine removes itself, and before that what is
    left of a run that is over; a host, which may not, shuts down, and costs its disk alone. An exit code: 1 where it is
    asked again until it goes.

    Raises:
        AccessError, Unreachable: Google does not say what there is, or does not let us.
    """
    superseded = found is Fate.SUPERSEDED
    _say(f"the run of this machine {'has a later submission' if superseded else 'was taken back, or is over'}: it goes")
    if machine.role == HOST:
        subprocess.run(["systemctl", "poweroff"], stdin=subprocess.DEVNULL, check=False)
        return 1
    compute = Compute(session=session, project=project().strip())
    stem, own = stem_of(machine.run_id), machine.name
    if superseded:  # by zone, too: the later submission's has the same name
        compute.ok("DELETE", compute.url(f"zones/{machine.zone}/instances/{own}"))
        return 1
    for left in teardown.remove(compute, stem, session.clock, patience_s=GONE_WITHIN_S, spared=own):
        _say(f"still there: {left}")
    return 0


def keep_hosts(hosts: Hosts, pause_s: float = PROVISION_S) -> None:
    """Step after step, in a thread; it never ends."""
    said = ""
    while True:
        try:
            hosts.step()
            said = ""
        except Exception as error:  # noqa: BLE001 (a thread's edge; the journal says what is under way)
            if str(error) != said:
                _say(f"hosts: {error}")
            said = str(error)
        time.sleep(pause_s)


def _say(line: str) -> None:
    print(line, file=sys.stdout, flush=True)  # named: from a thread (``Replicator.send`` has the reason)


def program(machine: Machine) -> list[str]:
    """The argv of the run's program on this machine."""
    module = "muster.app.supervisor" if machine.role == SUPERVISOR else "muster.agent.watchdog"
    words = [sys.executable, "-P", "-m", module, "--run-dir", str(machine.run_dir), "--run-id", machine.run_id]
    return words if machine.role == SUPERVISOR else [*words, "--host", machine.name]


def _write_private(path: Path, data: bytes) -> None:
    half = path.with_suffix(".new")
    descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    half.replace(path)


def main() -> int:
    processes.forgive_outputs()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", choices=[HOST, SUPERVISOR], required=True)
    role = parser.parse_args().role
    clock, store = SystemClock(), open_store(timeout_s=10.0, patience_s=30.0)
    machine, session = machines.read(clock), Session(http=MachineHttp(), clock=clock)
    if machine.role != role:
        print(f"error: this machine is the run's {machine.role}, not its {role}", file=sys.stderr)
        return 2
    try:
        if (found := fate(machine, store)) is not Fate.NEEDED:
            return leave(machine, found, session)
        environ = prepare(machine, store, session)
    except MusterError as error:
        print(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        with contextlib.suppress(MusterError):
            machine.tell(store, "failed", str(error))
        return error.exit_code
    machine.tell(store, "checked", f"the files and secrets of submission {machine.submission}")
    state = RunState(run_dir=machine.run_dir, job=supervisor_of(machine.run_id))
    keeper = Keeper(machine=machine, argv=program(machine), environ=environ, state=state)
    if role == SUPERVISOR:
        hosts, keeper.clear = provisioned(machine, store, session)
        hosts.useless = Useless(placement=hosts.placement, store=store, wall_s=hosts.wall_s, up_s=lambda: keeper.up_s)
        threading.Thread(target=keep_hosts, args=(hosts,), name="hosts", daemon=True).start()
    Letters(
        store=store, home=machine.home, run_id=machine.run_id,
        token=Path(environ["MUSTER_TOKEN_FILE"]).read_bytes().strip(), index=machine.name, children=RealChildren(),
        env=environ, run_dir=machine.run_dir, holds=lambda: role == SUPERVISOR and keeper.runs,
    ).start()  # fmt: skip
    return keeper.run()


if __name__ == "__main__":
    raise SystemExit(main())
