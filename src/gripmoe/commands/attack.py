"""All attacks on a cell."""

from __future__ import annotations

from gripmoe.attacks.suite import letter_attacks, news_attacks, run_attacks
from gripmoe.commands import beside, one_thread_unless_set
from gripmoe.config import load_run
from gripmoe.evaluation.report import load_answers
from gripmoe.files import file_digest, read_json, write_csv, write_json
from gripmoe.fingerprint import code_fingerprint
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import load_model
from gripmoe.provenance import recorded


def attack(args) -> None:
    """All attacks on one cell in one process; one that was interrupted goes on with the next attack."""
    run = load_run(args.run)
    one_thread_unless_set()
    state_file = args.output.with_name("attack_state.json")
    with recorded(beside(args.output), "gripmoe.attacks.suite"):
        (before, _), (after, tokenizer) = (
            load_model(path.parent / "weights") for path in (args.model, args.checkpoint)
        )
        before, after = MoEModel(before), MoEModel(after)
        if run.benchmark.is_news:
            attacks = news_attacks(run, before, after, tokenizer, args.data)
        else:
            attacks = letter_attacks(
                run, before, after, tokenizer, args.data, lambda questions: load_answers(args.answers, questions)
            )
        identity = {
            "models": [read_json(path)["weights"] for path in (args.model, args.checkpoint)],
            "files": {
                path.name: file_digest(path) for path in (args.run, args.answers, *sorted(args.data.glob("*.jsonl")))
            },
            "code": code_fingerprint("gripmoe.attacks.suite"),
        }
        found = run_attacks(attacks, state_file, identity, f"attacks on {run.objective}/{run.method_name}/{run.seed}")
        write_csv(args.questions, found.items)
        write_json(args.output, found.metrics)
    state_file.unlink(missing_ok=True)
