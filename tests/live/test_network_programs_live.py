"""``muster check --network`` with programs on this machine for hosts: real collectives of gloo, real hangs."""

import json
import os
import sys
import time

import pytest

from muster.app.inspect.network import NetworkTest, check_network
from muster.app.inspect.network_hosts import Place, reaching
from muster.cli.main import run
from muster.core.processes import program
from muster.health.hardware.nccl_tests import read_nccl_tests
from muster.health.network.figures import COLLECTIVES
from muster.health.verdicts import Verdict

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
MIB = 1 << 20


def hosts(count):
    return [Place(name=f"host-{number}", address="127.0.0.1") for number in range(count)]


def of(result, check):
    return [one for one in result.findings if one.check == check]


def test_four_collectives_between_three_hosts_and_a_fourth_that_is_not_reached():
    said = []

    def argv(place):
        return ["sh", "-c", "echo no route to it >&2"] if place.name == "host-3" else reaching("", "env")(place)

    result = check_network(hosts(4), argv, NetworkTest(pair_bytes=MIB, largest_bytes=2 * MIB, say=said.append))
    (absent,) = of(result, "net.reach")
    assert (absent.host, absent.verdict) == ("host-3", Verdict.INCOMPLETE) and "no route to it" in absent.message
    tables = [read_nccl_tests(text) for text in result.tables]
    assert [table.collective for table in tables] == list(COLLECTIVES), result
    for table in tables:
        assert table.wrong_values == 0 and not table.missing and table.gpus == len(table.hosts) >= 2
        assert [row.size_bytes // 1000 for row in table.rows] == [1048, 2097] and table.largest.busbw > 0
    assert not of(result, "net.values") and not of(result, "net.group")
    assert said[0] == "3 of 4 hosts are ready" and result.rounds >= 3


HUNG = """\
import os, signal, time
from muster.probe import collectives, network

def waits_for_nothing(*figure):
    {what}

collectives._figure = waits_for_nothing
network.main()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("what", "seen"),
    [("time.sleep(600)", "hung.py:5"), ("os.kill(os.getpid(), signal.SIGSTOP)", "is stopped")],
    ids=["code", "stopped"],
)
def test_a_host_whose_ranks_hang_is_named_with_what_they_do(what, seen, tmp_path):
    if program("py-spy") is None:
        pytest.skip("needs py-spy")
    script = tmp_path / "hung.py"
    script.write_text(HUNG.format(what=what))

    def argv(place):
        if place.name == "host-2":
            return [sys.executable, "-P", str(script), "--address", place.address]
        return reaching("", "env")(place)

    test = NetworkTest(pair_bytes=MIB, largest_bytes=MIB, limit_s=5.0, collectives=("all_gather",))
    result = check_network(hosts(3), argv, test)
    (named,) = of(result, "net.host")
    assert (named.host, named.verdict) == ("host-2", Verdict.REPLACE), result
    assert "did not end within 5 s" in named.evidence and "on host-2" in named.evidence and seen in named.evidence
    assert len(result.tables) == 1, "the other two are measured"
    until = time.monotonic() + 20
    while left_of(script) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left_of(script), "its ranks are gone"


def left_of(script):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                found += [pid] if str(script) in file.read() else []
        except OSError:
            continue
    return found


def test_the_command_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
    words = ["--host", "a=127.0.0.1", "--host", "b=127.0.0.1", "--reach", "env", "--largest-mib", "1"]
    code = run(["check", "--network", *words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert len(found["tables"]) == 4 and code in (0, 1), found
    assert (tmp_path / "network.jsonl").read_bytes().count(b"\n") == 1
