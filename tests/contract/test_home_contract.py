"""A run's home in a bucket with the moods of the real one: slow answers, 429, 503, answers that get lost, an outage."""

import random
import threading
import time

import pytest

from muster.core import event_log
from muster.core.errors import BusyError, ConflictError
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


def test_hosts_ship_and_others_read_them(bucket, tmp_path):
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
    verdicts = event_log.check_directory(reader.local / "events", run_id=RUN)
    assert len(verdicts) == 4
    assert not any(verdict.problem or verdict.torn_bytes for verdict in verdicts.values())
    assert reader.heads(RUN) == {f"{host}.1.jsonl": logs[host].head for host in hosts}


def test_decisions_are_sealed_in_time_or_not_at_all(bucket, tmp_path):
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
    other = home_at(tmp_path / "b")
    other.end_earlier(RUN, "supervisor", 2)
    say(log, "of a zombie")
    with pytest.raises(ConflictError):
        for _ in range(5):  # a 503 may come first
            log.sync()
    assert other.mirror(other.local) > 0
    assert b"zombie" not in (other.local / "events" / "supervisor.1.jsonl").read_bytes()


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
