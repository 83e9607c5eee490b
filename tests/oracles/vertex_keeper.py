"""Oracle: what decided on a host of Vertex AI before ``backends/host``; for one release.

* The agent is started again whenever it ends before the run does: whether the run goes on is the supervisor's decision.
* The supervisor belongs to whoever holds the run's lease. The chief starts it at once; another host when the lease has
  been free for a while, longer for each further host. One that ends without an end of the run has crashed.
* Nothing here ends before the run does: what Vertex makes of a container's exit is in ``vertex.host``.
* SIGTERM is a notice, and where nobody dies of it within ``NOTICE_S`` it was none. Spot takes the whole job, so the run
  is saved and asks to be continued (75), and its first host that starts again goes on; else one machine goes, and the
  run's supervisor decides about it. Where that is here it is killed, so that another host takes over at once.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from muster.backends.host.children import Children
from muster.backends.host.run_state import SUPERVISOR, RunState
from muster.core.clock import SystemClock
from muster.core.errors import BackendError, MusterError
from muster.core.protocols import Clock

AGENT = "agent"
AGAIN, STOPPED, REFUSED = 75, 130, 1
"""Saved and asks to be continued; stopped by somebody; one cause of which is that another supervisor was faster."""
WRONG_WORDS = (2, 3)
"""A run file or plan that cannot be used: no other host has better ones."""
LOOK_S = 0.5
SOONEST_S, LATEST_S = 1.0, 3.0
"""How often the lease is looked at: one of 10 s is renewed every 3 s."""
STAGGER_S, LONGEST_STAGGER_S = 2.0, 30.0
"""For how much longer each further host leaves a free lease to those before it."""
CHIEF_COMES_S = 60.0
"""For how long the chief's machine is waited for where nobody has held the run yet; the last one to come may be it."""
WORDS_TRIES, TRIES = 3, 10
"""Crashes in a row after which wrong words are believed, and after which this job ends."""
IN_A_ROW_S = 600.0
BACK_OFF_S, LONGEST_BACK_OFF_S = 1.0, 30.0
"""Before a program is started again; doubled each time that it lived for less than the longest."""
NOTICE_S = 120.0
"""Nothing says how long a notice is ahead of the end; 30 s are usual."""
LEAVE_S, KILL_S = 30.0, 10.0
"""What an agent has to leave by itself after the run's end, and after a signal then."""
SHIP_S = 6.0
STOP_AGAIN_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Program:
    """How one is started; ``log``: the file for its output, None: where ours goes."""

    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path | None = None


def say(text: str) -> None:
    """Into the job's log."""
    print(f"muster: {text}", file=sys.stderr, flush=True)


@dataclass(kw_only=True)
class Keeper:
    """One host's. ``turn`` looks once; ``run`` until the run is over."""

    index: int
    """Among the job's hosts; 0: the chief."""
    agent: Program
    supervisor: Program
    children: Children
    state: RunState
    """As the supervisor's own folder has it."""
    stop_run: Callable[[str], bool]
    """Tells the run's supervisor to save and to ask to be continued, and why; False: it did not answer."""
    whole_job_goes: bool
    """What a notice means here: the job, else this machine."""
    leave_at_s: float | None = None
    """When the job's time is nearly up, by ``clock``; Vertex gives no notice of that."""
    clock: Clock = field(default_factory=SystemClock)
    said: bool | None = None
    """None: the run goes on; else whether its end stands in its home."""
    _term: bool = False
    _noticed_s: float | None = None
    _agent_at_s: float = 0.0
    _agent_began_s: float = 0.0
    _agent_pause_s: float = BACK_OFF_S
    _next_look_s: float = 0.0
    _next_stop_s: float = 0.0
    _free_since_s: float | None = None
    _was_held: bool = False
    _again_since_s: float | None = None
    """When an end with 75 was seen first."""
    _looked: bool = False
    _supervisor_began_s: float = 0.0
    _supervisor_pid: int | None = None
    _crash: int | None = None
    """With what a supervisor ended here, until it is known what that means."""
    _crashes: list[float] = field(default_factory=list)

    def run(self) -> bool:
        """Until the run is over and the programs here have left; whether the home says how it ended."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signal)
        while self.said is None:
            self.turn()
            self.clock.sleep(LOOK_S)
        self._leave()
        return self.said

    def notice(self) -> None:
        """As SIGTERM."""
        self._term = True

    @property
    def supervises(self) -> bool:
        """A supervisor runs here; whether it holds the run the lease says."""
        return self.children.pid(SUPERVISOR) is not None

    def turn(self) -> None:
        """Look at everything once, and act."""
        now = self._now_s()
        for name, code in self.children.ended():
            if name == AGENT:
                self._agent_ended(code, now)
            else:
                self._supervisor_ended(code, now)
        self._watch_notice(now)
        self._watch_run(now)
        waits = self._noticed_s is not None or self._again_since_s is not None
        if self.said is None and not waits and self.children.pid(AGENT) is None and now >= self._agent_at_s:
            self._agent_began_s = now
            self._start(AGENT, self.agent)

    # ------------------------------------------------------------ the agent

    def _agent_ended(self, code: int, now: float) -> None:
        long = now - self._agent_began_s >= LONGEST_BACK_OFF_S
        self._agent_pause_s = BACK_OFF_S if long else min(LONGEST_BACK_OFF_S, 2 * self._agent_pause_s)
        self._agent_at_s = now + self._agent_pause_s
        self._next_look_s = min(self._next_look_s, now)  # the run's end is the usual reason
        say(f"the agent ended with code {code}")

    def _start(self, name: str, program: Program) -> None:
        try:
            pid = self.children.start(name, program.argv, program.env, program.log)
        except (BackendError, OSError) as error:
            say(f"error: {error}")
            self._agent_at_s = self._next_look_s = self._now_s() + LONGEST_BACK_OFF_S
            return
        if name == SUPERVISOR:
            self._supervisor_pid = pid

    # ------------------------------------------------------------ notices

    def _signal(self, _number: int, _frame: FrameType | None) -> None:
        self._term = True

    def _watch_notice(self, now: float) -> None:
        if self._noticed_s is not None and now - self._noticed_s > NOTICE_S:
            say(f"still here {NOTICE_S:.0f} s after the notice: going on")
            self._noticed_s, self._term = None, False
        elif self._term and self._noticed_s is None:
            self._noticed_s = now
            self._on_notice()

    def _on_notice(self) -> None:
        if self.whole_job_goes and self.stop_run("SIGTERM from Vertex AI: the job is taken away"):
            say("SIGTERM: the run's supervisor saves")
            return
        say("SIGTERM: this host's agent is told")
        if self.supervises:
            self.children.send(SUPERVISOR, signal.SIGKILL)
            self.state.ship(SUPERVISOR, SHIP_S)
        self.children.send(AGENT, signal.SIGTERM)

    # ------------------------------------------------------------ the run

    def _watch_run(self, now: float) -> None:
        late = self.leave_at_s is not None and now >= self.leave_at_s
        if self.supervises:
            if late and now >= self._next_stop_s:
                told = self.stop_run("the custom job's time is nearly up")
                self._next_stop_s = now + (10 * NOTICE_S if told else STOP_AGAIN_S)
            return
        if now < self._next_look_s:
            return
        if (held_s := self.state.held_s()) > 0:
            self._free_since_s, self._was_held, self._looked = None, True, True
            self._next_look_s = now + min(LATEST_S, max(SOONEST_S, held_s - SOONEST_S))
            if self.index <= 1:
                self.state.catch_up()
            return
        self._next_look_s = now + SOONEST_S
        try:
            ended = self.state.ended()
        except (MusterError, OSError):
            return  # nobody could start now either
        first, self._looked = not self._looked, True
        if ended == AGAIN:
            self._to_be_continued(now, first=first, late=late)
        elif ended is not None:
            self._over(said=True)
        else:
            self._again_since_s = None
            self._take_over_where_due(now)

    def _to_be_continued(self, now: float, *, first: bool, late: bool) -> None:
        """It saved on a notice: this job's containers are about to go, unless its time is up. Of a life before this one
        it is what the notice announced; and where nobody goes, the notice was none."""
        if late:
            self._over(said=True)
        elif self._again_since_s is None and not first:
            self._again_since_s = now
        elif first or (self._noticed_s is None and now - (self._again_since_s or now) > NOTICE_S):
            say("the run saved itself on a notice, and this job is still here: it goes on")
            self.state.withdraw_end(AGAIN)
            self._again_since_s = None

    def _take_over_where_due(self, now: float) -> None:
        if (code := self._crash) is not None:
            self._crash = None
            self._crashed(code, now)
        if self.said is not None or self._noticed_s is not None or now < self._next_look_s - SOONEST_S:
            return
        if self._free_since_s is None:
            self._free_since_s = now
        patience_s = min(LONGEST_STAGGER_S, STAGGER_S * self.index)
        patience_s += CHIEF_COMES_S if self.index and not self._was_held else 0.0
        if now - self._free_since_s >= patience_s:
            say("nobody holds the run: starting its supervisor here")
            self._supervisor_began_s, self._free_since_s = now, None
            self._start(SUPERVISOR, self.supervisor)

    def _supervisor_ended(self, code: int, now: float) -> None:
        self._next_look_s, self._free_since_s, self._crash = now, None, None
        if self._noticed_s is not None:
            return
        faster = code == REFUSED and self.state.held_s() > 0 and self.state.held_by() != self._supervisor_pid
        if faster:
            say("another host holds the run: standing by")
        else:
            self._crash = code

    def _crashed(self, code: int, now: float) -> None:
        """A supervisor ended here, its lease is out, and the run's home says no end."""
        lived_s = now - self._supervisor_began_s
        said = f"the supervisor ended with code {code} after {lived_s:.0f} s, and the run did not end"
        if code in (0, AGAIN, STOPPED):  # its verdict, which it could not write
            say(f"error: {said} in its home")
            self._over(said=False)
            return
        self._crashes = [*(at for at in self._crashes if now - at < IN_A_ROW_S), now]
        often = len(self._crashes)
        if often >= (WORDS_TRIES if code in WRONG_WORDS else TRIES):
            say(f"error: {said} ({often}x in a row)")
            self._over(said=False)
            return
        pause_s = min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2 ** (often - 1))
        say(f"{said} ({often}x in a row); again in {pause_s:.0f} s")
        self._next_look_s = now + SOONEST_S + pause_s

    # ------------------------------------------------------------ the end

    def _over(self, *, said: bool) -> None:
        self.said = said

    def _leave(self) -> None:
        """The agent leaves by itself when its run has ended; one that never heard of that is told."""
        for number, patience_s in ((None, LEAVE_S), (signal.SIGTERM, KILL_S), (signal.SIGKILL, KILL_S)):
            until = self._now_s() + patience_s
            for name in (AGENT, SUPERVISOR):
                if number is not None:
                    self.children.send(name, number)
            while self._now_s() < until:
                self.children.ended()
                if self.children.pid(AGENT) is None and not self.supervises:
                    return
                self.clock.sleep(LOOK_S)

    def _now_s(self) -> float:
        return self.clock.monotonic_ns() / 1e9
