"""``python -m muster.app.supervisor``: the supervisor of a detached run. Its output is the run's own log."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from muster.app.inspect.event_format import Narrator
from muster.app.run.event_writer import EventWriter, JsonLines, Lines
from muster.app.run.metrics_page import metrics_sinks
from muster.app.run.notifications import notification_sinks
from muster.app.run.repair import repair_run_file
from muster.app.run.revive import revivals
from muster.app.run.take_out import machines_taken_out
from muster.core import environment, processes, resolved_file
from muster.core.errors import MusterError
from muster.core.resolved_file import DamagedRunFile
from muster.storage import run_output
from muster.storage.run_registry import RunDir
from muster.supervise.process.supervisor import Supervisor
from muster.transport.listening import raise_soft_limit


def main() -> None:
    """Block until the run has ended; exit with its code."""
    processes.forgive_outputs()
    parser = argparse.ArgumentParser(description="supervise one Muster run")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--run-id", required=True)
    arguments = parser.parse_args()
    raise_soft_limit()
    given = environment.current()  # the back end says where agents on other hosts can reach us
    supervisor = Supervisor(
        run_dir=arguments.run_dir, bind=given.bind, job=given.jobset, ignore_term=given.term_ignored
    )
    if (repaired := _repaired(RunDir(path=arguments.run_dir, run_id=arguments.run_id))) is not None:
        supervisor.note(repaired)
    as_json = given.jobset and run_output.json_logs_of(arguments.run_dir)
    own_log = (JsonLines if as_json else Lines)(sys.stdout, Narrator(arguments.run_dir))
    sinks = [own_log, *revivals(supervisor), *metrics_sinks(supervisor)]
    sinks += [*machines_taken_out(supervisor), *notification_sinks(supervisor)]
    writer, said = EventWriter.of(supervisor, sinks), ""
    try:
        code = supervisor.serve()
    except MusterError as error:
        said = f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else "")
        code = error.exit_code
    if writer.close(code) and said:  # not into a pipe without a reader
        print(said, file=sys.stderr)
    sys.exit(code)


def _repaired(run: RunDir) -> str | None:
    """Repair the run's file, unchecked so far if a scheduler started this process. ``serve`` reports what is left."""
    try:
        resolved_file.read(run.path)
    except DamagedRunFile:
        from muster.app.run import resolve  # and all that submits

        with contextlib.suppress(MusterError):
            return repair_run_file(run, resolve.again)
    except OSError:
        pass
    return None


if __name__ == "__main__":
    main()
