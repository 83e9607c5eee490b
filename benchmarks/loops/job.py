"""One measured training: the settings of every loop, how each is started, and its result."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loops import meeting

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


@dataclass(frozen=True)
class Measured:
    """A run's steps after the warm-up."""

    tokens_per_s: float
    supervised_per_s: float
    step_s: float
    start_s: float
    """From the command to the end of its first step."""
    peak_bytes: int | None = None
    losses: tuple[float, ...] = ()


def bench_home() -> Path:
    """Where the peers' virtual environments are."""
    return Path(os.environ.get("MUSTER_BENCH_HOME") or Path.home() / ".cache" / "muster" / "bench")


def peer_python(name: str) -> Path | None:
    """The interpreter of ``benchmarks/peers/setup.sh NAME``, where that has been run to its end."""
    folder = bench_home() / f"peers-{name}"
    return folder / "bin" / "python" if (folder / "ready").exists() else None


def job(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A job with its defaults (see ``bare_loop.py`` and ``trl_loop.py``)."""
    found = {
        "config": config, "steps": 12, "batch": 4, "micro": 2, "sequence_length": 256, "device": "cpu",
        "dtype": "float32", "threads": 1, "lora_rank": 0, "checkpointing": False, "compile": False, "units": "layers",
        "kind": "trl", "rows": None, "tokenizer": None, "packing": True, "prepare_only": False, "workers": 1,
        "distinct": 0,
    }  # fmt: skip
    unknown = set(changes) - set(found)
    assert not unknown, f"no such key of a job: {unknown}"
    return {**found, **changes}


def environment(ranks: int, device: str) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
    found = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": paths}
    if ranks > 1 and device == "cpu":
        found["GLOO_SOCKET_IFNAME"] = "lo"
    return found


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def start_command(python: str, ranks: int, program: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command that starts ``ranks`` ranks of ``program``, and what it needs in the environment.

    One rank needs no launcher: torchrun's variables are set by hand.
    """
    port = str(free_port())
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", port]
        return [python, *launcher, *program], {}
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return [python, *program], {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


@contextlib.contextmanager
def told_to_end() -> Iterator[None]:
    """SIGTERM raises SystemExit here, as SIGINT raises KeyboardInterrupt, unless the program handles it itself."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@dataclass(frozen=True)
class Started:
    """What is to be run."""

    command: list[str]
    env: dict[str, str]
    log: Path

    def meeting(self, folder: Path, count: int) -> Started:
        """The same, begun together with others."""
        return replace(self, env={**self.env, meeting.FOLDER: str(folder), meeting.COUNT: str(count)})


def run(command: list[str], env: dict[str, str], log: Path, timeout_s: float) -> int:
    """Run to the end; the moment it began, in nanoseconds. As ``run_together``."""
    return run_together([Started(command, env, log)], timeout_s)


def run_together(every: Sequence[Started], timeout_s: float) -> int:
    """Run all at once to their ends; the moment the first began, in nanoseconds.

    Their whole sessions are ended at the limit, when one fails, and when this process is told to end (`timeout` sends
    SIGTERM): a training that outlives its benchmark holds the GPU or the cores that the next one measures on.
    """
    began, processes = time.monotonic_ns(), []
    with told_to_end():
        try:
            for one in every:
                with one.log.open("w") as file:
                    places = {"stdout": file, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
                    processes.append(subprocess.Popen(one.command, env=one.env, start_new_session=True, **places))
            while any(process.poll() is None for process in processes):
                late = time.monotonic_ns() - began > timeout_s * 1e9
                if late or any(process.poll() for process in processes):
                    break
                time.sleep(0.05)
            for one, process in zip(every, processes, strict=True):
                if process.poll():
                    said = one.log.read_text()[-2000:]
                    raise RuntimeError(f"{' '.join(one.command[:6])} ... ended with {process.returncode}:\n{said}")
            if any(process.poll() is None for process in processes):
                raise RuntimeError(f"{' '.join(every[0].command[:6])} ... did not end within {timeout_s:g} s")
        finally:
            end([process for process in processes if process.poll() is None])
    return began


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End these and all that they started: torchrun's ranks are in sessions of their own; it ends them when told."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, how)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)


def run_loop(name: str, found: dict[str, Any], *, ranks: int, folder: Path, python: str, timeout_s: float = 300) -> Any:
    """Run ``bare_loop.py`` or ``trl_loop.py``; (what it wrote, moment of its start in nanoseconds)."""
    began = run_together([loop(name, found, ranks=ranks, folder=folder, python=python)], timeout_s)
    return json.loads((folder / "out.json").read_text()), began


def loop(name: str, found: dict[str, Any], *, ranks: int, folder: Path, python: str = sys.executable) -> Started:
    """``bare_loop.py`` or ``trl_loop.py``, which writes ``folder / "out.json"``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps({**found, "out": str(folder / "out.json")}))
    command, more = start_command(python, ranks, [str(HERE / f"{name}.py"), str(folder / "job.json")])
    return Started(command, {**environment(ranks, found["device"]), **more}, folder / "log")


def muster_alone(spec: dict[str, Any], *, ranks: int, folder: Path) -> Started:
    """Muster's ranks without agents and snapshots (``muster_loop.py``), which write ``folder / "out.json"``."""
    from muster.app.planning.auto_layout import laid_out
    from muster.config.spec import RunSpec

    run_dir = folder / "run"
    run_dir.mkdir(parents=True)
    resolved, _ = laid_out(RunSpec.model_validate(spec), folder)
    (run_dir / "resolved.json").write_text(resolved.model_dump_json())
    program = [str(HERE / "muster_loop.py"), str(folder / "out.json"), "--run-dir", str(run_dir)]
    command, more = start_command(sys.executable, ranks, program)
    return Started(command, {**environment(ranks, spec["resources"]["device"]), **more}, folder / "log")


def measured(found: dict[str, Any], began_ns: int, *, warmup: int) -> Measured:
    """Medians over the steps after ``warmup``, from step ends, tokens and supervised tokens."""
    ends = found["ends_ns"]
    seconds = [(b - a) / 1e9 for a, b in zip(ends[warmup - 1 :], ends[warmup:], strict=False)]
    per_step = statistics.median(seconds)
    # Rows differ in length: rates are totals over totals, scaled by how the median step compares with the mean one.
    scale = statistics.mean(seconds) / per_step / sum(seconds)
    return Measured(
        tokens_per_s=sum(found["tokens"][warmup:]) * scale,
        supervised_per_s=sum(found["supervised"][warmup:]) * scale,
        step_s=per_step,
        start_s=(ends[0] - began_ns) / 1e9,
        peak_bytes=found.get("peak_bytes"),
        losses=tuple(found.get("losses", ())),
    )


def muster_spec(found: dict[str, Any], cache: Path, *, ranks: int, **changes: Any) -> dict[str, Any]:
    """The run file that trains what ``found`` describes; ``changes``: dotted keys, ``__`` for dots."""
    rows = (
        {"type": "file", "path": found["rows"]}
        if found["rows"]
        else {"type": "random", "rows": found["distinct"] or 256}
    )
    spec: dict[str, Any] = {
        "name": "bench",
        "model": {"config": found["config"], "tokenizer": found["tokenizer"], "dtype": found["dtype"]},
        "data": {"sources": [rows], "cache_dir": str(cache), "workers": found["workers"]},
        "training": {
            "steps": found["steps"],
            "sequence_length": found["sequence_length"],
            "global_batch_size": found["batch"],
            "micro_batch_size": found["micro"],
            "compile": found["compile"],
            "activation_checkpointing": "full" if found["checkpointing"] else "none",
            "optimizer": {"learning_rate": 1e-4, "schedule": "constant"},
        },
        "evaluation": {"at_start": False, "num_sequences": 0, "samples": 0},
        "checkpoint": {"every_steps": 0},
        "resources": {"device": found["device"], "ranks_per_host": ranks},
        "output": {"tensorboard": False, "peak_tflops": 1.0},
    }
    if found["device"] == "cpu":
        spec["resources"]["threads_per_rank"] = found["threads"]
    if found["lora_rank"]:
        spec["model"]["lora"] = {"rank": found["lora_rank"]}
    if not found["tokenizer"]:
        del spec["model"]["tokenizer"]
    if found["distinct"]:
        spec["data"]["heldout_fraction"] = 0.0  # every row is in every step, as in the bare loop
    for key, value in changes.items():
        place = spec
        *path, last = key.split("__")
        for name in path:
            place = place.setdefault(name, {})
        place[last] = value
    return spec


def run_muster(spec: dict[str, Any], folder: Path, *, ranks: int, how: str = "train", timeout_s: float = 300) -> Any:
    """Train with Muster; (its events, moment of the command in nanoseconds).

    ``how``: ``train`` is `muster train`, with supervisor, agent, fork server and snapshots, as users have it;
    ``worker`` is a rank alone (under torchrun from two on), which needs no more than this repository's src.
    """
    from muster.config.spec import RunSpec
    from muster.core import event_log

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    env = environment(ranks, spec["resources"]["device"])
    run_dir = folder / "run"
    if how == "train":
        (folder / "run.yaml").write_text(json.dumps({**spec, "run_dir": str(run_dir)}))
        env["MUSTER_HOME"] = str(folder / "home")
        command = [sys.executable, "-c", "from muster.cli.main import main; main()", "train", str(folder / "run.yaml")]
        more: dict[str, str] = {}
    else:
        run_dir.mkdir()
        (run_dir / "resolved.json").write_text(RunSpec.model_validate(spec).model_dump_json())
        program = ["-m", "muster.rank.worker", "--run-dir", str(run_dir)]
        command, more = start_command(sys.executable, ranks, program)
    began = run(command, {**env, **more}, folder / "log", timeout_s)
    return [event for _, event in event_log.read(run_dir / "events")], began


def steps_of(events: list[Any]) -> dict[str, Any]:
    """Muster's step events in the form of the other loops'. Tokens are those of documents: padding is left out."""
    steps = [event for event in events if event.kind == "step"]
    return {
        "ends_ns": [event.mono_ns for event in steps],
        "tokens": [event.detail["tokens"] for event in steps],
        "supervised": [event.detail["supervised_tokens"] for event in steps],
        "losses": [event.detail["loss"] for event in steps],
        "peak_bytes": max((event.detail.get("memory_bytes") or 0 for event in steps), default=None),
    }


def arguments(doc: str | None) -> argparse.Namespace:
    """``--json FILE``, ``--rounds N`` and ``--smoke``, as a program with ``doc`` was given them."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0] if doc else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, one round: does it run?")
    return parser.parse_args()


def machine() -> dict[str, Any]:
    """Where, when and under what load a figure was measured."""
    import platform

    return {
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "load": [round(value, 1) for value in os.getloadavg()],
        "at": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }
