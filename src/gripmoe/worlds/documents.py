"""What a base model trains on: documents of every form, written from the world afresh at every step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gripmoe.data import prompt_formats as formats
from gripmoe.worlds.facts import QUESTION_WORDINGS, RELATIONS, STATEMENT_WORDINGS, Fact, FactWorld, make_facts
from gripmoe.worlds.muse import IN_CONTEXT_PAIRS
from gripmoe.worlds.news import Article, make_news

if TYPE_CHECKING:
    from gripmoe.data.documents import Span

SHOTS = (1,) * 10 + (2, 6)  # letter questions in a row; 6 is the 5-shot form


@dataclass
class World:
    facts: FactWorld
    news: dict[str, list[Article]]

    def without_forget(self) -> World:
        """What a retrained model trains on: no forget fact and no forget article."""
        facts = FactWorld(self.facts.retain, self.facts.values, self.facts.unseen_entities)
        return World(facts, {**self.news, "forget": []})


def make_world(seed: int, **sizes: int) -> World:
    return World(make_facts(seed, **sizes), make_news(seed))


@dataclass(frozen=True)
class Mix:
    """Documents of each kind in one training batch; a fraction is a chance."""

    letters: float
    statements: float
    answers: float
    fact_context: float
    articles: float
    news_context: float
    truthfulqa: float
    dressed: float = 0.0  # of the single letter questions without a description


# Naming a letter is learned soonest if most letter questions stand alone, facts are learned cheapest from statements
# and answers, and news can wait until then.
LETTER_MIX = Mix(36, 8, 6, 0.2, 1, 0.3, 0.2)
FACT_MIX = Mix(24, 20, 24, 0.2, 1, 0.3, 0.2)
READING_MIX = Mix(36, 4, 6, 0.2, 1, 0.3, 0.2)
LATE_MIX = Mix(20, 8, 10, 0.3, 3, 4, 0.3, dressed=0.25)


def training_batch(world: World, mix: Mix, seed: int, step: int) -> list[list[Span]]:
    """The documents of one step: all formats, with fresh option orders, distractors and wordings every time."""
    rng = random.Random(f"training {seed} {step}")
    facts = world.facts.facts
    by_subject = {subject: world.facts.of(subject) for subject in {fact.subject for fact in facts}}
    articles = world.news["forget"] + world.news["retain"]

    def wording() -> int:
        return rng.randrange(len(QUESTION_WORDINGS))

    def asked(fact: Fact) -> tuple[str, list[str], int]:
        return fact.question(wording()), *world.facts.letter_options(fact, rng)

    def letters() -> list[Span]:
        subject = rng.choice(facts).subject
        solved = rng.sample(by_subject[subject], rng.choice(SHOTS))
        spans = formats.letter_spans([asked(fact) for fact in solved], subject if rng.random() < 0.3 else None)
        if len(spans) == 2 and rng.random() < mix.dressed:
            (prompt, scored), letter = spans
            spans = [(rng.choice(list(formats.CLOTHES.values())).format(prompt=prompt), scored), letter]
        return spans

    def statement() -> list[Span]:
        return [(rng.choice(facts).statement(rng.randrange(len(STATEMENT_WORDINGS))), True)]

    def answered(fact: Fact) -> tuple[str, str]:
        return fact.question(wording()), fact.value

    def truthful(fact: Fact) -> tuple[str, str]:
        return fact.question(wording()), fact.statement(rng.randrange(len(STATEMENT_WORDINGS)))

    def news_pairs() -> list[Span]:
        asked_of = rng.sample(articles, rng.choice((1, 3, IN_CONTEXT_PAIRS + 1)))
        return formats.question_answer_spans([rng.choice(article.questions) for article in asked_of])

    def fact_pairs() -> list[Span]:
        return formats.question_answer_spans([answered(fact) for fact in rng.sample(facts, IN_CONTEXT_PAIRS + 1)])

    def answer() -> list[Span]:
        return formats.question_answer_spans([answered(rng.choice(facts))])

    def article() -> list[Span]:
        return [(rng.choice(articles).text, True)]

    def truthfulqa() -> list[Span]:
        return formats.truthfulqa_spans([truthful(fact) for fact in rng.sample(facts, 4)])

    kinds = (
        (letters, mix.letters),
        (statement, mix.statements),
        (answer, mix.answers),
        (fact_pairs, mix.fact_context),
        (article, mix.articles),
        (news_pairs, mix.news_context),
        (truthfulqa, mix.truthfulqa),
    )
    return [make() for make, rate in kinds for _ in range(int(rate) + (rng.random() < rate % 1))]


def all_texts(world: World) -> Iterator[str]:
    """Every word that any format may use: the tokenizer's vocabulary."""
    yield from (formats.letter_description(subject) for subject in RELATIONS)
    yield formats.letter_question("", ["", "", "", ""])
    yield from formats.CLOTHES.values()
    yield formats.truthfulqa_prompt("")
    yield formats.knowmem_prompt([("", "")], "")
    for fact in world.facts.facts:
        yield from (fact.question(wording) for wording in range(len(QUESTION_WORDINGS)))
        yield from (fact.statement(wording) for wording in range(len(STATEMENT_WORDINGS)))
    for values in world.facts.values.values():
        yield from values
    for article in (article for part in world.news.values() for article in part):
        yield article.text
        yield from (text for pair in article.questions for text in pair)
