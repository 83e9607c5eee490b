"""Captured files are known by what is in them."""

import json

import hardware_captures
import pytest
from hardware_captures import ALL_GATHER, IBSTAT_DOWN, SMI_4090, SMI_H100, XID_119, capture
from hypothesis import given
from hypothesis import strategies as st
from smi_sample import report

from muster.health import recognise as recognising
from muster.health.hardware.error_table import OwnNumbers
from muster.health.recognise import Expected, kind_of, recognise
from muster.health.verdicts import Verdict, exit_code, worst

XID = "[ 5140.9] NVRM: Xid (PCI:0000:1a:00): 79, pid=7, name=python, GPU has fallen off the bus.\n"
QUIET = "[    0.0] Linux version 6.8.0\n[    1.5] usb 1-1: new device\n"
IBSTAT = (
    "CA 'mlx5_0'\n\tCA type: MT4129\n\tNumber of ports: 1\n\tPort 1:\n\t\tState: Active\n\t\tPhysical state: LinkUp\n"
    "\t\tRate: 400\n\t\tLink layer: InfiniBand\n"
)
STACK = 'Process 4711: python train.py\nPython v3.11.7\n\nThread 4711 (idle): "MainThread"\n    step (train.py:41)\n'


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (report(), recognising.QUERY.name),
        ("index, name, uuid\n0, x, GPU-0\n", recognising.CSV.name),
        (XID, recognising.KERNEL_LOG.name),
        (QUIET, recognising.KERNEL_LOG.name),
        ("4,1,1,-;usb 1-1: new device\n4,2,9,-;usb 1-1: gone\n", recognising.KERNEL_LOG.name),
        ("2026-02-23T16:24:18+0000 node-1 kernel: usb 1-1: new device\n", recognising.KERNEL_LOG.name),
        (IBSTAT, recognising.IBSTAT.name),
        ("/sys/class/infiniband/mlx5_0/ports/1/state:4: ACTIVE\n", recognising.SYSFS.name),
        ("GPU 0: NVIDIA L4 (UUID: GPU-0)\n\t Link 0: 25 GB/s\n", recognising.NVLINK.name),
        ("#  size  count  type  busbw\n", recognising.NCCL_TESTS.name),
        ("● nvidia-fabricmanager.service\n Active: active (running)\n", recognising.FABRIC_MANAGER.name),
        (STACK, recognising.HANG.name),
        (json.dumps({"version": "2.10", "entries": [], "pg_config": {}}), recognising.HANG.name),
        ("", ""),
        ("hello\n", ""),
        ("2026-02-23 16:24:18 INFO train: step 7\n" * 9, ""),
        ('{"a": 1}', ""),
        ("\x00\x01\x02", ""),
    ],
)
def test_kinds(text, kind):
    assert kind_of(text.encode()) == kind


def test_names_of_files_mean_nothing_and_folders_name_hosts():
    """A kernel log needs nvidia-smi's addresses to name a GPU, whichever file comes first."""
    found = recognise(
        [("node-3/a.txt", XID.encode()), ("node-3/ibstat", report().encode()), ("node-4/x", XID.encode())]
    )
    assert found.kinds == {"node-3/a.txt": "kernel log", "node-3/ibstat": "nvidia-smi -q", "node-4/x": "kernel log"}
    lost = [one for one in found.findings if one.check == "gpu.xid"]
    assert [(one.host, one.gpu, one.verdict) for one in lost] == [
        ("node-3", 1, Verdict.REPLACE),
        ("node-4", None, Verdict.REPLACE),
    ]
    assert exit_code(found.findings) == 6


def test_what_is_of_no_known_form_is_said_and_never_healthy():
    for content in (b"", b"\n", b"hello\n", b"\xff\xfe\x00"):
        (found,) = recognise([("dmesg", content)]).findings
        assert found.verdict is Verdict.INCOMPLETE and "dmesg" in found.message
    assert exit_code(recognise([]).findings) == 1, "nothing was looked at"


def test_the_machines_row_and_the_run_file_count():
    files = [("a", report().encode()), ("b", XID.encode()), ("c", IBSTAT.encode())]
    assert worst(recognise(files[:1], expected=Expected(gpus=8)).findings) is Verdict.REPLACE
    assert worst(recognise(files[2:], expected=Expected(ports=8, port_gbps=400)).findings) is Verdict.REPLACE
    ignored = recognise(files[1:2], own=OwnNumbers(ignore=frozenset({79})))
    assert exit_code(ignored.findings) == 0


def test_a_culprit_of_a_hang_is_noted_and_costs_no_host():
    found = recognise([("rank-0.txt", STACK.encode())])
    assert found.analysis is not None
    assert not any(one.verdict.faulty for one in found.findings)


@given(st.sampled_from([report(), XID * 2, IBSTAT, STACK]), st.data())
def test_a_capture_that_is_cut_raises_nothing_and_is_not_healthy(text, data):
    end = data.draw(st.integers(0, len(text) - len(" None\n\n")))
    verdict = worst(recognise([("x", text[:end].encode())]).findings)
    assert verdict is not Verdict.HEALTHY


@given(st.binary())
def test_no_bytes_raise(content):
    recognise([("x", content), ("x/y", b"NVRM: " + content), ("z", report().encode() + content)])


def test_a_folder_of_real_captures():
    names = (XID_119, SMI_4090, SMI_H100, IBSTAT_DOWN, ALL_GATHER)
    found = recognise([(f"{number}/x", capture(name).encode()) for number, name in enumerate(names)])
    assert list(found.kinds.values()) == ["kernel log", "nvidia-smi -q", "nvidia-smi -q", "ibstat", "nccl-tests"]
    by_host = {str(number): worst(one for one in found.findings if one.host == str(number)) for number in range(4)}
    assert by_host == {"0": "reset", "1": "healthy", "2": "drain", "3": "note"}


def test_the_recorded_flight_recorders_name_a_culprit():
    folder = hardware_captures.ORACLES / "flight_recorder"
    files = [(path.name, path.read_bytes()) for path in sorted(folder.rglob("*.json"))]
    if not files:
        pytest.skip("no recorded flight recorders at hand")
    found = recognise(files)
    assert set(found.kinds.values()) == {recognising.HANG.name}
    assert found.analysis is not None and found.analysis.culprits
