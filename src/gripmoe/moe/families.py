"""What differs between architectures: one row each.

A family fits if its routers are linear modules that return (logits, weights, indices), as transformers writes them; the
model's `_can_record_outputs` table names their class. A row says how such a router selects experts (`SelectionRule`)
and how it weighs selected experts, its own or forced ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gripmoe.geometry.routing import SelectionRule
from gripmoe.io.errors import ConfigError

Weigh = Callable[[nn.Module, Tensor, Tensor], Tensor]  # router, scores_TE, top_k_Tk -> weights_Tk


def _plain(router: nn.Module) -> SelectionRule:
    return SelectionRule(router.top_k)


def _with_logit_bias(router: nn.Module) -> SelectionRule:
    return SelectionRule(router.top_k, logit_bias_E=router.bias.detach())


def _with_statistics(router: nn.Module) -> SelectionRule:
    bias_E = router.moe_statics.e_score_correction_bias.detach().squeeze(0)
    return SelectionRule(router.top_k, choice_bias_E=bias_E, squash="softmax")


def _greedy_groups(router: nn.Module) -> SelectionRule:
    if router.topk_method == "greedy":
        return SelectionRule(router.top_k)
    return SelectionRule(router.top_k, num_groups=router.num_group, chosen_groups=router.topk_group, counted=1)


def _biased_groups(router: nn.Module) -> SelectionRule:
    return SelectionRule(
        router.top_k,
        choice_bias_E=router.e_score_correction_bias.detach(),
        squash="sigmoid",
        num_groups=router.num_group,
        chosen_groups=router.topk_group,
        counted=2,
    )


def _softmax_of_all(scores_TE: Tensor, top_k_Tk: Tensor) -> Tensor:
    return torch.softmax(scores_TE, dtype=torch.float, dim=-1).gather(1, top_k_Tk)


def _probabilities(router, scores_TE, top_k_Tk):
    return _softmax_of_all(scores_TE, top_k_Tk)


def _renormalized(router, scores_TE, top_k_Tk):
    weights_Tk = _softmax_of_all(scores_TE, top_k_Tk)
    return weights_Tk / weights_Tk.sum(dim=-1, keepdim=True)


def _renormalized_if_so_configured(router, scores_TE, top_k_Tk):
    return (_renormalized if router.norm_topk_prob else _probabilities)(router, scores_TE, top_k_Tk)


def _renormalized_above_minimum(router, scores_TE, top_k_Tk):
    weights_Tk = _softmax_of_all(scores_TE, top_k_Tk)
    return weights_Tk / weights_Tk.sum(dim=-1, keepdim=True).clamp(min=router.norm_min)


def _softmax_of_chosen(router, scores_TE, top_k_Tk):
    return torch.softmax(scores_TE.gather(1, top_k_Tk), dim=-1)


def _scaled_probabilities(router, scores_TE, top_k_Tk):
    return _softmax_of_all(scores_TE, top_k_Tk) * router.routed_scaling_factor


def _scaled_sigmoids(router, scores_TE, top_k_Tk):
    weights_Tk = scores_TE.sigmoid().gather(1, top_k_Tk)
    if router.norm_topk_prob:
        weights_Tk = weights_Tk / (weights_Tk.sum(dim=-1, keepdim=True) + 1e-20)
    return weights_Tk * router.routed_scaling_factor


def _sparse_mixer(router, scores_TE, top_k_Tk):
    """Phi-MoE: one slot after the other, the chosen expert's softmax among the experts that are left and whose relative
    distance below it is at most twice the jitter."""
    weights = []
    for slot in range(top_k_Tk.shape[1]):
        chosen_T1 = top_k_Tk[:, slot : slot + 1]
        left_TE = scores_TE.scatter(1, top_k_Tk[:, :slot], -torch.inf)
        own_T1 = left_TE.gather(1, chosen_T1)
        far_TE = (own_T1 - scores_TE) / scores_TE.abs().clamp(min=own_T1) > 2 * router.router_jitter_noise
        weights.append(left_TE.masked_fill(far_TE, -torch.inf).softmax(dim=-1).gather(1, chosen_T1))
    return torch.cat(weights, dim=-1)


@dataclass(frozen=True)
class Family:
    weigh: Weigh | None
    rule: Callable[[nn.Module], SelectionRule] = _plain


DENSE = Family(weigh=None)  # no routers at all: a baseline to unlearn from, nothing to constrain

FAMILIES = {
    "qwen3": DENSE,
    **dict.fromkeys(  # of these, Qwen1.5-MoE's checkpoints set norm_topk_prob: false
        ("qwen3_moe", "qwen2_moe", "qwen3_next", "olmoe", "flex_olmo", "mellum"),
        Family(_renormalized_if_so_configured),
    ),
    **dict.fromkeys(("qwen3_5_moe_text", "mixtral", "minimax"), Family(_renormalized)),
    "jamba": Family(_probabilities),
    **dict.fromkeys(
        ("granitemoe", "granitemoe_swa", "granitemoeshared", "granitemoehybrid"), Family(_softmax_of_chosen)
    ),
    "gpt_oss": Family(_softmax_of_chosen, _with_logit_bias),
    "phimoe": Family(_sparse_mixer),
    "ernie4_5_moe": Family(_renormalized_above_minimum, _with_statistics),
    "deepseek_v2": Family(_scaled_probabilities, _greedy_groups),
    **dict.fromkeys(
        ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "dots1", "exaone_moe", "solar_open")
        + ("nemotron_h", "axk1"),
        Family(_scaled_sigmoids, _biased_groups),
    ),
}


def logits_scaling(model: nn.Module) -> float:
    """What a family divides the output of its language head by (Granite does)."""
    return getattr(model.config, "logits_scaling", 1.0)


def family_of(model: nn.Module) -> Family:
    """The row of a transformers model. Raises ValueError for a family without one, with what stands in the way."""
    model_type = model.config.model_type if hasattr(model, "config") else None
    if not model_type or (model_type in FAMILIES and not hasattr(model, "model")):
        raise ValueError(f"{type(model).__name__} is no model of transformers: give the one that has a language head")
    if model_type not in FAMILIES:
        raise ConfigError(
            f"no row for model type {model_type!r} in gripmoe.moe.families: {_obstacle(model)} (known families: "
            f"{', '.join(FAMILIES)})"
        )
    return FAMILIES[model_type]


def _obstacle(model: nn.Module) -> str:
    record = _router_record(model)
    if record is None:
        return "transformers records no router logits of it, it is dense or hides its routers: nothing to constrain"
    target = record.target_class
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None:
        return "its decoder layers are not at `model.layers`, as in an encoder-decoder or a model of several modalities"
    blocks = [block for layer in layers for block in layer.children()]
    router = next((child for block in blocks for child in block.children() if isinstance(child, target)), None)
    if record.index != 0 or router is None:
        return f"its {target.__name__} is no router of its own within a block, that returns (logits, weights, indices)"
    needed = [p.name for p in inspect.signature(router.forward).parameters.values() if p.default is p.empty]
    if len(needed) > 1:
        return f"its {target.__name__} needs {', '.join(needed[1:])} from its block to select experts"
    weight = getattr(router, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return f"its {target.__name__} is no single linear map with a `weight` of (experts, hidden size)"
    output = router(weight.new_zeros(2, weight.shape[1]))
    if not (isinstance(output, tuple) and len(output) == 3 and output[0].shape == (2, len(weight))):
        return f"its {target.__name__} does not return (logits, weights, indices)"
    return "its routers return what they should; if they are linear, add a row: how they select experts and weigh them"


def is_moe(model: nn.Module) -> bool:
    """Whether the model has experts, of whatever family."""
    return any(getattr(model.config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def router_class(model: nn.Module) -> type[nn.Module]:
    record = _router_record(model)
    if record is None:
        raise ConfigError(f"{type(model).__name__} records no router logits: it is not a mixture of experts")
    return record.target_class


def _router_record(model: nn.Module):
    tables = (getattr(module, "_can_record_outputs", None) or {} for module in model.modules())
    record = next((table["router_logits"] for table in tables if "router_logits" in table), None)
    return record[0] if isinstance(record, list) else record
