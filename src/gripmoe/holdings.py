"""What a method keeps through training beside the model, and which layers it runs and trains: bytes, by its axes."""

from __future__ import annotations

from dataclasses import dataclass

from gripmoe.catalogue import Sizes, Widths
from gripmoe.config import Method, Training

BYTES_STATE = 2  # of a number of a hidden state that is kept: bf16


@dataclass(frozen=True)
class Held:
    """Bytes that a method keeps through training: on the GPU of each process, and in host memory of each process."""

    gpu: float = 0.0
    host: float = 0.0


@dataclass(frozen=True)
class Tokens:
    """Of documents that were traced (on one side), and of those that training goes through."""

    traced: int
    retain: int
    forget: int
    forget_documents: int


def layers_run(objective: str, training: Training, sizes: Sizes) -> int:
    """RMU neither trains nor runs what comes after its layer, unless a constraint looks there."""
    return training.objective["layer"] + 1 if objective == "rmu" else sizes.layers


def layers_trained(method: Method, objective: str, training: Training, sizes: Sizes) -> int:
    """Those that get gradients: of losses, and of penalties that compare what all layers see."""
    if training.trained_layers or method.constraint not in ("anchor", "routing_scores"):
        return min(layers_run(objective, training, sizes), training.trained_layers or sizes.layers)
    return sizes.layers


def may_idle(method: Method, objective: str) -> bool:
    """Whether training passes may leave out layers, which `idle_layers: host` then keeps in host memory."""
    return objective == "rmu" and not method.looks_at_passes


def held_by_method(
    method: Method, objective: str, sizes: Sizes, widths: Widths, tokens: Tokens, reference_memory: float
) -> Held:
    """Bytes kept beside model and bases: copies of routers (of the run, of each step, of most constraints), inputs and
    margins of the bases' tokens, factors that follow; on the host traces as they are read, and what losses compare
    with, as far as each kind of it fits into `reference_memory` bytes."""
    layers, d, experts = sizes.layers, widths.hidden, widths.experts
    routers = layers * experts * d * 4
    gpu = 2 * routers
    if method.constraint in ("router_l2", "anchor") or method.has_bases or method.form == "paper":
        gpu += routers
    if method.has_bases:
        held = tokens.traced * (2 if method.surface == "combined" else 1)
        gpu += layers * held * (d + experts) * 4
    if method.basis == "tracked":  # triangular factors in fp64
        gpu += layers * _bases_per_layer(widths, method) * min(d, method.max_rank or d) * d * 8
    if method.constraint == "anchor" and method.tracked:  # two routers, cross and gram matrices in fp64
        gpu += 3 * 2 * routers + layers * d * d * 8
    references = references_of(method, objective, sizes, widths, tokens).values()
    host = sum(size for size in references if size <= reference_memory)
    if method.critical_experts:
        host += tokens.retain * 4
    if objective == "npo":
        host += tokens.forget_documents * 4
    return Held(gpu, host + layers_traced_at_once(method, layers) * trace_bytes(widths, 1, tokens.traced))


def references_of(method: Method, objective: str, sizes: Sizes, widths: Widths, tokens: Tokens) -> dict[str, int]:
    """Bytes of each kind of thing that a run asks of the original model about every token, by what asks it."""
    layers, d = sizes.layers, widths.hidden
    found = {}
    if method.constraint == "anchor":
        found["anchor"] = tokens.retain * (layers + 1) * d * BYTES_STATE
    elif method.constraint == "routing_scores":
        found["routing_scores"] = tokens.retain * layers * widths.experts * 4
    if objective in ("kl", "rmu"):
        found[objective] = tokens.retain * d * BYTES_STATE
    if method.replay:
        found["replay"] = (tokens.retain + tokens.forget) * layers * widths.chosen * 8
    return found


def trace_bytes(widths: Widths, layers: int, tokens: int) -> int:
    """Router inputs and scores in fp32 and the chosen experts of so many tokens."""
    return layers * tokens * (4 * widths.hidden + 4 * widths.experts + 8 * widths.chosen)


def basis_bytes(widths: Widths, layers: int, tokens: int, method: Method) -> int:
    """Of fixed bases, at most: as wide as the expert of a layer that serves most tokens needs, so as wide as all
    tokens, the hidden size or `max_rank` allow."""
    tokens *= 2 if method.surface == "combined" else 1
    width = min(widths.hidden, tokens, method.max_rank or widths.hidden)
    return layers * _bases_per_layer(widths, method) * widths.hidden * width * 4


def _bases_per_layer(widths: Widths, method: Method) -> int:
    return 1 if method.granularity == "layer" else widths.experts


def layers_traced_at_once(method: Method, layers: int) -> int:
    """Layers of traces that are in memory at once: one, or with `surface: combined` all of both traces."""
    return 2 * layers if method.surface == "combined" else 1
