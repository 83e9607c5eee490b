"""The one tree of errors that users can meet.

::

    MusterError                    1   the run or the command failed
    ├── UsageError                 2   bad command line, bad run file (RunFileError lists them all)
    ├── NoPlanError                3   nothing on offer fits the spec
    ├── CapacityError              4   no machines now; ``retry_after_s`` says when to ask again
    ├── AccessError                5   credentials, permissions, tokens
    ├── BackendError               6   the scheduler, the cloud or the host misbehaved
    ├── ConflictError              1   another process holds the name, the lease or the generation
    ├── CheckpointError            1   torn, truncated, foreign or unreadable checkpoint
    └── RunFailed                  1   the training itself failed; the verdict says why

An adapter translates a library's exception once (``raise CapacityError(...) from error``); only ``cli``
prints it, as one line and a hint, and only ``cli`` exits.
"""

from __future__ import annotations

import json
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "muster-gpu"  # `muster` on the Python package index is another project


class MusterError(Exception):
    """An error with a message for the user, a hint for the next step, and an exit code."""

    exit_code = 1
    asked = True
    """Of a submission: whether something may have been asked for before it failed. False: there is nothing to end."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(MusterError):
    """The command line or an argument cannot be used as given."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a run file: where, what, and what would be right."""

    key: str
    message: str
    _: KW_ONLY
    value: object = None
    line: int | None = None
    source: str = "run file"
    hint: str | None = None
    to_submit: bool = False
    """A name that has to be there before the run is submitted; a plan does without."""

    def render(self) -> str:
        """One line: ``RUN.yaml:12: training.steps: must be at least 1, got 0 (hint: ...)``."""
        place = f"{self.source}:{self.line}" if self.line is not None else self.source
        key = f" {self.key}:" if self.key else ""
        hint = f" (hint: {self.hint})" if self.hint else ""
        return f"{place}:{key} {self.message}{hint}".replace("\n", "\\n")  # a key may hold what it likes


class RunFileError(UsageError):
    """Everything wrong with a run file, all at once."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(problem.render() for problem in problems))

    def in_one_line(self) -> str:
        """Every key and what is wrong with it, for a row of a table; places and hints are left out."""
        return "; ".join(f"{problem.key}: {problem.message}" for problem in self.problems)


class NoPlanError(MusterError):
    """Nothing on offer fits what the spec asks for."""

    exit_code = 3


class CapacityError(MusterError):
    """No machines now."""

    exit_code = 4

    def __init__(self, message: str, *, hint: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class AccessError(MusterError):
    """Credentials, permissions or a run's token do not allow this."""

    exit_code = 5


class BackendError(MusterError):
    """The scheduler, the cloud or the host misbehaved."""

    exit_code = 6


class BusyError(BackendError):
    """The back end asks to come again later (429, 503, a connection that was reset): the same request may succeed."""


class ConflictError(MusterError):
    """A conditional write lost: another process wrote first, or holds the lease."""


class CheckpointError(MusterError):
    """A checkpoint is torn, truncated, foreign or unreadable."""


class RunFailed(MusterError):
    """The training failed; the message is the verdict."""


def first_line(error: Exception) -> str:
    """What a library's error says, as one line of a message of ours: the first of several, or its type's name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def install_command(extras: str) -> str:
    """The command that adds ``extras`` (comma-separated) to the Muster that is running.

    A clone has a program for it; what pip installed from a file, a folder or a URL is installed again from there (the
    index may not have it); only an installation from an index is named by the distribution alone.
    """
    if (Path(__file__).parents[3] / "setup.sh").is_file():
        return f"./setup.sh install {extras}"
    url, revision = _origin()
    if not url:
        return f"pip install '{DISTRIBUTION}[{extras}]'"
    if url.startswith("file:"):
        return f"pip install '{unquote(urlsplit(url).path)}[{extras}]'"
    return f"pip install '{DISTRIBUTION}[{extras}] @ {revision or url}'"


def _origin() -> tuple[str, str]:
    """The URL that pip installed from, and the same with the revision of a repository; empty for an index (PEP 610)."""
    import importlib.metadata  # 20 ms that `muster --help` does without

    try:
        record = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        record = None
    if record is None:
        return "", ""
    direct = json.loads(record)
    repository = direct.get("vcs_info")
    return direct["url"], f"{repository['vcs']}+{direct['url']}@{repository['commit_id']}" if repository else ""
