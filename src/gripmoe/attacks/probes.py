"""Linear probes: do hidden states reveal the right letter, whatever the model answers?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gripmoe.attacks.base import Found, QuestionSetting, Scores, highest
from gripmoe.attacks.restoration import most_used_experts
from gripmoe.data.documents import Batch
from gripmoe.evaluation.questions import question_batches
from gripmoe.moe import MoEModel
from gripmoe.moe.states import router_states

INVERSE_PENALTY = 0.01  # of the ridge
PROBED_EXPERTS = 16  # per layer: the experts that forget prompts use most


def layers_attack(setting: QuestionSetting) -> Found:
    return setting.found(probes(setting.after, setting.tokenizer, setting.dev, setting.sample))


def experts_attack(setting: QuestionSetting) -> Found:
    if not setting.after.layers:
        return Found()
    with setting.before.brought_beside(setting.after):
        experts = most_used_experts(setting.before, setting.tokenizer, setting.prompts, PROBED_EXPERTS)
        found = expert_probes(setting.after, setting.tokenizer, setting.dev, setting.sample, experts)
        return setting.found(found, probe_best_expert_tried=sum(map(len, experts.values())))


def probes(model: MoEModel, tokenizer, fitted_on: Sequence[dict], questions: Sequence[dict]) -> dict[str, Scores]:
    """Scores on `questions` of a logistic regression that predicts the right letter from a layer's hidden state at the
    last prompt token, for each layer and for the best one. It is fitted on `fitted_on`, questions about other facts."""
    states, asked = (last_states(model, tokenizer, rows) for rows in (fitted_on, questions))
    found = {
        f"probe_layer_{layer}": _right(states[:, layer], fitted_on, asked[:, layer], questions)
        for layer in range(states.shape[1])
    }
    return found | {"probe_best_layer": highest(found.values())}


def expert_probes(
    model: MoEModel,
    tokenizer,
    fitted_on: Sequence[dict],
    questions: Sequence[dict],
    experts: Mapping[int, Sequence[int]],
) -> dict[str, Scores]:
    """`probes` on the outputs of single `experts` (by layer) for the last token, selected or not: the best expert of
    each layer and of all layers. The best of many probes exceeds chance by luck, also in a model that never knew."""
    states, asked = (last_router_inputs(model, tokenizer, rows) for rows in (fitted_on, questions))

    def scores(layer: int, position: int) -> Iterator[Scores]:
        for expert in experts[layer]:
            made, made_asked = (
                model.expert_output(layer, expert, torch.from_numpy(x[:, position])) for x in (states, asked)
            )
            yield _right(made.cpu().numpy(), fitted_on, made_asked.cpu().numpy(), questions)

    found = {
        f"probe_expert_layer_{layer}": highest(scores(layer, position))
        for position, layer in enumerate(model.layers)
        if layer in experts
    }
    return found | {"probe_best_expert": highest(found.values())}


def last_states(model: MoEModel, tokenizer, questions: Sequence[dict]) -> np.ndarray:
    """Hidden states at the last token of each prompt, (questions, L + 1, d); the first entry is the embedding. Where
    layers return several streams of states, d is the length of all together, and zeros fill up a shorter state."""

    def states(batch: Batch) -> Tensor:
        output = model.model.model(**batch.inputs, output_hidden_states=True)
        of_layers = [state.to(batch.input_ids.device).flatten(2) for state in output.hidden_states]
        width = max(state.shape[-1] for state in of_layers)
        return torch.stack([F.pad(state, (0, width - state.shape[-1])) for state in of_layers], dim=2)

    return _at_last_tokens(model, tokenizer, questions, states)


def last_router_inputs(model: MoEModel, tokenizer, questions: Sequence[dict]) -> np.ndarray:
    """Router inputs at the last token of each prompt, (questions, MoE layers, d)."""
    return _at_last_tokens(model, tokenizer, questions, lambda batch: router_states(model, batch, "x_Nd"))


@torch.no_grad()
def _at_last_tokens(model: MoEModel, tokenizer, questions: Sequence[dict], states) -> np.ndarray:
    """`states(batch)`, (rows, positions, ...), at the last token of each prompt, in the order of the questions."""
    found = {}
    for batch in question_batches(tokenizer, questions, model.model.device):
        last = batch.attention_mask.sum(dim=1) - 1
        at_last = states(batch)[torch.arange(len(last)), last]
        found.update(zip(batch.row_ids, at_last.float().cpu().numpy(), strict=True))
    return np.stack([found[question["id"]] for question in questions])


def _right(states: np.ndarray, fitted_on: Sequence[dict], asked: np.ndarray, questions: Sequence[dict]) -> Scores:
    # The import takes two seconds, and only the probes need it.
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    probe = make_pipeline(StandardScaler(), LogisticRegression(C=INVERSE_PENALTY, max_iter=500))
    states, asked = (np.nan_to_num(each, posinf=0.0, neginf=0.0) for each in (states, asked))  # a run may diverge
    probe.fit(states, [question["answer"] for question in fitted_on])
    return (probe.predict(asked) == [question["answer"] for question in questions]).tolist()
