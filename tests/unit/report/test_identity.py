"""The accounting identity over thousands of random logs, and the agreement of the script that shares no code."""

import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_runs import Files, implausible, plausible
from thorough import usually

from muster.core.event_log import EventLog
from muster.report import api
from muster.report.ledger.categories import CATEGORIES
from muster.report.ledger.fold import Ledger, fold
from muster.report.render.document import document

ROOT = Path(__file__).parents[3]
SEEDS = st.integers(0, 2**48)


def held_ns(files: Files) -> int | None:
    """Purchased time straight from grants and releases of one supervisor, where those are in order."""
    grants = [event for event in files.get("supervisor.1.jsonl", []) if event.kind.startswith("host.")]
    newest = max((timed.t_ns for timed in fold(files).events), default=0)
    since, total = {}, 0
    for event in grants:
        if event.kind == "host.allocated":
            since.setdefault(event.host, event.mono_ns)
        elif event.kind == "host.released" and event.host in since:
            total += event.mono_ns - since.pop(event.host)
    return total + sum(newest - begin for begin in since.values())


def check(ledger: Ledger) -> None:
    spent = ledger.categories_ns
    assert sum(spent.values()) == ledger.purchased_ns
    assert all(ns >= 0 for ns in spent.values())
    assert set(spent) == set(CATEGORIES)
    for host, lane in ledger.lanes.items():
        tiles = [(segment.begin_ns, segment.end_ns) for segment in lane.segments]
        for begin, end in lane.held:
            inside = [tile for tile in tiles if begin <= tile[0] and tile[1] <= end]
            assert sum(b - a for a, b in inside) == end - begin, host
        assert sum(ledger.host_ns[host].values()) == lane.held_ns
    found = document(ledger, {}).to_json()
    json.dumps(found, allow_nan=False)
    assert found["host_time"]["identity_error"] == 0.0


@settings(max_examples=usually(300, nightly=1000), deadline=None)
@given(SEEDS)
def test_identity_closes_over_runs_that_could_be(seed):
    files = plausible(seed)
    ledger = fold(files)
    check(ledger)
    assert ledger.purchased_ns == held_ns(files)
    assert ledger.categories_ns["unattributed"] == 0


@settings(max_examples=usually(300, nightly=1000), deadline=None)
@given(SEEDS)
@example(20265964)  # released and bought again in the same instant
def test_identity_closes_over_events_in_any_order(seed):
    check(fold(implausible(seed)))


@settings(max_examples=150, deadline=None)
@given(SEEDS)
def test_a_run_can_be_reported_at_any_moment(seed):
    """Cut a log anywhere: the identity holds and what was final before is no more than what is final later."""
    files = plausible(seed)
    longest = max(len(events) for events in files.values())
    for share in (0.2, 0.6):
        check(fold({name: events[: max(1, round(share * longest))] for name, events in files.items()}))


def script():
    spec = importlib.util.spec_from_file_location("recompute_goodput", ROOT / "tools" / "recompute_goodput.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(files: Files, directory: Path) -> None:
    for name, events in files.items():
        log = EventLog("random", directory, name.split(".")[0], 1)
        for event in events:
            log.append(
                event.kind,
                host=event.host,
                rank=event.rank,
                phase=event.phase,
                step=event.step,
                attempt=event.attempt,
                mono_ns=event.mono_ns,
                wall_ns=event.wall_ns,
                detail=event.detail,
            )
        log.close()


@pytest.mark.parametrize("seed", range(60))
def test_the_script_that_shares_no_code_agrees(seed, tmp_path):
    write(plausible(seed), tmp_path / "events")
    report = api.load(tmp_path).to_json()
    recompute = script()
    found = recompute.figures(tmp_path / "events")
    assert found["chain_problems"] == []
    assert recompute.differences(found, report) == []


@pytest.mark.parametrize("seed", range(20))
def test_it_agrees_where_the_last_steps_before_a_restart_have_no_event(seed, tmp_path):
    """They were lost with a host, whose peer held the snapshot that the next attempt started from."""
    files = plausible(seed)
    started = [event for event in files["supervisor.1.jsonl"] if event.kind == "attempt.started"]
    for event in started[1:]:
        event.detail["resume_attempt"] = event.attempt - 1
    lost = {(event.attempt - 1, event.detail["resume_step"] - back) for event in started[1:] for back in range(3)}
    for events in files.values():
        events[:] = [one for one in events if one.kind != "step" or (one.attempt, one.step) not in lost]
    write(files, tmp_path / "events")
    report, recompute = api.load(tmp_path).to_json(), script()
    assert recompute.differences(recompute.figures(tmp_path / "events"), report) == []


@pytest.mark.parametrize("seed", range(10))
def test_it_agrees_on_a_trainer_without_a_supervisor(seed, tmp_path):
    write({name: events for name, events in plausible(seed).items() if name.startswith("host-")}, tmp_path / "events")
    report = api.load(tmp_path).to_json()
    assert report["host_time"]["identity_error"] == 0
    recompute = script()
    assert recompute.differences(recompute.figures(tmp_path / "events"), report) == []


def test_the_script_would_notice(tmp_path):
    write(plausible(3), tmp_path / "events")
    report = api.load(tmp_path).to_json()
    recompute = script()
    found = recompute.figures(tmp_path / "events")
    report["tokens"] += 1
    report["categories"]["productive"]["host_ns"] += 10**9
    assert len(recompute.differences(found, report)) == 2
    path = tmp_path / "events" / "supervisor.1.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"count":', b'"count": ', 1))
    assert recompute.figures(tmp_path / "events")["chain_problems"]
