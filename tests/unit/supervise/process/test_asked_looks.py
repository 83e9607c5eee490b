"""Clients who ask what the hosts' hardware looks like."""

from muster.health.machine.report import read_probe
from muster.protocol.client import AskStatus, CheckHosts, SupervisorStatus
from muster.protocol.codec import MAX_BYTES, encode
from muster.protocol.to_supervisor import HostLooked, HostReady
from muster.protocol.values import HostLook
from muster.supervise.checks.asked import AskedLooks

STATUS = SupervisorStatus(phase="run", reason="", attempt=1, step=3)
LOOK = HostLook(part="passive", output="seen")


def test_hosts_are_asked_once_for_each_question_and_each_gets_its_answers():
    asked = []
    looks = AskedLooks(lambda host, message: asked.append((host, message.number)))
    one, other = CheckHosts(number=11), CheckHosts(number=12)
    for message in (one, other, one, AskStatus()):
        assert looks.answer(message, STATUS, ["host-0", "host-1"]).looks == {}
    assert asked == [("host-0", 11), ("host-1", 11), ("host-0", 12), ("host-1", 12)]
    assert looks.take("host-1", HostLooked(number=11, look=LOOK))
    assert looks.answer(one, STATUS, []).looks == {"host-1": LOOK} and looks.answer(other, STATUS, []).looks == {}
    assert looks.answer(AskStatus(), STATUS, []) == STATUS


def test_more_than_an_answer_can_hold_is_left_out_and_said_to_be_missing():
    looks = AskedLooks(lambda host, message: None)
    looks.answer(CheckHosts(number=5), STATUS, [])
    for number in range(9):
        looks.take(f"host-{number}", HostLooked(number=5, look=HostLook(part="passive", output="x" * (1 << 20))))
    answer = looks.answer(CheckHosts(number=5), STATUS, [])
    assert [len(one.output) > 0 for one in answer.looks.values()] == [True] * 6 + [False] * 3
    assert len(encode(answer)) <= MAX_BYTES
    assert read_probe(answer.looks["host-8"].output.encode(), host="host-8").missing


def test_what_a_host_saw_by_itself_is_the_state_machines():
    looks = AskedLooks(lambda host, message: None)
    assert not looks.take("host-0", HostLooked(look=LOOK)) and not looks.take("host-0", HostReady())


def test_old_questions_are_forgotten_and_late_answers_to_them_belong_to_nobody():
    looks = AskedLooks(lambda host, message: None)
    for number in range(1, 7):
        looks.answer(CheckHosts(number=number), STATUS, [])
    assert looks.take("host-0", HostLooked(number=1, look=LOOK))
    assert looks.answer(CheckHosts(number=6), STATUS, []).looks == {}
