"""Text of others on a terminal: what a terminal obeys is shown, not obeyed, by every way out of the command line."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from muster.app import api
from muster.cli import output
from muster.core.redact import printable

HOSTILE = "a\x1b]0;title\x07\x1b[2Jb\x9b31m\x00\x7f\u202etxt\u2066\ud800\u2028c\rd"
OBEYED = set("\x1b\x07\x9b\x00\x7f\u202e\u2066\u2028\r\ud800")


def test_each_character_that_is_obeyed_is_named_and_all_others_stay():
    assert printable(HOSTILE) == (
        "a\\u001b]0;title\\u0007\\u001b[2Jb\\u009b31m\\u0000\\u007f\\u202etxt\\u2066\\ud800\\u2028c\\u000dd"
    )
    assert printable("größer\t\U0001f600 日本\n") == "größer\t\U0001f600 日本\n"


@given(st.text(st.characters(codec=None)))
def test_a_json_document_stands_for_the_same_after_it(text):
    assert json.loads(printable(json.dumps({text: [text]}, ensure_ascii=False))) == {text: [text]}


@pytest.mark.parametrize("out", [output.result, output.info, output.written, output.as_json])
def test_no_way_out_of_the_command_line_lets_one_through(out, capsys):
    out(HOSTILE)
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert "txt" in text and not OBEYED & set(text)


def test_what_rich_draws_has_rich_s_own_escapes_alone():
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(Text(HOSTILE, style="red"))
    target = io.StringIO()
    api.Console(file=target, force_terminal=True, width=200, color_system="standard").print(table, HOSTILE)
    text = target.getvalue()
    assert "\x1b[31m" in text, "its colour"
    assert not (OBEYED - {"\x1b"}) & set(text) and "\x1b]" not in text and "\x1b[2J" not in text


def test_a_script_s_colours_stay_on_a_terminal_and_nothing_else():
    line = "\x1b[31mred\x1b[0m" + HOSTILE
    assert api.shown(line, colours=True).startswith("\x1b[31mred\x1b[0ma")
    assert "\x1b" not in api.shown(line, colours=True)[14:] and "\x1b" not in api.shown(line, colours=False)
