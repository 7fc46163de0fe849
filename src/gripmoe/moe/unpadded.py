"""Forward passes that compute nothing for padding.

The decoder gets a padded batch as one row of the tokens that count. Only attention sees padded rows, as in the
variable-length kernels of flash-attention, which need a GPU. Outputs are padded again, so that callers see no
difference but the time.

Shapes: T tokens of a padded batch (rows x positions), U of them that count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

FAMILIES = frozenset({"olmoe", "qwen2_moe", "qwen3", "qwen3_moe"})  # where a test compares outputs and gradients
ATTENTION = "gripmoe_unpadded"  # its name among the attention functions of transformers


@dataclass(frozen=True)
class Padding:
    """Where the tokens that count stand in a padded batch, and where in rows that are padded on the right alone."""

    shape: torch.Size  # (rows, positions)
    counted_U: Tensor
    aligned_U: Tensor

    @classmethod
    def of(cls, attention_mask: Tensor) -> Padding:
        counted_U = attention_mask.flatten().nonzero().squeeze(1)
        rank = attention_mask.cumsum(dim=1) - 1
        first = torch.arange(len(rank), device=rank.device)[:, None] * rank.shape[1]
        return cls(rank.shape, counted_U, (first + rank).flatten()[counted_U])

    def added(self, tokens_U: Tensor) -> Tensor:
        """(U, ...) as (T, ...), with zeros for padding."""
        return _spread(tokens_U, self.counted_U, self.shape)

    def removed(self, tokens_T: Tensor) -> Tensor:
        """(T, ...) as (U, ...)."""
        return tokens_T.index_select(0, self.counted_U.to(tokens_T.device))

    def rows(self, heads: Tensor) -> Tensor:
        """(1, heads, U, d) as rows padded on the right, (rows, heads, positions, d)."""
        return _spread(heads[0].transpose(0, 1), self.aligned_U, self.shape).unflatten(0, self.shape).transpose(1, 2)

    def unrowed(self, rows: Tensor) -> Tensor:
        """(rows, positions, heads, d) of `rows` as (1, U, heads, d)."""
        return rows.flatten(0, 1).index_select(0, self.aligned_U.to(rows.device))[None]


def _spread(tokens_U: Tensor, places_U: Tensor, shape: torch.Size) -> Tensor:
    spread = tokens_U.new_zeros(shape.numel(), *tokens_U.shape[1:])
    return spread.index_copy(0, places_U.to(tokens_U.device), tokens_U)


def can_unpad(model: nn.Module) -> bool:
    config = model.config
    plain = config._attn_implementation == "sdpa" and not getattr(config, "sliding_window", None)
    return plain and config.model_type in FAMILIES


@contextmanager
def unpadded_passes(model: nn.Module) -> Iterator[list[Padding]]:
    """Within the block, passes of `model` compute no padding. While a pass runs, the yielded list holds its `Padding`.
    Passes with a cache or under gradient checkpointing stay as they are, and so do models that `can_unpad` refuses."""
    running: list[Padding] = []
    if not can_unpad(model):
        yield running
        return
    _register()
    decoder, config = model.model, model.config
    padded_forward = decoder.forward

    def forward(input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs):
        plain = input_ids is not None and isinstance(attention_mask, Tensor) and attention_mask.dim() == 2
        plain &= not any(kwargs.get(name) is not None for name in ("past_key_values", "position_ids"))
        plain &= not (decoder.training and model.is_gradient_checkpointing)
        if not plain or not (attention_mask == 0).any():
            return padded_forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        padding = Padding.of(attention_mask)
        positions_U = padding.aligned_U % padding.shape[1]
        as_it_is = attention_mask.new_ones(1, 1, 1, 1, dtype=torch.bool)  # transformers takes a 4-D mask as prepared
        kwargs |= {"position_ids": positions_U[None], "use_cache": False, "padding": padding}
        running.append(padding)
        try:
            one_row = padding.removed(input_ids.flatten())[None]
            output = padded_forward(input_ids=one_row, attention_mask=as_it_is, **kwargs)
        finally:
            running.pop()
        output.last_hidden_state = padding.added(output.last_hidden_state[0]).unflatten(0, padding.shape)
        return output

    decoder.forward, config._attn_implementation = forward, ATTENTION
    try:
        yield running
    finally:
        del decoder.forward
        config._attn_implementation = "sdpa"


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface  # with a model, whose classes are imported then
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(module, query, key, value, attention_mask, padding: Padding | None = None, **kwargs):
        if padding is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        rows = map(padding.rows, (query, key, value))
        return padding.unrowed(sdpa_attention_forward(module, *rows, None, **kwargs)[0]), None

    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
