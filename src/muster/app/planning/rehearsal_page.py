"""A study of rehearsals as a page: all of them, and under them one as an event log, and so as the report's own page:
the ledger folds it like any run's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from muster.app.planning.plan import Planned
from muster.app.planning.simulate import to_json
from muster.core.errors import UsageError
from muster.core.event_details.attempts import AttemptStarted
from muster.core.events import Event
from muster.core.typed_json import Json, JsonObject
from muster.report.ledger.fold import Ledger, fold
from muster.report.render import page
from muster.report.render.document import document
from muster.simulate.ensembles import Study
from muster.simulate.rehearsal import Simulation
from muster.simulate.scenario import Scenario
from muster.supervise.recovery.inputs import SECOND_NS

RUN_ID = "rehearsal"
#: Each step is an event that is folded: a million take about a gigabyte.
MOST_STEPS = 1_000_000
#: Of a plan's document: the run file's own text has no place on a page that is passed on.
_LEFT_OUT = ("run_text", "spec", "spec_digest", "settings")


def write_page(study: Study, target: str) -> Path:
    """Write the study's figures, and the rehearsal whose goodput is their median as the report's page; return its path.

    Raises:
        UsageError: the file cannot be written, or the rehearsal has too many steps for a page.
    """
    steps = study.scenario.hours * 3600 / study.scenario.profile.mean_s("step")
    if steps > MOST_STEPS:
        raise UsageError(
            f"a page of {steps:,.0f} steps cannot be written, at most {MOST_STEPS:,}", hint="rehearse fewer --hours"
        )
    ordered = sorted(study.outcomes, key=lambda outcome: outcome.goodput_active)
    seed = ordered[len(ordered) // 2].seed
    ledger = ledger_of(study.scenario, seed)
    name = f"rehearsal, seed {seed} of {study.scenario.spec.name} (virtual hosts and clock)"
    result = replace(document(ledger, {}), name=name)
    spread = {
        "active": [outcome.goodput_active for outcome in study.outcomes],
        "purchased": [outcome.goodput_purchased for outcome in study.outcomes],
    }
    more: JsonObject = {"study": to_json(study), "spread": spread}
    return page.write(page.render(ledger, result, more=more, scripts=page.STUDY), target)


def ledger_of(scenario: Scenario, seed: int) -> Ledger:
    """The ledger's own account of one rehearsal, against the scenario's step time as reference."""
    play = Simulation(scenario, seed)
    play.run()
    training = scenario.spec.training
    tokens = training.global_batch_size * training.sequence_length
    step_s = scenario.profile.mean_s("step")
    events = {"supervisor.1.jsonl": list(_supervisor(play)), "ranks.1.jsonl": list(_ranks(play, tokens))}
    return fold(events, reference_tokens_per_s=tokens / step_s)


def _supervisor(play: Simulation) -> Iterator[Event]:
    attempt = 0
    for seq, (at_s, log) in enumerate(play.cluster.log):
        if log.kind == "attempt.started":
            attempt += 1
        detail = dict(log.detail)
        if log.kind == "incident.detected":
            fault = play.last_fault_before(at_s)
            detail |= {} if fault is None else {"since_ns": round(fault * SECOND_NS)}
        if log.kind == "host.allocated" and play.scenario.usd_per_host_hour is not None:
            detail |= {"usd_per_hour": play.scenario.usd_per_host_hour}
        yield _event(seq, at_s, log.kind, attempt, log.host or "supervisor", detail, rank=log.rank, step=log.step,
                     phase=log.phase)  # fmt: skip


def _ranks(play: Simulation, tokens: int) -> Iterator[Event]:
    """Phases of every host's rank, and the steps; in order of time within each attempt."""
    cluster, seq = play.cluster, 0
    worlds = {
        number + 1: (at_s, AttemptStarted.of(log.detail).hosts)
        for number, (at_s, log) in enumerate(entry for entry in cluster.log if entry[1].kind == "attempt.started")
    }
    segments = {attempt: (last, run) for attempt, last, run in cluster.history}
    for attempt, (at_s, hosts) in worlds.items():
        for host, ranks in hosts.items():
            yield _event(seq, at_s, "phase.changed", attempt, host, {}, rank=ranks[0], phase="start")
            seq += 1
        if attempt not in segments:
            continue
        last, run = segments[attempt]
        began_s = run.began_ns / SECOND_NS
        for host, ranks in hosts.items():
            yield _event(seq, began_s, "phase.changed", attempt, host, {}, rank=ranks[0], phase="train")
            seq += 1
        before_s, first = 0.0, next(iter(hosts))
        for step in range(run.first_step + 1, last + 1):
            productive_s = run.productive_s(step - run.first_step)
            after_s = cluster.disk.elapsed_s(productive_s) if cluster.disk else productive_s
            stall_s = after_s - before_s - (productive_s - run.productive_s(step - 1 - run.first_step))
            detail = {
                "loss": None, "grad_norm": None, "learning_rate": None, "tokens": tokens, "supervised_tokens": tokens,
                "padding_tokens": 0, "step_ns": round((after_s - before_s) * SECOND_NS),
                "stall_ns": max(0, round(stall_s * SECOND_NS)), **_held(play.scenario, step, run.first_step),
            }  # fmt: skip
            yield _event(seq, began_s + after_s, "step", attempt, first, detail, rank=0, step=step)
            before_s, seq = after_s, seq + 1


def _held(scenario: Scenario, step: int, first_step: int) -> dict[str, int]:
    """What hosts' memory holds after a step, as ranks say it: a peer has what was taken one snapshot before."""
    every = scenario.snapshot_every
    taken = step // every * every
    if not scenario.memory_tier or taken <= first_step:
        return {}
    copied = scenario.replicate_snapshots and scenario.hosts > 1 and taken - every > first_step
    return {"snapshot_step": taken, **({"peer_step": taken - every} if copied else {})}


def _event(
    seq: int,
    at_s: float,
    kind: str,
    attempt: int,
    host: str,
    detail: JsonObject,
    *,
    rank: int | None = None,
    step: int | None = None,
    phase: str | None = None,
) -> Event:
    at_ns = round(at_s * SECOND_NS)
    return Event(run_id=RUN_ID, attempt=attempt, seq=seq, mono_ns=at_ns, wall_ns=at_ns, host=host, kind=kind,
                 detail=detail, rank=rank, step=step, phase=phase)  # fmt: skip


def render(result: Planned) -> str:
    """The page. It loads nothing from anywhere."""
    plan = {key: value for key, value in result.plan.to_json().items() if key not in _LEFT_OUT}
    taken = {way.title for way in result.plan.frontier}
    others = [point for point in _points(result) if point["title"] not in taken]
    data: dict[str, Json] = {"plan": plan, "others": others, "limits": result.limits}
    return page.fill(data, title=f"{result.plan.job} · Muster plan", scripts=("plan.js",), plain="muster plan RUN.yaml")


def write(result: Planned, target: str) -> Path:
    """Write the page and return its path.

    Raises:
        UsageError: the file cannot be written.
    """
    return page.write(render(result), target, hint="choose another place with --html")


def _points(result: Planned) -> list[JsonObject]:
    """Everything else that fits, at its best setting."""
    return [
        {
            "title": candidate.title,
            "accelerator": candidate.option.offer.accelerator,
            "gpus": candidate.gpus,
            "hours": {"p50": candidate.cost.hours_p50, "p90": candidate.cost.hours_p90},
            "usd": {"p50": candidate.cost.usd_p50, "p90": candidate.cost.usd_p90},
        }
        for candidate in result.outcome.candidates
    ]
