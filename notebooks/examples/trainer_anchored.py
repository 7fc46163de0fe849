"""Ours in transformers' Trainer: a callback, and a `compute_loss` that marks the retain pass and adds the penalty."""

import tempfile

import torch
from transformers import Trainer, TrainingArguments

import gripmoe
from gripmoe.worlds.models import make_model

generator = torch.Generator().manual_seed(0)
forget, retain = (torch.randint(3, 64, (8, 16), generator=generator) for _ in range(2))


class Unlearner(Trainer):
    """Gradient difference: down on the retain documents, up on the trainer's own, which are to be forgotten."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with callback.handle.retain():
            retain_loss = model(input_ids=retain, labels=retain).loss
        return retain_loss + callback.handle.penalty() - model(**inputs).loss


for method in ("frozen_router", "anchored"):
    model = make_model("qwen3_moe", vocabulary_size=64, seed=0)
    before = gripmoe.routed_experts(model, retain)
    callback = gripmoe.trainer_callback([{"input_ids": retain}], method=method)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=40, learning_rate=1e-3, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
        )
        documents = [{"input_ids": row, "labels": row} for row in forget]
        Unlearner(model, arguments, train_dataset=documents, callbacks=[callback]).train()
    kept = gripmoe.routing_stability(before, gripmoe.routed_experts(model, retain))
    print(f"routing stability on the retain documents, {method}: {kept:.3f}")
