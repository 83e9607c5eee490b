"""What ``up`` and ``down`` are doing, as a tree: events in, rows out. Pure: no terminal.

::

    engine --(Began, Changed, Said)--> Tree.take      Tree.rows(now) -> [Row(key, parent, state, text, seconds)]

The picture is the real graph of resources: each is below the deepest of those it needs, and names the others it
waits for. Making goes from the roots down, removing from the leaves up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from muster.backends.cluster import Began, Changed, Event, Planned, Progress, Said, Step

State = Literal["pending", "active", "done", "trouble"]

__all__ = ["Began", "Changed", "Event", "Planned", "Progress", "Row", "Said", "Tree", "parents"]

STATES: dict[Step, tuple[State, str]] = {
    "absent": ("pending", ""),
    "looking": ("active", "looking"),
    "making": ("active", "creating"),
    "waiting": ("active", "not ready yet"),
    "replacing": ("active", "replacing"),
    "removing": ("active", "deleting"),
    "there": ("done", "there"),
    "gone": ("done", "gone"),
    "kept": ("done", "kept"),
    "differs": ("trouble", "differs"),
    "failed": ("trouble", "failed"),
}
NAMED = 2
"""How many of those that something waits for are named; the rest are counted."""


@dataclass(frozen=True, kw_only=True)
class Row:
    key: str
    parent: str | None
    state: State
    text: str
    seconds: float | None
    """In its present step, or for a finished one since it was begun; None: nothing was done, or not yet."""


@dataclass
class _Node:
    planned: Planned
    step: Step | None = None
    text: str = ""
    since_s: float = 0.0
    begun_s: float | None = None
    """When work on it began that takes time: a mere look is none."""
    existed: bool = False


@dataclass
class Tree:
    """Folds events. ``at_s`` is any clock that goes forward; all methods use the same."""

    title: str = ""
    making: bool = True
    began_s: float = 0.0
    _nodes: dict[str, _Node] = field(default_factory=dict)
    _parents: dict[str, str | None] = field(default_factory=dict)

    def take(self, event: Event, at_s: float) -> None:
        """Fold one event; an unknown key and a sentence change nothing."""
        if isinstance(event, Began):
            self.title, self.making, self.began_s = event.title, event.making, at_s
            self._nodes = {node.key: _Node(planned=node) for node in event.nodes}
            self._parents = parents(event.nodes)
        elif isinstance(event, Changed) and (node := self._nodes.get(event.key)) is not None:
            self._change(node, event, at_s)

    def rows(self, now_s: float) -> list[Row]:
        """Every resource, parents before their children."""
        below: dict[str | None, list[str]] = {}
        for key, parent in self._parents.items():
            below.setdefault(parent, []).append(key)
        result: list[Row] = []
        todo = list(reversed(below.get(None, [])))
        while todo:
            key = todo.pop()
            result.append(self._row(key, now_s))
            todo.extend(reversed(below.get(key, [])))
        return result

    def bills(self) -> list[Planned]:
        """What costs by the hour as far as is known: it is there, or is being made or removed."""
        return [node.planned for node in self._nodes.values() if node.planned.bills and node.existed]

    def _change(self, node: _Node, event: Changed, at_s: float) -> None:
        if event.step != node.step:
            node.since_s = at_s
        if event.step in ("making", "waiting", "replacing", "removing") and node.begun_s is None:
            node.begun_s = at_s
        if event.step in ("making", "waiting", "replacing", "removing", "there", "kept"):
            node.existed = True
        elif event.step in ("gone", "absent"):
            node.existed = False
        node.step, node.text = event.step, event.text

    def _row(self, key: str, now_s: float) -> Row:
        node = self._nodes[key]
        state, text = STATES[node.step] if node.step else ("pending", "")
        seconds: float | None = None
        if state == "pending":
            text = self._waits_for(node)
        elif state == "active":
            seconds = now_s - node.since_s
        elif node.begun_s is not None:
            seconds = node.since_s - node.begun_s
        text = f"{text}: {node.text}" if node.text else text
        return Row(key=key, parent=self._parents[key], state=state, text=text, seconds=seconds)

    def _waits_for(self, node: _Node) -> str:
        names = self._before(node.planned)
        open_ = [key for key in names if (step := self._nodes[key].step) is None or STATES[step][0] != "done"]
        if not open_:
            return "next"
        more = f" and {len(open_) - NAMED} more" if len(open_) > NAMED else ""
        return "waiting for " + ", ".join(open_[:NAMED]) + more

    def _before(self, planned: Planned) -> Sequence[str]:
        """What has to be done before it: what it needs, or when removing what needs it."""
        if self.making:
            return [key for key in planned.needs if key in self._nodes]
        return [key for key, node in self._nodes.items() if planned.key in node.planned.needs]


def parents(nodes: Sequence[Planned]) -> dict[str, str | None]:
    """The parent of each:  the deepest of its needs, of equals the last."""
    known = {node.key: node for node in nodes}
    depths: dict[str, int] = {}

    def depth(key: str) -> int:
        if key not in depths:
            depths[key] = 1 + max((depth(need) for need in known[key].needs if need in known), default=-1)
        return depths[key]

    result: dict[str, str | None] = {}
    for node in nodes:
        needs = [need for need in node.needs if need in known]
        result[node.key] = max(reversed(needs), key=depth, default=None)
    return result
