"""The trackers' process on a host: where rank 0 is, started again when it dies, waited for only at the end of a run."""

import math

import pytest
from fakes.host import VirtualHost

from muster.agent.decide import end_host
from muster.agent.programs.trackers import NAME, QUIET_S, RETRY_S
from muster.agent.values.actions import FinishTrackers, StopProgram
from muster.agent.values.events import ProgramEnded, ProgramLine
from muster.config.spec import RunSpec
from muster.protocol.codec import encode
from muster.protocol.pipes import TrackerNote
from muster.protocol.to_supervisor import StartFailed

SPEC = RunSpec.model_validate({"name": "case", "output": {"tracker": "mlflow", "tensorboard": False}})


@pytest.fixture
def host():
    return VirtualHost(spec=SPEC)


def ranks(host, *numbers, attempt=1):
    host.state.ranks.table.clear()
    for number in numbers:
        host.rank(90 + number, number, attempt)
    host.tick()


def test_it_runs_from_rank_0s_first_start_over_all_attempts(host):
    host.tick()
    ranks(host, 1)
    assert not host.started(NAME)
    for living in ((1, 0), (), (1,)):
        ranks(host, *living)
    ranks(host, 0, 1, attempt=2)
    (program,) = host.started(NAME)
    assert program.ends_with_session and program.env == "run" and not host.did(StopProgram)


def test_without_a_tracker_there_is_none():
    host = VirtualHost(spec=RunSpec.model_validate({"name": "case", "output": {"tensorboard": False}}))
    ranks(host, 0)
    assert not host.started(NAME)


def test_another_run_file_begins_another(host):
    ranks(host, 0)
    host.state.spec = SPEC.model_copy()
    host.tick()
    assert len(host.started(NAME)) == 2 and host.did(StopProgram)[0].leave


def test_one_that_dies_is_started_again_and_reported_once(host):
    ranks(host, 0)
    for _ in range(3):
        host.give(ProgramEnded(NAME, -9))
        ranks(host)  # whether or not ranks run just then
        assert host.state.trackers.retry_s == host.now_s + RETRY_S, "not at once"
        host.tick(RETRY_S)
        assert host.state.trackers.retry_s == math.inf
    assert len(host.started(NAME)) == 4
    restart = "the process on host-0 that serves trackers ended with code -9 and is restarted"
    assert host.notes == [restart]
    host.now_s += 2 * QUIET_S
    host.give(ProgramEnded(NAME, -9))
    assert host.notes == [restart] * 2


def test_one_that_has_nothing_more_to_do_is_not(host):
    ranks(host, 0)
    host.give(ProgramLine(NAME, encode(TrackerNote(text="begun"))), ProgramLine(NAME, b"a library's own line"))
    host.give(ProgramEnded(NAME, 0)).tick(1e6)
    assert len(host.started(NAME)) == 1 and host.notes == ["begun"]


def test_secrets_that_cannot_be_read_are_reported_and_looked_at_again(host):
    host.refused[NAME] = StartFailed(reason="others can read secrets.json", exit_code=5)
    ranks(host, 0)
    host.tick()
    assert host.notes == ["no figures for mlflow: others can read secrets.json"]
    host.refused.clear()
    host.now_s = host.state.trackers.retry_s
    host.tick()
    assert len(host.started(NAME)) == 2


def at_the_end(host, reason):
    host.state.leaving.reason = reason
    return end_host(host.state, now_s=host.now_s, wall_ns=0)


def test_the_end_of_the_run_is_passed_on_and_waited_for(host):
    ranks(host, 0)
    assert FinishTrackers("failed") in at_the_end(host, "failed")


def test_a_process_that_died_just_before_the_end_leaves_a_note(host):
    ranks(host, 0)
    host.give(ProgramEnded(NAME, -9))
    assert "muster track RUN" in str(at_the_end(host, "succeeded"))


@pytest.mark.parametrize("reason", ["the watchdog is gone", "preempted"])
def test_where_the_run_goes_on_nothing_is_waited_for(host, reason):
    ranks(host, 0)
    actions = at_the_end(host, reason)
    assert StopProgram(NAME, leave=True) in actions
    assert not [action for action in actions if isinstance(action, FinishTrackers)]
