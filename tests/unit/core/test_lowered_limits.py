"""Resource limits that somebody lowers while a process runs: put back where it may, else named."""

import subprocess
import sys

BEGIN = """
import os, resource
from muster.core import processes
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)  # nobody may raise a hard limit
before = processes.limits()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
"""


def said_by(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", BEGIN + program], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_soft_limit_is_put_back() -> None:
    program = """
resource.setrlimit(resource.RLIMIT_NOFILE, (16, hard))
print(repr(processes.restore_limits(before)))
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard))
"""
    assert said_by(program) == ["''", "True"]


def test_a_hard_limit_is_named_and_what_is_below_it_put_back() -> None:
    program = """
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 32))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
print(processes.restore_limits(before))
print(resource.getrlimit(resource.RLIMIT_NOFILE), soft, os.getpid())
"""
    words, found = said_by(program)
    limit, soft, pid = found.rsplit(" ", 2)
    assert limit == "(32, 32)"
    assert f"RLIMIT_NOFILE of process {pid} was lowered from {soft} to 32" in words
    assert "OFILE of" not in words.replace("RLIMIT_NOFILE of", ""), "two names of one limit"


def test_one_that_was_raised_meanwhile_stays() -> None:
    program = """
resource.setrlimit(resource.RLIMIT_NOFILE, (16, hard))
low = processes.limits()
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(repr(processes.restore_limits(low)), resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard))
"""
    assert said_by(program) == ["'' True"]
