"""The command that adds an extra to this installation: each kind of installation has its own."""

import json

import pytest

from muster.core import errors
from muster.core.errors import install_command

WHEEL = {"url": "file:///tmp/my%20dist/muster_gpu-0.2.1-py3-none-any.whl", "archive_info": {}}
URL = {"url": "https://example.org/muster_gpu-0.2.1-py3-none-any.whl", "archive_info": {}}
REPOSITORY = {
    "url": "https://example.org/m.git",
    "vcs_info": {"vcs": "git", "commit_id": "0abc"},
}


def installed(folder, monkeypatch, direct_url):
    """This module as pip would have left it below ``folder``, a site-packages."""
    record = folder / "muster_gpu-0.2.1.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: muster-gpu\nVersion: 0.2.1\n")
    if direct_url is not None:
        (record / "direct_url.json").write_text(json.dumps(direct_url))
    monkeypatch.setattr(errors, "__file__", str(folder / "muster" / "core" / "installation.py"))
    monkeypatch.setattr("sys.path", [str(folder)])


def test_a_clone_has_a_program_for_it(tmp_path, monkeypatch):
    (tmp_path / "setup.sh").touch()
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "src" / "muster" / "core" / "installation.py"))
    assert install_command("sweep") == "./setup.sh install sweep"


@pytest.mark.parametrize(
    ("direct_url", "expected"),
    [
        (None, "pip install 'muster-gpu[train,data]'"),
        (WHEEL, "pip install '/tmp/my dist/muster_gpu-0.2.1-py3-none-any.whl[train,data]'"),
        (URL, "pip install 'muster-gpu[train,data] @ https://example.org/muster_gpu-0.2.1-py3-none-any.whl'"),
        (REPOSITORY, "pip install 'muster-gpu[train,data] @ git+https://example.org/m.git@0abc'"),
    ],
)
def test_what_pip_installed_is_installed_again_from_where_it_came(tmp_path, monkeypatch, direct_url, expected):
    installed(tmp_path, monkeypatch, direct_url)
    assert install_command("train,data") == expected


def test_code_that_was_only_unpacked_names_the_distribution(tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "muster" / "core" / "installation.py"))
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert install_command("sweep") == "pip install 'muster-gpu[sweep]'"
