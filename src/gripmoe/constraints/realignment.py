"""Method B on a model: correct the routers after training (Sec. 4.3), or put the original routers back; and two
reports, of how Method B generalises and of how Algorithm 1 converges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from gripmoe.config.methods import EpsNullConfig, Method
from gripmoe.constraints.null_space import feasible_router, sound_bounds
from gripmoe.data.documents import Batch, documents_of
from gripmoe.geometry.halfspace import nearest_feasible, randomized_kaczmarz, violation
from gripmoe.geometry.nullspace import RetainBasis
from gripmoe.geometry.realignment import HELD_OUT, Realignment, holdout_stability, realign_paper, realign_sound
from gripmoe.geometry.routing import RoutingTrace, route
from gripmoe.moe import MoEModel
from gripmoe.moe.recording import counted_tokens

KACZMARZ_DRAWS = (1, 10, 30, 100, 300, 1000, 3000)  # the paper's limit is 100
KACZMARZ_TOKENS = 400
# Method A for layers whose fit is rejected. If it were read from methods.yaml, every run would depend on that file.
METHOD_A = {
    "paper": Method(
        constraint="null_space", form="paper", basis="minibatch", eps_null=EpsNullConfig(value=1e-2, kind="absolute")
    ),
    "sound": Method(constraint="null_space", basis="original", eps_null=EpsNullConfig(value=1e-4, kind="relative")),
}


@torch.no_grad()
def realign_routers(
    model: MoEModel,
    theta_0: dict[int, Tensor],
    trace: RoutingTrace,
    batch: Batch,
    *,
    form: str = "sound",
    retain_tokens: int | None = None,
) -> dict[int, Realignment]:
    """Method B on every layer of an unlearned model; returns the result of each layer.

    `trace` is the original model's trace of `batch`, on any device, and `theta_0` has its routers. The paper's form
    fits all layers to the inputs of the uncorrected model. The sound form works within one forward pass: it corrects
    each router before the router is used, so a layer is fitted to the outputs of the corrected layers below. If a fit
    is rejected, the layer gets Method A's projection of its router's displacement, in the same form; in the sound form
    only if this keeps more of the held-out sets than the unlearned router. `retain_tokens` limits the number of tokens.
    After an error all routers are unchanged.
    """
    theta_post = model.thetas()
    realigned: dict[int, Realignment] = {}
    keep = counted_tokens(batch.attention_mask)
    documents_N = _documents(batch, keep, retain_tokens)

    def fit(layer: int, x_post_Nd: Tensor) -> None:
        rule, old, new = model.rule(layer), theta_0[layer], theta_post[layer]
        x_post_Nd = x_post_Nd[:retain_tokens]
        seen = trace[layer].map(lambda values: values[:retain_tokens].to(x_post_Nd.device))
        if form == "paper":
            result = realign_paper(old, new, seen.x_Nd, x_post_Nd)
            if not result.accepted:
                fallback_Ed = feasible_router(METHOD_A[form], old, new, route(x_post_Nd, old, rule), rule)
                result = replace(result, theta_Ed=fallback_Ed, fell_back=True)
        else:
            result = realign_sound(
                *(old, new, seen.x_Nd, x_post_Nd, rule),
                wanted_Nk=seen.top_k_Nk,
                documents_N=documents_N,
                fallback=lambda: feasible_router(METHOD_A[form], old, new, seen, rule),
            )
            model.set_thetas({layer: result.theta_Ed})
        realigned[layer] = result

    try:
        with model.evaluating(), model.before_routers(lambda layer, x_Td: fit(layer, x_Td[keep])):
            model.model.model(**batch.inputs)
        model.set_thetas({layer: result.theta_Ed for layer, result in realigned.items()})
    except BaseException:
        model.set_thetas(theta_post)
        raise
    return realigned


def _documents(batch: Batch, keep: Tensor, count: int | None) -> Tensor:
    """The number of the document of each of the first `count` tokens that count, the same for documents of the same
    tokens: none of them checks a fit to another. With too few documents to hold one out, the place of each token in its
    document."""
    known: dict[tuple[int, ...], int] = {}
    numbers = [known.setdefault(ids, len(known)) for ids in documents_of(batch.input_ids, batch.attention_mask)]
    rows = torch.tensor(numbers, device=keep.device)
    of_tokens_N = rows.repeat_interleave(batch.input_ids.shape[1])[keep][:count]
    found, documents_N = of_tokens_N.unique(return_inverse=True)  # documents without a token that counts are left out
    if len(found) >= HELD_OUT:
        return documents_N
    places_N = batch.attention_mask.cumsum(dim=-1).flatten().to(keep.device)[keep][:count]
    return places_N - 2  # 0 for the first that counts


def make_correction(
    method: Method,
    theta_0: dict[int, Tensor],
    biases: Mapping[int, Mapping[str, Tensor]],
    trace: RoutingTrace,
    batch: Batch,
) -> Callable[[MoEModel], dict]:
    """The correction of a row of methods.yaml: a function that changes a model in place and returns a flat report."""

    def correct(model: MoEModel) -> dict:
        model.set_router_biases(biases)
        if method.correction == "restore":
            model.set_thetas(theta_0)
            return {}
        realigned = realign_routers(model, theta_0, trace, batch, form=method.form, retain_tokens=method.retain_tokens)
        return {
            f"{name}_layer_{layer}": getattr(result, name)
            for layer, result in realigned.items()
            for name in ("fit_cosine", "held_out_stability", "ridge", "accepted", "fell_back")
        }

    return correct


@torch.no_grad()
def holdout_report(model: MoEModel, theta_0: dict[int, Tensor], trace: RoutingTrace, batch: Batch) -> dict[str, float]:
    """How Method B generalises on an uncorrected model: `holdout_<form>_<tokens>_<fit|other>`, the routing stability on
    the fitted and on other tokens, mean over layers. Fits take from an eighth of the hidden size to half of all
    tokens."""
    after, thetas = model.trace([batch]), model.thetas()
    tokens = len(next(iter(after.values())))
    powers = (round(model.hidden_size * 2**n) for n in range(-3, 16))
    sizes = [size for size in powers if 8 <= size <= tokens // 2]
    report: dict[str, float] = {}
    for layer, seen in after.items():
        before = trace[layer].to(seen.x_Nd.device)
        old = theta_0[layer], thetas[layer], before.x_Nd, seen.x_Nd
        for form in ("paper", "sound"):
            curve = holdout_stability(*old, model.rule(layer), before.top_k_Nk, sizes, form)
            for size, values in curve.items():
                for where, value in zip(("fit", "other"), values, strict=True):
                    name = f"holdout_{form}_{size}_{where}"
                    report[name] = report.get(name, 0.0) + value / len(after)
    return report


@torch.no_grad()
def kaczmarz_report(model: MoEModel, theta_0: dict[int, Tensor], trace: RoutingTrace) -> dict[str, float]:
    """How much of the violations of finished routers remains after Algorithm 1 (`violation_after_<draws>`) and after
    the exact projection (`violation_exact`), on the first retain tokens. Each value is the remaining share of a router
    row's worst violation, mean over all rows with a violation. Empty if no row has one."""
    left: dict[str, list[Tensor]] = {}
    thetas = model.thetas()
    for layer, recorded in trace.items():
        rule = model.rule(layer)
        seen = recorded.map(lambda values: values[:KACZMARZ_TOKENS].to(model.model.device))
        bounds_NE = sound_bounds(seen, rule, 0.0).double()
        moved_Ed, x_Nd = (thetas[layer] - theta_0[layer]).double(), seen.x_Nd.double()
        points = {}
        for draws in KACZMARZ_DRAWS:
            generator = torch.Generator(x_Nd.device).manual_seed(0)
            options = dict(max_steps=draws, tolerance=0.0, generator=generator)
            points[f"violation_after_{draws}"] = randomized_kaczmarz(moved_Ed, x_Nd, bounds_NE, **options)
        nothing_fixed = RetainBasis(x_Nd.new_zeros(1, x_Nd.shape[1], 0))
        points["violation_exact"] = nearest_feasible(moved_Ed, nothing_fixed, x_Nd, bounds_NE)
        before_E = violation(moved_Ed, x_Nd, bounds_NE)
        for name, u_Ed in points.items():
            left.setdefault(name, []).append((violation(u_Ed, x_Nd, bounds_NE) / before_E)[before_E > 0])
    joined = {name: torch.cat(shares) for name, shares in left.items()}
    return {name: shares.mean().item() for name, shares in joined.items() if len(shares)}
