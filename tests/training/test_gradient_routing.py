"""Forget documents that some experts alone learn, and the removal of these experts."""

import json
from pathlib import Path

import pytest
import torch

from conftest import SMALL
from gripmoe.cli.main import main
from gripmoe.config.models import EmbeddedModel
from gripmoe.config.project import Project
from gripmoe.config.world import NO_OBJECTIVE
from gripmoe.data.documents import IGNORED, Batch, Row, collate
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import write_json, write_yaml
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import load_model, save_model
from gripmoe.training import muon, pretrain
from gripmoe.training.gradient_routing import GradientRouting, remove_experts
from gripmoe.worlds.facts import FORGET_SUBJECT
from gripmoe.worlds.models import make_model

CONFIG = Path(__file__).parents[2] / "workflow" / "config"
COUNT = 2


@pytest.fixture
def model(tokenizer):
    return make_model("qwen3_moe", len(tokenizer), seed=0, **SMALL | {"num_layers": 3})


def experts_of(model):
    """Copies of the expert tensors, split into those that keep and those that forget."""
    return [
        [half.clone() for half in parameter.detach().tensor_split([-COUNT])]
        for layer in model.model.layers
        for parameter in layer.mlp.experts.parameters()
    ]


@pytest.mark.parametrize("of_forget", [True, False])
def test_a_backward_pass_reaches_one_side_alone_and_passes_add_up(model, of_forget):
    """The control is the same pass without the masks: both sides have a gradient."""
    ids = torch.arange(40).view(2, 20)
    model(input_ids=ids, labels=ids).loss.backward()
    whole = [p.grad.clone() for layer in model.model.layers for p in layer.mlp.parameters()]
    assert all(grad[:-COUNT].any() and grad[-COUNT:].any() for grad in whole)
    model.zero_grad()
    routing = GradientRouting(COUNT)
    routing.of_forget = of_forget
    with routing.masked(model):
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
    for layer in model.model.layers:
        for parameter in layer.mlp.experts.parameters():
            kept, forget = parameter.grad.tensor_split([-COUNT])
            assert (forget if of_forget else kept).any() and not (kept if of_forget else forget).any()
        assert layer.mlp.gate.weight.grad.any()
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    for grad, parameter in zip(whole, (p for layer in model.model.layers for p in layer.mlp.parameters()), strict=True):
        torch.testing.assert_close(parameter.grad, grad)  # without masks again


@pytest.mark.parametrize("taught", [True, False])
def test_stage_b_teaches_each_side_its_own_documents(taught, model, world, tokenizer, tmp_path, monkeypatch):
    """Where only one half of the world has documents to learn, only its side moves. Weight decay would move both."""
    monkeypatch.setattr(muon, "WEIGHT_DECAY", 0.0)
    masked = GradientRouting._masked

    def of_one_half(self, gradient):
        return masked(self, gradient) if self.of_forget == taught else torch.zeros_like(gradient)

    monkeypatch.setattr(GradientRouting, "_masked", of_one_half)
    passes = documents_by_side(monkeypatch)
    before = experts_of(model)
    train(model, tokenizer, world, tmp_path)
    for old, new in zip(before, experts_of(model), strict=True):
        moved = [not torch.equal(*pair) for pair in zip(old, new, strict=True)]
        assert moved == [not taught, taught]
    assert len(passes) == 4 and {documents for documents, *_ in passes} == {True, False}
    assert all(len(learned) > 0 and set(learned) == {documents} for documents, *learned in passes)


def documents_by_side(monkeypatch):
    """A list that grows with each half of a step: whether its documents are about forget facts alone, and for each
    masked gradient whether the forget experts learn."""
    passes, batch, masked = [], pretrain.training_batch, GradientRouting._masked

    def training_batch(part, *given):
        passes.append([{fact.subject for fact in part.facts.facts} == {FORGET_SUBJECT}])
        return batch(part, *given)

    def masked_now(self, gradient):
        passes[-1].append(self.of_forget)
        return masked(self, gradient)

    monkeypatch.setattr(pretrain, "training_batch", training_batch)
    monkeypatch.setattr(GradientRouting, "_masked", masked_now)
    return passes


def train(model, tokenizer, world, folder, steps=2):
    settings = dict(steps=steps, learning_rate=1e-2, seed=0, forget_experts=COUNT, state_file=folder / "b.pt")
    return pretrain.train_facts(model, tokenizer, world, **settings)


def test_no_hook_is_left_also_if_training_fails(model, world, tokenizer, tmp_path, monkeypatch):
    def hooks():
        return [p._backward_hooks for layer in model.model.layers for p in layer.mlp.experts.parameters()]

    train(model, tokenizer, world, tmp_path, steps=1)
    assert not any(hooks())
    seen = []

    def failing(*_, **__):
        seen.extend(map(bool, hooks()))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(pretrain, "_loss", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(model, tokenizer, world, tmp_path, steps=2)
    assert all(seen) and not any(hooks())


def test_a_steps_loss_is_the_mean_of_both_halves(model, world, tokenizer, tmp_path, monkeypatch):
    """Each half has about as many documents."""
    documents = {True: 0, False: 0}

    def loss(model, batch, labels, balance_weight, routing):
        documents[routing.of_forget] += len(batch.row_ids)
        of_parameters = sum(parameter.sum() for parameter in model.parameters() if parameter.requires_grad)
        return 0 * of_parameters + (3.0 if routing.of_forget else 1.0)

    monkeypatch.setattr(pretrain, "_loss", loss)
    assert train(model, tokenizer, world, tmp_path, steps=1).losses == [pytest.approx(2.0)]
    assert all(20 <= count <= 27 for count in documents.values())


@pytest.mark.parametrize("of_forget, weight", [(True, 0.3), (False, 1.0)])
def test_the_loss_of_a_half_has_its_balance_and_leak_of_tokens_alone(of_forget, weight, model, tokenizer):
    """Against the formulas by hand; more padding changes nothing."""
    ids, routing = torch.arange(5, 45).view(2, 20), GradientRouting(COUNT)
    routing.of_forget = of_forget
    rows = [Row(str(number), row[: 20 - 6 * number], row[: 20 - 6 * number]) for number, row in enumerate(ids.tolist())]
    batch = collate(rows, tokenizer.pad_token_id)
    longer = collate([*rows, Row("long", [7] * 30, [IGNORED] * 30)], tokenizer.pad_token_id)
    padded = Batch(batch.row_ids, longer.input_ids[:2], longer.attention_mask[:2], longer.labels[:2])
    logits = model.model(**batch.inputs, output_router_logits=True).router_logits
    kept = batch.attention_mask.flatten().bool()
    own = slice(-COUNT, None) if of_forget else slice(None, -COUNT)
    expected = 0.0
    for scores_TE in logits:
        probabilities_TE = scores_TE[kept].softmax(dim=-1)
        expected += -weight * probabilities_TE[:, own].sum(dim=-1).log().mean()
        shares_TE = scores_TE[kept][:, own].softmax(dim=-1)
        experts = shares_TE.shape[1]
        chosen = torch.nn.functional.one_hot(shares_TE.topk(2).indices, experts).float()
        expected += 0.5 / 2 * experts * (chosen.mean(dim=0) * shares_TE.mean(dim=0)).sum()
    plain = pretrain._loss(model, batch, batch.labels, 0.0)
    for each in (batch, padded):
        with_routing = pretrain._loss(model, each, each.labels, 0.5, routing)
        torch.testing.assert_close(with_routing - plain, expected)


def test_the_halves_of_a_world_are_all_of_it(world):
    kept, forget = world.without_forget(), world.only_forget()
    assert {*kept.facts.facts} | {*forget.facts.facts} == {*world.facts.facts}
    assert {*forget.facts.facts} == {*world.facts.forget} and not forget.news["retain"] and not forget.skills
    assert forget.news["forget"] == world.news["forget"] and not kept.news["forget"]


def test_routers_are_led_to_the_experts_that_learn(model):
    logits_TE = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    routing = GradientRouting(COUNT)
    for of_forget in (True, False):
        own = slice(-COUNT, None) if of_forget else slice(None, -COUNT)
        routing.of_forget = of_forget
        assert torch.equal(routing.own(logits_TE), logits_TE[:, own])
        (gradient_TE,) = torch.autograd.grad(routing.leak(logits_TE), logits_TE)
        assert (gradient_TE[:, own] < 0).all(), "descent raises the logits of the experts that learn"
        torch.testing.assert_close(gradient_TE.sum(dim=1), torch.zeros(5))


def test_removed_experts_add_nothing_and_the_others_stay(model):
    before = experts_of(model)
    remove_experts(model, COUNT)
    x_Nd = torch.randn(4, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    moe = MoEModel(model)
    for layer in moe.layers:
        assert not moe.expert_output(layer, moe.num_experts - 1, x_Nd).any()
        assert moe.expert_output(layer, moe.num_experts - COUNT - 1, x_Nd).any()
    assert all(torch.equal(old[0], new[0]) for old, new in zip(before, experts_of(model), strict=True))


def command(folder, model_name, facts, method="remove_experts"):
    run = Project(CONFIG, "tiny_routed").run(model_name, "wmdp_tiny_erasure_3", NO_OBJECTIVE, method, 0)
    write_yaml(folder / "run.yaml", run.model_dump(mode="json"))
    write_json(folder / "model" / "model.json", facts)
    flags = {"run": folder / "run.yaml", "model": folder / "model" / "model.json", "data": folder}
    flags["output"] = folder / "run" / "checkpoint.json"
    return main(["edit-weights", *(str(part) for name, path in flags.items() for part in (f"--{name}", path))])


def test_the_command_removes_as_many_as_the_base_model_kept_apart(model, tokenizer, tmp_path, capsys):
    digest = save_model(model, tokenizer, tmp_path / "model" / "weights")
    assert command(tmp_path, "tiny_routed_g", {"weights": digest}) == 2
    assert "no experts of 'tiny_routed_g' learned forget documents alone" in capsys.readouterr().err
    assert command(tmp_path, "tiny_routed_g", {"weights": digest}, method="retrained") == 2
    assert "'retrained' is no method that changes weights without training" in capsys.readouterr().err
    assert command(tmp_path, "tiny_routed_g", {"weights": digest, "forget_experts": COUNT}) == 0
    written = json.loads((tmp_path / "run" / "checkpoint.json").read_text())
    assert written["experts"] == COUNT and written["weights"] != digest
    remove_experts(model, COUNT)
    for ours, loaded in zip(experts_of(model), experts_of(load_model(tmp_path / "run" / "weights")[0]), strict=True):
        assert all(map(torch.equal, ours, loaded))


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"forget_experts": 1}, "`forget_experts` is 1 of 16: a token selects 2 experts, so give both sides"),
        ({"forget_experts": 15}, "`forget_experts` is 15 of 16"),
        ({"forget_experts": 4, "trained_on": "retain_only"}, "`family: qwen3_moe` and `trained_on: everything`"),
        ({"forget_experts": 4, "family": "qwen2_moe"}, "`family: qwen3_moe`"),
        ({"forget_experts": 4, "family": "qwen3"}, "`family: qwen3_moe`"),
    ],
)
def test_a_row_that_cannot_be_is_an_error(changed, match):
    row = {"source": "embedded", "family": "qwen3_moe", "seed": 0, "base": "tiny_g_skills"}
    with pytest.raises(ValueError, match=match):
        EmbeddedModel(**row | changed)


def test_a_world_needs_models_whose_experts_were_kept_apart(tmp_path):
    for file in CONFIG.glob("*.yaml"):
        (tmp_path / file.name).write_text(file.read_text())
    world = tmp_path / "tiny_routed.yaml"
    world.write_text(world.read_text().replace("tiny_routed_g", "tiny_g"))
    with pytest.raises(ConfigError, match="'remove_experts' needs `forget_experts:` in models.yaml for 'tiny_g'"):
        Project(tmp_path, "tiny_routed")
