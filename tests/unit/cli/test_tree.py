"""The tree on a terminal, played on a small screen of our own: in place, never taller or wider than the screen."""

import os
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from rich.cells import cell_len

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fakes.pty_program import PtyProgram
from fakes.screen import Screen

from muster.app.cluster.progress_tree import Began, Changed, Planned, Said, Tree
from muster.cli import tree as tree_module
from muster.cli.tree import LiveTree, PlainTree, Terminal, picture, watched

CHILD = str(Path(__file__).with_name("tree_child.py"))


def nodes(count):
    subnets = tuple(Planned(key=f"subnetworks/muster-data-sub-{n}", needs=("networks/net",)) for n in range(count))
    cluster = Planned(key="clusters/c", needs=("networks/net",), bills="a cluster", usd_per_hour=0.234)
    return (Planned(key="networks/net"), *subnets, cluster, Planned(key="nodePools/p", needs=("clusters/c",)))


def began(count=3, title="making what is missing in z"):
    return Began(title=title, making=True, nodes=nodes(count))


class Cooked(Screen):
    """As the kernel does it: each new line begins at the left."""

    def write(self, text):
        super().write(text.replace("\n", "\r\n"))


@pytest.fixture
def screen(monkeypatch):
    def of(columns, lines):
        found = Cooked(columns, lines)
        return found, LiveTree(Terminal(file=found, force_terminal=True, width=columns, height=lines, _environ={}))

    monkeypatch.setattr(tree_module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    return of


def test_the_tree_stays_where_it_is(screen):
    shown, live = screen(100, 30)
    live.take(began())
    for step in ("looking", "making", "there"):
        for node in nodes(3):
            live.take(Changed(key=node.key, step=step))
            live.live.refresh()
    live.close()
    assert shown.shown() == [
        "making what is missing in z  0 s",
        "└── + networks/net                       there  0 s",
        "    ├── + subnetworks/muster-data-sub-0  there  0 s",
        "    ├── + subnetworks/muster-data-sub-1  there  0 s",
        "    ├── + subnetworks/muster-data-sub-2  there  0 s",
        "    └── + clusters/c                     there  0 s",
        "        └── + nodePools/p                there  0 s",
        "",
    ]


def test_a_tall_tree_on_a_small_terminal_does_not_scroll(screen):
    shown, live = screen(60, 10)
    shown.write("before\r\n")
    live.take(began(40))
    for node in nodes(40):
        live.take(Changed(key=node.key, step="making"))
        live.live.refresh()
        assert len(shown.rows) <= 11 and shown.rows[0] == "before", "what stood there before was not pushed away"
    assert "clusters/c" not in "".join(shown.shown()) and "36 more: 36 creating" in shown.shown()[-1]
    live.take(Changed(key="networks/net", step="there"))
    live.take(Changed(key="clusters/c", step="failed", words="no\x1b[2Jroom\n" * 40))
    live.live.refresh()
    assert any("! clusters/c" in row and "failed: no [2J" in row for row in shown.shown()), "trouble comes first"
    live.close()
    text = [row.rstrip() for row in shown.rows]
    assert sum("subnetworks/" in row for row in text) == 40, "the last picture is whole, for reading back"


def test_a_terminal_that_becomes_narrower(screen):
    shown, live = screen(100, 200)
    shown.write("before\r\n")
    live.take(began(20))
    for columns in (60, 25):
        shown.narrow(columns)
        live.console.size = (columns, 200)
        for _ in range(3):
            live.live.refresh()
            rows = [row for row in shown.shown() if row]
            assert rows[0] == "before" and rows[1].startswith("making what is missi") and len(rows) == 25, rows
            assert sum("subnet" in row for row in rows) == 20 and all(len(row) <= columns for row in rows)
    live.close()


@pytest.mark.parametrize("columns", [20, 33, 80])
@pytest.mark.parametrize("lines", [4, 7, 50])
def test_no_line_is_wider_and_no_picture_taller_than_asked(columns, lines, capsys):
    tree = Tree()
    tree.take(began(12), 0.0)
    tree.take(Changed(key="clusters/c", step="failed", words="漢字" * 50), 4000.0)
    console = Terminal(width=columns, force_terminal=False)
    console.print(picture(tree, 5000.0, console.options, lines))
    found = capsys.readouterr().out.splitlines()
    assert len(found) <= lines and all(cell_len(line) <= columns for line in found)


def test_without_unicode(tmp_path):
    tree = Tree()
    tree.take(began(1), 0.0)
    with open(tmp_path / "log", "w", encoding="ascii") as file:
        console = Terminal(file=file, width=30)
        console.print(picture(tree, 0.0, console.options, 3))
    assert (tmp_path / "log").read_text().splitlines()[2] == "3 more: 3 waiting"


def test_a_sentence_stays_above_the_tree(screen):
    shown, live = screen(80, 20)
    live.take(Said(text="capacity: 0.9"))
    live.take(began(1))
    live.take(Said(text="no room in a"))
    live.take(began(1, title="clearing a"))
    live.close()
    text = [row for row in shown.shown() if row and not row.strip(" │").startswith(("├", "└"))]
    assert text == ["capacity: 0.9", "no room in a", "making what is missing in z  0 s", "clearing a  0 s"]


def test_lines_for_a_log(capsys):
    log = PlainTree()
    log.take(began(1))
    for step in ("looking", "making", "looking", "there", "there"):
        log.take(Changed(key="clusters/c", step=step))
    found = [line[10:] for line in capsys.readouterr().err.splitlines()]
    assert found == ["making what is missing in z: 4 resources", "clusters/c: creating", "clusters/c: there (0 s)"]


def test_words_of_a_service_cannot_move_the_cursor(capsys):
    log = PlainTree()
    log.take(began(1))
    log.take(Changed(key="clusters/c", step="failed", words="a\x1b[2Jb\r\nc"))
    assert "clusters/c: failed: a [2Jb  c" in capsys.readouterr().err


# ---------------------------------------------------------------- a real pseudo-terminal


@pytest.fixture
def terminal():
    opened = []

    def start(kind, columns=90, lines=12, **env):
        opened.append(PtyProgram([sys.executable, CHILD, kind], columns=columns, lines=lines, env=env))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_on_a_terminal_it_is_drawn_in_place(terminal):
    up = terminal("quick")
    up.read()
    assert up.code() == 0 and up.process.stdout.read() == b"7\n", up.text()
    assert up.text().count("making what is missing") == 1 and "said in between" in up.text()
    assert up.text().count("clusters/c ") == 1 and "creating" not in up.text()
    assert up.screen.column == 0 and b"\x1b[?25" not in up.raw


def test_a_narrow_terminal_and_one_that_becomes_narrow(terminal):
    up = terminal("stuck", columns=70, lines=30)
    up.read("clusters/c", "creating")
    up.narrow(32)
    before = len(up.raw)
    while up.raw.count(b"making what is", before) < 3:  # pictures since then
        up.read("making what is")
        up.settle()
    rows = [row for row in up.screen.shown() if row]
    assert sum("making what is" in row for row in rows) == 1 and sum("* cluster" in row for row in rows) == 1, rows
    assert all(len(row) <= 32 for row in rows)


@pytest.mark.parametrize("kind", ["INT", "KILL"])
def test_interrupted_and_killed_the_terminal_stays_usable(terminal, kind):
    up = terminal("stuck", lines=30)
    up.read("clusters/c", "creating")
    before = termios.tcgetattr(up.master)
    if kind == "INT":
        up.type(b"\x03")
    else:
        os.kill(up.process.pid, signal.SIGKILL)
    up.read()
    assert up.code() == (130 if kind == "INT" else -9), up.text()
    assert termios.tcgetattr(up.master) == before and b"\x1b[?25l" not in up.raw, "the cursor was never hidden"
    assert "clusters/c" in up.text() and "creating" in up.text(), "the last state stays on the screen"
    if kind == "INT":
        rows = [row for row in up.screen.rows if row]
        assert rows[-1] == "hint: muster down run.yaml removes what was created" and up.screen.column == 0
        assert "^C" not in up.text()


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"FORCE_COLOR": "1"}])
def test_without_a_terminal_that_can_move_there_are_lines(terminal, env):
    if "TERM" in env:
        up = terminal("quick", **env)
        up.read()
        raw = up.raw
    else:
        raw = subprocess.run([sys.executable, CHILD, "quick"], env=os.environ | env, capture_output=True).stderr
    lines = raw.decode().splitlines()
    assert b"\x1b" not in raw and sum("clusters/c:" in line for line in lines) == 3, lines


# ---------------------------------------------------------------- work that is watched


def test_what_the_work_returns_and_raises_comes_through(capsys):
    assert watched(lambda progress: progress(began()) or 7, again="x") == 7
    with pytest.raises(ZeroDivisionError):
        watched(lambda progress: 1 / 0, again="x")


def test_ctrl_c_is_answered_while_the_work_still_waits(capsys):
    never = threading.Event()

    class Interrupting(PlainTree):
        def take(self, event):
            super().take(event)
            if event == Changed(key="clusters/c", step="making"):
                raise KeyboardInterrupt

    def work(progress):
        progress(began())
        progress(Changed(key="clusters/c", step="making"))
        never.wait()

    original, tree_module.PlainTree = tree_module.PlainTree, Interrupting
    try:
        with pytest.raises(typer.Exit) as caught:
            watched(work, again="muster up run.yaml", undo="muster down run.yaml")
    finally:
        tree_module.PlainTree = original
        never.set()
    assert caught.value.exit_code == 130
    said = capsys.readouterr().err.splitlines()[-4:]
    assert said == [
        "stopped by you; operations that have begun continue",
        "billed: clusters/c (a cluster), about $0.23 an hour",
        "hint: muster up run.yaml resumes",
        "hint: muster down run.yaml removes what was created",
    ]
