"""Questions and texts of one's own as a data folder, and what is refused, with file, row and remedy."""

from pathlib import Path

import pytest

from gripmoe.auditing.inputs import OF_OTHER_FACTS, TABLE, Named, named, own
from gripmoe.cli.main import main
from gripmoe.config.grid import Project
from gripmoe.config.reading import read_catalogue
from gripmoe.evaluation.questions import load_questions
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import write_jsonl
from gripmoe.worlds.benchmark import wmdp_files

pytest_plugins = "audit_pairs"
CONFIG = Path(__file__).parents[2] / "workflow" / "config"


def test_named_benchmarks_are_those_of_the_workflow():
    for name, row in read_catalogue(TABLE, Named).items():
        project = Project(CONFIG, "tiny" if name == "wmdp_tiny" else "paper")
        assert row.benchmark == project.benchmarks[name] and row.relearning == project.world.relearning


def test_a_named_benchmark_has_the_files_of_prepare_data(world):
    inputs = named("wmdp_tiny")
    assert inputs.files == wmdp_files(world, 0) and set(inputs.absent) == {"relearning from the corpus"}


def test_questions_of_ones_own_become_a_data_folder(asked, files, tmp_path):
    inputs = own(**files)
    inputs.write(tmp_path / "data")
    for kind in ("forget", "retain"):
        rows = load_questions(tmp_path / "data" / f"{kind}_questions.jsonl")
        assert [row["question"] for row in rows] == [row["question"] for row in getattr(asked, kind)]
        assert {row["exposure"] == "forget" for row in rows} == {kind == "forget"}
        assert {row["split"] for row in rows} == {"dev", "test"} and len({row["fact"] for row in rows}) == len(rows)
    held_out, kept = inputs.files["held_out_corpus"], inputs.files["retain_corpus"]
    assert len(held_out) == 6 and len(kept) == 54 and not {row["id"] for row in held_out} & {row["id"] for row in kept}
    assert own(asked.forget, asked.retain, forget_text=asked.forget_text).files["forget_questions"] == rows_of(inputs)


def rows_of(inputs):
    return inputs.files["forget_questions"]


def test_columns_of_ones_own_are_kept(world):
    rows = wmdp_files(world, 0)["forget_questions"]
    assert rows_of(own(rows, wmdp_files(world, 0)["retain_questions"])) == rows


def test_answers_may_be_letters(asked):
    letters = [row | {"answer": "ABCD"[row["answer"]]} for row in asked.forget]
    assert rows_of(own(letters, asked.retain)) == rows_of(own(asked.forget, asked.retain))


@pytest.mark.parametrize("end", ["\n", "\r\n", " \n"])
def test_blank_lines_part_documents_of_plain_text(asked, tmp_path, end):
    file, others = tmp_path / "retain.txt", [f"Text {n}." for n in range(9)]
    text = "One document\nof two lines.\n\n\nAnother.\n" + "\n\n".join(others)
    file.write_bytes(text.replace("\n", end).encode())
    inputs = own(asked.forget, asked.retain, retain_text=file)
    texts = [row["text"] for name in ("held_out_corpus", "retain_corpus") for row in inputs.files[name]]
    assert len(texts) == 10 and f"One document{end}of two lines." in [text.rstrip() for text in texts]


def test_what_data_do_not_allow_is_told(asked):
    absent = own(asked.forget, asked.retain).absent
    of_documents = {"relearning from the corpus", "relearning from retain documents", "membership"}
    assert absent.keys() == of_documents | set(OF_OTHER_FACTS)
    assert "--retain-text" in absent["relearning from retain documents"]
    texts = dict(forget_text=asked.forget_text, holdout_text=asked.retain_text)
    assert "membership" not in own(asked.forget, asked.retain, **texts).absent
    scattered = [row | {"subject": f"subject {n}"} for n, row in enumerate(asked.forget)]
    assert "are solved before each" in own(scattered, asked.retain).absent["prompts"]


def test_documents_about_dev_facts_are_counted(world, asked):
    """Fewer than a batch are told before the audit. Other documents, of which there are enough, do not count."""
    files = wmdp_files(world, 0)
    questions, documents = files["forget_questions"], files["forget_corpus"]
    dev = {row["fact"] for row in questions if row["split"] == "dev"}
    about = [row for row in documents if row["id"].rsplit("/", 1)[0] in dev or row["id"].rsplit("/", 2)[0] in dev]
    others = [row for row in documents if row not in about][:20]
    batch = own(questions, asked.retain).relearning.batch_size
    assert not set(OF_OTHER_FACTS) & own(questions, asked.retain, [*others, *about[:batch]]).absent.keys()
    absent = own(questions, asked.retain, [*others, *about[: batch - 1]]).absent
    told = f"gives {batch - 1} documents whose `id` begins with a dev question's `fact`"
    assert all(told in absent[name] for name in OF_OTHER_FACTS)
    assert absent["relearning from the corpus"].startswith("the facts of documents are known")


BAD = {
    "a missing column": ({"choices": None}, r"row `?.*`choices`|no `choices`"),
    "one choice": ({"choices": ["yes"]}, "has 1 choices; a question has a list of 4"),
    "choices that are no list": ({"choices": "yes or no"}, "no list of choices"),
    "an answer out of range": ({"answer": 4}, "answer 4 is out of range; give 0 to 3"),
    "an answer of no letter": ({"answer": "E"}, "answer 'E' is out of range"),
    "an answer that is a truth value": ({"answer": True}, "answer True is out of range"),
    "another split": ({"split": "train"}, "split 'train' is neither 'dev' nor 'test'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_question_is_refused_with_its_file_and_row(case, asked, files, capsys, tmp_path):
    change, message = BAD[case]
    rows = [dict(row) for row in asked.forget]
    rows[6] |= change
    if None in change.values():
        del rows[6]["choices"]
    write_jsonl(files["forget"], rows)
    with pytest.raises(ConfigError, match=message) as error:
        own(**files)
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
        own(empty, files["retain"])
    with pytest.raises(ConfigError, match="--retain-text .*empty.jsonl: there is no text"):
        own(files["forget"], files["retain"], retain_text=empty)
    with pytest.raises(ConfigError, match="--questions, --retain-questions: both are"):
        own(files["forget"], files["forget"])
    with pytest.raises(ConfigError, match="none.jsonl: cannot be read"):
        own(tmp_path / "none.jsonl", files["retain"])
    with pytest.raises(ConfigError, match="`text` of document 'retain/1' is no text"):
        own(files["forget"], files["retain"], retain_text=[{"text": "A fact."}, {"text": None}])
    twice = [row | {"id": "q"} for row in asked.forget]
    with pytest.raises(ConfigError, match="row 2: the id 'q' stands twice"):
        own(twice, asked.retain)
    with pytest.raises(ConfigError, match="no question is of the split 'test'"):
        own([row | {"split": "dev"} for row in asked.forget], asked.retain)
    with pytest.raises(ConfigError, match=r"of the split 'test' are about 1 facts \(column `fact`\)"):
        halves = [row | {"fact": "biology", "split": ("dev", "test")[n % 2]} for n, row in enumerate(asked.forget)]
        own(halves, asked.retain)
