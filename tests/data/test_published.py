"""The real loaders on small local clones of the data sets' schema, with invented rows."""

import copy
from collections import Counter

import datasets
import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import gripmoe
from conftest import clone, small_model
from gripmoe.config.benchmarks import PublishedData
from gripmoe.config.models import PublishedModel
from gripmoe.data.published import benchmark_files, load_rows
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_json, write_json
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import load_model, load_published, save_model, weights_digest


def invented(number: int) -> list[dict]:
    """Questions, of which 30 are enough to forget."""
    return [
        {"question": f"Which {i} ?", "choices": list("abcd"), "answer": i % 4, "subject": "world_history"}
        for i in range(number)
    ]


@pytest.fixture
def data(tmp_path):
    questions = invented(50)
    forget, retain = (
        [{"text": ""}, {"text": "= Heading ="}]
        + [{"text": f"An invented document to {what} number {i} " * 4} for i in range(20)]
        for what in ("forget", "retain")
    )
    targets = {"choices": ["Yes .", "No ."], "labels": [1, 0]}
    truths = [{"question": "Is it ?", "mc1_targets": targets, "mc2_targets": targets, "source": "x"}]
    return PublishedData(
        source="published",
        forget_questions=clone(tmp_path / "wmdp", "wmdp-cyber", "test", questions[:30]),
        retain_questions=clone(
            tmp_path / "mmlu", "all", "test", questions[30:39], validation=questions[39:43], dev=questions[43:]
        ),
        forget_corpus=clone(tmp_path / "corpora", "cyber-forget-corpus", "train", forget),
        retain_corpus=clone(tmp_path / "wikitext", "wikitext-2-raw-v1", "test", retain),
        truthfulqa=clone(tmp_path / "truthfulqa", "multiple_choice", "validation", truths),
    )


def test_local_clones_become_the_files_of_a_benchmark(data):
    files = benchmark_files(data)
    assert len(files["forget_questions"]) == 30 and len({row["id"] for row in files["retain_questions"]}) == 20
    assert Counter(row["split"] for row in files["retain_questions"]) == {"test": 9, "dev": 4, "shots": 7}
    assert files["retain_questions"][0]["subject"] == "world history"
    assert files["forget_questions"][1]["answer"] == 1
    assert files["truthfulqa"][0]["mc2_targets"]["labels"] == [1, 0]
    assert len(files["forget_corpus"]) == 20, "headings and blank lines are no documents"
    held_out = {row["id"] for row in files["held_out_corpus"]}
    assert held_out and not held_out & {row["id"] for row in files["retain_corpus"]}


def test_the_first_retain_documents_are_of_all_articles(data, tmp_path):
    """As Methods A and B take them. WikiText keeps the lines of an article together, as forget documents here do."""
    texts = [{"text": f"Article {number // 20:02} , line {number} . " * 4} for number in range(200)]
    path = clone(tmp_path / "articles", "wikitext-2-raw-v1", "test", texts)
    others = [{"text": f"{row['text']} Other ."} for row in texts]
    same = clone(tmp_path / "same", "cyber-forget-corpus", "train", others)
    changed = data.model_copy(update={"retain_corpus": path, "forget_corpus": same})
    files = [benchmark_files(changed) for _ in range(2)]
    assert files[0] == files[1]
    articles = {name: {row["text"][:10] for row in files[0][name][:40]} for name in ("retain_corpus", "forget_corpus")}
    assert len(articles["retain_corpus"]) == 10 and len(articles["forget_corpus"]) == 2
    documents = files[0]["retain_corpus"] + files[0]["held_out_corpus"]
    assert {row["id"]: row["text"] for row in documents} == {
        f"retain/{number}": row["text"].strip() for number, row in enumerate(texts)
    }


WRONG_TRUTHS = [
    {"mc1_targets": {"choices": ["Yes .", "No ."], "labels": [0, 1]}},  # the harness takes the first for true
    {"mc1_targets": None},
    {"mc2_targets": {"choices": ["Yes .", "No ."], "labels": [1]}},
    {"mc2_targets": {"choices": ["Yes .", "No ."], "labels": [1, 1]}},
]


@pytest.mark.parametrize("change", WRONG_TRUTHS)
def test_a_question_of_truthfulqa_that_cannot_be_scored_is_named(data, tmp_path, change):
    targets = {"choices": ["Yes .", "No ."], "labels": [1, 0]}
    good = {"question": "Is it ?", "mc1_targets": targets, "mc2_targets": targets}
    path = clone(tmp_path / "bad", "multiple_choice", "validation", [good, good | change])
    with pytest.raises(ConfigError, match=f"data.truthfulqa: row 1: `{next(iter(change))}` is"):
        benchmark_files(data.model_copy(update={"truthfulqa": path}))


def test_dates_are_read_as_they_are_written(data, tmp_path):
    """The control is what datasets makes of them."""
    dates = ["1999-01-01", "2000-01-01", "2001-01-01", "2002-01-01"]
    rows = [{**question, "choices": dates} for question in invented(30)]
    path = clone(tmp_path / "dates", "wmdp-cyber", "test", rows)
    files = benchmark_files(data.model_copy(update={"forget_questions": path, "rows": {"forget_questions": 30}}))
    assert [row["choices"] for row in files["forget_questions"]] == [dates] * 30
    table = datasets.load_dataset(path, "wmdp-cyber", split="test", cache_dir=str(tmp_path / "cache"))
    assert table[0]["choices"] != dates


def test_a_folder_is_read_as_it_is_now_and_not_as_another_of_its_name_was(tmp_path):
    """As after a second download, or one to elsewhere: name, card and number of rows are the same."""
    for parent, answer in (("first", 0), ("first", 1), ("second", 2)):
        path = clone(tmp_path / parent / "wmdp", "wmdp-cyber", "test", [{"answer": answer}])
        table = load_rows(path, "wmdp-cyber", "test", ("answer",), revision=None, key="data.forget_questions")
        assert [row["answer"] for row in table] == [answer]


def test_missing_column_is_named(data, tmp_path):
    path = clone(tmp_path / "bad", "wmdp-cyber", "test", [{"question": "x", "answer": 0}])
    with pytest.raises(
        ValueError, match="yaml: data.forget_questions: .* lacks choices; it has question, answer; rename or add"
    ):
        benchmark_files(data.model_copy(update={"forget_questions": path}))


WRONG_QUESTIONS = [
    ({"choices": list("abcdef")}, "forget/0 .'Which 0 .'.: 6 choices and answer 0; a question has 4 choices"),
    ({"choices": list("abc")}, "3 choices and answer 0"),
    ({"answer": 7}, "4 choices and answer 7; .* 0 to 3"),
    ({"answer": "B"}, "4 choices and answer 'B'"),
]


@pytest.mark.parametrize("change, message", WRONG_QUESTIONS)
def test_a_question_that_no_letter_answers_is_named(data, tmp_path, change, message):
    first, *others = invented(30)
    path = clone(tmp_path / "bad", "wmdp-cyber", "test", [first | change, *others])
    with pytest.raises(ValueError, match=message):
        benchmark_files(data.model_copy(update={"forget_questions": path}))


def test_questions_that_all_have_one_letter_are_named(data, tmp_path):
    """Probes could not be fitted to them, after hours of unlearning."""
    path = clone(tmp_path / "one", "wmdp-cyber", "test", [{**row, "answer": 2} for row in invented(30)])
    with pytest.raises(ConfigError, match="data.forget_questions: .*one has one letter as the answer of all"):
        benchmark_files(data.model_copy(update={"forget_questions": path}))


def test_too_few_questions_and_documents_are_named(data, tmp_path):
    """Those that suffice are the control: the data of each other test."""
    path = clone(tmp_path / "few", "wmdp-cyber", "test", invented(6))
    with pytest.raises(ConfigError, match="data.forget_questions: .*few has 6 questions. .* at least 5"):
        benchmark_files(data.model_copy(update={"forget_questions": path}))
    path = clone(tmp_path / "one", "wikitext-2-raw-v1", "test", [{"text": "A document . " * 9}])
    with pytest.raises(ConfigError, match="data.retain_corpus: .*one has one document"):
        benchmark_files(data.model_copy(update={"retain_corpus": path}))


NO_TEXTS = [
    ("forget_questions", {"question": None}, "data.forget_questions: question forget/1: `question` is None"),
    (
        "forget_questions",
        {"choices": None},
        "data.forget_questions: question forget/1 .*`choices` is None; give a list",
    ),
    ("forget_questions", {"choices": ["a", "b", None, "d"]}, "question forget/1 .*`choices` is .*None.*; give a list"),
    ("retain_questions", {"subject": None}, "question retain/1: `subject` is None and no text"),
    ("forget_corpus", {"text": None}, "data.forget_corpus: `text` of row 1 is None and no text: give it one"),
    ("retain_corpus", {"text": {"is": "a structure"}}, "data.retain_corpus: `text` of row 1 is {.* and no text"),
]
WHERE = {
    "forget_questions": ("wmdp-cyber", "test"),
    "retain_questions": ("all", "test"),
    "forget_corpus": ("cyber-forget-corpus", "train"),
    "retain_corpus": ("wikitext-2-raw-v1", "test"),
}


@pytest.mark.parametrize("key, change, message", NO_TEXTS)
def test_a_row_without_a_text_is_named(data, tmp_path, key, change, message):
    rows = [{**question, "text": f"Text {number} . " * 9} for number, question in enumerate(invented(90))]
    more = {"validation": rows[80:85], "dev": rows[85:]} if key == "retain_questions" else {}
    rows = rows[50:80] if more else rows[:30]  # what is to be forgotten has the first
    benchmark_files(data.model_copy(update={key: clone(tmp_path / "good", *WHERE[key], rows, **more)}))
    rows[1] |= change
    path = clone(tmp_path / "bad", *WHERE[key], rows, **more)
    with pytest.raises(ConfigError, match=message):
        benchmark_files(data.model_copy(update={key: path}))


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
UNREADABLE = [
    ("parquet", POINTER),
    ("parquet", "PAR1 and no more"),
    ("jsonl", POINTER),
    ("jsonl", '{"text": "a"}\n{"text": 1\n'),
    ("jsonl", '{"text": "a"}\n{"text": "b\n{"text": "c"}\n'),
    ("jsonl", ""),
    ("csv", 'text\na\n"b,c,\n1,2,3\n'),
]


@pytest.mark.parametrize("ending, content", UNREADABLE)
def test_a_file_that_holds_no_rows_is_named(tmp_path, ending, content):
    """As a pointer of git-lfs in the place of the file."""
    (tmp_path / f"x.{ending}").write_text(content)
    card = f"---\nconfigs:\n- config_name: c\n  data_files:\n  - split: train\n    path: x.{ending}\n---\n"
    (tmp_path / "README.md").write_text(card)
    remedy = rf"A file there is damaged or a Git LFS pointer: .*download {tmp_path} again .*`git lfs`"
    with pytest.raises(ConfigError, match=rf"data.forget_corpus: cannot read .* \(c, train\): .{{9,}}\. {remedy}"):
        load_rows(str(tmp_path), "c", "train", ("text",), revision=None, key="data.forget_corpus")


def test_a_corpus_without_documents_is_named(data, tmp_path):
    path = clone(tmp_path / "short", "cyber-forget-corpus", "train", [{"text": "Short ."}] * 3)
    with pytest.raises(ValueError, match="data.forget_corpus: none of its 3 texts has 50 characters"):
        benchmark_files(data.model_copy(update={"forget_corpus": path}))


def test_documents_that_are_left_out_are_counted(data, tmp_path, capsys):
    texts = [
        {"text": "Short ."},
        *({"text": f"Document {number} is long enough for the corpus of forget documents ."} for number in range(3)),
    ]
    path = clone(tmp_path / "mixed", "cyber-forget-corpus", "train", texts)
    files = benchmark_files(data.model_copy(update={"forget_corpus": path}))
    assert len(files["forget_corpus"]) == 3
    assert "data.forget_corpus: 1 of 4 texts are left out: below 50 characters" in capsys.readouterr().err


def test_questions_that_cannot_be_scored_are_left_out_and_named(data, tmp_path, capsys):
    """The right choice stands twice, or nothing is asked. A wrong choice may stand twice: nobody is misled by it."""
    rows = invented(30)
    rows[3] |= {"choices": ["a", "b", "c", " a"], "answer": 0}
    rows[4] |= {"question": "  "}
    rows[5] |= {"choices": ["a", "b", "b", "d"], "answer": 0}
    path = clone(tmp_path / "some", "wmdp-cyber", "test", rows)
    files = benchmark_files(data.model_copy(update={"forget_questions": path, "rows": {"forget_questions": 30}}))
    kept = [row["id"] for row in files["forget_questions"]]
    assert kept == [f"forget/{number}" for number in range(30) if number not in (3, 4)]
    assert "data.forget_questions: 2 of 30 questions (forget/3, forget/4) are left out" in capsys.readouterr().err


def test_no_text_is_both_retained_and_held_out(data, tmp_path, capsys):
    texts = [
        {"text": f"Document {number % 20} is long enough for the corpus of retain documents ."} for number in range(60)
    ]
    path = clone(tmp_path / "repeated", "wikitext-2-raw-v1", "test", texts)
    files = benchmark_files(data.model_copy(update={"retain_corpus": path, "rows": {"retain_corpus": 60}}))
    kept, held_out = ({row["text"] for row in files[name]} for name in ("retain_corpus", "held_out_corpus"))
    assert len(kept) == 18 and len(held_out) == 2 and not kept & held_out
    first = {row["id"] for name in ("retain_corpus", "held_out_corpus") for row in files[name]}
    assert first == {f"retain/{number}" for number in range(20)}
    assert "data.retain_corpus: 40 of 60 documents are left out: they repeat another one" in capsys.readouterr().err


def test_nothing_is_asked_or_retained_that_stands_elsewhere(data, tmp_path, capsys):
    """In the prompt, among the questions of the stop rule, or in what is to be forgotten. Order of choices aside."""
    asked, texts = invented(60), [{"text": f"Document {number} " * 9} for number in range(20)]
    turned = [{**row, "choices": list("dcba"), "answer": 3 - row["answer"]} for row in asked]
    own = {
        "forget_questions": clone(tmp_path / "f", "wmdp-cyber", "test", asked[:30]),
        "retain_questions": clone(
            tmp_path / "r", "all", "test", turned[28:50], validation=turned[48:54], dev=turned[47:51]
        ),
        "forget_corpus": clone(tmp_path / "t", "cyber-forget-corpus", "train", texts[:12]),
        "retain_corpus": clone(tmp_path / "u", "wikitext-2-raw-v1", "test", texts[8:]),
    }
    files = benchmark_files(data.model_copy(update=own))
    by_split = {split: [row["question"] for row in files["retain_questions"] if row["split"] == split]
                for split in ("test", "dev", "shots")}  # fmt: skip
    assert by_split == {
        "test": [f"Which {i} ?" for i in range(30, 47)],
        "dev": [f"Which {i} ?" for i in range(51, 54)],
        "shots": [f"Which {i} ?" for i in range(47, 51)],
    }
    kept = [row["text"] for name in ("retain_corpus", "held_out_corpus") for row in files[name]]
    assert sorted(kept) == sorted(row["text"].strip() for row in texts[12:])
    told = capsys.readouterr().err
    assert "data.retain_questions (test): 2 of 22 are left out: they are to be forgotten" in told
    assert "data.retain_questions (dev): 3 of 6 are left out: they stand in an earlier split" in told
    assert "data.retain_questions (test): 3 of 20 are left out: they stand in an earlier split" in told
    assert "data.retain_corpus: 4 of 12 are left out: they are to be forgotten" in told


def test_a_decimal_among_the_choices_leaves_whole_numbers_as_they_are_written(data, tmp_path):
    rows = invented(30)
    rows[3]["choices"], rows[4]["choices"] = [1990, 1991, 1992, 1993], [0.5, 1, 2, 3]
    rows = [{**row, "choices": [i + n for n in range(4)]} if i not in (3, 4) else row for i, row in enumerate(rows)]
    path = clone(tmp_path / "numbers", "wmdp-cyber", "test", rows)
    found = benchmark_files(data.model_copy(update={"forget_questions": path}))["forget_questions"]
    assert found[3]["choices"] == ["1990", "1991", "1992", "1993"] and found[4]["choices"] == ["0.5", "1", "2", "3"]


def test_the_subject_of_own_questions_is_named_by_the_catalogue(data):
    subjects = [
        {row["subject"] for row in benchmark_files(data.model_copy(update=own))["forget_questions"]}
        for own in ({}, {"forget_subject": "colours"})
    ]
    assert subjects == [{"cybersecurity"}, {"colours"}]


def test_a_wrong_number_of_rows_is_named(data):
    with pytest.raises(ValueError, match="has 30 rows, benchmarks.yaml: data.rows says 1987"):
        benchmark_files(data.model_copy(update={"rows": {"forget_questions": 1987}}))
    with pytest.raises(ValueError, match=r"\(all, dev\) has 7 rows, benchmarks.yaml: data.rows says 285"):
        benchmark_files(data.model_copy(update={"rows": {"retain_questions": 9, "mmlu_dev": 285}}))


def test_offline_says_what_to_do(data):
    with pytest.raises(
        ValueError,
        match="data.forget_corpus: cannot read 'cais/wmdp-corpora'.*hf download --repo-type",
    ):
        benchmark_files(data.model_copy(update={"forget_corpus": "cais/wmdp-corpora"}))
    with pytest.raises(ValueError, match="'nobody/nothing'.*neither a local folder nor reachable"):
        load_published(PublishedModel(source="published", id="nobody/nothing"))


def test_a_folder_that_cannot_be_read_gets_no_advice_about_the_hub(data, tmp_path):
    """The control is above: a hub id gets it."""
    (tmp_path / "empty").mkdir()
    for folder, remedy in (("absent", "no such folder: correct the path"), ("empty", "Its README.md has to name the")):
        with pytest.raises(ConfigError, match=remedy) as raised:
            benchmark_files(data.model_copy(update={"forget_corpus": str(tmp_path / folder)}))
        assert "hf download" not in str(raised.value)


def test_offline_the_hubs_cache_is_read(data, tmp_path, monkeypatch):
    """As `hf download` leaves it: of a branch, or of a commit that the catalogue pins."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "cache" / "datasets--somebody--wmdp"
    commits = {name: name * 40 for name in "ab"}
    for answer, commit in enumerate(commits.values()):
        clone(repository / "snapshots" / commit, "wmdp-cyber", "test", [{"answer": answer}])
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commits["b"])
    for revision, answer in ((None, 1), (commits["a"], 0)):
        asked = dict(revision=revision, key="data.forget_questions")
        table = load_rows("somebody/wmdp", "wmdp-cyber", "test", ("answer",), **asked)
        assert [row["answer"] for row in table] == [answer]
    with pytest.raises(ConfigError, match="data.forget_questions: cannot read 'somebody/wmdp'.*hf download"):
        load_rows("somebody/wmdp", "wmdp-cyber", "test", (), revision="c" * 40, key="data.forget_questions")


@pytest.mark.parametrize("broken", ["lacks", "truncated", "unknown", "a shard less", "no json", "no tokenizer"])
def test_a_checkpoint_that_is_not_whole_is_refused(broken, tmp_path):
    """transformers would initialise what is not there at random. The control: the whole one is read."""
    model, tokenizer = gripmoe.tiny_model()
    model.save_pretrained(tmp_path, max_shard_size="100KB" if broken == "a shard less" else "1GB")
    tokenizer.save_pretrained(tmp_path)
    config = PublishedModel(source="published", id=str(tmp_path), dtype="float32")
    assert load_published(config)[0].num_parameters() == model.num_parameters()
    weights, settings = tmp_path / "model.safetensors", tmp_path / "config.json"
    if broken == "lacks":
        kept = {name: tensor for name, tensor in load_file(weights).items() if ".1.mlp.experts." not in name}
        save_file(kept, weights, metadata={"format": "pt"})
    elif broken == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif broken == "a shard less":
        next(tmp_path.glob("model-00002-of-*.safetensors")).unlink()
    elif broken == "no json":
        settings.write_text(settings.read_text()[:-10])
    elif broken == "no tokenizer":
        for file in tmp_path.glob("*token*"):
            file.unlink()
    else:
        write_json(settings, read_json(settings) | {"model_type": "nothing_moe"})
    said = {"lacks": "the weights lack model.layers.1", "no tokenizer": "the tokenizer is missing"}
    with pytest.raises(ConfigError, match=rf"{said.get(broken, 'cannot be read')}.*; download it again"):
        load_published(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "qwen2_moe"])
def test_published_checkpoint_from_a_folder(family, dtype, tmp_path, tokenizer):
    """It is read in the dtype asked for, whatever it was written in; its routers are kept in fp32 in both."""
    sizes = dict(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=16, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=8,
        num_experts_per_tok=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).float()
    model.save_pretrained(tmp_path / "hub")
    tokenizer.save_pretrained(tmp_path / "hub")
    config = PublishedModel(source="published", id=str(tmp_path / "hub"), dtype=str(dtype).removeprefix("torch."))
    digest = save_model(*load_published(config), tmp_path / "weights")
    reloaded, _ = load_model(tmp_path / "weights")
    asked = AutoModelForCausalLM.from_pretrained(tmp_path / "hub", dtype=dtype)
    MoEModel(asked)
    assert digest == weights_digest(reloaded) == weights_digest(asked)
    assert (digest == weights_digest(model)) == (dtype == torch.float32)
    assert {p.dtype for name, p in reloaded.named_parameters() if "gate.weight" not in name} == {dtype}
    assert all(theta.dtype == torch.float32 for theta in MoEModel(reloaded).thetas().values())


def test_a_tokenizer_without_padding_pads_with_its_end(tmp_path, tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.pad_token = None
    save_model(small_model(vocabulary_size=len(tokenizer)), bare, tmp_path / "model")
    assert load_model(tmp_path / "model")[1].pad_token_id == tokenizer.eos_token_id
    published = PublishedModel(source="published", id=str(tmp_path / "model"), dtype="float32")
    assert load_published(published)[1].pad_token_id == tokenizer.eos_token_id
