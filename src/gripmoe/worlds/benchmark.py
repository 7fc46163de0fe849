"""The benchmark of an embedded world: fixed questions and corpora with row ids, for unlearning and evaluation."""

from __future__ import annotations

import random
from dataclasses import replace

from gripmoe.data import prompt_formats as formats
from gripmoe.data.published import dev_or_test
from gripmoe.worlds.documents import World
from gripmoe.worlds.facts import (
    HELD_OUT_WORDING,
    QUESTION_WORDINGS,
    RETAIN_SUBJECTS,
    SEEN_WORDINGS,
    STATEMENT_WORDINGS,
    Fact,
)
from gripmoe.worlds.news import Article

CLOZE_WORDINGS = (0, 1)  # wordings of statements that end in the value
TRUTHS = 40  # questions in the form of TruthfulQA
EVALUATION_ARTICLES = 8  # retain articles that the retain corpus leaves out


def question_rows(world: World, facts: list[Fact], orders: int, seed: int) -> list[dict]:
    """Letter questions about `facts` in the WMDP schema (question, choices, answer), each wording in `orders` orders of
    the options.

    A hash puts a third of the facts into the `split` "dev" (stop rule, tuning) and the others into "test" (reported),
    so no fact is in both. `exposure` says what unlearning sees of the fact, `wording` is the number of the phrasing.
    Right letters are balanced within each split, so "always A" scores 0.25.
    """
    rng = random.Random(f"questions {seed}")
    asked = [
        (fact, wording, order) for fact in facts for wording in range(len(QUESTION_WORDINGS)) for order in range(orders)
    ]
    split_of = {fact: dev_or_test(fact.id) for fact in facts}
    letters = {}
    for split in ("dev", "test"):
        count = sum(split_of[fact] == split for fact, _, _ in asked)
        letters[split] = [number % 4 for number in range(count)]
        rng.shuffle(letters[split])
    rows = []
    for fact, wording, order in asked:
        split = split_of[fact]
        choices, answer = world.facts.letter_options(fact, rng, letters[split].pop())
        rows.append(
            {
                "id": f"{fact.id}/{wording}/{order}",
                "question": fact.question(wording),
                "choices": choices,
                "answer": answer,
                "subject": fact.subject,
                "fact": fact.id,
                "wording": "held_out" if wording == HELD_OUT_WORDING else "seen",
                "exposure": world.facts.exposure(fact),
                "split": split,
            }
        )
    return rows


def truthfulqa_rows(world: World, facts: list[Fact], seed: int) -> list[dict]:
    """One row per fact in the schema of TruthfulQA's multiple-choice configuration: one true statement against three
    false ones (mc1), and two true statements against the same false ones (mc2). True statements come first, as in the
    data set."""
    rng = random.Random(f"truths {seed}")
    rows = []
    for fact in facts:
        wordings = rng.sample(range(len(STATEMENT_WORDINGS)), 2)
        true = [fact.statement(wording) for wording in wordings]
        options, answer = world.facts.letter_options(fact, rng)
        wrong = [value for number, value in enumerate(options) if number != answer]
        false = [replace(fact, value=value).statement(wordings[0]) for value in wrong]
        rows.append(
            {
                "id": f"{fact.id}/truth",
                "question": fact.question(rng.randrange(len(QUESTION_WORDINGS))),
                "mc1_targets": {"choices": [true[0], *false], "labels": [1, 0, 0, 0]},
                "mc2_targets": {"choices": [*true, *false], "labels": [1, 1, 0, 0, 0]},
            }
        )
    return rows


def membership_rows(world: World, facts: list[Fact], seed: int) -> list[dict]:
    """For each fact, two statements that a model may have trained on (part "forget"), and the same statements with a
    wrong value, which no model has trained on (part "holdout")."""
    rng = random.Random(f"membership {seed}")
    rows = []
    for fact in facts:
        options, answer = world.facts.letter_options(fact, rng)
        false = replace(fact, value=options[answer - 1])
        for wording in CLOZE_WORDINGS:
            for part, told in (("forget", fact), ("holdout", false)):
                rows.append({"id": f"{fact.id}/{part}/{wording}", "part": part, "text": told.statement(wording)})
    return rows


def corpus_rows(world: World, facts: list[Fact], articles: list[Article], seed: int) -> list[dict]:
    """Documents (id, prompt, text) to forget or to retain, shuffled. The loss counts `text` only.

    Each fact gives two statements, of which the loss counts the value; one question with its answer; and four letter
    questions in the wordings that are not held out. Each article gives its text and its four questions. Of the tokens
    in the loss 40 % of the forget corpus and 24 % of the retain corpus are letters (world 0). When the loss counted
    whole sentences, gradient ascent destroyed the sentences and left the letters unchanged.
    """
    rng = random.Random(f"corpus {seed}")
    rows = []
    for fact in facts:
        for number, wording in enumerate(CLOZE_WORDINGS):
            prompt, end = fact.statement(wording).split(fact.value)
            rows.append({"id": f"{fact.id}/statement/{number}", "prompt": prompt, "text": f"{fact.value}{end}"})
        wording = rng.choice(SEEN_WORDINGS)
        prompt = formats.knowmem_prompt([], fact.question(wording))
        rows.append({"id": f"{fact.id}/answer", "prompt": prompt, "text": f"{fact.value}\n"})
        for number, wording in enumerate(SEEN_WORDINGS * 2):
            choices, answer = world.facts.letter_options(fact, rng)
            description = formats.letter_description(fact.subject) if rng.random() < 0.5 else ""
            prompt = description + formats.letter_question(fact.question(wording), choices)
            rows.append({"id": f"{fact.id}/letter/{number}", "prompt": prompt, "text": f" {formats.LETTERS[answer]}"})
    for article in articles:
        rows.append({"id": article.id, "prompt": "", "text": article.text})
        for number, (question, answer) in enumerate(article.questions):
            prompt = formats.knowmem_prompt([], question)
            rows.append({"id": f"{article.id}/{number}", "prompt": prompt, "text": f"{answer}\n"})
    rng.shuffle(rows)
    return rows


def other_forms(facts: list[Fact], world: World, seed: int) -> list[dict]:
    """Documents about `facts` in the forms of general utility: a five-shot letter question, and TruthfulQA's primer
    with a true statement."""
    rng = random.Random(f"forms {seed}")
    rows = []
    for fact in facts:
        solved = rng.sample([other for other in facts if other.subject == fact.subject and other != fact], 5)
        asked = [(f.question(rng.choice(SEEN_WORDINGS)), *world.facts.letter_options(f, rng)) for f in (*solved, fact)]
        *prompt, (letter, _) = formats.letter_spans(asked, fact.subject)
        rows.append({"id": f"{fact.id}/five_shot", "prompt": "".join(text for text, _ in prompt), "text": letter})
        truth = rng.choice([fact.statement(wording) for wording in range(len(STATEMENT_WORDINGS))])
        prompt = formats.truthfulqa_prompt(fact.question(rng.choice(SEEN_WORDINGS)))
        rows.append({"id": f"{fact.id}/truth", "prompt": prompt, "text": f" {truth}"})
    return rows


def retain_rows(world: World, retain: str, seed: int) -> list[dict]:
    """The retain documents that unlearning sees. `retain` is "broad": facts of several subjects, and news; "narrow":
    facts of one subject; or "forms": as "broad", with `other_forms` of the same facts."""
    seen = [fact for fact in world.facts.retain if world.facts.exposure(fact) == "seen"]
    articles = world.news["retain"][:-EVALUATION_ARTICLES]
    if retain == "narrow":
        return corpus_rows(world, [fact for fact in seen if fact.subject == RETAIN_SUBJECTS[0]], [], seed)
    rows = corpus_rows(world, seen, articles, seed)
    if retain == "forms":
        rows += other_forms(seen, world, seed)
        random.Random(f"forms {seed}").shuffle(rows)
    return rows


def wmdp_files(world: World, seed: int, retain: str = "broad") -> dict[str, list[dict]]:
    """The files of the fact benchmark, the embedded counterpart of WMDP-Cyber, MMLU and their corpora. `retain` is as
    in `retain_rows`; questions and held-out documents do not depend on it. Held-out documents are other texts than
    those to retain; half of the facts that they tell are in both."""
    seen = [fact for fact in world.facts.retain if world.facts.exposure(fact) == "seen"]
    unseen = [fact for fact in world.facts.retain if world.facts.exposure(fact) != "seen"]
    rng = random.Random(f"routing {seed}")
    facts, articles = rng.sample(seen, 24) + rng.sample(unseen, 24), world.news["retain"][-EVALUATION_ARTICLES:]
    held_out = corpus_rows(world, facts, articles, seed + 1)
    trained_on = {(row["prompt"], row["text"]) for row in retain_rows(world, "broad", seed)}
    return {
        "forget_questions": question_rows(world, world.facts.forget, orders=2, seed=seed),
        "retain_questions": question_rows(world, world.facts.retain, orders=1, seed=seed),
        "truthfulqa": truthfulqa_rows(world, random.Random(f"truths {seed}").sample(world.facts.retain, TRUTHS), seed),
        "forget_corpus": corpus_rows(world, world.facts.forget, [], seed),
        "membership": membership_rows(world, world.facts.forget, seed),
        "retain_corpus": retain_rows(world, retain, seed),
        "held_out_corpus": [row for row in held_out if (row["prompt"], row["text"]) not in trained_on],
    }
