"""A worker of pytest-xdist that dies: the run goes on without the test that it ran, ends, and tells where it died.

xdist 3.8's scheduler of files puts all that a dead worker was ever given back into its queue, files that are done
included. A worker that is handed such a file has nothing to run, reports nothing and is given nothing more: the run
waits for ever at 99 %. It would also run the test again that killed the worker. ``Scheduler`` gives back only tests
that are left.

What Python says of a fatal error goes to a file of the worker's own, since the end of a log that many write to is often
not there: the failure of the test that ran has it, the thread that died first.
"""

import contextlib
import faulthandler
import os
import shutil
import tempfile
from pathlib import Path

import pytest

with contextlib.suppress(ImportError):  # without xdist nobody asks for a scheduler
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):
        """``--dist loadfile`` that survives its workers."""

        def remove_node(self, node):
            left = {scope: tests for scope, tests in self.assigned_work[node].items() if not all(tests.values())}
            if not left:
                return super().remove_node(node)
            del self.assigned_work[node]
            first = next(iter(left.values()))
            crashed = next(test for test, completed in first.items() if not completed)
            first[crashed] = True
            self.workqueue.update((scope, tests) for scope, tests in left.items() if not all(tests.values()))
            for other in self.nodes:
                self._reschedule(other)
            return crashed

        def add_node_collection(self, node, collection):
            """xdist gives a successor that finds other tests nothing to do, without a word: the last one would idle."""
            if self.collection_is_completed and list(collection) != self.collection:
                raise RuntimeError(f"worker {node.gateway.id} found other tests than the worker before it")
            super().add_node_collection(node, collection)

        def _reschedule(self, node):
            """A worker begins a test when it has the next one, or knows that there is none: with one it would wait."""
            if node not in self.registered_collections:
                return  # two successors at once: one of them still collects
            super()._reschedule(node)
            while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                self._assign_work_unit(node)


#: How a test ended that was never finished; the report's ``when``, as xdist has it.
CRASHED = "???"
LINES = 60
SCHEDULER = pytest.StashKey[object]()
DEATHS = pytest.StashKey[list[str]]()
FAULTS = pytest.StashKey[Path]()


def pytest_sessionstart(session):
    """After pytest's own plugin, which has faults written to the stderr that all workers share."""
    config = session.config
    if "faults" in getattr(config, "workerinput", ()):
        # Open for as long as the process runs: a fault may come after everything else.
        faulthandler.enable(os.open(config.workerinput["faults"], os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    stash = node.config.stash
    if FAULTS not in stash:
        stash[FAULTS] = Path(tempfile.mkdtemp(prefix="faults-"))
    node.workerinput["faults"] = str(stash[FAULTS] / node.gateway.id)


def pytest_unconfigure(config):
    if FAULTS in config.stash:
        shutil.rmtree(config.stash[FAULTS], ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") != "loadfile":
        return None
    config.stash[SCHEDULER] = scheduler = Scheduler(config, log)
    return scheduler


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    if error and error != "keyboard-interrupt":
        node.config.stash.setdefault(DEATHS, []).append(node.gateway.id)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    """A worker may die without a test, again and again, and nothing was run: xdist calls that a success."""
    no_failure = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if DEATHS in session.config.stash and session.exitstatus in no_failure:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem, report, sched):
    path = Path(report.node.workerinput["faults"])
    if path.exists() and (text := path.read_text(errors="replace")):
        report.sections.append(("what Python said of it", crashed_first(text)))


def crashed_first(text):
    """A fault's text with the thread that it came in before the others."""
    head, *threads = text.strip().split("\n\n")
    threads.sort(key=lambda thread: not thread.startswith("Current thread"))
    return "\n".join("\n\n".join([head, *threads]).splitlines()[:LINES])


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    ran = {r.node.gateway.id: r.nodeid for r in terminalreporter.stats.get("failed", ()) if r.when == CRASHED}
    if deaths := config.stash.get(DEATHS, []):
        terminalreporter.section("WORKERS THAT CRASHED, and the test that ran (or began) then")
    for worker in deaths:
        test = ran.get(worker, f"none: {worker} collected them, or had ended")
        terminalreporter.write_line(f"{test.partition('::')[0]}: {test}" if worker in ran else test)
    if exitstatus == pytest.ExitCode.INTERRUPTED and SCHEDULER in config.stash:
        terminalreporter.section("TESTS THAT RAN WHEN IT WAS INTERRUPTED")
        for files in config.stash[SCHEDULER].assigned_work.values():
            left = (test for tests in files.values() for test, completed in tests.items() if not completed)
            terminalreporter.write_line(next(left, "none"))
