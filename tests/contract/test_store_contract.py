"""What every ``Store`` does: on files, on memory://, on a GCS over HTTP, on ssh:// with a run's server over TCP."""

import itertools
import multiprocessing
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid

import pytest
from waiting import eventually, listens

from muster.core.errors import AccessError, BackendError, ConflictError
from muster.core.protocols import Stored
from muster.storage import uris
from muster.storage.store import blobs, open_store

WRITERS = 16


@pytest.fixture(scope="module")
def gcs():
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # read when gcsfs is imported
    pytest.importorskip("google.cloud.storage")
    pytest.importorskip("gcsfs")
    from fakes.gcs import GcsFake

    with GcsFake(buckets=("bucket", "secret")) as fake, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", fake.url)
        fake.denied.add("secret")
        yield fake


@pytest.fixture(scope="module")
def homes(tmp_path_factory):
    """The server of a host, in a process of its own as there; what a host's programs have in their environment."""
    folder = tmp_path_factory.mktemp("homes")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "token").write_text("t" * 64)
    (folder / "token").chmod(0o600)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUSTER_STORE", f"127.0.0.1 {port}")
        patch.setenv("MUSTER_TOKEN_FILE", str(folder / "token"))
        argv = [sys.executable, "-m", "muster.backends.ssh.store_server", str(folder), "run", "127.0.0.1", str(port)]
        server = subprocess.Popen(argv, start_new_session=True)
        eventually(lambda: listens("127.0.0.1", port))
        yield
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.fixture(params=["file", "url", "memory", "gs", "ssh"])
def root(request, tmp_path):
    """A fresh folder of each scheme."""
    if request.param == "ssh":
        request.getfixturevalue("homes")
        return f"ssh://gpu1/run/{uuid.uuid4().hex}"
    if request.param == "gs":
        request.getfixturevalue("gcs")
        return f"gs://bucket/{uuid.uuid4().hex}"
    return {"file": str(tmp_path), "url": f"file://{tmp_path}", "memory": f"memory://{uuid.uuid4().hex}"}[request.param]


@pytest.fixture
def store():
    return open_store()


# ---------------------------------------------------------------- one writer


def test_what_is_put_is_got(store, root):
    uri = uris.join(root, "a", "b c", "ä.json")
    generation = store.put(uri, b"one")
    assert store.get(uri).data == b"one"
    assert store.get(uri, start=2) == Stored(data=b"e", generation=generation)
    assert store.get(uri).generation == generation
    assert store.put(uri, b"") != generation
    assert store.get(uri).data == b""


def test_a_large_object(store, root):
    """An index of a large checkpoint: more than a message of ssh:// takes."""
    uri, data = uris.join(root, "index.json"), random.Random(0).randbytes(17_000_000)
    generation = store.put_if_absent(uri, data)
    assert store.get(uri) == Stored(data=data, generation=generation)
    assert store.get(uri, start=16_000_000).data == data[16_000_000:]
    store.put_if(uri, data[1:], generation)
    assert store.get(uri).data == data[1:]
    assert list(store.list(root)) == [uri]


def test_absent(store, root):
    with pytest.raises(FileNotFoundError):
        store.get(uris.join(root, "none"))
    store.delete(uris.join(root, "none"))
    store.delete(uris.join(root, "no", "such", "folder"))
    assert store.list(uris.join(root, "nothing")) == {}
    with pytest.raises(ConflictError):
        store.put_if(uris.join(root, "none"), b"x", "1")
    assert store.list(root) == {}


def test_equal_bytes_are_a_new_generation(store, root):
    uri = uris.join(root, "lease")
    seen = [store.put_if_absent(uri, b"same")]
    for _ in range(30):
        seen.append(store.put_if(uri, b"same", seen[-1]))
    for _ in range(30):
        seen.append(store.put(uri, b"same"))
    assert len(set(seen)) == len(seen)
    assert store.get(uri).generation == seen[-1]
    for stale in seen[:-1]:
        with pytest.raises(ConflictError):
            store.put_if(uri, b"stolen", stale)
    assert store.get(uri).data == b"same"


def test_created_again_is_another_generation(store, root):
    uri = uris.join(root, "lease")
    first = store.put_if_absent(uri, b"x")
    store.delete(uri)
    second = store.put_if_absent(uri, b"x")
    assert first != second
    with pytest.raises(ConflictError):
        store.put_if(uri, b"y", first)
    store.delete(uri)
    with pytest.raises(ConflictError):
        store.put_if(uri, b"y", second)
    with pytest.raises(FileNotFoundError):
        store.get(uri)


def test_list_is_of_the_folder_and_sorted(store, root):
    names = ["run/b", "run/a/deep/er", "run/a.json", "running/c", "z"]
    for size, name in enumerate(names):
        store.put(uris.join(root, name), b"1" * size)
    held = {uris.join(root, name): size for size, name in sorted(enumerate(names), key=lambda item: item[1])}
    inside = {uri: size for uri, size in held.items() if uri.startswith(uris.join(root, "run") + "/")}
    assert list(store.list(uris.join(root, "run")).items()) == list(inside.items())
    assert list(store.list(root).items()) == list(held.items())
    assert store.list(root + "/") == store.list(root)
    store.delete(uris.join(root, "run/b"))
    store.delete(uris.join(root, "run/b"))
    assert uris.join(root, "run/b") not in store.list(root)


def test_blobs_live_under_the_same_uris(store, root):
    uri = uris.join(root, "step-1", "rank.shard")
    data = random.Random(0).randbytes(3_000_000)
    with blobs.writing(uri) as file:
        for start in range(0, len(data), 700_000):
            file.write(data[start : start + 700_000])
    assert blobs.size(uri) == len(data)
    assert blobs.read_range(uri, 1000, 2000) == data[1000:2000]
    with blobs.reading(uri) as file:
        assert file.read() == data
    assert store.get(uri).data == data
    assert blobs.folders(root) == ["step-1"]
    assert blobs.folders(uris.join(root, "none")) == []
    blobs.remove_tree(uris.join(root, "step-1"))
    blobs.remove_tree(uris.join(root, "step-1"))
    assert store.list(root) == {}
    for absent in (blobs.size, lambda uri: blobs.read_range(uri, 0, 1)):
        with pytest.raises(FileNotFoundError):
            absent(uri)


# ---------------------------------------------------------------- sixteen writers


def race(root, rounds, body):
    """Run ``body(store, root, writer, round)`` in 16 writers that start each round together; all results, by round.

    Real processes for files; threads, each with a store (and HTTP client) of its own, for the others.
    """
    if uris.is_local(root):
        # Not "fork": this process has threads by now.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["muster.storage.store", "pytest"])
        with context.Manager() as shared:
            return _race(root, rounds, body, context.Process, shared.Barrier(WRITERS), shared.Queue())
    return _race(root, rounds, body, threading.Thread, threading.Barrier(WRITERS), queue.Queue())


def _race(root, rounds, body, make, barrier, results):
    arguments = [(root, rounds, body, number, barrier, results) for number in range(WRITERS)]
    workers = [make(target=_writer, args=argument, daemon=True) for argument in arguments]
    for worker in workers:
        worker.start()
    found = [[] for _ in range(rounds)]
    for _ in range(rounds * WRITERS):
        turn, number, result = results.get(timeout=60)
        found[turn].append((number, result))
    for worker in workers:
        worker.join(30)
    return found


def _writer(root, rounds, body, number, barrier, results):
    store = open_store()
    for turn in range(rounds):
        barrier.wait(60)
        try:
            results.put((turn, number, body(store, root, number, turn)))
        except Exception as error:  # noqa: BLE001 (the test reports it)
            results.put((turn, number, f"{type(error).__name__}: {error}"))


def winner(attempt):
    try:
        return attempt()
    except ConflictError:
        return None


def create(store, root, number, turn):
    return winner(lambda: store.put_if_absent(uris.join(root, f"{turn}.json"), f"writer {number}".encode()))


def replace_first(store, root, number, turn):
    """Everybody names the generation that the test left in ``held``."""
    held = store.get(uris.join(root, f"held-{turn}")).data.decode()
    return winner(lambda: store.put_if(uris.join(root, f"lease-{turn}"), f"writer {number}".encode(), held))


def count_up(store, root, number, turn):
    uri = uris.join(root, "counter")
    for attempt in itertools.count(1):
        held = store.get(uri)
        if winner(lambda held=held: store.put_if(uri, str(int(held.data) + 1).encode(), held.generation)):
            return attempt


def test_sixteen_create_one_wins(store, root):
    for turn, results in enumerate(race(root, 4, create)):
        won = [(number, generation) for number, generation in results if generation is not None]
        assert len(won) == 1, won
        assert not str(won[0][1]).startswith("BackendError"), won
        stored = store.get(uris.join(root, f"{turn}.json"))
        assert stored.data == f"writer {won[0][0]}".encode()
        assert stored.generation == won[0][1]


def test_sixteen_replace_one_wins(store, root):
    for turn in range(4):
        held = store.put_if_absent(uris.join(root, f"lease-{turn}"), b"start")
        store.put(uris.join(root, f"held-{turn}"), held.encode())
    for turn, results in enumerate(race(root, 4, replace_first)):
        won = [(number, generation) for number, generation in results if generation is not None]
        assert len(won) == 1, won
        assert not str(won[0][1]).startswith("BackendError"), won
        stored = store.get(uris.join(root, f"lease-{turn}"))
        assert stored.data == f"writer {won[0][0]}".encode()
        assert stored.generation == won[0][1]


def test_no_update_is_lost(store, root):
    """A counter that sixteen writers raise by read, add, put_if: it ends at the number of successes."""
    store.put_if_absent(uris.join(root, "counter"), b"0")
    race(root, 2, count_up)
    assert store.get(uris.join(root, "counter")).data == str(2 * WRITERS).encode()


def test_readers_see_whole_objects(store, root):
    uri = uris.join(root, "object")
    size = 300_000
    store.put(uri, b"a" * size)
    stop = threading.Event()

    def write():
        own = open_store()
        for letter in itertools.cycle((b"b", b"c", b"d")):
            if stop.is_set():
                return
            own.put(uri, letter * size)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        seen = set()
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline and len(seen) < 4:
            data = store.get(uri).data
            assert len(data) == size
            assert data == data[:1] * size
            seen.add(data[:1])
    finally:
        stop.set()
        writer.join(10)
    assert len(seen) > 1


# ---------------------------------------------------------------- killed, refused


def _write_for_ever(uri, size, started):
    store = open_store()
    started.send(True)
    for letter in itertools.cycle((b"b", b"c")):
        store.put(uri, letter * size)
        winner(lambda: store.put_if_absent(uri, b"?" * size))


def test_a_killed_writer_leaves_no_torn_file(store, tmp_path):
    uri = str(tmp_path / "object")
    size = 2_000_000
    store.put(uri, b"a" * size)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["muster.storage.store", "pytest"])
    for turn in range(8):
        beginning, end = context.Pipe(duplex=False)
        process = context.Process(target=_write_for_ever, args=(uri, size, end), daemon=True)
        process.start()
        assert beginning.poll(60)
        time.sleep(0.007 * turn)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        stored = store.get(uri)
        assert stored.data == stored.data[:1] * size
        assert store.list(str(tmp_path)) == {uri: len(store.get(uri).data)}
        # The lock died with its holder, and what it left behind takes nobody's name.
        assert store.put_if(uri, b"z" * size, stored.generation)


def test_a_killed_upload_leaves_nothing(gcs, store):
    """Half a request, then silence: neither a new object nor a changed one."""
    import socket

    host, port = gcs.server.server_address
    for path in ("uploadType=media&name=half", "uploadType=media&name=half&ifGenerationMatch=0"):
        with socket.create_connection((host, port)) as line:
            line.sendall(f"POST /upload/storage/v1/b/bucket/o?{path} HTTP/1.1\r\n".encode())
            line.sendall(b"Host: x\r\nContent-Length: 1000\r\n\r\n" + b"x" * 500)
    time.sleep(0.2)
    with pytest.raises(FileNotFoundError):
        store.get("gs://bucket/half")
    with pytest.raises(KeyboardInterrupt):
        with blobs.writing("gs://bucket/half") as file:
            file.write(b"x" * 10_000_000)
            raise KeyboardInterrupt
    with pytest.raises(FileNotFoundError):
        store.get("gs://bucket/half")


def test_refusals_are_access_errors(gcs, store):
    for call in (
        lambda: store.get("gs://secret/a"),
        lambda: store.put_if_absent("gs://secret/a", b"x"),
        lambda: store.list("gs://secret/a"),
        lambda: blobs.read_range("gs://secret/a", 0, 1),
    ):
        with pytest.raises(AccessError) as caught:
            call()
        assert caught.value.hint
        assert "\n" not in str(caught.value)
    with pytest.raises(BackendError, match="bucket"):
        store.put("gs://no-such-bucket/a", b"x")


def test_an_unreachable_bucket_is_a_backend_error(monkeypatch):
    pytest.importorskip("google.cloud.storage")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(BackendError):
        open_store().get("gs://bucket/a")
    assert time.monotonic() - began < 5  # nothing was retried
