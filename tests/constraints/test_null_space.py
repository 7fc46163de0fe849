"""Method A on a real optimizer: what it promises, and the controls without the mechanism."""

import functools
import json
import weakref
from types import SimpleNamespace

import pytest
import torch

import gripmoe
from conftest import METHODS, random_batch, small_model
from gripmoe.auditing.inputs import benchmark_inputs
from gripmoe.config.methods import EpsNullConfig, Method, method_table
from gripmoe.constraints import null_space as module
from gripmoe.constraints.base import Unconstrained
from gripmoe.constraints.hooks import ConstraintHandle
from gripmoe.constraints.null_space import NullSpace, NullSpacePaper, constrained_trace, fit_bases, null_space_of
from gripmoe.data.batches import batches_of
from gripmoe.geometry import screening
from gripmoe.geometry.halfspace import nearest_feasible, violation
from gripmoe.geometry.nullspace import EpsNull, RetainBasis, RetainStatistics, covariance_basis, extended
from gripmoe.geometry.routing import (
    LayerRouting,
    SelectionRule,
    mean_stability,
    route,
    selection_mask,
    stability_by_layer,
)
from gripmoe.moe import MoEModel
from pretended_devices import FIRST, HOST, MixedDevices, PretendedDevices, device_of


def null_space(eps_null, **axes):
    config = EpsNullConfig(value=eps_null, kind="relative")
    return Method(constraint="null_space", basis="original", eps_null=config, **axes)


def constrained_by(constraint, moe, optimizer, retain=()):
    constraint.start(moe, retain)
    return ConstraintHandle(moe, optimizer, constraint)


def train(model, optimizer, handle=None, steps=8, seed=1):
    """Any training loop: ordinary losses, AdamW with momentum and weight decay."""
    for step in range(steps):
        batch = random_batch(seed=seed + step)
        optimizer.zero_grad()
        if handle is None:
            model(**batch.inputs, labels=batch.input_ids).loss.backward()
        else:
            with handle.retain():
                model(**batch.inputs, labels=batch.input_ids).loss.backward()
        optimizer.step()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def router_only_stability(trace, moe):
    moved = {layer: route(r.x_Nd, moe.theta(layer).detach(), moe.rule(layer)) for layer, r in trace.items()}
    return mean_stability(stability_by_layer(trace, moved))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_sound_constraint_keeps_every_recorded_set(family):
    retain = [random_batch(seed=100 + i) for i in range(2)]
    stability, moved = {}, {}
    for constrained in (True, False):
        model = small_model(family)
        optimizer = adamw(model)
        trace = MoEModel(model).trace(retain)
        before = MoEModel(model).thetas()
        if constrained:
            with gripmoe.constrain(model, optimizer, retain) as handle:
                train(model, optimizer, handle)
        else:
            train(model, optimizer)
        moe = MoEModel(model)
        stability[constrained] = router_only_stability(trace, moe)
        moved[constrained] = sum((moe.theta(layer) - before[layer]).norm().item() for layer in moe.layers)
    assert stability[True] == 1.0
    assert stability[False] < 0.9, "the control: unconstrained, the sets change"
    assert moved[True] > 0.01, "the router is not frozen"


def test_the_threshold_decides_how_many_selections_of_a_trained_model_stay():
    """As docs/geometry.md says. Random models, as above, leave no direction free in which selected scores move."""
    documents = benchmark_inputs("wmdp_tiny").files
    changed = {}
    for eps_null in (1e-4, 1e-8):
        torch.manual_seed(0)
        model, tokenizer = gripmoe.tiny_model()

        def batches(name, tokenizer=tokenizer):
            rows = [row["prompt"] + row["text"] for row in documents[name][:64]]
            parts = [rows[start : start + 8] for start in range(0, 64, 8)]
            return [tokenizer(part, return_tensors="pt", padding=True, return_token_type_ids=False) for part in parts]

        def loss(batch, model=model):
            labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            return model(**batch, labels=labels).loss

        retain, forget = batches("retain_corpus"), batches("forget_corpus")
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
        trace = MoEModel(model).trace(batches_of(retain, "retain"))
        with gripmoe.constrain(model, optimizer, retain, method=null_space(eps_null)):
            for step in range(24):
                optimizer.zero_grad()
                (loss(retain[step % 8]) - loss(forget[step % 8])).backward()
                optimizer.step()
        moe = MoEModel(model)
        moved = {layer: route(r.x_Nd, moe.theta(layer).detach(), moe.rule(layer)) for layer, r in trace.items()}
        changed[eps_null] = [
            (trace[n].top_k_Nk.sort().values != moved[n].top_k_Nk.sort().values).any(1).float().mean() for n in trace
        ]
    assert 0 < max(changed[1e-4]) < 0.03, "a few selections change"
    assert sum(changed[1e-8]) == 0, "the control: with nearly nothing free, none does"


def test_projecting_the_gradient_does_not_hold_under_adamw():
    """Why the sound form acts on the update that the optimizer made: AdamW's update of a projected gradient leaks."""
    retain = [random_batch(rows=1, length=8, seed=100)]
    leaks = {}
    for what in ("gradient", "update"):
        model = small_model()
        moe = MoEModel(model)
        bases = fit_bases(moe.trace(retain), moe.rules(), null_space(1e-6))
        before = moe.thetas()
        optimizer = adamw(model)
        if what == "gradient":

            def project(*_, moe=moe, bases=bases):
                for layer in moe.layers:
                    moe.theta(layer).grad.copy_(bases[layer].project(moe.theta(layer).grad))

            optimizer.register_step_pre_hook(project)
            train(model, optimizer)
        else:
            with gripmoe.constrain(model, optimizer, retain) as handle:
                train(model, optimizer, handle)
        displacement = moe.theta(0).detach() - before[0]
        leaks[what] = ((displacement - bases[0].project(displacement)).norm() / displacement.norm()).item()
    assert leaks["update"] < 1e-5
    assert leaks["gradient"] > 1e-2


def test_unconstrained_handle_changes_nothing():
    plain, constrained = small_model(), small_model()
    optimizer = adamw(plain)
    train(plain, optimizer)
    optimizer = adamw(constrained)
    with constrained_by(Unconstrained(), MoEModel(constrained), optimizer) as handle:
        train(constrained, optimizer, handle)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), constrained.parameters(), strict=True))


def test_the_recorded_routing_is_let_go_once_training_begins():
    moe, method = MoEModel(small_model()), null_space(0.3)
    trace = moe.trace([random_batch()])
    constraint = NullSpace(trace, fit_bases(trace, moe.rules(), method))
    constraint.start(moe, [])
    recorded = weakref.ref(trace[0].top_k_Nk)
    del trace
    assert recorded() is None


def test_paper_form_projects_each_update_against_the_current_minibatch():
    """One row of the retain minibatch, far margins: the step must leave its selected scores where they were."""
    generator = torch.Generator().manual_seed(0)
    model = small_model()
    moe = MoEModel(model)
    constraint = NullSpacePaper(METHODS["expert_specific_paper"])
    constraint.start(moe, [])
    x = 3 * torch.randn(6, 32, generator=generator)
    before = moe.theta(0).detach()
    seen = route(x, before, moe.rule(0))
    after = before + 0.01 * torch.randn(before.shape, generator=generator)
    feasible = constraint.constrain(0, before, after, seen)
    selected = selection_mask(seen.top_k_Nk, moe.num_experts)
    assert (x @ (feasible - before).T).abs()[selected].max() < 1e-4
    assert (x @ (after - before).T).abs()[selected].max() > 1e-2, "the control"
    expected = covariance_basis(x, selected, EpsNull(1e-2, "absolute")).project(after - before)
    torch.testing.assert_close(feasible - before, expected, atol=1e-6, rtol=0)


def test_paper_form_constrains_by_the_sets_of_the_original_router_after_it_has_drifted():
    """The control: scores that the router of the step before selects move."""
    generator = torch.Generator().manual_seed(7)
    moe = MoEModel(small_model())
    constraint = NullSpacePaper(METHODS["expert_specific_paper"].model_copy(update={"kaczmarz_tolerance": 1e6}))
    constraint.start(moe, [])
    theta, rule = moe.theta(0).detach(), moe.rule(0)
    drifted = 3 * torch.randn(theta.shape, generator=generator)
    x = torch.randn(6, 32, generator=generator)
    original, seen = route(x, theta, rule), route(x, drifted, rule)
    after = drifted + 0.1 * torch.randn(theta.shape, generator=generator)
    moved = (x @ (constraint.constrain(0, drifted, after, seen) - drifted).T).abs()
    assert moved.gather(1, original.top_k_Nk).max() < 1e-3 < 1e-2 < moved.gather(1, seen.top_k_Nk).max()


@pytest.mark.parametrize("safety_margin", [1e-3, 1e3], ids=["margins", "bounds of 0"])
def test_large_inputs_of_low_rank_keep_their_sets_and_leave_the_rest_free(safety_margin):
    """Inputs of norm 30 that span 16 of 32 directions, but for the rounding of fp32: what the other directions do to
    scores is rounding, and no reason to stop rows, even where every bound is 0."""
    generator = torch.Generator().manual_seed(0)
    moe = MoEModel(small_model())
    theta = moe.theta(0).detach().clone()
    x = torch.randn(400, 16, generator=generator) @ torch.randn(16, 32, generator=generator)
    seen = route(30 * x / x.norm(dim=1, keepdim=True), theta, moe.rule(0))
    trace = dict.fromkeys(range(2), seen)
    constraint = NullSpace(trace, fit_bases(trace, moe.rules(), null_space(1e-4)), safety_margin)
    constraint.start(moe, [])
    constrained, free = theta, theta
    for _ in range(20):
        step = 0.05 * torch.randn(theta.shape, generator=generator)
        constrained, free = constraint.constrain(0, constrained, constrained + step, None), free + step

    def stability(moved):
        return mean_stability(stability_by_layer({0: seen}, {0: route(seen.x_Nd, moved, moe.rule(0))}))

    assert stability(constrained) == 1.0 and stability(free) < 0.9
    feasible = constraint.bases[0].project((free - theta).double())
    assert ((constrained - theta).norm(dim=1) > 0.99 * feasible.norm(dim=1)).all()


@pytest.mark.parametrize(
    "choice, less", [({"kaczmarz_steps": 5000}, 0.5), ({"kaczmarz_tolerance": 1e6}, None)], ids=str
)
def test_a_method_chooses_the_draws_of_algorithm_1_and_what_triggers_them(choice, less):
    """More draws leave less violated; under a tolerance that nothing exceeds Stage 1 is all there is."""
    generator = torch.Generator().manual_seed(0)
    moe = MoEModel(small_model())
    theta, rule = moe.theta(0).detach(), moe.rule(0)
    seen = route(torch.randn(100, 32, generator=generator), theta, rule)
    update = torch.randn(theta.shape, generator=generator)
    eps_null = EpsNullConfig(value=0.3, kind="relative")
    method = Method(constraint="null_space", form="paper", basis="minibatch", eps_null=eps_null)
    selected = selection_mask(seen.top_k_Nk, moe.num_experts)
    bounds = (rule.margins(seen.scores_NE, seen.top_k_Nk) - 1e-3).masked_fill(selected, torch.inf)

    def feasible(method):
        constraint = null_space_of(method, dict.fromkeys(range(2), seen), None, seed=0)
        constraint.start(moe, [])
        return constraint.constrain(0, theta, theta + update, seen) - theta

    stage_1 = covariance_basis(seen.x_Nd, selected, EpsNull(0.3, "relative")).project(update)
    usual, chosen = feasible(method), feasible(method.model_copy(update=choice))
    if less is None:
        torch.testing.assert_close(chosen, stage_1, atol=1e-5, rtol=0)
        assert (usual - stage_1).norm() > 0.1, "the control"
    else:
        assert 0 < violation(chosen, seen.x_Nd, bounds).sum() < less * violation(usual, seen.x_Nd, bounds).sum()


def paper(**axes):
    return Method(
        constraint="null_space", form="paper", basis="minibatch", eps_null={"value": 0.3, "kind": "relative"}, **axes
    )


def test_the_papers_full_null_space_is_stage_1_alone_with_every_token():
    """Every score stays on the strong directions of all tokens; per expert, other experts' tokens move scores."""
    generator = torch.Generator().manual_seed(0)
    moe = MoEModel(small_model())
    theta, rule = moe.theta(0).detach(), moe.rule(0)
    seen = route(torch.randn(100, 32, generator=generator), theta, rule)
    update = torch.randn(theta.shape, generator=generator)
    moved = {}
    for granularity in ("layer", "expert"):
        constraint = null_space_of(paper(granularity=granularity), {}, None, seed=0)
        constraint.start(moe, [])
        moved[granularity] = constraint.constrain(0, theta, theta + update, seen) - theta
    basis = covariance_basis(seen.x_Nd, torch.ones(100, 1, dtype=torch.bool), EpsNull(0.3, "relative"))
    assert 0 < basis.ranks.item() < 32
    torch.testing.assert_close(moved["layer"], basis.project(update))
    assert (moved["expert"] - basis.project(moved["expert"])).norm() > 0.1, "the control"


@pytest.mark.parametrize("name", [name for name, method in method_table().items() if method.has_bases])
def test_bases_depend_on_the_settings_that_name_them_alone(name):
    """The workflow fits bases again when these settings change, and other steps refuse bases of other settings."""
    read = set()

    class Recording:
        def __getattr__(self, key):
            read.add(key)
            return getattr(method_table()[name], key)

    moe = MoEModel(small_model())
    retain, forget = moe.trace([random_batch(seed=0)]), moe.trace([random_batch(seed=1)])
    fit_bases(constrained_trace(Recording(), retain, forget), moe.rules(), Recording())
    named = set(json.loads(method_table()[name].fitted_with))
    assert {"surface", "eps_null", "granularity", "max_rank"} <= read, "the control: the settings are read here"
    assert read <= named < Method.OF_BASES


def test_cached_bases_keep_the_originals_tokens_and_all_that_came_since():
    """The control, bases of the minibatch alone, lets scores of earlier tokens move. Bases stay orthonormal."""
    generator = torch.Generator().manual_seed(0)
    moe = MoEModel(small_model())
    theta, rule = moe.theta(0).detach(), moe.rule(0)
    first, second, third = (route(torch.randn(8, 32, generator=generator), theta, rule) for _ in range(3))
    update = torch.randn(theta.shape, generator=generator)
    moved = {}
    for basis in ("cached", "minibatch"):
        method = METHODS["expert_specific_paper"].model_copy(update={"basis": basis, "kaczmarz_tolerance": 1e6})
        trace = dict.fromkeys(range(2), first)
        bases = fit_bases(trace, moe.rules(), method) if basis == "cached" else None
        constraint, resumed = (null_space_of(method, trace, bases, seed=0) for _ in range(2))
        for one in (constraint, resumed):
            one.start(moe, [])
        constraint.constrain(0, theta, theta + update, second)
        resumed.load_state(constraint.state())
        change = constraint.constrain(0, theta, theta + update, third) - theta
        assert torch.equal(resumed.constrain(0, theta, theta + update, third) - theta, change)
        scores = [(seen.x_Nd @ change.T).gather(1, seen.top_k_Nk).abs().max() for seen in (first, second, third)]
        moved[basis] = torch.stack(scores)
    assert moved["cached"].max() < 1e-3 and moved["minibatch"][2] < 1e-3
    assert moved["minibatch"][:2].min() > 0.1, "the control"
    fixed = rule.fixed(second.scores_NE, second.top_k_Nk)
    U = extended(fit_bases(trace, moe.rules(), method)[0], second.x_Nd, fixed, EpsNull(1e-2, "absolute")).columns_Edr
    torch.testing.assert_close(U.transpose(1, 2) @ U, torch.diag_embed((U != 0).any(dim=1).float()), atol=1e-5, rtol=0)


def test_a_projected_gradient_does_not_repair_margins_that_are_exceeded():
    """Nor does it add to a step of next to nothing what would be divided by its rate. The control: a projected update
    does both."""
    generator = torch.Generator().manual_seed(0)
    moe = MoEModel(small_model())
    theta, rule = moe.theta(0).detach(), moe.rule(0)
    seen = route(torch.randn(100, 32, generator=generator), theta, rule)
    update = 1e-8 * torch.randn(theta.shape, generator=generator, dtype=torch.float64)
    stage_1 = covariance_basis(seen.x_Nd, rule.fixed(seen.scores_NE, seen.top_k_Nk), EpsNull(0.3, "relative"))
    for projects in ("gradient", "update"):
        constraint = null_space_of(paper(projects=projects, safety_margin=1.0), {}, None, seed=0)
        constraint.start(moe, [])
        moved = constraint.constrain(0, theta.double(), theta.double() + update, seen) - theta
        added = (moved - stage_1.double().project(update)).norm() / update.norm()
        assert added < 1e-4 if projects == "gradient" else added > 1e4


def test_a_state_loaded_to_another_device_is_brought_to_the_model():
    """As by `torch.load(map_location="cuda")`. The control: its bases are of another device than a minibatch."""
    method = method_table()["expert_specific_paper_cached"]
    with PretendedDevices():
        moe = MoEModel(small_model())
        theta = moe.theta(0).detach()
        seen = route(torch.randn(8, 32, generator=torch.Generator().manual_seed(0)), theta, moe.rule(0))
        trace = dict.fromkeys(range(2), seen)
        constraint = null_space_of(method, trace, fit_bases(trace, moe.rules(), method), seed=0)
        constraint.start(moe, [])
        step = 0, theta, theta + 0.1, seen
        constraint.constrain(*step)
        state = constraint.state()
        generator, cached = state["generator"].to(FIRST), {layer: U.to(FIRST) for layer, U in state["cached"].items()}
        expected = constraint.constrain(*step)
        with pytest.raises(MixedDevices):
            seen.x_Nd @ cached[0]
        draws, given = constraint.generator, []
        constraint.generator = SimpleNamespace(set_state=given.append)
        constraint.load_state(state | {"generator": generator, "cached": cached})
        assert [device_of(tensor) for tensor in given] == [HOST], "where alone torch takes it"
        constraint.generator = draws.set_state(given[0])
        assert torch.equal(constraint.constrain(*step), expected)


@pytest.mark.parametrize("surface", ["retain", "forget", "combined"])
def test_the_papers_form_looks_at_the_tokens_of_its_surface(surface):
    """Of the minibatch: scores of selected experts stay on tokens of the sides named and move on those of the other."""
    moe = MoEModel(small_model())
    optimizer = torch.optim.AdamW(moe.model.parameters(), lr=0.01)
    batches = {"forget": random_batch(rows=1, seed=1), "retain": random_batch(rows=1, seed=2)}
    method = paper(surface=surface).model_copy(update={"eps_null": EpsNullConfig(value=1e-2, kind="absolute")})
    seen = {kind: moe.trace([batch])[0] for kind, batch in batches.items()}
    before, moved = moe.theta(0).detach().clone(), {}
    with gripmoe.constrain(moe.model, optimizer, [batches["retain"]], method=method) as handle:
        for kind, batch in batches.items():
            with getattr(handle, kind)():
                moe.model(**batch.inputs, labels=batch.input_ids).loss.backward()
        optimizer.step()
        for kind, routing in seen.items():
            change = routing.x_Nd @ (moe.theta(0).detach() - before).T
            moved[kind] = change.gather(1, routing.top_k_Nk).abs().max().item()
    fixed = {"retain", "forget"} if surface == "combined" else {surface}
    assert all(moved[kind] < 1e-3 if kind in fixed else moved[kind] > 1e-2 for kind in moved), moved


def test_layer_granularity_is_the_stricter_one():
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    theta = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    trace = {0: LayerRouting(x, x @ theta.T, (x @ theta.T).topk(2).indices)}
    update = torch.randn(8, 32, generator=torch.Generator().manual_seed(2))
    methods = {g: null_space(1e-8, granularity=g) for g in ("expert", "layer")}
    free = {
        g: fit_bases(trace, {0: SelectionRule(2)}, method)[0].project(update).norm() for g, method in methods.items()
    }
    assert free["layer"] < 1e-3 < free["expert"]


def test_fitting_in_blocks_is_fitting_at_once():
    generator = torch.Generator().manual_seed(0)
    x, theta = torch.randn(2500, 16, generator=generator), torch.randn(4, 16, generator=generator)
    routing = route(x, theta, SelectionRule(2))
    blocked = fit_bases({0: routing}, {0: SelectionRule(2)}, null_space(1e-6))[0]
    once = RetainStatistics(4, 16).update(x, selection_mask(routing.top_k_Nk, 4)).basis(EpsNull(1e-6, "relative"))
    update = torch.randn(4, 16, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(blocked.project(update.float()).double(), once.project(update), atol=1e-5, rtol=0)


def test_bands_count_layers_of_the_whole_trace():
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, -3, 32)
    theta = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    trace = dict.fromkeys(range(3), route(x, theta, SelectionRule(2)))
    eps_null = EpsNullConfig(value=1e-1, kind="relative", bands={"late": 1e-9})
    method = Method(constraint="null_space", basis="original", eps_null=eps_null)
    rules = dict.fromkeys(range(3), SelectionRule(2))
    ranks = {layer: basis.ranks.sum() for layer, basis in fit_bases(trace, rules, method).items()}
    assert ranks[0] == ranks[1] < ranks[2]


@pytest.mark.parametrize("basis", ["original", "minibatch"])
def test_a_rank_cap_holds_the_strongest_directions_alone(basis):
    """Inputs with one strong direction: capped at one, bases keep it and drop the weak ones."""
    generator = torch.Generator().manual_seed(0)
    moe = MoEModel(small_model())
    theta = moe.theta(0).detach()
    x = torch.randn(40, 32, generator=generator)
    x[:, 0] = 50.0
    seen, strong = route(x, theta, moe.rule(0)), torch.eye(32)[0]
    trace = dict.fromkeys(range(2), seen)
    update = 1e-3 * torch.randn(theta.shape, generator=generator)
    served = selection_mask(seen.top_k_Nk, 8).any(dim=0)
    strongly, weakly = {}, {}
    for cap in (None, 1):
        config = EpsNullConfig(value=1e-9, kind="relative")
        method = Method(constraint="null_space", basis=basis, eps_null=config, max_rank=cap)
        constraint = null_space_of(method, trace, fit_bases(trace, moe.rules(), method), seed=0)
        constraint.start(moe, [])
        feasible = constraint.constrain(0, theta, theta + update, seen) - theta
        strongly[cap] = (feasible[served] @ strong).abs().max().item()
        weakly[cap] = (x @ feasible.T).abs().gather(1, seen.top_k_Nk).max().item()
    assert max(strongly.values()) < 1e-4 < (update[served] @ strong).abs().max()
    assert weakly[None] < 1e-5 < 1e-3 < weakly[1]


@pytest.mark.parametrize("learning_rate, least, most", [(0.3, 0.1, 1.0), (1e-7, 0.0, 0.0)])
def test_the_history_says_how_often_the_null_space_is_not_enough(learning_rate, least, most):
    moe = MoEModel(small_model())
    optimizer = torch.optim.AdamW(moe.model.parameters(), lr=learning_rate)
    method = null_space(0.3, granularity="expert")
    with gripmoe.constrain(moe.model, optimizer, [random_batch(seed=3)], method=method) as handle:
        assert handle.constraint.observed() == {}
        train(moe.model, optimizer, handle, steps=1)
        observed = handle.constraint.observed()
    assert least <= observed["stage_2_rate"] <= most
    assert observed["rank_layer_1"] == handle.constraint.bases[1].ranks.double().mean() > 0


@pytest.mark.filterwarnings("ignore:the projection onto the margins")
@pytest.mark.parametrize("basis", ["original", "minibatch"])
def test_the_history_counts_rows_that_are_shrunk(basis, monkeypatch):
    """The control: without a limit on rounds that cuts the solver short, no row is."""
    counted = {}
    for max_rounds in (1, 1000):
        solver = functools.partial(nearest_feasible, max_rounds=max_rounds)
        monkeypatch.setattr(screening if basis == "original" else module, "nearest_feasible", solver)
        moe = MoEModel(small_model())
        optimizer = torch.optim.AdamW(moe.model.parameters(), lr=3.0)
        method = null_space(0.3, granularity="expert").model_copy(update={"basis": basis})
        with gripmoe.constrain(moe.model, optimizer, [random_batch(rows=64, seed=3)], method=method) as handle:
            train(moe.model, optimizer, handle, steps=1)
            counted[max_rounds] = handle.constraint.observed()["rows_shrunk"]
            saved, handle.constraint._shrunk = handle.state_dict(), {}
            handle.load_state_dict(saved)
            assert handle.constraint.observed()["rows_shrunk"] == counted[max_rounds], "resumed between two projections"
    assert counted[1] > 0 == counted[1000]


def test_a_resumed_run_compares_the_tokens_that_the_interrupted_one_would():
    """Or it would round otherwise. The control: a run that begins there looks from another point."""
    looked = []
    for resumed in (True, False):
        moe = MoEModel(small_model())
        optimizer = torch.optim.AdamW(moe.model.parameters(), lr=1e-3)
        with gripmoe.constrain(moe.model, optimizer, [random_batch(seed=3)], method=null_space(0.3)) as handle:
            train(moe.model, optimizer, handle, steps=3)
            state = handle.state_dict()
        looked.append(state["looked"][1])
        moe = MoEModel(small_model())
        optimizer = torch.optim.AdamW(moe.model.parameters(), lr=1e-3)
        with gripmoe.constrain(moe.model, optimizer, [random_batch(seed=3)], method=null_space(0.3)) as handle:
            if resumed:
                handle.load_state_dict(state)
            looked.append(handle.state_dict()["looked"][1])
    interrupted, same, _, fresh = looked
    assert all(torch.equal(*pair) for pair in zip(interrupted, same, strict=True)) and fresh is None


def test_what_was_observed_outlives_an_interruption():
    """Between two looks a resumed run says what the interrupted one said; without its state it looks anew."""
    retain = [random_batch(seed=3)]

    def constrained(steps, learning_rate, state=None):
        moe = MoEModel(small_model())
        optimizer = torch.optim.AdamW(moe.model.parameters(), lr=learning_rate)
        with gripmoe.constrain(moe.model, optimizer, retain, method=null_space(0.3)) as handle:
            if state is not None:
                handle.load_state_dict(state)
            train(moe.model, optimizer, handle, steps=steps)
            return handle.constraint.observed(), handle.state_dict()

    calm, state = constrained(2, 1e-7)
    assert constrained(1, 0.3, state)[0] == calm != constrained(1, 0.3)[0]


@pytest.mark.parametrize("precision, dtype", [("highest", torch.float32), ("high", torch.float64)])
def test_where_tf32_rounds_products_the_papers_form_projects_in_fp64(precision, dtype, batch, monkeypatch):
    """Elsewhere in fp32 as before, the control."""
    dtypes, remainder = set(), RetainBasis.remainder
    model, before = small_model(), torch.get_float32_matmul_precision()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.set_float32_matmul_precision(precision)
    monkeypatch.setattr(RetainBasis, "remainder", lambda self, x: dtypes.add(x.dtype) or remainder(self, x))
    try:
        with gripmoe.constrain(model, optimizer, [batch], method="expert_specific_paper") as handle:
            with handle.retain():
                model(**batch.inputs).logits.sum().backward()
            optimizer.step()
    finally:
        torch.set_float32_matmul_precision(before)
    assert dtypes == {dtype} and MoEModel(model).theta(0).dtype == torch.float32
