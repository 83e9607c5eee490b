"""Tokenizer and config of a model, from a hub in this process by huggingface_hub's own client."""

import pytest
from fakes.model_hub import model_hub

from muster.data.hub import fetch_model_files

pytest.importorskip("huggingface_hub")


def test_each_is_asked_for_by_its_name_in_the_models_repository(tmp_path, monkeypatch):
    """The name of the file was once taken for that of the model too, and no hub has such a model."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with model_hub() as hub:
        hub.repos["org/small"] = {"config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors": b"no"}
        files = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in (("ENDPOINT", hub.url), ("HUGGINGFACE_CO_URL_TEMPLATE", files)):
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        found = fetch_model_files("org/small", None, ("config.json", "tokenizer.json", "tokenizer.model"))
        assert {name: path.read_bytes() for name, path in found.items()} == {
            "config.json": b"{}",
            "tokenizer.json": b"[]",
        }
        assert not any("safetensors" in asked for asked in hub.asked)
