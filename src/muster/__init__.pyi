"""The types of what ``__init__.py`` imports when it is first used."""

from types import ModuleType

from muster.app import api as api
from muster.app.inspect.logs import events as events
from muster.app.inspect.report import report as report
from muster.app.inspect.status import status as status
from muster.app.planning.plan import plan as plan
from muster.app.run.recover import recover as recover
from muster.app.run.stop import down as down
from muster.app.run.stop import stop as stop
from muster.app.run.submit import submit as submit
from muster.app.run.train import train as train

__version__: str
__all__ = [
    "__version__", "api", "down", "events", "plan", "recover", "report", "status", "stop", "submit", "train",
]  # fmt: skip

class CallablePackage(ModuleType): ...
