"""Measures training steps of published models on this machine's GPU, and their time over steps without the constraint.

    python workflow/measure_steps.py --world single_gpu --output steps.csv

Weights and documents are random, at the models' true dimensions, so no checkpoint is needed. The steps are those of
`gripmoe unlearn`. `gripmoe plan --methods-table` says what each step should take. A step that fails is in the table
with its error. Columns: `gb`, the peak of the GPU memory that torch has allocated; `seconds`, of a step;
`plain_seconds`, of a step without the constraint, taken in turns; `tokens`, that a step passes forward and backward
through the model; `bases_gb`; and `stage_2_rate`, the share of router rows that Stage 2 of Method A moves.
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch
from shared import CONFIG
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from gripmoe.config.project import Project
from gripmoe.config.training import Training
from gripmoe.constraints.build import build
from gripmoe.data.corpora import Corpora
from gripmoe.data.documents import Row, collate
from gripmoe.evaluation.stop_rule import StopRule
from gripmoe.geometry.nullspace import RetainBasis, padded_indices
from gripmoe.geometry.routing import RoutingTrace
from gripmoe.io.files import write_csv
from gripmoe.moe import MoEModel
from gripmoe.planning.fake import dimensions
from gripmoe.training.loop import Outcome, layers_of_losses, unlearn
from gripmoe.training.objectives import make_objective

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
METHODS = "unconstrained", "frozen_router", "anchored", "seuf", "expert_specific", "expert_specific_paper"
STEPS = 5  # before steps are timed: the optimizer makes its states, kernels are compiled, routers reach margins
TRACED = 16  # documents whose routing Method A fixes
COLUMNS = (
    "card", "model", "objective", "method", "gb", "seconds", "plain_seconds", "ratio", "tokens", "bases_gb",
    "stage_2_rate", "error",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", default="single_gpu")
    parser.add_argument("--models", nargs="*", help="of the world; all by default")
    parser.add_argument("--objectives", nargs="*", default=["gd"])
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    project = Project(CONFIG, args.world)
    rows, card = [], torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    for model in args.models or project.world.models:
        pairs = [(objective, method) for objective in args.objectives for method in args.methods]
        for objective, method in tqdm(pairs, desc=model):
            row = dict.fromkeys(COLUMNS, "")
            row |= {"card": card, "model": model, "objective": objective, "method": method}
            try:
                row |= measured(project, model, objective, method)
            except Exception as error:
                traceback.print_exc()
                row |= {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            rows.append(row)
            write_csv(args.output, rows)
            print(row, flush=True)
            gc.collect()
            if DEVICE == "cuda":
                torch.cuda.empty_cache()


def measured(project: Project, model: str, objective: str, method: str) -> dict[str, float]:
    torch.manual_seed(0)
    config, row = dimensions(project.models[model].model_dump(mode="json")), project.methods[method]
    with torch.device(DEVICE):
        moe = MoEModel(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    benchmark = project.world.benchmarks[0]
    length = project.benchmarks[benchmark].max_length
    training = project.training(model, benchmark, objective, method)
    last = {"max_steps": STEPS, "check_every": STEPS, "checkpoint_every": 2 * STEPS}
    training = Training(**{**training.model_dump(), **last, "loss_bound": 1e9})
    corpora = Corpora(*(_documents(config.vocab_size, length, seed) for seed in (0, 1)), pad_id=0)
    asked = make_objective(project.objectives[objective].path, training.objective, seed=0)
    traces = [_trace(moe, documents[:TRACED]) for documents in (corpora.retain, corpora.forget)]
    bases: dict[int, RetainBasis] = {}

    def spans(trace: RoutingTrace) -> Mapping[int, RetainBasis]:
        bases.update(_spans(moe, trace))
        return bases

    layers = layers_of_losses(moe, asked.last_layer, training.trained_layers)
    built = build(row, *traces, bases=spans, layers=layers, seed=0)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        outcome = unlearn(
            moe,
            asked,
            built.constraint,
            corpora,
            training,
            StopRule({"asked": -1.0}, lambda _: {"asked": 0.0}),
            seed=0,
            scope=built.scope,
            replay=row.replay,
            expert_eps=row.expert_eps,
            state_file=Path(folder) / "state.pt",
        )
    sizes = [basis.columns_Edr.nbytes for basis in bases.values()]
    return {
        "gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if DEVICE == "cuda" else "",
        **_seconds(outcome),
        "tokens": outcome.tokens // max(1, outcome.steps),
        "bases_gb": round(sum(sizes) / 1e9, 2),
        **{key: round(outcome.history[-1][key], 3) for key in ("stage_2_rate",) if key in outcome.history[-1]},
    }


def _seconds(outcome: Outcome) -> dict[str, float | str]:
    if outcome.seconds is None:
        return {"error": outcome.status}
    seconds, plain = outcome.seconds
    return {"seconds": round(seconds, 4), "plain_seconds": round(plain, 4), "ratio": round(seconds / plain, 3)}


def _documents(vocabulary: int, length: int, seed: int, count: int = 64) -> list[Row]:
    draw = random.Random(seed)
    texts = [[draw.randrange(3, vocabulary) for _ in range(length)] for _ in range(count)]
    return [Row(f"{seed}/{number}", ids, ids) for number, ids in enumerate(texts)]


def _trace(moe: MoEModel, documents: list[Row]) -> RoutingTrace:
    """In host memory, where `gripmoe unlearn` reads it from."""
    batches = [collate([row], pad_id=0) for row in documents]
    return {layer: seen.to("cpu") for layer, seen in moe.trace(batches).items()}


def _spans(moe: MoEModel, trace: RoutingTrace) -> Mapping[int, RetainBasis]:
    """The span of all tokens that each expert serves, without the SVD of `fit_bases`, which drops weak directions."""
    found = {}
    for layer, seen in trace.items():
        seen = seen.to(moe.model.device)
        index_Em, valid_Em = padded_indices(moe.rule(layer).fixed(seen.scores_NE, seen.top_k_Nk))
        served_Edm = torch.where(valid_Em[..., None], seen.x_Nd[index_Em].float(), 0).transpose(1, 2)
        basis_Edr = torch.linalg.qr(served_Edm).Q
        found[layer] = RetainBasis(basis_Edr * valid_Em[:, None, : basis_Edr.shape[2]])
    return found


if __name__ == "__main__":
    main()
