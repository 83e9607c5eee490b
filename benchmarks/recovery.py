"""Seconds from a fault to the end of the next new step (L), and applied steps lost, for Muster and its peers.

    python benchmarks/recovery.py --quick --json out.json

Loopback (and network namespaces where this machine allows them), gloo, CPU ranks; one process tree per
host. L runs from the injected fault to the end of the next step that goes beyond the last one applied
before it; medians over ``--trials``. ``--quick`` is Muster alone; without it the peers in
``benchmarks/peers`` run too, each in its own environment, in the same run.

Tier granted: memory (host) for a rank's fault, a peer host's memory for a host's.

The goals are stated for a step of about 0.3 s. How long a step of the same work takes differs from machine to
machine and from hour to hour, so a first healthy run is timed and the length of the sequences set by it, for Muster
and the peers alike (``--length`` fixes it instead).
"""

import argparse
import importlib.util
import itertools
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "live"))
from cluster import LiveRun, namespaces_work, signal_all, spec_of
from recovery_stages import STAGES, compiling, medians, stages

MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
}


#: Tokens of a sequence; ``calibrate`` sets it.
LENGTH = 128
GOAL_STEP_S = 0.3
#: Ten hosts on two cores take a minute and more to their first step.
START_S = 300
PHASES = itertools.count()
#: The stages of the trials of the case under way.
FOUND_STAGES = []
#: What JAX says of its programs in them.
FOUND_COMPILING = []


def calibrate():
    """Sets ``LENGTH`` so that a step of two ranks takes about ``GOAL_STEP_S`` here and now."""
    global LENGTH
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder, LiveRun(Path(folder), bench_spec()) as run:
            run.start()
            run.wait_for_step(14)
            step = step_s(run)
        LENGTH = min(256, max(32, round(LENGTH * GOAL_STEP_S / step / 8) * 8))
    print(f"sequences of {LENGTH} tokens (a step of the last try took {step:.3f} s)", flush=True)


def bench_spec(**changes):
    """A model whose step takes about 0.3 s on two ranks of two cores (see ``calibrate``)."""
    return spec_of(
        **{
            "model.config": MODEL,
            "training.sequence_length": LENGTH,
            "training.global_batch_size": 12,
            "training.micro_batch_size": 2,
            "training.steps": 10_000,
            "data.sources": [{"type": "random", "rows": 4096}],
            "recovery.heartbeat_timeout_s": 0.3,
            "recovery.grace_s": 5.0,
            "checkpoint.snapshot_every_steps": 1,  # what is measured redoes no applied step
            **changes,
        }
    )


def measure(run, aim, *, settle_steps=6):
    """Inject a fault into a stepping run; returns (L seconds, applied steps lost).

    ``aim()`` finds what is to be struck, which takes a while, and returns the blow.
    """
    at = run.step() + settle_steps
    run.wait_for_step(at, START_S)
    time.sleep(next(PHASES) * 0.37 % 1 * GOAL_STEP_S)  # spread over a step: a copy takes part of one
    strike = aim()
    began = time.monotonic_ns()
    strike()
    run.wait_until(lambda: new_step(run, began) is not None, "a new step", 60)
    first, before = new_step(run, began)
    FOUND_STAGES.append(stages(run.events(), began_ns=began, before=before))
    FOUND_COMPILING.append(compiling(run.dir / "logs"))
    repeated = {event.step for event in run.events("step") if event.mono_ns > began and event.step <= before}
    return (first - began) / 1e9, len(repeated)


def new_step(run, began):
    """(end in ns of the first step beyond what was applied before ``began``, that last step); None: not yet."""
    steps = run.events("step")
    # The line of the last step before the fault may reach the log after it.
    before = max(event.step for event in steps if event.mono_ns < began)
    ends = [event.mono_ns for event in steps if event.mono_ns > began and event.step > before]
    return (min(ends), before) if ends else None


def rank_fault(number, trials, **changes):
    with tempfile.TemporaryDirectory() as folder, LiveRun(Path(folder), bench_spec(**changes)) as run:
        run.start()
        found = []
        for trial in range(trials):
            found.append(measure(run, lambda trial=trial: partial(os.kill, run.ranks()[trial % 2][0], number)))
        return found, step_s(run)


def host_fault(aim, trials, *, spares, hosts, netns=False, min_hosts=None, **more):
    """One run a trial: a lost host does not come back."""
    found, steps = [], []
    changes = {"resources.hosts": hosts, "resources.ranks_per_host": 1, "resources.spare_hosts": spares, **more}
    if min_hosts:
        changes["resources.min_hosts"] = min_hosts
    for _ in range(trials):
        with tempfile.TemporaryDirectory() as folder, LiveRun(Path(folder), bench_spec(**changes), netns=netns) as run:
            run.start()
            run.wait_for_step(2, START_S)
            if spares:
                run.wait_for_spare()
            victim = run.ranks()[max(run.ranks())][1]
            found.append(measure(run, partial(aim, run, victim)))
            steps.append(step_s(run))
    return found, statistics.median(steps)


def grow(trials, *, hosts=3, min_hosts=2, **more):
    """The pause while a host joins: the longest gap between two steps' ends, less the median step before it."""
    found, steps = [], []
    changes = {"resources.hosts": hosts, "resources.min_hosts": min_hosts, "resources.ranks_per_host": 1, **more}
    victim = f"host-{hosts - 1}"
    for _ in range(trials):
        with tempfile.TemporaryDirectory() as folder, LiveRun(Path(folder), bench_spec(**changes)) as run:
            run.start()
            run.wait_for_step(3, START_S)
            run.signal_host(victim)
            run.wait_until(lambda run=run: len(run.events("incident.resolved")) == 1, "the shrink")
            run.start_agent(victim)
            run.wait_until(lambda run=run: "grow" in run.actions(), "the return", START_S)
            at = run.step()
            run.wait_for_step(at + 4)
            FOUND_STAGES.append(stages_of_return(run))
            ends = sorted(event.mono_ns for event in run.events("step") if event.step >= at - 2)
            gaps = [(b - a) / 1e9 for a, b in itertools.pairwise(ends)]
            steps.append(step_s(run))
            found.append((max(gaps) - steps[-1], 0))
    return found, statistics.median(steps)


def stages_of_return(run):
    """Where the time goes from the decision to let a host join: until the ranks pause, steps go on."""
    began = next(event.mono_ns for event in run.events("incident.decided") if event.detail["action"] == "grow")
    ended = next(event.mono_ns for event in run.events("attempt.ended") if event.mono_ns > began)
    joined = max(event.mono_ns for event in run.events("attempt.started"))
    before = max(event.step for event in run.events("step") if event.mono_ns < joined)
    found = stages(run.events(), began_ns=ended - 1, before=before)
    return {name: s for name, s in found.items() if name not in ("notice", "decide")}


def step_s(run):
    return statistics.median(event.detail["step_ns"] for event in run.events("step")[2:]) / 1e9


def cases(trials):
    kill = lambda run, name: partial(signal_all, run.host_pids(name), signal.SIGKILL)  # noqa: E731
    stop = lambda run, name: partial(signal_all, run.host_pids(name), signal.SIGSTOP)  # noqa: E731
    cut = lambda run, name: partial(run.network.cut, name)  # noqa: E731
    netns = namespaces_work()
    yield "rank_kill", lambda: rank_fault(signal.SIGKILL, trials)
    yield "rank_stop", lambda: rank_fault(signal.SIGSTOP, trials)
    peers = {"recovery.heartbeat_timeout_s": 1.5}  # what the peers are tuned to, to compare at equal settings
    yield "rank_stop_1500ms", lambda: rank_fault(signal.SIGSTOP, trials, **peers)
    replicas = {"parallelism.dp_replicate": 2}  # the survivor keeps its process
    yield "replica_lost", lambda: rank_fault(signal.SIGKILL, trials, **replicas)
    yield "replica_stopped", lambda: rank_fault(signal.SIGSTOP, trials, **replicas)
    yield "host_swap", lambda: host_fault(kill, trials, hosts=2, spares=1, netns=netns)
    yield "host_stop", lambda: host_fault(stop, trials, hosts=2, spares=1, netns=netns)
    if netns:
        yield "host_cut", lambda: host_fault(cut, trials, hosts=2, spares=1, netns=True)
    yield "shrink", lambda: host_fault(kill, trials, hosts=3, spares=0, min_hosts=2, netns=netns)
    yield "grow", lambda: grow(trials)
    # The trainer for TPUs, two hosts of two chips that are this machine's CPU.
    chips = {
        "resources.device": "tpu", "resources.hosts": 2, "resources.ranks_per_host": 1, "training.deterministic": False,
        "env.XLA_FLAGS": "--xla_force_host_platform_device_count=2", "env.JAX_LOG_COMPILES": "1",
    }  # fmt: skip
    yield "tpu_rank_kill", lambda: rank_fault(signal.SIGKILL, trials, **chips)
    # Three replicas of three stages: on nine hosts of one rank, and inside each of three hosts.
    grid = {"parallelism.dp_replicate": 3, "parallelism.dp_shard": 1, "parallelism.pp": 3}
    calm = {"recovery.heartbeat_timeout_s": 5.0}  # ten hosts share these cores; nothing here is noticed by silence
    for name, hosts in (("grid9", 9), ("grid3", 3)):
        more = {**grid, **calm, "resources.ranks_per_host": 9 // hosts}
        least = hosts - hosts // 3
        yield f"{name}_rank_kill", partial(rank_fault, signal.SIGKILL, trials, **more, **{"resources.hosts": hosts})
        yield f"{name}_swap", partial(host_fault, kill, trials, hosts=hosts, spares=1, **more)
        yield f"{name}_shrink", partial(host_fault, kill, trials, hosts=hosts, spares=0, min_hosts=least, **more)
        yield f"{name}_grow", partial(grow, trials, hosts=hosts, min_hosts=least, **more)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="Muster alone, no peer installed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--length", type=int, help="tokens of a sequence; default: what makes a step take 0.3 s")
    parser.add_argument("--stages", action="store_true", help="where the time goes, by the event log; keys *_stages_ms")
    parser.add_argument("--slurm", action="store_true", help="on a Slurm of its own too (root; recovery_slurm.py)")
    arguments = parser.parse_args()
    global LENGTH
    if arguments.length:
        LENGTH = arguments.length
    else:
        calibrate()
    found = {"sequence_length": LENGTH}
    result = {"muster": found, "missing": {}, "machine": {"cpus": os.cpu_count(), "platform": platform.platform()}}
    for name, play in cases(arguments.trials):
        if arguments.only and name not in arguments.only:
            continue
        if name.startswith("tpu_") and importlib.util.find_spec("jax") is None:
            result["missing"][name] = "jax is not installed: pip install 'jax>=0.10.2,<0.11'"
            print(f"{name:10s} missing: {result['missing'][name]}", flush=True)
            continue
        FOUND_STAGES.clear()
        FOUND_COMPILING.clear()
        trials, step = play()
        times, lost = [t for t, _ in trials], [n for _, n in trials]
        found[f"{name}_s"] = round(statistics.median(times), 3)
        found[f"{name}_min_max_s"] = [round(min(times), 3), round(max(times), 3)]
        found[f"{name}_steps_lost"] = max(lost)
        if step is not None:
            found[f"{name}_step_s"] = round(step, 3)
        print(
            f"{name:10s} L median {statistics.median(times):.3f} s ({min(times):.3f}-{max(times):.3f}, n={len(times)})"
            f"  steps lost {max(lost)}" + (f"  step {step:.3f} s" if step else ""),
            flush=True,
        )
        if arguments.stages and FOUND_STAGES:
            found[f"{name}_stages_ms"] = {stage: round(s * 1e3, 1) for stage, s in medians(FOUND_STAGES).items()}
            for stage, ms in found[f"{name}_stages_ms"].items():
                print(f"    {stage:8s} {ms:7.1f} ms until {STAGES[stage]}", flush=True)
            for what in sorted({what for trial in FOUND_COMPILING for what in trial}):
                ms = statistics.median(trial.get(what, 0.0) for trial in FOUND_COMPILING) * 1e3
                found[f"{name}_compiling_ms"] = {**found.get(f"{name}_compiling_ms", {}), what: round(ms, 1)}
                print(f"    of the first steps, {what}: {ms:7.1f} ms", flush=True)
        write(arguments.json, result)
    if not arguments.quick:
        from peers.recovery import measure_peers

        result.update(measure_peers(arguments.trials, length=LENGTH))
        write(arguments.json, result)
    if arguments.slurm:
        import recovery_slurm

        result["slurm"] = recovery_slurm.measure(arguments.trials)
        write(arguments.json, result)


def write(path, result):
    """What is measured so far, whole at any moment: a case that fails later takes nothing away."""
    if path:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(result, indent=1) + "\n")
        new.replace(path)


if __name__ == "__main__":
    main()
