"""MUSE's criteria against hand-computed values, and generation against its plainest form."""

import math
import zlib

import pytest
import torch

from conftest import small_model
from gripmoe.attacks.forcing import LockStep, generation_forcing
from gripmoe.data.documents import Row
from gripmoe.data.muse import CONTEXT, news_files
from gripmoe.evaluation.muse import (
    News,
    _row_scores,
    answer_of,
    auc,
    continuations,
    knowledge_memory,
    leakage,
    lowest_mean,
    membership_scores,
    news_scores,
    privacy_leakage,
    rouge_l,
    verbatim_memory,
)
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import write_jsonl
from gripmoe.moe import MoEModel
from gripmoe.training.finetune import finetune
from gripmoe.worlds.muse import muse_tables, write_repository


@pytest.fixture(scope="module")
def files(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("muse")
    write_repository(muse_tables(world.news, 0), folder)
    return news_files(str(folder))


@pytest.fixture(scope="module")
def news(files):
    return News(files["knowmem"], files["verbmem"], files["privleak"])


@pytest.fixture
def model(tokenizer):
    return small_model(vocabulary_size=len(tokenizer), seed=1)


def test_rouge_is_f1_and_not_recall_and_does_not_stem():
    # Longest common subsequence "a b": precision 2/4, recall 2/2.
    assert rouge_l("a b c d", "a b") == pytest.approx(2 / 3)
    assert rouge_l("running", "run") == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Bob\n\nQuestion: x", "Bob"),
        ("Bob\nQuestion : x", "Bob"),
        ("Bob Question: x", "Bob "),
        ("Bob", "Bob"),
        ("Bob \n Braplir about museum", "Bob "),
        ("\nBob\nand", "Bob"),
        ("\n\nQuestion: x", ""),
        ("\n\n", ""),
    ],
)
def test_an_answer_ends_with_its_line_or_at_the_next_question(text, answer):
    assert answer_of(text) == answer


def test_an_answer_ends_also_where_a_tokenizer_decodes_spaces_between_tokens(tokenizer):
    """The embedded world's, of a model that goes on with the next question."""
    assert tokenizer.decode(tokenizer("A B\n\nQuestion: A")["input_ids"]) == "A B \n \n Question : A", "with spaces"
    for text in ("A B\n\nQuestion: A", "A B\nQuestion: A", "A B Question: A", "A B\n\nA", "A B"):
        assert answer_of(tokenizer.decode(tokenizer(text)["input_ids"])).strip() == "A B"


def test_left_padded_batches_write_what_single_prompts_do(model, tokenizer, news):
    prompts = [row["prompt"] for row in news.verbmem[:5]] + ["News", "The people of"]
    together = continuations(model, tokenizer, prompts, 12)
    assert together == [continuations(model, tokenizer, [prompt], 12)[0] for prompt in prompts]
    assert len(set(together)) > 2, "the prompts matter"


def test_generation_is_greedy_whatever_the_model_prefers(model, tokenizer):
    plain = continuations(model, tokenizer, ["News from"], 12)
    words = [tokenizer(word)["input_ids"][0] for word in plain[0].split()[:2]]
    for own in (
        {"do_sample": True, "temperature": 5.0, "repetition_penalty": 3.0, "top_k": 3},
        {"suppress_tokens": words, "no_repeat_ngram_size": 1, "min_new_tokens": 12},
    ):
        model.generation_config.update(**own)
        assert continuations(model, tokenizer, ["News from"], 12) == plain
        assert all(getattr(model.generation_config, name) == value for name, value in own.items()), "left as it was"


def test_min_k_takes_the_least_likely_tokens():
    logprob_T = torch.tensor([-1.0, -5.0, -2.0, -4.0, -3.0])
    assert lowest_mean(logprob_T, 40) == -4.5  # of five tokens, two
    assert lowest_mean(logprob_T[:1], 40) == -1.0  # one at least


def test_membership_scores_of_one_text_by_hand():
    probabilities = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])
    scores = _row_scores(Row("0", [0, 1, 1], []), probabilities.log(), "some text")
    expected = [math.log(0.25), math.log(0.8)]
    assert scores["loss"] == pytest.approx(sum(expected) / 2)
    assert scores["min_40"] == pytest.approx(expected[0])
    mean = 0.5 * math.log(0.5) + 0.5 * math.log(0.25)
    deviation = math.sqrt(0.5 * math.log(0.5) ** 2 + 0.5 * math.log(0.25) ** 2 - mean**2)
    assert scores["min_plus_20"] == pytest.approx((expected[0] - mean) / deviation, rel=1e-4)
    assert scores["zlib"] == pytest.approx(sum(expected) / 2 / len(zlib.compress(b"some text")))


def test_a_text_that_is_cut_is_compressed_as_far_as_it_is_read(model, tokenizer, news, monkeypatch):
    """Both say something of the same text: a longer end, which no score reads, changes none."""
    text = news.privleak[0]["text"]
    longer = f"{text} {news.privleak[1]['text']}"
    whole, other = membership_scores(model, tokenizer, [text, longer])["zlib"]
    assert whole != pytest.approx(other, rel=1e-2)
    monkeypatch.setattr("gripmoe.evaluation.muse.MAX_SCORED_TOKENS", 12)
    cut = membership_scores(model, tokenizer, [text, longer])
    assert all(values[0] == pytest.approx(values[1], rel=1e-4) for values in cut.values())
    words = tokenizer.decode(tokenizer(text)["input_ids"][:12])
    assert cut["zlib"][0] == pytest.approx(cut["loss"][0] / len(zlib.compress(words.encode())))


@pytest.mark.parametrize("text, tokens", [("", 0), ("News", 1)])
def test_a_text_without_a_token_to_score_is_named(model, tokenizer, bos_tokenizer, text, tokens):
    rows = [{"id": f"{part}/0", "part": part, "text": "News from Bazis"} for part in ("forget", "holdout")]
    leakage(model, tokenizer, rows)
    rows.append({"id": "holdout/1", "part": "holdout", "text": text})
    message = f"privleak.jsonl: the text of 'holdout/1' has {tokens} tokens.*remove the row, or give it more text"
    with pytest.raises(ConfigError, match=message):
        leakage(model, tokenizer, rows)
    if tokens:  # the BOS predicts it
        assert all(map(math.isfinite, leakage(model, bos_tokenizer, rows).values()))


def test_recited_and_true_text_are_read_alike(model, tokenizer, bos_tokenizer, news, monkeypatch):
    """As in the benchmark: both without special tokens; the true continuation is 128 tokens, a BOS among them."""
    article = news.verbmem[0]
    rows = [{**article, "gt": f"{article['gt']} <eos>"}]
    for reader in (tokenizer, bos_tokenizer):
        recited = reader(rows[0]["gt"])["input_ids"]
        monkeypatch.setattr("gripmoe.evaluation.muse._continued", lambda *_, ids=recited: [ids])
        assert verbatim_memory(model, reader, rows) == {article["id"]: 100.0}
    long = [{**article, "gt": " ".join(["A", "B"] * 80)}]
    written = tokenizer(" ".join(["A", "B"] * 64))["input_ids"]
    for reader, words in ((tokenizer, 128), (bos_tokenizer, 127)):
        monkeypatch.setattr("gripmoe.evaluation.muse._continued", lambda *_: [written])
        (score,) = verbatim_memory(model, reader, long).values()
        assert score == pytest.approx(100 * 2 * words / (128 + words))


def test_a_model_that_recites_a_text_and_goes_on_has_recited_it(model, tokenizer, news, monkeypatch):
    """A finetuned model ends a recited article, and forgets to within a few steps of any training."""
    article = news.verbmem[0]
    recited, further = tokenizer(article["gt"])["input_ids"], tokenizer(news.verbmem[1]["gt"])["input_ids"]
    assert len(recited) < len(recited + further) <= 128, "the benchmark's own limit cuts nothing here"
    monkeypatch.setattr("gripmoe.evaluation.muse._continued", lambda *_: [recited + further])
    assert verbatim_memory(model, tokenizer, [article]) == {article["id"]: 100.0}
    monkeypatch.setattr("gripmoe.evaluation.muse._continued", lambda *_: [further + recited])
    assert verbatim_memory(model, tokenizer, [article])[article["id"]] < 60.0, "the control"


def test_padding_does_not_count_in_membership(model, tokenizer, news):
    texts = [row["text"] for row in news.privleak[:4]] + ["News from Bazis"]
    together = membership_scores(model, tokenizer, texts)
    for number, text in enumerate(texts):
        alone = membership_scores(model, tokenizer, [text])
        assert all(together[name][number] == pytest.approx(alone[name][0], abs=1e-4) for name in alone)


def test_texts_and_prompts_begin_with_the_tokenizers_bos(model, tokenizer, bos_tokenizer, news):
    """As the benchmark reads them: the first word of a text is predicted from the BOS, and counts."""
    text, prompt = news.privleak[0]["text"], news.verbmem[0]["prompt"]
    for reader in (tokenizer, bos_tokenizer):
        ids = torch.tensor([reader(text)["input_ids"]])
        with torch.no_grad():
            loss = model(input_ids=ids, labels=ids).loss.item()
            asked = torch.tensor([reader(prompt)["input_ids"]])
            written = model.generate(asked, attention_mask=asked > 0, max_new_tokens=12, do_sample=False)
        assert membership_scores(model, reader, [text])["loss"][0] == pytest.approx(-loss, abs=1e-4)
        assert continuations(model, reader, [prompt], 12) == [reader.decode(written[0, asked.shape[1] :])]


def test_leakage_has_the_benchmarks_orientation():
    remembers, never_saw = auc([-3.0, -2.5], [-0.1, -0.2]), auc([-3.0, -2.0], [-2.5, -2.6])
    assert (remembers, never_saw) == (0.0, 0.5)
    assert privacy_leakage(remembers, never_saw) == -100.0
    assert privacy_leakage(0.75, 0.5) == 50.0, "over-unlearned texts look less likely than unseen ones"


@pytest.mark.parametrize("part", ["forget", "holdout"])
def test_a_part_without_texts_is_named(part, model, tokenizer):
    rows = [{"id": "a", "part": "forget", "text": "the port of"}, {"id": "b", "part": "holdout", "text": "a city of"}]
    leakage(model, tokenizer, rows)
    with pytest.raises(ConfigError, match=f"privleak.jsonl: no text is of the part '{part}'; add some"):
        leakage(model, tokenizer, [row for row in rows if row["part"] != part])


def test_a_model_without_numbers_has_no_leakage():
    assert math.isnan(auc([float("nan"), 1.0], [0.0, 0.0]))
    assert math.isnan(privacy_leakage(float("nan"), 0.5)) and math.isnan(privacy_leakage(0.5, 0.0))


def test_a_model_that_memorised_recites_answers_and_leaks(model, tokenizer, files, tmp_path):
    prompts = files["verbmem"][:4]
    few = [doc for doc in files["forget_corpus"] if any(doc["text"].startswith(row["prompt"]) for row in prompts)]
    holdout = [row for row in files["privleak"] if row["part"] == "holdout"]
    texts = [{"id": doc["id"], "part": "forget", "text": doc["text"]} for doc in few]
    before = leakage(model, tokenizer, texts + holdout)["auc_min_40"], verbatim_memory(model, tokenizer, prompts)
    rows = []
    for doc in few:
        ids = [*tokenizer(doc["text"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        rows.append(Row(doc["id"], ids, ids))
    finetune(
        model, rows, epochs=150, learning_rate=1e-2, batch_size=4, pad_id=0, seed=0, state_file=tmp_path / "state.pt"
    )
    recited = verbatim_memory(model, tokenizer, prompts)
    assert min(recited.values()) > 95 and max(before[1].values()) < 60
    after = leakage(model, tokenizer, texts + holdout)["auc_min_40"]
    assert privacy_leakage(after, before[0]) == pytest.approx(-100, abs=1) and before[0] > 0.2


@pytest.mark.parametrize("blocks_only", [True, False])
def test_finetuning_of_blocks_leaves_all_else_to_the_bit(blocks_only, tokenizer, files, tmp_path):
    """The control, finetuning of everything, changes attention and embeddings too."""
    model = small_model(vocabulary_size=len(tokenizer), seed=1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    ids = [tokenizer(doc["text"], add_special_tokens=False)["input_ids"] for doc in files["forget_corpus"][:8]]
    rows = [Row(str(i), row, row) for i, row in enumerate(ids)]
    options = dict(epochs=2, learning_rate=1e-2, batch_size=4, pad_id=0, seed=0, state_file=tmp_path / "state.pt")
    finetune(model, rows, blocks_only=blocks_only, **options)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    blocks = {name for name in before if ".mlp." in name}
    assert changed == (blocks if blocks_only else set(before))
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_finetuning_that_diverges_ends_and_saves_nothing(tmp_path):
    model, rows = small_model(), [Row(str(n), [n + 3] * 4, [n + 3] * 4) for n in range(4)]
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.fill_(torch.nan)
    options = dict(epochs=4, learning_rate=1e-2, batch_size=2, pad_id=0, seed=0, save_every=1)
    with pytest.raises(ConfigError, match="training diverged at step 0"):
        finetune(model, rows, **options, state_file=tmp_path / "state.pt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_finetuning_resumes_to_the_bit(optimizer, tokenizer, files, tmp_path):
    """Published models finetune in bf16 and 8 bits, at a rate that changes in every step, some with dropout."""

    def trained(state, epochs):
        model = small_model(vocabulary_size=len(tokenizer), seed=1)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        if optimizer == "adamw_8bit":
            model.bfloat16()
        ids = [tokenizer(doc["text"], add_special_tokens=False)["input_ids"] for doc in files["forget_corpus"][:8]]
        rows = [Row(str(i), row, row) for i, row in enumerate(ids)]
        options = dict(epochs=epochs, learning_rate=1e-3, batch_size=4, pad_id=0, seed=0, save_every=3)
        with torch.compiler.set_stance("force_eager"):  # compiling steps in 8 bits takes most of a minute
            return model, finetune(model, rows, state_file=state, optimizer=optimizer, **options)

    whole, losses = trained(tmp_path / "a.pt", 5)
    state = tmp_path / "b.pt"
    state.write_bytes((tmp_path / "a.pt").read_bytes())  # what a run killed after its last checkpoint leaves
    resumed, again = trained(state, 5)
    assert losses == again
    assert all(
        torch.equal(a, b) for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
    )


def test_a_batch_in_several_passes_is_one_step(tokenizer, files, tmp_path, monkeypatch):
    def losses(tokens):
        monkeypatch.setattr("gripmoe.data.corpora.TOKENS_PER_BATCH", tokens)
        model = small_model(vocabulary_size=len(tokenizer), seed=1)
        ids = [tokenizer(doc["text"], add_special_tokens=False)["input_ids"] for doc in files["forget_corpus"][30:38]]
        rows = [Row(str(i), row, row) for i, row in enumerate(ids)]
        options = dict(epochs=3, learning_rate=1e-3, batch_size=8, pad_id=0, seed=0)
        return finetune(model, rows, state_file=tmp_path / str(tokens), **options)

    assert losses(300) == pytest.approx(losses(100000), rel=1e-4)


def test_the_files_keep_what_each_is_for_apart(files):
    by_split = {}
    for pair in files["knowmem"]:
        by_split.setdefault((pair["part"], pair["split"]), set()).add(pair["question"])
    for part in ("forget", "retain"):
        dev, test, context = (by_split[part, split] for split in ("dev", "test", CONTEXT))
        assert len(context) == 10 and len(dev) > 15 and len(test) > 45 and not dev & test and not context & (dev | test)
    held_out = {row["text"] for row in files["held_out_corpus"]}
    assert not held_out & {row["text"] for row in files["retain_corpus"]}
    assert not {row["text"] for row in files["privleak"] if row["part"] == "holdout"} & {
        row["text"] for name in ("forget", "retain", "held_out") for row in files[f"{name}_corpus"]
    }


def test_a_question_that_stands_solved_in_the_prompt_is_not_asked(world, tmp_path, capsys):
    tables = muse_tables(world.news, 0)
    tables["knowmem", "retain_qa_icl"] = tables["knowmem", "retain_qa"][:10]
    write_repository(tables, tmp_path)
    pairs = [row for row in news_files(str(tmp_path))["knowmem"] if row["part"] == "retain"]
    solved, asked = (
        {row["question"] for row in pairs if (row["split"] == CONTEXT) == is_solved} for is_solved in (1, 0)
    )
    assert len(solved) == 10 and len(asked) == len(tables["knowmem", "retain_qa"]) - 10 and not solved & asked
    assert "10 questions of retain_qa are left out: they stand solved" in capsys.readouterr().err


def test_an_empty_text_is_named(world, tmp_path):
    tables = muse_tables(world.news, 0)
    tables["raw", "forget"][2]["text"] = " "
    write_repository(tables, tmp_path)
    with pytest.raises(
        ConfigError, match=r"raw, forget\): `text` of row 2 is empty: give it a text, or remove the row"
    ):
        news_files(str(tmp_path))


def test_a_missing_column_or_folder_is_named(world, tmp_path):
    write_repository(muse_tables(world.news, 0), tmp_path)
    write_jsonl(tmp_path / "verbmem" / "forget.jsonl", [{"prompt": "x"}])
    with pytest.raises(ValueError, match=r"verbmem, forget\) lacks gt; it has prompt"):
        news_files(str(tmp_path))
    write_repository(muse_tables(world.news, 0), tmp_path / "short")
    with pytest.raises(ValueError, match=r"raw, forget\) has \d+ rows, .*data.rows says 889: an incomplete download"):
        news_files(str(tmp_path / "short"), expected={"raw/forget": 889})
    few = muse_tables(world.news, 0)
    few["verbmem", "forget"] = few["verbmem", "forget"][:1]
    write_repository(few, tmp_path / "few")
    with pytest.raises(ValueError, match="none of the 1 rows of verbmem is of the split '(dev|test)'.*; add rows"):
        news_files(str(tmp_path / "few"))
    with pytest.raises(
        ValueError,
        match=r"data.repository: cannot read 'muse-bench/MUSE-News'.*hf download",
    ):
        news_files("muse-bench/MUSE-News")


def test_ten_solved_questions_and_the_trailing_space_of_the_benchmark_reach_the_model(
    model, tokenizer, news, monkeypatch
):
    seen = []
    monkeypatch.setattr(
        "gripmoe.evaluation.muse.continuations", lambda m, t, prompts, n: seen.append(prompts) or ["x"] * len(prompts)
    )
    pairs, context = news.pairs("forget", "dev")[:2], news.pairs("forget", CONTEXT)
    knowledge_memory(model, tokenizer, pairs, context)
    [prompts] = seen
    assert prompts[0].count("Question: ") == 11
    assert prompts[0].endswith(f"Question: {pairs[0]['question']}\nAnswer: ")


@pytest.mark.parametrize("prompts", [["News from Bazis on Monday"], ["News from Bazis on Monday", "The people of"]])
def test_lock_step_sets_are_those_of_a_whole_pass(model, tokenizer, prompts):
    """While a model writes, another one runs along: its sets are as if it read the whole text at once."""
    moe, other = MoEModel(model), MoEModel(small_model(vocabulary_size=len(tokenizer), seed=2))
    recorded = []
    step = LockStep(other)

    def routes(input_ids, attention_mask):
        found = step(input_ids, attention_mask)
        recorded.append((input_ids, found))
        return found

    with moe.force_routing(routes):
        continuations(model, tokenizer, prompts, 6)
    text = torch.cat([ids for ids, _ in recorded], dim=1)
    for row in range(len(prompts)):
        read = text[row] != tokenizer.pad_token_id
        alone = other.routes(text[row][read][None])
        for layer in other.layers:
            sets = torch.cat([found[layer].view(*ids.shape, -1)[row] for ids, found in recorded])
            assert torch.equal(sets[read].sort().values, alone[layer].sort().values)


def test_forced_generation_has_its_controls(model, tokenizer, news):
    before, after = MoEModel(model), MoEModel(small_model(vocabulary_size=len(tokenizer), seed=2))
    prompts = [row["prompt"] for row in news.verbmem[:3]]
    wanted = continuations(model, tokenizer, prompts, 20)

    def scores(moe):
        same = zip(continuations(moe.model, tokenizer, prompts, 20), wanted, strict=True)
        return {"verbmem": {str(number): 100.0 * (a == b) for number, (a, b) in enumerate(same)}}

    assert generation_forcing(before, before, scores, seed=0).metrics["forced_verbmem"] == 100.0, "its own sets"
    found = generation_forcing(before, after, scores, seed=0)
    assert found.metrics["forced_verbmem"] < 100.0, "other experts write otherwise"
    assert set(found.scores["forced_verbmem"]) == {"0", "1", "2"}
    assert generation_forcing(after, before, scores, seed=0).metrics["random_forced_verbmem"] < 100.0


def test_scores_come_by_criterion(model, tokenizer, news):
    few = News(
        [pair for i, pair in enumerate(news.knowmem) if pair["split"] == CONTEXT or i % 9 == 0], news.verbmem[:4], []
    )
    scores = news_scores(model, tokenizer, few, "test")
    assert set(scores) == {"verbmem", "knowmem_forget", "knowmem_retain"}
    assert set(news_scores(model, tokenizer, few, "test", retain=False)) == {"verbmem", "knowmem_forget"}
