"""Log-probabilities of a run's answers under the model before its first step: computed once, kept with its checkpoints.

A block of documents is an object: float32 numbers and a checksum (XXH3-64). A kill loses one block. Adapters are zero
before the first step, so the model is its own reference and no second one is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash

from muster.config.spec import RunSpec
from muster.core.errors import CheckpointError
from muster.core.protocols import Store
from muster.data.arrays import Float32s
from muster.data.cache import fingerprint
from muster.data.prepare import Prepared
from muster.data.sequences import SequenceStore
from muster.protocol.ranks import AgentClient
from muster.storage import uris
from muster.storage.store import open_store
from muster.train.data_feed.batch import shared_batches
from muster.train.distributed.device_mesh import Meshes
from muster.train.distributed.reduce import ReduceGroups
from muster.train.evaluation.evaluated_model import EvaluatedModel

#: Sequences of a block.
BLOCK = 1024


@dataclass
class References:
    """Those of a run's prepared data."""

    spec: RunSpec
    folder: str
    """URI"""
    stores: dict[str, SequenceStore]
    objects: Store = field(default_factory=open_store)
    digest: str = ""
    """Of all that was read; empty: not read yet."""

    @classmethod
    def of(cls, spec: RunSpec, prepared: Prepared, directory: str) -> References:
        """Below ``directory``, where the run's checkpoints are; of no store: its objective compares with nothing."""
        objective = spec.training.preference
        stores: dict[str, SequenceStore] = {}
        if objective is None or not objective.traits.needs_reference:
            return cls(spec, "", stores)
        assert spec.model is not None
        for name, store in (("train", prepared.train), ("heldout", prepared.heldout)):
            if store is not None:
                stores[name] = store
                if store.mismatched is not None:
                    stores[f"{name}-mismatched"] = store.mismatched
        keys = {"tokenizer", "attention", "weights"}
        key = fingerprint([prepared.fingerprint, spec.model.model_dump(mode="json", exclude=keys), spec.training.seed])
        return cls(spec, uris.join(directory, "reference", key), stores)

    def read(self) -> dict[str, str]:
        """Give the stores what is kept; what a save says of it. Empty: something is missing or damaged."""
        digest = xxhash.xxh3_64()
        if self.digest or not self.stores:
            return {"reference": self.digest} if self.digest else {}
        for name, store in self.stores.items():
            blocks = [self._block(name, store, number) for number in range(_blocks(store))]
            known = [block for block in blocks if block is not None]
            if len(known) < len(blocks):
                return {}
            store.reference = np.concatenate(known)
            digest.update(store.reference.tobytes())
        self.digest = digest.hexdigest()
        return {"reference": self.digest}

    @torch.no_grad()
    def make(
        self,
        model: EvaluatedModel,
        groups: ReduceGroups,
        meshes: Meshes,
        agent: AgentClient,
        device: torch.device,
        *,
        step: int,
        writes: bool,
    ) -> dict[str, str]:
        """Compute the blocks that are missing, write them where this is the rank that does, and give them to the
        stores; as ``read``. Collective.

        Raises:
            CheckpointError: the model is no longer the one before the first step, or what was written cannot be read.
        """
        todo = [(name, number) for name, store in self.stores.items() for number in range(_blocks(store))]
        missing = torch.tensor([writes and self._lacks(*each) for each in todo], dtype=torch.int64, device=device)
        flags = groups.sum_everywhere_(missing).tolist()
        if any(flags) and step > 0:
            raise CheckpointError(
                f"{self.folder} lacks the log-probabilities that step {step} was trained with",
                hint="restore that folder, or set another checkpoint.dir to start from step 0",
            )
        with model.evaluating():
            for (name, number), flag in zip(todo, flags, strict=True):
                if not flag:
                    continue
                self.digest = ""  # what is computed now is read by all ranks
                store = self.stores[name]
                first, last = _span(store, number)
                values = torch.zeros(int(store.firsts[last] - store.firsts[first]), dtype=torch.float64, device=device)
                size = self.spec.training.micro_batch_size
                rounds = shared_batches(
                    store, range(first, last), device, size=size, rank=meshes.data_rank,
                    ranks=meshes.layout.data_ranks, static_shapes=model.compiled,
                )  # fmt: skip
                for index, batch in rounds:
                    log_probs = model.documents(batch)
                    agent.progress()
                    if index is not None and len(log_probs):
                        at = int(store.firsts[first + index * size] - store.firsts[first])
                        values[at : at + len(log_probs)] = log_probs.double()
                groups.sum_everywhere_(values)
                if writes:
                    data = values.float().cpu().numpy().astype("<f4").tobytes()
                    self.objects.put(self._uri(name, number), data + xxhash.xxh3_64_digest(data))
        groups.sum_everywhere_(missing)  # written, before others read
        digest = self.read()
        if not digest:
            raise CheckpointError(f"what was written to {self.folder} cannot be read", hint="see its disk or bucket")
        return digest

    def _lacks(self, name: str, number: int) -> bool:
        return not self.digest and self._block(name, self.stores[name], number) is None

    def _uri(self, name: str, number: int) -> str:
        return uris.join(self.folder, f"{name}-{number:06}")

    def _block(self, name: str, store: SequenceStore, number: int) -> Float32s | None:
        try:
            held = self.objects.get(self._uri(name, number)).data
        except FileNotFoundError:
            return None
        data, first_last = held[:-8], _span(store, number)
        count = int(store.firsts[first_last[1]] - store.firsts[first_last[0]])
        if len(data) != 4 * count or xxhash.xxh3_64_digest(data) != held[-8:]:
            return None
        return np.frombuffer(data, dtype="<f4").copy()


def _blocks(store: SequenceStore) -> int:
    return -(-len(store) // BLOCK)


def _span(store: SequenceStore, number: int) -> tuple[int, int]:
    return number * BLOCK, min((number + 1) * BLOCK, len(store))
