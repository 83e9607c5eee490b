"""The user's code: what is packed, what is passed over, and that it comes out as it went in."""

import pytest

from muster.backends import code_bundle
from muster.config.spec import RunSpec
from muster.core.errors import UsageError


def own(script, **more):
    return RunSpec.model_validate({"name": "own", "command": [str(script), "--flag"], **more})


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    for name in (
        "train.py",
        "lib/net.py",
        "lib/__pycache__/net.pyc",
        ".git/config",
        ".env",
        "venv2/pyvenv.cfg",
        "venv2/x.py",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "link.py").symlink_to("/etc/passwd")
    return folder


def test_the_folder_of_the_script_goes_along(project, tmp_path):
    spec, data = code_bundle.pack(own(project / "train.py"), "/gcs/b/run")
    assert spec.command == ["/gcs/b/run/code/train.py", "--flag"]
    code_bundle.unpack(data, tmp_path / "run")
    found = {str(path.relative_to(tmp_path / "run" / "code")) for path in (tmp_path / "run" / "code").rglob("*.*")}
    assert found == {"train.py", "lib/net.py"}, "no secrets, no links, nothing built"


def test_a_new_shipment_replaces_the_old_one(project, tmp_path):
    _, data = code_bundle.pack(own(project / "train.py"), "/r")
    code_bundle.unpack(data, tmp_path / "run")
    (project / "lib" / "net.py").unlink()
    code_bundle.unpack(code_bundle.pack(own(project / "train.py"), "/r")[1], tmp_path / "run")
    assert not (tmp_path / "run" / "code" / "lib").exists()


def test_what_the_image_has_is_left_alone(tmp_path):
    for spec in (
        own("/opt/in/the/image.py"),
        own("-m"),
        RunSpec.model_validate({"name": "a", "command": ["-m", "mine"]}),
    ):
        assert code_bundle.pack(spec, "/r") == (spec, None)


def test_a_policy_of_ones_own_goes_along(tmp_path):
    (tmp_path / "patient.py").write_text("decide = None")
    spec, data = code_bundle.pack(own("-m", recovery={"policy": str(tmp_path / "patient.py")}), "/r")
    assert spec.recovery.policy == "/r/code/policy/patient.py"
    code_bundle.unpack(data, tmp_path / "run")
    assert (tmp_path / "run" / "code" / "policy" / "patient.py").read_text() == "decide = None"


def test_too_much_is_refused_and_the_largest_is_named(project):
    import os

    (project / "weights.bin").write_bytes(os.urandom(code_bundle.LIMIT_BYTES + 1))
    with pytest.raises(UsageError, match=r"largest: weights\.bin"):
        code_bundle.pack(own(project / "train.py"), "/r")
