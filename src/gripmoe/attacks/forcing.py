"""Adversarial expert forcing (App. E, Alg. 2): the unlearned model with the expert sets of the original router.

The original model runs in lock-step on the same tokens, and gives the expert sets of every token of every prompt.
`gripmoe.moe.forcing` makes a model use them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from gripmoe.attacks.base import Found, NewsSetting, QuestionScores, QuestionSetting, mean
from gripmoe.evaluation.muse import news_scores
from gripmoe.evaluation.questions import question_batches
from gripmoe.geometry.routing import jaccard
from gripmoe.moe import MoEModel
from gripmoe.moe.forcing import Routes
from gripmoe.moe.random_routing import random_sets
from gripmoe.moe.recording import counted_tokens

SHIFTED_BELOW = 0.999  # the routing of a prompt counts as shifted below this mean Jaccard similarity


def expert_forcing(setting: QuestionSetting) -> Found:
    """Accuracy under forcing on all forget questions, and what it recovers.

    `recovery_rate`: forced minus normal accuracy. `recovery_rate_paper`: forced accuracy on questions whose routing
    shifted, minus normal accuracy on all questions (as in the paper). Controls: the original gate weights forced too,
    random sets, and forced retain accuracy.
    """
    before, after, forget = setting.before, setting.after, setting.forget
    if not after.layers:
        return Found()
    with before.brought_beside(after):
        with after.force_routing(before.routes):
            forced = setting.right(after, forget)
            forced_retain = setting.right(after, setting.retain)
        with after.force_routing(before.weighted_routes):
            recorded_weights = setting.right(after, forget)
        with after.force_routing(random_sets(after, setting.seed)):
            random_forced = setting.right(after, forget)
        agreement = prompt_agreement(before, after, setting.tokenizer, forget)

    own, ids = QuestionScores(setting.own_answers), [question["id"] for question in forget]
    shifted = [number for number, name in enumerate(ids) if agreement[name] < SHIFTED_BELOW]
    return Found.over(
        ids,
        {
            "forced_forget_accuracy": forced,
            "forced_with_recorded_weights": recorded_weights,
            "random_forced_forget_accuracy": random_forced,
        },
        recovery_rate=mean(forced) - mean(own),
        recovery_rate_paper=mean([forced[number] for number in shifted]) - mean(own),
        num_shifted=len(shifted),
        wrong_to_right=sum(b > a for a, b in zip(own, forced, strict=True)),
        right_to_wrong=sum(b < a for a, b in zip(own, forced, strict=True)),
        forced_retain_accuracy=mean(forced_retain),
    )


@torch.no_grad()
def prompt_agreement(before: MoEModel, after: MoEModel, tokenizer, questions: Sequence[dict]) -> dict[str, float]:
    """By question id: the Jaccard similarity of the two models' expert sets, mean over the prompt's tokens and all
    layers."""
    agreement: dict[str, float] = {}
    for batch in question_batches(tokenizer, questions, after.model.device):
        routes_before, routes_after = before.routes(batch.input_ids), after.routes(batch.input_ids)
        per_token = torch.stack([jaccard(routes_before[layer], routes_after[layer]) for layer in after.layers])
        per_position = per_token.mean(dim=0).view(batch.input_ids.shape)
        counted = counted_tokens(batch.attention_mask).view(batch.input_ids.shape)
        means = (per_position * counted).sum(dim=1) / counted.sum(dim=1)
        agreement.update(zip(batch.row_ids, means.tolist(), strict=True))
    return agreement


class LockStep:
    """Routes for `force_routing` while a model generates: the sets that another model selects on the same tokens, with
    its own cache. A pass over several tokens begins a new batch; a pass over one token continues the batch."""

    def __init__(self, model: MoEModel):
        self._model = model
        self._cache: DynamicCache | None = None

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Routes:
        rows, width = input_ids.shape
        if self._cache is None or width > 1:
            self._cache = DynamicCache(config=self._model.model.config)
        if attention_mask is None:  # transformers leaves it out without padding
            attention_mask = input_ids.new_ones(rows, self._cache.get_seq_length() + width)
        with self._model.record_routing() as recorder:
            self._model.model.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=(attention_mask.cumsum(dim=-1) - 1).clamp_min(0)[:, -width:],
                past_key_values=self._cache,
            )
            return {layer: seen.top_k_Nk for layer, seen in recorder.take().items()}


def news_attack(setting: NewsSetting) -> Found:
    """Expert forcing during generation, on every test item of VerbMem and KnowMem."""
    if not setting.after.layers:
        return Found()

    def scores(model: MoEModel) -> dict[str, dict[str, float]]:
        return news_scores(model.model, setting.tokenizer, setting.news, "test", retain=False)

    with setting.before.brought_beside(setting.after):
        return generation_forcing(setting.before, setting.after, scores, seed=setting.seed)


def generation_forcing(
    before: MoEModel, after: MoEModel, scores: Callable[[MoEModel], dict[str, dict[str, float]]], *, seed: int
) -> Found:
    """`forced_<name>` for each name of `scores`, with the original model in lock-step. The control:
    `random_forced_<name>` with random sets."""
    runs = {}
    with after.force_routing(LockStep(before)):
        runs["forced"] = scores(after)
    with after.force_routing(random_sets(after, seed)):
        runs["random_forced"] = scores(after)
    by_id = {f"{run}_{name}": items for run, found in runs.items() for name, items in found.items()}
    return Found({name: mean(list(items.values())) for name, items in by_id.items()}, by_id)
