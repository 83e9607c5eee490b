"""Custom jobs as Vertex AI's API has them: create, look, cancel, and what their programs printed.

A creation is sent once: an answer that is lost, or an error of the service's own, says nothing of whether there is a
job (``turns.py`` looks for it by its nonce).
"""

from __future__ import annotations

import datetime
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass

from muster.backends.google.http import Call, Unreachable
from muster.backends.google.refusals import refusal
from muster.backends.google.session import Session
from muster.backends.vertex.custom_job import RUN_LABEL, Request
from muster.core.typed_json import Json, JsonObject, children, text

LOGGING = "https://logging.googleapis.com/v2/entries:list"
PAGE = 1000
"""Log entries in one answer, at most."""
OWN_ERROR = 500
TOO_MANY = 429


class Lost(Exception):
    """Whether there is a job now is not known."""


class QuotaRefused(Exception):
    """The request is larger than the region's limit: there is no job."""


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """One project's."""

    session: Session
    project: str

    def create(self, request: Request) -> JsonObject:
        """The new job's record.

        Raises:
            Lost, QuotaRefused: as they say.
            AccessError, BackendError: Google's refusal; there is no job.
        """
        call = Call(method="POST", url=request.url, body=request.body)
        try:
            reply = self.session.http.send(call)
        except Unreachable as error:
            raise Lost(str(error)) from error
        quota = "quota" in reply.message.lower()
        if reply.status == TOO_MANY and quota:
            raise QuotaRefused(reply.message)
        if (
            reply.status >= OWN_ERROR
            or reply.status == TOO_MANY
            or (reply.status < 300 and not text(reply.body, "name"))
        ):
            raise Lost(f"status {reply.status}: {reply.message}")
        if reply.status >= 300:
            raise refusal(call, reply)
        return reply.body

    def labelled(self, region: str, label: str, value: str) -> list[JsonObject]:
        """The region's jobs with that label, as far as its list has them already."""
        found: list[JsonObject] = []
        query = {"filter": f"labels.{label}={value}"}
        while True:
            url = f"{self._of(region)}?{urllib.parse.urlencode(query)}"
            body = self.session.ok(Call(method="GET", url=url)).body
            found += [row for row in children(body, "customJobs") if text(row, "labels", label) == value]
            if not (page := text(body, "nextPageToken")):
                return found
            query["pageToken"] = page

    def of_run(self, region: str, run_id: str) -> list[JsonObject]:
        return self.labelled(region, RUN_LABEL, run_id)

    def get(self, name: str) -> JsonObject | None:
        """The record of the job with the full name ``name``; None: there is none."""
        reply = self.session.find(Call(method="GET", url=self._at(name)))
        return reply.body if reply is not None else None

    def cancel(self, name: str) -> None:
        """Ask for its end; one that has ended, or is gone, is success."""
        call = Call(method="POST", url=f"{self._at(name)}:cancel", body={})
        try:
            reply = self.session.send(call)
        except Unreachable:
            return  # the caller that waits for its end asks again
        if reply.status >= 300 and reply.status not in (400, 404):
            raise refusal(call, reply)

    def output(self, number: str, after_ns: int) -> Iterator[tuple[str, int, str]]:
        """(host as Vertex calls it, when in ns since 1970, line) of the job ``number``, printed after ``after_ns``;
        seconds to minutes late.

        Raises:
            AccessError, BackendError: Google's refusal.
        """
        stamp = _stamp(after_ns)
        terms = ['resource.type="ml_job"', f'resource.labels.job_id="{number}"', f'timestamp>"{stamp}"']
        body: dict[str, Json] = {
            "resourceNames": [f"projects/{self.project}"], "filter": " AND ".join(terms),
            "orderBy": "timestamp asc", "pageSize": PAGE,
        }  # fmt: skip
        while True:
            answer = self.session.ok(Call(method="POST", url=LOGGING, body=body)).body
            for row in children(answer, "entries"):
                line = text(row, "textPayload") or text(row, "jsonPayload", "message")
                yield text(row, "resource", "labels", "task_name"), _ns(text(row, "timestamp")), line
            if not (page := text(answer, "nextPageToken")):
                return
            body["pageToken"] = page

    def _of(self, region: str) -> str:
        return f"https://{region}-aiplatform.googleapis.com/v1/projects/{self.project}/locations/{region}/customJobs"

    def _at(self, name: str) -> str:
        """By its region's own host; the project as we name it, since a job's name has its number."""
        _, _, _, region, _, number = name.split("/")
        return f"{self._of(region)}/{number}"


def _stamp(ns: int) -> str:
    seconds, rest = divmod(max(0, ns), 10**9)
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S") + f".{rest:09d}Z"


def _ns(stamp: str) -> int:
    """Of an RFC 3339 time with up to nine digits; 0: it is none."""
    head, _, rest = stamp.removesuffix("Z").partition(".")
    try:
        moment = datetime.datetime.fromisoformat(head).replace(tzinfo=datetime.UTC)
        return int(moment.timestamp()) * 10**9 + int((rest.partition("+")[0] or "0").ljust(9, "0")[:9])
    except ValueError:
        return 0
