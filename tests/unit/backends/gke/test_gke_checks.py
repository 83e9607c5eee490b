"""Cross-field rules: each refused or warned about before anything is sent, with its reason."""

import pytest
from cases import RUN_DIR, RUN_ID, placement, spec

from muster import backends
from muster.backends.gke.manifests.placement import Options, object_name, place
from muster.backends.gke.manifests.render import render
from muster.backends.gke.manifests.spec_rules import findings
from muster.config import load
from muster.core.errors import RunFileError, UsageError


def said(of, options=None, *, error=True, run_dir=RUN_DIR):
    return [one.problem.message for one in findings(placement(of, options, run_dir=run_dir)) if one.error == error]


ERRORS = [
    ("cannot be had as", spec("a4-highgpu-8g", "on_demand"), None),
    ("cannot be had as", spec("a3-ultragpu-8g", "on_demand"), None),
    ("cannot be had as", spec("a3-highgpu-1g", "on_demand"), None),
    ("needs the reservation's name", spec("a4-highgpu-8g", "reservation", reservation=None), None),
    ("cannot use a reservation", spec("a4-highgpu-8g", "spot", reservation="mine"), None),
    ("cannot be a reservation's name", spec("a4-highgpu-8g", "reservation", reservation="My Reservation"), None),
    ("no container image", spec("a4-highgpu-8g", "spot", image=None), None),
    ("cannot be an image's name", spec("a4-highgpu-8g", "spot", image="a b"), None),
    ("a pod's own disk", spec("a4-highgpu-8g", "spot", checkpoint={"dir": "/tmp/here"}), None),
    ("more ranks than GPUs", spec("a4-highgpu-8g", "spot", ranks_per_host=9), None),
    ("contradict each other", spec("a4-highgpu-8g", "spot", device="cpu"), None),
    ("is not a region or zone", spec("a4-highgpu-8g", "spot", locations=["Iowa"]), None),
    ("one image cannot start on both", spec("a4x-highgpu-4g", "reservation"), Options()),
    ("NVLink between hosts needs a ComputeDomain", spec("a4x-maxgpu-4g-metal", "reservation"), Options()),
    ("has no RDMA device class", spec("a3-megagpu-8g", "spot"), Options(network="claims")),
    ("is not a Kubernetes name", spec("a4-highgpu-8g", "spot", queue="My Queue"), None),
    ("is not a Kubernetes name", spec("a4-highgpu-8g", "spot"), Options(namespace="no/such")),
]
WARNINGS = [
    ("Spot leaves pods 15 s", spec("a4-highgpu-8g", "spot", recovery={"grace_s": 30.0})),
    ("longer than one flex-start", spec("a4-highgpu-8g", "flex_start", limits={"max_hours": 200})),
    ("a lost node ends the run", spec("a4-highgpu-8g", "flex_start_queued")),
    ("a zone is needed", spec("a4-highgpu-8g", "spot", locations=["us-central1"])),
    ("GPUs of each host stay idle", spec("a4-highgpu-8g", "spot", ranks_per_host=4)),
]


@pytest.mark.parametrize(("words", "of", "options"), ERRORS)
def test_refused(words, of, options):
    (message,) = said(of, options)
    assert words in message
    with pytest.raises(RunFileError) as caught:
        render(of, run_id=RUN_ID, run_dir=RUN_DIR, options=options)
    assert len(caught.value.problems) == 1 and ": " in caught.value.problems[0].message


@pytest.mark.parametrize(("words", "of"), WARNINGS)
def test_warned_about(words, of):
    assert any(words in message for message in said(of, error=False)) and not said(of)


def test_a_sound_run_file_has_no_findings():
    sound = spec("a4-highgpu-8g", "flex_start_queued", spare_hosts=1)
    assert findings(placement(sound)) == []


def test_all_errors_come_at_once():
    bad = spec("a4-highgpu-8g", "on_demand", image=None, ranks_per_host=9)
    with pytest.raises(RunFileError) as caught:
        render(bad, run_id=RUN_ID, run_dir=RUN_DIR)
    assert {problem.key for problem in caught.value.problems} == {
        "resources.provisioning_model",
        "resources.image",
        "resources.ranks_per_host",
    }


def test_unknown_machines_have_a_suggestion():
    with pytest.raises(UsageError, match="a4-highgpu-9g") as caught:
        placement(spec("a4-highgpu-9g", "spot"))
    assert "a4-highgpu-8g" in caught.value.hint


@pytest.mark.parametrize(("word", "hint"), [("H100", "a3-megagpu-8g"), ("A100", "a2-ultragpu-8g"), ("B20", "B200")])
def test_words_that_fit_several_machines_are_asked_about(word, hint):
    with pytest.raises(UsageError) as caught:
        placement(spec(None, "spot", accelerator=word))
    assert hint in caught.value.hint


def test_an_accelerator_is_enough():
    assert placement(spec(None, "spot", accelerator="b200")).machine.name == "a4-highgpu-8g"


@pytest.mark.parametrize("run_id", ["a" * 50, "Ünïcode and blanks", "9-starts-with-a-digit", "ends-in-", "a.b_c"])
def test_hostile_run_ids_become_names(run_id):
    name = object_name(run_id)
    assert len(f"{name}-supervisor-0-0-abcde") <= 63 and name.isascii() and name[0].isalpha()
    assert object_name(run_id) == name != object_name(run_id + "x")


def test_a_run_id_that_is_no_label_is_refused():
    hostile = place(spec("a4-highgpu-8g", "spot"), run_id="no label!", run_dir=RUN_DIR, options=Options())
    assert any("cannot be a label" in one.problem.message for one in findings(hostile))


def test_a_plan_refuses_what_submit_refuses_and_asks_for_no_name():
    """They were rules of the rendering alone: ``plan`` and ``load`` accepted the file."""
    rules = backends.get("gke").checks.rules
    refused = spec("a4-highgpu-8g", "spot", reservation="mine")
    assert [problem.key for problem in rules(refused)] == ["resources.reservation"]
    assert not list(rules(spec("a4-highgpu-8g", "spot", image=None)))  # `muster image` makes it
    with pytest.raises(RunFileError, match="cannot use a reservation"):
        load.loads(refused.model_dump_json(), environment=False, to_plan=True)
