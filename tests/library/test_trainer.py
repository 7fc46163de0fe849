"""In transformers' own `Trainer`, and one of TRL's."""

import copy
import shutil
import warnings
from types import SimpleNamespace

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer, TrainingArguments

import gripmoe
from conftest import METHODS, random_batch, small_model
from gripmoe.constraints.hooks import ConstraintHandle, inner_optimizer
from gripmoe.geometry.routing import mean_stability, route, stability_by_layer
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


def recorded(model):
    """The routing of RETAIN; leaves nothing on the model."""
    moe = MoEModel(model)
    trace = moe.trace(RETAIN)
    moe.release()
    return trace


def kept(trace, model):
    """The share of original selections that the routers alone keep on their original inputs."""
    moe = MoEModel(model)
    moved = {layer: route(r.x_Nd, moe.theta(layer).detach(), moe.rule(layer)) for layer, r in trace.items()}
    moe.release()
    return mean_stability(stability_by_layer(trace, moved))


@pytest.mark.parametrize("constrained", [True, False])
def test_method_a(constrained, tmp_path):
    model = small_model()
    trace = recorded(model)
    trained(tmp_path, model, [gripmoe.trainer_callback(RETAIN)] if constrained else [], max_steps=6, learning_rate=0.05)
    assert (kept(trace, model) == 1.0) == constrained


def trl_trainer(kind, folder, model, tokenizer, callbacks, trainer=None, **settings):
    """TRL's DPO, with a second model that it compares with, or its finetuning."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    words = [tokenizer.decode([n]) for n in range(5, 29)]
    sft = kind == "SFT"
    names = ("text",) if sft else ("prompt", "chosen", "rejected")
    columns = dict(zip(names, (words[:8], words[8:16], words[16:]), strict=False))
    if sft:
        columns["text"] = [f"{a} {b} {c}" for a, b, c in zip(words[:8], words[8:16], words[16:], strict=True)]
    arguments = (trl.SFTConfig if sft else trl.DPOConfig)(
        str(folder), per_device_train_batch_size=2, use_cpu=True, bf16=False, report_to=[], save_strategy="no",
        disable_tqdm=True, **settings,
    )  # fmt: skip
    models = [model] if sft else [model, copy.deepcopy(model)]
    trainer = trainer or (trl.SFTTrainer if sft else trl.DPOTrainer)
    dataset = datasets.Dataset.from_dict(columns)
    return trainer(*models, arguments, train_dataset=dataset, processing_class=tokenizer, callbacks=callbacks)


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
@pytest.mark.parametrize("constrained", [True, False])
def test_method_a_in_trainers_of_trl(constrained, kind, tmp_path, tokenizer):
    """Texts are read by the trainer's own tokenizer."""
    model = small_model(vocabulary_size=len(tokenizer))
    texts = [" ".join(tokenizer.decode([n]) for n in range(29, 53))]
    original = MoEModel(model).trace([tokenizer(texts, return_tensors="pt")])
    callbacks = [gripmoe.trainer_callback(texts)] if constrained else []
    settings = dict(max_steps=4, learning_rate=0.05, router_aux_loss_coef=0.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "training adds the load-balancing loss")
        trl_trainer(kind, tmp_path, model, tokenizer, callbacks, **settings).train()
    assert (kept(original, model) == 1.0) == constrained


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_the_load_balancing_loss_of_trl_is_told_once(kind, tmp_path, tokenizer):
    """TRL adds it unless told otherwise; the test above has it off."""
    model = small_model(vocabulary_size=len(tokenizer))
    callback = gripmoe.trainer_callback([random_batch()])
    trainer = trl_trainer(kind, tmp_path, model, tokenizer, [callback], max_steps=1)
    with warnings.catch_warnings(record=True, action="always") as seen:
        trainer.train()
        trainer.train()
    said = [str(warning.message) for warning in seen if "load-balancing" in str(warning.message)]
    assert len(said) == 1 and "(router_aux_loss_coef 0.001)" in said[0]
    assert model.config.output_router_logits == (kind == "SFT"), "which TRL leaves behind"


def test_a_model_that_adds_the_load_balancing_loss_warns():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.config.output_router_logits = True
    with pytest.warns(UserWarning, match="load-balancing loss .* `model.config.output_router_logits = False`") as seen:
        gripmoe.constrain(model, optimizer, RETAIN).close()
    assert [warning.filename for warning in seen] == [__file__]
    model.config.output_router_logits = False
    with warnings.catch_warnings(action="error"):
        gripmoe.constrain(model, optimizer, RETAIN).close()


def test_the_anchor_in_a_trainer_of_trl(tmp_path, tokenizer):
    """Marks and penalty in an SFTTrainer of one's own; the control is a frozen router."""
    trl = pytest.importorskip("trl")
    retain = random_batch()

    class Anchored(trl.SFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            handle = next(c.handle for c in self.callback_handler.callbacks if hasattr(c, "handle"))
            with handle.retain():
                loss = model(**retain.inputs, labels=retain.labels).loss
            return loss + handle.penalty() - super().compute_loss(model, inputs, *args, **kwargs)

    stability = {}
    for method in ("frozen_router", "anchored"):
        model = small_model(vocabulary_size=len(tokenizer))
        original = MoEModel(model).trace([retain])
        callback = gripmoe.trainer_callback([retain], method=method)
        settings = dict(max_steps=30, learning_rate=3e-3, router_aux_loss_coef=0.0)
        trl_trainer("SFT", tmp_path, model, tokenizer, [callback], trainer=Anchored, **settings).train()
        stability[method] = mean_stability(stability_by_layer(original, MoEModel(model).trace([retain])))
    assert stability["anchored"] > stability["frozen_router"] + 0.1, stability


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
        stability[method] = mean_stability(stability_by_layer(original, MoEModel(model).trace(RETAIN)))
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


@pytest.mark.parametrize("method", ["expert_specific", "anchored"])
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


@pytest.mark.parametrize("method", ["expert_specific", "anchored", "router_l2_single"])
def test_after_an_error_the_same_trainer_keeps_to_the_first_original(method, tmp_path):
    """And to what trains: "router_l2_single" trains one expert."""
    model = small_model()
    trace, experts = recorded(model), model.model.layers[0].mlp.experts.down_proj.detach().clone()
    callback = gripmoe.trainer_callback(RETAIN, method=method, forget=[random_batch()])
    trainer = failing(tmp_path, model, callback, step=2)
    failed = callback.handle
    trainer.train()
    assert callback.handle is not failed and callback.handle.constraint is failed.constraint
    assert trainer.state.global_step == 4 and all(p.requires_grad for p in model.parameters())
    assert hooks_on(model, inner_optimizer(trainer.optimizer)) == (0, 0)
    changed = (model.model.layers[0].mlp.experts.down_proj != experts).any(dim=-1).any(dim=-1)
    if method == "router_l2_single":
        assert changed.sum() <= 1
    else:
        assert kept(trace, model) == 1.0 and changed.sum() > 1


@pytest.mark.parametrize("again", [True, False])
def test_a_second_training_keeps_to_the_first_original(again, tmp_path):
    """The control: a new callback takes the trained model for the original."""
    model = small_model()
    trace = recorded(model)
    callback = gripmoe.trainer_callback(RETAIN)
    trainer = made(tmp_path, model, [callback], max_steps=4, learning_rate=0.05)
    trainer.train()
    assert kept(trace, model) == 1.0
    if not again:
        trainer = made(tmp_path, model, [gripmoe.trainer_callback(RETAIN)], max_steps=4, learning_rate=0.05)
    trainer.train()
    assert (kept(trace, model) == 1.0) == again


class OutOfMemory(Trainer):
    """Runs out of memory once."""

    step = 3

    def compute_loss(self, *args, **kwargs):
        if self.state.global_step == self.step:
            self.step = None
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize("again", [True, False])
def test_a_batch_size_that_is_found_keeps_to_the_original(again, tmp_path, monkeypatch):
    """The control: what happens to a callback that constrains anew."""
    if not again:
        constrain_again = "gripmoe.library.trainer.constrain_again"
        monkeypatch.setattr(constrain_again, lambda h, *to: h.close() or gripmoe.constrain(*to, RETAIN))
    model = small_model()
    trace = recorded(model)
    callback = gripmoe.trainer_callback(RETAIN)
    settings = dict(max_steps=6, learning_rate=0.05, weight_decay=0.0, auto_find_batch_size=True)
    trainer = made(tmp_path, model, [callback], OutOfMemory, **settings)
    trainer.train()
    assert trainer.step is None and trainer.state.global_step == 6
    assert (kept(trace, model) == 1.0) == again
    assert hooks_on(model, inner_optimizer(trainer.optimizer)) == (0, 0)


def test_a_trainer_that_would_run_threads_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match="on 2 GPUs in threads .nn.DataParallel.*: start by torchrun"):
        made(tmp_path, small_model(), [gripmoe.trainer_callback(RETAIN)], max_steps=1)


def test_a_callback_that_comes_after_wrapping_is_refused(tmp_path, monkeypatch):
    """With several processes: the gradients of its routers would not be shared."""
    trainer = made(tmp_path, small_model(), [], max_steps=1)
    trainer.add_callback(gripmoe.trainer_callback(RETAIN))
    monkeypatch.setattr("gripmoe.io.distributed.processes", lambda: 2)
    with pytest.raises(ValueError, match="give this callback to the Trainer when it is made"):
        trainer.train()


def test_a_restart_inherits_no_pass_of_the_aborted_step(tmp_path):
    class Aborted(Trainer):
        failed = False

        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            with callback.handle.retain():
                loss = model(**inputs).loss
            if not Aborted.failed:
                Aborted.failed = True
                assert callback.handle.constraint._errors, "the control: the pass has left something"
                raise RuntimeError("CUDA out of memory.")
            assert len(callback.handle.constraint._errors) == 1
            return loss + callback.handle.penalty()

    rows = [{"input_ids": random_batch(rows=8, length=10).input_ids}]  # those of the training
    callback = gripmoe.trainer_callback(rows, method="anchored")
    settings = dict(max_steps=2, auto_find_batch_size=True, weight_decay=0.0)
    made(tmp_path, small_model(), [callback], Aborted, **settings).train()
    assert Aborted.failed


def test_a_callback_is_of_one_model(tmp_path):
    callback = gripmoe.trainer_callback(RETAIN)
    trained(tmp_path, small_model(), [callback], max_steps=1)
    with pytest.raises(ValueError, match="the constraint is of another model: .* make a callback, for each model"):
        trained(tmp_path, small_model(), [callback], max_steps=1)


def test_the_best_model_is_whole(tmp_path):
    """Fused experts too, which `Trainer` leaves as the last step has made them; the control is a trainer by itself."""
    kept_at = {}

    class Remembering(Trainer):
        def evaluate(self, *args, **kwargs):
            metrics = super().evaluate(*args, **kwargs)
            kept_at[self.state.global_step] = copy.deepcopy(self.model.state_dict())
            return metrics

    settings = dict(
        max_steps=3, learning_rate=0.05, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True,
    )  # fmt: skip
    for callbacks in ([], [gripmoe.trainer_callback(RETAIN)]):
        model = small_model()
        trainer = made(tmp_path, model, callbacks, Remembering, **settings)
        if callbacks:
            with pytest.warns(UserWarning, match=r"transformers [\d.]+\S* leaves \d+ tensors of the last step"):
                trainer.train()
        else:
            trainer.train()
        best = kept_at[int(trainer.state.best_model_checkpoint.rsplit("-", 1)[1])]
        differing = [name for name, now in model.state_dict().items() if not torch.equal(now, best[name])]
        assert trainer.state.best_global_step < 3 and bool(differing) == (not callbacks)
        assert all(".experts." in name for name in differing)


def test_a_training_that_cannot_begin_leaves_nothing_behind(tmp_path):
    model = small_model()
    callback = gripmoe.trainer_callback([{"input_ids": torch.tensor([[70, 71]])}])
    for _ in range(2):
        with pytest.raises(ValueError, match="the token 70 is not in the model's vocabulary of 64"):
            trained(tmp_path, model, [callback], max_steps=1)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_arguments_are_checked_when_the_callback_is_made():
    """Values in tests/library/test_retain_data.py."""
    with pytest.raises(ValueError, match="unknown name 'expert_specfic'; did you mean 'expert_specific'"):
        gripmoe.trainer_callback(RETAIN, method="expert_specfic")
    with pytest.raises(ValueError, match="this method looks at what is to be forgotten"):
        gripmoe.trainer_callback(RETAIN, method="seuf")
    with pytest.raises(TypeError, match="unexpected keyword argument 'methods'"):
        gripmoe.trainer_callback(RETAIN, methods="frozen_router")
    with pytest.raises(ValueError, match="no batches were given"):
        gripmoe.trainer_callback([])
    with pytest.raises(ValueError, match="is empty"):
        gripmoe.trainer_callback([{"input_ids": RETAIN[0].input_ids[:0]}])
    with pytest.raises(AttributeError, match="the handle is there once training has begun"):
        gripmoe.trainer_callback(RETAIN).handle  # noqa: B018


# Draws rows at random wherever a margin is exceeded, which with a wide one is in every step.
PAPER = METHODS["expert_specific_paper"].model_copy(update={"safety_margin": 1.0})
EVERY_2 = METHODS["expert_specific"].model_copy(update={"every": 2})
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
        (EVERY_2, torch.float32),
        (PAPER, torch.float32),
        ("anchored", torch.bfloat16),
    ],
    ids=["sound", "every 2", "paper", "anchored"],
)
def test_training_resumes_where_it_was(method, dtype, tmp_path, monkeypatch):
    """To the bit, from a checkpoint of the trainer; the control is what a handle forgets without its state."""
    uninterrupted = weights_after(tmp_path, method, dtype)
    assert equal(weights_after(tmp_path, method, dtype, resume=f"{tmp_path}/checkpoint-3"), uninterrupted)
    monkeypatch.setattr(ConstraintHandle, "load_state_dict", lambda handle, state: None)
    forgetful = weights_after(tmp_path, method, dtype, resume=f"{tmp_path}/checkpoint-3")
    sound = method in ("expert_specific", EVERY_2)
    assert equal(forgetful, uninterrupted) == sound, "sound Method A has nothing to forget"


@pytest.mark.parametrize("settles", [True, False])
def test_what_is_evaluated_and_saved_is_feasible(settles, tmp_path, monkeypatch):
    """After one step of two that wait for a projection. The control: without it, selections change."""
    if not settles:
        monkeypatch.setattr(ConstraintHandle, "settle", lambda handle: None)
    model, found = small_model(), []
    trace = recorded(model)

    class Evaluated(Trainer):
        def evaluate(self, *args, **kwargs):
            found.append(kept(trace, copy.deepcopy(self.model)))

    strategy = dict(save_strategy="steps", save_steps=3, eval_strategy="steps", eval_steps=3)
    callback = gripmoe.trainer_callback(RETAIN, method=EVERY_2)
    trained(tmp_path, model, [callback], Evaluated, max_steps=3, learning_rate=0.05, **strategy)
    saved = type(model).from_pretrained(tmp_path / "checkpoint-3", dtype=torch.float32)
    found += [kept(trace, saved), kept(trace, model)]
    assert len(found) > 2 and {each == 1.0 for each in found} == {settles}


def test_the_same_trainer_resumes_where_it_was(tmp_path):
    """From a checkpoint of its own first training, whose fused experts `Trainer` does not read."""
    model = small_model()
    trainer = made(tmp_path, model, [gripmoe.trainer_callback(RETAIN, method=PAPER)], Unlearner, **SAVED)
    trainer.train()
    uninterrupted = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.mul_(2.0)
    trainer.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-3")
    assert equal(model.state_dict(), uninterrupted)


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
        callback = gripmoe.trainer_callback(RETAIN, method="anchored")
        trained(tmp_path, model, [callback], Evaluated, max_steps=3, eval_strategy=strategy, eval_steps=1)
        weights[strategy] = model.state_dict()
    assert equal(weights["steps"], weights["no"]) and not all(losses)


@pytest.mark.parametrize("skips", [False, True])
def test_a_step_that_a_scaler_skips_is_forgotten(skips, tmp_path, monkeypatch):
    """Its tokens are none of the next step's. The control: no step is skipped."""
    stepping, numbers, seen = AcceleratedOptimizer.step, iter(range(9)), []

    def skipping(optimizer, closure=None):
        return None if next(numbers) == 1 and skips else stepping(optimizer, closure)

    class Counting(Unlearner):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            seen.append(len(callback.handle._seen))
            return loss

    monkeypatch.setattr(AcceleratedOptimizer, "step", skipping)
    model, callback = small_model(), gripmoe.trainer_callback(RETAIN, method=PAPER)
    trained(tmp_path, model, [callback], Counting, max_steps=3, learning_rate=1e-2)
    assert seen == [1, 1, 1] and next(numbers) == 3


def test_a_node_with_checkpoints_of_its_own_has_the_state_of_the_handle(tmp_path):
    callback, node = gripmoe.trainer_callback(RETAIN), SimpleNamespace(is_world_process_zero=False, global_step=3)
    callback.handle = SimpleNamespace(state_dict=dict)
    (tmp_path / "checkpoint-3").mkdir()
    for saves in (False, True):
        callback.on_save(SimpleNamespace(should_save=saves, output_dir=tmp_path), node, None)
        assert any((tmp_path / "checkpoint-3").iterdir()) == saves


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
