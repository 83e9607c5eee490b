"""Oracle: what decided in a GKE pod before ``backends/host``; for one release.

Run as ``python -m muster.backends.gke.pod.main ROLE --run-dir DIR [--host NAME] [--leave-after-s N] -- PROGRAM...``.

* ``host``: a pod that is removed (drained, preempted, deleted) ends with 75, so that its Job creates another one, and
  so does one whose agent failed: whether the run goes on is the supervisor's decision, never the Job's; an agent that
  left because no supervisor connected is restarted for the lifetime of the pod.
* ``supervisor``: two pods have this role, and one works. The other one stands by until the run's lease is out (10 s),
  and ends as the run did where that has ended. A program that ends without an end of the run in the run's home has
  crashed, and is started again; one that says several times that its words are wrong is believed.
  A pod that alone is removed lets go of the run at once: what its supervisor wrote is brought home, agents continue
  training, and the other one adopts them. Where all pods are removed at the same time (the queue evicts the run), the
  supervisor saves with them first.
  When the run itself saved and wants to run again (75: the allocation ends, or too little of it is left), the rest of
  it is queued as a new JobSet, which goes through the queue to a new allocation and goes on from the checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType

from muster.backends.gke.pod.continuation import AllocationsUsedUp, JobSetGone
from muster.backends.google.http import Unreachable
from muster.backends.host.run_state import RunState
from muster.core.errors import BusyError, MusterError

AGAIN = 75
"""Saved, asks to be continued. As a pod's exit code it is free: the Job creates a new pod and does not count it."""
BACK_END_FAULT = 6
REFUSED = 1
"""One of the causes: another supervisor holds the run."""
STOPPED = 130
"""Somebody or a limit stopped the run."""
COUNTED = 70
"""No verdict, and not free: the Job's backoff limit counts it, so what fails forever ends."""
WRONG_WORDS = (2, 3)
"""A command line, run file or plan that cannot be used: no other pod has better ones."""
WORDS_TRIES, TRIES = 3, 10
"""Crashes in a row after which wrong words are believed, and after which the pod ends."""
EARLY_S, IN_A_ROW_S = 60.0, 600.0
"""A program that crashed within the first of these is started again in this pod; older crashes do not count."""
BACK_OFF_S, LONGEST_BACK_OFF_S = 1.0, 30.0
"""Between two tries; doubled each time."""
KILLED = 128
"""The least exit code of a program that a signal ended."""
SOONEST_S, LATEST_S = 1.0, 3.0
"""How often a supervisor that stands by looks at the lease: one of 10 s is renewed every 3 s."""
OTHERS_REQUEUE_S = 60.0
"""The supervisor whose run asks to be continued has this time to queue the rest; then the other one does."""
ANSWER_S = 5.0
"""What the API server may take to say whether all pods go."""
SHIP_S = 6.0
"""What the last events may take of a pod's grace."""
LATE_S = 30.0
"""A supervisor that starts when the allocation is about to end is told so once it can listen."""
LONELY = "no supervisor and no work"
"""The reason in ``agent.ended`` of an agent that left because no supervisor connected."""
SHORTEST_RUN_S = 60.0
"""A run whose allocation is younger than this would be requeued forever without a step."""
REQUEUE_S = 300.0
"""For how long one pod tries to queue the rest; then another pod does."""


@dataclass(kw_only=True)
class Pod:
    """One program, its signals, and its end."""

    argv: Sequence[str]
    role: str
    state: RunState | None = None
    lonely: Callable[[], bool] = lambda: False
    all_go: Callable[[], bool | None] = lambda: False
    """Asked once the pod is to go: whether all pods of the run are; None: one cannot know."""
    age_s: Callable[[], float | None] = lambda: 0.0
    """For how long the run has had its allocation, if longer than this pod's age; None: nobody says."""
    requeue: Callable[[], str] | None = None
    """Queues the rest of the run; returns the name of what was made."""
    leave_after_s: float | None = None
    grace_s: float = 30.0
    _child: int | None = None
    _taken: bool = False
    """This pod is to end with 75, and another one comes."""
    _leaving: bool = False
    _worked: bool = False
    _goes: bool | None = None
    """What ``all_go`` said."""
    _last: int = 0
    """The program that ended last, as a process id."""
    _crashes: list[float] = field(default_factory=list)
    """When, by the monotonic clock."""
    _started: float = field(default_factory=time.monotonic)

    def _supervise(self) -> int:
        code: int | None = None
        while code is None and not self._taken:
            if (held_s := self._held_s()) > 0:
                if self.state is not None:
                    self.state.catch_up()
                self._pause(min(LATEST_S, max(SOONEST_S, held_s - SOONEST_S)))
            elif (code := self._ended()) is not None:
                if code == AGAIN:
                    self._pause(OTHERS_REQUEUE_S)
            else:
                began = time.monotonic()
                code = self._verdict(self._wait(), time.monotonic() - began)
        if self._taken or code is None or code == COUNTED:
            self._let_go(code)
            return AGAIN if self._taken or code is None else code
        return self._requeued() if code == AGAIN else code

    def _verdict(self, code: int, lived_s: float) -> int | None:
        """What the end of the supervisor's program means for the run; None: nothing, stand by (again)."""
        if self._taken:
            return code
        left_held = code == REFUSED and self._held_s() > 0
        if left_held and self.state is not None and self.state.held_by() != self._last:
            return None  # another one was faster
        if (ended := self._ended()) is not None:
            return ended
        if code in (0, AGAIN, STOPPED) or not (left_held or self._says_how_it_ended()):
            return code
        return self._crashed(code, lived_s)

    def _crashed(self, code: int, lived_s: float) -> int | None:
        """It ended, and the run did not: a refused credential, a bucket that does not answer, a bug."""
        if lived_s >= EARLY_S:
            print(f"the supervisor crashed (code {code}); its pod is started again", file=sys.stderr, flush=True)
            self._taken = True
            return code
        now = time.monotonic()
        self._crashes = [*(at for at in self._crashes if now - at < IN_A_ROW_S), now]
        often = len(self._crashes)
        said = (
            f"the supervisor ended with code {code} after {lived_s:.0f} s, and the run did not end ({often}x in a row)"
        )
        if often >= (WORDS_TRIES if code in WRONG_WORDS else TRIES):
            print(f"error: {said}", file=sys.stderr, flush=True)
            return code if code in WRONG_WORDS else COUNTED
        pause_s = min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2 ** (often - 1))
        print(f"{said}; again in {pause_s:.0f} s", file=sys.stderr, flush=True)
        self._pause(pause_s)
        return None

    def _let_go(self, code: int | None) -> None:
        """What a supervisor that goes leaves behind, for the next one."""
        if self.state is not None and self._worked:
            self.state.ship("supervisor", SHIP_S)
            if code == AGAIN and (self.all_go() if self._goes is None else self._goes):
                self.state.withdraw_end(AGAIN)  # all pods went: the run goes on with the same JobSet

    def _held_s(self) -> float:
        return self.state.held_s() if self.state is not None else 0.0

    def _ended(self) -> int | None:
        try:
            return self.state.ended() if self.state is not None else None
        except (MusterError, OSError):
            return None

    def _says_how_it_ended(self) -> bool:
        return self.state is not None and self.state.says_how_it_ended

    def _pause(self, seconds: float) -> None:
        """Less where the pod is to go: a signal does not end a sleep."""
        until = time.monotonic() + seconds
        while not self._taken and (left_s := until - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.25))

    def _signal(self, number: int, _frame: FrameType | None) -> None:
        self._taken = True
        if self.role == "supervisor":
            threading.Thread(target=self._go, name="go", daemon=True).start()
        else:
            self._send(number)

    def _go(self) -> None:
        """To a supervisor SIGTERM means: the whole run is preempted. Where only its pod is, it is killed: its state is
        in its log, and agents wait for its successor. Where nobody says which, its hosts do: it saves with them if
        they are preempted too, within the pod's grace."""
        until = time.monotonic() + self.grace_s - SHIP_S - 2.0
        goes = self._goes = self.all_go()
        if goes is not False:
            if goes:
                self._send(signal.SIGTERM)
            time.sleep(max(0.0, until - time.monotonic()))
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if (child := self._child) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)

    def _requeued(self) -> int:
        until, pause_s = time.monotonic() + REQUEUE_S, BACK_OFF_S
        while not self._taken:
            last, code, said = self._queue_the_rest()
            print(said, file=sys.stderr, flush=True)
            if last or time.monotonic() >= until:
                return code
            self._pause(pause_s)
            pause_s = min(LONGEST_BACK_OFF_S, 2 * pause_s)
        return AGAIN  # the home says that the run asks to be continued: the next pod does it

    def _queue_the_rest(self) -> tuple[bool, int, str]:
        """(whether another try is of no use, the exit code if this was the last one, what to say)."""
        age_s, own_s = self.age_s(), time.monotonic() - self._started
        wants, hint = "error: the run asks to be continued", "\nhint: muster submit continues it"
        if self.requeue is None:
            return True, BACK_END_FAULT, f"{wants} but this pod may not queue it{hint}"
        if own_s < SHORTEST_RUN_S and age_s is None:
            return False, AGAIN, "the run asks to be continued; the API server does not answer yet"
        if (lived_s := max(own_s, age_s or 0.0)) < SHORTEST_RUN_S:
            return True, BACK_END_FAULT, f"{wants} after only {lived_s:.0f} s{hint}"
        try:
            return True, 0, f"continuation queued: {self.requeue()}"
        except AllocationsUsedUp as error:
            if self.state is not None:
                self.state.end_instead(AGAIN, STOPPED, str(error))
            return True, STOPPED, f"the run has reached its limit: {error}\nhint: {error.hint}"
        except JobSetGone as error:
            return True, BACK_END_FAULT, f"{wants}: {error}{hint}"
        except (Unreachable, BusyError, OSError) as error:
            return False, AGAIN, f"cannot queue the rest of the run yet: {error}"
        except MusterError as error:  # a refusal may be one of a moment: a webhook that is down, a role that is new
            return False, COUNTED, f"cannot queue the rest of the run: {error}"
