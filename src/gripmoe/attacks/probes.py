"""Linear probes: can the right letter be read off the hidden states, whatever the model answers?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from gripmoe.data.documents import collate, encode, length_buckets
from gripmoe.evaluation.choice import prompt_of
from gripmoe.moe import MoEModel


@torch.no_grad()
def last_states(model: MoEModel, tokenizer, questions: Sequence[dict]) -> np.ndarray:
    """What every layer sends out at the last token of each prompt, (questions, L + 1, d); the first entry is the
    embedding."""
    rows = [encode(tokenizer, [(prompt_of(question), False)], question["id"]) for question in questions]
    states = {}
    for bucket in length_buckets(rows, 4000):
        batch = collate(bucket, tokenizer.pad_token_id).to(model.model.device)
        output = model.model.model(**batch.inputs, output_hidden_states=True)
        last = batch.attention_mask.sum(dim=1) - 1
        stacked = torch.stack(output.hidden_states, dim=2)[torch.arange(len(bucket)), last]
        states.update(zip(batch.row_ids, stacked.float().cpu().numpy(), strict=True))
    return np.stack([states[question["id"]] for question in questions])


def probes(
    model: MoEModel, tokenizer, fitted_on: Sequence[dict], questions: Sequence[dict], *, strength: float = 0.01
) -> dict[str, float]:
    """Accuracy of a logistic regression from each layer's last state to the right letter, fitted on `fitted_on` and
    asked about `questions`, which are about other facts; and the best layer's."""
    states, wanted = last_states(model, tokenizer, fitted_on), [question["answer"] for question in fitted_on]
    asked, right = last_states(model, tokenizer, questions), [question["answer"] for question in questions]
    metrics = {}
    for layer in range(states.shape[1]):
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=500))
        metrics[f"probe_layer_{layer}"] = float(probe.fit(states[:, layer], wanted).score(asked[:, layer], right))
    metrics["probe_best_layer"] = max(metrics.values())
    return metrics
