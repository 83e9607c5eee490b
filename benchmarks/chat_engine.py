"""What the chat engine costs a row, apart from encoding: processor time of one process.

    python benchmarks/chat_engine.py [--rows 4000] [--template FILE ...]

Rows of one and of three answers, about 150 tokens each, without and with reasoning, and with calls of tools; templates
of the tests, tokenizer SHARED/tokenizers/bpe2k with the templates' marks. The target: at most 25 us a row, and 10 % of
encoding. Never part of a test.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import tempfile
import time
from pathlib import Path

from muster.data.chat.engine import ChatEngine, ChatRules
from muster.data.text.templates import ChatTemplate
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


def calls_of(count: int) -> list[dict[str, object]]:
    """A question, a call of a tool with words as its arguments, its result, an answer; the tool's schema as text."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"type": "string"}}}
    tools = json.dumps([{"type": "function", "function": {"name": "weather", "parameters": schema}}])
    rows = []
    for number, row in enumerate(rows_of(2, count)):
        question, _, result, answer = row["messages"]  # type: ignore[misc]
        function = {"name": "weather", "arguments": json.dumps({"city": question["content"][:20], "unit": "C"})}
        call = {"id": f"call{number:05}", "type": "function", "function": function}
        told = {**result, "role": "tool", "name": "weather", "tool_call_id": call["id"]}
        messages = [question, {"role": "assistant", "content": None, "tool_calls": [call]}, told, answer]
        rows.append({"messages": messages, "tools": tools})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--template", nargs="*", default=["qwen2_5", "qwen3", "llama3", "phi3_5", "mistral", "gpt_oss"])
    parsed = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    kinds = {
        "1 answer": rows_of(1, parsed.rows), "3 answers": rows_of(3, parsed.rows),
        "1, reasoning": rows_of(1, parsed.rows, thinks=True), "call and answer": calls_of(parsed.rows),
    }  # fmt: skip
    print("| template | rows | tokens a row | encoding, us a row | engine, us a row |\n|---|---|---|---|---|")
    for name in parsed.template:
        with tempfile.TemporaryDirectory() as folder:
            Encoder(SHARED / "tokenizers" / "bpe2k").save(Path(folder))
            template = find_template(str(TEMPLATES / f"{name}.jinja"))
            with_marks(Path(folder), template)
            install_template(Path(folder), template)
            for kind, rows in kinds.items():
                engine = ChatEngine(Encoder(Path(folder)), ChatRules())
                documents, _ = engine.documents(rows)
                fast = engine._encoder.fast
                texts = [fast.decode(ids, skip_special_tokens=False) for row in documents for ids, _ in row]
                if not texts:
                    continue
                whole, encoding = [], []
                for _ in range(5):  # in turns, because other programs run here, too
                    began = time.process_time()
                    engine.documents(rows)
                    between = time.process_time()
                    [each.ids for each in fast.encode_batch(texts, add_special_tokens=False)]
                    whole.append(between - began)
                    encoding.append(time.process_time() - between)
                tokens = sum(len(ids) for row in documents for ids, _ in row) / len(rows)
                us = 1e6 / len(rows)
                print(f"| {name} | {kind} | {tokens:.0f} | {min(encoding) * us:.0f} | "
                      f"{(min(whole) - min(encoding)) * us:.0f} |", flush=True)  # fmt: skip


def with_marks(folder: Path, template: ChatTemplate) -> None:
    """Add the template's marks as special tokens, which they are in the published tokenizers."""
    from tokenizers import AddedToken, Tokenizer

    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    marks = sorted({*re.findall(r"<[|｜][^<>\n']{1,40}[|｜]>|<(?:start|end)_of_turn>|\[/?[A-Z_]{4,}\]", template.text)})
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    tokenizer.save(path)


if __name__ == "__main__":
    main()
