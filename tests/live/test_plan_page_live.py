"""A plan's page in a real headless Chromium, opened from a file: it draws, answers keys and mouse, stays offline."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from muster.app.planning import plan as use_case
from muster.app.planning import rehearsal_page

pytestmark = pytest.mark.live

RUN = """\
name: eight
backend: gke
model: {source: meta-llama/Llama-3.1-8B}
data: {sources: [{type: random, rows: 100000}]}
training: {steps: 1000, sequence_length: 4096, global_batch_size: 64}
limits: {max_usd: 400, max_hours: 30}
"""
ROWS = "[...document.querySelectorAll('#frontier tbody tr')]"
#: Colours of the canvas that are no grid: pixels of a saturated hue.
VIVID = """
const c = document.querySelector('#charts canvas');
const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
let n = 0;
for (let i = 0; i < d.length; i += 4) {
  const rgb = [d[i], d[i + 1], d[i + 2]];
  n += d[i + 3] > 100 && Math.max(...rgb) - Math.min(...rgb) > 60;
}
return n"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    place = tmp_path_factory.mktemp("plan")
    (place / "run.yaml").write_text(RUN)
    now = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
    planned = use_case.plan(place / "run.yaml", now=now, home=place / "home", reasons=True)
    return planned, rehearsal_page.write(planned, str(place / "plan.html"))


@pytest.fixture
def opened(browser, found):
    browser.size(1280, 900)
    browser.open(found[1])
    browser.wait("document.documentElement.dataset.ready")
    return browser


def test_it_draws_the_chart_and_every_plan_without_an_error(opened, found):
    plan = found[0].plan
    assert opened.messages() == []
    assert opened.run("return performance.getEntriesByType('resource').length") == 0
    assert opened.run(VIVID) > 800
    assert opened.run(f"return {ROWS}.length") == len(plan.frontier)
    assert plan.chosen.title in opened.run("return document.getElementById('head').textContent")
    text = opened.run("return document.body.innerText")
    assert "In time" in text and "Within the budget" in text and "Not taken" in text
    assert "undefined" not in text and "NaN" not in text


def test_keys_go_from_plan_to_plan(opened, found):
    titles = [each.title for each in found[0].plan.frontier]
    marked = f"return {ROWS}.filter(row => row.classList.contains('at')).map(row => row.dataset.title)"
    assert opened.run(marked) == titles[:1]
    opened.keys("#charts [tabindex='0']", "\ue014")  # arrow right
    assert opened.run(marked) == titles[1:2]
    assert opened.run("return document.getElementById('said').textContent").startswith(titles[1])
    opened.keys("#charts [tabindex='0']", "\ue012\ue012")  # arrow left, twice: round the corner
    assert opened.run(marked) == titles[-1:]


def test_the_mouse_finds_a_plan(opened):
    """Over the whole chart in steps: points come under it, and their words appear."""
    box = opened.run(
        "document.getElementById('charts').scrollIntoView({behavior: 'instant'});"
        "const r = document.querySelector('.u-over').getBoundingClientRect(); return [r.left, r.top, r.width, r.height]"
    )
    said = set()
    for down in range(1, 8):
        for across in range(1, 16):
            opened.point(int(box[0] + box[2] * across / 16), int(box[1] + box[3] * down / 8))
            if not opened.run("return document.getElementById('tip').hidden"):
                said.add(opened.run("return document.getElementById('tip').textContent"))
    assert len(said) > 3 and all("GPUs" in words and "p90" in words for words in said)


def test_a_narrow_screen_and_the_other_theme(browser, found):
    browser.size(360, 740)
    browser.open(found[1])
    browser.wait("document.documentElement.dataset.ready")
    assert browser.run("return document.documentElement.scrollWidth") <= 360
    before = browser.run("return getComputedStyle(document.body).backgroundColor")
    browser.run("document.getElementById('theme').click()")
    assert browser.run("return getComputedStyle(document.body).backgroundColor") != before
    assert browser.run(VIVID) > 300
    browser.run("document.getElementById('theme').click()")


def test_offers_without_a_price_are_said_and_not_drawn(browser, found, tmp_path):
    planned, _ = found
    unpriced = tuple(replace(each, usd=replace(each.usd, p50=None)) for each in planned.plan.frontier)
    planned = replace(planned, plan=replace(planned.plan, frontier=unpriced))
    target = tmp_path / "unpriced.html"
    target.write_text(rehearsal_page.render(planned), encoding="utf-8")
    browser.open(target)
    browser.wait("document.documentElement.dataset.ready")
    assert browser.messages() == []
    assert "No offer that fits has a known price" in browser.run("return document.body.innerText")
