"""The user's code: what is packed, what is passed over, and that it comes out as it went in."""

import io
import os
import pathlib
import shutil
import subprocess
import tarfile

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

    (project / "weights.bin").write_bytes(os.urandom(code_bundle.LIMIT_BYTES + 1))
    with pytest.raises(UsageError, match=r"largest: weights\.bin"):
        code_bundle.pack(own(project / "train.py"), "/r")


def work(folder, **more):
    return RunSpec.model_validate({"name": "own", "command": ["train.py"], "workdir": str(folder), **more})


@pytest.fixture
def tree(tmp_path):
    folder = tmp_path / "tree"
    for name in ("train.py", "lib/net.py", ".gitignore", ".env", "data/big.bin", "build/kept.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("data/\n" if name == ".gitignore" else name)
    (folder / "train.py").chmod(0o755)
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return folder


def shipped(spec, tmp_path):
    seen, data = code_bundle.pack(spec, str(tmp_path / "run"))
    code_bundle.unpack(data, tmp_path / "run")
    below = pathlib.Path(seen.workdir)
    assert below.parent == tmp_path / "run" / "code"
    return seen, {str(path.relative_to(below)) for path in below.rglob("*") if not path.is_dir()}


def test_a_git_tree_is_shipped_without_what_it_ignores(tree, tmp_path):
    spec, names = shipped(work(tree), tmp_path)
    assert names == {"train.py", "lib/net.py", ".gitignore", "build/kept.py"}
    assert spec.command == ["train.py"] and os.access(f"{spec.workdir}/train.py", os.X_OK)


def test_its_name_is_its_content(tree, tmp_path):
    before, again = shipped(work(tree), tmp_path)[0], shipped(work(tree), tmp_path)[0]
    (tree / "data" / "big.bin").write_text("ignored")
    assert before.workdir == again.workdir == shipped(work(tree), tmp_path)[0].workdir
    (tree / "lib" / "net.py").write_text("changed")
    assert shipped(work(tree), tmp_path)[0].workdir != before.workdir


def test_links_stay_inside(tree, tmp_path):
    (tree / "same.py").symlink_to(tree / "lib" / "net.py")
    spec, names = shipped(work(tree), tmp_path)
    assert "same.py" in names and (pathlib.Path(spec.workdir) / "same.py").read_text() == "lib/net.py"
    (tree / "lib" / "out.py").symlink_to("/etc/hostname")
    with pytest.raises(UsageError, match=r"the link lib/out\.py leads out of .* \(to /etc/hostname\)"):
        code_bundle.pack(work(tree), "/r")


def packed(*entries):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, kind, link in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, link
            archive.addfile(entry, io.BytesIO())
    return raw.getvalue()


FILE, LINK = tarfile.REGTYPE, tarfile.SYMTYPE


@pytest.mark.parametrize(
    "entries",
    [
        [("../out.py", FILE, "")],
        [("/tmp/out.py", FILE, "")],
        [("a/../../out.py", FILE, "")],
        [("a", LINK, ".."), ("a/out.py", FILE, "")],
        [("a", LINK, "/etc/hostname")],
        [("a", LINK, "b/c/../.."), ("b/c", LINK, "..")],
        [("same", LINK, "other"), ("same", FILE, "")],
        [("a.py", FILE, ""), ("b.py", tarfile.LNKTYPE, "a.py")],
        [("a", tarfile.CHRTYPE, "")],
        [("a", tarfile.FIFOTYPE, "")],
    ],
)
def test_an_archive_that_is_none_of_ours_puts_nothing_anywhere(tmp_path, entries):
    """Whoever can write into the bucket, and knows the digest's place, still writes into no other folder."""
    run = tmp_path / "run"
    code_bundle.unpack(packed(("kept.py", FILE, "")), run)
    with pytest.raises(UsageError, match="the code that was shipped holds"):
        code_bundle.unpack(packed(*entries), run)
    assert [path.name for path in tmp_path.iterdir()] == ["run"] and [path.name for path in run.iterdir()] == ["code"]
    assert [path.name for path in (run / "code").iterdir()] == ["kept.py"]


def test_a_folder_outside_git_is_shipped_without_what_is_hidden(project, tmp_path, monkeypatch):
    shutil.rmtree(project / ".git")
    (project / "link.py").unlink()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert shipped(work(project), tmp_path)[1] == {"train.py", "lib/net.py"}


def test_a_hole_of_a_terabyte_is_refused_unread(tree):
    with (tree / "huge.bin").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, match=r"1099511627\d+ bytes, at most 700000 are shipped \(largest: huge\.bin"):
        code_bundle.pack(work(tree), "/r")


def test_a_setup_of_ones_own_goes_along(tmp_path):
    (tmp_path / "prepare.sh").write_text("#!/bin/sh\n")
    (tmp_path / "prepare.sh").chmod(0o755)
    spec, data = code_bundle.pack(own("-m", setup=str(tmp_path / "prepare.sh")), str(tmp_path / "run"))
    code_bundle.unpack(data, tmp_path / "run")
    assert spec.setup == str(tmp_path / "run/code/setup/prepare.sh") and os.access(spec.setup, os.X_OK)
