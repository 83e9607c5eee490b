"""Muster from Python, cell by cell (VS Code and Jupyter run ``# %%`` as cells): plan, train, look, continue.

python examples/from_python.py            # about a minute on two cores
"""

# %% The run file, and what is to differ from it. Nothing heavy is imported yet.
from pathlib import Path

import muster

RUN_FILE = Path(__file__).with_name("text2sql-cpu.yaml")
SMALL = [
    "name=notebook", "training.steps=6", "training.sequence_length=128", "data.on_overlong=truncate",
    "data.sources.0.rows=400", "data.sources.0.heldout_rows=10", "evaluation.every_steps=0",
    "evaluation.num_questions=0", "evaluation.final_num_questions=0", "evaluation.num_sequences=4",
    "resources.ranks_per_host=1",
]  # fmt: skip

# %% Will it fit, how long, how much? The values are those of `muster plan --json`.
planned = muster.plan(RUN_FILE, SMALL)
print(planned.to_json()["job"])

# %% In the background, as `muster submit`; `muster.train` stays until the end.
run = muster.submit(RUN_FILE, SMALL).run
print(run.run_id, muster.status(run.run_id).to_json()["state"])

# %% Events as they come, until the run has ended.
losses = [event.detail["loss"] for event in muster.events(run.run_id, follow=True, kinds=("step",))]
print(f"{len(losses)} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}")

# %% How it ended, and what it took.
status = muster.status(run.run_id).to_json()
print(status["state"], status["reason"])
print(sorted(muster.report(run.run_id).to_json()))

# %% On from there, in the foreground: the folder holds its checkpoints.
ended = muster.train(RUN_FILE, [*SMALL, f"run_dir={run.path}", "training.steps=8"])
print(f"exit code {ended.exit_code}, step {muster.status(run.run_id).to_json()['step']}")

# %% Nothing is left running.
print(muster.down(run.run_id).to_json())
