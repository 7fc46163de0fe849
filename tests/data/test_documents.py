import itertools
import json

import pytest

from gripmoe.attacks.prompts import rewritten
from gripmoe.data import corpora
from gripmoe.data.corpora import in_batches, load_corpus
from gripmoe.data.documents import PASS_OVERHEAD, Row, collate, encode, encode_all, length_buckets, opening
from gripmoe.evaluation.muse import News
from gripmoe.evaluation.questions import load_questions
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import write_jsonl
from gripmoe.worlds.benchmark import question_rows


def test_only_scored_spans_have_labels(tokenizer):
    row = encode(tokenizer, [("A. B.", False), (" C", True)])
    letters = [tokenizer(c)["input_ids"][0] for c in "ABC."]
    assert row.ids == [letters[0], letters[3], letters[1], letters[3], letters[2]]
    assert row.labels == [-100] * 4 + [letters[2]]
    assert encode(tokenizer, [("A. B.", True)], max_length=2).ids == row.ids[:2]


def test_a_document_begins_as_the_tokenizer_says(tokenizer, bos_tokenizer):
    """With its BOS once, not scored; the embedded world's tokenizer adds none."""
    spans = [("A. B.", False), (" C", True)]
    without, begun = encode(tokenizer, spans), encode(bos_tokenizer, spans)
    assert opening(tokenizer) == [] and without.ids[0] != tokenizer.bos_token_id
    assert begun.ids == bos_tokenizer("A. B. C")["input_ids"] == [tokenizer.bos_token_id, *without.ids]
    assert begun.labels == [-100, *without.labels]
    assert encode(bos_tokenizer, [("A B", True)], max_length=2).ids == begun.ids[:2]
    assert encode(bos_tokenizer, [("<bos>A. B.", False), (" C", True)]) == begun, "a chat template has written it"


def test_documents_together_are_encoded_as_each_alone(tokenizer, bos_tokenizer):
    """With spans of different numbers, an empty one, and one that a chat template has written."""
    documents = [
        ("0", [("A. B.", False), (" C", True)]), ("1", [("", False), ("B", True)]), ("2", [("<bos>A", True)]),
        ("3", [("C A", True)]), ("4", [("A", False), (" B", True), (" C.", False)]),
    ]  # fmt: skip
    for each in (tokenizer, bos_tokenizer):
        together = encode_all(each, documents, max_length=4)
        assert together == [encode(each, spans, name, max_length=4) for name, spans in documents]
        assert len({tuple(row.ids) for row in together}) == len(documents)
    assert encode_all(tokenizer, []) == []


def test_a_corpus_is_tokenized_in_parts_and_no_further_than_its_limit(tmp_path, tokenizer, monkeypatch):
    write_jsonl(tmp_path / "corpus.jsonl", [{"id": str(n), "text": "A B C " * (n + 2)} for n in range(5)])
    together, parts = load_corpus(tmp_path / "corpus.jsonl", tokenizer, 4, whole=True), []

    def noted(tokenizer, documents):
        parts.append(list(documents))
        return encode_all(tokenizer, parts[-1])

    monkeypatch.setattr(corpora, "DOCUMENTS_PER_CALL", 2)
    monkeypatch.setattr(corpora, "encode_all", noted)
    assert load_corpus(tmp_path / "corpus.jsonl", tokenizer, 4, whole=True) == together
    assert [len(part) for part in parts] == [2, 2, 1]
    parts.clear()
    assert load_corpus(tmp_path / "corpus.jsonl", tokenizer, 4, limit=2, whole=True) == together[:2]
    assert load_corpus(tmp_path / "corpus.jsonl", tokenizer, 4, limit=3, whole=True) == together[:3]
    assert [len(part) for part in parts] == [2, 2]


def test_every_piece_of_a_document_begins_with_the_bos(tmp_path, tokenizer, bos_tokenizer):
    write_jsonl(tmp_path / "c.jsonl", [{"id": "x", "text": "A B C D E F G"}])
    (entire,) = load_corpus(tmp_path / "c.jsonl", tokenizer, 100)
    pieces = load_corpus(tmp_path / "c.jsonl", bos_tokenizer, 5, whole=True)
    assert {piece.ids[0] for piece in pieces} == {tokenizer.bos_token_id}
    assert [i for piece in pieces for i in piece.ids[1:]] == entire.ids and all(len(p.ids) <= 5 for p in pieces)
    assert [i for piece in pieces for i in piece.labels[1:]] == entire.labels
    (cut,) = load_corpus(tmp_path / "c.jsonl", bos_tokenizer, 5)
    assert cut.ids == [tokenizer.bos_token_id, *entire.ids[:4]] and cut.labels[0] == -100


def test_collate_pads_on_the_right():
    batch = collate([Row("a", [5, 6, 7], [-100, 6, 7]), Row("b", [5], [5])], pad_id=0)
    assert batch.input_ids.tolist() == [[5, 6, 7], [5, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.labels.tolist() == [[-100, 6, 7], [5, -100, -100]]


def test_buckets_hold_every_row_within_the_limit():
    rows = [Row(str(n), [1] * n, [1] * n) for n in (9, 1, 4, 4, 30, 2)]
    buckets = length_buckets(rows, 10)
    assert sorted(row.id for bucket in buckets for row in bucket) == sorted(row.id for row in rows)
    assert all(len(b) == 1 or len(b) * max(len(r.ids) for r in b) <= 10 for b in buckets)


def test_buckets_cost_the_least_of_all_cuts():
    lengths = (3, 5, 6, 20, 22, 23, 60, 64)
    rows = [Row(str(n), [1] * n, [1] * n) for n in lengths]

    def cost(groups):
        return sum(len(group) * max(group) + PASS_OVERHEAD for group in groups)

    every_cut = []
    for cuts in itertools.product((False, True), repeat=len(lengths) - 1):
        groups = [[lengths[0]]]
        for length, cut in zip(lengths[1:], cuts, strict=True):
            groups = [*groups, [length]] if cut else [*groups[:-1], [*groups[-1], length]]
        if all(len(group) * max(group) <= 150 for group in groups):
            every_cut.append(cost(groups))
    buckets = length_buckets(rows, 150)
    assert cost([[len(row.ids) for row in bucket] for bucket in buckets]) == min(every_cut) < max(every_cut)


ASKED = {"id": "x", "prompt": "Question: A B C D", "text": "A"}
MISTAKES = {
    "no text below blank lines": ([{"id": "x", "text": "A B"}, None, None, {"id": "y", "text": ""}], r"\(line 4\)"),
    "no text": ([{"id": "x", "text": "A B"}, {"id": "y", "text": ""}], r"document 'y' has no text \(line 2\)"),
    "one token": ([{"id": "x", "text": "A"}], "document 'x' has fewer than two tokens"),
    "a prompt that fills the row": ([ASKED], "the prompt of document 'x' fills `max_length` 3"),
    "no id": ([{"text": "A B"}], "each document needs an `id` of its own"),
    "an id twice": ([{"id": "x", "text": "A B"}] * 2, r"an `id` of its own \(got 'x'\) \(line 2\)"),
    "a text that is none": ([{"id": "x", "text": 5}], r"`text` of document 'x' is 5 \(line 1\); give a text"),
    "a prompt that is none": ([{"id": "x", "prompt": [1], "text": "A B"}], r"`prompt` of document 'x' is \[1\]"),
    "an id that is none": ([{"id": ["x"], "text": "A B"}], r"`id` is \['x'\] \(line 1\); give a text or a number"),
    "nothing": ([], "there is no document"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_corpus_errors_name_the_file(mistake, tmp_path, tokenizer):
    documents, said = MISTAKES[mistake]
    lines = ["" if document is None else json.dumps(document) for document in documents]
    (tmp_path / "c.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"c.jsonl: .*{said}"):
        load_corpus(tmp_path / "c.jsonl", tokenizer, 3)


def test_numbers_name_documents_as_their_text_does(tmp_path, tokenizer):
    write_jsonl(tmp_path / "c.jsonl", [{"id": 7, "text": "A B"}, {"id": "8", "text": "A B"}])
    assert [row.id for row in load_corpus(tmp_path / "c.jsonl", tokenizer, 4)] == ["7", "8"]
    write_jsonl(tmp_path / "c.jsonl", [{"id": 7, "text": "A B"}, {"id": "7", "text": "A B"}])
    with pytest.raises(ConfigError, match=r"each document needs an `id` of its own \(got '7'\)"):
        load_corpus(tmp_path / "c.jsonl", tokenizer, 4)


def test_opening_tokens_may_not_fill_a_row(tmp_path, bos_tokenizer):
    write_jsonl(tmp_path / "c.jsonl", [{"id": "x", "text": "A B C D"}])
    with pytest.raises(ConfigError, match="c.jsonl: `max_length` 1 leaves no room beside 1 opening tokens"):
        load_corpus(tmp_path / "c.jsonl", bos_tokenizer, 1, whole=True)


def test_a_prompt_may_not_fill_a_piece_either(tmp_path, tokenizer):
    write_jsonl(tmp_path / "c.jsonl", [ASKED | {"text": "A B C D"}])
    assert load_corpus(tmp_path / "c.jsonl", tokenizer, 10)
    with pytest.raises(ConfigError, match="the prompt of document 'x' fills `max_length` 3"):
        load_corpus(tmp_path / "c.jsonl", tokenizer, 3, whole=True)


def test_a_row_without_what_a_step_reads_is_named_with_its_line(tmp_path, tokenizer, world):
    """Of documents, questions, news and rewrites; whole files are read."""
    question = question_rows(world, world.facts.forget[:1], orders=1, seed=0)[0]
    document = {"id": "a", "prompt": "", "text": "A B"}
    news = {
        "knowmem": {"id": "a", "part": "forget", "split": "dev", "question": "A", "answer": "B"},
        "verbmem": {"id": "a", "split": "dev", "prompt": "A", "gt": "B"},
        "privleak": {"id": "a", "part": "forget", "text": "A B"},
    }
    for name, row in news.items():
        write_jsonl(tmp_path / f"{name}.jsonl", [row])
    files = [
        ("corpus", document, ("text",), lambda file: load_corpus(file, tokenizer, 10)),
        ("questions", question, tuple(question), load_questions),
        ("rewrites", {"id": question["id"], "prompt": "Answer:"}, ("id", "prompt"), lambda f: rewritten(f, [question])),
        *((name, row, tuple(row), lambda file: News.load(file.parent)) for name, row in news.items()),
    ]
    for name, row, keys, read in files:
        file = tmp_path / f"{name}.jsonl"
        write_jsonl(file, [row])
        read(file)
        for key in keys:
            write_jsonl(file, [row, {k: v for k, v in row.items() if k != key}])
            with pytest.raises(ConfigError, match=rf"{name}.jsonl: .* no `{key}` \(line 2\); each needs .*: correct"):
                read(file)
        write_jsonl(file, [row])


def test_a_longer_document_is_cut_or_comes_in_pieces(tmp_path, tokenizer):
    write_jsonl(tmp_path / "c.jsonl", [{"id": "x", "text": "A B C D E F G"}])
    (entire,) = load_corpus(tmp_path / "c.jsonl", tokenizer, 100, end_id=1)
    assert entire.ids[-1] == entire.labels[-1] == 1
    (cut,) = load_corpus(tmp_path / "c.jsonl", tokenizer, 5, end_id=1)
    assert cut.id == "x" and cut.ids == entire.ids[:5]
    pieces = load_corpus(tmp_path / "c.jsonl", tokenizer, 5, whole=True, end_id=1)
    assert len(pieces) > 1 and [i for piece in pieces for i in piece.ids] == entire.ids


def test_batches_keep_the_order_of_rows():
    rows = [Row(str(i), [1] * (i % 7 + 2), [1] * (i % 7 + 2)) for i in range(3000)]
    batches = in_batches(rows, 0)
    assert len(batches) > 1 and [i for b in batches for i in b.row_ids] == [row.id for row in rows]
    assert all(batch.input_ids.numel() <= 4000 for batch in batches)


def test_processes_share_the_rows_in_as_many_batches(monkeypatch):
    """Their lengths differ, so that each alone would make batches of its own."""
    monkeypatch.setattr("gripmoe.data.corpora.TOKENS_PER_BATCH", 60)
    rows = [Row(str(i), [1] * (30 if i % 2 else 3), [1] * (30 if i % 2 else 3)) for i in range(12)]
    first, second = (in_batches(rows, 0, rank, 2) for rank in (0, 1))
    assert len(first) == len(second) == 3 and len(in_batches(rows[::2], 0)) == 1
    assert [[row for batch in part for row in batch.row_ids] for part in (first, second)] == [
        [row.id for row in rows[rank::2]] for rank in (0, 1)
    ]
    with pytest.raises(ValueError, match="12 rows cannot be split over 5 processes"):
        in_batches(rows, 0, 0, 5)


def test_a_document_is_not_called_like_a_part_of_a_longer_one(tokenizer, tmp_path):
    """NPO finds original probabilities by name."""
    long, short = " ".join(["a b c"] * 3), "a b"
    write_jsonl(tmp_path / "c.jsonl", [{"id": "x", "text": long}, {"id": "x#0", "text": short}])
    with pytest.raises(ConfigError, match=r"c.jsonl: 'x#0' is also the name of a part of 'x', a long one; rename it"):
        load_corpus(tmp_path / "c.jsonl", tokenizer, 5, whole=True)
    assert len(load_corpus(tmp_path / "c.jsonl", tokenizer, 5)) == 2
