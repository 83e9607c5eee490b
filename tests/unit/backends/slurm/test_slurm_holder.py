"""What a node makes of the holder of the run's lease: who is deposed, when, and by whom; who is cut off."""

import json

import pytest
from fakes.clock import VirtualClock

from muster.backends.host.run_state import RunState
from muster.backends.slurm.locate import SILENCE_S, Holder
from muster.core.errors import ConflictError
from muster.storage.store import open_store
from muster.supervise.process.lease import LeaseKeeper

HOLDER, CONTROLLER = ("192.0.2.1", 9), ("192.0.2.5", 6817)


class Node:
    """One in virtual time; ``reaches``: the addresses that accept."""

    def __init__(self, run_dir, number, reaches=(CONTROLLER,)):
        self.reaches, self.clock, self.asked = set(reaches), VirtualClock(), []
        (run_dir / "controllers.json").write_text(json.dumps([CONTROLLER]))
        self.holder = Holder(
            home=RunState(run_dir=run_dir), controllers=run_dir / "controllers.json", rank=number, cut_off_after_s=8.0,
            say=lambda text: None, connects=self.connects, clock=self.clock,
        )  # fmt: skip

    def connects(self, address):
        self.asked.append(address)
        return address in self.reaches

    def looks(self, *after_s, ended_pid=None):
        """What it makes of the lease, after so many seconds each."""
        found = []
        for each in after_s:
            self.clock.sleep(each)
            seen = self.holder.look(ended_pid)
            found.append("cut off" if seen.cut_off else seen.lease.kind)
        return found


@pytest.fixture
def keeper(tmp_path):
    """A lease whose holder lives, at ``HOLDER``."""
    found = LeaseKeeper(open_store(), str(tmp_path / "lease.json"))
    found.take(HOLDER)
    return found


def test_a_holder_that_answers_is_left_alone(tmp_path, keeper):
    node = Node(tmp_path, 1, reaches=[HOLDER])
    assert set(node.looks(*[1] * 100)) == {"held"} and set(node.asked) == {HOLDER}
    keeper.renew()


def test_a_silent_holder_is_borne_with_for_a_while_then_deposed(tmp_path, keeper):
    node = Node(tmp_path, 1)
    assert node.looks(0, SILENCE_S - 0.5) == ["held"] * 2
    assert CONTROLLER not in node.asked, "nobody is asked before it is this node's turn"
    keeper.renew()
    assert node.looks(1, 1) == ["vacated", "free"] and Node(tmp_path, 2).looks(0) == ["free"]
    with pytest.raises(ConflictError):
        keeper.renew()  # the old holder finds out at its next renewal, wherever it is
    assert LeaseKeeper(open_store(), str(tmp_path / "lease.json")).take(("192.0.2.2", 9)) == 2


def test_one_that_answers_the_second_question_is_left_alone(tmp_path, keeper):
    node = Node(tmp_path, 1)
    node.looks(0)
    answers = iter([False, True, True])  # holder, controller, holder
    node.holder.connects = lambda address: next(answers)
    assert node.looks(SILENCE_S + 1) == ["held"]
    keeper.renew()


def test_later_nodes_are_more_patient_and_without_a_known_controller_the_lease_decides(tmp_path, keeper):
    node = Node(tmp_path, 3, reaches=[])
    node.holder.controllers.unlink()
    assert node.looks(0, SILENCE_S + 1, 4, 1) == ["held", "held", "held", "vacated"]


def test_a_node_that_reaches_nobody_is_cut_off_and_deposes_nobody(tmp_path, keeper):
    node = Node(tmp_path, 1, reaches=[])
    assert node.looks(0, SILENCE_S + 1, 5) == ["held", "held", "cut off"], "its ranks may go on for a while"
    node.reaches.add(CONTROLLER)
    assert node.looks(1, SILENCE_S - 1, 2) == ["held", "held", "vacated"], "the holder gets its time anew"


def test_a_lease_that_was_given_back_is_free_and_so_is_one_of_an_own_dead_process(tmp_path, keeper):
    node, pid = Node(tmp_path, 1, reaches=[HOLDER]), RunState(run_dir=tmp_path).current_lease().pid
    assert node.looks(0, ended_pid=pid + 1) == ["held"] and node.looks(0, ended_pid=pid) == ["free"]
    keeper.give_back()
    assert Node(tmp_path, 1).looks(0) == ["free"]


def test_an_earlier_jobs_lease_does_not_stop_the_first_node(tmp_path, keeper):
    assert Node(tmp_path, 0, reaches=[HOLDER]).looks(0, 1) == ["free", "held"], "a living holder wins the race"


def test_the_time_in_which_this_node_supervised_is_not_the_next_holders_silence(tmp_path, keeper):
    node = Node(tmp_path, 1)
    assert node.looks(0) + node.looks(3600, SILENCE_S + 1, ended_pid=4321) == ["held", "held", "vacated"]


def test_a_folder_that_cannot_be_read_starts_nothing(tmp_path, keeper):
    (tmp_path / "lease.json").unlink()
    (tmp_path / "lease.json").mkdir()
    assert Node(tmp_path, 0).looks(0) == ["unknown"]
