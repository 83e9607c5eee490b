"""What a run's home in a bucket guarantees (docs/how-to/gke.md), on one with the moods of the real one: slow answers,
429 and 503, answers that get lost, an outage."""

import random
import threading
import time

import pytest
from fakes.chains import check_directory
from waiting import eventually

from muster.core.errors import BusyError, ConflictError, MusterError
from muster.core.event_log.cadence import SEAL_S
from muster.storage.home import ANSWER_S, HOME_FILE, open_home
from muster.storage.store import open_store

RUN = "run-1"


@pytest.fixture
def bucket(monkeypatch):
    pytest.importorskip("google.cloud.storage")
    from fakes.gcs import Faults, GcsFake

    with GcsFake.unkind(faults=Faults(unavailable=0.05, lost=0.02), seed=11) as fake:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.url)
        yield fake


def home_at(local):
    local.mkdir(parents=True, exist_ok=True)
    (local / "run_id").write_text(RUN + "\n")
    (local / HOME_FILE).write_text("gs://bucket/runs/run-1\n")
    return open_home(local)


def say(log, text):
    log.append("run.message", detail={"text": text})


def test_3_a_prefix_once_whatever_happens_to_answers(bucket, tmp_path):
    """Of four hosts, through an outage, for a reader that looks all the time."""
    hosts = [f"pod-{number}" for number in range(4)]
    homes = {host: home_at(tmp_path / host) for host in hosts}
    syncs = {host: homes[host].start(host) for host in hosts}
    logs = {host: homes[host].open_log(RUN, host, 1) for host in hosts}
    chance = random.Random(5)
    until = time.monotonic() + 9
    reader = home_at(tmp_path / "reader")
    while time.monotonic() < until:
        host = chance.choice(hosts)
        say(logs[host], f"of {host}")
        if chance.random() < 0.01:
            reader.mirror(reader.local)
        time.sleep(0.02)
    bucket.away = True
    time.sleep(1)
    for host in hosts:
        say(logs[host], "during the outage")
    stopping = [threading.Thread(target=sync.stop, args=(20,)) for sync in syncs.values()]
    for thread in stopping:
        thread.start()
    time.sleep(1)
    bucket.away = False
    for thread in stopping:
        thread.join(30)
    assert [sync.trouble for sync in syncs.values()] == [None] * 4
    reader.mirror(reader.local)
    for host in hosts:
        name = f"{host}.1.jsonl"
        assert (reader.local / "events" / name).read_bytes() == logs[host].path.read_bytes()
    verdicts = check_directory(reader.local / "events", run_id=RUN)
    assert len(verdicts) == 4
    assert not any(verdict.problem or verdict.torn_bytes for verdict in verdicts.values())
    assert reader.heads(RUN) == {f"{host}.1.jsonl": logs[host].head for host in hosts}


def test_2_what_is_synced_is_durable_in_time_or_not_acted_on(bucket, tmp_path):
    log = home_at(tmp_path / "a").open_log(RUN, "supervisor", 1)
    took, sealed = [], 0
    for number in range(25):
        say(log, f"decision {number}")
        began = time.monotonic()
        sealed += log.sync()
        took.append(time.monotonic() - began)
        time.sleep(0.01)
    assert sealed >= 23
    assert max(took) < ANSWER_S + 0.5
    assert sorted(took)[len(took) // 2] < 0.5
    bucket.away = True
    say(log, "while nobody answers")
    began = time.monotonic()
    assert not log.sync()
    assert time.monotonic() - began < ANSWER_S + 0.5
    bucket.away = False
    deadline = time.monotonic() + 10
    while not log.sync() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert log.unsealed is None
    reader = home_at(tmp_path / "b")
    reader.mirror(reader.local)
    assert (reader.local / "events" / log.name).read_bytes() == log.path.read_bytes()


def test_2_two_syncs_within_a_second_do_not_wait_for_each_other(bucket, tmp_path):
    """A bucket takes one write a second of an object; a decision and its follow-up are two objects."""
    log, took = home_at(tmp_path / "a").open_log(RUN, "supervisor", 1), []
    for number in range(6):
        say(log, f"decision {number}")
        began = time.monotonic()
        while not log.sync():
            pass
        took.append(time.monotonic() - began)
        time.sleep(0.2)
    assert sorted(took)[3] < 0.6, took
    assert sum("/events/supervisor.1/" in f"/{name}" for name in bucket.buckets["bucket"]) >= 4


def test_4_a_supervisor_whose_term_was_ended_adds_nothing(bucket, tmp_path):
    log, successor = home_at(tmp_path / "a").open_log(RUN, "supervisor", 1), home_at(tmp_path / "b")
    for text in ("one", "two"):
        say(log, text)
        eventually(log.sync)
    successor.end_earlier(RUN, "supervisor", 2)
    successor.mirror(successor.local)
    before = (successor.local / "events" / log.name).read_bytes()
    assert before == log.path.read_bytes()
    say(log, "of a zombie")
    with pytest.raises(ConflictError):
        for _ in range(5):  # a 503 may come first
            log.sync()
    assert successor.mirror(successor.local) == 0
    assert (successor.local / "events" / log.name).read_bytes() == before


def test_5_what_is_missing_is_refused_by_name(bucket, tmp_path):
    logs = {host: home_at(tmp_path / host).open_log(RUN, host, 1) for host in ("pod-0", "pod-1")}
    for log in logs.values():
        for text in ("one", "two", "three"):
            say(log, text)
            eventually(log.sync)
    objects = sorted(name for name in bucket.buckets["bucket"] if "/pod-0/" in name)
    assert len(objects) >= 2, "within a second"
    del bucket.buckets["bucket"][objects[0]]
    reader = home_at(tmp_path / "reader")
    with pytest.raises(MusterError, match=f"{objects[0]} is missing") as refused:
        reader.mirror(reader.local)
    assert "restore it" in refused.value.hint
    assert (reader.local / "events/pod-1.1.jsonl").read_bytes() == logs["pod-1"].path.read_bytes()


def test_1_and_6_a_lost_host_takes_its_last_seconds_alone_a_killed_process_nothing(bucket, tmp_path):
    """And an event file that always grows costs one write in each interval."""
    home = home_at(tmp_path / "host")
    sync, log, written = home.start("pod-0"), home.open_log(RUN, "pod-0", 1), {}
    bucket.bill.anew()
    began = time.monotonic()
    while time.monotonic() - began < 14:
        say(log, "x")
        written[log.path.stat().st_size] = time.monotonic()
        time.sleep(0.1)
    lost_s = time.monotonic()
    writes = bucket.bill.operations["objects.insert"]
    reader = home_at(tmp_path / "reader")
    reader.mirror(reader.local)
    path = reader.local / "events" / log.name
    here = path.stat().st_size
    assert max(lost_s - at_s for size, at_s in written.items() if size > here) < SEAL_S + 1.0
    assert 2 <= writes <= 14 / (SEAL_S - 0.5) + 1
    log.close()  # killed: nothing of it waits in memory
    sync.stop(0.0)
    eventually(lambda: all(ended.is_set() for ended in sync._ended))
    for shipper in home.shippers.values():
        shipper.release()
    eventually(lambda: home_at(tmp_path / "host").start("pod-0").stop(5.0))
    reader.mirror(reader.local)
    assert path.read_bytes() == log.path.read_bytes()


def test_one_object_changed_twice_a_second_is_met_with_patience(bucket):
    """A fence is closed and sealed within a second; a bucket takes one change of an object a second."""
    store, uri = open_store(), "gs://bucket/fence.json"
    generation = store.put_if_absent(uri, b"0")
    for number in range(1, 4):
        generation = store.put_if(uri, str(number).encode(), generation)
    assert store.get(uri).data == b"3"
    quick = open_store(timeout_s=2.0, patience_s=0.3, answer_s=2.0)
    with pytest.raises(BusyError):
        for number in range(4, 8):
            generation = quick.put_if(uri, str(number).encode(), generation)


@pytest.mark.parametrize(("wrong_s", "said"), [(0, None), (-30, "30 s behind"), (40, "40 s ahead of")])
def test_a_clock_that_is_wrong_is_told_of_once(monkeypatch, capsys, wrong_s, said):
    pytest.importorskip("google.cloud.storage")
    from fakes.gcs import GcsFake

    real = time.time
    with GcsFake() as fake:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.url)
        store = open_store()
        monkeypatch.setattr("muster.storage.store.gcs.time", Clock(lambda: real() + wrong_s))
        for _ in range(3):
            store.put("gs://bucket/a", b"x")
    told = [line for line in capsys.readouterr().err.splitlines() if "clock" in line]
    assert len(told) == (0 if said is None else 1)
    assert said is None or said in told[0]


class Clock:
    """A module ``time`` with another time."""

    def __init__(self, now):
        self.time = now
