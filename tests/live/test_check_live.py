"""A run's own look at its hosts, and ``muster check RUN`` beside it: real processes, a stub of NVIDIA's library.

The stub stands for a driver with eight GPUs; the run itself trains on the processor.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from verbs import RUN_FILE, Shell

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]

STUB = Path(__file__).parents[1] / "unit" / "probe" / "nvml_stub.c"


def test_a_runs_hosts_before_the_start_and_beside_the_training(shell: Shell) -> None:
    pytest.importorskip("pynvml")
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", shell.folder / "libnvidia-ml.so.1", STUB], check=True)
    shell.env |= {"LD_LIBRARY_PATH": str(shell.folder), "MUSTER_STUB": "narrow:6 "}
    (shell.folder / "run.yaml").write_text(f"{RUN_FILE}check: {{mode: passive}}\n")
    shell.run("submit", "run.yaml", "run_dir=there", "resources.ranks_per_host=1")
    shell.wait_for_step(2)

    fault = "GPU 6: PCIe link of 8 of 16 lanes"
    (event,) = map(json.loads, shell.run("events", "there", "--kind", "host.check", "--json").stdout.splitlines())
    assert (event["host"], event["detail"]["part"], event["detail"]["verdict"]) == ("host-0", "passive", "drain")
    assert event["detail"]["findings"][0] == fault
    assert f"drain: {fault}" in shell.run("logs", "there").stdout, "who trains is told, and the host still works"

    found = json.loads(shell.run("check", "there", "--json", code=6).stdout)
    (drained,) = [one for one in found["findings"] if one["verdict"] == "drain"]
    assert (found["verdict"], drained["host"], drained["message"]) == ("drain", "host-0", fault)
    table = shell.run("check", "there", code=6).stdout.splitlines()
    assert table[0] == "host-0: drain" and fault in table[1]
    now = shell.status("there")
    assert (now["state"], now["attempt"]) == ("running", 1), "nobody was disturbed"

    shell.run("stop", "there")
    over = shell.run("check", "there", code=2)
    assert "has ended: muster stop" in over.stderr
