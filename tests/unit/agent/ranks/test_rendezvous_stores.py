"""A rendezvous store serves one attempt: real agents' decisions under the supervisor's state machine, in virtual time.

A fork server answers with a new store after some time, in which anything else may happen. It keeps two stores: one that
an attempt was given ends under a later attempt that is given it once more.
"""

import random
from dataclasses import replace

import pytest
from fakes.host import FORK_SERVER, SUPERVISOR, VirtualHost, spec_of
from fakes.virtual_run import machine

from muster.agent.values.events import (
    ForkServerMessage,
    Greeted,
    PeerLost,
    ProcessGone,
    SupervisorConnected,
    SupervisorMessage,
)
from muster.protocol.fork_server import ChildExited, ForkServerHello, NewStore, SpawnStandbys
from muster.protocol.hello import AgentHello
from muster.protocol.rank_agent import StandbyHello
from muster.protocol.to_agent import EndAttempt, StartAttempt
from muster.protocol.to_supervisor import RanksEnded, StoreLost
from muster.protocol.values import StoreAddress
from muster.supervise.recovery.inputs import FromHost, HostUp, Send


class Run:
    """Hosts of one rank each. Standbys are forked at once, stores when ``answer`` is called."""

    def __init__(self, hosts):
        self.spec = spec_of(resources={"device": "cpu", "hosts": hosts, "ranks_per_host": 1})
        self.machine, self.now_ns, self.pid = machine(self.spec), 0, 100
        self.hosts, self.given, self.stores = {}, {}, {}
        """``given``: attempt -> the stores of its ranks. ``stores``: of each fork server, oldest first."""
        self.obey(self.machine.start(0))
        for name in (f"host-{number}" for number in range(hosts)):
            host = self.hosts[name] = VirtualHost(spec=self.spec)
            host.state.identity, self.stores[name] = replace(host.state.identity, host=name), [(name, 1)]
            host.state.preparation.prepared = True
            host.give(SupervisorConnected(SUPERVISOR))
            host.give(Greeted(FORK_SERVER, ForkServerHello(pid=7, store=(name, 1))))
        self.settle()

    def obey(self, effects):
        for effect in effects:
            if isinstance(effect, Send):
                if isinstance(effect.message, StartAttempt):
                    (context,) = effect.message.contexts
                    store = (context.master_addr, context.master_port)
                    self.given.setdefault(effect.message.attempt, set()).add(store)
                self.hosts[effect.host].give(SupervisorMessage(effect.message))

    def taken(self, host, kind):
        """Orders of a kind to the fork server."""
        orders = [order for _, order in host.to if isinstance(order, kind)]
        host.to[:] = [(peer, order) for peer, order in host.to if not isinstance(order, kind)]
        return orders

    def settle(self):
        """Until no process has anything to do but to make stores."""
        busy = True
        while busy:
            busy = False
            for name, host in self.hosts.items():
                messages, host.sent[:] = host.sent[:], []
                pids, host.killed[:] = host.killed[:], []
                orders = self.taken(host, SpawnStandbys)
                busy = busy or bool(messages or pids or orders)
                for local_rank in [local_rank for order in orders for local_rank in order.local_ranks]:
                    self.pid += 1
                    hello = StandbyHello(pid=self.pid, local_rank=local_rank, bound=False)
                    host.give(Greeted(self.pid, hello))
                host.give(*map(ProcessGone, pids))
                for message in messages:
                    self.now_ns += 1_000_000
                    is_hello = isinstance(message, AgentHello)
                    heard = HostUp(host=name, hello=message) if is_hello else FromHost(host=name, message=message)
                    self.obey(self.machine.handle(heard, self.now_ns))

    def answer(self, name):
        """Its fork server makes the stores that it was asked for, and keeps two."""
        for _ in self.taken(self.hosts[name], NewStore):
            newest = (name, self.stores[name][-1][1] + 1)
            self.stores[name] = [*self.stores[name], newest][-2:]
            self.hosts[name].give(ForkServerMessage(StoreAddress(store=newest)))
        self.settle()

    def kill_rank(self, name):
        pid = next(iter(self.hosts[name].state.ranks.table))
        self.hosts[name].give(ProcessGone(pid), ForkServerMessage(ChildExited(pid=pid, code=-9)))
        self.settle()

    def judge(self):
        """No store was given to two attempts, and the newest attempt's exists."""
        every = [store for stores in self.given.values() for store in stores]
        assert len(every) == len(set(every)) == len(self.given), self.given
        assert all(store in self.stores[store[0]] for store in self.given[self.machine.state.attempt]), self.stores


def test_an_attempt_that_ends_at_once_shares_its_store_with_no_other():
    run = Run(2)
    run.kill_rank("host-1")
    run.judge()
    assert sorted(run.given) == [1, 2]


def test_a_run_of_one_host_waits_for_the_next_store():
    run = Run(1)
    run.kill_rank("host-0")
    assert sorted(run.given) == [1]
    run.answer("host-0")
    run.judge()
    assert sorted(run.given) == [1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_in_any_order_of_failures_and_answers(seed):
    drawn, run = random.Random(seed), Run(2)
    for _ in range(10):
        name = drawn.choice(sorted(run.hosts))
        if drawn.random() < 0.5 and run.hosts[name].state.ranks.table:
            run.kill_rank(name)
        else:
            run.answer(name)
        run.judge()
    assert len(run.given) > 1


@pytest.mark.parametrize("begun", [False, True])
def test_a_host_that_may_have_missed_an_order_to_start_makes_another_store(begun):
    """The supervisor has died, or its connection: ranks elsewhere may have been given the store."""
    run = Run(2)
    host = run.hosts["host-0"]
    run.answer("host-0")
    host.give(PeerLost(SUPERVISOR), SupervisorConnected(SUPERVISOR))
    host.sent.clear()
    host.give(SupervisorMessage(EndAttempt(attempt=1 if begun else 2, why="")))
    host.give(*map(ProcessGone, host.killed))
    assert [type(message) for message in host.sent] == [StoreLost, RanksEnded][begun:]
    assert len(run.taken(host, NewStore)) == (not begun)
