"""URIs as text, and how a store's errors read."""

import os

import pytest

from muster.core.errors import AccessError, BackendError, ConflictError, UsageError
from muster.storage import uris
from muster.storage.store import LocalStore, open_store
from muster.storage.store.local import translated


@pytest.mark.parametrize(
    ("uri", "parts", "joined"),
    [
        ("/a", ("b",), "/a/b"),
        ("/a/", ("b/", "/c"), "/a/b/c"),
        ("/", ("b",), "/b"),
        ("gs://bucket", ("a",), "gs://bucket/a"),
        ("gs://bucket/", ("a", ""), "gs://bucket/a"),
        ("memory://", ("a",), "memory://a"),
        ("relative", ("x",), "relative/x"),
    ],
)
def test_join(uri, parts, joined):
    assert uris.join(uri, *parts) == joined


def test_schemes():
    assert [uris.scheme(uri) for uri in ("/a", "a:b", "file:///a", "gs://b", "gcs://b", "S3://b", "memory://x")] == [
        "file", "file", "file", "gs", "gs", "s3", "memory",
    ]  # fmt: skip
    assert str(uris.local_path("file:///a/b")) == "/a/b"
    assert uris.bucket_and_key("gs://b/c/d") == ("b", "c/d")
    for wrong in ("gs://", "gs:///a"):
        with pytest.raises(UsageError):
            uris.bucket_and_key(wrong)
    with pytest.raises(UsageError):
        uris.local_path("gs://b/c")
    with pytest.raises(UsageError, match="ftp"):
        open_store().get("ftp://host/file")


def test_operating_system_errors_are_ours(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    store = LocalStore()
    for call in (
        lambda: store.put(str(tmp_path / "file" / "below"), b"x"),
        lambda: store.put_if_absent(str(tmp_path / "file" / "below"), b"x"),
        lambda: store.get(str(tmp_path)),
    ):
        with pytest.raises(BackendError):
            call()
    with pytest.raises(AccessError) as caught, translated("u"):
        raise PermissionError(13, "Permission denied")
    assert caught.value.hint
    with pytest.raises(BackendError, match="No space") as caught, translated("u"):
        raise OSError(28, "No space left on device")
    assert caught.value.hint


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    store = LocalStore()
    uri = str(tmp_path / "object")
    generation = store.put(uri, b"old")

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for call in (
        lambda: store.put(uri, b"new"),
        lambda: store.put_if(uri, b"new", generation),
        lambda: store.put_if_absent(str(tmp_path / "other"), b"new"),
    ):
        with pytest.raises(BackendError):
            call()
    monkeypatch.undo()
    assert store.get(uri).data == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".muster-lock", "object"]


def test_coarse_clocks_still_tell_writes_apart(tmp_path, monkeypatch):
    """On a file system that keeps whole seconds, the forced modification time rises by seconds."""
    real = os.utime
    monkeypatch.setattr(os, "utime", lambda fd, ns: real(fd, ns=(ns[0] // 10**9 * 10**9, ns[1] // 10**9 * 10**9)))
    store = LocalStore()
    uri = str(tmp_path / "object")
    seen = [store.put_if_absent(uri, b"x")]
    for _ in range(6):
        seen.append(store.put_if(uri, b"x", seen[-1]))
    assert len(set(seen)) == len(seen)
    with pytest.raises(ConflictError):
        store.put_if(uri, b"x", seen[0])
