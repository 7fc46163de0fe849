"""Method B after your own training (Sec. 4.3): `remember` the original routers, and `realign` those of the trained
model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gripmoe.constraints.realignment import realign_routers
from gripmoe.data.batches import batches_of
from gripmoe.data.documents import Batch, collate_inputs
from gripmoe.geometry.realignment import Realignment
from gripmoe.geometry.routing import LayerRouting, RoutingTrace
from gripmoe.library.checks import are_other_routers
from gripmoe.moe import MoEModel
from gripmoe.moe.adapters import unwrapped
from gripmoe.moe.recording import counted_tokens


@dataclass(frozen=True)
class Original:
    """What Method B needs of the original model (Theta and X_r of Eq. 5), about 4 N (d + E) bytes per layer.

    By decoder layer: `theta_0`, the router, (E, d), fp32; and `trace`, its routing of the N retain tokens that count
    (`x_Nd`, `scores_NE`, `top_k_Nk`). `batch` has the documents, (rows, positions).
    """

    theta_0: dict[int, Tensor]
    trace: RoutingTrace
    batch: Batch
    biases: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)


torch.serialization.add_safe_globals([Original, LayerRouting, Batch])  # so that `torch.load` reads an `Original`
torch.serialization.add_safe_globals([(Original, "gripmoe.constraints.realignment.Original")])  # in files of 0.2.0


def remember(
    model: nn.Module, retain: Iterable[Batch | Mapping[str, Tensor]] | Iterable[str], *, tokenizer: Any = None
) -> Original:
    """Records the original routers and their retain inputs for Method B (Sec. 4.3); call it before unlearning.

    `retain` and `tokenizer` are as in `constrain`. Give at least four tokens per hidden dimension (the paper takes one,
    App. D.4). The model is unchanged. Warns of fewer tokens than hidden dimensions.

    Raises ValueError for an unknown family, a dense model, or fewer than two tokens that count; KeyError for a batch
    without `input_ids`.
    """
    with _opened(model, to_own_dtype=True) as moe:
        batches = [batch.to(moe.model.device) for batch in batches_of(retain, "retain", moe.model, tokenizer)]
        if not batches:
            raise ValueError("`retain` holds no batches: Method B fits routers to what they saw of retain documents")
        batch = collate_inputs(batches)
        tokens = int(counted_tokens(batch.attention_mask).sum())
        if tokens < 2:
            raise ValueError(
                f"`retain` holds {tokens} tokens that count, the first of every row aside: Method B fits to one and "
                f"checks on another at least, and fits well from {4 * moe.hidden_size}"
            )
        original = Original(moe.thetas(), moe.trace(batches), batch, moe.router_biases())
    if tokens < moe.hidden_size:
        warnings.warn(
            f"`retain` holds {tokens} tokens that count, fewer than the hidden size of {moe.hidden_size}: Method B "
            f"fits well from {4 * moe.hidden_size}",
            stacklevel=2,
        )
    return original


def realign(model: nn.Module, original: Original, *, form: str = "sound") -> dict[int, Realignment]:
    """Method B (PTC, Sec. 4.3, Eq. 5): refits every router of the unlearned `model` in place, so that retain tokens are
    routed as in `original`, the result of `remember`. Returns a `Realignment` by decoder layer.

    `form` "paper" is Eq. 5 with the acceptance test of App. D.4. "sound" (ours) starts from the original router, goes
    layer by layer, and chooses the ridge on every fourth document (on every fourth token of fewer than four documents).

    Raises ValueError for an unknown form or family, a dense model, a model that an open handle holds, or an `original`
    that differs in layers, shapes, tokens or their number, or holds values that are not finite. Raises ValueError also
    for a model whose hidden states are not finite. Routers in bf16 are in fp32
    afterwards. After an error all routers are unchanged.
    """
    if form not in ("sound", "paper"):
        raise ValueError(f"unknown form {form!r}; sound or paper")
    with _opened(model) as moe:
        moe.require_free()
        _check_remembered(moe, original)
        trained = moe.router_biases()
        moe.set_router_biases(original.biases)
        device = moe.model.device  # which may be another since
        theta_0 = {layer: theta_Ed.to(device) for layer, theta_Ed in original.theta_0.items()}
        try:
            with moe.unpadded():
                _check_finite(moe, original.batch.to(device))
                return realign_routers(moe, theta_0, original.trace, original.batch.to(device), form=form)
        except BaseException:
            moe.set_router_biases(trained)
            raise


@torch.no_grad()
def _check_finite(moe: MoEModel, batch: Batch) -> None:
    with moe.evaluating():
        hidden = moe.model.model(**batch.inputs).last_hidden_state
    if not hidden[batch.attention_mask.to(hidden.device).bool()].isfinite().all():
        raise ValueError("hidden states of this model are not finite: realign weights from before it diverged")


@contextmanager
def _opened(model: nn.Module, *, to_own_dtype: bool = False) -> Iterator[MoEModel]:
    """The model with routers in fp32, where they stay unless `to_own_dtype`, or after an error."""
    moe = MoEModel(unwrapped(model))
    try:
        moe.require_routers("to realign")
        yield moe
    except BaseException:
        moe.release(to_own_dtype=True)
        raise
    moe.release(to_own_dtype=to_own_dtype)


def _check_remembered(moe: MoEModel, original: Original) -> None:
    if not isinstance(original, Original):
        raise ValueError(f"`original` is a {type(original).__name__}: give the result of gripmoe.remember")
    if (token := int(original.batch.input_ids.max())) >= moe.model.get_input_embeddings().weight.shape[0]:
        raise ValueError(
            f"the remembered documents have token {token}, which this model lacks: realign the model that "
            "was remembered"
        )
    for what, layers in (("routers", list(original.theta_0)), ("retain inputs", list(original.trace))):
        if sorted(layers) != sorted(moe.layers):
            raise ValueError(
                f"this model has routers in layers {moe.layers}, and {what} are remembered of layers {layers}: realign "
                "the model that was remembered"
            )
    tokens = int(counted_tokens(original.batch.attention_mask).sum())
    for layer in moe.layers:
        for what, tensor, shape in (
            ("router", original.theta_0[layer], tuple(moe.theta(layer).shape)),
            ("retain input", original.trace[layer].x_Nd, (tokens, moe.hidden_size)),
        ):
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"layer {layer}: the shape of its {what} is {tuple(tensor.shape)} as remembered and {shape} in "
                    "this model: realign the model that was remembered, with the same documents"
                )
            if not tensor.isfinite().all():
                raise ValueError(
                    f"layer {layer}: its {what} as remembered is not finite: remember a model before it diverges"
                )
    if are_other_routers(original.theta_0, moe.thetas()):
        raise ValueError(
            "the routers of this model differ from the remembered ones by more than their norm: realign the model that "
            "was remembered"
        )
