"""Each process keeps its own compiled programs, by a private name of JAX's: a newer jax that has another fails here."""

import subprocess
import sys

PROGRAM = """
import sys
from pathlib import Path
from types import SimpleNamespace
import jax
from jax._src import distributed
from muster.train_jax.components import set_numerics
from muster.train_jax.engine import _Progress

folder = Path(sys.argv[1])
spec = SimpleNamespace(model=SimpleNamespace(dtype="bfloat16"))
set_numerics(spec, SimpleNamespace(run_dir=str(folder), rank=1))
assert not jax.config.jax_share_binary_between_hosts
assert distributed.global_state.process_id == 0, "the name that the trainer sets"
distributed.global_state.process_id = 1
agent = SimpleNamespace(progress=lambda for_s=None: None)
kept = lambda: len(list((folder / "xla_cache" / "rank-1").glob("*-cache")))
jax.jit(lambda x: x * 2 + 1)(3.0)
assert kept() == 0, "JAX lets process 0 alone write"
before = kept()
with _Progress(agent, 1):
    jax.jit(lambda x: x * 3 + 1)(3.0)
assert kept() > before, "and this one was it meanwhile"
assert distributed.global_state.process_id == 1
"""


def test_a_process_that_is_not_the_first_keeps_its_programs_whatever_the_environment_says(tmp_path):
    environment = {"JAX_PLATFORMS": "cpu", "JAX_SHARE_BINARY_BETWEEN_HOSTS": "true", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
