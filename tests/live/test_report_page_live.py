"""The report page in a real headless Chromium, opened from a file: it draws, zooms, speaks and stays offline."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from muster.report import api
from muster.report.ledger.step_budget import Lever, StepBudget
from muster.report.render.page import render

pytestmark = pytest.mark.live
UNIT = Path(__file__).parents[1] / "unit" / "report"


def unit(name):
    spec = importlib.util.spec_from_file_location(f"{name}_for_page", UNIT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


on_purpose = unit("test_on_purpose")


def made_up_run(directory: Path) -> Path:
    unit("faulty_run").write(directory / "events")
    return directory


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    place = tmp_path_factory.mktemp("page")
    path = place / "report.html"
    path.write_text(api.render_html(api.load(made_up_run(place / "run"))), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser, page):
    browser.size(1280, 900)
    browser.open(page)
    browser.wait("document.documentElement.dataset.ready")
    return browser


def lit(browser, chart):
    """How many pixels of a chart's canvas are drawn."""
    return browser.run(
        "const c = document.querySelectorAll('.chart canvas')[arguments[0]];"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n",
        chart,
    )


def shown(browser):
    """The moments on the x axis of the first chart, from its live region."""
    return browser.run("return document.getElementById('said').textContent")


def test_it_draws_every_chart_without_an_error(opened):
    assert opened.run("return document.querySelectorAll('.chart canvas').length") == 10
    assert all(lit(opened, chart) > 300 for chart in range(10))
    assert opened.messages() == []
    figures = opened.run("return [...document.querySelectorAll('.figure .name')].map(e => e.textContent)")
    assert figures[:5] == ["Held-out loss", "Training loss", "Execution accuracy", "Time", "Cost"]
    assert "Goodput, active hosts60.93 %" in opened.run("return document.querySelector('.figures').textContent")
    assert "23% of the host time went to spare" in opened.run("return document.getElementById('next').textContent")
    assert opened.run("return performance.getEntriesByType('resource').length") == 0


def test_lanes_show_what_hosts_did(opened):
    """Below the mouse in host-1's lane: its restart, with the incident's sentence."""
    opened.keys("#charts [tabindex='0']", "n")
    box = opened.run(
        "const lanes = [...document.querySelectorAll('.chart')].find(c => c.textContent.startsWith('What every host'));"
        "lanes.scrollIntoView({behavior: 'instant'});"
        "const r = lanes.querySelector('.u-over').getBoundingClientRect();"
        "return [r.left, r.top, r.width, r.height]"
    )
    opened.point(int(box[0] + box[2] * 0.45), int(box[1] + box[3] * 0.5))
    opened.wait("!document.getElementById('tip').hidden")
    tip = opened.run("return document.getElementById('tip').textContent")
    assert "host-1: restart" in tip and "killed by signal 9" in tip


def test_the_keyboard_is_enough(opened):
    opened.keys("#charts [tabindex='0']", "+")
    assert shown(opened) == "Showing 0:54 to 2:41"
    opened.keys("#charts [tabindex='0']", "\ue014")  # arrow right
    assert shown(opened) == "Showing 1:15 to 3:02"
    opened.keys("#charts [tabindex='0']", "n")
    assert "killed by signal 9" in shown(opened)
    opened.keys("#charts [tabindex='0']", "0")
    assert shown(opened) == "Showing 0:00 to 3:34"


def by(browser, name):
    browser.run("document.querySelector(`[data-by=${arguments[0]}]`).click()", name)
    return browser.run("return [...document.querySelectorAll('#charts h3')].map(e => e.firstChild.textContent)")


def test_charts_by_step_and_by_tokens(opened):
    """By steps the curve is each step once; what only time orders is not drawn."""
    for name, whole in (("step", "Showing 0 to 60"), ("tokens", "Showing 0 to 3.93M")):
        titles = by(opened, name)
        assert titles[:2] == ["Loss", "Execution accuracy"] and "What every host was doing" not in titles
        opened.keys("#charts [tabindex='0']", "0")
        assert shown(opened) == whole and opened.messages() == []
        assert all(lit(opened, chart) > 200 for chart in range(len(titles)))
    assert "What every host was doing" in by(opened, "time")


@pytest.fixture
def paused(browser, tmp_path):
    """Twenty steps, a day in which nothing was held, twenty steps more; on hosts that cost nothing."""
    clock = on_purpose.Hand()
    on_purpose.attempt(tmp_path, clock, 1, first=1, asked=True)
    clock.now_ns += 86_400 * on_purpose.S
    on_purpose.attempt(tmp_path, clock, 2, first=21, asked=True, outcome="succeeded")
    target = tmp_path / "paused.html"
    target.write_text(api.render_html(api.load(tmp_path)), encoding="utf-8")
    browser.size(480, 900)
    browser.open(target)
    browser.wait("document.documentElement.dataset.ready")
    return browser


def test_a_pause_in_which_nothing_was_held_is_not_drawn(paused):
    paused.keys("#charts [tabindex='0']", "0")
    assert shown(paused) == "Showing 0:00 to 0:52"
    assert "nothing was held (24 h 00 min) is left out" in paused.run(
        "return document.getElementById('charts').innerText"
    )
    attempts = paused.run("return [...document.querySelectorAll('.pairs tr')].map(e => e.innerText)")
    assert any(row.split()[:2] == ["2", "0:26"] for row in attempts), attempts


def test_a_run_that_cost_nothing_shows_no_dollars(paused):
    assert "$" not in paused.run("return document.body.innerText")
    assert paused.run("return document.documentElement.scrollWidth") <= 480


def test_no_moment_has_a_sixtieth_second(browser, tmp_path):
    report = api.load(made_up_run(tmp_path / "run"))
    first, second, *others = report.document.incidents
    moved = (replace(first, at_s=119.7), replace(second, at_s=3599.6), *others)
    found = replace(report.document, incidents=moved)
    target = tmp_path / "rounded.html"
    target.write_text(render(report.ledger, found), encoding="utf-8")
    browser.size(1280, 900)
    browser.open(target)
    browser.wait("document.documentElement.dataset.ready")
    text = browser.run("return document.getElementById('incidents').innerText")
    assert "at 2:00" in text and "at 1:00:00" in text and ":60" not in text


def test_a_step_and_its_parts_are_shown(browser, tmp_path):
    report = api.load(made_up_run(tmp_path / "run"))
    lever = Lever(part="data_wait", worth_s=0.03, worth_share=0.3, usd_per_day=72.0, advice="faster storage")
    parts = {"compute": 0.06, "communication": 0.01, "data_wait": 0.03}
    budget = StepBudget(
        steps=10, step_s=0.1, parts_s=parts, planned_step_s=0.05, planned_s={"compute": 0.05}, levers=[lever]
    )
    target = tmp_path / "step.html"
    target.write_text(render(report.ledger, replace(report.document, step_budget=budget)), encoding="utf-8")
    browser.size(1280, 900)
    browser.open(target)
    browser.wait("document.documentElement.dataset.ready")
    text = browser.run("return document.getElementById('step').innerText")
    assert "mean of 10" in text and "planned ms" in text and "60.0" in text
    assert "Next: data wait, worth 30 % of a step at most, $72.00 a day: faster storage." in text
    assert browser.messages() == []


def test_both_themes_draw(opened):
    before = opened.run("return getComputedStyle(document.body).backgroundColor")
    opened.run("document.getElementById('theme').click()")
    after = opened.run("return getComputedStyle(document.body).backgroundColor")
    assert before != after
    assert all(lit(opened, chart) > 300 for chart in range(10))
    opened.run("document.getElementById('theme').click()")


def test_a_narrow_screen_needs_no_sideways_scrolling(browser, page):
    browser.size(360, 740)
    browser.open(page)
    browser.wait("document.documentElement.dataset.ready")
    assert browser.run("return document.documentElement.scrollWidth") <= 360
    assert all(lit(browser, chart) > 200 for chart in range(10))


def test_what_is_unknown_is_said_and_not_drawn(browser, tmp_path):
    """A log with a single purchase in it: no chart pretends to know."""
    spec_dir = made_up_run(tmp_path / "run")
    for path in (spec_dir / "events").glob("host-*"):
        path.unlink()
    target = tmp_path / "bare.html"
    target.write_text(api.render_html(api.load(spec_dir)), encoding="utf-8")
    browser.size(1280, 900)
    browser.open(target)
    browser.wait("document.documentElement.dataset.ready")
    assert browser.messages() == []
    text = browser.run("return document.body.innerText")
    assert "No reference rate" in text and "No checkpoint was committed" in text and "unknown" in text
    assert browser.run("return document.querySelectorAll('.chart canvas').length") == 2  # lanes and cost


def test_text_of_a_run_is_only_text(browser, tmp_path):
    spec_dir = made_up_run(tmp_path / "run")
    report = api.load(spec_dir)
    for incident in report.ledger.incident_records.values():
        incident.evidence = "<img src=x onerror=\"document.title='owned'\"></script><b id=owned>"
    target = tmp_path / "evil.html"
    target.write_text(api.render_html(report), encoding="utf-8")
    browser.open(target)
    browser.wait("document.documentElement.dataset.ready")
    assert browser.run("return document.getElementById('owned')") is None
    assert browser.run("return document.title") != "owned"
