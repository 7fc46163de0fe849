"""What `constrain` refuses and warns of in a model, its original and its optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gripmoe.config.methods import Method
from gripmoe.constraints.base import RouterConstraint
from gripmoe.constraints.null_space import NullSpace, NullSpaceReparameterized
from gripmoe.data.documents import Batch
from gripmoe.moe import MoEModel
from gripmoe.moe.adapters import adapter_parameters, is_adapted, unwrapped


def warn_of_balancing(model: nn.Module, arguments: Any = None) -> None:
    """Warns if training adds the load-balancing loss. In transformers the model's configuration turns it on; in a TRL
    trainer, `router_aux_loss_coef` of its `arguments`, or the configuration if that is None."""
    config = unwrapped(model).config.get_text_config()
    weight = getattr(config, "router_aux_loss_coef", None) or 0.0
    if hasattr(arguments, "router_aux_loss_coef") and hasattr(config, "output_router_logits"):
        weight = weight if arguments.router_aux_loss_coef is None else arguments.router_aux_loss_coef
    elif not getattr(config, "output_router_logits", False):
        return
    if weight:
        warnings.warn(
            f"training adds the load-balancing loss (router_aux_loss_coef {weight:g}), which pulls at the routing that "
            "is to stay. Turn it off: `router_aux_loss_coef=0.0` in the arguments of a TRL trainer, "
            "`model.config.output_router_logits = False` anywhere else",
            stacklevel=3,
        )


def check_retain(batches: Sequence[Batch]) -> None:
    """Raises ValueError if there are no batches."""
    if not batches:
        raise ValueError("`retain` holds nothing to trace: no batches were given")


def check_forget(batches: Sequence[Batch], method: Method) -> None:
    """Raises ValueError if there are no batches for a method that looks at them."""
    if method.looks_at_forget and not batches:
        raise ValueError("this method looks at what is to be forgotten: give batches of it as `forget`")


def check_original(original: MoEModel, moe: MoEModel) -> None:
    """Raises ValueError unless `original` may be a copy of `moe`: of its family and shapes, and with its routers, which
    may have been rounded to another precision."""
    kinds = [
        (each.model.config.model_type, {layer: tuple(each.theta(layer).shape) for layer in each.layers})
        for each in (original, moe)
    ]
    if kinds[0] != kinds[1]:
        names = [type(each.model).__name__ for each in (original, moe)]
        raise ValueError(
            f"`original` is another model: {names[0]} and {names[1]} differ in their family or in the shapes of their "
            "routers; give a copy of the model from before"
        )
    others = original.thetas()
    pairs = [(theta_Ed.cpu(), others[layer].cpu()) for layer, theta_Ed in moe.thetas().items()]
    if not all(torch.allclose(*pair, rtol=1e-2, atol=1e-6) for pair in pairs):
        raise ValueError(
            "`original` has other routers than `model`, which has trained or is another model: call `constrain` before "
            "training, with a copy of the model, and `constrain_again` for a further optimizer"
        )


def are_other_routers(thetas: Mapping[int, Tensor], others: Mapping[int, Tensor]) -> bool:
    """Whether routers, (E, d) by layer, differ from `thetas` by more than the norm of these."""
    pairs = [(theta_Ed.cpu(), others[layer].cpu()) for layer, theta_Ed in thetas.items()]
    moved = sum((theta_Ed - other_Ed).square().sum() for theta_Ed, other_Ed in pairs)
    return bool(moved > sum(theta_Ed.square().sum() for theta_Ed, _ in pairs))


def check_adapters(moe: MoEModel, method: Method) -> None:
    """Raises ValueError if adapters compute what the method writes."""
    layers = [layer for layer in moe.layers if is_adapted(moe.outer_router(layer))]
    if layers and method.constraint not in ("none", "frozen"):
        raise ValueError(
            f"an adapter changes the routers of layers {layers}, and this method writes or compares whole router "
            "weights: name modules without routers as `target_modules` and `target_parameters` (in place of "
            '"all-linear", of which PEFT excludes no router), and routers as `modules_to_save`, or use '
            'method="frozen_router"'
        )
    if method.experts == "top_attributed" and adapter_parameters(moe.model):
        raise ValueError(
            "this method trains one whole expert, and adapters train in the place of whole weights: train without "
            'adapters, or use method="gate_anchor"'
        )


def check_routers(moe: MoEModel, optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError unless the optimizer holds the routers that train, and steps the weights that are evaluated."""
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise ValueError(
            f"{type(optimizer).__name__} is schedule-free: its `eval()` writes routers that no step has made, and no "
            'constraint holds; take another optimizer, or method="frozen_router" or "anchored"'
        )
    stepped = _stepped(optimizer)
    missing = [layer for layer in moe.layers if id(moe.theta(layer)) not in stepped]
    trains = any(moe.theta(layer).requires_grad for layer in missing)
    if trains or len(missing) == len(moe.layers):
        remedy = (
            "of several optimizers give the one that holds them"
            if trains or not adapter_parameters(moe.model)
            else 'adapters leave routers as they are: use method="frozen_router" or "anchored", or name the routers in '
            "`modules_to_save`"
        )
        raise ValueError(
            f"the optimizer does not hold the routers of layers {missing}: there is nothing to constrain ({remedy})"
        )


def check_experts(moe: MoEModel, scope: Mapping[int, Iterable[int]], optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError unless the optimizer holds the experts of the layers in `scope` that train."""
    stepped = _stepped(optimizer)
    parameters = [parameter for layer in scope if scope[layer] for parameter in moe.expert_parameters(layer)]
    if any(parameter.requires_grad and id(parameter) not in stepped for parameter in parameters):
        raise ValueError(
            "the optimizer does not hold the experts, of which this method lets one change: of several optimizers "
            "give the one that holds them, or train routers and experts with one"
        )


def _stepped(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of the parameters that an optimizer holds."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def warn_if_nothing_moves(method: Method, constraint: RouterConstraint, moe: MoEModel) -> None:
    """Warns if no router trains under Method A, and of layers whose bases leave their router no direction."""
    if method.constraint == "null_space" and not any(each.requires_grad for each in moe.router_parameters()):
        warnings.warn(
            'no router trains (`requires_grad` is False), so this acts as method="frozen_router": call '
            "`requires_grad_(True)` on the routers before `constrain`",
            stacklevel=3,
        )
    if isinstance(constraint, NullSpace | NullSpaceReparameterized):
        bases = constraint.bases
        if held := [layer for layer in moe.layers if bool((bases[layer].ranks == moe.hidden_size).all())]:
            which = "any router" if held == moe.layers else f"the routers of layers {held}"
            warnings.warn(
                f"the retain tokens leave no direction of {which} free, where no router moves, as under "
                'method="frozen_router": give fewer tokens, or a method with a larger `eps_null`',
                stacklevel=3,
            )


def warn_of_decay(moe: MoEModel, optimizer: torch.optim.Optimizer) -> None:
    routers = {id(moe.theta(layer)) for layer in moe.layers}
    of_routers = [group for group in optimizer.param_groups if any(id(p) in routers for p in group["params"])]
    if decay := max((group.get("weight_decay", 0.0) for group in of_routers), default=0.0):
        warnings.warn(
            f"{type(optimizer).__name__} decays router weights (weight_decay {decay:g}) wherever the constraint does "
            "not hold them, and the workflow trains this method without that: give the routers a parameter group with "
            "weight_decay 0",
            stacklevel=4,
        )
