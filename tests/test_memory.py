"""What steps hold: by hand for published models, and against the bytes that a tiny one really holds."""

import inspect
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.core_model_loading import revert_weight_conversion

from conftest import small_model
from gripmoe.adapter import METHODS
from gripmoe.catalogue import Sizes, Widths
from gripmoe.commands.plan import NO_WAY
from gripmoe.commands.unlearn import held_bytes
from gripmoe.config import EpsNullConfig, Method
from gripmoe.data.documents import Row, collate
from gripmoe.files import write_json
from gripmoe.holdings import Tokens, basis_bytes, held_by_method, trace_bytes
from gripmoe.memory import BYTES_GRADIENT, BYTES_STATES, BYTES_WEIGHT, CONVERTED, Step, memory_needed, needed
from gripmoe.method_a import fit_bases, held_trace
from gripmoe.moe import MoEModel
from gripmoe.objectives import make_objective
from gripmoe.penalties import constraint_of
from gripmoe.project import Project
from gripmoe.reference import OriginalSets
from gripmoe.remedies import what_would_fit
from gripmoe.unlearning import _adamw, _trainable

CONFIG = Path(__file__).parents[1] / "workflow" / "config"
LARGE, CELL = "qwen3_30b_a3b", ("wmdp_cyber", "gd")
UNBOUNDED = 1e9  # GB
EVERYTHING = EpsNullConfig(value=1e-12, kind="relative")  # every direction that is no noise is held


def needs_of(project):
    """By model and objective under no constraint, or by model and step."""
    needs = memory_needed(project)
    return {
        (need.step.model, need.step.objective or need.step.what): need
        for need in needs
        if need.step.method in ("", "unconstrained")
    }


def changed(world, **changes):
    project = Project(CONFIG, world)
    project.world = project.world.model_copy(update=changes)
    return project


def unlearned(project, method, objective="gd", model=LARGE, results=None):
    return needed(project, Step(model, "unlearn", "wmdp_cyber", objective, method), results)


def test_memory_by_hand_and_rmu_needs_less():
    """29 of 30.5 billion parameters train, of them the experts that are shared; RMU trains 8 of 48 layers."""
    plain = Project(CONFIG, "paper").world.training.model_copy(update={"optimizer": "adamw"})
    full = needs_of(changed("paper", training=plain, gpus={}))[LARGE, "gd"]
    assert (full.weights, full.gradients, full.states) == pytest.approx((61.0, 58.0, 116.0))
    needs = needs_of(Project(CONFIG, "paper"))
    shared = needs[LARGE, "gd"]
    assert (shared.weights, shared.gradients, shared.states) == pytest.approx((3.0 + 29.0, 29.0, 29.0))
    routers = 2 * 48 * 128 * 2048 * 4 / 1e9  # the run's copy and the step's
    assert shared.held == pytest.approx(routers) and routers < 0.11
    assert needs[LARGE, "rmu"].total == pytest.approx(32 + 29 * 8 / 48 * 2 + routers)
    assert needs[LARGE, "evaluate"].total == pytest.approx(2 * 32.0), "it and the original"
    logits = 8 * 3000 * 151_936 * 2 * 2 / 1e9  # of eight prompts below five questions, and their log-softmax
    assert needs[LARGE, "forcing"].total == pytest.approx(2 * 32.0 + logits) and 14 < logits < 15
    assert needs[LARGE, "relearning"].total == pytest.approx(3 * 32.0)
    alone = needs_of(changed("paper", gpus={}))
    assert alone[LARGE, "evaluate"].total == pytest.approx(122.0)
    assert alone[LARGE, "relearning"].total == pytest.approx(183.0)
    eight = needs_of(changed("paper", gpus={LARGE: 8}))[LARGE, "evaluate"]
    assert eight.total == pytest.approx((1.5 + 29 / 8) * 2 + logits), "more than the original would take beside it"
    assert needs_of(Project(CONFIG, "single_gpu"))["olmoe", "relearning"].total == pytest.approx(6.9 * 6)


def test_a_penalty_on_what_every_layer_sees_trains_them_all():
    """Under RMU too, whose own losses end at its layer; unless the layers that train are counted out."""
    project = Project(CONFIG, "paper")
    states = {name: unlearned(project, name, "rmu").states for name in ("unconstrained", "frozen_router", "anchored")}
    assert states["anchored"] == pytest.approx(29.0) and states["frozen_router"] == states["unconstrained"] < 5
    three = project.world.training.model_copy(update={"trained_layers": 3})
    assert unlearned(changed("paper", training=three), "anchored", "rmu").states == pytest.approx(29 * 3 / 48)


def test_three_trained_layers_let_rmu_fit_one_gpu():
    """As RMU's authors have it: Qwen3-30B-A3B on one GPU of 80 GB, not only on one of 141. To be written from there
    too, other layers have to lie in host memory."""
    three = Project(CONFIG, "paper").world.training.model_copy(update={"trained_layers": 3, "optimizer": "adamw"})
    needs = needs_of(changed("paper", training=three, gpus={}))
    by_hand, copies = 61 + 58 * 3 / 48 * 3, 58 * 2 / 3
    for objective in ("rmu", "gd"):
        need = needs[LARGE, objective]
        assert need.total - need.saving == pytest.approx(by_hand, abs=0.11) and by_hand < 79
        assert need.total == pytest.approx(61 + 58 * 3 / 48 + copies, abs=0.11) and need.total > 100
    idle = three.model_copy(update={"idle_layers": "host"})
    assert needs_of(changed("paper", training=idle, gpus={}))[LARGE, "rmu"].total < 30


def test_small_gpus_hold_the_large_model_if_there_are_enough():
    """Of 48 GB eight do for everything without a constraint, and two for nothing but RMU; Method A's bases
    must lie elsewhere then. Most is needed to ask both models."""
    eight, two = (needs_of(changed("paper", gpus={LARGE: count})).values() for count in (8, 2))
    most = max((need for need in eight if need.gpus == 8), key=lambda need: need.total)
    assert most.step.what == "forcing" and most.total == pytest.approx((1.5 + 29 / 8) * 4 + 14.6, abs=0.1)
    assert {need.step.objective for need in two if need.gpus == 2 and need.total < 48} == {"rmu", ""}
    bases = [unlearned(changed("paper", gpus={LARGE: 8}, basis_memory=gb), "expert_specific").total for gb in (16, 4)]
    assert bases[1] < 48 < bases[0]


def test_states_in_fp32_take_more_gpus():
    fp32 = Project(CONFIG, "paper").world.training.model_copy(update={"optimizer": "adamw_fp32"})
    two, eight = (needs_of(changed("paper", training=fp32, gpus={LARGE: count})) for count in (2, 8))
    assert two[LARGE, "rmu"].total == pytest.approx(32 + 29 * 8 / 48 * 7, abs=0.11)
    assert two[LARGE, "gd"].total == pytest.approx(32 + 29 * 7, abs=0.11)
    assert eight[LARGE, "gd"].total == pytest.approx(2 * (1.5 + 29 / 8) + 29 / 4 * 7, abs=0.11)


def test_what_writes_a_model_holds_converted_copies():
    """Two thirds of the experts: fetched in host memory, corrected on the GPUs, finetuned together on the host."""
    paper = Project(CONFIG, "paper")
    assert needed(paper, Step(LARGE, "prepare_model")).host == pytest.approx(61 + 58 * 2 / 3)
    corrected = needed(paper, Step(LARGE, "realign", "wmdp_cyber", "gd", "ptc"))
    assert corrected.total == pytest.approx(32 + 29 * 2 / 3)
    rmu = unlearned(paper, "unconstrained", "rmu")
    assert rmu.saving == 0, "processes gather on the host"
    alone = changed("paper", gpus={})
    assert unlearned(alone, "unconstrained", "rmu").saving == pytest.approx(58 * (2 / 3 - 8 / 48))
    assert unlearned(alone, "unconstrained", "gd").saving == 0, "states took more"
    news = Step(f"{LARGE}_news", "finetune_model")
    four = changed("paper_muse", gpus={news.model: 4}, nodes={news.model: 4})
    assert needed(four, news).host == pytest.approx(61 + 58 * 2 / 3), "one process on each node; the first gathers"


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_writing_copies_two_thirds_of_the_experts(family):
    """By transformers, of what shares no memory with the weights."""
    model = small_model(family)
    state = model.state_dict()
    own = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    experts = sum(tensor.nbytes for name, tensor in state.items() if ".experts." in name)
    written = revert_weight_conversion(model, state).values()
    copies = sum(tensor.nbytes for tensor in written if tensor.untyped_storage().data_ptr() not in own)
    assert copies == pytest.approx(CONVERTED * experts) and copies > 0


def test_layers_are_not_cut():
    """Of 16 layers the fullest of three GPUs has six."""
    sizes = Sizes(total=10.0, blocks=8.0, active=1.0, layers=16)
    assert sizes.split_over(3) == 2 + 8 * 6 / 16 > sizes.held_by(3)


def test_finetuning_on_news_trains_everything():
    needs = needs_of(Project(CONFIG, "single_gpu_muse"))
    assert needs["olmoe_news", "finetune_model"].total == pytest.approx(6.9 * 6)
    assert needs["olmoe_news", "rmu"].total < needs["olmoe_news", "gd"].total < 6.9 * 6
    shared = needs_of(Project(CONFIG, "paper_muse"))["qwen3_30b_a3b_news", "finetune_model"]
    assert shared.gpus == 2 and shared.total == pytest.approx((1.5 + 29.0 / 2) * 6)
    assert shared.host == pytest.approx(2 * 61.0), "each process reads all weights"


# Against what a tiny model holds. ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    """A random model in bf16, its sizes, documents on both sides, and their traces."""
    moe = MoEModel(small_model("qwen3_moe").to(torch.bfloat16))
    blocks = sum(p.numel() for layer in moe.layers for p in moe.block(layer).parameters())
    total = sum(p.numel() for p in moe.model.parameters())
    sizes = Sizes(total=total, blocks=blocks, active=1.0, layers=len(moe.layers))
    widths = Widths(hidden=moe.hidden_size, vocabulary=64, experts=moe.num_experts, chosen=moe.top_k)
    documents = {}
    for seed, side in enumerate(("retain", "forget")):
        ids = torch.randint(3, 64, (12, 20), generator=torch.Generator().manual_seed(seed)).tolist()
        rows = [Row(f"{side}/{i}", row[: 10 + i % 4], row[: 10 + i % 4]) for i, row in enumerate(ids)]
        documents[side] = [collate(rows, 0)]
    traces = {side: moe.trace(batches) for side, batches in documents.items()}
    tokens = {side: int(batches[0].attention_mask.sum()) for side, batches in documents.items()}
    counted = Tokens(len(traces["retain"][0]), tokens["retain"], tokens["forget"], 12)
    return SimpleNamespace(moe=moe, sizes=sizes, widths=widths, documents=documents, traces=traces, tokens=counted)


def started(tiny, method):
    """The constraint of a method, with its bases, when training begins."""
    held = held_trace(method, tiny.traces["retain"], tiny.traces["forget"])
    bases = fit_bases(held, tiny.moe.rules(), method) if method.has_bases else None
    constraint = constraint_of(method, held, bases, (1, 3), 0)
    constraint.start(tiny.moe, tiny.documents["forget"], tiny.documents["retain"])
    tiny.moe.model.requires_grad_(True)
    return constraint


def said(tiny, method, objective="gd"):
    return held_by_method(method, objective, tiny.sizes, tiny.widths, tiny.tokens, UNBOUNDED)


def routers(tiny):
    return held_bytes(tiny.moe.thetas())


def test_a_trace_takes_what_is_said(tiny):
    assert held_bytes(tiny.traces["retain"]) == trace_bytes(tiny.widths, tiny.sizes.layers, tiny.tokens.traced)
    assert held_bytes(tiny.traces["retain"][0]) == said(tiny, Method(constraint="none")).host, "layer by layer"
    combined = METHODS["expert_specific"].model_copy(update={"surface": "combined"})
    assert held_bytes(tiny.traces) == said(tiny, combined).host, "of both sides"


@pytest.mark.parametrize(
    "changes", [{}, {"granularity": "layer"}, {"max_rank": 5}, {"surface": "combined"}], ids=lambda c: str(*c)
)
def test_a_null_space_holds_bases_inputs_margins_and_routers(tiny, changes):
    """Beside the copies of run and step. Fewer tokens than the hidden size would be said to be less."""
    method = METHODS["expert_specific"].model_copy(update={"eps_null": EVERYTHING, **changes})
    constraint = started(tiny, method)
    bases = held_bytes(constraint.bases) // 2  # a GPU holds them in fp32, a CPU in fp64
    held = bases + held_bytes([constraint._x_Nd, constraint._bounds_NE, constraint._theta_0])
    assert said(tiny, method).gpu + bases == held + 2 * routers(tiny)
    at_most = [basis_bytes(tiny.widths, tiny.sizes.layers, n, method) for n in (tiny.tokens.traced, 4)]
    assert at_most[0] == bases > at_most[1]


def test_bases_that_host_memory_holds_count_for_every_process():
    """Of 103 GB at most 16 are on each of two GPUs and 64 in the host's memory, twice."""
    host = {gb: unlearned(changed("paper", basis_host_memory=gb), "expert_specific").host for gb in (0, 64, 80, 1000)}
    trace = 64 * 512 * (2048 * 4 + 128 * 4 + 8 * 8) / 1e9
    gathered = 61 + 58 * 2 / 3
    assert host[64] == pytest.approx(2 * (64 + trace) + gathered, abs=0.1)
    assert host[80] - host[64] == pytest.approx(2 * 16)
    assert host[1000] - host[64] == pytest.approx(2 * (48 * 128 * 2048 * 2048 * 4 / 1e9 - 16 - 64))
    assert host[0] == pytest.approx(2 * 61)
    step = Step(LARGE, "unlearn", "wmdp_cyber", "gd", "expert_specific")
    found = what_would_fit(Project(CONFIG, "paper"), step, UNBOUNDED, 200)["host"]
    (least,) = [int(way.removeprefix("basis_host_memory: ")) for way in found if way.startswith("basis_host")]
    for gb, fits in ((least, True), (least + 1, False)):
        assert (unlearned(changed("paper", basis_host_memory=gb), "expert_specific").host <= 200) == fits


def test_bases_that_hold_less_are_not_wider(tiny):
    """What is said of bases is what they take at most."""
    method = METHODS["expert_specific"].model_copy(update={"eps_null": EpsNullConfig(value=0.1, kind="relative")})
    bases = held_bytes(started(tiny, method).bases) // 2  # in fp32
    assert 0 < bases < basis_bytes(tiny.widths, tiny.sizes.layers, tiny.tokens.traced, method)


def test_tracked_bases_hold_their_factors(tiny):
    method = METHODS["expert_specific_tracked"].model_copy(update={"eps_null": EVERYTHING})
    constraint = started(tiny, method)
    for layer in tiny.moe.layers:
        theta = tiny.moe.theta(layer).detach()
        constraint.constrain(layer, theta, theta.clone(), tiny.traces["retain"][layer])
    held = held_bytes(constraint._factors)
    assert said(tiny, method).gpu == held + 2 * routers(tiny) and held > 10 * routers(tiny)


@pytest.mark.parametrize("method", ["anchored", "anchored_tracked"])
def test_an_anchor_holds_states_of_every_token(tiny, method):
    constraint, plain = started(tiny, METHODS[method]), said(tiny, Method(constraint="none"))
    held = said(tiny, METHODS[method])
    for layer, tracker in constraint._trackers.items():
        seen = tiny.traces["retain"][layer]
        tracker.update(seen.x_Nd, seen.scores_NE)
    assert held.host - plain.host == held_bytes(constraint._states) > 0
    assert held.gpu - plain.gpu == held_bytes([constraint._theta_0, constraint._trackers])


@pytest.mark.parametrize("constraint", ["routing_scores", "router_l2"])
def test_soft_constraints_hold_what_they_compare_with(tiny, constraint):
    method, plain = Method(constraint=constraint), said(tiny, Method(constraint="none"))
    held, real = said(tiny, method), held_bytes(started(tiny, method))
    assert held.host - plain.host + held.gpu - plain.gpu == real > 0


@pytest.mark.parametrize("name", ["gd", "kl", "npo", "rmu"])
def test_objectives_hold_their_references(tiny, name):
    settings = {"npo": {"beta": 0.1}, "rmu": {"layer": 1, "steering": 1.0}}.get(name, {})
    objective = make_objective(name, {"alpha": 1.0, **settings}, 0)
    tiny.moe.model.requires_grad_(False)
    objective.start(tiny.moe, tiny.documents["forget"], tiny.documents["retain"])
    tiny.moe.model.requires_grad_(True)
    caches = [vars(objective)[name] for name in ("_hidden", "_logprob") if name in vars(objective)]
    cached = held_bytes([cache._kept for cache in caches])
    plain = Method(constraint="none")
    assert said(tiny, plain, name).host - said(tiny, plain).host == cached and bool(cached) == (name != "gd")


def test_replay_holds_the_sets_of_both_sides(tiny):
    sets = OriginalSets(tiny.moe, [*tiny.documents["forget"], *tiny.documents["retain"]])
    replay, plain = (said(tiny, Method(constraint="none", replay=replay)).host for replay in (True, False))
    assert replay - plain == held_bytes(sets) > 0


def test_one_expert_takes_the_states_of_its_whole_layer(tiny):
    """The fused tensors of one layer are in the optimizer, whole, and are copied in every step."""
    training = Project(CONFIG, "paper").world.training.model_copy(update={"optimizer": "adamw"})
    trained, experts = _trainable(tiny.moe, {1: [3]}, tiny.moe.all_layers)
    optimizer = _adamw(trained, experts, training)
    with tiny.moe.restrict_experts({1: [3]}, optimizer):
        for parameter in (*trained, *experts):
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        snapshot = next(iter(optimizer._optimizer_step_pre_hooks.values()))
        copies = held_bytes(inspect.getclosurevars(snapshot).nonlocals["before"])
    tiny.moe.model.requires_grad_(True)
    states = sum(held_bytes([optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]]) for p in experts)
    gradients = sum(held_bytes(p.grad) for p in experts)
    tiny.moe.model.zero_grad()
    elements = tiny.sizes.blocks / tiny.sizes.layers - tiny.widths.hidden * tiny.widths.experts  # without its router
    each = BYTES_GRADIENT, BYTES_STATES["adamw"], BYTES_WEIGHT
    assert (gradients, states, copies) == tuple(elements * part for part in each)
    one = sum(p[0].numel() for p in experts)
    assert elements == 8 * one, "not those of one expert"


def test_a_method_of_one_expert_by_hand():
    """Of Qwen3-30B-A3B 0.6 of 29 billion parameters train: gradients, states in 8 bits, a copy."""
    need = unlearned(Project(CONFIG, "paper"), "seuf")
    assert (need.gradients, need.states) == pytest.approx((29 / 48 * 2, 29 / 48 * 2))
    assert need.held == pytest.approx(29 / 48 * 2, abs=0.11)
    assert need.saving == pytest.approx(2 / 3 * 29 - 29 / 48 * 4), "of weights on a GPU, when states and copy are gone"
    assert need.total == pytest.approx(32 + 29 / 48 * 2 + 2 / 3 * 29, abs=0.11)


def test_idle_layers_lie_in_host_memory():
    """RMU up to layer 7 on one GPU: eight layers and one that visits, of 48, and three that train."""
    training = Project(CONFIG, "paper").world.training
    host = training.model_copy(update={"trained_layers": 3, "idle_layers": "host"})
    idle, resident = (changed("paper", training=t, gpus={}) for t in (host, training))
    need = unlearned(idle, "unconstrained", "rmu")
    assert need.weights == pytest.approx(3 + 58 * 9 / 48) and need.total < 26
    written = 58 * 40 / 48 * (1 + 2 / 3)  # where they are cut too
    assert need.host - unlearned(resident, "unconstrained", "rmu").host == pytest.approx(written)
    assert need.saving == pytest.approx(58 * 8 / 48 * 2 / 3 - 58 * 3 / 48)
    assert unlearned(idle, "anchored", "rmu").weights == pytest.approx(61), "which looks at training passes"
    assert unlearned(idle, "unconstrained", "gd").weights == pytest.approx(61), "which runs every layer"


@pytest.mark.parametrize("gpus", [1, 2, 3, 8])
@pytest.mark.parametrize("last", [0, 7, 46, 47])
def test_idle_layers_of_one_process_over_several_gpus(gpus, last):
    """One that trains a single expert spreads the layers that run; the first GPU has room for a visitor. Processes that
    share experts leave no layer idle."""
    training = Project(CONFIG, "paper").world.training.model_copy(update={"idle_layers": "host"})
    project = changed("paper", models=[LARGE], training=training, gpus={LARGE: gpus})
    project.world.objective_training["rmu"]["objective"]["layer"] = last
    alone = unlearned(project, "expert_specific_single", "rmu")
    here = math.ceil((last + 1) / gpus) + (last < 47)
    assert alone.weights == pytest.approx(3 + 58 * here / 48)
    if gpus > 1:
        assert unlearned(project, "unconstrained", "rmu").weights == pytest.approx(3 + 58 / gpus)


@pytest.mark.parametrize("name", [n for n, m in Project(CONFIG, "tiny_all").methods.items() if m.trains])
def test_who_looks_at_training_passes(name):
    method = Project(CONFIG, "tiny_all").methods[name]
    assert method.looks_at_passes == bool(constraint_of(method, {}, None, (0, 0), 0).watches)


# Of published models: what is recorded, what does not fit, what would. -----------------------------------------------


def test_what_is_recorded_comes_before_what_may_be(tmp_path):
    """Bases and tokens are bounded until they are there: 103 GB for every direction of every expert."""
    paper = changed("paper", basis_memory=UNBOUNDED)
    bound = unlearned(paper, "expert_specific", results=tmp_path)
    full = 48 * 128 * 2048 * 2048 * 4 / 1e9
    traced = 48 * 64 * 512 * (2048 + 128) * 4 / 1e9
    assert bound.held == pytest.approx(full + traced + 3 * 0.05, abs=0.01) and full == pytest.approx(103, abs=0.1)
    limited = unlearned(Project(CONFIG, "paper"), "expert_specific", results=tmp_path)
    assert bound.held - limited.held == pytest.approx(full - 16 - full / 48), "one layer's come and go"
    folder = tmp_path / LARGE / "wmdp_cyber"
    write_json(folder / "routing.json", {"retain_tokens": 8000, "forget_tokens": 4000})
    write_json(folder / "bases" / "expert_specific.json", {"basis_megabytes": 26_000.0})
    recorded = unlearned(paper, "expert_specific", results=tmp_path)
    assert recorded.held == pytest.approx(26 + traced * 8000 / (64 * 512) + 3 * 0.05, abs=0.01)
    assert recorded.total < 141 < bound.total


def test_references_are_those_of_documents_that_are_there(tmp_path):
    """0.2 MB a token, in each of two processes, for at most 20,000 documents of 512 tokens; of shorter ones less. The
    first gathers and cuts the weights beside them."""
    paper = changed("paper", reference_memory=UNBOUNDED)
    trace = 64 * (2048 * 4 + 128 * 4 + 8 * 8)  # of one layer, per token of 64 documents
    bound = unlearned(paper, "anchored", results=tmp_path).host
    assert bound == pytest.approx(2 * 512 * (20_000 * 49 * 2048 * 2 + trace) / 1e9 + 61 + 58 * 2 / 3)
    for side in ("retain", "forget"):
        file = tmp_path / "data" / "wmdp_cyber" / f"{side}_corpus.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(("x" * 299 + "\n") * 5000)
    known = unlearned(paper, "anchored", results=tmp_path).host
    assert known == pytest.approx(2 * 100 * (5000 * 49 * 2048 * 2 + trace) / 1e9 + 61 + 58 * 2 / 3)
    on_disk = unlearned(Project(CONFIG, "paper"), "anchored", results=tmp_path).host
    assert on_disk == pytest.approx(2 * 61), "each of two processes reads the model; later it holds a trace's layer"


def test_every_change_that_is_named_fits_and_the_next_does_not():
    """By the need under the change itself."""
    unbounded = {"basis_memory": 1000}
    paper, step = changed("paper", **unbounded), Step(LARGE, "unlearn", *CELL, "expert_specific")
    gpus, rank, memory = what_would_fit(paper, step, 141, UNBOUNDED)["GPU"]
    assert gpus == "gpus: 9 and batch sizes divisible by 9" and rank == "max_rank: 738"
    totals = [unlearned(changed("paper", gpus={LARGE: n}, **unbounded), "expert_specific").total for n in (8, 9)]
    assert totals[1] <= 141 < totals[0]
    on_gpu = int(memory.removeprefix("basis_memory: "))
    for gb, fits in ((on_gpu, True), (on_gpu + 1, False)):
        assert (unlearned(changed("paper", basis_memory=gb), "expert_specific").total <= 141) == fits
    for width, fits in ((738, True), (739, False)):
        narrow = changed("paper", **unbounded)
        narrow.methods["expert_specific"] = narrow.methods["expert_specific"].model_copy(update={"max_rank": width})
        assert (unlearned(narrow, "expert_specific").total <= 141) == fits


def test_an_optimizer_is_named_only_where_it_is_another():
    step = Step(LARGE, "unlearn", *CELL, "unconstrained")
    plain = Project(CONFIG, "paper").world.training.model_copy(update={"optimizer": "adamw"})
    assert "optimizer: adamw_8bit" in what_would_fit(changed("paper", training=plain), step, 100, UNBOUNDED)["GPU"]
    ways = what_would_fit(Project(CONFIG, "paper"), step, 50, UNBOUNDED)
    assert ways == {"GPU": ["gpus: 4 and batch sizes divisible by 4", "trained_layers: 14"]}
    assert 3 + 29 + 58 * 14 / 48 + 0.1 < 50 < 3 + 29 + 58 * 15 / 48 + 0.1


def test_idle_layers_are_named_where_a_single_process_may_have_them():
    """RMU on one GPU of 60 GB; not where two processes train, nor where a constraint looks at all layers."""
    training = Project(CONFIG, "paper").world.training.model_copy(update={"trained_layers": 1})
    one, two = (changed("paper", training=training, gpus={LARGE: count}) for count in (1, 2))
    said = {
        method: what_would_fit(project, Step(LARGE, "unlearn", "wmdp_cyber", "rmu", method), size, UNBOUNDED)["GPU"]
        for project, method, size in ((one, "unconstrained", 60), (one, "anchored", 60), (two, "frozen_router", 30))
    }
    assert [method for method, ways in said.items() if "idle_layers: host" in ways] == ["unconstrained"]
    host = training.model_copy(update={"idle_layers": "host"})
    idle = changed("paper", training=host, gpus={})
    assert unlearned(idle, "unconstrained", "rmu").total < 60 < unlearned(one, "unconstrained", "rmu").total
    step = Step(LARGE, "unlearn", "wmdp_cyber", "rmu", "unconstrained")
    assert what_would_fit(idle, step, 10, UNBOUNDED)["GPU"] == [
        "gpus: 9 and batch sizes divisible by 9 without idle_layers"
    ]


def test_where_nothing_helps_every_change_is_named():
    """Whatever any remedy changes."""
    training = Project(CONFIG, "paper").world.training.model_copy(update={"optimizer": "adamw"})
    project = changed("paper", training=training, gpus={LARGE: 2}, reference_memory=UNBOUNDED, basis_memory=90)
    one = changed("paper", training=training, gpus={})
    cases = [(project, "gd", "expert_specific"), (project, "gd", "anchored"), (one, "rmu", "unconstrained")]
    keys = set()
    for world, objective, method in cases:
        step = Step(LARGE, "unlearn", "wmdp_cyber", objective, method)
        for share in (0.6, 0.9, 0.99):
            need = needed(world, step)
            for found in what_would_fit(world, step, share * need.total, share * need.host).values():
                keys |= {way.split(":")[0] for way in found}
    asked = Step(LARGE, "forcing", "wmdp_cyber")
    assert what_would_fit(one, asked, 130, UNBOUNDED)["GPU"] == ["gpus: 2", "evaluation_batch_size: 4"]
    keys.add("evaluation_batch_size")
    assert keys == set(re.findall(r"\w+_\w+|gpus|nodes|optimizer", NO_WAY))


def test_where_no_single_change_does_gpus_and_a_rank_together_may():
    step = Step(LARGE, "unlearn", *CELL, "expert_specific")
    unbounded = {"basis_memory": 1000}
    (way,) = what_would_fit(changed("paper", **unbounded), step, 80, UNBOUNDED)["GPU"]
    gpus, rank = 4, int(way.removeprefix("gpus: 4 and batch sizes divisible by 4 with max_rank: "))
    for width, fits in ((rank, True), (rank + 1, False)):
        narrow = changed("paper", gpus={LARGE: gpus}, **unbounded)
        narrow.methods["expert_specific"] = narrow.methods["expert_specific"].model_copy(update={"max_rank": width})
        assert (unlearned(narrow, "expert_specific").total <= 80) == fits
    asked = Step(LARGE, "evaluate", "wmdp_cyber")
    assert what_would_fit(Project(CONFIG, "paper"), asked, 2.9, UNBOUNDED) == {"GPU": []}


def test_too_many_references_want_fewer_steps():
    paper, step = changed("paper", reference_memory=UNBOUNDED), Step(LARGE, "unlearn", *CELL, "anchored")
    (way,) = what_would_fit(paper, step, 141, 2000)["host"]  # two nodes are not enough
    steps = int(way.removeprefix("max_steps: "))
    hosts = []
    for count in (steps, steps + 50):  # at checks
        overrides = {**paper.world.overrides, "gd/anchored": {"max_steps": count}}
        fewer = changed("paper", overrides=overrides, reference_memory=UNBOUNDED)
        hosts.append(unlearned(fewer, "anchored").host)
    assert hosts[0] <= 2000 < hosts[1]


def test_nodes_share_what_the_host_holds_and_split_what_one_process_does():
    """Two GPUs on two nodes: a process on each; what a single process does has one GPU."""
    paper, far = (changed("paper", nodes={LARGE: count}, reference_memory=UNBOUNDED) for count in (1, 2))
    near, apart = (unlearned(project, "anchored") for project in (paper, far))
    whole = 61 + 58 * 2 / 3  # gathered and cut
    assert near.total == apart.total and near.host - whole == pytest.approx(2 * (apart.host - whole))
    assert "nodes: 2" in what_would_fit(paper, near.step, 141, 2200)["host"]
    asked = Step(LARGE, "evaluate", "wmdp_cyber")
    assert (unlearned(far, "seuf").gpus, needed(far, asked)) == (1, needed(changed("paper", gpus={}), asked))
    assert needed(far, asked).total == pytest.approx(122.0)


def plan(folder, *arguments, world="paper"):
    command = [sys.executable, "-m", "gripmoe.cli", "plan", "--world", world, "--config", str(CONFIG), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


def test_the_command_says_what_does_not_fit(tmp_path):
    single = plan(tmp_path, world="single_gpu")
    assert single.returncode == 0, single.stderr
    assert (
        "olmoe, gd, 1 GPU: 14 GB weights + 13 gradients + 13 AdamW states + 21.5 held by expert_spec" in single.stdout
    )
    tight = plan(tmp_path, "--gpu-memory", "80")
    assert tight.returncode == 2 and "does not fit" in tight.stdout
    assert f"{LARGE}, relearning\n    GPU: gpus: 3\n" in tight.stderr
    assert f"{LARGE}, gd (expert_specific)\n    GPU: gpus: 4 and batch sizes divisible by 4" in tight.stderr
    assert f"{LARGE}, evaluate" not in tight.stderr and "adamw_8bit" not in tight.stderr, "it is set already"


def test_the_command_refuses_by_host_memory(tmp_path):
    enough, small = (plan(tmp_path, "--host-memory", amount, world="single_gpu") for amount in ("58", "56"))
    assert enough.returncode == 0 and small.returncode == 2
    assert "qwen15_moe, evaluate\n" in small.stderr and "olmoe" not in small.stderr, "two models of 28.6 GB"


def test_the_command_warns_of_what_is_not_pinned(tmp_path):
    said = plan(tmp_path, world="single_gpu").stdout
    warning = next(line for line in said.splitlines() if line.startswith("warning: "))
    assert "Qwen/Qwen1.5-MoE-A2.7B-Chat, allenai/OLMoE-1B-7B-0924, cais/wmdp" in warning
    assert "`gripmoe pin --world single_gpu`" in warning
    assert "warning" not in plan(tmp_path, world="tiny").stdout
