"""``muster render --format terraform``: byte by byte (``python tests/golden/terraform/terraform_cases.py`` rewrites),
read by a parser that is not ours, and held against the schema of Google's provider."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
for folder in (TESTS, *(TESTS / "golden" / name for name in ("gke", "gce", "terraform"))):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

hcl2 = pytest.importorskip("hcl2", reason="python-hcl2 is not installed")

from cases import FAMILIES, MODES, Options, placement, spec  # noqa: E402
from fakes.terraform import complaints, dangling  # noqa: E402
from terraform_cases import HERE, cases, on_gce, on_gke  # noqa: E402

from muster.backends.gke.provision.inventory.resource_names import site  # noqa: E402
from muster.backends.gke.provision.terraform import rendered  # noqa: E402
from muster.backends.gke.provision.up import resources  # noqa: E402
from muster.backends.google.project import hcl  # noqa: E402
from muster.core.errors import UsageError  # noqa: E402

CASES = cases()


def check(files):
    """Parsed by file name; nothing in them is unknown, of another type, missing, or refers to what is not there."""
    parsed = {name: hcl2.loads(text) for name, text in files.items() if name.endswith(".tf")}
    for name, file in parsed.items():
        assert complaints(file) == [], name
    assert dangling([text for name, text in files.items() if name in parsed], list(parsed.values())) == set()
    return parsed


@pytest.mark.parametrize("name", CASES)
def test_as_recorded(name):
    files = {str(path.relative_to(HERE / name)) for path in (HERE / name).rglob("*") if path.is_file()}
    assert files == set(CASES[name])
    for file, text in CASES[name].items():
        assert text == (HERE / name / file).read_text(), f"{name}/{file}: python {HERE / 'terraform_cases.py'} if meant"


@pytest.mark.parametrize("name", CASES)
def test_the_provider_knows_every_argument(name):
    check(CASES[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_of_buying(family):
    for mode in MODES:
        if mode != "on_demand" or family not in ("a4", "a3-ultra"):
            check(on_gke(FAMILIES[family], mode))


def test_every_resource_of_up_is_in_it():
    of = placement(
        spec("a4-highgpu-8g", "spot", project="example-project", private=True, authorized_networks=["1.2.3.4/32"])
    )
    files = rendered(of)
    (cluster, *_) = [hcl2.loads(files["cluster.tf"])]
    made = {
        (kind.strip('"'), name.strip('"')) for row in cluster["resource"] for kind, one in row.items() for name in one
    }
    # One each, and besides: the way out of the router, and the supervisors' pool, which the cluster is made with.
    assert len(made) == len(resources(site(of), None)) + 2
    assert files["muster-queue/templates/objects.yaml"].count("kind: ClusterQueue") == 1


def test_what_up_made_is_found_again():
    files = on_gke("a3-megagpu-8g", "spot")
    imports = hcl2.loads(files["made-by-up/imports.tf"])["import"]
    ids = {row["to"].strip("${}"): row["id"].strip('"') for row in imports}
    assert ids["google_container_cluster.muster"] == "projects/example-project/locations/us-central1/clusters/muster"
    assert ids["google_container_node_pool.muster_cpu"] == "example-project/us-central1/muster/muster-cpu"
    # Adding a member, or switching a service on, twice is as once: all others are named.
    cluster = hcl2.loads(files["cluster.tf"])["resource"]
    made = {f"{kind}.{name}".replace('"', "") for row in cluster for kind, one in row.items() for name in one}
    assert {one for one in made if "_iam_member" not in one and "_project_service" not in one} == set(ids)


def test_claims_are_refused():
    with pytest.raises(UsageError, match="acceleratorNetworkProfile"):
        on_gke("a4-highgpu-8g", "spot", Options(network="claims"))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("machine_type ", "machine_typ ", "no such argument"),
        ("disk_size_gb    = 100", 'disk_size_gb    = "100"', "is no number"),
        ("  autoscaling {", "  auto_scaling {", "no such argument"),
        ('    gpu_driver_version = "', '    gpu_driver = "', "misses gpu_driver_version"),
        ("gvnic {\n      enabled = true\n    }", "gvnic = true", "is a block"),
        ('"google_compute_firewall"', '"google_compute_fire"', "no such resource"),
    ],
)
def test_the_check_refuses_what_the_provider_would(old, new, said):
    text = CASES["gke-a4-queued-private"]["cluster.tf"]
    assert old in text
    assert any(said in line for line in complaints(hcl2.loads(text.replace(old, new, 1))))


def test_a_reference_to_nothing_is_seen():
    text = CASES["gke-l4-on-demand"]["cluster.tf"].replace(
        '"google_compute_network" "muster_net"', '"google_compute_network" "net"'
    )
    assert dangling([text], [hcl2.loads(text)]) == {"google_compute_network.muster_net"}


def test_text_is_never_an_expression():
    body = [("description", 'a "quoted" ${var.secret} %{if x}\nline')]
    text = hcl.document([hcl.Block(kind="resource", labels=("a", "b"), body=body)])
    assert "$${var.secret} %%{if x}" in text
    hcl2.loads(text)


@pytest.mark.skipif(shutil.which("terraform") is None, reason="no terraform here")
@pytest.mark.parametrize("name", CASES)
def test_laid_out_as_terraform_does(name, tmp_path):
    for file, text in CASES[name].items():
        if file.endswith(".tf"):
            (tmp_path / Path(file).name).write_text(text)
    done = subprocess.run(["terraform", "fmt", "-check", "-diff", str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_compute_engine_in_every_family():
    for machine, mode in (("a3-megagpu-8g", "spot"), ("a4-highgpu-8g", "flex_start"), ("g2-standard-48", "on_demand")):
        check(on_gce(machine, mode))
