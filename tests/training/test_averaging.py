"""Weight averaging: what is checked and what a run ends with, and that a run resumes."""

import pytest
import torch

from conftest import random_batch, small_model
from gripmoe.config.methods import method_table
from gripmoe.constraints.build import build
from gripmoe.constraints.null_space import fit_bases
from gripmoe.io.errors import ConfigError
from gripmoe.moe import MoEModel
from gripmoe.training.averaging import WeightAverage
from training.test_loop import TRAINING, assert_resumes, run

AVERAGED = TRAINING.model_copy(update={"average_decay": 0.5})


def weights_of(moe):
    return [p.detach().clone() for layer in moe.layers for p in moe.expert_parameters(layer)]


def test_an_average_by_hand():
    parameter = torch.nn.Parameter(torch.tensor([4.0]))
    average = WeightAverage([parameter], decay=0.75)
    for value in (8.0, 0.0):
        with torch.no_grad():
            parameter.fill_(value)
        average.update()
    with average.weights():  # 4, then 5, then 3.75
        assert parameter.item() == 3.75
    assert parameter.item() == 0.0
    average.write()
    assert parameter.item() == 3.75


def test_weights_in_lower_precision_are_averaged_in_fp32():
    """The control: in bf16 a step of 2^-9 beside 1 is rounded away."""
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    average = WeightAverage([parameter], decay=0.5)
    with torch.no_grad():
        parameter.fill_(1 + 2**-7)
    for _ in range(20):
        average.update()
    average.write()
    assert parameter.item() == 1 + 2**-7
    in_bf16 = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(20):
        in_bf16.lerp_(parameter.detach(), 0.5)
    assert in_bf16.item() == 1.0


def test_checks_and_the_end_see_the_average_and_steps_the_weights(tmp_path):
    """The average of a run is that of the weights of the same run without averaging; the control ends elsewhere."""
    every_step = TRAINING.model_copy(update={"check_every": 1, "checkpoint_every": TRAINING.max_steps})
    passed, checked = [], []
    kept = lambda seen: lambda moe: seen.append(weights_of(moe)) or 1.0  # noqa: E731
    plain, _ = run(tmp_path / "plain.pt", training=every_step, accuracy=kept(passed))
    averaged = every_step.model_copy(update={"average_decay": 0.5})
    moe, _ = run(tmp_path / "state.pt", training=averaged, accuracy=kept(checked))
    expected = passed[0]
    for own, seen in zip(passed[1:], checked[1:], strict=True):
        expected = [torch.lerp(before, now, 0.5) for before, now in zip(expected, own, strict=True)]
        assert all(torch.equal(*pair) for pair in zip(expected, seen, strict=True))
    assert all(torch.equal(*pair) for pair in zip(expected, weights_of(moe), strict=True))
    assert not any(torch.equal(*pair) for pair in zip(weights_of(plain), weights_of(moe), strict=True))


def test_a_model_in_lower_precision_ends_with_the_average(tmp_path, monkeypatch):
    """The steps that are timed at the end do not add to it what rounding took from other weights. The control: they
    would, if they came after it."""
    model, written = small_model().bfloat16(), []
    moe, write = MoEModel(model), WeightAverage.write

    def writes_to(average):
        write(average)
        written.append(weights_of(moe))

    monkeypatch.setattr(WeightAverage, "write", writes_to)
    run(tmp_path / "state.pt", moe=moe, training=AVERAGED.model_copy(update={"optimizer": "adamw_fp32"}))
    assert all(torch.equal(*pair) for pair in zip(written[-1], weights_of(moe), strict=True))


def test_an_averaged_run_resumes_in_the_same_bytes(tmp_path):
    assert_resumes(tmp_path, AVERAGED)


def test_averages_of_routers_that_leave_the_constraint_are_refused(tmp_path):
    moe = MoEModel(small_model())
    method = method_table()["expert_specific_every_10"]
    held = moe.trace([random_batch(seed=3)])
    constraint = build(method, held, bases=lambda trace: fit_bases(trace, moe.rules(), method), seed=0).constraint
    with pytest.raises(ConfigError, match="`average_decay` needs `every: 1`"):
        run(tmp_path / "state.pt", training=AVERAGED, constraint=constraint, moe=moe)
