"""``muster init``: for each kind of rows it writes a file that plan and train accept; wrong rows are named."""

import json
import os
import signal
import subprocess
import sys

import pytest
from fakes.pty_program import PtyProgram

pytestmark = pytest.mark.live
SCHEMA = "CREATE TABLE t (a INT)"
KINDS = {
    "chat": [
        {"messages": [{"role": "user", "content": f"Colour {n}?"}, {"role": "assistant", "content": f"It is {n % 3}."}]}
        for n in range(30)
    ],
    "prompt and completion": [{"instruction": f"Add 1 to {n}", "output": str(n + 1)} for n in range(30)],
    "text": [{"text": f"The number {n} comes before the number {n + 1}. " * 4} for n in range(30)],
    "question and SQL": [
        {"question": f"Rows above {n}?", "schema": SCHEMA, "sql": f"SELECT a FROM t WHERE a > {n}"} for n in range(30)
    ],
}


@pytest.fixture
def muster(tmp_path):
    env = {**os.environ, "MUSTER_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}

    def run(*argv):
        return subprocess.run(
            [sys.executable, "-m", "muster.cli.main", *argv], cwd=tmp_path, env=env, text=True, capture_output=True,
            stdin=subprocess.DEVNULL, timeout=280, check=False,
        )  # fmt: skip

    return run


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("kind", KINDS)
def test_the_written_file_trains(kind, tmp_path, muster):
    write(tmp_path / "rows.jsonl", KINDS[kind])
    made = muster("init", "--from", "rows.jsonl")
    assert made.returncode == 0 and made.stdout == "run.yaml\n", made.stderr
    assert f"30 rows of {kind}" in made.stderr
    written = (tmp_path / "run.yaml").read_bytes()
    again = muster("init", "--from", "rows.jsonl")
    assert again.returncode == 2 and "not overwritten" in again.stderr
    assert (tmp_path / "run.yaml").read_bytes() == written
    planned = muster("plan", "run.yaml", "--json")
    assert planned.returncode == 0, planned.stderr
    trained = muster("train", "run.yaml", "training.steps=2", "evaluation.samples=0", "evaluation.num_questions=0")
    assert trained.returncode == 0 and "done after step 2" in trained.stdout + trained.stderr, trained.stderr


def test_a_wrong_row_is_named_and_nothing_is_written(tmp_path, muster):
    write(tmp_path / "rows.jsonl", [*KINDS["chat"][:4], {"messages": [{"role": "user"}]}])
    made = muster("init", "--from", "rows.jsonl")
    assert made.returncode == 2 and "rows.jsonl:5: a chat turn needs 'role' and 'content'" in made.stderr
    write(tmp_path / "rows.jsonl", [{"chosen": "a", "rejected": "b"}])
    made = muster("init")  # the one file here
    assert made.returncode == 2 and "rows.jsonl:1: columns 'chosen', 'rejected'" in made.stderr
    assert not (tmp_path / "run.yaml").exists()


def base_model(folder):
    from muster.config.spec import TrainedTokenizer
    from muster.data.tokenizer import train

    train(lambda: ["some words to learn from"] * 9, TrainedTokenizer(vocab_size=100), folder)
    config = {"model_type": "llama", "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64,
              "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()


@pytest.fixture
def terminal(tmp_path):
    programs = []

    def start(*argv, columns=80):
        env = {"MUSTER_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "muster.cli.main", *argv]
        programs.append(PtyProgram(command, columns=columns, lines=40, cwd=tmp_path, env=env))
        return programs[-1]

    yield start
    for program in programs:
        program.close()


@pytest.mark.parametrize("columns", [80, 120])
def test_its_questions_on_a_terminal(tmp_path, terminal, columns):
    write(tmp_path / "chat.jsonl", KINDS["chat"])
    base_model(tmp_path / "base")
    program = terminal("init", columns=columns)
    program.read("Rows: a file, a folder, or OWNER/DATASET (chat.jsonl):")
    program.type(b"\n")
    program.read("Base model: a folder, or OWNER/MODEL; Enter trains a small one from scratch:")
    program.type(b"base\n")
    program.read("Train adapters (LoRA) instead of all weights? y or n (n):")
    program.type(b"y\n")
    program.read("hint: muster data run.yaml")
    program.read()
    assert program.code() == 0 and program.process.stdout.read() == b"run.yaml\n"
    assert len(program.screen.shown()[0]) <= columns and program.text().count("?") == 1
    text = (tmp_path / "run.yaml").read_text()
    assert 'source: "base"' in text and "lora: {rank: 16, alpha: 32}" in text and "chat_template: chatml" in text


def test_a_wrong_answer_and_ctrl_c_write_nothing(tmp_path, terminal):
    write(tmp_path / "a.jsonl", KINDS["chat"])
    write(tmp_path / "b.jsonl", KINDS["chat"])
    program = terminal("init")
    program.read("Rows: a file, a folder, or OWNER/DATASET:")
    program.type(b"c.jsonl\n")
    program.read("Base model")
    program.type(b"\n")
    program.read("error: data file 'c.jsonl' does not exist")
    program.read()
    assert program.code() == 2
    stopped = terminal("init")
    stopped.read("Rows: a file, a folder, or OWNER/DATASET:")
    stopped.settle()
    stopped.process.send_signal(signal.SIGINT)  # Ctrl-C: the terminal here controls no session
    stopped.read()
    assert stopped.code() != 0 and "Traceback" not in stopped.text()
    assert not (tmp_path / "run.yaml").exists()


def test_a_hub_data_set_without_a_network_is_one_line(tmp_path, muster):
    made = muster("init", "--from", "owner/rows", "--yes")
    assert made.returncode == 6 and "Traceback" not in made.stderr, made.stderr
    error, hint = made.stderr.splitlines()
    assert error.startswith("error: data set 'owner/rows': the Hugging Face hub cannot be reached: ") and "hint" in hint
