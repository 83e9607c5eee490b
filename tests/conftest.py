"""Makes the folder's modules importable (``from fakes.gcs import GcsFake``); which tests run, in which order.

``sizes`` has the tables. Soak tests run only when ``-m`` names them. Among several workers (``-n``) live tests go
first: they take up to minutes each, and what is short fills the gaps at the end.

``MUSTER_TESTS_RAN``, a file: a test that ran is added to it, and one that is in it already is left out, so that no test
runs twice where several commands run one after the other (``.ci/run``).
"""

import os
import signal
import sys
from pathlib import Path

import pytest
import second_try
import sizes
import worker_crash

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.plugin import outcomes, times

LIVE = Path(__file__).parent / "live"
RAN = os.environ.get("MUSTER_TESTS_RAN")


def pytest_configure(config):
    for marker in ("reads(*patterns): files of the repository that the test file opens or lists",
                   "loads(*modules): what it loads by name or starts as a program"):  # fmt: skip
        config.addinivalue_line("markers", marker)
    config.pluginmanager.register(second_try)
    config.pluginmanager.register(worker_crash)
    if times.TIMES:
        config.pluginmanager.register(times)
    if outcomes.FAILED:
        config.pluginmanager.register(outcomes)
    if os.environ.get("MUSTER_RECORD"):
        from tests.plugin import recorder

        config.pluginmanager.register(recorder)
    # A shell's background job ignores Ctrl-C, and so does all that it starts: `muster logs -f` would not end.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items):
    sizes.mark(items)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: LIVE not in item.path.parents)
    ran = frozenset(Path(RAN).read_text().splitlines()) if RAN and Path(RAN).exists() else ()
    everything = "soak" in (config.option.markexpr or "")
    left_out = [item for item in items if item.nodeid in ran or (item.get_closest_marker("soak") and not everything)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    """An earlier step may have run everything that was asked for: that is no mistake."""
    if RAN and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_unconfigure(config):
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if RAN and reporter is not None and not hasattr(config, "workerinput"):
        outcomes = ("passed", second_try.SECOND, *second_try.FAILURES)
        reports = [report for outcome in outcomes for report in reporter.stats.get(outcome, ())]
        with Path(RAN).open("a") as file:
            file.writelines(f"{test}\n" for test in dict.fromkeys(report.nodeid for report in reports))
