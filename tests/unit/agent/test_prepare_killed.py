"""Data preparation that is killed or fails: restarted, reported, tried again. And the host's setup before it."""

import pytest
from fakes.host import VirtualHost

from muster.agent.programs import preparation
from muster.agent.programs.preparation import NOTE_S, PREPARE, RETRY_S
from muster.agent.values.actions import CheckSetup, FindForkServer
from muster.agent.values.events import (
    ProgramEnded,
    ProgramLine,
    RunFileRead,
    SetupFound,
    SupervisorMessage,
)
from muster.config.spec import RunSpec
from muster.protocol.codec import encode
from muster.protocol.pipes import DataFailed, DataPrepared, Preparing
from muster.protocol.to_agent import Reload, StartAttempt
from muster.protocol.to_supervisor import HostPreparing, StartFailed

SPEC = RunSpec.model_validate({"name": "case", "model": {"source": "m"}, "data": {"sources": [{"type": "random"}]}})
LATER = SupervisorMessage(StartAttempt(attempt=1, contexts=()))


@pytest.fixture
def host():
    """Its preparation runs."""
    host = VirtualHost(spec=SPEC).supervised().give(SetupFound("", False))
    assert len(host.started(PREPARE)) == 1
    return host


def says(host, message):
    host.give(ProgramLine(PREPARE, encode(message)))


def ended(host, code=1):
    host.give(ProgramEnded(PREPARE, code))


def failures(host):
    return host.of(StartFailed)


def test_a_killed_preparation_is_restarted_once(host):
    for round_ in (1, 2):
        ended(host, -9)
        assert len(host.notes) == 1 and "signal 9" in host.notes[0]
        assert len(host.started(PREPARE)) == 2 and (round_ == 1) == (failures(host) == [])
    (failure,) = failures(host)
    assert "ended with code -9" in failure.reason and failure.exit_code == 1 and "lack of memory" in failure.hint


def test_its_own_error_is_reported_at_once(host):
    says(host, DataFailed(error="no such file", hint="name another", exit_code=2))
    ended(host)
    assert not host.notes and failures(host) == [StartFailed(reason="no such file", exit_code=2, hint="name another")]


def test_it_is_tried_again_by_itself_and_the_same_failure_told_once(host):
    """A disk was full when a restarted agent prepared: nothing else would ever start it again."""
    ended(host)
    host.tick()
    assert len(host.started(PREPARE)) == 1, "not at once"
    assert host.due_s() <= host.now_s + RETRY_S
    host.tick(RETRY_S)
    host.tick()
    assert len(host.started(PREPARE)) == 2
    ended(host)
    assert len(failures(host)) == 1


def test_an_attempt_that_starts_has_it_tried_and_told_again(host):
    host.give(LATER)
    assert len(host.started(PREPARE)) == 1, "the first one still runs"
    ended(host)
    host.give(LATER)
    ended(host)
    assert len(failures(host)) == 2 and failures(host)[0] == failures(host)[1]


def test_a_wrong_run_file_is_not_tried_again_until_an_attempt_starts(host):
    says(host, DataFailed(error="no such source", exit_code=2))
    ended(host, 2)
    host.tick(10 * RETRY_S)
    assert len(host.started(PREPARE)) == 1
    host.give(LATER)
    assert len(host.started(PREPARE)) == 2


def test_ranks_that_train_are_not_ended_by_a_restarted_agents_preparation(host):
    rank = host.rank()
    ended(host)
    assert failures(host) == [] and "the ranks on host-0 go on" in host.notes[0]
    del host.state.ranks.table[rank.pid]
    host.give(LATER)
    ended(host)
    assert len(failures(host)) == 1


@pytest.mark.parametrize(
    ("later", "note"),
    [
        (("fetch org/name (2.0 GB)", 3, 4), "host-0: fetch org/name (2.0 GB): 75%"),
        (("wait for host-1, which prepares", 0, 0), "host-0: wait for host-1, which prepares"),
    ],
)
def test_what_it_says_while_it_runs_is_told_and_noted_now_and_then(host, later, note):
    """A download of an hour: the supervisor hears that it moves, the run's log a line each minute."""
    host.give(ProgramLine(PREPARE, b"a package's own line"))
    says(host, Preparing(activity="fetch org/name (2.0 GB)", done=1, total=4))
    assert host.sent == [HostPreparing(activity="fetch org/name (2.0 GB)", done=1, total=4)] and not host.notes
    host.now_s += NOTE_S
    activity, done, total = later
    says(host, Preparing(activity=activity, done=done, total=total))
    assert host.sent[1:] == [HostPreparing(activity=activity, done=done, total=total)] and host.notes == [note]
    says(host, DataPrepared(fingerprint="f", tokens=1, sequences=1, cached=False, more={"weights_bytes": 4}))
    assert not host.state.preparation.prepared
    ended(host, 0)
    detail = {"fingerprint": "f", "tokens": 1, "sequences": 1, "cached": False, "weights_bytes": 4}
    assert ("data.prepared", detail, None) in host.logged and host.state.preparation.prepared and not failures(host)


def test_a_run_file_that_changes_is_prepared_again_and_earlier_failures_say_nothing(host):
    ended(host)
    host.state.preparation.prepared = True
    host.give(SupervisorMessage(Reload()))
    assert not host.state.preparation.prepared, "before the new file is there"
    host.answers[CheckSetup] = lambda action: [SetupFound("", False)]
    host.give(RunFileRead(SPEC.model_copy()))
    assert len(host.started(PREPARE)) == 2 and host.state.link.kept == {}


def test_secrets_that_cannot_be_read_are_reported_and_looked_at_again():
    host = VirtualHost(spec=SPEC).supervised()
    host.refused[PREPARE] = StartFailed(reason="others can read secrets.json", exit_code=5, hint="chmod 600")
    host.give(SetupFound("", False))
    (failure,) = failures(host)
    assert (failure.reason, failure.exit_code, failure.hint) == ("others can read secrets.json", 5, "chmod 600")
    host.refused.clear()
    host.tick(RETRY_S)
    assert len(host.started(PREPARE)) == 2


# ---------------------------------------------------------------- setup


def test_what_ranks_import_is_there_before_the_fork_server_starts():
    host = VirtualHost(spec=SPEC).supervised().give(SetupFound("abc", False))
    (program,) = host.started(preparation.SETUP)
    assert program.argv[-1] == "abc" and not host.did(FindForkServer) and not host.started(PREPARE)
    host.now_s += 2.5
    host.give(ProgramEnded(preparation.SETUP, 0))
    assert host.notes == ["setup on host-0 took 2.5 s"] and len(host.did(FindForkServer)) == 1
    assert len(host.started(PREPARE)) == 1


def test_one_that_was_done_is_not_done_again():
    host = VirtualHost(spec=SPEC).give(SetupFound("abc", True))
    assert not host.started(preparation.SETUP) and host.started(PREPARE)


@pytest.mark.parametrize("output", [encode(DataFailed(error="pip failed", hint="see logs", exit_code=2)), b"torn"])
def test_one_that_fails_is_reported_and_starts_nothing(output):
    host = VirtualHost(spec=SPEC).supervised().give(SetupFound("abc", False))
    host.give(ProgramEnded(preparation.SETUP, 1, b"a line\n" + output + b"\n"))
    (failure,) = failures(host)
    assert failure.reason.startswith("host-0: pip failed" if output[:1] == b"[" else "host-0: setup ended with code 1")
    assert not host.started(PREPARE) and not host.did(FindForkServer)
