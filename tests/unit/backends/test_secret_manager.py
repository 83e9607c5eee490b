"""Secret Manager's client against the played service: each request gone wrong in each way, late grants, damage."""

import base64

import pytest

discovery = pytest.importorskip("fakes.discovery")
if discovery.folder() is None:
    pytest.skip("google-api-python-client (Google's discovery documents) is not installed", allow_module_level=True)

from fakes.clock import VirtualClock  # noqa: E402
from fakes.google_wire import Fault, Wire, each_request_each_way  # noqa: E402
from fakes.secrets import ACCESSOR, API, FakeSecrets  # noqa: E402

from muster.backends.google.http import Reply  # noqa: E402
from muster.backends.google.secret_manager import SecretManager  # noqa: E402
from muster.backends.google.session import Session  # noqa: E402
from muster.core.errors import AccessError, BackendError, ConflictError, MusterError  # noqa: E402

DOCUMENTS = discovery.Discovery(discovery.folder(), (API,))
VERSION = "projects/example-project/secrets/muster-llama/versions/1"
LABELS = {"muster-run": "llama"}
ACCOUNT = "trainer@example-project.iam.gserviceaccount.com"


class Project:
    def __init__(self, faults=None):
        self.clock, self.secrets = VirtualClock(), FakeSecrets(discovery=DOCUMENTS)
        self.wire = Wire(self.secrets, self.clock, faults=faults or {})
        self.manager = SecretManager(session=Session(http=self.wire, clock=self.clock))

    def as_host(self):
        """The same, as the run's own account."""

        class Host:
            send = staticmethod(lambda call: self.secrets.as_account(ACCOUNT, call))

        return SecretManager(session=Session(http=Host(), clock=self.clock))

    def grant(self):
        self.secrets.policies["muster-llama"] = {
            "bindings": [{"role": ACCESSOR, "members": [f"serviceAccount:{ACCOUNT}"]}]
        }


@pytest.mark.parametrize("faults", list(each_request_each_way(4)), ids=str)
def test_whatever_goes_wrong_the_same_again_makes_one_secret(faults):
    project = Project(faults)
    for _ in range(3):
        try:
            project.manager.create(VERSION, b"token", LABELS)
            break
        except MusterError:
            continue
    else:
        pytest.fail("not made in three tries")
    assert project.manager.access(VERSION) == b"token"
    assert set(project.secrets.versions["muster-llama"]) == {b"token"}
    assert project.manager.labelled("example-project", "muster-run", "llama") == [
        "projects/123456789/secrets/muster-llama"
    ]


def test_no_token_is_in_what_is_printed():
    project, sent = Project(), []
    send = project.wire.send
    project.wire.send = lambda call: (sent.append(call), send(call))[1]
    project.manager.create(VERSION, b"token", LABELS)
    words = base64.b64encode(b"token").decode()
    assert not any(words in call.shown() or words in call.url for call in sent)


def test_a_secret_that_holds_something_else_is_left_alone():
    project = Project()
    project.manager.create(VERSION, b"token", LABELS)
    with pytest.raises(ConflictError, match="holds something else"):
        project.manager.create(VERSION, b"other", LABELS)
    assert project.secrets.versions["muster-llama"] == [b"token"]


def test_a_grant_that_comes_late_is_waited_for():
    project = Project()
    project.manager.create(VERSION, b"token", LABELS)
    project.grant()
    project.secrets.holds_after = 20
    assert project.as_host().access(VERSION, project="123456789") == b"token"
    assert project.clock.now_s >= 60


def test_an_account_without_a_grant_is_refused_in_the_end():
    project = Project()
    project.manager.create(VERSION, b"token", LABELS)
    with pytest.raises(AccessError, match=r"secretmanager\.versions\.access"):
        project.as_host().access(VERSION)
    assert 120 <= project.clock.now_s < 200


def test_what_is_not_there():
    project = Project()
    with pytest.raises(BackendError, match="does not exist"):
        project.manager.access(VERSION)
    assert not project.manager.delete(VERSION)
    project.manager.create(VERSION, b"token", LABELS)
    assert project.manager.delete(VERSION) and not project.secrets.versions
    with pytest.raises(BackendError, match="names no version"):
        project.manager.access("projects/example-project/secrets/muster-llama/versions/latest")


@pytest.mark.parametrize("payload", [{"data": "dG9rZW4=", "dataCrc32c": "1"}, {"data": "%%%"}])
def test_damage_is_seen(payload):
    project = Project()
    project.wire.send = lambda call: Reply(status=200, body={"payload": payload})
    with pytest.raises(BackendError, match="came damaged"):
        project.manager.access(VERSION)


def test_a_secret_of_another_run_that_the_filter_let_through_is_not_named():
    project = Project()
    project.manager.create(VERSION, b"token", {"muster-run": "other"})
    assert project.manager.labelled("example-project", "muster-run", "llama") == []


def test_a_lost_answer_to_the_version_makes_no_second_one():
    project = Project({3: Fault.LOST})
    project.manager.create(VERSION, b"token", LABELS)
    assert project.secrets.versions["muster-llama"] == [b"token"]
