"""What the chat engine costs a row, apart from encoding: processor time of one process.

    python benchmarks/chat_engine.py [--rows 4000] [--template FILE ...]

Rows of one and of three answers, about 150 tokens each, without and with reasoning; templates of the tests, tokenizer
SHARED/tokenizers/bpe2k. The target: at most 25 us a row, and 10 % of encoding. Never part of a test.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from pathlib import Path

from muster.data.chat.engine import ChatEngine, ChatRules
from muster.data.tokenizer import Encoder, find_template, install_template

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("SHARED") or ROOT.parent / "shared" / "data")
TEMPLATES = ROOT / "tests/unit/data/chat/templates"


def rows_of(answers: int, count: int, *, thinks: bool = False) -> list[dict[str, object]]:
    words = (SHARED / "corpora" / "tiny_shakespeare.txt").read_text().split()
    rng = random.Random(0)

    def text(length: int) -> str:
        first = rng.randrange(len(words) - length)
        return " ".join(words[first : first + length])

    def turn(role: str) -> dict[str, str]:
        thought = {"reasoning_content": text(20)} if thinks and role == "assistant" else {}
        return {"role": role, "content": text(60 // (2 * answers)), **thought}

    return [{"messages": [turn(role) for _ in range(answers) for role in ("user", "assistant")]} for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--template", nargs="*", default=["qwen2_5", "qwen3", "llama3", "phi3_5", "mistral", "gpt_oss"])
    parsed = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    print("| template | answers a row | tokens a row | encoding, us a row | engine, us a row |\n|---|---|---|---|---|")
    for name in parsed.template:
        with tempfile.TemporaryDirectory() as folder:
            Encoder(SHARED / "tokenizers" / "bpe2k").save(Path(folder))
            install_template(Path(folder), find_template(str(TEMPLATES / f"{name}.jinja")))
            for answers, thinks in ((1, False), (3, False), (1, True)):
                rows = rows_of(answers, parsed.rows, thinks=thinks)
                engine = ChatEngine(Encoder(Path(folder)), ChatRules())
                engine.documents(rows[:64])
                began = time.process_time()
                documents, _ = engine.documents(rows)
                whole = time.process_time() - began
                texts = [engine._encoder.decode(ids, skip_special=False) for row in documents for ids, _ in row]
                began = time.process_time()
                engine._encoder.fast.encode_batch(texts, add_special_tokens=False)
                encoding = time.process_time() - began
                tokens = sum(len(ids) for row in documents for ids, _ in row) / len(rows)
                per_row = 1e6 / len(rows)
                engine_us = (whole - encoding) * per_row
                kind = f"{answers}, reasoning" if thinks else answers
                print(f"| {name} | {kind} | {tokens:.0f} | {encoding * per_row:.0f} | {engine_us:.0f} |")


if __name__ == "__main__":
    main()
