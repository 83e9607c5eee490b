"""What a host program does about its agent and the run's supervisor: one pure function for every back end.

* The agent is started again whenever it ends before the run does: whether the run goes on is the supervisor's decision.
* The supervisor is whichever process holds the run's lease. The host with rank 0 starts it at once; another host when
  the lease has been free for a while, longer for each further rank. A supervisor that ends without an end of the run in
  the run's home has crashed, unless another one was faster to take the lease.
* What a notice, an end and an exit code mean on a back end is in its ``Rules``.

``docs/reference/host-program.md`` is the table of what it answers.
"""

from __future__ import annotations

from dataclasses import replace
from signal import Signals
from typing import TypeAlias

from muster.backends.host.state import (
    AGENT,
    CONFIG_ERRORS,
    NEVER,
    RESUME,
    STOPPED,
    SUPERVISOR,
    Action,
    AskSave,
    AskScope,
    AskTime,
    Child,
    ChildEnded,
    EndHere,
    Event,
    Exit,
    LeaveAt,
    Leaving,
    Look,
    Looked,
    Notice,
    Noticed,
    NotStarted,
    Outcome,
    Requeue,
    Requeued,
    RequeueRest,
    Rules,
    Saved,
    SaveReason,
    Say,
    ScopeKnown,
    Send,
    Ship,
    Shipped,
    Start,
    State,
    Tick,
    WithdrawEnd,
)
from muster.protocol.exit_codes import UNSUPERVISED

Decision: TypeAlias = tuple[State, list[Action]]

REFUSED = 1
"""Exit code of a supervisor: among other causes, another one holds the lease."""
CLEAN = (0, RESUME, UNSUPERVISED, STOPPED)
"""Exit codes of programs that brought their last events home themselves."""
KILLED = 128
"""The least exit code of a program that a signal ended."""
SOONEST_S = 1.0
"""Between two looks at the lease."""
UNKNOWN_S = 2.0
"""Until a home that did not answer is asked again."""
STAGGER_S, LONGEST_STAGGER_S = 2.0, 30.0
"""How much longer each further rank leaves a free lease to those before it."""
FIRST_HOST_S = 60.0
"""Added where the run was never held: the machine of rank 0 may be the last to start."""
CONFIG_TRIES, TRIES, IN_A_ROW_S = 3, 10, 600.0
"""Within that time, so many configuration errors are believed, and so many crashes end the program."""
BACK_OFF_S, LONGEST_BACK_OFF_S = 1.0, 30.0
"""Before a program is started again; doubled each time that it lived for less than the longest."""
REFUSED_AGENT_S = 600.0
"""Between two starts of an agent that ended with 2 (another version) three times in a row."""
STEP_PAUSE_S = 10.0
"""Before a program with a limited number of starts is started again, times its starts."""
MOVES_S = 60.0
"""A supervisor that crashed sooner is started again here."""
NOTICE_S = 120.0
"""A notice after which the host is still there for so long was none; 30 s are usual."""
LAST_S = 8.0
"""Of a notice's grace, for the last uploads."""
LAST_UPLOAD_S = 6.0
LISTENS_S = 30.0
"""What a supervisor may take until it listens."""
SAVE_AGAIN_S, SAVE_LATER_S, INSIST_S = 5.0, 1200.0, 1.0
"""Until the supervisor is asked to save again: it did not answer; it did; a notice that must be delivered."""
REQUEUE_S = 300.0
"""For how long one host tries to queue the rest of the run."""


def decide(state: State, event: Event, now: float, rules: Rules) -> Decision:
    """The state after ``event`` at ``now``, and what to do, in this order."""
    if state.leaving is not None and state.leaving.done:
        return state, []
    match event:
        case Tick():
            return _tick(state, now, rules)
        case ChildEnded(name=name, code=code):
            return _child_ended(state, name, code, now, rules)
        case NotStarted(name=name):
            later_s = now + LONGEST_BACK_OFF_S
            state = _with(state, name, running=False, not_before_s=later_s)
            return replace(state, next_look_s=later_s), []
        case Shipped(name=name):
            return _with(state, name, shipping=False), []
        case Looked():
            return _looked(state, event, now, rules) if state.leaving is None else (state, [])
        case Noticed():
            return _noticed(state, now, rules) if state.leaving is None else (state, [])
        case ScopeKnown(scope=scope):
            return _scope_known(state, scope, now, rules)
        case Saved(reason=reason, delivered=delivered):
            return _saved(state, reason, delivered, now, rules)
        case Requeued():
            return _requeued(state, event, now, rules)
        case LeaveAt(at_s=at_s):
            return replace(state, leave_at_s=at_s), []


def _tick(state: State, now: float, rules: Rules) -> Decision:
    if state.leaving is not None:
        return _leave_further(state, now)
    actions: list[Action] = []
    notice = state.notice
    if notice is not None and not rules.insists and now - notice.since_s > NOTICE_S:
        actions.append(Say(f"still here {NOTICE_S:.0f} s after the notice: going on"))
        state, notice = replace(state, notice=None), None
    if state.requeue is not None:
        if now < state.requeue.next_s:
            return state, actions
        return replace(state, requeue=replace(state.requeue, next_s=NEVER)), [*actions, RequeueRest()]
    state, saves = _save_where_due(state, now, rules)
    actions += saves
    anything_ended = rules.rank is not None or any(not child.running for child in state.programs.values())
    if rules.rank is None and not rules.reads_end:
        pass  # nothing that the home says matters here
    elif not state.supervises and anything_ended and now >= state.next_look_s:
        return replace(state, next_look_s=NEVER), [*actions, Look()]
    elif not state.supervises and anything_ended and state.next_look_s == NEVER:
        return state, actions  # what is being read may say that the run has ended
    waits = (notice is not None and not rules.insists) or state.cut_off
    if waits or (state.again_since_s is not None and rules.continues == "waits"):
        return state, actions
    for name, child in state.programs.items():
        may_start = rules.most_starts is None or child.starts < rules.most_starts
        idle = not child.running and not child.shipping
        if name != SUPERVISOR and idle and may_start and now >= child.not_before_s:
            state = _started(state, name, now)
            actions.append(Start(name))
    return state, actions


def _save_where_due(state: State, now: float, rules: Rules) -> Decision:
    if now < state.next_save_s:
        return state, []
    notice = state.notice
    if rules.insists and notice is not None and not notice.delivered:
        if state.supervises or not rules.everyone_is_notified:
            return replace(state, next_save_s=NEVER), [AskSave("notice")]
    elif state.supervises and now >= _save_at_s(state, rules):
        if rules.saves_by_signal:
            text = "the allocation is about to end: saving"
            state = replace(state, next_save_s=NEVER, time_was_asked=True)
            return state, [Say(text), Send(SUPERVISOR, Signals.SIGTERM)]
        return replace(state, next_save_s=NEVER), [AskSave("time")]
    return state, []


def _save_at_s(state: State, rules: Rules) -> float:
    """A supervisor that started when the time was up already is signalled once it has its handler."""
    began_s = state.child(SUPERVISOR).began_s
    return began_s + LISTENS_S if rules.saves_by_signal and began_s >= state.leave_at_s else state.leave_at_s


# ---------------------------------------------------------------- programs


def _with(state: State, name: str, **changes: object) -> State:
    child = replace(state.child(name), **changes)  # type: ignore[arg-type]
    return replace(state, programs={**state.programs, name: child})


def _started(state: State, name: str, now: float) -> State:
    return _with(state, name, running=True, began_s=now, starts=state.child(name).starts + 1)


def _child_ended(state: State, name: str, code: int, now: float, rules: Rules) -> Decision:
    lived_s = now - state.child(name).began_s
    state = _with(state, name, running=False, lived_s=lived_s)
    actions: list[Action] = [Say(f"{name} ended with code {code} after {lived_s:.0f} s")] if code else []
    if code > KILLED or (name == AGENT and code not in CLEAN):
        state = _with(state, name, shipping=True)
        actions.append(Ship(name))
    if state.leaving is not None:
        state = replace(state, crash=code if name == SUPERVISOR else state.crash)
        state, more = _withdraw_of_evicted(state)
        return state, actions + more
    if name == SUPERVISOR:
        # Whether it crashed depends on who holds the lease now, and on what the home says.
        crash = None if state.notice is not None and not rules.insists else code
        state = replace(state, crash=crash, next_look_s=now, free_since_s=None)
        return replace(state, next_save_s=min(state.next_save_s, now)), actions
    state = replace(state, next_look_s=min(state.next_look_s, now))  # the run's end is the usual reason
    if rules.most_starts is not None:
        child = state.child(name)
        starts = rules.most_starts if code in CONFIG_ERRORS else child.starts
        return _with(state, name, starts=starts, not_before_s=now + STEP_PAUSE_S * child.starts), actions
    state, more = _agent_ended(state, name, code, now, rules)
    return state, actions + more


def _agent_ended(state: State, name: str, code: int, now: float, rules: Rules) -> Decision:
    child = state.child(name)
    if code == 0 and rules.released_host_ends:
        return _leave(state, Outcome.RUN_ENDED, code, now, rules)
    refusals = child.refusals + 1 if code in CONFIG_ERRORS else 0
    if rules.moves and not refusals and code != UNSUPERVISED:
        return _leave(state, Outcome.EVICTED, RESUME, now, rules)
    state = _with(_paused(state, name, now), name, refusals=refusals)
    if refusals < CONFIG_TRIES:
        return state, []
    text = f"error: the agent ended with code {code} {refusals}x in a row; again in {REFUSED_AGENT_S:.0f} s"
    return _with(state, name, not_before_s=now + REFUSED_AGENT_S), [Say(text)]


def _paused(state: State, name: str, now: float) -> State:
    """Before it is started again: the longer, the more often it ended early."""
    child = state.child(name)
    pause_s = BACK_OFF_S if child.lived_s >= LONGEST_BACK_OFF_S else min(LONGEST_BACK_OFF_S, 2 * child.pause_s)
    return _with(state, name, pause_s=pause_s, not_before_s=now + pause_s)


# ---------------------------------------------------------------- the lease and the end


def _looked(state: State, event: Looked, now: float, rules: Rules) -> Decision:
    lease, end = event.lease, event.end
    if lease.kind == "unknown":  # no supervisor could start now either
        return replace(state, free_since_s=None, next_look_s=now + UNKNOWN_S), []
    if lease.kind == "held" and (state.crash is None or lease.left_s > 0):
        return _stand_by(state, event, now, rules)
    state = replace(state, next_look_s=now + SOONEST_S, cut_off=False)
    if end == "unreadable":
        return state, []
    first, state = not state.looked, replace(state, looked=True)
    if end == RESUME and rules.continues != "ends":
        return _to_be_continued(state, now, rules, first=first)
    if end is not None:
        return _leave(state, Outcome.RUN_ENDED, end, now, rules)
    state = replace(state, again_since_s=None)
    if state.programs and all(_is_used_up(child, rules) for child in state.programs.values()):
        return _leave(state, Outcome.END_UNWRITTEN, 1, now, rules)
    if state.crash is not None:
        return _judge_crash(state, state.crash, now, rules)
    return _take_over_where_due(state, now, rules, at_once=lease.kind == "vacated")


def _stand_by(state: State, event: Looked, now: float, rules: Rules) -> Decision:
    """A supervisor that ended because another one holds the lease has lost a race: no crash. A host that is cut off
    ends its own ranks, and starts none."""
    lost_race = state.crash == REFUSED
    state = replace(
        state,
        free_since_s=None,
        was_held=True,
        looked=True,
        next_look_s=now + min(rules.longest_look_s, max(SOONEST_S, event.lease.left_s - SOONEST_S)),
        crash=None if lost_race else state.crash,
        cut_off=event.cut_off,
    )
    if event.cut_off and state.child(AGENT).running:
        return state, [Say("cut off: ending this host's ranks"), EndHere()]
    return state, [Say("another host holds the run: standing by")] if lost_race else []


def _is_used_up(child: Child, rules: Rules) -> bool:
    return rules.most_starts is not None and not child.running and child.starts >= rules.most_starts


def _take_over_where_due(state: State, now: float, rules: Rules, *, at_once: bool) -> Decision:
    """``at_once``: this host has waited for its turn before it expired the lease; the one that lost it may have been
    the one that gets the notice of the allocation's end."""
    is_blocked = (state.notice is not None and not rules.insists) or state.child(SUPERVISOR).shipping
    if rules.rank is None or state.supervises or is_blocked:
        return state, []
    if now < state.child(SUPERVISOR).not_before_s:
        return replace(state, next_look_s=state.child(SUPERVISOR).not_before_s), []
    free_since_s = now if state.free_since_s is None else state.free_since_s
    state = replace(state, free_since_s=free_since_s)
    patience_s = min(LONGEST_STAGGER_S, STAGGER_S * rules.rank)
    if rules.rank and not state.was_held:
        patience_s += FIRST_HOST_S
    if now - free_since_s < patience_s and not at_once:
        return state, []
    state = replace(_started(state, SUPERVISOR, now), free_since_s=None)
    actions: list[Action] = [Say("the run's lease is free: starting its supervisor here"), Start(SUPERVISOR)]
    return state, [*actions, AskTime()] if at_once else actions


def _judge_crash(state: State, code: int, now: float, rules: Rules) -> Decision:
    """The supervisor here ended, no other holds the lease, and the home says no end."""
    child = state.child(SUPERVISOR)
    state = replace(state, crash=None)
    text = f"the supervisor ended with code {code} after {child.lived_s:.0f} s, and the run did not end"
    if code == RESUME and rules.continues == "requeue":
        return _begin_requeue(state, now)
    if not rules.reads_end:
        return _leave(state, Outcome.RUN_ENDED, code, now, rules)
    if code in (0, RESUME, STOPPED):  # its result, which it could not write
        state, actions = _leave(state, Outcome.END_UNWRITTEN, code, now, rules)
        return state, [Say(f"error: {text} in its home"), *actions]
    ships: list[Action] = []
    if code < KILLED:
        state, ships = _with(state, SUPERVISOR, shipping=True), [Ship(SUPERVISOR)]
    if rules.moves and child.lived_s >= MOVES_S:
        state, actions = _leave(state, Outcome.EVICTED, RESUME, now, rules)
        return state, [Say(text), *ships, *actions]
    state = replace(state, crashes=(*(at for at in state.crashes if now - at < IN_A_ROW_S), now))
    count = len(state.crashes)
    if count >= (CONFIG_TRIES if code in CONFIG_ERRORS else TRIES):
        state, actions = _leave(state, Outcome.GIVEN_UP, code, now, rules)
        return state, [Say(f"error: {text} ({count}x in a row)"), *ships, *actions]
    pause_s = min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2 ** (count - 1))
    again_s = now + SOONEST_S + pause_s
    state = _with(replace(state, next_look_s=again_s), SUPERVISOR, not_before_s=again_s)
    return state, [Say(f"{text} ({count}x in a row); again in {pause_s:.0f} s"), *ships]


def _to_be_continued(state: State, now: float, rules: Rules, *, first: bool) -> Decision:
    """The home says 75. Written by an earlier start, it announced this one; else this host may be about to go."""
    ours = state.crash == RESUME
    if rules.continues == "here":
        if rules.rank is None:
            return state, []
        state = _paused(state, SUPERVISOR, now) if ours else state
        return replace(state, crash=None), [WithdrawEnd()]
    if rules.continues == "requeue":
        since_s = now if state.again_since_s is None else state.again_since_s
        state = replace(state, again_since_s=since_s)
        return _begin_requeue(state, now) if ours or now - since_s >= rules.requeue_after_s else (state, [])
    if now >= state.leave_at_s:
        return _leave(state, Outcome.RUN_ENDED, RESUME, now, rules)
    if state.again_since_s is None and not first:
        return replace(state, again_since_s=now), []
    waited_s = now - (now if state.again_since_s is None else state.again_since_s)
    if first or (state.notice is None and waited_s > NOTICE_S):
        text = "the run saved itself on a notice, and this host is still here: going on"
        return replace(state, again_since_s=None), [Say(text), WithdrawEnd()]
    return state, []


def _begin_requeue(state: State, now: float) -> Decision:
    return replace(state, crash=None, requeue=Requeue(since_s=now, next_s=NEVER)), [RequeueRest()]


def _requeued(state: State, event: Requeued, now: float, rules: Rules) -> Decision:
    requeue = state.requeue
    if requeue is None or state.leaving is not None:
        return state, []
    if not event.again or now - requeue.since_s >= REQUEUE_S:
        state, actions = _leave(state, Outcome.REQUEUED, event.code, now, rules)
        return state, [Say(event.text), *actions]
    pause_s = min(LONGEST_BACK_OFF_S, 2 * requeue.pause_s)
    requeue = replace(requeue, next_s=now + requeue.pause_s, pause_s=pause_s)
    return replace(state, requeue=requeue), [Say(event.text)]


# ---------------------------------------------------------------- notices


def _noticed(state: State, now: float, rules: Rules) -> Decision:
    notice = state.notice
    if notice is not None and not (notice.delivered and now - notice.since_s > NOTICE_S):
        return state, []
    if rules.notice_scope is None:
        if not state.supervises:
            return _leave(state, Outcome.EVICTED, RESUME, now, rules)
        state = replace(state, notice=Notice(since_s=now, scope="asked"))
        return _evict(state, now, rules, [AskScope()])
    state = replace(state, notice=Notice(since_s=now, scope=rules.notice_scope))
    if rules.notice_scope == "host":
        return _host_goes(state, now, rules)
    if not rules.everyone_is_notified or state.supervises:
        return replace(state, next_save_s=NEVER if rules.insists else state.next_save_s), [AskSave("notice")]
    if state.was_held or state.child(SUPERVISOR).starts:
        return state, []
    # There is nothing to save, so nothing to wait for.
    state, actions = _leave(state, Outcome.EVICTED, KILLED + Signals.SIGTERM, now, rules, steps=((None, 5.0),))
    return state, [Say("ended before the run had a supervisor"), EndHere(), *actions]


def _host_goes(state: State, now: float, rules: Rules) -> Decision:
    """The agent is signalled first. A supervisor here makes room: its state is in its log, its agents wait for the
    successor."""
    actions: list[Action] = [
        Send(name, Signals.SIGTERM) for name, child in state.programs.items() if child.running and name != SUPERVISOR
    ]
    if state.supervises:
        actions.append(Send(SUPERVISOR, Signals.SIGKILL))
    actions = [Say("notice: this host goes"), *actions]
    return _evict(state, now, rules, actions) if rules.leaves_on_notice else (state, actions)


def _evict(state: State, now: float, rules: Rules, actions: list[Action]) -> Decision:
    steps = ((None, max(0.0, rules.grace_s - LAST_S)), (Signals.SIGKILL, LAST_UPLOAD_S))
    state, more = _leave(state, Outcome.EVICTED, RESUME, now, rules, steps=steps)
    return state, [*actions, *more]


def _scope_known(state: State, scope: str | None, now: float, rules: Rules) -> Decision:
    """The whole run: the supervisor saves. This host alone: it is killed. Unknown: its agents tell it, if they go too,
    until the grace is almost over."""
    if state.notice is None or state.notice.scope != "asked" or state.leaving is None:
        return state, []
    known = replace(state.notice, scope="unknown" if scope is None else scope)  # type: ignore[arg-type]
    state = replace(state, notice=known)
    if not state.supervises:
        return _withdraw_of_evicted(state)
    if scope is None:
        return state, []
    return state, [Send(SUPERVISOR, Signals.SIGTERM if scope == "run" else Signals.SIGKILL)]


def _withdraw_of_evicted(state: State) -> Decision:
    """All hosts went, and the supervisor saved: the same allocation goes on, so 75 is no end."""
    if state.crash != RESUME or state.notice is None or state.notice.scope != "run":
        return state, []
    return replace(state, crash=None), [WithdrawEnd()]


def _saved(state: State, reason: SaveReason, delivered: bool, now: float, rules: Rules) -> Decision:
    if reason == "time":
        later_s = SAVE_LATER_S if delivered else SAVE_AGAIN_S
        return replace(state, next_save_s=now + later_s, time_was_asked=state.time_was_asked or delivered), []
    if state.notice is None or state.leaving is not None:
        return state, []
    if delivered:
        next_s = now if rules.insists else state.next_save_s
        return replace(state, notice=replace(state.notice, delivered=True), next_save_s=next_s), []
    if rules.insists:
        return replace(state, next_save_s=now + INSIST_S), []
    return _host_goes(state, now, rules)


# ---------------------------------------------------------------- leaving


def _leave(
    state: State, outcome: Outcome, code: int, now: float, rules: Rules,
    steps: tuple[tuple[Signals | None, float], ...] | None = None,
) -> Decision:  # fmt: skip
    steps = rules.leave if steps is None else steps
    until_s = now + steps[0][1]
    state = replace(state, leaving=Leaving(outcome=outcome, code=code, until_s=until_s, steps=steps[1:]))
    return state, []


def _leave_further(state: State, now: float) -> Decision:
    """Until no program is left and nothing is being uploaded; each step signals what is left."""
    leaving = state.leaving
    assert leaving is not None
    running = [name for name, child in state.programs.items() if child.running]
    is_asking = state.notice is not None and state.notice.scope == "asked"
    is_busy = running or is_asking or any(child.shipping for child in state.programs.values())
    if is_busy and now < leaving.until_s:
        return state, []
    if not is_busy or not leaving.steps:
        return replace(state, leaving=replace(leaving, done=True)), [Exit(leaving.outcome, leaving.code)]
    (number, wait_s), *rest = leaving.steps
    state = replace(state, leaving=replace(leaving, until_s=now + wait_s, steps=tuple(rest)))
    return state, [Send(name, number) for name in running] if number is not None else []
