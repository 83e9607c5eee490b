"""The live region of a run, drawn in terminals of several widths."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, Group

from muster.cli.drawn.region import Region
from muster.cli.live import LiveDisplay
from muster.config import load
from muster.core.events import Event

SPEC = load.loads(
    "name: x\nmodel: {config: {model_type: llama}}\ndata: {sources: [{type: random}]}\ntraining: {steps: 100000}\n"
).spec


def event(kind: str, seq: int, step: int | None = None, **detail: object) -> Event:
    place = {"run_id": "r", "attempt": 1, "seq": seq, "mono_ns": 0, "wall_ns": seq * 10**9, "host": "host-0"}
    return Event(**place, kind=kind, step=step, rank=0, detail=detail)  # type: ignore[arg-type]


def drawn(width: int, *events: Event) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=20, force_terminal=True, color_system=None)
    display = LiveDisplay(SPEC, Region(console))
    for each in events:
        display.event(each)
    with console.capture() as captured:
        console.print(Group(*display.progress.get_renderables()))
    return captured.get().splitlines()


FIGURES = {
    "loss": 12.3456, "step_ns": 10**9, "tokens": 1_234_567, "supervised_tokens": 1, "padding_tokens": 0, "mfu": 0.355,
    "grad_norm": 1.0, "learning_rate": 1e-3,
}  # fmt: skip
BEGUN = event("attempt.started", 0, world_size=2, layout={"dp_shard": 2}, hosts={"host-0": [0, 1]})
STEPS = [BEGUN] + [event("step", n, 99_000 + n, **FIGURES) for n in range(1, 12)]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_bar_and_its_numbers_are_one_line(width: int):
    (line,) = drawn(width, *STEPS)
    assert len(line) <= width and "training" in line and "99011/100000" in line
    assert "ETA 16 min" in line and ("loss 12.3456" in line) == (width >= 80)
    assert ("MFU 35.5%" in line) == (width >= 120)


def test_the_last_incident_stands_below_it():
    told = {"incident_id": "i1", "incident": "rank_exit", "evidence": "rank 1 ended with signal 9 " + "x" * 80}
    found = drawn(80, *STEPS, event("incident.detected", 20, **told))
    assert len(found) == 2 and found[1].startswith("  1 incident; incident i1: rank_exit: rank 1 ended")
    assert len(found[1]) <= 80
    after = drawn(120, *STEPS, event("incident.detected", 20, **told), event(
        "incident.resolved", 21, incident_id="i1", lost_ns=1_500_000_000, resume_step=99_011))  # fmt: skip
    assert after[1].strip() == "1 incident; recovered from i1 in 1.50 s"
