"""A rank's process is set up before its first kernel."""

import os
import socket
from collections import defaultdict

import pytest

from muster.config.spec import RunSpec
from muster.core.errors import BackendError
from muster.train.distributed import process_setup
from muster.train.distributed.process_setup import fix_libraries, open_rendezvous


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


def test_a_rendezvous_store_that_is_dead_costs_no_half_hour(monkeypatch):
    monkeypatch.setattr(process_setup, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(BackendError, match=f"nothing answers at 127.0.0.1:{port}.*refused"):
        open_rendezvous("127.0.0.1", port, serve=False, begun=True)


def test_a_rendezvous_store_that_is_slow_is_waited_for(monkeypatch):
    """It listens and has not answered yet, twice."""
    tries = []

    class Slow:
        def __init__(self, *arguments, timeout, wait_for_workers):
            tries.append(timeout.total_seconds())
            if len(tries) < 3:
                raise RuntimeError("timed out")

        def set_timeout(self, timeout):
            tries.append(timeout.total_seconds())

    monkeypatch.setattr(process_setup, "TCPStore", Slow)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        open_rendezvous(*listening.getsockname(), serve=False, begun=True)
    assert tries == [process_setup.CONNECT_S] * 3 + [process_setup.COLLECTIVE_TIMEOUT_S]
