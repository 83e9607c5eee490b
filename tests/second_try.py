"""A second try for live tests, where ``MUSTER_SECOND_TRY`` is set: ``./setup.sh test`` and CI.

Live tests depend on how busy the machine is. One that fails is run once more at the end, alone, in a process of its
own; failing twice fails the run. No other test gets that, and none where more than ``MOST`` live tests failed: then it
is not the machine. The summary names every test that passed only so, with the end of its first failure.

``MUSTER_SECOND_TRY`` is a file: every test that failed is added to it, with how it ended (``.ci/run`` prints it).
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from worker_crash import CRASHED

NOTES = os.environ.get("MUSTER_SECOND_TRY")
MOST = 4
LAST_LINES = 15
#: Also the outcome that pytest's last line counts.
SECOND = "passed only on the second try"
FAILURES = ("failed", "error")


@pytest.hookimpl(trylast=True)  # when the workers have ended, and with them what they share
def pytest_sessionfinish(session, exitstatus):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not NOTES or reporter is None or hasattr(session.config, "workerinput"):
        return
    failed = {report.nodeid: report for outcome in FAILURES for report in reporter.stats.get(outcome, ())}
    live = [test for test, report in failed.items() if "live" in getattr(report, "keywords", ())]
    ends = {test: "crashed" if report.when == CRASHED else "failed" for test, report in failed.items()}
    if exitstatus == pytest.ExitCode.TESTS_FAILED and len(live) <= MOST:
        for test in live:
            reporter.section(f"second try: {test}")
            reporter.flush()
            ends[test] = SECOND if passes(test, session.config.rootpath) else "failed twice"
    elif live:
        ends |= dict.fromkeys(live, f"failed, one of {len(live)} live tests: too many for second tries")
    for test, end in ends.items():
        if end == SECOND:
            forgive(reporter, test)
    if failed and set(ends.values()) == {SECOND}:
        session.exitstatus = pytest.ExitCode.OK
    with Path(NOTES).open("a") as file:
        file.writelines(f"{end.upper()}: {test}\n{in_short(failed[test])}\n" for test, end in ends.items())


def passes(test, root):
    """Whether it passes now: neither skipped nor left out."""
    with tempfile.TemporaryDirectory() as folder:
        ran = Path(folder) / "ran"
        env = {**os.environ, "MUSTER_TESTS_RAN": str(ran), "MUSTER_SECOND_TRY": ""}
        argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "", "-n", "0", test]
        code = subprocess.run(argv, cwd=root, env=env, check=False).returncode
        return code == 0 and test in ran.read_text().splitlines()


def forgive(reporter, test):
    for outcome in FAILURES:
        reports = reporter.stats.pop(outcome, [])
        reporter.stats.setdefault(SECOND, []).extend(report for report in reports if report.nodeid == test)
        if left := [report for report in reports if report.nodeid != test]:
            reporter.stats[outcome] = left


def in_short(report):
    """What failed, and the last lines of how; of a fatal error the first, where the thread is that died."""
    if report.when == CRASHED:
        return "\n".join(f"    {line[:400]}" for line in whole(report).splitlines()[:LAST_LINES])
    crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", "").splitlines()[:3]
    lines = [*crash, "...", *whole(report).rstrip().splitlines()[-LAST_LINES:]]
    return "\n".join(f"    {line[:400]}" for line in lines)


def whole(report):
    return "\n".join([*(f"--- {name}\n{text}" for name, text in report.sections), report.longreprtext])


def pytest_terminal_summary(terminalreporter):
    found = terminalreporter.stats.get(SECOND, [])
    for report in found:
        terminalreporter.section(f"first failure of {report.nodeid}")
        terminalreporter.write_line(whole(report))
    if found:
        terminalreporter.section(f"LIVE TESTS THAT {SECOND.upper()}")
    for report in found:
        terminalreporter.write_line(f"{report.nodeid}\n{in_short(report)}")
