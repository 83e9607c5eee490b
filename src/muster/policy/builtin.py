"""The policies that ship: ``default``, ``conservative`` and ``none``.

The ladder is restart -> reset -> swap -> shrink -> wait -> stop: the cheapest step that can heal the
incident is taken. Budgets count restarts since the last new step, not restarts in all: a run that
advances may fail a hundred times (NVRx's progress rule; a count alone ends long runs for nothing).
"""

from __future__ import annotations

from dataclasses import dataclass

from muster.core.incidents import HARDWARE_CAUSES, Repeats, Treatment
from muster.core.types import Action, Decision, Incident
from muster.policy.cluster_state import Adjust, ClusterState

#: Default time to wait for capacity.
MAX_WAIT_S = 3600.0
#: A host blamed this often within the window is replaced rather than restarted.
MAX_HOST_FAILURES = 3
#: Steps that a run may skip because their batch is never finite; with more, the cause is not a bad sample.
MAX_SKIPS = 10


def _decision(incident: Incident, action: Action, reason: str, **extra: object) -> Decision:
    if action is Action.STOP and "exit_code" in incident.detail:
        extra.setdefault("exit_code", incident.detail["exit_code"])
    return Decision(incident_id=incident.incident_id, action=action, reason=reason, **extra)  # type: ignore[arg-type]


@dataclass(frozen=True)
class DefaultPolicy:
    """Keep the run alive at the lowest cost."""

    max_wait_s: float = MAX_WAIT_S
    """Time to wait for capacity before the run stops (75: it may be started again)."""
    adjust: Adjust | None = None

    def decide(self, situation: ClusterState, incident: Incident) -> Decision:
        """Every incident of the table has an answer. Raises UsageError on a kind that is not in the table."""
        traits = incident.traits
        if traits.repeats is Repeats.BY_SIGNATURE and "signature" in incident.detail:
            return self._suspect(situation, incident)
        match traits.treatment:
            case Treatment.REPLAY:
                return self._not_finite(situation, incident)
            case Treatment.IGNORE:
                return _decision(incident, Action.IGNORE, "continuing costs less than a restart")
            case Treatment.GROW:
                return self._grow(situation, incident)
            case Treatment.WAIT:
                return self.wait_or_stop(situation, incident, hosts=situation.min_hosts)
            case Treatment.REPLACE:
                if incident.detail.get("class") == "drain" and not _sound(situation):
                    reason = f"the host still works, and there is no spare to take its place: {incident.evidence}"
                    return _decision(incident, Action.IGNORE, reason, host=incident.host)
                return self._replace(situation, incident)
            case Treatment.RESTART:
                return self._restart(situation, incident)

    def _restart(self, situation: ClusterState, incident: Incident) -> Decision:
        traits = incident.traits
        if incident.detail.get("exception") == "ConflictError" and "exit_code" in incident.detail:
            # Our own: a copy or a successor of this run has its checkpoints, and would be fenced off in turn.
            return _decision(incident, Action.STOP, incident.evidence)
        if traits.fails_alike and situation.last_applied_step == 0:
            reason = f"{incident.evidence} (before any step: a restart would fail the same way)"
            return _decision(incident, Action.STOP, reason)
        elsewhere = traits.retry_on_other_host and incident.host in situation.active
        if elsewhere and situation.same_error_repeats == 2 and situation.same_error_hosts == 1 and _sound(situation):
            reason = f"the same error again on {incident.host}: one try on another host"
            return _decision(incident, Action.SWAP, reason, host=incident.host, replacement=_sound(situation)[0])
        times, restarts = situation.same_error_repeats, situation.restarts_without_progress
        if traits.fails_alike and times >= 2:
            reason = f"the same error occurred at the same step {times} times: {incident.evidence}"
            return _decision(incident, Action.STOP, reason)
        # A rejected snapshot leaves fewer to choose from, so such restarts end by themselves.
        if restarts >= situation.max_restarts_without_progress and not incident.detail.get("snapshot_rejected"):
            reason = f"{restarts} restarts without a new step; last: {incident.evidence}"
            return _decision(incident, Action.STOP, reason)
        host = incident.host
        hardware = incident.detail.get("culprit") in HARDWARE_CAUSES and host in situation.active
        if hardware and (host in situation.resettable or _sound(situation)):
            return self._replace(situation, incident)  # in place it would hang again
        failing = host is not None and situation.host_failures.get(host, 0) >= MAX_HOST_FAILURES
        if failing and (situation.spares or len(situation.active) - 1 >= situation.min_hosts):
            return self._replace(situation, incident, failing=True)
        return _decision(incident, Action.RESTART, "no host is to blame: restart the ranks in place", host=host)

    def _suspect(self, situation: ClusterState, incident: Incident) -> Decision:
        """A rank's last words name a device or network: the host is to blame, unless the error follows the ranks."""
        times, where = situation.same_error_repeats, situation.same_error_hosts
        if where >= 2:
            reason = "the same error followed the ranks to another host, so the program is the cause"
            return _decision(incident, Action.STOP, f"{reason}: {incident.evidence}")
        if situation.restarts_without_progress >= situation.max_restarts_without_progress:
            return self._restart(situation, incident)
        if incident.host in situation.resettable or _sound(situation):
            return self._replace(situation, incident)
        if times < 2:
            reason = f"there is no spare, so one more try in place: {incident.evidence}"
            return _decision(incident, Action.RESTART, reason, host=incident.host)
        if len(situation.active) - 1 >= max(1, situation.min_hosts):
            return self._replace(situation, incident)
        reason = f"the same error occurred at the same step {times} times, and there is no other host"
        return _decision(incident, Action.STOP, f"{reason}: {incident.evidence}")

    def _not_finite(self, situation: ClusterState, incident: Incident) -> Decision:
        """Replay once, since a flipped bit does not recur; after that the batch is bad."""
        step, skipped = incident.step or 0, situation.skipped_steps
        if situation.restarts_without_progress >= situation.max_restarts_without_progress:
            return _decision(incident, Action.STOP, f"not finite: {incident.evidence}")
        if situation.same_error_repeats < 2:
            reason = f"the step is replayed, since a flipped bit does not recur: {incident.evidence}"
            return _decision(incident, Action.RESTART, reason, host=incident.host)
        again = f"not finite again at the same step, so the batch is bad: {incident.evidence}"
        if situation.on_nonfinite_step != "skip":
            return _decision(incident, Action.STOP, again)
        if len(skipped) >= MAX_SKIPS:
            return _decision(incident, Action.STOP, f"{len(skipped)} steps were skipped already; {again}")
        if {step - 1, step, step + 1} & set(skipped):
            return _decision(incident, Action.STOP, f"no two steps in a row are skipped; {again}")
        reason = f"recovery.on_nonfinite_step is skip, so step {step} is skipped: {again}"
        return _decision(incident, Action.RESTART, reason, host=incident.host, detail={"skip_steps": [step]})

    def _replace(self, situation: ClusterState, incident: Incident, *, failing: bool = False) -> Decision:
        host = incident.host
        reason = f"{host} failed {situation.host_failures.get(host or '', 0)} times" if failing else incident.evidence
        if not failing and host in situation.resettable and not incident.traits.announced:
            return _decision(incident, Action.RESET, f"a reset may heal it: {reason}", host=host)
        remaining = tuple(name for name in situation.active if name != host and name not in situation.noticed)
        sound = _sound(situation)
        if incident.traits.announced and not remaining and not situation.spares:
            reason = f"every host will be taken away, so the state is saved now: {reason}"
            return _decision(incident, Action.STOP, reason, host=host, exit_code=75)
        flapping = [name for name in situation.spares if name not in sound]
        if sound or (flapping and len(remaining) < max(1, situation.min_hosts)):
            replacement = (sound or flapping)[0]
            return _decision(incident, Action.SWAP, f"a spare is ready: {reason}", host=host, replacement=replacement)
        if len(remaining) >= max(1, situation.min_hosts):
            return _decision(incident, Action.SHRINK, f"no spare; {len(remaining)} hosts continue: {reason}", host=host)
        return self.wait_or_stop(situation, incident, hosts=situation.min_hosts)

    def wait_or_stop(self, situation: ClusterState, incident: Incident, *, hosts: int) -> Decision:
        """Wait until there are ``hosts``, for at most ``max_wait_s``."""
        if situation.waited_s >= self.max_wait_s:
            reason = f"no capacity within {situation.waited_s:.0f} s: {incident.evidence}"
            return _decision(incident, Action.STOP, reason, exit_code=75)
        reason = f"{len(situation.active)} of {hosts} hosts: wait for one to return"
        left_s, detail = self.max_wait_s - situation.waited_s, {"hosts": hosts}
        return _decision(incident, Action.WAIT, reason, host=incident.host, detail=detail, wait_s=left_s)

    def _grow(self, situation: ClusterState, incident: Incident) -> Decision:
        if len(situation.active) >= situation.wanted_hosts:
            return _decision(incident, Action.IGNORE, "enough hosts run; it is kept as a spare", host=incident.host)
        failures = situation.host_failures.get(incident.host or "", 0)
        if failures >= MAX_HOST_FAILURES:  # a flapping link: each return and each loss would cost a pause
            reason = f"{incident.host} was lost {failures} times: it is not used"
            return _decision(incident, Action.IGNORE, reason, host=incident.host)
        others = [name for name in _sound(situation) if name != incident.host]
        room = situation.wanted_hosts - len(situation.active)
        reason = f"{len(situation.active)} of {situation.wanted_hosts} hosts run"
        detail = {"hosts": [incident.host, *others][:room]}
        return _decision(incident, Action.GROW, reason, host=incident.host, detail=detail)


def _sound(situation: ClusterState) -> list[str]:
    """Spares that have not failed often themselves."""
    return [name for name in situation.spares if situation.host_failures.get(name, 0) < MAX_HOST_FAILURES]


@dataclass(frozen=True)
class ConservativePolicy(DefaultPolicy):
    """As ``default``, but never on fewer hosts than asked for: numerics stay those of one layout."""

    def decide(self, situation: ClusterState, incident: Incident) -> Decision:
        decision = super().decide(situation, incident)
        if decision.action is Action.SHRINK:
            return self.wait_or_stop(situation, incident, hosts=situation.wanted_hosts)
        return decision


@dataclass(frozen=True)
class NoRecovery(DefaultPolicy):
    """Every failure ends the run: for debugging."""

    def decide(self, situation: ClusterState, incident: Incident) -> Decision:
        if incident.traits.treatment in (Treatment.IGNORE, Treatment.GROW):
            return _decision(incident, Action.IGNORE, "recovery.policy is none")
        if incident.traits.announced:
            return _decision(incident, Action.STOP, incident.evidence, exit_code=75)
        return _decision(incident, Action.STOP, incident.evidence or incident.kind)


SHIPPED = {"default": DefaultPolicy(), "conservative": ConservativePolicy(), "none": NoRecovery()}
