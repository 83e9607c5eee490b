"""Steps as columns say what their events said, however many there are."""

import random

import numpy as np
import pytest
from faulty_run import Writer
from random_runs import Pen

from muster.core.errors import MusterError
from muster.report import api
from muster.report.ledger.file_log import COUNTS, NUMBERS, UNKNOWN, FileLog

LONG = 2 * (1 << 15) + 3


def steps(count, details):
    pen = Pen(random.Random(1))
    for step in range(1, count + 1):
        pen.add("h", step, "step", attempt=1, rank=0, step=step, detail=details(step))
    return pen.files["h.1.jsonl"]


def test_columns_of_several_blocks_hold_each_value_as_it_was():
    rng = random.Random(3)
    kinds = (None, 0, 7, -1, 1 << 40, (1 << 63) - 1)

    def detail(step):
        counts = {name: kinds[(at + step // 20_000) % len(kinds)] for at, name in enumerate(COUNTS)}
        return {**counts, "tokens": rng.randrange(1 << 20), "loss": rng.random(), "grad_norm": rng.choice([None, 1.5])}

    events = steps(LONG, detail)
    log = FileLog.of(events)
    assert len(log.steps) == LONG and len(log.events) == 1
    for name in COUNTS:
        said = [UNKNOWN if event.detail[name] is None else event.detail[name] for event in events]
        assert log.steps.ints(name).tolist() == said, name
    for name in NUMBERS:
        said = np.array([np.nan if event.detail.get(name) is None else event.detail[name] for event in events])
        assert np.array_equal(log.steps.floats(name), said, equal_nan=True), name
    assert log.steps.ints("step").tolist() == list(range(1, LONG + 1))


def test_a_step_whose_detail_is_no_number_is_named():
    given = {"loss": "much", "grad_norm": 1.0, "learning_rate": 0.1, "tokens": 1, "step_ns": 1}
    with pytest.raises(MusterError, match="loss"):
        FileLog.of(steps(1, lambda step: {**given, "supervised_tokens": 1, "padding_tokens": 0}))


@pytest.mark.parametrize("head", ["no hash at all", "0" * 64, "-1"])
def test_a_head_that_no_line_has_is_reported(tmp_path, head):
    writer = Writer(tmp_path / "events")
    writer.add("host-0", 1.0, "run.message", detail={"text": "here"})
    writer.add("supervisor", 2.0, "log.hash_heads", detail={"heads": {"host-0.1.jsonl": head}})
    writer.close()
    found = api.load(tmp_path).verdicts
    assert found["host-0.1.jsonl"].problem == "a line that the supervisor cited is missing: cut short or changed"
    assert found["supervisor.1.jsonl"].problem is None


def test_a_file_that_cannot_be_read_is_no_whole_chain(tmp_path):
    writer = Writer(tmp_path / "events")
    writer.add("host-0", 1.0, "run.message", detail={"text": "here"})
    writer.close()
    (tmp_path / "events" / "host-1.1.jsonl").symlink_to(tmp_path / "events" / "host-0.1.jsonl")
    assert str(api.load(tmp_path).verdicts["host-1.1.jsonl"].problem).startswith("cannot be read: ")
