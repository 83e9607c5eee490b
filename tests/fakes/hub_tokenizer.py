"""Tokenizer folders as the hub has them, of classes that transformers 5 builds from the vocabulary alone."""

import json

from muster.config.spec import TrainedTokenizer
from muster.data.tokenizer import train

#: Class -> the model type that such a base has.
CLASSES = {
    "Qwen2Tokenizer": "qwen3",
    "GPT2Tokenizer": "gpt2",
    "GPTNeoXTokenizer": "gpt_neox",
    "CodeGenTokenizer": "codegen",
    "LlamaTokenizer": "llama",
    "PreTrainedTokenizerFast": "llama",
}
TEXTS = ["The user asks and the assistant answers with a short sentence.\n"] * 4


def make_hub_tokenizer(folder, name):
    """``folder`` with tokenizer.json, tokenizer_config.json (its ``added_tokens_decoder`` whole) and, but for a plain
    one, vocab.json and merges.txt; and a config.json of its model type."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    if name == "PreTrainedTokenizerFast":
        train(lambda: TEXTS, TrainedTokenizer(kind="bpe", vocab_size=320), folder)
    else:
        vocab, merges = _sentencepiece() if name == "LlamaTokenizer" else _byte_level(folder)
        roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        if name != "LlamaTokenizer":
            roles = dict.fromkeys([*roles, "pad_token"], "<|endoftext|>")
        made = getattr(transformers, name)(vocab=vocab, merges=merges, **roles)
        made.save_pretrained(folder)
        if name != "LlamaTokenizer":
            (folder / "vocab.json").write_text(json.dumps(vocab))
            (folder / "merges.txt").write_text("".join(f"{a} {b}\n" for a, b in merges))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    config |= {"tokenizer_class": name, "added_tokens_decoder": {str(token.pop("id")): token for token in added}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": CLASSES[name]}))
    return folder


def _byte_level(folder):
    train(lambda: TEXTS, TrainedTokenizer(kind="bpe", vocab_size=320), folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "special_tokens_map.json").unlink()
    kept = {token: number for token, number in model["vocab"].items() if number >= 4}  # without the trained ones' marks
    vocab = {token: number for number, token in enumerate(sorted(kept, key=kept.__getitem__))}
    return vocab, [tuple(pair) for pair in model["merges"]]


def _sentencepiece():
    """A BPE with byte fallback, as sentencepiece models are converted."""
    letters = [*sorted({letter for text in TEXTS for letter in text} - set(" \n")), "▁", "|", "<", ">", "_", "Q"]
    merges = [("t", "h"), ("th", "e"), ("▁", "a"), ("▁", "the"), ("e", "r")]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256)), *dict.fromkeys(letters)]
    pieces += [a + b for a, b in merges]
    return {token: number for number, token in enumerate(pieces)}, merges
