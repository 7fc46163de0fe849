"""Where the forget gradient is taken, if not at the model's own weights.

An adversary, a simulated attacker, relearns while a model unlearns, as in TAR (Tamirisa et al. 2024) and MUDMAN (Sondej
et al. 2025). Unlearning takes the gradient of its forget loss where relearning would bring the model, so that the loss
holds there too. The adversary starts from the model's weights at each `restart` and goes on from its own in between.
SAM (Fan et al. 2025) takes the gradient at the worst of the weights nearby, to first order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gripmoe.constraints.hooks import Diverged
from gripmoe.io import distributed
from gripmoe.moe.modes import restored


class RelearningAdversary:
    """The adversary's copy of `parameters`, the ones that unlearning trains. A step of descent moves each weight by
    `rate` against the sign of its gradient, as AdamW's first step does; so the adversary keeps no optimizer state
    (ours). Raises ValueError without parameters, or for a `rate` that is not positive. `weights` raises RuntimeError
    before the first `restart`, `restart` within `weights`, and `relearn` outside `weights` or under reentrant gradient
    checkpointing. `relearn` raises Diverged for a loss that is not finite."""

    def __init__(self, parameters: Iterable[nn.Parameter], rate: float):
        self._parameters = list(parameters) if isinstance(parameters, Iterable) else []
        self._rate = rate
        self._weights: list[Tensor] = []
        self._attacking = False  # whether the parameters have the adversary's weights
        if not self._parameters or not all(isinstance(parameter, Tensor) for parameter in self._parameters):
            raise ValueError(
                "`parameters` are the weights that the adversary trains: give `model.parameters()`, or some of them"
            )
        if not isinstance(rate, int | float) or not 0 < rate < math.inf:
            raise ValueError(f"`rate` is {rate!r}: give the distance that a step moves each weight, above 0")

    def restart(self) -> None:
        """The adversary takes the weights that the model has now. Raises RuntimeError within `weights`, where the model
        has the adversary's."""
        if self._attacking:
            raise RuntimeError(
                "within `weights` the model has the adversary's weights: call `restart` before that block"
            )
        self._weights = [parameter.detach().to(torch.float32, copy=True) for parameter in self._parameters]

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Within the block the parameters have the adversary's weights. Gradients stay when the block ends. Raises
        RuntimeError before the first `restart`, and if an optimizer steps the parameters, since that is undone."""
        if len(self._weights) != len(self._parameters):
            raise RuntimeError("the adversary has no weights yet: call `restart` first")
        with restored(self._parameters):
            with torch.no_grad():
                for parameter, weight in zip(self._parameters, self._weights, strict=True):
                    parameter.copy_(weight)
            self._attacking, hook = True, register_optimizer_step_pre_hook(self._refuse)
            try:
                yield
            finally:
                self._attacking = False
                hook.remove()

    def _refuse(self, optimizer: torch.optim.Optimizer, *_) -> None:
        own = {id(parameter) for parameter in self._parameters}
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            raise RuntimeError("a step within `weights` would be undone: step the optimizer after that block")

    def relearn(self, loss_of: Callable[[], Tensor]) -> float:
        """One step of descent on a loss, within `weights`; returns the loss. The gradients of all parameters, also of
        those that are not the adversary's, are afterwards what they were before. Raises RuntimeError outside `weights`
        and under reentrant gradient checkpointing, Diverged if the loss is not finite, ValueError if `loss_of` returns
        no loss, or one of which no parameter of the adversary has a gradient."""
        if not self._attacking:
            raise RuntimeError("outside `weights` this would train the model itself: call `relearn` within that block")
        loss = loss_of()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(f"`loss_of` returns {type(loss).__name__}: let it return the loss, a tensor of one number")
        if not math.isfinite(mean := distributed.average(float(loss.detach()))):  # all processes stop together
            raise Diverged(f"the loss is {mean}, of which nothing is learned: take an earlier checkpoint")
        kept = [(tensor, tensor.grad) for tensor in {*self._parameters, *_leaves(loss)}]
        try:
            for tensor, _ in kept:
                tensor.grad = None
            if loss.requires_grad:
                loss.backward()
            if all(parameter.grad is None for parameter in self._parameters):
                raise ValueError(
                    "no parameter of the adversary has a gradient of this loss, so the adversary learns nothing: give "
                    "parameters that train (under PEFT, those of the adapter)"
                )
            with torch.no_grad():
                for parameter, weight in zip(self._parameters, self._weights, strict=True):
                    if parameter.grad is not None:  # the adversary's weights are in fp32: in bf16 few would move
                        weight.sub_(parameter.grad.sign(), alpha=self._rate)
                        parameter.copy_(weight)
        finally:
            for tensor, before in kept:
                tensor.grad = before
        return loss.item()


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """The tensors in which a backward pass of the loss accumulates gradients. Raises RuntimeError if some of them are
    hidden."""
    seen, nodes = set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "CheckpointFunction" in node.name():
            raise RuntimeError(
                "reentrant gradient checkpointing hides which gradients the adversary changes: "
                'model.activation_checkpointing_enable({"use_reentrant": False})'
            )
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [following for following, _ in node.next_functions]


@contextmanager
def uphill(parameters: Sequence[nn.Parameter], radius: float) -> Iterator[None]:
    """Within the block those of `parameters` that have gradients are moved along them, by `radius` in the 2-norm of all
    together: up the loss that the gradients are of (SAM). Their gradients are cleared before the block runs."""
    moved = [parameter for parameter in parameters if parameter.grad is not None]
    with restored(moved):
        with torch.no_grad():
            if moved and (norm := distributed.total_norm([parameter.grad for parameter in moved]).item()):
                for parameter in moved:
                    parameter.add_(parameter.grad, alpha=radius / norm)
        for parameter in moved:
            parameter.grad = None
        yield
