"""Operations of the fake cloud: things that take a few looks, can fail, and can be cancelled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fakes.discovery import Match

from muster.backends.google.http import Reply


@dataclass
class Operation:
    """Something that takes ``looks`` looks; then ``finish`` happens."""

    body: dict[str, Any]
    looks: int
    finish: Callable[[bool], None]
    error: dict[str, Any] | None = None
    busy: str | None = None
    failed: bool = False
    """Cancelled on the way."""


@dataclass(kw_only=True)
class Operations:
    """What was begun, by name. Time goes on when somebody looks, or is refused because something is busy."""

    looks: int = 1
    """How often an operation is looked at before it is over."""
    operations: dict[str, Operation] = field(default_factory=dict)

    def begin(
        self,
        folder: str,
        body: dict[str, Any],
        finish: Callable[[bool], None],
        *,
        error: tuple[str, str] | None = None,
        busy: str | None = None,
        api: str = "",
        name: str | None = None,
        target: str | None = None,
        looks: int | None = None,
    ) -> Reply:
        number = f"operation-{len(self.operations) + 1}"
        place = "/".join(folder.split("/")[: 6 if "regions" in folder else 5])
        link = target or f"{folder}/{body.get('name', '')}"
        if api == "compute.v1":
            row: dict[str, Any] = {"name": number, "operationType": "insert", "status": "RUNNING", "targetLink": link}
            row["selfLink"] = f"https://compute.googleapis.com/{place}/operations/{number}"
            words = {"errors": [{"code": error[0], "message": error[1]}]} if error else None
        elif api == "container.v1":
            row = {"name": number, "operationType": "CREATE_NODE_POOL", "status": "RUNNING", "targetLink": link}
            words = {"code": 8, "message": f"{error[0]}: {error[1]}"} if error else None
        else:
            row = {
                "name": name or f"{folder.rpartition('/')[0].removeprefix('v1/')}/operations/{number}",
                "done": False,
            }
            words = {"code": 8, "message": f"{error[0]}: {error[1]}"} if error else None
        operation = Operation(row, self.looks if looks is None else looks, finish, words, busy)
        self.operations[str(row["name"]).rpartition("/")[2]] = operation
        if operation.looks == 0:
            self._finish(operation)
        return Reply(status=200, body=row)

    def look(self, match: Match) -> Reply:
        name = next(match.path[key] for key in ("operation", "operationsId") if key in match.path)
        operation = self.operations[name]
        self._advance(operation)
        return Reply(status=200, body=operation.body)

    def cancel(self, match: Match) -> Reply:
        """GKE stops creating a node pool; the pool stays, in error."""
        operation = self.operations[match.path["operationsId"]]
        if operation.looks > 0:
            operation.error = {"code": 1, "message": "Operation was cancelled by user."}
            operation.failed = True
            operation.looks = 1
            self._advance(operation)
        return Reply(status=200, body={})

    def advance(self, which: Callable[[Operation], bool]) -> None:
        """A refusal for being busy makes callers wait, and what they wait for goes on meanwhile."""
        for operation in [one for one in self.operations.values() if which(one)]:
            self._advance(operation)

    def pass_time(self) -> None:
        """What was begun goes on while nobody looks: between one run of the program and the next."""
        for operation in self.operations.values():
            while operation.looks > 0:
                self._advance(operation)

    def _advance(self, operation: Operation) -> None:
        if operation.looks > 0:
            operation.looks -= 1
            if operation.looks == 0:
                self._finish(operation)

    def _finish(self, operation: Operation) -> None:
        operation.finish(operation.failed)
        operation.busy = None
        if "status" in operation.body:
            operation.body["status"] = "DONE"
        else:
            operation.body["done"] = True
        if operation.error:
            operation.body["error"] = operation.error

    def pending(self, path: str) -> bool:
        return any(one.body.get("targetLink", "").endswith(path) for one in self.operations.values() if one.looks > 0)
