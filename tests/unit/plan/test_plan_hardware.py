"""Prices of the run file, and the machine that ``muster`` runs on, as a plan takes them."""

import os
import re
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from muster.app.planning import hardware as use_case
from muster.app.planning.plan import plan
from muster.backends.local.launcher import LocalLauncher
from muster.catalog import rows
from muster.cli.drawn import plan_table
from muster.core.errors import NoPlanError
from muster.core.types import Offer

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
RUN = """\
name: eight
backend: {backend}
model:
  source: meta-llama/Llama-3.1-8B
data:
  sources:
    - {{type: random, rows: 100000}}
training:
  steps: 1000
  sequence_length: 4096
  global_batch_size: 64
"""
SMALL = """\
name: small
model:
  config: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4,
           num_key_value_heads: 4, vocab_size: 512, tie_word_embeddings: true}
  dtype: float32
data:
  sources:
    - {type: random, rows: 1000}
training: {steps: 1000, sequence_length: 128, global_batch_size: 8}
resources: {device: cpu, ranks_per_host: 2}
"""


@pytest.fixture
def planned(tmp_path):
    def planned(*overrides, text=None, backend="gke"):
        (tmp_path / "run.yaml").write_text(text or RUN.format(backend=backend))
        return plan(tmp_path / "run.yaml", overrides, now=NOW, home=tmp_path / "home")

    return planned


def a_machine_with(monkeypatch, count, name="NVIDIA H100 80GB HBM3"):
    offer = Offer(
        backend="local", machine="box", location="here", accelerator=name, gpus_per_node=count,
        gpu_memory_bytes=80 * 10**9, usd_per_node_hour=0.0, peak_flops_per_gpu=None, max_nodes=1, mode="owned",
    )  # fmt: skip
    monkeypatch.setattr(LocalLauncher, "offers", lambda self, spec: [offer])


PINNED = ("resources.machine=a3-megagpu-8g", "resources.provisioning_model=reservation", "resources.reservation=ours",
          "resources.locations=[us-central1]")  # fmt: skip


def test_a_committed_use_price_is_the_plans_price(planned):
    """A year's commitment enters as what a host costs by the hour: bill, limits and the run's settings follow it."""
    cheap = planned(*PINNED, "resources.usd_per_host_hour=24", "resources.hosts=2")
    assert cheap.plan.chosen.usd_per_hour == pytest.approx(48)
    assert cheap.plan.chosen.usd.p50 == pytest.approx(48 * cheap.plan.chosen.hours.p50)
    assert cheap.plan.settings["resources.usd_per_host_hour"] == 24
    assert cheap.plan.chosen.price.source == "resources.usd_per_host_hour"
    dear = planned(*PINNED, "resources.usd_per_host_hour=48", "resources.hosts=2")
    assert dear.plan.chosen.usd.p50 == pytest.approx(2 * cheap.plan.chosen.usd.p50)
    shown = "\n".join(plan_table.lines(cheap))
    assert "$3 a GPU-hour (user: resources.usd_per_host_hour)" in shown and "$48.00/h" in shown
    with pytest.raises(NoPlanError, match=r"the cheapest costs"):
        planned(*PINNED, "resources.usd_per_host_hour=2400", f"limits.max_usd={cheap.plan.chosen.usd.p90 * 1.1:.2f}")


def test_the_price_is_of_the_named_machine_alone(planned):
    mine = "a3-ultragpu-8g"
    for found in planned(f"resources.machine={mine}", "resources.usd_per_host_hour=8").outcome.candidates:
        assert found.option.offer.machine == mine and found.option.price.usd_per_gpu_hour == 1
    machine = rows.machines()[mine]
    priced = {each.mode.name for each in use_case.hardware(_spec(machine=mine, usd_per_host_hour=8.0), None).options
              if each.offer.machine == mine and each.price is not None}  # fmt: skip
    assert priced == set(machine.modes), "modes without a list price have one now"


def test_the_network_of_ones_own_hosts_is_planned_with(planned):
    """A100s with InfiniBand of 200 GB/s a host, where Google's have 12.5."""
    given = ("resources.machine=a2-ultragpu-8g", "resources.provisioning_model=on_demand", "resources.hosts=8",
             "parallelism.dp_shard=64", "training.micro_batch_size=1")  # fmt: skip
    slow, fast = planned(*given), planned(*given, "resources.network_gb_s=200")
    assert fast.chosen.option.fabric.inter == pytest.approx(200e9 * 0.9375, rel=0.03)
    assert slow.chosen.time.parts["sharding"] > 5 * fast.chosen.time.parts["sharding"]
    assert any("resources.network_gb_s 200" in line for line in fast.plan.assumptions)


def test_a_reservation_without_a_name_is_planned_and_its_name_is_asked_for(planned):
    found = planned("resources.machine=a3-ultragpu-8g", "resources.provisioning_model=reservation")
    assert any("resources.reservation will be named" in line for line in found.plan.assumptions)


SINFO = """\
#!{python}
import sys, time
time.sleep({s})
form = next(word for word in sys.argv if word.startswith("--format="))[len("--format="):]
node = dict(n="n1", R="gpu", T="idle", G="gpu:h100:8", c="96", m="1000000", f="(null)", l="infinite", a="up", s="1-8")
for name, value in node.items():
    form = form.replace("%" + name, value)
print(form)
"""


def test_a_slurm_cluster_is_asked_what_it_has(planned, tmp_path, monkeypatch):
    (tmp_path / "sinfo").write_text(SINFO.format(python=sys.executable, s=0))
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = planned("resources.device=cuda", "resources.hosts=1", backend="slurm")
    assert {each.option.offer.location for each in found.outcome.candidates} == {"gpu"}
    assert found.plan.chosen.accelerator == "H100" and found.plan.chosen.usd.p50 == 0
    assert any("the cluster has 8 H100 in gpu as a3-" in line for line in found.plan.assumptions)


def test_a_slurm_cluster_that_does_not_answer_leaves_an_assumption(planned, tmp_path, monkeypatch):
    monkeypatch.setattr("muster.backends.slurm.LOOK_S", 0.2)
    (tmp_path / "sinfo").write_text(SINFO.format(python=sys.executable, s=30))
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = planned("resources.device=cuda", "resources.hosts=1", backend="slurm")
    [line] = [line for line in found.plan.assumptions if "the cluster was not asked" in line]
    assert "0.2 s" in line and "an assumption" in line and found.plan.chosen.usd.p50 > 0


def test_the_reason_is_the_machines_that_was_asked_for_and_no_tpus(planned):
    with pytest.raises(NoPlanError, match="A100-80GB has no flash3 attention; known: flash2"):
        planned("resources.accelerator=A100-80GB", "model.attention=flash_attention_3")


def test_a_price_of_no_machine_is_not_used_and_that_is_said(planned):
    with_price, without = planned("resources.usd_per_host_hour=1"), planned()
    assert with_price.plan.chosen.usd == without.plan.chosen.usd
    assert any("resources.machine names, and it names none" in line for line in with_price.plan.assumptions)


@pytest.mark.parametrize(("given", "usd"), [((), 0.0), (("resources.usd_per_host_hour=16",), 16.0)])
def test_gpus_of_this_machine_are_an_offer(planned, monkeypatch, given, usd):
    a_machine_with(monkeypatch, 8)
    found = planned(*given, backend="local")
    here = [each for each in found.outcome.candidates if each.option.offer.machine == "this machine"]
    assert len(here) == 1 and here[0].gpus == 8 and here[0].option.title == "this machine"
    assert here[0].cost.usd_p50 == pytest.approx(usd * here[0].cost.hours_p50)
    if not usd:
        assert found.plan.chosen.machine == "this machine" and found.plan.chosen.usd.p50 == 0
        assert next(iter(plan_table.lines(found))).startswith("here: free, about ")
    assert "resources.machine" not in found.plan.settings


def test_a_machine_that_is_too_small_is_named_with_what_it_lacks(planned, monkeypatch):
    a_machine_with(monkeypatch, 1)
    found = planned(backend="local")
    [reason] = [each.reason for each in found.plan.rejected if each.machine == "this machine"]
    assert "needs" in reason and "an H100 has 80 GB" in reason
    assert found.plan.chosen.machine != "this machine"


@pytest.mark.parametrize(
    ("count", "name", "words"),
    [(0, "cpu", "it has no GPU"), (2, "Quadro of 2004", "does not know its Quadro of 2004"), (2, None, "3 ranks need")],
)
def test_a_machine_that_cannot_be_planned_is_left_out_with_the_reason(planned, monkeypatch, count, name, words):
    a_machine_with(monkeypatch, count, *([name] if name else []))
    overrides = ["resources.ranks_per_host=3", "resources.machine=null"] if name is None else []
    spec = _spec(backend="local", **({"ranks_per_host": 3} if overrides else {}))
    [note] = use_case.hardware(spec, None).notes
    assert note.startswith("this machine is left out") and words in note


def test_a_run_on_this_cpu_is_planned_for_this_cpu(planned, monkeypatch):
    monkeypatch.setattr(use_case, "_matmul_flops", lambda: (100e9, 0.0, "measured here"))
    found = planned(text=SMALL)
    chosen = found.plan.chosen
    assert (chosen.machine, chosen.accelerator, chosen.gpus) == ("this machine", "CPU", 2)
    assert chosen.usd.p50 == 0 and found.plan.frontier == (chosen,)
    assert chosen.hours.p50 * 3600 < 1000 * chosen.step_s + 60, "nothing has to be got first"
    assert "measured here: 100 GFLOP/s for 2 rank(s)" in found.plan.assumptions
    priced = planned("resources.usd_per_host_hour=0.5", text=SMALL).plan.chosen
    assert priced.usd_per_hour == pytest.approx(0.5)


def test_this_cpu_is_measured_once_so_that_a_file_has_one_step_time(planned, monkeypatch, tmp_path):
    monkeypatch.setattr(use_case, "_matmul_flops", lambda: (100e9, 0.0, "measured here"))
    first = planned(text=SMALL)
    monkeypatch.setattr(use_case, "_matmul_flops", lambda: (1e6, 0.0, "measured again"))
    again, kept = planned(text=SMALL), tmp_path / "home" / "matmul.json"
    assert again.plan.chosen.step_s == first.plan.chosen.step_s
    assert any(str(kept) in line for line in again.plan.assumptions)
    for broken in ("", '{"flops": -1.0, "cores": 2, "made": ""}', '{"flops": 1e12, "cores": 0, "made": ""}'):
        kept.write_text(broken)
        assert planned(text=SMALL).plan.chosen.step_s > first.plan.chosen.step_s, "another machine's, or nothing"


def test_a_busy_machine_is_said_and_measured_again_after_a_while(planned, monkeypatch, tmp_path):
    kept = tmp_path / "home" / "matmul.json"
    monkeypatch.setattr(use_case, "_matmul_flops", lambda: (10e9, 0.45, "measured now"))
    busy = planned(text=SMALL)
    monkeypatch.setattr(use_case, "_matmul_flops", lambda: (100e9, 0.0, "measured now"))
    again = planned(text=SMALL)
    assert again.plan.chosen.step_s == busy.plan.chosen.step_s, "typed a moment later"
    for found in (busy, again):
        assert any("while other programs used 45% of them" in line for line in found.plan.assumptions)
    kept.write_text(re.sub(r'"made":"[^"]*"', '"made":"2026-11-21T12:00:00+00:00"', kept.read_text()))
    quiet = planned(text=SMALL)
    assert quiet.plan.chosen.step_s < busy.plan.chosen.step_s
    assert not any("other programs" in line for line in quiet.plan.assumptions)
    for made in ("", "yesterday", "2026-11-21"):  # a hand has been in it
        kept.write_text(f'{{"flops": 1e9, "cores": {os.cpu_count()}, "made": "{made}", "others": 0.9}}')
        assert planned(text=SMALL).plan.chosen.step_s == quiet.plan.chosen.step_s


def test_the_matmul_is_really_measured():
    flops, others, origin = use_case._matmul_flops()
    assert 1e8 < flops < 1e14 and 0 <= others <= 1 and "measured now" in origin


def test_what_others_use_meanwhile_is_seen():
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        assert max(use_case._matmul_flops()[1] for _ in range(5)) > use_case.BUSY
    finally:
        for each in others:
            each.kill()
            each.wait()


def _spec(backend="gke", **resources):
    from muster.config.spec import RunSpec

    return RunSpec.model_validate(
        {
            "name": "p",
            "backend": backend,
            "model": {"config": {}},
            "data": {"sources": [{"type": "random"}]},
            "training": {"steps": 10},
            "resources": resources,
        }
    )
