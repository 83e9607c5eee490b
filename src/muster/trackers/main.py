"""``python -m muster.trackers.main``: delivers a run's figures to its trackers until the run ends.

Started by the agent of rank 0's host. It reads ``RunOver`` from stdin and prints ``TrackerNote``; the end of stdin
ends it at once. Each tracker is called in a thread of its own: this one only waits, and can always leave.
"""

from __future__ import annotations

import argparse
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from muster.config.spec import RunSpec
from muster.core import processes, resolved_file
from muster.core.redact import hide_values
from muster.protocol.codec import encode, reader_of
from muster.protocol.pipes import RUN_OVER, TrackerNote
from muster.storage import run_secrets
from muster.trackers import TENSORBOARD, wanted
from muster.trackers.delivery import Delivery, FigureReader
from muster.trackers.services import RunFacts, connector

#: From the end of a run until its trackers have everything: what they do not have then stays in the event files. Less
#: than the 15 s that a Spot pod has to end in.
END_S = 8.0
#: Exit code: start another one (EX_TEMPFAIL of sysexits.h). 0: everything is delivered, or nothing ever can be.
AGAIN = 75


def begin(run_dir: Path, run_id: str, *, writer: str | None, report: Callable[[str], None]) -> list[Delivery]:
    """Start to deliver to each tracker of the run. ``writer``: see ``FigureReader``."""
    spec = RunSpec.model_validate_json(resolved_file.read(run_dir, patient=True))
    hidden = run_secrets.read(run_dir)
    hide_values(hidden.values())
    given = {**spec.env, **hidden}
    # The caller of ``muster track`` may have a newer key than the run.
    os.environ.update(given if writer is not None else {**given, **os.environ})
    # MLflow's client would try seven times, for four minutes: here a failed call is repeated in any case.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    config, environ = spec.model_dump(mode="json"), dict(os.environ)
    facts = RunFacts(run_id=run_id, name=spec.name, run_dir=run_dir, config=config, environ=environ)
    made = [
        Delivery(
            name,
            connect=connector(name, facts),
            reader=FigureReader(run_dir / "events", writer, spec.output.log_every_steps),
            record=run_dir / "trackers" / f"{name}.json",
            report=report,
            redoes=name == TENSORBOARD,
        )
        for name in wanted(spec)
    ]
    for each in made:
        threading.Thread(target=each.serve, name=each.name, daemon=True).start()
    return made


def finish(made: Sequence[Delivery], outcome: str, report: Callable[[str], None], *, within_s: float = END_S) -> bool:
    """Wait for the rest, and report what a tracker lacks then. Whether they have everything."""
    for each in made:
        each.finish(outcome)
    until = time.monotonic() + within_s
    while (late := [each for each in made if not each.ended]) and time.monotonic() < until:
        time.sleep(0.05)
    for each in late:
        step = max(each.delivered.newest.values(), default=None)
        has = "nothing" if step is None else f"the figures up to step {step}"
        report(f"{each.name} has {has} {within_s:.0f} s after the end of the run: muster track RUN sends the rest")
    return not late


def main() -> None:
    parser = argparse.ArgumentParser(description="deliver a Muster run's figures to its trackers")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--writer", required=True, help="of this host's event files")
    arguments = parser.parse_args()
    # Libraries print to stdout: theirs is the log from here on.
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    processes.forgive_outputs()
    # Behind the ranks. MUSTER_NICE: what the watchdog had before it raised its own priority.
    os.setpriority(os.PRIO_PROCESS, 0, min(19, int(os.environ.get("MUSTER_NICE", "0")) + 5))

    def report(text: str) -> None:
        print(encode(TrackerNote(text=text)).decode(), file=output)

    made = begin(arguments.run_dir, arguments.run_id, writer=arguments.writer, report=report)
    code: int | None = None
    while code is None:
        if select.select([0], [], [], 1.0)[0]:
            line = os.read(0, 4096)
            if line:
                finish(made, reader_of(RUN_OVER)(line.strip()).outcome, report)
            code = 0 if line else AGAIN
        elif any([each.is_stuck() for each in made]):  # each may have something to report
            code = AGAIN
        elif all(each.ended for each in made):
            code = 0
    os._exit(code)  # a thread may be held up in a tracker, and an exit handler of its library too


if __name__ == "__main__":
    main()
