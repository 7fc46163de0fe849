"""How methods, objectives and metrics are called and coloured, everywhere the same."""

from __future__ import annotations

OBJECTIVES = {"gd": "GD", "kl": "KL", "npo": "NPO", "rmu": "RMU", "none": ""}

METHODS = {
    "original": "Before unlearning",
    "retain_only": "Retain-only oracle",
    "unconstrained": "Unconstrained",
    "frozen_router": "Frozen router",
    "restore_router": "Original router put back",
    "expert_specific": "Method A, sound",
    "expert_specific_paper": "Method A, paper",
    "ptc": "Method B, sound",
    "ptc_paper": "Method B, paper",
    "ptc_matched": "Method B, sound, matched",
}

# Okabe and Ito's palette, which colour-blind readers can tell apart; black and grey for references.
COLOURS = {
    "original": "#000000",
    "retain_only": "#7f7f7f",
    "unconstrained": "#d55e00",
    "frozen_router": "#0072b2",
    "restore_router": "#56b4e9",
    "expert_specific": "#009e73",
    "expert_specific_paper": "#009e73",
    "ptc": "#cc79a7",
    "ptc_paper": "#cc79a7",
    "ptc_matched": "#e69f00",
}

DASHED = {"expert_specific_paper", "ptc_paper"}  # the paper's form, in the colour of the sound one

METRICS = {
    "forget_accuracy": "FA",
    "retain_accuracy": "RA",
    "routing_stability": "RS",
    "routing_stability_router_only": "RS router",
    "routing_stability_representation_only": "RS repr.",
    "forced_forget_accuracy": "forced FA",
    "recovery_rate": "recovery",
    "random_forced_forget_accuracy": "random FA",
}

LOWER_IS_BETTER = {"forget_accuracy", "forced_forget_accuracy", "recovery_rate"}


def method_label(method: str) -> str:
    return METHODS.get(method, method.replace("_", " "))


def line_style(method: str) -> str:
    return "--" if method in DASHED else "-"


def colour(method: str) -> str:
    return COLOURS.get(method, "#444444")
