"""`constrain`: Method A and its relatives in any training loop, on any model and any optimizer."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gripmoe.config.methods import Method, method_table
from gripmoe.constraints.build import build
from gripmoe.constraints.hooks import ConstraintHandle, inner_optimizer, layers_not_finite
from gripmoe.constraints.null_space import fit_bases
from gripmoe.constraints.original import OriginalSets, documents_of
from gripmoe.data.documents import Batch, as_batch
from gripmoe.io import distributed
from gripmoe.moe import MoEModel
from gripmoe.moe.model import unwrapped

ALIASES = {"freeze_moe_router": "frozen_router"}
SAMPLED = 256  # entries of a weight that name the model
UNABLE = {  # keys of a row, and why a loop of one's own cannot have them
    "baseline": "it trains nothing; leave `constrain` out",
    "corrects": "it is about a finished model; call gripmoe.realign after training",
    "correction": "it comes after training; call gripmoe.realign",
    "critical_experts": "it weighs tokens in the loss, which is the loop's own",
}


def constrain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    retain: Iterable[Batch | Mapping[str, Tensor]],
    *,
    method: str | Method = "expert_specific",
    forget: Iterable[Batch | Mapping[str, Tensor]] = (),
    original: nn.Module | None = None,
    replay: bool = False,
    loss_bound: float = math.inf,
    seed: int = 0,
) -> ConstraintHandle:
    """Constrains the routers of `model` while `optimizer` trains it (Method A: Sec. 4.2, Eq. 3, Algorithm 1), until the
    returned handle is closed. docs/library.md says what each method does and needs in the loop.

    `model`: a transformers MoE model of a known family, also spread over devices or prepared by accelerate.
    `optimizer`: the one that steps the routers. `retain`: batches of input_ids and, if rows are padded, attention_mask,
    both (rows, positions), a document a row. Their original routing is recorded here: call this before training.
    `method`: a name in gripmoe/config/methods.yaml or a `Method`. `forget`: batches to forget, for SEUF, a null space
    with `surface: forget` or `combined`, and `replay`, which trains under the original expert sets. `original`: an
    untrained copy of the model, which is asked where otherwise answers about `retain` are kept. `loss_bound`: above it
    `handle.check(retain_loss)` raises `Diverged`. `seed`: of the draws of Algorithm 1.

    Raises ValueError for an unknown family or method, a method that is more than a constraint on routers, a dense
    model, batches without a token that counts or with packed documents, missing forget batches, an `original` that is
    the model itself, an optimizer that is none of torch's or lacks the routers, routers or inputs of routers that are
    not finite, a model with another open handle, or a DistributedDataParallel that would not know of a change to its
    parameters; KeyError for a batch without `input_ids`. After an error model and optimizer are as before.
    """
    method = _method(method, replay)
    wrapped = isinstance(model, DistributedDataParallel)
    precisions = [parameter.dtype for parameter in model.parameters()]
    moe = MoEModel(unwrapped(model))
    with ExitStack() as undo:
        undo.push(lambda error, *_: moe.release(rounded=error is not None))
        if wrapped and precisions != [parameter.dtype for parameter in model.parameters()]:
            raise ValueError(
                "routers train in fp32, and DistributedDataParallel would no longer reduce their gradients: call "
                "`constrain` before it wraps the model (Trainer: give it the callback when it is made)"
            )
        if not moe.layers:
            raise ValueError(f"{type(moe.model).__name__} is dense: it has no routers to constrain")
        if layers := layers_not_finite(moe):
            raise ValueError(f"the routers of layers {layers} are not finite: load weights that are")
        stepping = inner_optimizer(optimizer)
        if method.constraint == "null_space":
            _check_routers(moe, stepping)
            if method.form == "sound":
                _warn_of_decay(moe, stepping)
        device = moe.model.device
        to_retain, to_forget = ([as_batch(batch, device) for batch in batches] for batches in (retain, forget))
        trace = moe.trace(to_retain)
        if not len(trace[moe.layers[0]].x_Nd):
            raise ValueError("no retain token counts: padding does not, and neither does the first of each row")
        if layers := [layer for layer, seen in trace.items() if not seen.x_Nd.isfinite().all()]:
            raise ValueError(
                f"what the routers of layers {layers} see of `retain` is not finite: load weights that are"
            )
        if method.experts == "top_attributed" and distributed.processes() > 1:
            raise ValueError("a method that trains one expert needs one process: there is nothing to share")
        if method.looks_at_forget and not to_forget:
            raise ValueError("this method looks at what is to be forgotten: give batches of it as `forget`")
        built = build(
            method,
            trace,
            moe.trace(to_forget) if method.looks_at_forget else None,
            bases=lambda constrained: fit_bases(constrained, moe.rules(), method),
            seed=seed,
        )
        constraint = built.constraint
        if original is not None:
            if unwrapped(original) is moe.model:
                raise ValueError("`original` is the model that trains: give a copy of it from before")
            constraint.original = undo.enter_context(_untrained(unwrapped(original)))
        trained = undo.enter_context(_trained_again(p for n in moe.layers for p in moe.router(n).parameters()))
        with moe.evaluating():
            constraint.start(moe, to_forget, to_retain)
            sets = OriginalSets(moe, [*to_retain, *to_forget]) if method.replay else None
        frozen = any(not parameter.requires_grad for parameter in trained)
        if frozen and wrapped and not model.find_unused_parameters:
            raise ValueError(
                "this method freezes routers, which DistributedDataParallel has to know: call `constrain` before it "
                "wraps the model, or let it find unused parameters (Trainer: ddp_find_unused_parameters=True)"
            )
        if sets:
            undo.enter_context(moe.force_routing(lambda *inputs: sets.of(*inputs) if moe.model.training else None))
        if built.scope:
            undo.enter_context(moe.restrict_experts(built.scope, stepping))
        origin = _origin(moe, method, [*to_retain, *to_forget])
        handle = ConstraintHandle(moe, stepping, constraint, loss_bound, origin)
        handle.on_close(undo.pop_all().close)
    _states_in_fp32(moe, stepping)
    return handle


def _method(method: str | Method, replay: bool) -> Method:
    """A row of the table, or a method given as such, without what belongs to the loop."""
    name = repr(method) if isinstance(method, str) else "this one"
    if isinstance(method, str):
        method = ALIASES.get(method, method)
        if method not in method_table():
            raise ValueError(
                f"unknown method {name}; one of {', '.join(methods_of_loops())}, or a gripmoe.config.methods.Method"
            )
        method = method_table()[method]
    if reason := _unable(method):
        raise ValueError(f"method {name}: `constrain` cannot do {reason}")
    return method.model_copy(update={"training": {}} | ({"replay": True} if replay else {}))


def methods_of_loops() -> dict[str, Method]:
    """The rows of the package's table that `constrain` can apply in a loop of one's own."""
    return {name: method for name, method in method_table().items() if not _unable(method)}


def _unable(method: Method) -> str | None:
    """What of a method `constrain` cannot do, and what to do instead; None where it can do all."""
    for key, reason in UNABLE.items():
        if getattr(method, key) != Method.model_fields[key].default:
            return f"`{key}`: {reason}"
    if of_loop := sorted(method.training.keys() - {"router_weight_decay"}):  # of which `_warn_of_decay` warns
        keys = ", ".join(f"`training.{key}`" for key in of_loop)
        return f"{keys}: hyperparameters of the loop; set them there, and give a Method without `training`"
    return None


def _check_routers(moe: MoEModel, optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError unless the optimizer holds the routers that train."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [layer for layer in moe.layers if id(moe.theta(layer)) not in stepped]
    if any(moe.theta(layer).requires_grad for layer in missing) or len(missing) == len(moe.layers):
        raise ValueError(
            f"the optimizer does not hold the routers of layers {missing}: there is nothing to constrain (of several "
            "optimizers give the one that holds them)"
        )


def _warn_of_decay(moe: MoEModel, optimizer: torch.optim.Optimizer) -> None:
    routers = {id(moe.theta(layer)) for layer in moe.layers}
    of_routers = [group for group in optimizer.param_groups if any(id(p) in routers for p in group["params"])]
    if decay := max((group.get("weight_decay", 0.0) for group in of_routers), default=0.0):
        warnings.warn(
            f"{type(optimizer).__name__} decays router weights (weight_decay {decay:g}) wherever the constraint does "
            "not hold them, and the workflow trains this method without that: give the routers a parameter group with "
            "weight_decay 0",
            stacklevel=3,
        )


def _states_in_fp32(moe: MoEModel, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer that has stepped a router has moments in its old precision."""
    for layer in moe.layers:
        state = optimizer.state.get(moe.theta(layer), {})
        for name, value in state.items():
            if type(value) is Tensor and value.is_floating_point():
                state[name] = value.float()


@contextmanager
def _untrained(model: nn.Module) -> Iterator[MoEModel]:
    """Within the block a model that is only asked; then as it was, to the bit."""
    moe = MoEModel(model)
    try:
        with moe.evaluating(), _trained_again(model.parameters()):
            model.requires_grad_(False)
            yield moe
    finally:
        moe.release(rounded=True)


@contextmanager
def _trained_again(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Those that train; what the block freezes or lets train is undone."""
    before = [(parameter, parameter.requires_grad) for parameter in parameters]
    try:
        yield [parameter for parameter, trains in before if trains]
    finally:
        for parameter, trains in before:
            parameter.requires_grad_(trains)


def _origin(moe: MoEModel, method: Method, batches: Sequence[Batch]) -> str:
    """A checksum of what a handle is made from: the method, the documents, and of every weight up to SAMPLED entries,
    evenly spaced. It is the same on every device; shards, which differ between processes, do not count."""
    documents = sorted(tokens for batch in batches for tokens in documents_of(batch.input_ids, batch.attention_mask))
    digest = hashlib.sha256(json.dumps([method.model_dump_json(), documents]).encode())
    for parameter in moe.model.parameters():
        if not isinstance(parameter, DTensor) and not parameter.is_meta:
            entries = parameter.detach().flatten()
            sampled = entries[:: max(1, len(entries) // SAMPLED)][:SAMPLED].float()
            digest.update(sampled.cpu().numpy().tobytes())
    return digest.hexdigest()
