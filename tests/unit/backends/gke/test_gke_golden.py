"""Golden renderings: what is sent, byte by byte, a case per branch (``python tests/golden/gke/cases.py`` rewrites)."""

import pytest
from cases import HERE, cases, text

CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_as_recorded(name):
    for file, content in text(CASES[name]).items():
        assert content == (HERE / name / file).read_text(), f"{name}/{file}: python {HERE / 'cases.py'} if meant"


def test_no_record_without_a_case():
    assert {path.parent.name for path in HERE.glob("*/*.yaml")} == set(CASES)
