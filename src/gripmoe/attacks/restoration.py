"""Component restoration (ours): put an original part back into the unlearned model, to find where the knowledge is.

The workflow's unlearning trains experts and routers (in a dense model the feed-forward blocks). All else stays the
original's, so putting that back is a control that changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from gripmoe.attacks.base import Found, Scores, Setting, expert_usage, highest, mean
from gripmoe.moe import MoEModel
from gripmoe.moe.modes import restored
from gripmoe.moe.recording import hooked

PARTS = ("experts", "router", "attention")
SHARES = (0.25, 0.5, 0.75)  # of the way from the unlearned weights back to the original ones


def parts_of_model(model: MoEModel) -> tuple[str, ...]:
    """PARTS; for a dense model, without the routers."""
    return PARTS if model.layers else ("experts", "attention")


def attack(setting: Setting) -> Found:
    before, after = setting.before, setting.after
    with before.brought_beside(after):
        experts = most_used_experts(before, setting.tokenizer, setting.prompts) if after.layers else {}
        found = restoration(before, after, setting.scores_of, experts)
        tried = {"restored_single_expert_tried": sum(map(len, experts.values()))} if experts else {}
        return setting.found(found, **tried)


def linear_connectivity(setting: Setting) -> Found:
    """`interpolated_<n>`: scores on the straight line from the unlearned weights to the original ones, n per cent of
    the way; and `changes`, how long the way is. A diagnostic (From Dormant to Deleted, arXiv 2505.22310): an attacker
    has no original."""
    before, after = setting.before, setting.after
    found = {}
    with before.brought_beside(after):
        for share in SHARES:
            with interpolated(before, after, share):
                found[f"interpolated_{100 * share:.0f}"] = setting.scores_of(after)
        return setting.found(found, **changes(before, after))


def readable_depth(setting: Setting) -> Found:
    """`read_above_layer_<n>`: scores of the original model on the unlearned model's states after decoder layer n. A
    diagnostic (activation patching of the Unlearning Depth Score, arXiv 2605.24614, here of all positions)."""
    before, after = setting.before, setting.after
    with before.brought_beside(after):
        found = read_above(before, after, setting.scores_of)
    return setting.found({f"read_above_layer_{layer}": scores for layer, scores in found.items()})


def read_above(before: MoEModel, after: MoEModel, scores_of: Callable[[MoEModel], Scores]) -> dict[int, Scores]:
    """The scores of `before` by decoder layer, the last one left out: embeddings and layers up to this one are those of
    `after`, layers above and the head its own."""
    embeddings, found = after.model.get_input_embeddings(), {}
    layers = list(zip(before.model.model.layers, after.model.model.layers, strict=True))
    with ExitStack() as stack:
        # A hook and no other weights, because the head may share them.
        hook = before.model.get_input_embeddings().register_forward_hook(lambda _, args, __: embeddings(*args))
        stack.enter_context(hooked([hook]))
        for number, of_layer in enumerate(layers[:-1]):
            stack.enter_context(replaced(list(zip(*map(_tensors, of_layer), strict=True))))
            found[number] = scores_of(before)
    return found


@contextmanager
def interpolated(before: MoEModel, after: MoEModel, share: float) -> Iterator[None]:
    """Within the block `after` is that share of the way to `before`."""
    with restored(_tensors(after.model), device="cpu"):  # beside two models there may be no room
        with torch.no_grad():
            for current, original in zip(_tensors(after.model), _tensors(before.model), strict=True):
                current.lerp_(original.to(current), share)
        yield


def changes(before: MoEModel, after: MoEModel) -> dict[str, float]:
    """`changed_<part>`: the norm of what changed as a share of the norm before, of embeddings, attention with norms,
    routers and experts, whole and by layer; `changed_other` of all else."""
    changed: dict[str, float] = defaultdict(float)  # squared norms
    whole: dict[str, float] = defaultdict(float)
    counted: set[int] = set()

    def add(names: list[str], old: Tensor, new: Tensor) -> None:
        old, moved = old.detach().float(), new.detach().to(old.device).float()
        change, norm = (moved - old).square().sum().item(), old.square().sum().item()
        counted.add(id(new))
        for name in names:
            changed[name] += change
            whole[name] += norm

    for part in parts_of_model(after):
        for layer in after.all_layers:
            for pair in zip(tensors_of(before, layer, part), tensors_of(after, layer, part), strict=True):
                add([f"changed_{part}", f"changed_{part}_layer_{layer}"], *pair)
    add(["changed_embeddings"], *(moe.model.get_input_embeddings().weight for moe in (before, after)))
    for old, new in zip(_tensors(before.model), _tensors(after.model), strict=True):
        if id(new) not in counted:
            add(["changed_other"], old, new)
    return {name: (changed[name] / norm) ** 0.5 if norm else 0.0 for name, norm in whole.items()}


def restoration(
    before: MoEModel,
    after: MoEModel,
    scores_of: Callable[[MoEModel], Scores],
    experts: Mapping[int, Sequence[int]],
) -> dict[str, Scores]:
    """Scores by metric. Original parts (experts, router, attention) in the unlearned model:
    `restored_<part>_layer_<n>`, `restored_<part>_worst_layer` (of the layer that returns most), `restored_<part>_all`,
    `restored_other` (all else: embeddings, head, last norm, layers without experts), and `restored_single_expert` (the
    best of `experts`, by layer). Unlearned experts in the original model: `transplanted_experts_layer_<n>` and
    `transplanted_experts_lowest` (of the layer that takes most)."""
    found = {}
    put_back = partial(_scores_with, after, scores_of, scores_of(after))
    for part in parts_of_model(after):
        pairs = {layer: pairs_of(before, after, [layer], [part]) for layer in after.all_layers}
        alone = {layer: put_back(of_layer) for layer, of_layer in pairs.items()}
        found |= {f"restored_{part}_layer_{layer}": scores for layer, scores in alone.items()}
        found[f"restored_{part}_worst_layer"] = highest(alone.values())
        found[f"restored_{part}_all"] = put_back([pair for of_layer in pairs.values() for pair in of_layer])
    found["restored_other"] = put_back(list(zip(outside_parts(after), outside_parts(before), strict=True)))
    own = scores_of(before)
    taken_over = {
        layer: _scores_with(before, scores_of, own, pairs_of(after, before, [layer], ["experts"]))
        for layer in after.all_layers
    }
    found |= {f"transplanted_experts_layer_{layer}": scores for layer, scores in taken_over.items()}
    found["transplanted_experts_lowest"] = min(taken_over.values(), key=mean)
    if experts:
        singles = []
        for layer, chosen in experts.items():
            for expert in chosen:
                with restored_experts(before, after, {layer: [expert]}):
                    singles.append(scores_of(after))
        found["restored_single_expert"] = highest(singles)
    return found


def _scores_with(
    target: MoEModel, scores_of: Callable[[MoEModel], Scores], own: Scores, pairs: Sequence[tuple[Tensor, Tensor]]
) -> Scores:
    """The scores of `target` while the first tensor of each pair, one of `target`, has the values of the second.
    Returns `own`, those of `target` itself, if all pairs are equal."""
    if all(torch.equal(current, other) for current, other in pairs):
        return own
    with replaced(pairs):
        return scores_of(target)


def restored_experts(
    before: MoEModel, after: MoEModel, experts: Mapping[int, Sequence[int]]
) -> AbstractContextManager[None]:
    """Within the block, `after` has the original weights of single `experts` (by layer)."""
    slices = [
        (current.detach()[expert], original[expert])  # views
        for layer, chosen in experts.items()
        for original, current in zip(before.expert_parameters(layer), after.expert_parameters(layer), strict=True)
        for expert in chosen
    ]
    return replaced(slices)


def without_expert(model: MoEModel, layer: int, expert: int) -> AbstractContextManager[None]:
    """Within the block the expert's output is zero. Routers still select it."""
    return replaced([(weight.detach()[expert], weight.new_zeros(())) for weight in model.expert_parameters(layer)])


def pairs_of(
    before: MoEModel, after: MoEModel, layers: Sequence[int], parts: Sequence[str]
) -> list[tuple[Tensor, Tensor]]:
    """Pairs of each tensor of `after` in these `parts` of `layers`, and the same tensor of `before`."""
    return [
        pair
        for layer in layers
        for part in parts
        for pair in zip(tensors_of(after, layer, part), tensors_of(before, layer, part), strict=True)
    ]


def tensors_of(model: MoEModel, layer: int, part: str) -> list[Tensor]:
    """The parameters and buffers in one of PARTS of a layer, in the same order for all models of an architecture. The
    router has its biases, also those that a family keeps in the block. "experts" is all else of the feed-forward part:
    routed and shared experts, or the whole block of a dense model. "attention" is all other of a layer, with the
    norms."""
    feed_forward = [tensor for module in model.feed_forward(layer) for tensor in _tensors(module)]
    if part == "attention":
        return _without(_tensors(model.model.model.layers[layer]), feed_forward)
    router = []
    if layer in model.layers:
        router = [*_tensors(model.outer_router(layer)), *_tensors(model.block(layer), recurse=False)]
    return router if part == "router" else _without(feed_forward, router)


def outside_parts(model: MoEModel) -> list[Tensor]:
    """The parameters and buffers outside the layers that have parts."""
    layers = [model.model.model.layers[number] for number in model.all_layers]
    return _without(_tensors(model.model), [tensor for layer in layers for tensor in _tensors(layer)])


def _tensors(module: nn.Module, recurse: bool = True) -> list[Tensor]:
    buffers = [buffer for buffer in module.buffers(recurse) if buffer.is_floating_point()]
    return [*module.parameters(recurse), *buffers]


def _without(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    left_out = set(map(id, others))
    return [tensor for tensor in tensors if id(tensor) not in left_out]


@contextmanager
def replaced(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Within the block, the first tensor of each pair has the values of the second."""
    with restored((current for current, _ in pairs), device="cpu"):
        with torch.no_grad():
            for current, original in pairs:
                current.copy_(original)
        yield


def most_used_experts(model: MoEModel, tokenizer, prompts: Sequence[str], count: int = 2) -> dict[int, list[int]]:
    """The `count` experts of each layer, or all if it has fewer, that `model` selects most often on `prompts`."""
    usage = expert_usage(model, tokenizer, prompts)
    return {layer: share_E.topk(min(count, len(share_E))).indices.tolist() for layer, share_E in usage.items()}
