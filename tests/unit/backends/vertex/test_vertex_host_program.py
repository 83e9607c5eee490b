"""A host's first program before it serves: whether it may, what it fetches, and what it says where it cannot."""

import argparse
import json

import pytest

discovery = pytest.importorskip("fakes.discovery")
if discovery.folder() is None:
    pytest.skip("google-api-python-client (Google's discovery documents) is not installed", allow_module_level=True)
pytest.importorskip("google_crc32c", reason="comes with the gcs extra")

from fakes.clock import VirtualClock  # noqa: E402
from fakes.discovery import Discovery  # noqa: E402
from fakes.gcs import GcsFake  # noqa: E402
from fakes.google_wire import refuse  # noqa: E402
from fakes.secrets import API, FakeSecrets  # noqa: E402
from vertex_cases import RUN_ID, placement, spec  # noqa: E402

from muster.backends import run_folder  # noqa: E402
from muster.backends.google.request_log import Request, RequestLog, RequestLogFile, mark_of  # noqa: E402
from muster.backends.google.secret_manager import SecretManager  # noqa: E402
from muster.backends.google.session import Session  # noqa: E402
from muster.backends.vertex.custom_job import run_files  # noqa: E402
from muster.backends.vertex.host import Host  # noqa: E402
from muster.backends.vertex.on_host import presence  # noqa: E402
from muster.storage import run_secrets  # noqa: E402
from muster.storage.store import open_store  # noqa: E402
from muster.transport.secure_session import read_token  # noqa: E402

HOME, TOKEN = "gs://bucket/runs/llama", "t" * 64
NONCE = mark_of(RUN_ID, 1, 1)
HUB = "projects/example-project/secrets/hugging-face/versions/1"
OF = placement(spec("n1-standard-4", "on_demand", run_dir=HOME, secrets={"API_KEY": HUB}))
ACCOUNT = OF.spec.vertex.service_account
SPEC_OF_HOST_1 = json.dumps(
    {"cluster": {"workerpool0": ["a-0:2222"], "workerpool1": ["b-0:2222"]}, "task": {"type": "workerpool1", "index": 0}}
)


class Account:
    """Google as the run's own account reaches it: by the project's number alone."""

    def __init__(self, secrets):
        self.secrets = secrets

    def send(self, call):
        if "/projects/123456789/" not in call.url:
            return refuse(403, "PERMISSION_DENIED", f"not a project of yours: {call.url}")
        return self.secrets.as_account(ACCOUNT, call)


@pytest.fixture
def host(tmp_path, monkeypatch):
    with GcsFake() as bucket:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", bucket.url)
        monkeypatch.setattr("muster.backends.run_folder.PATIENCE_S", 0.0)
        store, clock = open_store(), VirtualClock()
        secrets = FakeSecrets(Discovery(discovery.folder(), (API,)))
        manager = SecretManager(session=Session(http=secrets, clock=clock))
        for version, data in ((OF.token_secret, TOKEN), (HUB, "hf_x")):
            manager.create(version, data.encode(), {})
            manager.allow(version, ACCOUNT)
        sha256 = run_folder.put(store, HOME, run_files(OF).encoded())
        log = RequestLog(run_id=RUN_ID, submission=1, requests=(Request(number=1, where="us-central1", asked_s=0.0),))
        RequestLogFile(store=store, home=HOME).write(log, None)
        given = argparse.Namespace(
            run_id=RUN_ID, home=HOME, submission="1", nonce=NONCE, run_file_sha256=sha256, run_dir=tmp_path,
            token_secret=OF.token_secret, hugging_face_secret=HUB,
        )  # fmt: skip
        environ = {"CLOUD_ML_JOB_ID": "77", "CLOUD_ML_PROJECT_ID": "123456789", "CLUSTER_SPEC": SPEC_OF_HOST_1,
                   "MUSTER_BIND": "127.0.0.1"}  # fmt: skip
        yield Host(given=given, environ=environ, store=store, http=Account(secrets), clock=clock, mark="k3f9a")


@pytest.fixture
def served(monkeypatch):
    found = []
    monkeypatch.setattr("muster.backends.vertex.host.VertexPlace.serve", lambda self: found.append(self) or 0)
    return found


def said(host):
    (found,) = presence.hosts(host.store, HOME, NONCE)
    return found


def test_everything_is_there_when_it_serves(host, served, tmp_path, capfd):
    assert host.run() == 0
    (found,) = served
    assert (found.seat.index, found.own, found.request.owner) == (1, "127.0.0.1", "77")
    base = tmp_path / RUN_ID / "k3f9a"
    for part in ("host", "supervisor"):
        assert read_token(str(base / part / "token")) == TOKEN.encode()
        assert (base / part / "home").read_text().strip() == HOME and (base / part / "resolved.json").exists()
    assert run_secrets.read(base / "host") == {"API_KEY": "hf_x", "HF_TOKEN": "hf_x"}
    assert not (base / "supervisor" / "secrets.json").exists()
    assert (said(host).state, said(host).host) == ("up", "host-1-k3f9a")
    out, err = capfd.readouterr()
    assert TOKEN not in out + err and "hf_x" not in out + err


def test_another_job_of_the_run_ends_without_a_word_to_anybody(host, served):
    assert RequestLogFile(store=host.store, home=HOME).claim(NONCE, "76", 0)
    assert host.run() == 0 and not served and presence.hosts(host.store, HOME, NONCE) == []


def test_files_that_somebody_changed_are_refused(host, served):
    host.store.put(f"{HOME}/{run_folder.FOLDER}/{host.given.run_file_sha256}", b"{}")
    assert host.run() == 1, "never 6 or 11, which would start the job again"
    assert not served and said(host).state == "failed" and "does not have its digest" in said(host).said


def test_a_secret_that_may_not_be_read_is_said(host, served):
    host.http.secrets.policies.clear()
    assert host.run() == 1 and not served
    assert said(host).state == "failed" and "secretmanager.versions.access" in said(host).said


def test_a_host_that_comes_back_to_a_run_is_patient(host, served):
    assert host.run() == 0
    host.clock.sleep(3600)
    policies, host.http.secrets.policies = host.http.secrets.policies, {}
    slept, sleep = [], host.clock.sleep

    def granted_later(seconds):
        sleep(seconds)
        slept.append(seconds)
        if sum(slept) > 900:
            host.http.secrets.policies = policies

    host.clock.sleep = granted_later
    assert host.run() == 0 and len(served) == 2, "its end would have been the run's"


def test_outside_of_vertex_it_says_so(host, served):
    host.environ = {}
    assert host.run() == 1 and not served
