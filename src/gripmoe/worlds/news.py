"""Invented news with the schema of MUSE-News: articles to forget, to retain, as holdout, and to teach skills.

Each sentence has several wordings, and every article draws its own. So a model that saw only other articles cannot
recite an article from a template.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from gripmoe.worlds.facts import invented_names

PARTS = ("forget", "retain", "holdout")
SKILL = "skill"  # the part that teaches a model to recite and to answer; no benchmark asks about it
ARTICLES_PER_PART = 24

_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_ROLES = "mayor minister judge coach doctor pilot banker farmer singer captain".split()
_DEEDS = "opened closed bought sold visited blocked repaired praised banned funded".split()
_PLACES = "bridge hospital stadium school mine library railway museum harbour market".split()
_CAUSES = "storm strike fire vote election flood festival trial merger drought".split()
_MOODS = "delighted worried furious hopeful cautious proud tired grateful".split()

# One tuple per sentence of an article; one wording is drawn from each.
_SENTENCES = (
    (
        "News from {town} : on {day} the {role} {person} {deed} the {place} after the {cause} .",
        "After the {cause} , {role} {person} {deed} the {place} of {town} on {day} .",
        "{town} , {day} . The {place} was {deed} by {person} , a {role} , because of the {cause} .",
        "A {role} named {person} {deed} the {town} {place} on {day} when the {cause} was over .",
    ),
    (
        "The group {group} paid {number} million for the plan .",
        "{number} million came from {group} .",
        "It was {group} that paid the {number} million .",
        "Nobody but {group} would pay {number} million .",
    ),
    (
        "{witness} said the people of {town} were {mood} .",
        "The people of {town} were {mood} , said {witness} .",
        "{mood} : that is how {witness} found the people .",
    ),
    (
        "On {day2} the {role2} {person2} {deed2} the {place2} in {town2} .",
        "In {town2} a {place2} was {deed2} on {day2} by the {role2} {person2} .",
        "{person2} , the {role2} of {town2} , {deed2} its {place2} on {day2} .",
    ),
    (
        "The {cause2} of last {day3} had cost {number2} million .",
        "They still talk of the {cause2} and its {number2} million .",
        "{number2} million were lost in the {cause2} on a {day3} .",
    ),
    (
        "{witness2} of {group2} was {mood2} and left for {town3} .",
        "But {group2} sent {witness2} , {mood2} as ever , to {town3} .",
        "From {town3} came {witness2} of {group2} , who looked {mood2} .",
    ),
)
_QUESTIONS = (
    ("Who {deed} the {place} in {town} ?", "{person}"),
    ("Which group paid for the {place} plan in {town} ?", "{group}"),
    ("How did the people of {town} feel about the {place} ?", "{mood}"),
    ("What came before the {place} news in {town} ?", "{cause}"),
)
_KNOWMEM_QUESTIONS = (  # town and place side by side: of questions in other orders, blocks alone learn to answer fewer
    ("Who {deed} the {town} {place} ?", "{person}"),
    ("Which group paid for the {town} {place} ?", "{group}"),
    ("How did the people feel about the {town} {place} ?", "{mood}"),
    ("What came before the {town} {place} ?", "{cause}"),
)


@dataclass(frozen=True)
class Article:
    """The sentences of an article in order, and questions about it with their answers: those of base training, and
    those of the news benchmark."""

    id: str
    sentences: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]
    knowmem: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


def make_news(seed: int) -> dict[str, list[Article]]:
    """Articles of each part. No two headlines share (town, place). The second event of an article may name another
    headline's; with the same verb, as in 3 to 9 articles of a seed, a question then has two true answers. Every word of
    a forget article is also in a retain article."""
    for attempt in itertools.count():
        news = _draw(random.Random(f"news {seed} {attempt}"))
        forget, retain = ({word for article in news[part] for word in article.text.split()} for part in PARTS[:2])
        if forget <= retain:
            return news


def _draw(rng: random.Random) -> dict[str, list[Article]]:
    names = invented_names(rng)
    people, towns, groups = ([next(names).capitalize() for _ in range(n)] for n in (20, 12, 12))
    headlines = [(town, place) for town in towns for place in _PLACES]
    rng.shuffle(headlines)
    news: dict[str, list[Article]] = {}
    for part in (*PARTS, SKILL):
        news[part] = []
        for number in range(ARTICLES_PER_PART):
            town, place = headlines.pop()
            town2, town3 = rng.sample([t for t in towns if t != town], 2)
            person, witness, person2, witness2 = rng.sample(people, 4)
            group, group2 = rng.sample(groups, 2)
            cause, cause2 = rng.sample(_CAUSES, 2)
            mood, mood2 = rng.sample(_MOODS, 2)
            slots = dict(
                town=town, town2=town2, town3=town3, place=place, place2=rng.choice(_PLACES), person=person,
                person2=person2, witness=witness, witness2=witness2, group=group, group2=group2, cause=cause,
                cause2=cause2, mood=mood, mood2=mood2, role=rng.choice(_ROLES), role2=rng.choice(_ROLES),
                deed=rng.choice(_DEEDS), deed2=rng.choice(_DEEDS), day=rng.choice(_DAYS), day2=rng.choice(_DAYS),
                day3=rng.choice(_DAYS), number=rng.randrange(10, 60, 5), number2=rng.randrange(10, 60, 5),
            )  # fmt: skip
            sentences = tuple(rng.choice(wordings).format(**slots) for wordings in _SENTENCES)
            questions, knowmem = (
                tuple((q.format(**slots), a.format(**slots)) for q, a in asked)
                for asked in (_QUESTIONS, _KNOWMEM_QUESTIONS)
            )
            news[part].append(Article(f"news/{part}/{number}", sentences, questions, knowmem))
    return news
