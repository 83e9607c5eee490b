"""Small run files and tokenizers for the data floor's tests."""

import pytest

from muster.config.spec import RunSpec


@pytest.fixture
def make_spec(tmp_path):
    """``make_spec(sources, model=..., training={...}, **data)`` with a cache of its own."""

    def make(sources, *, model=None, training=None, **data):
        return RunSpec.model_validate(
            {
                "name": "test",
                "model": model or {"config": {"vocab_size": 512}, "tokenizer": {"vocab_size": 512}},
                "data": {"sources": sources, "cache_dir": str(tmp_path / "cache"), "workers": 1, **data},
                "training": {"sequence_length": 64, **(training or {})},
            }
        )

    return make
