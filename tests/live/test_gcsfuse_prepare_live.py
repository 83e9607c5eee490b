"""Hosts that prepare one data set on mounts of one bucket: one prepares, the others wait, whatever dies in between."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from fakes.gcs import Faults, GcsFake, Latency
from gcsfuse_mounts import NEEDED, objects

from muster.config.spec import RunSpec

pytest_plugins = ["gcsfuse_mounts"]
pytestmark = NEEDED

#: As ``backends.gke.manifests.volumes`` writes them for ``data.cache_dir``.
WRITTEN = ["implicit-dirs", "metadata-cache-ttl-secs=0", "rename-dir-limit=200000"]
#: The moods of a run's bucket, with answers that come sooner and are lost more often: these tests count steps.
SOON, FAULTS = Latency(0.002, 0.01), Faults(unavailable=0.002, lost=0.01)
STALE_S = 4

#: A host: for each line that it reads (a run file) a child prepares. Its names are its own, as in a pod.
HOST = f"""
import json, os, socket, sys
from pathlib import Path
from muster.config.spec import RunSpec
from muster.core.errors import MusterError
from muster.data import prepare, tokenise
from muster.storage.store import link_lease
import tokenizers

name, run_dir = sys.argv[1:]
socket.gethostname = lambda: name
link_lease.here = lambda: name
link_lease.STALE_S, link_lease.BEAT_S = {STALE_S}, 1.2

def say(**words):
    os.write(1, json.dumps(words).encode() + b"\\n")

def prepared(line):
    waited = []
    def progress(activity, done, total):
        if activity.startswith("wait"):
            waited.append(activity)
    try:
        found = prepare.prepare(RunSpec.model_validate_json(line), run_dir=Path(run_dir), progress=progress)
    except MusterError as error:
        say(error=str(error), exit_code=error.exit_code)
    except BaseException as error:
        say(error=f"{{type(error).__name__}}: {{error}}", exit_code=1)
    else:
        rows = [row.input_ids.tolist() for row in found.train]
        say(fingerprint=found.fingerprint, cached=found.stats["cached"], rows=rows, waited=sorted(set(waited)))

say(ready=name)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        say(pid=os.getpid())
        prepared(line)
        os._exit(0)
    os.waitpid(child, 0)
"""


class Host:
    """A pod on a mount of its own."""

    def __init__(self, name, mount, tmp_path):
        self.name, self.mount = name, mount
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOST, name, str(tmp_path / f"run-{name}")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def prepare(self, cache, rows=60):
        """Begin; ``result`` is what comes of it."""
        spec = RunSpec.model_validate(
            {
                "name": "live",
                "model": {"config": {"vocab_size": 128}, "tokenizer": {"vocab_size": 128}},
                "data": {"sources": [{"type": "text2sql", "rows": rows, "heldout_rows": 8}], "workers": 1,
                         "cache_dir": str(self.mount / cache)},
                "training": {"sequence_length": 64},
            }
        )  # fmt: skip
        self.process.stdin.write(spec.model_dump_json() + "\n")
        self.process.stdin.flush()
        self.child = self.read()["pid"]

    def read(self):
        return json.loads(self.process.stdout.readline())

    def result(self):
        found = self.read()
        assert "error" not in found, f"{self.name}: {found['error']}"
        return found

    def kill(self):
        with contextlib.suppress(ProcessLookupError):  # it had just done all it does
            os.kill(self.child, signal.SIGKILL)


@pytest.fixture
def weather():
    """The unkind bucket, of a seed."""
    pytest.importorskip("google_crc32c", reason="comes with the gcs extra")
    with contextlib.ExitStack() as held:
        yield lambda seed, **more: held.enter_context(GcsFake.unkind(latency=SOON, faults=FAULTS, seed=seed, **more))


@pytest.fixture
def pods(mounted, tmp_path):
    """``pods(bucket, 3)``: so many hosts with a mount each, ready."""
    with contextlib.ExitStack() as held:

        def start(fake, count):
            hosts = [Host(f"pod-{n}", mounted(f"pod-{n}", *WRITTEN, url=fake.url), tmp_path) for n in range(count)]
            for host in hosts:
                held.enter_context(host.process)
                held.callback(host.process.kill)
                assert host.read() == {"ready": host.name}
            return hosts

        yield start


def left(fake, cache):
    """What is in the cache: the first parts of its objects' names."""
    inside = [name.removeprefix(f"{cache}/") for name in objects(fake) if name.startswith(f"{cache}/")]
    return sorted({name.split("/")[0] for name in inside if name})


def only_the_data_is_left(fake, cache, fingerprint):
    names = left(fake, cache)
    assert len(names) == 2 and names[0] == fingerprint and names[1].startswith(f"{fingerprint}."), names


def changes(fake):
    """How many requests so far may have changed the bucket."""
    return sum(method != "GET" for method, _ in list(fake.requests))


def at_change(fake, number, *processes, timeout_s=60):
    """Wait for the bucket's change of this number, or until nobody makes one."""
    until_s = time.monotonic() + timeout_s
    while changes(fake) < number and time.monotonic() < until_s:
        if all(not os.path.exists(f"/proc/{pid}") for pid in processes):
            return
        time.sleep(0.001)


NIGHT = pytest.mark.soak  # most of the seconds are those of opening data on a mount that remembers no name


@pytest.mark.parametrize(
    ("count", "rounds"), [(3, 1), pytest.param(2, 10, marks=NIGHT), pytest.param(3, 10, marks=NIGHT)]
)
@pytest.mark.timeout(1800)
def test_hosts_that_prepare_at_once_prepare_once(weather, pods, count, rounds):
    fake = weather(seed=100 * count + rounds)
    hosts, chance = pods(fake, count), random.Random(rounds)
    for number in range(rounds):
        for host in hosts:
            host.prepare(f"cache-{number}")
            time.sleep(chance.choice((0, 0, 0.2)))
        found = [host.result() for host in hosts]
        assert sorted(each["cached"] for each in found) == [False] + [True] * (count - 1)
        assert all(each["rows"] == found[0]["rows"] for each in found)
        builder = next(host.name for host, each in zip(hosts, found, strict=True) if not each["cached"])
        waited = [words for each in found for words in each["waited"]]
        assert any(words.startswith(f"wait for {builder}, which prepares this data since ") for words in waited), waited
        only_the_data_is_left(fake, f"cache-{number}", found[0]["fingerprint"])


@pytest.mark.parametrize("changes_later", [0, *(pytest.param(number, marks=NIGHT) for number in range(1, 25, 2))])
def test_a_host_that_comes_while_another_publishes_takes_nothing_for_damaged(weather, pods, changes_later):
    """From the last file of the data (its seal) on, at any change of the bucket. Once, a folder was renamed then."""
    fake = weather(seed=changes_later)
    first, second = pods(fake, 2)
    first.prepare("cache")
    while not any(name.endswith("/sums.json") for name in objects(fake)):
        time.sleep(0.001)
    at_change(fake, changes(fake) + changes_later, first.child)
    second.prepare("cache")
    found = [first.result(), second.result()]
    assert found[0]["fingerprint"] == found[1]["fingerprint"]
    assert [each["cached"] for each in found] == [False, True]
    assert found[0]["rows"] == found[1]["rows"]
    only_the_data_is_left(fake, "cache", found[0]["fingerprint"])


@pytest.mark.parametrize("number", [14, *(pytest.param(number, marks=NIGHT) for number in range(1, 34, 2))])
def test_a_host_killed_at_a_change_of_the_bucket_is_replaced_by_one_that_waits(weather, pods, number):
    """Its mount lives on, as a pod's does: what the process had open is finished by its death."""
    fake = weather(seed=number)
    first, second = pods(fake, 2)
    before = changes(fake)
    first.prepare("cache")
    at_change(fake, before + number, first.child)
    first.kill()
    second.prepare("cache")
    found = second.result()
    assert len(found["rows"]) > 20
    only_the_data_is_left(fake, "cache", found["fingerprint"])
