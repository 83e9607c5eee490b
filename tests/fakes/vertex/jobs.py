"""A custom job's life: its machines, its states, and what an exit, a lost machine or a preemption makes of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fakes.timeline import Timeline
from fakes.vertex.rules import DAY_S, seconds
from fakes.vertex.workers import Programs, Stop, Variant, Worker, environment, roster

FINAL = {f"JOB_STATE_{word}" for word in ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED")}
ABORTED = {6, 11, 134, 139}
"""Exits that may be transient: SIGABRT and SIGSEGV, as Python and as a container's shell say them."""


@dataclass(kw_only=True)
class Manners:
    """How the service behaves where nothing says how it does. The defaults are the unkind ones."""

    list_lag_s: float = 30.0
    """Until ``list`` shows a new job."""
    queue_s: float = 20.0
    machine_s: float = 60.0
    """Until the first machine is there."""
    skew_s: float = 600.0
    """Between the first worker's start and the last one's; the chief is the last."""
    error_late_s: float = 60.0
    """From a job's end until its ``error`` is set."""
    shutdown_s: float = 45.0
    """From the exit that ends a job until its workers are gone."""
    sigterm: Callable[[Worker], float | None] = lambda worker: 30.0 if worker.index % 2 else None
    """Seconds from SIGTERM to SIGKILL of a worker; None: no SIGTERM."""
    restarts_briefly: bool = True
    """Whether a container that failed starts once more while its job is being shut down."""
    replace_s: float = 240.0
    """From a machine's death until its worker starts on another."""
    cancel_s: float = 40.0
    after_timeout: str = "JOB_STATE_CANCELLED"
    stockout_s: float = 600.0
    """One attempt to get machines that are not there."""
    variant: Variant = field(default_factory=Variant)
    shm_bytes: int = 64 << 20


@dataclass
class Job:
    """``body`` is what ``get`` answers; everything else is the service's own."""

    number: str
    region: str
    project: str
    """Number of the project."""
    body: dict[str, Any]
    created_s: float
    time: Timeline
    manners: Manners
    programs: Programs
    capacity: Callable[[Job], bool]
    """Whether the region has the machines now."""
    ended: Callable[[], None]
    """Told when the machines are given back."""
    admitted: bool = False
    """Out of the queue: it holds quota."""
    released: bool = False
    workers: list[Worker] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    job_restarts: int = 0
    errors: int = 0
    preemptions: int = 0
    attempts: int = 0
    began_s: float = 0.0
    generation: int = 0
    """Of the containers; what was planned for an earlier one does not happen."""
    boots: int = 0
    verdict: tuple[str, int, str] | None = None

    @property
    def spec(self) -> dict[str, Any]:
        found: dict[str, Any] = self.body["jobSpec"]
        return found

    @property
    def scheduling(self) -> dict[str, Any]:
        found: dict[str, Any] = self.spec.get("scheduling", {})
        return found

    @property
    def state(self) -> str:
        return str(self.body["state"])

    @property
    def final(self) -> bool:
        return self.state in FINAL

    def to(self, state: str) -> None:
        self.body |= {"state": f"JOB_STATE_{state}", "updateTime": self.time.stamp()}

    def worker(self, name: str) -> Worker:
        return next(one for one in self.workers if one.name == name)

    def stop_of(self, name: str) -> Stop:
        return next(one for one in self.stops if one.worker == name)

    # ---- from the queue to the machines

    def admit(self) -> None:
        """Enough quota remains: look for machines."""
        self.admitted, self.began_s = True, self.time.now_s
        self.to("PENDING")
        self.workers = roster(self.spec, self.number, self.manners.variant)
        self._acquire()

    def _acquire(self) -> None:
        if self.verdict or self.final:
            return
        if self.capacity(self):
            self._start_all()
            return
        if self.scheduling.get("strategy") == "FLEX_START":
            limit_s = seconds(self.scheduling.get("maxWaitDuration", f"{DAY_S}s"))
            if limit_s and self.time.now_s - self.began_s >= limit_s:  # 0 is for ever
                self._fail(8, self.out_of_stock())
                return
        else:
            self.attempts += 1
            if self.attempts > 4:  # three times again
                self._fail(8, self.out_of_stock())
                return
        self.time.after(self.manners.stockout_s, self._acquire)

    def out_of_stock(self) -> str:
        return (
            f"Resources are insufficient in region: {self.region}. Try a different region or use a different "
            "accelerator."
        )

    def _start_all(self, *, boot: bool = True) -> None:
        """Every worker, each when its machine is there; flex-start has all of them before it begins."""
        self.generation += 1
        together = self.scheduling.get("strategy") == "FLEX_START"
        order = sorted(self.workers, key=lambda one: (one.primary, one.pool, one.index))
        step_s = 0.0 if together or len(order) == 1 else self.manners.skew_s / (len(order) - 1)
        for number, worker in enumerate(order):
            worker.done = False
            self._later(self.manners.machine_s + number * step_s, functools.partial(self._start, worker, boot=boot))

    def _later(self, delay_s: float, happens: Callable[[], None]) -> None:
        generation = self.generation
        self.time.after(delay_s, lambda: happens() if generation == self.generation else None)

    def _start(self, worker: Worker, *, boot: bool) -> None:
        if self.final:
            return
        if boot or not worker.boots:
            self.boots += 1
            worker.boot(int(self.number[-6:]) * 64 + self.boots)
        worker.starts, worker.running = worker.starts + 1, True
        worker.shm_bytes = self.manners.shm_bytes
        self.programs.start(worker, self.environment(worker))
        leaving = self.verdict is not None or self.state == "JOB_STATE_CANCELLING"
        if not leaving and all(one.running or one.done for one in self.workers):
            self._all_there()

    def _all_there(self) -> None:
        self.to("RUNNING")
        if self.spec.get("enableWebAccess"):
            place = f"{self.number}-dot-{self.region}.aiplatform-training.googleusercontent.com"
            self.body["webAccessUris"] = {one.name: f"https://{one.name}-{place}" for one in self.workers}
        if "startTime" not in self.body:  # of the first time; it does not move again
            self.body["startTime"] = self.time.stamp()
            self.time.after(seconds(self.scheduling.get("timeout", "604800s")), self._out_of_time)

    def environment(self, worker: Worker) -> dict[str, str]:
        at = {"number": self.number, "region": self.region, "project": self.project}
        return environment(worker, self.workers, self.spec, self.manners.variant, **at)

    def cannot_start(self, why: str) -> None:
        """Its containers do not come up (an image that may not be read)."""
        self.generation += 1
        self._fail(3, why)

    # ---- what a container does

    def exit(self, name: str, code: int, text: str = "") -> None:
        """The container's first process has ended by itself."""
        worker = self.worker(name)
        assert worker.running, f"{name} is not running"
        worker.running = False
        if self.verdict or self.final:
            return
        if code == 0:
            worker.done = not worker.primary
            if worker.primary:
                self._succeed()
        elif code in ABORTED and self.job_restarts < 3:
            self.job_restarts += 1
            self._restart_job()
        elif code == 137:
            self._fail(3, f"The replica {name} ran out of memory and exited with a non-zero status of 137.")
        else:
            words = f"The replica {name} exited with a non-zero status of {code}. Termination reason: Error."
            if self.manners.restarts_briefly:
                self._later(2.0, lambda: self._start(worker, boot=False))
            self._fail(3, f"{words}\n{text}".rstrip())

    def breaks(self, name: str) -> None:
        """An error that is not permanent and not the program's: the container starts again on its machine, five times
        at most; then the job does, three times."""
        worker = self.worker(name)
        self._kill(worker, None)
        if self.scheduling.get("restartJobOnWorkerRestart"):
            self._restart_job()
        elif worker.restarts < 5:
            worker.restarts += 1
            self._later(5.0, lambda: self._start(worker, boot=False))
        elif self.job_restarts < 3:
            self.job_restarts += 1
            for one in self.workers:
                one.restarts = 0
            self._restart_job()
        else:
            self._fail(3, f"The replica {name} failed too often.")

    def lose_machine(self, name: str) -> None:
        """Its machine dies, or is maintained: the same name on another one, minutes later. No state tells of it."""
        worker = self.worker(name)
        self._kill(worker, None)
        if self.scheduling.get("strategy") == "SPOT":
            self.preempt()
        elif self.scheduling.get("restartJobOnWorkerRestart"):
            self._restart_job()
        else:
            self._later(self.manners.replace_s, lambda: self._start(worker, boot=True))

    def preempt(self) -> None:
        """Spot: all of it, not one host; six times."""
        if self.preemptions == 6:
            self._fail(8, f"STOCKOUT: {self.out_of_stock()}")
            return
        self.preemptions += 1
        self._restart_job()

    def internal_error(self) -> None:
        """Google's own: three attempts in all."""
        self.errors += 1
        if self.errors == 3 or (self.scheduling.get("disableRetries") and "startTime" in self.body):
            self._fail(13, "Internal error occurred.")
        else:
            self._restart_job()

    def _restart_job(self) -> None:
        """All containers anew, on other machines, under the same number."""
        for worker in self.workers:
            self._kill(worker, self.manners.sigterm(worker))
        self.body.pop("webAccessUris", None)
        self.to("PENDING")
        self._start_all()

    def _kill(self, worker: Worker, grace_s: float | None) -> None:
        if worker.running:
            worker.running = False
            self.stops.append(Stop(worker.name, grace_s))
            self.programs.stop(worker, grace_s)

    # ---- its end

    def cancel(self) -> None:
        """Asked to end. It may still end otherwise before it does."""
        self.to("CANCELLING")
        if not self.admitted:
            self.generation += 1
        self.time.after(self.manners.cancel_s, self._cancelled)

    def _cancelled(self) -> None:
        if self.verdict is None and not self.final:
            self.verdict = ("CANCELLED", 1, "CANCELED")
            self._end()

    def _out_of_time(self) -> None:
        if self.verdict is None and not self.final:
            word = self.manners.after_timeout.removeprefix("JOB_STATE_")
            self.verdict = (word, 1 if word == "CANCELLED" else 4, "The job ran longer than its timeout.")
            self._end()

    def _succeed(self) -> None:
        """The chief is done, and so is everybody: what others had still to write is lost."""
        self.verdict = ("SUCCEEDED", 0, "")
        self._end()

    def _fail(self, code: int, message: str) -> None:
        self.verdict = ("FAILED", code, message)
        self.time.after(self.manners.shutdown_s, self._end)

    def _end(self) -> None:
        """The state first, the reason a minute later."""
        assert self.verdict is not None
        word, code, message = self.verdict
        self.generation += 1
        for worker in self.workers:
            self._kill(worker, self.manners.sigterm(worker))
        self.to(word)
        self.body["endTime"] = self.time.stamp()
        self.body.pop("webAccessUris", None)
        self.released = True
        self.ended()
        if code:
            late = {"error": {"code": code, "message": message}}
            self.time.after(self.manners.error_late_s, lambda: self.body.update(late))
