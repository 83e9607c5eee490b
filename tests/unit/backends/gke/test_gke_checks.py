"""Cross-field rules: each refused or warned about before anything is sent, with its reason."""

import pytest
from cases import RUN_DIR, RUN_ID, placement, spec

from muster.backends.gke.manifests.cluster_options import Options
from muster.backends.gke.manifests.placement import object_name, place
from muster.backends.gke.manifests.render import render
from muster.backends.gke.manifests.spec_rules import findings
from muster.core.errors import RunFileError, UsageError


def rules(of, options=None, *, error=True, run_dir=RUN_DIR):
    return {one.rule for one in findings(placement(of, options, run_dir=run_dir)) if one.error == error}


ERRORS = [
    ("mode-sold", spec("a4-highgpu-8g", "on_demand"), None),
    ("mode-sold", spec("a3-ultragpu-8g", "on_demand"), None),
    ("mode-sold", spec("a3-highgpu-1g", "on_demand"), None),
    ("reservation-name", spec("a4-highgpu-8g", "reservation", reservation=None), None),
    ("reservation-unused", spec("a4-highgpu-8g", "spot", reservation="mine"), None),
    ("reservation-label", spec("a4-highgpu-8g", "reservation", reservation="My Reservation"), None),
    ("image", spec("a4-highgpu-8g", "spot", image=None), None),
    ("image", spec("a4-highgpu-8g", "spot", image="a b"), None),
    ("checkpoint-dir", spec("a4-highgpu-8g", "spot", checkpoint={"dir": "/tmp/here"}), None),
    ("ranks-per-host", spec("a4-highgpu-8g", "spot", ranks_per_host=9), None),
    ("device", spec("a4-highgpu-8g", "spot", device="cpu"), None),
    ("location", spec("a4-highgpu-8g", "spot", locations=["Iowa"]), None),
    ("claims", spec("a4x-maxgpu-4g-metal", "reservation"), Options(network="annotations")),
    ("claims", spec("a3-megagpu-8g", "spot"), Options(network="claims")),
    ("dns-label", spec("a4-highgpu-8g", "spot", queue="My Queue"), None),
    ("dns-label", spec("a4-highgpu-8g", "spot"), Options(namespace="no/such")),
]
WARNINGS = [
    ("spot-grace", spec("a4-highgpu-8g", "spot", recovery={"grace_s": 30.0})),
    ("seven-days", spec("a4-highgpu-8g", "flex_start", limits={"max_hours": 200})),
    ("queued-spares", spec("a4-highgpu-8g", "flex_start_queued")),
    ("one-zone", spec("a4-highgpu-8g", "spot", locations=["us-central1"])),
    ("idle-gpus", spec("a4-highgpu-8g", "spot", ranks_per_host=4)),
    ("arm64", spec("a4x-highgpu-4g", "spot")),
    ("checkpoint-mount", spec("a4-highgpu-8g", "spot", checkpoint={"dir": "/gcs/b/x"})),
]


@pytest.mark.parametrize(("rule", "of", "options"), ERRORS)
def test_refused(rule, of, options):
    assert rules(of, options) == {rule}
    with pytest.raises(RunFileError) as caught:
        render(of, run_id=RUN_ID, run_dir=RUN_DIR, options=options)
    assert len(caught.value.problems) == 1 and ": " in caught.value.problems[0].message


@pytest.mark.parametrize(("rule", "of"), WARNINGS)
def test_warned_about(rule, of):
    assert rule in rules(of, error=False) and not rules(of)


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
    assert "dns-label" in {one.rule for one in findings(hostile)}
