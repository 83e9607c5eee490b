"""Following the logs of a run's pods: a cluster in memory whose connections break, whose pods come and go."""

import json
import queue

import httpx2
import pytest
from fakes.clock import VirtualClock
from fakes.kubernetes import FakeKubernetes, in_memory

from muster.backends.gke.operate import log_follow as module
from muster.backends.gke.operate.log_follow import Follower, LogPosition
from muster.backends.google.http import Unreachable
from muster.core.errors import AccessError, BackendError

RUN = "app.kubernetes.io/instance=llama"
PODS, JOBSETS = "api/v1/namespaces/default/pods", "apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets"


def at(second, fraction="000000001"):
    return f"2026-01-02T03:04:{second:02d}.{fraction}Z"


class Script(httpx2.SyncByteStream):
    """One connection: what comes over it; something to call, to raise or to wait for may stand between the lines."""

    def __init__(self, items):
        self.items, self.closed = items, queue.Queue()

    def __iter__(self):
        for item in self.items:
            if isinstance(item, Exception):
                raise item
            if callable(item):
                item()
            elif item is ...:
                self.closed.get(timeout=30)  # an open connection on which nothing comes
                raise OSError("closed")
            else:
                yield item.encode()

    def get_extra_info(self, name):
        return self

    def shutdown(self, how):
        self.closed.put(None)


class Changes(Script):
    """A watch: open until it is closed."""

    def __iter__(self):
        while (item := self.closed.get(timeout=30)) is not None:
            yield json.dumps({"type": "MODIFIED", "object": item}).encode() + b"\n"


class Server:
    """The API server: objects by ``FakeKubernetes``, connections by script."""

    def __init__(self):
        self.kubernetes = FakeKubernetes()
        self.logs, self.refused, self.asked, self.opened, self.watches = {}, {}, [], [], {}
        self.jobset("Running")

    def jobset(self, condition):
        status = {"conditions": [{"type": condition, "status": "True"}]}
        self._put(JOBSETS, {"metadata": {"name": "llama", "labels": dict([RUN.split("=")])}, "status": status})

    def pod(self, index, phase="Running"):
        labels = {"jobset.sigs.k8s.io/replicatedjob-name": "host", "jobset.sigs.k8s.io/job-index": str(index)}
        metadata = {"name": f"host-{index}", "namespace": "default", "labels": labels | dict([RUN.split("=")])}
        self._put(PODS, {"metadata": metadata, "status": {"phase": phase}})

    def _put(self, folder, one):
        path = f"{folder}/{one['metadata']['name']}"
        self.kubernetes.handle("PUT", "/" + path, json.dumps(one).encode())
        for watch in self.watches.get(folder, []):
            watch.closed.put(one)

    def handle(self, request):
        path, query = request.url.path.strip("/"), dict(request.url.params)
        if query.get("watch") or path.endswith("/log"):
            return self.lines(path, query)
        status, body = self.kubernetes.handle(request.method, request.url.raw_path.decode())
        return httpx2.Response(status, json=body)

    def lines(self, path, query):
        self.asked.append((path, query))
        if path in self.refused:
            return httpx2.Response(self.refused[path], json={"message": "no"})
        if query.get("watch"):
            assert query["labelSelector"] == RUN
            found = Changes([])
            self.watches.setdefault(path, []).append(found)
            for key, one in list(self.kubernetes.objects.items()):
                if key.rpartition("/")[0] == path:  # a watch begins with what is there
                    found.closed.put(one)
        else:
            assert query["follow"] == query["timestamps"] == "true" and query["container"] == "host"
            rest = self.logs.get(path.split("/")[-2], [])
            if not rest:
                return httpx2.Response(404, json={"message": "not found"})
            found = rest.pop(0)
            if isinstance(found, Exception):
                raise found
            found = Script(found)
        self.opened.append(found)
        return httpx2.Response(200, stream=found, extensions={"network_stream": found})

    def over(self):
        return self.kubernetes.objects[f"{JOBSETS}/llama"]["status"]["conditions"][0]["type"] == "Completed"


@pytest.fixture
def server():
    return Server()


def follower(server):
    cluster = in_memory(server.kubernetes, server.handle)
    labels, clock = dict([RUN.split("=")]), VirtualClock()
    return Follower(cluster=cluster, namespace="default", labels=labels, over=server.over, clock=clock, pause_s=0.0)


def told(server):
    found = {}
    for chunk in follower(server).chunks():
        found.setdefault(chunk.task, []).append(chunk.text)
    return found


def test_one_stream_a_pod_through_a_break_and_pods_that_come_later(server):
    server.pod(0)
    server.pod(1, phase="Pending")
    server.logs["host-0"] = [
        [f"{at(1)} agent up\n", f"{at(2)} rank-0.a1 | hello\n", f"{at(2)} rank-1.a1 | hello\n", ConnectionError("cut")],
        Unreachable("restarting"),
        [
            # The server cuts the time to the second: three lines come again, one with the same time is new.
            f"{at(1)} agent up\n", f"{at(2)} rank-0.a1 | hello\n", f"{at(2)} rank-1.a1 | hello\n",
            f"{at(2)} rank-1.a1 | again\n", lambda: server.pod(1), f"{at(3)} bye\n",
            lambda: server.pod(0, phase="Succeeded"),
        ],
    ]  # fmt: skip
    server.logs["host-1"] = [
        [f"{at(4)} second\n", lambda: server.pod(1, phase="Succeeded"), lambda: server.jobset("Completed")]
    ]
    assert told(server) == {
        "host-0": ["agent up\n", "bye\n"],
        "rank-0.a1": ["hello\n"],
        "rank-1.a1": ["hello\n", "again\n"],
        "host-1": ["second\n"],
    }
    since = [query.get("sinceTime") for path, query in server.asked if path.endswith("host-0/log")]
    assert since == [None, at(2), at(2)], "from the last line on, not from the beginning"
    assert len([path for path, _ in server.asked if path.endswith("host-1/log")]) == 1, "one stream a pod"


def test_the_end_waits_for_the_last_words(server):
    server.pod(0)
    late = [lambda: server.jobset("Completed"), f"{at(1)} last words\n", lambda: server.pod(0, phase="Succeeded")]
    server.logs["host-0"] = [late]
    assert told(server) == {"host-0": ["last words\n"]}


def test_the_end_does_not_wait_for_a_dead_node(server, monkeypatch):
    monkeypatch.setattr(module, "DRAIN_S", 0.0)
    server.pod(0)
    server.logs["host-0"] = [[f"{at(1)} one\n", lambda: server.jobset("Completed"), ...]]
    assert told(server) == {"host-0": ["one\n"]}


def test_a_run_that_has_ended_is_told_whole(server):
    server.jobset("Completed")
    server.pod(0, phase="Succeeded")
    server.logs["host-0"] = [[f"{at(1)} one\n", f"{at(2)} two\n"]]
    assert told(server) == {"host-0": ["one\n", "two\n"]}


def test_leaving_closes_every_connection(server):
    server.pod(0)
    server.logs["host-0"] = [[f"{at(1)} one\n", ...]]
    made = follower(server)
    chunks = made.chunks()
    assert next(chunks).text == "one\n"
    chunks.close()
    for reader in made._readers.values():
        reader.join(30)
        assert not reader.is_alive()
    assert len([path for path, query in server.asked if path.endswith("/log")]) == 1, "nothing is opened again"


def test_leaving_lets_go_of_a_reader_that_waits_for_room(server, monkeypatch):
    monkeypatch.setattr(module, "AHEAD_LINES", 4)
    server.pod(0)
    server.logs["host-0"] = [[f"{at(1)} line\n"] * 1000]
    made = follower(server)
    chunks = made.chunks()
    next(chunks)
    chunks.close()
    made._readers["host-0"].join(30)
    assert not made._readers["host-0"].is_alive() and made._queue.qsize() <= 4


def test_what_is_not_allowed_is_said(server):
    server.pod(0)
    server.refused[f"{PODS}/host-0/log"] = 403
    with pytest.raises(AccessError, match="host-0/log: no"):
        told(server)


def test_who_may_not_watch_may_still_follow(server, monkeypatch):
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.0)
    server.refused = {PODS: 403, JOBSETS: 403}
    server.pod(0)
    server.logs["host-0"] = [
        [f"{at(1)} one\n", lambda: server.jobset("Completed"), lambda: server.pod(0, phase="Succeeded")]
    ]
    assert told(server) == {"host-0": ["one\n"]}


def test_a_bug_of_ours_does_not_hang_the_reader(server):
    made = follower(server)
    made.over = lambda: 1 / 0
    with pytest.raises(BackendError, match="ZeroDivisionError"):
        list(made.chunks())


def test_lines_without_a_time_are_told_and_a_clock_that_steps_back_loses_none():
    place = LogPosition()
    assert place.fresh(b"unable to retrieve container logs\n") == b"unable to retrieve container logs\n"
    assert place.fresh(f"{at(5)} a\n".encode()) == b"a\n"
    assert place.fresh(f"{at(3)} b\n".encode()) == b"b\n"
    place.reopened()
    assert place.since == at(3)
    assert place.fresh(f"{at(3)} b\n".encode()) is None
    assert place.fresh(f"{at(3, '1')} c\n".encode()) == b"c\n", "a shorter fraction is a later time here"
