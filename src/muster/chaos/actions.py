"""How each fault of the menu is dealt: real signals to real processes, orders to a rank, a cut link."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from muster.chaos.network import Network
from muster.chaos.target import SIGCONT, SIGSEGV, SIGSTOP, SIGTERM, Scene

#: Mean seconds between the blows of the punisher, and how many it deals.
PUNISH_MEAN_S, PUNISH_TIMES = 2.0, 5
#: How long a stopped supervisor stays so: longer than any heartbeat limit of a drill.
PAUSE_S = 6.0
#: A link that comes and goes: seconds down, seconds up, how often. Below the limit that the drill sets.
FLAP_DOWN_S, FLAP_UP_S, FLAPS = 0.5, 1.0, 4
#: How long a network stays split: several heartbeat limits.
SPLIT_S = 8.0
#: So many steps further the copies must be before a host whose mover died is lost, and the run with a full disk.
COPIES = 5
#: Longest that the drill waits for one stage of a blow.
STAGE_S = 180.0


# ---------------------------------------------------------------- ranks


def kill_rank(scene: Scene) -> None:
    scene.signal_rank(scene.any_rank())


def crash_rank(scene: Scene) -> None:
    scene.signal_rank(scene.any_rank(), SIGSEGV)


def stop_rank(scene: Scene) -> None:
    scene.signal_rank(scene.any_rank(), SIGSTOP)


def kill_all_ranks(scene: Scene) -> None:
    scene.send(pid for pid, _ in scene.ranks().values())


def misdeed(name: str, *, always: bool = False) -> Callable[[Scene], None]:
    """A rank does it to itself, at a moment that no signal from outside can hit."""

    def strike(scene: Scene) -> None:
        scene.order(name, scene.any_rank(), always=always, timeout_s=STAGE_S)

    return strike


def punish(scene: Scene) -> None:
    """Random ranks at random moments, gaps drawn from an exponential distribution."""
    for _ in range(PUNISH_TIMES):
        scene.signal_rank(scene.any_rank())
        time.sleep(scene.random.expovariate(1 / PUNISH_MEAN_S))


def crash_loop(scene: Scene) -> None:
    """The same host's rank, three times, each time after a new step."""
    host = scene.random.choice(scene.hosts())
    for blow in range(3):
        scene.wait(lambda blow=blow: len(scene.events("incident.resolved")) >= blow, "recovery", STAGE_S)  # type: ignore[misc]
        scene.send([next(pid for pid, on in scene.ranks().values() if on == host)])


# ---------------------------------------------------------------- Muster's own processes


def kill_agent(scene: Scene) -> None:
    scene.send([scene.agent(scene.random.choice(scene.hosts()))])


def kill_agent_and_rank(scene: Scene) -> None:
    """Both at once: the rank's end is seen by an agent that was not there."""
    rank = scene.any_rank()
    pid, host = scene.ranks()[rank]
    scene.send([scene.agent(host), pid])


def kill_keeper(scene: Scene) -> None:
    scene.send([scene.keeper(scene.random.choice(scene.hosts()))])


def kill_mover_then_host(scene: Scene) -> None:
    """A host whose mover died a while ago is lost: another mover must have gone on with the copies."""
    host = scene.random.choice(scene.hosts())
    dead = scene.movers(host)
    scene.send(dead)
    scene.wait(lambda: set(scene.movers(host)) - set(dead), "new mover", STAGE_S)
    copied = scene.copied_step()
    scene.wait(lambda: scene.copied_step() > copied + COPIES, "copies by the new mover", STAGE_S)
    scene.signal_host(host)


def kill_fork_server(scene: Scene) -> None:
    scene.send([scene.fork_server(scene.random.choice(scene.hosts()))])


def take_the_port(scene: Scene) -> None:
    """The store's port is somebody else's when the next attempt wants one."""
    host = scene.random.choice(scene.hosts())
    port = scene.store_port(host)
    dead = scene.fork_server(host)
    scene.send([dead])
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        scene.wait(lambda: _bound(taken, port), f"port {port} to be free", 30)
        scene.wait(lambda: scene.fork_server(host) != dead, "new fork server", STAGE_S)
        scene.signal_rank(scene.any_rank())
        scene.wait(lambda: scene.events("incident.resolved"), "recovery", STAGE_S)


def _bound(sock: socket.socket, port: int) -> bool:
    try:
        sock.bind(("127.0.0.1", port))
    except OSError:
        return False
    sock.listen()
    return True


def kill_supervisor(scene: Scene) -> None:
    scene.send([scene.supervisor()])


def pause_supervisor(scene: Scene) -> None:
    """What it did not hear while it stood still says nothing about the hosts."""
    pid = scene.supervisor()
    scene.send([pid], SIGSTOP)
    time.sleep(PAUSE_S)
    scene.send([pid], SIGCONT)


# ---------------------------------------------------------------- hosts


def kill_host(scene: Scene) -> None:
    scene.signal_host(scene.random.choice(scene.hosts()))


def stop_host(scene: Scene) -> None:
    scene.signal_host(scene.random.choice(scene.hosts()), SIGSTOP)


def stop_host_for_a_while(scene: Scene) -> None:
    """It wakes up after it was replaced, and must find itself fenced."""
    host = scene.random.choice(scene.hosts())
    scene.signal_host(host, SIGSTOP)
    struck_ns = scene.struck_ns
    scene.wait(lambda: scene.events("incident.resolved"), "recovery", STAGE_S)
    scene.signal_host(host, SIGCONT)
    scene.struck_ns = struck_ns


def kill_host_and_return(scene: Scene) -> None:
    host = scene.random.choice(scene.hosts()[1:])
    scene.signal_host(host)
    struck_ns = scene.struck_ns
    scene.wait(lambda: scene.events("incident.resolved"), "recovery", STAGE_S)
    scene.start_agent(host)
    scene.struck_ns = struck_ns


def kill_two_hosts(scene: Scene) -> None:
    """Neighbours: the second holds the copy of the first one's state."""
    hosts = scene.hosts()
    first = scene.random.randrange(len(hosts))
    pair = (hosts[first], hosts[(first + 1) % len(hosts)])
    scene.send([each.pid for host in pair for each in scene.processes(host)])
    for host in pair:
        scene.signal_host(host)


def kill_rank_then_host(scene: Scene) -> None:
    host = scene.random.choice(scene.hosts()[1:])
    scene.signal_rank(0)
    time.sleep(0.05)
    scene.signal_host(host)


def break_spare_then_host(scene: Scene) -> None:
    """A spare whose fork server never comes up is set aside; when a host is lost, the other one is taken."""
    bad = sorted(scene.spares())[0]
    seen: set[int] = set()

    def broken() -> bool:
        pid = scene.fork_server(bad)
        if pid not in seen:
            seen.add(pid)
            scene.send([pid])
        return any("cannot start" in str(event.detail["text"]) for event in scene.events("run.message"))

    scene.wait(broken, f"note that {bad} cannot start", STAGE_S)
    scene.signal_host(scene.random.choice(scene.hosts()))


def start_one_more(scene: Scene) -> None:
    """One agent more than the run has places for: it is parked, and nobody else is disturbed."""
    name = f"host-{scene.spec.resources.hosts + scene.spec.resources.spare_hosts}"
    scene.struck_ns = time.time_ns()
    scene.start_agent(name)
    scene.wait(lambda: name in scene.spares(), f"{name} to be parked", STAGE_S)


# ---------------------------------------------------------------- everything, and what is on the disk


def kill_everything(scene: Scene) -> None:
    scene.send(each.pid for each in scene.processes())
    struck_ns = scene.struck_ns
    for _ in range(2):
        scene.send(each.pid for each in scene.processes())
    scene.struck_ns = struck_ns


def notice(scene: Scene) -> None:
    scene.send([scene.supervisor()], SIGTERM)


def rot_checkpoint(scene: Scene) -> None:
    """The newest checkpoint rots while nobody looks, and the machine loses its power."""
    kill_everything(scene)
    scene.forget_memory()
    folder = max(scene.run.checkpoints.glob("step-*.a*"))
    scene.rot(max((path for path in folder.iterdir() if path.is_file()), key=lambda path: path.stat().st_size))


def tear_checkpoint(scene: Scene) -> None:
    """Everything dies while a checkpoint is being written."""
    before = len(scene.events("checkpoint.begun"))
    scene.wait(lambda: len(scene.events("checkpoint.begun")) > before, "checkpoint under way", STAGE_S)
    kill_everything(scene)
    scene.forget_memory()


def fill_disk(scene: Scene) -> None:
    """No room for a checkpoint until one has failed; then room again, and the next one must stand."""
    disk = scene.disk
    assert disk is not None, "a fault of the disk has one"
    scene.struck_ns = time.time_ns()

    def failed() -> bool:
        disk.fill()  # again and again: a checkpoint that is removed leaves room
        return any(event.wall_ns > scene.struck_ns for event in scene.events("checkpoint.failed"))

    scene.wait(failed, "checkpoint that finds no room", STAGE_S)
    step = scene.step()
    scene.wait(lambda: scene.step() > step + COPIES, "steps without a checkpoint", STAGE_S)
    disk.free()
    scene.wait(
        lambda: any((event.step or 0) > step for event in scene.events("checkpoint.committed")),
        "checkpoint once there is room",
        STAGE_S,
    )


# ---------------------------------------------------------------- networks


def cut_link(scene: Scene) -> None:
    network, host = _network(scene), scene.random.choice(scene.hosts())
    scene.struck_ns = time.time_ns()
    network.cut(host)


def flap_link(scene: Scene) -> None:
    network, host = _network(scene), scene.random.choice(scene.hosts())
    scene.struck_ns = time.time_ns()
    for _ in range(FLAPS):
        network.cut(host)
        time.sleep(FLAP_DOWN_S)
        network.heal(host)
        time.sleep(FLAP_UP_S)


def silence_host(scene: Scene) -> None:
    """It hears everybody and nobody hears it."""
    network, host = _network(scene), scene.random.choice(scene.hosts())
    scene.struck_ns = time.time_ns()
    network.limit(host, rate="8bit", burst="1b", limit="1b")  # no packet fits through


def slow_link(scene: Scene) -> None:
    """A tenth of a gigabit on the way out: training is slower, and nobody is blamed."""
    network, host = _network(scene), scene.random.choice(scene.hosts())
    scene.struck_ns = time.time_ns()
    network.limit(host, rate="100mbit", burst="64kb", limit="1mb")


def split_network(scene: Scene) -> None:
    """Half against half; the supervisor's half goes on, the other is fenced, and comes back when it heals."""
    network, hosts = _network(scene), scene.hosts()
    away = hosts[len(hosts) // 2 :]
    scene.struck_ns = time.time_ns()
    network.split(away)
    scene.wait(lambda: not set(away) & set(scene.hosts()), "attempt without the half that is away", STAGE_S)
    time.sleep(SPLIT_S)
    network.join(away)


def _network(scene: Scene) -> Network:
    assert scene.network is not None, "a fault of the network has one"
    return scene.network
