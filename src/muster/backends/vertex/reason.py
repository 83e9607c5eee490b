"""Where a run on Vertex AI is, in words: from what Vertex says, what the hosts say, and what the run's home says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from muster.backends.bucket_launcher import RESUME_LATER, STOPPED_BY_USER, ended_with
from muster.backends.google.request_log import NOTHING
from muster.backends.vertex.job_state import CustomJob, cause, sentence, web_links
from muster.backends.vertex.on_host.presence import HostRecord
from muster.backends.vertex.progress import Looked
from muster.backends.vertex.turns import NoRoom, Over
from muster.core.typed_json import JsonObject
from muster.core.types import JobState, JobStatus
from muster.protocol.lease import EndRecord

NO_CAPACITY = 4


def explain(looked: Looked, end: EndRecord | None, hosts: Sequence[HostRecord], now_s: float) -> JobStatus:
    """One look at a run that was submitted. ``end``: the run's, of this submission."""
    job, going = looked.job, [one for one in looked.jobs if not one.final]
    over = end is not None and (end.exit_code != RESUME_LATER or not going)
    if end is not None and over:
        left = f" ({sentence(going[0], now_s)}: its hosts leave)" if going else ""
        found = ended_with(end)
        return replace(found, reason=found.reason + left)
    if looked.log is not None and looked.log.closed:
        return JobStatus(state=JobState.STOPPED, reason="ended by muster down")
    if isinstance(looked.next, NoRoom):
        reasons = "; ".join(looked.next.reasons)
        return JobStatus(state=JobState.FAILED, reason=f"no region has room: {reasons}", exit_code=NO_CAPACITY)
    if job is None:
        return _without_a_job(looked)
    failed = [f"host {one.index}: {one.said}" for one in hosts if one.state == "failed" and one.said]
    said = "; ".join([sentence(job, now_s), *failed])
    if isinstance(looked.next, Over):
        return _over(job, said, now_s)
    # A job that has ended may go on in another region: that is known once Vertex says why it has ended.
    state = JobState.WAITING if job.final else job.job_state
    return JobStatus(state=state, reason=_with_earlier(looked, said), tasks=_tasks(hosts, looked.record))


def _without_a_job(looked: Looked) -> JobStatus:
    last = looked.request
    if last is not None and last.name:
        number = last.name.rpartition("/")[2]
        return JobStatus(state=JobState.FAILED, reason=f"custom job {number} is gone: it was deleted")
    where = f" {last.where}" if last is not None else ""
    return JobStatus(state=JobState.WAITING, reason=_with_earlier(looked, f"asking{where}"))


def _over(job: CustomJob, said: str, now_s: float) -> JobStatus:
    if job.job_state is JobState.SUCCEEDED:  # the first host ended as a run's end that is written does
        return JobStatus(state=JobState.FAILED, reason=f"{said}, and the run's home has no end of the run", exit_code=1)
    code = STOPPED_BY_USER if job.job_state is JobState.STOPPED else 1
    hint = "" if cause(job, now_s) is None else " (hint: muster logs RUN, and the job's page in the console)"
    return JobStatus(state=job.job_state, reason=said + hint, exit_code=code)


def _with_earlier(looked: Looked, said: str) -> str:
    """With why regions before this one brought nothing."""
    before = looked.log.requests[:-1] if looked.log is not None else ()
    earlier = [f"{one.where}: {one.reason}" for one in before if one.state == NOTHING]
    return f"{said} (before it {'; '.join(earlier)})" if earlier else said


def _tasks(hosts: Sequence[HostRecord], record: JsonObject) -> dict[str, str]:
    """Each host as it says of itself, with the link to its shell in the browser."""
    links = web_links(record)
    found = {f"host-{one.index}": f"{one.state} at {one.address}" for one in hosts}
    for name, link in links.items():
        pool, _, index = name.partition("-")
        host = {"workerpool0": 0, "workerpool1": 1}.get(pool)
        if host is not None and index.isdecimal():
            task = f"host-{host + int(index)}"
            found[task] = ", ".join([*([found[task]] if task in found else []), f"shell: {link}"])
    return found
