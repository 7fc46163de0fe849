"""What a block changes in a model, and that the model is afterwards as it was."""

import warnings

import pytest
import torch

from conftest import small_model
from gripmoe.moe import MoEModel
from gripmoe.moe.modes import checkpointing, freeze, restored


def embedding_hooks(model):
    return len(model.get_input_embeddings()._forward_hooks)


def requires_grad(model, batch):
    return model(**batch.inputs).logits.requires_grad


def test_checkpointing_leaves_no_hook_on_the_embeddings(batch):
    """Enabling adds one, so that a frozen model has gradients within the block: the control."""
    model = small_model().requires_grad_(False)
    for _ in range(2):
        with checkpointing(model, True):
            assert model.is_activation_checkpointing and requires_grad(model, batch)
        assert not model.is_activation_checkpointing
        assert embedding_hooks(model) == 0 and not requires_grad(model, batch)
    with checkpointing(model, False):
        assert not model.is_activation_checkpointing and embedding_hooks(model) == 0


def test_gradients_of_inputs_that_were_asked_for_before_stay(batch):
    """By a hook that `disable_input_require_grads` still removes."""
    for enable in ("enable_input_require_grads", "activation_checkpointing_enable"):
        model = small_model().requires_grad_(False)
        getattr(model, enable)()
        was_on = model.is_activation_checkpointing
        for _ in range(2):
            with checkpointing(model, True):
                assert model.is_activation_checkpointing
            assert model.is_activation_checkpointing == was_on
            assert embedding_hooks(model) == 1 and requires_grad(model, batch)
        model.disable_input_require_grads()
        assert embedding_hooks(model) == 0 and not requires_grad(model, batch)


def test_checkpointing_and_passes_without_padding_call_nothing_that_transformers_removes(batch):
    moe = MoEModel(small_model())
    with warnings.catch_warnings(action="error", category=FutureWarning):
        with checkpointing(moe.model.train(), True), moe.unpadded():
            moe.model(**batch.inputs).logits.sum().backward()
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):  # the control
        assert not moe.model.is_gradient_checkpointing


def test_what_is_frozen_has_no_gradient_left():
    layer = torch.nn.Linear(2, 2)
    layer(torch.ones(2)).sum().backward()
    freeze([layer.bias])
    assert not layer.bias.requires_grad and layer.bias.grad is None
    assert layer.weight.requires_grad and layer.weight.grad is not None


def test_restored_puts_values_back_in_place_after_an_error_too():
    tensor = torch.zeros(3)
    with pytest.raises(KeyboardInterrupt), restored([tensor], device="cpu"):
        tensor.add_(1)
        raise KeyboardInterrupt
    assert torch.equal(tensor, torch.zeros(3))
