"""``python -m muster.agent.host_agent``: one host of a run, as a loop over events.

Its edge reads what happens, ``decide`` judges, and the edge carries out what was decided. The loop never waits for a
disk, a bucket or a peer (the replicator does that) and never imports torch. Its state can be rebuilt: a restarted agent
listens on the same socket file, its fork server and ranks reconnect, and the snapshots are still in memory.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from itertools import chain

from muster.agent.decide import decide, due_s, end_host
from muster.agent.edge.edge import Edge
from muster.agent.edge.lease import supervisor_address
from muster.agent.values.actions import Action
from muster.agent.values.events import Event, Started, Tick
from muster.agent.values.host_identity import SOCKET, HostIdentity
from muster.agent.values.state import ForkServer, HostState, Replicator
from muster.agent.watchdog import parse_arguments
from muster.core import environment, processes, typed_json
from muster.core.errors import MusterError
from muster.protocol import to_agent, to_supervisor
from muster.protocol.rank_agent import TO_RANK


class HostAgent:
    def __init__(self, identity: HostIdentity) -> None:
        self.edge = Edge(identity)
        record = self.edge.replicator_record()
        self.state = HostState(
            identity=identity, spec=identity.read_spec(), writer=self.edge.log.writer,
            fork_server=ForkServer(socket=str(identity.memory.path(SOCKET))),
            replicator=Replicator(port=record.port, copies=record.peers),
        )  # fmt: skip
        detail = {"pid": os.getpid(), "ranks": self.state.ranks_per_host, "boot_id": processes.boot_id()}
        self.edge.log.write("agent.started", detail)

    def run(self, *, watchdog: int | None, ignore_term: bool) -> int:
        """Serve until the supervisor ends the host, or the wait for one is over; the exit code.

        ``watchdog``: exit with this pid. An exception ends the agent as a crash does: its ranks live on.
        """
        self.edge.start(watchdog=watchdog, ignore_term=ignore_term)
        self.give(Started())
        typed_json.prepare(*to_agent.TO_AGENT.messages, *to_supervisor.FROM_AGENT.messages, *TO_RANK.messages)
        while self.state.leaving.reason is None:
            self.turn()
        self.act(end_host(self.state, now_s=time.monotonic(), wall_ns=time.time_ns()))
        self.edge.close()
        if self.state.leaving.error:
            print(f"error: {self.state.leaving.error}", file=sys.stderr)
        return self.state.leaving.code

    def turn(self) -> None:
        """Wait for what happens next. The clock's event comes last: timers that are due, or may be served early."""
        wait_s = max(0.0, due_s(self.state) - time.monotonic())
        for event in chain(self.edge.poll(wait_s), [Tick()]):
            self.give(event)

    def give(self, event: Event) -> None:
        self.act(decide(self.state, event, now_s=time.monotonic(), wall_ns=time.time_ns()))

    def act(self, actions: Iterable[Action]) -> None:
        """Depth first: the answer to an action is judged before the next action."""
        for action in actions:
            for answer in self.edge.carry_out(action):
                self.give(answer)


def main() -> None:
    processes.forgive_outputs()
    arguments, variables = parse_arguments("Muster's agent (started by its watchdog)"), environment.current()
    try:
        supervisor_address(arguments.run_dir, me=arguments.host)  # refuse another version before touching anything
        agent = HostAgent(HostIdentity.of_this_process(arguments))
        code = agent.run(watchdog=variables.watchdog_pid, ignore_term=variables.term_ignored)
    except MusterError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)


if __name__ == "__main__":
    main()
