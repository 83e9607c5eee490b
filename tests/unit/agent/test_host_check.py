"""The agent's look at its host: the real probe as a process, in the agent's loop; a stub of NVIDIA's library."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from muster.agent.hardware import host_check
from muster.agent.hardware.host_check import HostCheck, part_of
from muster.config.spec import RunSpec
from muster.health.machine.report import read_probe
from muster.protocol.to_agent import LookAtHost
from muster.supervise.recovery.host_health import fault_of, judge
from muster.transport.connections import ConnectionPool

STUB = Path(__file__).parents[1] / "probe" / "nvml_stub.c"


def spec(mode="passive", *, hosts=1, hours=None, **resources):
    return RunSpec.model_validate(
        {
            "name": "test",
            "command": ["train.py"],
            "check": {"mode": mode},
            "resources": {"ranks_per_host": 1, "hosts": hosts, **resources},
            "limits": {"max_hours": hours},
        }
    )


class Host:
    """An agent's part with its loop. ``program``: in place of the probe's module."""

    def __init__(self, tmp_path, *, of=None, alone=True, environ=None, program=None, cards=8):
        self.hub = ConnectionPool(token="0" * 32, on_accept=lambda peer: None, on_gone=lambda peer, why: None)
        self.sent, self.over, self.supervised, self.argv = [], 0, True, []
        self.environ, self.program = environ or {}, program
        folder = tmp_path / "gpus"
        folder.mkdir()
        for number in range(cards):
            (folder / f"0000:{16 * number + 11:02x}:00.0").mkdir()
        self.check = HostCheck(
            start_program=self.start, environ=self.environ, alone=alone, hub=self.hub, spec=lambda: of or spec(),
            send=self.sent.append, is_supervised=lambda: self.supervised, on_over=self.on_over, gpus=folder,
        )  # fmt: skip

    def start(self, log, module, *arguments, **streams):
        self.argv.append((log, module, *arguments))
        command = self.program or [sys.executable, "-P", "-m", module, *arguments]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, **self.environ}, **streams,
        )  # fmt: skip

    def on_over(self):
        self.over += 1

    def until(self, happened, limit_s=60.0):
        end = time.monotonic() + limit_s
        while not happened():
            assert time.monotonic() < end
            self.hub.run_once(max(0.0, min(0.2, self.check.due_s() - time.monotonic())))
            self.check.watch()

    def close(self):
        self.check.shutdown()
        self.hub.shutdown()


@pytest.fixture
def on_host(tmp_path):
    made = []

    def make(**more):
        made.append(Host(tmp_path, **more))
        return made[-1]

    yield make
    for host in made:
        host.close()


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    """A folder with libnvidia-ml.so.1."""
    pytest.importorskip("pynvml")
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    folder = tmp_path_factory.mktemp("nvml")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", STUB], check=True)
    return str(folder)


def test_a_faulty_gpu_is_told_before_the_host_is_ready(on_host, driver):
    host = on_host(environ={"LD_LIBRARY_PATH": driver, "MUSTER_STUB": "failed:6 ", "MUSTER_NODE": "node-7"})
    host.check.begin()
    assert not host.check.over and not host.check.loads
    host.until(lambda: host.sent)
    (looked,) = host.sent
    assert (looked.number, looked.look.part, looked.look.node, looked.look.own) == (0, "passive", "node-7", None)
    fault = fault_of(judge("host-1", looked.look, spec()), looked)
    assert fault is not None and (fault.verdict, fault.resettable) == ("replace", ())
    assert "GPU 6: a memory row could not be remapped" in fault.evidence
    assert host.check.over and host.over == 1 and host.argv[0][-2:] == ("--part", "passive")


def test_gpus_of_others_are_named_and_the_fault_is_theirs(on_host, driver):
    cards = "NVIDIA_VISIBLE_DEVICES"
    host = on_host(environ={"LD_LIBRARY_PATH": driver, "MUSTER_STUB": "failed:6 ", cards: "0,1"}, of=spec("full"))
    host.check.begin()
    assert not host.check.loads, "what others use is not loaded"
    host.until(lambda: host.sent)
    look = host.sent[0].look
    assert (
        look.own == ("0000:0b:00.0", "0000:1b:00.0") and fault_of(judge("host-1", look, spec()), host.sent[0]) is None
    )


def test_one_that_hangs_holds_up_no_start_and_is_incomplete(on_host, monkeypatch):
    monkeypatch.setattr(host_check, "PASSIVE_S", 0.3)
    monkeypatch.setitem(host_check.LIMIT_S, "passive", 1.5)
    begin = '{"rung":"begin","plan":["gpus"]}'
    host = on_host(program=["sh", "-c", f"echo '{begin}'; exec sleep 1000"])
    host.check.begin()
    host.until(lambda: host.check.over)
    host.until(lambda: host.over)
    assert not host.sent, "the start goes on without it"
    host.until(lambda: host.sent)
    look = host.sent[0].look
    assert "gpus: the probe ended before it" in read_probe(look.output.encode(), host="h").missing
    assert fault_of(judge("host-1", look, spec()), host.sent[0]) is None and host.over == 1


def test_a_full_one_holds_the_standbys_until_it_has_ended(on_host):
    host = on_host(of=spec("full"), program=["sh", "-c", "sleep 0.5; echo nothing"])
    host.check.begin()
    assert host.check.loads and not host.check.over
    host.until(lambda: host.over)
    assert not host.check.loads and host.check.over and host.sent[0].look.part == "full"


def test_whoever_asks_is_answered_and_nothing_is_loaded(on_host):
    host = on_host(of=spec("off"), program=["sh", "-c", "sleep 0.3; echo seen"])
    host.check.begin()
    assert not host.argv and host.check.over
    host.check.ask(LookAtHost(number=5))
    host.check.ask(LookAtHost(number=6))
    host.until(lambda: len(host.sent) == 2)
    assert [(one.number, one.look.part, one.look.output) for one in host.sent] == [
        (5, "passive", "seen\n"), (6, "passive", "seen\n")
    ]  # fmt: skip
    assert len(host.argv) == 1 and host.over == 0


def test_what_was_seen_without_a_supervisor_is_told_to_the_next_one(on_host):
    host = on_host(program=["echo", "seen"])
    host.supervised = False
    host.check.begin()
    host.until(lambda: host.check.over)
    assert not host.sent
    host.supervised = True
    host.until(lambda: host.sent)


def test_a_probe_that_cannot_be_started_says_so(on_host):
    host = on_host(program=["/nowhere/at/all"])
    host.check.begin()
    assert host.check.over
    host.check.ask(LookAtHost(number=5))
    assert [one.look.output for one in host.sent] == [""]


@pytest.mark.parametrize(
    ("of", "gpus", "whole", "part"),
    [
        (spec("auto"), False, True, None),  # a laptop
        (spec("auto", device="cpu"), True, True, None),
        (spec("auto"), True, True, "passive"),
        (spec("auto", accelerator="H100"), False, True, "passive"),  # where are they?
        (spec("auto", hosts=7), True, True, "passive"),
        (spec("auto", hosts=8), True, True, "full"),
        (spec("auto", hosts=8), True, False, "passive"),
        (spec("auto", hosts=8, hours=0.5), True, True, "passive"),
        (spec("auto", hours=8), True, True, "full"),
        (spec("passive", hosts=64), True, True, "passive"),
        (spec("passive"), False, True, "passive"),
        (spec("full"), True, True, "full"),
        (spec("full"), True, False, "passive"),
        (spec("off", hosts=64), True, True, None),
    ],
)
def test_what_is_looked_at(of, gpus, whole, part):
    assert part_of(of, gpus=gpus, ports=False, whole=whole) == part
