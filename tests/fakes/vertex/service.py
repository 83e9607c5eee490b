"""The custom-job service: requests checked by Google's discovery document, jobs on a virtual clock.

A request of the wrong shape is a mistake in our program: it fails the test. What Google refuses although its shape is
right is answered as Google answers. Nothing here has run against Google; where no page says how the service behaves,
``Manners`` has the unkind choice, and tests set others.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from fakes.discovery import Discovery, Match
from fakes.google_wire import Service, body_of, refuse
from fakes.timeline import Timeline
from fakes.vertex import listing, machines, rules
from fakes.vertex.jobs import Job, Manners
from fakes.vertex.workers import Programs, Worker

from muster.backends.google.http import Call, Reply

APIS = ("aiplatform.v1", "logging.v2")
NUMBER, PROJECT = "123456789", "example-project"
HOST = re.compile(r"(?P<region>[a-z0-9-]+)-aiplatform\.googleapis\.com")
JOBS = "aiplatform.projects.locations.customJobs."


@dataclass(kw_only=True)
class FakeVertex:
    """Answers the calls of one submitter. Time passes in ``timeline``; what is not Vertex AI's goes ``elsewhere``."""

    discovery: Discovery
    timeline: Timeline
    elsewhere: Service | None = None
    manners: Manners = field(default_factory=Manners)
    programs: Programs = field(default_factory=Programs)
    limits: dict[tuple[str, str], int] = field(default_factory=dict)
    """Region and metric -> quota; what is not here has Google's default, which is none of nearly every GPU."""
    used: Counter[tuple[str, str]] = field(default_factory=Counter)
    """What other people's jobs hold of it."""
    empty: set[str] = field(default_factory=set)
    """Regions without machines."""
    acts_as: set[str] | None = None
    """Accounts that the submitter may act as; None: any."""
    foreign_images: dict[str, set[str]] = field(default_factory=dict)
    """Another project with images -> who may read them there."""
    several_regions: set[str] = field(default_factory=set)
    """Buckets that lie in more than one region."""
    log_writers: set[str] | None = None
    """Accounts whose jobs' output is kept; None: all of them."""
    log_late_s: float = 20.0
    delete_s: float = 20.0
    jobs: dict[str, Job] = field(default_factory=dict)
    operations: dict[str, dict[str, Any]] = field(default_factory=dict)
    entries: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    _created: int = 0

    def send(self, call: Call) -> Reply:
        self.timeline.settle()
        url = urllib.parse.urlsplit(call.url)
        if url.netloc.endswith(".aiplatform-training.googleusercontent.com"):
            return Reply(status=302, text="<html>Sign in - Google Accounts</html>")  # for a browser, and a person
        here = url.netloc.endswith("aiplatform.googleapis.com") or url.netloc == "logging.googleapis.com"
        if not here:
            assert self.elsewhere is not None, f"not one of Vertex AI's: {call.method} {call.url}"
            return self.elsewhere.send(call)
        match = self.discovery.match(call.method, url.netloc, url.path)
        assert match is not None, f"no documented method: {call.method} {call.url}"
        complaints = self.discovery.complaints(match, url.query, call.body)
        assert not complaints, f"{match.id}: {complaints}"
        reply = self._answer(match, url, call)
        if reply.status < 300:
            wrong = self.discovery.wrong_answer(match, reply.body)
            # A state that was added after the document was written is part of what clients have to live with.
            assert not [one for one in wrong if ".state: " not in one], f"{match.id}: {wrong}"
        return reply

    def _answer(self, match: Match, url: urllib.parse.SplitResult, call: Call) -> Reply:
        if match.id == "logging.entries.list":
            return self._logs(body_of(call))
        region = match.path["locationsId"]
        host = HOST.fullmatch(url.netloc)
        if host is None or host["region"] != region or match.path["projectsId"] not in (PROJECT, NUMBER):
            return refuse(404, "NOT_FOUND", f"The requested resource was not found at {url.netloc}: {url.path}")
        if match.id == JOBS + "create":
            return self._create(region, body_of(call))
        if match.id == JOBS + "list":
            return self._list(region, dict(urllib.parse.parse_qsl(url.query)))
        if match.id.endswith("operations.get"):
            found = self.operations.get(match.path["operationsId"])
            return Reply(status=200, body=found) if found else refuse(404, "NOT_FOUND", "no such operation")
        job = self.jobs.get(match.path.get("customJobsId", ""))
        if job is None or job.region != region:
            return refuse(404, "NOT_FOUND", f"The CustomJob does not exist: {url.path}")
        if match.id == JOBS + "get":
            return Reply(status=200, body=job.body)
        if match.id == JOBS + "cancel":
            if job.final:
                return refuse(400, "FAILED_PRECONDITION", f"The CustomJob is in state {job.state}: not cancellable.")
            job.cancel()
            return Reply(status=200, body={})
        assert match.id == JOBS + "delete", f"not played: {match.id}"
        return self._delete(job)

    # ---- create

    def _create(self, region: str, asked: dict[str, Any]) -> Reply:
        spec = asked["jobSpec"]
        if trouble := rules.complaint(asked, region, self.several_regions):
            return refuse(400, "INVALID_ARGUMENT", trouble)
        account = spec.get("serviceAccount")
        if account and self.acts_as is not None and account not in self.acts_as:
            words = f"Permission 'iam.serviceAccounts.actAs' denied on service account {account}."
            return refuse(403, "PERMISSION_DENIED", words)
        over = [f"aiplatform.googleapis.com/{metric}" for metric, need in machines.demand(spec).items()
                if need > self.limit(region, metric)]  # fmt: skip
        if over:
            words = f"The following quota metrics exceed quota limits: {','.join(over)}"
            return refuse(429, "RESOURCE_EXHAUSTED", words)
        self._created += 1
        number = str(4_000_000_000_000_000_000 + self._created)
        body = json.loads(json.dumps(asked))
        for pool in filter(None, body["jobSpec"]["workerPoolSpecs"]):
            pool.setdefault("replicaCount", "1")
            pool.setdefault("diskSpec", {"bootDiskSizeGb": 100, "bootDiskType": "pd-ssd"})
        now = self.timeline.stamp()
        body |= {"name": f"projects/{NUMBER}/locations/{region}/customJobs/{number}", "createTime": now}
        body |= {"updateTime": now, "state": "JOB_STATE_QUEUED"}
        job = Job(
            number=number, region=region, project=NUMBER, body=body, time=self.timeline, manners=self.manners,
            programs=self.programs, capacity=lambda one: one.region not in self.empty, ended=self._admit,
            created_s=self.timeline.now_s,
        )  # fmt: skip
        self.jobs[number] = job
        self.timeline.after(self.manners.queue_s, self._admit)
        return Reply(status=200, body=job.body)

    def limit(self, region: str, metric: str) -> int:
        return self.limits.get((region, metric), machines.default_limit(metric, region))

    def held(self, region: str) -> Counter[str]:
        """What jobs hold of each metric."""
        total: Counter[str] = Counter()
        for job in self.jobs.values():
            if job.region == region and job.admitted and not job.released:
                total += machines.demand(job.spec)
        for (place, metric), used in self.used.items():
            if place == region:
                total[metric] += used
        return total

    def _admit(self) -> None:
        """Jobs in the queue whose quota remains, oldest first; the others wait, without a word and without end."""
        for job in self.jobs.values():
            if job.state != "JOB_STATE_QUEUED" or self.timeline.now_s < job.created_s + self.manners.queue_s:
                continue
            held = self.held(job.region)
            if all(
                held[metric] + need <= self.limit(job.region, metric)
                for metric, need in machines.demand(job.spec).items()
            ):
                job.admit()
                if trouble := self._pull_trouble(job):
                    job.cannot_start(trouble)

    def free(self, region: str, metric: str, number: int) -> None:
        """Other people give quota back."""
        self.used[region, metric] -= number
        self._admit()

    def _pull_trouble(self, job: Job) -> str | None:
        """Images are pulled by Google's service agent: never by the run's own account."""
        agent = f"service-{NUMBER}@gcp-sa-aiplatform.iam.gserviceaccount.com"
        for pool in filter(None, job.spec["workerPoolSpecs"]):
            image = pool.get("containerSpec", {}).get("imageUri", "")
            owner = image.split("/")[1] if image.partition("/")[0].endswith("-docker.pkg.dev") else ""
            if owner in self.foreign_images and agent not in self.foreign_images[owner]:
                return f"Failed to pull image {image}: 403 Forbidden: {agent} may not read it"
        return None

    # ---- look, remove

    def _list(self, region: str, query: dict[str, str]) -> Reply:
        before_s = self.timeline.now_s - self.manners.list_lag_s
        shown = [job for job in self.jobs.values() if job.region == region and job.created_s <= before_s]
        try:
            rows = [job.body for job in shown if listing.keeps(query.get("filter", ""), job.body)]
        except listing.BadFilter as error:
            return refuse(400, "INVALID_ARGUMENT", str(error))
        first, size = int(query.get("pageToken", "0")), min(int(query.get("pageSize", "0")) or 100, 100)
        body: dict[str, Any] = {"customJobs": rows[first : first + size]} if rows[first:] else {}
        if len(rows) > first + size:
            body["nextPageToken"] = str(first + size)
        return Reply(status=200, body=body)

    def _delete(self, job: Job) -> Reply:
        if not job.final:
            return refuse(400, "FAILED_PRECONDITION", f"The CustomJob is in state {job.state}: it cannot be deleted.")
        short = str(len(self.operations) + 1)
        name = f"projects/{NUMBER}/locations/{job.region}/operations/{short}"
        operation = self.operations[short] = {"name": name, "done": False}

        def gone() -> None:
            self.jobs.pop(job.number, None)
            operation.update(done=True, response={})

        self.timeline.after(self.delete_s, gone)
        return Reply(status=200, body=operation)

    # ---- what containers do to the outside

    def uses(self, job: Job, worker: Worker, memory_bytes: int) -> None:
        """A container's memory grows to this much: past what is left on its machine the kernel ends it."""
        if memory_bytes > machines.memory_left(worker.machine):
            job.exit(worker.name, 137)

    def prints(self, job: Job, worker: Worker, line: str) -> None:
        """A line of a container's output. Where the job's own account may not write logs it is gone for good."""
        worker.lines.append(line)
        account = job.spec.get("serviceAccount")
        if account and self.log_writers is not None and account not in self.log_writers:
            return
        labels = {"job_id": job.number, "task_name": worker.name, "project_id": PROJECT}
        entry = {
            "resource": {"type": "ml_job", "labels": labels},
            "textPayload": line,
            "timestamp": self.timeline.stamp(),
            "insertId": str(len(self.entries)),
            "logName": f"projects/{PROJECT}/logs/{worker.name}",
            "severity": "INFO",
        }
        self.entries.append((self.timeline.now_s + self.log_late_s, entry))

    def _logs(self, asked: dict[str, Any]) -> Reply:
        terms = [
            re.fullmatch(r'\s*([\w.]+)\s*(>=|>|=)\s*"([^"]*)"\s*', one)
            for one in re.split(r"\sAND\s|\n", asked.get("filter", "")) if one.strip()
        ]  # fmt: skip
        rows = []
        for seen_s, entry in self.entries:
            flat = {"timestamp": entry["timestamp"], "resource.type": entry["resource"]["type"]}
            flat |= {f"resource.labels.{key}": value for key, value in entry["resource"]["labels"].items()}
            kept = seen_s <= self.timeline.now_s
            for term in terms:
                if term is None or term[1] not in flat:
                    return refuse(400, "INVALID_ARGUMENT", f"Unparseable filter: {asked['filter']}")
                value = flat[term[1]]
                kept &= (
                    value == term[3] if term[2] == "=" else value > term[3] or (term[2] == ">=" and value == term[3])
                )
            if kept:
                rows.append(entry)
        if "desc" in asked.get("orderBy", ""):
            rows.reverse()
        first, size = int(asked.get("pageToken", "0")), asked.get("pageSize", 50)
        body: dict[str, Any] = {"entries": rows[first : first + size]} if rows[first:] else {}
        if len(rows) > first + size:
            body["nextPageToken"] = str(first + size)
        return Reply(status=200, body=body)
