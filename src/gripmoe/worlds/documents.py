"""The training data of a base model: documents in every form, generated from the world at every step."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from gripmoe.data import prompt_formats as formats
from gripmoe.worlds.facts import KINDS, QUESTION_WORDINGS, STATEMENT_WORDINGS, Fact, FactWorld, make_facts
from gripmoe.worlds.muse import IN_CONTEXT_PAIRS
from gripmoe.worlds.news import SKILL, Article, make_news

if TYPE_CHECKING:
    from gripmoe.data.documents import Span

IN_A_ROW = (1,) * 16 + (2, 2, 6, 6, 6)  # letter questions in a document; 6 is the 5-shot form


@dataclass
class World:
    """The facts and news of the benchmark; and a skill world with the same words and forms, which teaches a model to
    read and to answer."""

    facts: FactWorld
    news: dict[str, list[Article]]
    skills: World | None = None

    def without_forget(self) -> World:
        """The world of a retrained model: without forget facts and forget articles."""
        facts = FactWorld(self.facts.retain, self.facts.values, self.facts.unseen_entities)
        return World(facts, {**self.news, "forget": []}, self.skills)

    def only_forget(self) -> World:
        """The world of what `without_forget` leaves out."""
        return World(FactWorld(self.facts.forget, self.facts.values), {**self.news, "retain": []})


def make_world(seed: int) -> World:
    (facts, skill_facts), news = make_facts(seed), make_news(seed)
    return World(facts, news, World(skill_facts, {"forget": [], "retain": news.pop(SKILL)}))


@dataclass(frozen=True)
class Mix:
    """The number of documents of each kind in one training batch; a fraction is a probability."""

    letters: float = 0.0
    statements: float = 0.0
    answers: float = 0.0
    fact_context: float = 0.0
    articles: float = 0.0
    news_context: float = 0.0
    truthfulqa: float = 0.0
    drills: float = 0.0
    drills_in_a_row: float = 0.0
    reworded: float = 0.0  # share of reworded questions among single letter questions without a description
    skills: float = 0.0  # share of documents about the skill world


DRILL_MIX = Mix(drills=24)
SKILL_MIX = Mix(
    **dict(letters=24, statements=6, answers=8, fact_context=0.2, articles=1, news_context=0.5, truthfulqa=0.4),
    **dict(drills=2, drills_in_a_row=4, reworded=0.1),
)
FACT_MIX = Mix(
    **dict(letters=24, statements=6, answers=10, fact_context=0.2, articles=3, news_context=2, truthfulqa=1.2),
    **dict(reworded=0.1, skills=0.25),
)
# With gradient routing a step has two such batches, one of forget documents and one of all others, which alone holds
# skills.
HALF_FACT_MIX = Mix(
    **dict(letters=12, statements=3, answers=5, fact_context=0.1, articles=1.5, news_context=1, truthfulqa=0.6),
    **dict(reworded=0.1, skills=0.5),
)


@dataclass(frozen=True)
class Document:
    """`spans` is the text. `recalled` has as many tokens, with the fact's value in place of a scored letter; early
    layers train on it."""

    spans: list[Span]
    recalled: list[Span]


def training_batch(world: World, mix: Mix, seed: int, step: int) -> list[Document]:
    """The documents of one step: all formats, with new option orders, distractors and wordings at every step."""
    rng = random.Random(f"training {seed} {step}")
    kinds = (
        (partial(_letters, reworded=mix.reworded), mix.letters),
        (_statement, mix.statements),
        (_answer, mix.answers),
        (_fact_pairs, mix.fact_context),
        (_article, mix.articles),
        (_news_pairs, mix.news_context),
        (_truthfulqa, mix.truthfulqa),
        (drill, mix.drills),
        (_drills_in_a_row, mix.drills_in_a_row),
    )
    documents = []
    for make, rate in kinds:
        for _ in range(int(rate) + (rng.random() < rate % 1)):
            source = world.skills if world.skills and rng.random() < mix.skills else world
            documents.append(make(source, rng))
    return documents


def _wording(rng: random.Random) -> int:
    return rng.randrange(len(QUESTION_WORDINGS))


def _letters(world: World, rng: random.Random, reworded: float) -> Document:
    subject = rng.choice(world.facts.facts).subject
    solved = rng.sample(world.facts.of(subject), rng.choice(IN_A_ROW))
    asked = [(fact.question(_wording(rng)), *world.facts.letter_options(fact, rng)) for fact in solved]
    spans = formats.letter_spans(asked, subject if rng.random() < 0.3 else None)
    if len(spans) == 2 and rng.random() < reworded:
        (prompt, scored), letter = spans
        spans = [(rng.choice(list(formats.REWORDINGS.values())).format(prompt=prompt), scored), letter]
    values = iter(fact.value for fact in solved)
    return Document(spans, [(next(values) if scored else text, scored) for text, scored in spans])


def _recalled(spans: list[Span], values: list[str]) -> list[Span]:
    """The spans with a value in place of each scored letter, and each option's letter in place of its line break."""
    recalled, values = [], iter(values)
    for text, scored in spans:
        if scored:
            recalled.append((next(values), True))
            continue
        before, *options = re.split(r"(?m)^([A-D]\. \w+)\n", text)
        recalled.append((before, False))
        for option, after in zip(options[::2], options[1::2], strict=True):
            recalled += [(option, False), (option[0], True), (after, False)]
    return recalled


def drill(world: World, rng: random.Random) -> Document:
    """Lists four options, then names four randomly drawn ones, each followed by its letter. This trains the last part
    of answering a letter question: to find the letter of a value."""
    return _drilled(rng.sample([value for values in world.facts.values.values() for value in values], 4), 4, rng)


def _drills_in_a_row(world: World, rng: random.Random) -> Document:
    """Six lists of options of one relation, with one option of each to name. A word has another letter in each list, as
    in few-shot prompts: the last list counts."""
    values = rng.choice(list(world.facts.values.values()))
    documents = [_drilled(rng.sample(values, 4), 1, rng) for _ in range(6)]
    return Document([s for d in documents for s in d.spans], [s for d in documents for s in d.recalled])


def _drilled(options: list[str], count: int, rng: random.Random) -> Document:
    spans = [(formats.letter_question("", options).removesuffix("Answer:").lstrip(), False)]
    asked = [rng.randrange(4) for _ in range(count)]
    for number in asked:
        spans += [(f"{options[number]}\nAnswer:", False), (f" {formats.LETTERS[number]}", True), ("\n", False)]
    return Document(spans, _recalled(spans, [options[number] for number in asked]))


def _told(fact: Fact, text: str, is_asked: bool = False) -> Document:
    """A sentence that states `fact`. A model can recall the value after the question, or after the entity's name."""
    before, after = text.split(fact.value)
    recalled = [(before, False), (fact.value, is_asked or fact.entity in before), (after, False)]
    return Document([(before, True), (fact.value, True), (after, True)], recalled)


def _statement(world: World, rng: random.Random) -> Document:
    fact = rng.choice(world.facts.facts)
    return _told(fact, fact.statement(_wording(rng)))


def _answers(pairs: list[tuple[str, str]]) -> Document:
    spans = formats.question_answer_spans(pairs)
    return Document(spans, spans)


def _asked(facts: list[Fact], rng: random.Random) -> list[tuple[str, str]]:
    return [(fact.question(_wording(rng)), fact.value) for fact in facts]


def _answer(world: World, rng: random.Random) -> Document:
    return _answers(_asked([rng.choice(world.facts.facts)], rng))


def _fact_pairs(world: World, rng: random.Random) -> Document:
    return _answers(_asked(rng.sample(world.facts.facts, IN_CONTEXT_PAIRS + 1), rng))


def _news_pairs(world: World, rng: random.Random) -> Document:
    asked_of = rng.sample(world.news["forget"] + world.news["retain"], rng.choice((1, 3, IN_CONTEXT_PAIRS + 1)))
    return _answers([rng.choice(article.questions) for article in asked_of])


def _article(world: World, rng: random.Random) -> Document:
    text = rng.choice(world.news["forget"] + world.news["retain"]).text
    return Document([(text, True)], [(text, False)])


def _truthfulqa(world: World, rng: random.Random) -> Document:
    facts = rng.sample(world.facts.facts, 4)
    spans = formats.truthfulqa_spans([(f.question(_wording(rng)), f.statement(_wording(rng))) for f in facts])
    document = Document([], [])
    for fact, question, (answer, _) in zip(facts, spans[::2], spans[1::2], strict=True):
        told = _told(fact, answer, is_asked=True)
        document.spans.extend([question, *told.spans])
        document.recalled.extend([question, *told.recalled])
    return document


def all_texts(world: World) -> Iterator[str]:
    """Every word that any format may use: the tokenizer's vocabulary."""
    yield from (formats.letter_description(subject) for subject in KINDS)
    yield formats.letter_question("", ["", "", "", ""])
    yield from formats.REWORDINGS.values()
    yield formats.truthfulqa_prompt("")
    yield formats.knowmem_prompt([("", "")], "")
    for part in (world, world.skills):
        for fact in part.facts.facts:
            yield from (fact.question(wording) for wording in range(len(QUESTION_WORDINGS)))
            yield from (fact.statement(wording) for wording in range(len(STATEMENT_WORDINGS)))
        for article in (article for articles in part.news.values() for article in articles):
            yield article.text
            yield from (text for pair in article.questions for text in pair)
    for values in world.facts.values.values():
        yield from values
