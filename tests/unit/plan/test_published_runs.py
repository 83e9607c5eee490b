"""Published runs as an outside check: rows that nothing was fitted on, and the documentation's copy of the table."""

from pathlib import Path

from muster.catalog import rows
from muster.plan.published_runs import checks, median_error

ROOT = Path(__file__).parents[3]


def test_checked_rows_are_predicted():
    found = checks(rows.anchors())
    checked = [each for each in found if each.anchor.use == "check"]
    assert len(checked) >= 12 and len({each.anchor.stack for each in checked}) >= 5
    assert median_error(found) < 0.15
    assert max(abs(each.error) for each in checked) < 0.40


def test_each_stack_has_one_efficiency_and_it_is_credible():
    by_stack = {}
    for each in checks(rows.anchors()):
        by_stack.setdefault(each.anchor.stack, set()).add(each.efficiency)
    assert all(len(found) == 1 for found in by_stack.values())
    assert all(0.3 < next(iter(found)) < 1.0 for found in by_stack.values())


def test_the_documentation_shows_this_table():
    import importlib.util

    spec = importlib.util.spec_from_file_location("plan_anchors", ROOT / "benchmarks" / "plan_anchors.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.table() in (ROOT / "docs" / "plan.md").read_text(), "run benchmarks/plan_anchors.py and paste it"
