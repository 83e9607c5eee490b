"""Mounted buckets are known by the kernel's table, and nothing that needs one winner is written through them."""

import pytest

from muster.core.errors import UsageError
from muster.storage.store import LocalStore, local
from muster.storage.store.local import uri_of_mounted

TABLE = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 27 0:50 / /data rw,nosuid,nodev,relatime shared:2 - fuse.gcsfuse training-data rw,user_id=0,group_id=0
41 27 0:51 /runs/a /home/run rw - fuse my.bucket_1 rw,user_id=0,group_id=0,allow_other
42 27 0:52 / /all rw - fuse.gcsfuse gcsfuse rw
43 27 0:53 / /remote rw - fuse.sshfs me@host:/x rw
44 27 0:54 / /raw rw - fuse /dev/fuse rw
45 27 0:55 / /data/over rw - tmpfs tmpfs rw
46 27 0:56 / /with\040space rw - fuse.gcsfuse bucket-2 rw
47 27 0:57 / /twice rw - fuse.gcsfuse hidden-bucket rw
48 27 0:58 / /twice rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "uri"),
    [
        ("/data/checkpoints/fence.json", "gs://training-data/checkpoints/fence.json"),
        ("/data", "gs://training-data"),
        ("/data2/x", None),
        ("/data/over/x", None),
        ("/home/run/lease.json", "gs://my.bucket_1/runs/a/lease.json"),
        ("/all/bucket/x", "gs://bucket/x"),
        ("/remote/x", None),
        ("/raw/x", None),
        ("/with space/x y", "gs://bucket-2/x y"),
        ("/twice/x", None),
        ("/tmp/x", None),
    ],
)
def test_the_bucket_behind_a_path(tmp_path, path, uri):
    table = tmp_path / "mountinfo"
    table.write_text(TABLE.lstrip())
    assert uri_of_mounted(path, mounts=table) == uri


def test_without_a_table_nothing_is_mounted(tmp_path):
    assert uri_of_mounted("/data", mounts=tmp_path / "none") is None


def test_conditional_writes_on_a_mounted_bucket_are_refused(tmp_path, monkeypatch):
    table = tmp_path / "mountinfo"
    table.write_text(f"1 0 0:1 / {tmp_path}/mnt rw - fuse some-bucket rw\n")
    monkeypatch.setattr(local, "MOUNTS", table)
    (tmp_path / "mnt").mkdir()
    store, lease = LocalStore(), str(tmp_path / "mnt" / "lease.json")
    for write in (lambda: store.put_if_absent(lease, b"x"), lambda: store.put_if(lease, b"x", "1.1")):
        with pytest.raises(UsageError, match="mount of a bucket") as caught:
            write()
        assert "gs://some-bucket/lease.json" in caught.value.hint
    assert list((tmp_path / "mnt").iterdir()) == []
    assert store.put_if_absent(str(tmp_path / "lease.json"), b"x")
