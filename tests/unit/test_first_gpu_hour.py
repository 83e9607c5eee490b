"""``benchmarks/first_gpu_hour.py`` without its probes: bundles, limits, failures, what it brings."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import first_gpu_hour as hour
from gpu_hour import wheels
from gpu_hour.runs import read_trace


def test_each_bundle_ends_within_its_time() -> None:
    assert len(hour.COMMANDS) == 18
    for bundle in "ABCDEFGH":
        limits = [each.limit_s for each in hour.COMMANDS if each.bundle == bundle]
        assert 1 <= len(limits) <= 3 and sum(limits) <= hour.BUNDLE_S < 600


def test_a_failure_and_a_hang_cost_themselves_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = {
        "fails": "import sys; print('no such kernel'); sys.exit(3)",
        # What it starts has a session of its own, as a run's agents have, and outlives it.
        "hangs": "import subprocess, sys, time\n"
        "subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "open(sys.argv[2], 'w').write('{\"figures\": {\"half\": 1}}')\ntime.sleep(300)",
        "works": 'import json, sys\njson.dump({"figures": {"x": 1}}, open(sys.argv[2], "w"))',
    }
    commands = []
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        commands.append(hour.Command(name, "A", 2 if name == "hangs" else 60, "about", (str(tmp_path / name),)))
    monkeypatch.setattr(hour, "judged", lambda command, said, smoke: hour.Findings(figures=said))
    before = hour.children()
    other = subprocess.Popen(["sleep", "60"])  # of this process, not of a command
    options = argparse.Namespace(out=tmp_path / "out", wheels=None, bundle=None, smoke=False)
    assert hour.hour(list(enumerate(commands, 1)), options) == 1
    assert hour.children() - before == {other.pid}, "nothing that a command started is left, and nothing else ended"
    other.kill()
    other.wait()
    found = json.loads((tmp_path / "out" / "hour.json").read_text())
    assert found["fails"]["ended"] == "exit code 3" and "no such kernel" in found["fails"]["why"]
    assert "limit of 2 s" in found["hangs"]["ended"]
    assert found["hangs"]["figures"]["figures"] == {"half": 1}, "what was measured before counts"
    assert found["works"]["ended"] == "exit code 0" and found["works"]["why"] == ""


def test_a_bundle_starts_nothing_that_its_time_has_no_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hour, "BUNDLE_S", 10)
    options = argparse.Namespace(out=tmp_path, wheels=None, bundle="A", smoke=True)
    began = time.monotonic()
    assert hour.hour([(1, hour.COMMANDS[0])], options) == 1
    assert "not started" in json.loads((tmp_path / "hour.json").read_text())["machine"]["ended"]
    assert time.monotonic() - began < 30


def test_claims_of_the_benchmarks() -> None:
    trainer = next(each for each in hour.COMMANDS if each.name == "trainer-1b")
    rows = {"muster_compiled": {"tokens_per_s": 96.0, "mfu": {"causal": 0.3}}, "bare_compiled": {"tokens_per_s": 100.0}}
    said = hour.judged(trainer, {"shapes": {"1b": rows}}, smoke=False).claims
    assert [each["says"] for each in said] == ["refutes", "proves"]
    said = hour.judged(trainer, {"shapes": {"1b": {"muster_compiled": {"failed": "x"}}}}, smoke=False).claims
    assert [each["says"] for each in said] == ["open", "open"]
    recovery = next(each for each in hour.COMMANDS if each.name == "recovery")
    said = hour.judged(recovery, {"cases": {"rank_kill": {"l_s": 1.0, "steps_again": 1}}}, smoke=False).claims
    assert said[0]["says"] == "refutes"


def test_claims_of_the_looks() -> None:
    check = next(each for each in hour.COMMANDS if each.name == "check")
    figure = {"what": "matmul", "value": 700.0, "floor": 675.0, "unit": "TFLOP/s"}
    full = {"seconds": 12.0, "verdict": "healthy", "failed": {}, "figures": [figure, {**figure, "floor": None}]}
    passive = {"seconds": 1.5, "looks": 20, "alarms": 0, "first_alarm": []}
    said = hour.judged(check, {"passive": passive, "full": full}, smoke=False).claims
    assert [each["says"] for each in said] == ["proves"] * 5
    slow = {**figure, "value": 500.0}
    worse = {**full, "seconds": 31.0, "verdict": "drain", "figures": [slow, {**slow, "value": None}]}
    alarmed = {**passive, "seconds": 2.1, "alarms": 1, "first_alarm": ["drain: x"]}
    said = hour.judged(check, {"passive": alarmed, "full": worse}, smoke=False).claims
    assert [each["says"] for each in said] == ["refutes"] * 5 + ["open"]
    start = {"off": {"seconds": 9.0}, "passive": {"seconds": 9.5}, "full": {"seconds": 20.0}}
    beside = {"step_s": 0.1, "step_beside_s": 0.11, "verdicts": ["note", "reset"]}
    said = hour.judged(check, {"start": start, "beside": beside}, smoke=False).claims
    assert [each["says"] for each in said] == ["proves", "refutes", "refutes"]


def test_a_trace_is_read() -> None:
    def row(cat: str, name: str, start: float, duration: float) -> dict:
        return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration}

    table = read_trace([
        row("kernel", "gemm", 0, 400), row("kernel", "gemm", 300, 200),  # two streams overlap
        row("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 700, 300),
        row("cuda_runtime", "cudaStreamSynchronize", 10, 5), {"ph": "i", "name": "mark"},
    ])  # fmt: skip
    assert table["span_ms"] == 1.0 and table["busy_share"] == 0.8
    assert table["largest_gaps_us"] == [200.0] and table["waits"] == {"cudaStreamSynchronize": 1}
    assert table["copies_ms"]["DtoH"] == 0.3 and table["longest_ms"]["gemm"] == 0.6
    assert read_trace([])["busy_share"] is None


def test_a_kernels_kind_is_told_by_its_whole_name() -> None:
    late = "void at::native::(anonymous namespace)::" + "of_a_long_name_" * 3 + "multi_tensor_apply_kernel"
    names = (late, "void pytorch_flash::flash_fwd_kernel", "nvjet_sm90_tst_256x128", "triton_poi_fused_add_1", "copy")
    rows = [{"ph": "X", "cat": "kernel", "name": name, "ts": 0, "dur": 1000 * n} for n, name in enumerate(names, 1)]
    kinds = read_trace(rows)["kinds_ms"]
    assert kinds == {"attention": 2.0, "matrices": 3.0, "triton": 4.0, "optimizer": 1.0, "other": 5.0}


def test_what_is_brought_is_what_the_lock_has_for_that_python() -> None:
    older, newer = wheels.pinned("3.11"), wheels.pinned("3.12")
    assert {"pydantic", "pydantic-core", "ruamel-yaml", "transformers", "annotated-types"} <= older.keys()
    assert "torch" not in older and "pyarrow" not in older
    assert older["numpy"].split()[0] != newer["numpy"].split()[0], "the lock has one for 3.11 and one for later ones"
    assert all("--hash=sha256:" in lines and " ; " not in lines for lines in newer.values())


def test_what_the_image_has_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "is_here", lambda package: package != "xxhash")
    asked: list[list[str]] = []
    monkeypatch.setattr(wheels.subprocess, "run", lambda command, check: asked.append(command))
    assert wheels.install(tmp_path, tmp_path / "site") == "brought: xxhash"
    assert asked[0][-1].startswith("xxhash==") and "--no-index" in asked[0]
