"""``python -m muster.data --run-dir DIR``: prepare a run's data; the last line of stdout is the result.

Started by each host's agent, outside any process group, while torch is still being imported elsewhere.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from muster.core.errors import MusterError, UsageError, install_command
from muster.core.processes import forgive_outputs
from muster.protocol.codec import encode
from muster.protocol.pipes import DataFailed, DataPrepared, Preparing

#: Seconds between two lines about one activity.
LINES_S = 10.0


def main() -> None:
    """Prints ``DataPrepared``, or ``DataFailed`` and exits with the error's code."""
    forgive_outputs("stderr")  # stdout speaks to the agent
    parser = argparse.ArgumentParser(description="prepare a Muster run's data")
    parser.add_argument("--run-dir", required=True, type=Path)
    run_dir = parser.parse_args().run_dir
    os.setpriority(os.PRIO_PROCESS, 0, int(os.environ.get("MUSTER_NICE", "0")))  # the agent's, not that of the watchdog
    try:
        # Imported here, so that a missing package is reported in the result, which is read before this program's log.
        from muster.config.spec import RunSpec
        from muster.core import resolved_file
        from muster.data.prepare import prepare
        from muster.data.weights.model_files import fetch_for_ranks

        spec, tell = RunSpec.model_validate_json(resolved_file.read(run_dir, patient=True)), told_to_agent()
        result = prepare(spec, run_dir=run_dir, progress=tell)
        fetched = {} if spec.model is None else fetch_for_ranks(spec.model, run_dir, tell)
    except MusterError as error:
        sys.exit(_fail(DataFailed(error=str(error), hint=error.hint, exit_code=error.exit_code)))
    except ModuleNotFoundError as error:
        traceback.print_exc()
        message, hint = (
            f"data preparation needs {error.name}, which is not installed",
            install_command("train,data"),
        )
        sys.exit(_fail(DataFailed(error=message, hint=hint, exit_code=UsageError.exit_code)))
    except Exception as error:  # noqa: BLE001 (the process's edge: the agent reports it)
        traceback.print_exc()
        sys.exit(_fail(DataFailed(error=f"data preparation failed: {type(error).__name__}: {error}")))
    found = {**result.stats, **fetched}
    stats = {key: value for key, value in found.items() if isinstance(value, int | float | str | bool)}
    tokens, cached = int(stats.pop("tokens", 0)), bool(stats.pop("cached", False))
    prepared = DataPrepared(
        fingerprint=result.fingerprint, tokens=tokens, sequences=len(result.train), cached=cached, more=stats
    )
    print(encode(prepared).decode())


def told_to_agent() -> Callable[[str, int, int], None]:
    """Progress into the log of this program and to the agent: of each activity at once, then each 10 s."""
    reported: dict[str, float] = {}

    def tell(activity: str, done: int, total: int) -> None:
        now = time.monotonic()
        if activity in reported and now - reported[activity] < LINES_S:
            return
        reported[activity] = now
        share = f": {done / total:.0%}" if done and total else ""
        print(f"{time.strftime('%H:%M:%S')} {activity}{share}", file=sys.stderr, flush=True)
        print(encode(Preparing(activity=activity, done=done, total=total)).decode(), flush=True)

    return tell


def _fail(failure: DataFailed) -> int:
    print(encode(failure).decode())
    return failure.exit_code


if __name__ == "__main__":
    main()
