"""`muster watch --web` in a real Chromium: two runs side by side, charts that grow, wide and narrow, light and dark."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import eventually

from muster.config import load
from muster.core.event_log import EventLog
from muster.storage import run_registry

pytestmark = pytest.mark.live
UNIT = Path(__file__).parents[1] / "unit" / "report"
MUSTER = [sys.executable, "-m", "muster.cli.main"]
RUN_FILE = """\
name: growing
model:
  config: {model_type: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 4, intermediate_size: 64}
  tokenizer: {kind: word}
  dtype: float32
data: {sources: [{type: text2sql, level: 1, rows: 400}]}
training: {steps: 100000, sequence_length: 64, global_batch_size: 2}
resources: {device: cpu, ranks_per_host: 1}
"""
MADE_UP = "made-up-20261121-101500-ab12"


def muster(*words):
    return subprocess.run([*MUSTER, *words], capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.fixture(scope="module")
def growing(tmp_path_factory):
    """A run that trains until it is ended; beside it the log of a made-up one with faults. Yields its id."""
    place = tmp_path_factory.mktemp("watched")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUSTER_HOME", str(place / "home"))
        (place / "run.yaml").write_text(RUN_FILE)
        spec = importlib.util.spec_from_file_location("faulty_run_for_watch", UNIT / "faulty_run.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        folder = run_registry.home() / "runs" / MADE_UP
        resolved = load.loads(RUN_FILE).spec.model_dump_json()
        run = run_registry.create(MADE_UP, folder, run_file=RUN_FILE, resolved=resolved)
        (run.path / "job.json").write_text(json.dumps({"run_id": MADE_UP}))
        module.write(run.events)
        run_id = muster("submit", str(place / "run.yaml"), f"run_dir={place / 'run'}").splitlines()[0]
        yield run_id
        muster("down", run_id)


@pytest.fixture
def served(browser, growing):
    """The addresses that the command prints."""
    process = subprocess.Popen([*MUSTER, "watch", "--web", growing, MADE_UP], stdout=subprocess.PIPE, text=True)
    yield process.stdout
    browser.open("about:blank")
    browser.messages()
    process.send_signal(2)
    assert process.wait(20) == 130


def opened(browser, address, width=1400):
    browser.size(width, 900)
    browser.open(address)
    browser.wait("document.documentElement.dataset.ready", 30)
    return browser


RUNS = "[...document.querySelectorAll('.run')]"


def steps_drawn(browser):
    """To which step the charts by step go."""
    browser.keys(".run .charts [tabindex='0']", "0")
    return int(browser.run("return document.getElementById('said').textContent").split()[-1].replace(",", ""))


def test_it_shows_what_the_terminal_shows_and_grows(browser, served, growing):
    opened(browser, served.readline().strip())
    browser.wait(f"{RUNS}.length === 2 && {RUNS}.every(run => run.querySelector('canvas'))", 90)
    browser.wait(f"/0 train .pid/.test({RUNS}[0].innerText) && {RUNS}[0].querySelectorAll('canvas').length > 3", 90)
    texts = browser.run(f"return {RUNS}.map(run => run.innerText)")
    assert growing in texts[0] and "of 100,000" in texts[0] and "0 train (pid " in texts[0] and "memory" in texts[0]
    assert "killed by signal 9" in texts[1] and "87.5 %" in texts[1] and "host-2" in texts[1]
    boxes = browser.run(f"return {RUNS}.map(run => run.getBoundingClientRect()).map(box => [box.left, box.top])")
    assert boxes[0][1] == boxes[1][1] and boxes[0][0] < boxes[1][0], "side by side"
    browser.run(f"{RUNS}[0].querySelector('[data-by=step]').click()")
    before = steps_drawn(browser)
    eventually(lambda: steps_drawn(browser) > before, 90)
    browser.keys(".run .charts [tabindex='0']", "+")
    part = browser.run("return document.getElementById('said').textContent")
    drawn = "document.querySelector('.run .charts')"
    browser.run(f"window.former = {drawn}")
    browser.wait(f"{drawn} !== window.former", 60)
    browser.keys(".run .charts [tabindex='0']", "\ue014\ue012")  # right and back: where it is, is said
    said = browser.run("return document.getElementById('said').textContent")
    assert said == part, "the part that was looked at is shown on"
    pressed = browser.run(f"return {RUNS}[0].querySelector('[aria-pressed=true]').textContent")
    assert pressed == "steps", "what was chosen stays when the charts are drawn anew"
    assert browser.messages() == []


@pytest.mark.parametrize("width", [1400, 480])
def test_wide_and_narrow_light_and_dark(browser, served, width):
    opened(browser, served.readline().strip(), width)
    browser.wait(f"{RUNS}.length === 2 && {RUNS}.every(run => run.querySelector('canvas'))", 60)
    grounds = set()
    for _ in range(2):
        browser.run("document.getElementById('theme').click()")
        grounds.add(browser.run("return getComputedStyle(document.body).backgroundColor"))
        drawn = browser.run(
            "return [...document.querySelectorAll('canvas')].map(c => c.getContext('2d')"
            ".getImageData(0, 0, c.width, c.height).data.some((value, i) => i % 4 === 3 && value > 0))"
        )
        assert drawn and all(drawn)
    assert len(grounds) == 2 and browser.messages() == []
    assert browser.run("return document.documentElement.scrollWidth") <= width


def test_the_address_leaves_the_history_and_opens_no_second_page(browser, served):
    address = served.readline().strip()
    code = address.partition("#")[2]
    opened(browser, address)
    browser.wait(f"{RUNS}.length === 2", 30)
    here = browser.run("return [location.href, document.cookie, Object.values(localStorage).join()]")
    assert here[0] == address.partition("#")[0] and code not in "".join(here) and here[1] == ""
    browser.run("location.reload()")
    browser.wait(f"{RUNS}.length === 2", 30)  # the key is this page's, until it is closed
    browser.run("sessionStorage.clear()")
    browser.open("about:blank")
    opened(browser, address)
    browser.wait("document.querySelector('#head .sub').textContent.includes('has opened a page before')", 10)
    assert browser.run(f"return {RUNS}.length") == 0
    opened(browser, served.readline().strip())
    browser.wait(f"{RUNS}.length === 2", 30)


def test_text_of_a_run_is_only_text(browser, served):
    evil = "<img src=x onerror=\"document.title='owned'\"><b id=owned>"
    log = EventLog(MADE_UP, run_registry.home() / "runs" / MADE_UP / "events", "supervisor", 99)
    detail = {"incident_id": "i99", "incident": "rank_exit", "evidence": evil}
    log.append("incident.detected", host="host-0", rank=0, step=30, detail=detail)
    log.close()
    opened(browser, served.readline().strip())
    browser.wait(f"{RUNS}.length === 2 && {RUNS}[1].innerText.includes('onerror')", 90)
    assert browser.run("return document.getElementById('owned')") is None
    assert browser.run("return document.title") == "Muster watch"
