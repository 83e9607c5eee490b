"""What the double of gcsfuse makes of a volume's options, and how it keeps files, without a mount.

What needs the kernel is in ``tests/live/test_gcsfuse_live.py``.
"""

import errno
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[2] / "live" / "kube"))
import fuse_wire
import gcsfuse_bucket
from gcsfuse_bucket import Bucket, NotFound, Precondition
from gcsfuse_files import File, Streams, Window
from gcsfuse_options import BadOption, Settings, of_volume, settings, told

pytest.importorskip("google_crc32c", reason="comes with the gcs extra")
from fakes.gcs import Faults, GcsFake

#: The structures of linux/fuse.h, in bytes.
SIZES = {
    "IN_HEADER": 40, "OUT_HEADER": 16, "ATTR": 88, "ENTRY": 40, "ATTR_VALID": 16, "OPEN": 16, "READ_WRITE": 40,
    "SETATTR": 88, "INIT_OUT": 64, "STATFS": 80, "DIRENT": 24,
}  # fmt: skip
FAST = "a3-megagpu-8g"


@pytest.fixture
def fake():
    with GcsFake() as found:
        yield found


def bucket(fake, ttl_s=0.0, negative_ttl_s=0.0):
    return Bucket(fake.url, "bucket", ttl_s=ttl_s, negative_ttl_s=negative_ttl_s)


def file(of, name, source=None, number=itertools.count(2), streams=None, **changes):  # noqa: B008
    return File(next(number), name, source, of, Settings(**changes), streams or Streams(4))


def test_row_18_messages_have_the_kernels_sizes():
    assert {name: getattr(fuse_wire, name).size for name in SIZES} == SIZES


def test_row_18_flags_and_config_lines():
    flags, config = told(
        ["implicit-dirs", "file-mode=600", "metadata-cache:ttl-secs:0", "log-file=/x", "logging:severity:debug"],
        {"fileCacheCapacity": "10Gi", "metadataCacheTTLSeconds": "30", "bucketName": "b"},
    )
    assert flags == {"implicit-dirs": "", "file-mode": "600"}  # the driver keeps log-file to itself
    assert config == {"metadata-cache:ttl-secs": "30", "logging:severity": "debug", "file-cache:max-size-mb": "10240"}
    options, attributes, name = of_volume(
        {"readOnly": True, "volumeAttributes": {"bucketName": "b", "mountOptions": "uid=7,dir-mode=700"}}, fs_group=9
    )
    found = settings(options, attributes)
    assert name == "b" and found == Settings(uid=7, gid=9, file_mode=0o664, dir_mode=0o700, read_only=True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["metadata-cache-ttl=0"], "unknown flag: --metadata-cache-ttl"),
        (["metadata-cache:ttl:0"], "metadata-cache:ttl"),
        (["rename-dir-limit=many"], "invalid argument"),
        (["implicit-dirs=perhaps"], "invalid argument"),
        (["profile=fast"], "profile"),
    ],
)
def test_row_18_what_gcsfuse_does_not_know_keeps_the_pod_from_starting(options, text):
    with pytest.raises(BadOption, match=text):
        settings(options)


def test_row_18_every_volume_of_the_goldens_is_taken_by_every_version():
    """And means the same on all of them: no option goes by a config file that some versions ignore."""
    yaml = pytest.importorskip("yaml")
    found = 0
    for path in sorted((Path(__file__).parents[2] / "golden" / "gke").glob("*/run.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            for csi in volumes(document):
                options, attributes, _ = of_volume(csi)
                for machine in ("e2-standard-8", FAST):
                    now, old = (
                        settings(options, attributes, machine=machine, version=version)
                        for version in ("3.11.2", "3.5.3")
                    )
                    assert now == old, path
                found += 1
    assert found


def volumes(value):
    """The ``csi`` volumes in a manifest, at any depth."""
    if isinstance(value, dict):
        if value.get("driver") == "gcsfuse.csi.storage.gke.io":
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from volumes(one)


def test_row_18_machines_and_profiles_have_their_own_defaults():
    slow, fast = settings([], machine="e2-standard-16"), settings([], machine=FAST)
    assert slow == Settings() and (slow.ttl_s, slow.metadata_cache_negative_ttl_secs) == (60, 5)
    assert (fast.ttl_s, fast.metadata_cache_negative_ttl_secs) == (-1, 0)
    assert (fast.implicit_dirs, fast.rename_dir_limit, fast.write_global_max_blocks) == (True, 200_000, 1600)
    assert settings([], machine="a3-highgpu-1g") == slow  # not of the group
    assert settings(["profile=aiml-checkpointing"]).rename_dir_limit == 200_000
    assert settings(["profile:aiml-serving"]).kernel_list_cache_ttl_secs == -1
    assert settings(["stat-cache-max-size-mb=0"]).ttl_s == 0


@pytest.mark.parametrize("version", ["3.4.0", "3.5.3", "3.5.6", "3.6.0", "3.11.2"])
def test_row_18_some_versions_hear_only_flags_on_fast_machines(version):
    deaf = version < "3.6" and version != "3.11.2"
    config = ["metadata-cache:ttl-secs:0", "file-system:rename-dir-limit:5", "file-system:file-mode:600"]
    found = settings(config, machine=FAST, version=version)
    assert (found.ttl_s, found.rename_dir_limit) == ((-1, 200_000) if deaf else (0, 5))
    assert found.file_mode == 0o600  # no default of the machine's: heard
    assert settings(["metadata-cache-ttl-secs=0"], machine=FAST, version=version).ttl_s == 0
    assert settings(config, machine="e2-standard-4", version=version).ttl_s == 0
    assert settings([], {"metadataCacheTTLSeconds": "0"}, machine=FAST, version=version).ttl_s == (-1 if deaf else 0)


def test_row_18_the_first_flush_wins_and_the_other_is_stale(fake):
    one, other = (file(bucket(fake), "f") for _ in range(2))
    for each in (one, other):
        each.new()
        each.write(memoryview(b"x" * each.inode), 0)
        each.sync()
    assert fake.buckets["bucket"] == {}
    other.flush()
    with pytest.raises(OSError) as caught:
        one.flush()
    assert caught.value.errno == errno.ESTALE
    assert len(fake.buckets["bucket"]["f"].data) == other.inode


def test_row_18_an_upload_that_gave_up_breaks_its_file_until_it_is_closed(fake):
    one = file(bucket(fake), "f", chunk_retry_deadline_secs=0)
    one.new()
    one.opens = 2
    one.write(memoryview(b"x"), 0)
    fake.weather.faults = Faults(unavailable=1, lost=0)
    for call in (one.flush, lambda: one.write(memoryview(b"y"), 1), one.flush):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.EIO
    fake.weather.faults = None
    one.closed()
    with pytest.raises(OSError):
        one.write(memoryview(b"y"), 1)
    one.closed()
    one.new()
    one.write(memoryview(b"again"), 0)
    one.flush()
    assert fake.buckets["bucket"]["f"].data == b"again"


def test_row_18_streams_are_counted_and_come_back(fake):
    streams = Streams(1)
    first, second, third = (file(bucket(fake), name, streams=streams) for name in "abc")
    first.new()
    second.new()
    assert first.stream is not None and second.stage is not None
    first.flush()
    third.new()
    assert third.stream is not None


def test_row_18_reading_ahead_makes_few_requests(fake):
    of = bucket(fake)
    data = bytes(range(256)) * 4096 * 8
    fake.write("bucket", "f", data, {})
    one, window = file(of, "f", of.stat("f")), Window()
    fake.bill.anew()
    assert b"".join(bytes(one.read(window, at, 4096)) for at in range(0, len(data), 4096)) == data
    assert fake.bill.operations["objects.get"] <= 5
    assert bytes(one.read(window, len(data), 10)) == b""


def test_row_18_names_are_remembered_and_forgotten(fake):
    of = bucket(fake, ttl_s=60, negative_ttl_s=60)
    with pytest.raises(NotFound):
        of.stat("f")
    fake.write("bucket", "f", b"1", {})
    with pytest.raises(NotFound):
        of.stat("f")
    found = of.stat("f", fresh=True)
    fake.write("bucket", "f", b"22", {})
    assert of.stat("f") == found  # remembered, of whatever age
    with pytest.raises(Precondition):
        of.insert("f", b"", found)
    assert of.stat("f").size == 2  # a try forgets
    of.delete("f")
    with pytest.raises(NotFound):
        of.stat("f")
    assert bucket(fake).recall("f") == (False, None)  # a time of 0 remembers nothing


def test_row_18_refusals_are_tried_again_for_ever_and_uploads_have_a_deadline(monkeypatch):
    longest = []
    with GcsFake(faults=Faults(unavailable=1, lost=0)) as fake:

        def no_pause(_, most_s):
            longest.append(most_s)
            if len(longest) == 30:
                fake.weather.faults = None
            return 0

        monkeypatch.setattr(gcsfuse_bucket, "random", SimpleNamespace(uniform=no_pause))
        of = bucket(fake)
        with pytest.raises(NotFound):
            of.stat("f")
        assert len(longest) == 30 and max(longest) == gcsfuse_bucket.LONGEST_PAUSE_S
        fake.weather.faults = Faults(unavailable=1, lost=0)
        with pytest.raises(OSError) as caught:
            of.insert("f", b"x", None, deadline_s=0.05)
        assert caught.value.errno == errno.EIO


@pytest.mark.parametrize(("code", "expected"), [(401, "EACCES"), (403, "EACCES"), (404, "ENOENT"), (400, "EIO")])
def test_row_18_errors_of_the_bucket_have_one_number_each(code, expected):
    assert errno.errorcode[gcsfuse_bucket.refusal(code, "x").errno] == expected


def test_row_18_times_keep_their_nanoseconds():
    for at_ns in (1, 10**9, 1_700_000_000_123_456_789, 1_700_000_000_100_000_000):
        assert gcsfuse_bucket.read_time(gcsfuse_bucket.written_time(at_ns)) == at_ns
