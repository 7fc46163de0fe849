"""One step of a published model on fake tensors: the real code at true widths, without memory for the tensors."""

from __future__ import annotations

import gc
import io
import logging
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr
from math import ceil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from gripmoe.attacks import relearning as attack
from gripmoe.config.methods import Method, UndoConfig
from gripmoe.config.training import Relearning, Training
from gripmoe.constraints.build import build
from gripmoe.data.corpora import Corpora
from gripmoe.data.documents import Row, collate
from gripmoe.evaluation.stop_rule import StopRule
from gripmoe.geometry import nullspace
from gripmoe.geometry.nullspace import RetainBasis
from gripmoe.geometry.routing import LayerRouting
from gripmoe.io import distributed
from gripmoe.io.errors import ConfigError
from gripmoe.moe import MoEModel
from gripmoe.moe.families import family_of
from gripmoe.moe.sharding import shard_experts
from gripmoe.planning.counting import FORMULAS, Answers, Memory, bytes_of
from gripmoe.planning.workload import Workload
from gripmoe.training import loop, steps
from gripmoe.training.finetune import finetune
from gripmoe.training.objectives import make_objective, sequence_logprobs
from gripmoe.training.undo import undo

NOWHERE = Path("/nonexistent/state.pt")  # no state to resume from
Spent = Callable[[], dict[str, float]]  # operations and bytes received so far, and bytes held now


def measure(workload: Workload) -> dict[str, float]:
    """Measures a step. Returns bytes of each process: "weights", "gradients", optimizer "states", retain "basis"; the
    peaks of "passes" and "update", and for "evaluate" of "saving" the model; bytes "held" before a step of unlearning,
    and bytes "received" from other processes. Also "flops", "parameters", and "of_layers", the number of layers of the
    published model.

    Raises NotMeasurable for a model without known dimensions, and for one in fp32.
    """
    if workload["model"]["dtype"] != "bfloat16":
        raise NotMeasurable(f"model {workload['model']['id']!r}: torch's fake grouped products are in bf16 alone")
    config = dimensions(workload["model"])
    of_layers, config.num_hidden_layers = config.num_hidden_layers, workload["layers"]
    if types := getattr(config, "layer_types", None):  # the last one again, for a model of fewer layers
        config.layer_types = (types + types[-1:] * workload["layers"])[: workload["layers"]]
    processes = workload["processes"]
    with _quiet(), _processes(processes), _replaced() as memory:
        fake = FakeTensorMode()
        fake.fake_tensor_converter.set_tensor_memo = lambda *_: None  # its weak references forbid Module.float()
        with fake:
            moe = MoEModel(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
        shard_experts(moe)
        memory.track_external(moe.model)
        weights = memory.now()
        flops = FlopCounterMode(display=False, custom_mapping=FORMULAS)
        # Its module hooks keep graphs alive, and with them recomputed activations.
        flops.mod_tracker._fw_pre_hook = flops.mod_tracker._fw_post_hook = lambda *_: None
        with fake, Answers(), memory, flops:
            spent = lambda: {"flops": flops.get_total_flops(), "received": memory.received, "held": memory.now()}  # noqa: E731
            taken = STEPS[workload["what"]](moe, workload, spent)
            if workload["what"] == "evaluate":
                memory.phase = "saving"
                revert_weight_conversion(moe.model, moe.model.state_dict())
    return {
        "of_layers": of_layers,
        "parameters": _parameters(moe.model),
        "weights": weights,
        "gradients": memory.gradients,
        "states": memory.states,
        "passes": memory.peaks["passes"] + memory.states,  # the first step makes the states after its passes
        "update": memory.peaks.get("update", 0),
        "saving": memory.peaks.get("saving", 0),
        "basis": 0,
        **spent(),
        **(taken or {}),
    }


def layers_of(model: Mapping[str, Any], fewest: int) -> dict[str, int]:
    """The number of layers of a published model, "of_layers", and of its "first" ones: those before all that are as
    large as the last. A single first layer counts as none. A step is measured with the first ones and `fewest` others.
    Raises NotMeasurable if these do not tell the size of the whole model, or do not run."""
    with _quiet(), torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(dimensions(model))
    family_of(whole)  # which says what an unknown family lacks
    sizes = [_parameters(layer) for layer in whole.model.layers]
    differing = max((number for number, size in enumerate(sizes, 1) if size != sizes[-1]), default=0)
    first = differing if differing > 1 else 0
    if first and first + fewest >= len(sizes):
        raise NotMeasurable(f"model {model['id']!r}: layers of several sizes take turns")
    workload = {"model": model, "layers": first + fewest, "processes": 1, "what": "evaluate"}
    try:
        found = measure({**workload, "rows": [1], "length": 2, "news": False})
    except ConfigError:
        raise
    except Exception as error:
        raise NotMeasurable(f"model {model['id']!r}: {first + fewest} of its layers do not run ({error})") from error
    if found["parameters"] + (len(sizes) - first - fewest) * sizes[-1] != _parameters(whole):
        raise NotMeasurable(f"model {model['id']!r}: {first + fewest} of its layers do not tell the size of all")
    return {"of_layers": len(sizes), "first": first}


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def dimensions(model: Mapping[str, Any]) -> PretrainedConfig:
    """The config.json of the model, or of its text model, in a local folder or the hub's cache, or else `config` of its
    row in models.yaml. Raises NotMeasurable without either."""
    try:
        found = AutoConfig.from_pretrained(model["id"], revision=model["revision"], local_files_only=True)
        return found.get_text_config()
    except (OSError, ValueError):
        if not model["config"]:
            raise NotMeasurable(
                f"model {model['id']!r}: no config.json in the hub's cache; fetch it, or write its dimensions under "
                "`config:` of its row in models.yaml"
            ) from None
    try:
        return AutoConfig.for_model(**model["config"])
    except Exception as error:  # of many kinds
        raise NotMeasurable(f"model {model['id']!r}: `config:` of its row in models.yaml: {error}") from error


class NotMeasurable(ConfigError):
    """The dimensions of a model are unknown, torch has no fake operation for it, or few layers say nothing of all."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Within the block, there are no progress bars and no warnings."""
    logging.disable(logging.WARNING)
    gc.disable()  # `Memory` collects garbage, always at the same operations
    gc.freeze()
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
        gc.unfreeze()
        gc.enable()


@contextmanager
def _processes(count: int) -> Iterator[None]:
    """Within the block, this is the first process of a fake group of `count` processes."""
    if count > 1:
        dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        if count > 1:
            dist.destroy_process_group()


@contextmanager
def _replaced() -> Iterator[Memory]:
    """Within the block, replaces what fake tensors cannot run: GPUs, compiled kernels, timed steps, copies in host
    memory, and the rows of other processes."""
    memory = Memory()
    with ExitStack() as stack:
        stack.enter_context(patch("torch.cuda.is_available", return_value=False))
        stack.enter_context(patch("torch.compile", memory.uncounted))
        shapes = "_propagate_tensor_meta_non_cached"
        uncounted = memory.uncounted(getattr(ShardingPropagator, shapes))
        stack.enter_context(patch.object(ShardingPropagator, shapes, uncounted))
        stack.enter_context(patch.object(steps, "TIMED_PAIRS", 0))
        stack.enter_context(patch.object(attack, "restored", lambda *_, **__: nullcontext()))
        if distributed.processes() > 1:
            everywhere = lambda local_N: torch.cat([local_N] * distributed.processes())  # noqa: E731
            stack.enter_context(patch.object(distributed, "gathered", everywhere))
        yield memory


class _Read(UserDict):
    """The content of a file by layer; every access reads the file again."""

    def __getitem__(self, layer: int) -> Any:
        return self.data[layer]()


def _rows(count: int, length: int) -> list[Row]:
    return [Row(str(number), [1] * length, [1] * length) for number in range(count)]


def _unlearn(moe: MoEModel, workload: Workload, spent: Spent) -> dict[str, float]:
    """The step of `objective` under `method`, as `gripmoe.training.steps` takes it."""
    method, training = Method(**workload["method"]), Training(**workload["training"])
    if method.constraint != "none" and not moe.layers:
        raise ConfigError(
            f"`constraint: {method.constraint}` is about routers, and model {workload['model']['id']!r} has none: "
            "leave methods with it out of the world"
        )
    tokens, d, experts = workload["traced"], moe.hidden_size, moe.num_experts
    shape = 1 if method.granularity == "layer" else experts, d, min(d, tokens, method.max_rank or d)

    def recorded(rows: int) -> _Read:
        sizes = ((rows, d), torch.float), ((rows, experts), torch.float), ((rows, moe.top_k), torch.long)
        seen = lambda: LayerRouting(*(torch.zeros(size, dtype=dtype) for size, dtype in sizes))  # noqa: E731
        return _Read(dict.fromkeys(moe.layers, seen))

    of_a_side = recorded(tokens // len(method.sides))
    bases = _Read(dict.fromkeys(moe.layers, lambda: RetainBasis(torch.zeros(shape))))
    built = build(method, of_a_side, of_a_side, bases=lambda _: bases, seed=0)
    before: dict[str, float] = {}

    def scores(_: MoEModel) -> dict[str, float]:
        before.update(before or spent())  # before the first step, after all one-time work
        return {"asked": 1.0}

    def even_share(chosen_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, sharing = chosen_NE.shape
        shape = sharing, tokens if sharing == 1 else ceil(tokens * moe.top_k / sharing)
        return torch.zeros(shape, dtype=torch.long), torch.ones(shape, dtype=torch.bool)

    with patch.object(nullspace, "padded_indices", even_share):
        loop.unlearn(
            moe,
            make_objective(workload["objective"], training.objective, seed=0),
            built.constraint,
            Corpora(*(_rows(count, workload["length"]) for count in workload["rows"]), pad_id=0),
            training,
            StopRule({"asked": 0.0}, scores),
            seed=0,
            scope=built.scope,
            replay=method.replay,
            expert_eps=method.expert_eps,
            state_file=NOWHERE,
        )
    basis = len(moe.layers) * bytes_of([bases[next(iter(moe.layers))].columns_Edr]) if method.has_bases else 0
    of_step = {name: value - before[name] for name, value in spent().items()}
    return of_step | {"basis": basis, "held": before.get("held", 0)}


def _finetune(moe: MoEModel, workload: Workload, spent: Spent) -> None:
    rows = _rows(*workload["rows"], workload["length"])
    settings = {"epochs": 1, "learning_rate": 1.0, "batch_size": len(rows), **workload["training"]}
    finetune(moe.model, rows, **settings, pad_id=0, seed=0, state_file=NOWHERE)


def _relearn(moe: MoEModel, workload: Workload, spent: Spent) -> None:
    rows = _rows(*workload["rows"], workload["length"])
    attack.relearning(moe, rows, lambda _: [], Relearning(**workload["training"]), checks=(0, 1))


def _undo(moe: MoEModel, workload: Workload, spent: Spent) -> None:
    rows = _rows(*workload["rows"], workload["length"])
    undo(moe, rows, UndoConfig(**{**workload["training"], "steps": 1}), pad_id=0, seed=0)


@torch.no_grad()
def _read(moe: MoEModel, workload: Workload, spent: Spent) -> None:
    """Letter prompts as in lm-evaluation-harness, or texts of news for membership inference."""
    batch = collate(_rows(*workload["rows"], workload["length"]), pad_id=0)
    if workload["news"]:
        sequence_logprobs(moe, batch)
    else:
        F.log_softmax(moe.model(batch.input_ids).logits, dim=-1)


STEPS = {"unlearn": _unlearn, "finetune_model": _finetune, "relearning": _relearn, "undo": _undo, "evaluate": _read}
