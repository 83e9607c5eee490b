"""The tree on a terminal, played on a small screen of our own: in place, never taller or wider than the screen."""

import io
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fakes.screen import Screen

from muster.app.cluster.progress_tree import Began, Changed, Planned, Said, Tree
from muster.cli import tree as tree_module
from muster.cli.live_region import Growing, cut, grows, terminal_size
from muster.cli.tree import LiveTree, PlainTree, picture, watched


def nodes(count):
    subnets = tuple(Planned(key=f"subnetworks/muster-data-sub-{n}", needs=("networks/net",)) for n in range(count))
    cluster = Planned(key="clusters/c", needs=("networks/net",), bills="a cluster", usd_per_hour=0.234)
    return (Planned(key="networks/net"), *subnets, cluster, Planned(key="nodePools/p", needs=("clusters/c",)))


def began(count=3, title="making what is missing in z"):
    return Began(title=title, making=True, nodes=nodes(count))


@pytest.fixture
def screen(monkeypatch):
    def of(columns, lines):
        found = Screen(columns, lines)
        live = LiveTree(found)
        live.growing = Growing(found, lambda: (found.columns, found.lines))
        return found, live

    monkeypatch.setattr(tree_module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    return of


def test_the_tree_stays_where_it_is(screen):
    shown, live = screen(100, 30)
    live.take(began())
    for step in ("looking", "making", "there"):
        for node in nodes(3):
            live.take(Changed(key=node.key, step=step))
            live.tick()
    live.close()
    assert shown.shown() == [
        "making what is missing in z  0 s",
        "+ networks/net                      there  0 s",
        "+ ├─ subnetworks/muster-data-sub-0  there  0 s",
        "+ ├─ subnetworks/muster-data-sub-1  there  0 s",
        "+ ├─ subnetworks/muster-data-sub-2  there  0 s",
        "+ └─ clusters/c                     there  0 s",
        "+    └─ nodePools/p                 there  0 s",
        "",
    ]


def test_a_tall_tree_on_a_small_terminal_does_not_scroll(screen):
    shown, live = screen(60, 10)
    shown.write("before\r\n")
    live.take(began(40))
    for node in nodes(40):
        live.take(Changed(key=node.key, step="making"))
        live.tick()
        assert len(shown.rows) <= 11 and shown.rows[0] == "before", "what stood there before was not pushed away"
    assert "clusters/c" not in "".join(shown.shown()) and "36 more: 36 creating" in shown.shown()[-2]
    live.take(Changed(key="networks/net", step="there"))
    live.take(Changed(key="clusters/c", step="failed", words="no\x1b[2Jroom\n" * 40))
    live.tick()
    assert any("! clusters/c" in row and "failed: no [2Jroom" in row for row in shown.shown()), "trouble comes first"
    live.close()
    text = [row.rstrip() for row in shown.rows]
    assert sum("subnetworks/" in row for row in text) == 40, "the last picture is whole, for reading back"


def test_a_terminal_that_changes_its_size(screen):
    shown, live = screen(100, 30)
    live.take(began(20))
    shown.columns, shown.lines = 40, 8
    shown.rows = [""]  # what it does to old text is its own affair
    shown.row = shown.column = 0
    live.growing._widths = []
    for _ in range(3):
        live.tick()
        assert len(shown.rows) <= 8 and all(len(row) < 40 for row in shown.rows)


@pytest.mark.parametrize("columns", [20, 33, 80])
@pytest.mark.parametrize("lines", [4, 7, 50])
def test_no_line_is_wider_and_no_picture_taller_than_asked(columns, lines):
    tree = Tree()
    tree.take(began(12), 0.0)
    tree.take(Changed(key="clusters/c", step="failed", words="漢字" * 50), 4000.0)
    found = picture(tree, 5000.0, width=columns, height=lines)
    from muster.cli.live_region import cells

    assert len(found) <= lines and all(cells(line) <= columns for line in found)


def test_without_unicode(screen):
    tree = Tree()
    tree.take(began(1), 0.0)
    "\n".join(picture(tree, 0.0, width=30, height=3, ascii_only=True)).encode("ascii")


def test_a_sentence_stays_above_the_tree(screen):
    shown, live = screen(80, 20)
    live.take(Said(text="capacity: 0.9"))
    live.take(began(1))
    live.take(Said(text="no room in a"))
    live.take(began(1, title="clearing a"))
    live.close()
    text = [row for row in shown.shown() if row and not row.startswith((".", "+"))]
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
    assert "\x1b" not in cut("x" * 9, 5) and cut("x" * 9, 5) == "xxxx…"


def test_a_terminal_without_a_size_and_one_that_cannot_move(monkeypatch):
    monkeypatch.setattr("os.get_terminal_size", lambda _: (0, 0))
    stream = Screen(1, 1)
    stream.fileno = lambda: 1
    assert terminal_size(stream) == (80, 24) and terminal_size(io.StringIO()) == (80, 24)
    monkeypatch.delenv("TERM", raising=False)
    assert grows(stream) and not grows(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not grows(stream)


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
