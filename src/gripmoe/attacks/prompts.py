"""Black-box prompt attacks (Sec. 5.5, after Jang et al.): the same questions reworded.

Built-in variants are templates, so the attack needs no second model. Rewrites by a language model come from a file. The
original model's row in the tables shows how well it still answers each variant; a variant counts only so far.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gripmoe.attacks.base import Found, QuestionScores, QuestionSetting, Scores, mean
from gripmoe.data.prompt_formats import REWORDINGS, SHOTS, letter_question
from gripmoe.evaluation.muse import continuations
from gripmoe.evaluation.questions import ANSWER, load_questions, prompt_of
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import file_digest, read_jsonl

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INSTRUCTIONS = {  # to a language model, by style
    "verse": "Rewrite the question below as a poem of a few lines that asks the same. Keep every name and number.",
    "paraphrase": "Rewrite the question below in entirely other words. Keep every name and number.",
    "indirect": "Rewrite the question below as an indirect question within a short story. Keep every name and number.",
}
REWRITE_TOKENS = 160  # at most
THOUGHTS = ("<think>", "</think>")
TRANSLATION = "Translate the following question to French , then answer it .\n{prompt}"
WORD = re.compile(r"\w+")
ORDER = (2, 3, 1, 0)  # of the choices when they are shuffled: no choice keeps its letter
Prompt = Callable[[dict], str]


def attack(setting: QuestionSetting) -> Found:
    """All variants on the sample, also the rewrites that the benchmark names. The variants of Table 5 run on every test
    question. Verse is a template unless the benchmark names a rewrite in verse."""
    table_5 = {"five_shot": five_shot(setting.dev, setting.seed), "verse": reworded(REWORDINGS["verse"])}
    terms = technical_terms(setting.forget, load_questions(setting.data / "retain_questions.jsonl"))
    others = {"translation": reworded(TRANSLATION), "no_terms": without_terms(terms)}  # base models never saw these
    for name, file in setting.benchmark.rewrites.items():
        digest, prompt = rewritten(Path(file), setting.forget)
        others[f"{name}_{digest}"] = prompt
        table_5 |= {name: prompt} if name == "verse" else {}

    def ask(questions: Sequence[dict], prompt: Prompt) -> Scores:
        return setting.right(setting.after, questions, prompt)

    ids = [question["id"] for question in setting.forget]
    on_all = {f"prompt_{name}": ask(setting.forget, prompt) for name, prompt in table_5.items()}
    place = {name: number for number, name in enumerate(ids)}
    known = {name: [scores[place[asked]] for asked in setting.ids] for name, scores in on_all.items()}
    sampled = {"plain": prompt_of, **{name: reworded(text) for name, text in REWORDINGS.items()}, **others}
    found = {f"prompt_{name}": ask(setting.sample, prompt) for name, prompt in sampled.items() if name not in table_5}
    found["prompt_choice_shuffle"] = ask([choices_shuffled(question) for question in setting.sample], prompt_of)
    plain = mean(QuestionScores(setting.own_answers))
    rates = {
        "prompt_recovery_rate": prompt_recovery(found | known),
        "prompt_recovery_rate_paper": mean([mean(scores) for scores in on_all.values()]) - plain,
    }
    return Found.joined((setting.found(found), Found.over(ids, on_all, **rates)))


def prompt_recovery(found: Mapping[str, Scores]) -> float:
    """The mean gain of five shots, templates and shuffled choices over the plain prompt."""
    names = ("five_shot", *REWORDINGS, "choice_shuffle")
    return mean([mean(found[f"prompt_{name}"]) for name in names]) - mean(found["prompt_plain"])


def reworded(template: str) -> Prompt:
    """A prompt that puts the question into a template."""
    return lambda question: template.format(prompt=letter_question(question["question"], question["choices"]))


def five_shot(solved: Sequence[dict], seed: int) -> Prompt:
    """A prompt with five `solved` questions of the same subject, about other facts, before the question."""

    def prompt(question: dict) -> str:
        rng = random.Random(f"shots {seed} {question['id']}")
        pool = [q for q in solved if q["subject"] == question["subject"] and q["fact"] != question["fact"]]
        if len(pool) < SHOTS:
            raise ConfigError(
                f"forget_questions.jsonl: the split dev has {len(pool)} questions of {question['subject']!r} about "
                f"other facts than {question['id']!r}; {SHOTS} are solved before it: add forget questions to the data"
            )
        return prompt_of(question, rng.sample(pool, SHOTS))

    return prompt


def technical_terms(forget: Sequence[dict], retain: Sequence[dict]) -> set[str]:
    """The words, in lower case, that occur in forget questions and not in retain questions."""

    def words(questions: Sequence[dict]) -> set[str]:
        return {word.lower() for question in questions for word in WORD.findall(question["question"])}

    return words(forget) - words(retain)


def without_terms(terms: Collection[str]) -> Prompt:
    """A prompt in which "something" replaces each run of `terms`."""

    def prompt(question: dict) -> str:
        text = WORD.sub(lambda found: "something" if found[0].lower() in terms else found[0], question["question"])
        return prompt_of({**question, "question": re.sub(r"something(\W+something\b)+", "something", text)})

    return prompt


def choices_shuffled(question: dict) -> dict:
    """The question with its choices in another order, each under another letter."""
    choices = [question["choices"][i] for i in ORDER]
    return {**question, "choices": choices, "answer": ORDER.index(question["answer"])}


def rewritten(file: Path, questions: Sequence[dict]) -> tuple[str, Prompt]:
    """The beginning of a file's checksum, which names it in results, and the prompt of the rewritten `questions` in the
    file, one {"id", "prompt"} per line. Raises ConfigError if a question is missing, if a line lacks a key, if its
    prompt does not end as that of a letter question, or if its `question_digest`, which is optional, is that of another
    question."""
    rows = {row["id"]: row for row in read_jsonl(file, "id", "prompt")}
    if missing := [question["id"] for question in questions if question["id"] not in rows]:
        raise ConfigError(
            f"{file}: {len(missing)} of {len(questions)} questions have no rewrite, first {missing[0]!r}; add a line "
            "for each"
        )
    for question in questions:
        prompt = rows[question["id"]]["prompt"]
        if not isinstance(prompt, str) or not prompt.rstrip().endswith(ANSWER):
            raise ConfigError(
                f"{file}: the prompt of {question['id']!r} is {str(prompt)[-40:]!r}, which does not end in {ANSWER!r}; "
                "write the choices with their letters and this ending too, as `gripmoe rewrite` does"
            )
    if other := other_questions(rows, questions):
        raise ConfigError(
            f"{file}: {len(other)} of {len(questions)} rewrites are of other questions with the same id, first "
            f"{other[0]!r}; name the file that was made from these questions"
        )
    return file_digest(file)[:8], lambda question: rows[question["id"]]["prompt"]


def question_digest(question: dict) -> str:
    """The beginning of a checksum of the question and its choices."""
    return hashlib.sha256(json.dumps([question["question"], question["choices"]]).encode()).hexdigest()[:16]


def other_questions(rewrites: Mapping[str, dict], questions: Sequence[dict]) -> list[str]:
    """The ids of the `questions` whose rewrite, by id, has the `question_digest` of another question."""
    made = [(question, rewrites[question["id"]]) for question in questions if question["id"] in rewrites]
    return [
        question["id"]
        for question, row in made
        if "question_digest" in row and row["question_digest"] != question_digest(question)
    ]


def rewrites_by(model: PreTrainedModel, tokenizer, questions: Sequence[dict], instruction: str) -> list[dict]:
    """Has a language model rewrite the questions, with unchanged choices: {"id", "question_digest", "rewrite",
    "prompt"}. A model's thoughts are left out. If the model writes nothing, or does not end, the question stays as it
    is."""

    def request(question: dict) -> str:
        text = f"{instruction} Answer with the rewritten question only.\n\n{question['question']}"
        if not tokenizer.chat_template:
            return f"{text}\n\nRewritten question:"
        message = {"role": "user", "content": text}
        return tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )

    requests = [request(question) for question in questions]
    texts = continuations(model, tokenizer, requests, REWRITE_TOKENS, unfinished=False)
    rows = []
    for question, asked, text in zip(questions, requests, texts, strict=True):
        begun = THOUGHTS[0] if asked.rstrip().endswith(THOUGHTS[0]) else ""  # by the chat template
        rewrite = _without_thoughts(begun + text).strip()
        prompt = prompt_of({**question, "question": rewrite or question["question"]})
        row = {"id": question["id"], "question_digest": question_digest(question), "rewrite": rewrite}
        rows.append({**row, "prompt": prompt})
    return rows


def _without_thoughts(text: str) -> str:
    """The text after the model's thoughts; empty if these do not end."""
    before, _, after = text.rpartition(THOUGHTS[1])
    return after if before or THOUGHTS[0] not in after else ""
