"""A run on the played Compute Engine: its network, its home in memory, and its hosts kept by the real program."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from typing import Any

from fakes.compute_engine.operator import Operator
from fakes.google_wire import Fault, Killed, Wire
from fakes.timeline import EPOCH

from muster.backends.gce import requests, teardown
from muster.backends.gce.compute import Compute
from muster.backends.gce.placement import Placement
from muster.backends.gce.provision import Hosts, Instance, instances_of
from muster.backends.google.request_log import RequestLog, RequestLogFile
from muster.backends.google.session import Session
from muster.core.errors import MusterError
from muster.storage.store import MemoryStore

LOOK_S = 10.0


class RunOfHosts:
    """``wire`` is the way to Google of the newest program; each ``program`` has one of its own."""

    def __init__(self, placement: Placement, **service: Any) -> None:
        self.user = Operator(**service)
        self.placement = placement
        self.store = MemoryStore()
        self.file = RequestLogFile(store=self.store, home=f"memory://{uuid.uuid4()}/runs")
        self.said: list[str] = []
        cloud = self.user.cloud
        for key in ("service_account", "supervisor_service_account"):
            cloud.store[f"iam/{key}/serviceAccounts/{getattr(placement.spec.gce, key)}"] = {}
        for zone in placement.zones:
            for request in requests.hosts(placement, zone, request_number=1):
                inner: Any = request.body.get("instanceProperties") or request.body.get("properties") or {}
                for nic in inner.get("networkInterfaces", []):
                    name = nic["subnetwork"].rpartition("/")[2]
                    cloud.store[f"compute/v1/{nic['subnetwork']}"] = {"name": name}
        self.file.begin(placement.run_id, int(placement.submission))
        self.wire = self.user.wire

    def program(self, *, kill_at: int | None = None, faults: dict[int, Fault] | None = None) -> Hosts:
        """A new one, as after a reboot of the supervisor's machine."""
        self.wire = Wire(self.user.cloud, self.user.clock, faults=faults or {}, kill_at=kill_at)
        return Hosts(
            placement=self.placement, compute=self.compute(self.wire), file=self.file,
            wall_s=lambda: 1_800_000_000 + self.user.clock.now_s, report=self.said.append,
        )  # fmt: skip

    def compute(self, wire: Wire | None = None) -> Compute:
        session = Session(http=wire or self.user.wire, clock=self.user.clock)
        return Compute(session=session, project="example-project")

    def drive(self, hosts: Hosts, *, until: Callable[[], bool] | None = None, limit_s: float = 7200.0) -> None:
        """Step after step, until all hosts live or ``until``. Errors are what the keeper prints."""
        ends_s = self.user.clock.now_s + limit_s
        while True:
            try:
                whole = hosts.step()
            except MusterError as error:
                self.said.append(f"error: {error}")
                whole = False
            if until() if until else whole:
                return
            assert self.user.clock.now_s < ends_s, f"{self.said[-5:]} {self.log}"
            self.user.time.sleep(LOOK_S)

    def down(self, *, kill_at: int | None = None, faults: dict[int, Fault] | None = None) -> list[teardown.Left]:
        self.wire = Wire(self.user.cloud, self.user.clock, faults=faults or {}, kill_at=kill_at)
        self.file.close()
        return teardown.remove(self.compute(self.wire), self.placement.stem, Settling(self.user), patience_s=4000.0)

    @property
    def log(self) -> RequestLog:
        log, _ = self.file.read()
        assert log is not None
        return log

    def instances(self) -> list[Instance]:
        return instances_of(self.compute(), self.placement.stem)

    def living(self) -> list[str]:
        return sorted(one.name for one in self.instances() if one.lives)

    def left(self) -> list[str]:
        """Of everything that the run made, whatever it is called or labelled."""
        stem = self.placement.stem
        return [key for key in self.user.cloud.store if f"/{stem}" in key]


@dataclasses.dataclass
class Settling:
    """A program's clock: time passes in the cloud, too."""

    user: Operator

    def sleep(self, seconds: float) -> None:
        self.user.time.sleep(seconds)

    def monotonic_ns(self) -> int:
        return self.user.clock.monotonic_ns()

    def wall_ns(self) -> int:
        """As the cloud's stamps say it."""
        return int((EPOCH.timestamp() + self.user.clock.now_s) * 1e9)


__all__ = ["Killed", "RunOfHosts"]
