"""The arithmetic of memory against the bytes that a tiny model in bf16 really holds after two steps."""

import pytest
import torch

from conftest import SMALL
from gripmoe import unlearning
from gripmoe.catalogue import PublishedModel, Sizes, Widths
from gripmoe.commands.unlearn import held_bytes
from gripmoe.constraints import Unconstrained
from gripmoe.memory import Step, needed
from gripmoe.moe import MoEModel
from gripmoe.objectives import make_objective
from gripmoe.penalties import constraint_of
from gripmoe.worlds.models import make_model
from test_planning import changed
from test_unlearning import CORPORA, NEVER

LARGE, LAYERS, LAST = "qwen3_30b_a3b", 4, 1
SETTINGS = {"gd": {"alpha": 1.0}, "rmu": {"alpha": 1.0, "layer": LAST, "steering": 1.0}}
WIDE = {**SMALL, "num_layers": LAYERS, "expert_width": 64}  # so that each tensor of experts is kept in 8 bits


@pytest.fixture
def moe():
    return MoEModel(make_model("qwen3_moe", 64, seed=0, **WIDE).to(torch.bfloat16))


def two_steps(moe, objective, training, folder, monkeypatch, constraint=None):
    """The optimizer, after the real loop."""
    made = []
    make = unlearning.make_adamw
    monkeypatch.setattr(
        unlearning, "make_adamw", lambda *args, **settings: made.append(make(*args, **settings)) or made[0]
    )
    outcome = unlearning.unlearn(
        moe,
        make_objective(objective, SETTINGS[objective], 0),
        constraint or Unconstrained(),
        CORPORA,
        training,
        NEVER,
        seed=0,
        state_file=folder / "state.pt",
    )
    assert (outcome.status, outcome.steps) == ("not_reached", 2)
    return made[0]


def said(moe, objective, training, method="unconstrained"):
    """What planning says of a published model with these numbers of parameters, in bytes."""
    blocks = sum(p.numel() for layer in moe.layers for p in moe.block(layer).parameters())
    sizes = Sizes(total=sum(p.numel() for p in moe.model.parameters()), blocks=blocks, active=1.0, layers=LAYERS)
    project = changed("paper", training=training, gpus={}, models=[LARGE])
    project.models[LARGE] = PublishedModel(source="published", id="tiny", parameters=sizes)
    project.widths[LARGE] = Widths(hidden=moe.hidden_size, vocabulary=64, experts=moe.num_experts, chosen=moe.top_k)
    project.world.objective_training[objective]["objective"] = SETTINGS[objective]
    need = needed(project, Step(LARGE, "unlearn", "wmdp_cyber", objective, method))
    return need.weights * 1e9, need.gradients * 1e9, need.states * 1e9


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_fp32", "adamw_8bit"])
@pytest.mark.parametrize(
    "objective, trained_layers, layers",
    [("gd", None, [0, 1, 2, 3]), ("gd", 3, [1, 2, 3]), ("rmu", None, [0, 1]), ("rmu", 1, [1])],
)
def test_weights_gradients_and_states_take_what_is_said(
    moe, objective, trained_layers, layers, optimizer, tmp_path, monkeypatch
):
    """Of the layers that train, to the byte, but that planning counts routers in bf16: they, their gradients and their
    states are in fp32. States in 8 bits have a scale for every 256 of them (two in fp32, a 32nd of a byte each) and a
    table for each tensor."""
    changes = {"trained_layers": trained_layers, "optimizer": optimizer, "max_steps": 2, "check_every": 2}
    training = changed("paper").world.training.model_copy(update=changes)
    weights, gradients, states = said(moe, objective, training)
    with torch.compiler.set_stance("force_eager"):  # steps in 8 bits would be compiled, which takes most of a minute
        adamw = two_steps(moe, objective, training, tmp_path, monkeypatch)

    parameters = list(moe.model.parameters())
    routers = {id(moe.theta(layer)) for layer in moe.layers}
    one_router = moe.theta(0).numel()
    assert sum(p.numel() * p.element_size() for p in parameters) == weights + 2 * one_router * LAYERS

    trained = [p for p in parameters if p.grad is not None]
    of_layers = [p for layer in layers for p in moe.block(layer).parameters()]
    assert {id(p) for p in trained} == {id(p) for p in of_layers} == {id(p) for p in adamw.state}
    in_fp32 = one_router * len(layers)
    assert sum(p.grad.numel() * p.grad.element_size() for p in trained) == gradients + 2 * in_fp32

    kept = sum(state_bytes(adamw.state[p]) for p in trained if id(p) not in routers)
    per_router = {"adamw": 4, "adamw_fp32": 12, "adamw_8bit": 2}[optimizer]
    experts = states - per_router * in_fp32
    if optimizer != "adamw_8bit":
        assert kept == experts
    else:
        tables = 2 * 256 * 4 * sum(id(p) not in routers for p in trained)
        assert kept - tables == pytest.approx(experts * (1 + 4 / 256))


@pytest.mark.parametrize("trained_layers, layers", [(None, [0, 1, 2, 3]), (1, [1])])
def test_an_anchor_trains_experts_above_rmus_layer_too(moe, trained_layers, layers, tmp_path, monkeypatch):
    """Its penalty looks at all layers; its routers are frozen, which planning counts."""
    changes = {"trained_layers": trained_layers, "optimizer": "adamw", "max_steps": 2, "check_every": 2}
    project = changed("paper")
    training = project.world.training.model_copy(update=changes)
    _, gradients, states = said(moe, "rmu", training, "anchored")
    constraint = constraint_of(project.methods["anchored"], {}, None, None, 0)
    adamw = two_steps(moe, "rmu", training, tmp_path, monkeypatch, constraint)
    routers = {id(moe.theta(layer)) for layer in moe.layers}
    experts = [p for layer in layers for p in moe.block(layer).parameters() if id(p) not in routers]
    # Not what has a gradient now: the last step of a run is timed without the constraint.
    assert {id(p) for p in adamw.state} == {id(p) for p in experts}
    counted = 2 * moe.theta(0).numel() * len(layers)
    assert sum(p.numel() * p.element_size() for p in adamw.state) == gradients - counted
    assert sum(map(state_bytes, adamw.state.values())) == states - 2 * counted


def state_bytes(state):
    """Of its moments, not of the step count, which is one number; states in 8 bits are made of several tensors."""
    moments = [value for name, value in state.items() if name != "step"]
    return sum(
        sum(held_bytes(getattr(moment, name)) for name in moment.tensor_attrs)
        if hasattr(moment, "tensor_attrs")
        else held_bytes(moment)
        for moment in moments
    )
