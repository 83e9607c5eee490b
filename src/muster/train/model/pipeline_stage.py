"""A stage of a pipeline: the transformers model of which only some layers are here.

Layers of other stages are passed over, and the embedding, the last norm and the head are left out where they do not
belong. Places in lists and names of parameters stay as they are in the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from muster.core.errors import UsageError
from muster.core.layout import FAMILIES, cut_layers
from muster.train.distributed.pipeline_order import Schedule
from muster.train.distributed.reduce import TiedGradient
from muster.train.distributed.stage_link import StageLink
from muster.train.model.lora import is_adapter_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Which part of the model is here."""

    link: StageLink
    schedule: Schedule
    chunks: tuple[range, ...]
    """The layers of each chunk."""
    lists: tuple[nn.ModuleList, ...]
    """Of each chunk, where there are several: its layers, and placeholders for the others."""
    tied: str | None
    """The parameter that embedding and head share, if this stage holds it: for one of them, or in a V for both."""
    elsewhere: frozenset[str]
    """Parameters of the model that are not here."""
    trained_elsewhere: frozenset[str]
    """Of them, those that are trained."""

    @property
    def layers(self) -> list[int]:
        """The layers that are here, in order."""
        return [index for chunk in self.chunks for index in chunk]

    @property
    def has_embedding(self) -> bool:
        """Whether the model begins here."""
        return self.schedule.begins_on(self.link.stage)

    @property
    def has_head(self) -> bool:
        """Whether the model ends here."""
        return self.schedule.ends_on(self.link.stage)

    def ends(self, chunk: int) -> bool:
        """Whether the model does behind this chunk."""
        return self.schedule.target(self.link.stage, chunk) is None

    @contextmanager
    def only(self, model: PreTrainedModel, chunk: int) -> Iterator[None]:
        """Have the forward pass pass over the layers of the other chunks here, and over what is behind the last one."""
        if not self.lists:
            yield
            return
        body: Any = model.base_model
        layers, norm = body.layers, body.norm
        body.layers = self.lists[chunk]
        if not self.ends(chunk):
            body.norm = nn.Identity()
        try:
            yield
        finally:
            body.layers, body.norm = layers, norm

    @property
    def counted_elsewhere(self) -> frozenset[str]:
        """Parameters that are here, and that an earlier stage counts in norms and hashes."""
        return frozenset() if self.tied is None or self.has_embedding else frozenset((self.tied,))


class PassedOver(nn.Module):
    """Stands for a layer of another stage: hands the hidden states on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # What a model's forward pass reads of its layers: which mask they take.
        for name, value in vars(layer).items():
            if isinstance(value, str | int) and not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def cut(model: PreTrainedModel, layers: Sequence[nn.Module], link: StageLink, schedule: Schedule) -> Stage:
    """Leave in ``model`` (on the meta device, adapters in place) what belongs to this stage.

    Raises:
        UsageError: the model's forward pass cannot begin in the middle, or there are too few layers.
    """
    config = model.config.get_text_config()
    check_family(config.model_type, getattr(config, "layer_types", None))
    named = dict(model.named_parameters())
    tied = tied_name(model)
    every = layers_of(model, layers, schedule)
    chunks = tuple(every[schedule.part(link.stage, chunk)] for chunk in range(schedule.chunks))
    body: Any = model.base_model
    for index, layer in enumerate(layers):
        mine = next((chunk for chunk in chunks if index in chunk), None)
        if mine is None:
            body.layers[index] = PassedOver(layer)
            continue
        for module in layer.modules():
            place: Any = getattr(module, "layer_idx", None)
            if isinstance(place, int):  # in the cache of generation, which has this chunk's layers alone
                setattr(module, "layer_idx", place - mine.start)  # noqa: B010 (torch's stub takes modules only)
    first, last = schedule.begins_on(link.stage), schedule.ends_on(link.stage)
    if not last:
        body.norm = nn.Identity()
        model.lm_head = None
    if not first and not (last and tied is not None):
        body.embed_tokens = None
    held = {name for name, _ in model.named_parameters()}
    elsewhere = frozenset(named.keys() - held)
    return Stage(
        link=link,
        schedule=schedule,
        chunks=chunks,
        lists=tuple(_only(body.layers, chunk) for chunk in chunks) if len(chunks) > 1 else (),
        tied=tied if tied in held else None,
        elsewhere=elsewhere,
        trained_elsewhere=frozenset(name for name in elsewhere if named[name].requires_grad),
    )


def _only(layers: Sequence[nn.Module], chunk: range) -> nn.ModuleList:
    return nn.ModuleList(
        layer if index in chunk or isinstance(layer, PassedOver) else PassedOver(layer)
        for index, layer in enumerate(layers)
    )


def tied_gradient(model: PreTrainedModel, stage: Stage | None) -> TiedGradient | None:
    """The gradient that this stage shares with another; None: there is none."""
    if stage is None or stage.tied is None or (stage.has_embedding and stage.has_head):
        return None
    parameter = dict(model.named_parameters())[stage.tied]
    if not parameter.requires_grad:
        return None
    return TiedGradient(parameter, stage.link.both_ends, counts=stage.has_embedding)


def check_family(model_type: str, layer_types: Sequence[str] | None) -> None:
    """Raise UsageError if a model cannot be cut into stages."""
    if model_type not in FAMILIES:
        raise UsageError(
            f"parallelism.pp: the forward pass of {model_type} is not known to begin in the middle",
            hint=f"pp: 1, or one of {', '.join(sorted(FAMILIES))}",
        )
    if len(set(layer_types or ())) > 1:
        raise UsageError(
            f"parallelism.pp: {model_type} with layers of several kinds ({', '.join(sorted(set(layer_types or ())))}) "
            "is not cut into stages: a stage's cache would take one kind for another",
            hint="pp: 1",
        )


def layers_of(model: PreTrainedModel, layers: Sequence[nn.Module], schedule: Schedule) -> list[range]:
    """The layers of each part, by what layers and head cost. Attention is left out: it depends on the documents, and a
    cut must not. Raises UsageError."""
    weights = dict(layers[0].named_parameters())
    in_layer = sum(weights[name].numel() for name in weights if weights[name].ndim > 1 and not is_adapter_name(name))
    head: Any = model.get_output_embeddings()
    try:
        return cut_layers(len(layers), schedule.parts, last=head.weight.numel() / in_layer)
    except ValueError as error:
        chunks = f" with {schedule.chunks} chunks each" if schedule.chunks > 1 else ""
        hint = f"pp: at most {len(layers) // schedule.chunks}"
        raise UsageError(f"parallelism.pp {schedule.stages}{chunks}: {error}", hint=hint) from error


def tied_name(model: PreTrainedModel) -> str | None:
    """The name of the parameter that embedding and head share; None: they do not."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:
        return None
    return next(name for name, parameter in model.named_parameters() if parameter is embedding.weight)
