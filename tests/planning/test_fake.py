"""A step on fake tensors: it runs under every method and objective at true dimensions, and its numbers are right."""

import json
from copy import copy
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from gripmoe.config.project import Project
from gripmoe.config.training import Training
from gripmoe.constraints.build import build, held_bytes
from gripmoe.geometry.nullspace import RetainBasis
from gripmoe.geometry.routing import LayerRouting
from gripmoe.io.errors import ConfigError
from gripmoe.moe import MoEModel
from gripmoe.planning import fake
from gripmoe.planning.cost import Costs, Step
from gripmoe.planning.counting import SLOW, _grouped_product
from gripmoe.planning.fake import NotMeasurable, dimensions, layers_of

PAPER = Project(Path(__file__).parents[2] / "workflow" / "config", "paper")
PUBLISHED = {  # as their config.json have them
    **{name: PAPER.models[name].config for name in ("qwen3_30b_a3b", "qwen15_moe", "olmoe")},
    "deepseek_v2_lite": dict(
        model_type="deepseek_v2", vocab_size=102400, hidden_size=2048, num_hidden_layers=27, num_attention_heads=16,
        num_key_value_heads=16, intermediate_size=10944, moe_intermediate_size=1408, n_routed_experts=64,
        n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=None,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, topk_method="greedy", n_group=1, topk_group=1,
        norm_topk_prob=False, routed_scaling_factor=1.0,
    ),
    "mixtral_8x7b": dict(
        model_type="mixtral", vocab_size=32000, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2,
    ),
    "gpt_oss_20b": dict(
        model_type="gpt_oss", vocab_size=201088, hidden_size=2880, num_hidden_layers=24, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4,
        sliding_window=128, attention_bias=True, tie_word_embeddings=False,
    ),
}  # fmt: skip
SMALL = dict(
    model_type="qwen3_moe", vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=32, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=4,
)  # fmt: skip
NARROW = dict(
    vocab_size=64, hidden_size=64, num_hidden_layers=9, num_attention_heads=4, num_key_value_heads=4, head_dim=16,
    intermediate_size=128, moe_intermediate_size=32,
)  # fmt: skip
PLAIN = dict(num_hidden_layers=2, layer_types=["full_attention"] * 2, decoder_sparse_step=1)
DENSE_FIRST = {
    "deepseek_v3": dict(
        NARROW, model_type="deepseek_v3", n_routed_experts=8, num_experts_per_tok=2, first_k_dense_replace=3,
        n_group=4, topk_group=2, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16,
        v_head_dim=16,
    ),
    "glm4_moe": dict(
        NARROW, model_type="glm4_moe", n_routed_experts=8, num_experts_per_tok=2, first_k_dense_replace=3
    ),
}  # fmt: skip
TAKING_TURNS = {
    "qwen2_moe": dict(
        NARROW, model_type="qwen2_moe", shared_expert_intermediate_size=32, num_experts=8, num_experts_per_tok=2,
        decoder_sparse_step=2,
    ),
    "qwen3_next": dict(
        NARROW, model_type="qwen3_next", shared_expert_intermediate_size=32, num_experts=8, num_experts_per_tok=2,
        linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
    ),
    "jamba": dict(
        NARROW, model_type="jamba", num_experts=8, num_experts_per_tok=2, use_mamba_kernels=False, mamba_d_state=8
    ),
}  # fmt: skip
OBJECTIVES = ["gd", "kl", "npo", "rmu"]
# A row for each kind of constraint, and one for each other path through the code.
KINDS = [
    "unconstrained", "frozen_router", "router_l2", "seuf", "routing_scores", "anchored", "expert_specific",
    "expert_specific_paper",
]  # fmt: skip
OTHERS = [
    "gate_anchor", "full_null_space", "combined", "expert_specific_minibatch",
    "expert_specific_paper_gradient", "routing_replay",
]  # fmt: skip


MEASURED = {}  # by workload


def measure(workload):
    """As `fake.measure` does, once for tests that ask the same."""
    asked = json.dumps(workload, sort_keys=True)
    if asked not in MEASURED:
        MEASURED[asked] = fake.measure(workload)
    return dict(MEASURED[asked])


def row(config):
    return {"id": "nobody/nothing", "revision": None, "config": config, "dtype": "bfloat16"}


def test_a_method_for_fp32_alone_is_refused():
    with pytest.raises(ConfigError, match="`experts: null_space` needs weights in fp32"):
        measure(unlearning(method="expert_null_space"))


def real_model():
    return MoEModel(AutoModelForCausalLM.from_config(AutoConfig.for_model(**SMALL), dtype=torch.bfloat16))


def costs_of(config, folder, **world):
    """Those of the paper's world, with a model of these dimensions in place of OLMoE."""
    project = copy(PAPER)
    project.models = {**PAPER.models, "olmoe": PAPER.models["olmoe"].model_copy(update={"config": config})}
    project.world = PAPER.world.model_copy(update=world)
    return Costs(project, folder)


def unlearning(model="olmoe", objective="gd", method="unconstrained", layers=2, processes=1, length=32, **change):
    """What `measure` is asked of a step of the paper's world, with shorter documents."""
    training = PAPER.training(model, "wmdp_cyber", objective, "unconstrained").model_dump(mode="json")
    training |= {"max_steps": 1, "check_every": 1, "checkpoint_every": 1, "adversary_restart": 1, "optimizer": "adamw"}
    sizes = dict.fromkeys(("forget_batch_size", "retain_batch_size"), 2 // processes)
    training |= {"gradient_checkpointing": False, **sizes, **change}
    if objective == "rmu":
        training["objective"] = {**training["objective"], "layer": 1}
    return {
        "model": row(PUBLISHED[model]),
        "layers": layers,
        "processes": processes,
        "what": "unlearn",
        "rows": [2, 2],
        "length": length,
        "traced": 256,
        "objective": objective,
        "method": PAPER.methods[method].model_dump(mode="json"),
        "training": training,
    }


EVERY = [("gd", method) for method in KINDS + OTHERS] + [(objective, "unconstrained") for objective in OBJECTIVES[1:]]


@pytest.mark.parametrize(("objective", "method"), EVERY)
def test_every_method_takes_a_step_under_every_objective(objective, method):
    found = measure(unlearning(objective=objective, method=method))
    assert found["flops"] > 0 and 0 < found["gradients"] < found["weights"] < found["passes"]
    assert (found["basis"] > 0) == PAPER.methods[method].has_bases


def test_one_step_of_an_attacked_method_can_be_planned(tmp_path):
    """Whose adversary restarts at checkpoints."""
    workload = Costs(PAPER, tmp_path)._unlearning(Step("olmoe", "unlearn", "wmdp_cyber", "gd", "anchored_adversary"))
    assert Training(**workload["training"]).adversary_steps == 2


@pytest.mark.parametrize("name", ["frozen_router_adversary", "repselect", "mudman", "weight_distance"])
def test_what_becomes_of_the_forget_gradient_costs(name):
    """The control: none of it is free of operations, or of memory."""
    changes = PAPER.methods[name].training
    plain, found = (measure(unlearning(method="frozen_router", **change)) for change in ({}, changes))
    assert found["flops"] > 1.2 * plain["flops"] or found["passes"] > 1.2 * plain["passes"]


def test_what_bf16_cannot_train_is_not_planned():
    with pytest.raises(ConfigError, match="`sharpness_radius` needs weights in fp32"):
        measure(unlearning(method="frozen_router", **PAPER.methods["sam"].training))


def test_a_step_of_undo_is_a_step_of_training():
    """And a pass of the teacher. Experts alone have states: relearning has those of all weights."""
    base = {"model": row(PUBLISHED["olmoe"]), "layers": 2, "processes": 1, "rows": [2], "length": 32}
    asked = PAPER.methods["undo"].undo.model_dump() | {"batch_size": 2}
    found = measure({**base, "what": "undo", "training": asked})
    settings = {key: asked[key] for key in ("learning_rate", "optimizer", "batch_size", "gradient_checkpointing")}
    trained = measure({**base, "what": "relearning", "training": settings})
    assert found["flops"] > 0.9 * trained["flops"] and 0 < found["states"] < trained["states"]


@pytest.mark.parametrize("model", [name for name in PUBLISHED if name != "olmoe"])
def test_the_anchor_takes_a_step_in_every_family(model):
    found = measure(unlearning(model, method="anchored", layers=3))
    assert found["flops"] > 0 and found["gradients"] > 0


FAMILIES = [name for name in PUBLISHED if name != "olmoe"]
# Every method in a second family, under one objective or another.
TOGETHER = [
    (FAMILIES[number % len(FAMILIES)], OBJECTIVES[number % len(OBJECTIVES)], method)
    for number, method in enumerate(KINDS + OTHERS)
]


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "objective", "method"), TOGETHER)
def test_every_method_takes_a_step_in_another_family(model, objective, method):
    assert measure(unlearning(model, objective, method))["flops"] > 0


def test_a_method_about_routers_is_named_where_a_model_has_none():
    dense = {"model": row(NARROW | {"model_type": "qwen3"})}
    with pytest.raises(ConfigError, match="`constraint: frozen` is about routers, and model .* has none: leave"):
        measure(unlearning(method="frozen_router") | dense)
    assert measure(unlearning() | dense)["flops"] > 0, "the control"


def test_a_world_in_fp8_is_measured_in_the_models_own_precision(tmp_path):
    """FP8 needs a card, which a plan does not."""
    project = copy(PAPER)
    training = {"expert_precision": "fp8", "linear_precision": "te_fp8"}
    project.world = project.world.model_copy(update={"training": project.world.training.model_copy(update=training)})
    workload = Costs(project, tmp_path)._workload(Step("qwen3_30b_a3b", "unlearn", "wmdp_cyber", "gd", "unconstrained"))
    assert {workload["training"][name] for name in training} == {"native"}


@pytest.mark.parametrize(
    ("model", "parameters"),
    [("qwen3_30b_a3b", 30_532_122_624), ("qwen15_moe", 14_315_784_192), ("olmoe", 6_919_161_856)],
)
def test_parameters_are_as_many_as_published(tmp_path, model, parameters):
    """Of all layers, from three and four of them."""
    assert Costs(PAPER, tmp_path).parameters(Step(model, "evaluate", "wmdp_cyber")) == parameters


@pytest.mark.parametrize(
    ("name", "objective", "in_part"),
    [
        pytest.param("deepseek_v3", "gd", {"trained": 4}, marks=pytest.mark.nightly),
        ("glm4_moe", "rmu", {"run": 8}),
    ],
)
def test_first_layers_may_differ(tmp_path, name, objective, in_part):
    """Three dense ones, then six with experts: what few layers predict of all nine is what these take."""
    costs, asked = costs_of(DENSE_FIRST[name], tmp_path), unlearning(objective=objective)
    workload = {**asked, "model": row(DENSE_FIRST[name]), "in_part": in_part}
    assert costs._of_model(workload) == pytest.approx(costs._measure(workload, {"layers": 9, **in_part}), rel=1e-3)


def test_the_first_gpu_has_the_first_layers_and_its_share_of_the_others(tmp_path):
    config, step = DENSE_FIRST["deepseek_v3"], Step("olmoe", "evaluate", "wmdp_cyber")
    costs = costs_of(config, tmp_path, gpus={"olmoe": 3})
    held = costs._measure(costs._workload(step), {"layers": 3 + 2})["weights"]
    assert costs.of(step).parts["weights"] == pytest.approx(2 * held / 1e9), "of two models"


@pytest.mark.parametrize("name", TAKING_TURNS)
def test_a_model_whose_layers_take_turns_is_not_measured(tmp_path, name):
    """Three layers and four do not tell how many of the others have experts, or attention."""
    with pytest.raises(NotMeasurable, match="take turns"):
        layers_of(row(TAKING_TURNS[name]), 3)
    costs = costs_of(TAKING_TURNS[name], tmp_path)
    steps = Step("olmoe", "evaluate", "wmdp_cyber"), Step("olmoe", "unlearn", "wmdp_cyber", "gd", "unconstrained")
    assert [costs.of(step) for step in steps] == [None, None]


def test_few_layers_that_do_not_run_or_differ_in_size_are_not_measured(monkeypatch):
    """But an unknown family is a fault that its error names."""

    def failing(*_):
        raise RuntimeError("no fake operation")

    for few in (SMALL, TAKING_TURNS["qwen2_moe"] | PLAIN):  # of fewer layers than are measured
        assert layers_of(row(few), 3) == {"of_layers": 2, "first": 0}
    with monkeypatch.context() as patched, pytest.raises(NotMeasurable, match=r"do not run \(no fake operation\)"):
        patched.setitem(fake.STEPS, "evaluate", failing)
        layers_of(row(SMALL), 3)
    with monkeypatch.context() as patched, pytest.raises(NotMeasurable, match="do not tell the size"):
        patched.setattr(fake, "measure", lambda _: {"parameters": 1})
        layers_of(row(SMALL), 3)
    with pytest.raises(ConfigError, match="family 'gpt2'"):
        layers_of(row({"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 2, "vocab_size": 64}), 3)


def test_operations_are_those_of_the_real_model():
    """Of a small one's forward pass; without a formula for grouped products most are missing."""
    workload = {"model": row(SMALL), "layers": 2, "processes": 1, "what": "evaluate", "rows": [2], "length": 16}
    counted = measure({**workload, "news": False})["flops"]
    model = real_model().model
    formulas = {torch.ops.aten._grouped_mm: _grouped_product}
    real = []
    for mapping in (formulas, {torch.ops.aten._grouped_mm: lambda *_, **__: 0}):
        with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=mapping) as flops:
            model(torch.ones(2, 16, dtype=torch.long))
        real.append(flops.get_total_flops())
    attention = 2 * 2 * (2 * 16) * 16 * (64 + 64)  # of two layers, a product with keys and one with values
    assert counted - attention == real[0] > 1.5 * real[1]
    tokens, experts = 2 * 16, 2 * 4 * (64 * 128 + 64 * 64)  # of two layers, for each token
    assert real[0] - real[1] == 2 * tokens * experts


def test_attention_counts():
    """Of each position with all others, two products forward and five backward: more in long documents than in short
    ones of as many tokens."""

    def layer(rows, length):
        sizes = dict.fromkeys(("forget_batch_size", "retain_batch_size"), rows)
        questions = [unlearning(layers=layers, length=length, **sizes) | {"rows": [rows, rows]} for layers in (2, 3)]
        two, three = (measure(workload)["flops"] for workload in questions)
        return three - two

    tokens, both = 2 * 64, 2  # a pass of forget documents and one of retain documents
    more = 2 * tokens * (64 - 32) * PUBLISHED["olmoe"]["hidden_size"]
    assert layer(2, 64) - layer(4, 32) == both * (2 + 5) * more


@pytest.mark.parametrize("processes", [1, 2])
def test_layers_cost_alike(processes):
    """What three and four layers predict of six is what six take."""
    three, four, six = (measure(unlearning(layers=layers, processes=processes)) for layers in (3, 4, 6))
    for name in ("parameters", "weights", "gradients", "states", "flops", "received"):
        assert three[name] + 3 * (four[name] - three[name]) == six[name], name
    for name in ("passes", "update"):
        assert three[name] + 3 * (four[name] - three[name]) == pytest.approx(six[name], rel=0.02), name


@pytest.mark.parametrize(("objective", "method"), [("gd", "unconstrained"), ("rmu", "anchored")])
def test_a_process_gives_back_the_gradients_of_a_layer_when_they_are_shared_out(objective, method):
    """With each layer its peak grows by what the layer leaves behind: its share of weights, gradients and states, and
    little else. RMU's first pass leaves out the last layers, which the anchor trains."""
    four, six = (measure(unlearning("olmoe", objective, method, layers, processes=2)) for layers in (4, 6))
    left = sum(six[name] - four[name] for name in ("weights", "gradients", "states"))
    assert left > 0 and six["passes"] - four["passes"] < 1.15 * left


def test_states_and_gradients_are_those_of_what_trains():
    """The MoE blocks, routers in fp32; states in bf16, in 8 bits with a scale for every 256, and in fp32 with what
    rounding has lost."""
    config = PUBLISHED["olmoe"]
    experts = 2 * config["num_experts"] * 3 * config["hidden_size"] * config["intermediate_size"]
    routers = 2 * config["num_experts"] * config["hidden_size"]
    of_kind = {kind: measure(unlearning(optimizer=kind)) for kind in ("adamw", "adamw_8bit", "adamw_fp32")}
    assert {found["gradients"] for found in of_kind.values()} == {2 * experts + 4 * routers}
    steps = 4 * 6  # a number for each of the parameters
    assert of_kind["adamw"]["states"] == pytest.approx(4 * experts + 8 * routers, abs=steps)
    assert of_kind["adamw_fp32"]["states"] == pytest.approx(12 * (experts + routers), abs=steps)
    assert of_kind["adamw_8bit"]["states"] == pytest.approx(2 * (experts + routers) * (1 + 4 / 256), rel=1e-3)


def test_checkpointing_saves_activations_and_costs_operations():
    plain, checkpointed = (measure(unlearning(layers=4, gradient_checkpointing=on, length=512)) for on in (False, True))
    assert checkpointed["passes"] < plain["passes"] and checkpointed["flops"] > 1.1 * plain["flops"]


def test_a_checkpointed_layer_leaves_its_input_alone():
    """Until the update, of the documents of both passes, in bf16; nothing that the backward pass computes again."""
    four, six = (measure(unlearning(layers=layers, gradient_checkpointing=True)) for layers in (4, 6))
    kept = [found["passes"] - sum(found[name] for name in ("weights", "gradients", "states")) for found in (four, six)]
    assert kept[1] - kept[0] == pytest.approx(2 * 2 * 32 * PUBLISHED["olmoe"]["hidden_size"] * 2, rel=0.1)


def test_decompositions_count():
    """Of each expert's even share of a step's retain tokens, in every layer; torch counts none of them."""
    free, held = (measure(unlearning(method=name))["flops"] for name in ("unconstrained", "expert_specific_minibatch"))
    config = PUBLISHED["olmoe"]
    share = 2 * 32 * config["num_experts_per_tok"] // config["num_experts"]
    qr, svd = 2 * share * config["hidden_size"] * share, 14 * share * config["hidden_size"] * share
    assert held - free == pytest.approx(SLOW * 2 * config["num_experts"] * (qr + svd), rel=0.02)


def test_a_trace_of_both_sides_counts_once():
    """Those of both sides hold what as many retain tokens alone do: tokens in fp32 and their norms, bounds, how fast
    each score can rise, and the routers."""
    workload = {**unlearning(method="expert_specific"), "traced": 2**17}
    one, both = (
        measure({**workload, "method": PAPER.methods[name].model_dump(mode="json")})
        for name in ("expert_specific", "combined")
    )
    d, experts = (PUBLISHED["olmoe"][name] for name in ("hidden_size", "num_experts"))
    held = 2 * 4 * (2**17 * (d + 1 + 2 * experts) + experts * d)
    for found in (one, both):
        assert found["held"] - found["weights"] == pytest.approx(held, rel=0.02)


def test_a_real_null_space_keeps_what_is_said():
    """Of both sides, on the GPU, once training has begun; the trace itself is in host memory."""
    tokens, method = 2000, PAPER.methods["combined"]
    said = measure({**unlearning(method="combined"), "model": row(SMALL), "traced": 2 * tokens})
    moe = real_model()
    sizes = (tokens, 64), (tokens, 8), (tokens, 4)
    seen = LayerRouting(*(torch.zeros(size, dtype=torch.long if size[1] == 4 else torch.float) for size in sizes))
    trace = dict.fromkeys(moe.layers, seen)
    bases = {layer: RetainBasis(torch.zeros(8, 64, 1)) for layer in moe.layers}
    constraint = build(method, trace, trace, bases=lambda _: bases, seed=0).constraint
    constraint.start(moe, [])
    constraint.bases = None
    assert said["held"] - said["weights"] == pytest.approx(held_bytes(constraint), rel=0.01)


def test_what_a_run_asks_once_is_no_part_of_a_step():
    """KL and NPO ask the original model about all documents before the first step, and receive the experts of each
    layer for that."""
    gd, *others = (
        measure(unlearning(objective=name, layers=3, processes=2))["received"] for name in ("gd", "kl", "npo")
    )
    config = PUBLISHED["olmoe"]
    layer = config["num_experts"] * 3 * config["hidden_size"] * config["intermediate_size"]  # the other's half, in bf16
    assert all(abs(received - gd) < 1.5 * layer for received in others) and gd > 6 * layer


def test_processes_share_experts():
    """Each has half of them, with gradients and states, and its rows of the batch; the other's experts are received."""
    alone, shared = (measure(unlearning(method="anchored", processes=count)) for count in (1, 2))
    config = PUBLISHED["olmoe"]
    experts = 2 * 2 * config["num_experts"] * 3 * config["hidden_size"] * config["intermediate_size"]
    assert alone["weights"] - shared["weights"] == experts / 2
    assert alone["gradients"] - shared["gradients"] == experts / 2
    assert alone["states"] - shared["states"] == experts
    assert shared["flops"] == pytest.approx(alone["flops"] / 2, rel=0.05)
    assert alone["received"] == 0 and shared["received"] > experts


def test_without_dimensions_it_says_what_to_do():
    for config in ({"num_hidden_layers": 4}, {"model_type": "no_such"}, {"model_type": "olmoe", "hidden_size": "wide"}):
        with pytest.raises(NotMeasurable, match="'nobody/nothing': `config:` of its row in models.yaml: "):
            dimensions({"id": "nobody/nothing", "revision": None, "config": config})
    with pytest.raises(NotMeasurable, match="write its dimensions under `config:`"):
        measure({**unlearning(), "model": row(None)})
