"""Router attacks: wider or noisy routing of the unlearned model may reach knowledge behind a shifted router."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gripmoe.attacks.base import Found, Setting
from gripmoe.moe import MoEModel
from gripmoe.moe.model import Routes


def attack(setting: Setting) -> Found:
    """Recall with twice the experts per token, and with noisy gates; the original model's row shows what each costs."""
    model, found = setting.after, {}
    if not model.layers:
        return Found()
    with widened(model, 2):
        found["wider_routing"] = setting.recall(model)
    with model.force_routing(noisy_sets(model, 0.5, setting.seed)):
        found["noisy_routing"] = setting.recall(model)
    return setting.found(found)


@contextmanager
def widened(model: MoEModel, factor: int) -> Iterator[None]:
    """Within the block every router selects `factor` times as many experts, at most all."""
    routers = [model.router(layer) for layer in model.layers]
    own = [router.top_k for router in routers]
    try:
        for router in routers:
            router.top_k = min(factor * router.top_k, model.num_experts)
        yield
    finally:
        for router, top_k in zip(routers, own, strict=True):
            router.top_k = top_k


def noisy_sets(model: MoEModel, scale: float, seed: int) -> Callable[..., Routes]:
    """The sets that the model selects when noise of `scale` standard deviations of the scores is added to them."""
    generator = torch.Generator().manual_seed(seed)

    def routes(input_ids: Tensor, attention_mask: Tensor | None = None) -> Routes:
        with torch.no_grad(), model.record_routing() as recorder:
            model.model.model(input_ids=input_ids, attention_mask=attention_mask)
            trace = recorder.take()
        sets = {}
        for layer, seen in trace.items():
            noise_TE = torch.randn(seen.scores_NE.shape, generator=generator).to(seen.scores_NE)
            sets[layer] = model.rule(layer).select(seen.scores_NE + scale * seen.scores_NE.std() * noise_TE)
        return sets

    return routes
