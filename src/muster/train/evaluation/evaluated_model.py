"""What evaluation asks of a model, whichever library computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from muster.train.data_feed.batch import Batch
from muster.train.evaluation.generate import generate, objection
from muster.train.model.model_with_loss import ModelWithLoss, forward_pass
from muster.train.model.sharding import evaluating, reshard


class EvaluatedModel(Protocol):
    """The model in training. All calls are collective."""

    @property
    def compiled(self) -> bool:
        """Whether it wants batches of static shapes."""
        ...

    def evaluating(self) -> AbstractContextManager[object]:
        """Evaluation mode; ``loss`` and ``complete`` are called inside."""
        ...

    def loss(self, batch: Batch, *, chunk_tokens: int) -> Tensor:
        """The sum of this rank's cross-entropies at supervised tokens; 0-d float32. 0 on all stages but the last."""
        ...

    def documents(self, batch: Batch) -> Tensor:
        """The log-probabilities of the answers of this rank's documents; none on all stages but the last."""
        ...

    def objection(self) -> str | None:
        """Why nothing can be completed now; None: it can."""
        ...

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        pad_id: int,
        progress: Callable[[], None],
    ) -> list[list[int]]:
        """Greedy continuations of this rank's prompts, as ``generate.generate``."""
        ...


@dataclass(frozen=True)
class TorchModel:
    """The torch trainer's."""

    module: ModelWithLoss

    @property
    def compiled(self) -> bool:
        return self.module.compiled

    def evaluating(self) -> AbstractContextManager[object]:
        return evaluating(self.module)

    def loss(self, batch: Batch, *, chunk_tokens: int) -> Tensor:
        loss = forward_pass(self.module, batch, chunk_tokens=chunk_tokens, scale=1.0)
        reshard(self.module)
        return torch.zeros(()) if loss is None else loss

    @torch.no_grad()
    def documents(self, batch: Batch) -> Tensor:
        result = forward_pass(self.module, batch, want="documents")
        reshard(self.module)
        return torch.zeros(0) if result is None else result

    def objection(self) -> str | None:
        return objection(self.module)

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        pad_id: int,
        progress: Callable[[], None],
    ) -> list[list[int]]:
        return generate(
            self.module, prompts, max_new_tokens=max_new_tokens, stop_ids=stop_ids, pad_id=pad_id, progress=progress
        )
