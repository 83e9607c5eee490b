"""Held-out figures: loss, scores of answered questions, and sample generations.

Every rank takes part: the model is sharded, so all ranks make the same forward passes. The loss of each
micro-batch does not depend on who computes it, and the sum is taken in one order, so the held-out loss of the
same weights is the same bits at any number of ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from muster.config.spec import RunSpec
from muster.core.typed_json import Json
from muster.data.prepare import Prepared
from muster.data.questions import Question, heldout_questions, majority_baseline
from muster.data.sequences import SequenceStore
from muster.data.tokenizer import Encoder
from muster.protocol.ranks import AgentClient
from muster.train.data_feed.batch import Batch, chosen_targets, shared_batches
from muster.train.distributed.process_setup import World
from muster.train.distributed.reduce import ReduceGroups
from muster.train.evaluation.evaluated_model import EvaluatedModel
from muster.train.objectives.base import Objective

#: Result rows shown with a sample.
SHOWN_ROWS = 5


@dataclass
class Evaluator:
    """Measures the held-out figures of the current model; emits ``eval`` and ``generation`` (rank 0)."""

    spec: RunSpec
    prepared: Prepared
    model: EvaluatedModel
    groups: ReduceGroups
    data_rank: int
    data_ranks: int
    world: World
    device: torch.device
    agent: AgentClient
    counts: bool = True
    """False: another rank of the same context, or another stage, gives the same answers."""
    objective: Objective | None = None
    _baselines: dict[int, float | None] = field(default_factory=dict)

    def run(self, step: int, *, final: bool = False) -> dict[str, float]:
        """The figures after ``step``; collective. Returns the detail of the ``eval`` event (rank 0: all of it)."""
        began = time.monotonic_ns()
        detail: dict[str, float] = {}
        with self.model.evaluating():
            rows = self.spec.evaluation.num_sequences
            if rows and self.prepared.heldout is not None and len(self.prepared.heldout):
                detail.update(self.heldout(self.prepared.heldout, rows))
            detail.update(self._answer(step, final=final))
        detail["duration_ns"] = time.monotonic_ns() - began
        if self.world.rank == 0:
            self.agent.emit("eval", step=step, phase=None, **detail)
        return detail

    @torch.no_grad()
    def heldout(self, store: SequenceStore, rows: int) -> dict[str, float]:
        """The mean loss over the supervised tokens of the first ``rows`` sequences, or over their units and what was
        measured of them; empty if there is nothing to learn there."""
        training, objective = self.spec.training, self.objective
        chosen = range(min(rows, len(store)))
        weight = sum(store[index].weight for index in chosen)
        if weight == 0:
            return {}
        prompts = None
        if objective is not None:
            objective.begin(self.device)
            if objective.traits.learns_prompts:
                prompts = weight / sum(chosen_targets(store[index]) for index in chosen)
            if store.mismatched is not None:
                objective.look_at(self.model.documents, self._reported(store.mismatched, chosen), self.groups)
        losses = torch.zeros(-(-len(chosen) // training.micro_batch_size), dtype=torch.float64, device=self.device)
        for index, batch in self._shared(store, chosen, prompts):
            loss = self.model.loss(batch, chunk_tokens=training.loss_chunk_tokens)
            if index is not None:
                losses[index] = loss.double()
            self.agent.progress()
        self.groups.sum_everywhere_(losses)  # each element comes from one rank, the others add zeros: exact
        result = {"loss": math.fsum(losses.tolist()) / weight}
        if objective is not None and objective.totals is not None:
            result |= objective.figures(self.groups.sum_everywhere_(objective.totals).tolist())
        return result

    def _reported(self, store: SequenceStore, chosen: Sequence[int]) -> Iterator[tuple[int | None, Batch]]:
        for part in self._shared(store, chosen):
            yield part
            self.agent.progress()

    def _shared(
        self, store: SequenceStore, chosen: Sequence[int], prompts: float | None = None
    ) -> Iterator[tuple[int | None, Batch]]:
        return shared_batches(
            store, chosen, self.device, size=self.spec.training.micro_batch_size, rank=self.data_rank,
            ranks=self.data_ranks, static_shapes=self.model.compiled, learns_prompts=prompts,
        )  # fmt: skip

    def _answer(self, step: int, *, final: bool) -> dict[str, float]:
        """Generate answers to held-out questions and score them; the first few are emitted as samples."""
        evaluation = self.spec.evaluation
        count = evaluation.num_questions
        if final and evaluation.final_num_questions is not None:
            count = evaluation.final_num_questions
        num_questions = max(count, evaluation.samples)
        questions = heldout_questions(self.spec, self.prepared, num_questions) if num_questions else []
        if not questions or self.prepared.tokenizer_dir is None:
            return {}
        reason = self.model.objection()
        if reason is not None:
            if self.world.rank == 0:
                self.agent.emit("run.message", text=reason)
            return {}
        encoder = Encoder(self.prepared.tokenizer_dir)
        texts = [encoder.decode(ids).strip() for ids in self._complete(questions)]
        verdicts = self._score(questions[:count], texts[:count])
        if self.world.rank != 0:
            return {}
        for question, text in list(zip(questions, texts, strict=True))[: evaluation.samples]:
            self.agent.emit("generation", step=step, phase=None, **sample(question, text))
        if not count:
            return {}
        figures = summary(questions[:count], verdicts)
        baseline = self._baseline(questions[:count])
        return figures if baseline is None else {**figures, "baseline_accuracy": baseline}

    def _complete(self, questions: Sequence[Question]) -> list[list[int]]:
        """Completions of all prompts, on every rank; each rank generates its share."""
        width, end = self.spec.evaluation.max_new_tokens, self.prepared.eos_id
        local = range(self.data_rank, len(questions), self.data_ranks)
        share = -(-len(questions) // self.data_ranks)
        prompts = [list(questions[index].prompt_ids) for index in local]
        prompts += [list(questions[0].prompt_ids)] * (share - len(prompts))  # every rank runs the same number
        completions = self.model.complete(
            prompts,
            max_new_tokens=width,
            stop_ids=self.prepared.stop_ids or (() if end is None else (end,)),
            pad_id=self.prepared.pad_id,
            progress=self.agent.progress,
        )
        table = torch.zeros(len(questions), width, dtype=torch.int64, device=self.device)
        for index, ids in zip(local if self.counts else (), completions, strict=False):
            table[index, : len(ids)] = torch.tensor(ids[:width], dtype=torch.int64, device=self.device) + 1
        self.groups.sum_everywhere_(table)
        return [[token - 1 for token in row if token > 0] for row in table.tolist()]

    def _score(self, questions: Sequence[Question], texts: Sequence[str]) -> list[Verdict]:
        """Every verdict on every rank; each rank scores its share of the answers."""
        table = torch.zeros(len(questions), 2, dtype=torch.int64, device=self.device)
        for index in range(self.data_rank, len(questions), self.data_ranks) if self.counts else ():
            outcome = questions[index].score(texts[index])
            table[index] = torch.tensor([int(outcome.correct), int(outcome.timed_out)])
            self.agent.progress()
        self.groups.sum_everywhere_(table)
        return [Verdict(correct=bool(correct), timed_out=bool(late)) for correct, late in table.tolist()]

    def _baseline(self, questions: Sequence[Question]) -> float | None:
        if len(questions) not in self._baselines:
            self._baselines[len(questions)] = majority_baseline(questions)
        return self._baselines[len(questions)]


@dataclass(frozen=True)
class Verdict:
    """The score of one answer."""

    correct: bool
    timed_out: bool


def summary(questions: Sequence[Question], verdicts: Sequence[Verdict]) -> dict[str, float]:
    """The share of correct answers for each metric of the task (text-to-SQL: executed, and compared as text)."""
    figures: dict[str, float] = {"questions": len(questions)}
    for metric in sorted({question.metric for question in questions}):
        chosen = [v for q, v in zip(questions, verdicts, strict=True) if q.metric == metric]
        figures[metric] = sum(verdict.correct for verdict in chosen) / len(chosen)
    figures["timeouts"] = sum(verdict.timed_out for verdict in verdicts)
    return figures


def sample(question: Question, completion: str) -> dict[str, Json]:
    """One sample generation, with what the answer produced."""
    outcome = question.score(completion)
    return {
        "prompt": question.prompt_text,
        "completion": completion,
        "expected": question.gold,
        "correct": outcome.correct,
        "rows": [list(map(str, row)) for row in outcome.rows[:SHOWN_ROWS]],
    }
