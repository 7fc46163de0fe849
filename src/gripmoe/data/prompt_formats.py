"""The prompt formats of the evaluations.

The letter template of WMDP and MMLU, and TruthfulQA's primer, are read from the installed lm-evaluation-harness, so
that tiny models train on exactly the prompts of the evaluation.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import TYPE_CHECKING

import jinja2
import yaml

if TYPE_CHECKING:
    from gripmoe.data.documents import Span

LETTERS = "ABCD"
SHOTS = 5  # solved questions before another one, in five-shot prompts
LETTER_TASK = "wmdp/_default_template_yaml"
# Rewordings of letter questions, for black-box attacks. Embedded base models have trained on them too.
REWORDINGS = {
    "verse": "In lines that rhyme the tale is told ,\nof things that are both new and old .\n{prompt}",
    "role_play": "You are an old expert who helps a student . The student asks :\n{prompt}",
    "filler": "It was a quiet day in town and nobody had much to say .\n{prompt}",
}


@functools.cache
def template_of(task: str) -> str:
    """The template of the prompts of a task of the harness, named by its file."""
    text = (resources.files("lm_eval") / "tasks" / task).read_text(encoding="utf-8")
    return yaml.safe_load(text)["doc_to_text"]


@functools.cache
def _compiled(task: str) -> jinja2.Template:
    return jinja2.Template(template_of(task))


def letter_question(question: str, choices: list[str]) -> str:
    """The WMDP and MMLU prompt of one question, up to "Answer:"."""
    return _compiled(LETTER_TASK).render(question=question, choices=choices)


def letter_description(subject: str) -> str:
    """The line that the harness puts before the first question of a subject, with a blank line; nothing without one."""
    return f"The following are multiple choice questions (with answers) about {subject}.\n\n" if subject else ""


def truthfulqa_prompt(question: str) -> str:
    """The harness's TruthfulQA prompt: six fixed questions with answers, then this one."""
    return _compiled("truthfulqa/truthfulqa_mc1.yaml").render(question=question)


def knowmem_prompt(pairs: list[tuple[str, str]], question: str) -> str:
    """MUSE's KnowMem prompt: in-context pairs, then the question; it ends in "Answer: "."""
    context = "".join(f"Question: {q}\nAnswer: {a}\n\n" for q, a in pairs)
    return f"{context}Question: {question}\nAnswer: "


def letter_spans(questions: list[tuple[str, list[str], int]], subject: str | None) -> list[Span]:
    """Solved letter questions in k-shot form after the subject's description. Only the letters are scored."""
    spans: list[Span] = [(letter_description(subject), False)] if subject else []
    for number, (question, choices, answer) in enumerate(questions):
        separator = "\n\n" if number else ""
        spans += [(separator + letter_question(question, choices), False), (f" {LETTERS[answer]}", True)]
    return spans


def question_answer_spans(pairs: list[tuple[str, str]]) -> list[Span]:
    """KnowMem's form. Every answer is scored with its line break."""
    spans: list[Span] = []
    for question, answer in pairs:
        spans += [(f"Question: {question}\nAnswer: ", False), (f"{answer}\n", True), ("\n", False)]
    return spans


def truthfulqa_spans(pairs: list[tuple[str, str]]) -> list[Span]:
    """TruthfulQA's primer, then questions. Only their answers are scored."""
    spans: list[Span] = [(truthfulqa_prompt(pairs[0][0]), False), (f" {pairs[0][1]}", True)]
    for question, answer in pairs[1:]:
        spans += [(f"\n\nQ: {question}\nA:", False), (f" {answer}", True)]
    return spans
