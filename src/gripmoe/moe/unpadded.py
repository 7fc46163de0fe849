"""Forward passes that compute nothing for padding.

The decoder gets a padded batch as one row without padding. Attention alone pads again, since the kernels that
need no padding (flash-attention) need a GPU. Outputs are padded again too, with zeros.

Shapes: T tokens of a padded batch (rows x positions), U of them that are not padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Families for which a test compares outputs and gradients with those of padded passes.
COMPARED_FAMILIES = frozenset({"olmoe", "qwen2_moe", "qwen3", "qwen3_moe"})
ATTENTION = "gripmoe_unpadded"  # the name of the attention function in transformers


@dataclass(frozen=True)
class Padding:
    """Positions of the real tokens: `real_U` in the padded batch, `aligned_U` in the same rows padded on the right."""

    shape: torch.Size  # (rows, positions)
    real_U: Tensor
    aligned_U: Tensor

    @classmethod
    def of(cls, attention_mask: Tensor) -> Padding:
        real_U = attention_mask.flatten().nonzero().squeeze(1)
        rank = attention_mask.cumsum(dim=1) - 1
        first = torch.arange(len(rank), device=rank.device)[:, None] * rank.shape[1]
        return cls(rank.shape, real_U, (first + rank).flatten()[real_U])

    def added(self, tokens_U: Tensor) -> Tensor:
        """(U, ...) as (T, ...), with zeros for padding."""
        return _spread(tokens_U, self.real_U, self.shape)

    def removed(self, tokens_T: Tensor) -> Tensor:
        """(T, ...) as (U, ...)."""
        return tokens_T.index_select(0, self.real_U.to(tokens_T.device))

    def to_rows(self, heads: Tensor) -> Tensor:
        """(1, heads, U, d) as rows padded on the right, (rows, heads, positions, d)."""
        return _spread(heads[0].transpose(0, 1), self.aligned_U, self.shape).unflatten(0, self.shape).transpose(1, 2)

    def from_rows(self, rows: Tensor) -> Tensor:
        """(rows, positions, heads, d) of `to_rows` as (1, U, heads, d)."""
        return rows.flatten(0, 1).index_select(0, self.aligned_U.to(rows.device))[None]


def _spread(tokens_U: Tensor, places_U: Tensor, shape: torch.Size) -> Tensor:
    spread = tokens_U.new_zeros(shape.numel(), *tokens_U.shape[1:])
    return spread.index_copy(0, places_U.to(tokens_U.device), tokens_U)


def can_unpad(model: nn.Module) -> bool:
    config = model.config
    plain = config._attn_implementation == "sdpa" and not getattr(config, "sliding_window", None)
    return plain and config.model_type in COMPARED_FAMILIES


def padding_of(model: nn.Module) -> Padding | None:
    """The padding that the running pass of `model` leaves out; None if it leaves none out."""
    running = vars(model.model).get("running_unpadded")
    return running[-1] if running else None


@contextmanager
def unpadded_passes(model: nn.Module) -> Iterator[None]:
    """Within the block, passes of `model` compute no padding. Passes that cache, return more than the last hidden state
    or run under gradient checkpointing stay as they are, and so do models that `can_unpad` refuses. Do not copy the
    model within the block: the copy would run the weights of `model`."""
    decoder, config = model.model, model.config
    if "running_unpadded" in vars(decoder) or not can_unpad(model):
        yield
        return
    _register()
    own, padded_forward = vars(decoder).get("forward"), decoder.forward
    decoder.running_unpadded = []

    def forward(input_ids: Tensor | None = None, attention_mask: Tensor | None = None, *args, **kwargs):
        padding = None
        if not args and _is_plain(model, kwargs) and isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
            if input_ids is not None and (attention_mask == 0).any() and attention_mask.any():
                padding = Padding.of(attention_mask)
        if padding is None:
            return padded_forward(input_ids, attention_mask, *args, **kwargs)
        one_row = padding.removed(input_ids.flatten())[None]
        as_it_is = attention_mask.new_ones(1, 1, 1, 1, dtype=torch.bool)  # transformers takes a 4-D mask as prepared
        positions_U = padding.real_U % padding.shape[1]
        kwargs |= {"position_ids": positions_U[None], "use_cache": False, "padding": padding}
        decoder.running_unpadded.append(padding)
        try:
            output = padded_forward(one_row, as_it_is, **kwargs)
        finally:
            decoder.running_unpadded.pop()
        output.last_hidden_state = padding.added(output.last_hidden_state[0]).unflatten(0, padding.shape)
        return output

    decoder.forward, config._attn_implementation = forward, ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"
        del decoder.forward, decoder.running_unpadded
        if own is not None:  # of accelerate's hooks
            decoder.forward = own


def _is_plain(model: nn.Module, arguments: dict) -> bool:
    """Whether a pass asks for the last hidden state alone."""
    config, more = model.config, ("output_hidden_states", "output_attentions", "output_router_logits")
    asked = {name for name, value in arguments.items() if value is not None and value is not False}
    recomputed = model.training and model.is_activation_checkpointing
    return not asked and not recomputed and not any(getattr(config, name, False) for name in more)


def _register() -> None:
    # Imported here: whoever has a model has imported its classes.
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(module, query, key, value, attention_mask, padding: Padding | None = None, **kwargs):
        if padding is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        rows = map(padding.to_rows, (query, key, value))
        return padding.from_rows(sdpa_attention_forward(module, *rows, None, **kwargs)[0]), None

    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
