"""All attacks on a cell."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from gripmoe.attacks.forcing import expert_forcing
from gripmoe.attacks.probes import probes
from gripmoe.attacks.prompts import prompt_attacks
from gripmoe.attacks.quantization import quantized
from gripmoe.attacks.relearning import relearning
from gripmoe.attacks.restoration import most_used_experts, restoration
from gripmoe.attacks.routers import router_attacks
from gripmoe.commands import beside, one_thread_unless_set
from gripmoe.config import load_run
from gripmoe.data.corpora import load_corpus
from gripmoe.evaluation.choice import accuracy, direct_answers, harness_answers, load_questions
from gripmoe.evaluation.report import load_answers
from gripmoe.files import write_csv, write_json
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import load_model
from gripmoe.provenance import recorded

SAMPLE = 240  # forget questions for the attacks that ask many times; accuracy near chance is known to .03


def attack(args) -> None:
    """All attacks on one cell in one process: expert forcing on every test question, through the harness; the others
    on a sample, the same for every cell."""
    run = load_run(args.run)
    one_thread_unless_set()
    with recorded(beside(args.output), "gripmoe.attacks.forcing"), tempfile.TemporaryDirectory() as work:
        before, after = (load_model(path.parent / "weights") for path in (args.model, args.checkpoint))
        tokenizer = after[1]
        before, after = MoEModel(before[0]), MoEModel(after[0])
        forget = load_questions(args.data / "forget_questions.jsonl", "test")
        dev = load_questions(args.data / "forget_questions.jsonl", "dev")
        sample = random.Random(0).sample(forget, min(SAMPLE, len(forget)))

        def answer_all(moe, questions):
            return harness_answers(
                moe.model, tokenizer, questions, work_folder=Path(work), batch_size=run.benchmark.evaluation_batch_size
            )

        def ask(moe, questions, prompt=None):
            return direct_answers(moe.model, tokenizer, questions, prompt=prompt)

        metrics: dict[str, float] = {}
        forced = [{"id": question["id"], "fact": question["fact"]} for question in forget]
        if after.layers:  # a dense model has no routers to force and no experts to put back
            result = expert_forcing(
                before,
                after,
                tokenizer,
                forget,
                load_questions(args.data / "retain_questions.jsonl", "dev"),
                load_answers(args.answers, forget),
                answer_all,
                ask,
                seed=run.seed,
            )
            metrics, forced = result.metrics, result.questions
            metrics |= restoration(before, after, sample, ask, most_used_experts(before, tokenizer, dev))
            metrics |= router_attacks(after, sample, ask, seed=run.seed)
        metrics |= probes(after, tokenizer, dev, sample)
        metrics |= prompt_attacks(after, sample, dev, ask, seed=run.seed)
        for bits in (8, 4):
            with quantized(after, bits):
                metrics[f"quantized_{bits}_bit"] = accuracy(ask(after, sample))
        documents = load_corpus(args.data / "forget_corpus.jsonl", tokenizer, run.benchmark.max_length)
        # What the dev questions ask about; the sample asks about other facts.
        facts = {question["fact"] for question in dev}
        known = [row for row in documents if row.id.rsplit("/", 1)[0] in facts or row.id.rsplit("/", 2)[0] in facts]
        curve = relearning(after, known or documents, sample, ask, pad_id=tokenizer.pad_token_id, seed=run.seed)
        metrics |= {f"relearned_after_{step}": value for step, value in curve.items()}
        write_csv(args.questions, forced)
        write_json(args.output, metrics)
