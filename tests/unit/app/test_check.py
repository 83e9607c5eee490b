"""``muster check`` by its command line: captures by content, exit codes, JSON."""

import json

import pytest

from muster.app.inspect.check import Checked
from muster.cli import output
from muster.cli.main import run
from muster.core.typed_json import encode
from muster.health.machine.report import ProbeLine, Settings
from muster.health.verdicts import Finding, Verdict

SETTINGS = Settings(processors=8, memory_bytes=10**11, memory_available_bytes=10**10, clock_source="tsc")
XID = "[ 1000.000000] NVRM: Xid (PCI:0000:9b:00): {}, pid=4242, name=python, Ch 00000010\n"


def probe_output(*, whole=True):
    lines = [ProbeLine(rung="begin", plan=("settings",)), ProbeLine(rung="settings", settings=SETTINGS)]
    lines += [ProbeLine(rung="end")] if whole else []
    return b"".join(encode(line) + b"\n" for line in lines)


@pytest.fixture
def captures(tmp_path):
    for host in ("node-1", "node-2"):
        (tmp_path / host).mkdir()
        (tmp_path / host / "seen").write_bytes(probe_output())
    return tmp_path


def checked(capsys, *argv):
    code = run(["check", *map(str, argv)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_sound_captures(capsys, captures):
    code, out, _ = checked(capsys, "--from", captures)
    assert code == 0 and "node-1: healthy" in out and "node-2: healthy" in out


def test_a_fault_in_a_kernel_log_names_the_host(capsys, captures):
    (captures / "node-2" / "anything.txt").write_text(XID.format(79))
    code, out, _ = checked(capsys, "--from", captures, "--json")
    found = json.loads(out)
    assert code == 6 and found["verdict"] == "replace"
    assert {one["host"] for one in found["findings"] if one["verdict"] == "replace"} == {"node-2"}
    assert found["captures"]["node-2/anything.txt"] == "kernel log"


def test_the_users_own_error_costs_no_host(capsys, captures):
    (captures / "node-2" / "dmesg").write_text(XID.format(13))
    assert checked(capsys, "--from", captures)[0] == 0


def test_what_is_torn_or_unknown_is_incomplete(capsys, captures):
    (captures / "node-1" / "seen").write_bytes(probe_output(whole=False))
    assert checked(capsys, "--from", captures)[0] == 1
    (captures / "node-1" / "seen").write_bytes(b"my shopping list")
    assert checked(capsys, "--from", captures)[0] == 1


def test_hosts_are_picked_by_name(capsys, captures):
    (captures / "node-2" / "dmesg").write_text(XID.format(79))
    assert checked(capsys, "--from", captures, "--host", "node-1")[0] == 0
    code, _, err = checked(capsys, "--from", captures, "--host", "node-3")
    assert code == 2 and "node-3" in err and "node-1, node-2" in err


def test_nothing_there(capsys, tmp_path):
    assert checked(capsys, "--from", tmp_path / "none")[0] == 2
    assert checked(capsys, "--from", tmp_path)[0] == 2
    assert checked(capsys, "--from", tmp_path, "--passive")[0] == 2
    assert checked(capsys, "--host", "a")[0] == 2


def test_commands_of_the_back_end(capsys, captures, tmp_path):
    (captures / "node-2" / "dmesg").write_text(XID.format(79))
    run_file = tmp_path / "run.yaml"
    run_file.write_text('name: a\nbackend: slurm\ncommand: ["train.py"]\n')
    code, out, err = checked(capsys, run_file, "--from", captures / "node-2")
    assert code == 6, err
    assert "scontrol update nodename=" in out or "captures: replace" in out


def test_this_machine_without_loading_it(capsys):
    """Real: the probe starts, and the verdict is its own."""
    code, out, _ = checked(capsys, "--passive", "--raw")
    assert out.splitlines()[0].startswith('{"rung":"begin"') and '"rung":"end"' in out.splitlines()[-1]
    assert code in (0, 1, 6)


def test_what_is_the_same_of_several_gpus_is_one_line():
    slow = [
        Finding(
            check="gpu.clocks",
            verdict=Verdict.DRAIN,
            host="a",
            gpu=gpu,
            message=f"GPU {gpu}: braked",
            evidence=f"{gpu}",
        )
        for gpu in (0, 1, 2, 5)
    ]
    other = Finding(check="gpu.clocks", verdict=Verdict.DRAIN, host="a", gpu=3, message="GPU 3: hot", command="cool it")
    shown = Checked(findings=(*slow[:2], other, *slow[2:]), commands={}).lines()
    assert shown == [
        "a: drain",
        "  drain      GPUs 0-2, 5: braked",
        "  drain      GPU 3: hot",
        "             try: cool it",
    ]
    assert len(Checked(findings=tuple(slow)).to_json()["findings"]) == 4, "for programs each is one"


@pytest.mark.parametrize("columns", [80, 120])
def test_on_a_terminal_long_lines_go_on_below_their_text(capsys, captures, monkeypatch, columns):
    (captures / "node-1" / "kern.log").write_text(XID.format(119))
    monkeypatch.setattr(output, "width", lambda: columns)
    code, out, _ = checked(capsys, "--from", captures)
    assert code == 6 and max(map(len, out.splitlines())) <= columns
    monkeypatch.setattr(output, "width", lambda: None)
    _, whole, _ = checked(capsys, "--from", captures)
    assert out.split() == whole.split(), "nothing is lost"
    begins = [line[:13].strip() for line in out.splitlines() if line.startswith("  ")]
    assert set(begins) <= {*Verdict, ""}, "the column of verdicts holds nothing else"
