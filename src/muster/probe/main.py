"""The probe's entry: ``python -P -m muster.probe.main --part passive|full [--folder DIR]``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from functools import partial

from muster.health.hardware.own_gpus import GPUS
from muster.health.machine.report import ProbeLine
from muster.probe import passive
from muster.probe.measurements import Measurement, Output, run_in_turn, run_together

#: Limits: of the whole passive part, and of each measurement of the loaded part (with the import of torch
#: and the making of contexts in the first).
PASSIVE_S = 2.0
LIMITS_S = {"torch": 60.0, "matmul": 30.0, "copies": 20.0, "all_reduce": 20.0, "loopback": 10.0}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Look at this machine; JSON lines.")
    parser.add_argument("--part", choices=("passive", "full"), default="passive")
    parser.add_argument("--folder", default="", help="where checkpoints would be written")
    parser.add_argument("--driver", default=str(GPUS), help="folder that a host with NVIDIA's driver has")
    given = parser.parse_args(argv)
    full = given.part == "full"
    output = Output(partial(_write, sys.stdout.fileno()))
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # torch's numbers of GPUs are then the driver's
    measurements: dict[str, Measurement] = {
        "gpus": partial(passive.gpus, PASSIVE_S - 0.2),
        "settings": passive.settings,
        "ports": passive.ports,
    }
    if os.path.isdir(given.driver):
        measurements["links"] = partial(passive.links, PASSIVE_S - 0.2)
        measurements["kernel_log"] = partial(passive.kernel_log, PASSIVE_S - 0.2)
    if given.folder:
        measurements["disk"] = partial(passive.disk, given.folder)
    loaded = _loaded() if full else {}
    output.begin((*measurements, *loaded))
    run_together(measurements, output, limit_s=PASSIVE_S if not full else 3 * PASSIVE_S)
    why = _why_not_loaded(output.sent)
    for name in loaded if why else ():
        output.add(ProbeLine(rung=name, failed=f"not tried: {why}"))
    run_in_turn(loaded, output)
    output.end()
    os._exit(0)  # a measurement that was given up may never return


def _why_not_loaded(sent: Sequence[ProbeLine]) -> str:
    """Why GPUs may not be loaded: a process uses one, or it is not known whether one does; empty: they may."""
    line = next((line for line in sent if line.rung == "gpus"), None)
    if line is None or line.failed:
        return "it is not known whether a process uses a GPU, and this would disturb it"
    if line.gpus is None:
        return ""  # neither a driver's library nor its tool
    user = next((pid for gpu in line.gpus.gpus for pid, _ in gpu.processes), None)
    if user is not None:
        return f"process {user} uses a GPU, and this would disturb it"
    if line.gpus.missing:
        return "it is not known whether a process uses a GPU that could not be read, and this would disturb it"
    return ""


def _loaded() -> dict[str, tuple[Measurement, float]]:
    names = tuple(LIMITS_S) if importlib.util.find_spec("torch") else ("torch",)
    return {name: (partial(_load, name), LIMITS_S[name]) for name in names}


def _load(name: str) -> ProbeLine:
    from muster.probe import compute

    if name == "torch":
        return ProbeLine(rung=name)
    measurements: dict[str, Measurement] = {
        "matmul": compute.matmul,
        "copies": compute.copies,
        "all_reduce": compute.all_reduce,
        "loopback": compute.loopback,
    }
    return measurements[name]()


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    main()
