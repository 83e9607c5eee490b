"""``--nccl-tests`` with fakes of ``mpirun`` and NVIDIA's programs, which replay captured output, refuse, die and hang
in the words of the real ones (common.h and common.cu of nccl-tests)."""

import os
import sys
import time
from pathlib import Path

import pytest

from muster.app.inspect import nccl_tests
from muster.app.inspect.nccl_tests import launching, measured_by_nccl_tests
from muster.app.inspect.network_hosts import Place
from muster.health.hardware.nccl_tests import read_nccl_tests

CAPTURES = Path(__file__).resolve().parents[4] / "shared" / "data" / "oracles" / "nccl"
MIB, GIB = 1 << 20, 1 << 30
LADDER = tuple(MIB << number for number in range(14))
HOSTS = [(Place(name="node-0"), 8), (Place(name="node-1", address="10.0.0.2"), 8)]

MPIRUN = """\
#!/bin/sh
while [ $# -gt 0 ]; do
  case "$1" in
    --allow-run-as-root) shift ;;
    --host | -np) shift 2 ;;
    -*) echo "mpirun: Error: unknown option \\"$1\\"" >&2; exit 1 ;;
    *) break ;;
  esac
done
command -v "$1" > /dev/null && exec "$@"
cat >&2 <<'END'
--------------------------------------------------------------------------
mpirun was unable to find the specified executable file, and therefore
did not launch the job.  This error was first reported for process
rank 0; it may have occurred for other processes as well.
--------------------------------------------------------------------------
END
exit 1
"""

PROGRAM = """\
#!{python}
import getopt, os, pathlib, re, sys, time

given = dict(getopt.getopt(sys.argv[1:], "b:e:f:g:n:w:")[0])
first, last = int(given["-b"]), int(given["-e"])
pathlib.Path({folder!r}, "pid").write_text(str(os.getpid()))
mode = os.environ.get("FAKE", "")
if mode == "no GPU":
    print("node-0: Test CUDA failure common.cu:891 'no CUDA-capable device is detected'")
    print(" .. node-0 pid 112372: Test failure common.cu:1025")
    sys.exit(2)
rows = 0
for line in pathlib.Path({capture!r}).read_text().splitlines():
    size = re.match(r"\\s+(\\d+)\\s+\\d+\\s+float", line)
    if size and not first <= int(size[1]) <= last:
        continue
    rows += bool(size)
    if rows == 4 and mode == "dies":
        print("node-1: Test NCCL failure common.cu:1005 'unhandled system error (run with NCCL_DEBUG=INFO) / '")
        print(" .. node-1 pid 112372: Test failure common.cu:1080")
        sys.exit(3)
    if rows == 4 and mode == "hangs":
        time.sleep(600)
    line = re.sub(r"Rank  \\d", "Rank  0", line) if mode == "no MPI" else line
    print(re.sub(r"minBytes \\d+ maxBytes \\d+", f"minBytes {{first}} maxBytes {{last}}", line), flush=True)
"""


@pytest.fixture
def bin_folder(tmp_path, monkeypatch):
    """On the path before all others, with ``mpirun`` alone."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    install(tmp_path / "mpirun", MPIRUN)
    return tmp_path


@pytest.fixture
def programs(bin_folder):
    for collective in ("gather", "reduce"):
        capture = CAPTURES / f"nccl_all{collective}.log"
        if not capture.exists():
            pytest.skip(f"no capture {capture.name} at hand")
        text = PROGRAM.format(python=sys.executable, folder=str(bin_folder), capture=str(capture))
        install(bin_folder / f"all_{collective}_perf", text)
    return bin_folder


def install(path, text):
    path.write_text(text)
    path.chmod(0o755)


def measured(limit_s=60.0):
    """(what came of it, the tables, what was said)."""
    said = []
    result, tables = measured_by_nccl_tests(
        HOSTS, launching("", "env"), collectives=("all_gather", "all_reduce"), sizes=LADDER, limit_s=limit_s,
        say=said.append,
    )  # fmt: skip
    return result, tables, said


def test_figures_are_those_that_the_programs_print(programs):
    result, tables, said = measured()
    assert not result.failed and said == ["all_gather_perf on 2 hosts", "all_reduce_perf on 2 hosts"]
    assert [(one.collective, one.size_bytes) for one in result.sizes] == [
        (collective, size) for collective in ("all_gather", "all_reduce") for size in LADDER
    ]
    assert [round(one.busbw, 2) for one in result.sizes if one.size_bytes == 8 * GIB] == [223.39, 235.26]
    assert [len(read_nccl_tests(text).rows) for text in tables] == [14, 14]


def test_one_that_dies_says_why_and_its_rows_count(programs, monkeypatch):
    monkeypatch.setenv("FAKE", "dies")
    result, _, said = measured()
    assert "all_gather_perf: node-1: Test NCCL failure common.cu:1005 'unhandled system error" in result.failed
    assert [one.size_bytes for one in result.sizes] == [MIB, 2 * MIB, 4 * MIB] * 2 and len(said) == 2


def test_one_that_hangs_is_ended_after_a_row_s_limit(programs, monkeypatch):
    monkeypatch.setenv("FAKE", "hangs")
    monkeypatch.setattr(nccl_tests, "_START_S", 2.0)
    result, _, said = measured(limit_s=2.0)
    assert result.failed.startswith("all_gather_perf hangs after 4 MiB: no row within 4 s"), result
    assert [one.size_bytes for one in result.sizes] == [MIB, 2 * MIB, 4 * MIB]
    assert said == ["all_gather_perf on 2 hosts"], "the others would hang, too"
    pid, until = int((programs / "pid").read_text()), time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_one_that_refuses_is_tried_once(programs, monkeypatch):
    monkeypatch.setenv("FAKE", "no GPU")
    result, tables, said = measured()
    assert "no CUDA-capable device is detected" in result.failed and not result.sizes and not tables and len(said) == 1


def test_one_without_mpi_measures_no_network(programs, monkeypatch):
    """``mpirun`` starts it once for each rank, and each measures itself: figures of nothing, and no error."""
    monkeypatch.setenv("FAKE", "no MPI")
    result, tables, said = measured()
    assert "not built with MPI=1" in result.failed and not result.sizes and not tables and len(said) == 1


def test_programs_that_are_not_installed(bin_folder):
    result, tables, said = measured()
    assert "mpirun was unable to find the specified executable file" in result.failed and len(said) == 1
    assert not result.sizes and not tables


def test_no_mpirun(bin_folder):
    install(bin_folder / "mpirun", "#!/no/such/interpreter\n")
    assert "No such file" in measured()[0].failed


def test_how_they_are_started():
    limit = ["timeout", "--kill-after=10", "90"]
    mpirun = ["mpirun", "--allow-run-as-root", "--host", "node-0:8,10.0.0.2:8", "-np", "16"]
    assert launching("", "ssh {host}")(HOSTS, 90) == ["ssh", "node-0", *limit, *mpirun]
    assert launching("gke", "")(HOSTS, 90) == ["kubectl", "exec", "-i", "node-0", "--", *limit, *mpirun]
    assert launching("slurm", "")(HOSTS, 90) == [
        *limit, "srun", "--overlap", "--mpi=pmix", "--nodes=2", "--nodelist=node-0,node-1", "--ntasks=16",
        "--ntasks-per-node=8",
    ]  # fmt: skip
