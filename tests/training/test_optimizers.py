"""What bf16 does to AdamW at the paper's learning rate, and what stochastic rounding does about it."""

import io
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from gripmoe.training.checkpoint import load_state, save_state
from gripmoe.training.muon import MuonWithAdamW
from gripmoe.training.optimizers import make_adamw


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
    far, _ = moved("adamw_fp32", torch.bfloat16)
    assert far == pytest.approx(1.0, abs=0.05)


def test_rounding_to_the_nearest_does_not():
    far, stuck = moved("adamw", torch.bfloat16)
    assert stuck > 0.3 and abs(far - 1) > 0.1


def trained(optimizer, weight, steps, first=0):
    """Steps on gradients that are numbers of bf16, whatever the weight is."""
    for step in range(first, first + steps):
        torch.manual_seed(step)
        weight.grad = torch.randn(weight.shape).bfloat16().to(weight.dtype)
        optimizer.step()


SETTINGS = dict(lr=3e-5, weight_decay=0.01)


def weights():
    """The same one in bf16 and in fp32."""
    torch.manual_seed(0)
    start = (0.02 * torch.randn(64, 256)).bfloat16()
    return torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())


def test_fp32_states_move_bf16_weights_as_fp32_ones_to_the_bit():
    """The control: with states in bf16 they end elsewhere."""
    (low, full), (plain, _) = weights(), weights()
    exact = make_adamw("adamw_fp32", [{"params": [low]}], **SETTINGS)
    trained(exact, low, 30)
    trained(torch.optim.AdamW([full], foreach=False, **SETTINGS), full, 30)
    trained(make_adamw("adamw", [{"params": [plain]}], **SETTINGS), plain, 30)
    assert low.dtype == torch.bfloat16 and torch.equal(low.float() + exact.state[low]["lost"], full)
    assert torch.equal(low, full.bfloat16()) and not torch.equal(plain, full.bfloat16())


def test_fp32_states_are_resumed_in_fp32():
    (whole, _), (stopped, _) = weights(), weights()
    trained(make_adamw("adamw_fp32", [{"params": [whole]}], **SETTINGS), whole, 8)
    first = make_adamw("adamw_fp32", [{"params": [stopped]}], **SETTINGS)
    trained(first, stopped, 4)
    again = make_adamw("adamw_fp32", [{"params": [stopped]}], **SETTINGS)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert {state.dtype for state in again.state[stopped].values()} == {torch.float32}
    trained(again, stopped, 4, first=4)
    assert torch.equal(whole, stopped)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists what is mapped")
@pytest.mark.parametrize("kind", ["adamw", "adamw_fp32", "muon"])
def test_a_resumed_run_does_not_hold_the_file_that_it_came_from(kind, tmp_path):
    """Or a replaced checkpoint would stay on disk until the process ends."""
    model, state = torch.nn.Linear(64, 64), tmp_path / "state.pt"
    adamw = lambda: make_adamw(kind, [{"params": list(model.parameters())}], lr=0.1)  # noqa: E731
    optimizer = MuonWithAdamW(model, lr=0.1) if kind == "muon" else adamw()
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    save_state(state, model, optimizer, seen=torch.ones(64))
    progress = load_state(state, model, optimizer)
    assert str(state) not in Path("/proc/self/maps").read_text() and progress["seen"].sum() == 64
    mapped = torch.load(state, mmap=True)
    assert str(state) in Path("/proc/self/maps").read_text() and mapped, "the control"


def test_what_others_write_into_a_weight_stands():
    """As a constraint does after a step: no hidden copy overrules it."""
    weight, _ = weights()
    optimizer = make_adamw("adamw_fp32", [{"params": [weight]}], **SETTINGS)
    trained(optimizer, weight, 2)
    with torch.no_grad():
        weight.fill_(1.0)
    trained(optimizer, weight, 1)
    assert (weight.float() - 1.0).abs().max() < 0.01


@pytest.mark.parametrize(("kind", "size"), [("adamw", 4), ("adamw_8bit", 2), ("adamw_fp32", 12)])
def test_states_take_so_many_bytes(kind, size):
    """In 8 bits a little more, for the scale of every 256 values."""
    weight = torch.nn.Parameter(torch.zeros(64, 1024, dtype=torch.bfloat16))
    optimizer = make_adamw(kind, [{"params": [weight]}], lr=1e-3)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    file = io.BytesIO()
    torch.save([state for state in optimizer.state[weight].values() if state.numel() > 1], file)
    assert file.tell() / weight.numel() == pytest.approx(size, rel=0.1)


@pytest.mark.parametrize("missing", ["torchao", "torchao.optim"])
def test_without_torchao_it_says_what_to_install(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        ValueError, match=r"needs torchao: run `make gpu` or pip install 'gripmoe\[gpu\]', or take `adamw`"
    ):
        make_adamw("adamw_8bit", [{"params": [torch.nn.Parameter(torch.zeros(2))]}])


@pytest.fixture
def mesh():
    """Of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "kind, dtype",
    [
        ("adamw_8bit", torch.float32),
        ("adamw_fp32", torch.bfloat16),
        ("adamw_8bit", torch.bfloat16),  # whose states are views that forget another dtype than fp32
    ],
)
def test_sharded_weights_move_as_whole_ones_to_the_bit(kind, dtype, mesh):
    ends = []
    for placed in (lambda tensor: tensor, lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])):
        start = weights()[0].detach().to(dtype)
        weight = torch.nn.Parameter(placed(start.clone()))
        optimizer = make_adamw(kind, [{"params": [weight]}], **SETTINGS)
        for step in range(4):
            torch.manual_seed(step)
            weight.grad = placed(torch.randn(start.shape).to(dtype))
            torch.manual_seed(step)  # of stochastic rounding
            optimizer.step()
        ends.append(weight.detach().full_tensor() if isinstance(weight, DTensor) else weight.detach())
    assert torch.equal(*ends) and not torch.equal(ends[0], start)
