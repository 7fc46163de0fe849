"""What bf16 does to AdamW at the paper's learning rate, and what stochastic rounding does about it."""

import io
import os
import sys

import pytest
import torch

from gripmoe.optimizer import make_adamw
from gripmoe.planning import BYTES_STATES

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torchao compiles its step, which takes longer than all else


def moved(kind, dtype, steps=20):
    """How far weights of usual size have gone in the direction of a constant gradient, as a share of steps times
    learning rate; and the share of weights that have not moved at all."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter((0.02 * torch.randn(64, 256)).to(dtype))
    before = weight.detach().clone()
    optimizer = make_adamw(kind, [{"params": [weight]}], lr=3e-5, weight_decay=0.0)
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    gone = before.float() - weight.detach().float()
    return (gone.mean() / (steps * 3e-5)).item(), (gone == 0).float().mean().item()


def test_stochastic_rounding_goes_as_far_as_fp32_on_average():
    far, _ = moved("adamw", torch.float32)
    assert far == pytest.approx(1.0, abs=0.01)
    far, stuck = moved("adamw_8bit", torch.bfloat16)
    assert far == pytest.approx(1.0, abs=0.05) and stuck < 0.05


def test_rounding_to_the_nearest_does_not():
    far, stuck = moved("adamw", torch.bfloat16)
    assert stuck > 0.3 and abs(far - 1) > 0.1


@pytest.mark.parametrize("kind", sorted(BYTES_STATES))
def test_states_take_what_the_plan_says(kind):
    """In 8 bits a little more, for the scale of every 256 values."""
    weight = torch.nn.Parameter(torch.zeros(64, 1024, dtype=torch.bfloat16))
    optimizer = make_adamw(kind, [{"params": [weight]}], lr=1e-3)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    file = io.BytesIO()
    torch.save([state for state in optimizer.state[weight].values() if state.numel() > 1], file)
    assert file.tell() / weight.numel() == pytest.approx(BYTES_STATES[kind], rel=0.1)


def test_without_torchao_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(
        ValueError, match=r"needs torchao: run `make gpu` or pip install 'gripmoe\[gpu\]', or take `adamw`"
    ):
        make_adamw("adamw_8bit", [{"params": [torch.nn.Parameter(torch.zeros(2))]}])
