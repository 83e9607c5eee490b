"""Hosts that join a supervisor's state machine one by one, each with what it saw of its hardware."""

from fakes.probe_output import output
from fakes.virtual_run import machine, spec

from muster.protocol.hello import AgentHello
from muster.protocol.to_agent import StartAttempt
from muster.protocol.to_supervisor import HostLooked, HostReady
from muster.protocol.values import HostLook
from muster.protocol.version import MINE
from muster.supervise.recovery.inputs import FromHost, HostUp, Log, Send


class Run:
    """A supervisor's state machine; ``effects``: all that it has done."""

    def __init__(self, **resources):
        self.machine = machine(spec(**resources))
        self.effects = self.machine.start(0)
        self.now_ns = 0

    def give(self, *given):
        for one in given:
            self.now_ns += 1_000_000
            self.effects += self.machine.handle(one, self.now_ns)

    def join(self, name, *gpus, output_of=output, **look):
        """A host connects, has looked, and is ready."""
        hello = AgentHello(version=MINE, host=name, pid=7, attempt=0, ready=False, step=-1)
        told = HostLook(part="passive", output=output_of(*gpus), node=f"node-of-{name}", **look)
        self.give(
            HostUp(host=name, hello=hello),
            FromHost(host=name, message=HostLooked(look=told, at_ns=self.now_ns + 1)),
            FromHost(host=name, message=HostReady(store=("10.0.0.1", 1))),
        )

    def kinds(self, kind):
        return [one for one in self.effects if isinstance(one, Log) and one.kind == kind]

    def actions(self):
        return [one.detail["action"] for one in self.kinds("incident.decided")]

    def started(self):
        """The hosts of the attempt that was started last."""
        orders = [one.host for one in self.effects if isinstance(one, Send) and isinstance(one.message, StartAttempt)]
        return orders[-len(self.machine.state.active) :] if orders else []
