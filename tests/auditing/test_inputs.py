"""Questions and texts of one's own as a data folder, and what is refused, with file, row and remedy."""

import itertools
from contextlib import nullcontext
from pathlib import Path

import pandas as pd
import pytest

from gripmoe.auditing.inputs import OF_OTHER_FACTS, TABLE, AuditSettings, benchmark_inputs, own_inputs, settings_of
from gripmoe.cli.main import main
from gripmoe.config.project import Project
from gripmoe.config.reading import read_catalogue
from gripmoe.config.training import Relearning
from gripmoe.evaluation.questions import load_questions, prompt_of
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import write_jsonl
from gripmoe.worlds.benchmark import wmdp_files

CORPORA = ("forget_corpus", "retain_corpus")
pytest_plugins = "audit_pairs"
CONFIG = Path(__file__).parents[2] / "workflow" / "config"


def test_named_benchmarks_are_those_of_the_workflow():
    for name, row in read_catalogue(TABLE, AuditSettings).items():
        project = Project(CONFIG, "tiny" if name == "wmdp_tiny" else "paper")
        assert row.benchmark == project.benchmarks[name] and row.relearning == project.world.relearning


def test_a_named_benchmark_has_the_files_of_prepare_data(world):
    inputs = benchmark_inputs("wmdp_tiny")
    assert inputs.files == wmdp_files(world, 0) and set(inputs.absent) == {"relearning from the corpus"}


def test_questions_of_ones_own_become_a_data_folder(asked, files, tmp_path):
    inputs = own_inputs(**files)
    inputs.write(tmp_path / "data")
    for kind in ("forget", "retain"):
        rows = load_questions(tmp_path / "data" / f"{kind}_questions.jsonl")
        assert [row["question"] for row in rows] == [row["question"] for row in getattr(asked, kind)]
        assert {row["exposure"] == "forget" for row in rows} == {kind == "forget"}
        assert {row["split"] for row in rows} == {"dev", "test"} and len({row["fact"] for row in rows}) == len(rows)
    held_out, kept = inputs.files["held_out_corpus"], inputs.files["retain_corpus"]
    assert len(held_out) == 6 and len(kept) == 54 and not {row["id"] for row in held_out} & {row["id"] for row in kept}
    assert own_inputs(asked.forget, asked.retain, forget_text=asked.forget_text).files["forget_questions"] == rows_of(
        inputs
    )


def rows_of(inputs):
    return inputs.files["forget_questions"]


def test_columns_of_ones_own_are_kept(world):
    rows = wmdp_files(world, 0)["forget_questions"]
    assert rows_of(own_inputs(rows, wmdp_files(world, 0)["retain_questions"])) == rows


def test_answers_may_be_letters(asked):
    for written, missing in (("ABCD", None), ("abcd", float("nan")), ([0.0, 1.0, 2.0, 3.0], " ")):
        answers = [row | {"answer": written[row["answer"]], "fact": missing} for row in asked.forget]
        assert rows_of(own_inputs(answers, asked.retain)) == rows_of(own_inputs(asked.forget, asked.retain))


@pytest.mark.parametrize(
    "given, subject", [({}, "general knowledge"), ({"subject": None}, "general knowledge"), ({"subject": ""}, "")]
)
def test_a_question_may_be_asked_without_a_line_on_its_subject(given, subject, asked):
    plain = [{key: row[key] for key in ("question", "choices", "answer")} for row in asked.forget]
    (first, *_) = own_inputs([row | given for row in plain], asked.retain).files["forget_questions"]
    assert first["subject"] == subject
    assert prompt_of(first).startswith(
        f"The following are multiple choice questions (with answers) about {subject}."
        if subject
        else plain[0]["question"]
    )


def test_nan_in_documents_is_nothing(asked):
    plain = asked.retain_text
    as_pandas_gives_them = [{**row, "id": float("nan"), "prompt": float("nan")} for row in plain]
    own_text = own_inputs(asked.forget, asked.retain, retain_text=as_pandas_gives_them).files["retain_corpus"]
    numbered = own_inputs(asked.forget, asked.retain, retain_text=[row["text"] for row in plain]).files["retain_corpus"]
    assert own_text == numbered
    with pytest.raises(ConfigError, match="`prompt` of document 'retain/0' is no text"):
        own_inputs(asked.forget, asked.retain, retain_text=[{"text": "A text of words.", "prompt": 5}])
    with pytest.raises(ConfigError, match="--retain-text: row 1 has no `text`"):
        own_inputs(asked.forget, asked.retain, retain_text=5)


def test_facts_are_counted_among_the_questions_that_attacks_ask(asked):
    """Of 1,500 questions about one fact and one question each about four others, an attack asks the first alone."""
    questions = [
        {**asked.forget[0], "id": f"q{n}", "question": f"Question {n}?", "fact": "one", "split": "test"}
        for n in range(1500)
    ]
    questions += [
        {**row, "id": f"other{n}", "fact": f"f{n}", "split": "test" if n < 4 else "dev"}
        for n, row in enumerate(asked.forget[1:20])
    ]
    with pytest.raises(ConfigError, match="are about 1 facts"):
        own_inputs(questions, asked.retain)


def test_documents_need_a_token_that_is_predicted(asked, tokenizer):
    """A prompt that is null is none."""
    texts = [{**row, "prompt": None} for row in asked.retain_text]
    own_inputs(asked.forget, asked.retain, retain_text=texts).check_documents(tokenizer)
    word = asked.retain_text[0]["text"].split()[0]
    for short in ({"text": word}, {"text": word, "prompt": " ".join([word] * 600)}):
        inputs = own_inputs(asked.forget, asked.retain, forget_text=[*texts, short])
        with pytest.raises(
            ConfigError, match="--forget-text: document 'forget/60' .* has no second token, or a prompt"
        ):
            inputs.check_documents(tokenizer)


def test_questions_fit_into_what_models_read(asked, tokenizer):
    long = {**asked.forget[0], "question": " ".join([asked.forget[0]["question"]] * 9)}
    inputs = own_inputs([long, *asked.forget[1:]], asked.retain)
    length = len(tokenizer(prompt_of(rows_of(inputs)[0]))["input_ids"])
    inputs.check_questions(tokenizer, length)
    with pytest.raises(ConfigError, match=f"forget question .* has {length} tokens .* models read {length - 1}; leave"):
        inputs.check_questions(tokenizer, length - 1)


def test_documents_without_ids_are_numbered(asked):
    """A null id is none."""
    texts = [{"id": None, "text": "One."}, {"text": "Two."}]
    (first, second), _ = (own_inputs(asked.forget, asked.retain, forget_text=texts).files[name] for name in CORPORA)
    assert (first["id"], second["id"]) == ("forget/0", "forget/1")


def test_a_question_that_stands_twice_is_in_one_split(asked):
    """The first one's, also where blanks give the second another hash."""
    twice = asked.forget + [row | {"question": f" {row['question']} "} for row in asked.forget]
    splits = [row["split"] for row in rows_of(own_inputs(twice, asked.retain))]
    assert splits[: len(splits) // 2] == splits[len(splits) // 2 :] and len(set(splits)) == 2


def test_prompts_need_five_solved_questions_of_the_dev_split(asked):
    """A dev question itself is never asked, so it need not leave five others."""
    for solved, missing in ((5, False), (4, True)):
        rows = [row | {"split": "dev" if n < solved else "test"} for n, row in enumerate(asked.forget)]
        assert ("prompts" in own_inputs(rows, asked.retain).absent) == missing


def test_rows_may_come_from_a_generator(asked):
    assert (
        own_inputs(iter(asked.forget), (row for row in asked.retain)).files
        == own_inputs(asked.forget, asked.retain).files
    )


def test_a_question_that_stands_twice_is_about_one_fact(asked):
    """Or intervals over facts would narrow by copying. Other questions have facts of their own."""
    once = rows_of(own_inputs(asked.forget, asked.retain))
    shuffled = [row | {"choices": row["choices"][::-1], "answer": 3 - row["answer"]} for row in asked.forget]
    twice = rows_of(own_inputs([*asked.forget, *shuffled], asked.retain))
    assert len(twice) == 2 * len(once) and {row["fact"] for row in twice} == {row["fact"] for row in once}


def test_a_question_that_stands_twice_has_one_fact(asked):
    """Or one of its copies may be solved in the prompt of the other. The control: both name the same fact."""
    named = [row | {"id": f"again {n}", "fact": f"fact {n}"} for n, row in enumerate(asked.forget)]
    first = [{key: value for key, value in row.items() if key != "fact"} for row in asked.forget]
    with pytest.raises(ConfigError, match="stands twice, about fact .* give both the same `fact`"):
        own_inputs([*first, *named], asked.retain)
    both = [row | {"id": f"first {n}", "fact": f"fact {n}"} for n, row in enumerate(asked.forget)]
    assert len(rows_of(own_inputs([*both, *named], asked.retain))) == 2 * len(named)


def test_a_question_has_one_right_answer(asked):
    """The control is above: it may stand twice with its choices in another order."""
    other = [row | {"answer": (row["answer"] + 1) % 4} for row in asked.forget]
    with pytest.raises(ConfigError, match="stands twice, and another choice is right there; correct one of them"):
        own_inputs([*asked.forget, *other], asked.retain)


@pytest.mark.parametrize(("same", "refused"), [(1.0, True), (0.65, True), (0.5, False)])
def test_one_letter_is_not_the_answer_of_most_questions(asked, same, refused):
    """Or a model that always gives it would seem to know them."""
    rows = [row | {"answer": 0, "choices": row["choices"]} for row in asked.forget]
    others = itertools.cycle((1, 2, 3))
    rows = [row if n < same * len(rows) else row | {"answer": next(others)} for n, row in enumerate(rows)]
    with pytest.raises(ConfigError, match="A is right in .*: shuffle the choices") if refused else nullcontext():
        own_inputs(rows, asked.retain)


def test_a_table_of_questions_is_refused(asked):
    table = pd.DataFrame(asked.forget)
    with pytest.raises(ConfigError, match="--questions: a table; give its rows, such as"):
        own_inputs(table, asked.retain)
    own_inputs(table.to_dict("records"), asked.retain)


@pytest.mark.parametrize("both", ["--forget-text, --retain-text", "--forget-text, --holdout-text"])
def test_a_document_is_in_one_file_of_texts(asked, both):
    texts = {name: [f"{name} {number}" for number in range(3)] for name in ("forget", "retain", "holdout")}
    own_inputs(asked.forget, asked.retain, *texts.values())
    other = texts[both.split("--")[2].removesuffix("-text")]
    other += ["forget 1"]
    own_inputs(asked.forget, asked.retain, *texts.values())  # one may be a heading
    other += ["forget 2"]
    with pytest.raises(ConfigError, match=f"{both}: both have 'forget 1' .2 documents in all."):
        own_inputs(asked.forget, asked.retain, *texts.values())


def test_questions_to_forget_are_not_questions_to_retain(asked, tmp_path):
    copied = [*asked.retain, asked.forget[3], asked.forget[5]]
    with pytest.raises(ConfigError, match="--retain-questions: questions are in both, first .*2 in all"):
        own_inputs(asked.forget, copied)


def test_settings_of_relearning_that_are_not_given_are_the_audits_own(asked):
    """Of a benchmark, and of questions of one's own: AdamW in fp32 and batches of four."""
    for given in ({"learning_rate": 1e-3}, Relearning(learning_rate=1e-3)):
        settings = own_inputs(asked.forget, asked.retain, relearning=given).relearning
        assert settings == Relearning(learning_rate=1e-3, batch_size=4, optimizer="adamw_fp32")
    benchmark = read_catalogue(TABLE, AuditSettings)["wmdp_cyber"].relearning
    assert settings_of({"steps": [2]}, read_catalogue(TABLE, AuditSettings)["wmdp_cyber"]) == benchmark.model_copy(
        update={"steps": [2]}
    )
    with pytest.raises(ConfigError, match="--relearning: batch_size: .*greater than 0"):
        own_inputs(asked.forget, asked.retain, relearning={"batch_size": 0})


def test_a_table_is_not_read_as_plain_text(asked, tmp_path):
    file = tmp_path / "retain.csv"
    file.write_text("id,text\n1,some text\n")
    with pytest.raises(ConfigError, match="--retain-text .*retain.csv: .*write JSON lines with `text`"):
        own_inputs(asked.forget, asked.retain, retain_text=file)


@pytest.mark.parametrize("name", ["retain.ndjson", "retain.jsonl", "retain.txt"])
def test_json_lines_are_read_as_such_or_refused(asked, tmp_path, name):
    write_jsonl(tmp_path / name, asked.retain_text)
    if name.endswith("txt"):
        with pytest.raises(ConfigError, match="retain.txt: these are JSON lines; name the file retain.jsonl"):
            own_inputs(asked.forget, asked.retain, retain_text=tmp_path / name)
    else:
        files = own_inputs(asked.forget, asked.retain, retain_text=tmp_path / name).files
        assert len(files["retain_corpus"]) + len(files["held_out_corpus"]) == len(asked.retain_text)


@pytest.mark.parametrize("end", ["\n", "\r\n", " \n"])
def test_blank_lines_part_documents_of_plain_text(asked, tmp_path, end):
    file, others = tmp_path / "retain.txt", [f"Text {n}." for n in range(9)]
    text = "One document\nof two lines.\n\n\nAnother.\n" + "\n\n".join(others)
    file.write_bytes(text.replace("\n", end).encode())
    inputs = own_inputs(asked.forget, asked.retain, retain_text=file)
    texts = [row["text"] for name in ("held_out_corpus", "retain_corpus") for row in inputs.files[name]]
    assert len(texts) == 10 and f"One document{end}of two lines." in [text.rstrip() for text in texts]


def test_what_data_do_not_allow_is_told(asked):
    absent = own_inputs(asked.forget, asked.retain).absent
    of_documents = {"relearning from the corpus", "relearning from retain documents", "membership"}
    assert absent.keys() == of_documents | set(OF_OTHER_FACTS)
    assert "--retain-text" in absent["relearning from retain documents"]
    texts = dict(forget_text=asked.forget_text, holdout_text=asked.retain_text)
    assert "membership" not in own_inputs(asked.forget, asked.retain, **texts).absent
    scattered = [row | {"subject": f"subject {n}"} for n, row in enumerate(asked.forget)]
    assert "are solved before each" in own_inputs(scattered, asked.retain).absent["prompts"]


def test_documents_about_dev_facts_are_counted(world, asked):
    """Fewer than a batch are told before the audit. Other documents, of which there are enough, do not count."""
    files = wmdp_files(world, 0)
    questions, documents = files["forget_questions"], files["forget_corpus"]
    dev = {row["fact"] for row in questions if row["split"] == "dev"}
    about = [row for row in documents if row["id"].rsplit("/", 1)[0] in dev or row["id"].rsplit("/", 2)[0] in dev]
    others = [row for row in documents if row not in about][:20]
    batch = own_inputs(questions, asked.retain).relearning.batch_size
    assert not set(OF_OTHER_FACTS) & own_inputs(questions, asked.retain, [*others, *about[:batch]]).absent.keys()
    absent = own_inputs(questions, asked.retain, [*others, *about[: batch - 1]]).absent
    told = f"gives {batch - 1} documents whose `id` begins with a dev question's `fact`"
    assert all(told in absent[name] for name in OF_OTHER_FACTS)
    assert absent["relearning from the corpus"].startswith("the facts of documents are known")


BAD = {
    "a missing column": ({"choices": None}, r"row `?.*`choices`|no `choices`"),
    "one choice": ({"choices": ["yes"]}, "has 1 choices; a question has a list of 4"),
    "choices that are no list": ({"choices": "yes or no"}, "no list of choices"),
    "no question": ({"question": None}, "question None is no text"),
    "an empty choice": ({"choices": ["yes", "no", " ", "both"]}, "are not all texts"),
    "a choice that is missing": ({"choices": ["yes", "no", None, "both"]}, "are not all texts"),
    "a choice that is no text": ({"choices": ["yes", "no", {"a": 1}, "both"]}, "are not all texts"),
    "a truth value as choice": ({"choices": ["yes", "no", True, "both"]}, "are not all texts"),
    "a right answer twice": ({"choices": ["yes", "no", "both", "yes"], "answer": 0}, "'yes' is right and stands twice"),
    "an answer out of range": (
        {"answer": 4},
        "answer 4 is neither 0 to 3 nor A to D; give one of them, counting from 0",
    ),
    "an answer of no letter": ({"answer": "E"}, "answer 'E' is neither"),
    "an answer that is a numeral": ({"answer": "1"}, "answer '1' is neither"),
    "an answer that is a truth value": ({"answer": True}, "answer True is neither"),
    "another split": ({"split": "train"}, "split 'train' is neither 'dev' nor 'test'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_question_is_refused_with_its_file_and_row(case, asked, files, capsys, tmp_path):
    change, message = BAD[case]
    rows = [dict(row) for row in asked.forget]
    rows[6] |= change
    if case == "a missing column":
        del rows[6]["choices"]
    write_jsonl(files["forget"], rows)
    with pytest.raises(ConfigError, match=message) as error:
        own_inputs(**files)
    assert "forget.jsonl" in str(error.value) and ("row 7" in str(error.value) or "line 7" in str(error.value))
    line = ["audit", "--original", "x", "--unlearned", "y", "--questions", files["forget"]]
    line += ["--retain-questions", files["retain"], "--output", tmp_path / "audit"]
    assert main(list(map(str, line))) == 2
    told = capsys.readouterr().err
    assert told.startswith("gripmoe audit: error: ") and told.count("\n") == 1
    assert not (tmp_path / "audit").exists()


def test_other_bad_inputs_are_refused(asked, files, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(ConfigError, match="empty.jsonl: 0 questions; an interval needs 20"):
        own_inputs(empty, files["retain"])
    with pytest.raises(ConfigError, match="--retain-text .*empty.jsonl: there is no text"):
        own_inputs(files["forget"], files["retain"], retain_text=empty)
    with pytest.raises(ConfigError, match="--questions, --retain-questions: both are"):
        own_inputs(files["forget"], files["forget"])
    with pytest.raises(ConfigError, match="none.jsonl: cannot be read"):
        own_inputs(tmp_path / "none.jsonl", files["retain"])
    with pytest.raises(ConfigError, match="`text` of document 'retain/1' is no text"):
        own_inputs(files["forget"], files["retain"], retain_text=[{"text": "A fact."}, {"text": None}])
    twice = [row | {"id": "q"} for row in asked.forget]
    with pytest.raises(ConfigError, match="row 2: the id 'q' stands twice"):
        own_inputs(twice, asked.retain)
    numbered = list(enumerate(asked.forget))
    with pytest.raises(ConfigError, match="no question is of the split 'test'"):
        own_inputs([row | {"split": "dev"} for row in asked.forget], asked.retain)
    with pytest.raises(ConfigError, match=r"of the split 'test' are about 1 facts \(column `fact`\)"):
        halves = [row | {"fact": ("physics", "biology")[n % 2], "split": ("dev", "test")[n % 2]} for n, row in numbered]
        own_inputs(halves, asked.retain)
    with pytest.raises(ConfigError, match="row 2: fact 'biology' has questions in both splits"):
        own_inputs([row | {"fact": "biology", "split": ("dev", "test")[n % 2]} for n, row in numbered], asked.retain)
    with pytest.raises(ConfigError, match="--forget-text: the id 'fact/1' stands twice"):
        own_inputs(
            asked.forget, asked.retain, forget_text=[{"id": "fact/1", "text": "One."}, {"id": "fact/1", "text": "Two."}]
        )
