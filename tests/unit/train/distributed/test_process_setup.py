"""A rank's process is set up before its first kernel."""

import os
from collections import defaultdict

import pytest

from muster.config.spec import RunSpec
from muster.train.distributed.process_setup import fix_libraries


@pytest.mark.parametrize(
    ("training", "value"), [({"deterministic": True}, "1"), ({"exact": True}, "1"), ({}, None)], ids=str
)
def test_flash_attention_of_a_deterministic_run_sums_in_a_fixed_order(monkeypatch, training, value):
    """The very condition by which transformers hands the switch to flash-attn."""
    from transformers.modeling_flash_attention_utils import _process_flash_attention_kwargs

    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC", raising=False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    base = {"name": "case", "model": {"source": "m"}, "data": {"sources": [{"type": "random"}]}}
    fix_libraries(RunSpec.model_validate(base | {"training": training}))
    assert os.environ.get("FLASH_ATTENTION_DETERMINISTIC") == value
    taken = defaultdict(bool, deterministic=True)
    given = _process_flash_attention_kwargs(8, 8, is_causal=True, supports_mapping=taken)
    assert given["deterministic"] is (value == "1")
    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC", raising=False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
