"""Reading a run file with the rules of its back end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from muster import backends
from muster.backends.backend import SECTIONS
from muster.config import load as config
from muster.config.load import Loaded
from muster.config.spec import RunSpec
from muster.core.errors import Problem, UsageError


def load(path: str | Path, overrides: Sequence[str] = (), *, environment: bool = True) -> Loaded:
    """Read and check a run file whole; with ``environment``, this machine's files and folders too.

    Raises:
        RunFileError: everything that is wrong, in the order of the file.
        UsageError: there is no such file, or it is not text.
    """
    return config.load(path, overrides, environment=environment, site=_BackendRules())


def loads(text: str, overrides: Sequence[str] = (), *, source: str = "run file", environment: bool = True) -> Loaded:
    """``load`` for a text."""
    return config.loads(text, overrides, source=source, environment=environment, site=_BackendRules())


class _BackendRules:
    """``config.load.Site`` for the back end that the run file names."""

    def problems(self, spec: RunSpec, *, environment: bool) -> Iterator[Problem]:
        try:
            backend = backends.get(spec.backend)
        except UsageError as error:
            yield Problem(key="backend", message=str(error), value=spec.backend, hint=error.hint)
            return
        yield from backend.rules(spec)
        if environment:
            yield from backend.host_checks(spec)

    def unused(self, spec: RunSpec) -> Iterator[tuple[str, str]]:
        backend = backends.get(spec.backend)
        yield from backend.unused_settings(spec)
        for section in SECTIONS - backend.sections:
            yield section, f"backend is {spec.backend}"
