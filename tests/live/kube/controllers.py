"""Plays JobSet, Kueue, the Job controller and a cloud's nodes on a control plane: a thread that looks every 0.2 s.

Each part is in a file of its own (``jobset``, ``kueue``, ``jobs``, ``nodes``) and follows the real one, the unkind side
first: what a test does not say is refused, evicted, delayed and left lying as the real controllers would.
"""

import threading
import time

from jobs import Jobs
from jobset import JobSets
from kueue import Kueue
from nodes import Nodes
from objects import JOBSETS, KUEUE, WORKLOADS, Api, Clock

__all__ = ["JOBSETS", "KUEUE", "WORKLOADS", "Controllers"]

KUEUE_SPEED = 300.0
"""Kueue's 30 minutes are 6 seconds."""


class Controllers:
    """``with Controllers(plane):`` starts the thread; without it ``step`` looks once.

    ``job_speed``: how much faster than ours the Job controller's delay after a failure passes (10 s and more).
    """

    def __init__(self, plane, *, hold=False, kueue_speed=KUEUE_SPEED, job_speed=1.0, source=time.monotonic):
        self.plane, self.api = plane, Api(plane)
        self.jobs = Jobs(self.api, Clock(job_speed, source))
        self.jobsets = JobSets(self.api, self.jobs, Clock(1.0, source))
        self.kueue = Kueue(self.api, Clock(kueue_speed, source))
        self.kueue.hold = hold
        self.nodes = Nodes(self.api)
        self.jobset_down = False
        """JobSet's only replica is away: nothing is reconciled, and no pod of a JobSet can be made."""
        self.jobs.refusal = self._webhook
        self.stopping = threading.Event()
        self.trouble = None
        self.thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        self.thread.join(10)
        assert self.trouble is None, self.trouble

    @property
    def hold(self):
        return self.kueue.hold

    @hold.setter
    def hold(self, value):
        self.kueue.hold = value

    def admit(self):
        self.kueue.hold = False

    def evict(self, jobset, reason, message="evicted by a test"):
        self.kueue.evict(jobset, reason, message)

    def step(self):
        self.nodes.step()
        self.jobs.step()
        if not self.jobset_down:
            self.jobsets.step()
        self.kueue.step()

    def _webhook(self):
        """Why no pod can be made: its webhooks' failurePolicy is Fail."""
        for down, hook, service in (
            (self.jobset_down, "mpod.kb.io", "jobset-webhook-service.jobset-system"),
            (self.kueue.down or bool(self.kueue.refused), "mpod.kb.io", "kueue-webhook-service.kueue-system"),
        ):
            if down:
                words = f'no endpoints available for service "{service.partition(".")[0]}"'
                return f'Internal error occurred: failed calling webhook "{hook}": failed to call webhook: {words}'
        return None

    def _loop(self):
        while not self.stopping.wait(0.2):
            try:
                self.step()
            except OSError:
                time.sleep(0.5)
            except Exception as error:
                self.trouble = repr(error)
                raise
