"""Rewrites of questions by a language model of transformers' own layout, here one that says little."""

import json

import pytest
import torch

from conftest import small_model
from gripmoe.attacks.prompts import rewrites_by, rewritten
from gripmoe.cli.main import main
from gripmoe.io.files import read_jsonl, write_jsonl
from gripmoe.worlds.benchmark import question_rows


@pytest.fixture
def writer(tmp_path, world, tokenizer):
    """A model that always writes the same word, as a checkpoint, and the questions to rewrite."""
    model = small_model(vocabulary_size=len(tokenizer))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    folder = tmp_path / "writer"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    questions = tmp_path / "forget_questions.jsonl"
    write_jsonl(questions, question_rows(world, world.facts.forget[:40], orders=1, seed=0))
    return folder, questions


def rewrite(writer, output, *more):
    folder, questions = writer
    return main(["rewrite", "--model", str(folder), "--questions", str(questions), "--output", str(output), *more])


def test_rewrites_are_a_file_that_the_attack_reads(writer, tmp_path):
    output = tmp_path / "poem.jsonl"
    assert rewrite(writer, output) == 0
    asked = [row for row in read_jsonl(writer[1]) if row["split"] == "test"]
    rows = {row["id"]: row for row in read_jsonl(output)}
    assert set(rows) == {row["id"] for row in asked} and len(asked) > 32, "more than one batch"
    question = asked[-1]
    _, prompt = rewritten(output, asked)
    assert all(choice in prompt(question) for choice in question["choices"]) and prompt(question).endswith("Answer:")
    assert rows[question["id"]]["instruction"].startswith("Rewrite the question below as a poem")


def test_an_interrupted_rewriting_goes_on_and_other_words_need_another_file(writer, tmp_path, capsys):
    output, whole = tmp_path / "some.jsonl", tmp_path / "whole.jsonl"
    assert rewrite(writer, whole) == 0
    rows = read_jsonl(whole)
    write_jsonl(output, rows[:3])
    kept = output.read_bytes()
    assert rewrite(writer, output) == 0
    assert output.read_bytes() == whole.read_bytes() and output.read_bytes().startswith(kept)
    assert rewrite(writer, output, "--style", "Say it backwards.") == 2
    assert "some.jsonl: holds rewrites by another model or instruction" in capsys.readouterr().err
    assert output.read_bytes() == whole.read_bytes()


def test_the_chat_template_is_used_where_there_is_one_and_nothing_keeps_the_question(world, tokenizer, monkeypatch):
    seen = []

    def nothing(model, tokenizer, prompts, max_new_tokens):
        seen.extend(prompts)
        return ["  "] * (len(prompts) - 1) + [" O port "]

    monkeypatch.setattr("gripmoe.attacks.prompts.continuations", nothing)
    monkeypatch.setattr(tokenizer, "chat_template", "<{{ messages[0].content }}>", raising=False)
    questions = question_rows(world, world.facts.forget[:1], orders=1, seed=0)[:2]
    first, second = rewrites_by(None, tokenizer, questions, "Turn it.")
    assert seen[0].startswith("<Turn it. ") and seen[0].endswith(f"{questions[0]['question']}>")
    assert questions[0]["question"] in first["prompt"] and first["rewrite"] == ""
    assert "O port" in second["prompt"] and questions[1]["question"] not in second["prompt"]
    assert json.dumps([first, second])
