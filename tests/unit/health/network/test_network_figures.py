"""Bus bandwidth, its table, what is expected of it, and what was measured before."""

import pytest

from muster.health.hardware.nccl_tests import is_nccl_tests, judge_nccl_tests, read_nccl_tests
from muster.health.network.expected import Past, expected_bandwidth, judge_history, judge_level
from muster.health.network.figures import COLLECTIVES, Measured, SizeResult, size_results
from muster.health.network.judge import judge_together, judge_values
from muster.health.network.search import Assessment
from muster.health.network.table import nccl_table
from muster.health.verdicts import Verdict, worst

GIB = 1 << 30


def rung(collective="all_gather", size=8 * GIB, *, ranks=16, busbw=None, seconds=0.1, wrong=0):
    one = SizeResult(collective=collective, size_bytes=size, ranks=ranks, seconds=seconds, spread=0.01, wrong=wrong)
    if busbw is None:
        return one
    return SizeResult(
        collective=collective,
        size_bytes=size,
        ranks=ranks,
        seconds=seconds * one.busbw / busbw,
        spread=0.01,
        wrong=wrong,
    )


@pytest.mark.parametrize(
    ("collective", "microseconds", "algbw", "busbw"),
    [("all_gather", 33646, 255.31, 223.39), ("all_reduce", 63896, 134.44, 235.26)],
)
def test_bandwidths_are_those_of_nccl_tests(collective, microseconds, algbw, busbw):
    """Rows that nccl-tests printed for 8 GiB on 8 A100."""
    one = rung(collective, ranks=8, seconds=microseconds / 1e6)
    assert one.algbw == pytest.approx(algbw, abs=0.01) and one.busbw == pytest.approx(busbw, abs=0.01)


def test_a_group_is_as_slow_as_its_slowest_rank():
    figures = [Measured(rank=rank, collective="all_gather", size_bytes=64, seconds=0.1 + rank) for rank in range(3)]
    figures += [Measured(rank=0, collective="all_gather", size_bytes=128, seconds=0.1)]
    (one,) = size_results(figures, ranks=3)
    assert (one.size_bytes, one.seconds) == (64, 2.1), "a size that a rank has not measured is none"


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_our_table_reads_as_one_of_nccl_tests(collective):
    measured = [rung(collective, size << 20, ranks=4, seconds=size * 0.003) for size in (1, 2, 4)]
    ranks = [(f"node-{number // 2}", number % 2, "NVIDIA H100 80GB HBM3") for number in range(4)]
    text = nccl_table(measured, ranks, repeats=5)
    table = read_nccl_tests(text)
    assert is_nccl_tests(text) and table.collective == collective and not table.missing
    assert (table.hosts, table.gpus, table.device) == (("node-0", "node-1"), 4, "NVIDIA H100 80GB HBM3")
    assert [row.size_bytes for row in table.rows] == [1 << 20, 2 << 20, 4 << 20] and table.wrong_values == 0
    assert table.largest.busbw == pytest.approx(measured[-1].busbw, abs=0.01)
    assert worst(judge_nccl_tests(table)) is Verdict.HEALTHY


def test_wrong_values_show_in_the_table():
    table = read_nccl_tests(nccl_table([rung(size=1 << 20, ranks=2, wrong=3)], [("a", 0, ""), ("b", 0, "")], repeats=5))
    assert worst(judge_nccl_tests(table)) is Verdict.REPLACE


@pytest.mark.parametrize(
    ("family", "gb_s", "verdict"),
    [
        ("A4", 376.6, Verdict.HEALTHY),
        ("A4", 300, Verdict.NOTE),
        ("A4", 251, Verdict.DRAIN),  # a third is gone: thresholds in use elsewhere (250) let it pass
        ("A3 Ultra", 328.9, Verdict.HEALTHY),
        ("A3 Ultra", 231, Verdict.DRAIN),
        ("A3 Mega", 188.7, Verdict.HEALTHY),
        ("A3 Mega", 150, Verdict.NOTE),
        ("A3 High", 50.2, Verdict.NOTE),
    ],
)
def test_a_level_against_the_published_one(family, gb_s, verdict):
    found = judge_level(rung(busbw=gb_s), hosts=2, family=family)
    assert found.verdict is verdict and family in found.expected and "2026" in found.source


@pytest.mark.parametrize(
    ("family", "one"),
    [
        ("A4X", rung(busbw=1)),
        ("A2", rung(busbw=1)),
        ("", rung(busbw=1)),
        ("A4", rung("all_reduce", busbw=1)),  # may exceed the network: no figure for it
        ("A4", rung(size=1 << 20, busbw=1)),
    ],
)
def test_where_no_figure_is_known_none_is_made_up(family, one):
    found = judge_level(one, hosts=2, family=family)
    assert found.verdict is Verdict.HEALTHY and "no expected value" in found.message and not found.expected


def test_all_together_against_pairs():
    seen = Assessment(level=188.0, noise=0.03, detectable=0.1)
    together = [rung(size=1 << 20, busbw=20), rung(size=GIB, busbw=150), rung("all_reduce", size=GIB, busbw=90)]
    (found,) = judge_together(together, seen, hosts=16, size_bytes=GIB)
    assert found.verdict is Verdict.NOTE and "20% slower than pairs" in found.message
    assert not judge_together([rung(size=GIB, busbw=180)], seen, hosts=16, size_bytes=GIB)
    assert not judge_together(together, seen, hosts=2, size_bytes=GIB), "that is the pair"


def test_all_together_where_the_size_is_no_multiple_of_the_ranks():
    """24 ranks: 1 GiB is cut to a multiple of them."""
    seen = Assessment(level=188.0, noise=0.03, detectable=0.1)
    assert judge_together([rung(size=GIB // 96 * 96, ranks=24, busbw=150)], seen, hosts=3, size_bytes=GIB)


def test_wrong_values_name_the_host_that_all_such_pairs_share():
    assert not judge_values({}, 0)
    (found,) = judge_values({("a", "b"): 3, ("c", "b"): 4}, 2)
    assert (found.host, found.value, found.verdict) == ("b", "9", Verdict.REPLACE) and "a-b, c-b" in found.message
    assert judge_values({("a", "b"): 3}, 0)[0].host == "", "one of the two"
    assert judge_values({}, 5)[0].host == ""


def test_rows_hold_together():
    for family in ("A3 High", "A3 Mega", "A3 Ultra", "A4"):
        row = expected_bandwidth(family)
        assert row is not None and row.bad_gb_s < row.good_gb_s < row.gb_s and row.nodes == 2


def past(busbw, **changes):
    given = {
        "family": "A4", "hosts": 4, "library": "NCCL 2.27.7", "collective": "all_gather", "size_bytes": GIB,
        "busbw": busbw, "date": "2026-11-01",
    }  # fmt: skip
    return Past(**{**given, **changes})


def test_beside_what_was_measured_here():
    former = [past(370.0), past(372.0), past(368.0)]
    assert judge_history(past(371.0), former).verdict is Verdict.HEALTHY
    slower = judge_history(past(320.0), former)
    assert slower.verdict is Verdict.NOTE and "14% slower" in slower.message
    assert judge_history(past(320.0), former[:2]) is None
    assert judge_history(past(320.0, hosts=8), former) is None, "another count of hosts is another figure"
    assert judge_history(past(320.0, library="NCCL 2.28.3"), former) is None
