"""Every attack on a run, by name. What an attack asks again and again is a sample, the same for every run."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gripmoe.attacks.forcing import expert_forcing, generation_forcing
from gripmoe.attacks.probes import expert_probes, probes
from gripmoe.attacks.prompts import (
    TRANSLATION,
    Prompt,
    dressed,
    prompt_attacks,
    prompt_recovery,
    rewritten,
    technical_terms,
    without_terms,
)
from gripmoe.attacks.quantization import quantization
from gripmoe.attacks.relearning import relearning
from gripmoe.attacks.restoration import most_used_experts, restoration
from gripmoe.attacks.routers import router_attacks
from gripmoe.attacks.scores import Found, Recall, Scores
from gripmoe.config.benchmarks import Benchmark
from gripmoe.config.training import Relearning
from gripmoe.config.world import Run
from gripmoe.data.corpora import load_corpus
from gripmoe.data.documents import Row
from gripmoe.data.muse import CONTEXT
from gripmoe.data.rows import read_rows
from gripmoe.evaluation.muse import News, knowledge_memory, leakage, news_scores
from gripmoe.evaluation.questions import Answer, direct_answers, harness_answers, load_questions, prompt_of
from gripmoe.io.files import read_json, write_text
from gripmoe.moe import MoEModel

SAMPLE = 240  # forget questions for the attacks that ask many times; accuracy near chance is known to .03
RETAIN_SAMPLE = 1000  # retain questions under forced experts
PAIRS = 32  # of news, likewise
Attack = Callable[[], Found]
PROBED_EXPERTS = 16  # of each layer, those that forget prompts use most


def run_attacks(
    attacks: Mapping[str, Attack], state_file: Path, identity: Mapping[str, Any], description: str = ""
) -> Found:
    """Makes one attack after the other and keeps in `state_file` what each has found. Those that it holds for the same
    `identity` (JSON: models, settings, data, code) are not made again; remove it when the result is safe."""
    kept = read_json(state_file) if state_file.exists() else {}
    found = kept["found"] if kept.get("identity") == identity else {}
    for name, attack in (bar := tqdm(attacks.items(), desc=description)):
        bar.set_postfix_str(name)
        if name not in found:
            found[name] = asdict(attack())
            # unsorted: the order of metrics and items is that of columns and rows
            write_text(state_file, json.dumps({"identity": identity, "found": found}))
    return Found(
        {name: value for attack in attacks for name, value in found[attack]["metrics"].items()},
        {name: items for attack in attacks for name, items in found[attack]["scores"].items()},
    )


def letter_attacks(
    run: Run,
    benchmark: Benchmark,
    before: MoEModel,
    after: MoEModel,
    tokenizer,
    data: Path,
    answers: Callable[[list[dict]], list[Answer]],
    finetuning: Relearning | None,
) -> dict[str, Attack]:
    """Forced experts on every test question, through the harness; the others on a sample, asked directly. `answers` are
    the unlearned model's own to some questions. What is about routers and single experts a dense model is spared."""
    forget, dev = (load_questions(data / "forget_questions.jsonl", split) for split in ("test", "dev"))
    retain = load_questions(data / "retain_questions.jsonl", "test")
    retain = random.Random(0).sample(retain, min(RETAIN_SAMPLE, len(retain)))
    sample = random.Random(0).sample(forget, min(SAMPLE, len(forget)))
    documents, benign = (
        load_corpus(data / f"{n}_corpus.jsonl", tokenizer, **benchmark.reading) for n in ("forget", "retain")
    )
    # What the dev questions ask about; the sample asks about other facts.
    facts = {question["fact"] for question in dev}
    known = [row for row in documents if row.id.rsplit("/", 1)[0] in facts or row.id.rsplit("/", 2)[0] in facts]
    # Which facts a published document tells, nobody has noted.
    forgotten = {"relearned": known} if known else {"relearned_from_corpus": documents}
    prompts = [prompt_of(question) for question in dev]

    def ask(moe, questions, prompt=None):
        return direct_answers(moe.model, tokenizer, questions, prompt=prompt)

    def right(moe, questions, prompt=None):
        return [float(answer.correct) for answer in ask(moe, questions, prompt)]

    asked = _Asked([question["id"] for question in sample], lambda moe: right(moe, sample))

    def own() -> Found:
        return Found.over(
            [question["id"] for question in forget],
            {"forget_accuracy": [float(answer.correct) for answer in answers(forget)]},
        )

    def forcing() -> Found:
        with tempfile.TemporaryDirectory() as folder:
            size = benchmark.evaluation_batch_size
            return expert_forcing(
                before,
                after,
                tokenizer,
                forget,
                retain,
                answers(forget),
                lambda moe, rows: harness_answers(
                    moe.model, tokenizer, rows, work_folder=Path(folder), batch_size=size
                ),
                ask,
                seed=run.seed,
            )

    def single_experts() -> Found:
        experts = most_used_experts(before, tokenizer, prompts, min(PROBED_EXPERTS, after.num_experts))
        return asked.found(expert_probes(after, tokenizer, dev, sample, experts))

    def in_other_words() -> Found:
        others = _other_prompts(benchmark, forget, sample, data)
        found = prompt_attacks(after, sample, dev, right, seed=run.seed, others=others)
        return asked.found(found, **prompt_recovery(found))

    def membership() -> Found:
        return Found(leakage(after.model, tokenizer, statements, "membership.jsonl"))

    statements = read_rows(data / "membership.jsonl", "id", "part", "text")  # a published benchmark has none
    return {
        "own answers": own,
        **({"expert forcing": _with_original(before, after, forcing)} if after.layers else {}),
        "probes": lambda: asked.found(probes(after, tokenizer, dev, sample)),
        **({"probes of single experts": _with_original(before, after, single_experts)} if after.layers else {}),
        "prompts": in_other_words,
        **_attacks_on_weights(before, after, tokenizer, prompts, asked, run.seed),
        **({"membership": membership} if statements else {}),
        **_relearning(after, tokenizer, forgotten | {"relearned_from_others": benign}, asked, finetuning, run.seed),
    }


@dataclass(frozen=True)
class _Asked:
    """What the attacks that ask many times ask about: items by id, and how to score a model on them."""

    ids: Sequence[str]
    recall: Recall

    def found(self, scores: Mapping[str, Scores], **others: float) -> Found:
        return Found.over(self.ids, scores, **others)


def news_attacks(
    run: Run, before: MoEModel, after: MoEModel, tokenizer, data: Path, finetuning: Relearning | None
) -> dict[str, Attack]:
    """Forced experts on every test item of VerbMem and KnowMem; the others on a sample of KnowMem."""
    news = News.load(data)
    context, pairs = news.pairs("forget", CONTEXT), news.pairs("forget", "test")[:PAIRS]
    # Benign: what holds the answers would teach them to any model.
    documents = load_corpus(data / "retain_corpus.jsonl", tokenizer, **run.benchmark.reading)
    prompts = [row["prompt"] for row in news.prompts("dev")]

    def scores(moe):
        return news_scores(moe.model, tokenizer, news, "test", retain=False, strip_prompts=run.benchmark.strip_prompts)

    def recall(moe):
        found = knowledge_memory(moe.model, tokenizer, pairs, context, run.benchmark.strip_prompts)
        return [item.score for item in found]

    def forcing() -> Found:
        return generation_forcing(before, after, scores, seed=run.seed)

    asked = _Asked([pair["id"] for pair in pairs], recall)
    return {
        **({"expert forcing": _with_original(before, after, forcing)} if after.layers else {}),
        **_attacks_on_weights(before, after, tokenizer, prompts, asked, run.seed),
        **_relearning(after, tokenizer, {"relearned_from_others": documents}, asked, finetuning, run.seed),
    }


def _with_original(before: MoEModel, after: MoEModel, attack: Attack) -> Attack:
    """An attack that needs both models side by side; under the others the original one stays where it is."""

    def attacked() -> Found:
        with before.brought_beside(after):
            return attack()

    return attacked


def _other_prompts(benchmark: Benchmark, forget: list[dict], sample: list[dict], data: Path) -> dict[str, Prompt]:
    """Prompts that base models of the tiny world have not seen, and the rewrites that the benchmark names."""
    terms = technical_terms(forget, load_questions(data / "retain_questions.jsonl"))
    prompts = {"translation": dressed(TRANSLATION), "no_terms": without_terms(terms)}
    for name, file in benchmark.rewrites.items():
        digest, prompts_of_file = rewritten(Path(file), sample)
        prompts[f"{name}_{digest}"] = prompts_of_file
    return prompts


def _attacks_on_weights(
    before: MoEModel, after: MoEModel, tokenizer, prompts: Sequence[str], asked: _Asked, seed: int
) -> dict[str, Attack]:
    """Parts put back, routers disturbed, weights rounded."""

    def restored() -> Found:
        experts = most_used_experts(before, tokenizer, prompts) if after.layers else {}
        return asked.found(restoration(before, after, asked.recall, experts))

    on_routers = {"routers": lambda: asked.found(router_attacks(after, asked.recall, seed=seed))}
    return {
        "restoration": _with_original(before, after, restored),
        **(on_routers if after.layers else {}),
        "quantisation": lambda: asked.found(quantization(after, asked.recall)),
    }


def _relearning(
    after: MoEModel,
    tokenizer,
    documents: Mapping[str, Sequence[Row]],
    asked: _Asked,
    settings: Relearning | None,
    seed: int,
) -> dict[str, Attack]:
    """Finetuning on each of these `documents`, by what its metrics are called: "relearned" from those about other facts
    than the ones asked, "relearned_from_corpus" from what may hold the answers, "relearned_from_others" from what says
    nothing of them."""

    def curve(name: str) -> Found:
        rows = documents[name]
        known = relearning(after, rows, asked.recall, settings, pad_id=tokenizer.pad_token_id, seed=seed)
        return asked.found({f"{name}_after_{step}": scores for step, scores in known.items()})

    return {f"relearning, {name}": partial(curve, name) for name in documents} if settings else {}
