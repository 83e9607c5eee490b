"""Versions of torch, transformers and flash-attn: what is refused, what is tested, and what pyproject.toml allows."""

import tomllib
from pathlib import Path

import pytest

from muster.catalog import libraries
from muster.core.errors import UsageError

requirements = pytest.importorskip("packaging.requirements")
PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
GOOD = {"torch": "2.13.0+cu130", "transformers": "5.23.0"}


def test_pyproject_allows_what_was_tested_and_no_more():
    allowed = {
        one.name: one.specifier
        for one in map(requirements.Requirement, PROJECT["project"]["optional-dependencies"]["train"])
    }
    for name in ("torch", "transformers"):
        tested = sorted({libraries.release(getattr(row, name)) for row in libraries.libraries().tested})
        assert all(allowed[name].contains(".".join(map(str, version))) for version in tested), name
        major, low, _ = tested[0]
        _, high, patch = tested[-1]
        assert not allowed[name].contains(f"{major}.{low - 1}.9"), name
        assert not allowed[name].contains(f"{major}.{high + 1}.0"), name
        assert allowed[name].contains(f"{major}.{high}.{patch + 1}"), "a release that mends is allowed"
    minors = {libraries.release(row.torch)[1] for row in libraries.libraries().tested}
    assert minors == set(range(min(minors), max(minors) + 1)), "no torch between the oldest and the newest is untried"


@pytest.mark.parametrize(
    ("changes", "attention", "words"),
    [
        ({"torch": "2.10.1+cu128"}, "auto", "torch 2.10.1+cu128 cannot be used"),
        ({"transformers": "4.57.1"}, "auto", "transformers 4.57.1 cannot be used"),
        ({"flash-attn": "2.2.0"}, "auto", "flash-attn 2.2.0 cannot be used"),
        ({"flash-attn": "2.2.0"}, "varlen", None),
        ({"flash-attn": "2.8.3.post2"}, "auto", None),
        ({"flash-attn-4": "4.0.0b36"}, "auto", "without flash-attn"),
        ({"flash-attn-4": "4.0.0b36"}, "sdpa", None),
        ({"flash-attn-4": "4.0.0b36", "flash-attn": "2.8.3"}, "auto", None),
        ({}, "auto", None),
    ],
)
def test_what_is_refused(changes, attention, words):
    found = {**GOOD, **changes}
    if words is None:
        libraries.refuse(found, attention=attention)
        return
    with pytest.raises(UsageError, match=words.replace("+", r"\+")) as error:
        libraries.refuse(found, attention=attention)
    assert "\n" not in str(error.value) and error.value.hint


@pytest.mark.parametrize(
    ("torch", "transformers", "tested"),
    [
        ("2.13.0+cpu", "5.23.0", True),
        ("2.13.1", "5.23.4", True),
        ("2.11.0+cu130", "5.21.2", True),  # between two that were run
        ("2.13.0", "5.22.0", False),
        ("2.14.0.dev20261101+cu130", "5.23.0", False),
        ("2.15.0", "5.23.0", False),
    ],
)
def test_what_nobody_tried_is_said_in_a_line(torch, transformers, tested):
    line = libraries.untested({"torch": torch, "transformers": transformers})
    assert (line is None) == tested
    if line:
        assert torch in line and transformers in line and "2.13.0 with 5.23.0" in line and "\n" not in line


def test_a_machine_without_torch_is_not_judged():
    libraries.refuse({})
    assert libraries.untested({"transformers": "5.23.0"}) is None


def test_what_is_installed_here_is_tested():
    found = libraries.installed()
    assert {"torch", "transformers"} <= found.keys()
    libraries.refuse(found)
    assert libraries.untested(found) is None
