"""A log with a damaged line: the state after what is whole; numbers rise, and steps are not counted down."""

from dataclasses import replace

import pytest
from fakes.virtual_run import cluster, events_of, kinds, machine, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.core.event_log import EventLog
from muster.supervise.recovery.phases import Adopting, Draining
from muster.supervise.replay.event_replay import EventReplay
from muster.supervise.replay.rebuild_state import rebuild_state


def a_log(fault=True):
    """Two hosts; one is lost and replaced, so there are two attempts and an incident; the run goes on."""
    found = cluster(spec(hosts=2, spare_hosts=1))
    if fault:
        found.at(10.0, lambda: found.kill_host("host-1"))
    found.run(until_s=30.0)
    return events_of(found)


EVENTS = a_log()
WHOLE = rebuild_state(EVENTS)


def facts(state):
    return state.attempt, state.next_incident, state.last_applied_step


def test_what_the_log_holds():
    assert facts(WHOLE)[:2] == (2, 2) and WHOLE.last_applied_step > 5 and WHOLE.ranks


@pytest.mark.parametrize("index", range(len(EVENTS)))
def test_one_lost_event_takes_back_no_number(index):
    left = [*EVENTS[:index], *EVENTS[index + 1 :]]
    attempt, incident, step = facts(rebuild_state(left))
    assert attempt >= 2 and incident == 2
    assert step == WHOLE.last_applied_step or EVENTS[index].kind == "step"


def test_an_attempt_whose_beginning_is_lost_is_not_begun_again():
    left = [event for event in EVENTS if not (event.kind == "attempt.started" and event.attempt == 2)]
    state = rebuild_state(left)
    assert state.attempt == 2 and set(state.ranks.values()) == {"host-0", "host-1"}, "as far as the log goes"
    assert isinstance(state.phase, Adopting)
    state = rebuild_state([event for event in EVENTS if event.kind != "attempt.started"])
    assert state.attempt == 3, "whoever runs ranks of attempt 2 is told to end them"


def without_the_change(events):
    """One bad block of the supervisor's file: the end of attempt 1 and the beginning of attempt 2 are lost."""
    lost = {("attempt.ended", 1), ("attempt.started", 2)}
    return [event for event in events if (event.kind, event.attempt) not in lost]


def test_the_ranks_of_an_attempt_that_is_not_known_are_ended():
    events = without_the_change(EVENTS)
    (step, *_) = (event for event in reversed(events) if event.kind == "step" and event.attempt == 2)
    state = rebuild_state([*events, replace(step, host="host-2", rank=1)])
    assert isinstance(state.phase, Adopting) and isinstance(state.phase.found, Draining)
    assert state.attempt == 3 and not state.ranks, "older than it is whatever a host runs"
    assert state.phase.found.next.hosts == ["host-0", "host-2"], "host-1 was lost; host-2 has taken steps"


def test_a_supervisor_that_does_not_know_the_newest_attempt_starts_another_one():
    of = spec(hosts=2, spare_hosts=1)
    found = cluster(of)
    found.at(10.0, lambda: found.kill_host("host-1"))
    found.at(20.0, lambda: found.lose_supervisor())
    found.at(
        25.0,
        lambda: found.replace_supervisor(machine(of, state=rebuild_state(without_the_change(events_of(found))))),
    )
    end = found.run(until_s=2000.0)
    assert end is not None and (end.exit_code, end.reason) == (0, "done after step 100")
    assert not kinds(found, "attempt.adopted")
    layouts = [(list(log.detail["hosts"]), log.detail["world_size"]) for _, log in kinds(found, "attempt.started")]
    assert layouts == [(["host-0", "host-1"], 2), (["host-0", "host-2"], 2), (["host-0", "host-2"], 2)]


@pytest.mark.parametrize("kind", ["attempt.started", "incident.decided", "incident.detected", "attempt.ended", "step"])
def test_a_supervisor_that_lacks_them_brings_the_run_to_its_end(kind):
    of = spec(hosts=2, spare_hosts=1)
    found = cluster(of)
    found.at(10.0, lambda: found.kill_host("host-1"))
    found.at(20.0, lambda: found.lose_supervisor())

    def takes_over():
        left = [event for event in events_of(found) if event.kind != kind]
        found.replace_supervisor(machine(of, state=rebuild_state(left)))

    found.at(25.0, takes_over)
    end = found.run(until_s=2000.0)
    assert end is not None and (end.exit_code, end.reason) == (0, "done after step 100")
    numbers = [log.detail["incident_id"] for _, log in kinds(found, "incident.detected")]
    assert len(numbers) == len(set(numbers))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_flipped_byte_of_a_file_is_read_past(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("events")
    log = EventLog("r", folder, "host-0", 1)
    for event in EVENTS:
        given = {name: value for name, value in vars(event).items() if name not in ("run_id", "seq", "_read")}
        if event.kind != "step":  # those of virtual ranks say less than real ones'
            log.append(given.pop("kind"), **given)
    log.close()
    whole = bytearray(log.path.read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    log.path.write_bytes(whole)
    past = EventReplay(folder)
    past.read_new_events()
    attempt, incident, _ = facts(rebuild_state(past.in_order()))
    assert attempt in (2, 3) and incident == 2
