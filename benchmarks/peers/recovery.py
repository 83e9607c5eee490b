"""The peers' half of ``benchmarks/recovery.py``: L and steps lost of torchrun, NVRx and torchft, bounded in time.

L is what that file says: from the fault to the end of the next step beyond the last one applied before it. A case
that a tool cannot do, or did not finish within ``LIMIT_S``, is null, and ``<case>_why`` says so; it is never a number.
Environments: ``benchmarks/peers/setup.sh torchft nvrx``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
WORKER = str(HERE / "recovery_worker.py")
LIMIT_S = 60.0
START_S = 90.0
#: No new trial of a case is begun after this.
CASE_S = 240.0
SETTLE_STEPS = 6


class NotRecovered(Exception):
    """The tool made no new step in time, or never began."""


@dataclass
class Job:
    """One started job of a peer: its processes, its folder in memory."""

    folder: Path
    env: dict[str, str]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, command: list[str]) -> None:
        log = (self.folder / f"log-{name}").open("wb")
        self.processes[name] = subprocess.Popen(
            command, env=self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def steps(self) -> list[tuple[int, int]]:
        """(step, end in monotonic nanoseconds) as every surviving writer noted them."""
        found = []
        for path in self.folder.glob("steps-*"):
            lines = path.read_text().splitlines()
            found += [(int(words[0]), int(words[1])) for words in map(str.split, lines) if len(words) >= 2]
        return sorted(found, key=lambda pair: pair[1])

    def last_step(self) -> int:
        return max((step for step, _ in self.steps()), default=0)

    def ranks(self) -> dict[int, int]:
        """Rank (or replica) -> pid, the newest."""
        path = self.folder / "ranks"
        lines = path.read_text().splitlines() if path.exists() else []
        return {int(words[0]): int(words[1]) for words in map(str.split, lines)}

    def tree(self, name: str) -> list[int]:
        """A host's processes: a launcher and all it started."""
        root = psutil.Process(self.processes[name].pid)
        return [root.pid, *(child.pid for child in root.children(recursive=True))]

    def host_of(self, pid: int) -> str:
        return next(name for name in self.processes if self.alive(name) and pid in self.tree(name))

    def alive(self, name: str) -> bool:
        return self.processes[name].poll() is None

    def wait_for(self, step: int, limit_s: float, what: str) -> None:
        until = time.monotonic() + limit_s
        while self.last_step() < step:
            if time.monotonic() > until:
                raise NotRecovered(f"{what}: no step {step} within {limit_s:.0f} s")
            if not any(self.alive(name) for name in self.processes if name != "lighthouse"):
                raise NotRecovered(f"{what}: the tool itself ended; {self.last_words()}")
            time.sleep(0.01)

    def last_words(self) -> str:
        logs = [path.read_text(errors="replace").strip() for path in sorted(self.folder.glob("log-*"))]
        return " | ".join(log.splitlines()[-1][-200:] for log in logs if log)

    def end(self) -> None:
        for process in self.processes.values():
            pids = [process.pid]
            with contextlib.suppress(psutil.Error):
                pids += [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
            for pid in [*pids, *self.ranks().values()]:
                with contextlib.suppress(psutil.Error):
                    if pid in pids or str(self.folder) in " ".join(psutil.Process(pid).cmdline()):
                        psutil.Process(pid).kill()
            process.wait()


@dataclass(frozen=True)
class Tool:
    """A peer as a user would start it."""

    name: str
    python: str | None
    start: Callable[[Job, str, Sequence[int], int], None]
    """(job, python, hosts, ranks a host): starts these hosts; host 0 is first, and serves what the others need."""
    cases: tuple[str, ...]
    cannot: dict[str, str]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def launcher(module: list[str], mode: str, options: list[str], conf: str, timeout_s: float) -> Callable[..., None]:
    """torchrun and its child ft_launcher: one launcher a host, rendezvous served by host 0."""

    def start(job: Job, python: str, hosts: Sequence[int], ranks: int) -> None:
        port = int(job.env.setdefault("BENCH_PORT", str(free_port())))
        needed = job.env["BENCH_NODES"]
        for host in hosts:
            place = [f"--nnodes={needed}", f"--nproc-per-node={ranks}", "--max-restarts=100", "--rdzv-backend=c10d"]
            serves = "true" if host == 0 else "false"
            join = [f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf=is_host={serves}{conf}", "--rdzv-id=bench"]
            program = [WORKER, mode, str(job.folder), f"--timeout={timeout_s}"]
            command = [part.replace("PYTHON_BIN", str(Path(python).parent)) for part in module]
            job.start(f"host-{host}", [python, *command, *place, *join, "--local-addr=127.0.0.1", *options, *program])
            if host == 0:
                time.sleep(1.0)  # the rendezvous is up before the others ask for it

    return start


def replicas(heartbeat_ms: int, tick_ms: int, timeout_s: float) -> Callable[..., None]:
    """torchft: a lighthouse, and a replica group of one rank a host."""

    def start(job: Job, python: str, hosts: Sequence[int], ranks: int) -> None:
        port = free_port()
        job.env["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{port}"
        lighthouse = str(Path(python).parent / "torchft_lighthouse")
        job.start("lighthouse", [
            lighthouse, "--bind", f"127.0.0.1:{port}", "--min_replicas", "1", "--join_timeout_ms", "1000",
            "--heartbeat_timeout_ms", str(heartbeat_ms), "--quorum_tick_ms", str(tick_ms),
        ])  # fmt: skip
        for host in hosts:
            program = [WORKER, "torchft", str(job.folder), f"--timeout={timeout_s}", f"--replica={host}"]
            job.start(f"host-{host}", [python, *program])

    return start


def tools() -> list[Tool]:
    torchrun = ["-m", "torch.distributed.run"]
    nvrx = ["PYTHON_BIN/ft_launcher"]
    plain = {"rank_stop": "the group's timeout is 30 minutes by default: a stopped rank is not noticed in bounded time"}
    no_launch = {"host_swap": "restarts no process: a lost replica is left behind (see rank_kill_s)"}
    alive = ",keep_alive_interval=1,keep_alive_max_attempt=2"
    launched = ("rank_kill", "host_swap")
    quick = ["--monitor-interval=0.02", "--shutdown-timeout=1"]
    checks = ["--ft-workload-check-interval=0.1", "--ft-node-health-check-interval=0.5"]
    beats = ["--ft-initial-rank-heartbeat-timeout=30", "--ft-rank-heartbeat-timeout=1.5", "--monitor-interval=0.02"]
    off = ["--ft-enable-nic-monitor=False", "--ignore-missing-fault-tol-cfg"]
    return [
        Tool("torchrun", peer("torchft"), launcher(torchrun, "plain", [], "", 0), launched, plain),
        Tool(
            "torchrun_tuned",
            peer("torchft"),
            launcher(torchrun, "plain", quick, alive, 1.5),
            ("rank_kill", "rank_stop", "host_swap", "shrink"),
            {},
        ),
        Tool("nvrx", peer("nvrx"), launcher(nvrx, "nvrx", off, "", 0), launched, plain),
        Tool(
            "nvrx_tuned",
            peer("nvrx"),
            launcher(nvrx, "nvrx", [*off, *checks, *beats], alive, 0),
            ("rank_kill", "rank_stop", "host_swap"),
            {},
        ),
        Tool("torchft", peer("torchft"), replicas(5000, 100, 60), ("rank_kill",), no_launch),
        Tool("torchft_tuned", peer("torchft"), replicas(300, 20, 1.5), ("rank_kill", "rank_stop"), no_launch),
    ]


def peer(name: str) -> str | None:
    home = Path(os.environ.get("MUSTER_BENCH_HOME") or Path.home() / ".cache" / "muster" / "bench")
    folder = home / f"peers-{name}"
    return str(folder / "bin" / "python") if (folder / "ready").exists() else None


#: Case -> (hosts, ranks a host, --nnodes).
SHAPES = {"rank_kill": (1, 2, "1"), "rank_stop": (1, 2, "1"), "host_swap": (2, 1, "2"), "shrink": (2, 1, "1:2")}
#: Muster's cases that no peer is put through, and why.
NOT_TRIED = {
    "grow": "not tried",
    "host_stop": "not tried",
    "host_cut": "not tried: needs a network namespace a host",
}


def strike(tool: Tool, job: Job, case: str) -> None:
    """The fault: of rank 1, or of the host that does not serve the rendezvous.

    A spare host's launcher is started with the fault. One that waits from the beginning would be more like a spare, but
    with three torchrun 2.13 launchers in a world of two the workers were restarted every 1.4 s and never made a step.
    """
    ranks = job.ranks()
    if case.startswith("rank"):
        os.kill(ranks[1], signal.SIGSTOP if case == "rank_stop" else signal.SIGKILL)
        return
    victim = next(name for pid in ranks.values() if (name := job.host_of(pid)) != "host-0")
    for pid in job.tree(victim):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if case == "host_swap":
        assert tool.python is not None
        tool.start(job, tool.python, [2], 1)


def one_trial(tool: Tool, case: str, trial: int) -> tuple[float, int, float]:
    """(L in seconds, steps applied twice, median step before the fault in seconds)."""
    assert tool.python is not None
    hosts, ranks, nodes = SHAPES[case]
    if tool.name.startswith("torchft"):
        hosts, ranks = 2, 1
    folder = Path(tempfile.mkdtemp(prefix="muster-peer-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "BENCH_NODES": nodes}
    if tool.name != "torchrun":
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else most of its restarts fail in torch 2.13
    job = Job(folder, env)
    try:
        tool.start(job, tool.python, range(hosts), ranks)
        job.wait_for(SETTLE_STEPS, START_S, "start")
        # Both replicas or ranks must have joined before the fault.
        until = time.monotonic() + START_S
        while len(job.ranks()) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        job.wait_for(job.last_step() + 3, START_S, "start")
        time.sleep(0.07 * (trial % 5))  # anywhere within a step
        began = time.monotonic_ns()
        strike(tool, job, case)
        before = max(step for step, end in job.steps() if end < began)
        job.wait_for(before + 1, LIMIT_S, case)
        seen = job.steps()
        first = min(end for step, end in seen if step > before and end > began)
        lost = {step for step, end in seen if end > began and step <= before}
        ends = sorted(end for step, end in dict(seen).items() if end < began)[-8:]
        gaps = [(b - a) / 1e9 for a, b in itertools.pairwise(ends)]
        return (first - began) / 1e9, len(lost), statistics.median(gaps) if gaps else 0.0
    finally:
        job.end()
        shutil.rmtree(folder, ignore_errors=True)


def measure_tool(tool: Tool, trials: int, only: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Every case of one peer, in the keys of ``benchmarks/recovery.py``."""
    found: dict[str, Any] = {}
    for case, why in NOT_TRIED.items():
        found[f"{case}_s"], found[f"{case}_why"] = None, why
    for case in SHAPES:
        if only and case not in only:
            continue
        found[f"{case}_s"] = None
        if tool.python is None:
            found[f"{case}_why"] = "not installed: benchmarks/peers/setup.sh"
            continue
        if case not in tool.cases:
            found[f"{case}_why"] = tool.cannot.get(case, "the tool has no such case, or does not finish it safely")
            continue
        times, lost, steps, failures = [], [], [], []
        until = time.monotonic() + CASE_S
        for trial in range(trials):
            if time.monotonic() > until:
                break
            try:
                seconds, twice, step_s = one_trial(tool, case, trial)
            except (NotRecovered, psutil.Error, StopIteration, KeyError) as error:
                failures.append(str(error) or type(error).__name__)
                if len(failures) >= 2 and not times:
                    break  # it costs a minute each time
                continue
            times.append(seconds)
            lost.append(twice)
            steps.append(step_s)
        if failures:
            found[f"{case}_failed"] = len(failures)
            found[f"{case}_why"] = failures[-1]
        if times:
            found[f"{case}_s"] = round(statistics.median(times), 3)
            found[f"{case}_min_max_s"] = [round(min(times), 3), round(max(times), 3)]
            found[f"{case}_trials"] = len(times)
            found[f"{case}_steps_lost"] = max(lost)
            found[f"{case}_step_s"] = round(statistics.median(steps), 3)
        shown = f"{found[f'{case}_s']} s" if times else f"null: {found[f'{case}_why'][:160]}"
        print(f"{tool.name:15s} {case:10s} L median {shown} (n={len(times)}, failed {len(failures)})", flush=True)
    return found


def measure_peers(
    trials: int, *, length: int, names: list[str] | None = None, only: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """Peer -> figures, in the keys of Muster's own.

    ``length``: tokens of a sequence; ``names``: some peers; ``only``: some cases.
    """
    os.environ["BENCH_LENGTH"] = str(length)
    chosen = [tool for tool in tools() if not names or tool.name in names]
    return {tool.name: measure_tool(tool, trials, only) for tool in chosen}
