"""A run's figures in Google's Cloud Monitoring (``metrics.cloud_monitoring``), written by the machine's own account.

Vertex AI itself sends there what each of a custom job's machines uses (processors, GPUs, memory, network, under
``ml.googleapis.com/training``: cloud.google.com/vertex-ai/docs/general/monitoring-metrics), but knows no step. So the
run's figures go as user-defined metrics, under the names of the Prometheus page: ``projects.timeSeries.create`` of the
Monitoring API v3, which takes at most 200 series a request, makes the descriptor of a metric that it does not know, and
refuses points of one series that follow each other too fast.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from muster.app.run.run_figures import MOST_TOLD, RunFigures, SentFigures
from muster.backends.google.http import Call, Http, Unreachable
from muster.backends.google.metadata import MachineHttp
from muster.core.typed_json import Json, JsonObject
from muster.report.exposition import Sample

ROOT = "https://monitoring.googleapis.com/v3"
PREFIX = "custom.googleapis.com/"
#: Google takes a point of a series every 5 s at most: a run's last ones wait until those before are ``APART_S`` old.
EVERY_S, APART_S = 60.0, 6.0
MOST_SERIES = 200
_UNITS = {"seconds": "s", "bytes": "By", "ratio": "1"}


@dataclass
class CloudMonitoring(SentFigures):
    project: str = ""
    http: Http = field(default_factory=lambda: MachineHttp(timeout_s=10.0))
    name = "the export to Cloud Monitoring"
    key = "metrics.cloud_monitoring"
    every_s = EVERY_S

    def end(self, code: int | None) -> None:
        time.sleep(max(0.0, self._sent_s + APART_S - time.monotonic()))
        super().end(code)

    def problem(self) -> str:
        now_ns = self.clock.wall_ns()
        given = self.figures.samples(now_ns)
        began_ns, run_id = self.figures.began_ns, self.figures.run_id
        found = list(series(given, run_id=run_id, project=self.project, began_ns=began_ns, now_ns=now_ns))
        for first in range(0, len(found), MOST_SERIES):
            body: JsonObject = {"timeSeries": found[first : first + MOST_SERIES]}
            try:
                reply = self.http.send(Call(method="POST", url=self.url, body=body))
            except Unreachable as error:
                return str(error)[:MOST_TOLD]
            if reply.status == 403:
                return f"{reply.message[:MOST_TOLD]}; its account needs roles/monitoring.metricWriter there"
            if reply.status >= 300:
                return f"HTTP {reply.status}: {reply.message[:MOST_TOLD]}"
        return ""


def series(
    samples: Iterable[Sample], *, run_id: str, project: str, began_ns: int, now_ns: int
) -> Iterator[dict[str, Json]]:
    """Each sample as a ``TimeSeries`` with its one point."""
    now, began = _rfc3339(now_ns), _rfc3339(began_ns)
    resource: JsonObject = {
        "type": "generic_task",
        "labels": {
            "project_id": project, "location": "global", "namespace": "muster", "job": run_id, "task_id": "supervisor",
        },
    }  # fmt: skip
    for family, labels, value in samples:
        counter = family.type == "counter"
        interval: JsonObject = {"startTime": began, "endTime": now} if counter else {"endTime": now}
        yield {
            "metric": {"type": PREFIX + family.name, "labels": {"run": run_id, **labels}},
            "resource": resource,
            "metricKind": "CUMULATIVE" if counter else "GAUGE",
            "valueType": "DOUBLE",
            "unit": next((unit for word, unit in _UNITS.items() if word in family.name.split("_")), "1"),
            "description": family.help,
            "points": [{"interval": interval, "value": {"doubleValue": float(value)}}],
        }


def _rfc3339(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns / 1e9, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def cloud_monitoring(project: str, figures: RunFigures, say: Callable[[str], None]) -> CloudMonitoring:
    """The sink for ``metrics.cloud_monitoring``."""
    return CloudMonitoring(figures, f"{ROOT}/projects/{project}/timeSeries", say, project=project)
