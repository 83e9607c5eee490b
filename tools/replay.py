"""The run that a recorded one has to equal: its run file once more from step 1, and nothing goes wrong.

Neither supervisor nor agent takes part: ``python -m muster.data`` prepares the data, and each rank is a plain process
(``python -m muster.rank.worker``, in the environment that torchrun would give). It is ended at the last step that the
recorded run applied. What is read of the record is read as ``muster.report.audit.history`` reads it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.report.audit.history import Finding, History, load

LOOK_EVERY_S = 0.1


class CannotReplay(Exception):
    """No replay can be compared with this history; says why in one line."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What will be run."""

    spec: Mapping[str, Any]
    """The recorded run file with this replay's changes."""
    ranks_of_hosts: tuple[int, ...]
    """A rank's share of a host's threads is part of its sums: local ranks are numbered as they were."""
    last_step: int
    fingerprints: frozenset[str]
    """Of the data that the run was trained on; empty: not recorded."""


def plan(run_dir: str | Path, *, ranks: int | None = None) -> Replay:
    """Decide how to replay the run in ``run_dir``; starts nothing.

    Raises:
        CannotReplay: an unfailed run would not have to give these numbers.
    """
    history = load(Path(run_dir), Finding())
    started = [line["detail"] for line in history.of("attempt.started")]
    reason = _reason_against(history, started)
    if reason is not None:
        raise CannotReplay(reason)
    layout = dict(started[0]["layout"])
    hosts = tuple(len(each) for each in started[0]["hosts"].values())
    if ranks is not None:
        if not history.spec["training"].get("exact"):
            raise CannotReplay("another number of ranks gives other bits where training.exact is false")
        layout, hosts = {"dp_replicate": 1, "dp_shard": ranks, "tp": 1}, (ranks,)
    return Replay(
        spec=_changed(history.spec, layout),
        ranks_of_hosts=hosts,
        last_step=max(int(line["step"]) for line in history.of("step")),
        fingerprints=frozenset(str(line["detail"]["fingerprint"]) for line in history.of("data.prepared")),
    )


def replay(wanted: Replay, folder: Path) -> None:
    """Run it in ``folder``, which is a run's folder then. Blocks; no process is left, whatever happens.

    Raises:
        CannotReplay: its data is gone or has changed, or a rank failed before the last step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "resolved.json").write_text(json.dumps(wanted.spec))
    _prepare(wanted, folder)
    address = ("127.0.0.1", _free_port())
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(sum(wanted.ranks_of_hosts)):
            ranks.append(_start(wanted, folder, rank, address))
        _watch(wanted, folder, ranks)
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# ---------------------------------------------------------------- what can be replayed


def _reason_against(history: History, started: Sequence[Mapping[str, Any]]) -> str | None:
    """Why an unfailed run need not give the recorded numbers; None: it has to."""
    if not history.spec:
        return "it has no resolved.json"
    if history.spec.get("command"):
        return "it ran a `command:`, and only Muster's own loop repeats its steps"
    steps = [int(line["step"]) for line in history.of("step")]
    if not steps or not started:
        return "no attempt or no step is recorded"
    if min(steps) > 1:
        return f"its record begins at step {min(steps)}: it went on from a checkpoint of another run"
    training = history.spec.get("training", {})
    exact = bool(training.get("exact"))
    repeats = training.get("deterministic") and training.get("optimizer", {}).get("name") != "adamw_8bit"
    if not exact and not repeats:
        return "its numbers are not promised to repeat (training.exact or training.deterministic, and not adamw_8bit)"
    layouts = {json.dumps(each["layout"], sort_keys=True) for each in started}
    if len(layouts) > 1 and not exact:
        return f"it ran on {len(layouts)} layouts without training.exact: sums in another order have other bits"
    if any(each.get("batch_schedule") for each in started):
        return "its policy changed batch or learning rate on the way"
    if any(each.get("skip_steps") for each in started):
        return "it left out the updates of steps that were not finite: an unfailed run would have ended there"
    if len({line["detail"]["spec_digest"] for line in history.of("run.submitted")}) > 1:
        return "its run file was changed on the way"
    return None


def _changed(recorded: Mapping[str, Any], layout: Mapping[str, int]) -> dict[str, Any]:
    """The recorded run file: the same numbers, on this machine, with nothing beside them."""
    spec = json.loads(json.dumps(recorded))
    changes: dict[str, dict[str, Any]] = {
        "training": {"state_hash_every_steps": 1, "profile": {}},
        "parallelism": dict(layout),
        "checkpoint": {"dir": None, "every_steps": 0, "snapshot_every_steps": 0},
        "evaluation": {"every_steps": 0, "at_start": False, "num_sequences": 0, "num_questions": 0,
                       "final_num_questions": None,
                       "samples": 0},
        "recovery": {"baseline_steps": 0},
        "output": {"tensorboard": False, "tracker": "none"},
    }  # fmt: skip
    for section, values in changes.items():
        spec[section] = {**(spec.get(section) or {}), **values}
    spec["output"]["peak_tflops"] = spec["output"].get("peak_tflops") or 1.0  # else it is measured
    return spec


# ---------------------------------------------------------------- its processes


def _prepare(wanted: Replay, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "muster.data", "--run-dir", str(folder)],
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        _, found = json.loads(done.stdout.splitlines()[-1])  # a message: its kind and its fields
    except (ValueError, IndexError):
        raise CannotReplay(f"its data cannot be prepared: {_last_line(done.stderr)}") from None
    if "error" in found:
        raise CannotReplay(f"its data cannot be prepared: {found['error']}")
    if wanted.fingerprints and found["fingerprint"] not in wanted.fingerprints:
        raise CannotReplay("its data, or the code that prepares it, is not what it was (another fingerprint)")


def _start(wanted: Replay, folder: Path, rank: int, address: tuple[str, int]) -> subprocess.Popen[bytes]:
    host, local_rank = 0, rank
    while local_rank >= wanted.ranks_of_hosts[host]:
        local_rank -= wanted.ranks_of_hosts[host]
        host += 1
    local_world = wanted.ranks_of_hosts[host]
    if wanted.spec["resources"].get("device") != "cpu":  # a rank's GPU goes by its local number
        local_rank, local_world = rank, sum(wanted.ranks_of_hosts)
    threads = wanted.spec["resources"].get("threads_per_rank") or len(os.sched_getaffinity(0)) // local_world
    place = {
        "RANK": rank, "WORLD_SIZE": sum(wanted.ranks_of_hosts), "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world, "MASTER_ADDR": address[0], "MASTER_PORT": address[1],
        "OMP_NUM_THREADS": max(1, threads),
    }  # fmt: skip
    with open(folder / f"rank-{rank}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "muster.rank.worker", "--run-dir", str(folder)],
            env=_environment() | {name: str(value) for name, value in place.items()},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _environment() -> dict[str, str]:
    """This process's, without what would make another program of it: a drill's or a run's own words."""
    found = {name: value for name, value in os.environ.items() if not name.startswith(("MUSTER_", "TORCHELASTIC_"))}
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    return found | ({"GLOO_SOCKET_IFNAME": loopback} if loopback else {})


def _watch(wanted: Replay, folder: Path, ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Return when the last step is in the log."""
    reached, offset = 0, 0
    while True:
        ended = [process.poll() for process in ranks]
        for path in (folder / "events").glob("*.jsonl"):  # one file: rank 0's
            with open(path, "rb") as file:
                file.seek(offset)
                data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            offset += len(data)
            steps = [line["step"] for line in map(json.loads, data.splitlines()) if line["kind"] == "step"]
            reached = max([reached, *steps])
        if reached >= wanted.last_step:
            return
        for rank, code in enumerate(ended):
            if code is not None:
                said = _last_line((folder / f"rank-{rank}.log").read_text(errors="replace"))
                raise CannotReplay(f"rank {rank} of the replay ended with {code} after step {reached}: {said}")
        time.sleep(LOOK_EVERY_S)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
