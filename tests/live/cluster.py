"""Real runs for live tests: agents and a supervisor as processes, faults by real signals, checks of the outcome.

A host is an agent's process tree. With ``netns`` each host lives in a network namespace of its own, joined
by a bridge, so that cutting its link is a real cut.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
from watched import Watched

from muster.config.spec import RunSpec
from muster.storage import job_record
from muster.storage.memory_dir import MemoryDir, left_over

RUN_ID = "live"

SMALL = {
    "name": "live",
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
            "max_position_embeddings": 512,
        },
        "dtype": "float32",
    },
    "data": {"sources": [{"type": "random", "rows": 512}]},
    "training": {"steps": 60, "sequence_length": 64, "global_batch_size": 12, "deterministic": True},
    "evaluation": {"at_start": False, "num_sequences": 0, "samples": 0},
    "checkpoint": {"every_steps": 0},
    "resources": {"hosts": 1, "ranks_per_host": 2, "device": "cpu", "threads_per_rank": 1},
    "recovery": {"heartbeat_timeout_s": 2.0, "grace_s": 20.0},
    "output": {"tensorboard": False, "peak_tflops": 0.1},
}


def spec_of(**changes: object) -> RunSpec:
    """``SMALL`` with dotted keys changed: ``spec_of(**{"resources.hosts": 2})``."""
    found = json.loads(json.dumps(SMALL))
    for key, value in changes.items():
        *path, last = key.split(".")
        place = found
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return RunSpec.model_validate(found)


class LiveRun(Watched):
    """One run in ``directory``; use as a context manager, which leaves no process behind."""

    def __init__(self, directory: Path, spec: RunSpec, *, netns: bool = False, extra_hosts: int = 0):
        super().__init__(directory)
        self.spec, self.netns = spec, netns
        self.names = [f"host-{n}" for n in range(spec.resources.hosts + spec.resources.spare_hosts + extra_hosts)]
        self.agents: dict[str, subprocess.Popen] = {}
        self.supervisor: subprocess.Popen | None = None
        self.network = Network(self.names) if netns else None

    def __enter__(self):
        (self.dir / "logs").mkdir(parents=True, exist_ok=True)
        (self.dir / "resolved.json").write_text(self.spec.model_dump_json())
        number = job_record.submission(self.dir) + 1  # as `muster recover` does: an end is that of its submission
        (self.dir / "job.json").write_text(json.dumps({"run_id": RUN_ID, "submission": number}))
        if not (self.dir / "token").exists():
            fd = os.open(self.dir / "token", os.O_CREAT | os.O_WRONLY, 0o600)
            os.write(fd, secrets.token_hex(32).encode())
            os.close(fd)
        if self.network:
            self.network.up()
        return self

    def __exit__(self, *_):
        for process in [*self.agents.values(), self.supervisor]:
            if process is not None:
                kill_tree(process.pid)
        for process in psutil.process_iter(["cmdline"]):
            if str(self.dir) in " ".join(process.info["cmdline"] or []):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        for folder in left_over(self.dir, RUN_ID)[0]:
            shutil.rmtree(folder, ignore_errors=True)
        if self.network:
            self.network.down()

    # ------------------------------------------------------------ processes

    def start(self, names=None):
        """Start the supervisor and the agents (all of them, or ``names``)."""
        self.start_supervisor()
        for name in names or self.names:
            self.start_agent(name)

    def under_way(self, step=10):
        """Start everything; return when ``step`` has been taken and every spare is connected."""
        self.start()
        self.wait_for_step(step)
        self.wait_until(lambda: len(self.spares()) >= self.spec.resources.spare_hosts, "every spare")

    def start_supervisor(self):
        bind = self.network.bridge if self.network else "127.0.0.1"
        code = (
            "import sys; from pathlib import Path; from muster.supervise.process.supervisor import Supervisor; "
            "sys.exit(Supervisor(Path(sys.argv[1]), bind=sys.argv[2]).serve())"
        )
        log = open(self.dir / "logs" / "supervisor.log", "a")  # noqa: SIM115 (the child's)
        self.supervisor = subprocess.Popen(
            [sys.executable, "-c", code, str(self.dir), bind], stdout=log, stderr=log, start_new_session=True
        )

    def start_agent(self, name):
        log = open(self.dir / "logs" / f"agent-{name}.log", "a")  # noqa: SIM115 (the child's)
        argv = [
            sys.executable, "-m", "muster.agent.watchdog", "--run-dir", str(self.dir), "--run-id", RUN_ID,
            "--host", name, "--hosts-here", str(self.spec.resources.hosts), "--no-metadata-server",
        ]  # fmt: skip
        if self.network:
            argv = [
                "nsenter",
                f"--net=/run/netns/{self.network.namespace(name)}",
                *argv,
                "--bind",
                self.network.address(name),
            ]
        self.agents[name] = subprocess.Popen(
            argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def wait(self, timeout_s=120):
        """The supervisor's exit code."""
        try:
            return self.supervisor.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError("the run did not end in time:\n" + self.story()) from None

    # ------------------------------------------------------------ looking

    def wait_for_step(self, step, timeout_s=90):
        self.wait_until(lambda: self.step() >= step, f"step {step}", timeout_s)

    def wait_for_spare(self):
        self.wait_until(self.spares, "a spare")

    def wait_until(self, condition, what, timeout_s=90):
        until = time.monotonic() + timeout_s
        while not condition():
            if self.supervisor is not None and self.supervisor.poll() is not None:
                raise AssertionError(
                    f"the supervisor left with {self.supervisor.returncode} before {what}:\n{self.story()}"
                )
            assert time.monotonic() < until, f"no {what} within {timeout_s} s:\n{self.story()}"
            time.sleep(0.01)

    def story(self):
        """What happened, for a failing test's message."""
        lines = [
            f"{event.wall_ns / 1e9:.3f} {event.host} a{event.attempt} {event.kind} "
            f"r={event.rank} s={event.step} {dict(event.detail)}"
            for event in self.events()
            if event.kind not in ("step", "phase.changed", "clock.offset")
        ]
        logs = [f"--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted((self.dir / "logs").glob("*.log"))]
        return "\n".join([*lines[-60:], *logs])

    # ------------------------------------------------------------ faults

    def kill_rank(self, rank, number=signal.SIGKILL):
        os.kill(self.ranks()[rank][0], number)

    def host_pids(self, name):
        """Every process of a host: its watchdog's tree and the sessions its agent started."""
        memory = MemoryDir.of_run(self.dir).get(name)
        found = set()
        for process in psutil.process_iter(["pid", "cmdline"]):
            command = " ".join(process.info["cmdline"] or [])
            mine = f"--host {name}" in command and str(self.dir) in command
            if mine or (memory is not None and str(memory.folder) in command):
                found.add(process.info["pid"])
        for pid in list(found):
            with contextlib.suppress(psutil.Error):
                found |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
        return found

    def signal_host(self, name, number=signal.SIGKILL):
        """All processes of a host at once."""
        signal_all(self.host_pids(name), number)

    def fork_servers(self):
        """Pids of the fork servers that ever logged a start on these hosts."""
        memories = MemoryDir.of_run(self.dir)
        return [int(memories[name].read("forkserver.pid").split()[0]) for name in self.names if name in memories]

    def memory(self, name="host-0"):
        """The host's folder in memory, which its agent has made."""
        return MemoryDir.of_run(self.dir)[name].folder

    def supervisor_address(self):
        from muster.protocol.lease import read_lease

        return read_lease((self.dir / "lease.json").read_bytes(), me="the test").address

    def replicator_port(self, name="host-0"):
        return json.loads((self.memory(name) / "replicator.json").read_text())["port"]

    def tell(self, message):
        """Send the supervisor a message as a client; returns its answer."""
        from muster.transport.client import ask_supervisor
        from muster.transport.secure_session import read_token

        return ask_supervisor(self.supervisor_address(), read_token(str(self.dir / "token")), message)

    def final_hash(self):
        """SHA-256 over every tensor of the newest checkpoint, whatever its layout."""
        return checkpoint_hash(self.dir / "checkpoints")


def signal_all(pids: Iterable[int], number: int) -> None:
    """A host's processes at once; before a kill they are stopped, so that none reports another one's end."""
    oldest_first = sorted(pids)  # its agent is older than its ranks: the host is lost before they are
    for each in (signal.SIGSTOP, number) if number == signal.SIGKILL else (number,):
        for pid in oldest_first:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, each)


def checkpoint_hash(directory: Path) -> str:
    import hashlib

    from muster.checkpoint.load import newest_valid
    from muster.checkpoint.shards import ShardReader, read_tensor
    from muster.checkpoint_format.reader import open_checkpoint
    from muster.storage.store import open_store

    manifest = newest_valid(open_store(), str(directory))
    assert manifest is not None, f"no checkpoint in {directory}"
    reader = ShardReader(open_checkpoint(manifest))
    digest = hashlib.sha256(str(manifest.step).encode())
    for name in sorted(reader.shapes()):
        digest.update(name.encode() + read_tensor(reader, name).contiguous().numpy().tobytes())
    return digest.hexdigest()


def kill_tree(pid):
    with contextlib.suppress(psutil.Error):
        tree = psutil.Process(pid)
        for process in [*tree.children(recursive=True), tree]:
            with contextlib.suppress(psutil.Error):
                process.kill()


class Network:
    """A bridge and one namespace per host, in a /24 of its own: .1 is ours, hosts from .11 on."""

    def __init__(self, names):
        self.names = names
        # A deleted namespace's links go away later: a name is never used twice.
        self.tag = f"mu{secrets.token_hex(3)}"
        self.subnet = f"10.79.{secrets.randbelow(250)}"  # runs side by side must not share one
        self.bridge = f"{self.subnet}.1"

    def namespace(self, name):
        return f"{self.tag}{self.names.index(name)}"

    def address(self, name):
        return f"{self.subnet}.{11 + self.names.index(name)}"

    def up(self):
        ip("link", "add", f"{self.tag}br", "type", "bridge")
        ip("addr", "add", f"{self.bridge}/24", "dev", f"{self.tag}br")
        ip("link", "set", f"{self.tag}br", "up")
        for index, name in enumerate(self.names):
            space = self.namespace(name)
            ip("netns", "add", space)
            ip("link", "add", f"{self.tag}v{index}", "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", f"{self.tag}v{index}", "master", f"{self.tag}br", "up")
            ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")

    def cut(self, name):
        ip("link", "set", f"{self.tag}v{self.names.index(name)}", "down")

    def heal(self, name):
        ip("link", "set", f"{self.tag}v{self.names.index(name)}", "up")

    def pids(self, name):
        """Every process in the host's namespace."""
        argv = ["ip", "netns", "pids", self.namespace(name)]
        return [int(word) for word in subprocess.run(argv, capture_output=True, check=False).stdout.split()]

    def processes(self, name, word):
        """Living processes of a host whose command line holds ``word``."""
        found = []
        for pid in self.pids(name):
            with contextlib.suppress(OSError):
                if word in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):  # a zombie's is empty
                    found.append(pid)
        return found

    def kill_processes(self, name):
        for _ in range(20):
            for pid in self.pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def down(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", self.namespace(name)], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self.tag}br"], check=False, capture_output=True)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True)


def namespaces_work():
    """Whether this machine lets us make network namespaces (root, iproute2)."""
    name = f"muprobe{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
    if made:
        subprocess.run(["ip", "netns", "del", name], check=False)
    return made and os.geteuid() == 0
