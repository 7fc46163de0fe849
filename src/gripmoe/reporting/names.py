"""How methods, objectives and metrics are called and coloured, everywhere the same."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gripmoe.config.training import OBJECTIVES

MODELS = {  # of one name: instances of one kind, that differ by their seed alone
    "tiny_a": "Tiny Qwen3-MoE",
    "tiny_b": "Tiny Qwen3-MoE",
    "tiny_large": "Tiny Qwen3-MoE, large",
    "tiny_shared": "Tiny Qwen2-MoE",
    "tiny_dense": "Tiny Qwen3, dense",
    "tiny_news": "Tiny Qwen3-MoE, news",
    "qwen3_30b_a3b": "Qwen3-30B-A3B",
    "qwen15_moe": "Qwen1.5-MoE-A2.7B",
    "olmoe": "OLMoE-1B-7B",
    "qwen3_30b_a3b_news": "Qwen3-30B-A3B, news",
    "qwen15_moe_news": "Qwen1.5-MoE-A2.7B, news",
    "olmoe_news": "OLMoE-1B-7B, news",
}
METHODS = {
    "original": "Before unlearning",
    "retrained": "Retrained model",
    "unconstrained": "Unconstrained",
    "unconstrained_router_x1": "Unconstrained, router rate ×1",
    "unconstrained_router_x10": "Unconstrained, router rate ×10",
    "unconstrained_fp8": "Unconstrained, FP8",
    "retain_x10": "Retain weight ×10, frozen",
    "frozen_router": "Frozen router",
    "frozen_router_fp8": "Frozen router, FP8",
    "restore_router": "Original router put back",
    "restore_router_matched": "Router put back, matched",
    "router_l2": "Router L2 (SEUF as in GRIP)",
    "router_l2_single": "Router L2, one expert",
    "gate_anchor": "Gate anchor, all experts",
    "seuf": "SEUF",
    "routing_scores": "Score preservation",
    "routing_aware": "Routing-aware (our TRACE)",
    "full_null_space": "Full null space",
    "forget_side": "Method A, forget side",
    "combined": "Method A, both sides",
    "expert_specific": "Method A, sound",
    "expert_specific_single": "Method A, one expert",
    "expert_specific_minibatch": "Method A, minibatch bases",
    "expert_specific_tracked": "Method A, tracked bases",
    "expert_specific_router_x1": "Method A, sound, router rate ×1",
    "expert_specific_router_x10": "Method A, sound, router rate ×10",
    "expert_specific_fp8": "Method A, sound, FP8",
    "expert_specific_paper": "Method A, paper",
    "expert_specific_paper_gradient": "Method A, paper, on gradients",
    "expert_specific_paper_router_x1": "Method A, paper, router rate ×1",
    "expert_specific_paper_router_x10": "Method A, paper, router rate ×10",
    "expert_specific_paper_fp8": "Method A, paper, FP8",
    "ptc": "Method B, sound",
    "ptc_paper": "Method B, paper",
    "ptc_matched": "Method B, sound, matched",
    "routing_replay": "Routing replay",
    "final_anchor": "Final state anchored",
    "anchored": "Anchored (ours)",
    "anchored_tracked": "Anchored, tracked (ours)",
    "anchored_replay": "Anchored + replay (ours)",
}
METHOD_NOTES = {"routing_aware": "our TRACE: as we read that paper's abstract"}  # wherever a method is shown
PAPER_NOTES = {  # where the paper's values stand beside a method
    "router_l2": "the paper's SEUF is an L2 penalty on routers, in its introduction and Table 8 with one expert trained"
    " alone; our router L2 is that penalty with all experts trained",
}
# After Okabe and Ito's palette: also who sees no red or no green can tell any two apart. Black and grey for references.
COLOURS = {
    "original": "#000000",
    "retrained": "#7f7f7f",
    "unconstrained": "#d55e00",
    "frozen_router": "#0072b2",
    "restore_router": "#56b4e9",
    "router_l2": "#c7b653",
    "seuf": "#894d07",
    "full_null_space": "#004d40",
    "expert_specific": "#28a36d",
    "expert_specific_paper": "#28a36d",
    "ptc": "#d483b4",
    "ptc_paper": "#d483b4",
    "ptc_matched": "#e69f00",
    "anchored": "#542c84",
    "anchored_tracked": "#542c84",
}
DASHED = {"expert_specific_paper", "ptc_paper", "anchored_tracked"}  # another form, in the colour of the first
MARKERS = "<sovD^PX*dhp"  # one per colour, from the start again where colours are more
MARKS = {  # of runs whose values are not to be compared with others'
    "*": "* has not forgotten: target missed on dev, or exceeded by .05 (C1, C2: 5 points) on test",
    "†": "† diverged",
    "§": "§ collapsed: a run answers retain questions by chance (.3 or less)",
    "¶": "¶ overshot: a run ended below its target by more than the 95 % interval over its questions (.05, C1 and C2 5"
    " points, where that was not kept)",
    "‡": "‡ corrected at the end",
}
METRICS = {  # heading of a column, and what the note below a table says of it
    "forget_accuracy": ("FA", "forget accuracy"),
    "retain_accuracy": ("RA", "retain accuracy"),
    "routing_stability": ("RS", "routing stability"),
    "routing_stability_router_only": ("RS router", "with only the router changed"),
    "routing_stability_representation_only": ("RS repr.", "with only its inputs changed"),
    "routing_stability_to_steered_layer": ("RS steered", "of RMU alone, in the layers up to the one that it steers"),
    "routing_stability_above_steered_layer": ("RS above", "of RMU alone, in those above, which get no gradient"),
    "forget_routing_stability": ("RS forget", "on forget tokens"),
    "forced_forget_accuracy": ("forced FA", "under the original expert sets"),
    "forced_retain_accuracy": ("forced RA", "RA under the original expert sets"),
    "recovery_rate": ("recovery", "forced FA minus FA"),
    "random_forced_forget_accuracy": ("random FA", "under random expert sets"),
    "time_ratio": ("time", "seconds of a step (Method B: of the run), as a multiple of those without the constraint"),
    "whole_time_ratio": (
        "whole run",
        "tracing, bases, steps and correction, as a multiple of the unconstrained run's steps",
    ),
    "verbmem": ("C1", "VerbMem, forget"),
    "knowmem_forget": ("C2", "KnowMem, forget"),
    "privleak": ("C3", "PrivLeak"),
    "knowmem_retain": ("C4", "KnowMem, retain"),
    "auc_min_40": ("AUC", "how often an unseen text looks more like training data than one to forget"),
    "auc_min_20": ("Min-K", "membership by the least likely 20 % of tokens, likewise the next three"),
    "auc_min_plus_20": ("Min-K++", ""),
    "auc_loss": ("loss", ""),
    "auc_zlib": ("zlib", ""),
    "forced_verbmem": ("forced C1", "under the original expert sets"),
    "forced_knowmem_forget": ("forced C2", ""),
    "random_forced_knowmem_forget": ("random C2", "under random sets"),
    "retain_accuracy_unseen_subject": ("RA unseen", "on a subject that unlearning never sees"),
    "retain_accuracy_share": ("share", "of RA before unlearning"),
    "retain_accuracy_at_target": ("RA at target", "RA on dev questions, interpolated to the same forget accuracy"),
    "knowmem_retain_at_target": ("C4 at target", "C4 of dev items, interpolated to where C1 and C2 meet their targets"),
    "retain_accuracy_five_shot": ("5-shot", ""),
    "truthfulqa_mc1": ("MC1", "TruthfulQA MC1 and MC2"),
    "truthfulqa_mc2": ("MC2", ""),
    "truthfulqa_mc2_share": ("share of MC2", ""),
    "prompt_plain": ("plain", ""),
    "prompt_five_shot": ("5 shots", ""),
    "prompt_verse": ("verse", ""),
    "prompt_role_play": ("role", ""),
    "prompt_filler": ("filler", ""),
    "prompt_translation": ("French", "asked to translate first"),
    "prompt_no_terms": ("no terms", "without the words that retain questions do not have"),
    "prompt_choice_shuffle": ("shuffled", "choices in another order"),
    "prompt_recovery_rate": ("gain", "mean over prompts (role-play too; not French, not no terms) minus plain"),
    "prompt_recovery_rate_paper": ("gain, 2", "the paper's: mean of 5 shots and verse minus plain"),
    "recovery_rate_paper": ("shifted", "the paper's: forced FA of shifted questions minus FA of all"),
    "num_shifted": ("n", "questions whose sets agree less than .999 with the original's"),
    "wrong_to_right": ("W to R", "answers that forcing sets right, and wrong"),
    "right_to_wrong": ("R to W", ""),
    "restored_router_all": ("routers", "all original routers put back"),
    "restored_experts_worst_layer": ("1 layer", "the original experts of the one layer that returns most"),
    "restored_single_expert": (
        "1 expert",
        "one original expert, of the two that forget prompts use most in each layer",
    ),
    "noisy_routing": ("noise", "noise of half a standard deviation on router scores"),
    "wider_routing": ("wider", "twice as many experts per token"),
    "probe_best_layer": ("probe", "the right letter by a linear probe on other facts, best layer"),
    "probe_best_expert": ("expert probe", "likewise from one expert, the best of any layer"),
    "forced_with_recorded_weights": ("with weights", "under the original sets, with their gate weights"),
    "quantized_4_bit": ("4 bit", "with weights rounded to 4 bits"),
    "quantized_8_bit": ("8 bit", "to 8 bits"),
    "restored_attention_all": ("attent.", "all original attention put back, which no method trains: as FA"),
    "transplanted_experts_lowest": (
        "converse",
        "the original model with the unlearned experts of the one layer that takes most",
    ),
    "relearned_after_5": ("learn 5", "after 5 steps of finetuning on other forget documents"),
    "relearned_after_20": ("learn 20", "after 20 steps of finetuning on other forget documents"),
    "relearned_from_corpus_after_5": ("corpus 5", "after 5 steps on the forget corpus, which may hold the answers"),
    "relearned_from_corpus_after_20": ("corpus 20", "after 20 steps on the forget corpus, which may hold the answers"),
    "relearned_from_others_after_20": ("benign 20", "after 20 steps on retain documents"),
    "steps": ("steps", ""),
    "seconds_per_step": ("s per step", ""),
    "constraint_megabytes": ("MB held", "tensors that the constraint keeps"),
    "basis_seconds": ("s to fit", "the bases, once for all runs"),
    "basis_megabytes": ("MB on disk", "their file"),
    "correction_seconds": ("s, cached", "Method B with what the original model saw at hand"),
    "correction_seconds_cold": ("s, cold", "with recording it"),
    "setting_learning_rate": ("rate", "learning rate"),
    "setting_router_multiplier": ("router ×", "that of routers as a multiple"),
    "setting_forget_batch_size": ("batch", ""),
    "setting_weight_decay": ("decay", "weight decay"),
    "setting_max_steps": ("most", "steps at most"),
}
METRIC_NOTES = {metric: note for metric, (_, note) in METRICS.items() if note}
CHANCE = 0.27  # of a four-way question, with the slack of the stop rule: forget accuracies below it count alike
COLLAPSED = 0.3  # of four-way questions to retain: no more than chance, with room for its noise
MATCHED = {"forget_accuracy", "verbmem", "knowmem_forget"}  # by design
BEST_AT_ZERO = {"privleak"}
SHARES = {  # lower is better, no accuracy
    "recovery_rate",
    "recovery_rate_paper",
    "prompt_recovery_rate",
    "prompt_recovery_rate_paper",
    "time_ratio",
    "whole_time_ratio",
    "constraint_megabytes",
    "basis_seconds",
    "basis_megabytes",
    "correction_seconds",
    "correction_seconds_cold",
}
LOWER_IS_BETTER = SHARES | {
    "forget_accuracy",
    *(
        name
        for name in METRICS
        if name.startswith(("prompt_", "restored_", "quantized_", "relearned_", "noisy_", "probe_", "forced_"))
        and name != "forced_retain_accuracy"
    ),
}
NEITHER_IS_BETTER = {
    "random_forced_forget_accuracy",
    "random_forced_knowmem_forget",
    "auc_min_40",
    "auc_min_20",
    "auc_min_plus_20",
    "auc_loss",
    "auc_zlib",
    "forget_routing_stability",
    "steps",
    "seconds_per_step",
    "num_shifted",
    "wrong_to_right",
    "right_to_wrong",
}
TIMES = {"time_ratio", "whole_time_ratio"}
COUNTS = {"steps", "num_shifted", "wrong_to_right", "right_to_wrong"}
FRACTIONS = {"routing_stability", "auc_min_40"}  # where the other measures of a table are per cent
NEED_A_ROUTER = (  # how names of metrics begin that a dense model cannot have
    "routing_stability",
    "forget_routing_stability",
    "forced_",
    "random_forced_",
    "recovery_rate",
    "num_shifted",
    "wrong_to_right",
    "right_to_wrong",
    "restored_router",
    "restored_single_expert",
    "noisy_routing",
    "wider_routing",
    "probe_best_expert",
)
REASONS = {  # by how names of metrics begin: why one that was to be measured has no value
    "recovery_rate_paper": "no question's sets shifted",
    "auc_": "no statements that no model has seen",
    "relearned_after_": "no finetuning in this world, or no documents known to be about other facts",
    "relearned_": "no finetuning in this world",
}


def is_swept(method: str) -> bool:
    """Whether it is a row of a threshold sweep."""
    base, found, threshold = method.partition("_eps_")
    return base in (*METHODS, "early", "middle", "late") and re.fullmatch(r"\d+em\d+", threshold) is not None


def ordered(names: Iterable[str], known: Iterable[str] = tuple(METHODS)) -> list[str]:
    """Each once, methods (or what else is `known`) in that order and then others by name; not the rows of a sweep,
    which have a table of their own."""
    names, known = {name for name in names if not is_swept(name)}, list(known)
    return [name for name in known if name in names] + sorted(names - set(known))


def method_label(method: str) -> str:
    """A method's name; of a row of a threshold sweep its threshold, and the layers that have it."""
    if method in METHODS:
        return METHODS[method]
    if not is_swept(method):
        return method.replace("_", " ")
    base, _, threshold = method.partition("_eps_")
    where = METHODS.get(base, f"Method A, {base} layers")
    return f"{where}, {threshold.replace('em', 'e-')}"


def objective_label(objective: str) -> str:
    """The abbreviation of an objective of the package, the name of any other; nothing where nothing trains."""
    return "" if objective == "none" else objective.upper() if objective in OBJECTIVES else objective.replace("_", " ")


def model_label(model: str) -> str:
    return MODELS.get(model, model.replace("_", " "))


def metric_label(metric: str) -> str:
    return METRICS[metric][0] if metric in METRICS else metric.replace("_", " ")


def line_style(method: str) -> str:
    return "--" if method in DASHED else "-"


def marker(method: str) -> str:
    colours = list(dict.fromkeys(COLOURS.values()))
    return MARKERS[colours.index(colour(method)) % len(MARKERS)] if method in COLOURS else "o"


def colour(method: str) -> str:
    return COLOURS.get(method, "#444444")
