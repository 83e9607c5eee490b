"""From a run file to a plan file and back: the table, the refusals, prices and calibration that are the user's own."""

import json
from dataclasses import asdict
from datetime import UTC, datetime

import pytest

from muster.app.planning import plan as use_case
from muster.app.planning import prices
from muster.app.planning.calibrate import Entry, calibration_for, keep
from muster.backends.local.launcher import LocalLauncher
from muster.cli.drawn import plan_table
from muster.config.load import load
from muster.core import resolved_file
from muster.core.clock import SystemClock
from muster.core.errors import AccessError, BackendError, NoPlanError, RunFileError, UsageError
from muster.core.event_details.training import Step
from muster.core.event_log import EventLog
from muster.core.types import Offer
from muster.plan.calibrate import calibrate
from muster.plan.constants import DEFAULT
from muster.plan.step_time import step_time

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
RUN = """\
name: eight
backend: gke
model:
  source: meta-llama/Llama-3.1-8B
data:
  sources:
    - {type: random, rows: 100000}
training:
  steps: 1000
  sequence_length: 4096
  global_batch_size: 64
  compile: true
"""


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


def planned(run_file, home, *overrides, **changes):
    return use_case.plan(run_file, overrides, now=NOW, home=home, **changes)


def test_a_plan_sets_what_the_file_left_open(run_file, home, tmp_path):
    found = planned(run_file, home, reasons=True)
    answer = found.plan.to_json()
    json.dumps(answer)
    assert answer["chosen"]["memory_bytes_per_gpu"] <= answer["chosen"]["gpu_memory_bytes"]
    assert sum(answer["chosen"]["memory_bytes_by_item"].values()) == answer["chosen"]["memory_bytes_per_gpu"]
    assert answer["rejected"] and answer["frontier"] and answer["why"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(answer))
    loaded = use_case.open_plan(path)
    assert loaded.spec.resources.machine == answer["chosen"]["machine"]
    assert loaded.spec.parallelism.dp_shard == answer["chosen"]["layout"]["dp_shard"]
    assert loaded.spec.training.micro_batch_size == answer["chosen"]["micro_batch_size"]
    assert loaded.planned_step_s == answer["chosen"]["step_s_by_item"]
    assert sum(loaded.planned_step_s.values()) == pytest.approx(answer["chosen"]["step_s"])


def test_a_plan_is_refused_when_its_run_file_changed(run_file, home, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(planned(run_file, home).plan.to_json()))
    run_file.write_text(RUN.replace("steps: 1000", "steps: 2000"))
    with pytest.raises(UsageError, match=r"training\.steps was 1000, is 2000"):
        use_case.open_plan(path)
    run_file.write_text("# a comment changes nothing\n" + RUN)
    assert use_case.open_plan(path).spec.training.steps == 1000
    run_file.unlink()
    assert use_case.open_plan(path).spec.training.steps == 1000


def test_an_edited_plan_and_a_changed_one_are_refused(run_file, home, tmp_path):
    answer = planned(run_file, home).plan.to_json()
    path = tmp_path / "plan.json"
    answer["spec"]["training"]["steps"] = 5
    path.write_text(json.dumps(answer))
    with pytest.raises(UsageError, match="was edited"):
        use_case.open_plan(path)
    path.write_text("{}")
    with pytest.raises(UsageError, match="not a plan of this version"):
        use_case.open_plan(path)
    path.write_text(json.dumps(planned(run_file, home).plan.to_json()))
    with pytest.raises(UsageError, match="used unchanged"):
        use_case.open_plan(path, ["training.steps=3"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("limits.deadline=2020-01-01T00:00:00Z", "limits.deadline .* is in the past"),
        ("limits.max_usd=0", "limits.max_usd must be"),
        ("limits.max_usd=1", "the cheapest costs"),
        ("resources.locations=[mars-north1]", "not known in mars-north1"),
        ("limits.max_hours=0.05", "the fastest takes"),
    ],
)
def test_impossible_wishes_end_with_exit_code_3(run_file, home, override, words):
    with pytest.raises(NoPlanError, match=words) as caught:
        planned(run_file, home, override)
    assert caught.value.exit_code == 3
    assert caught.value.hint.startswith("the nearest plan that works")


def test_a_wrong_file_is_still_a_wrong_file(run_file, home):
    with pytest.raises(RunFileError):
        planned(run_file, home, "limits.max_usd=0", "training.steps=-1")
    with pytest.raises(UsageError, match="not in the catalogue"):
        planned(run_file, home, "model.source=somebody/model")
    with pytest.raises(UsageError, match=r"training\.epochs alone"):
        planned(run_file, home, "training.steps=null", "training.epochs=1")


def test_fixed_keys_are_pins_and_defaults_are_free(run_file, home):
    assert use_case.pins_of(load(run_file)).micro_batch_size is None
    pins = use_case.pins_of(load(run_file, ["training.micro_batch_size=1", "resources.hosts=1"]))
    assert (pins.micro_batch_size, pins.num_nodes, pins.axes) == (1, 1, {})


def test_the_table_says_the_same_as_the_json(run_file, home):
    found = planned(run_file, home, "limits.max_hours=1000")
    text = "\n".join(plan_table.lines(found, every=True))
    assert found.plan.chosen.title in text
    assert f"{found.plan.chosen.mfu:.1%}" in text
    assert "chance   100% in time" in text
    assert all(each.reason in text for each in found.plan.rejected)


def test_a_plan_of_this_machine_says_first_what_it_comes_to_here(run_file, home):
    """Nothing is chosen among, nothing is rented: no dollars, no prices, no table of one row."""
    small = "model={config: {model_type: llama, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, "
    small += "intermediate_size: 128}, tokenizer: {kind: word}, dtype: float32}"
    own = ["backend=local", small, "resources.device=cpu", "training.steps=10"]
    found = planned(run_file, home, *own, "training.sequence_length=256", "training.compile=false")
    lines = list(plan_table.lines(found))
    assert lines[0].startswith("here: free, about ") and "(p90 " in lines[0]
    assert not any("$" in line or "queueing" in line or line.startswith("plan ") for line in lines), lines
    rented = list(plan_table.lines(planned(run_file, home)))
    assert not any(line.startswith("here:") for line in rented) and any("$" in line for line in rented)


def test_own_prices_change_the_choice(run_file, home):
    home.mkdir()
    (home / "prices.csv").write_text(
        "machine,mode,region,usd_per_gpu_hour\na3-ultragpu-8g,flex_start,us-central1,0.25\n"
    )
    chosen = planned(run_file, home).plan.chosen
    assert (chosen.machine, chosen.mode) == ("a3-ultragpu-8g", "flex_start")
    assert chosen.price.reliability == "user"


def test_prices_are_not_touched_without_credentials(home, monkeypatch):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(home / "absent.json"))
    with pytest.raises(AccessError, match="no credentials for the billing catalogue"):
        prices.update(home, fetch=lambda *_: pytest.fail("asked without credentials"))
    assert not home.exists()


def test_fetched_prices_are_kept_beside_the_users(home):
    def sku(description, units, nanos):
        price = {"units": str(units), "nanos": nanos}
        return {
            "description": description,
            "serviceRegions": ["us-central1"],
            "pricingInfo": [{"pricingExpression": {"usageUnit": "h", "tieredRates": [{"unitPrice": price}]}}],
        }

    pages = {
        "": {"skus": [sku("A4 Nvidia B200 (1 gpu slice) running in Americas", 16, 0)], "nextPageToken": "2"},
        "2": {"skus": [sku("Spot Preemptible A4 Nvidia B200 (1 gpu slice) running in Americas", 3, 500000000)]},
    }
    asked = []

    def fetch(url, headers):
        asked.append(url)
        return pages["2" if "pageToken=2" in url else ""]

    found = prices.update(home, api_key="k", fetch=fetch)
    assert len(asked) == 2 and found.skus == 2
    kept = {(each.machine, each.mode): each for each in prices.all_prices(home) if each.region == "us-central1"}
    assert kept["a4-highgpu-8g", "spot"].usd_per_gpu_hour == 3.5
    assert kept["a4-highgpu-8g", "spot"].reliability == "first-hand"
    with pytest.raises(BackendError, match="no price that is understood"):
        prices.update(home, api_key="k", fetch=lambda *_: {"skus": []})


def test_calibration_finds_the_constant_that_made_the_steps(run_file, home):
    found = planned(run_file, home)
    chosen = found.chosen
    from dataclasses import replace

    truth = replace(DEFAULT, efficiency=0.5)
    steps = [step_time(found.work, chosen.setting, chosen.option, chosen.num_nodes, truth).seconds] * 8
    fit = calibrate(found.work, chosen.setting, chosen.option, chosen.num_nodes, [9.0, 5.0, *steps], DEFAULT)
    assert fit.efficiency == pytest.approx(0.5, rel=1e-6)
    assert fit.off < 0
    with pytest.raises(UsageError, match="too few"):
        calibrate(found.work, chosen.setting, chosen.option, chosen.num_nodes, steps[:4], DEFAULT)
    with pytest.raises(UsageError, match="cannot be explained"):
        calibrate(found.work, chosen.setting, chosen.option, chosen.num_nodes, [1e-6] * 8, DEFAULT)


def test_a_kept_calibration_is_used_and_narrows_the_plan(run_file, home):
    before = planned(run_file, home, "resources.accelerator=H100").plan.chosen
    home.mkdir()
    entry = Entry(
        accelerator="H100", parameters=8 * 10**9, lora=False, run_id="r", made="then", efficiency=0.4,
        measured_step_s=1.0, predicted_step_s=1.0, steps=9, spread=0.0, off=0.0,
    )  # fmt: skip
    (home / "calibration.json").write_text(json.dumps([asdict(entry)]))
    after = planned(run_file, home, "resources.accelerator=H100").plan.chosen
    assert after.step_s > before.step_s
    spec = load(run_file, ["resources.accelerator=H100"]).spec
    constants, sigma, _ = calibration_for(home, spec, planned(run_file, home).work)
    assert constants.efficiency == 0.4 and sigma == 0.05


def test_a_model_of_another_size_does_not_speak_for_this_one(run_file, home):
    home.mkdir()
    entry = Entry(
        accelerator="H100", parameters=10**7, lora=False, run_id="r-1", made="then", efficiency=0.4,
        measured_step_s=1.0, predicted_step_s=0.8, steps=9, spread=0.0, off=-0.2,
    )  # fmt: skip
    (home / "calibration.json").write_text(json.dumps([asdict(entry)]))
    spec = load(run_file, ["resources.accelerator=H100"]).spec
    constants, _, said = calibration_for(home, spec, planned(run_file, home).work)
    assert constants == DEFAULT and said is None


def test_a_plan_says_that_it_was_calibrated_only_where_it_was(run_file, home):
    """Cores and GPUs have constants of their own, and neither is a calibration."""
    said = {}
    for device in ("cpu", "auto"):
        said[device] = " ".join(planned(run_file, home, f"resources.device={device}").plan.assumptions)
    assert "matrices at 65% of the measured matmul ceiling (not calibrated)" in said["cpu"]
    assert "matrices at 87% of the measured matmul ceiling (two runs on one H100" in said["auto"]


def test_a_plan_says_how_far_off_the_last_one_was_and_leaves_it_out_where_asked(run_file, home):
    home.mkdir()
    entry = Entry(
        accelerator="H100", parameters=8 * 10**9, lora=False, run_id="r-1", made="then", efficiency=0.4,
        measured_step_s=1.0, predicted_step_s=0.8, steps=9, spread=0.0, off=-0.2, machine="a3-megagpu-8g",
        layout={"dp_shard": 8}, memory_bytes=50 * 10**9, planned_memory_bytes=52 * 10**9, stall_share=0.02,
    )  # fmt: skip
    (home / "calibration.json").write_text(json.dumps([asdict(entry)]))
    with_it = planned(run_file, home, "resources.accelerator=H100")
    [line] = [line for line in with_it.plan.assumptions if line.startswith("calibrated by")]
    assert line == (
        "calibrated by r-1 on a3-megagpu-8g (dp_shard 8): its plan was off by -20% of a step, memory +4%, "
        "stalls 2% of a step"
    )
    without = planned(run_file, home, "resources.accelerator=H100", calibrated=False)
    assert without.plan.chosen.step_s < with_it.plan.chosen.step_s
    assert not any(line.startswith("calibrated by") for line in without.plan.assumptions)


@pytest.mark.parametrize(
    ("environment", "change", "entries"),
    [("", "one attempt", 1), ("true", "one attempt", 0), ("", "two attempts", 0), ("", "held up", 0)],
)
def test_a_run_on_gpus_calibrates_the_next_plan_but_not_in_ci_nor_by_steps_that_say_little(
    tmp_path, run_file, home, monkeypatch, environment, change, entries
):
    monkeypatch.setenv("MUSTER_HOME", str(home))
    monkeypatch.setenv("CI", environment)
    offer = Offer(
        backend="local", machine="m", location="here", accelerator="NVIDIA H100 80GB HBM3", gpus_per_node=1,
        gpu_memory_bytes=0, usd_per_node_hour=None, peak_flops_per_gpu=None, max_nodes=1, mode="owned",
    )  # fmt: skip
    monkeypatch.setattr(LocalLauncher, "offers", lambda self, spec: [offer])
    given = ["backend=local", "resources.device=cuda", "resources.ranks_per_host=1", "model.lora={rank: 8}"]
    spec = load(
        run_file, [*given, "training.micro_batch_size=1", "data.sources=[{type: random}]"], environment=False
    ).spec
    run = tmp_path / "run"
    (run / "events").mkdir(parents=True)
    resolved_file.write(run, spec.model_dump_json())
    log = EventLog("r-1", run / "events", "rank", 0, clock=SystemClock())
    seconds = 200 if change == "held up" else 20
    step = Step(
        loss=1.0, grad_norm=1.0, learning_rate=1e-4, step_ns=seconds * 10**9, tokens=64 * 4096, memory_bytes=30 * 10**9,
        supervised_tokens=64 * 4096, padding_tokens=0, stall_ns=10**9,
    )  # fmt: skip
    for number in range(10):
        log.append("step", detail=asdict(step), step=number, rank=0)
    log.close()
    if change == "two attempts":
        log = EventLog("r-1", run / "events", "rank", 1, clock=SystemClock())
        log.append("step", detail=asdict(step), step=10, rank=0)
        log.close()
    keep(run, spec)
    said = planned(run_file, home, "resources.accelerator=H100", "model.lora={rank: 8}").plan.assumptions
    assert [line.split(":")[0] for line in said if line.startswith("calibrated by")] == [
        "calibrated by r-1 on H100 (one rank)"
    ] * entries
