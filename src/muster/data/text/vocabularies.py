"""Small vocabularies trained on a run's own text. Same texts, same vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from muster.core.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
#: A word keeps the space before it, so that the tokens joined are the text again. Digits, signs and blanks apart.
WORD_PATTERN = r" ?[^\W\d]\w*| ?\d+| ?[^\w\s]+|\s+"


def train_words(texts: Iterable[str], vocab_size: int, special: list[str]) -> Tokenizer:
    """The commonest words, ties in alphabetical order; the rest become the unknown token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token=SPECIAL[3]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.WordLevelTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int, special: list[str]) -> Tokenizer:
    """Byte-level BPE: every text can be written, nothing is unknown."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + len(special)
    if vocab_size < least:
        raise UsageError(
            f"model.tokenizer.vocab_size {vocab_size} is too small for bpe: its 256 bytes and "
            f"{len(special)} special tokens need {least}",
            hint=f"use {least} or more, or kind: word",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
