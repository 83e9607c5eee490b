"""``muster render --format terraform``: the values byte by byte (``python tests/golden/terraform/terraform_cases.py``
rewrites), the files against the schema of Google's provider, and the addresses against those of before."""

import functools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
for folder in (TESTS, *(TESTS / "golden" / name for name in ("gke", "gce", "terraform"))):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from cases import FAMILIES, MODES, Options, placement, spec  # noqa: E402
from fakes.terraform import addresses, complaints, dangling, parse  # noqa: E402
from fakes.terraform.evaluate import evaluated  # noqa: E402
from terraform_cases import HERE, PRIVATE, cases, on_gce, on_gke, recorded  # noqa: E402

from muster.backends.gke.provision.inventory.resource_names import site  # noqa: E402
from muster.backends.gke.provision.up import resources  # noqa: E402
from muster.core.errors import UsageError  # noqa: E402

CASES = cases()
#: What commit 331955c5 rendered: case -> address -> what its ``import`` block named, if it had one.
OLD = json.loads((HERE / "addresses_331955c5.json").read_text())


def blocks(files):
    return [block for name, text in files.items() if name.endswith(".tf") for block in parse(text)]


def values(files):
    return json.loads(files["terraform.tfvars.json"])


def pairs(files, kind):
    rows = [block.arguments for block in blocks(files) if block.kind == kind]
    return {row.get("from", row["to"]): row["to"] if kind == "moved" else json.loads(row["id"]) for row in rows}


@pytest.mark.parametrize("name", CASES)
def test_as_recorded(name):
    files = {str(path.relative_to(HERE / name)) for path in (HERE / name).rglob("*") if path.is_file()}
    assert files == set(recorded(CASES[name]))
    for file, text in recorded(CASES[name]).items():
        assert text == (HERE / name / file).read_text(), f"{name}/{file}: python {HERE / 'terraform_cases.py'} if meant"


@pytest.mark.parametrize("name", CASES)
def test_the_provider_knows_every_argument(name):
    assert complaints(blocks(CASES[name])) == []
    assert dangling(blocks(CASES[name])) == set()


def leaves(value, key=""):
    if isinstance(value, dict):
        for name, one in value.items():
            yield from leaves(one, key if key in ("labels",) else name)
    elif isinstance(value, list):
        for one in value:
            yield from leaves(one, key)
    else:
        yield key, value


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_of_every_way_of_buying_is_read(family):
    """What a request has is either read from its variable or the same in the file itself."""
    for mode in MODES:
        if mode == "on_demand" and family in ("a4", "a3-ultra"):
            continue
        files = on_gke(FAMILIES[family], mode, **PRIVATE)
        text = "\n".join(files[name] for name in files if name.endswith(".tf"))
        declared = {name for block in blocks(files) if block.kind == "variable" for name in block.labels}
        assert set(values(files)) <= declared
        of_resources = {key: one for key, one in values(files).items() if isinstance(one, dict)}
        for name, one in {(name, str(one)): one for name, one in leaves(of_resources)}.items():
            read = re.search(rf"(\.value|\]|\.\w+)\.{name[0]}\b", text)
            fixed = re.search(rf"\b{name[0]} += ({re.escape(json.dumps(one))}|local\.labels)$", text, re.M)
            assert read or fixed or name in SAID_OTHERWISE, (mode, name)


#: A block that is there says it, or an argument of another name does.
SAID_OTHERWISE = {
    ("enabled", "True"), ("use_ip_aliases", "True"), ("enable_public_endpoint", "True"), ("managed-by", "muster"),
}  # fmt: skip


@pytest.mark.parametrize("case", OLD)
def test_what_was_applied_before_stays(case):
    """Six machine families, on GKE and on plain machines: each old address is one of today's, or moved to one, and
    no two to the same one; what finds a resource again is the same."""
    where, machine, mode = case.split()
    files = on_gke(machine, mode, **PRIVATE) if where == "gke" else on_gce(machine, mode, private=True)
    now, moved = addresses(blocks(files), values(files)), pairs(files, "moved")
    of_services = "google_project_service.services"
    assert {old for old in OLD[case] if old not in moved and old not in now} - {
        of_services,
        "helm_release.kueue",
    } == set()
    assert any(one.startswith(of_services) for one in now)
    assert set(moved) <= set(OLD[case]) and set(moved.values()) <= now
    assert len(set(moved.values())) == len(moved)
    assert pairs(files, "import") == {moved[old]: found for old, found in OLD[case].items() if found}


def test_terraform_moves_a_release_that_got_a_count():
    """Terraform's documentation on refactoring: "When you add count to an existing resource that didn't use it,
    Terraform automatically proposes to move the original object to instance 0"."""
    assert "helm_release.kueue[0]" in addresses(blocks(CASES["gke-l4-on-demand"]), values(CASES["gke-l4-on-demand"]))


def test_bucket_and_networks_are_not_destroyed():
    kept = {
        block.labels[0]
        for block in blocks(CASES["gke-l4-on-demand"])
        for inner in block.blocks
        if inner.kind == "lifecycle" and inner.arguments.get("prevent_destroy") == "true"
    }
    assert kept == {"google_compute_network", "google_storage_bucket"}


def test_every_resource_of_up_is_in_it():
    of = placement(spec("a4-highgpu-8g", "spot", project="example-project", **PRIVATE))
    files = on_gke("a4-highgpu-8g", "spot", **PRIVATE)
    made = {one for one in addresses(blocks(files), values(files)) if one.startswith("google")}
    made = {one for one in made if "_project_service." not in one}
    # One each but for the services, and also: the way out of the router, and the supervisors' pool.
    assert len(made) == len(resources(site(of), None)) - 1 + 2
    assert files["muster-queue/templates/objects.yaml"].count("kind: ClusterQueue") == 1


def test_claims_are_refused():
    with pytest.raises(UsageError, match="acceleratorNetworkProfile"):
        on_gke("a4-highgpu-8g", "spot", Options(network="claims"))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("machine_type     =", "machine_typ      =", "no such argument"),
        ("deletion_protection      = false", "deletion_protection      = 1", "is no bool"),
        ('  dynamic "autoscaling" {', '  dynamic "auto_scaling" {', "no such block"),
        ("          gpu_driver_version =", "          gpu_driver =", "misses gpu_driver_version"),
        ("  ip_allocation_policy {}", "  ip_allocation_policy = true", "is a block"),
        ('"google_compute_firewall"', '"google_compute_fire"', "no such resource"),
    ],
)
def test_the_check_refuses_what_the_provider_would(old, new, said):
    files = CASES["gke-a4-queued-private"]
    text = files["cluster.tf"] + files["project.tf"]
    assert old in text
    assert any(said in line for line in complaints(parse(text.replace(old, new, 1))))


@pytest.mark.parametrize(
    ("old", "new", "seen"),
    [
        ('"google_compute_network" "networks"', '"google_compute_network" "net"', "google_compute_network.networks"),
        ('variable "routers"', 'variable "router"', "var.routers"),
        ("each.value.direction", "each.value.way", "var.firewalls: way"),
    ],
)
def test_a_reference_to_nothing_is_seen(old, new, seen):
    files = CASES["gce-cpu-private"]
    text = "\n".join(text for name, text in files.items() if name.endswith(".tf"))
    assert old in text
    assert seen in dangling(parse(text.replace(old, new)))


terraform = pytest.mark.skipif(shutil.which("terraform") is None, reason="no terraform here")


@terraform
@pytest.mark.parametrize("name", CASES)
def test_laid_out_as_terraform_does(name, tmp_path):
    for file, text in CASES[name].items():
        if file.endswith(".tf"):
            (tmp_path / Path(file).name).write_text(text)
    done = subprocess.run(["terraform", "fmt", "-check", "-diff", str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@terraform
@pytest.mark.parametrize("name", CASES)
def test_terraform_takes_the_values(name, tmp_path):
    """Types and validations of the variables, by Terraform itself; a value is text, whatever is in it."""
    files = CASES[name]
    text = "\n".join(text for file, text in files.items() if file.endswith(".tf"))
    declared = re.findall(r'^variable "\w+" \{\n(?:.*\n)*?\}\n', text, re.M)
    (tmp_path / "variables.tf").write_text("\n".join(declared))
    given = {**values(files), "service_accounts": {"a": {"email": "a@b", "display_name": "${var.project} %{if x}"}}}
    (tmp_path / "terraform.tfvars.json").write_text(json.dumps(given))
    asked = "jsonencode({" + ", ".join(f"{key} = var.{key}" for key in given) + "})\n"
    done = subprocess.run(["terraform", "console"], cwd=tmp_path, input=asked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(json.loads(done.stdout))
    assert seen["service_accounts"] == given["service_accounts"]
    for key, one in given.items():
        assert (set(seen[key]) if isinstance(one, dict) else seen[key]) == (set(one) if isinstance(one, dict) else one)


@terraform
@pytest.mark.parametrize("name", CASES)
def test_every_argument_is_as_it_was_rendered_before(name, tmp_path):
    """By Terraform's own evaluation: nothing that was applied from the rendering of 331955c5 changes."""
    parts = [text for file, text in CASES[name].items() if file.endswith(".tf") and "/" not in file]
    parts = [text for text in parts if "helm_release" not in text and "moved {" not in text]
    now = evaluated("\n".join(parts), values(CASES[name]), tmp_path)
    services = now.pop("google_project_service")
    assert {one["service"] for one in services} == set(values(CASES[name])["services"])
    before = json.loads((HERE / "values_331955c5.json").read_text())[name]
    order = functools.partial(json.dumps, sort_keys=True)
    assert {kind: sorted(rows, key=order) for kind, rows in now.items() if rows} == {
        kind: sorted(rows, key=order) for kind, rows in before.items()
    }


def test_compute_engine_in_every_family():
    for machine, mode in (("a3-megagpu-8g", "spot"), ("a4-highgpu-8g", "flex_start"), ("g2-standard-48", "on_demand")):
        assert complaints(blocks(on_gce(machine, mode))) == []
