"""A trace of what XLA computes between two moments."""

import jax
import jax.numpy as jnp
from fakes import chrome_trace

from muster.train_jax.trace import XlaTrace


def test_a_trace_has_what_was_computed_and_leaves_nothing_behind(tmp_path):
    double = jax.jit(lambda values: (values @ values).sum())
    values = jnp.ones((32, 32))
    double(values).block_until_ready()
    trace = XlaTrace()
    trace.start()
    double(values).block_until_ready()
    trace.stop()
    trace.export_chrome_trace(str(tmp_path / "step-3.rank-0.part"))
    assert any("reduce" in name for name in chrome_trace.read(tmp_path / "step-3.rank-0.part").names)
    assert (tmp_path / "step-3.rank-0.xplane.pb").stat().st_size > 0
    assert trace._folder is not None and not trace._folder.exists()
