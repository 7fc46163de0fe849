"""Linear layers by TransformerEngine, with a stand-in for it that computes as torch does: what is converted, when it
computes, and that the model is afterwards what it was. What FP8 does to numbers only a card can tell."""

import math
import sys
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import convert_model
from test_families import make
from test_loop import TRAINING, corpus
from torch import nn
from transformers import AutoModelForCausalLM

from conftest import random_batch, small_model
from gripmoe.constraints.base import Unconstrained
from gripmoe.data.corpora import Corpora
from gripmoe.evaluation.stop_rule import StopRule
from gripmoe.moe import MoEModel, fp8
from gripmoe.moe.families import FAMILIES
from gripmoe.moe.storage import save_model, weights_digest
from gripmoe.training import steps
from gripmoe.training.loop import unlearn
from gripmoe.training.objectives import GradientDifference


class StandIn(nn.Linear):
    """As TransformerEngine's: weights of its own, an empty bias for none, a state beside them, whole tiles."""

    active = False

    def __init__(self, in_features, out_features, bias=True, params_dtype=None):
        super().__init__(in_features, out_features, bias=bias, dtype=params_dtype)
        if not bias:
            del self.bias
            self.bias = torch.Tensor()

    def get_extra_state(self):
        return torch.zeros(1)

    def forward(self, x):
        assert self.active, "outside of the autocast it would compute in the model's dtype"
        assert math.prod(x.shape[:-1]) % 8 == 0 and x.shape[-1] % 16 == 0
        return nn.functional.linear(x, self.weight, self.bias if self.bias.numel() else None)


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """The stand-in installed, on a machine with a card; `entered` has the recipe of every autocast that was entered."""
    entered = []

    @contextmanager
    def fp8_autocast(enabled, fp8_recipe):
        entered.append(fp8_recipe)
        StandIn.active = enabled
        try:
            yield
        finally:
            StandIn.active = False

    contents = {
        "transformer_engine": {},
        "transformer_engine.pytorch": dict(Linear=StandIn, LayerNorm=nn.LayerNorm, fp8_autocast=fp8_autocast),
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": dict(
            DelayedScaling=SimpleNamespace, Format=SimpleNamespace(HYBRID="hybrid")
        ),
    }
    for name, attributes in contents.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
    installed = tmp_path / "site" / "transformer_engine-2.8.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.8\n")
    monkeypatch.syspath_prepend(installed.parent)
    with_card(monkeypatch, (8, 9))
    yield entered
    AcceleratorState._reset_state(reset_partial_state=True)


def with_card(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def converted(moe):
    return {name for name, module in moe.model.named_modules() if type(module) is StandIn}


def within(moe):
    """What a training pass computes by TransformerEngine."""
    with fp8.linear_precision(moe, "te_fp8")():
        return converted(moe)


def test_attention_and_shared_experts_are_converted_routers_and_odd_widths_are_not(engine):
    attention = {f"model.layers.{n}.self_attn.{p}_proj" for n in range(2) for p in "qkvo"}
    assert within(MoEModel(small_model())) == attention
    shared = {f"model.layers.{n}.mlp.shared_expert.{p}_proj" for n in range(2) for p in ("gate", "up", "down")}
    moe = MoEModel(small_model("qwen2_moe"))
    assert within(moe) == attention | shared, "not the gate of the shared expert, of width 1, nor the head"
    assert all(moe.theta(layer).dtype == torch.float32 for layer in moe.layers)
    assert not converted(moe)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_has_its_routers_or_fused_experts_converted(family, engine):
    moe = make(family)
    names = {module: name for name, module in moe.model.named_modules()}
    kept = [f"{names[moe.router(layer)]}" for layer in moe.layers]
    found = within(moe)
    assert found and not any(name == router or name.startswith(f"{router}.") for name in found for router in kept)


def test_a_router_that_is_a_linear_layer_is_left_alone(engine):
    """Phi-MoE's: of 16 experts, so that accelerate would convert it."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "phimoe", vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=32, num_local_experts=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    moe = MoEModel(model)
    assert isinstance(moe.router(0), nn.Linear)
    name = next(name for name, module in model.named_modules() if module is moe.router(0))
    assert within(moe) and name not in within(moe)
    with torch.no_grad():
        convert_model(model.model, _convert_ln=False)
    assert name in converted(moe), "the control"


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])  # the second has biases
def test_within_a_pass_it_is_the_same_model_with_the_same_parameters(family, engine):
    """Tokens that fill no tile included. The control: outside of a pass nothing enters the autocast."""
    moe, batch = MoEModel(small_model(family)), random_batch(rows=3, length=7)
    parameters = dict(moe.model.named_parameters())
    order, plain = list(moe.model.state_dict()), moe.model(**batch.inputs).logits
    training_pass = fp8.linear_precision(moe, "te_fp8")
    torch.testing.assert_close(moe.model(**batch.inputs).logits, plain, rtol=0, atol=0)
    assert not engine
    with training_pass():
        torch.testing.assert_close(moe.model(**batch.inputs).logits, plain)
        assert all(p is parameters[name] for name, p in moe.model.named_parameters())
        assert len(list(moe.model.state_dict())) > len(order), "with states that plain transformers has not"
    assert list(moe.model.state_dict()) == order and [recipe.fp8_format for recipe in engine] == ["hybrid"]


def test_it_ends_with_a_pass_that_fails(engine):
    moe = MoEModel(small_model())
    with pytest.raises(KeyboardInterrupt), fp8.linear_precision(moe, "te_fp8")():
        raise KeyboardInterrupt
    assert not converted(moe)


def trained(tmp_path, precision, seen=None, **changes):
    moe = MoEModel(small_model())
    training = TRAINING.model_copy(update={"linear_precision": precision, "max_steps": 4, **changes})
    outcome = unlearn(
        moe, GradientDifference(alpha=1.0), Unconstrained(), Corpora(corpus(0), corpus(1), pad_id=0), training,
        StopRule({"a": -1.0}, lambda m: (seen if seen is not None else []).append(converted(m)) or {"a": 1.0}), seed=5,
        state_file=tmp_path / f"{precision}.pt",
    )  # fmt: skip
    return moe, outcome


@pytest.mark.parametrize("recomputed", [False, True])
def test_training_enters_it_in_every_pass_and_nowhere_else(recomputed, engine, tmp_path, tokenizer):
    """32 tokens a pass: the stand-in computes to the bit what the plain model does. What is saved on the way, and what
    the stop rule asks, is the plain model."""
    ends, seen = {}, []
    for precision in ("native", "te_fp8"):
        moe, _ = trained(tmp_path, precision, seen, gradient_checkpointing=recomputed)
        ends[precision] = weights_digest(moe.model)
        passes = 2 * (4 + 2 * steps.TIMED_PAIRS)
        assert len(engine) == (passes if precision == "te_fp8" else 0), "four steps and those timed; the control: none"
        state = torch.load(tmp_path / f"{precision}.pt", weights_only=True)["model"]
        assert list(state) == list(small_model().state_dict())
    assert ends["te_fp8"] == ends["native"] != weights_digest(small_model())
    assert seen and not any(seen) and not converted(moe)
    assert save_model(moe.model, tokenizer, tmp_path / "weights") == ends["native"]
    assert weights_digest(AutoModelForCausalLM.from_pretrained(tmp_path / "weights")) == ends["native"]


def test_where_package_or_card_is_missing_nothing_begins(engine, tmp_path, monkeypatch):
    for card in (None, (8, 0)):
        with_card(monkeypatch, card)
        with pytest.raises(ValueError, match=r"linear_precision 'te_fp8' needs a GPU.*8\.9 or more; take `native`"):
            trained(tmp_path, "te_fp8", begun := [])
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ValueError, match=r"linear_precision 'te_fp8' needs transformer-engine: run .*\[fp8\]"):
        trained(tmp_path, "te_fp8", begun)
    assert not begun and not list(tmp_path.glob("*.pt"))
    assert trained(tmp_path, "native")[1].steps == 4
