"""`gripmoe unlearn`: the training of one run."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from gripmoe.cli.common import beside, identity_of, training_together
from gripmoe.config.fingerprint import code_fingerprint
from gripmoe.config.methods import Method
from gripmoe.config.provenance import entry_of
from gripmoe.config.training import Training
from gripmoe.config.world import load_run
from gripmoe.constraints.build import build
from gripmoe.constraints.original import ReferenceStore
from gripmoe.constraints.realignment import make_correction
from gripmoe.data.corpora import Corpora, load_corpus
from gripmoe.data.documents import collate
from gripmoe.evaluation.stop_rule import stop_rule
from gripmoe.io import distributed
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import file_digest, read_json, write_json
from gripmoe.moe import MoEModel
from gripmoe.moe.bases import StoredBases
from gripmoe.moe.placement import visiting
from gripmoe.moe.sharding import shard_experts
from gripmoe.moe.storage import load_model, save_model
from gripmoe.moe.traces import StoredTrace
from gripmoe.training.checkpoint import claim_state, remove_state
from gripmoe.training.loop import Outcome
from gripmoe.training.loop import unlearn as run_unlearning
from gripmoe.training.objectives import make_objective


def unlearn(args) -> None:
    """Trains one cell until it has forgotten, or as far as it gets; under torchrun in several processes together."""
    run = load_run(args.run)
    folder = args.output.parent
    state_file = folder / "state.pt"
    with training_together(args.output, beside(args.output), unlearn):
        fitted = (args.trace, args.bases)  # beside which a digest says what they hold
        digests = [file.with_suffix(".json") for file in fitted if file and file.with_suffix(".json").exists()]
        files = (args.run, args.model, args.reference, *digests, *sorted(args.data.glob("*.jsonl")))
        claim_state(state_file, identity_of(unlearn, *files))
        method, own = run.method, run.own_objective
        objective = make_objective(own.path if own else run.objective, run.training.objective, run.seed)
        resident = resident_layers(run.training, objective.last_layer, method)
        model, tokenizer = load_model(args.model.parent / "weights", resident=resident)
        weights = {"model": read_json(args.model)["weights"]}
        moe = MoEModel(model)
        shard_experts(moe)
        if args.references:
            asked = f"{weights['model']} {code_fingerprint(entry_of(unlearn))}"  # what other code has kept is not found
            moe.references = ReferenceStore(args.references, asked, args.reference_memory * 1e9)
            if distributed.is_first():
                moe.references.remove_stale()
        theta_0 = moe.thetas()
        documents = [
            load_corpus(args.data / f"{name}_corpus.jsonl", tokenizer, **run.benchmark.reading)
            for name in ("forget", "retain")
        ]
        corpora = Corpora(*documents, pad_id=tokenizer.pad_token_id)
        trace, forget_trace = (
            StoredTrace(path, weights | {"corpus": file_digest(args.data / f"{name}_corpus.jsonl")})
            for name, path in (("retain", args.trace), ("forget", args.forget_trace))
        )
        recorded_rows = corpora.retain[: run.benchmark.retain_documents]
        batch = collate(recorded_rows, corpora.pad_id).to(model.device)
        stop = stop_rule(run.benchmark, args.data, args.reference, tokenizer)
        tiers = (args.basis_memory * 1e9, args.basis_host_memory * 1e9)
        built = build(
            method,
            trace,
            forget_trace,
            bases=lambda _: StoredBases(args.bases, weights, model.device, *tiers),  # fitted by `gripmoe fit-basis`
            last_layer=objective.last_layer,
            seed=run.seed,
        )
        with nullcontext() if resident is None else visiting(model, resident):
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
                critical_experts=method.critical_experts,
                corrected=make_correction(method, theta_0, trace, batch) if method.correction else None,
                state_file=state_file,
                description=f"{run.objective}/{run.method_name}/{run.seed}",
            )
        digest = save_model(model, tokenizer, folder / "weights")
        if distributed.is_first():
            write_json(folder / "history.json", outcome.history)
            ended = {"weights": digest, "status": outcome.status, "steps": outcome.steps}
            write_json(
                args.output, {**ended, **costs(outcome), "constraint_megabytes": held_bytes(built.constraint) / 1e6}
            )
        distributed.wait_for_all()
        remove_state(state_file)


def resident_layers(training: Training, last_layer: int | None, method: Method) -> int | None:
    """How many decoder layers stay on the GPU while the others, which only checks run, lie in host memory; None where
    all stay. A constraint that looks at training passes runs them all."""
    if training.idle_layers == "resident" or last_layer is None:
        return None
    if distributed.processes() > 1:
        raise ConfigError("`idle_layers: host` needs one process: layers that are shared cannot leave their GPUs")
    return None if method.looks_at_passes else last_layer + 1


def costs(outcome: Outcome) -> dict[str, float]:
    """Seconds of a step, of one without the constraint, and their ratio."""
    if outcome.seconds is None:
        return {}
    step, plain = outcome.seconds
    return {"seconds_per_step": step, "plain_seconds_per_step": plain, "time_ratio": step / plain}


def held_bytes(thing: object) -> int:
    """Bytes of the tensors that an object keeps in memory, in itself and in what it is made of; shared storage counts
    once."""
    storages: dict[int, int] = {}
    waiting, known = [thing], set()
    while waiting:
        item = waiting.pop()
        if id(item) in known:
            continue
        known.add(id(item))
        if isinstance(item, torch.Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, (list, tuple)):
            waiting += item
        elif type(item).__module__.startswith("gripmoe.") and not isinstance(item, MoEModel):
            waiting += vars(item).values()
    return sum(storages.values())
