"""Adversarial expert forcing (App. E, Alg. 2): the unlearned model under the expert sets of the original router.

The original model runs in lock-step on the same tokens, so every token of every prompt has its recorded set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from gripmoe.attacks.scores import Found, Scores, mean
from gripmoe.data.documents import collate, encode, length_buckets
from gripmoe.evaluation.muse import Scored
from gripmoe.evaluation.questions import Answer, prompt_of
from gripmoe.geometry.routing import jaccard
from gripmoe.moe import MoEModel
from gripmoe.moe.model import Routes
from gripmoe.moe.random_routing import random_sets
from gripmoe.moe.recording import routed_tokens

AnswerAll = Callable[[MoEModel, Sequence[dict]], list[Answer]]


def expert_forcing(
    before: MoEModel,
    after: MoEModel,
    tokenizer,
    forget: Sequence[dict],
    retain: Sequence[dict],
    normal: Sequence[Answer],
    answer_all: AnswerAll,
    control_answers: AnswerAll,
    *,
    shifted_below: float = 0.999,
    seed: int = 0,
) -> Found:
    """Forces the original sets on the unlearned model and measures what comes back.

    `normal` are the unlearned model's own answers to `forget`. `answer_all` asks a model (the harness, for what is
    reported), `control_answers` asks it more cheaply. Reported: accuracy under forcing over all forget questions and
    over those whose routing shifted (mean Jaccard similarity over prompt tokens and layers below `shifted_below`), as
    the paper defines recovery (forced accuracy on the shifted subset minus normal accuracy on all) and on equal
    questions; what forcing turns right and what it turns wrong; accuracy with the original gate weights too. Controls:
    the original model forced with its own sets (a no-op), random sets, and forced retain accuracy.
    """
    with after.force_routing(before.routes):
        forced = answer_all(after, forget)
        forced_retain = control_answers(after, retain)
    with after.force_routing(before.weighted_routes):
        recorded_weights = control_answers(after, forget)
    with after.force_routing(random_sets(after, seed)):
        random_forced = control_answers(after, forget)
    original = control_answers(before, forget)
    with before.force_routing(before.routes):
        original_forced = control_answers(before, forget)

    agreement = prompt_agreement(before, after, tokenizer, forget)
    ids = [question["id"] for question in forget]
    shifted = [number for number, name in enumerate(ids) if agreement[name] < shifted_below]
    own, under_force = _right(normal), _right(forced)
    recovered = mean([under_force[number] for number in shifted])
    return Found.over(
        ids,
        {
            "forget_accuracy": own,
            "forced_forget_accuracy": under_force,
            "forced_with_recorded_weights": _right(recorded_weights),
            "random_forced_forget_accuracy": _right(random_forced),
            "original_forget_accuracy": _right(original),
            "original_forced_with_own_sets": _right(original_forced),
            "set_agreement": [agreement[name] for name in ids],
        },
        recovery_rate=mean(under_force) - mean(own),
        adversarial_recovery_rate=recovered,
        recovery_rate_paper=recovered - mean(own),
        recovery_rate_shifted=recovered - mean([own[number] for number in shifted]),
        num_questions=len(ids),
        num_shifted=len(shifted),
        wrong_to_right=sum(b > a for a, b in zip(own, under_force, strict=True)),
        right_to_wrong=sum(b < a for a, b in zip(own, under_force, strict=True)),
        forced_retain_accuracy=mean(_right(forced_retain)),
        own_sets_change_answers=sum(a != b for a, b in zip(original, original_forced, strict=True)),
    )


def _right(answers: Sequence[Answer]) -> Scores:
    return [float(answer.correct) for answer in answers]


class LockStep:
    """For `force_routing` while a model generates: the sets that another model selects on the same tokens, pass by
    pass, with a cache of its own. A pass over several tokens begins a new batch of texts, one token continues it."""

    def __init__(self, model: MoEModel):
        self._model = model
        self._cache: DynamicCache | None = None

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Routes:
        rows, width = input_ids.shape
        if self._cache is None or width > 1:
            self._cache = DynamicCache(config=self._model.model.config)
        if attention_mask is None:  # transformers leaves it out where nothing is padded
            attention_mask = input_ids.new_ones(rows, self._cache.get_seq_length() + width)
        with self._model.record_routing() as recorder:
            self._model.model.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=(attention_mask.cumsum(dim=-1) - 1).clamp_min(0)[:, -width:],
                past_key_values=self._cache,
            )
            return {layer: seen.top_k_Nk for layer, seen in recorder.take().items()}


def generation_forcing(
    before: MoEModel, after: MoEModel, scores: Callable[[MoEModel], dict[str, list[Scored]]], *, seed: int = 0
) -> Found:
    """Expert forcing while the unlearned model writes, the original model in lock-step. `scores` measures a model by
    what it generates. Found are `forced_<name>`; `random_forced_<name>` under random sets; and as controls
    `original_<name>` and, forced with its own sets, `original_forced_<name>`."""
    runs = {}
    with after.force_routing(LockStep(before)):
        runs["forced"] = scores(after)
    with after.force_routing(random_sets(after, seed)):
        runs["random_forced"] = scores(after)
    runs["original"] = scores(before)
    with before.force_routing(LockStep(before)):
        runs["original_forced"] = scores(before)
    by_id = {
        f"{run}_{name}": {item.id: item.score for item in items}
        for run, found in runs.items()
        for name, items in found.items()
    }
    return Found({name: mean(list(items.values())) for name, items in by_id.items()}, by_id)


@torch.no_grad()
def prompt_agreement(before: MoEModel, after: MoEModel, tokenizer, questions: Sequence[dict]) -> dict[str, float]:
    """Mean Jaccard similarity of the two models' own sets over a prompt's tokens and all layers, by question id."""
    rows = [encode(tokenizer, [(prompt_of(question), False)], question["id"]) for question in questions]
    agreement: dict[str, float] = {}
    for bucket in length_buckets(rows, 4000):
        batch = collate(bucket, tokenizer.pad_token_id).to(after.model.device)
        routes_before, routes_after = before.routes(batch.input_ids), after.routes(batch.input_ids)
        per_token = torch.stack([jaccard(routes_before[layer], routes_after[layer]) for layer in after.layers])
        per_position = per_token.mean(dim=0).view(batch.input_ids.shape)
        counted = routed_tokens(batch.attention_mask).view(batch.input_ids.shape)
        means = (per_position * counted).sum(dim=1) / counted.sum(dim=1)
        agreement.update(zip(batch.row_ids, means.tolist(), strict=True))
    return agreement
