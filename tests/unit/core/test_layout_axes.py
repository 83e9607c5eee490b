"""Layout axes: one table, every axis carried by keys, headers and events."""

import dataclasses

import pytest

from muster.checkpoint_format.shards import ShardHeader, decode_header, encode_header
from muster.checkpoint_format.snapshot_ring import Ring, file_name, list_snapshots
from muster.config.spec import Parallelism
from muster.core.layout import AXES, Layout, layout_for
from muster.report.audit import history

ODD = Layout(**{axis.name: 2 + number for number, axis in enumerate(AXES)})


def test_every_axis_is_in_the_key() -> None:
    assert Layout.from_key(ODD.key) == ODD and ODD.key == "r2s3t4p5c6e7"
    assert len({axis.letter for axis in AXES}) == len(AXES)
    for axis in AXES:
        other = dataclasses.replace(ODD, **{axis.name: 1})
        assert other.key != ODD.key
        assert (other.world_size < ODD.world_size) == (axis.name != "ep"), "ranks of ep are ranks of other axes too"
    for bad in ("", "r1s2t3", "r1s2t1p1c1e1x", "xr1s2t1p1c1e1"):
        with pytest.raises(ValueError, match="not a layout"):
            Layout.from_key(bad)


def test_every_axis_is_in_headers_and_file_names(tmp_path) -> None:
    header = ShardHeader(rank=0, layout=ODD, tensors=())
    assert decode_header(encode_header(header)).layout == ODD
    ring = Ring.create(tmp_path / file_name("own", ODD.key, 3), header=b"{}", slot_bytes=16)
    ring.commit(ring.begin(), step=1, attempt=1, rank=3)
    assert [Layout.from_key(held.layout) for held in list_snapshots(tmp_path)] == [ODD]
    assert Layout.of({"dp_shard": 2}) == Layout(dp_shard=2)
    with pytest.raises(TypeError):
        Layout.of({"unknown": 2})


def test_the_run_file_and_the_audit_know_the_same_axes() -> None:
    assert list(Parallelism().axes) == [axis.name for axis in AXES] == list(history.AXES)


@pytest.mark.parametrize(
    ("axes", "ranks", "expected"),
    [
        ({"dp_replicate": 2}, 6, Layout(dp_replicate=2, dp_shard=3)),
        ({"dp_replicate": 2}, 5, None),
        ({"dp_replicate": 4}, 2, None),
        ({"dp_shard": 2}, 4, None),
        ({"dp_shard": 2, "tp": 2}, 4, Layout(dp_shard=2, tp=2)),
        ({"tp": 3}, 4, None),
    ],
)
def test_without_resizing_the_run_files_own_layout_or_none(axes, ranks, expected) -> None:
    assert layout_for(Parallelism(**axes).axes, ranks) == expected
    assert layout_for({**Parallelism(**axes).axes, "pp": 2}, 2 * ranks) == (
        expected and dataclasses.replace(expected, pp=2)
    )
