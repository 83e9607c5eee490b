"""What each level does, by the verbs that a user types: nothing here knows a back end's name."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from muster import backends
from muster.accept.ladder import CLEARING_S, DOLLARS, HOST_HOURS, Level, Meter, NotHere, Unit
from muster.accept.run_network import found, judged, waiting
from muster.app.cluster import preflight as preflight_
from muster.app.inspect.check import check_run
from muster.app.inspect.network import NetworkTest, check_network
from muster.app.inspect.network_hosts import Place
from muster.app.inspect.report import report
from muster.app.inspect.status import job, mirror
from muster.app.planning.prices import priced
from muster.app.run import recover as recover_
from muster.app.run import stop as stop_
from muster.app.run import submit as submit_
from muster.app.run.exec import execute
from muster.app.run.resolve import resolved
from muster.backends.backend import Site
from muster.backends.cluster import Cluster
from muster.backends.machine_prices import cluster_usd_per_hour
from muster.backends.protocols import Terminal
from muster.catalog.rows import machines
from muster.chaos.target import RunTarget
from muster.config.load import Loaded
from muster.config.spec import RunSpec
from muster.core.errors import MusterError, UsageError
from muster.core.event_details.hosts import AgentStarted
from muster.core.event_details.network import NetworkMeasured
from muster.core.event_details.run import RunFinished
from muster.health.network.expected import unjudged
from muster.health.verdicts import Verdict
from muster.probe.programs import network_command
from muster.report.audit.invariants import broken, check
from muster.storage.run_registry import RunDir

HOSTS = 2
ONE_MACHINE = "one machine: its hosts have one kernel"
FIRST_STEPS, MORE_STEPS = 5, 5
SMALL_MACHINE = "e2-standard-4"
"""Of a cluster's own small pool."""
UP_S, PREFLIGHT_S, START_S, RECOVERY_S = 3600.0, 1800.0, 3600.0, 1800.0
LEAST_S = 60.0
END_HOST = "muster.chaos.end_host"
#: What a trial changes in the run file.
OVERRIDES = (
    "resources.hosts=2", "resources.min_hosts=1", "training.steps=1000000", "training.epochs=null",
    "checkpoint.every_steps=50", "evaluation.at_start=false", "output.tracker=none", "recovery.policy=default",
    "recovery.keep_hosts_after_failure_s=0", "check.network=true",
)  # fmt: skip


@dataclass(kw_only=True)
class Trial:
    """One climb: a run file of two hosts, and what has come of it so far."""

    loaded: Loaded
    cluster: Cluster | None
    per_host_hour: float
    """In ``unit``."""
    unit: Unit = DOLLARS
    site: Site | None = None
    run: RunDir | None = None
    killed: str = ""
    up: bool = False
    rehearsal: str | None = None
    """What showed that this is not the place itself."""

    @property
    def spec(self) -> RunSpec:
        return self.loaded.spec

    @property
    def base_usd(self) -> float:
        """An hour of what is there without hosts."""
        if self.cluster is None or not backends.get(self.spec.backend).acceptance.rehearse:
            return 0.0
        region = next(iter(self.spec.resources.locations), "").rpartition("-")[0]
        return cluster_usd_per_hour(SMALL_MACHINE, region) or 0.0

    def levels(self) -> list[Level]:
        base, whole = self.base_usd, self.base_usd + HOSTS * self.per_host_hour
        first = 2 * base if self.site is None else whole
        return [
            Level(name="render", title="what would be sent, without sending it", act=self.render),
            Level(name="access", title="credentials, permissions, quota", act=self.access),
            Level(name="up", title="what runs need in the project", act=self.make, per_hour=base, limit_s=UP_S),
            Level(
                name="preflight", title="a small job on processors", act=self.preflight, per_hour=first,
                limit_s=PREFLIGHT_S,
            ),
            Level(
                name="network", title="the network between the hosts", act=self.network,
                per_hour=whole if self.site is not None or not self.spec.unmeasured_network else 0.0,
                limit_s=PREFLIGHT_S if self.site is not None else START_S,
            ),
            Level(name="train", title=f"{HOSTS} hosts train", act=self.train, per_hour=whole, limit_s=START_S),
            Level(name="check", title="the hosts' hardware, meanwhile", act=self.check, per_hour=whole),
            Level(name="kill", title="a host's programs are killed", act=self.kill, per_hour=whole),
            Level(
                name="recover", title="it trains on beyond the step", act=self.trains_on, per_hour=whole,
                limit_s=RECOVERY_S,
            ),
            Level(
                name="continue", title="stopped, saved, and continued", act=self.go_on, per_hour=whole,
                limit_s=START_S,
            ),
            Level(name="report", title="every second and dollar", act=self.account, per_hour=whole),
        ]  # fmt: skip

    def clearing(self) -> Level:
        return Level(name="down", title="everything is removed, and looked for", act=self.clear, limit_s=CLEARING_S)

    # ------------------------------------------------------------ nothing

    def render(self, meter: Meter) -> str:
        request = submit_.preview(self.loaded)
        tasks = ", ".join(f"{task.count} x {task.name}" for task in request.tasks)
        return f"{tasks}; {len(request.files)} files"

    def access(self, meter: Meter) -> str:
        offers = backends.load(self.spec.backend).offers(self.spec)  # asks the place: refused here, if at all
        if self.cluster is not None:
            return "; ".join(self.cluster.look()) or "nothing is in the way"
        found = [f"{len(offers)} kinds of hosts on offer"]
        if (ask := backends.get(self.spec.backend).acceptance.access) is not None:
            found += ask(self._resolved(), submit_.preview(self.loaded))
        return "; ".join(found)

    # ------------------------------------------------------------ cents

    def make(self, meter: Meter) -> str:
        if self.cluster is None:
            raise NotHere(f"{self.spec.backend} has nothing to make")
        self.up = True
        lease = self.cluster.up(None)
        return f"{len(lease.resources)} resources"

    def preflight(self, meter: Meter) -> str:
        began_ns, said = meter.clock.monotonic_ns(), list[str]()
        if self.site is not None:
            looked = self.site.look(self._resolved(), meter.wait)
            self._judge(looked.kernels)
            said.append(looked.said)
        if backends.get(self.spec.backend).acceptance.rehearse is None:
            raise NotHere(f"{self.spec.backend} has no preflight")
        left_s = PREFLIGHT_S - (meter.clock.monotonic_ns() - began_ns) / 1e9
        said.append(preflight_.preflight(self.loaded, timeout_s=max(LEAST_S, left_s), clock=meter.clock).reason)
        return "; ".join(said)

    # ------------------------------------------------------------ dollars

    def network(self, meter: Meter) -> str:
        """Between hosts that do nothing else yet: it takes their accelerators whole. Where no hosts are held without a
        run, the run's own ranks measure before they train."""
        if self.site is None:
            return self._network_of_run(meter)
        spec = self._resolved()
        test = NetworkTest(family=_family(spec))
        with self.site.held(spec, meter.wait) as hosts:

            def argv(place: Place) -> list[str]:
                host = hosts[place.name]
                return [*host.words, *network_command(peer=host.peer, python=host.python)]

            checked = check_network([Place(name=name) for name in hosts], argv, test)
        wrong = [one.message for one in checked.findings if one.verdict.faulty or one.verdict is Verdict.INCOMPLETE]
        if wrong:
            raise MusterError("; ".join(wrong))
        if why := unjudged(checked.findings, family=test.family):
            said = [one.message for one in checked.findings if one.check == "net.busbw"]
            raise MusterError("; ".join([*said, why]))
        return f"{' and '.join(hosts)}: {checked.assessment.level:.3g} GB/s"

    def _network_of_run(self, meter: Meter) -> str:
        if reason := self.spec.unmeasured_network:
            raise NotHere(reason)
        self._submit()
        launcher, handle = job(self._run())
        measured: list[NetworkMeasured] = []
        last = ""

        def seen() -> bool:
            nonlocal last
            mirror(launcher, self._run())
            if (one := found(self._target().events(), hosts=HOSTS)) is not None:
                measured.append(one)
                return True
            status = launcher.poll(handle)
            last = waiting(self._target().events(), hosts=HOSTS, status=status.reason)
            if status.state.ended:
                raise MusterError(f"the run ended before its network was measured: {last}")
            return False

        meter.wait(seen, "figures of the network", START_S, lambda: last)
        self._judge_hosts()
        return judged(measured[0], family=_family(self._resolved()))

    def train(self, meter: Meter) -> str:
        if self.run is None:
            self._submit()
        self._wait_for_step(meter, FIRST_STEPS, START_S)
        self._judge_hosts()
        return f"run {self._run().run_id}: step {self._target().step()} on {len(self._target().hosts())} hosts"

    def _submit(self) -> None:
        backend = self.spec.backend
        self.rehearsal = backends.get(backend).acceptance.stand_in(backends.load(backend)) or self.rehearsal
        self.run = submit_.submit(self.loaded, argv=["muster", "accept"]).run

    def _judge_hosts(self) -> None:
        started = self._target().events(AgentStarted.kind)
        boots = {event.host: event.read(AgentStarted).boot_id for event in started}
        self._judge([boot for boot in boots.values() if boot is not None])

    def _judge(self, kernels: Sequence[str]) -> None:
        """Hosts that share a kernel are processes, network namespaces or containers of a single machine."""
        if len(set(kernels)) < len(kernels):
            self.rehearsal = self.rehearsal or ONE_MACHINE

    def check(self, meter: Meter) -> str:
        found = check_run(self._run().run_id)
        faulty = [one.message for one in found.findings if one.verdict.faulty]
        if faulty:
            raise MusterError("; ".join(faulty))
        return "; ".join(found.lines()[:6]) or "nothing to say"

    def kill(self, meter: Meter) -> str:
        """All of Muster's on one host, with the signal that no program sees."""
        target = self._target()
        self.killed = target.hosts()[-1]
        launcher, _ = job(self._run())
        said, step, run_id = f"{self.killed}, at step {target.step()}", target.step(), self._run().run_id
        if launcher.exec is None:
            target.signal_host(self.killed)
            return said
        python = sys.executable if launcher.remote is None else "python"
        python = self.site.python(self.spec) if self.site is not None else python
        for number in reversed(range(HOSTS)):  # a back end may number hosts in another order
            out = io.BytesIO()
            try:
                argv = [python, "-P", "-m", END_HOST, run_id, self.killed]
                code = execute(run_id, argv, Terminal(out=out.write, err=out.write), host=number)
            except UsageError:
                raise
            except MusterError:  # the way into a host may end with its programs
                return said
            if code == 0:
                lines = out.getvalue().decode(errors="replace").strip().splitlines()  # srun may warn before
                return f"{said}: {lines[-1][:200] if lines else 'killed'}"
        raise MusterError(f"no host has programs of {self.killed} at step {step}")

    def trains_on(self, meter: Meter) -> str:
        before = self._target().step()
        meter.wait(lambda: self._seen("incident.resolved"), "recovery", RECOVERY_S)
        self._wait_for_step(meter, before + MORE_STEPS, RECOVERY_S)
        return f"resolved; step {self._target().step()}, {len(self._target().hosts())} hosts"

    def go_on(self, meter: Meter) -> str:
        reference = self._run().run_id
        stop_.stop(reference, wait=False, clock=meter.clock)
        launcher, handle = job(self._run())
        limit_s = self.spec.recovery.grace_s + CLEARING_S
        meter.wait(lambda: launcher.poll(handle).state.ended, "end of the run", limit_s)
        mirror(launcher, self._run())
        before = self._target().step()
        recover_.recover(reference, argv=["muster", "accept"])
        self._wait_for_step(meter, before + MORE_STEPS, START_S)
        return f"from step {before} to step {self._target().step()}"

    def account(self, meter: Meter) -> str:
        stop_.stop(self._run().run_id, wait=False, clock=meter.clock)  # the ledger of a run that is over
        launcher, handle = job(self._run())
        limit_s = self.spec.recovery.grace_s + CLEARING_S
        meter.wait(lambda: launcher.poll(handle).state.ended, "end of the run", limit_s)
        mirror(launcher, self._run())
        document = report(self._run().run_id).document
        wrong = broken(check(self._run().path, bound_s=self.spec.recovery.start_timeout_s))
        if wrong:
            raise MusterError("; ".join(wrong))
        if not document.incidents:
            raise MusterError("the report knows of no incident, and a host was killed")
        return f"{len(document.incidents)} incidents: {document.incidents[0].sentence}"

    # ------------------------------------------------------------ the end

    def clear(self, meter: Meter) -> str:
        """The run, then what ``up`` made; what is left is a failure, with its names."""
        left: list[str] = []
        if self.run is not None:
            try:
                left += stop_.down(self.run.run_id).left
            except MusterError as error:
                left.append(str(error))
        if self.site is not None:
            try:
                left += self.site.left()
            except MusterError as error:
                left.append(str(error))
        if self.cluster is not None and self.up:
            try:
                down = self.cluster.down()
                left += [*down.troubles, *(one.sentence() for one in down.leftovers if not one.kept)]
            except MusterError as error:
                left.append(str(error))
        if left:
            raise MusterError("left: " + "; ".join(left), hint="muster down, by hand, now")
        return "nothing is left"

    # ------------------------------------------------------------ looking

    def _run(self) -> RunDir:
        assert self.run is not None
        return self.run

    def _resolved(self) -> RunSpec:
        return resolved(self.spec, backends.load(self.spec.backend))[0]

    def _target(self) -> RunTarget:
        return RunTarget(run=self._run(), spec=self.spec, random=random.Random(0))

    def _seen(self, kind: str) -> bool:
        mirror(job(self._run())[0], self._run())
        return bool(self._target().events(kind))

    def _wait_for_step(self, meter: Meter, step: int, limit_s: float) -> None:
        launcher, handle = job(self._run())
        last = ""

        def reached() -> bool:
            nonlocal last
            mirror(launcher, self._run())
            target = self._target()
            if target.step() >= step:
                return True
            status = launcher.poll(handle)
            last = status.reason
            if status.state.ended:
                ends = target.events(RunFinished.kind)
                reason = ends[-1].read(RunFinished).reason if ends else status.reason
                raise MusterError(f"the run ended before step {step}: {reason}")
            return False

        meter.wait(reached, f"step {step}", limit_s, lambda: last)


def _family(spec: RunSpec) -> str:
    row = machines().get(spec.resources.machine or "")
    return row.family if row is not None else ""


def trial(loaded: Loaded, cluster: Cluster | None, budget: float) -> Trial:
    """Where others run the place and no price is known, the budget counts host-hours.

    Raises:
        UsageError: the price of a host there is not known, so no budget could be kept.
    """
    spec = priced(loaded.spec)
    backend = backends.get(spec.backend)
    site = backend.acceptance.site() if backend.acceptance.site is not None else None
    free = backend.capabilities.uses_this_machine or spec.resources.provisioning_model == "owned"
    usd = spec.resources.usd_per_host_hour
    if usd is None and not free and site is None:
        raise UsageError(
            "what a host costs is not known, so no budget can be kept",
            hint="resources.machine, provisioning_model and locations of a row in `muster prices`, or "
            "resources.usd_per_host_hour; provisioning_model: owned for machines that cost nothing",
        )
    # The supervisor keeps it too, should this program die.
    limits = spec.limits.model_copy(update={"max_usd": min(budget, spec.limits.max_usd or budget)})
    kept = spec.model_copy(update={"limits": limits}) if usd else spec
    if site is not None:  # measured on hosts that are held for it
        kept = kept.model_copy(update={"check": kept.check.model_copy(update={"network": False})})
    counted = site is not None and usd is None
    return Trial(
        loaded=replace(loaded, spec=site.trial(kept) if site is not None else kept),
        cluster=cluster,
        site=site,
        per_host_hour=1.0 if counted else usd or 0.0,
        unit=HOST_HOURS if counted else DOLLARS,
    )
