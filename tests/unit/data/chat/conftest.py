"""A byte-level tokenizer that cuts words as published ones do, opened by transformers and by Muster."""

import re
from pathlib import Path

import pytest

from muster.data.chat.engine import ChatRules
from muster.data.tokenise import Recipe

FOLDER = Path(__file__).with_name("templates")
MARK = re.compile(r"<[|｜][^<>\n']{1,40}[|｜]>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>|\[/?[A-Z_]{4,}\]")
#: Several line ends are one token.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Tokens whose names these templates put together.
ROLES = dict.fromkeys(("glm4", "phi3_5", "olmo2"), ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"))
ENDS = {
    "llama3": "<|eot_id|>", "gemma2": "<end_of_turn>", "gemma3": "<end_of_turn>", "gpt_oss": "<|return|>",
    "deepseek_r1": "<｜end▁of▁sentence｜>", "deepseek_v3_1": "<｜end▁of▁sentence｜>",
    **dict.fromkeys(("qwen2_5", "qwen3", "phi4", "smollm3"), "<|im_end|>"),
}  # fmt: skip
TODAY = "2025-03-04"


@pytest.fixture(scope="session")
def templates():
    return {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}


@pytest.fixture(scope="session")
def base(templates):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(WORDS), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*templates.values(), "\n\n\n", "\n\n", "assistant\n\n"] * 4, trainer)
    return tokenizer.to_str()


@pytest.fixture
def opened(base, templates, tmp_path):
    """``opened(template)``: (what transformers opens, the folder that Muster opens)."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import AddedToken, Tokenizer

    def make(name, text=None, **tokens):
        text = templates[name] if text is None else text
        tokenizer = Tokenizer.from_str(base)
        tokens = {"bos_token": "<s>", "eos_token": ENDS.get(name, "</s>"), **tokens}
        marks = sorted({*MARK.findall(text), *ROLES.get(name, ()), *filter(None, tokens.values())})
        tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
        result = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)
        result.chat_template = text
        result.save_pretrained(tmp_path / name)
        return result, tmp_path / name

    return make


@pytest.fixture
def recipe():
    def make(folder, train_on="completions", thinking="auto"):
        stops = Recipe(folder, "chat", None, ChatRules()).encoder.stop_ids
        return Recipe(folder, "chat", None, ChatRules(train_on, thinking, TODAY, stops))

    return make
