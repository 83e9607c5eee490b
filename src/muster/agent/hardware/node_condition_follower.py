"""Errors of the GPU driver as GKE has seen them, where this host's kernel log may not be followed.

The node's condition holds the numbers of Xids, neither their GPUs nor how often they came, and GKE puts 48 alone there
unless it is told more: less than the log, but no privilege is needed. A number is an error when it appears; those that
stood there before this agent are not judged, as what the kernel log holds of the past is not.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from datetime import datetime

from muster.agent.ranks.rank_process import end_child
from muster.core.typed_json import Unreadable
from muster.health.hardware.kernel_log import KernelFault
from muster.health.hardware.node_condition import CONDITION, fault_of, numbers_in
from muster.protocol.codec import reader_of
from muster.protocol.pipes import NODE_CONDITIONS, NodeCondition
from muster.transport.connections import ConnectionPool

WATCHER = "muster.backends.gke.pod.node_watcher"
_decode = reader_of(NODE_CONDITIONS)


class NodeConditionFollower:
    """Owns the program that asks the API server; it ends with its standard input."""

    def __init__(
        self,
        *,
        node: str,
        hub: ConnectionPool,
        start_program: Callable[..., subprocess.Popen[bytes]],
        on_fault: Callable[[KernelFault], None],
        note: Callable[[str], None],
        arguments: tuple[str, ...] = (),
    ) -> None:
        """``arguments``: of the program, besides the node."""
        self._node, self._hub, self._start_program = node, hub, start_program
        self._on_fault, self._note, self._arguments = on_fault, note, arguments
        self._begun_s = time.time()
        self._known: set[int] = set()
        self._child: subprocess.Popen[bytes] | None = None
        self._fd = -1
        self._buffer = b""

    def start(self) -> None:
        """Begin; never raises."""
        try:
            child = self._start_program(
                "node", WATCHER, self._node, *self._arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        except OSError as error:
            self._note(f"{WATCHER}: {error.strerror}")
            return
        assert child.stdout is not None
        self._child, self._fd = child, child.stdout.fileno()
        os.set_blocking(self._fd, False)
        self._hub.watch(self._fd, self._on_output)

    def shutdown(self) -> None:
        """End the program."""
        self._leave()
        end_child(self._child)

    def _leave(self) -> None:
        if self._fd >= 0:
            self._hub.unwatch(self._fd)
            self._fd = -1

    def _on_output(self) -> None:
        try:
            output = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        if not output:
            self.shutdown()
            self._note(f"{WATCHER} ended, so an Xid of a GPU is not seen")
            return
        *lines, self._buffer = (self._buffer + output).split(b"\n")
        for line in lines:
            try:
                self._on_condition(_decode(line))
            except Unreadable as error:
                self._note(f"a word of {WATCHER}: {error}")

    def _on_condition(self, found: NodeCondition) -> None:
        if found.problem:
            self._note(
                f"node {self._node} is not read, so an Xid of a GPU is not seen: {found.problem} "
                "(its pod's account needs get on nodes)"
            )
            return
        if found.status != "True":  # another boot: what comes now is new
            self._known.clear()
            return
        said = f"node {self._node}: {CONDITION} {found.reason} since {found.since}"
        numbers = numbers_in(found.reason)
        if not numbers:
            self._note(f"{said} cannot be read")
        first, new = not self._known, [number for number in numbers if number not in self._known]
        self._known.update(numbers)
        if new and first and _seconds(found.since) < self._begun_s:
            self._note(f"{said}: from before this agent, not judged")
            return
        for number in new:
            self._on_fault(fault_of(number, said, time.time()))


def _seconds(since: str) -> float:
    """RFC 3339 in Unix seconds; what cannot be read counts as now."""
    try:
        return datetime.fromisoformat(since.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return time.time()
