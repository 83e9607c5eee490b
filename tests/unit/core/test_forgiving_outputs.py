"""What a program says to people cannot end it, nor change its exit code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SAYS = """
import sys
{first}
print("a line")
print("another", file=sys.stderr)
sys.exit({code})
"""
FIRST = "from muster.core.processes import forgive_outputs; forgive_outputs()"


def code_on_a_full_disk(*argv: str) -> int:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, *argv], stdout=full, stderr=full, env=env, check=False)
    return done.returncode


def test_a_full_disk_changes_no_exit_code() -> None:
    assert code_on_a_full_disk("-c", SAYS.format(first=FIRST, code=0)) == 0
    assert code_on_a_full_disk("-c", SAYS.format(first=FIRST, code=75)) == 75
    assert code_on_a_full_disk("-c", SAYS.format(first="", code=0)) == 120, "the test can fail"


def test_a_reader_that_has_left_changes_no_exit_code() -> None:
    with subprocess.Popen([sys.executable, "-c", SAYS.format(first=FIRST, code=3)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.close()
        assert child.wait(30) == 3


@pytest.mark.parametrize(
    "module",
    [
        "muster.app.supervisor", "muster.agent.watchdog", "muster.agent.host_agent",
        "muster.rank.fork_server", "muster.backends.slurm.batch", "muster.backends.slurm.node",
        "muster.backends.gke.pod.main",
    ],
)  # fmt: skip
def test_every_program_of_a_run_begins_so(module: str) -> None:
    """The parser's help is the first thing that any of them says."""
    assert code_on_a_full_disk("-m", module, "--help") == 0


def test_the_stream_is_what_it_was() -> None:
    script = f"{FIRST}; import sys; print(sys.stdout.fileno(), sys.stdout.isatty(), '\\xfc\\udc80', flush=True)"
    script += "; sys.stdout.buffer.write(b'raw')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout == "1 False \xfc\\udc80\nraw".encode()
