"""`constrain`: Method A and other constraints in any training loop, with any torch optimizer."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gripmoe.config.methods import Method, method_table
from gripmoe.config.reading import require_known
from gripmoe.constraints.base import RouterConstraint
from gripmoe.constraints.baselines import restricted_experts
from gripmoe.constraints.build import build
from gripmoe.constraints.hooks import ConstraintHandle, inner_optimizer, layers_not_finite
from gripmoe.constraints.marked_pass import COMPILED
from gripmoe.constraints.null_space import fit_bases
from gripmoe.constraints.original import OriginalSets
from gripmoe.data.batches import batches_of
from gripmoe.data.documents import Batch, documents_of
from gripmoe.geometry.routing import LayerRouting, RoutingTrace
from gripmoe.io import distributed
from gripmoe.library.checks import (
    check_adapters,
    check_experts,
    check_forget,
    check_original,
    check_retain,
    check_routers,
    warn_if_nothing_moves,
    warn_of_balancing,
    warn_of_decay,
)
from gripmoe.moe import MoEModel
from gripmoe.moe.adapters import adapter_parameters, compiled_from, unwrapped
from gripmoe.moe.recording import counted_tokens

Data = Iterable[Batch | Mapping[str, Tensor]] | Iterable[str]  # docs/library_reference.md lists further forms
ALIASES = {"freeze_moe_router": "frozen_router"}
SAMPLED = 256  # entries of each weight in the checksum of a model
UNABLE = {  # keys of a method that `constrain` cannot apply, and why
    "baseline": "it trains nothing; leave `constrain` out",
    "undo": "it distils a finished model; `gripmoe realign` does so to a run",
    "corrects": "it changes routers after training: call gripmoe.remember before and gripmoe.realign after training, "
    "which refit them; to put the original routers back is a control of the workflow",
    "correction": "it comes after training; call gripmoe.realign",
}


@dataclass(frozen=True)
class Prepared:
    """What `constrain` makes from the original model once. It outlives the handle."""

    method: Method
    constraint: RouterConstraint
    scope: dict[int, list[int]] | None  # experts that train, by layer
    sets: OriginalSets | None  # for routing replay
    original: nn.Module | None
    requires_grad: dict[nn.Parameter, bool]  # of the router parameters, under the constraint
    loss_bound: float
    origin: str


def constrain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    retain: Data,
    *,
    method: str | Method = "expert_specific",
    forget: Data = (),
    original: nn.Module | None = None,
    replay: bool = False,
    loss_bound: float = math.inf,
    seed: int = 0,
    tokenizer: Any = None,
) -> ConstraintHandle:
    """Constrains the routers of `model` while `optimizer` trains it (Method A: Sec. 4.2, Eq. 3, Algorithm 1), until the
    returned handle is closed. docs/library.md says what each method does and what it needs in the loop.

    - `model`: a transformers MoE model of a known family; it may be spread over devices, or prepared by accelerate or
      PEFT.
    - `optimizer`: the optimizer that steps the routers; for a method that trains one expert, the experts too.
    - `retain`: batches of `input_ids` and, if rows are padded, `attention_mask`, both (rows, positions), one document
      per row; or a DataLoader, a Dataset, or texts with their `tokenizer`. Their original routing is recorded now, so
      call this before training.
    - `method`: a name in gripmoe/config/methods.yaml, or a `Method`.
    - `forget`: data to forget, for methods that train one expert or anchor its gate, for a null space with `surface:
      forget` or `combined`, and for `replay`.
    - `original`: an untrained copy of the model. It computes what is otherwise stored for `retain`.
    - `replay`: whether passes in training mode use the original expert sets.
    - `loss_bound`: `handle.check(retain_loss)` raises `Diverged` above it.
    - `seed`: of the random draws of Algorithm 1, and for a class of your own that takes one.

    Warns of a load-balancing loss, of weights in float16, of weight decay on routers under Method A's sound form, of
    rows that seem padded but have no mask, of retain tokens that leave no router free to move under Method A's sound
    form, of routers that do not train under Method A, and of a step under `replay` in eval mode.

    Raises ValueError for a wrong argument, an unknown family or method, a method that is more than a constraint on
    routers, a class of your own that is not found, takes other settings or cannot constrain, a dense model, data
    without a token that counts or with tokens outside the vocabulary, missing forget data, an `original` that is the
    model itself or another one, an optimizer that is not torch's, is schedule-free or lacks the routers or the expert
    that trains, routers or router inputs that are not finite, offloaded routers, adapters on what the method writes to,
    a model with another open handle or within `replay_experts`, processes whose documents differ, nn.DataParallel, or a
    DistributedDataParallel that would not notice a change of its parameters; KeyError for a batch without `input_ids`.
    After an error, model and optimizer are unchanged.
    """
    method = checked_method(method, replay=replay, loss_bound=loss_bound, seed=seed, original=original)
    with ExitStack() as undo:
        moe, stepping = _opened(model, optimizer, method, undo)
        warn_of_balancing(moe.model)
        to_retain, to_forget = (
            [batch.to(moe.model.device) for batch in batches_of(data, name, moe.model, tokenizer)]
            for name, data in (("retain", retain), ("forget", forget))
        )
        trace = checked_trace(moe, to_retain, kept=method.has_bases)
        check_forget(to_forget, method)
        if method.looks_at_forget and not any(counted_tokens(batch.attention_mask).any() for batch in to_forget):
            raise ValueError("no forget token counts: padding does not, and neither does the first of each row")
        built = build(
            method,
            trace,
            moe.trace(to_forget) if method.looks_at_forget else None,
            bases=lambda constrained: fit_bases(constrained, moe.rules(), method),
            seed=seed,
        )
        # `_opened` has checked those of a null space. Whether a class of one's own writes routers is known only now.
        if method.own_constraint and type(built.constraint).constrain is not RouterConstraint.constrain:
            check_routers(moe, stepping)
        if original is not None:
            if unwrapped(original) is moe.model:
                raise ValueError("`original` is the model that trains: give a copy of it from before")
            built.constraint.original = undo.enter_context(_untrained(unwrapped(original)))
            check_original(built.constraint.original, moe)
        parameters = moe.router_parameters()
        undo.push(partial(_restore_gradients, [(parameter, parameter.grad) for parameter in parameters]))
        trained_before = undo.enter_context(_requires_grad_restored(parameters))
        with moe.evaluating():
            built.constraint.start(moe, to_retain)
            sets = OriginalSets(moe, [*to_retain, *to_forget]) if method.replay else None
        warn_if_nothing_moves(method, built.constraint, moe)
        requires_grad = {parameter: parameter.requires_grad for parameter in parameters}
        origin = _origin(moe, method, [*to_retain, *to_forget])
        if distributed.average(float(origin != distributed.text_of_first(origin))):
            raise ValueError(
                "processes differ in documents or weights: give every process the same `retain` and `forget`, from a "
                "loader that is not sharded"
            )
        prepared = Prepared(method, built.constraint, built.scope, sets, original, requires_grad, loss_bound, origin)
        return _attached(prepared, model, moe, stepping, trained_before, undo)


def constrain_again(handle: ConstraintHandle, model: nn.Module, optimizer: torch.optim.Optimizer) -> ConstraintHandle:
    """Closes `handle` and returns a new handle of its constraint, for the same model and another optimizer (ours). The
    original model is still the one that `constrain` saw. Raises ValueError for another model, and for the optimizer as
    `constrain` does."""
    if unwrapped(model) is not handle.model.model:
        raise ValueError("the constraint is of another model: call `constrain`, or make a callback, for each model")
    handle._close(settle=True)
    prepared: Prepared = handle.prepared
    with ExitStack() as undo:
        moe, stepping = _opened(model, optimizer, prepared.method, undo)
        if prepared.original is not None:
            undo.enter_context(_untrained(unwrapped(prepared.original)))  # the constraint still asks it
        trained_before = undo.enter_context(_requires_grad_restored(prepared.requires_grad))
        for parameter, trains in prepared.requires_grad.items():
            parameter.requires_grad_(trains)
            if not trains:
                parameter.grad = None  # of the time between, in which it trained
        return _attached(prepared, model, moe, stepping, trained_before, undo)


def checked_trace(moe: MoEModel, retain: Sequence[Batch], *, kept: bool) -> RoutingTrace:
    """The routing of retain batches by layer; empty unless `kept`, since it takes some 0.4 MB a token in
    Qwen3-30B-A3B. Raises ValueError if no token counts, or if routers see what is not finite."""
    check_retain(retain)
    parts, count = [], 0
    with closing(moe.traced(retain)) as found:  # or its hooks would stay as long as an error does
        for part in found:
            if layers := [layer for layer, seen in part.items() if not seen.x_Nd.isfinite().all()]:
                what = f"what the routers of layers {layers} see of `retain`"
                raise ValueError(f"{what} is not finite: load weights that are")
            count += len(part[moe.layers[0]])
            parts += [part] * kept
    if not count:
        raise ValueError("no retain token counts: padding does not, and neither does the first of each row")
    return {layer: LayerRouting.joined([part.pop(layer) for part in parts]) for layer in moe.layers if parts}


def _opened(
    model: nn.Module, optimizer: torch.optim.Optimizer, method: Method, undo: ExitStack
) -> tuple[MoEModel, torch.optim.Optimizer]:
    """The model as routers and experts, with routers in fp32 until `undo` closes, and the torch optimizer. Raises
    ValueError if the method cannot constrain them."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"`model` is a {type(model).__name__}: give a transformers model, in memory")
    if isinstance(model, nn.DataParallel):
        raise ValueError(
            "nn.DataParallel runs a pass in threads that share the hooks of a constraint: start one process for each "
            "GPU by torchrun"
        )
    precisions = [parameter.dtype for parameter in model.parameters()]
    moe = MoEModel(unwrapped(model))
    undo.push(lambda error, *_: moe.release(to_own_dtype=error is not None))
    moe.require_free()
    converted = precisions != [parameter.dtype for parameter in model.parameters()]
    if converted and isinstance(compiled_from(model), DistributedDataParallel):
        raise ValueError(
            "routers train in fp32, and DistributedDataParallel would no longer reduce their gradients: call "
            "`constrain` before it wraps the model (Trainer: give it the callback when it is made)"
        )
    moe.require_routers("to constrain")
    if any(moe.theta(layer).is_meta for layer in moe.layers):
        raise ValueError("routers are offloaded (device `meta`): load the model without offloading to CPU or disk")
    check_adapters(moe, method)
    if layers := layers_not_finite(moe):
        raise ValueError(f"the routers of layers {layers} are not finite: load weights that are")
    if torch.float16 in precisions:
        warnings.warn(
            "the model is in float16, in which the states of an optimizer overflow: load it in bfloat16 or float32",
            stacklevel=3,
        )
    stepping = inner_optimizer(optimizer)
    if method.constraint == "null_space":
        check_routers(moe, stepping)
        if method.form == "sound":
            warn_of_decay(moe, stepping)
    if method.experts == "top_attributed" and distributed.processes() > 1:
        raise ValueError("a method that trains one expert needs one process: there is nothing to share")
    return moe, stepping


def _attached(
    prepared: Prepared,
    model: nn.Module,
    moe: MoEModel,
    stepping: torch.optim.Optimizer,
    trained_before: list[nn.Parameter],
    undo: ExitStack,
) -> ConstraintHandle:
    """The handle of `prepared`, with routing replay, frozen experts and the optimizer's states in fp32. `undo` then
    belongs to the handle. Raises ValueError if DistributedDataParallel would not notice what is frozen."""
    frozen = bool(prepared.scope) or any(not parameter.requires_grad for parameter in trained_before)
    wrapper = compiled_from(model)
    if frozen and isinstance(wrapper, DistributedDataParallel) and not wrapper.find_unused_parameters:
        raise ValueError(
            "this method freezes weights, which DistributedDataParallel has to know: call `constrain` before it wraps "
            "the model, or let it find unused parameters (Trainer: ddp_find_unused_parameters=True)"
        )
    if sets := prepared.sets:
        routes = moe.force_routing(lambda *inputs: sets.of(*inputs) if moe.model.training else None)
        passes = undo.enter_context(routes)
        undo.enter_context(stepping.register_step_post_hook(_end_of_replay(passes)))
    if prepared.scope:
        check_experts(moe, prepared.scope, stepping)
        undo.enter_context(restricted_experts(moe, prepared.scope, stepping))
    handle = ConstraintHandle(moe, stepping, prepared.constraint, prepared.loss_bound, prepared.origin)
    handle.prepared = prepared
    handle.on_close(undo.pop_all().close)
    _states_in_fp32(moe, stepping)
    return handle


def _end_of_replay(passes: list[tuple[int, Any]]) -> Callable[..., None]:
    """A hook that clears the passes of a step under replay. The hook warns if replay has not acted: replay leaves eval
    mode alone, and a compiled model may call no hooks."""
    has_stepped = False

    def end(*_) -> None:
        nonlocal has_stepped
        why = None
        if not passes and not has_stepped:
            why = COMPILED
        elif passes and all(routes is None for _, routes in passes):
            why = "it acts in training mode, and the model is in eval mode; call `model.train()`"
        if why:
            warnings.warn(f"`replay` has not acted on this step: {why}", stacklevel=2)
        has_stepped = True
        passes.clear()

    return end


def checked_method(
    method: str | Method = "expert_specific",
    *,
    replay: bool = False,
    loss_bound: float = math.inf,
    seed: int = 0,
    original: nn.Module | None = None,
) -> Method:
    """The method that these arguments of `constrain` name, without its training settings, which belong to the loop.
    Raises ValueError for a wrong argument."""
    if not isinstance(original, nn.Module | None):
        raise ValueError(f"`original` is a {type(original).__name__}: give a copy of the model from before training")
    numbers = (("loss_bound", loss_bound, (int, float)), ("seed", seed, (int,)), ("replay", replay, (bool,)))
    for name, value, kinds in numbers:
        if not isinstance(value, kinds) or value != value:
            raise ValueError(f"`{name}` is {value!r}: give {' or '.join(kind.__name__ for kind in kinds)}")
    if loss_bound <= 0:
        raise ValueError(f"`loss_bound` is {loss_bound!r}: give a retain loss above 0, which training may not exceed")
    if not isinstance(method, str | Method):
        raise ValueError(f"`method` is {method!r}: give the name of a method or a gripmoe.config.methods.Method")
    name = "this one"
    if isinstance(method, str):
        name, method = repr(method), ALIASES.get(method, method)
        if method not in method_table():
            require_known(method, methods_of_loops(), "`method`")
        method = method_table()[method]
    if reason := _unable(method):
        raise ValueError(f"method {name}: `constrain` cannot do {reason}")
    return method.model_copy(update={"training": {}} | ({"replay": True} if replay else {}))


def methods_of_loops() -> dict[str, Method]:
    """The methods of the package's table that `constrain` can apply."""
    return {name: method for name, method in method_table().items() if not _unable(method)}


def _unable(method: Method) -> str | None:
    """What `constrain` cannot do of a method, and what to do instead; None if it can do everything."""
    for key, reason in UNABLE.items():
        if getattr(method, key) != Method.model_fields[key].default:
            return f"`{key}`: {reason}"
    if method.experts == "null_space":
        return "`experts: null_space`: it moves experts, which the loop trains; the workflow does so"
    if of_loop := sorted(method.training.keys() - {"router_weight_decay"}):  # of which `warn_of_decay` warns
        keys = ", ".join(f"`training.{key}`" for key in of_loop)
        adversary = " (gripmoe.RelearningAdversary)" if "adversary_steps" in of_loop else ""
        return f"{keys}: hyperparameters of the loop; set them there{adversary}, and give a Method without `training`"
    return None


def _states_in_fp32(moe: MoEModel, optimizer: torch.optim.Optimizer) -> None:
    """Casts the optimizer's states of routers to fp32: an optimizer that has stepped has them in the old precision."""
    for parameter in moe.router_parameters():
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if type(value) is Tensor and value.is_floating_point():
                state[name] = value.float()


@contextmanager
def _untrained(model: nn.Module) -> Iterator[MoEModel]:
    """Within the block, `model` in eval mode and without gradients; afterwards it is unchanged, to the bit."""
    moe = MoEModel(model)
    try:
        with moe.evaluating(), _requires_grad_restored(model.parameters()):
            model.requires_grad_(False)
            yield moe
    finally:
        moe.release(to_own_dtype=True)


@contextmanager
def _requires_grad_restored(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yields the parameters that train. Afterwards undoes what the block has frozen or unfrozen."""
    before = [(parameter, parameter.requires_grad) for parameter in parameters]
    try:
        yield [parameter for parameter, trains in before if trains]
    finally:
        for parameter, trains in before:
            parameter.requires_grad_(trains)


def _restore_gradients(before: Sequence[tuple[nn.Parameter, Tensor | None]], error: type | None, *_) -> None:
    """Puts gradients back after an error."""
    if error:
        for parameter, gradient in before:
            parameter.grad = gradient


def _origin(moe: MoEModel, method: Method, batches: Sequence[Batch]) -> str:
    """A checksum of what a handle is made from: the method, the documents, and up to SAMPLED evenly spaced entries of
    every weight. It is the same on every device. It leaves out shards, which differ between processes, and adapters,
    which start at random."""
    documents = sorted(tokens for batch in batches for tokens in documents_of(batch.input_ids, batch.attention_mask))
    digest = hashlib.sha256(json.dumps([method.model_dump_json(), documents]).encode())
    adapters = adapter_parameters(moe.model)
    for parameter in moe.model.parameters():
        if not isinstance(parameter, DTensor) and not parameter.is_meta and id(parameter) not in adapters:
            entries = parameter.detach().flatten()
            sampled = entries[:: max(1, len(entries) // SAMPLED)][:SAMPLED].float()
            digest.update(sampled.cpu().numpy().tobytes())
    return digest.hexdigest()
