"""Released manifests: fetched once, pinned by a person, compared from then on; ``up`` and ``down`` as JSON."""

import dataclasses
import json
import urllib.error
from types import SimpleNamespace

import pytest
import typer
from fakes.gke_run import invoke, on_gke
from typer.testing import CliRunner

from muster.app.run import stop
from muster.backends.cluster import Down, Leftover, Said
from muster.backends.gke.provision import software
from muster.backends.gke.provision.cluster import GkeCluster, open_cluster
from muster.backends.gke.provision.software import wanted_software
from muster.backends.protocols import Lease
from muster.cli import cloud as commands
from muster.cli import run_commands
from muster.config.load import loads
from muster.core.errors import BackendError, UsageError


def cluster(**parts):
    return dataclasses.replace(open_cluster(loads(on_gke(), (), environment=False).spec), **parts)


def place():
    return cluster().sites[0]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def release(url):
    return f"apiVersion: v1\r\nkind: ConfigMap\nmetadata: {{name: {url.rpartition('/')[2].split('.')[0]}}}\n".encode()


def test_fetched_once_and_kept_byte_for_byte(home):
    asked = []
    lines = software.fetch_missing(place(), lambda url: asked.append(url) or release(url))
    assert len(lines) == len(asked) == 2 and software.fetch_missing(place(), lambda url: 1 / 0) == []
    texts = software.at_hand(place(), None)
    assert texts["kueue.yaml"] == release("manifests.yaml").decode()
    assert str(home) in lines[0]


def test_an_address_that_does_not_answer():
    def nobody(url):
        raise urllib.error.URLError("no route")

    with pytest.raises(BackendError, match=r"cannot get https://github\.com/kubernetes-sigs/") as caught:
        software.fetch_missing(place(), nobody)
    assert "--manifests FOLDER" in caught.value.hint


def test_nothing_is_applied_before_somebody_vouched_for_it(home):
    with pytest.raises(UsageError, match="2 of the manifests"):
        cluster(http=object(), fetch=release).up(None)
    found, path = cluster(fetch=release).pin(None)
    assert len(found) == 2 and path == home / "manifests.json"
    assert software.pins() == dict(found) and json.loads(path.read_text())["pins"]
    calls, doubts = cluster().dry_run(None)
    assert calls and doubts == []


def test_a_folder_with_other_bytes_is_refused_until_it_is_pinned_again(tmp_path):
    cluster(fetch=release).pin(None)
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in wanted_software(place()):
        (folder / name).write_bytes(b"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: other}\n")
    with pytest.raises(UsageError, match="has changed"):
        cluster(http=object()).up(folder)
    before = dict(software.pins())
    cluster().pin(folder)
    assert software.pins().keys() == before.keys() and software.pins() != before


def test_a_file_of_pins_that_is_none(home):
    home.mkdir()
    (home / "manifests.json").write_text("[]")
    with pytest.raises(UsageError, match=r"manifests\.json is not a file of pinned manifests"):
        software.pins()


def test_a_dry_run_says_what_nobody_vouched_for(tmp_path):
    software.fetch_missing(place(), release)
    found = invoke(commands.up, tmp_path, "--dry-run", "--json")
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)
    assert {row["method"] for row in rows} == {"GET", "POST", "PUT", "PATCH"}
    assert found.stderr.count("not pinned by hash; up needs --pin") == 2


def test_up_as_json(tmp_path, monkeypatch):
    def up(self, manifests, *, progress, **_):
        progress(Said(text="talk"))
        return Lease(run_id="r", resources=("services", "clusters/muster"), labels={"zone": self.sites[0].zone})

    monkeypatch.setattr(GkeCluster, "up", up)
    found = invoke(commands.up, tmp_path, "--json")
    assert json.loads(found.stdout) == {
        "project": "example-project",
        "zone": "us-central1-b",
        "resources": ["services", "clusters/muster"],
    }
    assert "talk" in found.stderr


@pytest.mark.parametrize(
    ("left", "code"),
    [
        ((), 0),
        ((Leftover(kind="buckets", name="b", bills="by the GB", kept=True),), 0),
        ((Leftover(kind="disks", name="d", bills="10 GB", usd_per_day=1.5),), 6),
        ((Leftover(kind="disks", name="d", bills="10 GB"),), 6),
    ],
)
def test_down_as_json_fails_while_anything_of_ours_bills(tmp_path, monkeypatch, left, code):
    monkeypatch.setattr(GkeCluster, "down", lambda *_, **__: Down(troubles=(), leftovers=left))
    found = invoke(run_commands.down, tmp_path, "--json")
    assert found.exit_code == code
    document = json.loads(found.stdout)
    assert document["clean"] is (code == 0) and len(document["left"]) == len(left)
    assert document["usd_per_day"] == sum(one.usd_per_day or 0 for one in left)
    assert document["prices_not_known"] == sum(one.usd_per_day is None for one in left)


def test_down_of_a_run_as_json(monkeypatch, tmp_path):
    run = SimpleNamespace(run_id="tiny-1", path=tmp_path)
    gone = stop.Down(run=run, left=(), usd_per_hour=12.5)
    monkeypatch.setattr("muster.app.run.stop.down", lambda reference: gone)
    app = typer.Typer()
    app.command()(run_commands.down)
    found = CliRunner().invoke(app, ["tiny-1", "--json"])
    assert json.loads(found.stdout) == {"run_id": "tiny-1", "clean": True, "left": [], "stopped_usd_per_hour": 12.5}
