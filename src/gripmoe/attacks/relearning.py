"""Relearning: how fast a little finetuning brings the answers back, beside a model that never knew them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gripmoe.attacks.base import Found, QuestionSetting, Setting
from gripmoe.config.training import Relearning
from gripmoe.data.corpora import epoch_rows
from gripmoe.data.documents import Row, collate
from gripmoe.moe import MoEModel
from gripmoe.moe.modes import checkpointing, restored, train_only
from gripmoe.training.objectives import cross_entropy
from gripmoe.training.optimizers import make_adamw

RANK = 8  # of updates to experts that an attacker trains in the place of whole weights
LORA_RATE = 10.0  # their learning rate, as a multiple
WEIGHT_DECAY = 0.01  # of all that an attacker trains
Measured = TypeVar("Measured")


def from_other_facts(setting: QuestionSetting) -> Found:
    """`relearned_after_<step>`: on forget documents about the facts of dev questions; the sample asks about others."""
    return _curve(setting, "relearned", _about_dev_facts(setting))


def from_corpus(setting: QuestionSetting) -> Found:
    """`relearned_from_corpus_after_<step>`: on all forget documents, which may hold the answers. Empty for a benchmark
    whose documents name their facts."""
    if _about_dev_facts(setting):
        return Found()
    return _curve(setting, "relearned_from_corpus", setting.corpus("forget"))


def from_retain_documents(setting: Setting) -> Found:
    """`relearned_from_retain_after_<step>`: on documents that tell nothing about the answers."""
    return _curve(setting, "relearned_from_retain", setting.corpus("retain"))


def from_held_out_documents(setting: Setting) -> Found:
    """`relearned_from_held_out_after_<step>`: on held-out documents, which are other texts than those to
    retain."""
    return _curve(setting, "relearned_from_held_out", setting.corpus("held_out"))


def of_routers(setting: QuestionSetting) -> Found:
    """`relearned_routers_after_<step>`: on forget documents about other facts; only routers train."""
    model = setting.after
    routers = model.router_parameters()
    return _curve(setting, "relearned_routers", _about_dev_facts(setting), routers) if routers else Found()


def of_low_rank_experts(setting: QuestionSetting) -> Found:
    """`relearned_lora_after_<step>`: on forget documents about other facts; low-rank updates of experts train, which
    have ten times the rate."""
    if not setting.after.layers or not setting.finetuning:
        return Found()
    faster = setting.finetuning.model_copy(update={"learning_rate": LORA_RATE * setting.finetuning.learning_rate})
    with low_rank_experts(setting.after, RANK, setting.seed) as parameters:
        changed = replace(setting, finetuning=faster)
        return _curve(changed, "relearned_lora", _about_dev_facts(setting), parameters)


@contextmanager
def low_rank_experts(model: MoEModel, rank: int, seed: int) -> Iterator[list[nn.Parameter]]:
    """Within the block every fused expert matrix has an update of that rank beside it, zero at first (LoRA); gives the
    parameters of the updates."""
    generator, added = torch.Generator().manual_seed(seed), []
    modules = [model.block(layer).experts for layer in model.layers]
    order = {module: list(module._parameters) for module in modules}  # two models' parameters are compared in order
    try:
        for module in modules:
            for name, weight in list(module.named_parameters(recurse=False)):
                if weight.ndim == 3:
                    added.append((module, name, LowRankUpdate(weight, rank, generator)))
                    parametrize.register_parametrization(module, name, added[-1][-1])
        yield [parameter for *_, update in added for parameter in update.parameters()]
    finally:
        for module, name, _ in added:
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)
        for module, names in order.items():
            for name in names:
                module.register_parameter(name, module._parameters.pop(name))


class LowRankUpdate(nn.Module):
    """Adds the product of two factors in fp32, (E, m, r) and (E, r, n), to each expert's matrix. In bf16 the sum is
    rounded at random, up or down by how near each is: rounded to the nearest, many weights would not move at all."""

    def __init__(self, weight_Emn: Tensor, rank: int, generator: torch.Generator):
        super().__init__()
        experts, m, n = weight_Emn.shape
        right_Ern = torch.randn(experts, rank, n, generator=generator) / n**0.5
        self.right_Ern = nn.Parameter(right_Ern.to(weight_Emn.device))
        self.left_Emr = nn.Parameter(torch.zeros(experts, m, rank, device=weight_Emn.device))

    def forward(self, weight_Emn: Tensor) -> Tensor:
        sum_Emn = weight_Emn.float() + self.left_Emr @ self.right_Ern
        if weight_Emn.dtype == torch.bfloat16:
            sum_Emn = sum_Emn + (_to_bf16_at_random(sum_Emn.detach()) - sum_Emn.detach())  # gradients pass by
        return sum_Emn.to(weight_Emn.dtype)


def _to_bf16_at_random(values: Tensor) -> Tensor:
    """Values in fp32 that bf16 has, the mean of many being `values`: bf16 is the upper half of the bits of fp32."""
    bits = values.view(torch.int32)
    return (bits + torch.randint_like(bits, 1 << 16)).bitwise_and(-1 << 16).view(torch.float32)


def _about_dev_facts(setting: QuestionSetting) -> list[Row]:
    dev, test = ({question["fact"] for question in asked} for asked in (setting.dev, setting.forget))
    return [row for row in setting.corpus("forget") if is_about(row.id, dev, test)]


def is_about(document: str, facts: Collection[str], others: Collection[str]) -> bool:
    """Whether a document is about one of the facts. Its id begins with the fact: "fact/number", "fact/kind/number". If
    it also begins with one of the others, the longer one counts."""
    named = (document.rsplit("/", parts)[0] for parts in (1, 2))
    return next((fact in facts for fact in named if fact in facts or fact in others), False)


def _curve(setting: Setting, name: str, rows: Sequence[Row], parameters: Sequence[nn.Parameter] | None = None) -> Found:
    if not setting.finetuning or parameters == []:
        return Found()
    if len(rows) < setting.finetuning.batch_size:
        wanted = f"of {len(rows)} documents, a batch has {setting.finetuning.batch_size}"
        print(f"{name} is not measured: {wanted}", file=sys.stderr)
        return Found()
    given = dict(pad_id=setting.tokenizer.pad_token_id, seed=setting.seed, parameters=parameters)
    known = relearning(setting.after, rows, setting.scores_of, setting.finetuning, **given)
    return setting.found({f"{name}_after_{step}": scores for step, scores in known.items()})


def relearning(
    model: MoEModel,
    documents: Sequence[Row],
    scores_of: Callable[[MoEModel], Measured],
    settings: Relearning,
    *,
    checks: Sequence[int] | None = None,
    pad_id: int = 0,
    seed: int = 0,
    parameters: Sequence[nn.Parameter] | None = None,
) -> dict[int, Measured]:
    """`scores_of` before and after each number of steps in the settings, or at `checks`, of AdamW on `documents`, of
    `parameters` or of all. The model's weights are restored."""
    known, checks = {}, (0, *settings.steps) if checks is None else checks
    parameters = list(model.model.parameters() if parameters is None else parameters)
    with _training_only(model, parameters, settings.gradient_checkpointing):
        options = dict(lr=settings.learning_rate, weight_decay=WEIGHT_DECAY)
        optimizer = make_adamw(settings.optimizer, [{"params": parameters}], **options)
        for step in range(max(checks) + 1):
            if step in checks:
                model.model.eval()
                known[step] = scores_of(model)
            if step < max(checks):
                torch.manual_seed(1_000_000 * seed + step)  # of dropout and stochastic rounding
                model.model.train()
                optimizer.zero_grad()
                batch = collate(epoch_rows(documents, settings.batch_size, seed, step), pad_id)
                with model.unpadded():
                    cross_entropy(model, batch.to(model.model.device)).backward()
                optimizer.step()
    return known


@contextmanager
def _training_only(model: MoEModel, parameters: Sequence[nn.Parameter], gradient_checkpointing: bool) -> Iterator[None]:
    """Within the block `parameters` train, and no others. Afterwards weights, gradients and what trains are as they
    were."""
    before = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.model.parameters()]
    for parameter in train_only(model.model, parameters):
        parameter.grad = None
    try:
        with restored(parameters, device="cpu"), checkpointing(model.model, gradient_checkpointing):
            yield
    finally:
        model.model.eval()
        for parameter, requires_grad, grad in before:
            parameter.grad = grad
            parameter.requires_grad_(requires_grad)
