"""``python -m muster.data --run-dir DIR``: prepare a run's data; the last line of stdout is the result as JSON.

Started by each host's agent, outside any process group, while torch is still being imported elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from pathlib import Path

from muster.config.spec import RunSpec
from muster.core.errors import MusterError
from muster.data.prepare import prepare


def main() -> None:
    """Exit code 0, or the error's; the JSON then holds ``error``, ``hint`` and ``exit_code``."""
    parser = argparse.ArgumentParser(description="prepare a Muster run's data")
    parser.add_argument("--run-dir", required=True, type=Path)
    run_dir = parser.parse_args().run_dir
    os.setpriority(os.PRIO_PROCESS, 0, int(os.environ.get("MUSTER_NICE", "0")))  # the agent's, not that of the watchdog
    spec = RunSpec.model_validate_json((run_dir / "resolved.json").read_text())
    try:
        result = prepare(spec, run_dir=run_dir)
    except MusterError as error:
        print(json.dumps({"error": str(error), "hint": error.hint, "exit_code": error.exit_code}))
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001 (the process's edge: the agent reports it)
        traceback.print_exc()
        print(json.dumps({"error": f"data preparation failed: {type(error).__name__}: {error}", "exit_code": 1}))
        sys.exit(1)
    stats = {key: value for key, value in result.stats.items() if isinstance(value, int | float | str | bool)}
    print(
        json.dumps(
            {
                **stats,
                "fingerprint": result.fingerprint,
                "tokens": int(stats.get("tokens", 0)),
                "sequences": len(result.train),
                "cached": bool(stats.get("cached", False)),
            }
        )
    )


if __name__ == "__main__":
    main()
