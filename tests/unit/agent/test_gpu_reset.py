"""NVIDIA's tool resets GPUs; a tool that never ends does not hold the host."""

import pytest
from fakes.host import VirtualHost

from muster.agent.programs.preparation import RESET, RESET_LIMIT_S
from muster.agent.values.actions import StopProgram
from muster.agent.values.events import ProgramEnded, SupervisorMessage
from muster.protocol.to_agent import EndAttempt
from muster.protocol.to_supervisor import RanksEnded, StartFailed

END = SupervisorMessage(EndAttempt(attempt=1, why="i", reset=(0, 3)))


@pytest.mark.parametrize(
    ("code", "output", "ok", "evidence"),
    [
        (0, b"GPU 0\nAll done.\n", True, "All done."),
        (19, b"GPU 00000000:3B:00.0 is in use by other processes\n", False, "GPU 00000000:3B"),
        (6, b"", False, "exit code 6"),
    ],
)
def test_the_tools_last_line_is_the_evidence(code, output, ok, evidence):
    host = VirtualHost().supervised().give(END)
    (program,) = host.started(RESET)
    assert program.argv == ("nvidia-smi", "--gpu-reset", "-i", "0,3") and host.sent == []
    host.give(ProgramEnded(RESET, code, output))
    (ended,) = host.of(RanksEnded)
    assert ended.reset.ok is ok and ended.reset.evidence.startswith(evidence)
    ((kind, detail, _),) = host.logged
    assert (kind, detail["gpus"], detail["ok"]) == ("host.reset", [0, 3], ok)
    host.give(SupervisorMessage(EndAttempt(attempt=1, why="i")))
    assert host.of(RanksEnded)[1].reset is None, "told once"


def test_a_tool_that_waits_for_a_broken_driver_is_given_up():
    host = VirtualHost().supervised().give(END).tick(RESET_LIMIT_S - 1)
    assert host.sent == [] and host.due_s() <= host.now_s + 1
    host.tick(1.0)
    assert StopProgram(RESET, leave=True) in host.done
    assert host.of(RanksEnded)[0].reset.evidence == "nvidia-smi --gpu-reset has not ended within 120 s"


def test_without_the_tool_there_is_no_reset():
    host = VirtualHost().supervised()
    host.refused[RESET] = StartFailed(reason="No such file or directory")
    host.give(END)
    assert host.of(RanksEnded)[0].reset.evidence == "no reset: No such file or directory: nvidia-smi"
