"""States of a forward pass: outputs of a layer, what routers see, and the input of the head."""

from __future__ import annotations

import torch
from torch import Tensor

from gripmoe.data.documents import Batch
from gripmoe.io.errors import ConfigError
from gripmoe.moe.model import MoEModel


def hidden_states(model: MoEModel, layer: int, batch: Batch) -> Tensor:
    """Output of decoder layer `layer`, (rows, positions, d). Raises ConfigError for several streams of states."""
    with model.record_hidden(layer) as outputs:
        model.model.model(**batch.inputs)
    if len(shape := outputs[0].shape) != 3 or shape[-1] != model.hidden_size:
        raise ConfigError(
            f"layer {layer} of {type(model.model).__name__} returns several streams of states, of shape "
            f"{tuple(shape)}, and representation misdirection steers one: take another objective"
        )
    return outputs[0]


def router_states(model: MoEModel, batch: Batch, field: str) -> Tensor:
    """`x_Nd`, `scores_NE` or `top_k_Nk` (named by `field`) of every router: (rows, positions, L, d, E or k)."""
    with model.record_routing() as recorder:
        model.model.model(**batch.inputs)
        trace = recorder.take()
    states = [getattr(trace[layer], field).unflatten(0, batch.input_ids.shape) for layer in model.layers]
    return torch.stack(states, dim=2)


def final_hidden_states(model: MoEModel, batch: Batch) -> Tensor:
    """The input of the language-model head: normed hidden states, (rows, positions, d)."""
    return model.model.model(**batch.inputs).last_hidden_state
