"""AdamW: in the dtype of the weights, in fp32, or in little memory."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.adamw import adamw

from gripmoe.io import distributed
from gripmoe.io.errors import ConfigError

NO_TORCHAO = "optimizer 'adamw_8bit' needs torchao: run `make gpu` or pip install 'gripmoe[gpu]', or take `adamw`"


def make_adamw(kind: str, groups: Iterable[Mapping[str, Any]], **settings) -> torch.optim.Optimizer:
    """AdamW of a `kind`: "adamw" keeps two states in the dtype of each parameter; "adamw_8bit" keeps them in 8 bits,
    and rounds bf16 weights stochastically, since most would never move under rounding to nearest; "adamw_fp32" updates
    weights of any dtype as if they were in fp32. Raises ConfigError if "adamw_8bit" is asked for without torchao."""
    require_optimizer(kind)
    if kind == "adamw":
        return torch.optim.AdamW(groups, fused=True, **settings)
    if kind == "adamw_fp32":
        return AdamWFp32(groups, **settings)
    try:
        from torchao.optim import AdamW8bit
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError:
        raise ConfigError(NO_TORCHAO) from None

    class ShardableAdamW8bit(AdamW8bit):
        """States that declare fp32, whatever the dtype of the weights. A view of a state declares fp32 in any case, and
        DTensor wants both to agree."""

        @staticmethod
        def _subclass_zeros(p, signed, block_size):
            return OptimState8bit.zeros(p.shape, signed, block_size, p.device)

    return ShardableAdamW8bit(groups, bf16_stochastic_round=True, **settings)


def require_optimizer(kind: str) -> None:
    """Raises ConfigError if a `kind` of `make_adamw` needs a package that is missing. Call it before long work."""
    if kind == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        raise ConfigError(NO_TORCHAO)


def finite_norm(loss: float, parameters: Sequence[torch.nn.Parameter], step: int) -> float:
    """The norm of all gradients, over all processes. Raises ConfigError, before the step, if the norm or the loss of
    any process is not finite: weights that are NaN answer questions like a model that knows nothing."""
    norm = distributed.total_norm([p.grad for p in parameters if p.grad is not None]).item()
    if not math.isfinite(distributed.average(loss) + norm):
        raise ConfigError(f"training diverged at step {step}: lower `learning_rate`")
    return norm


@contextmanager
def rate_zero(groups: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Within the block steps leave the parameters of these groups unchanged to the bit, and take their usual time."""
    rates = [float(group["lr"]) for group in groups]
    set_rates(groups, [0.0] * len(groups))
    try:
        yield
    finally:
        set_rates(groups, rates)


def set_rates(groups: Sequence[dict[str, Any]], rates: Sequence[float]) -> None:
    """The learning rate of each parameter group, from the next step on."""
    for group, rate in zip(groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):  # torchao's
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class AdamWFp32(torch.optim.AdamW):
    """AdamW with states in fp32, and beside them the rounding error of each weight (`lost`): their sum is, to the bit,
    the weight that fp32 training would have."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    for name in ("exp_avg", "exp_avg_sq", "lost"):
                        state[name] = torch.zeros_like(parameter, dtype=torch.float32)
                exact = parameter.float() + state["lost"]
                adamw(
                    [exact],
                    [parameter.grad.float()],
                    [state["exp_avg"]],
                    [state["exp_avg_sq"]],
                    [],
                    [state["step"]],
                    foreach=False,
                    amsgrad=False,
                    beta1=beta1,
                    beta2=beta2,
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                parameter.copy_(exact)
                state["lost"] = exact - parameter.float()
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the states in fp32; torch would cast them to the dtype of the weights."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if name != "step":
                    self.state[parameter][name] = value.to(parameter.device)
