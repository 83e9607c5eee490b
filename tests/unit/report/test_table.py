"""What people read: the table, the comparison, durations in words."""

import pytest
from faulty_run import Writer, write

from muster.report import api
from muster.report.render.sentences import format_duration


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    write(place / "events")
    return api.load(place)


@pytest.mark.parametrize("width", [60, 100, 160])
def test_the_table_fits_its_width(report, width):
    lines = api.render_table(report, width=width).splitlines()
    assert max(len(line) for line in lines) <= width


def test_the_table_says_it_all(report):
    text = api.render_table(report, width=140)
    for words in ("60.93%", "43.70%", "productive", "redone", "replaced by host-2", "p50 13.8 s", "$3.61", "0.8"):
        assert words in text


def test_it_leads_with_what_was_learned_and_what_it_cost(report):
    lines = api.render_table(report, width=80).splitlines()
    assert [line.split("  ")[0] for line in lines[2:7]] == [
        "held-out loss", "training loss", "execution accuracy", "time", "cost"
    ]  # fmt: skip
    assert lines[-4] == "What to do next"


def test_a_run_that_cost_nothing_shows_no_dollars(tmp_path):
    write(tmp_path / "events", price=0.0)
    assert "$" not in api.render_table(api.load(tmp_path), width=120)


def test_no_colours_unless_asked(report):
    assert "\x1b[" not in api.render_table(report)
    assert "\x1b[" in api.render_table(report, color=True)


def test_an_empty_run_has_a_table_too(tmp_path):
    writer = Writer(tmp_path / "events")
    writer.add("client", 0.0, "run.submitted", detail={"spec_digest": "0", "backend": "local", "version": "0"})
    writer.close()
    text = api.render_table(api.load(tmp_path))
    assert "not finished" in text and "unknown" in text


def test_runs_side_by_side(report, tmp_path):
    write(tmp_path / "events", price=48.0)
    found = api.compare(report, api.load(tmp_path))
    row = found.figures["cost.usd"]
    assert row.ratio == [1.0, pytest.approx(2.0)]
    assert found.figures["tokens"].change == [0, 0]
    text = api.render_comparison(found, width=140)
    assert "+100.0%" in text and "productive" in text


def test_what_is_unknown_in_one_run_is_not_compared(report, tmp_path):
    write(tmp_path / "events", price=None)
    row = api.compare(report, api.load(tmp_path)).figures["cost.usd"]
    assert row.values[1] is None and row.change[1] is None and row.ratio[1] is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "unknown"),
        (0.0, "0 ms"),
        (0.0421, "42 ms"),
        (0.42, "0.42 s"),
        (12.34, "12.3 s"),
        (59.7, "1 min 00 s"),
        (250, "4 min 10 s"),
        (3 * 3600 + 299, "3 h 04 min"),
    ],
)
def test_durations_in_words(value, words):
    assert format_duration(value) == words
