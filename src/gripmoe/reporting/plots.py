"""The figures that are drawn from the tidy tables, beside routing stability by layer."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd

from gripmoe.reporting import names
from gripmoe.reporting.collect import KEYS, apart
from gripmoe.reporting.figures import PAPER_WIDTH, house_style, legend_below, nothing, panels_of

SHOWN = [  # of all methods, in figures that have no room for more
    "unconstrained",
    "frozen_router",
    "router_l2",
    "expert_specific_paper",
    "expert_specific",
    "ptc_matched",
    "anchored",
]


def forget_utility_tradeoff(
    histories: pd.DataFrame, forget: str = "forget_accuracy", retain: str = "retain_accuracy"
) -> plt.Figure:
    """What is retained against what is not forgotten, on dev questions along training (the paper's Figure 2): per
    method a line, the mean over runs at every check that all runs reached, and a dot at the mean of their last checks.
    Up and to the left is better. `forget` and `retain` name the two measures: accuracies, or C1 and C4."""
    wide = histories.pivot_table(index=[*KEYS, "step"], columns="metric", values="value").reset_index()
    methods = [m for m in SHOWN if m in set(wide.method)]
    with house_style():
        figure, panels = panels_of(wide)
        shown: dict[str, str] = {}
        for axes, objective, group in panels:
            for method in methods:
                runs = group[(group.objective == objective) & (group.method == method)]
                if runs.empty:
                    continue
                last = runs.sort_values("step").groupby(KEYS).tail(1)
                checks = runs.groupby("step")[[forget, retain]]
                reached_by_all = checks.mean()[checks.size() == len(last)]
                line = pd.concat([reached_by_all, last[[forget, retain]].mean().to_frame().T])
                shown[method] = names.line_style(method)
                axes.plot(line[forget], line[retain], shown[method], alpha=0.8, color=names.colour(method))
                axes.plot(*line.iloc[-1], **names.look_of(method, 4))
            if forget == "forget_accuracy":
                axes.axvline(0.25, color="0.6", linewidth=0.7, linestyle=":")
            axes.set_xlabel(f"{names.metric(forget).note} (dev)")
        first = panels[0][0]
        for method, style in shown.items():
            first.plot([], [], style, label=names.method_label(method), **names.look_of(method, 4))
        first.set_ylabel(f"{names.metric(retain).note} (dev)")
        legend_below(figure, first)
    return figure


def realignment_holdout(runs: pd.DataFrame) -> plt.Figure:
    """Method B by the number of tokens it is fitted to: routing stability on those tokens and on others, for the
    paper's form and the sound one, with the hidden size marked."""
    found = runs[runs.metric.str.startswith("holdout_")].copy()
    if found.empty:
        return nothing("no finished run was refitted in the paper's form (ptc_paper)")
    found[["form", "tokens", "where"]] = found.metric.str.extract(r"holdout_(paper|sound)_(\d+)_(fit|other)")
    found["tokens"] = found.tokens.astype(int)
    kinds = apart(found)
    with house_style():
        size = PAPER_WIDTH * (0.62 if len(kinds) == 1 else 1.0), 2.2
        figure, (panels,) = plt.subplots(1, len(kinds), figsize=size, sharey=True, squeeze=False)
        for axes, (kind, group) in zip(panels, kinds, strict=True):
            means = group.groupby(["form", "where", "tokens"]).value.mean()
            for form, method in (("paper", "ptc_paper"), ("sound", "ptc")):
                for where, style in (("fit", ":"), ("other", "-")):
                    line = means[form, where]
                    name = f"{form}, {'its own' if where == 'fit' else 'other'} tokens"
                    axes.plot(line.index, line.values, style, label=name, **names.look_of(method))
            hidden = runs.loc[(runs.metric == "hidden_size") & runs.model.isin(group.model), "value"]
            if not hidden.empty:
                axes.axvline(hidden.iloc[0], color="0.6", linewidth=0.7, linestyle="--")
                axes.text(hidden.iloc[0] * 1.1, 0.02, "$N_r = d$", fontsize=5.8, color="0.4")
            axes.set_xscale("log", base=2)
            axes.set(xlabel="retain tokens fitted to", ylim=(0, 1.03), title=kind)
        panels[0].set_ylabel("routing stability")
        panels[-1].legend(frameon=False, fontsize=5.8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.tight_layout()
    return figure
