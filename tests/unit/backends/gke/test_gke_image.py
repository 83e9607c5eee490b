"""The image of a run: its parts against the table, its context, and a Cloud Build that fails on purpose."""

import io
import json
import subprocess
import sys
import tarfile

import pytest
from cases import spec

from muster.backends.gke.provision.cluster import GkeCluster, open_cluster
from muster.backends.gke.provision.image import Parts, context, doubts, parts, tag
from muster.catalog import gke as catalogue
from muster.core.errors import AccessError, BackendError, UsageError

discovery = pytest.importorskip("fakes.discovery")
if discovery.folder() is None:
    pytest.skip("google-api-python-client (Google's discovery documents) is not installed", allow_module_level=True)

from fakes.gcp import FakeGoogleCloud  # noqa: E402

DOCUMENTS = discovery.Discovery(discovery.folder())
SPEC = spec("a4-highgpu-8g", "flex_start_queued", project="example-project")


BUILDER = "projects/example-project/serviceAccounts/muster-build@example-project.iam.gserviceaccount.com"


def cloud(**changes):
    """A project where ``up`` has been."""
    google = FakeGoogleCloud(DOCUMENTS, **changes)
    google.store[f"v1/{BUILDER}"] = {"description": "made by muster"}
    return google


class Clock:
    def sleep(self, seconds):
        pass


def image_of(spec, google=None, **parts):
    return GkeCluster(sites=open_cluster(spec).sites, http=google, clock=Clock()).image(**parts)


def messages(machine, **changes):
    family, found = catalogue.find(machine, None)
    return [(one.wrong, one.message) for one in doubts(parts(**changes), family, found)]


def test_the_tables_own_parts_are_not_wrong_anywhere():
    for family in catalogue.families().values():
        for machine in family.machines.values():
            assert not any(one.wrong for one in doubts(parts(), family, machine)), machine.name


@pytest.mark.parametrize(
    ("machine", "changes", "wrong", "words"),
    [
        (
            "a4-highgpu-8g",
            {"torch_index": "https://x/whl/cu126"},
            True,
            "torch is built for CUDA 12.6, a4 needs CUDA 12.8",
        ),
        ("a4-highgpu-8g", {"torch_index": "https://x/whl/cu130"}, True, "of different major versions"),
        ("a4-highgpu-8g", {"torch_index": "https://x/simple"}, False, "does not say which CUDA"),
        ("a4-highgpu-8g", {"base": "debian:13"}, False, "base debian:13 is not in the table"),
        ("a4-highgpu-8g", {}, False, "is known with NCCL 2.25, 2.26"),
        ("a3-ultragpu-8g", {}, False, "no known row for a3-ultra"),
        ("a3-highgpu-8g", {}, False, "GPUDirect-TCPX v3.1.9 is older than the NCCL that a torch of 2026 brings"),
        ("a4-highgpu-8g", {}, False, "the newest gIB is v1.1.2, built with CUDA 13.0"),
    ],
)
def test_what_does_not_fit_or_is_not_known_is_said(machine, changes, wrong, words):
    assert any(one == wrong and words in text for one, text in messages(machine, **changes)), messages(
        machine, **changes
    )


def test_parts_that_do_not_fit_are_refused_before_anything_is_sent():
    with pytest.raises(UsageError, match="these do not fit: torch is built for CUDA 12"):
        image_of(SPEC, torch_index="https://x/whl/cu126")


def test_the_context_is_this_muster_and_always_the_same(tmp_path):
    data = context(parts())
    assert context(parts()) == data and len(data) < 8_000_000
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        names = set(archive.getnames())
        archive.extractall(tmp_path)
    assert {"Dockerfile", "requirements.lock", "muster/agent/watchdog.py", "muster/backends/gke/pod/main.py"} <= names
    assert not any("__pycache__" in name for name in names)
    code = (
        "import muster, muster.agent.watchdog, muster.backends.gke.pod.main, muster.app.supervisor;"
        " print(muster.__file__)"
    )
    argv = [sys.executable, "-P", "-c", code]
    ran = subprocess.run(
        argv, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}, timeout=60, check=True
    )
    assert ran.stdout.startswith(str(tmp_path)), "what is packed starts"


def test_a_base_by_tag_is_doubted_and_one_by_digest_is_the_same_row_of_the_table():
    family, machine = catalogue.find("a4-highgpu-8g", None)
    tagged = parts()
    pinned = parts(base=f"{tagged.base}@sha256:{'0' * 64}")
    by_tag, by_digest = ({each.message for each in doubts(one, family, machine)} for one in (tagged, pinned))
    assert by_digest < by_tag
    (doubt,) = by_tag - by_digest
    assert f"{tagged.base}@sha256:..." in doubt


def test_another_part_is_another_image():
    data = b"x"
    one = Parts(base="a", torch="1", torch_index="b")
    assert len({tag(one, data), tag(one, b"y"), tag(Parts(base="a", torch="2", torch_index="b"), data)}) == 3


def test_built_once(google=None):
    google = cloud()
    image = image_of(SPEC, google)
    assert image.name.startswith("us-central1-docker.pkg.dev/example-project/muster/trainer:")
    assert image.build() is True
    (made,) = google.builds.values()
    assert made["images"] == [image.name] == list(google.images)
    assert made["serviceAccount"] == BUILDER
    name = image.name.rpartition(":")[2]
    assert google.uploads == {f"muster-build/{name}.tar.gz": context(parts())}
    assert image.build() is False and len(google.builds) == 1


def test_an_interrupted_build_is_joined_not_doubled():
    google = cloud(lose={4})
    image = image_of(SPEC, google)
    assert image.build() is True
    assert len(google.builds) == 1, "the answer to the create was lost, the build was not"


def test_a_build_that_failed_says_where_its_log_is():
    google = cloud(build_ends="FAILURE")
    with pytest.raises(BackendError, match="ended as FAILURE") as caught:
        image_of(SPEC, google).build()
    assert "https://log" in caught.value.hint and not google.images


def test_a_project_where_up_has_not_been_has_no_account_to_build_as():
    with pytest.raises(AccessError, match="cannot run as muster-build@example-project") as caught:
        image_of(SPEC, FakeGoogleCloud(DOCUMENTS)).build()
    assert "muster up makes that account" in caught.value.hint


def test_the_dry_run_shows_sizes_not_bytes():
    shown = "\n".join(call.shown() for call in image_of(SPEC).calls())
    assert "bytes of application/gzip" in shown and "cloud-builders/docker" in shown


def test_without_a_bucket_there_is_nowhere_to_put_it():
    plain = spec("a4-highgpu-8g", "spot", project="example-project", checkpoint={})
    with pytest.raises(UsageError, match="no bucket"):
        image_of(plain).calls()


def test_the_dockerfile_takes_what_is_given():
    from muster.backends.gke.provision.image import build_arguments

    text = context(parts())
    with tarfile.open(fileobj=io.BytesIO(text)) as archive:
        dockerfile = archive.extractfile("Dockerfile").read().decode()
    given = [word.partition("=")[0] for word in build_arguments(parts(), "i") if "=" in word]
    assert sorted(given) == sorted(set(given)) and all(f"ARG {name}\n" in dockerfile for name in given)
    assert json.dumps(given) == '["BASE", "TORCH", "TORCH_INDEX"]'


def test_who_asks_for_reducers_is_told_where_their_plugin_comes_from():
    asked = spec("a4-highgpu-8g", "flex_start_queued", project="example-project", vertex={"reduction_servers": "auto"})
    assert [one for one in image_of(asked).doubts if "google-reduction-server" in one]
    assert not [one for one in image_of(SPEC).doubts if "google-reduction-server" in one]


def test_the_build_says_whether_the_plugin_would_be_loaded_and_does_not_end_for_it():
    with tarfile.open(fileobj=io.BytesIO(context(parts()))) as archive:
        dockerfile = archive.extractfile("Dockerfile").read().decode()
        (line,) = [row for row in dockerfile.splitlines() if "reduction_plugin" in row]
        module = line.split()[3]
        assert line.endswith(" || true") and f"{module.replace('.', '/')}.py" in archive.getnames()
    told = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True)
    assert told.returncode == 1 and "google-reduction-server" in told.stdout
