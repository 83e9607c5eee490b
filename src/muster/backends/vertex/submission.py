"""One submission of a run to Vertex AI: what is put where before the first region is asked."""

from __future__ import annotations

from dataclasses import dataclass

from muster.backends import code_bundle, run_folder
from muster.backends.google.secret_manager import SecretManager, variables
from muster.backends.run_folder import RunFiles
from muster.backends.run_home import SUBMISSION
from muster.backends.vertex.custom_job import RUN_LABEL, code_dir, requests, run_files
from muster.backends.vertex.placement import Placement, place
from muster.backends.vertex.run_file_rules import rules
from muster.config.spec import RunSpec
from muster.core.errors import RunFileError
from muster.core.protocols import Store
from muster.core.types import JobRequest, TaskSpec

BACKEND = "vertex"
RESOLVED, RUN_YAML = "resolved.json", "run.yaml"


def render(spec: RunSpec, *, run_id: str, run_dir: str) -> JobRequest:
    """The requests by region, and the run's files. Pure.

    Raises:
        RunFileError: rules across keys are broken; all of them at once, with reasons.
        UsageError: no such machine.
    """
    if problems := list(rules(spec)):
        raise RunFileError(problems)
    placement = place(spec, run_id=run_id, run_dir=run_dir)
    files = run_files(placement)
    host = ("python", "-m", "muster.agent.watchdog", "--run-id", run_id)
    supervisor = ("python", "-m", "muster.app.supervisor", "--run-id", run_id)
    return JobRequest(
        run_id=run_id,
        backend=BACKEND,
        run_dir=run_dir,
        tasks=(TaskSpec(name="supervisor", argv=supervisor), TaskSpec(name="agent", argv=host, count=placement.hosts)),
        labels={RUN_LABEL: run_id},
        files={
            **{f"custom-job.{one.region}.json": one.text() for one in requests(placement)},
            RESOLVED: files.resolved,
            RUN_YAML: files.run_yaml,
        },
    )


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A request with the user's own code as it is now."""

    placement: Placement
    number: int
    files: RunFiles

    def put(self, store: Store, secrets: SecretManager, token: str) -> tuple[str, list[str]]:
        """The run's files into its home and its token into a secret that its account may read; the same again changes
        nothing. Returns the files' digest, and warnings.

        Raises:
            UsageError: a secret that hosts are to read is not there.
            ConflictError: the secret holds another token.
            AccessError, BackendError: refused.
        """
        asked = self.placement.spec.vertex
        warnings = secrets.require(variables(self.placement.spec.secrets, asked.hugging_face_secret))
        sha256 = run_folder.put(store, self.placement.home, self.files.encoded())
        version = self.placement.token_secret
        secrets.create(version, token.encode(), {RUN_LABEL: self.placement.run_id})
        return sha256, [*warnings, *secrets.share(version, (asked.service_account,))]


def submission_of(request: JobRequest) -> Submission:
    """Raises UsageError: more code than is shipped."""
    spec = RunSpec.model_validate_json(request.files[RESOLVED])
    shipped, code = code_bundle.pack(spec, code_dir(request.run_id))
    files = RunFiles(
        resolved=shipped.model_dump_json(indent=1) + "\n", run_yaml=request.files[RUN_YAML], code=code
    )  # fmt: skip
    placement = place(spec, run_id=request.run_id, run_dir=request.run_dir)
    return Submission(placement=placement, number=int(request.labels.get(SUBMISSION, "1")), files=files)
