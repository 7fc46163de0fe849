"""Routing in the exchange format of inference engines and trainers: the experts of every token and layer in one tensor.

`routed_experts`, (rows, positions, layers, k), is what vLLM returns and what verl and NeMo RL replay. Layers are the
MoE layers in order, or all decoder layers. -1 means that no route was recorded. The tensor has no expert weights: the
replaying model computes them with its current router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gripmoe.data.documents import attention_mask_of
from gripmoe.geometry.routing import jaccard
from gripmoe.moe.adapters import unwrapped
from gripmoe.moe.forcing import Routes
from gripmoe.moe.model import MoEModel
from gripmoe.moe.recording import counted_tokens


def routed_experts(model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """The experts that `model` selects in eval mode (ours): int16, (rows, positions, MoE layers, k), with -1 at
    padding. `input_ids` and `attention_mask` are (rows, positions). Raises ValueError for other shapes, for several
    documents in a row, for tokens outside the vocabulary, for an unknown family and for a dense model."""
    mask = attention_mask_of({"input_ids": input_ids, "attention_mask": attention_mask})
    moe = _with_routers(model)
    size = moe.model.get_input_embeddings().weight.shape[0]
    if input_ids.numel() and not 0 <= int(input_ids.min()) <= int(input_ids.max()) < size:
        raise ValueError(f"`input_ids`: tokens are not in the model's vocabulary of {size}; give ids of its tokenizer")
    try:
        with moe.evaluating():
            routes = moe.routes(input_ids, None if attention_mask is None else mask)
    finally:
        moe.release(to_own_dtype=True)
    experts = torch.stack([routes[layer] for layer in moe.layers], dim=1).unflatten(0, input_ids.shape)
    return experts.masked_fill(mask.to(experts.device)[..., None, None] == 0, -1).to(torch.int16)


def routing_stability(before: Tensor, after: Tensor) -> float:
    """Routing stability (Eq. 2), between 0 and 1: the mean Jaccard similarity of a token's expert sets in two tensors
    of `routed_experts`, over tokens and MoE layers. Give tensors of the same documents: of held-out retain documents,
    before and after unlearning. k may differ. The first recorded token of each row does not count, since the first of a
    document sees nothing but itself, and neither does a token with a -1 in either tensor.

    Raises ValueError for tensors of other rows, positions or layers, for experts that are no whole numbers or repeat
    in a token, as in layers without routers, and if no token counts."""
    before, after = torch.as_tensor(before), torch.as_tensor(after)  # inference engines return arrays
    if before.is_floating_point() or after.is_floating_point():
        raise ValueError(f"routed experts of {before.dtype} and {after.dtype}: give whole numbers")
    if before.ndim != 4 or before.shape[:3] != after.shape[:3]:
        raise ValueError(
            f"routed experts of shapes {tuple(before.shape)} and {tuple(after.shape)}: give two tensors (rows, "
            "positions, layers, k) of the same documents and layers"
        )
    before, after = before.long(), after.to(before.device, torch.long)  # some integer types have no comparison
    is_recorded = (before >= 0).all(dim=(2, 3)) & (after >= 0).all(dim=(2, 3))
    counts_T = counted_tokens(is_recorded)
    if not counts_T.any():
        empty = [n for n in range(before.shape[2]) if (before[:, :, n] < 0).all() or (after[:, :, n] < 0).all()]
        only = f"; layers {empty} hold nothing else: leave out layers without routers" if empty else ""
        raise ValueError(f"no token counts: the first of each row does not, nor does one with a -1{only}")
    for layer in range(before.shape[2]):
        if any(_repeats(each[:, :, layer].flatten(0, 1)[counts_T]).any() for each in (before, after)):
            raise ValueError(
                f"routed experts: in layer {layer} of the tensor a token's experts repeat; leave out layers without "
                "routers"
            )
    before_Nk, after_Nk = (each.flatten(0, 1)[counts_T].flatten(0, 1) for each in (before, after))
    return jaccard(before_Nk, after_Nk).mean().item()


@contextmanager
def replay_experts(
    model: nn.Module, routed_experts: Tensor | Callable[[Tensor, Tensor | None], Tensor | None]
) -> Iterator[list]:
    """Within the block, forward passes of `model` use recorded experts, with weights of the current routers (ours). Run
    backward passes inside the block too, because gradient checkpointing recomputes activations.

    `routed_experts` is a tensor for every pass in the block, of any integer type, (rows, positions, layers, k), or
    (positions, layers, k) for one row. It may also be a function that returns such a tensor for `input_ids` and
    `attention_mask` of a pass, or None for a pass without replay. Layers are the MoE layers or all decoder layers. A
    token with a -1 keeps its own experts. For gradient checkpointing, the yielded list keeps the routes of all passes;
    under a function, a loop of many steps clears the list after each step.

    Raises ValueError for an unknown family, for a dense model, and for a tensor with other layers, another k, another
    number of tokens, experts that the model lacks, or repeated experts of a token."""
    moe = _with_routers(model)

    def routes_of(input_ids: Tensor, attention_mask: Tensor | None) -> Routes | None:
        given = routed_experts(input_ids, attention_mask)
        return None if given is None else _routes(moe, given)

    before = getattr(moe.model, "_replaying", None)
    try:
        routes = routes_of if callable(routed_experts) else _routes(moe, routed_experts)
        moe.model._replaying = id(moe.model)
        with moe.force_routing(routes) as passes:
            yield passes
    finally:
        moe.model._replaying = before
        moe.release(to_own_dtype=True)


def _repeats(experts_Tk: Tensor) -> Tensor:
    """Whether an expert of a token stands twice, (T,); False for a token with a -1."""
    ordered_Tk = experts_Tk.sort(dim=1).values
    return (ordered_Tk[:, 1:] == ordered_Tk[:, :-1]).any(dim=1) & (ordered_Tk[:, 0] >= 0)


def _with_routers(model: nn.Module) -> MoEModel:
    moe = MoEModel(unwrapped(model))
    moe.require_routers("that select experts")
    return moe


def _routes(moe: MoEModel, routed_experts: Tensor) -> Routes:
    try:
        experts = torch.as_tensor(routed_experts)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(
            f"`routed_experts` is a {type(routed_experts).__name__}: give a tensor, (rows, positions, layers, k), or a "
            "function that returns one"
        ) from None
    if experts.ndim not in (3, 4) or experts.is_floating_point():
        raise ValueError(
            f"routed_experts: {experts.dtype} of shape {tuple(experts.shape)}, not whole numbers of shape (rows, "
            "positions, layers, k)"
        )
    experts_TLk = (experts if experts.ndim == 4 else experts[None]).flatten(0, 1).to(moe.model.device, torch.long)
    total = len(moe.model.model.layers)
    if experts_TLk.shape[1] not in (len(moe.layers), total):
        raise ValueError(
            f"routed_experts: {experts_TLk.shape[1]} layers; the model has {len(moe.layers)} MoE layers of {total}"
        )
    if experts_TLk.shape[2] != moe.top_k:
        raise ValueError(f"routed_experts: {experts_TLk.shape[2]} experts a token; the model selects {moe.top_k}")
    slots = moe.layers if experts_TLk.shape[1] == total else range(len(moe.layers))
    routes = {layer: experts_TLk[:, slot] for layer, slot in zip(moe.layers, slots, strict=True)}
    for layer, experts_Tk in routes.items():
        if _repeats(experts_Tk).any() or experts_Tk.numel() and experts_Tk.max() >= moe.num_experts:
            raise ValueError(
                f"routed_experts: in layer {layer} a token's experts repeat, or are not among the {moe.num_experts} of "
                "the model"
            )
    return routes
