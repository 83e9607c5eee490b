"""Compute Engine with machines, groups, disks and reservations, on a virtual clock.

It goes on where the fake cloud of GKE's ends: networks, rules, accounts, buckets and quotas are that one's. Operations
on machines take time in place of looks, and HTTP 200 says nothing of how they end. Nothing here has run against Google.
"""

from __future__ import annotations

import urllib.parse
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fakes.compute_engine import filters
from fakes.compute_engine.guest import Guest, Programs
from fakes.discovery import Match
from fakes.gcp import FakeGoogleCloud
from fakes.google_wire import refuse
from fakes.timeline import Timeline

from muster.backends.google.http import Call, Reply

ROOT = "compute/v1/projects/example-project"
OWN = ("instances", "regionInstances", "instanceGroupManagers", "instanceGroupManagerResizeRequests", "zoneOperations")
Finish = Callable[[], list[dict[str, Any]]]
"""What happens at an operation's end; the errors that it ends with."""


@dataclass(kw_only=True)
class Manners:
    """How long things take where nothing says how long they do."""

    visible_s: float = 5.0
    """Until a machine that was asked for can be seen."""
    boot_s: float = 30.0
    doomed_s: float = 60.0
    """How long the machines of a bulk request that failed live before they are deleted again."""
    delete_s: float = 90.0
    delete_pending_s: float = 39 * 60.0
    stop_s: float = 60.0
    remembers_s: float = 3600.0
    """How long a request's id is known."""
    noticed_s: float = 330.0
    """Until Google sees that a host is dead."""
    repair_s: float = 120.0
    cancel_s: float = 20.0
    queue_s: float = 60.0
    """Between two tries of a request that waits for machines."""


@dataclass(kw_only=True)
class FakeComputeEngine(FakeGoogleCloud):
    """``guests`` are the machines from the inside, by path of their instance."""

    timeline: Timeline
    manners: Manners = field(default_factory=Manners)
    programs: Programs = field(default_factory=Programs)
    stock: dict[str, int] = field(default_factory=dict)
    """Zone -> machines that are left; a zone that is not here has plenty."""
    stockout_code: str = "ZONE_RESOURCE_POOL_EXHAUSTED"
    odd_errors: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Zone -> another error in place of a machine. Used once."""
    instance_quota: int | None = None
    actors: dict[str, float] | None = None
    """Service account -> moment from which the caller may act as it; None: any, always."""
    guests: dict[str, Guest] = field(default_factory=dict)
    timed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Operations that take time, by name."""
    known: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Request id -> when it came, and its operation."""
    writes_s: list[float] = field(default_factory=list)
    boots: int = 0
    addresses: int = 0

    def _answer(self, call: Call) -> Reply:
        self.timeline.settle()
        reply = super()._answer(call)
        url = urllib.parse.urlsplit(call.url)
        match = self.discovery.match(call.method, url.netloc, url.path)
        if match and match.api == "compute.v1" and match.id.split(".")[1] in (*OWN, "disks") and reply.status < 300:
            wrong = self.discovery.wrong_answer(match, reply.body)
            assert not wrong, f"{match.id}: {wrong}"
        return reply

    def _special(self, match: Match, query: dict[str, str], call: Call) -> Reply | None:
        from fakes.compute_engine import bulk, groups, instances

        name = match.id.removeprefix("compute.")
        if match.api != "compute.v1" or "compute.googleapis.com" not in self.enabled:
            return super()._special(match, query, call)
        if match.path.get("instanceGroupManager", "").startswith("gke-"):
            return super()._special(match, query, call)  # a node pool's
        if name in ("zoneOperations.get", "zoneOperations.wait") and match.path["operation"] in self.timed:
            return Reply(status=200, body=self.timed[match.path["operation"]])
        if name.endswith("perations.get") and match.path["operation"] not in self.operations:
            return refuse(404, "notFound", f"The operation {match.path['operation']} was not found")
        if name == "zoneOperations.list":
            rows = [one for one in self.timed.values() if f"/zones/{match.path['zone']}/" in one["selfLink"]]
            return self.listed(rows, query, "operations")
        path = urllib.parse.urlsplit(call.url).path.lstrip("/")
        handler = {**instances.HANDLERS, **bulk.HANDLERS, **groups.HANDLERS}.get(name)
        if handler:
            if call.method != "GET" and (trouble := self._too_fast()):
                return trouble
            return handler(self, path, query, call)
        if match.verb in ("list", "aggregatedList") and name.partition(".")[0] not in (
            "networkProfiles",
            "machineTypes",
        ):
            return self.collection(match, path, query)
        return super()._special(match, query, call)

    def _too_fast(self) -> Reply | None:
        now_s = self.timeline.now_s
        self.writes_s = [moment for moment in self.writes_s if moment > now_s - 1]
        self.writes_s.append(now_s)
        if len(self.writes_s) > 20:
            return refuse(403, "rateLimitExceeded", "Rate Limit Exceeded")
        return None

    # ---- operations

    def operation(
        self,
        folder: str,
        kind: str,
        target: str,
        after_s: float,
        finish: Finish,
        *,
        request_id: str = "",
        group: str = "",
    ) -> dict[str, Any]:
        """Begin something; ``folder`` is the zone's or region's path."""
        name = f"operation-t{len(self.timed) + 1}"
        row: dict[str, Any] = {
            "kind": "compute#operation", "id": str(9000 + len(self.timed)), "name": name, "operationType": kind,
            "status": "RUNNING", "progress": 0, "insertTime": self.timeline.stamp(), "user": "muster@example-project",
            "targetLink": f"https://www.googleapis.com/{target}",
            "selfLink": f"https://www.googleapis.com/{folder}/operations/{name}",
        }  # fmt: skip
        if "/zones/" in f"{folder}/":
            row["zone"] = f"https://www.googleapis.com/{folder}"
        if group:
            row["operationGroupId"] = group
        self.timed[name] = row
        if request_id:
            self.known[request_id] = (self.timeline.now_s, name)

        def over() -> None:
            errors = finish()
            row.update(status="DONE", progress=100, endTime=self.timeline.stamp())
            if errors:
                status = 409 if any("EXISTS" in one["code"] for one in errors) else 503
                row.update(error={"errors": errors}, httpErrorStatusCode=status, httpErrorMessage="SERVICE UNAVAILABLE")

        self.timeline.after(after_s, over)
        return row

    def repeated(self, query: dict[str, str]) -> Reply | None:
        """The operation of a request that is known; ids are forgotten after a while. Not a UUID: 400."""
        if (given := query.get("requestId")) is None:
            return None
        try:
            zero = uuid.UUID(given).int == 0
        except ValueError:
            zero = True
        if zero:
            return refuse(400, "invalid", f"Invalid value for field 'requestId': '{given}'.")
        came_s, name = self.known.get(given, (-1e18, ""))
        if self.timeline.now_s - came_s > self.manners.remembers_s:
            return None
        return Reply(status=200, body=self.timed[name])

    # ---- lists, deletes

    def listed(self, rows: list[dict[str, Any]], query: dict[str, str], kind: str) -> Reply:
        try:
            rows = [row for row in rows if filters.keeps(query.get("filter", ""), row)]
        except filters.BadFilter as error:
            return refuse(400, "invalid", str(error))
        first, size = int(query.get("pageToken", "0")), int(query.get("maxResults", "500"))
        body: dict[str, Any] = {"items": rows[first : first + size]} if rows[first:] else {}
        if len(rows) > first + size:
            body["nextPageToken"] = str(first + size)
        return Reply(status=200, body=body)

    def collection(self, match: Match, path: str, query: dict[str, str]) -> Reply:
        """Resources of one kind in one place, or in every place there is."""
        kind = path.rpartition("/")[2]
        if match.verb == "list":
            rows = [one for key, one in self.store.items() if key.rpartition("/")[0] == path]
            return self.listed(rows, query, kind)
        scopes: dict[str, Any] = {f"zones/{zone}": {"warning": {"code": "NO_RESULTS_ON_PAGE"}} for zone in self.zones}
        for key, one in self.store.items():
            parts = key.split("/")
            if not key.startswith("compute/v1/") or parts[-2] != kind or "/resizeRequests/" in key:
                continue
            try:
                kept = filters.keeps(query.get("filter", ""), one)
            except filters.BadFilter as error:
                return refuse(400, "invalid", str(error))
            scope = "global" if parts[4] == "global" else "/".join(parts[4:6])
            if kept:
                scopes[scope] = {kind: [*scopes.get(scope, {}).get(kind, []), one]}
        return Reply(status=200, body={"items": scopes})

    def users(self, path: str) -> list[str]:
        """Paths of what refers to it: none of it can go before they have."""
        parts = path.split("/")
        tail = "/" + "/".join(parts[-2:])
        region = next((part for part in parts if part in self.places()), "")

        def refers(value: Any) -> bool:
            if isinstance(value, dict):
                return any(refers(one) for key, one in value.items() if key not in ("selfLink", "targetLink"))
            if isinstance(value, list):
                return any(refers(one) for one in value)
            text = f"/{value}" if isinstance(value, str) else ""
            return text.endswith(tail) and (not region or "/projects/" not in text or f"/{region}/" in text)

        others = [key for key in self.store if key.startswith("compute/v1/") and not f"{key}/".startswith(f"{path}/")]
        return [key for key in others if refers(self.store[key])]

    def places(self) -> set[str]:
        return {*self.zones, *(zone.rpartition("-")[0] for zone in self.zones)}

    def _delete(self, match: Match, path: str) -> Reply:
        """Refused at once where something uses it; what begins to use it meanwhile makes the operation fail."""
        if match.api != "compute.v1" or path not in self.store:
            return super()._delete(match, path)
        if users := self.users(path):
            words = f"The {path} resource is already being used by {users[0]}"
            return refuse(400, "resourceInUseByAnotherResource", words)

        def finish(cancelled: bool = False) -> None:
            if found := self.users(path):
                words = f"The {path} resource is already being used by {found[0]}"
                this = next(one for one in self.operations.values() if one.finish is finish)
                this.error = {"errors": [{"code": "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", "message": words}]}
            else:
                self.store.pop(path, None)

        return self.begin(path.rpartition("/")[0], {}, finish, api=match.api, target=path)
