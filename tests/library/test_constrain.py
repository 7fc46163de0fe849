"""What `constrain` offers beyond the constraint: documents to forget, routing replay, a bound on the retain loss."""

import copy
import warnings
from pathlib import Path

import pytest
import torch

import gripmoe
from conftest import METHODS, random_batch, small_model
from gripmoe.config.methods import Method, method_table
from gripmoe.config.project import Project
from gripmoe.constraints.base import RouterConstraint
from gripmoe.constraints.build import build
from gripmoe.constraints.null_space import NullSpaceReparameterized, fit_bases
from gripmoe.data.corpora import Corpora
from gripmoe.data.documents import Row, documents_of
from gripmoe.evaluation.stop_rule import StopRule
from gripmoe.geometry.nullspace import RetainBasis
from gripmoe.geometry.routing import mean_stability, route, stability_by_layer
from gripmoe.library.checks import warn_if_nothing_moves
from gripmoe.library.constrain import methods_of_loops
from gripmoe.moe import MoEModel
from gripmoe.training.loop import unlearn
from gripmoe.training.objectives import GradientDifference
from moe.test_families import make

pytestmark = pytest.mark.filterwarnings("ignore:AdamW decays router weights")
RETAIN, FORGET = [random_batch(seed=100)], [random_batch(seed=200)]


def adamw(model, lr=0.05):
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)


class Scaling(RouterConstraint):
    """A constraint of one's own on routers."""

    def constrain(self, layer, before_Ed, after_Ed, seen):
        return after_Ed * 0.5


class Watching(RouterConstraint):
    """One that leaves routers alone."""


def test_a_class_that_writes_routers_needs_them_in_the_optimizer():
    """The control: another class does not."""
    model = small_model()
    routers = {id(parameter) for parameter in MoEModel(model).router_parameters()}
    others = torch.optim.AdamW([p for p in model.parameters() if id(p) not in routers])
    gripmoe.constrain(model, adamw(model), RETAIN, method=Method(constraint=f"{__name__}:Scaling")).close()
    with pytest.raises(ValueError, match="the optimizer does not hold the routers"):
        gripmoe.constrain(model, others, RETAIN, method=Method(constraint=f"{__name__}:Scaling"))
    gripmoe.constrain(model, others, RETAIN, method=Method(constraint=f"{__name__}:Watching")).close()


def train(model, optimizer, handle, steps=3, retain=RETAIN):
    model.train()
    for step in range(steps):
        optimizer.zero_grad()
        with handle.forget():
            loss = -0.1 * model(**FORGET[0].inputs, labels=FORGET[0].input_ids).loss
        (loss + handle.penalty()).backward()
        with handle.retain():
            loss = model(**retain[step % len(retain)].inputs, labels=retain[step % len(retain)].input_ids).loss
        (loss + handle.penalty()).backward()
        optimizer.step()
    model.eval()


def router_only_stability(trace, model):
    moe = MoEModel(model)
    moved = {layer: route(r.x_Nd, moe.theta(layer).detach(), moe.rule(layer)) for layer, r in trace.items()}
    return mean_stability(stability_by_layer(trace, moved))


def test_every_row_works_by_name_or_says_why_not():
    """And what says why not is no row that works."""
    refused = {}
    for name in method_table():
        model = small_model()
        try:
            gripmoe.constrain(model, adamw(model), RETAIN, forget=FORGET, method=name).close()
        except ValueError as error:
            refused[name] = str(error)
    assert refused.keys() == method_table().keys() - methods_of_loops().keys()
    reasons = {
        "original": "`baseline`: it trains nothing; leave",
        "retain_x10": "`training.alpha_multiplier`: hyperparameters of the loop; set them there",
        "expert_specific_paper_retain_x3": "`training.alpha_multiplier`: hyperparameters of the loop",
        "expert_specific_router_x10": "`training.router_multiplier`: hyperparameters of the loop",
        "expert_specific_fp8": "`training.expert_precision`: hyperparameters of the loop",
        "anchored_adversary": "`training.adversary_steps`: hyperparameters of the loop; set them there (gripmoe.",
        "sam": "`training.sharpness_radius`: hyperparameters of the loop; set them there",
        "repselect": "`training.dropped_components`: hyperparameters of the loop; set them there",
        "mudman": "`training.adversary_rate`, `training.adversary_steps`, `training.disruption_mask`: hyperparameters",
        "sign_descent": "`training.betas`: hyperparameters of the loop; set them there",
        "weight_distance": "`training.distance_weight`: hyperparameters of the loop; set them there",
        "undo": "`undo`: it distils a finished model; `gripmoe realign` does so to a run",
        "expert_null_space": "`experts: null_space`: it moves experts, which the loop trains",
        "ptc": "`corrects`: it changes routers after training: call gripmoe.remember before and gripmoe.realign after",
        "ptc_matched": "`correction`: it comes after training; call gripmoe.realign",
    }
    for name, reason in reasons.items():
        assert f"method {name!r}: `constrain` cannot do {reason}" in refused[name]
    assert {"expert_specific", "expert_specific_single", "combined", "router_l2", "anchored_replay"} < set(
        methods_of_loops()
    )


def test_an_original_of_another_kind_is_refused():
    model = small_model()
    for other in (small_model("qwen2_moe"), small_model("qwen3"), small_model(num_experts=12)):
        with pytest.raises(ValueError, match="`original` is another model"):
            gripmoe.constrain(model, adamw(model), RETAIN, method="anchored", original=other)
        assert all(parameter.requires_grad for parameter in (*other.parameters(), *model.parameters()))


def test_an_original_of_the_same_shape_that_is_another_model_is_refused():
    """Or that the model has left. A copy in another precision is none of these."""
    model, refused = small_model(), "`original` has other routers than `model`"
    with pytest.raises(ValueError, match=refused):
        gripmoe.constrain(model, adamw(model), RETAIN, method="anchored", original=small_model(seed=1))
    original, optimizer = copy.deepcopy(model), adamw(model, lr=1e-2)
    in_bf16 = copy.deepcopy(model).bfloat16()
    gripmoe.constrain(model, optimizer, RETAIN, method="anchored", original=in_bf16).close()
    for _ in range(3):
        model(**FORGET[0].inputs, labels=FORGET[0].input_ids).loss.backward()
        optimizer.step()
    for method in ("anchored", "expert_specific", "router_l2"):
        with pytest.raises(ValueError, match=refused):
            gripmoe.constrain(model, optimizer, RETAIN, method=method, original=original)


def test_float16_is_warned_of():
    model = small_model().half()
    with pytest.warns(UserWarning, match="float16"), gripmoe.constrain(model, adamw(model), RETAIN):
        pass
    with pytest.raises(ValueError, match="`model` is a str: give a transformers model"):
        gripmoe.constrain("model", adamw(model), RETAIN)


def test_public_names_are_listed():
    assert set(gripmoe.__all__) <= set(dir(gripmoe))


def test_routers_that_do_not_train_have_another_name():
    states = []
    for name in ("frozen_router", "freeze_moe_router"):
        model = small_model()
        with gripmoe.constrain(model, adamw(model), RETAIN, method=name) as handle:
            states.append(handle.state_dict()["origin"])
    assert states[0] == states[1]
    with pytest.raises(ValueError, match="`method`: unknown name 'freeze'; known: unconstrained, frozen_router, "):
        gripmoe.constrain(model, adamw(model), RETAIN, method="freeze")


def stepped_by_a_loop(training, router_weight_decay):
    """The routers after gradient difference in a loop of one's own, which trains what the workflow trains."""
    moe, objective = MoEModel(small_model()), GradientDifference(alpha=1.0)
    moe.model.requires_grad_(False)
    routers = [moe.theta(layer) for layer in moe.layers]
    experts = [parameter for layer in moe.layers for parameter in moe.expert_parameters(layer)]
    for parameter in routers + experts:
        parameter.requires_grad_(True)
    groups = [{"params": experts}, {"params": routers, "weight_decay": router_weight_decay}]
    optimizer = torch.optim.AdamW(groups, lr=training.learning_rate, weight_decay=training.weight_decay)
    with gripmoe.constrain(moe.model, optimizer, RETAIN):
        for _ in range(training.max_steps):
            optimizer.zero_grad()
            (objective.forget_loss(moe, FORGET[0]) + objective.retain_loss(moe, RETAIN[0])).backward()
            torch.nn.utils.clip_grad_norm_(routers + experts, training.clip_norm)
            optimizer.step()
    return moe.thetas()


def rows_of(batch):
    documents = documents_of(batch.input_ids, batch.attention_mask)
    return [Row(str(number), list(ids), list(ids)) for number, ids in enumerate(documents)]


def stepped_by_the_workflow(training, method, folder):
    moe = MoEModel(small_model())
    trace = moe.trace(RETAIN)
    constraint = build(method, trace, bases=lambda t: fit_bases(t, moe.rules(), method), seed=0).constraint
    corpora = Corpora(rows_of(FORGET[0]), rows_of(RETAIN[0]), pad_id=0)
    never = StopRule({"accuracy": -1.0}, lambda _: {"accuracy": 1.0})
    state = folder / "state.pt"
    unlearn(moe, GradientDifference(alpha=1.0), constraint, corpora, training, never, seed=0, state_file=state)
    return moe.thetas()


def test_a_loop_that_does_not_decay_routers_steps_as_the_workflow_does(tmp_path):
    """And says so where it decays them: they then end elsewhere."""
    project = Project(Path(__file__).parents[2] / "workflow" / "config", "tiny")
    sizes = dict(forget_batch_size=4, retain_batch_size=4, max_steps=2, check_every=2, checkpoint_every=2)
    training = project.training("tiny_a", "wmdp_tiny", "gd", "expert_specific").model_copy(
        update=dict(sizes, router_multiplier=1.0, weight_decay=0.1)
    )
    workflow = stepped_by_the_workflow(training, project.methods["expert_specific"], tmp_path)
    with warnings.catch_warnings(action="error"):
        library = stepped_by_a_loop(training, router_weight_decay=0.0)
    with pytest.warns(UserWarning, match=r"AdamW decays router weights \(weight_decay 0.1\)"):
        decayed = stepped_by_a_loop(training, router_weight_decay=0.1)
    for layer in workflow:
        torch.testing.assert_close(library[layer], workflow[layer])
        assert not torch.allclose(decayed[layer], workflow[layer], atol=1e-5), "the control"


@pytest.mark.parametrize("method", ["frozen_router", "anchored", "expert_specific_paper", "full_null_space"])
def test_only_sound_null_spaces_warn_of_decay(method):
    """The workflow trains the paper's form with decay, and the other routers do not follow the optimizer."""
    model = small_model()
    with warnings.catch_warnings(record=True, action="always") as seen:
        gripmoe.constrain(model, adamw(model), RETAIN, method=method).close()
    said = [warning.filename for warning in seen if "decays router weights" in str(warning.message)]
    assert said == ([__file__] if method == "full_null_space" else [])


@pytest.mark.parametrize("again", [True, False])
def test_another_optimizer_goes_on_from_the_first_original(again):
    """The control: a second `constrain` keeps the routing that the model has by then."""
    model = small_model()
    trace = MoEModel(model).trace(RETAIN)
    optimizer = adamw(model)
    with gripmoe.constrain(model, optimizer, RETAIN) as first:
        train(model, optimizer, first)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.add_(torch.randn_like(layer.mlp.gate.weight), alpha=0.3)
    assert router_only_stability(trace, model) < 0.9
    optimizer = adamw(model)
    second = gripmoe.constrain_again(first, model, optimizer) if again else gripmoe.constrain(model, optimizer, RETAIN)
    with second:
        train(model, optimizer, second)
    assert (router_only_stability(trace, model) == 1.0) == again


def test_what_is_frozen_again_keeps_no_gradient():
    """Of the time between two handles, in which a GPT-OSS router's bias trains. The control: the first handle."""
    model = make("gpt_oss").model
    optimizer, bias_E = torch.optim.AdamW(model.parameters(), weight_decay=0.0), model.model.layers[0].mlp.router.bias
    before_E = bias_E.detach().clone()
    first = gripmoe.constrain(model, optimizer, RETAIN)
    first.close()
    model(**RETAIN[0].inputs, labels=RETAIN[0].labels).loss.backward()
    assert bias_E.grad is not None and bias_E.grad.any()
    with gripmoe.constrain_again(first, model, optimizer):
        optimizer.step()
    assert torch.equal(bias_E, before_E)


def test_weights_that_are_loaded_outside_stage_1_are_projected_back():
    """A common shift of all rows changes no selection, and Stage 1 forbids it. The step after it holds all margins."""
    model = small_model()
    moe = MoEModel(model)
    trace, optimizer = moe.trace(RETAIN), torch.optim.SGD(model.parameters(), lr=1e-3)
    with gripmoe.constrain(model, optimizer, RETAIN) as handle, torch.no_grad():
        for layer, seen in trace.items():
            moe.theta(layer).sub_(torch.nn.functional.normalize(seen.x_Nd.mean(dim=0), dim=0))
        assert router_only_stability(trace, model) == 1.0
        with torch.enable_grad():
            train(model, optimizer, handle, steps=1)
        assert router_only_stability(trace, model) == 1.0


def test_a_copy_of_a_model_under_replay_is_free(tmp_path):
    """As of a best checkpoint. The control: the model itself, in training."""
    model = small_model().train()
    optimizer = adamw(model)
    with gripmoe.constrain(model, optimizer, RETAIN, forget=FORGET, method="unconstrained", replay=True) as handle:
        train(model, optimizer, handle)
        model.train()
        copied, free = copy.deepcopy(model), small_model().train()
        free.load_state_dict(copied.state_dict())
        other = random_batch(seed=5)
        assert torch.equal(copied(**RETAIN[0].inputs).logits, free(**RETAIN[0].inputs).logits)
        assert torch.equal(copied(**other.inputs).logits, free(**other.inputs).logits)
        assert not torch.equal(model(**RETAIN[0].inputs).logits, free(**RETAIN[0].inputs).logits)
    assert torch.equal(copied(**FORGET[0].inputs).logits, free(**FORGET[0].inputs).logits)


@pytest.mark.parametrize("method", ["expert_specific", "expert_specific_paper", "frozen_router"])
@pytest.mark.parametrize("trains", [True, False])
def test_routers_that_do_not_train_are_warned_of_under_method_a(trains, method):
    model = small_model()
    optimizer = adamw(model)
    for layer in model.model.layers:
        layer.mlp.gate.weight.requires_grad_(trains)
    with warnings.catch_warnings(record=True, action="always") as seen:
        gripmoe.constrain(model, optimizer, RETAIN, method=method).close()
    said = [each.filename for each in seen if "no router trains" in str(each.message)]
    assert said == [__file__] * (not trains and method != "frozen_router")


@pytest.mark.parametrize("rows, warns", [(1, False), (40, True)])
def test_routers_that_cannot_move_are_warned_of(rows, warns):
    """Many tokens of few dimensions leave no direction free."""
    model = small_model()
    with warnings.catch_warnings(record=True, action="always") as seen:
        gripmoe.constrain(model, adamw(model), [random_batch(rows=rows, seed=3)]).close()
    assert any("no direction of any router free" in str(warning.message) for warning in seen) == warns


def test_the_layers_whose_routers_cannot_move_are_named():
    moe = MoEModel(small_model())
    eye_1dd = torch.eye(moe.hidden_size)[None]
    constraint = NullSpaceReparameterized({0: RetainBasis(eye_1dd[:, :, :1]), 1: RetainBasis(eye_1dd)})
    with pytest.warns(UserWarning, match=r"no direction of the routers of layers \[1\] free"):
        warn_if_nothing_moves(method_table()["reparameterized"], constraint, moe)


@pytest.mark.parametrize("another", [False, True])
def test_a_loop_that_steps_another_optimizer_is_warned_of(another):
    model = small_model()
    optimizer = adamw(model)
    with warnings.catch_warnings(record=True, action="always") as seen:
        with gripmoe.constrain(model, optimizer, RETAIN):
            stepping = adamw(model) if another else optimizer
            model(**RETAIN[0].inputs).logits.sum().backward()
            stepping.step()
        gripmoe.constrain(model, optimizer, RETAIN).close()  # without a backward pass there is nothing to say
        handle = gripmoe.constrain(model, optimizer, RETAIN, method="anchored")
        model(**RETAIN[0].inputs).logits.sum().backward()
        with pytest.raises(RuntimeError, match="within `with handle.retain"):
            optimizer.step()  # refused, but known
        handle.close()
    assert sum("has never stepped" in str(warning.message) for warning in seen) == another


def test_a_warning_that_is_made_an_error_leaves_nothing_behind():
    model = small_model()
    with warnings.catch_warnings(action="error"), pytest.raises(UserWarning, match="decays router weights"):
        gripmoe.constrain(model, adamw(model), RETAIN)
    gripmoe.constrain(model, adamw(model), RETAIN).close()


@pytest.mark.parametrize("surface", ["retain", "forget", "combined"])
def test_a_null_space_holds_the_surface_that_it_is_given(surface):
    model = small_model()
    optimizer = adamw(model)
    references = {"retain": MoEModel(model).trace(RETAIN), "forget": MoEModel(model).trace(FORGET)}
    method = METHODS["expert_specific"].model_copy(update={"surface": surface})
    with gripmoe.constrain(model, optimizer, RETAIN, forget=FORGET, method=method) as handle:
        train(model, optimizer, handle)
    for name, trace in references.items():
        assert (router_only_stability(trace, model) == 1.0) == (surface in (name, "combined"))


def test_seuf_trains_one_expert_and_its_router():
    model = small_model()
    optimizer = adamw(model, lr=1e-2)
    moe = MoEModel(model)
    before = [[p.detach().clone() for p in moe.expert_parameters(layer)] for layer in moe.layers]

    def changed():
        pairs = [
            (now[expert], old[expert])
            for layer, parameters in zip(moe.layers, before, strict=True)
            for now, old in zip(moe.expert_parameters(layer), parameters, strict=True)
            for expert in range(8)
        ]
        return sum(not torch.equal(now, old) for now, old in pairs)

    with gripmoe.constrain(model, optimizer, RETAIN, forget=FORGET, method="seuf") as handle:
        train(model, optimizer, handle)
        assert changed() == 2, "its two matrices"
        assert sum(p.requires_grad for layer in moe.layers for p in moe.expert_parameters(layer)) == 2
    optimizer.step()
    assert changed() == 16, "the control: momentum and weight decay move the other experts of the layer"
    assert all(p.requires_grad for layer in moe.layers for p in moe.expert_parameters(layer))


@pytest.mark.parametrize("method", ["seuf", "router_l2_single"])
def test_the_optimizer_of_the_routers_alone_cannot_keep_one_expert(method):
    """Decay and momentum of another optimizer would move experts that must not train."""
    model = small_model()
    routers = [parameter for name, parameter in model.named_parameters() if "gate.weight" in name]
    with pytest.raises(ValueError, match="the optimizer does not hold the experts"):
        gripmoe.constrain(model, torch.optim.AdamW(routers), RETAIN, method=method, forget=FORGET)
    gripmoe.constrain(model, adamw(model), RETAIN, method=method, forget=FORGET).close()


@pytest.mark.parametrize("family", ["deepseek_v3", "minimax_m2", "ernie4_5_moe"])
@pytest.mark.parametrize("written", [0.01, 0.0, None])
def test_biases_that_balance_the_load_are_warned_of_if_they_change(written, family, recwarn):
    """They are buffers of the router or of its block, or parameters. A bias that is written with the same values, as by
    a broadcast between processes, has not changed."""
    model = make(family).model
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    with gripmoe.constrain(model, optimizer, RETAIN):
        for _ in range(3):
            optimizer.step()
            for name, bias in (*model.named_buffers(), *model.named_parameters()):
                if name.endswith("e_score_correction_bias") and written is not None:
                    bias.detach().add_(written)
    said = [str(each.message) for each in recwarn if "biases that balance the load" in str(each.message)]
    assert len(said) == bool(written)


@pytest.mark.parametrize("method", ["frozen_router", "expert_specific"])
def test_a_constrained_model_compiles_to_one_graph(method, monkeypatch):
    """Routers leave autocast only where it is on. The control: there the graph breaks."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    model = small_model().train()
    with gripmoe.constrain(model, adamw(model, lr=0.0), RETAIN, method=method):
        with torch._dynamo.config.patch(disable=False):
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            assert torch.equal(compiled(**RETAIN[0].inputs).logits, model(**RETAIN[0].inputs).logits)
            with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(torch._dynamo.exc.Unsupported):
                compiled(**RETAIN[0].inputs)
    torch._dynamo.reset()


def test_seuf_leaves_shared_experts_as_they_are():
    """The control: they train without it."""
    for method, stays in (("seuf", True), ("frozen_router", False)):
        model = small_model("qwen2_moe")
        optimizer = adamw(model, lr=1e-2)
        shared = {name: p.detach().clone() for name, p in model.named_parameters() if "shared_expert" in name}
        with gripmoe.constrain(model, optimizer, RETAIN, forget=FORGET, method=method) as handle:
            train(model, optimizer, handle)
        now = dict(model.named_parameters())
        assert shared and all(torch.equal(now[name], before) for name, before in shared.items()) == stays
        assert all(now[name].requires_grad for name in shared)


def test_threads_that_share_hooks_are_refused():
    model = small_model()
    parallel = torch.nn.DataParallel(model)
    with pytest.raises(ValueError, match="nn.DataParallel runs a pass in threads.* by torchrun"):
        gripmoe.constrain(parallel, adamw(model), RETAIN)


def test_a_second_handle_is_refused_before_anything_is_recorded(monkeypatch):
    """And gradients that the loop has computed stay."""
    model = small_model()
    optimizer = adamw(model)
    with gripmoe.constrain(model, optimizer, RETAIN):
        model(**FORGET[0].inputs, labels=FORGET[0].input_ids).loss.backward()
        monkeypatch.setattr(MoEModel, "traced", lambda *_: pytest.fail("something was recorded"))
        with pytest.raises(ValueError, match="another handle holds this model"):
            gripmoe.constrain(model, optimizer, RETAIN, method="frozen_router")


def test_an_error_leaves_gradients_of_routers(monkeypatch):
    model = small_model()
    optimizer = adamw(model)
    model(**FORGET[0].inputs, labels=FORGET[0].input_ids).loss.backward()
    gradient = model.model.layers[0].mlp.gate.weight.grad

    def fails(*_):
        raise ValueError("no room")

    monkeypatch.setattr("gripmoe.library.constrain.OriginalSets", fails)
    with pytest.raises(ValueError, match="no room"):
        gripmoe.constrain(model, optimizer, RETAIN, method="frozen_router", replay=True)
    assert model.model.layers[0].mlp.gate.weight.grad is gradient


def sets_used(model, batch):
    with MoEModel(model).record_routing() as recorder:
        model(**batch.inputs)
        return {layer: seen.top_k_Nk for layer, seen in recorder.take(batch.attention_mask.bool()).items()}


def agree(some, others):
    return all(torch.equal(some[layer], others[layer]) for layer in some)


SOFT = [Method(constraint=name) for name in ("none", "router_l2", "gate_anchor", "routing_scores")]


@pytest.mark.parametrize("method", ["frozen_router", "expert_specific", "anchored", "seuf", *SOFT], ids=str)
def test_replay_trains_under_the_original_sets_and_evaluates_freely(method):
    model = small_model()
    optimizer = adamw(model, lr=0.1)
    original = sets_used(model, FORGET[0])
    with gripmoe.constrain(model, optimizer, RETAIN, forget=FORGET, method=method, replay=True) as handle:
        train(model, optimizer, handle)
        assert not agree(sets_used(model, FORGET[0]), original), "in evaluation, and the control"
        model.train()
        assert agree(sets_used(model, FORGET[0]), original)
        with pytest.raises(KeyError, match="give every document that training uses"):
            model(**random_batch(seed=5).inputs)
    assert not agree(sets_used(model, FORGET[0]), original), "closed, it is free in training mode too"


@pytest.mark.parametrize("training", [False, True])
def test_replay_in_eval_mode_is_warned_of(training, recwarn):
    """It leaves those passes alone. Evaluation between steps is no reason to warn."""
    model = small_model().train(training)
    optimizer = adamw(model)
    with gripmoe.constrain(model, optimizer, RETAIN, forget=FORGET, method="frozen_router", replay=True) as handle:
        with handle.forget():
            model(**FORGET[0].inputs, labels=FORGET[0].input_ids).loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.eval()(**RETAIN[0].inputs)
        optimizer.step()
    assert any("`replay` has not acted on this step" in str(seen.message) for seen in recwarn) != training


def test_replay_of_activations_that_are_computed_again():
    """The same gradients as without recomputation, of several passes before one backward pass too. The control: without
    replay they are others."""

    def gradients(recomputed, replay=True):
        model = small_model().train()
        if recomputed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        settings = dict(forget=FORGET, method=Method(constraint="none"), replay=replay)
        with gripmoe.constrain(model, adamw(model), RETAIN, **settings):
            with torch.no_grad():
                model.model.layers[0].mlp.experts.down_proj.mul_(3)
            for batches in ([RETAIN[0]], [FORGET[0], RETAIN[0]]):
                sum(model(**batch.inputs, labels=batch.input_ids).loss for batch in batches).backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(recomputed=False)
    torch.testing.assert_close(gradients(recomputed=True), expected)
    free = gradients(recomputed=False, replay=False)
    assert not all(map(torch.allclose, free, expected))


def test_under_replay_an_unknown_document_is_named_with_a_remedy_that_helps():
    """A copy of the original model would change nothing: replay reads the sets that it has recorded."""
    model = small_model().train()
    with gripmoe.constrain(model, adamw(model), RETAIN, replay=True):
        with pytest.raises(KeyError, match="under replay, give every document that training uses as `retain` or"):
            model(**FORGET[0].inputs)
    with gripmoe.constrain(model, adamw(model), RETAIN, forget=FORGET, replay=True):
        model(**FORGET[0].inputs)


def test_an_anchor_starts_at_no_weight_above_the_highest():
    model = small_model()
    with pytest.raises(ValueError, match="`anchor_floor` is 100000, above the highest weight of 10000"):
        gripmoe.constrain(model, adamw(model), RETAIN, method=Method(constraint="anchor", anchor_floor=1e5))


def test_under_replay_an_anchor_still_sees_what_routers_would_choose():
    """The passes use the original sets, so by those nothing would ever be amiss and the weight would fall."""
    model = small_model()
    method = Method(constraint="anchor", anchor_floor=1e-3)
    optimizer = adamw(model)
    with gripmoe.constrain(model, optimizer, RETAIN, method=method, replay=True) as handle:
        model.train()
        with torch.no_grad():
            model.model.embed_tokens.weight.add_(torch.randn_like(model.model.embed_tokens.weight))
        with handle.retain():
            logits = model(**RETAIN[0].inputs).logits
        (0 * logits.sum() + handle.penalty()).backward()
        optimizer.step()
        assert handle.constraint.weight.value > 1.0


def test_a_retain_loss_above_its_bound_ends_training_before_the_step():
    """Ascent on everything: without the bound the model is destroyed, with it the last weights are still good."""
    losses = {}
    for bound in (5.0, float("inf")):
        model = small_model()
        optimizer = adamw(model, lr=1e-2)

        def loss_of(batch, model=model):
            return model(**batch.inputs, labels=batch.input_ids).loss

        with gripmoe.constrain(model, optimizer, RETAIN, method="frozen_router", loss_bound=bound) as handle:
            try:
                for _ in range(40):
                    optimizer.zero_grad()
                    handle.check(loss_of(RETAIN[0]))
                    (-loss_of(FORGET[0])).backward()
                    optimizer.step()
            except gripmoe.Diverged:
                assert bound == 5.0
        losses[bound] = loss_of(RETAIN[0]).item()
    assert losses[5.0] < 6.0 and losses[float("inf")] > 8.0, losses
    with pytest.raises(gripmoe.Diverged, match="retain loss nan"):
        handle.check(float("nan"))
    with pytest.raises(ValueError, match="`retain_loss` has 2 numbers: give its mean"):
        handle.check(torch.ones(2))


def test_a_bound_that_the_loop_leaves_out_is_an_error():
    model = small_model()
    optimizer = adamw(model)
    with gripmoe.constrain(model, optimizer, RETAIN, method="frozen_router", loss_bound=5.0):
        model(**RETAIN[0].inputs, labels=RETAIN[0].input_ids).loss.backward()
        with pytest.raises(RuntimeError, match=r"call `handle.check\(loss\)` in every step"):
            optimizer.step()


@pytest.mark.parametrize("method", ["anchored", Method(constraint="routing_scores")])
def test_a_second_model_answers_what_a_cache_would_and_about_documents_that_nobody_listed(method):
    """After a step: penalties by the original's forward pass and by what was kept of it agree to the bit."""
    penalties = {}
    listed, unlisted = random_batch(seed=2), random_batch(seed=3)
    for kind in ("kept", "asked"):
        model = small_model()
        original = copy.deepcopy(model) if kind == "asked" else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gripmoe.constrain(model, optimizer, [listed], method=method, original=original) as handle:
            model(**random_batch(seed=1).inputs, labels=random_batch(seed=1).input_ids).loss.backward()
            with handle.retain():
                model(**listed.inputs)
            handle.penalty()
            optimizer.step()
            with handle.retain():
                model(**listed.inputs)
            penalties[kind] = handle.penalty().item()
            if kind == "kept":
                with pytest.raises(KeyError, match="no original output for a document"), handle.retain():
                    model(**unlisted.inputs)
            else:
                with handle.retain():
                    model(**unlisted.inputs)
                assert handle.penalty() > 0
    assert penalties["kept"] == penalties["asked"] > 0


def test_a_closed_handle_gives_the_second_model_back_as_it_was():
    """Its hooks, its mode, what of it trains, and its routers' precision and values."""
    model = small_model().bfloat16()
    original = copy.deepcopy(model).train()
    original.model.embed_tokens.requires_grad_(False)

    def looks():
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in original.modules())
        return hooks, original.training, [(p.dtype, p.requires_grad) for p in original.parameters()]

    before, weights = looks(), copy.deepcopy(original.state_dict())
    with gripmoe.constrain(model, adamw(model), RETAIN, method="anchored", original=original):
        hooks, training, parameters = looks()
        assert hooks == 2 * 2 and not training and not any(grad for _, grad in parameters), "the control"
    assert looks() == before
    assert all(torch.equal(value, weights[name]) for name, value in original.state_dict().items())


def test_the_model_is_not_its_own_original():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="`original` is the model that trains"):
        gripmoe.constrain(model, optimizer, [random_batch()], method="anchored", original=model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_positions_that_go_on_are_as_good_as_none():
    """Left padding shifts them, which turns no attention."""
    ids = random_batch(seed=100).input_ids
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    seen = []
    for positions in ({}, {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}):
        seen.append(MoEModel(small_model()).trace([{"input_ids": ids, "attention_mask": mask, **positions}]))
    assert all(torch.equal(seen[0][layer].top_k_Nk, seen[1][layer].top_k_Nk) for layer in seen[0])


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), small_model().model], ids=["linear", "decoder"])
def test_what_has_no_language_head_is_named(model):
    with pytest.raises(ValueError, match="is no model of transformers: give the one that has a language head"):
        gripmoe.constrain(model, adamw(model), RETAIN)


class ScheduleFree(torch.optim.SGD):
    """As optimizers whose `eval()` puts averages in the place of the weights that steps have written."""

    def train(self): ...

    def eval(self): ...


def test_a_schedule_free_optimizer_is_refused_where_its_steps_are_constrained():
    model = small_model()
    optimizer = ScheduleFree(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="ScheduleFree is schedule-free: .*frozen_router"):
        gripmoe.constrain(model, optimizer, [random_batch()])
    gripmoe.constrain(model, optimizer, [random_batch()], method="frozen_router").close()


def test_an_optimizer_without_a_rate_is_refused_where_gradients_are_projected_by_it():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None  # as of transformers' Adafactor with relative steps
    with pytest.raises(ValueError, match="projects gradients by the learning rate, and the optimizer has none"):
        gripmoe.constrain(model, optimizer, [random_batch()], method="reparameterized")
    gripmoe.constrain(model, optimizer, [random_batch()]).close()


def test_a_model_whose_optimizer_holds_what_trains():
    """The first router is frozen and not in the optimizer; the other is constrained."""
    model = small_model()
    MoEModel(model).theta(0).requires_grad_(False)
    trace = MoEModel(model).trace(RETAIN)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    with gripmoe.constrain(model, optimizer, RETAIN) as handle:
        train(model, optimizer, handle)
    assert router_only_stability(trace, model) == 1.0
    with pytest.raises(ValueError, match="of several optimizers give the one that holds them"):
        gripmoe.constrain(model, torch.optim.SGD([model.lm_head.weight], lr=0.1), RETAIN)


def test_a_bf16_model_that_has_begun_to_train():
    """AdamW's states of a router become fp32 with it."""
    model = small_model().to(torch.bfloat16)
    optimizer = adamw(model, lr=1e-3)
    model(**RETAIN[0].inputs, labels=RETAIN[0].input_ids).loss.backward()
    optimizer.step()
    trace = MoEModel(model).trace(RETAIN)
    with gripmoe.constrain(model, optimizer, RETAIN) as handle:
        train(model, optimizer, handle)
    train(model, optimizer, handle, steps=1)
    assert router_only_stability(trace, model) > 0.5


def test_every_module_keeps_its_mode():
    model = small_model().train()
    model.model.layers[0].eval()
    MoEModel(model).trace(RETAIN)
    assert model.training and not model.model.layers[0].self_attn.training and model.model.layers[1].training


def test_offloaded_routers_are_refused():
    model = small_model()
    optimizer = adamw(model)
    for layer in model.model.layers:
        layer.mlp.gate.to("meta")
    with pytest.raises(ValueError, match="routers are offloaded .device `meta`.: load the model without offloading"):
        gripmoe.constrain(model, optimizer, RETAIN)


def test_a_step_whose_passes_call_no_hook_is_warned_of(recwarn):
    """As of a model that was compiled and has run before. The control: a pass that replay has seen."""
    for passes in (True, False):
        model = small_model().train()
        optimizer = adamw(model)
        recwarn.clear()
        with gripmoe.constrain(model, optimizer, RETAIN, method="frozen_router", replay=True):
            if passes:
                model(**RETAIN[0].inputs)
            optimizer.step()
        assert any("compile it afterwards" in str(seen.message) for seen in recwarn) != passes


def test_a_refused_pass_or_step_leaves_nothing_to_the_next():
    """A pass without a penalty does not count as marked, and the passes of a refused step are not those of the next."""
    model = small_model()
    optimizer = adamw(model)
    with gripmoe.constrain(model, optimizer, RETAIN, method="anchored") as handle:
        with pytest.raises(KeyError, match="`original=` a copy of the model"), handle.retain():
            model(**random_batch(seed=3).inputs)
        with pytest.raises(RuntimeError, match="this method looks at the retain forward"):
            optimizer.step()
    with gripmoe.constrain(model, optimizer, RETAIN, method="combined_paper", forget=FORGET) as handle:
        with handle.retain():
            model(**RETAIN[0].inputs)
        assert handle._seen, "the control"
        with pytest.raises(RuntimeError, match="this method looks at the forget forward"):
            optimizer.step()
        assert not handle._seen and not handle._before


@pytest.mark.parametrize(("method", "kept"), [("expert_specific", True), ("expert_specific_paper", False)])
def test_a_method_without_fixed_bases_keeps_no_trace(method, kept, monkeypatch):
    """That of 100,000 tokens of a large model takes 40 GB."""
    given = []
    monkeypatch.setattr(
        "gripmoe.library.constrain.build",
        lambda method, trace, *args, **kw: given.append(trace) or build(method, trace, *args, **kw),
    )
    model = small_model()
    gripmoe.constrain(model, adamw(model), RETAIN, method=method).close()
    assert bool(given[0]) == kept
