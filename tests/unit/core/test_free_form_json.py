"""Reading JSON of any content by path: what is absent or of another type reads as nothing, never as an error."""

import pytest

from muster.core.typed_json import at, changed, child, children, text, texts, whole

POD = {
    "metadata": {"name": "host-0", "labels": {"index": 3}, "generation": "7"},
    "spec": {"suspend": False, "containers": [{"name": "a", "command": ["run", 1]}, "odd"]},
    "status": None,
}


def test_what_is_there():
    assert text(POD, "metadata", "name") == "host-0"
    assert text(POD, "metadata", "labels", "index") == "3"
    assert (whole(POD, "metadata", "generation"), whole(POD, "metadata", "labels", "index")) == (7, 3)
    assert at(POD, "spec", "containers", -1) == "odd"
    assert children(POD, "spec", "containers") == [POD["spec"]["containers"][0]]
    assert texts(POD, "spec", "containers", 0, "command") == ["run"]
    assert child(POD, "metadata", "labels") == {"index": 3}


@pytest.mark.parametrize("path", [("status", "phase"), ("spec", "containers", 9), ("metadata", "name", "x"), ("no",)])
def test_what_is_not_there(path):
    assert at(POD, *path) is None
    assert (text(POD, *path), text(POD, *path, default="?"), whole(POD, *path)) == ("", "?", 0)
    assert (child(POD, *path), children(POD, *path), texts(POD, *path)) == ({}, [], [])


def test_a_switch_is_no_text():
    assert at(POD, "spec", "suspend") is False
    assert text(POD, "spec", "suspend", default="neither") == "neither"


def test_a_number_that_is_none_is_an_error():
    with pytest.raises(ValueError, match="host-0"):
        whole(POD, "metadata", "name")


def test_a_change_leaves_the_original():
    new = changed(POD, "b", "metadata", "labels", "role")
    assert new["metadata"]["labels"] == {"index": 3, "role": "b"}
    assert "role" not in POD["metadata"]["labels"]
    assert changed(POD, 1, "status", "conditions", "first")["status"] == {"conditions": {"first": 1}}
