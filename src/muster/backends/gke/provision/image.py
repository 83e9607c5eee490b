"""The image of a run: what it is built from, whether its parts fit each other, and what is sent to be built. Pure.

One table (``catalog/gke/versions.yaml``) says which driver, CUDA, NCCL plugin and torch were seen to work together.
What it does not know is a warning that says so, never a guess.
"""

from __future__ import annotations

import hashlib
import re
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from muster.backends.code_bundle import archive
from muster.backends.gke.provision.inventory.resource_names import Site
from muster.backends.google.http import Call, Unreachable
from muster.backends.google.project.resources import MARK
from muster.backends.google.refusals import refusal
from muster.backends.google.session import Session
from muster.catalog import gke as catalogue
from muster.catalog.gke import Family, Machine
from muster.core.errors import AccessError, BackendError, UsageError
from muster.core.typed_json import JsonObject, child, children, text, texts

NAME = "trainer"
GOING = ("PENDING", "QUEUED", "WORKING")
LONGEST_S = 7200.0
DOCKER = "gcr.io/cloud-builders/docker"
"""Google's builder image with the docker client (Cloud Build's documentation)."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    base: str
    torch: str
    torch_index: str

    @property
    def torch_cuda(self) -> str | None:
        """``cu128`` of the index's address is CUDA 12.8; None for an index that does not say."""
        result = re.search(r"/cu(\d\d)(\d)$", self.torch_index.rstrip("/"))
        return f"{result[1]}.{result[2]}" if result else None


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """A combination that does not fit (``wrong``), or is untested as far as known."""

    message: str
    wrong: bool = False


def parts(*, base: str | None = None, torch: str | None = None, torch_index: str | None = None) -> Parts:
    """The table's, with the user's overrides."""
    table = child(catalogue.versions(), "image")
    return Parts(
        base=base or text(table, "base"),
        torch=torch or text(table, "torch"),
        torch_index=torch_index or text(table, "torch_index"),
    )


def doubts(made_of: Parts, family: Family, machine: Machine, *, reducers: bool = False) -> list[Doubt]:
    """What does not fit, first; then what is not known to. ``reducers``: a job on Vertex AI asks for them."""
    rows = [row for row in children(catalogue.versions(), "compatibility") if row["family"] == family.name]
    result = list(_of_the_base(made_of))
    if not rows and machine.gpus:
        result.append(Doubt(message=f"no known row for {family.name}: no image is known to work on it"))
    if machine.chips:
        result.append(Doubt(message="the image has no libtpu: TPUs need one of yours with muster and jax[tpu]==0.10.2"))
    if reducers:
        plugin = "vertex.reduction_servers needs the package google-reduction-server, which the image has from its base"
        result.append(Doubt(message=f"{plugin} alone: the build's log says whether NCCL would load it"))
    for row in rows:
        result += [*_of_the_row(made_of, row), *_of_the_node(family, machine, row)]
    return sorted(result, key=lambda doubt: not doubt.wrong)


def _of_the_base(made_of: Parts) -> Iterator[Doubt]:
    known = _known(made_of)
    if "@sha256:" not in made_of.base:
        yield Doubt(
            message=f"base {made_of.base} is named by a tag, which can move: name it with its digest, "
            f"{made_of.base}@sha256:... (docker buildx imagetools inspect {made_of.base})"
        )
    if not known:
        yield Doubt(message=f"base {made_of.base} is not in the table: its CUDA and glibc are not known here")
    elif made_of.torch_cuda and _number(known["cuda"])[0] != _number(made_of.torch_cuda)[0]:
        yield Doubt(
            message=f"base has CUDA {known['cuda']}, torch is built for {made_of.torch_cuda}: torch.compile's nvcc and "
            "torch's runtime are of different major versions",
            wrong=True,
        )
    if made_of.torch_cuda is None:
        yield Doubt(message=f"index {made_of.torch_index} does not say which CUDA torch is built for")


def _known(made_of: Parts) -> JsonObject:
    """The table's row of the base; a digest says which build of it, not what it is."""
    return child(catalogue.versions(), "image", "bases", made_of.base.partition("@")[0])


def _of_the_row(made_of: Parts, row: JsonObject) -> Iterator[Doubt]:
    cuda, glibc = made_of.torch_cuda, _known(made_of).get("glibc")
    if cuda and "least_cuda" in row and _number(cuda) < _number(row["least_cuda"]):
        requested = f"{row['family']} needs CUDA {row['least_cuda']} or newer"
        yield Doubt(message=f"torch is built for CUDA {cuda}, {requested}", wrong=True)
    if glibc and "least_glibc" in row and _number(glibc) < _number(row["least_glibc"]):
        requested = f"the NCCL plugin of {row['family']} needs {row['least_glibc']}"
        yield Doubt(message=f"base has glibc {glibc}, {requested}", wrong=True)
    if "supported_nccl" in row:
        versions = ", ".join(texts(row, "supported_nccl"))
        yield Doubt(
            message=f"{row['plugin']} is known with NCCL {versions}; the one that torch {made_of.torch} brings is not "
            "in the table: the build's log prints it, and NCCL_DEBUG=INFO says at the start which one is used"
        )
    if "doubt" in row:
        yield Doubt(message=text(row, "doubt"))
    if "torch" in row and cuda and row["torch"] != f"cu{cuda.replace('.', '')}":
        yield Doubt(
            message=f"seen to work with torch {row['torch']}, not with {made_of.torch_index.rsplit('/', 1)[-1]}"
        )


def _of_the_node(family: Family, machine: Machine, row: JsonObject) -> Iterator[Doubt]:
    installed = " ".join(machine.fabric.images.values())
    if machine.fabric.images and str(row["plugin"]) not in installed:
        yield Doubt(message=f"the known row is for {row['plugin']}; nodes get {installed.rsplit('/', 1)[-1]}")
    if "least_driver" in row and family.driver == "DEFAULT":
        least = f"{family.name} needs {row['least_driver']} or newer"
        yield Doubt(message=f"nodes get GKE's default driver, whose number is not known here; {least}")


def context(made_of: Parts) -> bytes:
    """What Cloud Build gets: Dockerfile, lock and this installation of Muster, as a tar.gz. The same parts give
    the same bytes. The lock is of what a pod needs: it trains, reads data and buckets, queues the run's next part."""
    package = _package(resources.files("muster"), PurePosixPath("muster"))
    own = {name: (resources.files(__package__) / name).read_bytes() for name in ("Dockerfile", "requirements.lock")}
    return archive(own | {str(path): data for path, data in package})


def tag(made_of: Parts, data: bytes) -> str:
    """The image's tag: the same parts and the same code are the same image, built once."""
    inputs = "\n".join((made_of.base, made_of.torch, made_of.torch_index)).encode()
    return hashlib.sha256(inputs + data).hexdigest()[:12]


def build_arguments(made_of: Parts, image: str) -> list[str]:
    """``docker``'s own, as Cloud Build runs it."""
    return [
        "build", "--build-arg", f"BASE={made_of.base}", "--build-arg", f"TORCH={made_of.torch}",
        "--build-arg", f"TORCH_INDEX={made_of.torch_index}", "--tag", image, ".",
    ]  # fmt: skip


def _package(folder: Traversable, at: PurePosixPath) -> Iterator[tuple[PurePosixPath, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name != "__pycache__":
            yield from _package(entry, at / entry.name)
        elif entry.is_file() and not entry.name.endswith((".pyc", ".so")):
            yield at / entry.name, entry.read_bytes()


def _number(version: object) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", str(version))]


@dataclass(frozen=True, kw_only=True)
class Build:
    """One image: where it goes, and what it is built from."""

    site: Site
    parts: Parts
    tag: str
    data: bytes

    @property
    def image(self) -> str:
        return f"{self.site.region}-docker.pkg.dev/{self.site.project}/{self.site.prefix}/{NAME}:{self.tag}"

    @property
    def bucket(self) -> str:
        """Raises UsageError where the run file names none."""
        if not self.site.buckets:
            raise UsageError("no bucket to put the build's files in", hint="checkpoint.dir: gs://BUCKET/checkpoints")
        return self.site.buckets[0]

    @property
    def source(self) -> str:
        return f"muster-build/{self.tag}.tar.gz"

    def calls(self) -> list[Call]:
        """What building it sends, in order."""
        return [self._there(), self._upload(), self._create()]

    def run(self, session: Session) -> bool:
        """Build and wait; False where the image was there already. Again after an interruption joins a running build.

        Raises:
            BackendError: the build failed; where its log is.
        """
        if self._exists(session):
            return False
        going = self._running(session)
        if going is None:
            session.ok(self._upload())
            try:
                going = child(self._begin(session), "metadata", "build")
            except Unreachable:
                going = self._running(session)  # the answer is lost, not necessarily the build
                if going is None:
                    raise
        self._wait(session, going)
        return True

    def _begin(self, session: Session) -> JsonObject:
        reply = session.send(call := self._create())
        if reply.status in (400, 403, 404) and self.site.build_account in reply.message:
            raise AccessError(
                f"the build cannot run as {self.site.build_account}: {reply.message}",
                hint="muster up makes that account; or name another: resources.build_service_account",
            )
        if reply.status >= 300:
            raise refusal(call, reply)
        return reply.body

    def _exists(self, session: Session) -> bool:
        call = self._there()
        reply = session.send(call)
        if reply.status >= 300 and reply.status != 404:
            raise refusal(call, reply)
        return reply.status < 300

    def _running(self, session: Session) -> JsonObject | None:
        condition = urllib.parse.quote(f'tags="{MARK.replace(" ", "-")}-{self.tag}"')
        builds = session.ok(Call(method="GET", url=f"{self._builds}?filter={condition}")).body
        return next((row for row in children(builds, "builds") if text(row, "status") in GOING), None)

    def _wait(self, session: Session, build: JsonObject) -> None:
        url, waited_s, pause_s = f"{self._builds}/{build['id']}", 0.0, 5.0
        while build.get("status") in GOING:
            if waited_s > LONGEST_S:
                raise BackendError(f"the build {build['id']} does not end", hint=str(build.get("logUrl", url)))
            session.clock.sleep(pause_s)
            waited_s += pause_s
            build = session.ok(Call(method="GET", url=url)).body
        if build.get("status") != "SUCCESS":
            reason = text(build, "statusDetail") or text(build, "failureInfo", "detail") or "it does not say why"
            raise BackendError(
                f"the build ended as {build.get('status')}: {reason}", hint=f"log: {build.get('logUrl')}"
            )

    def _there(self) -> Call:
        folder = f"projects/{self.site.project}/locations/{self.site.region}/repositories/{self.site.prefix}"
        url = f"https://artifactregistry.googleapis.com/v1/{folder}/packages/{NAME}/tags/{self.tag}"
        return Call(method="GET", url=url)

    def _upload(self) -> Call:
        name = urllib.parse.quote(self.source, safe="")
        url = f"https://storage.googleapis.com/upload/storage/v1/b/{self.bucket}/o?uploadType=media&name={name}"
        return Call(method="POST", url=url, data=self.data, content_type="application/gzip")

    def _create(self) -> Call:
        body: JsonObject = {
            "source": {"storageSource": {"bucket": self.bucket, "object": self.source}},
            "steps": [{"name": DOCKER, "args": build_arguments(self.parts, self.image)}],
            "images": [self.image],
            "tags": [f"{MARK.replace(' ', '-')}-{self.tag}"],
            "serviceAccount": f"projects/{self.site.project}/serviceAccounts/{self.site.build_account}",
            "timeout": f"{int(LONGEST_S)}s",
            # torch and CUDA unpack to tens of GB; the default machine has 1 CPU and 100 GB.
            "options": {"machineType": "E2_HIGHCPU_8", "diskSizeGb": "200", "logging": "CLOUD_LOGGING_ONLY"},
        }
        return Call(method="POST", url=self._builds, body=body)

    @property
    def _builds(self) -> str:
        return f"https://cloudbuild.googleapis.com/v1/projects/{self.site.project}/locations/{self.site.region}/builds"
