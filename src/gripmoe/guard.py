"""A constraint held over anybody's training loop, and the public face of Methods A and B.

    guard = gripmoe.constrain(model, optimizer, retain=batches, method="expert_specific")
    ...train as usual...
    guard.close()

The guard snapshots the routers before each optimizer step, lets the optimizer step, and writes back what the constraint
lets stand. It keeps no global state and changes nothing else in the loop.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gripmoe import distributed
from gripmoe.basis_store import BasisStore
from gripmoe.config import EpsNullConfig, Method
from gripmoe.constraints import RouterConstraint, Seen, fit_bases
from gripmoe.data.documents import Batch, as_batch, attention_mask_of
from gripmoe.geometry.nullspace import RetainBasis
from gripmoe.geometry.routing import LayerRouting, RoutingTrace
from gripmoe.moe import MoEModel
from gripmoe.moe.model import routed_tokens, unwrapped
from gripmoe.penalties import constraint_of

RELATIVE = EpsNullConfig(value=1e-4, kind="relative")
ABSOLUTE = EpsNullConfig(value=1e-2, kind="absolute")
UNABLE = ("reference", "experts", "replay", "critical_experts", "surface", "correction", "corrects")  # of a Method
METHODS = {
    "frozen_router": Method(constraint="frozen"),
    "expert_specific": Method(constraint="null_space", basis="original", eps_null=RELATIVE),
    "full_null_space": Method(constraint="null_space", basis="original", eps_null=RELATIVE, granularity="layer"),
    "expert_specific_minibatch": Method(constraint="null_space", basis="minibatch", eps_null=RELATIVE),
    "expert_specific_paper": Method(constraint="null_space", form="paper", basis="minibatch", eps_null=ABSOLUTE),
    "anchored": Method(constraint="anchor"),
    "anchored_tracked": Method(constraint="anchor", tracked=True),
}


class RouterGuard:
    """Holds `constraint` over `optimizer` until closed.

    Forward passes of retain data run within `with guard.retain():` where a method looks at them (`constraint.watches`),
    those of forget data within `with guard.forget():`; `guard.penalty()` is then added to the loss. For all other
    methods both are free of effect, so a loop may always be written with them.
    """

    def __init__(self, model: MoEModel, optimizer: torch.optim.Optimizer, constraint: RouterConstraint):
        self.model = model
        self.constraint = constraint
        self.seconds = 0.0  # spent on the constraint since the guard was made
        self._seen: list[RoutingTrace] = []
        self._penalties: list[Tensor | float] = []
        self._marked: set[str] = set()  # kinds of forward passes, since the guard was made
        self._before: dict[int, Tensor] = {}
        self._undo = ExitStack()  # when the constraint is lifted
        optimizer = _inner(optimizer)
        self._undo.callback(optimizer.register_step_pre_hook(self._before_step).remove)
        self._undo.callback(optimizer.register_step_post_hook(self._after_step).remove)

    def retain(self, rows: Tensor | None = None):
        """Marks a forward pass of retain data; of a batch that holds other data too, `rows` (bool, one entry per row)
        names the retain rows. Several passes before one step count together, as in gradient accumulation."""
        return self._watched("retain", rows)

    def forget(self, rows: Tensor | None = None):
        """Marks a forward pass of forget data."""
        return self._watched("forget", rows)

    @contextmanager
    def _watched(self, kind: str, rows: Tensor | None) -> Iterator[None]:
        if kind not in self.constraint.watches:
            yield
            return
        self._marked.add(kind)
        inputs: list[Mapping[str, Tensor]] = []
        hidden: list[Tensor] = []
        decoder = self.model.model.model
        handles = [
            decoder.register_forward_pre_hook(lambda module, args, kwargs: inputs.append(kwargs), with_kwargs=True),
            decoder.register_forward_hook(lambda module, args, output: hidden.append(output.last_hidden_state)),
        ]
        try:
            with self.model.record_routing() as recorder:
                yield
                started = time.perf_counter()
                if len(inputs) != 1:
                    raise RuntimeError(f"`with guard.{kind}():` marks one forward pass, not {len(inputs)}")
                mask = attention_mask_of(inputs[0])
                if rows is not None:
                    mask = mask * rows[:, None].to(mask)
                keep = routed_tokens(mask)
                if distributed.processes() == 1 and not keep.any():  # a mixed batch without a row that counts
                    return
                seen = Seen(recorder.take(keep), hidden[0].flatten(0, 1)[keep], inputs[0]["input_ids"], mask, keep)
                self._penalties.append(self.constraint.penalty(kind, seen))
                if kind == "retain" and self.constraint.needs_retain:
                    self._seen.append({layer: _detached(routing) for layer, routing in seen.routing.items()})
                self.seconds += time.perf_counter() - started
        finally:
            for handle in handles:
                handle.remove()

    def penalty(self) -> Tensor | float:
        """What the constraint adds to the loss for the passes marked since the last call; 0 for a hard constraint."""
        penalty = sum(self._penalties, 0.0)
        self._penalties = []
        return penalty

    def _before_step(self, *_) -> None:
        self._before = self.model.thetas()

    @torch.no_grad()
    def _after_step(self, *_) -> None:
        started = time.perf_counter()
        if self.constraint.needs_retain and not self._seen:
            raise RuntimeError("this constraint looks at the retain forward: run it within `with guard.retain():`")
        for kind in self.constraint.watches - self._marked:
            raise RuntimeError(f"this method looks at the {kind} forward: run it within `with guard.{kind}():`")
        if any(isinstance(penalty, Tensor) for penalty in self._penalties):
            raise RuntimeError("this method adds to the loss: add `guard.penalty()` to it before the backward pass")
        for layer, before_Ed in self._before.items():
            theta = self.model.theta(layer)
            seen = _joined([trace[layer] for trace in self._seen]) if self._seen else None
            theta.copy_(self.constraint.constrain(layer, before_Ed, theta.detach().clone(), seen))
            distributed.from_first_(theta.data)
        self._seen = []
        self.seconds += time.perf_counter() - started

    def state_dict(self) -> dict:
        """What a resumed run needs beyond model and optimizer."""
        return self.constraint.state()

    def load_state_dict(self, state: dict) -> None:
        self.constraint.load_state(state)

    def close(self) -> None:
        """Lifts the constraint: nothing of it stays on model or optimizer, and what it froze is free again. Routers of
        a precision below fp32 alone go on computing in fp32, in which they were trained: rounding them back would undo
        part of what the constraint has held. Closing twice does no harm."""
        self._undo.close()

    def __enter__(self) -> RouterGuard:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def constrain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    retain: Iterable[Batch | Mapping[str, Tensor]],
    *,
    method: str | Method = "expert_specific",
    seed: int = 0,
    cache: Path | None = None,
    hot_bytes: float = float("inf"),
    warm_bytes: float = float("inf"),
) -> RouterGuard:
    """Holds the routers of `model` while `optimizer` trains it (Method A; Eq. 3, Alg. 1).

    `model` is a transformers MoE model of a known family, or one that accelerate has prepared; `optimizer` holds its
    routers among others and may be wrapped by accelerate. `retain` are batches of input_ids (rows, positions) and, if
    rows are padded, attention_mask; the original routing of these tokens is recorded once, here, so call this before
    training. To resume, call this on the original model once more, then load the weights, the optimizer and
    `guard.state_dict()`. `method` is a name of METHODS or a `Method`:

    - "expert_specific", sound Method A: the optimizer cannot change which experts the original router selects for the
      retain tokens, whatever momentum or weight decay add, up to directions that `eps_null` counts as none. Needs
      nothing in the loop.
    - "full_null_space": no router row may change its score of any retain token (Sec. 4.1).
    - "expert_specific_paper", "expert_specific_minibatch": each step against the current retain batch, whose forward
      pass runs within `with guard.retain():`.
    - "anchored" (ours): a frozen router and a penalty on what its inputs become; retain passes within
      `with guard.retain():`, on documents of `retain`, and `guard.penalty()` added to the loss. "anchored_tracked": a
      router that follows its inputs by recursive least squares instead.
    - "frozen_router": the control.

    `cache` is a folder for the bases of methods that have fixed ones: they are found there by the next run on the same
    model and documents, and with `hot_bytes` and `warm_bytes` (device, host) need not fit memory (App. D).

    In several processes (data parallel, or `shard_experts`) every one calls this with the same `retain`; what each sees
    of the retain pass is gathered, and routers stay equal to the bit.

    Raises ValueError for an unknown family or method, one that is more than a constraint on routers, or an optimizer
    without the routers.
    """
    if isinstance(method, str):
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}; one of {', '.join(METHODS)}, or a gripmoe.config.Method")
        method = METHODS[method]
    unable = {name for name in UNABLE if getattr(method, name) != Method.model_fields[name].default}
    if method.constraint in (None, "gate_anchor") or unable:
        raise ValueError(
            f"a guard holds routers on `retain` while they train; it cannot do {method.constraint or ''} "
            f"{', '.join(sorted(unable))}".rstrip()
        )
    moe = MoEModel(unwrapped(model))
    with ExitStack() as undo:
        undo.callback(moe.release)
        if not moe.layers:
            raise ValueError(f"{type(moe.model).__name__} is dense: it has no routers to constrain")
        if method.constraint == "null_space":
            held = {id(p) for group in _inner(optimizer).param_groups for p in group["params"]}
            missing = [layer for layer in moe.layers if id(moe.theta(layer)) not in held]
            if missing:
                raise ValueError(
                    f"the optimizer does not hold the routers of layers {missing}: there is nothing to constrain"
                )
        batches = [as_batch(batch, moe.model.device) for batch in retain]
        reference = moe.trace(batches)
        limits = {"hot_bytes": hot_bytes, "warm_bytes": warm_bytes}
        bases = _bases(moe, reference, method, cache, **limits) if method.has_bases else None
        constraint = constraint_of(method, reference, bases, None, seed)
        free = [p for layer in moe.layers for p in moe.router(layer).parameters() if p.requires_grad]
        undo.callback(_thaw, free)
        with moe.evaluating():
            constraint.start(moe, [], batches)
        frozen = not all(parameter.requires_grad for parameter in free)
        if frozen and isinstance(model, DistributedDataParallel) and not model.find_unused_parameters:
            raise ValueError(
                "this method freezes routers, which DistributedDataParallel has to know: call `constrain` before it "
                "wraps the model, or let it find unused parameters (Trainer: ddp_find_unused_parameters=True)"
            )
        guard = RouterGuard(moe, optimizer, constraint)
        guard._undo.enter_context(undo.pop_all())
    return guard


def _bases(
    moe: MoEModel, reference: RoutingTrace, method: Method, cache: Path | None, **limits: float
) -> Mapping[int, RetainBasis]:
    """The fixed bases of a method, in memory or in the tiers of `cache`."""
    if cache is None:
        return fit_bases(reference, moe.rules(), method)

    def fit(layer: int) -> RetainBasis:
        return fit_bases(reference, moe.rules(), method, only=[layer])[layer]

    metadata = {"reference": _digest(reference), "method": method.model_dump_json()}
    return BasisStore(Path(cache), moe.layers, fit, metadata, device=moe.model.device, **limits)


def _thaw(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.requires_grad_(True)


def _digest(reference: RoutingTrace) -> str:
    """A checksum of what the original routers saw and selected: of model and retain documents together."""
    digest = hashlib.sha256()
    for layer, seen in reference.items():
        for tensor in (seen.x_Nd, seen.top_k_Nk):
            digest.update(f"{layer} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _inner(optimizer) -> torch.optim.Optimizer:
    """The optimizer that really steps, below accelerate's wrapper."""
    inner = getattr(optimizer, "optimizer", None)
    return _inner(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def _detached(routing: LayerRouting) -> LayerRouting:
    return LayerRouting(routing.x_Nd.detach(), routing.scores_NE.detach(), routing.top_k_Nk)


def _joined(parts: list[LayerRouting]) -> LayerRouting:
    """What all processes saw in all passes."""
    return LayerRouting(*map(distributed.gathered, vars(LayerRouting.joined(parts)).values()))
