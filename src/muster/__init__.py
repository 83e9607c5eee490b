"""Muster: assemble GPUs, train on them, keep the run alive, account for every second and dollar.

The verbs of the command line as functions, with the values that ``--json`` prints (``to_json``)::

    import muster
    run_id = muster.submit("run.yaml", ["training.steps=100"]).run.run_id
    print(muster.status(run_id).to_json()["state"])

Each is imported when it is first used. ``muster.api`` has the rest of them and their types; ``muster.run`` is for
training loops of your own.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

__version__ = "0.2.1"
_VERBS = ("down", "events", "plan", "recover", "report", "status", "stop", "submit", "train")
_PACKAGES = ("plan", "report", "train")
"""Verbs whose name is that of a package of Muster's own, too."""
__all__ = ["__version__", "api", *_VERBS]


class CallablePackage(ModuleType):
    """A package that is a verb when it is called: importing one of its modules binds the package to that name."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The verb of this name."""
        return self._verb(*args, **kwargs)

    @property
    def _verb(self) -> Callable[..., object]:
        api, name = importlib.import_module("muster.app.api"), self.__name__.rpartition(".")[2]
        verb: Callable[..., object] = getattr(api, name)
        return verb

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._verb)

    @property
    def __doc__(self) -> str:  # type: ignore[override]  # read by help() and by a notebook's ``muster.plan?``
        return f"{self.__name__}{self.__signature__}\n\n{inspect.getdoc(self._verb)}"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name == "api":  # imported when it is asked for: ``import muster`` stays cheap
        return importlib.import_module("muster.app.api")
    if name in _PACKAGES:
        return importlib.import_module(f"muster.{name}")
    if name in _VERBS:
        return getattr(importlib.import_module("muster.app.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
