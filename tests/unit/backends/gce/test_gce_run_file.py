"""Refusals and warnings of a run file for Compute Engine, each with its reason; and its offers."""

import pytest
from gce_cases import GCE, cases, placement, spec

from muster import backends
from muster.app.cluster import render
from muster.backends.gce.placement import rents
from muster.backends.gce.run_file_rules import rules, warnings
from muster.catalog import gce, gke, offers
from muster.core.errors import RunFileError

V6E = {"machine": "ct6e-standard-4t", "device": "tpu"}


def problems(of):
    return {problem.key: f"{problem.message} ({problem.hint})" for problem in rules(of)}


@pytest.mark.parametrize("name", cases())
def test_the_examples_are_accepted(name):
    assert problems(cases()[name].spec) == {}


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"machine": "a3-highgpu-9g"}, "resources.machine", "did you mean"),
        ({"machine": None, "accelerator": "H100"}, "resources.accelerator", "several machines"),
        ({"machine": "a4x-highgpu-4g"}, "resources.machine", "IMEX"),
        ({"mode": "owned"}, "resources.provisioning_model", "nothing there is owned"),
        ({"mode": "flex_start_queued"}, "resources.provisioning_model", "flex_start)"),
        ({"machine": "a4-highgpu-8g", "mode": "on_demand"}, "resources.provisioning_model", "not sold as on_demand"),
        ({"mode": "flex_start", "limits": {"max_hours": 169}}, "limits.max_hours", "7 days"),
        ({"mode": "reservation"}, "resources.reservation", "needs the reservation's name"),
        ({"mode": "spot", "reservation": "r"}, "resources.reservation", "NO_RESERVATION"),
        ({"mode": "reservation", "reservation": "R!"}, "resources.reservation", "cannot be a reservation"),
        ({"locations": []}, "resources.locations", "names no zone"),
        ({"locations": ["us-central1"]}, "resources.locations", "not a zone"),
        (
            {"gce": {"subnetwork": "projects/p/regions/us-east4/subnetworks/s"}},
            "gce.subnetwork", "is in us-east4, and resources.locations has us-central1-a",
        ),
        ({"project": None}, "resources.project", "names no project"),
        ({"gce": {"service_account": None}}, "gce.service_account", "no token"),
        ({"gce": {"supervisor_service_account": None}}, "gce.supervisor_service_account", "replaces hosts"),
        (
            {"gce": {"supervisor_service_account": GCE["service_account"]}},
            "gce.supervisor_service_account", "could make and remove machines",
        ),
        ({"gce": {"bundle": None}}, "gce.bundle", "no software"),
        ({"run_dir": None}, "run_dir", "gs://BUCKET"),
        ({"checkpoint": {"dir": "/data"}}, "checkpoint.dir", "only one host"),
        ({"model": {"source": "gs://bucket/weights"}}, "model.source", "have none"),
        (
            {"data": {"sources": [{"type": "file", "path": "/gcs/bucket/rows.jsonl"}]}},
            "data.sources.0.path", "have none",
        ),
        ({"ranks_per_host": 9}, "resources.ranks_per_host", "it has 8"),
        ({"machine": "ct6e-standard-4t"}, "resources.device", "has 4 TPU chips"),
        ({"device": "tpu"}, "resources.device", "has no TPU"),
        ({**V6E, "machine": "ct5lp-hightpu-4t"}, "resources.machine", "slices of v5p and v6e alone"),
        ({**V6E, "hosts": 3}, "resources.hosts", "are no slices: one has 1 (2x2), 2 (2x4)"),
        ({**V6E, "min_hosts": 1}, "resources.min_hosts", "neither spare hosts nor fewer"),
        ({**V6E, "parallelism": {"tp": 3}}, "parallelism.tp", "4 chips of a host"),
        ({"device": "cpu"}, "resources.device", "has 8 GPUs"),
    ],
)  # fmt: skip
def test_refused_with_the_reason(changes, key, words):
    given = dict(changes)
    found = problems(spec(given.pop("machine", "a3-megagpu-8g"), given.pop("mode", "spot"), **given))
    assert list(found) == [key] and words in found[key], found


def test_a_bundle_is_named_by_its_own_digest():
    with pytest.raises(ValueError, match="bundle"):
        spec(gce={"bundle": "gs://example-bucket/bundles/latest.tar.gz"})


def test_said_beforehand():
    of = placement(spec("a3-megagpu-8g", "spot", private=True, min_hosts=1, recovery={"grace_s": 300}))
    said = [f"{problem.key}: {problem.message}" for problem in warnings(of)]
    assert any("TCPXO" in one for one in said)
    assert any("1 of 2 machines is taken" in one for one in said)
    assert any("120 s at most" in one for one in said)
    assert any("Cloud NAT" in one for one in said)
    assert any("example-bucket should be in us-central1" in one for one in said)
    own = placement(spec(gce={"image": "projects/p/global/images/mine"}))
    assert not any("TCPXO" in problem.message for problem in warnings(own))


def test_render_prints_the_requests():
    shown = render.render(spec(), run_id="llama-1", run_dir=None)
    assert list(shown.files) == ["supervisor.json", "hosts.1.us-central1-a.json"]
    with pytest.raises(RunFileError, match="names no zone"):
        render.render(spec(locations=[]), run_id="llama-1")
    assert backends.load("gce").name == "gce"


def test_offers_are_what_is_set_up_here_at_the_same_price():
    everything = offers.catalogue()
    rented = rents(everything)
    assert {one.offer.backend for one in rented} == {"gce"}
    assert {one.offer.mode for one in rented} <= set(gce.MODES)
    assert not [one for one in rented if one.offer.machine.startswith(("a4x", "ct"))]
    prices = {one.title: one.offer.usd_per_node_hour for one in everything}
    assert all(one.offer.usd_per_node_hour == prices[one.title] for one in rented)


def test_tables_name_families_and_fabrics_that_there_are():
    families = gke.families()
    assert {family.name for family in families.values() if gce.refusal(family)} == {
        "a4x",
        "a4x-max",
        "tpu-v5e",
    }
    fabrics = {gce.missing(one) for family in families.values() for one in family.machines.values()}
    assert len(fabrics - {None}) == 3
    assert gce.image(families["a4"]).driver == 580 and gce.image(families["cpu"]).driver is None
    assert "tpu-v5e-v5p-v6e" in gce.image(families["tpu-v6e"]).name != gce.image(families["cpu"]).name


def test_reduction_server_is_refused_with_the_reason():
    (problem,) = list(rules(spec("a2-highgpu-8g", "on_demand", vertex={"reduction_servers": 4})))
    assert problem.key == "vertex.reduction_servers" and "Vertex AI's jobs alone" in problem.message
