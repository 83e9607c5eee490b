"""The page as text: whole, self-contained, safe against what a run may hold."""

import json
import random
import re

import pytest
from faulty_run import Writer, write
from random_runs import Pen, implausible, plausible

from muster.report import api
from muster.report.ledger.fold import fold
from muster.report.render import page, series


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    write(place / "events")
    return api.render_html(api.load(place))


def data_of(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


def test_one_file_that_loads_nothing(html):
    assert len(html.encode()) < 1_500_000
    assert "default-src 'none'" in html
    assert not re.search(r'(?:src|href)="(?:https?:)?//', html)
    assert not re.search(r"@import|url\((?!data:)", html)
    assert not re.search(r"/\*(STYLE|LIBRARY|SCRIPT|DATA)\*/|<!--TITLE-->", html)


def test_the_page_holds_the_document(html):
    found = data_of(html)
    assert found["report"]["tokens"] == 60 * 65_536
    assert found["report"]["kind"] == "muster.report"
    assert [lane["host"] for lane in found["series"]["lanes"]] == ["host-0", "host-1", "host-2"]


def test_text_of_a_run_never_becomes_markup(tmp_path):
    evil = "</script><script>alert(1)</script><!--"
    writer = Writer(tmp_path / "events")
    detail = {"spec_digest": "0", "backend": "local", "version": "0", "name": evil}
    writer.add("client", 0.0, "run.submitted", detail=detail)
    writer.close()
    html = api.render_html(api.load(tmp_path))
    assert html.count("<script") == 3
    assert "alert(1)</script>" not in html
    assert data_of(html)["report"]["name"] == evil


def test_a_run_may_be_named_like_a_mark_of_the_page_and_hold_what_no_file_can(tmp_path):
    data = {"report": {"name": "/*SCRIPT*/ <!--TITLE-->"}, "text": "\ud800\u202e\x1b"}
    text = page.fill(data, title="/*DATA*/ \ud800")
    page.write(text, tmp_path / "page.html")
    assert data_of(text) == data and not set("\ud800\u202e\x1b") & set(text)


def test_the_library_stands_unchanged_with_its_licence():
    assert "leeoniya/uPlot (v1.6.32)" in page._asset("uplot.iife.min.js")
    assert "MIT" in page._asset("LICENSE.uplot")


def test_no_line_crosses_an_outage_and_nothing_unknown_is_zero():
    for seed in range(40):
        ledger = fold(plausible(seed))
        found = series.series(ledger)
        attempts = set(ledger.lineage.steps.attempt.tolist())
        gaps = sum(step is None for step in found["steps"]["step"])
        assert gaps == max(0, len(attempts) - 1)
        assert all(value is None for value in found["steps"]["mfu"])
        for lane in found["lanes"]:
            assert all(a <= b for a, b, *_ in lane["segments"])


def test_curves_of_nonsense_are_still_json():
    for seed in range(100):
        json.dumps(series.series(fold(implausible(seed))), allow_nan=False)


def test_long_runs_are_thinned_but_keep_their_extremes(tmp_path):
    world = {"world_size": 1, "layout": {}, "hosts": {"h": [0]}}
    pen = Pen(random.Random(1))
    pen.add("supervisor", 0, "attempt.started", attempt=1, detail=world)
    plain = {"grad_norm": None, "learning_rate": None, "step_ns": 1, "tokens": 1}
    for step in range(1, 50_001):
        detail = {**plain, "supervised_tokens": 1, "padding_tokens": 0, "loss": 99.0 if step == 31_235 else 1.0}
        pen.add("h", step, "step", attempt=1, rank=0, step=step, detail=detail)
    steps = fold(pen.files).lineage.steps
    chosen = series._thinned(steps)
    assert len(chosen) < 3000
    assert steps.numbers("loss")[chosen].max() == 99.0
    assert steps.step[chosen[0]] == 1 and steps.step[chosen[-1]] == 50_000
