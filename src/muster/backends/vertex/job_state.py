"""What a custom job's record says: its state, and why it ended. Pure.

Origin: the API's description (aiplatform.v1, revision 20261106) for states and fields; Google's pages on the training
service for texts and for the minute between a job's end and its error; texts marked so from jobs of others.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from enum import StrEnum

from muster.backends.google import refusals
from muster.backends.vertex.custom_job import NONCE_LABEL
from muster.core.typed_json import JsonObject, at, child, text
from muster.core.types import JobState

ERROR_LATE_S = 90.0
"""A failed job's error comes about a minute after its end."""
_FINAL = {"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED"}
#: Quota that is used up makes a job wait here without limit and without an error.
_NOT_YET = {"UNSPECIFIED", "QUEUED", "PENDING"}
#: Google's own client waits forever on a job that has EXPIRED.
_STATES = {
    "RUNNING": JobState.RUNNING,
    "UPDATING": JobState.RUNNING,
    "CANCELLING": JobState.RUNNING,
    "SUCCEEDED": JobState.SUCCEEDED,
    "CANCELLED": JobState.STOPPED,
    "FAILED": JobState.FAILED,
    "EXPIRED": JobState.FAILED,
    "PARTIALLY_SUCCEEDED": JobState.FAILED,
}


class Cause(StrEnum):
    """Why a job failed, as far as it decides what to do."""

    NOT_YET_SAID = "Vertex says why about a minute after the end"
    STOCK_OUT = "the region had no machines"
    QUOTA = "the quota is too small"
    HOST_EXIT = "a host's program ended with an error"
    MEMORY = "a host ran out of memory"
    UNKNOWN = "a reason that is not known here"

    @property
    def elsewhere(self) -> bool:
        """Whether another region may serve the same request."""
        return self in (Cause.STOCK_OUT, Cause.QUOTA)


_TEXTS = (
    (Cause.MEMORY, r"ran out of memory|out[- ]of[- ]memory"),
    (Cause.HOST_EXIT, r"exited with a non-zero status"),
)
_REPLICA = re.compile(r"replica (workerpool\d+-\d+) exited with a non-zero status of (-?\d+)", re.IGNORECASE)
RESOURCE_EXHAUSTED = 8
"""google.rpc.Code."""


@dataclass(frozen=True, kw_only=True)
class CustomJob:
    """What is used of a record."""

    name: str
    """``projects/NUMBER/locations/REGION/customJobs/NUMBER``."""
    state: str
    """Without its prefix ``JOB_STATE_``; one that this version does not know stays as it is."""
    nonce: str = ""
    code: int = 0
    error: str = ""
    created_s: float | None = None
    ended_s: float | None = None
    """Both in seconds since 1970."""

    @property
    def final(self) -> bool:
        return self.state in _FINAL

    @property
    def waits(self) -> bool:
        """It has not all its machines yet. Programs run on hosts that came first all the same."""
        return self.state in _NOT_YET

    @property
    def runs(self) -> bool:
        """It has all its machines."""
        return self.state in ("RUNNING", "UPDATING")

    @property
    def region(self) -> str:
        return self.name.split("/")[3] if self.name.count("/") >= 3 else ""

    @property
    def job_state(self) -> JobState:
        """For people and the verbs; what does not run and has not ended waits, a state that is not known too."""
        return _STATES.get(self.state, JobState.WAITING)


def custom_job(record: JsonObject) -> CustomJob:
    """``record`` as the API answers; a missing or mistyped field counts as unknown."""
    code = at(record, "error", "code")
    return CustomJob(
        name=text(record, "name"),
        state=text(record, "state", default="UNSPECIFIED").removeprefix("JOB_STATE_"),
        nonce=text(record, "labels", NONCE_LABEL),
        code=code if isinstance(code, int) and not isinstance(code, bool) else 0,
        error=text(record, "error", "message"),
        created_s=_seconds(text(record, "createTime")),
        # Of states that set no end (EXPIRED) the last change is the end.
        ended_s=_seconds(text(record, "endTime") or text(record, "updateTime")),
    )


def web_links(record: JsonObject) -> dict[str, str]:
    """Host as Vertex calls it (``workerpool0-0``) -> its shell's address; while it runs, where it was asked for."""
    return {name: link for name, link in child(record, "webAccessUris").items() if isinstance(link, str)}


def cause(job: CustomJob, now_s: float) -> Cause | None:
    """Why ``job`` failed; None: it did not."""
    if job.job_state is not JobState.FAILED:
        return None
    if not job.error and not job.code:
        soon = job.ended_s is not None and now_s - job.ended_s <= ERROR_LATE_S
        return Cause.NOT_YET_SAID if soon else Cause.UNKNOWN
    refused = refusals.of_text(job.error)
    if refused.elsewhere:
        return Cause.STOCK_OUT if refused is refusals.Cause.NO_MACHINES else Cause.QUOTA
    for found, pattern in _TEXTS:
        if re.search(pattern, job.error, re.IGNORECASE):
            return found
    return Cause.QUOTA if job.code == RESOURCE_EXHAUSTED else Cause.UNKNOWN


def sentence(job: CustomJob, now_s: float) -> str:
    """Where the job is, in one line."""
    number = job.name.rpartition("/")[2] or "?"
    where = f"custom job {number} in {job.region}" if job.region else f"custom job {number}"
    why = cause(job, now_s)
    if why is not None:
        replica = _REPLICA.search(job.error)
        host = f": {replica[1]} with {replica[2]}" if replica else ""
        said = f" ({_first_line(job.error)})" if job.error and not replica else ""
        return f"{where} has failed: {why.value}{host}{said}"
    waited = f" for {_minutes(now_s - job.created_s)}" if job.waits and job.created_s is not None else ""
    words = {
        "QUEUED": f"waits{waited} for quota or machines",
        "PENDING": f"gets its machines{waited}",
        "RUNNING": "runs",
        "UPDATING": "is being changed",
        "CANCELLING": "is being cancelled",
        "PAUSED": "is paused",
        "SUCCEEDED": "has ended",
        "CANCELLED": "was cancelled",
        "UNSPECIFIED": f"has no state yet{waited}",
    }
    return f"{where} {words.get(job.state, f'is in a state that this version does not know: {job.state!r}')}"


def _minutes(seconds: float) -> str:
    return f"{max(0.0, seconds) / 3600:.1f} h" if seconds >= 5400 else f"{max(0.0, seconds) / 60:.0f} min"


def _first_line(words: str) -> str:
    line = " ".join(words.splitlines()[:1])
    return line if len(line) <= 300 else line[:300] + "..."


def _seconds(stamp: str) -> float | None:
    """Of an RFC 3339 time; None: not said, or not one."""
    try:
        moment = datetime.datetime.fromisoformat(stamp)
    except ValueError:
        return None
    return moment.timestamp() if moment.tzinfo is not None else None
