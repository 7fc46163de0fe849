"""Muon: its updates are orthogonal, and a stack of matrices moves as its matrices would one by one."""

import torch

from conftest import small_model
from gripmoe.training.muon import MuonWithAdamW, orthogonal


def test_singular_values_are_near_one():
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 16, 40), (3, 40, 16)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape, generator=generator)))
        assert 0.6 < values.min() and values.max() < 1.3


def test_a_stack_moves_as_its_matrices():
    stack = torch.randn(4, 8, 12, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(orthogonal(stack), torch.stack([orthogonal(matrix) for matrix in stack]))


def test_each_parameter_has_one_optimizer():
    model = small_model()
    optimizer = MuonWithAdamW(model, lr=1e-3)
    by_adamw = [p for group in optimizer.adamw.param_groups for p in group["params"]]
    assert len(by_adamw) + len(optimizer.matrices) == len(list(model.parameters()))
    kinds = {name.split(".")[-2] if name.endswith("weight") else name.split(".")[-1] for name in optimizer.matrices}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"}
