"""``python benchmarks/gpu_hour PROBE OUT.json [--smoke]``: one probe; its figures and claims go to OUT.json."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]
from gpu_hour.finding import Findings, line  # noqa: E402

#: Probe -> its module; the function has the probe's name.
PROBES = {
    "machine": "machine", "fork": "machine", "nccl": "machine",
    "varlen": "kernels", "padding": "kernels", "loss": "kernels",
    "whole": "runs", "exact": "runs", "trace": "runs", "trace_8b_lora": "runs",
    "snapshots": "runs", "memory": "runs",
}  # fmt: skip


def main() -> None:
    name, out = sys.argv[1], Path(sys.argv[2])
    found = Findings()
    try:
        getattr(importlib.import_module(f"gpu_hour.{PROBES[name]}"), name)(found, smoke="--smoke" in sys.argv[3:])
    finally:  # what was measured before a failure counts too
        out.write_text(json.dumps(found.to_json(), indent=1) + "\n")
    for each in found.claims:
        print(line(each))


if __name__ == "__main__":
    main()
