"""What holding routers costs at the widths of published models: random weights, one device, one call.

python tests/benchmarks/published_widths.py --output published_widths.csv [MODEL ...]

Steps are those of the workflow: what trains, optimizer, batches and gradient checkpointing are those of single_gpu.yaml
under GD. One model and one optimizer take a step with the method and one without in turns; each side has routers of its
own. A model has as many of its layers as fit the card. The table is written anew after each row, which says how it
ended: "ok", "out of memory", out of its share of `--seconds`, or by another error.

Method A's bases are random, of as many directions as each expert's even share of the retain tokens has, and in a row of
its own of four times as many for one expert: all are then stored as wide. Time does not ask what they span. A floor is
the arithmetic of the constraint alone, by bytes and by flops in fp64, at the rates of a copy and a product that are
timed here.
"""

from __future__ import annotations

import argparse
import copy
import gc
import platform
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from sides import Loop, elapsed, floor, rates
from test_step import batches
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    OlmoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from gripmoe.adapter import METHODS
from gripmoe.catalogue import Optimizer
from gripmoe.clock import now
from gripmoe.config import Method
from gripmoe.data.documents import collate_inputs
from gripmoe.evaluation.choice import direct_answers, prompt_of
from gripmoe.files import write_csv
from gripmoe.hours import QUESTION, SKEW
from gripmoe.memory import BYTES_GRADIENT, BYTES_STATES, BYTES_WEIGHT
from gripmoe.method_b import realign_routers
from gripmoe.project import Project
from gripmoe.worlds.benchmark import wmdp_files
from gripmoe.worlds.documents import all_texts, make_world
from gripmoe.worlds.tokenizer import make_tokenizer

CONFIGS = {
    "olmoe": OlmoeConfig(
        hidden_size=2048, intermediate_size=1024, num_experts=64, num_experts_per_tok=8, num_attention_heads=16,
        num_hidden_layers=16, vocab_size=50304,
    ),
    "qwen15_moe": Qwen2MoeConfig(
        hidden_size=2048, moe_intermediate_size=1408, shared_expert_intermediate_size=5632, num_experts=60,
        num_experts_per_tok=4, num_attention_heads=16, num_hidden_layers=24, vocab_size=151936,
    ),
    "qwen3_30b_a3b": Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, head_dim=128,
        num_attention_heads=32, num_key_value_heads=4, num_hidden_layers=48, vocab_size=151936, norm_topk_prob=True,
    ),
    # To try this script within seconds.
    "tiny": Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2, vocab_size=1000,
    ),
}  # fmt: skip
PUBLISHED = [name for name in CONFIGS if name != "tiny"]
PROJECT = Project(Path(__file__).parents[2] / "workflow" / "config", "single_gpu")
BENCHMARK = "wmdp_cyber"
UNCONSTRAINED = "unconstrained"
GOALS = {"expert_specific": 1.02, "expert_specific_tracked": 1.05, "anchored_tracked": 1.05}  # of a step without
PAPER = 1.71  # its Method A
SKEWED = "expert_specific_skewed"  # bases as wide as those of an expert that serves SKEW times the even share
SETTLED = 2  # steps before the first that counts: constraints bind only where routers have moved
QUESTIONS = 500
ROOM = 0.85  # of the card, for weights, gradients, optimizer states and bases; the rest for activations
RUN = ("date", "device", "torch", "model", "layers", "dtype", "optimizer", "tokens_per_step", "retain_tokens")
COLUMNS = (
    *RUN, "what", "status", "steps", "ms", "ms_unconstrained", "ratio", "goal", "paper", "floor_ms", "times_floor",
    "tokens_per_second", "questions_per_second", "prepared_seconds", "peak_gb",
)  # fmt: skip


class OutOfTime(Exception):
    pass


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Within the block OutOfTime is raised after so many seconds, or when the operation that runs then has ended."""

    def expired(*_):
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Table:
    """Rows of COLUMNS, printed as they come; `path`, if any, holds all of them after each."""

    def __init__(self, path: Path | None):
        self.path, self.rows = path, []

    def add(self, row: dict[str, Any]) -> None:
        shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()}
        self.rows.append(dict.fromkeys(COLUMNS, "") | shown)
        if self.path:
            write_csv(self.path, self.rows)
        told = [f"{name} {value}" for name, value in shown.items() if name not in RUN and value != ""]
        tqdm.write(f"{row['model']}: {', '.join(told)}")


def attempted(function: Callable[[dict[str, Any]], None], seconds: float) -> dict[str, Any]:
    """What `function` puts into a row, as far as memory and time allow, and how it ended."""
    row: dict[str, Any] = {"status": "ok"}
    if torch.cuda.is_available():
        gc.collect()  # of the row before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        with at_most(seconds):
            function(row)
    except torch.OutOfMemoryError:
        row["status"] = "out of memory"
    except OutOfTime:
        row["status"] = f"out of time after {seconds:.0f} s"
    except Exception as error:
        row["status"] = f"{type(error).__name__}: {error}".splitlines()[0]
    if torch.cuda.is_available():
        row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return row


def time_method(
    loop: Loop, method: Method, skew: int, steps: int, speed: tuple[float, float], pairs: list, row: dict
) -> None:
    """Appends to `pairs` seconds of a step with and of one without."""
    try:
        started = now()
        side = loop.side(method, skew)
        row["prepared_seconds"] = now() - started
        tokens = loop.retain[0].attention_mask[:, 1:].sum().item()
        if (least := floor(side, method, loop.moe, tokens, speed)) is not None:
            row["floor_ms"] = 1e3 * least
        for _ in range(SETTLED + steps):
            pairs.append((loop.step(side), loop.step(loop.free)))
    finally:
        loop.renew_guard()


def settled(row: dict, times: list) -> list:
    """Those that count; the row says how many there are."""
    times = times[SETTLED:] or times[-1:]
    row["steps"] = len(times)
    return times


def compare(row: dict, name: str, pairs: list[tuple[float, float]], tokens: int) -> None:
    """What the pairs say of a method, against its goal, the paper and the floor."""
    row |= {"goal": GOALS.get(name, ""), "paper": PAPER if name.startswith("expert_specific") else ""}
    if pairs := settled(row, pairs):
        held, free = (statistics.median(times) for times in zip(*pairs, strict=True))
        row |= {"ms": 1e3 * held, "ms_unconstrained": 1e3 * free, "tokens_per_second": tokens / held}
        row["ratio"] = statistics.median(one / other for one, other in pairs)
        if "floor_ms" in row:
            row["times_floor"] = 1e3 * statistics.median(one - other for one, other in pairs) / row["floor_ms"]


def measure_methods(
    loop: Loop, add: Callable, left: Callable[[], float], steps: int, speed: tuple[float, float], slow: bool
) -> None:
    """Those that decompose in every step or, if not `slow`, all others, first those that have a goal. No row takes more
    than half of the seconds that are `left`."""
    for name in [*sorted(METHODS, key=lambda name: name not in GOALS), SKEWED]:
        method, pairs = METHODS[name.removesuffix("_skewed")], []
        if (method.basis in ("minibatch", "tracked")) == slow:
            skew = SKEW if name == SKEWED else 1
            row = attempted(partial(time_method, loop, method, skew, steps, speed, pairs), left() / 2)
            compare(row, name, pairs, loop.tokens)
            add(name, row)


def measure(loop: Loop, add: Callable, left: Callable[[], float], steps: int, speed: tuple[float, float]) -> None:
    """Everything else about one model, and the methods that are fast."""
    moe, alone = loop.moe, []

    def unconstrained(row: dict) -> None:
        for _ in range(SETTLED + steps):
            alone.append(loop.step(loop.free))

    def recording(row: dict) -> None:
        row["ms"] = 1e3 * elapsed(lambda: moe.trace(loop.retain, device="cpu"))

    def method_b(form: str, row: dict) -> None:
        moe.set_thetas(loop.free.thetas)
        batch = collate_inputs(loop.retain)
        row["ms"] = 1e3 * elapsed(lambda: realign_routers(moe, loop.theta_0, loop.reference, batch, form=form))

    def evaluation(row: dict) -> None:
        world = make_world(0)
        tokenizer = make_tokenizer(all_texts(world))
        questions = wmdp_files(world, 0)["retain_questions"][:QUESTIONS]
        repeats = QUESTION // len(tokenizer(prompt_of(questions[0]))["input_ids"]) + 1
        ask = partial(direct_answers, prompt=lambda question: " ".join([prompt_of(question)] * repeats))
        row["questions_per_second"] = len(questions) / elapsed(lambda: ask(moe.model, tokenizer, questions))

    row = attempted(unconstrained, left())
    if times := settled(row, alone):
        row |= {"ms": 1e3 * statistics.median(times), "tokens_per_second": loop.tokens / statistics.median(times)}
    add(UNCONSTRAINED, row)
    measure_methods(loop, add, left, steps, speed, slow=False)
    add("method_b_recording", attempted(recording, left() / 2))
    for form in ("sound", "paper"):
        add(f"method_b_{form}", attempted(partial(method_b, form), left() / 2))
    add("evaluation", attempted(evaluation, left() / 2))


def layers_that_fit(name: str, optimizer: str, tokens: int) -> int:
    """All, or as many as the card holds while they train, with Method A's bases."""
    config, sizes = CONFIGS[name], PROJECT.models[name].parameters if name in PUBLISHED else None
    if not sizes or not torch.cuda.is_available():
        return config.num_hidden_layers
    rank = min(config.hidden_size, tokens * config.num_experts_per_tok // config.num_experts)
    trained = BYTES_WEIGHT + BYTES_GRADIENT + BYTES_STATES[optimizer]
    each = sizes.blocks / sizes.layers * trained + 4 * config.num_experts * config.hidden_size * rank
    free = ROOM * torch.cuda.get_device_properties(0).total_memory - BYTES_WEIGHT * (sizes.total - sizes.blocks)
    return min(sizes.layers, int(free / each))


def make_random(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model made where it stays and in the precision that it keeps."""
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(CONFIGS)}; all published ones")
    parser.add_argument("--layers", type=int, help="decoder layers; all that fit")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--optimizer", choices=get_args(Optimizer), default=PROJECT.world.training.optimizer)
    parser.add_argument("--steps", type=int, default=6, help="pairs of steps that are timed")
    parser.add_argument("--rows", type=int, default=PROJECT.world.training.retain_batch_size, help="of a batch")
    parser.add_argument("--length", type=int, default=PROJECT.benchmarks[BENCHMARK].max_length, help="tokens of a row")
    parser.add_argument("--retain-batches", type=int, default=8, help="batches whose routing is held")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all models together")
    parser.add_argument("--output", type=Path, help="a table, CSV")
    args = parser.parse_args(arguments)
    if unknown := set(args.models) - CONFIGS.keys():
        parser.error(f"unknown model {unknown.pop()!r}; one of {', '.join(CONFIGS)}")
    names, ends = args.models or PUBLISHED, time.monotonic() + args.seconds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    card = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    training = PROJECT.training("gd", UNCONSTRAINED, BENCHMARK).model_copy(update={"optimizer": args.optimizer})
    forget, retain = (
        [batch.to(device) for batch in batches(count, args.rows, args.length, seed)]
        for count, seed in ((8, 1), (args.retain_batches, 0))
    )
    tokens = args.retain_batches * args.rows * (args.length - 1)
    table, speed = Table(args.output), rates(device)
    parts = [(slow, name) for slow in (False, True) for name in names]  # a slow one has a third of the time
    while parts:
        shares = [1 if slow else 3 for slow, _ in parts]
        deadline = time.monotonic() + (ends - time.monotonic()) * shares[0] / sum(shares)
        slow, name = parts.pop(0)
        config = copy.deepcopy(CONFIGS[name])
        config.num_hidden_layers = args.layers or layers_that_fit(name, args.optimizer, tokens)
        about = (
            str(date.today()), card, torch.__version__, name,
            f"{config.num_hidden_layers} of {CONFIGS[name].num_hidden_layers}", args.dtype, args.optimizer,
            2 * args.rows * args.length, tokens,
        )  # fmt: skip
        loops: list[Loop] = []

        def make(row: dict, config=config, loops=loops) -> None:
            loops.append(Loop(make_random(config, getattr(torch, args.dtype), device), training, forget, retain))

        def add(what: str, row: dict, about=about) -> None:
            table.add({**dict(zip(RUN, about, strict=True)), "what": what, **row})

        def left(deadline=deadline) -> float:
            return deadline - time.monotonic()

        row = attempted(make, left())
        if not loops:
            add("model", row)
        elif slow:
            measure_methods(loops.pop(), add, left, args.steps, speed, slow)
        else:
            measure(loops.pop(), add, left, args.steps, speed)


if __name__ == "__main__":
    main()
