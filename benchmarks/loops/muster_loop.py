"""A rank of Muster's trainer without an agent, and the processor time of its steps.

    torchrun --nproc-per-node 2 muster_loop.py OUT.json --run-dir DIR        (DIR holds a ``resolved.json``)

What ``python -m muster.rank.worker`` runs; rank 0 writes OUT.json as the other loops do.
"""

import json
import os
import sys
import time

from meeting import meet


def main() -> int:
    from muster.rank import worker
    from muster.train.training_run import TrainingRun

    out = sys.argv.pop(1)
    seen = {"ends_ns": [], "cpu_ns": [], "tokens": [], "supervised": []}
    record = TrainingRun.record_step

    def noted(run, work, *given):
        record(run, work, *given)
        if run.world.rank == 0:
            meet(work.step)
        seen["ends_ns"].append(time.monotonic_ns())
        seen["cpu_ns"].append(time.process_time_ns())
        seen["tokens"].append(work.tokens)
        seen["supervised"].append(work.supervised_tokens)

    TrainingRun.record_step = noted
    code = worker.main()
    if os.environ["RANK"] == "0":
        with open(out, "w") as file:
            json.dump(seen, file)
    return code


if __name__ == "__main__":
    sys.exit(main())
