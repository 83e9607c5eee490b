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
from muster.backends.google.secret_manager import SecretManager, variables  # noqa: E402
from muster.backends.google.session import Session  # noqa: E402
from muster.core.errors import AccessError, BackendError, ConflictError, MusterError, UsageError  # noqa: E402

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


def test_what_hosts_are_going_to_read_is_looked_for():
    project = Project()
    project.manager.create(VERSION, b"token", LABELS)
    assert project.manager.require({"TOKEN": VERSION}) == []
    for version in (VERSION.replace("versions/1", "versions/2"), VERSION.replace("llama", "other")):
        with pytest.raises(UsageError, match=f"TOKEN is to come from {version}, which does not exist"):
            project.manager.require({"TOKEN": version})


@pytest.mark.parametrize("state", ["DISABLED", "DESTROYED"])
def test_a_version_that_nobody_can_read_is_as_good_as_none(state):
    project = Project()
    project.manager.create(VERSION, b"token", LABELS)
    project.grant()
    project.secrets.states["muster-llama", 1] = state
    with pytest.raises(UsageError, match=f"which is {state.lower()}") as raised:
        project.manager.require({"TOKEN": VERSION})
    assert raised.value.hint == "gcloud secrets versions list muster-llama --project example-project"
    with pytest.raises(BackendError, match=f"is in {state} state"):
        project.as_host().value(VERSION)


def test_who_may_not_look_is_told_so_and_goes_on():
    project = Project()
    project.secrets.may_look = False
    (warning,) = project.manager.require({"TOKEN": VERSION})
    assert f"cannot look whether {VERSION}, for TOKEN, is there" in warning and "secretmanager.versions.get" in warning


@pytest.mark.parametrize("faults", list(each_request_each_way(1)), ids=str)
def test_a_look_that_goes_wrong_once_says_nothing_false(faults):
    project = Project(faults)
    project.secrets.versions["muster-llama"] = [b"token"]
    project.secrets.labels["muster-llama"] = LABELS
    try:
        assert all("cannot look" in one for one in project.manager.require({"TOKEN": VERSION}))
    except BackendError as error:
        assert not isinstance(error, UsageError)


@pytest.mark.parametrize(
    ("data", "wrong"), [(b"\xff\xfe", "is not UTF-8"), (b"a\0b", "NUL byte"), (b"\n", "is empty"), (b"", "is empty")]
)
def test_what_no_variable_can_hold_is_refused(data, wrong):
    project = Project()
    project.manager.create(VERSION, data, LABELS)
    with pytest.raises(BackendError, match=wrong):
        project.manager.value(VERSION)


def test_a_value_is_that_of_a_file_without_the_lines_end():
    project = Project()
    project.manager.create(VERSION, b" hf_x \r\n\n", LABELS)
    assert project.manager.value(VERSION) == " hf_x "


def test_a_secret_of_the_run_file_comes_before_the_hugging_face_token():
    assert variables({"A": "1"}, None) == {"A": "1"} and variables({}, "") == {}
    assert variables({"A": "1"}, "2") == {"A": "1", "HF_TOKEN": "2"}
    assert variables({"HF_TOKEN": "1"}, "2") == {"HF_TOKEN": "1"}
