"""General utility through the harness: by hand, with questions before the question, beside its command line."""

import json
import math
import subprocess
import sys

import pytest
import torch

from conftest import small_model
from gripmoe.data.formats import truthfulqa_prompt
from gripmoe.evaluation.choice import harness_answers, harness_samples, harness_task
from gripmoe.evaluation.general import SHOTS, general_utility, solved_questions, truthfulqa
from gripmoe.files import write_jsonl, write_yaml
from gripmoe.moe.storage import save_model
from gripmoe.worlds.benchmark import question_rows, truthfulqa_rows


@pytest.fixture(scope="module")
def model(tokenizer):
    return small_model(vocabulary_size=len(tokenizer), seed=3)


@pytest.fixture(scope="module")
def questions(world):
    return question_rows(world, world.facts.of("geography")[:8] + world.facts.of("history")[:8], orders=1, seed=0)


@torch.no_grad()
def log_likelihood(model, tokenizer, prompt, text):
    head, ids = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (prompt, prompt + text))
    logprobs = model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    return sum(logprobs[i - 1, ids[i]].item() for i in range(len(head), len(ids)))


def test_truthfulqa_by_hand(model, tokenizer, world, tmp_path):
    rows = truthfulqa_rows(world, world.facts.retain[:5], seed=0)
    metrics = truthfulqa(model, tokenizer, rows, work_folder=tmp_path, batch_size=8)
    likeliest, mass = [], []
    for row in rows:
        prompt = truthfulqa_prompt(row["question"])
        one = [log_likelihood(model, tokenizer, prompt, f" {text}") for text in row["mc1_targets"]["choices"]]
        likeliest.append(one.index(max(one)) == 0)
        both = [math.exp(log_likelihood(model, tokenizer, prompt, f" {t}")) for t in row["mc2_targets"]["choices"]]
        mass.append(sum(p for p, true in zip(both, row["mc2_targets"]["labels"], strict=True) if true) / sum(both))
    assert metrics["truthfulqa_mc1"] == pytest.approx(sum(likeliest) / len(rows))
    assert metrics["truthfulqa_mc2"] == pytest.approx(sum(mass) / len(rows), abs=1e-4)


def test_true_statements_are_true_and_false_ones_false(world):
    facts = world.facts.retain[:20]
    for fact, row in zip(facts, truthfulqa_rows(world, facts, seed=0), strict=True):
        for targets in (row["mc1_targets"], row["mc2_targets"]):
            assert [fact.value in text.split() for text in targets["choices"]] == [bool(x) for x in targets["labels"]]
            assert len(set(targets["choices"])) == len(targets["choices"])


def test_five_solved_questions_of_the_subject_stand_before_each(model, tokenizer, questions, tmp_path):
    test, solved = questions[3::6], questions
    file = tmp_path / "history.jsonl"
    write_jsonl(file, [row for row in test if row["subject"] == "history"])
    write_jsonl(tmp_path / "history.jsonl.shots", [row for row in solved if row["subject"] == "history"][:SHOTS])
    task = harness_task("letters_history", file, "history", SHOTS)
    sample = harness_samples(model, tokenizer, [task], 8)["letters_history"][0]
    prompt = sample["arguments"][0][0] if isinstance(sample["arguments"], list) else str(sample["arguments"])
    assert prompt.count("Answer:") == SHOTS + 1 and prompt.startswith("The following are multiple choice questions")
    first = next(row for row in solved if row["subject"] == "history")
    assert f"{first['question']}\n" in prompt and f"Answer: {'ABCD'[first['answer']]}\n\n" in prompt
    plain = harness_answers(model, tokenizer, test, work_folder=tmp_path, batch_size=8)
    below = harness_answers(model, tokenizer, test, work_folder=tmp_path, batch_size=8, solved=solved, shots=SHOTS)
    assert [a.id for a in plain] == [a.id for a in below]
    assert [a.letter_logprobs for a in plain] != [a.letter_logprobs for a in below]


def test_all_of_general_utility(model, tokenizer, questions, world, tmp_path):
    truths = truthfulqa_rows(world, world.facts.retain[:3], seed=0)
    metrics = general_utility(
        model, tokenizer, questions[:9], questions, truths, work_folder=tmp_path, batch_size=8, few_shot_questions=6
    )
    assert set(metrics) == {"retain_accuracy_five_shot", "truthfulqa_mc1", "truthfulqa_mc2"}
    assert all(0 <= value <= 1 for value in metrics.values())


def test_the_harness_command_line_gives_the_same_log_likelihoods(model, tokenizer, questions, tmp_path):
    """Model in memory and questions in a file, against the model on disk and a task file: one harness, two ways in."""
    rows = [row for row in questions if row["subject"] == "history"][:8]
    write_jsonl(tmp_path / "history.jsonl", rows)
    save_model(model, tokenizer, tmp_path / "model")
    write_yaml(tmp_path / "tasks" / "t.yaml", harness_task("letters_history", tmp_path / "history.jsonl", "history"))
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "run",
        "--model",
        "hf",
        "--tasks",
        "letters_history",
        "--batch_size",
        "4",
    ]
    command += ["--model_args", f"pretrained={tmp_path / 'model'},dtype=float32,add_bos_token=False", "--device", "cpu"]
    command += ["--include_path", str(tmp_path / "tasks"), "--log_samples", "--output_path", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    logged = next((tmp_path / "out").rglob("samples_letters_history_*.jsonl")).read_text().splitlines()
    by_line = {
        sample["doc"]["id"]: [float(response[0]) for response in sample["filtered_resps"]]
        for sample in map(json.loads, logged)
    }
    for answer in harness_answers(model, tokenizer, rows, work_folder=tmp_path, batch_size=8):
        assert by_line[answer.id] == pytest.approx(answer.letter_logprobs, abs=1e-4)


def test_solved_questions_are_the_benchmarks_own_where_it_has_some(tmp_path):
    rows = [{"id": str(number), "split": split} for number, split in enumerate(["test", "dev", "shots", "dev"])]
    write_jsonl(tmp_path / "mmlu.jsonl", rows)
    write_jsonl(tmp_path / "tiny.jsonl", [row for row in rows if row["split"] != "shots"])
    assert [row["id"] for row in solved_questions(tmp_path / "mmlu.jsonl")] == ["2"]
    assert [row["id"] for row in solved_questions(tmp_path / "tiny.jsonl")] == ["1", "3"]
