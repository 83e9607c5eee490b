"""``python -m muster.backends.gce.host --role host|supervisor``: what systemd keeps alive on a run's machine.

It fetches the run's files by the digest in the machine's metadata, reads the run's token and secrets with the machine's
own account, and keeps the agent (or the supervisor) running until the run has ended (``backends/host``); questions from
outside come through the run's home (``letters``). On the supervisor's machine it asks for hosts and replaces lost ones
(``provision``), and when the run is over it removes everything, itself last. It holds no state: killed, or after a
reboot, it does the same again. Exit code 0: the run is over, and systemd lets it rest.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from muster.backends import run_folder
from muster.backends.gce import machine as machines
from muster.backends.gce import teardown
from muster.backends.gce.compute import Compute
from muster.backends.gce.machine import HOST, Machine
from muster.backends.gce.placement import RUNS, place, stem_of, supervisor_of
from muster.backends.gce.provision import Hosts
from muster.backends.gce.reason import Useless
from muster.backends.google import metadata
from muster.backends.google.metadata import MachineHttp
from muster.backends.google.request_log import RequestLogFile
from muster.backends.google.secret_manager import SecretManager, variables
from muster.backends.google.session import Session
from muster.backends.host.children import Children, RealChildren
from muster.backends.host.decide import CONFIG_TRIES, IN_A_ROW_S, TRIES
from muster.backends.host.loop import HostProgram
from muster.backends.host.place import Place, Program, program_argv, say
from muster.backends.host.run_state import RunState
from muster.backends.host.state import AGENT, CONFIG_ERRORS, SUPERVISOR, Exit, Outcome, Rules, State
from muster.backends.letters import Letters
from muster.config.spec import RunSpec
from muster.core import environment, processes, resolved_file
from muster.core.clock import SystemClock
from muster.core.errors import MusterError
from muster.core.protocols import Store
from muster.storage import run_secrets
from muster.storage.store import open_store
from muster.storage.store.patient import start_thread
from muster.transport.secure_session import read_token

MEMORY = Path("/run/muster")
"""On tmpfs: the run's token is on no disk."""
PROVISION_S = 10.0
PROJECT = "project/project-id"
LINGER_S = 45.0
"""After the run's end hosts bring home the last of their logs."""
GONE_WITHIN_S = 3600.0
GRACE_S = 108.0
"""Of the 110 s that the unit has to stop in: a Spot machine has 30 s after its notice, others 120."""


def rules(role: str) -> Rules:
    """A machine that shuts down takes its programs along. 75 in the home: hosts were taken away, and others come."""
    return Rules(rank=0 if role == SUPERVISOR else None, continues="here", leaves_on_notice=True, grace_s=GRACE_S)


@dataclass(kw_only=True)
class GcePlace(Place):
    machine: Machine
    hosts: Hosts | None = None
    """On the supervisor's machine, which removes everything at the run's end."""

    def leave(self, ended: Exit, state: State) -> int:
        """0 where nothing is left to do; else systemd starts this program again, unless the machine shuts down."""
        match ended.outcome:
            case Outcome.EVICTED:
                return ended.code
            case Outcome.END_UNWRITTEN:  # the next supervisor finds it in the run's events
                return 1
            case Outcome.GIVEN_UP if not self.home.end(ended.code, _why_given_up(ended.code)):
                return 1
        if self.hosts is not None:
            self._remove_run(self.hosts)
        return 0

    def _remove_run(self, hosts: Hosts) -> None:
        session, placement = hosts.compute.session, hosts.placement
        session.clock.sleep(LINGER_S)
        say("the run is over: its machines are removed")
        try:
            hosts.file.close()
            SecretManager(session=session).delete(placement.token_secret)
        except MusterError as error:  # a secret costs cents, and the account may not be allowed to
            say(f"not all is removed: {error}")
        remove_machines(hosts.compute, placement.stem, spared=self.machine.name)


def _why_given_up(code: int) -> str:
    """Machines are billed for as long as a supervisor that cannot work is started again."""
    if code in CONFIG_ERRORS:
        what = "run file" if code == 2 else "plan"
        return f"the supervisor cannot use this run's {what}: exit code {code}, {CONFIG_TRIES} times"
    return f"the supervisor crashed {TRIES} times within {IN_A_ROW_S:.0f} s, last with exit code {code}"


def remove_machines(compute: Compute, stem: str, *, spared: str) -> None:
    """Remove what the run has at Compute Engine, the machine ``spared`` last; report what stays."""
    for left in teardown.remove(compute, stem, compute.session.clock, patience_s=GONE_WITHIN_S, spared=spared):
        say(f"still there: {left}")


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
    processes.replace_text(token, secrets.value(machine.token_secret))
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


def hosts_of(machine: Machine, store: Store, session: Session) -> Hosts:
    """What asks for this run's hosts, and replaces lost ones."""
    spec = RunSpec.model_validate_json(run_folder.get(store, machine.home, machine.files).resolved)
    placement = replace(
        place(spec, run_id=machine.run_id, run_dir=machine.home),
        submission=machine.submission, files_sha256=machine.files,
    )  # fmt: skip
    file = RequestLogFile(store=store, home=machine.home)
    return Hosts(
        placement=placement, compute=Compute(session=session, project=placement.project), file=file, report=say
    )


class Fate(enum.Enum):
    """What a machine that starts finds of its run."""

    NEEDED = enum.auto()
    """As far as the home says."""
    SUPERSEDED = enum.auto()
    """The run lives in a later submission, which has asked for machines."""
    OVER = enum.auto()
    """It was cancelled, or has ended."""


def fate(machine: Machine, store: Store) -> Fate:
    """What has become of this machine's run; NEEDED where the home does not say.

    A request whose answer was lost may be carried out minutes after that; and a supervisor's machine that is killed
    while it clears up after its run finds no secret any more. A log of requests is there, and open, before any machine
    is asked for. Where a run has its home by name, that may be another run's by now.
    """
    try:
        log, _ = RequestLogFile(store=store, home=machine.home).read()
        submission = int(machine.submission)
        if log is None or log.run_id != machine.run_id or (log.closed and log.submission == submission):
            return Fate.OVER
        later = log.submission > submission
        asked = bool(log.supervisor_zone or log.requests)  # one that failed before lets this run heal
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
    say(f"the run of this machine {'has a later submission' if superseded else 'was cancelled, or is over'}: exiting")
    if machine.role == HOST:
        subprocess.run(["systemctl", "poweroff"], stdin=subprocess.DEVNULL, check=False)
        return 1
    compute = Compute(session=session, project=project().strip())
    stem, own = stem_of(machine.run_id), machine.name
    if superseded:  # by zone, too: the later submission's has the same name
        compute.ok("DELETE", compute.url(f"zones/{machine.zone}/instances/{own}"))
        return 1
    remove_machines(compute, stem, spared=own)
    return 0


def keep_hosts(hosts: Hosts, pause_s: float = PROVISION_S) -> None:
    """Step after step, in a thread; it never ends."""
    said = ""
    while True:
        try:
            hosts.step()
            said = ""
        except Exception as error:  # noqa: BLE001 (a thread's edge; the log says what is under way)
            if str(error) != said:
                say(f"hosts: {error}")
            said = str(error)
        time.sleep(pause_s)


def host_program(place: GcePlace, environ: Mapping[str, str], store: Store) -> HostProgram:
    """What keeps this machine's program, and answers what comes through the run's home."""
    machine, children = place.machine, RealChildren()
    supervises = machine.role == SUPERVISOR
    letters = Letters(
        store=store, home=machine.home, run_id=machine.run_id, token=place.token, index=machine.name, children=children,
        env=environ, run_dir=machine.run_dir, holds=functools.partial(_supervises, children),
    )  # fmt: skip
    module, words = ("muster.app.supervisor", []) if supervises else ("muster.agent.watchdog", ["--host", machine.name])
    program = Program(
        argv=[*program_argv(module, machine.run_dir, machine.run_id), *words],
        env=environ,
        home=place.home,
        writer=SUPERVISOR if supervises else machine.writer,
    )
    return HostProgram(
        place=place,
        rules=rules(machine.role),
        programs={SUPERVISOR if supervises else AGENT: program},
        services=[letters],
        children=children,
    )


def _supervises(children: Children) -> bool:
    return children.pid(SUPERVISOR) is not None


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
    own = GcePlace(
        home=RunState(run_dir=machine.run_dir, job=supervisor_of(machine.run_id)),
        token=read_token(environ["MUSTER_TOKEN_FILE"]),
        machine=machine,
    )
    program = host_program(own, environ, store)
    if role == SUPERVISOR:
        own.hosts = hosts_of(machine, store, session)
        up_s = functools.partial(program.up_s, SUPERVISOR)
        own.hosts.useless = Useless(placement=own.hosts.placement, store=store, wall_s=own.hosts.wall_s, up_s=up_s)
        start_thread(functools.partial(keep_hosts, own.hosts), "hosts")
    return program.run()


if __name__ == "__main__":
    raise SystemExit(main())
