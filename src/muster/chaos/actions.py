"""How each fault is injected: real signals to real processes, requests to a rank, a cut link."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from signal import SIGCONT, SIGSTOP, Signals

from muster.chaos.network import Network
from muster.chaos.target import RunTarget

Inject = Callable[[RunTarget], None]

#: Mean seconds between random kills of ranks, and how many.
RANDOM_KILL_MEAN_S, RANDOM_KILLS = 2.0, 5
#: How long a supervisor stays stopped: longer than any heartbeat limit of a drill.
PAUSE_S = 6.0
#: A flapping link: seconds down, seconds up, how often. Below the limit that the drill sets.
FLAP_DOWN_S, FLAP_UP_S, FLAPS = 0.5, 1.0, 4
#: How long a network stays split: several heartbeat limits.
SPLIT_S = 8.0
#: Steps that copies must advance before a host whose replicator died is killed, and a run with a full disk.
STEPS_ON = 5
#: Longest wait for one stage of a fault.
STAGE_S = 180.0


# ---------------------------------------------------------------- ranks


def signal_rank(number: Signals) -> Inject:
    return lambda target: target.signal_rank(target.any_rank(), number)


def kill_all_ranks(target: RunTarget) -> None:
    target.send(pid for pid, _ in target.ranks().values())


def in_rank(name: str, *, always: bool = False) -> Inject:
    """A rank injects it into itself, at a moment that no signal from outside can hit."""
    return lambda target: target.request_fault(name, target.any_rank(), always=always, timeout_s=STAGE_S)


def kill_random_ranks(target: RunTarget) -> None:
    """Random ranks at random times, gaps drawn from an exponential distribution."""
    for _ in range(RANDOM_KILLS):
        target.signal_rank(target.any_rank())
        time.sleep(target.random.expovariate(1 / RANDOM_KILL_MEAN_S))


def crash_loop(target: RunTarget) -> None:
    """The same host's rank, three times, each time after a new step."""
    host = target.any_host()
    for count in range(3):
        target.wait(lambda count=count: len(target.events("incident.resolved")) >= count, "recovery", STAGE_S)  # type: ignore[misc]
        target.send([next(pid for pid, on in target.ranks().values() if on == host)])


# ---------------------------------------------------------------- Muster's own processes


def kill_program(pid_of: Callable[[RunTarget, str], int]) -> Inject:
    """The program of any host whose pid ``pid_of`` names."""
    return lambda target: target.send([pid_of(target, target.any_host())])


def kill_agent_and_rank(target: RunTarget) -> None:
    """Both at once: the agent that reports the rank's exit was not running when it happened."""
    rank = target.any_rank()
    pid, host = target.ranks()[rank]
    target.send([target.agent(host), pid])


def kill_replicator_then_host(target: RunTarget) -> None:
    """A host whose replicator died earlier is lost: another replicator must have continued the copies."""
    host = target.any_host()
    dead = target.replicator_pids(host)
    target.send(dead)
    target.wait(lambda: set(target.replicator_pids(host)) - set(dead), "new replicator", STAGE_S)
    copied = target.copied_step()
    target.wait(lambda: target.copied_step() > copied + STEPS_ON, "copies by the new replicator", STAGE_S)
    target.signal_host(host)


def take_the_port(target: RunTarget) -> None:
    """Another process takes the store's port before the next attempt needs one."""
    host = target.any_host()
    port = target.store_port(host)
    dead = target.fork_server(host)
    target.send([dead])
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        target.wait(lambda: _bound(taken, port), f"port {port} to be free", 30)
        target.wait(lambda: target.fork_server(host) != dead, "new fork server", STAGE_S)
        target.signal_rank(target.any_rank())
        target.wait(lambda: target.events("incident.resolved"), "recovery", STAGE_S)


def _bound(sock: socket.socket, port: int) -> bool:
    try:
        sock.bind(("127.0.0.1", port))
    except OSError:
        return False
    sock.listen()
    return True


def signal_supervisor(number: Signals) -> Inject:
    return lambda target: target.send([target.supervisor()], number)


def pause_supervisor(target: RunTarget) -> None:
    """What it missed while it was stopped must not count against the hosts."""
    pid = target.supervisor()
    target.send([pid], SIGSTOP)
    time.sleep(PAUSE_S)
    target.send([pid], SIGCONT)


# ---------------------------------------------------------------- hosts


def signal_host(number: Signals) -> Inject:
    return lambda target: target.signal_host(target.any_host(), number)


def stop_host_for_a_while(target: RunTarget) -> None:
    """It resumes after it was replaced, and must be fenced."""
    host = target.any_host()
    target.signal_host(host, SIGSTOP)
    target.wait(lambda: target.events("incident.resolved"), "recovery", STAGE_S)
    target.send([process.pid for process in target.processes(host)], SIGCONT, again=True)


def kill_host_and_return(target: RunTarget) -> None:
    host = target.random.choice(target.hosts()[1:])
    target.signal_host(host)
    target.wait(lambda: target.events("incident.resolved"), "recovery", STAGE_S)
    target.start_agent(host)


def kill_two_hosts(target: RunTarget) -> None:
    """Neighbours: the second holds the copy of the first one's state."""
    hosts = target.hosts()
    first = target.random.randrange(len(hosts))
    pair = (hosts[first], hosts[(first + 1) % len(hosts)])
    target.send([process.pid for host in pair for process in target.processes(host)])
    for host in pair:
        target.signal_host(host)


def kill_rank_then_host(target: RunTarget) -> None:
    host = target.random.choice(target.hosts()[1:])
    target.signal_rank(0)
    time.sleep(0.05)
    target.signal_host(host)


def break_spare_then_host(target: RunTarget) -> None:
    """A spare whose fork server never starts is excluded; when a host is lost, the other spare is used."""
    bad = sorted(target.spares())[0]
    seen: set[int] = set()

    def broken() -> bool:
        pid = target.fork_server(bad)
        if pid not in seen:
            seen.add(pid)
            target.send([pid])
        return any(event.host == bad for event in target.events("host.set_aside"))

    target.wait(broken, f"note that {bad} cannot start", STAGE_S)
    target.signal_host(target.any_host())


def start_one_more(target: RunTarget) -> None:
    """One agent more than the run has hosts: it is parked, and the others are not disturbed."""
    name = f"host-{target.spec.resources.hosts + target.spec.resources.spare_hosts}"
    target.injected_ns = time.time_ns()
    target.start_agent(name)
    target.wait(lambda: name in target.spares(), f"{name} to be parked", STAGE_S)


# ---------------------------------------------------------------- everything, and the disk


def kill_everything(target: RunTarget) -> None:
    for again in (False, True, True):  # one may have forked in between
        target.send((process.pid for process in target.processes()), again=again)


def corrupt_checkpoint(target: RunTarget) -> None:
    """The newest checkpoint is corrupted on disk, and the machine loses power."""
    kill_everything(target)
    target.delete_snapshots()
    folder = max(target.run.checkpoints.glob("step-*.a*"))
    target.corrupt(max((path for path in folder.iterdir() if path.is_file()), key=lambda path: path.stat().st_size))


def interrupt_checkpoint(target: RunTarget) -> None:
    """Everything dies while a checkpoint is being written."""
    before = len(target.events("checkpoint.begun"))
    target.wait(lambda: len(target.events("checkpoint.begun")) > before, "checkpoint under way", STAGE_S)
    kill_everything(target)
    target.delete_snapshots()


def fill_disk(target: RunTarget) -> None:
    """No room for a checkpoint until one has failed; then room again, and the next one must be committed."""
    disk = target.disk
    assert disk is not None, "a fault of the disk has one"
    target.injected_ns = time.time_ns()

    def failed() -> bool:
        disk.fill()  # repeatedly: a checkpoint that is removed frees room
        return any(event.wall_ns > target.injected_ns for event in target.events("checkpoint.failed"))

    target.wait(failed, "checkpoint that finds no room", STAGE_S)
    step = target.step()
    target.wait(lambda: target.step() > step + STEPS_ON, "steps without a checkpoint", STAGE_S)
    disk.free()
    target.wait(
        lambda: any((event.step or 0) > step for event in target.events("checkpoint.committed")),
        "checkpoint once there is room",
        STAGE_S,
    )


# ---------------------------------------------------------------- networks


def cut_link(target: RunTarget) -> None:
    network, host = _network(target), target.any_host()
    network.cut(host)


def flap_link(target: RunTarget) -> None:
    network, host = _network(target), target.any_host()
    for _ in range(FLAPS):
        network.cut(host)
        time.sleep(FLAP_DOWN_S)
        network.heal(host)
        time.sleep(FLAP_UP_S)


def silence_host(target: RunTarget) -> None:
    """Drop outbound traffic only: the host receives but cannot send."""
    network, host = _network(target), target.any_host()
    network.limit(host, rate="8bit", burst="1b", limit="1b")  # no packet fits through


def slow_link(target: RunTarget) -> None:
    """100 Mbit/s outbound: training is slower, and no host is blamed."""
    network, host = _network(target), target.any_host()
    network.limit(host, rate="100mbit", burst="64kb", limit="1mb")


def split_network(target: RunTarget) -> None:
    """Half against half; the supervisor's half continues, the other is fenced, and rejoins when the link is back."""
    network, hosts = _network(target), target.hosts()
    cut_off = hosts[len(hosts) // 2 :]
    network.split(cut_off)
    target.wait(lambda: not set(cut_off) & set(target.hosts()), "attempt without the half that is cut off", STAGE_S)
    time.sleep(SPLIT_S)
    network.join(cut_off)


def _network(target: RunTarget) -> Network:
    """The run's, to be broken now."""
    assert target.network is not None, "a fault of the network has one"
    target.injected_ns = time.time_ns()
    return target.network
