"""Rewrites of questions by a language model of transformers' own layout, here one that says little."""

import json

import pytest
import torch

from conftest import small_model
from gripmoe.attacks.prompts import rewrites_by, rewritten
from gripmoe.cli import rewrite as command
from gripmoe.cli.main import main
from gripmoe.io.errors import ConfigError
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

    def nothing(model, tokenizer, prompts, max_new_tokens, **_):
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


def test_rewrites_of_other_questions_with_the_same_ids_are_refused(writer, tmp_path, capsys):
    """Ids of published data are row numbers. The control: rows without a digest, as other tools write them."""
    output = tmp_path / "poem.jsonl"
    assert rewrite(writer, output) == 0
    asked = [row for row in read_jsonl(writer[1]) if row["split"] == "test"]
    others = [{**row, "choices": row["choices"][::-1]} for row in asked]
    with pytest.raises(ConfigError, match=f"poem.jsonl: {len(asked)} of {len(asked)} rewrites are of other questions"):
        rewritten(output, others)
    write_jsonl(tmp_path / "by_hand.jsonl", [{key: row[key] for key in ("id", "prompt")} for row in read_jsonl(output)])
    rewritten(tmp_path / "by_hand.jsonl", others)
    kept = output.read_bytes()
    write_jsonl(writer[1], others)
    assert rewrite(writer, output) == 2
    said = f"poem.jsonl: the rewrite of {asked[0]['id']!r} is not of the question in {writer[1]}; remove the file"
    assert said in capsys.readouterr().err and output.read_bytes() == kept


TEMPLATE = "{{ messages[0].content }}{% if enable_thinking is false %} <no thoughts>{% endif %}"
THOUGHT = {  # what a model writes, and its rewrite
    "<think>\nIt is a port.\n</think>\n\nO port": "O port",
    "It is a port.</think>O port": "O port",
    "<think>\nIt is a port. Let me": "",
    "O port": "O port",
}


@pytest.mark.parametrize("written", THOUGHT)
def test_what_a_model_thinks_is_no_rewrite(written, world, tokenizer, monkeypatch):
    seen = []
    monkeypatch.setattr("gripmoe.attacks.prompts.continuations", lambda *given, **_: seen.extend(given[2]) or [written])
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE, raising=False)
    question = question_rows(world, world.facts.forget[:1], orders=1, seed=0)[0]
    row = rewrites_by(None, tokenizer, [question], "Turn it.")[0]
    assert seen[0].endswith("<no thoughts>") and row["rewrite"] == THOUGHT[written]
    assert "It is a port" not in row["prompt"] and (row["rewrite"] or question["question"]) in row["prompt"]
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0].content }}<think>\n", raising=False)
    begun = rewrites_by(None, tokenizer, [question], "Turn it.")[0]["rewrite"]
    assert begun == ("O port" if "</think>" in written else ""), "the template begins with thoughts"


def test_a_rewrite_that_does_not_end_is_none(world, tokenizer, monkeypatch):
    """The control: a model that ends at once writes nothing either, and one that ends after a word writes that."""
    model = small_model(vocabulary_size=len(tokenizer))
    word, end = tokenizer("port")["input_ids"][0], model.generation_config.eos_token_id
    question = question_rows(world, world.facts.forget[:1], orders=1, seed=0)[0]
    for ends, wanted in ((False, ""), (True, "port")):

        def generate(input_ids, max_new_tokens, ends=ends, **_):
            new = [word, end] if ends else [word] * max_new_tokens
            return torch.cat([input_ids, torch.tensor([new] * len(input_ids))], dim=1)

        monkeypatch.setattr(model, "generate", generate)
        row = rewrites_by(model, tokenizer, [question], "Turn it.")[0]
        assert row["rewrite"] == wanted and (wanted or question["question"]) in row["prompt"]


def test_a_model_is_placed_on_devices_and_pads_as_any_other(writer, tmp_path, monkeypatch):
    """With a tokenizer without a padding token, as those of Llama and Mistral."""
    folder, _ = writer
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / file).exists():
            told = json.loads((folder / file).read_text())
            (folder / file).write_text(json.dumps({key: told[key] for key in told if key != "pad_token"}))
    placed = []
    monkeypatch.setattr(command, "visible_devices", lambda: ["a device"])
    monkeypatch.setattr(command, "place", lambda model, devices: placed.append(devices))
    assert rewrite(writer, tmp_path / "poem.jsonl") == 0 and placed == [["a device"]]
