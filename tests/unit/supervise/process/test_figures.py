"""The few figures that the supervisor keeps of a run agree with what the whole log says."""

import pytest

from muster.core.events import Event
from muster.report.ledger.file_log import FileLog
from muster.report.log_folder import LogFolder, progress
from muster.supervise.process.figures import Figures


def event(kind, seq, *, attempt=1, step=None, **detail):
    return Event(
        run_id="r", attempt=attempt, seq=seq, mono_ns=seq * 10**9, wall_ns=seq * 10**9, host="h", kind=kind, rank=0,
        phase=None, step=step, detail=detail,
    )  # fmt: skip


def step(seq, number, attempt=1, loss=1.0, tokens=100, step_ns=10**9):
    more = dict.fromkeys(("grad_norm", "learning_rate", "supervised_tokens", "padding_tokens"), 0)
    return event("step", seq, attempt=attempt, step=number, loss=loss, tokens=tokens, step_ns=step_ns, **more)


def started(seq, attempt, resume=None):
    return event(
        "attempt.started", seq, attempt=attempt, world_size=1, hosts={"h": [0]}, layout={}, resume_step=resume,
        resume_attempt=attempt - 1 if resume else None, reason="", batch_schedule=[], skip_steps=[],
    )  # fmt: skip


@pytest.mark.parametrize("redone_from", [4, 2, 1])
def test_steps_that_are_redone_count_once(redone_from):
    events = [started(0, 1), *(step(n, n, loss=float(n)) for n in range(1, 6))]
    events.append(started(7, 2, redone_from - 1))
    events += [step(8 + n, redone_from + n, attempt=2, loss=0.5, tokens=70) for n in range(2)]
    figures = Figures()
    for each in events:
        figures.add(each)
    whole = progress(LogFolder({"h": FileLog.of(events)}))
    assert (figures.tokens, figures.loss) == (whole.tokens, whole.final_loss)


def test_speed_is_a_median_without_the_first_step_of_an_attempt():
    figures = Figures()
    for each in [started(0, 1), step(1, 1, step_ns=60 * 10**9), *(step(n, n) for n in range(2, 9))]:
        figures.add(each)
    assert figures.tokens_per_s == 100.0
    assert figures.incidents == 0


def test_a_trouble_of_several_ranks_is_one_incident():
    figures, told = Figures(), {"incident": "rank_exit", "evidence": "a rank was killed"}
    for each in [
        event("incident.detected", 1, incident_id="i1", **told),
        event("incident.detected", 2, incident_id="i2", part_of="i1", **told),
    ]:
        figures.add(each)
    assert figures.incidents == 1
