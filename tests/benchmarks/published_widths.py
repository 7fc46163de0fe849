"""What holding routers costs at the widths of published models: random weights, one device, one call.

python tests/benchmarks/published_widths.py --model olmoe --layers 16 --output figures.md

Writes, as Markdown with date and card, milliseconds of a training step under every method beside one without a
constraint, tokens a second and memory at its peak; the floor of Method A's projection (one product of all retain tokens
with all routers and one pass over the bases, timed here) and how many times that the method takes; seconds of Method B,
with what the original model saw at hand and with its recording; questions answered a second.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import get_args

import torch
from test_step import Loop, batches
from tqdm import tqdm
from transformers import (
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import gripmoe
from gripmoe.adapter import METHODS
from gripmoe.catalogue import Optimizer
from gripmoe.data.documents import Batch
from gripmoe.evaluation.choice import direct_answers
from gripmoe.files import write_text
from gripmoe.moe import MoEModel
from gripmoe.worlds.benchmark import wmdp_files
from gripmoe.worlds.documents import all_texts, make_world
from gripmoe.worlds.tokenizer import make_tokenizer

WIDTHS = {
    "olmoe": lambda layers, words: OlmoeForCausalLM(
        OlmoeConfig(
            hidden_size=2048, intermediate_size=1024, num_experts=64, num_experts_per_tok=8,
            num_attention_heads=16, num_hidden_layers=layers, vocab_size=words,
        )
    ),
    "qwen15_moe": lambda layers, words: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            hidden_size=2048, moe_intermediate_size=1408, shared_expert_intermediate_size=5632, num_experts=60,
            num_experts_per_tok=4, num_attention_heads=16, num_hidden_layers=layers, vocab_size=words,
        )
    ),
    "qwen3_30b_a3b": lambda layers, words: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, head_dim=128,
            num_attention_heads=32, num_key_value_heads=4, num_hidden_layers=layers, vocab_size=words,
        )
    ),
    # To try this script within seconds.
    "tiny": lambda layers, words: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            hidden_size=64, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, head_dim=16,
            num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=layers, vocab_size=words,
        )
    ),
}  # fmt: skip
SETTLED = 3  # steps before the first that counts: constraints bind only where routers have moved
UNCONSTRAINED = "unconstrained"
METHOD_A = "expert_specific"
QUESTIONS = 500
LEARNING_RATE = 1e-4


def synchronized() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(function: Callable[[], object], rounds: int = 1) -> float:
    """The median over rounds."""
    times = []
    for _ in range(rounds):
        started = synchronized()
        function()
        times.append(synchronized() - started)
    return statistics.median(times)


def peak_gigabytes() -> float:
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else float("nan")


def training_step(
    plain, method: str, forget: Sequence[Batch], retain: Sequence[Batch], steps: int, optimizer: str
) -> tuple[float, float, float]:
    """Seconds of a step, seconds of preparing the method, and gigabytes at the peak of both."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    started = synchronized()
    name = None if method == UNCONSTRAINED else method
    loop = Loop(plain, name, forget, retain, optimizer=optimizer, learning_rate=LEARNING_RATE)
    prepared = synchronized() - started
    for number in range(SETTLED):
        loop.step(forget[number % len(forget)], retain[number % len(retain)])
    numbers = iter(range(steps))

    def step():
        number = next(numbers)
        loop.step(forget[number % len(forget)], retain[number % len(retain)])

    taken = seconds(step, steps)
    loop.guard.close()
    return taken, prepared, peak_gigabytes()


def projection_floor(plain, retain: Sequence[Batch]) -> float:
    """Seconds that the arithmetic of Method A's projection takes at least, over all layers, in fp64."""
    model = copy.deepcopy(plain)
    with gripmoe.constrain(model, torch.optim.SGD(model.parameters()), retain, method=METHOD_A) as guard:
        reference, bases = guard.constraint.reference, guard.constraint.bases
        total = 0.0
        for layer, seen in reference.items():
            x_Nd, U_Edr = seen.x_Nd.double(), bases[layer].U_ret_Edr.to(seen.x_Nd.device).double()
            update_Ed = torch.randn(len(U_Edr), x_Nd.shape[1], dtype=x_Nd.dtype, device=x_Nd.device)
            total += seconds(lambda x=x_Nd, u=update_Ed: x @ u.T, 5)
            total += seconds(lambda u=update_Ed, U=U_Edr: (u[:, None] @ U) @ U.transpose(1, 2), 5)
    return total


def method_b(plain, retain: Sequence[Batch]) -> dict[str, float]:
    """Seconds of recording what the original model saw, and of the correction by it, by form."""
    unlearned = copy.deepcopy(plain)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in unlearned.parameters():
            noise = torch.randn(parameter.shape[-1:], generator=generator).to(parameter)
            parameter += 1e-3 * noise
    found = {"recording": seconds(lambda: gripmoe.remember(plain, retain))}
    original = gripmoe.remember(plain, retain)
    for form in ("sound", "paper"):
        model = copy.deepcopy(unlearned)
        found[form] = seconds(lambda model=model, form=form: gripmoe.realign(model, original, form=form))
    return found


def report(name: str, layers: int, steps: int, rows: int, length: int, retain_batches: int, optimizer: str) -> str:
    """Everything measured, as Markdown."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    world = make_world(0)
    tokenizer = make_tokenizer(all_texts(world))
    torch.manual_seed(0)
    with torch.device(device):
        plain = WIDTHS[name](layers, len(tokenizer))
    plain = plain.to(torch.bfloat16 if device == "cuda" else torch.float32)
    forget = [batch.to(device) for batch in batches(8, rows, length, seed=1)]
    retain = [batch.to(device) for batch in batches(retain_batches, rows, length, seed=0)]
    card = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {platform.processor() or platform.machine()}"
    moe = MoEModel(plain)
    shape = f"{layers} layers, d = {moe.hidden_size}, {moe.num_experts} experts, {moe.top_k} per token"
    tokens = retain_batches * rows * length
    out = [
        f"## {name}: {shape}",
        f"{date.today()}, {card}, torch {torch.__version__}, {next(plain.parameters()).dtype}, {optimizer}. "
        f"Random weights; {2 * rows * length} tokens in a step, {tokens} retain tokens; medians over {steps} steps.\n",
        "| Method | ms per step | times unconstrained | tokens per s | prepared in s | GB at the peak |",
        "|---|---|---|---|---|---|",
    ]
    taken = {}
    for method in tqdm([UNCONSTRAINED, *METHODS], desc=name):
        step, prepared, peak = training_step(plain, method, forget, retain, steps, optimizer)
        taken[method] = step
        ratio = step / taken[UNCONSTRAINED]
        speed = 2 * rows * length / step
        out.append(f"| {method} | {1e3 * step:.1f} | {ratio:.2f} | {speed:.0f} | {prepared:.1f} | {peak:.1f} |")
    floor = projection_floor(plain, retain)
    more = taken[METHOD_A] - taken[UNCONSTRAINED]
    out.append(
        f"\nMethod A, sound: {1e3 * more:.1f} ms more than an unconstrained step; floor of its projections "
        f"{1e3 * floor:.2f} ms ({more / floor:.1f} times)."
    )
    b = method_b(plain, retain)
    out.append(
        f"\nMethod B: recording {b['recording']:.2f} s; correction {b['sound']:.2f} s (sound), {b['paper']:.2f} s "
        "(paper)."
    )
    questions = wmdp_files(world, 0)["retain_questions"][:QUESTIONS]
    plain.eval()
    answering = seconds(lambda: direct_answers(plain, tokenizer, questions))
    out.append(f"\nEvaluation: {len(questions) / answering:.0f} letter questions a second, asked directly.\n")
    return "\n".join(out)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=WIDTHS, default="olmoe")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers (the published models have 16, 24, 48)")
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed")
    parser.add_argument("--rows", type=int, default=8, help="documents of a batch")
    parser.add_argument("--length", type=int, default=256, help="tokens of a document")
    parser.add_argument("--retain-batches", type=int, default=4, help="batches whose routing is held")
    parser.add_argument("--optimizer", choices=get_args(Optimizer), default="adamw")
    parser.add_argument("--output", type=Path, help="a Markdown file; else it is printed")
    args = vars(parser.parse_args(arguments))
    output = args.pop("output")
    text = report(args.pop("model"), **args)
    write_text(output, text) if output else print(text)


if __name__ == "__main__":
    main()
