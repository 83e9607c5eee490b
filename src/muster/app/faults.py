"""The fault menu: what is done to a run, what it needs, and what must come of it."""

from __future__ import annotations

import difflib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from muster.app.scene import Scene
from muster.core.errors import UsageError
from muster.core.spec import RunSpec

#: Steps between the disk checkpoints of a drill that falls back to one.
CHECKPOINT_EVERY = 5
#: Steps that a lost host may cost: those whose copy was still on its way to the other host when it went.
ON_THE_WAY = 3
#: Mean seconds between the blows of the punisher, and how many it deals.
PUNISH_MEAN_S, PUNISH_TIMES = 2.0, 5


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One entry of the menu."""

    name: str
    what: str
    """What is done, one sentence."""
    noticed: tuple[str, ...]
    """Incident kinds, any of which may come first; empty: nobody needs to notice."""
    done: tuple[tuple[str, ...], ...]
    """Sequences of actions, any of which heals it as it should."""
    redone: int | None = 0
    """Applied steps that may be taken again; None: back to the last checkpoint on disk."""
    strike: Callable[[Scene], None]
    hosts: int = 1
    """At least so many hosts are needed."""
    spares: int = 0
    shrinks: bool = False
    """It needs leave to go on with fewer hosts."""
    checkpoint: bool = False
    """It needs a committed checkpoint."""
    exit_code: int | None = None
    """The run ends with it; None: it trains on."""
    recover: bool = False
    """Nobody is left to heal it: the drill says ``muster recover``, as a user would."""

    def overrides(self, spec: RunSpec) -> list[str]:
        """What the run file lacks for this drill."""
        found = []
        resources = spec.resources
        hosts = max(resources.hosts, self.hosts)
        if hosts != resources.hosts:
            found.append(f"resources.hosts={hosts}")
        if self.spares != resources.spare_hosts:
            found.append(f"resources.spare_hosts={self.spares}")
        if self.shrinks:
            found.append("resources.min_hosts=1")
        elif resources.min_hosts is not None and resources.min_hosts != hosts:
            found.append(f"resources.min_hosts={hosts}")
        if self.checkpoint and spec.checkpoint.every_steps != CHECKPOINT_EVERY:
            found.append(f"checkpoint.every_steps={CHECKPOINT_EVERY}")
        return found


def find(name: str) -> Fault:
    """The fault of that name.

    Raises:
        UsageError: there is none.
    """
    if name in MENU:
        return MENU[name]
    near = difflib.get_close_matches(name, MENU, n=1)
    raise UsageError(f"no fault {name!r}", hint=f"did you mean {near[0]}?" if near else "muster drill --list")


# ---------------------------------------------------------------- strikes


def _kill_rank(scene: Scene) -> None:
    scene.signal_rank(scene.any_rank())


def _crash_rank(scene: Scene) -> None:
    scene.signal_rank(scene.any_rank(), signal.SIGSEGV)


def _stop_rank(scene: Scene) -> None:
    scene.signal_rank(scene.any_rank(), signal.SIGSTOP)


def _kill_all_ranks(scene: Scene) -> None:
    scene.send(pid for pid, _ in scene.ranks().values())


def _kill_agent(scene: Scene) -> None:
    scene.send([scene.agent(scene.random.choice(scene.hosts()))])


def _kill_fork_server(scene: Scene) -> None:
    scene.send([scene.fork_server(scene.random.choice(scene.hosts()))])


def _kill_supervisor(scene: Scene) -> None:
    scene.send([scene.supervisor()])


def _kill_host(scene: Scene) -> None:
    scene.signal_host(scene.random.choice(scene.hosts()))


def _stop_host(scene: Scene) -> None:
    scene.signal_host(scene.random.choice(scene.hosts()), signal.SIGSTOP)


def _kill_two_hosts(scene: Scene) -> None:
    """Neighbours: the second holds the copy of the first one's state."""
    hosts = scene.hosts()
    first = scene.random.randrange(len(hosts))
    pair = (hosts[first], hosts[(first + 1) % len(hosts)])
    scene.send([each.pid for host in pair for each in scene.processes(host)])
    for host in pair:
        scene.signal_host(host)


def _kill_rank_then_host(scene: Scene) -> None:
    host = scene.random.choice(scene.hosts()[1:])
    scene.signal_rank(0)
    time.sleep(0.05)
    scene.signal_host(host)


def _crash_loop(scene: Scene) -> None:
    """The same host's rank, three times, each time after a new step."""
    host = scene.random.choice(scene.hosts())
    for blow in range(3):
        scene.wait(lambda blow=blow: len(scene.events("recovered")) >= blow, "recovery", 120)  # type: ignore[misc]
        scene.send([next(pid for pid, on in scene.ranks().values() if on == host)])


def _punish(scene: Scene) -> None:
    """Random ranks at random moments, gaps drawn from an exponential distribution."""
    for _ in range(PUNISH_TIMES):
        scene.signal_rank(scene.any_rank())
        time.sleep(scene.random.expovariate(1 / PUNISH_MEAN_S))


def _kill_everything(scene: Scene) -> None:
    scene.send(each.pid for each in scene.processes())
    struck_ns = scene.struck_ns
    for _ in range(2):
        scene.send(each.pid for each in scene.processes())
    scene.struck_ns = struck_ns


def _notice(scene: Scene) -> None:
    scene.send([scene.supervisor()], signal.SIGTERM)


def _rot_checkpoint(scene: Scene) -> None:
    """The newest checkpoint rots while nobody looks, and the machine loses its power."""
    _kill_everything(scene)
    scene.forget_memory()
    folder = max(scene.run.checkpoints.glob("step-*.a*"))
    scene.rot(max((path for path in folder.iterdir() if path.is_file()), key=lambda path: path.stat().st_size))


def _tear_checkpoint(scene: Scene) -> None:
    """Everything dies while a checkpoint is being written."""
    before = len(scene.events("checkpoint.begun"))
    scene.wait(lambda: len(scene.events("checkpoint.begun")) > before, "checkpoint under way", 120)
    _kill_everything(scene)
    scene.forget_memory()


_RANK = ("rank_exit",)
_HOST = ("host_lost",)

MENU: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(name="rank-kill", what="kill -9 of one rank", noticed=_RANK, done=(("restart",),), strike=_kill_rank),
        Fault(name="rank-crash", what="SIGSEGV in one rank", noticed=_RANK, done=(("restart",),), strike=_crash_rank),
        Fault(
            name="rank-stop",
            what="SIGSTOP of one rank: no process dies, no collective raises",
            noticed=("rank_hang",),
            done=(("restart",),),
            strike=_stop_rank,
        ),
        Fault(
            name="all-ranks-kill",
            what="kill -9 of every rank at once",
            noticed=_RANK,
            done=(("restart",), ("restart", "restart")),
            strike=_kill_all_ranks,
        ),
        Fault(
            name="agent-kill",
            what="kill -9 of a host's agent: its ranks train on and are adopted",
            noticed=(),
            done=((),),
            strike=_kill_agent,
        ),
        Fault(
            name="fork-server-kill",
            what="kill -9 of a host's fork server, and with it of the rendezvous store",
            noticed=(),
            done=((), ("restart",), ("restart", "restart")),
            strike=_kill_fork_server,
        ),
        Fault(
            name="supervisor-kill",
            what="kill -9 of the supervisor: training goes on, a new one takes over",
            noticed=(),
            done=((),),
            strike=_kill_supervisor,
            recover=True,
        ),
        Fault(
            name="host-kill",
            what="kill -9 of every process of a host; a spare stands by",
            noticed=_HOST,
            done=(("swap",), ("restart", "swap")),
            redone=ON_THE_WAY,
            strike=_kill_host,
            hosts=2,
            spares=1,
        ),
        Fault(
            name="host-stop",
            what="SIGSTOP of every process of a host: silence, no connection closes",
            noticed=("host_lost", "rank_hang"),
            done=(("swap",),),
            redone=ON_THE_WAY,
            strike=_stop_host,
            hosts=2,
            spares=1,
        ),
        Fault(
            name="host-kill-no-spare",
            what="kill -9 of every process of a host, and no spare",
            noticed=(*_HOST, *_RANK),
            done=(("shrink",), ("restart", "shrink")),
            redone=ON_THE_WAY,
            strike=_kill_host,
            hosts=2,
            shrinks=True,
        ),
        Fault(
            name="two-hosts-kill",
            what="kill -9 of two hosts, the second of which held the copy of the first one's state",
            noticed=(*_HOST, *_RANK),
            done=(("shrink", "shrink"), ("restart", "shrink", "shrink")),
            redone=None,
            strike=_kill_two_hosts,
            hosts=3,
            shrinks=True,
            checkpoint=True,
        ),
        Fault(
            name="rank-then-host",
            what="kill -9 of a rank, and of a whole host while the ranks are being replaced",
            noticed=(*_RANK, *_HOST),
            done=(("restart", "swap"), ("swap",)),
            redone=ON_THE_WAY,
            strike=_kill_rank_then_host,
            hosts=2,
            spares=1,
        ),
        Fault(
            name="crash-loop",
            what="the same host's rank dies three times, each time after a new step",
            noticed=_RANK,
            done=(("restart", "restart", "swap"),),
            strike=_crash_loop,
            hosts=2,
            spares=1,
        ),
        Fault(
            name="punisher",
            what=f"{PUNISH_TIMES} kills of random ranks, {PUNISH_MEAN_S:g} s apart on average, clustered as it comes",
            noticed=_RANK,
            done=tuple(("restart",) * count for count in range(1, PUNISH_TIMES + 1)),
            strike=_punish,
        ),
        Fault(
            name="everything-kill",
            what="kill -9 of everything, the supervisor included: snapshots in memory stay; then muster recover",
            noticed=(),
            done=((),),
            strike=_kill_everything,
            recover=True,
        ),
        Fault(
            name="checkpoint-torn",
            what="power lost while a checkpoint is being written: every process and all memory; then muster recover",
            noticed=(),
            done=((),),
            redone=None,
            strike=_tear_checkpoint,
            checkpoint=True,
            recover=True,
        ),
        Fault(
            name="checkpoint-rot",
            what="power lost, and a bit of the newest checkpoint has flipped; then muster recover",
            noticed=(),
            done=((),),
            redone=None,
            strike=_rot_checkpoint,
            checkpoint=True,
            recover=True,
        ),
        Fault(
            name="notice",
            what="SIGTERM: the machine will be taken away; the run saves and leaves (75); then muster recover",
            noticed=(),
            done=((),),
            strike=_notice,
            exit_code=75,
            recover=True,
        ),
    )
}
