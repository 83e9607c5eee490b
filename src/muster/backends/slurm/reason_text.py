"""Slurm's codes in plain words: why a job waits, how one ended, what a refused command means."""

from __future__ import annotations

import re

from muster.core.errors import AccessError, BackendError, CapacityError, MusterError, UsageError
from muster.core.types import JobState

#: Pending reasons (``squeue --Format=reason``; slurm_protocol_defs.h of 22.05 and 24.11).
REASONS = {
    "None": "Slurm has not looked at it yet",
    "Priority": "jobs with a higher priority are before it",
    "Resources": "it is next, and waits for nodes to become free",
    "Dependency": "it waits for another job to end",
    "DependencyNeverSatisfied": "the job it depends on did not end as it should: it will never start",
    "BeginTime": "Slurm holds it back for a while (after a requeue), or its start time has not come",
    "JobHeldUser": "it is held; scontrol release lets it go",
    "JobHeldAdmin": "an administrator holds it",
    "JobHoldMaxRequeue": "it was requeued too often and is held; scontrol release lets it go",
    "job_requeued_in_held_state": "it was requeued and is held; scontrol release lets it go",
    "launch_failed_requeued_held": "a node could not start it; it is held until scontrol release",
    "ReqNodeNotAvail": "a node it needs is down, drained or reserved",
    "NodeDown": "a node it needs is down",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition does not start jobs now",
    "PartitionNodeLimit": "it asks for more nodes than its partition gives one job",
    "PartitionTimeLimit": "its time limit is above its partition's",
    "Licenses": "it waits for a licence",
    "Reservation": "its reservation has not begun",
    "ReservationDeleted": "its reservation is gone",
    "Cleaning": "its last start is still being cleaned up",
    "Prolog": "the nodes' prolog runs",
    "BadConstraints": "no node has the features it asks for",
    "InvalidAccount": "its account is not known or not yours",
    "InvalidQOS": "its QOS is not known or not yours",
    "AccountNotAllowed": "its account may not use this partition",
    "QOSNotAllowed": "its QOS may not use this partition",
    "AssociationJobLimit": "your account runs as many jobs as it may",
    "JobArrayTaskLimit": "its array runs as many tasks as it may",
    "NonZeroExitCode": "it ended with an error",
    "RaisedSignal": "it was ended by a signal",
    "NodeFail": "a node failed",
    "TimeLimit": "its time limit was reached",
    "OutOfMemory": "a node had no memory left",
    "SystemFailure": "Slurm itself failed",
    "FrontEndDown": "no front end node is up",
    "InactiveLimit": "it was inactive for too long",
    "BurstBufferResources": "it waits for the burst buffer",
    "DeadLine": "it can no longer end before its deadline",
    "MaxRequeue": "it was requeued too often",
}

STATES = {
    "COMPLETED": JobState.SUCCEEDED,
    "CANCELLED": JobState.STOPPED,
    "REVOKED": JobState.STOPPED,
    "PREEMPTED": JobState.PREEMPTED,
    "TIMEOUT": JobState.PREEMPTED,
    "DEADLINE": JobState.PREEMPTED,
}

#: How a job ended, where the run itself left no verdict.
ENDINGS = {
    "COMPLETED": "the job is done, but the run left no verdict",
    "CANCELLED": "the job was cancelled",
    "TIMEOUT": "the job's time limit was reached before the run could save and leave",
    "DEADLINE": "the job's deadline was reached",
    "PREEMPTED": "the job was preempted",
    "NODE_FAIL": "Slurm ended the job after a node failed",
    "OUT_OF_MEMORY": "a process of the job had no memory left",
    "BOOT_FAIL": "the job's nodes did not boot",
    "FAILED": "the job failed before the run could say why; its log does",
}

_REFUSED: tuple[tuple[str, type[MusterError], str | None], ...] = (
    (r"account or account/partition|Invalid account", AccessError, "slurm.account: sacctmgr show associations"),
    (r"Access/permission denied|not permitted to use|Invalid user id|Operation not permitted", AccessError, None),
    (r"authentication|[Mm]unge|credential", AccessError, "is munge (or auth/slurm) running on this machine?"),
    (r"Invalid qos", AccessError, "slurm.qos: sacctmgr show qos"),
    (r"[Ii]nvalid partition", UsageError, "resources.queue names the partition; sinfo lists them"),
    (r"[Ii]nvalid feature", UsageError, "slurm.constraint; sinfo -o %f lists features"),
    (r"[Ii]nvalid generic resource|Invalid gres|gres", UsageError, "slurm.gres; sinfo -o %G lists them"),
    (r"time limit is invalid|Requested time limit", UsageError, "slurm.time_limit; sinfo -o '%P %l' shows the limits"),
    (r"[Rr]eservation is invalid|invalid reservation", UsageError, "resources.reservation; scontrol show reservation"),
    (r"unrecognized option|invalid option|Invalid --|Unable to open file", UsageError, "slurm.options"),
    (
        r"node configuration is not available|Node count specification|More processors requested|"
        r"violates accounting/QOS|node configuration not available|Too many|Job size",
        CapacityError,
        "sinfo -o '%P %D %G %l' shows what there is",
    ),
    (r"invalid node name|Invalid node", UsageError, "slurm.exclude"),
)
#: The controller may have taken the request although no answer came.
UNSURE = re.compile(
    r"timed out|[Cc]onnection (reset|refused|closed)|Unable to contact|Zero Bytes|[Cc]ommunication", re.I
)
_GONE = re.compile(r"Invalid job id|already completing|already completed|not found", re.I)


def waits(reason: str) -> str:
    """A pending reason as half a sentence, with Slurm's own word where it says more."""
    reason = reason.strip().strip("()")
    word = re.split(r"[,(:\s]", reason)[0] or "None"
    if word in REASONS:
        rest = reason[len(word) :].strip(" ,:()")
        return REASONS[word] + (f" ({rest})" if rest else "")
    for start, what in (("QOS", "your QOS"), ("Assoc", "your account"), ("MaxJobs", "your account")):
        if word.startswith(start):
            return f"{what} has reached a limit ({reason})"
    return f"Slurm says {reason}"


def refusal(program: str, stderr: str) -> MusterError:
    """A command's complaint as the error that a user meets."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()] or ["no reason given"]
    said = next((line for line in reversed(lines) if re.search(r"error|fatal", line)), lines[-1])
    said = re.sub(rf"^{program}: (error|fatal): ", "", said)
    for pattern, kind, hint in _REFUSED:
        if re.search(pattern, stderr):
            return kind(f"{program}: {said}", hint=hint)
    if UNSURE.search(stderr):
        return BackendError(f"{program}: {said}", hint="scontrol ping asks whether the controller answers")
    if program == "sbatch":
        return BackendError(f"{program}: {said}", hint="muster render shows the script that was sent")
    return BackendError(f"{program}: {said}", hint="is this a login node of the cluster? scontrol ping asks it")


def is_gone(stderr: str) -> bool:
    """The job that a command named has ended already, or was never there."""
    return bool(_GONE.search(stderr))
