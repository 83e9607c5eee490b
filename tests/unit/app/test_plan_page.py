"""A plan's page as text: whole, self-contained, and with the figures of the JSON."""

import json
import re
from datetime import UTC, datetime

import pytest

from muster.app.planning import plan as use_case
from muster.app.planning import rehearsal_page
from muster.core.errors import UsageError
from muster.plan.search import LEAST_GAIN

RUN = """\
name: eight
backend: gke
model: {source: meta-llama/Llama-3.1-8B}
data: {sources: [{type: random, rows: 100000}]}
training: {steps: 1000, sequence_length: 4096, global_batch_size: 64}
limits: {max_usd: 400}
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    place = tmp_path_factory.mktemp("plan")
    (place / "run.yaml").write_text(RUN)
    now = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
    return use_case.plan(place / "run.yaml", now=now, home=place / "home", reasons=True)


def data_of(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


def test_the_page_holds_the_plan_and_loads_nothing(found):
    html = rehearsal_page.render(found)
    assert "default-src 'none'" in html and "muster plan RUN.yaml" in html
    assert not re.search(r'(?:src|href)="(?:https?:)?//', html)
    assert not re.search(r"/\*(STYLE|LIBRARY|SCRIPT|DATA)\*/|<!--(TITLE|PLAIN)-->", html)
    data, answer = data_of(html), json.loads(json.dumps(found.plan.to_json()))
    assert data["plan"]["chosen"] == answer["chosen"]
    assert data["plan"]["why"] and data["limits"] == {"max_usd": 400.0, "max_hours": None}
    assert "run_text" not in data["plan"]


def test_each_candidate_is_one_point(found):
    data = data_of(rehearsal_page.render(found))
    frontier, others = ({each["title"] for each in group} for group in (data["plan"]["frontier"], data["others"]))
    assert frontier and others and not frontier & others
    assert frontier | others == {each.title for each in found.outcome.candidates}
    for point in data["others"]:  # what the frontier is: nothing else is cheaper, or worth its price in time
        dearer = [each["usd"]["p50"] <= point["usd"]["p50"] for each in data["plan"]["frontier"]]
        slower = [each["hours"]["p50"] * (1 - LEAST_GAIN) <= point["hours"]["p50"] for each in data["plan"]["frontier"]]
        assert any(dearer) and any(slower)


def test_a_page_that_cannot_be_written_is_said(found, tmp_path):
    assert rehearsal_page.write(found, str(tmp_path / "plan.html")).stat().st_size > 50_000
    with pytest.raises(UsageError, match="cannot write"):
        rehearsal_page.write(found, str(tmp_path / "no" / "plan.html"))
