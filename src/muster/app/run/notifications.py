"""``notify`` of the run file: news of a run for people, by a program or a webhook, outside the supervisor's loop.

Each way has a thread of its own (``EventWriter``), and a time after which what it does is given up: nothing that a
program or a server does, or does not do, holds up the run or its end.
"""

from __future__ import annotations

import functools
import http.client
import json
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from muster.app.run.event_writer import Sink
from muster.app.run.otlp import NoRedirect
from muster.config.spec import RunSpec
from muster.core import environment, processes
from muster.core.clock import SystemClock
from muster.core.errors import MusterError
from muster.core.event_details.attempts import AttemptStarted
from muster.core.event_details.hosts import HostRequested
from muster.core.event_details.run import RunFinished, RunWaiting
from muster.core.event_details.training import Step
from muster.core.events import Event
from muster.core.protocols import Clock
from muster.core.redact import hide_values, redact
from muster.core.typed_json import JsonObject
from muster.storage import run_secrets
from muster.supervise.process.limits import LimitsGuard
from muster.supervise.process.run_file import read_run_id, read_spec
from muster.supervise.process.supervisor import Supervisor

LOOK_EVERY_S = 5.0
#: A program is ended after so long, an answer is waited for so long, and a server is asked again so often.
PROGRAM_S, ANSWER_S, TRIES = 10.0, 3.0, 3
#: Of the time from the run's begin to a limit, what is left when it is near.
NEAR_SHARE = 0.1
MOST_TOLD = 200


@dataclass(frozen=True, kw_only=True)
class News:
    """One message to people."""

    kind: str
    text: str
    run_id: str
    name: str
    wall_ns: int
    step: int | None
    outcome: str | None = None
    exit_code: int | None = None

    def to_json(self) -> JsonObject:
        moment = datetime.fromtimestamp(self.wall_ns / 1e9, tz=UTC).isoformat(timespec="seconds")
        return {
            "news": self.kind, "text": self.text, "run_id": self.run_id, "name": self.name, "time": moment,
            "step": self.step, "outcome": self.outcome, "exit_code": self.exit_code,
        }  # fmt: skip


@dataclass(kw_only=True)
class Notifications(Sink):
    """Makes news of events, and has them delivered. ``deliver`` returns what went wrong, empty: nothing."""

    name: str
    spec: RunSpec
    run_id: str
    deliver: Callable[[News], str]
    say: Callable[[str], None]
    clock: Clock = field(default_factory=SystemClock)
    tend_every_s: float | None = LOOK_EVERY_S
    _step: int | None = None
    _began_ns: int | None = None
    _waits_since_ns: int | None = None
    _told_waiting: bool = False
    _told_limits: set[str] = field(default_factory=set)
    _finished: RunFinished | None = None

    def __post_init__(self) -> None:
        self._guard = LimitsGuard(limits=self.spec.limits, grace_s=self.spec.recovery.grace_s)

    def event(self, event: Event) -> None:
        self._began_ns = event.wall_ns if self._began_ns is None else self._began_ns
        self._guard.add(event)
        if event.kind == Step.kind:
            self._step = event.step
        elif event.kind in (HostRequested.kind, RunWaiting.kind):
            self._waits_since_ns, self._told_waiting = self._waits_since_ns or event.wall_ns, False
        elif event.kind == AttemptStarted.kind and self._waits_since_ns is not None:
            waited_s = (event.wall_ns - self._waits_since_ns) / 1e9
            self._waits_since_ns = None
            ranks = event.read(AttemptStarted).world_size
            self._tell("hosts", f"its hosts came after {_age(waited_s)}: {ranks} ranks start")
        elif event.kind == RunFinished.kind:
            self._finished = event.read(RunFinished)  # sent by ``end``, which is waited for longer

    def tend(self) -> None:
        now_ns = self.clock.wall_ns()
        since_ns = self._waits_since_ns
        if since_ns is not None and not self._told_waiting and now_ns - since_ns >= self.spec.notify.waiting_s * 1e9:
            self._told_waiting = True
            self._tell("waiting", f"it has waited for hosts for {_age((now_ns - since_ns) / 1e9)}")
        limit = self._guard.next(now_ns)
        if limit is None or self._began_ns is None or limit.reason in self._told_limits:
            return
        left_ns = limit.at_wall_ns - now_ns
        if left_ns <= NEAR_SHARE * (limit.at_wall_ns - self._began_ns):
            self._told_limits.add(limit.reason)
            self._tell("limit", f"{limit.reason} is near: it saves and stops in {_age(max(0.0, left_ns / 1e9))}")

    def end(self, code: int | None) -> None:
        if self._finished is not None:
            said = self._finished
            step = "" if self._step is None else f" after step {self._step}"
            self._tell("ended", f"{said.outcome}{step}: {said.reason}", outcome=said.outcome, exit_code=said.exit_code)

    def _tell(self, kind: str, text: str, *, outcome: str | None = None, exit_code: int | None = None) -> None:
        if kind not in self.spec.notify.on:
            return
        problem = self.deliver(
            News(
                kind=kind, text=redact(f"{self.run_id}: {text}"), run_id=self.run_id, name=self.spec.name,
                wall_ns=self.clock.wall_ns(), step=self._step, outcome=outcome, exit_code=exit_code,
            )
        )  # fmt: skip
        if problem:
            self.say(redact(f"{self.name} was not notified ({kind}): {problem}"))


def program(argv: Sequence[str], env: Mapping[str, str], cwd: Path, news: News) -> str:
    """Start it with the news as its input; it and what it started are ended after ``PROGRAM_S``. What went wrong."""
    given = json.dumps(news.to_json()).encode() + b"\n"
    try:
        code, said = processes.tell(argv, given, env=env, cwd=cwd, limit_s=PROGRAM_S)
    except (OSError, ValueError) as error:
        return f"{argv[0]} cannot be started: {getattr(error, 'strerror', None) or error}"
    if code is None:
        return f"{argv[0]} did not end within {PROGRAM_S:.0f} s"
    last = (said.decode(errors="replace").strip().splitlines() or [""])[-1][:MOST_TOLD]
    return f"{argv[0]} ended with code {code}: {last}" if code else ""


def webhook(url: str, news: News) -> str:
    """Post it; a server that is away is asked again. What went wrong, without the address."""
    body = json.dumps({"text": news.text}).encode()
    headers = {"Content-Type": "application/json", "User-Agent": "muster"}
    problem = ""
    for attempt in range(TRIES):
        time.sleep(attempt)
        try:
            request = urllib.request.Request(url, body, headers, method="POST")
            with urllib.request.build_opener(NoRedirect).open(request, timeout=ANSWER_S):
                return ""
        except urllib.error.HTTPError as error:
            problem = f"HTTP {error.code}"
            if error.code < 500 and error.code != 429:
                break
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            problem = getattr(reason, "strerror", None) or type(reason).__name__
    return f"{urllib.parse.urlsplit(url).hostname}: {problem}"


def notification_sinks(supervisor: Supervisor) -> Sequence[Sink]:
    """The receivers of this run's news, from its run file."""
    run_dir = supervisor.run_dir.resolve()
    try:
        run_id, spec = read_run_id(run_dir), read_spec(run_dir)
        secrets = run_secrets.read(run_dir) or run_secrets.read(run_dir.parent / "host")  # of a custom job
    except (MusterError, OSError, ValueError, KeyError):
        return ()  # ``serve`` says so
    inherited = environment.inherited()

    def say(text: str) -> None:
        supervisor.note(text) if supervisor.result is None else print(text, file=sys.stderr, flush=True)

    ways: dict[str, Callable[[News], str]] = {}
    if (argv := spec.notify.command) is not None:
        ways["notify.command"] = functools.partial(program, argv, {**inherited, **spec.env, **secrets}, run_dir)
    if (given := spec.notify.webhook) is not None:
        url = secrets.get(given) or (inherited.get(given, "") if given in spec.secrets else given)
        hide_values([url])
        if url:
            ways["notify.webhook"] = functools.partial(webhook, url)
        else:
            supervisor.note(f"notify.webhook: the secret {given} is not here: no news is sent")
    return [Notifications(name=name, spec=spec, run_id=run_id, deliver=way, say=say) for name, way in ways.items()]


def _age(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.{unit.count('h')}f} {unit}"
    return f"{seconds:.0f} s"
