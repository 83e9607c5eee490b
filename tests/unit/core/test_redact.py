"""Secrets are hidden by name and by look; what only sounds like one stays."""

import pytest

import muster.core.redact as module
from muster.core.redact import HIDDEN, hide_values, is_secret, redact, redact_argv, redact_value, secret_word


@pytest.mark.parametrize(
    "key", ["token", "hub_token", "HF_TOKEN", "a.password", "api_key", "apiKey", "client-secret", "x.private_key"]
)
def test_names_that_say_secret(key: str):
    assert is_secret(key)


@pytest.mark.parametrize(
    "key", ["tokens", "tokenizer", "max_new_tokens", "loss_chunk_tokens", "monkey", "model.tokenizer.kind"]
)
def test_names_that_only_sound_like_it(key: str):
    assert not is_secret(key)


@pytest.mark.parametrize(
    "text",
    [
        "hf_" + "a" * 34,
        "sk-proj-" + "b" * 30,
        "ghp_" + "c" * 36,
        "AKIA" + "D" * 16,
        "AIza" + "e" * 35,
        "ya29." + "f" * 40,
        "-----BEGIN RSA PRIVATE KEY-----\nabc",
        "https://me:hunter2@host/x",
    ],
)
def test_values_that_look_like_it(text: str):
    shown = redact(f"before {text} after")
    assert HIDDEN in shown and shown.startswith("before ")
    assert "hunter2" not in shown and text not in shown


@pytest.mark.parametrize(
    "key",
    [
        "sk-" + "0a1b2c3d" * 4,
        "sk-ant-api03-aB3" + "x-Y_9" * 12,
        "sk-lf-01234567-89ab-cdef-0123-456789abcdef",
        "hf_" + "a" * 34,
    ],
)
@pytest.mark.parametrize("before", ["", "key=", "'", "x?key%3D", "\\n", "my_"])
def test_keys_are_found_wherever_they_begin(before, key):
    assert redact(f"{before}{key}") == f"{before}{HIDDEN}"


def test_plain_words_stay():
    text = (
        "training.steps=100 https://host:80/x gs://bucket/a@b hf_short sk-short risk-assessment-model-large "
        "sk-learn-random-forest-v2 shelf_of1234567890123456"
    )
    assert redact(text) == text


def test_command_lines():
    argv = ["muster", "train", "--token", "abc", "hub_token=abc", "--api-key=abc", "training.steps=5"]
    shown = ["muster", "train", "--token", HIDDEN, f"hub_token={HIDDEN}", f"--api-key={HIDDEN}", "training.steps=5"]
    assert redact_argv(argv) == shown


def test_containers():
    assert redact_value("env", {"HF_TOKEN": "abc", "list": ["hf_" + "a" * 20, 5]}) == {
        "HF_TOKEN": HIDDEN,
        "list": [HIDDEN, 5],
    }


@pytest.mark.parametrize(
    ("argv", "index"),
    [
        (["train.py", "--hub-token", "abc"], 2),
        (["train.py", "--hub-token=abc"], 1),
        (["train.py", "password=abc"], 1),
        (["train.py", "--note", "hf_" + "a" * 20], 2),
        (["train.py", "s3://user:word@host/x"], 1),
        (["train.py", "--token-file", "t.txt", "--api-key-env=KEY"], None),
        (["train.py", "--max-tokens", "5", "--tokenizer", "x", "--token", "--flag"], None),
        (["-m", "package.token", "value"], None),
        (["train.py", "--password="], None),
        (["train.py", "hub.token=abc"], 1),
        (["train.py", "--push_to_hub_token", "abc"], 2),
        (["train.py", "--client-secret", "abc"], 2),
        ([], None),
    ],
)
def test_a_word_that_gives_a_secret_away_is_found(argv, index):
    assert secret_word(argv) == index


@pytest.mark.parametrize(
    "words",
    [
        ["--moe-token-dispatcher-type", "alltoall"],
        ["actor.ppo_max_token_len_per_gpu=16384"],
        ["--eos_token", "<|im_end|>"],
        ["--eos-token", "im_end"],
        ["tokenizer.pad_token=<pad>"],
        ["tokenizer.pad_token=[PAD]"],
        ["--token", "<|x|>"],
        ["--max-token-length", "4096"],
        ["--add-bos-token", "true"],
        ["--password-min-length", "1e1"],
        ["--model", "risk-assessment-model-large"],
        ["--run-name", "multitask-finetune-2026-11-23"],
        ["--output", "/data/task-classification-run1"],
        ["disk-usage-forecasting-v3.jsonl"],
        ["--model", "sk-learn-random-forest-v2"],
    ],
)
def test_everyday_arguments_of_training_programs_are_no_secrets(words):
    assert secret_word(["train.py", *words]) is None
    assert [redact(word) for word in words] == words


def test_a_secret_that_was_given_is_hidden_whatever_it_looks_like(monkeypatch):
    monkeypatch.setattr(module, "_GIVEN", set())
    hide_values(["plain words", "short"])
    assert redact("key is plain words, short") == f"key is {HIDDEN}, short"
