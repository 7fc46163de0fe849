"""All attacks on a cell."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from gripmoe.attacks.run import letter_attacks, news_attacks, run_attacks
from gripmoe.attacks.scores import by_item
from gripmoe.cli.common import beside, identity_of, measured
from gripmoe.config.provenance import recorded
from gripmoe.config.reading import parse_settings
from gripmoe.config.training import Relearning
from gripmoe.evaluation.metrics import load_answers
from gripmoe.io.files import read_json, write_csv, write_json
from gripmoe.io.locks import exclusive
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import load_model


def attack(args) -> None:
    """All attacks on one cell in one process; one that was interrupted goes on with the next attack."""
    (run, benchmark), finetuning = measured(args), parse_settings(Relearning | None, args.settings)
    state_file = args.output.with_name("attack_state.json")
    with exclusive(args.output.parent), recorded(beside(args.output), attack):
        before = MoEModel(load_model(args.model.parent / "weights", device="cpu")[0])
        model, tokenizer = load_model(args.checkpoint.parent / "weights")
        after = MoEModel(model)
        if benchmark.is_news:
            attacks = news_attacks(run, before, after, tokenizer, args.data, finetuning)
        else:
            answers = partial(load_answers, args.answers)
            attacks = letter_attacks(run, benchmark, before, after, tokenizer, args.data, answers, finetuning)
        rewrites = map(Path, benchmark.rewrites.values())
        files = (args.run, args.answers, *sorted(args.data.glob("*.jsonl")), *rewrites)
        weights = [read_json(path)["weights"] for path in (args.model, args.checkpoint)]
        identity = identity_of(attack, *files, models=weights, relearning=args.settings, benchmark=args.benchmark)
        found = run_attacks(attacks, state_file, identity, f"attacks on {run.objective}/{run.method_name}/{run.seed}")
        write_csv(args.questions, by_item(found))
        write_json(args.output, found.metrics)
        state_file.unlink(missing_ok=True)
