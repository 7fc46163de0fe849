"""Experts in FP8: the emulated arithmetic beside the exact one, forward and backward, and in training."""

import inspect
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from test_families import make, rows
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from conftest import random_batch, small_model
from gripmoe.data.documents import collate
from gripmoe.io.errors import ConfigError
from gripmoe.moe import MoEModel, fp8

OFFSETS = torch.tensor([16, 16, 48, 64], dtype=torch.int32)  # one expert has no token


def factors(draw):
    """x_Si, weight_Eio, and the gradient of what comes out."""
    generator = torch.Generator().manual_seed(0)
    shapes = (64, 32), (4, 32, 48), (64, 48)
    return [draw(shape, generator) for shape in shapes]


def with_gradients(product, x_Si, weight_Eio, gradient_So):
    x_Si, weight_Eio = x_Si.clone().requires_grad_(), weight_Eio.clone().requires_grad_()
    y_So = product(x_Si, weight_Eio, OFFSETS)
    y_So.backward(gradient_So)
    return y_So.detach(), x_Si.grad, weight_Eio.grad


def exact(x_Si, weight_Eio, offsets_E):
    return F.grouped_mm(x_Si, weight_Eio, offs=offsets_E)


def relative(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


def test_numbers_that_fp8_has_give_the_exact_product_and_gradients():
    """Integers up to 8; with one of 9 digits in binary they no longer do."""
    given = factors(lambda shape, generator: torch.randint(-8, 9, shape, generator=generator).float())
    for found, wanted in zip(with_gradients(fp8._Emulated.apply, *given), with_gradients(exact, *given), strict=True):
        assert torch.equal(found, wanted)
    given[1][0, 0, 0] = 257.0
    assert not torch.equal(fp8._Emulated.apply(*given[:2], OFFSETS), exact(*given[:2], OFFSETS))


def test_rounding_is_that_of_four_bits():
    """E4M3 has a significand of four bits: half a unit of the last is a sixteenth at most, whatever a row's scale."""
    x = torch.randn(1000, 16, generator=torch.Generator().manual_seed(0))
    x *= torch.logspace(-8, 8, 1000)[:, None]
    error = (fp8.rounded(x, 1) - x).abs()
    assert (error <= x.abs() / 16 + x.abs().amax(1, keepdim=True) * 2.0**-17).all()
    assert (error.amax(1) > x.abs().amax(1) / 200).all(), "it rounds"


def test_random_numbers_give_nearly_the_product_and_gradients():
    given = factors(lambda shape, generator: torch.randn(shape, generator=generator))
    for found, wanted in zip(with_gradients(fp8._Emulated.apply, *given), with_gradients(exact, *given), strict=True):
        assert 0.01 < relative(found, wanted) < 0.06


def test_hopper_experts_are_torchaos_grouped_product(monkeypatch):
    """With its own signature, and an exact product in place of its kernel, which looks at what it needs: tokens of each
    expert in whole tiles, nothing padded, weights laid out by column, bf16 out."""
    from torchao.prototype import moe_training as training

    signature, given = inspect.signature(training._to_fp8_rowwise_then_scaled_grouped_mm), []

    def kernel(*args, **named):
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        given.append(bound.arguments)
        A, B_t, offs = (bound.arguments[name] for name in ("A", "B_t", "offs"))
        return F.grouped_mm(A, B_t, offs=offs).to(bound.arguments["out_dtype"])

    monkeypatch.setattr(training, "_to_fp8_rowwise_then_scaled_grouped_mm", kernel)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    moe, batch = make("qwen3_moe"), collate(rows(), 0)
    native, hopper = (outputs(moe, batch, precision) for precision in ("native", "fp8"))
    for found, wanted in zip(hopper, native, strict=True):
        assert 0 < relative(found, wanted) < 0.01, "but for bf16, forward and backward"
    assert len(given) == 2 * len(moe.layers)
    for call in given:
        assert call["out_dtype"] == torch.bfloat16 and not call["pad_token_groups_for_grouped_mm"]
        assert call["float8_dtype"] == torch.float8_e4m3fn
        assert (call["offs"] % 16 == 0).all() and call["offs"].dtype == torch.int32
        assert call["offs"][-1] == len(call["A"]), "rows of no expert"
        assert call["B_t"].stride(-2) == 1, "by column"


def outputs(moe, batch, precision):
    """Logits, and the gradients of the experts of the first layer."""
    moe.model.zero_grad()
    with fp8.expert_precision(moe, precision):
        logits = moe.model(**batch.inputs).logits
        logits.square().mean().backward()
    return [logits.detach(), *(p.grad.clone() for p in moe.expert_parameters(moe.layers[0]))]


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_the_forward_is_that_of_transformers_but_for_the_rounding(family):
    moe, batch = MoEModel(small_model(family)), random_batch()
    native, emulated = (outputs(moe, batch, precision) for precision in ("native", "fp8_emulated"))
    for found, wanted in zip(emulated, native, strict=True):
        assert 1e-4 < relative(found, wanted) < 0.2


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "jamba", "deepseek_v3"])
def test_without_the_rounding_it_is_the_experts_own(family, monkeypatch):
    """Biases, transposed and interleaved weights included."""
    monkeypatch.setattr(fp8, "rounded", lambda x, dim: x)
    monkeypatch.setattr(fp8, "_rounded_by_group", lambda x, offsets: x)
    moe, batch = make(family), collate(rows(), 0)
    native, emulated = (outputs(moe, batch, precision) for precision in ("native", "fp8_emulated"))
    for found, wanted in zip(emulated, native, strict=True):
        assert relative(found, wanted) < 1e-5


def test_it_ends_with_the_block_and_where_it_cannot_be_it_says_so(monkeypatch):
    moe = MoEModel(small_model())
    before = moe.model.config._experts_implementation
    with fp8.expert_precision(moe, "fp8_emulated"):
        assert moe.model.config._experts_implementation in ALL_EXPERTS_FUNCTIONS
    assert moe.model.config._experts_implementation == before
    dense = MoEModel(small_model("qwen3"))
    with (
        pytest.raises(ConfigError, match="is of experts, and the model is dense"),
        fp8.expert_precision(dense, "fp8_emulated"),
    ):
        pass
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "torchao.prototype.moe_training", None)
    with pytest.raises(ValueError, match="needs torchao: run `make gpu`"), fp8.expert_precision(moe, "fp8"):
        pass
    kernels = types.SimpleNamespace(_to_fp8_rowwise_then_scaled_grouped_mm=None)
    monkeypatch.setitem(sys.modules, "torchao.prototype.moe_training", kernels)
    with pytest.raises(ValueError, match="compute capability 9.0.*`fp8_emulated`"), fp8.expert_precision(moe, "fp8"):
        pass
