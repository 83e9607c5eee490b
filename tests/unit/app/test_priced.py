"""What a host costs by the hour: from the run file, the user's own prices, or the shipped list; never guessed."""

import pytest

from muster.app.planning import plan as planning
from muster.app.planning.prices import priced
from muster.catalog import vertex
from muster.config.spec import RunSpec

RUN = """\
name: eight
backend: {backend}
model: {{source: meta-llama/Llama-3.1-8B}}
data: {{sources: [{{type: random, rows: 1000}}]}}
training: {{steps: 1000, sequence_length: 4096, global_batch_size: 64}}
"""


def spec(backend="gke", **resources):
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


def price(home, **resources):
    return priced(spec(**resources), home).resources.usd_per_host_hour


def test_the_list_price_of_machine_mode_and_place(tmp_path):
    asked = {"machine": "a4-highgpu-8g", "provisioning_model": "spot"}
    assert price(tmp_path, **asked, locations=["us-east1-b"]) == pytest.approx(8 * 4.0758)
    anywhere = price(tmp_path, **asked)
    assert anywhere >= price(tmp_path, **asked, locations=["us-east1"]), "the dearest place keeps the limit"
    queued = price(
        tmp_path, machine="a4-highgpu-8g", provisioning_model="flex_start_queued", locations=["us-central1-b"]
    )
    assert queued == pytest.approx(8 * 8.055)


def test_the_users_own_price_wins_and_the_run_files_above_all(tmp_path):
    (tmp_path / "prices.csv").write_text("machine,mode,region,usd_per_gpu_hour\na4-highgpu-8g,spot,us-east1,1.5\n")
    asked = {"machine": "a4-highgpu-8g", "provisioning_model": "spot", "locations": ["us-east1"]}
    assert price(tmp_path, **asked) == 12.0
    assert price(tmp_path, **asked, usd_per_host_hour=3.0) == 3.0


def test_vertex_ais_fee_is_in_the_price(tmp_path):
    asked = {"machine": "g2-standard-48", "provisioning_model": "spot", "locations": ["us-central1"]}
    fee = vertex.fee("g2-standard-48", "us-central1")
    assert price(tmp_path, backend="vertex", **asked) == pytest.approx(
        price(tmp_path, **asked) + 4 * fee.usd_per_gpu_hour
    )
    assert fee.usd_per_gpu_hour > 0


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"machine": "a4-highgpu-8g"},
        {"machine": "a5-mega-9000g", "provisioning_model": "spot"},
        {"machine": "a4-highgpu-8g", "provisioning_model": "spot", "locations": ["mars-north1"]},
    ],
)
def test_what_is_not_known_stays_unknown(tmp_path, asked):
    assert price(tmp_path, **asked) is None


@pytest.mark.parametrize("backend", ["gke", "local"])
def test_a_plan_sets_the_price_where_it_chooses_the_machine(tmp_path, backend):
    (tmp_path / "run.yaml").write_text(RUN.format(backend=backend))
    found = planning.plan(tmp_path / "run.yaml", home=tmp_path)
    settings = found.plan.settings
    if backend == "local":
        assert not {"resources.machine", "resources.provisioning_model", "resources.usd_per_host_hour"} & set(settings)
    else:
        assert settings["resources.usd_per_host_hour"] == pytest.approx(
            found.plan.chosen.usd_per_hour / found.plan.chosen.num_nodes
        )
    assert "training.micro_batch_size" in settings
