"""Keeps a run's hosts: one step at a time from what is there towards what is wanted.

``Hosts.step`` may be killed after any of its requests, and be called again from anywhere: the intent is in the request
log before anything is sent, a request that is sent again means the same machines, and what is there is found by its
label. One request is open at a time. HTTP 200 says only that it began: it brought what its operation (or resize
request) left behind at its end, and machines that are there before that may vanish again.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from muster.backends.gce import requests
from muster.backends.gce.compute import Compute, over
from muster.backends.gce.placement import Placement
from muster.backends.google.http import Unreachable
from muster.backends.google.refusals import Cause, Refusal, of_code, of_reply
from muster.backends.google.request_log import ASKED, MADE, NOTHING, GivenUp, Request, RequestLog, RequestLogFile
from muster.catalog.gce import FLEX_START
from muster.core.typed_json import JsonObject, child, children, text

LIVING = ("PENDING", "PROVISIONING", "STAGING", "RUNNING", "REPAIRING", "PENDING_STOP")
ENDED = ("STOPPED", "TERMINATED", "SUSPENDED")
"""Stopped: they do nothing, and disks and names are held and billed all the same."""
AGAIN_S = 300
"""After every zone was asked in vain they are asked again so much later."""
DAY_S = 86_400
GIVEN_UP_A_DAY = 3
"""For each host of the run: what fails every time (a bundle that does not install) is not paid for again and again."""


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One machine of the run, as Compute Engine lists it."""

    name: str
    zone: str
    status: str
    request_number: int
    """0: the supervisor's."""
    group: str
    """The managed group that made it, as a path; empty: none."""
    row: JsonObject

    @property
    def lives(self) -> bool:
        return self.status in LIVING


def instances_of(compute: Compute, stem: str) -> list[Instance]:
    """Everything with the run's label, in all zones: a crash may have left some in a zone that was asked before."""
    rows = compute.everywhere("instances", f'labels.muster-run="{stem}"')
    return [_instance(place, row, stem) for place, row in rows if text(row, "labels", "muster-run") == stem]


def _instance(place: str, row: JsonObject, stem: str) -> Instance:
    name = text(row, "name")
    number = re.match(rf"{re.escape(stem)}-([0-9]{{1,9}})-", name)
    items = {text(one, "key"): text(one, "value") for one in children(child(row, "metadata"), "items")}
    return Instance(
        name=name,
        zone=place.rpartition("/")[2],
        status=text(row, "status"),
        request_number=int(number[1]) if number else 0,
        group=items.get("created-by", ""),
        row=row,
    )


@dataclass(kw_only=True)
class Hosts:
    """Of one run. Not for several threads."""

    placement: Placement
    compute: Compute
    file: RequestLogFile
    wall_s: Callable[[], float] = time.time
    report: Callable[[str], None] = print
    useless: Callable[[Sequence[Instance]], Mapping[str, str]] = lambda hosts: {}
    """Machines that run and will never be of use, with the reason."""
    _said: str = field(default="", repr=False)

    def step(self) -> bool:
        """Do what is next; whether every wanted host lives. Nothing, once the log is closed.

        Raises:
            MusterError: Google or the home does not answer, or refuses for good; the next step goes on from there.
        """
        log, generation = self.file.read()
        if log is None or generation is None or log.closed or log.submission != int(self.placement.submission):
            return False
        hosts = [one for one in instances_of(self.compute, self.placement.stem) if one.request_number]
        if log.last is not None and log.last.state == ASKED:
            self._settle(log, generation, log.last, hosts)
            return False
        log, generation = self._give_up(log, generation, hosts)
        self._clear(log, hosts)
        counted = self._counted(log, hosts)
        wanted = self.placement.hosts - len(counted)
        if wanted <= 0:
            return True
        zone = self._zone(log, counted)
        if zone is None:
            return False
        first = not counted and not any(request.state == MADE for request in log.requests)
        request = Request(number=log.next_number, where=zone, count=wanted, replaces=not first, asked_s=self.wall_s())
        generation = self.file.write(log.with_request(request), generation)  # the intent, before anything is sent
        self._ask(log.with_request(request), generation, request)
        return False

    def _counted(self, log: RequestLog, hosts: Sequence[Instance]) -> list[Instance]:
        made = {request.number for request in log.requests if request.state == MADE}
        given_up = {one.name for one in log.given_up}
        return [one for one in hosts if one.lives and one.request_number in made and one.name not in given_up]

    def _give_up(self, log: RequestLog, generation: str, hosts: Sequence[Instance]) -> tuple[RequestLog, str]:
        """What will never join is written down as given up: from then on it is removed, and another one asked for."""
        counted = self._counted(log, hosts)
        found = self.useless(counted) if counted else {}
        today = sum(self.wall_s() - one.at_s < DAY_S for one in log.given_up)
        most = GIVEN_UP_A_DAY * self.placement.hosts - today
        for name, reason in list(found.items())[: max(0, most)]:
            self._say(f"{name} is given up: {reason}")
            row = GivenUp(name=name, at_s=self.wall_s(), reason=reason)
            log = replace(log, given_up=(*log.given_up, row))
            generation = self.file.write(log, generation)
        if len(found) > most:
            self._say(f"no more machines are given up today ({today}): {next(iter(found.values()))}")
        return log, generation

    def _clear(self, log: RequestLog, hosts: Sequence[Instance]) -> None:
        """What ended on its own, what a request that brought nothing left, and what comes from an older submission."""
        kept = {one.name for one in self._counted(log, hosts)}
        for one in hosts:
            if one.name not in kept and one.status not in ("STOPPING", "DEPROVISIONING"):
                self._say(f"removing {one.name} ({one.status})")
                delete(self.compute, one)

    def _zone(self, log: RequestLog, living: Sequence[Instance]) -> str | None:
        """Which is asked now; None: not yet. Hosts stay in one zone: data networks and placement are a zone's."""
        late: list[Request] = []
        for request in reversed(log.requests):
            if request.state != NOTHING:
                break
            late.append(request)
        waited_s = self.wall_s() - late[0].asked_s if late else 0.0
        zones = [Counter(one.zone for one in living).most_common(1)[0][0]] if living else self.placement.zones
        if late and len(late) % len(zones) == 0 and waited_s < AGAIN_S:
            return None
        return zones[len(late) % len(zones)]

    # ------------------------------------------------------------ one request

    def _ask(self, log: RequestLog, generation: str, request: Request) -> None:
        """Send the request's calls, from the first one: those that were answered before are known by their names."""
        count = request.count if request.replaces else None
        asked = requests.hosts(self.placement, request.where, request_number=request.number, count=count)
        for number, call in enumerate(asked, start=1):
            try:
                reply = self.compute.send("POST", call.url, call.body)
            except Unreachable as error:  # sent again by the next step, with the same id and names
                self._say(f"{call.what}: {error}")
                return
            if reply.status < 300:
                operation = self.compute.address(text(reply.body, "selfLink"))
                if number < len(asked):  # the next one names what this one makes
                    self.compute.session.wait(reply.body, operation, patience_s=300.0)
                elif self.placement.mode != FLEX_START:
                    self.file.write(log.with_request(replace(request, name=operation)), generation)
                continue
            if not self._goes_on(log, generation, request, of_reply(reply), status=reply.status):
                return

    def _goes_on(self, log: RequestLog, generation: str, request: Request, trouble: Refusal, *, status: int) -> bool:
        """Whether a refusal is none: what was asked for is there already."""
        if trouble.cause is Cause.EXISTS:
            return True
        later = trouble.cause in (Cause.RATE, Cause.ACCESS) or (
            status >= 500 and trouble.cause is not Cause.NO_MACHINES
        )
        if later:  # a grant may not hold yet; the same request is sent again
            self._say(f"{request.where}: {trouble}")
            if request.reason != str(trouble):
                self.file.write(log.with_request(replace(request, reason=str(trouble))), generation)
        else:
            self._nothing(log, generation, request, trouble)
        return False

    def _nothing(self, log: RequestLog, generation: str, request: Request, trouble: Refusal) -> None:
        self._say(f"{request.count} x {self.placement.machine.name} in {request.where}: {trouble}")
        done = replace(request, state=NOTHING, reason=str(trouble), asked_s=self.wall_s())
        self.file.write(log.with_request(done), generation)

    def _settle(self, log: RequestLog, generation: str, request: Request, hosts: Sequence[Instance]) -> None:
        """The newest request: sent again if the service does not know it, waited for, or at its end."""
        if self.placement.mode == FLEX_START:
            self._settle_queued(log, generation, request)
            return
        if not request.name:
            self._ask(log, generation, request)
            return
        operation = self.compute.get(request.name)
        if operation is not None and not over(operation):
            return
        mine = [one for one in hosts if one.request_number == request.number and one.lives]
        least = 1 if request.replaces else min(request.count, self.placement.least_hosts)
        if len(mine) >= least:
            self._made(log, generation, request, len(mine))
            return
        trouble = self.compute.why(operation) if operation is not None else None
        self._nothing(log, generation, request, trouble or of_code("", "machines were made and are gone again"))

    def _made(self, log: RequestLog, generation: str, request: Request, count: int) -> None:
        fewer = f", of {request.count} that were asked for; they are kept and billed" if count < request.count else ""
        self._say(f"{count} x {self.placement.machine.name} in {request.where}{fewer}")
        self.file.write(log.with_request(replace(request, state=MADE, reason="")), generation)

    def _settle_queued(self, log: RequestLog, generation: str, request: Request) -> None:
        name = f"{self.placement.stem}-{request.number}"
        group = self.compute.url(f"zones/{request.where}/instanceGroupManagers/{name}")
        found = self.compute.get(f"{group}/resizeRequests/{name}")
        if found is None:
            self._ask(log, generation, request)
            return
        state = text(found, "state")
        if state == "SUCCEEDED":
            self._made(log, generation, request, request.count)
        elif state == "CANCELLED":
            waited = f"no machines within gce.max_wait_hours ({self.placement.spec.gce.max_wait_hours:g})"
            self._nothing(log, generation, request, Refusal(cause=Cause.NO_MACHINES, text=waited))
        elif state == "FAILED":
            errors = children(child(child(found, "status"), "error"), "errors")
            code, message = (text(errors[0], "code"), text(errors[0], "message")) if errors else ("FAILED", "")
            self._nothing(log, generation, request, of_code(code, message))
        elif state == "ACCEPTED" and self.wall_s() - request.asked_s > self.placement.max_wait_s:
            self.compute.ok("POST", f"{group}/resizeRequests/{name}/cancel")  # it may still succeed: then it counts

    def _say(self, line: str) -> None:
        if line != self._said:
            self.report(line)
        self._said = line


def delete(compute: Compute, machine: Instance) -> None:
    """Begin to remove one machine; it is gone minutes later. Behind its group's back a group's would come again."""
    at = f"zones/{machine.zone}"
    if machine.group:
        body: JsonObject = {"instances": [f"{at}/instances/{machine.name}"], "skipInstancesOnValidationError": True}
        compute.ok("POST", f"{compute.address(machine.group)}/deleteInstances", body)
    else:
        compute.ok("DELETE", compute.url(f"{at}/instances/{machine.name}"))
