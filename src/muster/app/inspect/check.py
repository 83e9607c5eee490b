"""``muster check``: is the hardware sound? Of this machine, of what a run's hosts found, or of captured outputs."""

from __future__ import annotations

import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path

from muster.app.inspect.nccl_tests import launching
from muster.app.inspect.network import NetworkTest, check_network
from muster.app.inspect.network_hosts import of_run, places, reaching
from muster.app.inspect.status import job, spec_of
from muster.app.inspect.supervisor_client import request
from muster.app.inspect.why import captured_files
from muster.catalog.rows import machines
from muster.config.load import load
from muster.config.spec import RunSpec
from muster.config.validation import is_remote
from muster.core.errors import BackendError, UsageError
from muster.core.typed_json import JsonObject
from muster.health.hang.stack_groups import ranges
from muster.health.machine.expected import Expected, expected_of
from muster.health.machine.fleet import compare_hosts
from muster.health.machine.judge import judge_machine
from muster.health.machine.report import is_probe, of_own_gpus, read_probe
from muster.health.recognise import kind_of, recognise
from muster.health.verdicts import Finding, Verdict, exit_code, worst
from muster.probe.programs import command, output_of
from muster.protocol.client import CheckHosts
from muster.storage import run_registry
from muster.storage.run_registry import RunDir
from muster.supervise.recovery import host_health
from muster.supervise.recovery.host_health import commands_of

#: The probe's measurements have limits of their own; this one holds where the whole program is stuck.
PASSIVE_LIMIT_S, FULL_LIMIT_S = 10.0, 180.0
#: A run's hosts have this long to answer, and are asked for what has come so often.
HOSTS_LIMIT_S, HOSTS_AGAIN_S = 20.0, 0.25
_GRAVEST = tuple(reversed(Verdict))


@dataclass(frozen=True, kw_only=True)
class Checked:
    """``commands``: what takes a faulty host out, by host. ``kinds``: of captures, what each file was taken for."""

    findings: tuple[Finding, ...]
    commands: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    whole: str = "captures"
    """What findings without a host are about."""
    raw: bytes = b""
    """The probe's own output, where this machine was looked at."""

    @property
    def exit_code(self) -> int:
        return exit_code(self.findings)

    def to_json(self) -> JsonObject:
        return {
            "verdict": worst(self.findings).value,
            "findings": [asdict(one) for one in self.findings],
            "commands": self.commands,
            "captures": self.kinds,
        }

    def lines(self) -> list[str]:
        """For people: a block for each host, the gravest finding first; then what to type."""
        shown: list[str] = []
        for host, group in groupby(sorted(self.findings, key=lambda one: one.host), key=lambda one: one.host):
            here = sorted(group, key=lambda one: _GRAVEST.index(one.verdict))
            shown.append(f"{host or self.whole}: {worst(here).value}")
            for one in _said_once(here):
                expected = f" (expected {one.expected}{f'; {one.source}' * bool(one.source)})" if one.expected else ""
                shown.append(f"  {one.verdict.value:<10} {one.message}{expected}")
                if one.command:
                    shown.append(f"  {'':<10} try: {one.command}")
        return [*shown, *(f"{host}: {command}" for host, command in self.commands.items())]


def _said_once(findings: Iterable[Finding]) -> list[Finding]:
    """What is the same of several GPUs is one line: of eight that one power supply slows down, for example."""
    found: dict[Finding, list[int]] = {}
    for one in findings:
        own = f"GPU {one.gpu}: "
        alike = one.gpu is not None and one.message.startswith(own)
        key = replace(one, gpu=None, evidence="", message=one.message.removeprefix(own)) if alike else one
        found.setdefault(key, []).extend([one.gpu] if alike and one.gpu is not None else [])
    return [
        replace(one, message=f"{'GPU' if len(gpus) == 1 else 'GPUs'} {ranges(gpus)}: {one.message}") if gpus else one
        for one, gpus in found.items()
    ]


def check_machine(run_file: str | None = None, *, passive: bool = False) -> Checked:
    """Look at this machine. With ``run_file`` the machine is held against the one that it names.

    ``passive``: nothing is loaded (two seconds); otherwise GPUs and processor are, unless a process uses a GPU.

    Raises:
        RunFileError: the run file is wrong.
        BackendError: the probe cannot be started.
    """
    spec = load(run_file, environment=False).spec if run_file is not None else None
    try:
        argv = command(full=not passive, folder=_folder(spec))
        output, _ = output_of(argv, limit_s=PASSIVE_LIMIT_S if passive else FULL_LIMIT_S)
    except OSError as error:
        raise BackendError(f"cannot start the probe: {error.strerror}") from error
    expected = _expected(spec)
    report = read_probe(output, host=socket.gethostname())
    own = host_health.own_numbers(spec)
    found = judge_machine(report, gpus=expected.gpus, source=expected.source, own=own)
    return Checked(findings=tuple(found), commands=_commands(found, spec), raw=output)


def is_run(target: str) -> bool:
    """Whether it names a run rather than a run file."""
    return not Path(target).is_file() and not is_run_file(target)


def is_run_file(target: str) -> bool:
    return Path(target).suffix in (".yaml", ".yml")


def is_capture(target: str) -> bool:
    """Whether it names a file of a known form."""
    return Path(target).is_file() and not is_run_file(target) and bool(kind_of(Path(target).read_bytes()))


def check_run(reference: str) -> Checked:
    """Have the agents of a live run look at their hosts, all at once, while it trains: nothing is loaded.

    Raises:
        UsageError: no such run; it has ended.
        SupervisorUnreachable: no supervisor holds it.
    """
    run = run_registry.find(reference)
    launcher, handle = job(run)
    status = launcher.poll(handle)
    if status.state.ended:
        hint = "a run's hosts are looked at while it lives; muster check alone looks at this machine"
        raise UsageError(f"{run.run_id} has ended: {status.reason}", hint=hint)
    return check_hosts_of(run)


def check_hosts_of(run: RunDir) -> Checked:
    """The same, of a run whose folder is known."""
    spec = spec_of(run)
    question, until = CheckHosts(number=1 + secrets.randbelow(1 << 31)), time.monotonic() + HOSTS_LIMIT_S
    while True:
        answer = request(run, question)
        waiting = [name for name, host in answer.hosts.items() if host.connected and name not in answer.looks]
        if not waiting or time.monotonic() >= until:
            break
        time.sleep(HOSTS_AGAIN_S)
    found: list[Finding] = []
    reports, take_out = [], {}
    for host, look in sorted(answer.looks.items()):
        here = host_health.judge(host, look, spec)
        found += here
        reports.append(of_own_gpus(read_probe(look.output.encode(), host=host), look.own))
        command = host_health.take_out(host, look, here, spec)
        if command is not None:
            take_out[host] = command
    found += compare_hosts(reports)
    lost = [name for name, host in answer.hosts.items() if not host.connected]
    for name in (*waiting, *lost):
        why = "is not connected" if name in lost else f"has not answered within {HOSTS_LIMIT_S:g} s"
        found.append(Finding(check="machine", verdict=Verdict.INCOMPLETE, host=name, message=f"{name} {why}"))
    return Checked(findings=tuple(found), commands=take_out)


def check_captures(place: str, run_file: str | None = None, *, hosts: Sequence[str] = ()) -> Checked:
    """Judge captured outputs (a folder or one file), each known by its content; a file's folder names its host.

    ``hosts``: only these; empty: all. Probe outputs of several hosts are compared with each other.

    Raises:
        UsageError: there is nothing to read, or nothing of these hosts.
    """
    spec = load(run_file, environment=False).spec if run_file is not None else None
    expected = _expected(spec)
    probes, others, kinds = [], [], {}
    for name, content in captured_files(Path(place)):
        if is_probe(content):
            host = Path(name).parent.name or Path(name).stem
            probes.append(read_probe(content, host=host))
            kinds[name] = "output of the probe"
        else:
            others.append((name, content))
    own = host_health.own_numbers(spec)
    known = recognise(others, expected=expected, own=own)
    found = [*known.findings]
    for report in probes:
        found += judge_machine(report, gpus=expected.gpus, source=expected.source, own=own)
    found += compare_hosts(probes)
    if hosts:
        there = sorted({one.host for one in found if one.host})
        if missing := sorted(set(hosts) - set(there)):
            known_hosts = ", ".join(there) or "none is named"
            raise UsageError(f"nothing in {place} is of host {missing[0]}", hint=f"hosts there: {known_hosts}")
        found = [one for one in found if one.host in hosts]
    if not found:
        raise UsageError(f"nothing to read in {place}", hint="kernel logs, nvidia-smi -q, ibstat, nccl-tests...")
    return Checked(findings=tuple(found), commands=_commands(found, spec), kinds={**known.kinds, **kinds})


def check_hosts_network(
    target: str | None,
    hosts: Sequence[str],
    *,
    reach: str = "",
    largest_mib: int | None = None,
    nccl_tests: bool = False,
    say: Callable[[str], object] | None = None,
) -> tuple[Checked, list[str]]:
    """Measure collectives between hosts; (findings, tables of nccl-tests' form).

    ``target``: a live run, whose hosts are measured (``hosts``: only these of them); or a run file, which names the
    back end, by which ``hosts`` (``NAME`` or ``NAME=ADDRESS``) are reached unless ``reach`` says how, and the machine's
    family. ``nccl_tests``: all together are measured by NVIDIA's programs, by ``mpirun`` or Slurm.

    Raises:
        RunFileError: the run file is wrong.
        UsageError: no such run, fewer than two hosts, it is not known how to reach them, or their GPUs are in use.
        SupervisorUnreachable: no supervisor holds the run.
    """
    run = target is not None and is_run(target)
    if run and (reach or nccl_tests):
        raise UsageError(f"{target} is a run: its hosts are reached by its back end", hint="--host, with a run file")
    busy, spec = "", None
    if run and target is not None:
        spec = spec_of(run_registry.find(target))
        members, argv, busy = of_run(target, hosts)
    else:
        spec = load(target, environment=False).spec if target is not None else None
        argv = reaching(spec.backend if spec is not None else "", reach)
        members = places(hosts)
    row = machines().get(spec.resources.machine or "") if spec is not None else None
    test = NetworkTest(
        largest_bytes=None if largest_mib is None else largest_mib << 20,
        family=row.family if row is not None else "",
        history=run_registry.home() / "network.jsonl",
        say=say or (lambda text: None),
        busy=busy,
        nccl_tests=launching(spec.backend if spec is not None else "", reach) if nccl_tests else None,
    )
    found = check_network(members, argv, test)
    commands_ = _commands(found.findings, spec)
    return Checked(findings=found.findings, commands=commands_, whole="network"), list(found.tables)


def _expected(spec: RunSpec | None) -> Expected:
    """What the machine that the run file names should have."""
    return expected_of(spec.resources.machine if spec is not None else None)


def _folder(spec: RunSpec | None) -> str:
    """Where saves would be written, or the nearest folder above it that is there."""
    place = spec.checkpoint.dir or spec.run_dir if spec is not None else None
    if place is None or is_remote(place):
        return tempfile.gettempdir()
    path = Path(place).expanduser().absolute()
    return str(next((one for one in (path, *path.parents) if one.is_dir()), Path("/")))


def _commands(found: Iterable[Finding], spec: RunSpec | None) -> dict[str, str]:
    return commands_of(found, spec) if spec is not None else {}
