"""In transformers' own `Trainer`."""

import pytest
import torch
from transformers import Trainer, TrainerState, TrainingArguments

import gripmoe
from conftest import random_batch, small_model
from gripmoe.geometry.routing import mean_stability, route, routing_stability
from gripmoe.moe import MoEModel

RETAIN = [random_batch(seed=100), random_batch(seed=101)]


def trained(tmp_path, model, callbacks, trainer=Trainer, **settings):
    documents = [{"input_ids": row, "labels": row} for row in random_batch(rows=8, length=10).input_ids]
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, **settings,
    )  # fmt: skip
    trainer(model, arguments, train_dataset=documents, callbacks=callbacks).train()


@pytest.mark.parametrize("held", [True, False])
def test_method_a(held, tmp_path):
    model = small_model()
    reference = MoEModel(model).trace(RETAIN)
    trained(tmp_path, model, [gripmoe.trainer_callback(RETAIN)] if held else [], max_steps=6, learning_rate=0.05)
    moe = MoEModel(model)
    moved = {layer: route(r.x_Nd, moe.theta(layer).detach(), moe.rule(layer)) for layer, r in reference.items()}
    assert (mean_stability(routing_stability(reference, moved)) == 1.0) == held


class Unlearner(Trainer):
    """Gradient difference under whatever method the callback holds."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        guard = next(c.guard for c in self.callback_handler.callbacks if hasattr(c, "guard"))
        batch = RETAIN[self.state.global_step % 2]
        with guard.retain():
            retain_loss = model(**batch.inputs, labels=batch.labels).loss
        guard.check(retain_loss)
        return retain_loss + guard.penalty() - model(**inputs).loss


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_anchor_holds_routing_that_a_frozen_router_loses(accumulated, tmp_path):
    stability, weights = {}, {}
    for method in ("frozen_router", "anchored"):
        model = small_model()
        original = MoEModel(model).trace(RETAIN)
        callback = gripmoe.trainer_callback(RETAIN, method=method, loss_bound=100.0)
        settings = dict(max_steps=40, learning_rate=3e-3, gradient_accumulation_steps=accumulated)
        trained(tmp_path, model, [callback], Unlearner, **settings)
        stability[method] = mean_stability(routing_stability(original, MoEModel(model).trace(RETAIN)))
        weights[method] = {p.requires_grad for p in model.parameters()}
    assert stability["anchored"] > stability["frozen_router"] + 0.1, stability
    assert weights["anchored"] == {True}, "and lets go"


def test_a_retain_loss_above_its_bound_ends_training(tmp_path):
    callback = gripmoe.trainer_callback(RETAIN, method="frozen_router", loss_bound=1.0)
    with pytest.raises(gripmoe.Diverged, match="retain loss .* above 1"):
        trained(tmp_path, small_model(), [callback], Unlearner, max_steps=4)


def test_a_resumed_trainer_is_refused():
    model = small_model()
    optimizer, callback = torch.optim.SGD(model.parameters()), gripmoe.trainer_callback(RETAIN)
    with pytest.raises(ValueError, match="resumes at step 4"):
        callback.on_train_begin(None, TrainerState(global_step=4), None, model=model, optimizer=optimizer)
