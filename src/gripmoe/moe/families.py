"""How the routers of each model family select and weigh experts: one row per family.

A family is supported if its routers are linear modules that return (logits, weights, indices), as in transformers; the
model's `_can_record_outputs` table names their class. A row has two functions: one returns the `SelectionRule` of a
router, given the router and its block; the other computes the weights of selected (or forced) experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from gripmoe.geometry.routing import SelectionRule
from gripmoe.io.errors import ConfigError

Weigh = Callable[[nn.Module, Tensor, Tensor], Tensor]  # router, scores_TE, top_k_Tk -> weights_Tk
Rule = Callable[[nn.Module, nn.Module], SelectionRule]  # router, its block


def _plain(router: nn.Module, block: nn.Module) -> SelectionRule:
    return SelectionRule(router.top_k)


def _with_logit_bias(router, block):
    return SelectionRule(router.top_k, logit_bias_E=router.bias.detach())


def _with_correction_bias(router, block):
    return SelectionRule(router.top_k, correction_bias_E=router.e_score_correction_bias.detach())


def _with_statistics(router, block):
    bias_E = router.moe_statics.e_score_correction_bias.detach().squeeze(0)
    return SelectionRule(router.top_k, correction_bias_E=bias_E, scoring="softmax")


def _greedy_groups(router, block):
    if router.topk_method == "greedy":
        return SelectionRule(router.top_k)
    return SelectionRule(router.top_k, num_groups=router.num_group, chosen_groups=router.topk_group, counted=1)


def _softmax_groups(router, block):
    groups = dict(num_groups=router.num_group, chosen_groups=router.topk_group, counted=2)
    return SelectionRule(router.top_k, scoring="softmax", **groups)


def _biased_sigmoids(router, block):
    """Adds the bias of the router or of its block, and selects among the best groups, if the family has these."""
    owner = router if hasattr(router, "e_score_correction_bias") else block
    bias_E = getattr(owner, "e_score_correction_bias", getattr(owner, "expert_bias", None))
    rule = SelectionRule(router.top_k, correction_bias_E=None if bias_E is None else bias_E.detach(), scoring="sigmoid")
    if getattr(router, "num_group", None) is None:
        return rule
    return replace(rule, num_groups=router.num_group, chosen_groups=router.topk_group, counted=2)


def _positive_groups(router, block):
    rule = _biased_sigmoids(router, block)
    if rule.num_groups > 1 and rule.correction_bias_E.amin() < 0:
        raise ConfigError(
            f"{type(router).__name__} gives experts outside the chosen groups the score 0, and a bias below 0 may put "
            "one of them above those inside: no rule of gripmoe says that"
        )
    return rule


def _uncapped_sigmoids(router, block):
    if router.router_logit_softcapping > 0:
        raise ConfigError(
            f"{type(router).__name__}: with moe_router_logit_softcapping {router.router_logit_softcapping:g} scores "
            "are no linear map of what the router sees, and a constraint needs one"
        )
    return _biased_sigmoids(router, block)


def _probabilities(router: nn.Module, scores_TE: Tensor, top_k_Tk: Tensor) -> Tensor:
    return torch.softmax(scores_TE, dtype=torch.float, dim=-1).gather(1, top_k_Tk)


def _renormalized(router, scores_TE, top_k_Tk):
    weights_Tk = _probabilities(router, scores_TE, top_k_Tk)
    return weights_Tk / weights_Tk.sum(dim=-1, keepdim=True)


def _renormalized_if_so_configured(router, scores_TE, top_k_Tk):
    return (_renormalized if router.norm_topk_prob else _probabilities)(router, scores_TE, top_k_Tk)


def _renormalized_above_minimum(router, scores_TE, top_k_Tk):
    weights_Tk = _probabilities(router, scores_TE, top_k_Tk)
    return weights_Tk / weights_Tk.sum(dim=-1, keepdim=True).clamp(min=router.norm_min)


def _softmax_of_chosen(router, scores_TE, top_k_Tk):
    return torch.softmax(scores_TE.gather(1, top_k_Tk), dim=-1)


def _scaled_probabilities(router, scores_TE, top_k_Tk):
    return _probabilities(router, scores_TE, top_k_Tk) * router.routed_scaling_factor


def _scaled_and_renormalized_if_so_configured(router, scores_TE, top_k_Tk):
    return _renormalized_if_so_configured(router, scores_TE, top_k_Tk) * router.routed_scaling_factor


def _scaled_sigmoids(router, scores_TE, top_k_Tk, least=1e-20):
    """Sigmoid weights; renormalised unless the router says otherwise; scaled if the router does this, not its block."""
    weights_Tk = scores_TE.sigmoid().gather(1, top_k_Tk)
    if getattr(router, "norm_topk_prob", True):
        weights_Tk = weights_Tk / (weights_Tk.sum(dim=-1, keepdim=True) + least)
    return weights_Tk * getattr(router, "routed_scaling_factor", getattr(router, "router_scaling_factor", 1.0))


def _softmax_or_sigmoids(router, scores_TE, top_k_Tk):
    of_softmax = router.expert_selection_fn == "softmax"
    return (_softmax_of_chosen if of_softmax else _scaled_sigmoids)(router, scores_TE, top_k_Tk)


def _sparse_mixer(router, scores_TE, top_k_Tk):
    """Phi-MoE: for one slot after the other, the chosen expert's softmax weight among the remaining experts whose
    scores are below its own by a relative distance of at most twice the jitter."""
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
    rule: Rule = _plain
    checked: bool = False  # whether a trace compares selections of the rule and of the routers


DENSE = Family(weigh=None)  # a baseline without routers

FAMILIES = {
    "qwen3": DENSE,
    "mistral": DENSE,
    "llama": DENSE,
    **dict.fromkeys(  # of these, Qwen1.5-MoE's checkpoints set norm_topk_prob: false
        ("qwen3_moe", "qwen2_moe", "qwen3_next", "qwen4_exp_text", "olmoe", "flex_olmo", "mellum", "lara_mini"),
        Family(_renormalized_if_so_configured),
    ),
    **dict.fromkeys(("qwen3_5_moe_text", "mixtral", "minimax"), Family(_renormalized)),
    "jamba": Family(_probabilities),
    **dict.fromkeys(
        ("granitemoe", "granitemoe_swa", "granitemoeshared", "granitemoehybrid", "aria_text"),
        Family(_softmax_of_chosen),
    ),
    "cohere2_moe": Family(_softmax_or_sigmoids),
    "gpt_oss": Family(_softmax_of_chosen, _with_logit_bias),
    "phimoe": Family(_sparse_mixer),
    "ernie4_5_moe": Family(_renormalized_above_minimum, _with_statistics),
    "deepseek_v2": Family(_scaled_probabilities, _greedy_groups),
    "mistral4": Family(_scaled_and_renormalized_if_so_configured, _softmax_groups),
    "flint": Family(_scaled_sigmoids),
    "kolibri1": Family(_scaled_sigmoids, _with_correction_bias),
    **dict.fromkeys(
        ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "dots1", "exaone_moe", "solar_open")
        + ("nemotron_h", "axk1", "bailing_hybrid", "beam", "dots3_note_text", "hy_v3", "hy_v4", "inkling2_text")
        + ("kimi_linear", "mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text"),
        Family(_scaled_sigmoids, _biased_sigmoids),
    ),
    "axk2": Family(_scaled_sigmoids, _positive_groups),
    "laguna": Family(_scaled_sigmoids, _uncapped_sigmoids),
    "lfm2_moe": Family(partial(_scaled_sigmoids, least=1e-6), _biased_sigmoids),
}


def logits_of(model: nn.Module, hidden: Tensor, head: nn.Module | None = None) -> Tensor:
    """fp32 logits of final hidden states, (..., d) to (..., vocabulary), as the model's own forward pass computes them.
    Some families scale them, cap them or cut the vocabulary. `head` replaces the model's head."""
    head, config = head or model.lm_head, model.config
    if head.weight.is_floating_point():  # some families keep the head in fp32
        hidden = hidden.to(head.weight.dtype)
    logits = head(hidden).float() * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    return logits[..., : getattr(config, "unpadded_vocab_size", None)]


def register_family(model_type: str, weigh: Weigh, rule: Rule = _plain) -> None:
    """Adds or replaces the family of models with this `config.model_type` (ours). Each router must be a linear module
    in its own block, with a `weight` of (experts, hidden size), and return (logits, weights, indices).

    `weigh(router, scores, experts)` returns the weights of chosen experts, (tokens, k), given logits (tokens, experts)
    and expert numbers (tokens, k). `rule(router, block)` returns the `gripmoe.SelectionRule` of a router; without it,
    the router selects the `top_k` largest logits. Recording a trace raises ValueError if the rule selects other experts
    than the router. Raises ValueError if `weigh` or `rule` is no function."""
    if not (callable(weigh) and callable(rule)):
        raise ValueError(
            "`weigh` and `rule` must be functions of a router; the docstring of register_family says which"
        )
    FAMILIES[model_type] = Family(weigh, rule, checked=True)


LOOPED = "layers that run once in a forward pass", "a model without looped layers"  # what is missing, what to write


def family_of(model: nn.Module) -> Family:
    """The family of a transformers model. Raises ValueError for an unknown family; the message says what is missing."""
    model_type = model.config.model_type if hasattr(model, "config") else None
    if not model_type or (model_type in FAMILIES and not hasattr(model, "model")):
        raise ValueError(f"{type(model).__name__} is no model of transformers: give the one that has a language head")
    if model_type not in FAMILIES:
        raise unfit(model, *_missing(model))
    return FAMILIES[model_type]


def unfit(model: nn.Module, missing: str, write: str | None = None) -> ConfigError:
    """The error for a model of an unknown family, or one that does not fit the row of its family."""
    model_type = model.config.model_type
    write = write or f"gripmoe.register_family({model_type!r}, weigh=..., rule=...)"
    return ConfigError(f"family {model_type!r} ({type(model).__name__}): missing: {missing}; write: {write}")


def _missing(model: nn.Module) -> tuple[str] | tuple[str, str]:
    """What a model of an unknown family lacks; and, if a row is not enough, what to write."""
    record = _router_record(model)
    if record is None:
        return (
            "routers whose logits transformers records; the model is dense or hides its routers",
            "`router_logits` in the `_can_record_outputs` of a model that has routers",
        )
    if getattr(model.config, "loop_num_passes", 1) > 1:
        return LOOPED
    name = record.target_class.__name__
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None:
        return "decoder layers at `model.layers`", "a causal language model of text alone that has them there"
    write = f"a router as in Qwen3MoeTopKRouter in place of {name}, then a row"
    blocks = [block for layer in layers for block in layer.children()]
    router = next(
        (child for block in blocks for child in block.children() if isinstance(child, record.target_class)), None
    )
    if record.index != 0 or router is None:
        return f"a router of its own within a block that returns (logits, weights, indices); {name} is none", write
    weight = getattr(router, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return f"a single linear map with a `weight` of (experts, hidden size) in {name}", write
    try:
        output = router(weight.new_zeros(2, weight.shape[1]))
    except Exception as error:
        return (f"a row; {name} needs more of its block than its inputs, which `rule` may take from there ({error})",)
    if not (isinstance(output, tuple) and len(output) == 3 and output[0].shape == (2, len(weight))):
        return f"(logits, weights, indices) as what {name} returns", write
    return ("a row; its routers return what they should, and must be linear",)


NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # in configurations


def has_experts(config: object) -> bool:
    """Whether the configuration of a model gives a number of experts, of whatever family. Without such a key the
    family decides."""
    numbers = [getattr(config, name) for name in NUMBERS_OF_EXPERTS if hasattr(config, name)]
    return any(numbers) if numbers else FAMILIES.get(getattr(config, "model_type", ""), DENSE) is not DENSE


def is_moe(model: nn.Module) -> bool:
    return has_experts(model.config)


def router_class(model: nn.Module) -> type[nn.Module]:
    record = _router_record(model)
    if record is None:
        raise unfit(model, *_missing(model))
    return record.target_class


def _router_record(model: nn.Module):
    tables = (getattr(module, "_can_record_outputs", None) or {} for module in model.modules())
    record = next((table["router_logits"] for table in tables if "router_logits" in table), None)
    if not isinstance(record, list):
        return record
    return next((one for one in record if "Attention" not in one.target_class.__name__), record[0])
