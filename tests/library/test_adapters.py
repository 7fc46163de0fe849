"""Models that PEFT has wrapped: what is constrained, what is saved, and how training resumes."""

import peft
import pytest
import torch
from test_trainer import SAVED, kept, made, recorded

import gripmoe
from conftest import random_batch, small_model
from gripmoe.moe import MoEModel

RETAIN = [random_batch(seed=100), random_batch(seed=101)]
SAVES_ROUTERS = dict(target_modules=["q_proj"], modules_to_save=["gate"])


def adapted(seed=0, **settings):
    torch.manual_seed(seed)
    return peft.get_peft_model(small_model(), peft.LoraConfig(r=4, lora_alpha=32, **settings))


def train(model, lr, method):
    """A few steps on other documents, under a method unless it is None."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    handle = gripmoe.constrain(model, optimizer, RETAIN, method=method) if method else None
    batch = random_batch(rows=8, length=10, seed=5)
    for _ in range(6):
        optimizer.zero_grad()
        model(**batch.inputs, labels=batch.labels).loss.backward()
        optimizer.step()
    if handle:
        handle.close()


@pytest.mark.parametrize("method", ["expert_specific", None])
def test_routers_that_are_saved_with_an_adapter(method, tmp_path):
    """Constrained in training, and the same after saving, loading and merging."""
    trace = recorded(small_model())
    model = adapted(**SAVES_ROUTERS)
    train(model, 0.01, method)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(small_model(), tmp_path)
    with torch.no_grad():
        assert torch.equal(again.eval()(**RETAIN[0].inputs).logits, model.eval()(**RETAIN[0].inputs).logits)
    for trained in (model.get_base_model(), again.merge_and_unload()):
        assert (kept(trace, trained) == 1.0) == bool(method)


@pytest.mark.parametrize("method", ["frozen_router", None])
def test_a_frozen_router_freezes_its_adapter(method):
    """The copy of the adapted layers, merged, is the original router; everything is free again afterwards."""
    trace = recorded(small_model())
    model = adapted(target_modules="all-linear")
    trains = {name: p.requires_grad for name, p in model.named_parameters()}
    train(model, 0.05, method)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trains
    assert (kept(trace, model.merge_and_unload()) == 1.0) == bool(method)


def test_the_remedy_for_adapters_on_routers_helps():
    """PEFT rewrites "all-linear", and then excludes nothing."""
    optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0)  # noqa: E731
    model = adapted(target_modules="all-linear", exclude_modules=["gate"])
    with pytest.raises(ValueError, match="name modules without routers as `target_modules` and `target_parameters`"):
        gripmoe.constrain(model, optimizer(model), RETAIN)
    named = dict(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], modules_to_save=["gate"])
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = adapted(**named, target_parameters=experts)
    gripmoe.constrain(model, optimizer(model), RETAIN).close()


def test_a_step_under_the_router_of_another_adapter_is_refused():
    model = adapted(**SAVES_ROUTERS)
    model.add_adapter("other", peft.LoraConfig(r=4, **SAVES_ROUTERS))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], weight_decay=0.0)
    with gripmoe.constrain(model, optimizer, RETAIN):
        optimizer.step()
        model.set_adapter("other")
        with pytest.raises(RuntimeError, match="call `constrain` after `set_adapter`"):
            optimizer.step()


def test_disabled_adapters_have_the_original_router():
    model = adapted(**SAVES_ROUTERS)
    train(model, 0.01, None)
    base = model.get_base_model()
    theta = MoEModel(small_model()).theta(0)
    assert not torch.equal(MoEModel(base).theta(0), theta)
    with model.disable_adapter():
        assert torch.equal(MoEModel(base).theta(0), theta)


def test_what_begins_at_random_does_not_name_the_original():
    """A resumed process may draw other adapters; another base model is still another."""

    def state(model):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        with gripmoe.constrain(model, optimizer, RETAIN, method="frozen_router") as handle:
            return handle.state_dict()["origin"]

    same, other = state(adapted(seed=0, target_modules=["q_proj"])), state(adapted(seed=1, target_modules=["q_proj"]))
    another = peft.get_peft_model(small_model(seed=1), peft.LoraConfig(target_modules=["q_proj"]))
    assert same == other != state(another)


@pytest.mark.parametrize("settings", [dict(target_modules=["q_proj"]), SAVES_ROUTERS], ids=["attention", "routers"])
def test_training_with_an_adapter_resumes_where_it_was(settings, tmp_path):
    method = "expert_specific" if settings is SAVES_ROUTERS else "frozen_router"
    weights, trace = [], recorded(small_model())
    for resume in (None, f"{tmp_path}/checkpoint-3"):
        model = adapted(**settings)
        callback = gripmoe.trainer_callback(RETAIN, method=method)
        trainer = made(tmp_path, model, [callback], **SAVED)
        trainer.train(resume_from_checkpoint=resume)
        assert kept(trace, model.get_base_model()) == 1.0
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert any(not torch.equal(now, weights[0][name]) for name, now in adapted(**settings).state_dict().items())
