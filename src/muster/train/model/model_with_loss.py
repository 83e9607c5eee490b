"""The module that is trained: a causal language model whose forward pass ends in its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from muster.train.data_feed.batch import IGNORED, Batch
from muster.train.model.attention import Attention, attention_arguments
from muster.train.model.attention_needs import Needs
from muster.train.model.context_parallel import Context
from muster.train.model.loss import Kernel, LogitRule, chunked_cross_entropy, logit_rule, token_log_probs
from muster.train.model.mixtures.load import Mixture
from muster.train.model.pipeline_stage import Stage
from muster.train.model.split_backward import LeftForLater
from muster.train.objectives.base import Objective, values_of

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


@dataclass(frozen=True)
class Decoding:
    """One step of generation. N prompts, Q new tokens, K tokens so far. Not a pytree: FSDP passes it on unchanged."""

    tokens: Tensor
    """int64[N, Q]"""
    mask: Tensor
    """int64[N, K]: 0 at padding on the left."""
    positions: Tensor
    """int64[N, Q]"""
    caches: Sequence[Cache]
    """One, or one for each chunk of a pipeline's stage."""
    chunk: int = 0

    @property
    def cache(self) -> Cache:
        return self.caches[self.chunk]


class ModelWithLoss(nn.Module):
    """A transformers model with its loss inside.

    The loss is inside because the root's parameters (head, embedding, last norm) are unsharded only during the root's
    forward pass. Parameters have transformers' names after ``model.``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attention: Attention,
        *,
        compute_dtype: torch.dtype,
        reshard_layers: bool = True,
    ) -> None:
        super().__init__()
        self.model = model
        self.attention = attention
        self.compute_dtype = compute_dtype
        self.reshard_layers = reshard_layers
        self.compiled = False
        """Its layers are, and want batches of static shapes."""
        self.kernel: Kernel | None = None
        """What computes the loss of a chunk, in the place of the uncompiled one."""
        self.mixture: Mixture | None = None
        """Its experts, where it has some."""
        self.context: Context | None = None
        """Where ranks share each sequence."""
        self.objective: Objective | None = None
        """What the loss is made of, in the place of cross-entropy."""
        self.needs: Needs | None = None
        """What it requires of an attention kernel."""
        self.unpacked: str | None = None
        """Why its documents never share a row; None: the self-test says whether they may."""
        self.rule: LogitRule = logit_rule(model.config.get_text_config())
        head = model.get_output_embeddings()
        self.own_head = model.base_model is not model and type(head) is nn.Linear
        """The head is applied here, in chunks; otherwise by the model's own forward, to all tokens at once."""
        self.later: LeftForLater | None = None
        """Gradients that backward passes have left undone, where they are split."""
        self.stage: Stage | None = None
        """Which part of the model is here; None: all of it."""

    def hidden_shape(self, given: Batch | Decoding) -> list[int]:
        """The shape of a rank's hidden states of these tokens between two stages."""
        rows, length = (given.tokens if isinstance(given, Decoding) else given.input_ids).shape
        if self.context is not None and isinstance(given, Batch):
            length //= self.context.size
        return [rows, length, self.model.config.get_text_config().hidden_size]

    @property
    def generation_attention(self) -> str:
        """Dense attention, which takes a padding mask and a cache."""
        return "sdpa" if getattr(self.model, "_supports_sdpa", False) and self.attention.kernel != "eager" else "eager"

    def forward(
        self,
        given: Batch | Decoding,
        *,
        scale: float = 1.0,
        chunk_tokens: int = 1024,
        want: str = "loss",
        hidden: Tensor | None = None,
        chunk: int = 0,
    ) -> Tensor:
        """The output that ``want`` names; in a part of the model before the last the hidden states behind its layers,
        [B, S, E].

        ``hidden``: what the part before gave; None in the first. ``chunk``: which of this stage's parts.

        ``loss``: 0-d fp32, ``scale`` times the summed cross-entropy. ``logits``: [B, S, V] fp32 as the loss sees them,
        ``model_logits``: the same by transformers' own forward. ``documents``: [D] fp32, the log-probabilities of the
        batch's documents. ``next`` (of a ``Decoding``): [N, V] fp32.
        """
        if self.context is not None and isinstance(given, Batch):
            given = self.context.part_of(given)
        if self.stage is None:
            return self._output(given, hidden, scale=scale, chunk_tokens=chunk_tokens, want=want)
        with self.stage.only(self.model, chunk):
            if self.stage.ends(chunk):
                return self._output(given, hidden, scale=scale, chunk_tokens=chunk_tokens, want=want)
            if isinstance(given, Decoding):
                onward: Tensor = self.model.base_model(**self._arguments(given, hidden))[0]
            else:
                trains = want == "loss" and torch.is_grad_enabled()
                onward = self._run(self.model.base_model, given, hidden, scale, trains=trains)[0][0]
            return onward

    def _output(
        self, given: Batch | Decoding, hidden: Tensor | None, *, scale: float, chunk_tokens: int, want: str
    ) -> Tensor:
        """Behind the model's last layer."""
        if isinstance(given, Decoding):
            return self._next(given, hidden)
        trains = want == "loss" and torch.is_grad_enabled()
        if want == "model_logits" or not self.own_head:
            output, extra = self._run(self.model, given, hidden, scale, trains=trains)
            logits: Tensor = output.logits
            if want == "documents" or (want == "loss" and self.objective is not None):
                chosen = logits.flatten(0, 1).index_select(0, given.targets).float().log_softmax(-1)
                labels = given.labels.flatten().index_select(0, given.targets).unsqueeze(1)
                return self._of_documents(chosen.gather(1, labels).squeeze(1), given, scale, want)
            if want != "loss":
                return logits.float().view(*given.input_ids.shape, -1)
            return _loss_of(logits, given, scale) + extra
        head = self.model.get_output_embeddings()
        output, extra = self._run(self.model.base_model, given, hidden, scale, trains=trains)
        hidden = output[0].flatten(0, 1)
        hidden = hidden.to(head.weight.dtype)  # Mamba's residual stream is float32
        if want == "logits":
            return torch.unflatten(self._logits(hidden), 0, given.input_ids.shape)
        # A token without a target contributes nothing, so its logits are not computed.
        hidden = hidden.index_select(0, given.targets)
        labels = given.labels.flatten().index_select(0, given.targets)
        if want == "documents" or self.objective is not None:
            log_probs = token_log_probs(
                hidden, head.weight, head.bias, labels, chunk_tokens=chunk_tokens, rule=self.rule
            )
            return self._of_documents(log_probs, given, scale, want)
        loss: Tensor = chunked_cross_entropy(
            hidden,
            head.weight,
            head.bias,
            labels,
            scale=scale,
            chunk_tokens=chunk_tokens,
            rule=self.rule,
            kernel=self.kernel,
        )
        return loss if self.mixture is None else loss + extra

    def _of_documents(self, log_probs: Tensor, given: Batch, scale: float, want: str) -> Tensor:
        assert self.objective is not None, "there is no objective that looks at documents"
        if want == "documents":
            return log_probs[:0] if given.units is None else values_of(log_probs, given.units).log_probs
        return self.objective(log_probs, given, scale=scale)

    def _run(
        self, part: nn.Module, given: Batch, hidden: Tensor | None, scale: float, *, trains: bool
    ) -> tuple[Any, Tensor | float]:
        """What ``part`` of the model returns, and what the load of its experts adds to the loss."""
        mixture, arguments = self.mixture, self._arguments(given, hidden)
        if mixture is None:
            return part(**arguments), 0.0
        real = given.real() if self.context is None else None
        wanted = trains and mixture.wants_logits
        mixture.begin(real, counts=trains)
        output = part(**arguments, **({"output_router_logits": True} if wanted else {}))
        mixture.end()
        if not wanted:
            return output, 0.0
        share = torch.full((), scale * given.supervised, device=output[0].device)
        # Means over no token at all would be NaN, also where they count nothing.
        return output, mixture.loss(self.model, output.router_logits, real if given.supervised else None, share)

    def _arguments(self, batch: Batch | Decoding, hidden: Tensor | None) -> dict[str, Any]:
        if isinstance(batch, Decoding):
            return {
                **_input(batch.tokens, hidden),
                "attention_mask": batch.mask,
                "position_ids": batch.positions,
                "past_key_values": batch.cache,
                "use_cache": True,
            }
        # No attention mask but flex attention's own: one of ones would disable the separation of documents silently.
        tokens, positions = batch.input_ids, batch.position_ids
        if self.attention.way == "segments":  # kernels take cumulative lengths of one row
            tokens, positions = tokens.view(1, -1), positions.view(1, -1)
        return {
            **_input(tokens, hidden),
            "position_ids": positions,
            "use_cache": False,
            **(self._bounds(batch) if self.context is None else self._shared(batch)),
        }

    def _bounds(self, batch: Batch) -> dict[str, Any]:
        config = self.model.config.get_text_config()
        return attention_arguments(batch, self.attention, config, self.compute_dtype)

    def _shared(self, batch: Batch) -> dict[str, Tensor | Context | None]:
        return {"cu_seq_lens_q": batch.cu_seqlens, "context": self.context}

    def _logits(self, hidden: Tensor) -> Tensor:
        head = self.model.get_output_embeddings()
        logits = nn.functional.linear(hidden, head.weight, head.bias).float() * self.rule.factor
        return logits if self.rule.cap is None else torch.tanh(logits / self.rule.cap) * self.rule.cap

    def _next(self, given: Decoding, hidden: Tensor | None) -> Tensor:
        arguments = self._arguments(given, hidden)
        if self.own_head:
            hidden = self.model.base_model(**arguments)[0][:, -1]
            return self._logits(hidden.to(self.model.get_output_embeddings().weight.dtype))
        logits: Tensor = self.model(**arguments).logits[:, -1]
        return logits.float()


def _input(tokens: Tensor, hidden: Tensor | None) -> dict[str, Tensor]:
    return {"input_ids": tokens} if hidden is None else {"inputs_embeds": hidden}


def forward_pass(module: ModelWithLoss, given: Batch | Decoding, **asked: Any) -> Tensor | None:
    """A forward pass without a backward one, of the whole model; None on a stage before the last.

    Collective over the stages. ``asked``: as ``ModelWithLoss.forward`` takes it.
    """
    if module.stage is None:
        output: Tensor = module(given, **asked)
        return output
    stage, link = module.stage, module.stage.link
    shape = module.hidden_shape(given)
    hidden: Tensor | None = None
    for chunk in range(stage.schedule.chunks):
        source, target = stage.schedule.source(link.stage, chunk), stage.schedule.target(link.stage, chunk)
        if source is not None and source != link.stage:
            hidden = link.receive(shape, source)
        given = replace(given, chunk=chunk) if isinstance(given, Decoding) else given
        output = module(given, hidden=hidden, chunk=chunk, **asked)
        if target is None:
            return output
        hidden = output
        if target != link.stage:
            link.send(output, target)
    return None


def _loss_of(logits: Tensor, batch: Batch, scale: float) -> Tensor:
    return scale * nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
