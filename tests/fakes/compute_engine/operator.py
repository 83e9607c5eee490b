"""A project with a network, a machine as one would ask for it, and the calls, for tests of the fake itself."""

from __future__ import annotations

import urllib.parse
import uuid
from pathlib import Path
from typing import Any

from fakes.clock import VirtualClock
from fakes.compute_engine.guest import Guest
from fakes.compute_engine.service import ROOT, FakeComputeEngine
from fakes.discovery import Discovery, folder
from fakes.google_wire import Wire
from fakes.timeline import Timeline

from muster.backends.google.http import Call, Reply

DOCUMENTS = Discovery(folder() or Path(), ("compute.v1",))
ZONE = "us-central1-a"
NETWORK, SUBNET = (
    "projects/example-project/global/networks/muster",
    ("projects/example-project/regions/us-central1/subnetworks/muster"),
)
ACCOUNT = "muster-hosts@example-project.iam.gserviceaccount.com"
LABELS = {"muster-run": "r1"}
FLEX = {
    "provisioningModel": "FLEX_START",
    "instanceTerminationAction": "DELETE",
    "onHostMaintenance": "TERMINATE",
    "maxRunDuration": {"seconds": "3600"},
}
SPOT = {"provisioningModel": "SPOT", "automaticRestart": False, "onHostMaintenance": "TERMINATE"}


def machine(**changes: Any) -> dict[str, Any]:
    """What a bulk request and a template have in common."""
    disk = {"boot": True, "autoDelete": True, "initializeParams": {"sourceImage": "projects/ubuntu-os-cloud/x",
                                                                   "labels": LABELS}}  # fmt: skip
    found = {
        "machineType": "g2-standard-12", "disks": [disk], "labels": LABELS,
        "networkInterfaces": [{"network": NETWORK, "subnetwork": SUBNET}],
        "scheduling": {"onHostMaintenance": "TERMINATE", "automaticRestart": True},
        "metadata": {"items": [{"key": "startup-script", "value": "#!/bin/sh\ntrue\n"}]},
        "reservationAffinity": {"consumeReservationType": "NO_RESERVATION"},
    }  # fmt: skip
    return found | changes


def instance(name: str, zone: str = ZONE, **changes: Any) -> dict[str, Any]:
    return machine(**changes) | {"name": name, "machineType": f"zones/{zone}/machineTypes/g2-standard-12"}


class Operator:
    """``cloud`` is the service, ``wire`` the way to it."""

    def __init__(self, **service: Any) -> None:
        self.clock = VirtualClock()
        self.time = Timeline(self.clock)
        self.cloud = FakeComputeEngine(
            discovery=DOCUMENTS, timeline=self.time, enabled={"compute.googleapis.com"}, looks=0, **service
        )
        self.cloud.store[f"compute/v1/{NETWORK}"] = {"name": "muster"}
        self.cloud.store[f"compute/v1/{SUBNET}"] = {"name": "muster", "network": NETWORK}
        self.wire = Wire(self.cloud, self.clock)

    def call(self, method: str, path: str, body: Any = None, **query: str) -> Reply:
        text = f"?{urllib.parse.urlencode(query)}" if query else ""
        return self.wire.send(Call(method=method, url=f"https://compute.googleapis.com/{ROOT}/{path}{text}", body=body))

    def at(self, name: str, zone: str = ZONE) -> str:
        """Path of an instance in the cloud's store."""
        return f"{ROOT}/zones/{zone}/instances/{name}"

    def guest(self, name: str, zone: str = ZONE) -> Guest:
        return self.cloud.guests[self.at(name, zone)]

    def insert(self, name: str, zone: str = ZONE, **changes: Any) -> Reply:
        query = {"requestId": changes.pop("request_id")} if "request_id" in changes else {}
        return self.call("POST", f"zones/{zone}/instances", instance(name, zone, **changes), **query)

    def running(self, name: str, zone: str = ZONE, **changes: Any) -> Guest:
        assert self.insert(name, zone, **changes).status == 200
        self.time.sleep(40)
        return self.guest(name, zone)

    def bulk(self, *names: str, least: int | None = None, zone: str = ZONE, **changes: Any) -> Reply:
        query = {"requestId": changes.pop("request_id")} if "request_id" in changes else {}
        body: dict[str, Any] = {"count": str(len(names)), "instanceProperties": machine(**changes)}
        body["perInstanceProperties"] = {name: {} for name in names}
        body |= {"minCount": str(least)} if least is not None else {}
        return self.call("POST", f"zones/{zone}/instances/bulkInsert", body, **query)

    def status(self, name: str, zone: str = ZONE) -> str | int:
        reply = self.call("GET", f"zones/{zone}/instances/{name}")
        return str(reply.body["status"]) if reply.status == 200 else reply.status

    def operation(self, reply: Reply) -> Any:
        """As it is now."""
        assert reply.status == 200, reply.message
        zone = str(reply.body["zone"]).rpartition("/")[2]
        return self.call("GET", f"zones/{zone}/operations/{reply.body['name']}").body

    def errors(self, reply: Reply) -> list[str]:
        found = self.operation(reply)
        assert found["status"] == "DONE"
        return [row["code"] for row in found.get("error", {}).get("errors", [])]

    def group(self, name: str = "queue", **properties: Any) -> str:
        """A managed group, and its path below the project."""
        self.call("POST", "global/instanceTemplates", {"name": name, "properties": machine(**properties)})
        template = f"projects/example-project/global/instanceTemplates/{name}"
        asked = {"name": name, "instanceTemplate": template, "targetSize": 0, "baseInstanceName": name}
        assert self.call("POST", f"zones/{ZONE}/instanceGroupManagers", asked).status == 200
        return f"zones/{ZONE}/instanceGroupManagers/{name}"

    def instances(self, text: str = "labels.muster-run=r1") -> dict[str, Any]:
        """Name -> instance, in all zones."""
        scopes: Any = self.call("GET", "aggregated/instances", filter=text).body["items"]
        return {one["name"]: one for scope in scopes.values() for one in scope.get("instances", [])}


def request_id() -> str:
    return str(uuid.uuid4())
