"""What a GPU must give as a CPU does, and what only a GPU has: `pytest tests/gpu`. Skipped without one."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import METHODS, random_batch, small_model
from gripmoe.config.methods import method_table
from gripmoe.config.training import Training
from gripmoe.constraints.build import build
from gripmoe.constraints.null_space import fit_bases
from gripmoe.data.corpora import Corpora
from gripmoe.data.documents import Row
from gripmoe.evaluation.stop_rule import StopRule
from gripmoe.geometry.halfspace import nearest_feasible, randomized_kaczmarz
from gripmoe.geometry.nullspace import EpsNull, RetainBasis, RetainStatistics, covariance_basis, extended
from gripmoe.geometry.routing import SelectionRule, mean_stability, route, stability_by_layer
from gripmoe.geometry.screening import ScreenedProjection
from gripmoe.moe import MoEModel, fp8
from gripmoe.planning.fake import STEPS, measure
from gripmoe.training import steps
from gripmoe.training.loop import unlearn
from gripmoe.training.objectives import GradientDifference
from gripmoe.training.optimizers import make_adamw

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
DEVICES = "cpu", "cuda"
N, E, d, k = 300, 8, 64, 2
TRAINING = Training(
    learning_rate=1e-3, router_multiplier=10.0, betas=(0.9, 0.999), adam_epsilon=1e-8, weight_decay=0.0,
    router_weight_decay=0.0, clip_norm=1.0, forget_batch_size=4, retain_batch_size=4, max_steps=8, check_every=4,
    checkpoint_every=4, loss_bound=1e4,
)  # fmt: skip


class Layer:
    """Tokens of half as many directions as dimensions, a router, and an update that breaks some of its margins."""

    def __init__(self, device):
        generator, self.rule = torch.Generator().manual_seed(0), SelectionRule(k)
        mixed_Nd = torch.randn(N, d // 2, generator=generator) @ torch.randn(d // 2, d, generator=generator) / d**0.5
        theta_Ed, update_Ed = (torch.randn(E, d, generator=generator) / d**0.5 for _ in range(2))
        self.x_Nd, self.theta_Ed, self.update_Ed = (each.to(device) for each in (mixed_Nd, theta_Ed, 0.1 * update_Ed))
        seen = route(self.x_Nd, self.theta_Ed, self.rule)
        self.fixed_NE = self.rule.fixed(seen.scores_NE, seen.top_k_Nk)
        margins_NE = self.rule.margins(seen.scores_NE, seen.top_k_Nk)
        self.bounds_NE = margins_NE.clamp_min(0).masked_fill(self.fixed_NE, torch.inf)
        few = slice(None, 40)
        self.basis = RetainStatistics(E, d).update(self.x_Nd[few], self.fixed_NE[few]).basis(EpsNull(1e-6, "relative"))


def on_both(compute):
    """What `compute` gives on the CPU and on the GPU, both on the CPU."""
    return [compute(Layer(device)).cpu() for device in DEVICES]


def test_the_sound_projection_is_that_of_the_cpu():
    def compute(layer):
        found_Ed = nearest_feasible(layer.update_Ed, layer.basis, layer.x_Nd, layer.bounds_NE, tolerance=1e-6)
        assert (layer.x_Nd @ found_Ed.T <= layer.bounds_NE + 1e-5).all(), "and it is feasible"
        assert (layer.x_Nd @ layer.basis.project(layer.update_Ed.double()).float().T > layer.bounds_NE).any()
        return found_Ed

    torch.testing.assert_close(*on_both(compute), atol=1e-5, rtol=0)


def test_screened_steps_are_those_of_the_cpu():
    def compute(layer):
        screened = ScreenedProjection(layer.basis, layer.x_Nd, layer.bounds_NE)
        at_Ed = torch.zeros_like(layer.update_Ed)
        for step in range(20):
            at_Ed = screened(at_Ed + layer.update_Ed.roll(step, dims=1) / 20, layer.basis, at_Ed, tolerance=1e-6)
        return at_Ed

    torch.testing.assert_close(*on_both(compute), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("tokens", "kind"), [(40, "independent"), (200, "dependent"), (N, "more than d")])
def test_the_papers_bases_are_those_of_the_cpu(tokens, kind):
    def compute(layer):
        counts_E = layer.fixed_NE[:tokens].sum(dim=0)
        found = "more than d" if counts_E.max() > d else "dependent" if counts_E.max() > d // 2 else "independent"
        assert found == kind
        eps_null = EpsNull(1e-2, "absolute")
        basis = covariance_basis(layer.x_Nd[:tokens], layer.fixed_NE[:tokens], eps_null)
        basis = extended(basis, layer.x_Nd[-20:], layer.fixed_NE[-20:], eps_null)
        return basis.project(layer.update_Ed)

    torch.testing.assert_close(*on_both(compute), atol=1e-3, rtol=0)


def test_kaczmarz_lowers_the_violation_on_a_gpu():
    layer = Layer("cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    moved_Ed = randomized_kaczmarz(layer.update_Ed, layer.x_Nd, layer.bounds_NE, max_steps=1000, generator=generator)
    before, after = ((layer.x_Nd @ each_Ed.T - layer.bounds_NE).amax() for each_Ed in (layer.update_Ed, moved_Ed))
    assert before > 0.1 and after < before / 2


def trained(device, method, state_file, *, stop_at=None, dtype=torch.float32):
    """A small model after a few steps, and how many of its retain tokens' sets its routers alone still give."""
    moe = MoEModel(small_model().to(device, dtype))
    rows = [[Row(str(n), ids, ids) for n, ids in enumerate(random_batch(8, seed=s).input_ids.tolist())] for s in (1, 2)]
    trace = moe.trace([random_batch(8, seed=2)])
    in_host_memory = {layer: seen.to("cpu") for layer, seen in trace.items()}
    row = METHODS.get(method) or method_table()[method]

    def bases(held):
        fitted = fit_bases(held, moe.rules(), row)
        return {layer: RetainBasis(basis.columns_Edr.to(device)) for layer, basis in fitted.items()}

    built = build(row, in_host_memory, in_host_memory, bases=bases, seed=0)
    calls = itertools.count()

    def scores(_):
        if next(calls) == stop_at:
            raise KeyboardInterrupt
        return {"asked": 1.0}

    stop = StopRule({"asked": -1.0}, scores)
    corpora = Corpora(*rows, pad_id=0)
    unlearn(
        moe, GradientDifference(1.0), built.constraint, corpora, TRAINING, stop, seed=0, scope=built.scope,
        state_file=state_file,
    )  # fmt: skip
    after = {layer: route(seen.x_Nd, moe.theta(layer).detach(), moe.rule(layer)) for layer, seen in trace.items()}
    return moe, mean_stability(stability_by_layer(trace, after))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sound_form_keeps_every_set_of_a_model_on_a_gpu(dtype, tmp_path):
    _, kept = trained("cuda", "expert_specific", tmp_path / "held.pt", dtype=dtype)
    _, free = trained("cuda", "unconstrained", tmp_path / "free.pt", dtype=dtype)
    assert kept == 1.0 and free < 0.99


@pytest.mark.parametrize("method", ["unconstrained", *METHODS])
def test_training_on_a_gpu_is_that_of_the_cpu(method, tmp_path):
    """But for the paper's form, whose draws are of another generator."""
    (here, _), (there, _) = (trained(device, method, tmp_path / f"{device}.pt") for device in DEVICES)
    original = dict(small_model().named_parameters())
    for name, parameter in here.model.named_parameters():
        other = dict(there.model.named_parameters())[name].cpu()
        if "paper" in method and ".gate." in name:
            continue
        moved = (parameter - original[name]).abs().max()
        assert (parameter - other).abs().max() <= 0.1 * moved + 1e-6, name


def test_a_run_on_a_gpu_resumes(tmp_path, capsys):
    """It ends where the uninterrupted run ends, but for the order of the GPU's sums."""
    whole, _ = trained("cuda", "expert_specific", tmp_path / "whole.pt")
    with pytest.raises(KeyboardInterrupt):
        trained("cuda", "expert_specific", tmp_path / "state.pt", stop_at=2)
    assert (tmp_path / "state.pt").exists()
    resumed, _ = trained("cuda", "expert_specific", tmp_path / "state.pt")
    assert "resumes at step 4" in capsys.readouterr().err
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def relative(found, wanted):
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


@hopper
def test_the_fp8_kernels_round_as_the_emulation_does():
    """Forward and backward; the exact product is farther away than the two are from each other."""
    pytest.importorskip("torchao")
    generator, offsets = torch.Generator().manual_seed(0), torch.tensor([64, 64, 192, 256], dtype=torch.int32)
    shapes = (256, 128), (4, 128, 256), (256, 256)
    given = [torch.randn(shape, generator=generator).to("cuda", torch.bfloat16) for shape in shapes]

    def with_gradients(product):
        x_Si, weight_Eio = (each.clone().requires_grad_() for each in given[:2])
        y_So = product(x_Si, weight_Eio, offsets.cuda())
        y_So.backward(given[2])
        return y_So.detach(), x_Si.grad, weight_Eio.grad

    exact = with_gradients(lambda x, weight, offsets: F.grouped_mm(x, weight, offs=offsets))
    for found, wanted, plain in zip(*map(with_gradients, (fp8._on_hopper, fp8._Emulated.apply)), exact, strict=True):
        assert relative(found, wanted) < 0.01 < relative(plain, wanted) < 0.06


@hopper
def test_a_model_computes_in_fp8():
    pytest.importorskip("torchao")
    wide = dict(hidden_size=128, expert_width=64)
    moe, batch = MoEModel(small_model(**wide).to("cuda", torch.bfloat16)), random_batch(rows=8, length=64)
    logits = {}
    for precision in ("native", "fp8_emulated", "fp8"):
        with fp8.expert_precision(moe, precision), torch.no_grad():
            logits[precision] = moe.model(**batch.to("cuda").inputs).logits
    assert relative(logits["fp8"], logits["fp8_emulated"]) < relative(logits["fp8"], logits["native"]) < 0.2


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "adamw_fp32"])
def test_weights_in_bf16_move_at_a_low_rate(optimizer):
    """Plain AdamW, the control, leaves most of them where they are."""
    pytest.importorskip("torchao")

    def moved(kind):
        torch.manual_seed(0)
        weight = torch.nn.Parameter((0.02 * torch.randn(256, 256, device="cuda")).bfloat16())
        before, made = weight.detach().clone(), make_adamw(kind, [{"params": [weight], "lr": 3e-5}], weight_decay=0.0)
        for _ in range(20):
            weight.grad = torch.ones_like(weight)
            made.step()
        return (weight.detach().float() - before.float()).mean().item()

    assert moved(optimizer) == pytest.approx(-20 * 3e-5, rel=0.1)
    assert abs(moved("adamw")) < 0.8 * 20 * 3e-5


@pytest.mark.parametrize(("method", "rows"), [("none", 2), ("none", 32), ("anchor", 2)])
def test_a_step_takes_the_memory_that_the_plan_says(method, rows, monkeypatch):
    monkeypatch.setattr(steps, "TIMED_PAIRS", 0)
    config = dict(
        model_type="qwen3_moe", vocab_size=1024, hidden_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, head_dim=64, intermediate_size=512, moe_intermediate_size=512, num_experts=32,
        num_experts_per_tok=4,
    )  # fmt: skip
    last = {"max_steps": 1, "check_every": 1, "checkpoint_every": 1, "objective": {"alpha": 1.0}}
    batches = {"forget_batch_size": rows, "retain_batch_size": rows, "gradient_checkpointing": rows > 2}
    question = {
        "model": {"id": "nobody/nothing", "revision": None, "config": config, "dtype": "bfloat16"},
        "layers": 4, "processes": 1, "what": "unlearn", "rows": [rows, rows], "length": 128, "traced": 1,
        "objective": "gd", "method": {"constraint": method}, "training": {**TRAINING.model_dump(), **last, **batches},
    }  # fmt: skip
    found = measure(copy.deepcopy(question))
    said = max(found["passes"], found["update"])
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() - sum(each.nbytes for each in model.parameters())
    STEPS["unlearn"](MoEModel(model), question, dict)
    taken = torch.cuda.max_memory_allocated() - before
    print(f"\n{method}, {rows} rows: {said / 1e6:.0f} MB said, {taken / 1e6:.0f} MB taken, {said / taken:.2f} of it")
    assert 0.9 < said / taken < 1.5, "the CPU's kernels, which the plan measures, take more"
