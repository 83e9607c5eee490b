"""Cloud Monitoring in memory: what ``timeSeries.create`` takes and refuses (the API's reference, its quotas)."""

from __future__ import annotations

import json
import re
import urllib.parse
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from fakes.discovery import Discovery
from fakes.google_wire import body_of, refuse

from muster.backends.google.http import Call, Reply

API = "monitoring.v3"
WRITE = "monitoring.timeSeries.create"
MOST_SERIES, MOST_LABELS, LONGEST_LABEL, SOONEST_S = 200, 30, 1024, 5.0
#: https://cloud.google.com/monitoring/api/resources
RESOURCES = {
    "global": {"project_id"},
    "generic_task": {"project_id", "location", "namespace", "job", "task_id"},
    "generic_node": {"project_id", "location", "namespace", "node_id"},
}


@dataclass
class FakeMonitoring:
    """One project's. A request with one bad series writes the good ones, and is refused, as by the real one."""

    discovery: Discovery
    project: str = "example-project"
    may_write: bool = True
    requests: int = 0
    points: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)
    """A series as JSON of its metric and resource -> (start, end, value) of its points; a gauge's start is its end."""
    descriptors: dict[str, dict[str, Any]] = field(default_factory=dict)

    def send(self, call: Call) -> Reply:
        url = urllib.parse.urlsplit(call.url)
        match = self.discovery.match(call.method, url.netloc, url.path)
        assert match is not None and match.id == "monitoring.projects.timeSeries.create", f"{call.method} {call.url}"
        complaints = self.discovery.complaints(match, url.query, call.body)
        assert not complaints, complaints
        self.requests += 1
        if match.path["projectsId"] != self.project or not self.may_write:
            return refuse(403, "PERMISSION_DENIED", f"Permission {WRITE} denied (or the resource may not exist).")
        given = body_of(call).get("timeSeries", [])
        if len(given) > MOST_SERIES:
            return refuse(400, "INVALID_ARGUMENT", f"Field timeSeries had an invalid value: more than {MOST_SERIES}.")
        names = [self._name(one) for one in given]
        wrong = [self._refusal(one) for one in given]
        wrong += ["Duplicate TimeSeries encountered." for name in set(names) if names.count(name) > 1]
        said = "; ".join(sorted({one for one in wrong if one}))
        if said:
            return refuse(400, "INVALID_ARGUMENT", f"One or more TimeSeries could not be written: {said}")
        return Reply(status=200)

    @staticmethod
    def _name(series: dict[str, Any]) -> str:
        return json.dumps([series["metric"], series["resource"]], sort_keys=True)

    def _refusal(self, series: dict[str, Any]) -> str:
        """Write its point; what was wrong, empty: it is written."""
        metric, resource = series["metric"], series["resource"]
        labels = metric.get("labels", {})
        if not re.fullmatch(r"(custom|external)\.googleapis\.com/[A-Za-z0-9_/.-]{1,200}", metric["type"]):
            return f"unrecognized metric {metric['type']}"
        if len(labels) > MOST_LABELS or any(len(value) > LONGEST_LABEL for value in labels.values()):
            return "too many labels, or too long ones"
        if not all(re.fullmatch(r"[a-zA-Z][a-zA-Z0-9_]*", name) for name in labels):
            return "a label's key is not valid"
        if RESOURCES.get(resource["type"]) != set(resource["labels"]):
            return f"unrecognized labels of {resource['type']}"
        (point,) = series["points"]
        ((kind, value),) = point["value"].items()
        want = {"metricKind": series["metricKind"], "kind": kind, "labels": sorted(labels)}
        if self.descriptors.setdefault(metric["type"], want) != want:
            return f"{metric['type']} is {self.descriptors[metric['type']]}, not {want}"
        end = _seconds(point["interval"]["endTime"])
        start = _seconds(point["interval"].get("startTime", point["interval"]["endTime"]))
        if (series["metricKind"] == "GAUGE") != (start == end):
            return "the start time must be before the end time of CUMULATIVE, and equal it of GAUGE"
        before = self.points.setdefault(self._name(series), [])
        if before and end <= before[-1][1]:
            return "Points must be written in order."
        if before and end - before[-1][1] < SOONEST_S:
            return "One or more points were written more frequently than the maximum sampling period."
        if before and series["metricKind"] == "CUMULATIVE" and (start != before[-1][0] or value < before[-1][2]):
            return "a cumulative point must go on from the same start, and not fall"
        before.append((start, end, float(value)))
        return ""


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
