"""States of a custom job, texts of its errors, and regions in turn."""

import json
from dataclasses import replace

import pytest
from fakes.discovery import folder

from muster.backends.google.request_log import NOTHING, Request
from muster.backends.vertex.job_state import Cause, cause, custom_job, sentence, web_links
from muster.backends.vertex.progress import LIST_LAG_S, Cancel, Create, Look, NoRoom, Over, Placed, next_step
from muster.core.types import JobState

NOW = 1_795_000_000.0
STOCK_OUT = (
    "Resources are insufficient in region: us-central1. Please try a different region or use a different accelerator."
)
QUOTA = (
    "The following quota metrics exceed quota limits: aiplatform.googleapis.com/custom_model_training_nvidia_h100_gpus"
)
HOST = "The replica workerpool1-1 exited with a non-zero status of 1. Termination reason: Error.\nTraceback ..."
MEMORY = "Replica workerpool0-0 ran out of memory and exited with a non-zero status of 137."


def record(state, *, number="7", region="us-central1", error=None, **changes):
    """As the API answers: times as text, an error of its own."""
    found = {
        "name": f"projects/123/locations/{region}/customJobs/{number}",
        "displayName": "llama",
        "state": f"JOB_STATE_{state}",
        "labels": {"muster-nonce": "n"},
        "createTime": "2026-11-18T10:00:00.123456Z",
        **changes,
    }
    return {**found, "error": {"code": error[0], "message": error[1]}} if error else found


def job(state, **changes):
    created = changes.pop("created_s", NOW - 60)
    ended = changes.pop("ended_s", None)
    return replace(custom_job(record(state, **changes)), created_s=created, ended_s=ended)


# ---------------------------------------------------------------- states


def test_every_state_of_the_api_has_a_meaning():
    documents = folder()
    if documents is None:
        pytest.skip("google-api-python-client is not installed")
    schemas = json.loads((documents / "aiplatform.v1.json").read_text())["schemas"]
    states = schemas["GoogleCloudAiplatformV1CustomJob"]["properties"]["state"]["enum"]
    assert len(states) == 12
    for state in states:
        found = job(state.removeprefix("JOB_STATE_"), ended_s=NOW)
        assert found.final == found.job_state.ended
        assert "does not know" not in sentence(found, NOW)


@pytest.mark.parametrize(
    ("state", "means"),
    [
        ("QUEUED", JobState.WAITING), ("PENDING", JobState.WAITING), ("PAUSED", JobState.WAITING),
        ("RUNNING", JobState.RUNNING), ("CANCELLING", JobState.RUNNING), ("SUCCEEDED", JobState.SUCCEEDED),
        ("CANCELLED", JobState.STOPPED), ("FAILED", JobState.FAILED), ("EXPIRED", JobState.FAILED),
        ("PARTIALLY_SUCCEEDED", JobState.FAILED), ("DEFROSTING", JobState.WAITING),
    ],
)  # fmt: skip
def test_states(state, means):
    assert job(state).job_state is means


def test_a_state_of_tomorrow_is_shown_and_ends_nothing():
    tomorrow = job("DEFROSTING")
    assert not tomorrow.final and "does not know: 'DEFROSTING'" in sentence(tomorrow, NOW)


def test_the_error_comes_a_minute_late():
    failed = job("FAILED", ended_s=NOW)
    assert cause(failed, NOW + 60) is Cause.NOT_YET_SAID
    assert "about a minute after" in sentence(failed, NOW + 60)
    assert cause(failed, NOW + 120) is Cause.UNKNOWN
    assert cause(job("EXPIRED"), NOW) is Cause.UNKNOWN, "a state whose end has no time is not waited for without end"


@pytest.mark.parametrize(
    ("code", "words", "why"),
    [
        (3, STOCK_OUT, Cause.STOCK_OUT),
        (8, "Job failed with a STOCKOUT error and could not be restarted.", Cause.STOCK_OUT),
        (8, QUOTA, Cause.QUOTA),
        (8, "", Cause.QUOTA),
        (3, HOST, Cause.HOST_EXIT),
        (3, MEMORY, Cause.MEMORY),
        (13, "Internal error occurred for the current attempt.", Cause.UNKNOWN),
    ],
)
def test_why_a_job_failed(code, words, why):
    failed = job("FAILED", error=(code, words), ended_s=NOW)
    assert cause(failed, NOW) is why
    assert why.elsewhere == (why in (Cause.STOCK_OUT, Cause.QUOTA))
    assert why.value in sentence(failed, NOW) and "\n" not in sentence(failed, NOW)


def test_a_hosts_exit_names_the_host_and_its_code():
    said = sentence(job("FAILED", error=(3, HOST), ended_s=NOW), NOW)
    assert said == "custom job 7 in us-central1 has failed: a host's program ended with an error: workerpool1-1 with 1"


def test_a_record_is_read_whatever_is_missing_or_odd():
    assert custom_job({}).state == "UNSPECIFIED" and sentence(custom_job({}), NOW)
    odd = {"state": 3, "name": None, "labels": [], "error": "no", "createTime": "yesterday", "endTime": 5}
    assert custom_job(odd).created_s is None and not custom_job(odd).final
    for code in ("eight", "8", 8.0, None, True, {}):
        assert custom_job({"state": "JOB_STATE_FAILED", "error": {"code": code, "message": "x"}}).code == 0
    nanoseconds = custom_job({"createTime": "2026-11-18T10:00:00.123456789Z", "updateTime": "2026-11-18T11:00:00Z"})
    assert nanoseconds.ended_s - nanoseconds.created_s == pytest.approx(3599.876544, abs=1e-3)
    assert web_links({"webAccessUris": {"workerpool0-0": "https://x", "workerpool1-0": 3}}) == {
        "workerpool0-0": "https://x"
    }


# ---------------------------------------------------------------- regions in turn

REGIONS = ("us-central1", "us-east4")
ASKED = Request(number=1, where="us-central1", asked_s=NOW - 60)


def step(asked, jobs=(), *, now_s=NOW, max_wait_s=7200.0):
    return next_step(REGIONS, asked, jobs, max_wait_s=max_wait_s, now_s=now_s)


def test_the_first_region_first():
    assert step([]) == Create(region="us-central1")


def test_a_lost_answer_is_looked_for_before_the_request_is_repeated():
    lost = replace(ASKED, asked_s=NOW)
    assert isinstance(step([lost], now_s=NOW + 1), Look)
    assert isinstance(step([lost], now_s=NOW + LIST_LAG_S - 1), Look)
    assert step([lost], now_s=NOW + LIST_LAG_S) == Create(region="us-central1", again=True)
    assert isinstance(step([lost], [job("QUEUED")], now_s=NOW + LIST_LAG_S), Look), "found: not made again"


def test_a_region_that_keeps_it_waiting_is_left_only_when_the_job_has_ended():
    waiting = job("QUEUED", created_s=NOW - 7200)
    assert step([ASKED], [replace(waiting, created_s=NOW - 7100)]) == Look(
        after_s=60.0, why="the job's state is QUEUED"
    )
    assert step([ASKED], [waiting]) == Cancel(name=waiting.name, leave=True)
    left = replace(ASKED, left=True)
    for state in ("QUEUED", "CANCELLING"):
        assert isinstance(step([left], [replace(waiting, state=state)]), Look), state
    assert step([left], [replace(waiting, state="CANCELLED")]) == Create(
        region="us-east4", nothing="the region kept the request waiting"
    )


def test_a_cancelled_job_may_have_got_its_machines_or_succeeded():
    left = replace(ASKED, left=True)
    assert isinstance(step([left], [job("RUNNING")]), Placed)
    assert isinstance(step([left], [job("SUCCEEDED")]), Over)


def test_a_job_that_somebody_else_cancelled_is_over():
    assert isinstance(step([ASKED], [job("CANCELLED")]), Over)


@pytest.mark.parametrize("error", [(3, STOCK_OUT), (8, QUOTA)])
def test_no_machines_moves_on_once_vertex_says_so(error):
    assert isinstance(step([ASKED], [job("FAILED", ended_s=NOW - 5)]), Look), "the error is not there yet"
    moved = step([ASKED], [job("FAILED", ended_s=NOW - 60, error=error)])
    assert isinstance(moved, Create) and moved.region == "us-east4" and moved.nothing


def test_an_error_of_ours_does_not_move_on():
    for error in ((3, HOST), (3, MEMORY), (13, "Internal error")):
        assert isinstance(step([ASKED], [job("FAILED", ended_s=NOW - 60, error=error)]), Over)


def test_a_refusal_moves_on_and_the_last_one_says_all_reasons():
    first = replace(ASKED, state=NOTHING, reason="the quota is too small")
    assert step([first]) == Create(region="us-east4", nothing="the quota is too small")
    second = Request(number=2, where="us-east4", asked_s=NOW)
    end = step([first, second], [job("FAILED", region="us-east4", ended_s=NOW - 60, error=(3, STOCK_OUT))])
    assert end == NoRoom(reasons=("us-central1: the quota is too small", "us-east4: the region had no machines"))


def test_of_two_jobs_of_one_request_the_one_that_counts_stays():
    older, younger = job("PENDING", number="7", created_s=NOW - 90), job("PENDING", number="8", created_s=NOW - 30)
    assert isinstance(step([ASKED], [older, younger]), Look), "either may claim the run: cancelling one might end both"
    owned = replace(ASKED, owner="8")
    assert step([owned], [older, younger]) == Cancel(name=older.name, leave=False)
    ending = replace(older, state="CANCELLING")
    assert step([owned], [ending, replace(younger, state="RUNNING")]) == Placed(job=replace(younger, state="RUNNING"))


def test_two_jobs_that_wait_too_long_are_both_ended():
    two = [job("QUEUED", number=number, created_s=NOW - 7200) for number in ("7", "8")]
    assert step([ASKED], two) == Cancel(name=two[0].name, leave=False)
    two[0] = replace(two[0], state="CANCELLING")
    assert step([ASKED], two) == Cancel(name=two[1].name, leave=True)


def test_unknown_and_paused_states_are_looked_at():
    for state in ("PAUSED", "DEFROSTING"):
        assert isinstance(step([ASKED], [job(state, created_s=NOW - 9e6)]), Look), state
