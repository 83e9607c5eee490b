"""A run's figures for an OpenTelemetry receiver (``metrics.otlp``): OTLP over HTTP, in Protobuf.

https://opentelemetry.io/docs/specs/otlp/#otlphttp.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from typing import IO, TYPE_CHECKING

from muster.app.run.event_writer import Sink
from muster.app.run.run_figures import MOST_TOLD, RunFigures, SentFigures
from muster.core import environment
from muster.core.errors import install_command
from muster.report.exposition import Family, Sample

if TYPE_CHECKING:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.common.v1.common_pb2 import KeyValue

PATH = "/v1/metrics"
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
"""Variable of the supervisor, as every OpenTelemetry exporter reads it: ``name=value,...``, values percent-encoded."""
#: How often figures are sent, and how long a receiver may take with them.
EVERY_S, PATIENCE_S = 15.0, 5.0
#: Bytes of its answer that are read.
MOST_READ = 1 << 16


@dataclass
class OtlpExport(SentFigures):
    headers: Mapping[str, str] = field(default_factory=dict)
    name = "the OTLP export"
    key = "metrics.otlp"
    every_s = EVERY_S

    def problem(self) -> str:
        try:
            from google.protobuf.message import DecodeError
            from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
        except ImportError:
            return f"this needs the extra: {install_command('otlp')}"
        now_ns = self.clock.wall_ns()
        found = self.figures.samples(now_ns)
        body = message_of(found, run_id=self.figures.run_id, began_ns=self.figures.began_ns, now_ns=now_ns)
        headers = {"Content-Type": "application/x-protobuf", "User-Agent": "muster", **self.headers}
        request = urllib.request.Request(self.url, body.SerializeToString(), headers, method="POST")
        try:
            with urllib.request.build_opener(NoRedirect).open(request, timeout=PATIENCE_S) as answer:
                taken = ExportMetricsServiceResponse.FromString(answer.read(MOST_READ)).partial_success
        except urllib.error.HTTPError as error:
            return f"HTTP {error.code}"
        except (OSError, http.client.HTTPException, DecodeError, ValueError) as error:
            return str(getattr(error, "reason", error))[:MOST_TOLD] or type(error).__name__
        refused = taken.rejected_data_points
        return f"{refused} of {len(found)} refused: {taken.error_message[:MOST_TOLD]}" if refused else ""


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Headers may hold a key: it goes only to the address that the run file names."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        return None


def message_of(samples: Iterable[Sample], *, run_id: str, began_ns: int, now_ns: int) -> ExportMetricsServiceRequest:
    """The samples of one moment; those of one metric follow each other."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality

    message = ExportMetricsServiceRequest()
    of_run = message.resource_metrics.add()
    of_run.resource.attributes.extend(_attributes({"service.name": "muster", "service.instance.id": run_id}))
    scope = of_run.scope_metrics.add()
    scope.scope.name = "muster"
    before: Family | None = None
    for family, labels, value in samples:
        counter = family.type == "counter"
        if family != before:
            metric = scope.metrics.add(name=family.name, description=family.help)
            if counter:
                metric.sum.is_monotonic = True
                metric.sum.aggregation_temporality = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
            before = family
        point = (metric.sum if counter else metric.gauge).data_points.add(time_unix_nano=now_ns, as_double=value)
        if counter:
            point.start_time_unix_nano = began_ns
        point.attributes.extend(_attributes({"run": run_id, **labels}))
    return message


def _attributes(given: Mapping[str, str]) -> list[KeyValue]:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

    return [KeyValue(key=key, value=AnyValue(string_value=value)) for key, value in given.items()]


def headers_of(text: str) -> dict[str, str]:
    """Of the variable ``HEADERS``; what has no ``=`` is left out, as by other exporters."""
    parts = [part.partition("=") for part in text.split(",") if "=" in part]
    return {name.strip(): urllib.parse.unquote(value.strip()) for name, _, value in parts}


def otlp_export(url: str, figures: RunFigures, say: Callable[[str], None]) -> Sink:
    """The sink for ``metrics.otlp``."""
    base = url.rstrip("/")
    target = base if base.endswith(PATH) else base + PATH
    return OtlpExport(figures, target, say, headers=headers_of(environment.inherited().get(HEADERS, "")))
