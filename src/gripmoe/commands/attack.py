"""All attacks on a cell."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from gripmoe.attacks.forcing import expert_forcing, generation_forcing
from gripmoe.attacks.probes import probes
from gripmoe.attacks.prompts import (
    TRANSLATION,
    Prompt,
    dressed,
    prompt_attacks,
    rewritten,
    technical_terms,
    without_terms,
)
from gripmoe.attacks.quantization import quantized
from gripmoe.attacks.relearning import relearning
from gripmoe.attacks.restoration import most_used_experts, restoration
from gripmoe.attacks.routers import router_attacks
from gripmoe.commands import beside, one_thread_unless_set
from gripmoe.config import Run, load_run
from gripmoe.data.corpora import load_corpus
from gripmoe.data.documents import Row
from gripmoe.data.muse import CONTEXT
from gripmoe.evaluation.choice import accuracy, direct_answers, harness_answers, load_questions, prompt_of
from gripmoe.evaluation.muse import News, Scored, knowledge_memory, mean_score, news_scores
from gripmoe.evaluation.report import load_answers
from gripmoe.files import write_csv, write_json
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import load_model
from gripmoe.provenance import recorded

SAMPLE = 240  # forget questions for the attacks that ask many times; accuracy near chance is known to .03
PAIRS = 32  # of news, likewise


def attack(args) -> None:
    """All attacks on one cell in one process. What every attack asks again and again is a sample, the same for every
    cell: letter questions, or of news what the model answers about the forgotten articles."""
    run = load_run(args.run)
    one_thread_unless_set()
    with recorded(beside(args.output), "gripmoe.attacks.forcing"):
        (before, _), (after, tokenizer) = (
            load_model(path.parent / "weights") for path in (args.model, args.checkpoint)
        )
        before, after = MoEModel(before), MoEModel(after)
        attacks = _on_news if run.benchmark.is_news else _on_letters
        metrics, items = attacks(run, before, after, tokenizer, args)
        write_csv(args.questions, items)
        write_json(args.output, metrics)


def _on_letters(run: Run, before: MoEModel, after: MoEModel, tokenizer, args) -> tuple[dict[str, float], list[dict]]:
    """Forced experts on every test question, through the harness; the others on a sample, asked directly."""
    forget, dev = (load_questions(args.data / "forget_questions.jsonl", split) for split in ("test", "dev"))
    sample = random.Random(0).sample(forget, min(SAMPLE, len(forget)))

    def ask(moe, questions, prompt=None):
        return direct_answers(moe.model, tokenizer, questions, prompt=prompt)

    metrics: dict[str, float] = {}
    items = [{"id": question["id"], "fact": question["fact"]} for question in forget]
    if after.layers:  # a dense model has no routers to force and no experts to put back
        retain = load_questions(args.data / "retain_questions.jsonl", "dev")
        with tempfile.TemporaryDirectory() as work:
            size = run.benchmark.evaluation_batch_size
            result = expert_forcing(
                before,
                after,
                tokenizer,
                forget,
                retain,
                load_answers(args.answers, forget),
                lambda moe, rows: harness_answers(moe.model, tokenizer, rows, work_folder=Path(work), batch_size=size),
                ask,
                seed=run.seed,
            )
        metrics, items = result.metrics, result.questions
    metrics |= probes(after, tokenizer, dev, sample)
    metrics |= prompt_attacks(after, sample, dev, ask, seed=run.seed, others=_other_prompts(run, forget, sample, args))
    documents = load_corpus(args.data / "forget_corpus.jsonl", tokenizer, **run.benchmark.reading)
    # What the dev questions ask about; the sample asks about other facts.
    facts = {question["fact"] for question in dev}
    known = [row for row in documents if row.id.rsplit("/", 1)[0] in facts or row.id.rsplit("/", 2)[0] in facts]
    prompts = [prompt_of(question) for question in dev]
    recall = lambda moe: accuracy(ask(moe, sample))  # noqa: E731
    benign = load_corpus(args.data / "retain_corpus.jsonl", tokenizer, **run.benchmark.reading)
    curve = relearning(after, benign, recall, checks=(20,), pad_id=tokenizer.pad_token_id, seed=run.seed)
    metrics |= {f"relearned_from_others_after_{step}": value for step, value in curve.items()}
    return metrics | _on_weights(before, after, tokenizer, prompts, known or documents, recall, run.seed), items


def _other_prompts(run: Run, forget: list[dict], sample: list[dict], args) -> dict[str, Prompt]:
    """Prompts that base models of the tiny world have not seen, and the rewrites that the benchmark names."""
    terms = technical_terms(forget, load_questions(args.data / "retain_questions.jsonl"))
    prompts = {"translation": dressed(TRANSLATION), "no_terms": without_terms(terms)}
    for name, file in run.benchmark.rewrites.items():
        digest, prompts_of_file = rewritten(Path(file), sample)
        prompts[f"{name}_{digest}"] = prompts_of_file
    return prompts


def _on_news(run: Run, before: MoEModel, after: MoEModel, tokenizer, args) -> tuple[dict[str, float], list[dict]]:
    """Forced experts on every test item of VerbMem and KnowMem; the others on a sample of KnowMem."""
    news = News.load(args.data)
    context, pairs = news.pairs("forget", CONTEXT), news.pairs("forget", "test")[:PAIRS]

    def scores(moe):
        return news_scores(moe.model, tokenizer, news, "test", retain=False, strip_prompts=run.benchmark.strip_prompts)

    def recall(moe):
        return mean_score(knowledge_memory(moe.model, tokenizer, pairs, context, run.benchmark.strip_prompts))

    metrics: dict[str, float] = {}
    forced: dict[str, list[Scored]] = {}
    if after.layers:
        metrics, forced = generation_forcing(before, after, scores, seed=run.seed)
    items = [{"criterion": name, "id": item.id, "forced": item.score} for name in forced for item in forced[name]]
    # Benign: what holds the answers would teach them to any model.
    documents = load_corpus(args.data / "retain_corpus.jsonl", tokenizer, **run.benchmark.reading)
    prompts = [row["prompt"] for row in news.prompts("dev")]
    return metrics | _on_weights(before, after, tokenizer, prompts, documents, recall, run.seed), items


def _on_weights(
    before: MoEModel,
    after: MoEModel,
    tokenizer,
    prompts: Sequence[str],
    documents: Sequence[Row],
    recall: Callable[[MoEModel], float],
    seed: int,
) -> dict[str, float]:
    """What `recall` finds when parts are put back, routers disturbed, weights rounded or trained again."""
    metrics: dict[str, float] = {}
    if after.layers:
        metrics |= restoration(before, after, recall, most_used_experts(before, tokenizer, prompts))
        metrics |= router_attacks(after, recall, seed=seed)
    for bits in (8, 4):
        with quantized(after, bits):
            metrics[f"quantized_{bits}_bit"] = recall(after)
    curve = relearning(after, documents, recall, pad_id=tokenizer.pad_token_id, seed=seed)
    return metrics | {f"relearned_after_{step}": value for step, value in curve.items()}
