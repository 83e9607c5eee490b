"""The real thing, short: WikiSQL from scratch, and a fine-tune of a real trained model on Shakespeare."""

from pathlib import Path

import pytest
from cluster import LiveRun

from muster.config.spec import RunSpec

pytestmark = [pytest.mark.live, pytest.mark.timeout(280)]

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the reference data is not beside this checkout")


def spec(tmp_path, **sections):
    return RunSpec.model_validate(
        {
            "name": "real",
            "resources": {"device": "cpu", "ranks_per_host": 2},
            "checkpoint": {"every_steps": 0},
            "output": {"tensorboard": False},
            **sections,
        }
    )


def losses(run):
    return [event.detail["loss"] for event in run.events("step")]


@needs_data
def test_wikisql_is_learnt_from(tmp_path):
    text = DATA / "text2sql"
    of = spec(
        tmp_path,
        model={
            "config": {
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 172,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "max_position_embeddings": 512,
                "vocab_size": 2048,
            },
            "tokenizer": str(DATA / "tokenizers" / "bpe2k"),
            "dtype": "float32",
        },
        data={
            "sources": [
                {
                    "type": "file",
                    "path": str(text / "wikisql_train.jsonl.gz"),
                    "heldout_path": str(text / "wikisql_dev.jsonl.gz"),
                    "limit": 4000,
                    "template": {"prompt": "{schema}\n{question}\n", "completion": "{sql}"},
                }
            ],
            "cache_dir": str(tmp_path / "cache"),
        },
        training={
            "steps": 30,
            "sequence_length": 512,
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 5},
        },
        evaluation={"at_start": True, "num_sequences": 16, "samples": 0, "num_questions": 4, "max_new_tokens": 16},
    )
    with LiveRun(tmp_path / "run", of) as run:
        run.start()
        assert run.wait(250) == 0, run.story()
        found = losses(run)
        before, after = (event.detail for event in run.events("eval"))
    assert found[0] > 7.0, "random weights: about the logarithm of 2,048"
    assert found[-1] < found[0] - 2.5
    assert after["loss"] < before["loss"] - 2.5
    assert "query_match" in after and "execution_accuracy" not in after, "its tables are not here to run against"


@needs_data
def test_a_real_model_is_tuned_on_shakespeare(tmp_path):
    of = spec(
        tmp_path,
        model={"source": str(DATA / "models" / "stories260k"), "dtype": "float32"},
        data={
            "sources": [{"type": "file", "path": str(DATA / "corpora" / "tiny_shakespeare.txt"), "format": "text"}],
            "on_overlong": "split",
            "train_on": "all",
            "cache_dir": str(tmp_path / "cache"),
        },
        training={
            "steps": 25,
            "sequence_length": 256,
            "global_batch_size": 8,
            "micro_batch_size": 4,
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 3},
        },
        evaluation={"at_start": False, "num_sequences": 0, "samples": 0},
    )
    with LiveRun(tmp_path / "run", of) as run:
        run.start()
        assert run.wait(250) == 0, run.story()
        found = losses(run)
    assert 3.0 < found[0] < 5.0, "a trained model: far below the logarithm of 512 (6.24)"
    assert found[-1] < found[0] - 0.2
