"""A job as one would submit it, and the five calls, for tests of the fake itself."""

from __future__ import annotations

import urllib.parse
from pathlib import Path
from typing import Any

from fakes.clock import VirtualClock
from fakes.discovery import Discovery, folder
from fakes.google_wire import Fault, Wire
from fakes.timeline import Timeline
from fakes.vertex.jobs import Job, Manners
from fakes.vertex.service import APIS, PROJECT, FakeVertex

from muster.backends.google.http import Call, Reply

DOCUMENTS = Discovery(folder() or Path(), APIS)
REGION = "us-central1"
L4 = {"machineType": "g2-standard-12", "acceleratorType": "NVIDIA_L4", "acceleratorCount": 1}
CPU = {"machineType": "n1-standard-4"}
IMAGE = "us-docker.pkg.dev/example-project/muster/train:1"
ACCOUNT = "muster-run@example-project.iam.gserviceaccount.com"


def pool(machine: dict[str, Any] = CPU, replicas: int = 1, **changes: Any) -> dict[str, Any]:
    container = {"imageUri": IMAGE, "command": ["muster-keeper"], "env": [{"name": "MUSTER_RUN", "value": "r1"}]}
    return {"machineSpec": machine, "replicaCount": str(replicas), "containerSpec": container, **changes}


def job(workers: int = 1, *, machine: dict[str, Any] = CPU, labels: dict[str, str] | None = None, **spec: Any) -> Any:
    """A chief and ``workers`` others."""
    pools = [pool(machine), *([pool(machine, workers)] if workers else [])]
    return {"displayName": "muster-r1", "labels": labels or {"muster-run": "r1", "muster-nonce": "n1"},
            "jobSpec": {"workerPoolSpecs": pools, "scheduling": {"disableRetries": False}, **spec}}  # fmt: skip


def at(region: str, path: str = "", **query: str) -> str:
    text = f"?{urllib.parse.urlencode(query)}" if query else ""
    return f"https://{region}-aiplatform.googleapis.com/v1/projects/{PROJECT}/locations/{region}/customJobs{path}{text}"


class Submitter:
    """One project's: ``vertex`` is the service, ``wire`` the way to it."""

    def __init__(self, manners: Manners | None = None, **service: Any) -> None:
        self.clock = VirtualClock()
        self.time = Timeline(self.clock)
        self.vertex = FakeVertex(discovery=DOCUMENTS, timeline=self.time, manners=manners or Manners(), **service)
        self.wire = Wire(self.vertex, self.clock)

    def fault(self, fault: Fault, ahead: int = 1) -> None:
        """The request after ``ahead - 1`` others goes wrong."""
        self.wire.faults[len(self.wire.log) + ahead] = fault

    def create(self, body: Any, region: str = REGION) -> Reply:
        return self.wire.send(Call(method="POST", url=at(region), body=body))

    def made(self, body: Any, region: str = REGION) -> Job:
        """The service's own view of a job that was accepted."""
        reply = self.create(body, region)
        assert reply.status == 200, reply.message
        return self.vertex.jobs[str(reply.body["name"]).rpartition("/")[2]]

    def running(self, body: Any) -> Job:
        made = self.made(body)
        self.time.sleep(2000)
        assert made.state == "JOB_STATE_RUNNING"
        return made

    def get(self, of: Job) -> Any:
        reply = self.wire.send(Call(method="GET", url=at(of.region, f"/{of.number}")))
        return reply.body if reply.status == 200 else reply

    def list(self, text: str = "", region: str = REGION, **query: str) -> list[Any]:
        found: Any = self.listed(text, region, **query).body.get("customJobs", [])
        return list(found)

    def listed(self, text: str = "", region: str = REGION, **query: str) -> Reply:
        query |= {"filter": text} if text else {}
        return self.wire.send(Call(method="GET", url=at(region, **query)))

    def cancel(self, of: Job) -> Reply:
        return self.wire.send(Call(method="POST", url=at(of.region, f"/{of.number}:cancel"), body={}))

    def delete(self, of: Job) -> Reply:
        return self.wire.send(Call(method="DELETE", url=at(of.region, f"/{of.number}")))
