"""Secrets are hidden by name and by look; what only sounds like one stays."""

import pytest

from muster.core.redact import HIDDEN, is_secret, redact, redact_argv, redact_value, secret_word


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


def test_plain_words_stay():
    text = "training.steps=100 https://host:80/x gs://bucket/a@b hf_short sk-short"
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
        ([], None),
    ],
)
def test_a_word_that_gives_a_secret_away_is_found(argv, index):
    assert secret_word(argv) == index
