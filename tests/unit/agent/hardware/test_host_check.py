"""The agent's look at its host: the real probe as a process with a stub of NVIDIA's library, and when it is asked."""

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.host import VirtualHost

from muster.agent.hardware.host_check import LIMIT_S, MOST_BYTES, NAME, PASSIVE_S, begin, is_over, loads_gpus, part_of
from muster.agent.values.actions import StopProgram
from muster.agent.values.events import (
    HardwareListed,
    ProgramEnded,
    SupervisorConnected,
    SupervisorMessage,
)
from muster.agent.values.state import HostContext
from muster.config.spec import RunSpec
from muster.health.machine.report import read_probe
from muster.protocol.to_agent import LookAtHost
from muster.protocol.to_supervisor import HostLooked, StartFailed
from muster.supervise.recovery.host_health import fault_of, judge

STUB = Path(__file__).parents[2] / "probe" / "nvml_stub.c"
GPUS = {f"0000:{16 * number + 11:02x}:00.0": number for number in range(8)}


def judged(looked, of):
    """What the supervisor makes of it."""
    return fault_of(judge("host-0", looked.look, of), looked)


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


class Host(VirtualHost):
    def __init__(self, of=None, *, own=None, environ=None, supervised=True):
        super().__init__(spec=of or spec(), environ=environ)
        if supervised:
            self.supervised()
        self.give(HardwareListed(GPUS, own, False, True))

    def begin(self):
        ctx = HostContext(self.state, self.now_s, 0)
        begin(ctx)
        for action in ctx.actions:
            self.done.append(action)
            self.give(*self._answers(action))
        return self

    def ends(self, output=b"seen\n", code=0):
        return self.give(ProgramEnded(NAME, code, output)).tick()

    @property
    def over(self):
        return is_over(HostContext(self.state, self.now_s, 0))

    @property
    def loads(self):
        return loads_gpus(self.state)

    @property
    def looked(self):
        return self.of(HostLooked)


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    """A folder with libnvidia-ml.so.1."""
    pytest.importorskip("pynvml")
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    folder = tmp_path_factory.mktemp("nvml")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", STUB], check=True)
    return str(folder)


def probed(host, driver, **environ):
    """What the real probe writes, in the host's own words."""
    (program,) = host.started(NAME)
    module, *arguments = program.argv
    env = {**os.environ, "LD_LIBRARY_PATH": driver, "MUSTER_STUB": "failed:6 ", **environ}
    done = subprocess.run([sys.executable, "-P", "-m", module, *arguments], capture_output=True, env=env, timeout=60)
    host.ends(done.stdout[:MOST_BYTES], done.returncode)


def test_a_faulty_gpu_is_told_before_the_host_is_ready(driver):
    host = Host(environ={"MUSTER_NODE": "node-7"}).begin()
    assert not host.over and not host.loads and host.started(NAME)[0].argv[-2:] == ("--part", "passive")
    probed(host, driver)
    (looked,) = host.looked
    assert (looked.number, looked.look.part, looked.look.node, looked.look.own) == (0, "passive", "node-7", None)
    fault = judged(looked, spec())
    assert fault is not None and (fault.verdict, fault.resettable) == ("replace", ())
    assert "GPU 6: a memory row could not be remapped" in fault.evidence and host.over


def test_gpus_of_others_are_named_and_the_fault_is_theirs(driver):
    own = frozenset(list(GPUS)[:2])
    host = Host(spec("full"), own=own).begin()
    assert not host.loads, "what others use is not loaded"
    probed(host, driver)
    assert host.looked[0].look.own == tuple(sorted(own)) and judged(host.looked[0], spec()) is None


def test_one_that_hangs_holds_up_no_start_and_is_incomplete():
    host = Host().begin()
    assert host.due_s() <= host.now_s + PASSIVE_S
    host.tick(PASSIVE_S)
    assert host.over and not host.looked, "the start goes on without it"
    host.answers[StopProgram] = lambda action: [ProgramEnded(NAME, None, b'{"rung":"begin","plan":["gpus"]}\n')]
    host.tick(LIMIT_S["passive"] - PASSIVE_S).tick()
    look = host.looked[0].look
    assert "gpus: the probe ended before it" in read_probe(look.output.encode(), host="h").missing
    assert judged(host.looked[0], spec()) is None


def test_a_full_one_holds_the_standbys_until_it_has_ended():
    host = Host(spec("full"))
    host.state.fork_server.peer, host.state.preparation.prepared = 1000, True
    host.begin().tick(20.0)
    host.with_fork_server()
    assert host.loads and not host.over and not [m for peer, m in host.to if peer == 1000]
    host.ends()
    assert not host.loads and host.over and host.looked[0].look.part == "full"
    assert [m for peer, m in host.to if peer == 1000], "standbys are forked now"


def test_whoever_asks_is_answered_and_nothing_is_loaded():
    host = Host(spec("off")).begin()
    assert not host.started(NAME) and host.over
    host.give(*(SupervisorMessage(LookAtHost(number=number)) for number in (5, 6)))
    host.ends()
    assert [(one.number, one.look.part, one.look.output) for one in host.looked] == [
        (5, "passive", "seen\n"), (6, "passive", "seen\n")
    ]  # fmt: skip
    assert len(host.started(NAME)) == 1


def test_what_was_seen_without_a_supervisor_is_told_to_the_next_one():
    host = Host(supervised=False).begin().ends()
    assert host.over and not host.looked
    host.give(SupervisorConnected(2000)).tick()
    assert len(host.looked) == 1


def test_a_probe_that_cannot_be_started_says_so():
    host = Host()
    host.refused[NAME] = StartFailed(reason="no such file")
    host.begin()
    assert host.over and host.state.hardware.check.ready_by_s == -math.inf
    host.give(SupervisorMessage(LookAtHost(number=5))).tick()
    assert [(one.number, one.look.output) for one in host.looked] == [(5, "")]


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
