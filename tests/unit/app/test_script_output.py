"""What ranks write, as a terminal gets it: each line at most once, and never more than somebody can read."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console, Group

from muster.app.run.script_output import LONGEST, MOST_BYTES, ScriptOutput
from muster.cli.drawn.region import Region
from muster.cli.live import Display, LiveDisplay, display_of
from muster.config import load
from muster.core.errors import UsageError
from muster.core.events import Event
from muster.storage.run_registry import RunDir

SPEC = load.loads("name: x\ncommand: [-m, train]\n").spec
RANK_0 = frozenset({0})


def write(logs: Path, data: bytes | str, name: str = "rank-0.a1.log") -> None:
    with (logs / name).open("ab") as file:
        file.write(data.encode() if isinstance(data, str) else data)


def test_each_line_once_and_none_from_before(tmp_path):
    write(tmp_path, "from before\n")
    output = ScriptOutput(tmp_path, RANK_0)
    assert output.look() == []
    write(tmp_path, "one\ntw")
    assert output.look() == ["one"] and output.unended == "tw"
    write(tmp_path, "o\n\n")
    assert output.look() == ["two", ""] and output.look() == [] == output.look(last=True)


def test_a_character_in_two_halves(tmp_path):
    output = ScriptOutput(tmp_path, RANK_0)
    write(tmp_path, "grün".encode()[:3])
    assert output.look() == []
    write(tmp_path, "grün\n".encode()[3:])
    assert output.look() == ["grün"]


def test_the_next_attempt_and_the_ranks_asked_for(tmp_path):
    one, everybody = ScriptOutput(tmp_path, RANK_0), ScriptOutput(tmp_path, None)
    write(tmp_path, "last words of the first", "rank-0.a1.log")
    write(tmp_path, "again\n", "rank-0.a2.log")
    write(tmp_path, "me too\n", "rank-1.a2.log")
    write(tmp_path, "not a rank\n", "host-0.log")
    assert one.look(last=True) == ["last words of the first", "again"]
    assert everybody.look() == ["[rank 0] again", "[rank 1] me too"]


def test_a_hundred_megabytes_are_not_read(tmp_path):
    output = ScriptOutput(tmp_path, RANK_0)
    write(tmp_path, "first\n")
    with (tmp_path / "rank-0.a1.log").open("r+b") as file:
        file.truncate(100_000_000)  # a hole: nobody has written them, and reading them would take memory
    write(tmp_path, "\nlast\n")
    lines = output.look()
    assert lines[0] == "(100.0 MB of the script's output left out: muster logs has all)" and lines[-1] == "last"
    assert sum(map(len, lines)) < MOST_BYTES and output.look() == []


def test_lines_of_a_flood_are_whole(tmp_path):
    output = ScriptOutput(tmp_path, RANK_0)
    write(tmp_path, "".join(f"line {n}\n" for n in range(50_000)))
    note, *lines = output.look()
    left_out = sum(len(f"line {n}\n") for n in range(50_000 - len(lines)))
    assert f"({left_out / 1e6:.1f} MB of" in note
    assert lines == [f"line {n}" for n in range(50_000 - len(lines), 50_000)]


def test_a_line_without_end_takes_no_memory(tmp_path):
    output = ScriptOutput(tmp_path, RANK_0)
    for _ in range(20):
        write(tmp_path, "x" * 50_000)
        assert output.look() == [] and len(output.unended) <= LONGEST
    write(tmp_path, "\nthen\n")
    note, line, then = output.look()
    assert "1.0 MB" in note and set(line) == {"x"} and len(line) == LONGEST and then == "then"


def test_a_bar_that_redraws_itself_is_what_a_terminal_shows(tmp_path):
    output = ScriptOutput(tmp_path, RANK_0)
    write(tmp_path, "\r 10%|#   |\r 20%|##  |")
    assert output.look() == [] and output.unended == " 20%|##  |"
    write(tmp_path, "\r100%|####|\nwindows\r\n")
    assert output.look() == ["100%|####|", "windows"]


def test_colours_stay_and_other_orders_to_a_terminal_do_not(tmp_path):
    output = ScriptOutput(tmp_path, RANK_0)
    write(tmp_path, "\x1b[31mred\x1b[2J\x1b]0;title\x07 \x1b[1Aup\x07\tx\n\xff\n".encode("latin-1"))
    assert output.look() == ["\x1b[31mred up\tx\x1b[0m", "�"]


def event(kind: str, seq: int, **detail: object) -> Event:
    place = {"run_id": "r", "attempt": 1, "seq": seq, "mono_ns": 0, "wall_ns": seq * 10**9, "host": "host-0"}
    return Event(**place, kind=kind, step=None, rank=0, detail=detail)  # type: ignore[arg-type]


def test_what_was_written_is_shown_before_what_is_said_of_it(tmp_path, capsys):
    run = RunDir(tmp_path, "x")
    run.logs.mkdir(parents=True)
    display = Display(SPEC, RANK_0)
    display.started(run)
    write(run.logs, "ValueError: boom\n")
    display.event(event("incident.detected", 1, incident_id="i1", incident="rank_exception", evidence="boom"))
    write(run.logs, "no end")
    display.end(None)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "ValueError: boom" and shown[1].startswith("incident i1") and shown[2] == "no end"


def test_the_scripts_own_bar_stands_in_the_live_region(tmp_path):
    run = RunDir(tmp_path, "x")
    run.logs.mkdir(parents=True)
    console = Console(file=io.StringIO(), width=60, height=20, force_terminal=True, color_system=None)
    display = LiveDisplay(SPEC, Region(console), RANK_0)
    display.started(run)
    write(run.logs, "hello\n 45%|####     | " + "x" * 80)
    display.tend()
    with console.capture() as captured:
        console.print(Group(*display.progress.get_renderables()))
    *_, bar = captured.get().splitlines()
    assert bar.startswith(" 45%|####") and len(bar) == 60


def test_whose_output_is_shown():
    assert display_of(SPEC).ranks == {0} and display_of(SPEC, "all").ranks is None
    assert display_of(SPEC, "3,0").ranks == {0, 3}
    text = "name: x\nmodel: {config: {model_type: llama}}\ndata: {sources: [{type: random}]}\ntraining: {steps: 9}\n"
    own = load.loads(text).spec
    assert display_of(own).ranks == frozenset()
    with pytest.raises(UsageError, match="'1-3' names no ranks"):
        display_of(SPEC, "1-3")
