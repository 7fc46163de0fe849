"""In transformers' own `Trainer`, and one of TRL's."""

import copy
import shutil

import pytest
import torch
from transformers import Trainer, TrainingArguments

import gripmoe
from conftest import METHODS, random_batch, small_model
from gripmoe.constraints.hooks import ConstraintHandle, inner_optimizer
from gripmoe.geometry.routing import mean_stability, route, routing_stability
from gripmoe.moe import MoEModel

RETAIN = [random_batch(seed=100), random_batch(seed=101)]


def made(tmp_path, model, callbacks, trainer=Trainer, **settings):
    documents = [{"input_ids": row, "labels": row} for row in random_batch(rows=8, length=10).input_ids]
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, use_cpu=True, report_to=[], logging_strategy="no",
        disable_tqdm=True, **{"save_strategy": "no"} | settings,
    )  # fmt: skip
    return trainer(model, arguments, train_dataset=documents, eval_dataset=documents, callbacks=callbacks)


def trained(tmp_path, model, callbacks, trainer=Trainer, resume=None, late=None, **settings):
    trainer = made(tmp_path, model, callbacks, trainer, **settings)
    if late:
        trainer.add_callback(late)
    trainer.train(resume_from_checkpoint=resume)


@pytest.mark.parametrize("constrained", [True, False])
def test_method_a(constrained, tmp_path):
    model = small_model()
    trace = MoEModel(model).trace(RETAIN)
    trained(tmp_path, model, [gripmoe.trainer_callback(RETAIN)] if constrained else [], max_steps=6, learning_rate=0.05)
    moe = MoEModel(model)
    moved = {layer: route(r.x_Nd, moe.theta(layer).detach(), moe.rule(layer)) for layer, r in trace.items()}
    assert (mean_stability(routing_stability(trace, moved)) == 1.0) == constrained


@pytest.mark.parametrize("constrained", [True, False])
def test_method_a_in_preference_optimization(constrained, tmp_path, tokenizer):
    """TRL's DPO, with a second model that it compares with."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    model = small_model(vocabulary_size=len(tokenizer))
    words = [tokenizer.decode([n]) for n in range(5, 53)]
    columns = dict(zip(("prompt", "chosen", "rejected"), (words[:8], words[8:16], words[16:24]), strict=True))
    retain = [tokenizer([" ".join(words[24:])], return_tensors="pt")]
    original = MoEModel(model).trace(retain)
    arguments = trl.DPOConfig(
        str(tmp_path), per_device_train_batch_size=2, use_cpu=True, bf16=False, report_to=[], save_strategy="no",
        disable_tqdm=True, max_steps=4, learning_rate=0.05,
    )  # fmt: skip
    trl.DPOTrainer(
        model, copy.deepcopy(model), arguments, train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=tokenizer, callbacks=[gripmoe.trainer_callback(retain)] if constrained else [],
    ).train()  # fmt: skip
    moe = MoEModel(model)
    moved = {layer: route(r.x_Nd, moe.theta(layer).detach(), moe.rule(layer)) for layer, r in original.items()}
    assert (mean_stability(routing_stability(original, moved)) == 1.0) == constrained


class Unlearner(Trainer):
    """Gradient difference under the callback's method."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        handle = next(c.handle for c in self.callback_handler.callbacks if hasattr(c, "handle"))
        batch = RETAIN[self.state.global_step % 2]
        with handle.retain():
            retain_loss = model(**batch.inputs, labels=batch.labels).loss
        handle.check(retain_loss)
        loss = retain_loss + handle.penalty() - model(**inputs).loss
        return (loss, {}) if return_outputs else loss


def test_the_anchor_keeps_routing_that_a_frozen_router_loses(tmp_path):
    """With gradient accumulation; without it a script of notebooks/examples does the same."""
    stability, weights = {}, {}
    for method in ("frozen_router", "anchored"):
        model = small_model()
        original = MoEModel(model).trace(RETAIN)
        callback = gripmoe.trainer_callback(RETAIN, method=method, loss_bound=100.0)
        settings = dict(max_steps=40, learning_rate=3e-3, gradient_accumulation_steps=2)
        trained(tmp_path, model, [callback], Unlearner, **settings)
        stability[method] = mean_stability(routing_stability(original, MoEModel(model).trace(RETAIN)))
        weights[method] = {p.requires_grad for p in model.parameters()}
    assert stability["anchored"] > stability["frozen_router"] + 0.1, stability
    assert weights["anchored"] == {True}, "and frees them"


def test_a_retain_loss_above_its_bound_ends_training(tmp_path):
    callback = gripmoe.trainer_callback(RETAIN, method="frozen_router", loss_bound=1.0)
    with pytest.raises(gripmoe.Diverged, match="retain loss .* above 1"):
        trained(tmp_path, small_model(), [callback], Unlearner, max_steps=4)


class Failing(Unlearner):
    """Ends in an error at a step, if there is one."""

    step = None

    def compute_loss(self, *args, **kwargs):
        if self.state.global_step == self.step:
            raise RuntimeError("deliberate")
        return super().compute_loss(*args, **kwargs)


def failing(tmp_path, model, callback, step):
    trainer = made(tmp_path, model, [callback], Failing, max_steps=4, learning_rate=0.05)
    trainer.step = step
    with pytest.raises(RuntimeError, match="deliberate"):
        trainer.train()
    trainer.step = None
    return trainer


def hooks_on(model, optimizer):
    of_modules = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    return of_modules, len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


@pytest.mark.parametrize("method", ["expert_specific", "anchored_tracked"])
def test_a_training_that_ended_in_an_error_leaves_nothing_behind_once_it_is_closed(method, tmp_path):
    model = small_model()
    callback = gripmoe.trainer_callback(RETAIN, method=method)
    optimizer = inner_optimizer(failing(tmp_path, model, callback, step=2).optimizer)
    of_modules, of_optimizer = hooks_on(model, optimizer)
    assert of_modules and of_optimizer == 2, "the control"
    for _ in range(2):
        callback.handle.close()
        assert hooks_on(model, optimizer) == (0, 0) and not hasattr(model, "_constrained")
    gripmoe.constrain(model, optimizer, RETAIN, method=method).close()


def test_after_an_error_the_same_trainer_trains_once_more_and_holds_what_it_then_finds(tmp_path):
    model = small_model()
    callback = gripmoe.trainer_callback(RETAIN)
    trainer = failing(tmp_path, model, callback, step=2)
    failed, trace = callback.handle, MoEModel(model).trace(RETAIN)
    trainer.train()
    assert callback.handle is not failed and trainer.state.global_step == 4
    moe = MoEModel(model)
    moved = {layer: route(r.x_Nd, moe.theta(layer).detach(), moe.rule(layer)) for layer, r in trace.items()}
    assert mean_stability(routing_stability(trace, moved)) == 1.0
    moe.release()
    assert hooks_on(model, inner_optimizer(trainer.optimizer)) == (0, 0)


def test_a_training_that_cannot_begin_leaves_nothing_behind(tmp_path):
    model = small_model()
    callback = gripmoe.trainer_callback([])
    for _ in range(2):
        with pytest.raises(ValueError, match="nothing to trace"):
            trained(tmp_path, model, [callback], max_steps=1)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# Draws rows at random wherever a margin is exceeded, which with a wide one is in every step.
PAPER = METHODS["expert_specific_paper"].model_copy(update={"safety_margin": 1.0})
SAVED = dict(save_strategy="steps", save_steps=3, max_steps=6, learning_rate=1e-2)


def weights_after(tmp_path, method="expert_specific", dtype=torch.float32, resume=None, model=None, **settings):
    model = model or small_model().to(dtype)
    callback = gripmoe.trainer_callback(RETAIN, method=method)
    trained(tmp_path, model, [callback], Unlearner, resume=resume, **(SAVED | settings))
    return model.state_dict()


def equal(some, others):
    return all(torch.equal(some[name], others[name]) for name in others)


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("expert_specific", torch.bfloat16),
        (PAPER, torch.float32),
        ("anchored", torch.bfloat16),
        ("anchored_tracked", torch.bfloat16),
    ],
    ids=["sound", "paper", "anchored", "tracked"],
)
def test_training_resumes_where_it_was(method, dtype, tmp_path, monkeypatch):
    """To the bit, from a checkpoint of the trainer; the control is what a handle forgets without its state."""
    uninterrupted = weights_after(tmp_path, method, dtype)
    assert equal(weights_after(tmp_path, method, dtype, resume=f"{tmp_path}/checkpoint-3"), uninterrupted)
    monkeypatch.setattr(ConstraintHandle, "load_state_dict", lambda handle, state: None)
    forgetful = weights_after(tmp_path, method, dtype, resume=f"{tmp_path}/checkpoint-3")
    assert equal(forgetful, uninterrupted) == (method == "expert_specific"), "sound Method A has nothing to forget"


def test_how_often_one_evaluates_changes_nothing(tmp_path):
    """An evaluation computes the same loss, marks and all, without gradients. The control: it is computed."""
    losses = []

    class Evaluated(Unlearner):
        def compute_loss(self, *args, **kwargs):
            losses.append(torch.is_grad_enabled())
            return super().compute_loss(*args, **kwargs)

    weights = {}
    for strategy in ("no", "steps"):
        model = small_model()
        callback = gripmoe.trainer_callback(RETAIN, method="anchored_tracked")
        trained(tmp_path, model, [callback], Evaluated, max_steps=3, eval_strategy=strategy, eval_steps=1)
        weights[strategy] = model.state_dict()
    assert equal(weights["steps"], weights["no"]) and not all(losses)


def test_a_checkpoint_elsewhere_is_resumed_where_the_arguments_name_it(tmp_path):
    there, here, checkpoint = tmp_path / "there", tmp_path / "here", str(tmp_path / "there" / "checkpoint-3")
    uninterrupted = weights_after(there)
    named = weights_after(here, resume=checkpoint, resume_from_checkpoint=checkpoint)
    assert equal(named, uninterrupted)
    with pytest.raises(ValueError, match="is not known: .* named by `resume_from_checkpoint` of its arguments"):
        weights_after(tmp_path / "nowhere", resume=checkpoint)


def test_the_last_checkpoint_may_be_asked_for_as_such(tmp_path):
    uninterrupted = weights_after(tmp_path)
    shutil.rmtree(tmp_path / "checkpoint-6")
    assert equal(weights_after(tmp_path, resume=True, resume_from_checkpoint=True), uninterrupted)


def test_another_checkpoint_than_the_trainer_has_loaded_is_refused(tmp_path):
    """Both folders have the step; the trainer alone knows from which it goes on."""
    there, here = tmp_path / "there", tmp_path / "here"
    weights_after(there)
    weights_after(here, learning_rate=1e-4)
    with pytest.raises(ValueError, match=f"resumes from another checkpoint than {here}/checkpoint-3: .* is named by"):
        weights_after(here, resume=f"{there}/checkpoint-3", learning_rate=1e-4)


def test_what_cannot_be_resumed_is_refused(tmp_path):
    weights = weights_after(tmp_path)
    checkpoint = tmp_path / "checkpoint-3"
    already_trained = small_model()
    already_trained.load_state_dict(weights)
    with pytest.raises(ValueError, match="of another model, method or documents"):
        weights_after(tmp_path, resume=checkpoint, model=already_trained)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in already_trained.modules())
    with pytest.raises(ValueError, match="of another model, method or documents"):
        weights_after(tmp_path, "frozen_router", resume=checkpoint)
    late = gripmoe.trainer_callback(RETAIN)
    with pytest.raises(ValueError, match="resumes at step 3, and what the routers were before is not known"):
        trained(tmp_path, small_model(), [], resume=checkpoint, late=late, **SAVED)
    (checkpoint / "constraint_handle.pt").unlink()
    with pytest.raises(ValueError, match="does not hold the handle's state of that step"):
        weights_after(tmp_path, resume=checkpoint)
