"""UNDO: noise goes into experts alone, and the teacher's predictions come back by distillation."""

from math import nan

import pytest
import torch

from conftest import random_batch, small_model
from gripmoe.config.methods import UndoConfig
from gripmoe.data.corpora import fitting_batch_size
from gripmoe.io.errors import ConfigError
from gripmoe.moe import MoEModel
from gripmoe.moe.states import final_hidden_states
from gripmoe.moe.storage import weights_digest
from gripmoe.training import undo as module
from gripmoe.training.undo import mix_in_noise, undo
from moe.test_families import make
from training.test_loop import corpus

SETTINGS = UndoConfig(noise=0.3, steps=12, learning_rate=3e-3, batch_size=4)
RETAIN = corpus(1)


def undone(moe=None, seed=0, **changes):
    moe = moe or MoEModel(small_model("qwen2_moe"))
    report = undo(moe, RETAIN, SETTINGS.model_copy(update=changes), pad_id=0, seed=seed)
    return moe, report


def test_noise_is_mixed_in_by_its_share():
    weight, bias = torch.full((4, 50, 70), 2.0), torch.ones(5)
    mix_in_noise([weight, bias], share=0.25, seed=0)
    assert weight.mean().item() == pytest.approx(1.5, abs=2e-3)
    assert weight.std().item() == pytest.approx(0.25 * (2 / 120) ** 0.5, rel=0.05)
    assert torch.equal(bias, torch.full((5,), 0.75))
    little = torch.full((4, 50, 70), 2.0)
    mix_in_noise([little], share=0.25, seed=0, scale=0.1)
    torch.testing.assert_close(little - 1.5, 0.1 * (weight - 1.5), atol=1e-6, rtol=1e-4)
    again = torch.full((4, 50, 70), 2.0)
    mix_in_noise([again], share=0.25, seed=0)
    other = torch.full((4, 50, 70), 2.0)
    mix_in_noise([other], share=0.25, seed=1)
    assert torch.equal(again, weight) and not torch.equal(other, weight)


def test_a_corpus_smaller_than_a_batch_is_said():
    """UNDO and finetuning take it whole."""
    with pytest.warns(UserWarning, match=f"the corpus has {len(RETAIN)} documents, fewer than a batch of 99"):
        undone(batch_size=99, steps=1)
    assert fitting_batch_size(RETAIN, 4) == 4


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3"])
def test_all_of_the_experts_change_and_nothing_else(family):
    """Of a dense model its feed-forward blocks."""
    before, (after, _) = MoEModel(small_model(family)), undone(MoEModel(small_model(family)))
    old, new = before.model.state_dict(), after.model.state_dict()
    for name, value in old.items():
        is_expert = ".mlp." in name and not name.endswith("mlp.gate.weight")
        assert torch.equal(new[name], value) != is_expert, name
    assert all(p.requires_grad for p in after.model.parameters()) and not after.model.training


def test_distillation_brings_the_predictions_back():
    """The control: without enough steps they stay what noise made of them."""
    teacher, batch = MoEModel(small_model("qwen2_moe")), random_batch(seed=3)
    wanted = final_hidden_states(teacher, batch).detach()
    reports = {steps: undone(steps=steps, learning_rate=1e-2)[1] for steps in (1, 60)}
    assert reports[60]["distillation_loss"] < 0.5 * reports[1]["distillation_loss"]
    lost = {scale: undone(noise_scale=scale, steps=1)[1]["distillation_loss"] for scale in (0.0, 1.0)}
    assert lost[0.0] < lost[1.0], "shrinking alone costs less"
    still, _ = undone(noise=0.0, steps=1, learning_rate=1e-12)
    torch.testing.assert_close(final_hidden_states(still, batch), wanted, atol=1e-5, rtol=1e-4)


def test_biases_of_experts_get_no_noise():
    """Also those of fused experts, which are matrices."""
    bias = torch.ones(4, 5)
    mix_in_noise([bias], share=0.25, seed=0, biases={bias})
    assert torch.equal(bias, torch.full((4, 5), 0.75))
    old = make("gpt_oss").model.state_dict()
    new = undone(make("gpt_oss"), steps=1, learning_rate=1e-12)[0].model.state_dict()
    name = next(name for name in old if name.endswith("experts.gate_up_proj_bias"))
    torch.testing.assert_close(new[name], 0.7 * old[name])


def test_a_loss_that_is_not_finite_ends_it(monkeypatch):
    monkeypatch.setattr(
        module.OriginalPredictions, "divergence", lambda _, moe, batch: nan * moe.other_parameters(0)[0].sum()
    )
    with pytest.raises(ConfigError, match="training diverged at step 0: lower `learning_rate`"):
        undone()


def test_a_seed_says_all_and_tokens_count():
    (one, report), (again, _), (other, _) = undone(), undone(), undone(seed=1)
    assert weights_digest(one.model) == weights_digest(again.model) != weights_digest(other.model)
    assert report["tokens"] == SETTINGS.steps * SETTINGS.batch_size * 8
    checkpointed, _ = undone(gradient_checkpointing=True)
    assert weights_digest(checkpointed.model) == weights_digest(one.model)
