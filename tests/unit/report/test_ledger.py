"""The ledger of a made-up run whose every second is known."""

import faulty_run
import pytest
from faulty_run import RUN_ID, TOKENS, write

from muster.report import api


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    write(place / "events")
    return place


@pytest.fixture(scope="module")
def found(run_dir):
    return api.load(run_dir).to_json()


def test_identity_closes_and_purchased_time_is_what_was_held(found):
    held = (214 - 20) + (180 - 22) + (214 - 25)
    assert found["host_time"]["purchased_host_s"] == pytest.approx(held, abs=1e-9)
    assert sum(spent["host_ns"] for spent in found["categories"].values()) == found["host_time"]["purchased_host_ns"]
    assert found["host_time"]["identity_error"] == 0.0
    assert found["host_time"]["queue_s"] == pytest.approx(20.0)


def test_each_category_holds_the_seconds_that_were_put_there(found):
    spent = {name: found["categories"][name]["host_s"] for name in found["categories"]}
    assert spent["provision"] == pytest.approx(15.0)
    assert spent["spare"] == pytest.approx(163 - 40)
    assert spent["out"] == pytest.approx(180 - 160.02)
    assert spent["eval"] == pytest.approx(2 * 3.0)
    assert spent["redone"] == pytest.approx(2 * 10.0)  # steps 41 to 45
    assert spent["unfinished"] == pytest.approx(2 * 1.0)  # half of step 26
    assert spent["detect"] == pytest.approx(2 * (0.5 + 4.0))
    assert spent["idle"] == pytest.approx(2 * (214 - 208.5))
    assert spent["straggler"] == pytest.approx(2 * 3 * 1.5, rel=0.1)
    assert spent["unattributed"] == 0


def test_redone_steps_count_once(found):
    assert found["tokens"] == 60 * TOKENS
    assert found["steps"] == 60
    assert found["token_counts"]["recomputed"] == 5 * TOKENS


def test_goodput_is_tokens_against_the_reference_rate(found):
    rate = found["goodput"]["reference"]["tokens_per_s"]
    assert rate == pytest.approx(TOKENS / 1.97, rel=1e-6)
    assert found["goodput"]["active"] == pytest.approx(60 * TOKENS / rate / (214 - 20), rel=1e-9)
    assert found["goodput"]["purchased"] == pytest.approx(60 * TOKENS / (rate / 4 * 2 * 541), rel=1e-9)
    assert "fault tolerance on" in found["goodput"]["reference"]["source"]


def test_incidents_say_what_it_cost(found):
    killed, lost = found["incidents"]
    assert killed["detect_s"] == pytest.approx(0.5)
    assert killed["lost_s"] == pytest.approx(112.5 - 106.5)
    assert lost["redone_steps"] == 5
    assert lost["lost_s"] == pytest.approx(177.5 - 156.0)
    assert "replaced by host-2" in lost["sentence"] and "5 steps redone" in lost["sentence"]
    assert found["incident_kinds"]["all"]["count"] == 2


def test_money_follows_the_hosts(found):
    assert found["cost"]["usd"] == pytest.approx(541 / 3600 * 24)
    assert sum(spent["usd"] for spent in found["categories"].values()) == pytest.approx(found["cost"]["usd"])
    rate = found["goodput"]["purchased"]
    assert found["cost"]["usd_per_goodput_point"] == pytest.approx(found["cost"]["usd"] * (1 - rate / (rate + 0.01)))


def test_the_figures_that_everybody_asks_for(found):
    assert found["run_id"] == RUN_ID
    assert found["execution_accuracy"] == 0.875
    assert found["mfu"] == pytest.approx(0.41)
    assert found["tokens_per_s"] == pytest.approx(TOKENS / 2.0)
    assert found["final_loss"] == pytest.approx(0.4 + 5.6 * 0.985**60)


def test_unknown_prices_stay_unknown(tmp_path):
    write(tmp_path / "events", price=None)
    found = api.load(tmp_path).to_json()
    assert found["cost"]["usd"] is None
    assert found["categories"]["productive"]["usd"] is None
    assert "unknown" in api.render_table(api.load(tmp_path))


def two_ends(tmp_path, second, *, first, secondary):
    """Incident i1 of rank 0, and ``second`` of rank 3 a moment later; an attempt because of i1."""
    hosts = {"host-0": [0, 1], "host-1": [2, 3]}
    w = faulty_run.Writer(tmp_path / "events", offsets_ns=dict.fromkeys((*hosts, "host-2"), 0))
    faulty_run._begin(w, None)
    faulty_run._attempt(w, 1, hosts, start=40.0, first_step=1, last_step=25, warm=True)
    faulty_run._incident(w, "i1", "rank_exit", 107.0, 1, "host-0", 0, first, 106.9, "restart", secondary=secondary)
    w.add("supervisor", 107.1, "incident.detected", attempt=1, host="host-1", rank=3, detail=second)
    faulty_run._attempt(w, 2, hosts, start=108.0, first_step=26, last_step=60, cause="i1")
    return w


LOST, KILLED = "rank 0 on host-0 lost a peer: Connection reset", "rank 3 on host-1 was killed by SIGKILL"


@pytest.mark.parametrize("decided_too", [True, False])
def test_a_cause_that_is_told_after_its_consequence_is_the_same_interruption(tmp_path, decided_too):
    """Earlier versions decided twice, and did not say whose part it is."""
    memory = "rank 3 on host-1 ran out of memory: can't allocate"
    second = {"incident_id": "i2", "incident": "rank_oom", "evidence": memory}
    w = two_ends(tmp_path, second if decided_too else {**second, "part_of": "i1"}, first=LOST, secondary=True)
    if decided_too:
        decided = {"incident_id": "i2", "action": "restart", "reason": "the cause"}
        w.add("supervisor", 107.1, "incident.decided", attempt=1, detail=decided)
    w.close()
    found = api.load(tmp_path).to_json()
    first, second = found["incidents"]
    assert (first["stopped_training"], second["stopped_training"]) == (True, False)
    assert f"{LOST[1:]}; the cause: {memory}" in first["sentence"] and "It cost" in first["sentence"]
    assert memory[1:] in second["sentence"] and "It cost" not in second["sentence"]
    assert found["incident_kinds"].keys() == {"rank_oom", "all"}, "of what it was"


def test_two_ranks_that_are_killed_in_the_same_moment_are_one_interruption(tmp_path):
    first = "rank 0 on host-0 was killed by SIGKILL"
    second = {"incident_id": "i2", "incident": "rank_exit", "evidence": KILLED, "part_of": "i1"}
    two_ends(tmp_path, second, first=first, secondary=False).close()
    found = api.load(tmp_path).to_json()
    assert [one["stopped_training"] for one in found["incidents"]] == [True, False]
    assert f"{first[1:]}; also: {KILLED}" in found["incidents"][0]["sentence"]
    assert found["incident_kinds"]["all"]["count"] == 1
