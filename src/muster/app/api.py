"""Muster from Python: the verbs of the command line as functions, and the types they take and return.

::

    from muster.app import api          # or: import muster; muster.api
    run = api.submit(api.load("run.yaml", ["training.steps=100"])).run
    print(api.status(run.run_id).status.reason)

A name is imported when it is first used: importing this module costs nothing. The imports for type checkers are the
list of names.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muster.app.inspect.checkpoints import checkpoints as checkpoints
    from muster.app.inspect.logs import events as events
    from muster.app.inspect.logs import logs as logs
    from muster.app.inspect.report import report as report
    from muster.app.inspect.status import all_runs as all_runs
    from muster.app.inspect.status import status as status
    from muster.app.inspect.watch import watch as watch
    from muster.app.planning.plan import plan as plan
    from muster.app.run.event_writer import Sink as Sink
    from muster.app.run.exec import execute as execute
    from muster.app.run.export import export as export
    from muster.app.run.recover import recover as recover
    from muster.app.run.script_output import shown as shown
    from muster.app.run.stop import down as down
    from muster.app.run.stop import restart as restart
    from muster.app.run.stop import stop as stop
    from muster.app.run.submit import preview as preview
    from muster.app.run.submit import submit as submit
    from muster.app.run.train import train as train
    from muster.app.web.watch_page import watch_page as watch_page
    from muster.backends.backend import Backend as Backend
    from muster.backends.cluster import Cluster as Cluster
    from muster.backends.protocols import Terminal as Terminal
    from muster.config.load import Loaded as Loaded
    from muster.config.load import load as load
    from muster.config.spec import RunSpec as RunSpec
    from muster.core import event_log
    from muster.core.errors import MusterError as MusterError
    from muster.core.errors import Problem as Problem
    from muster.core.errors import RunFileError as RunFileError
    from muster.core.errors import UsageError as UsageError
    from muster.core.event_log import Damage as Damage
    from muster.core.events import Event as Event
    from muster.core.redact import printable as printable
    from muster.core.redact import redact as redact
    from muster.report.render.terminal import Console as Console
    from muster.report.run_view import RunView as RunView
    from muster.storage import run_registry
    from muster.storage.run_registry import RunDir as RunDir

    damage_in_words = event_log.in_words
    find_run = run_registry.find


def _listed() -> dict[str, tuple[str, str]]:
    """Name -> the module that has it, and its name there."""
    (block,) = (node for node in ast.parse(inspect.getsource(sys.modules[__name__])).body if isinstance(node, ast.If))
    listed: dict[str, tuple[str, str]] = {}
    for node in block.body:
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                listed |= {each.name: (module, each.name) for each in names}
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute(value=ast.Name(id=owner), attr=there)):
                listed[name] = (".".join(listed[owner]), there)
    return {name: place for name, place in listed.items() if name not in ("event_log", "run_registry")}


_NAMES = _listed()
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, there = _NAMES[name]
    return getattr(importlib.import_module(module), there)
