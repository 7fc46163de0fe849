"""Routing-aware calibration of the retain loss, as we read the abstract of TRACE (arXiv 2606.10338).

Experts that forget tokens use more than retain tokens do (forget-critical experts) get little retain signal, so
unlearning damages what they store for other documents. Retain tokens are therefore reweighted until each such expert is
as active on retain tokens as on forget tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gripmoe.constraints.original import OriginalCache
from gripmoe.data.documents import Batch
from gripmoe.geometry.routing import selection_mask
from gripmoe.moe import MoEModel

MAX_STEPS = 100  # of Newton's method


def matching_weights(active_NS: Tensor, wanted_S: Tensor, *, ridge: float = 1e-2) -> Tensor:
    """The positive weights of mean 1 nearest to uniform (in relative entropy) under which the means of the columns of
    `active_NS` (0 or 1) are `wanted_S`.

    The weights are exponential in the columns; Newton's method minimises the dual. `ridge` keeps it finite where no
    weights give the wanted means, which they then approach.
    """
    active_NS, wanted_S = active_NS.double(), wanted_S.double()
    eye_SS = torch.eye(len(wanted_S), dtype=active_NS.dtype, device=active_NS.device)

    def dual(tilt_S: Tensor) -> Tensor:
        return (active_NS @ tilt_S).logsumexp(0) - wanted_S @ tilt_S + ridge / 2 * tilt_S.square().sum()

    tilt_S = torch.zeros_like(wanted_S)
    for _ in range(MAX_STEPS):
        share_N = (active_NS @ tilt_S).softmax(0)
        mean_S = share_N @ active_NS
        gradient_S = mean_S - wanted_S + ridge * tilt_S
        if gradient_S.abs().max() < 1e-9:
            break
        covariance_SS = (active_NS * share_N[:, None]).T @ active_NS - mean_S[:, None] * mean_S
        step_S = torch.linalg.solve(covariance_SS + ridge * eye_SS, gradient_S)
        length, before = 1.0, dual(tilt_S)
        while dual(tilt_S - length * step_S) > before and length > 1e-6:
            length /= 2
        tilt_S = tilt_S - length * step_S
    return len(active_NS) * (active_NS @ tilt_S).softmax(0)


def routing_aware_weights(
    model: MoEModel, forget: Sequence[Batch], retain: Sequence[Batch], per_layer: int
) -> OriginalCache:
    """A weight for every token of the `retain` documents, 0 for padding. Forget-critical are the `per_layer` experts of
    each layer whose share of forget tokens exceeds their share of retain tokens by most."""
    activity = {"forget": [], "retain": []}
    for name, batches in (("forget", forget), ("retain", retain)):
        for batch in batches:
            sets = model.routes(**batch.inputs)
            mask = batch.attention_mask.flatten().bool()
            selected = [selection_mask(sets[layer], model.num_experts)[mask] for layer in model.layers]
            activity[name].append(torch.stack(selected, dim=1))
    forget_NLE, retain_NLE = (torch.cat(activity[name]) for name in ("forget", "retain"))
    share_LE = forget_NLE.float().mean(0)
    critical = (share_LE - retain_NLE.float().mean(0)).topk(per_layer, dim=1).indices
    layers = torch.arange(len(model.layers), device=critical.device)[:, None].expand_as(critical)
    weights_N = matching_weights(retain_NLE[:, layers, critical].flatten(1), share_LE[layers, critical].flatten())
    kept, start = OriginalCache(), 0
    for batch in retain:
        mask = batch.attention_mask.bool()
        end = start + int(mask.sum())
        per_token = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        per_token[mask] = weights_N[start:end].float()
        kept.fill([batch], lambda _, values=per_token: values, "routing-aware weights")
        start = end
    return kept
