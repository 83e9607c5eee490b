"""Which test files did not pass as a whole: a pytest plugin, where ``MUSTER_FAILED`` names a file for them (JSON).

Nothing is written where the run was interrupted, or stopped at its first failure: then it is not known.
"""

import json
import os
from pathlib import Path

import pytest

FAILED = os.environ.get("MUSTER_FAILED")
_FILES: set[str] = set()


def pytest_runtest_logreport(report):
    if report.failed:  # a test whose worker crashed included
        _FILES.add(report.nodeid.partition("::")[0])


def pytest_collectreport(report):
    if report.failed:
        _FILES.add(report.nodeid.partition("::")[0])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    ended = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    if exitstatus in ended and not hasattr(session.config, "workerinput"):
        Path(FAILED).write_text(json.dumps(sorted(_FILES)))
