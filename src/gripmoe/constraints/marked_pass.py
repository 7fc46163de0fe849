"""What a constraint observes of a marked forward pass: its tokens, its routing and its final hidden states."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from gripmoe.constraints.base import MarkedPass, Tokens
from gripmoe.data.batches import seems_padded
from gripmoe.data.documents import attention_mask_of
from gripmoe.moe import MoEModel
from gripmoe.moe.recording import RoutingRecorder, counted_tokens, hooked, places_of

COMPILED = "a compiled model that has run before `constrain` calls no hooks: compile it afterwards"


@contextmanager
def observed_pass(model: MoEModel, kind: str, rows: Tensor | None) -> Iterator[ObservedPass]:
    """Observes the forward pass within the block, of which `rows` count."""
    decoder = model.model.model
    routers = [model.router(layer) for layer in model.layers]
    with model.record_routing() as recorder:
        observed = ObservedPass(model, kind, rows, recorder)
        hooks = [
            decoder.register_forward_pre_hook(observed.begin, with_kwargs=True),
            decoder.register_forward_hook(observed.end),
            *(module.register_forward_pre_hook(observed.note_grad_mode) for module in (decoder, *routers)),
        ]
        with hooked(hooks):
            yield observed


class ObservedPass:
    """Collects what the hooks of `observed_pass` see."""

    def __init__(self, model: MoEModel, kind: str, rows: Tensor | None, recorder: RoutingRecorder):
        self._model, self._kind, self._rows, self._recorder = model, kind, rows, recorder
        self._passes: list[Tokens] = []
        self._hidden: list[Tensor] = []
        self._grad_modes: set[bool] = set()  # whether gradients are on, in the decoder and in its routers

    def begin(self, module, args, kwargs) -> None:
        kwargs = {"input_ids": args[0], **kwargs} if args else kwargs
        self._passes.append(_tokens(self._kind, kwargs, self._rows))
        if kwargs.get("attention_mask") is None and seems_padded(kwargs["input_ids"], self._model.model):
            warnings.warn(
                f"a pass within `with handle.{self._kind}():` has no `attention_mask`, and rows begin or end with "
                "padding, which then counts as text: give the mask",
                stacklevel=2,
            )

    def end(self, module, args, output) -> None:
        self._hidden.append(output.last_hidden_state)

    def note_grad_mode(self, *_) -> None:
        self._grad_modes.add(torch.is_grad_enabled())

    def marked(self, needs_graph: bool) -> MarkedPass:
        """The pass. Raises RuntimeError unless there was exactly one, and if a penalty `needs_graph` that checkpointing
        hides."""
        if len(self._passes) != 1:
            why = f" ({COMPILED})" if not self._passes else ""
            raise RuntimeError(f"`with handle.{self._kind}():` marks one forward pass, not {len(self._passes)}{why}")
        if needs_graph and len(self._grad_modes) > 1:
            raise RuntimeError(
                "reentrant gradient checkpointing hides what routers see from the penalty's gradient: "
                'model.activation_checkpointing_enable({"use_reentrant": False})'
            )
        keep = self._passes[0].keep
        final_Td = self._hidden[0].to(keep.device).flatten(0, 1)  # accelerate puts the last norm elsewhere
        final_Nd = final_Td.index_select(0, places_of(keep))
        return MarkedPass(self._recorder.take(keep), final_Nd, self._passes[0])


def _tokens(kind: str, inputs: Mapping[str, Tensor], rows: Tensor | None) -> Tokens:
    if inputs.get("input_ids") is None:
        raise ValueError(f"`with handle.{kind}():` knows documents by their tokens: give `input_ids`")
    mask = attention_mask_of(inputs)
    if rows is not None:
        if not isinstance(rows, Tensor) or rows.dtype != torch.bool or rows.shape != (len(mask),):
            given = f"{rows.dtype} of shape {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(
                f"`rows` must be a bool tensor with an entry for each of the {len(mask)} rows, not {given}"
            )
        mask = mask * rows[:, None].to(mask)
    return Tokens(inputs["input_ids"], mask, counted_tokens(mask))
