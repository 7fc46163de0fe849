"""open-unlearning's trainers as a stand-in: their class takes no callbacks, and makes both passes in `compute_loss`."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from conftest import random_batch, small_model
from gripmoe.geometry.routing import mean_stability, route, stability_by_layer
from gripmoe.library.open_unlearning import Constrained
from gripmoe.moe import MoEModel


class ForgetAndRetain(torch.utils.data.Dataset):
    def __init__(self, forget, retain):
        self.forget, self.retain = forget, retain

    def __len__(self):
        return len(self.forget)

    def __getitem__(self, number):
        return {"forget": self.forget[number], "retain": self.retain[number % len(self.retain)]}


class GradientDifference(Trainer):
    alpha = 2.0

    def compute_retain_loss(self, model, retain_inputs):
        return model(**retain_inputs).loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = -model(**inputs["forget"]).loss
        return loss + self.alpha * self.compute_retain_loss(model=model, retain_inputs=inputs["retain"])


def collate(rows):
    if "forget" in rows[0]:
        return {part: collate([row[part] for row in rows]) for part in ("forget", "retain")}
    padded = {name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True) for name in rows[0]}
    return padded | {"labels": padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100)}


def documents(seed):
    batch = random_batch(rows=6, seed=seed)
    lengths = batch.attention_mask.sum(dim=1)
    return [
        {"input_ids": row[:n], "attention_mask": torch.ones(n, dtype=torch.long)}
        for row, n in zip(batch.input_ids, lengths, strict=True)
    ]


def train(tmp_path, callback=None, retain=None):
    """As Hydra runs a job. Returns the trainer, and how many recorded sets the trained routers keep."""
    data = ForgetAndRetain(documents(0), documents(1) if retain is None else retain)
    model = small_model()
    original = MoEModel(model).trace([{k: v for k, v in collate(documents(1)).items() if k != "labels"}])
    arguments = TrainingArguments(
        str(tmp_path), max_steps=3, learning_rate=0.05, per_device_train_batch_size=4, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    if callback:
        callback.on_run_start(config=None)
        callback.on_job_start(config=None, task_function=None)
    try:
        trainer = GradientDifference(model, arguments, train_dataset=data, data_collator=collate)
        trainer.train()
    finally:
        if callback:
            callback.on_job_end(config=None, job_return=None)
    moe = MoEModel(model)
    now = {layer: route(seen.x_Nd, moe.theta(layer).detach(), moe.rule(layer)) for layer, seen in original.items()}
    return trainer, mean_stability(stability_by_layer(original, now))


def test_a_weight_of_zero_would_remove_the_penalty_and_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(GradientDifference, "alpha", 0.0)
    with pytest.raises(ValueError, match="alpha: 0 scales the penalty of the constraint away"):
        train(tmp_path, Constrained(method="anchored"))
    for method in ("expert_specific", "expert_specific_paper"):  # without a penalty, and the second has marks
        trainer, _ = train(tmp_path, Constrained(method=method))
        assert trainer.state.global_step == 3


def test_a_job_is_constrained_and_nothing_stays_behind(tmp_path):
    made = Trainer.__init__
    trainer, kept = train(tmp_path, Constrained())
    assert kept == 1.0 and trainer.state.global_step == 3
    assert Trainer.__init__ is made
    _, kept = train(tmp_path)
    assert kept < 0.95, "the control: a job without the callback"


def test_methods_with_a_mark_and_a_penalty_run(tmp_path, monkeypatch):
    trainer, kept = train(tmp_path, Constrained(method="anchored", rows=6))
    assert kept == 1.0 and trainer.constraint.handle.constraint.observed()["anchor_weight"] > 0
    monkeypatch.delattr(GradientDifference, "compute_retain_loss")
    monkeypatch.setattr(
        GradientDifference, "compute_loss", lambda s, model, inputs, **_: model(**inputs["retain"]).loss
    )
    with pytest.raises(RuntimeError, match="looks at the retain forward"):
        train(tmp_path, Constrained(method="anchored"))


def test_the_penalty_is_not_weighed(tmp_path, monkeypatch):
    trainer, _ = train(tmp_path, Constrained())
    monkeypatch.setattr(trainer.constraint.handle, "penalty", lambda: 8.0)
    inputs = collate(documents(1))
    plain = trainer.model(**inputs).loss
    assert trainer.compute_retain_loss(trainer.model, inputs).item() == pytest.approx(plain.item() + 4)


def test_data_without_a_retain_part_are_refused(tmp_path):
    with pytest.raises(ValueError, match="without a `retain` part"):
        train(tmp_path, Constrained(), retain=[])
    with pytest.raises(AttributeError):
        Constrained().unknown  # noqa: B018
