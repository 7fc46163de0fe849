"""Component restoration (ours): one original part put back into the unlearned model. Where does the knowledge sit?

If a single original part returns the answers, they were not erased: they were made unreadable at one place. Unlearning
trains experts and routers, of a dense model its feed-forward blocks; attention is the original's in every run, and put
back it is the control that changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gripmoe.attacks.scores import Recall, Scores, highest, kept, mean
from gripmoe.data.documents import collate, encode, length_buckets
from gripmoe.moe import MoEModel

PARTS = ("experts", "router", "attention")


@contextmanager
def restored(before: MoEModel, after: MoEModel, layers: Sequence[int], parts: Sequence[str] = PARTS) -> Iterator[None]:
    """Within the block `after` has these original parts of `layers`; then its own. Experts are all of an MoE block but
    its router, and the whole feed-forward block of a dense model."""
    with _replaced(_pairs(before, after, layers, parts)):
        yield


def _pairs(
    before: MoEModel, after: MoEModel, layers: Sequence[int], parts: Sequence[str]
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Each parameter of `after` with that of `before`."""
    return [
        pair
        for layer in layers
        for part in parts
        for pair in zip(_parameters(after, layer, part), _parameters(before, layer, part), strict=True)
    ]


@contextmanager
def _replaced(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Within the block the first of each pair has the values of the second."""
    with kept(current for current, _ in pairs):
        with torch.no_grad():
            for current, original in pairs:
                current.copy_(original)
        yield


def _parameters(model: MoEModel, layer: int, part: str) -> list[nn.Parameter]:
    of_block = list(model.block(layer).parameters())
    if part == "attention":  # with the norms, and whatever a family has in its place
        block = set(map(id, of_block))
        return [p for p in model.model.model.layers[layer].parameters() if id(p) not in block]
    router = model.theta(layer) if layer in model.layers else None
    return [parameter for parameter in of_block if (parameter is router) == (part == "router")]


@contextmanager
def restored_experts(before: MoEModel, after: MoEModel, experts: Mapping[int, Sequence[int]]) -> Iterator[None]:
    """Within the block `after` has the original weights of single `experts` (by layer)."""
    slices = [
        (current.detach()[expert], original[expert])  # views
        for layer, chosen in experts.items()
        for original, current in zip(before.expert_parameters(layer), after.expert_parameters(layer), strict=True)
        for expert in chosen
    ]
    with _replaced(slices):
        yield


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
    before: MoEModel, after: MoEModel, recall: Recall, experts: Mapping[int, Sequence[int]]
) -> dict[str, Scores]:
    """What `recall` says that the model still knows with the original experts, router or attention of each layer, of
    the layer that returns most, and of all layers; with each of the single `experts` (by layer), of which the one that
    returns most, and all of them; and conversely of the original model with the unlearned parts ("transplanted"), of
    which the layer that takes most. Putting everything back is the original model.
    """
    parts = PARTS if after.layers else ("experts", "attention")
    found = {}
    for name, source, target in (("restored", before, after), ("transplanted", after, before)):
        own = recall(target)

        def asked(layers: Sequence[int], part: str, source=source, target=target, own=own) -> Scores:
            pairs = _pairs(source, target, layers, [part])
            if all(torch.equal(current, other) for current, other in pairs):
                return own
            with _replaced(pairs):
                return recall(target)

        for part in parts:
            alone = {layer: asked([layer], part) for layer in after.all_layers}
            found |= {f"{name}_{part}_layer_{layer}": scores for layer, scores in alone.items()}
            if name == "restored":
                found[f"restored_{part}_worst_layer"] = highest(alone.values())
                found[f"restored_{part}_all"] = asked(after.all_layers, part)
            else:
                found[f"transplanted_{part}_lowest"] = min(alone.values(), key=mean)
    if experts:
        singles = []
        for layer, chosen in experts.items():
            for expert in chosen:
                with restored_experts(before, after, {layer: [expert]}):
                    singles.append(recall(after))
        found["restored_single_expert"] = highest(singles)
        with restored_experts(before, after, experts):
            found["restored_top_experts"] = recall(after)
    return found
