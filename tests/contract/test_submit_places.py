"""``muster submit --backends``: the next place is asked where one has no machines, and nothing is left at the first.

The launchers are real, Vertex AI and Compute Engine are the played services of the launchers' contract.
"""

import signal

import pytest
from launcher_cases import PLACES, SLEEP, GceCase, VertexCase

from muster.app import submit_places
from muster.app.submit_places import Way, submit_to_first, ways
from muster.backends.gke.launcher import GkeLauncher
from muster.cli import main
from muster.core import processes
from muster.core.errors import AccessError, BackendError, CapacityError, UsageError
from muster.storage import run_registry

TEXT = (
    PLACES
    + """\
name: llama
model:
  config: {model_type: llama, hidden_size: 256, num_hidden_layers: 2, num_attention_heads: 4, intermediate_size: 512}
  tokenizer: {kind: word, vocab_size: 256}
data: {sources: [{type: text2sql, rows: 1000}]}
training: {steps: 200, sequence_length: 512, global_batch_size: 64}
"""
)
BOTH = ["vertex", "gce"]
REGION = ("resources.locations=[us-central1]",)
GKE = Way(place="gke", title="gke", usd=1.0, overrides=("backend=gke", "resources.cluster=train"))
VERTEX = Way(place="vertex", title="vertex", usd=2.0, overrides=("backend=vertex", *REGION))


class Market:
    """Two places, which are asked by one user."""

    def __init__(self, folder):
        self.vertex, self.gce, self.said = VertexCase(folder / "v"), GceCase(folder / "g"), []
        self.gce.argvs = self.vertex.argvs = AnyRun()
        self.gce.launcher.meanwhile = lambda request: None
        self.run_file = folder / "run.yaml"
        self.run_file.write_text(TEXT)

    def load(self, name):
        return {"vertex": self.vertex, "gce": self.gce}[name].launcher

    def submit(self, *overrides, names=BOTH, patience_s=None):
        return submit_to_first(
            self.run_file, overrides, names=names, patience_s=patience_s, tell=self.said.append, clock=self.gce.clock
        )

    @property
    def machines(self):
        return [key for key in self.gce.cloud.store if "/instances/" in key]

    @property
    def jobs(self):
        return [job for job in self.vertex.vertex.jobs.values() if not job.final]


class AnyRun(dict):
    """Programs of any run: they sleep, so that machines are there and no host joins."""

    def __missing__(self, run_id):
        return (SLEEP,)


@pytest.fixture
def market(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    found = Market(tmp_path)
    monkeypatch.setattr("muster.backends.load", found.load)
    yield found
    for run_id, _ in run_registry.registry():
        processes.send(processes.labelled(run_id), signal.SIGKILL)


def test_the_plans_order_is_the_cheapest_first_and_zones_are_their_regions_where_there_are_none(market):
    asked, without = ways(market.run_file, names=BOTH)
    assert [one.place for one in asked] == ["gce", "vertex"] and asked[0].usd < asked[1].usd and not without
    assert 'resources.locations=["us-central1"]' in asked[1].overrides, "of the zone us-central1-a"


def test_one_place_takes_it_and_no_other_is_asked(market):
    result = market.submit()
    assert result.spec.backend == "gce" and len(market.machines) == 1 and not market.vertex.vertex.jobs
    assert market.said[0].startswith("asking gce: 1 x g2-standard-48")


def test_without_machines_at_the_first_the_next_one_is_asked_and_nothing_is_left(market):
    market.gce.cloud.stock[GceCase.ZONE] = 0
    result = market.submit()
    assert result.spec.backend == "vertex" and len(market.jobs) == 1
    assert not market.machines and list(run_registry.registry()) == [(result.run.run_id, result.run.path)]
    assert any(line.startswith("refused: ") for line in market.said)


def test_where_nobody_has_machines_every_reason_is_said(market):
    market.gce.cloud.stock[GceCase.ZONE] = 0
    market.vertex.vertex.limits = {}
    with pytest.raises(CapacityError, match=r"no place takes the run: gce: .*; vertex: .*quota"):
        market.submit()
    assert not market.machines and not market.jobs and not list(run_registry.registry())


def test_a_place_that_may_hold_something_is_the_last_one_asked(market, monkeypatch):
    """Two requests must never be under way."""

    def lost(run_file, **more):
        raise BackendError("no answer")

    monkeypatch.setattr(submit_places, "submit", lost)
    with pytest.raises(BackendError, match="no answer"):
        market.submit()
    assert len([line for line in market.said if line.startswith("asking")]) == 1


def test_where_a_refusal_cannot_be_cleaned_up_nobody_else_is_asked(market, monkeypatch):
    """The rights end between the first machine and the next request."""
    market.gce.cloud.stock[GceCase.ZONE] = 0

    def refused(handle):
        raise AccessError("no rights any more")

    monkeypatch.setattr(market.gce.launcher, "cancel", refused)
    with pytest.raises(BackendError, match="could not be ended: no rights any more"):
        market.submit()
    assert not market.vertex.vertex.jobs and len(list(run_registry.registry())) == 1, "`muster down` finds it"


def test_a_place_without_credentials_leaves_nothing_and_the_next_one_is_asked(market, monkeypatch):
    class Nobody(GkeLauncher):
        def session(self):
            raise AccessError("no credentials for Google Cloud", hint="gcloud auth application-default login")

    real = market.load
    monkeypatch.setattr("muster.backends.load", lambda name: Nobody() if name == "gke" else real(name))
    monkeypatch.setattr(submit_places, "ways", lambda *words, **more: ([GKE, VERTEX], []))
    result = market.submit(names=["gke", "vertex"])
    assert result.spec.backend == "vertex" and "refused: no credentials for Google Cloud" in market.said
    assert list(run_registry.registry()) == [(result.run.run_id, result.run.path)]


def test_who_waits_long_enough_is_taken_back_before_the_next_is_asked(market):
    result = market.submit(patience_s=120.0)
    assert result.spec.backend == "vertex" and len(market.jobs) == 1, "the last one is waited for by nobody"
    assert not market.machines and not market.gce.secrets.versions
    assert list(run_registry.registry()) == [(result.run.run_id, result.run.path)]
    assert any(line.startswith("cancelled: ") for line in market.said) and market.gce.clock.monotonic_ns() >= 120e9


def test_one_folder_for_all_places_is_refused_where_one_may_be_left(market):
    with pytest.raises(UsageError, match="run_dir names one folder"):
        market.submit("run_dir=gs://example-bucket/runs/x", patience_s=60.0)


def test_a_place_without_a_plan_is_told_and_passed_over(market):
    result = market.submit("resources.locations=[us-central1]")
    assert result.spec.backend == "vertex"
    assert "left out: gce: resources.locations" in market.said[0] and "is not a zone" in market.said[0]


def test_a_place_that_lacks_a_name_is_left_out_before_anybody_is_asked(market):
    result = market.submit("gce.bundle=null")
    assert result.spec.backend == "vertex" and not market.machines
    assert "left out: gce: gce.bundle: no software" in market.said[0]
    with pytest.raises(UsageError, match=r"no place can be asked: .*resources.project: names no project.*muster show"):
        market.submit("resources.project=null")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backends", "vertex,nowhere"], "there is no back end 'nowhere'"),
        (["--backends", "vertex", "--backend", "gce"], "--backends asks several places"),
        (["--wait", "1"], "--wait is for --backends"),
    ],
)
def test_wrong_words_are_one_line(market, words, said, capsys):
    assert main.run(["submit", str(market.run_file), *words]) == 2
    assert said in capsys.readouterr().err


def test_as_a_person_types_it(market, capsys):
    assert main.run(["submit", str(market.run_file), "--backends", "vertex, gce"]) == 0
    out, err = capsys.readouterr()
    ((run_id, _),) = run_registry.registry()
    assert out.strip() == run_id and "asking gce: " in err
