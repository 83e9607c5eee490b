"""``muster up`` on a real pseudo-terminal: the tree stays in place, and Ctrl-C is answered at once.

Nothing here depends on the machine's own terminal, its variables or its speed: the size is set on the pseudo-terminal,
what comes out is played on a small terminal in memory, and events are waited for.
"""

import sys
import termios
from pathlib import Path

import pytest

discovery = pytest.importorskip("fakes.discovery")
if discovery.folder() is None:
    pytest.skip("google-api-python-client (Google's discovery documents) is not installed", allow_module_level=True)

from fakes.gke_run import on_gke  # noqa: E402
from fakes.pty_program import PtyProgram  # noqa: E402

pytestmark = pytest.mark.live
CHILD = str(Path(__file__).with_name("upchild.py"))
COLUMNS, LINES = 100, 16
MANIFEST = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: installed}\n"
NAMES = ("kueue.yaml", "jobset.yaml", "nccl-tcpxo-installer.yaml", "nri-device-injector.yaml")


class Terminal(PtyProgram):
    def __init__(self, folder, *arguments):
        (folder / "run.yaml").write_text(on_gke("a3-megagpu-8g"))
        manifests = folder / "manifests"
        manifests.mkdir(exist_ok=True)
        for name in NAMES:
            (manifests / name).write_text(MANIFEST)
        home = {"MUSTER_HOME": str(folder / "home")}
        super().__init__([sys.executable, CHILD, *arguments], columns=COLUMNS, lines=LINES, cwd=folder, env=home)


@pytest.fixture
def terminal(tmp_path):
    opened = []

    def start(kind, *arguments):
        opened.append(Terminal(tmp_path, kind, *arguments))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_the_tree_grows_in_place(terminal):
    up = terminal("quick", "up", "run.yaml", "--manifests", "manifests", "--pin")
    up.read("clusters/muster")
    up.read()
    assert up.code() == 0, up.text()
    text = up.text()
    assert up.raw.count(b"\x1b[2K") > 20, "it was drawn again and again"
    assert text.count("making what is missing in us-central1-b") == 1, "and stands there once"
    assert text.count("clusters/muster ") == 1 and text.count("subnetworks/muster-sub ") == 1
    assert "creating" not in text and "waiting" not in text, "the last picture is of the end"
    assert "hint: muster submit run.yaml" in text
    # 35 resources on 16 lines: while it grew, nothing was pushed out of sight but what had been said before.
    assert b" more: " in up.raw


def test_ctrl_c_leaves_a_clean_terminal_and_says_how_to_go_on(terminal):
    up = terminal("stuck", "up", "run.yaml", "--manifests", "manifests", "--pin")
    up.read("clusters/muster ", "creating")
    before = termios.tcgetattr(up.master)
    up.type(b"\x03")
    up.read()
    assert up.code() == 130, up.text()
    rows = [row.rstrip() for row in up.screen.rows if row.strip()]
    assert rows[-2:] == [
        "hint: muster up run.yaml --manifests manifests resumes",
        "hint: muster down run.yaml removes what was created",
    ]
    assert any(row.startswith("billed: clusters/muster") and "about $0.23 an hour" in row for row in rows)
    assert up.screen.column == 0 and "^C" not in up.text(), "the next prompt begins on a line of its own"
    assert termios.tcgetattr(up.master) == before and b"\x1b[?25l" not in up.raw


def test_down_on_a_terminal(terminal):
    down = terminal("quick", "down", "run.yaml")
    down.read()
    assert down.code() == 0 and "nothing of ours is left in example-project" in down.text()
