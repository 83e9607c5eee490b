"""The fault menu: what ``muster drill`` can inject into a run, and the expected outcome.

Numbers are those of the list in docs/explanation/recovery.md; ``tests/unit/chaos/test_drill_menu.py`` compares the two.
"""

from __future__ import annotations

import difflib
from signal import SIGKILL, SIGSEGV, SIGSTOP, SIGTERM

from muster.chaos import actions
from muster.chaos.fault import Fault
from muster.chaos.target import RunTarget
from muster.core.errors import UsageError

#: Steps that a lost host may cost: those whose copy was still in transit to the other host.
IN_TRANSIT = 3
#: Applied steps that a rank takes along which dies at any moment: one, where its snapshot does not count yet.
UNSAVED = 1
#: Below this limit a link may be down unnoticed (``actions.FLAP_DOWN_S``).
FLAP_LIMIT = "recovery.heartbeat_timeout_s=2.5"
#: Short, so that a drill of a cut link does not wait long.
SHORT_LIMIT = "recovery.heartbeat_timeout_s=1.5"


def find(name: str) -> Fault:
    """The fault of that name.

    Raises:
        UsageError: there is none.
    """
    if name in MENU:
        return MENU[name]
    near = difflib.get_close_matches(name, MENU, n=1)
    raise UsageError(f"no fault {name!r}", hint=f"did you mean {near[0]}?" if near else "muster drill --list")


_RANK = ("rank_exit",)
_HOST = ("host_lost",)
_EITHER = (*_HOST, *_RANK)
_RESTART = (("restart",),)
#: A peer's broken connection may be reported before its cause, and a second rank's after a restart began.
_RESTARTS = (("restart",), ("restart", "restart"))
_SWAPS = (("swap",), ("restart", "swap"))
_OWN = ("rank_exception", "rank_exit")

# fmt: off
_RANKS = (
    Fault(name="rank-kill", numbers=(1,), text="kill -9 of one rank", noticed=_RANK, done=_RESTART,
          redone=UNSAVED, inject=actions.signal_rank(SIGKILL)),
    Fault(name="rank-kill-reduce", numbers=(2,), text="kill -9 of a rank for which its peers wait in the all-reduce",
          noticed=_RANK, done=_RESTARTS, redone=UNSAVED, inject=actions.in_rank("kill-reduce"), own_loop=True),
    Fault(name="rank-kill-updated", numbers=(3,),
          text="kill -9 of a rank that has updated its shard, before its snapshot: the others' are of the next step",
          noticed=_RANK, done=_RESTARTS, redone=1, inject=actions.in_rank("kill-updated"), own_loop=True),
    Fault(name="rank-kill-voted", numbers=(4,),
          text="kill -9 of a rank that has agreed to an update, before it applies it: the others have", noticed=_RANK,
          done=_RESTARTS, redone=1, inject=actions.in_rank("kill-voted"), own_loop=True),
    Fault(name="rank-crash", numbers=(5,), text="SIGSEGV in one rank", noticed=_RANK, done=_RESTART,
          redone=UNSAVED, inject=actions.signal_rank(SIGSEGV)),
    Fault(name="rank-stop", numbers=(8,), text="SIGSTOP of one rank: no process dies, no collective raises",
          noticed=("rank_hang",), done=_RESTART, redone=UNSAVED, inject=actions.signal_rank(SIGSTOP)),
    Fault(name="all-ranks-kill", numbers=(1,), text="kill -9 of every rank at once", noticed=_RANK, done=_RESTARTS,
          redone=UNSAVED, inject=actions.kill_all_ranks),
    Fault(name="exception-once", numbers=(6,), text="an exception in one rank, once", noticed=_OWN, done=_RESTARTS,
          redone=1, inject=actions.in_rank("exception"), own_loop=True),
    Fault(name="exception-always", numbers=(7,), text="an exception in one rank whenever it takes that step",
          noticed=_OWN, done=(("restart", "stop"), ("restart", "restart", "stop")),
          inject=actions.in_rank("exception", always=True), own_loop=True, exit_code=1),
    Fault(name="rank-gil", numbers=(9,), text="a rank holds its interpreter's lock: no answer, no death",
          noticed=("rank_hang",), done=_RESTART, redone=1, inject=actions.in_rank("gil"), own_loop=True, hangs=True),
    Fault(name="rank-livelock", numbers=(10,), text="a rank answers, and makes no step", noticed=("rank_hang",),
          done=_RESTART, redone=1, inject=actions.in_rank("livelock"), own_loop=True, hangs=True),
    Fault(name="out-of-memory", numbers=(28,), text="a rank's allocation fails (by a resource limit)",
          noticed=("rank_oom", "rank_exit"), done=_RESTARTS, redone=1, inject=actions.in_rank("memory"), own_loop=True),
    Fault(name="not-finite-once", numbers=(31,), text="one micro-batch's loss is not a number, once: a flipped bit",
          noticed=("not_finite",), done=_RESTARTS, redone=1, inject=actions.in_rank("not-finite"), own_loop=True),
    Fault(name="not-finite-always", numbers=(31,),
          text="one micro-batch's loss is not a number whenever that step is taken: nothing of it is ever applied",
          noticed=("not_finite",), done=(("restart", "stop"),), inject=actions.in_rank("not-finite", always=True),
          own_loop=True, exit_code=1),
    Fault(name="reader-dies", numbers=(40,), text="the thread that reads a rank's data ahead fails, once", noticed=_OWN,
          done=_RESTARTS, redone=1, inject=actions.in_rank("reader"), own_loop=True),
    Fault(name="crash-loop", numbers=(39,), text="the same host's rank dies three times, each time after a new step",
          noticed=_RANK, done=(("restart", "restart", "swap"),), redone=3 * UNSAVED,
          inject=actions.crash_loop, hosts=2, spares=1),
    Fault(name="random-kills", numbers=(44,),
          text=f"{actions.RANDOM_KILLS} kills of random ranks, {actions.RANDOM_KILL_MEAN_S:g} s apart on average",
          noticed=_RANK, done=tuple(("restart",) * count for count in range(1, actions.RANDOM_KILLS + 1)),
          redone=actions.RANDOM_KILLS * UNSAVED, inject=actions.kill_random_ranks),
)
_PROGRAMS = (
    Fault(name="agent-kill", numbers=(11,), text="kill -9 of a host's agent: its ranks train on and are adopted",
          inject=actions.kill_program(RunTarget.agent)),
    Fault(name="agent-and-rank-kill", numbers=(11, 16), text="kill -9 of a host's agent and one of its ranks at once",
          noticed=_RANK, done=_RESTARTS, redone=UNSAVED, inject=actions.kill_agent_and_rank),
    Fault(name="watchdog-kill", numbers=(14,),
          text="kill -9 of a host's watchdog: the host ends, a spare takes its place", noticed=_EITHER, done=_SWAPS,
          redone=IN_TRANSIT, inject=actions.kill_program(RunTarget.watchdog_pid), hosts=2, spares=1),
    Fault(name="replicator-kill", numbers=(14,),
          text="kill -9 of a host's replicator, and some steps later of the whole host: copying must have continued",
          noticed=_EITHER, done=_SWAPS, redone=IN_TRANSIT, inject=actions.kill_replicator_then_host, hosts=2, spares=1),
    Fault(name="fork-server-kill", numbers=(13,),
          text="kill -9 of a host's fork server, and with it of the rendezvous store", done=((), *_RESTARTS),
          redone=UNSAVED, inject=actions.kill_program(RunTarget.fork_server)),
    Fault(name="port-taken", numbers=(37,),
          text="the rendezvous store dies, its port is taken by another process, and a rank dies: another port is used",
          noticed=_RANK, done=_RESTARTS, redone=UNSAVED, inject=actions.take_the_port),
    Fault(name="supervisor-kill", numbers=(12,),
          text="kill -9 of the supervisor: training continues, a new one takes over",
          inject=actions.signal_supervisor(SIGKILL), recover=True),
    Fault(name="supervisor-stop", numbers=(12,),
          text=f"SIGSTOP of the supervisor for {actions.PAUSE_S:g} s: what it missed does not count against any host",
          inject=actions.pause_supervisor),
)
_HOSTS = (
    Fault(name="host-kill", numbers=(14,), text="kill -9 of every process of a host; there is a spare", noticed=_HOST,
          done=_SWAPS, redone=IN_TRANSIT, inject=actions.signal_host(SIGKILL), hosts=2, spares=1),
    Fault(name="host-kill-no-spare", numbers=(17,), text="kill -9 of every process of a host, and no spare",
          noticed=_EITHER, done=(("shrink",), ("restart", "shrink")), redone=IN_TRANSIT,
          inject=actions.signal_host(SIGKILL), hosts=2, shrinks=True),
    Fault(name="host-kill-and-return", numbers=(17, 41),
          text="kill -9 of every process of a host, no spare, and it comes back: fewer ranks, then as many as before",
          noticed=_EITHER, done=(("shrink", "grow"), ("restart", "shrink", "grow")), redone=IN_TRANSIT,
          inject=actions.kill_host_and_return, hosts=2, shrinks=True),
    Fault(name="host-stop", numbers=(8, 14), text="SIGSTOP of every process of a host: silence, no connection closes",
          noticed=("host_lost", "rank_hang"), done=(("swap",),), redone=IN_TRANSIT, inject=actions.signal_host(SIGSTOP),
          hosts=2, spares=1),
    Fault(name="host-wakes-up", numbers=(8,),
          text="a host is stopped, replaced, and resumes: it is fenced and changes nothing",
          noticed=("host_lost", "rank_hang"), done=(("swap",),), redone=IN_TRANSIT,
          inject=actions.stop_host_for_a_while, hosts=2, spares=1),
    Fault(name="two-hosts-kill", numbers=(15,),
          text="kill -9 of two hosts, the second of which held the copy of the first one's state", noticed=_EITHER,
          done=(("shrink", "shrink"), ("restart", "shrink", "shrink")), redone=None, inject=actions.kill_two_hosts,
          hosts=3, shrinks=True, checkpoint=True),
    Fault(name="rank-then-host", numbers=(16,),
          text="kill -9 of a rank, and of a whole host while the ranks are being replaced", noticed=(*_RANK, *_HOST),
          done=(("restart", "swap"), ("swap",)), redone=IN_TRANSIT, inject=actions.kill_rank_then_host, hosts=2,
          spares=1),
    Fault(name="spare-bad", numbers=(18,),
          text="a spare cannot start and is excluded; then a host is killed, and the other spare takes its place",
          noticed=_HOST, done=_SWAPS, redone=IN_TRANSIT, inject=actions.break_spare_then_host, hosts=2, spares=2),
    Fault(name="one-agent-more", numbers=(19,), text="one agent more than the run has hosts: it is parked",
          inject=actions.start_one_more),
    Fault(name="everything-kill", numbers=(12, 14),
          text="kill -9 of everything, the supervisor included: snapshots in memory stay; then muster recover",
          redone=UNSAVED, inject=actions.kill_everything, recover=True),
    Fault(name="notice", numbers=(38,),
          text="SIGTERM: the machine will be taken away; the run saves and exits (75); then muster recover",
          inject=actions.signal_supervisor(SIGTERM), exit_code=75, recover=True),
)
_DISKS = (
    Fault(name="checkpoint-interrupted", numbers=(32, 42),
          text="power lost while a checkpoint is being written: every process and all memory; then muster recover",
          redone=None, inject=actions.interrupt_checkpoint, checkpoint=True, recover=True),
    Fault(name="checkpoint-corrupt", numbers=(33,),
          text="power lost, and a bit of the newest checkpoint has flipped; then muster recover", redone=None,
          inject=actions.corrupt_checkpoint, checkpoint=True, recover=True),
    Fault(name="disk-full", numbers=(34,),
          text="the disk with the checkpoints is full: saves fail, training continues; with room again one succeeds",
          inject=actions.fill_disk, checkpoint=True, disk=True),
)
_NETWORKS = (
    Fault(name="link-cut", numbers=(14, 22), text="a host's link is cut: silence, no process dies",
          noticed=("host_lost",), done=(("swap",),), redone=IN_TRANSIT, inject=actions.cut_link, hosts=2, spares=1,
          network=True, settings=(SHORT_LIMIT,)),
    Fault(name="link-one-way", numbers=(22,), text="outbound traffic of a host is dropped: it receives but cannot send",
          noticed=("host_lost",), done=(("swap",),), redone=IN_TRANSIT, inject=actions.silence_host, hosts=2, spares=1,
          network=True, settings=(SHORT_LIMIT,)),
    Fault(name="link-flap", numbers=(24,),
          text=f"a host's link is down for {actions.FLAP_DOWN_S:g} s, {actions.FLAPS} times, below the limit",
          inject=actions.flap_link, hosts=2, network=True, settings=(FLAP_LIMIT,)),
    Fault(name="link-slow", numbers=(25,), text="a host sends at 100 Mbit/s: slower steps, nothing else",
          inject=actions.slow_link, hosts=2, network=True),
    Fault(name="network-split", numbers=(23,),
          text=f"half the hosts see only each other for {actions.SPLIT_S:g} s: the supervisor's half continues, the "
               "other is fenced and rejoins",
          noticed=("host_lost",),
          done=(("shrink", "grow"), ("shrink", "shrink", "grow"), ("shrink", "shrink", "grow", "grow")),
          redone=IN_TRANSIT, inject=actions.split_network, hosts=2, shrinks=True, network=True,
          settings=(SHORT_LIMIT,)),
)
# fmt: on

MENU: dict[str, Fault] = {fault.name: fault for fault in (*_RANKS, *_PROGRAMS, *_HOSTS, *_DISKS, *_NETWORKS)}
