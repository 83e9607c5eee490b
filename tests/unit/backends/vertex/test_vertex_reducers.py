"""How many machines of Reduction Server ``auto`` takes, and why not."""

import pytest
from vertex_cases import placement, spec

from muster.backends.vertex import reducers
from muster.backends.vertex.custom_job import requests
from muster.backends.vertex.run_file_rules import rules, warnings

AUTO = {"vertex": {"reduction_servers": "auto"}}


def asked(machine="a2-highgpu-8g", mode="on_demand", hosts=8, **changes):
    changes = {"parallelism": {"dp_replicate": hosts}, **AUTO, **changes}
    return placement(spec(machine, mode, hosts=hosts, **changes))


@pytest.mark.parametrize("hosts, machines", [(8, 25), (5, 16)])
def test_as_many_as_google_sizes_them(hosts, machines):
    """Google's own examples: 8 and 5 hosts of 100 Gbps."""
    of = asked(hosts=hosts)
    assert reducers.count(of) == machines and not list(rules(of.spec))
    pool = requests(of)[0].body["jobSpec"]["workerPoolSpecs"][2]
    assert (pool["replicaCount"], pool["machineSpec"]) == (str(machines), {"machineType": "n1-highcpu-16"})
    (said,) = [one.message for one in warnings(of) if one.key == "vertex.reduction_servers"]
    assert said.startswith(f"auto takes {machines} n1-highcpu-16") and f"{machines * 16} of the quota" in said


@pytest.mark.parametrize(
    "of, why",
    [
        (asked(hosts=2), "a ring moves no more"),
        (asked("a3-megagpu-8g"), "GPUDirect"),
        (asked("a3-highgpu-8g"), "not documented"),
        (asked(mode="flex_start"), "flex-start"),
        (asked(hosts=1), "one host"),
        (asked("n1-standard-4"), "no GPUs"),
        (asked(parallelism={"dp_replicate": 1}), "sharded across hosts"),
        (asked("a2-ultragpu-4g"), "not in the table"),
        (asked("a2-highgpu-8g", command=["train.py"]), "your program"),
    ],
)
def test_none_where_they_do_not_help_and_no_error(of, why):
    assert reducers.count(of) == 0 and why in reducers.sentence(of)
    assert not [one for one in rules(of.spec) if one.key == "vertex.reduction_servers"]
    assert len(requests(of)[0].body["jobSpec"]["workerPoolSpecs"]) <= 2


def test_the_plan_says_what_they_may_save_and_what_they_cost():
    of = asked("a2-highgpu-8g", hosts=8)
    # 16 GB of gradients, 2 x 7/8 - 1 = 0.75 of them less over 12.5 GB/s a host: about a second.
    cheap = reducers.worth(of, step_s=2.0, usd_per_hour=8 * 29.39)
    assert cheap.startswith("Reduction Server may pay: at most 0.9") and "25 n1-highcpu-16 cost about $16.39" in cheap
    assert "does not pay" in reducers.worth(of, step_s=60.0, usd_per_hour=8 * 29.39)
    assert "none: a2" not in cheap
    assert "GPUDirect" in reducers.worth(asked("a3-megagpu-8g"), step_s=1.0, usd_per_hour=1.0)
