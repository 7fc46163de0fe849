"""Component restoration (ours): one original part put back into the unlearned model. Where does the knowledge sit?

If a single original part returns the answers, they were not erased: they were made unreadable at one place. Unlearning
trains experts and routers; attention is the original's in every cell, so there is nothing of it to put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from gripmoe.data.documents import collate, encode, length_buckets
from gripmoe.moe import MoEModel

PARTS = ("experts", "router")


@contextmanager
def restored(before: MoEModel, after: MoEModel, layers: Sequence[int], parts: Sequence[str] = PARTS) -> Iterator[None]:
    """Within the block `after` has the original experts (shared ones too) or routers of `layers`; then its own."""
    pairs = [
        (original, current)
        for layer in layers
        for original, current in zip(before.block(layer).parameters(), after.block(layer).parameters(), strict=True)
        if ("router" if current is after.theta(layer) else "experts") in parts
    ]
    own = [current.detach().clone() for _, current in pairs]
    try:
        with torch.no_grad():
            for original, current in pairs:
                current.copy_(original)
        yield
    finally:
        with torch.no_grad():
            for (_, current), kept in zip(pairs, own, strict=True):
                current.copy_(kept)


@contextmanager
def restored_experts(before: MoEModel, after: MoEModel, experts: Mapping[int, Sequence[int]]) -> Iterator[None]:
    """Within the block `after` has the original weights of single `experts` (by layer)."""
    slices = [
        (current, original, list(chosen))
        for layer, chosen in experts.items()
        for original, current in zip(before.expert_parameters(layer), after.expert_parameters(layer), strict=True)
    ]
    own = [current[chosen].detach().clone() for current, _, chosen in slices]
    try:
        with torch.no_grad():
            for current, original, chosen in slices:
                current[chosen] = original[chosen]
        yield
    finally:
        with torch.no_grad():
            for (current, _, chosen), kept in zip(slices, own, strict=True):
                current[chosen] = kept


def most_used_experts(model: MoEModel, tokenizer, prompts: Sequence[str], count: int = 2) -> dict[int, list[int]]:
    """The `count` experts of each layer that `model` selects most often on `prompts`."""
    rows = [encode(tokenizer, [(prompt, False)]) for prompt in prompts]
    batches = [collate(rows, tokenizer.pad_token_id) for rows in length_buckets(rows, 4000)]
    trace = model.trace(batches)
    return {
        layer: torch.bincount(seen.top_k_Nk.flatten(), minlength=model.num_experts).topk(count).indices.tolist()
        for layer, seen in trace.items()
    }


def restoration(
    before: MoEModel,
    after: MoEModel,
    recall: Callable[[MoEModel], float],
    experts: Mapping[int, Sequence[int]],
) -> dict[str, float]:
    """What `recall` says that the model still knows with the original experts or router of each layer, of all layers,
    and the highest that one layer's part returns; with each of the single `experts` (by layer) and all of them; and
    conversely of the original model with the unlearned experts of one layer. Putting everything back is the original
    model."""
    metrics = {}
    for part in PARTS:
        for layer in after.layers:
            with restored(before, after, [layer], [part]):
                metrics[f"restored_{part}_layer_{layer}"] = recall(after)
        metrics[f"restored_{part}_worst_layer"] = max(
            metrics[f"restored_{part}_layer_{layer}"] for layer in after.layers
        )
        with restored(before, after, after.layers, [part]):
            metrics[f"restored_{part}_all"] = recall(after)
    singles = []
    for layer, chosen in experts.items():
        for expert in chosen:
            with restored_experts(before, after, {layer: [expert]}):
                singles.append(recall(after))
    metrics["restored_single_expert"] = max(singles)
    with restored_experts(before, after, experts):
        metrics["restored_top_experts"] = recall(after)
    for layer in after.layers:
        with restored(after, before, [layer], ["experts"]):
            metrics[f"transplanted_experts_layer_{layer}"] = recall(before)
    return metrics
