"""A second try for tests marked ``timing(reason)``, and only for those; the summary names every test that needed it.

Such a test depends on how fast the machine is just then, and says why. Whatever else fails has failed.
"""

import pytest
from _pytest.runner import runtestprotocol

PROPERTY = "first try failed"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    marker = item.get_closest_marker("timing")
    if marker is None or item.config.getoption("usepdb"):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    failed = next((report for report in reports if report.failed), None)
    if failed is not None:
        item.user_properties.append((PROPERTY, f"{failed.longreprtext.splitlines()[-1]} ({marker.args[0]})"))
        item._initrequest()  # fresh fixtures, as pytest-rerunfailures does it
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_terminal_summary(terminalreporter):
    tries = {
        report.nodeid: (report.outcome, value)
        for outcome in ("passed", "failed", "skipped")
        for report in terminalreporter.stats.get(outcome, ())
        for name, value in report.user_properties
        if name == PROPERTY and (report.when == "call" or report.outcome != "passed")
    }
    if tries:
        terminalreporter.section("tests that depend on the machine: the second try counted")
    for test, (outcome, first) in tries.items():
        terminalreporter.write_line(f"{test}: {outcome}; the first try: {first}")
