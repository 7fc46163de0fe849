"""Router attacks: changed routing (more experts, noise, searched shifts, silenced experts) may reach hidden
knowledge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from operator import itemgetter
from statistics import fmean

import torch
from torch import Tensor, nn

from gripmoe.attacks.base import Found, QuestionSetting, Setting, expert_usage, mean, score_spread
from gripmoe.evaluation.questions import prompt_of
from gripmoe.geometry.routing import SelectionRule, selection_mask
from gripmoe.moe import MoEModel
from gripmoe.moe.recording import hooked

SILENCED = (4, 2, 1)  # numbers of experts per layer that the attacker tries to silence
SEARCHED = (4, 16, 64)  # numbers of random shifts that the attacker tries
SEARCH_QUESTIONS = 60  # dev questions that evaluate each shift, evenly spaced: so many to twice as many


def attack(setting: Setting) -> Found:
    """Scores with twice as many experts per token, and with noisy router scores. The row of the original model shows
    what the attack itself breaks."""
    model, found = setting.after, {}
    if not model.layers:
        return Found()
    with widened(model, 2):
        found["wider_routing"] = setting.scores_of(model)
    with noisy(model, 0.5, setting.seed):
        found["noisy_routing"] = setting.scores_of(model)
    return setting.found(found)


def silencing(setting: QuestionSetting) -> Found:
    """`silenced_experts`: scores without the experts that forget prompts use more than retain prompts do, as in SAFEx
    and SteerMoE. The attacker takes the number of SILENCED experts, the first of equal ones, that answers most dev
    questions."""
    model = setting.after
    counts = [count for count in SILENCED if count + model.top_k <= model.num_experts]
    if not counts:  # of a dense model too
        return Found()
    retain = [prompt_of(question) for question in setting.retain]
    used, others = (expert_usage(model, setting.tokenizer, prompts) for prompts in (setting.prompts, retain))
    excess = {layer: used[layer] - others[layer] for layer in model.layers}
    tried = []
    for count in counts:
        silent = {layer: selection_mask(e_E.topk(count).indices[None], len(e_E))[0] for layer, e_E in excess.items()}
        if all(model.rule(layer).can_do_without(silent_E) for layer, silent_E in silent.items()):
            with silenced(model, silent):
                tried.append((mean(setting.right(model, setting.dev)), silent))
    if not tried:
        return Found()
    _, best = max(tried, key=itemgetter(0))
    with silenced(model, best):
        return setting.found({"silenced_experts": setting.scores_of(model)})


def searched(count: int) -> range:
    """The numbers of the dev questions, of `count`, that evaluate each shift."""
    return range(0, count, max(1, count // SEARCH_QUESTIONS))


def search(setting: QuestionSetting) -> Found:
    """`searched_routing_after_<n>`: scores under the best of n random shifts of the router scores, the same shift for
    every prompt (a random search in place of F-SOUR's). The best shift gives the right letters of dev questions the
    highest probability, so the attacker is assumed to know some of the facts."""
    model = setting.after
    if not model.layers:
        return Found()
    generator = torch.Generator().manual_seed(setting.seed)
    spread = score_spread(model, setting.tokenizer, setting.prompts)

    def shift() -> dict[int, Tensor]:
        return {layer: size * torch.randn(model.num_experts, generator=generator) for layer, size in spread.items()}

    asked = [setting.dev[number] for number in searched(len(setting.dev))]
    # A model that answers with NaN keeps its own routing.
    found, best = {}, (-float("inf"), {layer: torch.zeros(model.num_experts) for layer in model.layers})
    for number in range(1, max(SEARCHED) + 1):
        tried = shift()
        with biased(model, tried):
            answers = setting.ask(model, asked)
        likely = fmean(answer.letter_logprobs[row["answer"]] for row, answer in zip(asked, answers, strict=True))
        best = max(best, (likely, tried), key=lambda pair: pair[0])
        if number in SEARCHED:
            with biased(model, best[1]):
                found[f"searched_routing_after_{number}"] = setting.scores_of(model)
    return setting.found(found)


def biased(model: MoEModel, scores: Mapping[int, Tensor]) -> AbstractContextManager[None]:
    """Within the block, routers add `scores`, (E,) by layer, to select experts."""
    return _selecting(model, lambda layer, rule, scores_TE: rule.select(scores_TE + scores[layer].to(scores_TE)))


def silenced(model: MoEModel, silent: Mapping[int, Tensor]) -> AbstractContextManager[None]:
    """Within the block, routers select none of the `silent` experts, bool of shape (E,) by layer, as long as enough
    others are left (`SelectionRule.can_do_without`)."""
    return _selecting(model, lambda layer, rule, scores_TE: rule.select(scores_TE, silent[layer]))


def noisy(model: MoEModel, scale: float, seed: int) -> AbstractContextManager[None]:
    """Within the block, routers add noise of `scale` standard deviations of their scores to select experts."""
    generator = torch.Generator().manual_seed(seed)

    def with_noise(layer: int, rule: SelectionRule, scores_TE: Tensor) -> Tensor:
        noise_TE = torch.randn(scores_TE.shape, generator=generator).to(scores_TE)
        return rule.select(scores_TE + scale * scores_TE.std() * noise_TE)

    return _selecting(model, with_noise)


def widened(model: MoEModel, factor: int) -> AbstractContextManager[None]:
    """Within the block, every router selects `factor` times as many experts, at most all of the groups that it may
    choose."""

    def more(layer: int, rule: SelectionRule, scores_TE: Tensor) -> Tensor:
        most = model.num_experts // rule.num_groups * rule.chosen_groups
        return replace(rule, k=min(factor * rule.k, most)).select(scores_TE)

    return _selecting(model, more)


def _selecting(model: MoEModel, choose: Callable[[int, SelectionRule, Tensor], Tensor]) -> AbstractContextManager[None]:
    """Within the block, routers select the experts `choose(layer, rule, scores_TE)`, (T, any number), and weigh them by
    their own scores."""

    def select(layer: int, router: nn.Module, args, output) -> tuple[Tensor, Tensor, Tensor]:
        top_k_Tk = choose(layer, model.rule(layer), output[0])
        return output[0], model.family.weigh(router, output[0], top_k_Tk).to(output[1]), top_k_Tk

    return hooked(model.router(layer).register_forward_hook(partial(select, layer)) for layer in model.layers)
