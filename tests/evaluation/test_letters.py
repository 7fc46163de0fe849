"""General utility through the harness: by hand, with questions before the question, beside its command line."""

import json
import math
import subprocess
import sys

import datasets
import pytest
import torch

from conftest import small_model
from gripmoe.data.prompt_formats import truthfulqa_prompt
from gripmoe.evaluation import letters
from gripmoe.evaluation.letters import SHOTS, general_utility, solved_questions, truthfulqa
from gripmoe.evaluation.questions import (
    HARNESS_KEYS,
    Answer,
    accuracy,
    harness_answers,
    harness_samples,
    harness_task,
    write_parquet,
)
from gripmoe.io.files import write_jsonl, write_yaml
from gripmoe.moe.storage import save_model
from gripmoe.worlds.benchmark import question_rows, truthfulqa_rows

TRUTHS = ("local_truthfulqa_mc1", "local_truthfulqa_mc2")


@pytest.fixture(scope="module")
def model(tokenizer):
    return small_model(vocabulary_size=len(tokenizer), seed=3)


@pytest.fixture(scope="module")
def questions(world):
    return question_rows(
        world, world.facts.of("computer science")[:8] + world.facts.of("national history")[:8], orders=1, seed=0
    )


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


def test_truths_of_which_all_are_very_unlikely_have_a_share(tokenizer, world, tmp_path):
    """Their probabilities are 0 in double precision; their ratio is not."""
    model = small_model(vocabulary_size=len(tokenizer))
    with torch.no_grad():
        model.lm_head.weight.mul_(10_000)
    rows = truthfulqa_rows(world, world.facts.retain[:5], seed=0)
    texts = [(row["question"], f" {text}") for row in rows for text in row["mc2_targets"]["choices"]]
    assert max(log_likelihood(model, tokenizer, truthfulqa_prompt(asked), text) for asked, text in texts) < -750
    assert 0 <= truthfulqa(model, tokenizer, rows, work_folder=tmp_path, batch_size=8)["truthfulqa_mc2"] <= 1


def test_true_statements_are_true_and_false_ones_false(world):
    facts = world.facts.retain[:20]
    for fact, row in zip(facts, truthfulqa_rows(world, facts, seed=0), strict=True):
        for targets in (row["mc1_targets"], row["mc2_targets"]):
            assert [fact.value in text.split() for text in targets["choices"]] == [bool(x) for x in targets["labels"]]
            assert len(set(targets["choices"])) == len(targets["choices"])


def test_five_solved_questions_of_the_subject_stand_before_each(model, tokenizer, questions, tmp_path):
    test, solved = questions[3::6], questions
    file = tmp_path / "history.parquet"
    for path, rows in ((file, test), (tmp_path / "history.parquet.shots", solved)):
        of_subject = [row for row in rows if row["subject"] == "national history"]
        write_parquet(path, of_subject[:SHOTS] if rows is solved else of_subject, HARNESS_KEYS)
    task = harness_task("letters_history", file, "national history", SHOTS)
    sample = harness_samples(model, tokenizer, [task], 8)["letters_history"][0]
    prompt = sample["arguments"][0][0] if isinstance(sample["arguments"], list) else str(sample["arguments"])
    assert prompt.count("Answer:") == SHOTS + 1 and prompt.startswith("The following are multiple choice questions")
    first = next(row for row in solved if row["subject"] == "national history")
    assert f"{first['question']}\n" in prompt and f"Answer: {'ABCD'[first['answer']]}\n\n" in prompt
    plain = harness_answers(model, tokenizer, test, work_folder=tmp_path, batch_size=8)
    below = harness_answers(model, tokenizer, test, work_folder=tmp_path, batch_size=8, solved=solved, shots=SHOTS)
    assert [a.id for a in plain] == [a.id for a in below]
    assert [a.letter_logprobs for a in plain] != [a.letter_logprobs for a in below]


def test_all_of_general_utility(model, tokenizer, questions, world, tmp_path, monkeypatch):
    """And the harness leaves nothing behind in the cache that all users' data sets share."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "shared")
    truths = truthfulqa_rows(world, world.facts.retain[:3], seed=0)
    metrics = general_utility(
        model, tokenizer, questions[:9], questions, truths, work_folder=tmp_path, batch_size=8, few_shot_questions=6
    )
    assert not (tmp_path / "shared").exists()
    assert set(metrics) == {"retain_accuracy_five_shot", "truthfulqa_mc1", "truthfulqa_mc2"}
    assert all(0 <= value <= 1 for value in metrics.values())


def test_questions_drawn_at_random_are_asked_after_five_solved_ones_where_there_are_five(monkeypatch):
    asked, options = [], {}

    def answers(model, tokenizer, rows, **given):
        asked.extend(rows)
        options.update(given)
        return [Answer(row["id"], 0, True, (0.0,) * 4) for row in rows]

    def of(subject, count):
        return [{"subject": subject, "id": f"{subject} {number}"} for number in range(count)]

    monkeypatch.setattr(letters, "harness_answers", answers)
    retain, solved = of("five", 8) + of("four", 8), of("five", 5) + of("four", 4)
    more = dict(work_folder=None, batch_size=1, few_shot_questions=6)
    assert general_utility(None, None, retain, solved, [], **more) == {"retain_accuracy_five_shot": 1.0}
    assert {row["subject"] for row in asked} == {"five"} and len({row["id"] for row in asked}) == len(asked) == 6
    assert asked != retain[:6], "files have questions of a kind together"
    assert options["solved"] == solved and options["shots"] == 5


@pytest.fixture(scope="module")
def by_command_line(model, tokenizer, questions, world, tmp_path_factory):
    """What the harness's command line logs of the model on disk, from task files: the log-likelihoods of each document
    by task and id; and its accuracies."""
    folder = tmp_path_factory.mktemp("harness")
    rows = [row for row in questions if row["subject"] == "national history"][: SHOTS + 20]
    for shots in (0, SHOTS):
        file = folder / f"history_{shots}.parquet"
        write_parquet(file, rows[SHOTS:], HARNESS_KEYS)
        write_parquet(folder / f"{file.name}.shots", rows[:SHOTS], HARNESS_KEYS)
        write_yaml(folder / f"letters_{shots}.yaml", harness_task(f"letters_{shots}", file, "national history", shots))
    truths = truthfulqa_rows(world, world.facts.retain[:5], seed=0)
    metrics = truthfulqa(model, tokenizer, truths, work_folder=folder, batch_size=8)  # which leaves its task files
    without = {"include": "truthfulqa_mc1.yaml", "task": "no_primer", "doc_to_text": "Q: {{question}}\nA:"}
    write_yaml(folder / "no_primer.yaml", without)
    save_model(model, tokenizer, folder / "model")
    tasks = ["letters_0", f"letters_{SHOTS}", *TRUTHS]
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu", "--batch_size", "4"]
    command += ["--model_args", f"pretrained={folder / 'model'},dtype=float32,add_bos_token=False"]
    command += ["--tasks", ",".join(tasks), "--include_path", str(folder)]
    command += ["--log_samples", "--output_path", str(folder / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    logged = {task: next((folder / "out").rglob(f"samples_{task}_*.jsonl")).read_text().splitlines() for task in tasks}
    results = json.loads(next((folder / "out").rglob("results_*.json")).read_text())["results"]
    accuracies = {task: results[task]["acc,none"] for task in tasks}
    return folder, rows, metrics, accuracies, {task: scores(map(json.loads, logged[task])) for task in tasks}


def scores(samples):
    return {
        sample["doc"].get("id", sample["doc_id"]): [float(response[0]) for response in sample["filtered_resps"]]
        for sample in samples
    }


def same(found, wanted):
    assert set(found) == set(wanted) and len(wanted) >= 5
    return all(found[name] == pytest.approx(wanted[name], abs=1e-4) for name in wanted)


def test_letters_as_the_harness_command_line_answers_them(by_command_line, model, tokenizer, tmp_path):
    """Model in memory and questions in a file, against the model on disk and a task file: one harness, two ways in."""
    _, rows, _, accuracies, by_line = by_command_line
    for shots, others in ((0, SHOTS), (SHOTS, 0)):
        found = harness_answers(
            model, tokenizer, rows[SHOTS:], work_folder=tmp_path, batch_size=8, solved=rows, shots=shots
        )
        answered = {answer.id: list(answer.letter_logprobs) for answer in found}
        assert same(answered, by_line[f"letters_{shots}"])
        assert accuracy(found) == pytest.approx(accuracies[f"letters_{shots}"])
        assert not same(answered, by_line[f"letters_{others}"]), "the control: as many solved questions as asked for"


def test_truthfulqa_as_the_harness_command_line_has_it(by_command_line, model, tokenizer):
    folder, _, metrics, accuracies, by_line = by_command_line
    samples = harness_samples(model, tokenizer, [*TRUTHS, "no_primer"], 8, folder)
    for task in TRUTHS:
        assert same(scores(samples[task]), by_line[task])
        assert metrics[task.removeprefix("local_")] == pytest.approx(accuracies[task], abs=1e-4)
    assert not same(scores(samples["no_primer"]), by_line[TRUTHS[0]]), "the control: the same questions, no primer"


def test_solved_questions_are_the_benchmarks_own_where_it_has_some(tmp_path):
    rows = [{"id": str(number), "split": split} for number, split in enumerate(["test", "dev", "shots", "dev"])]
    write_jsonl(tmp_path / "mmlu.jsonl", rows)
    write_jsonl(tmp_path / "tiny.jsonl", [row for row in rows if row["split"] != "shots"])
    assert [row["id"] for row in solved_questions(tmp_path / "mmlu.jsonl")] == ["2"]
    assert [row["id"] for row in solved_questions(tmp_path / "tiny.jsonl")] == ["1", "3"]
