"""Routers that cannot leave the null space (App. B.2): Theta = Theta_0 + P (W - Theta_0) with a free W.

No hook runs at a step: any optimizer, momentum and weight decay act on W alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from gripmoe.config.methods import Method
from gripmoe.constraints.null_space import fit_bases
from gripmoe.data.batches import batches_of
from gripmoe.geometry.halfspace import in_full_precision
from gripmoe.geometry.nullspace import RetainBasis
from gripmoe.library.constrain import Data, checked_method, methods_of_loops, traced
from gripmoe.moe import MoEModel
from gripmoe.moe.adapters import unwrapped

FREE = "parametrizations.weight.original"  # torch's name of W


class InNullSpace(nn.Module):
    """Maps W, (E, d), to the router weight: projects the displacement from the original weight row by row."""

    def __init__(self, theta_0_Ed: Tensor, basis: RetainBasis):
        super().__init__()
        self.register_buffer("theta_0_Ed", theta_0_Ed.detach().clone(), persistent=False)
        self.register_buffer("columns_Edr", basis.columns_Edr.to(theta_0_Ed), persistent=False)

    def forward(self, w_Ed: Tensor) -> Tensor:
        moved_Ed = in_full_precision(w_Ed - self.theta_0_Ed)
        return self.theta_0_Ed + RetainBasis(self.columns_Edr.to(moved_Ed)).project(moved_Ed).to(w_Ed)

    def right_inverse(self, theta_Ed: Tensor) -> Tensor:
        return theta_Ed


@contextmanager
def reparameterize(
    model: nn.Module, retain: Data, *, method: str | Method = "expert_specific", tokenizer: Any = None
) -> Iterator[nn.Module]:
    """Within the block, every router weight of `model`, (E, d), is Theta_0 + P (W - Theta_0) with a free W (App. B.2).
    Afterwards routers are plain trained weights in fp32. The state dict always has plain routers. `retain`,
    `tokenizer` and `method` are as in `gripmoe.constrain`; the method must have fixed bases.

    This is Stage 1 of Sec. 4.2 alone: scores of selected experts on retain tokens stay, but other scores may rise above
    them. `gripmoe.constrain` has both stages. Make the optimizer within the block, from `model.parameters()`.

    Raises ValueError for a method without fixed bases of retain batches, an unknown family, a dense model, routers that
    do not train, no retain batches, or a model that a handle or another such block holds; KeyError for a batch without
    `input_ids`.
    """
    row = checked_method(method)
    if not _has_fixed_bases(row):
        fixed = [name for name, other in methods_of_loops().items() if _has_fixed_bases(other)]
        raise ValueError(f"method {method!r} has no fixed bases of retain batches; one of {', '.join(fixed)}")
    moe = MoEModel(unwrapped(model))
    moe.require_free()
    has_begun = False
    with ExitStack() as undo:
        undo.push(lambda error, *_: moe.release(rounded=error is not None and not has_begun))  # training is kept
        moe.require_routers("to reparameterize")
        if not any(moe.theta(layer).requires_grad for layer in moe.layers):
            raise ValueError("no router trains: there is nothing to reparameterize")
        trace = traced(moe, batches_of(retain, "retain", moe.model, tokenizer))
        bases = fit_bases(trace, moe.rules(), row)
        for parameter in moe.freeze_router_biases():
            undo.callback(parameter.requires_grad_, True)
        for layer in moe.layers:
            router = moe.router(layer)
            parametrize.register_parametrization(router, "weight", InNullSpace(router.weight, bases[layer]))
            undo.callback(parametrize.remove_parametrizations, router, "weight")
            undo.callback(router.register_state_dict_post_hook(_save_plain).remove)
            undo.callback(router.register_load_state_dict_pre_hook(_load_plain).remove)
        has_begun = True
        yield model


def _has_fixed_bases(method: Method) -> bool:
    return method.basis == "original" and not method.looks_at_forget


def _save_plain(router: nn.Module, state: dict[str, Tensor], prefix: str, *_) -> None:
    """Saves the router weight in place of W."""
    del state[prefix + FREE]
    state[prefix + "weight"] = router.weight.detach()


def _load_plain(router: nn.Module, state: dict[str, Tensor], prefix: str, *_) -> None:
    """Loads a router weight as W. The projection changes none that `_save_plain` has saved."""
    if prefix + "weight" in state:
        state[prefix + FREE] = state.pop(prefix + "weight")
