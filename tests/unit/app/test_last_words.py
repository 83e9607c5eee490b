"""How a foreground run ends for those who look on: its verdict, and a terminal that can be used."""

from __future__ import annotations

import errno
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
import tty
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from muster.app.run import submit, train
from muster.app.run.event_writer import Sink
from muster.app.run.submit import Intent
from muster.core.errors import BackendError

SHOW_CURSOR = b"\x1b[?25h"


class Ending:
    """A launcher whose agents do not leave by themselves, and whose signal comes while one waits for them."""

    def __init__(self, number: signal.Signals = signal.SIGINT, *, broken: bool) -> None:
        self.broken, self.number, self.cancelled = broken, number, 0
        self.interrupts = True

    def attach(self, handle: object, *, task: str, pid: int) -> None:
        pass

    def remaining(self, handle: object) -> bool:
        if self.interrupts:
            self.interrupts = False
            signal.raise_signal(self.number)
        return not self.cancelled

    def cancel(self, handle: object) -> None:
        self.cancelled += 1
        if self.broken:
            raise BackendError("it cannot be cancelled")


class Served:
    """A supervisor whose run has ended."""

    def __init__(self, *, run_dir: Path) -> None:
        self.run_dir, self.result = run_dir, 0

    def detached(self, why: str) -> None:
        pass

    note = detached

    def serve(self) -> int:
        return 75


@dataclass
class Request:
    tasks: tuple[()] = ()


class Words(Sink):
    shows_run = True

    def __init__(self) -> None:
        self.codes: list[int | None] = []

    def end(self, code: int | None) -> None:
        self.codes.append(code)


@pytest.fixture
def intent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Intent:
    nothing: Sequence[Sink] = ()
    monkeypatch.setattr(train, "Supervisor", Served)
    monkeypatch.setattr(train, "revivals", lambda supervisor: nothing)
    monkeypatch.setattr(submit, "start", lambda intent, request: SimpleNamespace(warnings=()))
    (tmp_path / "logs").mkdir()
    run = SimpleNamespace(path=tmp_path, logs=tmp_path / "logs")
    spec = SimpleNamespace(resources=SimpleNamespace(on_gpus=False))
    return cast("Intent", SimpleNamespace(run=run, request=Request(), launcher=None, spec=spec))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_agents_leave_ends_them_and_the_verdict_comes(intent: Intent, number: signal.Signals) -> None:
    launcher, words = Ending(number, broken=False), Words()
    intent.__dict__["launcher"] = launcher
    before = time.monotonic()
    ended = train.supervise(intent, sinks=[words])
    assert (ended.exit_code, ended.shown) == (75, True)
    assert words.codes == [75] and launcher.cancelled == 1
    assert time.monotonic() - before < train.LEAVE_S / 2, "nobody waits for them any more"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_agents_that_cannot_be_ended_take_no_verdict_away(intent: Intent) -> None:
    words = Words()
    intent.__dict__["launcher"] = Ending(broken=True)
    with pytest.raises(BackendError):
        train.supervise(intent, sinks=[words])
    assert words.codes == [75]


DISPLAY = """
import errno, sys
from muster.cli import live
from muster.config import load
display = live.display_of(load.loads(open(sys.argv[1]).read()).spec)
display.open()
print("open", flush=True)
sys.stdin.readline()
if sys.argv[2] == "gone":
    display.gone("it takes no more")
else:
    live.show_cursor()
sys.stderr.write("over\\n")
"""


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("way", ["gone", "leave"])
def test_the_cursor_is_shown_again_where_that_needs_no_waiting(tmp_path: Path, way: str, stopped: bool) -> None:
    (tmp_path / "run.yaml").write_text(
        "name: x\nmodel: {config: {model_type: llama}}\ndata: {sources: [{type: random}]}\ntraining: {steps: 5}\n"
    )
    primary, secondary = pty.openpty()
    tty.setraw(secondary)
    shown = bytearray()

    def read() -> None:
        try:
            while data := os.read(primary, 1 << 12):
                shown.extend(data)
        except OSError as error:
            assert error.errno == errno.EIO  # its last user has gone

    reader = threading.Thread(target=read)
    with subprocess.Popen(
        [sys.executable, "-c", DISPLAY, str(tmp_path / "run.yaml"), way], stdin=subprocess.PIPE, stdout=secondary,
        stderr=subprocess.PIPE, env={**os.environ, "TERM": "xterm"}, text=True,
    ) as child:  # fmt: skip
        assert child.stdin is not None and child.stderr is not None
        reader.start()
        while b"open" not in shown and child.poll() is None:
            time.sleep(0.02)
        assert b"\x1b[?25l" in shown
        if stopped:
            termios.tcflow(secondary, termios.TCOOFF)
        child.stdin.write("\n")
        child.stdin.flush()
        _, said = child.communicate(timeout=60)
        assert "over" in said, "nothing was waited for"
        if stopped:
            termios.tcflow(secondary, termios.TCOON)
    os.close(secondary)
    reader.join(30)
    os.close(primary)
    assert (SHOW_CURSOR in shown) == (not stopped)
