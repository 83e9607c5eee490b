"""An image by Cloud Build: the context goes to a bucket, the image to the repository that ``up`` made; no docker."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass

from muster.backends.gke.provision.image import Parts, build_arguments
from muster.backends.gke.provision.inventory.resource_names import Site
from muster.backends.google.http import Call, Unreachable
from muster.backends.google.project.resources import MARK
from muster.backends.google.refusals import refusal
from muster.backends.google.session import Session
from muster.core.errors import AccessError, BackendError, UsageError
from muster.core.typed_json import JsonObject, child, children, text

NAME = "trainer"
GOING = ("PENDING", "QUEUED", "WORKING")
LONGEST_S = 7200.0
DOCKER = "gcr.io/cloud-builders/docker"
"""Google's builder image with the docker client (Cloud Build's documentation)."""


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
