"""What a process opens, lists and loads of this repository, for ``tests/plugin/recorder.py``.

On ``PYTHONPATH`` it is imported by every Python that a test starts (not with ``-I``, ``-E``, ``-S`` or an environment
made from nothing). Needs Python alone. The hook runs in forked ranks too: it takes no lock and writes each fact once,
by one ``write``.
"""

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))) + os.sep
WATCHED = frozenset(("open", "os.listdir", "os.scandir"))
NOT_OURS = tuple(
    ROOT + name for name in (".git/", ".venv", ".cache/", ".hypothesis/", ".pytest_cache/", ".mypy_cache/")
)
#: Readers of sources that only show them: tracebacks, hypothesis (constants of loaded modules), the import system.
SHOWS = (
    "linecache.py",
    "tokenize.py",
    "/inspect.py",
    "/hypothesis/",
    "/_pytest/",
    "<frozen importlib",
    "importlib/metadata",
)


class Recorder:
    """Appends ``test file TAB kind TAB path`` to the file that ``MUSTER_RECORD`` names."""

    def __init__(self, path: str) -> None:
        self.test = os.environ.get("MUSTER_TEST_FILE", "")
        self.seen: set = set()
        self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def set_test(self, test: str) -> None:
        if test != self.test:
            self.test = test
            self.seen.clear()
            if test:
                os.environ["MUSTER_TEST_FILE"] = test
            else:
                os.environ.pop("MUSTER_TEST_FILE", None)

    def note(self, kind: str, path: str) -> None:
        if self.test and (kind, path) not in self.seen:
            self.seen.add((kind, path))
            try:
                os.write(self.descriptor, f"{self.test}\t{kind}\t{path}\n".encode(errors="replace"))
            except OSError:  # a daemon closed what it inherited
                self.test = ""

    def hook(self, event: str, args: tuple) -> None:
        if event in WATCHED and self.test and args[0] is not None:
            try:
                path = os.fsdecode(args[0])
            except TypeError:  # a descriptor
                return
            if not path.startswith(os.sep):
                try:
                    path = os.path.join(os.getcwd(), path)
                except OSError:
                    return
            if path.startswith(ROOT) and not path.startswith(NOT_OURS):
                self.of_the_repository(event, path)

    def of_the_repository(self, event: str, path: str) -> None:
        if event == "open":
            if "/__pycache__/" in path:  # loaded: its source is what counts
                folder, _, name = path.rpartition("/__pycache__/")
                path = f"{folder}/{name.partition('.')[0]}.py"
            elif path.endswith(".py") and _is_shown():
                return
            self.note("open", os.path.normpath(path)[len(ROOT) :])
        elif not _is_shown():
            self.note("list", os.path.normpath(path)[len(ROOT) :])


def _is_shown() -> bool:
    """Whether one of ``SHOWS`` asked, rather than code of ours that called it through others."""
    try:
        frame = sys._getframe(3)
    except ValueError:  # the interpreter opens the program
        return False
    while frame is not None:
        file = frame.f_code.co_filename
        if any(part in file for part in SHOWS):
            return True
        if file == "<string>" or (file.startswith(ROOT) and not file.startswith(NOT_OURS)):
            return False
        frame = frame.f_back
    return False


def install() -> "Recorder | None":
    """The recorder of this process, made once; None where ``MUSTER_RECORD`` is not set."""
    path = os.environ.get("MUSTER_RECORD")
    if path and not hasattr(sys, "_muster_recorder"):
        sys._muster_recorder = Recorder(path)
        sys.addaudithook(sys._muster_recorder.hook)
    return getattr(sys, "_muster_recorder", None)


install()
