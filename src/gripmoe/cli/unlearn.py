"""`gripmoe unlearn`: the training of one run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from gripmoe.cli import options
from gripmoe.cli.common import BY_TORCHRUN, identity_of, start_together, training_together
from gripmoe.config.fingerprint import code_fingerprint
from gripmoe.config.provenance import entry_of
from gripmoe.config.reading import parse_as
from gripmoe.config.training import Training
from gripmoe.config.world import Run, load_run
from gripmoe.constraints.build import build
from gripmoe.constraints.original_files import OriginalStore
from gripmoe.constraints.realignment import make_correction
from gripmoe.data.corpora import Corpora, load_corpus
from gripmoe.data.documents import collate
from gripmoe.evaluation.stop_rule import stop_rule
from gripmoe.io import distributed
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import file_digest, read_json, write_json
from gripmoe.moe import MoEModel
from gripmoe.moe.bases import StoredBases
from gripmoe.moe.sharding import shard_experts
from gripmoe.moe.storage import load_model, save_model
from gripmoe.moe.traces import StoredTrace
from gripmoe.training.checkpoint import remove_state
from gripmoe.training.loop import layers_of_losses
from gripmoe.training.loop import unlearn as run_unlearning
from gripmoe.training.objectives import make_objective


def unlearn(
    *,
    run_file: options.RunFile,
    model_file: options.ModelFile,
    data: options.DataFolder,
    trace_file: options.TraceFile,
    forget_trace_file: options.ForgetTraceFile,
    output: options.OutputFile,
    bases_file: options.BasesFile = None,
    retrained_file: options.RetrainedFile = None,
    original_answers: Annotated[
        Path | None,
        typer.Option("--original-answers", help="The folder of outputs of the original model, which runs share."),
    ] = None,
    processes: options.Processes = 1,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            "--checkpoint-every",
            help="Steps between saved states, from which an interrupted run continues. Default: none.",
        ),
    ] = None,
    original_memory: Annotated[
        float,
        typer.Option("--original-memory", help="GB of host memory for these outputs. The rest is read from disk."),
    ] = 8.0,
    basis_memory: Annotated[
        float, typer.Option("--basis-memory", help="GB of each GPU for the bases. The rest is copied from host memory.")
    ] = 16.0,
    basis_host_memory: Annotated[
        float,
        typer.Option("--basis-host-memory", help="GB of host memory for the other bases. The rest is read from disk."),
    ] = 64.0,
) -> None:
    """Train a run until it meets its forget target, or for its maximum number of steps.

    An interrupted run continues from its last state.

    \b
    Example:
      gripmoe unlearn --run run/run.yaml --model model/model.json --data data --trace routing.safetensors \\
          --forget-trace routing_forget.safetensors --output run/checkpoint.json
    """
    run = _training_run(run_file, checkpoint_every)
    if run.method.has_bases and not bases_file:
        raise ConfigError(f"--bases is required: the file that `gripmoe fit-basis` writes for {run.method_name!r}")
    if processes != run.processes and BY_TORCHRUN not in os.environ:
        raise ConfigError(
            f"--processes {processes}: {run_file} asks for {run.processes}, and its batch sizes are of each process"
        )
    start_together(processes)
    fitted = (trace_file, bases_file)  # each has a digest of its content beside it
    digests = [file.with_suffix(".json") for file in fitted if file and file.with_suffix(".json").exists()]
    files = (run_file, model_file, retrained_file, *digests, *sorted(data.glob("*.jsonl")))
    with training_together(output, unlearn, identity_of(unlearn, *files)) as state_file:
        method, own = run.method, run.own_objective
        objective = make_objective(own.path if own else run.objective, run.training.objective, run.seed)
        model, tokenizer = load_model(model_file.parent / "weights")
        weights = {"model": read_json(model_file)["weights"]}
        moe = MoEModel(model)
        _require_routers(moe, run, run_file)
        shard_experts(moe)
        if original_answers:
            classes = [each.sha256 for each in (own, run.own_constraint) if each]
            store = original_answers / "own" if classes else original_answers
            asked = " ".join([weights["model"], code_fingerprint(entry_of(unlearn)), *classes])
            moe.originals = OriginalStore(store, asked, original_memory * 1e9)  # outputs of other code are not reused
            if distributed.is_first():
                moe.originals.remove_stale()
        theta_0, biases = moe.thetas(), moe.router_biases()
        forget_corpus, retain_corpus = (data / f"{name}_corpus.jsonl" for name in ("forget", "retain"))
        documents = [load_corpus(file, tokenizer, **run.benchmark.reading) for file in (forget_corpus, retain_corpus)]
        corpora = Corpora(*documents, pad_id=tokenizer.pad_token_id)
        recorded_from = weights | {"corpus": file_digest(retain_corpus)}
        trace = StoredTrace(trace_file, recorded_from)
        forget_trace = StoredTrace(forget_trace_file, weights | {"corpus": file_digest(forget_corpus)})
        fitted_to = recorded_from | {"forget_corpus": file_digest(forget_corpus), "fitted_with": method.fitted_with}
        recorded = collate(corpora.retain[: run.benchmark.retain_documents], corpora.pad_id).to(model.device)
        stop = stop_rule(run.benchmark, data, retrained_file, tokenizer)
        tiers = (basis_memory * 1e9, basis_host_memory * 1e9)
        built = build(
            method,
            trace,
            forget_trace,
            bases=lambda _: StoredBases(bases_file, fitted_to, model.device, *tiers),  # fitted by `gripmoe fit-basis`
            layers=layers_of_losses(moe, objective.last_layer, run.training.trained_layers),
            seed=run.seed,
        )
        outcome = run_unlearning(
            moe,
            objective,
            built.constraint,
            corpora,
            run.training,
            stop,
            seed=run.seed,
            scope=built.scope,
            replay=method.replay,
            expert_eps=method.expert_eps,
            correct=make_correction(method, theta_0, biases, trace, recorded) if method.correction else None,
            state_file=state_file,
            description=f"{run.objective}/{run.method_name}/{run.seed}",
        )
        if outcome.status == "reached" and not outcome.steps and distributed.is_first():
            said = "the model meets the forget target before training, so nothing was unlearned"
            print(f"{run_file}: {said}: choose another target, or a model that knows the documents", file=sys.stderr)
        digest = save_model(model, tokenizer, output.parent / "weights")
        if distributed.is_first():
            write_json(output.with_name("history.json"), outcome.history)
            ended = {"weights": digest, "status": outcome.status, "steps": outcome.steps, "tokens": outcome.tokens}
            ended["targets"] = stop.targets
            ended |= {f"effective_{kind}_batch": size for kind, size in outcome.documents.items()}
            write_json(output, {**ended, **outcome.costs, "constraint_megabytes": outcome.held_bytes / 1e6})
        distributed.wait_for_all()
        remove_state(state_file)


def _training_run(run_file: Path, checkpoint_every: int | None) -> Run:
    """The run of a file, which trains; it saves its state every `checkpoint_every` steps, if that is given."""
    run = load_run(run_file)
    if not run.training:
        raise ConfigError(f"{run_file}: {run.method_name!r} does not train; give the run.yaml of a method that does")
    if checkpoint_every is None:
        return run
    changed = run.training.model_dump() | {"checkpoint_every": checkpoint_every}
    return run.model_copy(update={"training": parse_as(Training, changed, Path("--checkpoint-every"))})


def _require_routers(moe: MoEModel, run: Run, run_file: Path) -> None:
    method = run.method
    acts = method.constraint not in (None, "none") or method.replay or method.correction in ("restore", "realign")
    if acts and not moe.layers:
        raise ConfigError(
            f"{run_file}: the model of {run.model!r} is dense, and {run.method_name!r} acts on routers; leave the "
            "method out, or take a model with experts"
        )
