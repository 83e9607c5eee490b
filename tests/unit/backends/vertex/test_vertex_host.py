"""A host of a custom job: its place in ``CLUSTER_SPEC`` in every form that was seen."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.backends.vertex.on_host.meeting import PORT, Peer, Seat, seat
from muster.core.errors import BackendError

PREFIXES = st.sampled_from(
    ["cmle-training-workerpool{}-ab12cd34-{}", "training-workerpool{}-x-{}", "workerpool{}-9b6f87bcee-{}"]
)
JOBS = st.sampled_from(
    [
        None,
        {},
        {"python_module": "", "package_uris": [], "job_args": []},
        '{"python_module":"","package_uris":[],"job_args":[]}',
        "not JSON",
    ]
)


@st.composite
def variants(draw):
    """(the variable, hosts, the index that it gives): what Vertex has been seen to write, in all combinations."""
    workers, reducers = draw(st.integers(0, 9)), draw(st.integers(0, 3))
    prefix, port = draw(PREFIXES), draw(st.sampled_from(["", ":2222", ":3333"]))
    sizes = {"workerpool0": 1, "workerpool1": workers, "workerpool2": reducers, "workerpool3": draw(st.integers(0, 1))}
    cluster = {
        pool: [prefix.format(pool[-1], index) + port for index in range(size)]
        for pool, size in sizes.items()
        if size or draw(st.booleans())  # a skipped pool is absent, or an empty list
    }
    pool = draw(st.sampled_from(["workerpool0", "workerpool1"] if workers else ["workerpool0"]))
    within = draw(st.integers(0, sizes[pool] - 1))
    task = {"type": pool, "index": draw(st.sampled_from([within, str(within)]))}
    if draw(st.booleans()):
        task["trial"] = ""
    spec = {"cluster": cluster, "task": task}
    if draw(st.booleans()):
        spec["environment"] = "cloud"
    if draw(st.booleans()):
        spec["open_ports"] = [3333]
    if (job := draw(JOBS)) is not None:
        spec["job"] = job
    names = list(spec)
    order = draw(st.permutations(names))
    return json.dumps({name: spec[name] for name in order}), 1 + workers, within + (pool == "workerpool1"), port


@settings(max_examples=60, deadline=None)
@given(variants())
def test_every_form_that_was_seen_gives_the_place(variant):
    value, hosts, index, port = variant
    found = seat(value, hosts=hosts)
    assert (found.index, len(found.peers), found.chief) == (index, hosts, index == 0)
    assert {peer.port for peer in found.peers} == {int(port[1:] or PORT)}
    assert all("workerpool2" not in peer.name and ":" not in peer.name for peer in found.peers)


KEYS = st.sampled_from(["cluster", "task", "workerpool0", "workerpool1", "type", "index"])
LEAVES = st.none() | st.integers() | st.text()
SHAPES = st.recursive(LEAVES, lambda one: st.lists(one) | st.dictionaries(KEYS, one))


@settings(max_examples=60, deadline=None)
@given(st.text() | SHAPES.map(json.dumps))
def test_anything_else_is_refused_in_one_line(value):
    try:
        found = seat(value, hosts=2)
    except BackendError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
    else:
        assert found.index in (0, 1) and len(found.peers) == 2


def test_the_documented_example():
    value = json.dumps(
        {
            "cluster": {
                "workerpool0": ["cmle-training-workerpool0-ab-0:2222"],
                "workerpool1": ["cmle-training-workerpool1-ab-0:2222", "cmle-training-workerpool1-ab-1:2222"],
                "workerpool2": ["cmle-training-workerpool2-ab-0:2222"],
            },
            "environment": "cloud",
            "task": {"type": "workerpool1", "index": 1, "trial": ""},
        }
    )
    found = seat(value, hosts=3)
    assert found.index == 2
    assert found.peers[0] == Peer(name="cmle-training-workerpool0-ab-0", port=2222)


@pytest.mark.parametrize("value", [None, "", "  "])
def test_a_host_that_is_alone_may_be_told_nothing(value):
    assert seat(value, hosts=1) == Seat(index=0, peers=())
    with pytest.raises(BackendError, match="not set on one of 2 hosts"):
        seat(value, hosts=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task": {"type": "workerpool2", "index": 0}}, "no place"),
        ({"task": {"type": "workerpool1", "index": 1}}, "no place"),
        ({"task": {"type": "workerpool0", "index": -1}}, "no place"),
        ({"task": {"type": "workerpool0", "index": True}}, "no place"),
        ({"task": {}}, "no place"),
        ({"cluster": {"workerpool0": ["a:2222"]}}, "names 1 hosts, and the run has 2"),
        ({"cluster": []}, "names 0 hosts"),
    ],
)
def test_refused_where_it_gives_no_place(change, words):
    spec = {
        "cluster": {"workerpool0": ["a:2222"], "workerpool1": ["b:2222"]},
        "task": {"type": "workerpool0", "index": 0},
    }
    assert seat(json.dumps(spec), hosts=2).chief
    with pytest.raises(BackendError, match=words):
        seat(json.dumps({**spec, **change}), hosts=2)
