"""Published runs as an outside check: rows that nothing was fitted on, and the documentation's copy of the table."""

import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from plan_anchors import anchors, checks, median_error, table, unfitted  # noqa: E402
from plan_published import errors, markdown, promised, runs  # noqa: E402


def test_checked_rows_are_predicted():
    found = checks(anchors())
    checked = [each for each in found if each.anchor.use == "check"]
    assert len(checked) >= 12 and len({each.anchor.stack for each in checked}) >= 5
    assert median_error(found) < 0.08
    assert max(abs(each.error) for each in checked) < 0.40


def test_each_stack_has_one_efficiency_and_it_is_credible():
    by_stack = {}
    for each in checks(anchors()):
        by_stack.setdefault(each.anchor.stack, set()).add(each.efficiency)
    assert all(len(found) == 1 for found in by_stack.values())
    assert all(0.3 < next(iter(found)) < 1.0 for found in by_stack.values())


def test_the_documentation_shows_this_table():
    assert table() in (ROOT / "docs" / "explanation" / "plan.md").read_text(), (
        "run benchmarks/plan_anchors.py and paste it"
    )
    assert unfitted() in (ROOT / "docs" / "explanation" / "plan.md").read_text(), (
        "run benchmarks/plan_anchors.py and paste it"
    )


def test_the_documentation_shows_the_run_files_tables():
    page = (ROOT / "docs" / "explanation" / "plan.md").read_text()
    assert markdown() in page, "run benchmarks/plan_published.py and paste it"


def test_the_shipped_constants_predict_tensor_and_pipeline_parallel_without_a_fit():
    """And MaxText, OLMo-core and DeepSpeed, which no constant has seen."""
    lines = unfitted().splitlines()
    assert sum(" tp " in line or " pp " in line for line in lines) >= 6
    assert {"MaxText", "OLMo-core", "DeepSpeed"} <= {line.split(",")[0].lstrip("| ") for line in lines}
    errors = [float(line.rstrip("% |").rsplit(" ", 1)[-1]) for line in lines if line.endswith("% |")]
    assert len(errors) >= 9 and sorted(map(abs, errors))[-2] < 10
    assert max(errors) < 10


def test_whole_run_files_of_published_runs_are_planned_as_they_went():
    """Rows in sight of a constant, and blind ones, which no constant was chosen with."""
    in_sight, blind = errors(runs(), "fit"), errors(runs(), "blind")
    assert len(in_sight) >= 25 and len(blind) >= 14
    assert median(in_sight) < 0.07 and median(blind) < 0.08
    assert max(in_sight + blind) < 0.20
    held = [each.memory_error for each in runs() if each.memory_error is not None]
    assert len(held) >= 3 and max(map(abs, held)) < 0.08


def test_of_published_runs_only_layouts_that_are_not_built_are_refused():
    """And one that torchtitan's fused norms left room for, and Muster's do not."""
    refused = {each.name: each.refused for each in runs() if each.refused}
    assert "needs 89 GB" in refused.pop("titan-l2-13b-64")
    assert all("does not go with" in reason or "must be 1" in reason for reason in refused.values())


def test_no_layout_that_ran_out_of_memory_is_promised():
    assert promised() == ()
