"""What the fork server imports in advance: all that a rank's first model needs, and nothing that none needs."""

import json
import subprocess
import sys

PROGRAM = """
import json, sys
sys.path.extend(sys.argv[1:])
from muster.config.spec import Model
from muster.rank import worker
worker.preload(Model.model_validate({"config": {"model_type": "llama"}}))
loaded = sorted(name for name in sys.modules if name.startswith("scipy"))
import torch
from transformers import AutoConfig, AutoModelForCausalLM
small = AutoConfig.for_model("llama", hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
AutoModelForCausalLM.from_config(small)(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4).long())
import scipy
print(json.dumps([loaded, scipy.__name__, "transformers.models.llama.modeling_llama" in sys.modules]))
"""


def preloaded(*paths):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, paths)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and "could not be loaded" not in done.stderr, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_scipy_which_no_language_model_uses_is_left_out_and_is_there_afterwards():
    assert preloaded() == [[], "scipy", True]


def test_where_scikit_learn_is_there_its_scipy_is_too(tmp_path):
    """It is imported with transformers' generation, and imports scipy."""
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn/__init__.py").write_text("")
    (tmp_path / "sklearn/metrics.py").write_text("import scipy.optimize\nroc_curve = None\n")
    assert "scipy.optimize" in preloaded(tmp_path)[0]
