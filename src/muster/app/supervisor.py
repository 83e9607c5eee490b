"""``python -m muster.app.supervisor``: the supervisor of a detached run. Its output is the run's own log."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from muster.app.inspect.event_format import line
from muster.core import environment
from muster.core.errors import MusterError
from muster.core.events import Event
from muster.supervise.process.server import Supervisor


def main() -> None:
    """Block until the run has ended; exit with its code."""
    parser = argparse.ArgumentParser(description="supervise one Muster run")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--run-id", required=True)
    arguments = parser.parse_args()
    try:
        given = environment.current()  # the back end says where agents on other hosts can reach us
        supervisor = Supervisor(
            run_dir=arguments.run_dir,
            on_event=_print,
            bind=given.bind,
            job=given.jobset,
            ignore_term=given.term_ignored,
        )
        sys.exit(supervisor.serve())
    except MusterError as error:
        print(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        sys.exit(error.exit_code)


def _print(event: Event) -> None:
    text = line(event)
    if text is not None:
        print(text, flush=True)


if __name__ == "__main__":
    main()
