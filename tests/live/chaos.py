"""Shared by the chaos tests: audited runs, reference results, a training script that fails on request."""

import json
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

from cluster import LiveRun, spec_of

from muster.config.spec import RunSpec
from muster.report import api
from muster.report.audit.invariants import broken, check

RECOMPUTE = Path(__file__).parents[2] / "tools" / "recompute_goodput.py"

#: A script as a user would write it: 40 steps over gloo, and faults at steps 12, 18, 24... on rank 1 (``evaluate``:
#: no fault, 3 s of something else on both). A file remembers each that was done; only ``always`` is done again.
SCRIPT = """
import ctypes, resource, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import muster.run

faults, done = dict(zip(range(12, 40, 6), sys.argv[1].split(","))), Path(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
weights = torch.zeros(8, dtype=torch.float64)
step = muster.run.restore({"weights": weights})


def evaluate():
    for _ in range(60):
        time.sleep(0.05)
        muster.run.progress()


def fail(how):
    if how == "always":
        raise ValueError("bad row 17")
    if (done / how).exists():
        return
    (done / how).touch()
    if how == "once":
        raise ValueError("a passing trouble")
    if how == "gil":
        ctypes.PyDLL(None).sleep(600)  # a PyDLL call keeps the GIL: no thread of this process runs
    if how == "livelock":
        while True:  # its link's thread goes on beating
            time.sleep(0.01)
    if how == "memory":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
        torch.ones(1 << 28)


while step < 40:
    if muster.run.should_stop():
        break
    step += 1
    if faults.get(step) == "evaluate":
        evaluate()
    elif step in faults and rank == 1:
        fail(faults[step])
    gradient = torch.full((8,), float(step * (rank + 1)), dtype=torch.float64)
    dist.all_reduce(gradient)
    weights += gradient * 0.01
    time.sleep(0.02)
    muster.run.save(step, {"weights": weights})
    muster.run.heartbeat(step, loss=float(weights.sum()), tokens=16)
muster.run.finish(step, {"weights": weights})
"""

#: The loss after step 40 of the script above, by hand: 8 * 0.01 * 3 * (1 + ... + 40).
SCRIPT_LOSS = 8 * 0.01 * 3 * 820


def script_spec(folder: Path, *faults: str, **recovery) -> RunSpec:
    """A run of ``SCRIPT`` on two ranks."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "done").mkdir()
    return RunSpec.model_validate(
        {
            "name": "script",
            "command": [str(folder / "script.py"), ",".join(faults), str(folder / "done")],
            "resources": {"ranks_per_host": 2, "device": "cpu", "threads_per_rank": 1},
            "recovery": {"heartbeat_timeout_s": 2.0, "grace_s": 20.0, **recovery},
            "checkpoint": {"every_steps": 0},
        }
    )


class Judged(LiveRun):
    """A run whose event log is audited when it is over, in addition to the test's own assertions.

    Every step's state is hashed. A run that ended well is compared with the unfailed run of the same model and data,
    step by step, where ``References`` made one; the judge knows which layouts promise the same bits.
    """

    unfailed: ClassVar[dict[str, Path]] = {}

    def __init__(self, directory, spec, **options):
        training = spec.training.model_copy(update={"state_hash_every_steps": 1})
        super().__init__(directory, spec.model_copy(update={"training": training}), **options)

    def __exit__(self, *exception):
        super().__exit__(*exception)
        if exception[0] is None:
            ended = self.events("run.finished")
            well = bool(ended) and ended[-1].detail["outcome"] == "succeeded"
            reference = self.unfailed.get(self.course_key()) if well else None
            problems = [*self.broken(reference), *self.unaccounted()]
            assert problems == [], "\n".join([*problems, self.story()])

    def broken(self, reference):
        """What the offline checker says against the run."""
        return broken(check(self.dir, reference=reference))

    def course_key(self):
        """What determines the results of a run, independent of its number of hosts."""
        return json.dumps([self.spec.model_dump(mode="json")[part] for part in ("model", "data", "training")])

    def unaccounted(self):
        """Errors of the ledger: host-time that does not add up, or figures that differ from the second script's."""
        found = api.load(self.dir).to_json()
        error = found["host_time"]["identity_error"]
        problems = [] if error < 1e-9 else [f"host-time by category is off by {error:g} of what was purchased"]
        (self.dir / "report.json").write_text(json.dumps(found))
        told = subprocess.run(
            [sys.executable, RECOMPUTE, self.dir, "--report", self.dir / "report.json"],
            capture_output=True,
            text=True,
            check=False,
        )
        return problems if told.returncode == 0 else [*problems, f"the second script disagrees: {told.stdout}"]

    def ended(self, code=0, timeout_s=180):
        assert self.wait(timeout_s) == code, self.story()

    def verdict(self):
        return self.events("run.finished")[-1].detail["reason"]


class References:
    """Final hash, losses and folder of unfailed runs, each run once.

    Always on one host: neither the number of hosts nor saves may change a bit, and every test that has several hosts,
    or saves, and compares with these proves it.
    """

    def __init__(self, factory):
        self._factory, self._found = factory, {}

    def __call__(self, hosts, per_host, **changes):
        key = (hosts * per_host, tuple(sorted(changes.items())))
        if key not in self._found:
            # A machine that is very busy must not fail what nothing happens to.
            calm = {"recovery.heartbeat_timeout_s": 30.0, "resources.hosts": 1}
            spec = spec_of(**{**changes, **calm, "resources.ranks_per_host": hosts * per_host})
            with Judged(self._factory.mktemp("reference"), spec) as run:
                run.start()
                run.ended(timeout_s=600)
                self._found[key] = (run.final_hash(), run.losses(), run.dir)
            Judged.unfailed[run.course_key()] = run.dir
        return self._found[key]
