"""A rehearsal's page in a real headless Chromium: `muster simulate --html` is the report's page of virtual hosts."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.live

RUN = """\
name: rehearsed
backend: gke
model: {source: meta-llama/Llama-3.1-8B}
data: {sources: [{type: random, rows: 1000}]}
training: {steps: 100000, sequence_length: 4096, global_batch_size: 64}
checkpoint: {every_steps: auto}
resources: {hosts: 8, spare_hosts: 1, min_hosts: 7}
"""


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    place = tmp_path_factory.mktemp("rehearsal")
    (place / "run.yaml").write_text(RUN)
    command = [sys.executable, "-m", "muster.cli.main", "simulate", "run.yaml", "--failures-per-day", "24",
               "--hours", "6", "--seeds", "3", "--paired", "1", "--html", "page.html"]  # fmt: skip
    told = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    browser.size(1280, 900)
    browser.open(place / "page.html")
    browser.wait("document.documentElement.dataset.ready")
    return browser


def test_it_draws_without_an_error_and_says_what_it_is(opened):
    assert opened.messages() == []
    assert opened.run("return performance.getEntriesByType('resource').length") == 0
    head = opened.run("return document.getElementById('head').textContent")
    assert "rehearsal, seed" in head and "virtual hosts and clock" in head
    drawn = opened.run("return [...document.querySelectorAll('.chart')].filter(c => c.querySelector('canvas'))"
                       ".map(c => c.querySelector('h3').textContent)")  # fmt: skip
    for title in ("Goodput", "What every host was doing", "Work at risk"):
        assert any(each.startswith(title) for each in drawn), (title, drawn)


def test_it_shows_the_distribution_and_the_tables_of_the_terminal(opened):
    text = opened.run("return document.getElementById('main').innerText")
    for words in ("3 rehearsals", "8 hosts (64 GPUs), 1 spare", "of purchased hosts", "Where host time went",
                  "host-hours", "Lost per interruption", "Without one thing", "Spare hosts", "Time between saves",
                  "Policies", "most of what is paid for", "No contention, no network", "One of them"):  # fmt: skip
        assert words in text, words
    bars = opened.run("return [...document.querySelectorAll('.histogram')].map(h => h.getAttribute('aria-label'))")
    for said in bars:
        assert sum(int(part.rpartition(": ")[2]) for part in said.split(", ")) == 3
    assert len(bars) == 2
    opened.size(480, 900)
    opened.wait("document.documentElement.scrollWidth <= 480")
    opened.size(1280, 900)


def test_every_host_has_a_lane_and_the_figures_are_numbers(opened):
    data = "JSON.parse(document.getElementById('data').textContent)"
    lanes = opened.run(f"return {data}.series.lanes.map(lane => lane.host)")
    assert lanes == [f"host-{number}" for number in range(9)]
    report = opened.run(f"return {data}.report")
    assert 0.5 < report["goodput"]["active"] <= 1.001
    assert report["host_time"]["identity_error"] < 1e-9
    assert report["incidents"], "24 failures a day in six hours leave some"
    assert {"memory", "peer"} <= set(report["checkpoint_exposure"])


def test_incidents_can_be_gone_through(opened):
    opened.keys("#charts [tabindex='0']", "n")
    said = opened.run("return document.getElementById('said').textContent")
    assert len(said) > 20 and "host-" in said
