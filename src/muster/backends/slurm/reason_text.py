"""Slurm's codes as text: why a job waits, how one ended, what a refused command means."""

from __future__ import annotations

import re

from muster.core.errors import AccessError, BackendError, BusyError, CapacityError, MusterError, UsageError
from muster.core.types import JobState

#: Pending reasons (``squeue --Format=reason``; slurm_protocol_defs.h of 22.05 and 24.11).
REASONS = {
    "None": "Slurm has not looked at it yet",
    "Priority": "jobs with a higher priority are ahead of it",
    "Resources": "it is next, and waits for nodes to become free",
    "Dependency": "it waits for another job to end",
    "DependencyNeverSatisfied": "the job it depends on failed: it will never start",
    "BeginTime": "Slurm delays it (after a requeue), or its start time has not come",
    "JobHeldUser": "it is held; `scontrol release` releases it",
    "JobHeldAdmin": "an administrator holds it",
    "JobHoldMaxRequeue": "it was requeued too often and is held; `scontrol release` releases it",
    "job_requeued_in_held_state": "it was requeued and is held; `scontrol release` releases it",
    "launch_failed_requeued_held": "a node could not start it; it is held until `scontrol release`",
    "ReqNodeNotAvail": "a node it needs is down, drained or reserved",
    "NodeDown": "a node it needs is down",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition does not start jobs now",
    "PartitionNodeLimit": "it requests more nodes than its partition allows per job",
    "PartitionTimeLimit": "its time limit is above its partition's",
    "Licenses": "it waits for a licence",
    "Reservation": "its reservation has not begun",
    "ReservationDeleted": "its reservation is gone",
    "Cleaning": "its last start is still being cleaned up",
    "Prolog": "the nodes' prolog is running",
    "BadConstraints": "no node has the features it requests",
    "InvalidAccount": "its account is not known or not yours",
    "InvalidQOS": "its QOS is not known or not yours",
    "AccountNotAllowed": "its account may not use this partition",
    "QOSNotAllowed": "its QOS may not use this partition",
    "AssociationJobLimit": "your account has reached its limit of jobs",
    "JobArrayTaskLimit": "its array has reached its limit of running tasks",
    "NonZeroExitCode": "it ended with an error",
    "RaisedSignal": "it was ended by a signal",
    "NodeFail": "a node failed",
    "TimeLimit": "its time limit was reached",
    "OutOfMemory": "a node ran out of memory",
    "SystemFailure": "Slurm itself failed",
    "FrontEndDown": "no front-end node is up",
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
}

#: The machine's doing, or the scheduler's: the same job may do better on other nodes. Others would end so again.
MACHINES_DOING = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL")

#: How a job ended, where the run itself recorded no result.
ENDINGS = {
    "COMPLETED": "the job completed, but the run recorded no result",
    "CANCELLED": "the job was cancelled",
    "TIMEOUT": "the job's time limit was reached before the run could save and exit",
    "DEADLINE": "the job's deadline was reached",
    "PREEMPTED": "the job was preempted",
    "NODE_FAIL": "Slurm ended the job after a node failed",
    "OUT_OF_MEMORY": "a process of the job ran out of memory",
    "BOOT_FAIL": "the job's nodes did not boot",
    "FAILED": "the job failed before the run could record why; see its log",
}

_REFUSED: tuple[tuple[str, type[MusterError], str | None], ...] = (
    (r"account or account/partition|Invalid account", AccessError, "slurm.account: sacctmgr show associations"),
    (r"Access/permission denied|not permitted to use|Invalid user id|Operation not permitted", AccessError, None),
    (r"authentication|[Mm]unge|credential", AccessError, "is munge (or auth/slurm) running on this machine?"),
    (r"Invalid qos", AccessError, "slurm.qos: sacctmgr show qos"),
    (r"[Ii]nvalid partition", UsageError, "resources.queue names the partition; sinfo lists them"),
    (r"[Ii]nvalid feature", UsageError, "slurm.constraint; sinfo -o %f lists features"),
    (r"[Ii]nvalid generic resource|Invalid gres|gres", UsageError, "slurm.gres; sinfo -o %G lists them"),
    (
        # The controller's own words, then those of sites' job_submit plug-ins, which demand one.
        r"time limit is invalid|Requested time limit|"
        r"(?i:(specify|missing|requires?|without|needs?|set)\b.{0,40}(time ?limit|--time\b|walltime)|"
        r"(time ?limit|--time\b|walltime)\b.{0,40}(missing|required|must|specified))",
        UsageError,
        "slurm.time_limit, or slurm.default_time_limit where a site demands one; sinfo -o '%P %l' shows the limits",
    ),
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
#: The controller may have accepted the request although no answer came.
NO_ANSWER = re.compile(
    r"timed out|[Cc]onnection (reset|refused|closed)|Unable to contact|Zero Bytes|[Cc]ommunication", re.I
)
_GONE = re.compile(r"Invalid job id|already completing|already completed|not found", re.I)


def waits(reason: str) -> str:
    """A pending reason as a clause, with Slurm's own text where it is more specific."""
    reason = reason.strip().strip("()")
    word = re.split(r"[,(:\s]", reason)[0] or "None"
    if word in REASONS:
        rest = reason[len(word) :].strip(" ,:()")
        return REASONS[word] + (f" ({rest})" if rest else "")
    for start, owner in (("QOS", "your QOS"), ("Assoc", "your account"), ("MaxJobs", "your account")):
        if word.startswith(start):
            return f"{owner} has reached a limit ({reason})"
    return f"Slurm reports {reason}"


def refusal(program: str, stderr: str) -> MusterError:
    """A command's error output as the error shown to the user."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()] or ["no reason given"]
    text = next((line for line in reversed(lines) if re.search(r"error|fatal", line)), lines[-1])
    text = re.sub(rf"^{program}: (error|fatal): ", "", text)
    for pattern, kind, hint in _REFUSED:
        if re.search(pattern, stderr):
            return kind(f"{program}: {text}", hint=hint)
    if NO_ANSWER.search(stderr):
        return BusyError(f"{program}: {text}", hint="run `scontrol ping` to check the controller")
    if program == "sbatch":
        return BackendError(f"{program}: {text}", hint="`muster render` shows the submitted script")
    return BackendError(f"{program}: {text}", hint="run `scontrol ping` to check that this is a login node")


def is_gone(stderr: str) -> bool:
    """Whether the job that a command named has ended already, or never existed."""
    return bool(_GONE.search(stderr))
