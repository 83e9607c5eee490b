"""The YAML we write reads back alike under YAML 1.1 (Kubernetes) and 1.2."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from muster.backends.gke.manifests.yaml_text import dump

SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=12)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(max_size=6), VALUES, max_size=3))
def test_round_trip(document):
    assert YAML(typ="safe", pure=True).load(dump([document])) == document


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text("abcxyz019._-/ ", max_size=6), VALUES, max_size=3))
def test_round_trip_under_yaml_1_1(document):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    assert yaml.safe_load(dump([document])) == document


@pytest.mark.parametrize(
    "word", ["on", "Off", "y", "no", "true", "null", "012", "1:30", "1e3", "0x1f", ".inf", "~", "=", "<<"]
)
def test_strings_that_yaml_reads_as_something_else(word):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    assert yaml.safe_load(dump([{"a": word}])) == {"a": word}


def test_lines_of_text_stay_readable():
    assert dump([{"a": "one\ntwo\n"}]) == "a: |\n  one\n  two\n"
