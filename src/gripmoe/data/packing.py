"""Documents that are packed into a row: where each begins."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED = "documents are packed into a row (`{}`): give each document a row of its own (in TRL, packing=False)"
SEGMENTS = ("cu_seq_lens_q", "cu_seqlens", "position_ids", "seq_idx", "segment_ids", "sequence_ids")


def segments_of(inputs: Mapping[str, Tensor]) -> Tensor | None:
    """Numbers, (rows, positions), that change where the next packed document of a row begins. They come from restarting
    positions, ends of documents, document numbers, a mask of document numbers, or a block-causal mask. None if the
    inputs have none of these. Raises ValueError if such an input does not fit the rows."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    mask = mask.to(ids.device) if isinstance(mask, Tensor) else None
    given = {name: inputs[name] for name in SEGMENTS if inputs.get(name) is not None}
    for name in ("cu_seq_lens_q", "cu_seqlens"):
        if name in given:
            ends = torch.as_tensor(given[name], device=ids.device).flatten()
            if int(ends[-1]) != ids.numel():
                raise ValueError(f"`{name}` ends at {int(ends[-1])}, and there are {ids.numel()} tokens")
            tokens = torch.arange(ids.numel(), device=ids.device)
            return torch.bucketize(tokens, ends[1:], right=True).view(ids.shape)
    for name, numbers in given.items():
        numbers = torch.as_tensor(numbers, device=ids.device)
        if numbers.dim() == 3:  # (axes of multimodal positions, rows, positions)
            numbers = numbers[0]
        try:
            numbers = numbers.expand_as(ids)
        except RuntimeError:
            shapes = f"{tuple(numbers.shape)}, and input_ids {tuple(ids.shape)}"
            raise ValueError(f"`{name}` has the shape {shapes}") from None
        if name == "position_ids":  # they restart at each document, and may run on over padding
            keep = mask if mask is not None and mask.shape == ids.shape else torch.ones_like(ids)
            before, is_first = _before(numbers, keep)
            return ((numbers <= before) & keep.bool() & ~is_first).cumsum(-1)
        return numbers
    if mask is None:
        return None
    if mask.dim() == 4:
        return _first_visible(mask, ids)
    return mask if not mask.is_floating_point() and mask.dtype != torch.bool and mask.amax() > 1 else None


def starts_anew(segments: Tensor, mask: Tensor) -> Tensor:
    """Whether a token belongs to another document than the last one before it that is not padding, (rows,
    positions)."""
    before, is_first = _before(segments, mask)
    return (segments != before) & mask.bool() & ~is_first


def _before(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """For each position, the value at the last one before it that is not padding, and whether there is none; both
    (rows, positions)."""
    positions = torch.arange(values.shape[1], device=values.device)
    counted = positions.masked_fill(~mask.bool(), -1)
    last = F.pad(counted.cummax(dim=-1).values[:, :-1], (1, 0), value=-1)
    return values.gather(1, last.clamp(min=0)), last < 0


def _first_visible(mask: Tensor, ids: Tensor) -> Tensor:
    """The first token that each token attends to, from a mask (rows, 1, positions, positions), bool or additive."""
    width = ids.shape[1]
    if mask.shape[0] not in (1, len(ids)) or mask.shape[2:] != (width, width):
        raise ValueError(f"attention_mask has the shape {tuple(mask.shape)}, and input_ids {tuple(ids.shape)}")
    sees = (mask if mask.dtype == torch.bool else mask == 0)[:, 0].expand(len(ids), -1, -1)
    first = sees.to(torch.int8).argmax(dim=-1)
    position = torch.arange(width, device=mask.device)
    if not torch.equal(sees, (first[:, :, None] <= position) & (position <= position[:, None])):
        raise ValueError("a 4-D attention_mask must be causal within documents that follow one another")
    return first
