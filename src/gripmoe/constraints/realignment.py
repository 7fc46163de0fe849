"""Method B on a model: correct the routers after training (Sec. 4.3), or put the original routers back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from gripmoe.config.methods import EpsNullConfig, Method
from gripmoe.constraints.null_space import feasible_router, sound_bounds
from gripmoe.data.batches import batches_of
from gripmoe.data.documents import Batch, collate_inputs
from gripmoe.geometry.halfspace import nearest_feasible, randomized_kaczmarz, violation
from gripmoe.geometry.nullspace import RetainBasis
from gripmoe.geometry.realignment import Realignment, holdout_stability, realign_paper, realign_sound, with_fallback
from gripmoe.geometry.routing import LayerRouting, RoutingTrace, route
from gripmoe.moe import MoEModel
from gripmoe.moe.adapters import unwrapped
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


@dataclass(frozen=True)
class Original:
    """What Method B needs of the original model (Theta and X_r of Eq. 5), about 4 N (d + E) bytes per layer.

    By decoder layer: `theta_0`, the router, (E, d), fp32; and `trace`, its routing of the N retain tokens that count
    (`x_Nd`, `scores_NE`, `top_k_Nk`). `batch` has the documents, (rows, positions).
    """

    theta_0: dict[int, Tensor]
    trace: RoutingTrace
    batch: Batch
    biases: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)


def remember(
    model: nn.Module, retain: Iterable[Batch | Mapping[str, Tensor]] | Iterable[str], *, tokenizer: Any = None
) -> Original:
    """Records the original routers and their retain inputs for Method B (Sec. 4.3); call it before unlearning.

    `retain` and `tokenizer` are as in `constrain`. Give at least four tokens per hidden dimension (the paper takes one,
    App. D.4). The model is unchanged. Warns of fewer tokens than hidden dimensions.

    Raises ValueError for an unknown family, a dense model, or fewer than two tokens that count; KeyError for a batch
    without `input_ids`.
    """
    with _opened(model, rounded=True) as moe:
        batches = [batch.to(moe.model.device) for batch in batches_of(retain, "retain", moe.model, tokenizer)]
        if not batches:
            raise ValueError("`retain` holds no batches: Method B fits routers to what they saw of retain documents")
        batch = collate_inputs(batches)
        tokens = int(counted_tokens(batch.attention_mask).sum())
        if tokens < 2:
            raise ValueError(
                f"`retain` holds {tokens} tokens that count, the first of every row aside: Method B fits to one and "
                f"checks on another at least, and fits well from {4 * moe.hidden_size}"
            )
        original = Original(moe.thetas(), moe.trace(batches), batch, moe.router_biases())
    if tokens < moe.hidden_size:
        warnings.warn(
            f"`retain` holds {tokens} tokens that count, fewer than the hidden size of {moe.hidden_size}: Method B "
            f"fits well from {4 * moe.hidden_size}",
            stacklevel=2,
        )
    return original


def realign(model: nn.Module, original: Original, *, form: str = "sound") -> dict[int, Realignment]:
    """Method B (PTC, Sec. 4.3, Eq. 5): refits every router of the unlearned `model` in place, so that retain tokens are
    routed as in `original`, the result of `remember`. Returns a `Realignment` by decoder layer.

    `form` "paper" is Eq. 5 with the acceptance test of App. D.4. "sound" (ours) starts from the original router, goes
    layer by layer, and chooses the ridge on every fourth document (on every fourth token of fewer than four documents).

    Raises ValueError for an unknown form or family, a dense model, a model that an open handle or
    `gripmoe.reparameterize` holds, or an `original` that differs in layers, shapes, tokens or their number, or holds
    values that are not finite. Routers in bf16 are in fp32 afterwards. After an error all routers are unchanged.
    """
    if form not in ("sound", "paper"):
        raise ValueError(f"unknown form {form!r}; sound or paper")
    with _opened(model) as moe:
        moe.require_free()
        _check_remembered(moe, original)
        trained = moe.router_biases()
        moe.set_router_biases(original.biases)
        device = moe.model.device  # which may be another since
        theta_0 = {layer: theta_Ed.to(device) for layer, theta_Ed in original.theta_0.items()}
        try:
            with moe.unpadded():
                return realign_routers(moe, theta_0, original.trace, original.batch.to(device), form=form)
        except BaseException:
            moe.set_router_biases(trained)
            raise


torch.serialization.add_safe_globals([Original, LayerRouting, Batch])  # so that `torch.load` reads an `Original`


@contextmanager
def _opened(model: nn.Module, *, rounded: bool = False) -> Iterator[MoEModel]:
    """The model with routers in fp32, where they stay unless `rounded`, or after an error."""
    moe = MoEModel(unwrapped(model))
    try:
        moe.require_routers("to realign")
        yield moe
    except BaseException:
        moe.release(rounded=True)
        raise
    moe.release(rounded=rounded)


def _check_remembered(moe: MoEModel, original: Original) -> None:
    if not isinstance(original, Original):
        raise ValueError(f"`original` is a {type(original).__name__}: give the result of gripmoe.remember")
    if (token := int(original.batch.input_ids.max())) >= moe.model.get_input_embeddings().weight.shape[0]:
        raise ValueError(
            f"the remembered documents have token {token}, which this model lacks: realign the model that "
            "was remembered"
        )
    for what, layers in (("routers", list(original.theta_0)), ("retain inputs", list(original.trace))):
        if sorted(layers) != sorted(moe.layers):
            raise ValueError(
                f"this model has routers in layers {moe.layers}, and {what} are remembered of layers {layers}: realign "
                "the model that was remembered"
            )
    tokens = int(counted_tokens(original.batch.attention_mask).sum())
    for layer in moe.layers:
        for what, tensor, shape in (
            ("router", original.theta_0[layer], tuple(moe.theta(layer).shape)),
            ("retain input", original.trace[layer].x_Nd, (tokens, moe.hidden_size)),
        ):
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"layer {layer}: the shape of its {what} is {tuple(tensor.shape)} as remembered and {shape} in "
                    "this model: realign the model that was remembered, with the same documents"
                )
            if not tensor.isfinite().all():
                raise ValueError(
                    f"layer {layer}: its {what} as remembered is not finite: remember a model before it diverges"
                )
    pairs = [(original.theta_0[layer].cpu(), moe.theta(layer).detach().cpu()) for layer in moe.layers]
    if sum((old - new).square().sum() for old, new in pairs) > sum(old.square().sum() for old, _ in pairs):
        raise ValueError(
            "the routers of this model differ from the remembered ones by more than their norm: realign the model that "
            "was remembered"
        )


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
    rows = torch.arange(len(batch.input_ids), device=keep.device)
    rows_N = rows.repeat_interleave(batch.input_ids.shape[1])[keep][:retain_tokens]
    documents_N = rows_N.unique_consecutive(return_inverse=True)[1]  # rows without a token that counts are left out
    if documents_N.unique().numel() < 4:  # too few to hold one out
        documents_N = None

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
            held_out = dict(wanted_Nk=seen.top_k_Nk, documents_N=documents_N)
            result = realign_sound(old, new, seen.x_Nd, x_post_Nd, rule, **held_out)
            if not result.accepted:
                fallback_Ed = feasible_router(METHOD_A[form], old, new, seen, rule)
                result = with_fallback(result, fallback_Ed, old, seen, x_post_Nd, rule, documents_N)
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
