"""From 30 lines of chat and a base model without chat template to a reloaded model, by the tutorial and README."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.live
ROOT = Path(__file__).parents[2]


def make_base(folder, texts):
    """A tiny Llama and a BPE tokenizer that knows no chat."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return tokenizer.get_vocab_size()


def test_the_commands_from_own_rows_to_a_reloaded_model(tmp_path):
    tutorial = (ROOT / "docs" / "tutorial" / "first-model.md").read_text()
    program = tutorial.partition("```python\n")[2].partition("```")[0]
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    rows = [json.loads(line)["messages"] for line in (tmp_path / "chat.jsonl").read_text().splitlines()]
    size = make_base(tmp_path / "base", [turn["content"] for row in rows for turn in row])
    env = {**os.environ, "MUSTER_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}

    def muster(*argv):
        done = subprocess.run(
            [sys.executable, "-m", "muster.cli.main", *argv], cwd=tmp_path, env=env, text=True, capture_output=True,
            stdin=subprocess.DEVNULL, timeout=280, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    muster("init", "--from", "chat.jsonl", "--model", "./base")
    muster("data", "run.yaml")
    muster("train", "run.yaml", "training.steps=20", "training.optimizer.learning_rate=0.01")
    muster("export", "last", "-o", "out")

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert len(tokenizer) == model.config.vocab_size == size + 2 and tokenizer.eos_token == "<|im_end|>"
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "The car is?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert tokenizer.decode(asked["input_ids"][0]).endswith("<|im_start|>assistant\n")
    answer = model.generate(**asked, max_new_tokens=20, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(answer).startswith("It is ")
    assert answer[-1] == tokenizer.eos_token_id, "generation stops at the turn's end"

    readme = (ROOT / "README.md").read_text()
    program = readme.partition("```python\n")[2].partition("```")[0].replace('"my-model"', '"out"')
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, cwd=tmp_path, env=env, text=True, capture_output=True, check=False)
    assert done.returncode == 0 and "It is" in done.stdout, done.stderr
