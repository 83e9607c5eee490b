"""What fault tolerance costs a step, and what the hosts' memory holds: both from the steps' own events."""

import pytest
from faulty_run import SECOND
from test_lineage import STEP, Run

from muster.report.ledger import figures
from muster.report.ledger.figures import versions
from muster.report.ledger.fold import fold
from muster.report.render.series import series


class Told(Run):
    """Steps that say what memory holds, and take as long as given."""

    def told(self, attempt, step, *, length=SECOND, stall=0, **held):
        self.t += length
        detail = {**STEP, "step_ns": length, "stall_ns": stall, **held}
        self.pen.add("h", self.t, "step", attempt=attempt, rank=0, step=step, detail=detail)


def measured(taxed_ns, *, after=20):
    """Three warm steps, ten of 0.9 s without fault tolerance, then ``after`` of ``taxed_ns``, 50 ms of it a stall."""
    run = Told().attempt(1).steps(1, 1, 3)
    for step in range(4, 14):
        run.told(1, step, length=SECOND * 9 // 10)
    run.event("baseline_rate", attempt=1, step=13, tokens_per_s=100 / 0.9, world_size=1, steps=10, first_step=4)
    for step in range(14, 14 + after):
        run.told(1, step, length=taxed_ns, stall=SECOND // 20)
    return fold(run.pen.files)


def test_the_tax_is_what_a_step_takes_beyond_the_reference():
    ledger = measured(SECOND)
    found = figures.goodput(ledger)
    assert found.fault_tolerance_overhead == pytest.approx(0.1)
    assert found.reference.source == "measured with fault tolerance off"
    assert ledger.identity_error == 0


def test_the_steps_of_the_reference_itself_are_not_taxed():
    overhead = figures.goodput(measured(SECOND, after=3)).fault_tolerance_overhead
    assert overhead is None, "step 3 and three more are too few"
    # Ten steps without it stand beside seven with it: a median over all of them would be the reference's own.
    assert figures.goodput(measured(SECOND, after=6)).fault_tolerance_overhead == pytest.approx(0.1)


def test_without_a_measured_reference_the_tax_is_unknown():
    assert figures.goodput(fold(Run().attempt(1).steps(1, 1, 30).pen.files)).fault_tolerance_overhead is None


def held_every_other_step():
    run = Told().attempt(1)
    for step in range(1, 9):
        newest = step // 2 * 2
        held = {"snapshot_step": newest} if newest else {}
        held |= {"peer_step": newest - 2} if newest > 2 else {}
        run.told(1, step, **held)
    return fold(run.pen.files)


def test_memory_holds_what_the_steps_say():
    ledger = held_every_other_step()
    found = versions(ledger.aligned, ledger.lineage.steps)
    assert found["memory"].step.tolist() == [2, 4, 6, 8]
    assert found["memory"].at_ns.tolist() == found["memory"].taken_ns.tolist()
    peer = found["peer"]
    assert peer.step.tolist() == [2, 4, 6]
    assert ((peer.at_ns - peer.taken_ns) // SECOND).tolist() == [2, 2, 2]


def test_exposure_of_memory_and_peer():
    ledger = held_every_other_step()
    found = figures.exposure(ledger)
    # A saw from 0 to 2 s; the peer's is one snapshot behind: from 2 to 4 s.
    assert found["memory"].mean_age_s == pytest.approx(1.0) and found["memory"].greatest_age_s == 2.0
    assert found["peer"].mean_age_s == pytest.approx(3.0) and found["peer"].greatest_age_s == 4.0
    assert set(series(ledger)["ages"]) == {"memory", "peer"}
    assert max(series(ledger)["ages"]["peer"]["age"]) == 4.0


def test_a_log_without_the_steps_word_has_no_memory_tier():
    assert figures.exposure(fold(Run().attempt(1).steps(1, 1, 9).pen.files)) == {}
