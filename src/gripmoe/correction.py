"""What may be done to the routers of a finished model: Method B, or the original router put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from gripmoe.config import Method
from gripmoe.data.documents import Batch
from gripmoe.geometry.realignment import Realignment, realign, realign_paper
from gripmoe.geometry.routing import LayerRouting, RoutingTrace
from gripmoe.moe import MoEModel


def make_correction(
    method: Method, theta_0: dict[int, Tensor], reference: RoutingTrace, batches: Sequence[Batch]
) -> Callable[[MoEModel], dict]:
    """The correction of a row of methods.yaml: it changes a model in place and returns a flat report."""

    def correct(model: MoEModel) -> dict:
        if method.correction == "restore":
            restore_routers(model, theta_0)
            return {}
        realigned = realign_routers(
            model, theta_0, reference, batches, form=method.form, retain_tokens=method.retain_tokens
        )
        return {
            f"{name}_layer_{layer}": getattr(result, name)
            for layer, result in realigned.items()
            for name in ("fit_cosine", "held_out_stability", "ridge", "accepted")
        }

    return correct


def first_tokens(trace: RoutingTrace, count: int | None) -> RoutingTrace:
    """The first `count` tokens of a trace, the paper's N_r; all of them for None."""
    return {layer: LayerRouting(r.x_Nd[:count], r.scores_NE[:count], r.top_k_Nk[:count]) for layer, r in trace.items()}


def restore_routers(model: MoEModel, theta_0: dict[int, Tensor]) -> None:
    """Puts the original routers back into an unlearned model: the control for Method B."""
    model.set_thetas(theta_0)


def realign_routers(
    model: MoEModel,
    theta_0: dict[int, Tensor],
    reference: RoutingTrace,
    batches: Sequence[Batch],
    *,
    form: str = "sound",
    retain_tokens: int | None = None,
) -> dict[int, Realignment]:
    """Method B on every layer of an unlearned model; returns what was done to each.

    `reference` is the original model's trace of `batches` and theta_0 its routers. The paper's form fits all layers to
    one pass through the uncorrected model; the sound form goes layer by layer and captures each layer's inputs again
    after the layers below were corrected.
    """
    reference = first_tokens(reference, retain_tokens)
    realigned = {}
    captured = model.trace(batches)
    for layer in model.layers:
        x_Nd, x_post_Nd = reference[layer].x_Nd, captured[layer].x_Nd[:retain_tokens]
        theta_post_Ed = model.theta(layer).detach().clone()
        if form == "paper":
            realigned[layer] = realign_paper(theta_0[layer], theta_post_Ed, x_Nd, x_post_Nd)
        else:
            realigned[layer] = realign(theta_0[layer], theta_post_Ed, x_Nd, x_post_Nd, model.top_k)
        if form == "sound":
            model.set_thetas({layer: realigned[layer].theta_Ed})
            captured = model.trace(batches)
    model.set_thetas({layer: result.theta_Ed for layer, result in realigned.items()})
    return realigned
