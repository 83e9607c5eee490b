"""A checkpoint while it is being made: by the ranks that save, and by replicators that flush snapshots.

Files are written first (``shard_file.write_shard``), each with the header that ``CheckpointDraft`` gives it; then
``finish`` writes the index and makes the manifest, and ``manifest.commit`` makes the checkpoint exist.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import muster
from muster.checkpoint_format import manifest as manifests
from muster.checkpoint_format.checksum import checksum_of
from muster.checkpoint_format.manifest import Manifest
from muster.checkpoint_format.shard_file import StoredFile
from muster.checkpoint_format.shards import Chunk, ShardHeader
from muster.checkpoint_format.tensor_index import INDEX, encode_index, incomplete
from muster.core.errors import CheckpointError
from muster.core.protocols import Store
from muster.core.typed_json import JsonObject
from muster.core.types import Layout
from muster.storage import uris


@dataclass(frozen=True, kw_only=True)
class WrittenShard:
    """A shard that lies in the draft's folder."""

    file: StoredFile
    begin: int
    """Where the tensors' bytes begin in it."""
    tensors: tuple[Chunk, ...]


@dataclass(frozen=True, kw_only=True)
class CheckpointDraft:
    """The state after ``step`` of ``attempt``, on its way into ``directory``."""

    directory: str
    run_id: str
    step: int
    attempt: int
    layout: Layout

    @property
    def prefix(self) -> str:
        return manifests.step_prefix(self.step, self.attempt)

    @property
    def uri(self) -> str:
        """The folder of its files."""
        return uris.join(self.directory, self.prefix)

    def header(self, rank: int, tensors: tuple[Chunk, ...], extra: JsonObject) -> ShardHeader:
        """What a rank's shard says of itself."""
        return ShardHeader(
            run_id=self.run_id, attempt=self.attempt, step=self.step, rank=rank, layout=self.layout,
            extra=extra, tensors=tensors,
        )  # fmt: skip

    def finish(
        self,
        store: Store,
        shards: Sequence[WrittenShard],
        *,
        extra: JsonObject,
        fence: int | None = None,
        name_prefix: str = "",
    ) -> Manifest:
        """Write the index and return the manifest to commit.

        ``fence``: the attempt in whose name it is committed; None: that of the draft.

        Raises:
            CheckpointError: the shards are not the whole state.
            AccessError, BackendError: the index cannot be written.
        """
        gap = incomplete(shard.tensors for shard in shards)
        if gap is not None:
            raise CheckpointError(f"the shards of step {self.step} are not the whole state: {gap}")
        index = encode_index([(shard.file.name, shard.begin, shard.tensors) for shard in shards if shard.tensors])
        name = f"{name_prefix}{INDEX}"
        store.put(uris.join(self.uri, name), index)
        files = tuple(shard.file for shard in shards)
        return Manifest(
            run_id=self.run_id,
            attempt=self.attempt if fence is None else fence,
            step=self.step,
            layout=self.layout,
            prefix=self.prefix,
            files=files,
            index=StoredFile(name=name, bytes=len(index), checksum=checksum_of(index)),
            bytes=sum(file.bytes for file in files) + len(index),
            created_ns=time.time_ns(),
            version=muster.__version__,
            extra=extra,
            directory=self.directory,
        )
