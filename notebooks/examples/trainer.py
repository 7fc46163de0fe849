"""Method A in transformers' Trainer (and in TRL's trainers, which build on it): one callback."""

import tempfile

import torch
from transformers import Trainer, TrainingArguments

import gripmoe
from gripmoe.geometry.routing import mean_stability, route, stability_by_layer
from gripmoe.moe import MoEModel
from gripmoe.worlds.models import make_model

model = make_model("qwen3_moe", vocabulary_size=64, seed=0)
generator = torch.Generator().manual_seed(0)
documents, retain = (torch.randint(3, 64, (8, 16), generator=generator) for _ in range(2))
original = MoEModel(model).trace([{"input_ids": retain}])

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=5, learning_rate=1e-2, use_cpu=True, report_to=[], save_strategy="no"
    )
    Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in documents],
        callbacks=[gripmoe.trainer_callback([{"input_ids": retain}])],
    ).train()

moe = MoEModel(model)
now = {layer: route(seen.x_Nd, moe.theta(layer).detach(), moe.rule(layer)) for layer, seen in original.items()}
kept = mean_stability(stability_by_layer(original, now))
print(f"selections of the original retain inputs that the trained router keeps: {kept:.3f}")
