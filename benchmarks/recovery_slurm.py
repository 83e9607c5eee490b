"""L on Slurm: Slurm's own requeue with plain torchrun against Muster, same cluster, same faults, same amount of work.

    python benchmarks/recovery_slurm.py --trials 3 --json out.json      # root; slurm-wlm, munge, iproute2

Four nodes in network namespaces (``tests/live/slurm_cluster.py``): three train, one is spare. L runs from the fault to
the end of the next step beyond the last one applied before it.

Granted to torchrun: a copy of the whole state at *every* step on the shared disk; a spare node that is idle, so
that the requeued job waits for nobody; and a Slurm that notices a lost node within SlurmdTimeout=10 and lets a
requeued job start after 5 s (``cred_expire=5``), where the defaults are 300 s and 120 s. Muster does not wait for
Slurm at all, so these settings do not touch it.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "live"))
from slurm_cluster import SlurmCluster, slurm_is_missing  # noqa: E402 (beside the tests)
from slurm_runs import User, recovery_s, run_file  # noqa: E402

LIMIT_S = 180.0
SETTLE_STEPS = 8
#: The shape of benchmarks/peers/recovery_worker.py.
MODEL = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 2048, "max_position_embeddings": 512,
}  # fmt: skip
TORCHRUN = """\
#!/bin/bash
#SBATCH --job-name=torchrun --nodes=3 --ntasks-per-node=1 --requeue --open-mode=append --exclusive
#SBATCH --output={folder}/torchrun.log
export GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --mpi=none {python} -m torch.distributed.run --nnodes=3 --nproc-per-node=1 --rdzv-backend=c10d \\
  --rdzv-id="$SLURM_JOB_ID.$SLURM_RESTART_COUNT" --rdzv-endpoint="$HEAD:29500" {worker} plain {folder}
"""


def spec(**changes):
    """A step of about 0.3 s on three ranks of two cores; the heartbeat limit is one that a loaded machine bears."""
    return run_file(
        model__config=MODEL, training__sequence_length=128, training__global_batch_size=12,
        training__micro_batch_size=2, training__exact=False, training__steps=10_000,
        data__sources=[{"type": "random", "rows": 4096}], resources__hosts=3, resources__ranks_per_host=1,
        resources__spare_hosts=1, recovery__heartbeat_timeout_s=1.0,
        checkpoint__snapshot_every_steps=1, **changes,
    )  # fmt: skip


def muster(cluster, folder, strike):
    """(L, steps applied twice) of one run of ours; ``strike(cluster, run)`` injects the fault."""
    user = User(cluster, folder)
    run = user.submit(spec())
    try:
        run.wait_for_step(SETTLE_STEPS)
        run.wait_until(run.spares, "a spare")
        attempt, at = max(event.attempt for event in run.events("step")), run.step()
        began_ns = time.time_ns()
        strike(cluster, run)
        run.wait_until(lambda: went_on(run, attempt), "the run going on", LIMIT_S)
        run.wait_for_step(at + 4, LIMIT_S)
        return recovery_s(run, began_ns)
    finally:
        user.end_all()


def went_on(run, attempt):
    """A step of a newer attempt; or another supervisor, where the lost node was the spare and nothing had to begin."""
    return any(event.attempt > attempt for event in run.events("step")) or len(run.events("supervisor.started")) > 1


def torchrun(cluster, folder, strike):
    """The same for Slurm's requeue of a plain torchrun job."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "torchrun.sh"
    worker = HERE / "peers" / "recovery_worker.py"
    script.write_text(TORCHRUN.format(folder=folder, python=sys.executable, worker=worker))
    job = cluster.ask("sbatch", "--parsable", str(script)).strip()
    try:
        wait_for(folder, SETTLE_STEPS)
        nodes = cluster.ask("squeue", "-h", "-j", job, "-o", "%N").strip()
        names = cluster.ask("scontrol", "show", "hostnames", nodes).split()
        began_ns = time.monotonic_ns()
        strike(cluster, names[-1])  # not the first one, which serves the rendezvous
        before = max(step for step, end in steps(folder) if end < began_ns)
        wait_for(folder, before + 1)
        first = min(end for step, end in steps(folder) if step > before and end > began_ns)
        again = {step for step, end in steps(folder) if end > began_ns and step <= before}
        return (first - began_ns) / 1e9, len(again)
    finally:
        cluster.ask("scancel", job)


def steps(folder):
    path = folder / "steps-rank0"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(words[0]), int(words[1])) for words in map(str.split, lines) if len(words) >= 2]


def wait_for(folder, step):
    until = time.monotonic() + LIMIT_S
    while max((number for number, _ in steps(folder)), default=0) < step:
        log = folder / "torchrun.log"
        assert time.monotonic() < until, f"no step {step}: {log.read_text()[-2000:] if log.exists() else 'no log'}"
        time.sleep(0.05)


# ---------------------------------------------------------------- faults


def cut_a_rank(cluster, run):
    """The link of a node that trains and does not supervise."""
    nodes = run.nodes()
    hosts = [host for _, (_, host) in sorted(run.ranks().items())]
    cluster.cut(next(nodes[host] for host in reversed(hosts) if nodes[host] != run.supervisor_host()))


def power_off_the_batch_node(cluster, run):
    """The node of the batch script, every ``srun`` and the supervisor."""
    cluster.power_off(run.supervisor_host())


def requeue(cluster, run):
    """The whole allocation is given back and granted again: from its checkpoint, after Slurm's own pause."""
    cluster.ask("scontrol", "requeue", run.jobs()[-1][0])


CASES = {
    "muster_cut": (muster, cut_a_rank),
    "torchrun_cut": (torchrun, lambda cluster, node: cluster.cut(node)),
    "muster_batch_node_off": (muster, power_off_the_batch_node),
    "muster_requeue": (muster, requeue),
}


def measure(trials, only=None):
    """Case -> L (median, least, most), steps applied twice, trials; a case that failed says why."""
    found = {}
    for name, (play, strike) in CASES.items():
        if only and name not in only:
            continue
        times, again, failures = [], [], []
        for trial in range(trials):
            with (
                tempfile.TemporaryDirectory() as folder,
                SlurmCluster(Path(folder) / "slurm", 4, gpus=0, slurmd_timeout_s=10) as cluster,
            ):
                try:
                    seconds, twice = play(cluster, Path(folder) / f"home{trial}", strike)
                except AssertionError as error:
                    failures.append(str(error)[:200])
                    continue
                times.append(seconds)
                again.append(twice)
        found[name] = {"failed": len(failures), **({"why": failures[-1]} if failures else {})}
        if times:
            found[name] |= {
                "L_s": round(statistics.median(times), 2), "min_max_s": [round(min(times), 2), round(max(times), 2)],
                "steps_again": max(again), "trials": len(times),
            }  # fmt: skip
        print(f"{name:22s} {found[name]}  load {os.getloadavg()[0]:.1f}", flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(CASES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if missing := slurm_is_missing():
        sys.exit(f"no Slurm here: {missing}")
    found = measure(arguments.trials, arguments.only)
    if arguments.json:
        arguments.json.write_text(json.dumps({"slurm": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
