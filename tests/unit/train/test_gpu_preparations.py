"""What a rank prepares for a GPU, where no GPU is needed to see it."""

import json
import pickle
from types import SimpleNamespace

import pytest
import torch

from muster.config.spec import Profile, RunSpec
from muster.train import inputs
from muster.train.measurement.profiling import Profiler


class Agent:
    def __init__(self):
        self.said = []

    def progress(self, *, for_s=None):
        self.said.append(for_s)


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_download_of_weights_counts_as_progress(monkeypatch, tmp_path, is_folder):
    agent, fetched = Agent(), []
    monkeypatch.setattr(inputs.model_files, "fetch", lambda *asked: fetched.append((asked, list(agent.said))))
    source = str(tmp_path) if is_folder else "org/name"
    base = {"name": "case", "model": {"source": source, "revision": "v1"}, "data": {"sources": [{"type": "random"}]}}
    spec = RunSpec.model_validate(base)
    assert inputs.fetch_weights(spec, tmp_path, agent) == spec
    if is_folder:
        assert not fetched and not agent.said
    else:
        assert fetched == [(("org/name", "v1"), [inputs.FETCH_LIMIT_S])], "said before it begins"
        assert agent.said == [inputs.FETCH_LIMIT_S, None] and inputs.FETCH_LIMIT_S > 600


def test_a_memory_snapshot_can_be_read_by_torchs_viewer(monkeypatch, tmp_path):
    snapshot = {"segments": [{"address": 1, "device": torch.device("cpu")}], "device_traces": []}
    asked = []
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda *_, **__: snapshot)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **given: asked.append(given))
    profiler = Profiler(Profile(memory_step=3), Agent(), directory=tmp_path, rank=1, device=torch.device("cuda"))
    profiler._trace = SimpleNamespace(end=lambda step: None)
    profiler.end(2)
    assert not list(tmp_path.iterdir())
    profiler.end(3)
    assert pickle.loads((tmp_path / "memory-step-3.rank-1.pickle").read_bytes()) == snapshot  # noqa: S301 (just written)
    assert json.loads((tmp_path / "memory-step-3.rank-1.json").read_text())["device_traces"] == []
    assert asked == [{"max_entries": 100_000}, {"enabled": None}]
