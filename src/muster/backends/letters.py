"""Questions that reach a host through the run's home: to the run's supervisor, and commands (``muster exec``).

A host of a custom job, or a machine without an external address, accepts no connections from outside. The host whose
supervisor holds the run reads the box ``supervisor``; each host reads a box of its own. A command gets no input and no
terminal, and its output comes at its end.
"""

from __future__ import annotations

import base64
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from muster.backends import mailbox
from muster.backends.host.children import Children
from muster.backends.mailbox import Box
from muster.core.errors import BackendError
from muster.core.protocols import Store
from muster.core.typed_json import Count, Record, Seconds, Unreadable, decode, encode
from muster.protocol.codec import reader_of
from muster.protocol.pipes import FROM_POD, PodError

LOOK_S = 2.0
ANSWER_S = 60.0
"""For the supervisor to answer a question in."""
ASK, RUN = "ask", "run"
"""Kinds of letters."""
MOST_BYTES = 1024 * 1024
"""Of a command's output, of each of its two streams; the end is kept."""


def box_of(index: int | str) -> str:
    """A host's own box, by its number or its machine's name."""
    return f"host-{index}"


@dataclass(frozen=True, kw_only=True)
class Command(Record):
    """What a letter to a host asks."""

    argv: tuple[str, ...]
    timeout_s: Seconds


@dataclass(frozen=True, kw_only=True)
class Outcome(Record):
    """What came of it; the streams in base64."""

    code: Count
    out: str
    err: str


@dataclass(kw_only=True)
class Answers:
    """Answers what a host is asked, however that reached it."""

    children: Children
    env: Mapping[str, str]
    run_dir: Path
    """The supervisor's folder on this host."""

    def ask(self, kind: str, text: str) -> str:
        """A question to the supervisor, as a pod's (``protocol.pipes``), by the same program; its answer's text."""
        if kind != ASK:
            raise BackendError(f"a question of the kind {kind!r} is not known here", hint="is it another version?")
        argv = [sys.executable, "-P", "-m", "muster.app.remote_entrypoint", "--run-dir", str(self.run_dir)]
        done = self.children.run(argv, self.env, line=text.encode() + b"\n", timeout_s=ANSWER_S)
        try:
            line = done.out.splitlines()[-1]
            answer = reader_of(FROM_POD)(line)
        except (Unreadable, IndexError) as error:
            raise BackendError(f"the host answered {done.err[-200:].decode(errors='replace')!r}") from error
        if isinstance(answer, PodError):
            raise BackendError(answer.error, hint=answer.hint)
        return line.decode()

    def command(self, kind: str, text: str) -> str:
        """Run a command to its end; as ``Outcome``."""
        if kind != RUN:
            raise BackendError(f"a question of the kind {kind!r} is not known here", hint="is it another version?")
        try:
            asked = decode(Command, text.encode())
        except Unreadable as error:
            raise BackendError(f"the command cannot be read: {error}") from error
        done = self.children.run(asked.argv, self.env, line=b"", timeout_s=asked.timeout_s)
        if done.code is None:
            raise BackendError(
                f"{asked.argv[0]} did not end within {asked.timeout_s:.0f} s, and was killed",
                hint="a command that takes longer can be left running: setsid COMMAND >FILE &",
            )
        out, err = (base64.b64encode(part[-MOST_BYTES:]).decode() for part in (done.out, done.err))
        return encode(Outcome(code=done.code, out=out, err=err)).decode()


@dataclass(kw_only=True)
class Letters(Answers):
    """Reads both boxes in threads until ``stop``."""

    store: Store
    home: str
    run_id: str
    token: bytes
    index: int | str
    holds: Callable[[], bool]
    """Whether the supervisor here holds the run."""
    _stopped: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        for name, act, due in (
            (mailbox.SUPERVISOR, self.ask, self.holds),
            (box_of(self.index), self.command, lambda: True),
        ):
            box = Box(store=self.store, home=self.home, name=name, run_id=self.run_id, token=self.token)
            threading.Thread(target=self._serve, args=(box, act, due), name=f"box-{name}", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _serve(self, box: Box, act: mailbox.Act, due: Callable[[], bool]) -> None:
        said = ""
        while not self._stopped.wait(LOOK_S):
            try:
                if due():
                    box.serve_once(act)
                said = ""
            except Exception as error:  # noqa: BLE001 (a thread's edge: the sender has a timeout of its own)
                if not said:
                    print(f"muster: questions to {box.name} are not answered: {error}", file=sys.stderr, flush=True)
                said = str(error)
