"""Experts and linear layers in FP8 in training passes (App. A, Hardware and Quantization). Routers and geometry stay in
fp32; stored weights and optimizer states keep their precision.

Experts: both factors of every product with an expert's weights are rounded to E4M3, in forward and backward passes. The
scale of each row along the summed dimension is a power of two. Linear layers: TransformerEngine with delayed scaling.

Shapes: T tokens, E experts, S token-expert pairs, i and o features in and out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gripmoe.config.training import LinearPrecision, Precision
from gripmoe.io.errors import ConfigError
from gripmoe.moe.model import MoEModel

ALIGNED = 16  # FP8 kernels need a multiple of 16 tokens
LARGEST = torch.finfo(torch.float8_e4m3fn).max


@contextmanager
def expert_precision(model: MoEModel, precision: Precision) -> Iterator[None]:
    """Within the block, experts compute in `precision`: "fp8" uses torchao's kernels for Hopper GPUs; "fp8_emulated"
    does the same arithmetic in the model's own dtype, on any device and slowly.

    Raises ConfigError for "fp8" without a GPU or torchao, for a dense model, and for experts that are not fused."""
    if precision == "native":
        yield
        return
    if precision == "fp8":
        _require_kernels()
    if not model.layers:
        raise ConfigError(f"expert_precision {precision!r} is of experts, and the model is dense; leave it out")
    if unfused := [layer for layer in model.layers if not hasattr(model.block(layer).experts, "_apply_gate")]:
        raise ConfigError(f"expert_precision {precision!r}: experts of layers {unfused} are not fused tensors")
    before = model.model.get_experts_implementation()
    model.model.set_experts_implementation(_registered(precision))
    try:
        yield
    finally:
        model.model.set_experts_implementation(before)


def _require_kernels() -> None:
    try:
        from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm  # noqa: F401
    except ImportError:
        raise ConfigError("expert_precision 'fp8' needs torchao: run `make gpu`, or take `fp8_emulated`") from None
    _require_gpu(
        "expert_precision 'fp8'", (9, 0), "`native`, or `fp8_emulated` for the same arithmetic, slowly, on any device"
    )


def _require_gpu(key: str, capability: tuple[int, int], otherwise: str) -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < capability:
        needed = "{}.{}".format(*capability)
        raise ConfigError(f"{key} needs a GPU of compute capability {needed} or more; take {otherwise}")


def linear_precision(model: MoEModel, precision: LinearPrecision) -> Callable[[], AbstractContextManager]:
    """Returns a context manager for training passes: within it, linear layers of the decoder whose widths are multiples
    of 16 compute in `precision`. Between passes the model is the plain one, with the same weights.

    Raises ConfigError for "te_fp8" without TransformerEngine or a GPU."""
    if precision == "native":
        return nullcontext
    from accelerate.utils import is_transformer_engine_available

    if not is_transformer_engine_available():
        raise ConfigError(
            "linear_precision 'te_fp8' needs transformer-engine: run `pip install --no-build-isolation '.[fp8]'` where "
            "nvcc is, or take `native`"
        )
    _require_gpu("linear_precision 'te_fp8'", (8, 9), "`native`")
    from transformer_engine.common.recipe import DelayedScaling, Format
    from transformer_engine.pytorch import fp8_autocast

    recipe = DelayedScaling(fp8_format=Format.HYBRID)  # E4M3 forward, E5M2 gradients; else its defaults, as accelerate
    places = _converted(model)

    @contextmanager
    def training_pass() -> Iterator[None]:
        for parent, name, _, counterpart in places:
            setattr(parent, name, counterpart)
        try:
            # Scales change only at the end, so a recomputation in the backward pass rounds like the pass.
            with fp8_autocast(enabled=True, fp8_recipe=recipe):
                yield
        finally:
            for parent, name, linear, _ in places:
                setattr(parent, name, linear)

    return training_pass


def _converted(model: MoEModel) -> list[tuple[nn.Module, str, nn.Module, nn.Module]]:
    """The linear layers that accelerate converts, without routers: parent, name, the layer, and the converted layer
    with the same parameters. The model is unchanged."""
    from accelerate import Accelerator
    from accelerate.utils import convert_model

    decoder = model.model.model  # losses use the weight of the head, not the module
    before = dict(decoder.named_modules(remove_duplicate=False))
    routers = {module for layer in model.layers for module in model.router(layer).modules()}
    Accelerator()  # `convert_model` needs its state
    with torch.no_grad():
        convert_model(decoder, _convert_ln=False)
    places = []
    for path, linear in before.items():
        if (counterpart := decoder.get_submodule(path)) is linear:
            continue
        parent, _, name = path.rpartition(".")
        setattr(before[parent], name, linear)
        if linear in routers:
            continue
        for key, parameter in linear.named_parameters():
            counterpart.register_parameter(key, parameter)
        counterpart.forward = partial(_in_tiles, counterpart.forward)
        places.append((before[parent], name, linear, counterpart))
    return places


def _in_tiles(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Calls `forward`, which needs a multiple of 16 tokens, on any number of tokens: pads them with zeros, which change
    no scale."""
    x_Ti = x.flatten(0, -2)
    y_To = forward(F.pad(x_Ti, (0, 0, 0, -len(x_Ti) % ALIGNED)))
    return y_To[: len(x_Ti)].unflatten(0, x.shape[:-1])


def _experts_forward(product, experts: nn.Module, x_Td: Tensor, top_k_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
    """The forward pass of fused experts, as transformers calls it. Pads the rows of each expert to a multiple of 16."""
    expert_S, order_S = top_k_Tk.flatten().sort(stable=True)
    token_S = order_S // top_k_Tk.shape[1]
    counts_E = torch.bincount(expert_S, minlength=experts.num_experts)
    padded_E = (counts_E + ALIGNED - 1) // ALIGNED * ALIGNED
    offsets_E = padded_E.cumsum(0).int()
    rank_S = torch.arange(len(expert_S), device=x_Td.device) - (counts_E.cumsum(0) - counts_E)[expert_S]
    row_S = (offsets_E - padded_E)[expert_S] + rank_S

    def linear(x_Si: Tensor, name: str) -> Tensor:
        weight = getattr(experts, name)
        padded = x_Si.new_zeros(int(offsets_E[-1]), x_Si.shape[1]).index_copy(0, row_S, x_Si)
        y_So = product(padded, weight if experts.is_transposed else weight.transpose(1, 2), offsets_E)[row_S]
        return y_So + getattr(experts, f"{name}_bias")[expert_S] if experts.has_bias else y_So

    up = linear(x_Td[token_S], "gate_up_proj" if experts.has_gate else "up_proj")
    y_Sd = linear(experts._apply_gate(up) if experts.has_gate else experts.act_fn(up), "down_proj")
    y_Sd = y_Sd * weights_Tk.flatten()[order_S, None]
    return torch.zeros_like(x_Td).index_add(0, token_S, y_Sd.to(x_Td.dtype))


def _on_hopper(x_Si: Tensor, weight_Eio: Tensor, offsets_E: Tensor) -> Tensor:
    from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm

    by_column = weight_Eio.transpose(1, 2).contiguous().transpose(1, 2)  # the layout that the kernel wants
    product = _to_fp8_rowwise_then_scaled_grouped_mm(
        x_Si, by_column, offsets_E, out_dtype=torch.bfloat16, pad_token_groups_for_grouped_mm=False
    )
    return product.to(x_Si.dtype)


class _Emulated(torch.autograd.Function):
    """x_Si times the weight of each group of rows, with the rounding of the kernels, also in the backward pass."""

    @staticmethod
    def forward(ctx, x_Si: Tensor, weight_Eio: Tensor, offsets_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_Si, weight_Eio, offsets_E)
        return F.grouped_mm(rounded(x_Si, 1), rounded(weight_Eio, 1), offs=offsets_E)

    @staticmethod
    def backward(ctx, gradient_So: Tensor):
        x_Si, weight_Eio, offsets_E = ctx.saved_tensors
        weight_Eoi = rounded(weight_Eio, 2).transpose(1, 2)
        of_x_Si = F.grouped_mm(rounded(gradient_So, 1), weight_Eoi, offs=offsets_E)
        x_Si, gradient_So = (_rounded_by_group(each, offsets_E) for each in (x_Si, gradient_So))
        return of_x_Si, F.grouped_mm(x_Si.T, gradient_So, offs=offsets_E), None


def rounded(x: Tensor, dim: int) -> Tensor:
    """`x` rounded to E4M3 and back, with one power-of-two scale for all entries along `dim`."""
    return _scaled(x, x.abs().amax(dim=dim, keepdim=True))


def _rounded_by_group(x_Sc: Tensor, offsets_E: Tensor) -> Tensor:
    """Like `rounded`, with one scale for each column of a group of rows."""
    row_S = torch.arange(len(x_Sc), device=x_Sc.device, dtype=offsets_E.dtype)
    group_S = torch.searchsorted(offsets_E, row_S, right=True)
    largest_Ec = x_Sc.new_zeros(len(offsets_E), x_Sc.shape[1])
    largest_Ec.scatter_reduce_(0, group_S[:, None].expand_as(x_Sc), x_Sc.abs(), "amax")
    return _scaled(x_Sc, largest_Ec[group_S])


def _scaled(x: Tensor, largest: Tensor) -> Tensor:
    scale = torch.exp2(torch.floor(torch.log2(LARGEST / largest.float().clamp_min(1e-12))))
    return ((x.float() * scale).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)


def _registered(precision: Precision) -> str:
    """Registers experts in `precision` with transformers; returns the name for the model's configuration."""
    # The import takes seconds, and only a run in FP8 needs it.
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    product = {"fp8": _on_hopper, "fp8_emulated": _Emulated.apply}[precision]
    ALL_EXPERTS_FUNCTIONS.register(f"gripmoe_{precision}", partial(_experts_forward, product))
    return f"gripmoe_{precision}"
