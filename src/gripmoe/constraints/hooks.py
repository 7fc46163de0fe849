"""The hooks that apply a constraint in a training loop, and the handle that owns them.

Before an optimizer's step, a hook copies the routers. After the step, another hook replaces each new router by the
feasible router that the constraint returns. For a constraint on gradients the first hook replaces the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor

from gripmoe.constraints.base import MarkedPass, RouterConstraint
from gripmoe.constraints.loop_watch import LoopWatch
from gripmoe.constraints.marked_pass import observed_pass
from gripmoe.geometry.routing import LayerRouting, RoutingTrace
from gripmoe.io import distributed
from gripmoe.moe import MoEModel
from gripmoe.moe.adapters import below_adapters

CLOSED = (
    "this handle is closed, so nothing is constrained any more: `gripmoe.constrain_again(handle, model, optimizer)` "
    "goes on from the first original, and `gripmoe.constrain` from the model as it is"
)


class Diverged(RuntimeError):
    """The retain loss is above its bound, or a loss, a penalty or a router is not finite (ours). A RuntimeError."""


class ConstraintHandle:
    """Applies `constraint` at every step of `optimizer` until it is closed (Sec. 4.2); also a context manager.

    Some methods observe retain or forget passes (`constraint.watches`). Then every step runs its retain passes within
    `with handle.retain():` and its forget passes within `with handle.forget():`, and adds `handle.penalty()` to the
    loss. For all other methods these marks have no effect, so a loop may always contain them.

    `origin` is a checksum of what the constraint was made from; `load_state_dict` accepts only states of the same
    origin. Raises ValueError if another handle of the model is open, for a constraint whose attributes contradict its
    methods, for an optimizer without step hooks, or, where gradients are projected, for one without a learning rate.
    The optimizer's `step` raises RuntimeError if the loop has left out a mark, the penalty or the check of
    `loss_bound`, if it gives a closure where gradients are projected, or if a router is now that of another adapter;
    and Diverged if a router would not be finite. After such an error the routers are those before the step, and the
    passes of the step are forgotten; other weights may have changed. `step` warns if biases that balance the load have
    changed. `step` and `close` warn of routers that something else has written in place since the last step. A closed
    handle raises RuntimeError where it is entered. In training, marks and `penalty` raise it too, if the method needs
    them.
    """

    def __init__(
        self,
        model: MoEModel,
        optimizer: torch.optim.Optimizer,
        constraint: RouterConstraint,
        loss_bound: float = math.inf,
        origin: str = "",
    ):
        optimizer = inner_optimizer(optimizer)
        constraint.require_usable()
        if constraint.of_gradient and any(group["lr"] is None for group in optimizer.param_groups):
            raise ValueError(
                "the method projects gradients by the learning rate, and the optimizer has none: give it `lr`"
            )
        model.require_free()
        self.model, self.constraint, self.loss_bound, self.origin = model, constraint, loss_bound, origin
        self.is_lifted = False
        self.prepared: object = None  # set by `gripmoe.constrain`: what it has made from the original model
        self._closed = False
        self._watch = LoopWatch(model)
        self._before: dict[int, Tensor] = {}  # copies of the routers, during a step
        self._feasible_before: dict[int, Tensor] = {}  # the last feasible routers
        self._waiting = 0  # steps since the last projection, for a method with `every` > 1
        # Since the last step:
        self._marked: set[str] = set()  # kinds of marked forward passes
        self._seen: list[RoutingTrace] = []  # routing of the watched passes, for a constraint that `collects`
        self._penalties: list[Tensor | float] = []  # penalties that the loop has not yet taken
        self._checked = False  # whether the retain loss was checked
        with ExitStack() as undo:
            model.model._constrained = id(model.model)
            undo.callback(delattr, model.model, "_constrained")
            undo.callback(optimizer.register_step_pre_hook(self._before_step).remove)
            undo.callback(optimizer.register_step_post_hook(self._after_step).remove)
            self._undo = undo.pop_all()  # runs when the handle closes

    # What a loop calls

    def retain(self, rows: Tensor | None = None) -> AbstractContextManager[None]:
        """Marks a forward pass of retain data. `rows`, bool of shape (rows,), selects the retain rows of a mixed batch.
        Several passes before one step count together, as in gradient accumulation.

        If the method observes retain passes, raises RuntimeError unless the block has exactly one forward pass, under
        reentrant gradient checkpointing, and in training with a closed handle; ValueError for wrong `rows` or a pass
        without `input_ids`; KeyError for a document that `constrain` did not get, if its original states are needed;
        Diverged if the penalty is not finite in some process."""
        return self._mark("retain", rows)

    def forget(self, rows: Tensor | None = None) -> AbstractContextManager[None]:
        """Marks a forward pass of forget data. Raises RuntimeError, ValueError and Diverged as `retain` does."""
        return self._mark("forget", rows)

    def penalty(self) -> Tensor | float:
        """The penalty to add to the loss for the passes marked since the last call: a scalar with its graph, or 0.0 if
        the method has no penalty. Raises RuntimeError in training with a closed handle, if the method observes
        passes."""
        self._require_open()
        penalty = sum(self._penalties, 0.0)
        self._penalties = []
        return penalty

    def check(self, retain_loss: Tensor | float) -> None:
        """Raises Diverged if `retain_loss`, a scalar, is above `loss_bound` or not finite in its mean over all
        processes, and ValueError for more than one number. Call it before the backward pass, so that after the error
        the weights are still those of the last step."""
        if isinstance(retain_loss, Tensor) and retain_loss.numel() != 1:
            raise ValueError(f"`retain_loss` has {retain_loss.numel()} numbers: give its mean")
        loss = _mean(retain_loss)
        self._checked = True
        if not (math.isfinite(loss) and loss <= self.loss_bound):
            reason = f"above {self.loss_bound:.3g}" if math.isfinite(loss) else "not finite"
            raise Diverged(f"retain loss {loss:.3g}, {reason}: take an earlier checkpoint")

    def skip(self) -> None:
        """Forgets the passes marked since the last step. Call it where a step does not come: a GradScaler has skipped
        it, or the loop gives up a batch after an error."""
        self._seen, self._penalties, self._checked = [], [], False
        self._marked.clear()
        self._watch.skip()
        self.constraint.skip()

    @torch.no_grad()
    def settle(self) -> None:
        """Makes the routers feasible now, for a method that does so at every n-th step only (`every`). Call it before
        an evaluation or a save, in every process; `close` does the same. It has no effect where no step waits."""
        if self._waiting and not self._closed:
            self._write_feasible()
            self._watch.after_step()

    @property
    def watches(self) -> frozenset[str]:
        """The kinds of forward passes that the constraint observes now."""
        return frozenset() if self.is_lifted else self.constraint.watches

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Within the block, steps are unconstrained. This serves to measure the time that the constraint takes."""
        self.is_lifted = True
        try:
            yield
        finally:
            self.is_lifted = False

    def state_dict(self) -> dict:
        """What a resumed run needs beyond the states of model and optimizer, for `torch.save`."""
        waiting = {"waiting": (self._waiting, dict(self._feasible_before))} if self._waiting else {}
        return {**self.constraint.state(), "origin": self.origin, **waiting}

    def load_state_dict(self, state: dict) -> None:
        """Restores a state of `state_dict`. Raises ValueError for the state of a handle of another model, other
        documents or another method."""
        if state.get("origin", "") != self.origin:
            raise ValueError(
                "this state is of another model, method or documents: call gripmoe.constrain on the original model, "
                "before its trained weights are loaded"
            )
        self._watch.loaded()
        self._waiting, feasible = state.get("waiting", (0, {}))
        self._feasible_before = {n: theta_Ed.to(self.model.theta(n).device) for n, theta_Ed in feasible.items()}
        if own := {n: value for n, value in state.items() if n not in ("origin", "waiting")}:
            self.constraint.load_state(own)

    def on_close(self, function: Callable[[], object]) -> None:
        """Registers a `function` to call when the handle closes. Functions run in reverse order."""
        self._undo.callback(function)

    def close(self) -> None:
        """Removes all hooks from model and optimizer, and undoes what `on_close` has registered, such as frozen routers
        of `gripmoe.constrain`. Routers that were in lower precision stay in fp32, because rounding would undo part of
        the constraint. May be called twice. Warns if routers got gradients and the optimizer has never stepped, or if
        something else has written routers since its last step."""
        try:
            self._warn()
        finally:
            self._close(settle=True)

    def _warn(self) -> None:
        # The loop of the workflow, whose handle has nothing prepared, steps the optimizer that it has made.
        if self.prepared is not None and not self._closed:
            self._watch.at_close()

    def _require_open(self) -> None:
        """Raises RuntimeError if training goes on with a closed handle whose marks would matter."""
        if self._closed and self.watches and not self._evaluates():
            raise RuntimeError(CLOSED)

    def _evaluates(self) -> bool:
        """Whether the model is in eval mode without gradients, as in `Trainer.evaluate`."""
        return not (torch.is_grad_enabled() or self.model.model.training)

    def _close(self, settle: bool) -> None:
        try:
            if settle and self._waiting and not layers_not_finite(self.model):
                self.settle()
        finally:
            self._closed = True
            self.skip()
            self._undo.close()

    def __enter__(self) -> ConstraintHandle:
        if self._closed:
            raise RuntimeError(CLOSED)
        return self

    def __exit__(self, error: type[BaseException] | None, *_) -> None:
        if error is None:  # as `close`, without a call in between, so that warnings point into the loop
            try:
                self._warn()
            finally:
                self._close(settle=True)
        else:  # of this process alone, perhaps: the others would not take part in settling
            self._close(settle=distributed.processes() == 1)

    # Hooks around a marked forward pass

    @contextmanager
    def _mark(self, kind: str, rows: Tensor | None) -> Iterator[None]:
        self._require_open()
        if self._evaluates() or kind not in self.watches:
            yield
            return
        with observed_pass(self.model, kind, rows) as observed:
            yield
            marked = observed.marked(self.constraint.needs_graph)
            # A mixed batch may hold no row that counts.
            if len(marked.hidden_Nd) or distributed.processes() > 1:
                self._take(kind, marked)
            self._marked.add(kind)  # not before: the block or the penalty may have raised

    def _take(self, kind: str, marked: MarkedPass) -> None:
        penalty = self.constraint.penalty(marked)
        self.constraint.require_shape("penalty", penalty, ())
        if not math.isfinite(value := _mean(penalty)):
            raise Diverged(f"penalty {value:.3g}, not finite: take an earlier checkpoint")
        self._penalties.append(penalty)
        if self.constraint.collects:
            self._seen.append({layer: each.map(Tensor.detach) for layer, each in marked.routing.items()})

    # Hooks around the optimizer's step

    def _before_step(self, optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        self._watch.before_step()
        with self._forgotten_on_error():
            self._require_same_routers()
        self._before = {} if self.is_lifted else self.model.thetas()
        if not self._waiting:
            self._feasible_before = self._before
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if closure is None:
            with self._forgotten_on_error():
                self._require_marks()
                if self.constraint.of_gradient:
                    self._constrain_gradients(optimizer)
            return None
        if self.constraint.of_gradient:
            with self._forgotten_on_error():
                raise RuntimeError("this method constrains gradients before the step: call `step()` without a closure")

        def checked():  # with a closure, the passes run within the step
            with self._forgotten_on_error():
                loss = closure()
                self._require_marks()
            return loss

        return (args[0], checked), {name: value for name, value in kwargs.items() if name != "closure"}

    def _require_same_routers(self) -> None:
        for layer in self.model.layers:
            if below_adapters(self.model.outer_router(layer)) is not self.model.router(layer):
                raise RuntimeError(
                    f"the router of layer {layer} is that of another adapter: call `constrain` after `set_adapter`"
                )

    @contextmanager
    def _forgotten_on_error(self) -> Iterator[None]:
        """After an error no step comes: its passes must not count in the next one."""
        try:
            yield
        except BaseException:
            self._before = {}
            self.skip()
            raise

    @torch.no_grad()
    def _after_step(self, *_) -> None:
        try:
            if self._before:  # not while lifted
                self._require_finite()
                self.constraint.after_step()
                if self._waiting + 1 < self.constraint.every:
                    self._waiting += 1
                    return
                self._write_feasible()
                self._require_finite()
        except BaseException:
            self.model.set_thetas(self._before)
            raise
        finally:
            # A step that calls `super().step()` ends twice. What it has written in between, the watch then finds.
            if self._before or self.is_lifted:
                self._watch.after_step()
            self._before = {}
            self.skip()

    def _write_feasible(self) -> None:
        for layer, before_Ed in self._feasible_before.items():
            theta = self.model.theta(layer)
            if self.constraint.of_update:
                after_Ed = theta.detach().to(before_Ed.device, copy=True)
                theta.copy_(self._feasible(layer, before_Ed, after_Ed))
            distributed.from_first_(theta.data)
        self._waiting, self._feasible_before = 0, {}

    @torch.no_grad()
    def _constrain_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Replaces the gradients, so that a plain gradient step ends at a feasible router."""
        scale = getattr(optimizer, "grad_scale", None)  # of a GradScaler, which a fused optimizer divides by itself
        scale = 1.0 if scale is None else float(scale)
        rates = {
            id(p): -float(group["lr"]) if group.get("maximize") else float(group["lr"])
            for group in optimizer.param_groups
            for p in group["params"]
        }
        for layer, before_Ed in self._before.items():
            theta = self.model.theta(layer)
            if theta.grad is not None:
                # In fp64: in fp32 a small step is lost beside the router. At a rate of 0, as a warm-up begins,
                # momentum keeps the gradient: it is projected for a step that reaches no margin.
                rate = (rates[id(theta)] or math.copysign(1e-8, rates[id(theta)])) / scale
                before64_Ed = before_Ed.double()
                after64_Ed = before64_Ed - rate * theta.grad.to(before64_Ed)
                theta.grad.copy_((before64_Ed - self._feasible(layer, before64_Ed, after64_Ed)) / rate)

    def _feasible(self, layer: int, before_Ed: Tensor, after_Ed: Tensor) -> Tensor:
        seen = None
        if self._seen:  # by all processes, in all passes
            seen = LayerRouting.joined([trace[layer] for trace in self._seen]).map(distributed.gathered)
        with torch.autocast(after_Ed.device.type, enabled=False):  # a loop may step within its own
            feasible_Ed = self.constraint.constrain(layer, before_Ed, after_Ed, seen)
        self.constraint.require_shape("constrain", feasible_Ed, after_Ed.shape)
        return feasible_Ed

    def _require_marks(self) -> None:
        """Raises RuntimeError if the loop has left out a mark, the penalty or the check in this step."""
        if self.is_lifted:
            return
        for kind in self.constraint.watches - self._marked:
            raise RuntimeError(
                f"this method looks at the {kind} forward: run it within `with handle.{kind}():`, in every step"
            )
        if self.constraint.collects and not self._seen:
            looked = " and ".join(sorted(self.constraint.watches))
            raise RuntimeError(f"this method looks at {looked} tokens in every step, and no row of this one holds any")
        if any(isinstance(penalty, Tensor) for penalty in self._penalties):
            raise RuntimeError("this method adds to the loss: add `handle.penalty()` to it before the backward pass")
        if self.loss_bound < math.inf and not self._checked:
            raise RuntimeError("a bound on the retain loss was given: call `handle.check(loss)` in every step")

    def _require_finite(self) -> None:
        if layers := layers_not_finite(self.model):
            raise Diverged(
                f"the routers of layers {layers} would not be finite after this step, and are left as they were before "
                "it; other weights may have moved: take an earlier checkpoint"
            )


def inner_optimizer(optimizer) -> torch.optim.Optimizer:
    """The torch optimizer inside accelerate's wrapper, if there is one. Raises ValueError for anything else."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        return inner_optimizer(inner)
    # DeepSpeed's wrapper says that it is one, and has no hooks.
    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ValueError(f"{type(optimizer).__name__} is no torch optimizer: give the one that it wraps")
    return optimizer


def layers_not_finite(model: MoEModel) -> list[int]:
    """The layers whose router weight has NaN or infinity. One sum over all routers shows the usual case of none."""
    thetas, device = {layer: model.theta(layer).detach() for layer in model.layers}, model.model.device
    if sum(theta_Ed.sum().to(device) for theta_Ed in thetas.values()).isfinite():
        return []
    return [layer for layer, theta_Ed in thetas.items() if (~theta_Ed.isfinite()).any()]


def _mean(number: Tensor | float) -> float:
    """The mean over all processes."""
    return distributed.average(float(torch.as_tensor(number).detach()))
