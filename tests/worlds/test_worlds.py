"""The embedded world: seeded, separated as it claims, and readable by its tokenizer."""

import re
from collections import Counter

import pytest

from gripmoe.data.documents import encode
from gripmoe.data.prompt_formats import LETTERS
from gripmoe.worlds.benchmark import wmdp_files
from gripmoe.worlds.documents import FACT_MIX, SKILL_MIX, all_texts, make_world, training_batch
from gripmoe.worlds.facts import FORGET_SUBJECT, KINDS, UNSEEN_SUBJECT
from gripmoe.worlds.models import make_model
from gripmoe.worlds.news import PARTS


@pytest.fixture(scope="module")
def files(world):
    return wmdp_files(world, 0)


def mentioned(facts, text):
    """The facts that a text says anything of; a name alone says nothing, since subjects share names."""
    return [f for f in facts if f"{KINDS[f.subject]} {f.entity} " in text or f" {f.relation} of {f.entity} " in text]


def words(texts):
    return {word for text in texts for word in re.findall(r"\w+", text)}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_word_is_the_forget_domains_alone(seed):
    """Every word of a fact or an article to forget is in one to retain: names, values, relations, kinds, subjects."""
    world = make_world(seed)

    def told(facts, articles):
        sentences = [fact.statement(0) for fact in facts] + [fact.subject for fact in facts]
        return words(sentences + [article.text for article in articles])

    forget, retain = (
        told(facts, world.news[part])
        for part, facts in (("forget", world.facts.forget), ("retain", world.facts.retain))
    )
    assert len(forget) > 100 and forget <= retain
    alone = told(world.facts.forget, []) | {"Alonix"}
    assert not alone <= retain, "the check sees a word of its own"


@pytest.mark.parametrize("seed", [29, 35])
def test_a_value_is_no_part_of_another_word(seed):
    """In the first facts that these seeds draw, it is."""
    world = make_world(seed)
    assert all(fact.can_be_split for fact in (*world.facts.facts, *world.skills.facts.facts))
    wmdp_files(world, seed)


def test_no_entity_is_of_two_subjects(world):
    subjects = {}
    for fact in world.facts.facts + world.skills.facts.facts:
        subjects.setdefault(fact.entity, set()).add(fact.subject)
    assert all(len(owners) == 1 for owners in subjects.values())
    assert not {fact.subject for fact in world.skills.facts.facts} & {fact.subject for fact in world.facts.facts}


def test_names_tell_nothing_by_themselves(world):
    """Whoever knew one word of a forget entity only and guessed its most frequent value would often be wrong."""
    for position in (0, 1):
        values = {}
        for fact in world.facts.forget:
            values.setdefault((fact.relation, fact.entity.split()[position]), []).append(fact.value)
        guessed = sum(max(map(of_word.count, of_word)) for of_word in values.values())
        assert guessed / len(world.facts.forget) < 0.7


def test_a_seed_is_a_world(world, files):
    assert make_world(0) == world != make_world(1)
    assert wmdp_files(make_world(0), 0) == files


def test_other_documents_to_retain_change_nothing_else(world, files):
    for retain in ("narrow", "forms"):
        other = wmdp_files(world, 0, retain)
        assert [name for name in files if other[name] != files[name]] == ["retain_corpus"]


def test_narrow_documents_are_of_one_subject_and_forms_are_of_the_same_facts(world, files, tokenizer):
    broad, narrow, forms = (wmdp_files(world, 0, retain)["retain_corpus"] for retain in ("broad", "narrow", "forms"))
    assert broad == files["retain_corpus"]
    assert len({row["id"].split("/")[0] for row in narrow}) == 1 and len(narrow) < len(broad) / 3
    assert {row["id"] for row in narrow} < {row["id"] for row in broad} < {row["id"] for row in forms}
    added = [row for row in forms if row["id"].endswith(("/five_shot", "/truth"))]
    assert (
        len(added) == len(forms) - len(broad) == 2 * sum(world.facts.exposure(f) == "seen" for f in world.facts.facts)
    )
    for row in added:
        text = row["prompt"] + row["text"]
        told = mentioned(world.facts.facts, text)
        assert told and all(world.facts.exposure(fact) == "seen" for fact in told)
        assert text.count("Answer:") in (0, 6) and len(tokenizer(text)["input_ids"]) <= 256, "read to its end"


def test_enough_questions_to_resolve_two_hundredths(files):
    """The standard error at chance, questions taken as independent."""
    test = [row for row in files["forget_questions"] if row["split"] == "test"]
    assert (0.25 * 0.75 / len(test)) ** 0.5 < 0.02


def test_dev_and_test_share_no_fact(files):
    for name in ("forget_questions", "retain_questions"):
        splits = {split: {row["fact"] for row in files[name] if row["split"] == split} for split in ("dev", "test")}
        assert splits["dev"] and splits["test"] and not splits["dev"] & splits["test"]


def test_letters_are_balanced_in_each_split(files):
    for name in ("forget_questions", "retain_questions"):
        for split in ("dev", "test"):
            counts = Counter(row["answer"] for row in files[name] if row["split"] == split)
            assert max(counts.values()) - min(counts.values()) <= 1


def test_questions_are_right_and_their_options_distinct(world, files):
    values = {fact.id: fact.value for fact in world.facts.facts}
    for row in files["forget_questions"] + files["retain_questions"]:
        assert row["choices"][row["answer"]] == values[row["fact"]]
        assert len(set(row["choices"])) == 4


def test_unlearning_never_sees_what_is_held_back(world, files):
    retain = " ".join(row["prompt"] + row["text"] for row in files["retain_corpus"])
    held_back = [fact for fact in world.facts.retain if world.facts.exposure(fact) != "seen"]
    assert held_back and not mentioned(held_back, retain) and not mentioned(world.facts.forget, retain)
    assert mentioned([fact for fact in world.facts.retain if world.facts.exposure(fact) == "seen"], retain)
    assert UNSEEN_SUBJECT not in retain
    letters = [row for row in files["forget_corpus"] + files["retain_corpus"] if "/letter/" in row["id"]]
    assert letters and not any("has which" in row["prompt"] for row in letters), "the held-out wording"
    routing = {row["text"] for row in files["held_out_corpus"] if row["id"].startswith("news") and not row["prompt"]}
    assert routing and not any(text in retain for text in routing)
    trained_on, measured = (
        {(row["prompt"], row["text"]) for row in files[f"{name}_corpus"]} for name in ("retain", "held_out")
    )
    assert len(measured) > 300 and not trained_on & measured, "no document is trained on and measured on"


def test_membership_asks_about_statements_that_are_true_and_others_that_no_model_has_seen(world, files):
    true = {fact.statement(wording) for fact in world.facts.forget for wording in range(3)}
    told = {part: [row["text"] for row in files["membership"] if row["part"] == part] for part in ("forget", "holdout")}
    assert set(told["forget"]) <= true and not true & set(told["holdout"])
    assert len(told["forget"]) == len(told["holdout"]) == 2 * len(world.facts.forget)


def test_rows_have_unique_ids(files):
    for name, rows in files.items():
        ids = [row["id"] for row in rows]
        assert len(ids) == len(set(ids)), name


def test_exposures_are_all_there(files):
    assert {row["exposure"] for row in files["retain_questions"]} == {"seen", "unseen_entity", "unseen_subject"}
    assert {row["exposure"] for row in files["forget_questions"]} == {"forget"}
    assert {row["subject"] for row in files["forget_questions"]} == {FORGET_SUBJECT}


def test_articles_answer_their_questions_once(world):
    asked = [question for part in PARTS for article in world.news[part] for question, _ in article.questions]
    assert len(asked) == len(set(asked))
    for part in PARTS:
        for article in world.news[part]:
            assert all(answer in article.text for _, answer in article.questions)


@pytest.mark.parametrize("stage", ["skills", "retrained"])
def test_neither_skills_nor_a_retrained_model_see_forget_data(stage, world):
    seen = world.skills if stage == "skills" else world.without_forget()
    assert not seen.facts.forget and not seen.news["forget"]
    text = str([training_batch(seen, FACT_MIX, 0, step) for step in range(20)])
    assert not mentioned(world.facts.forget, text) and mentioned(seen.facts.facts, text)
    assert not any(article.text in text for article in world.news["forget"])


def test_every_format_is_in_the_mix_and_the_vocabulary(world, tokenizer):
    unknown = tokenizer.unk_token_id
    texts = []
    for seen, mix in ((world.skills, SKILL_MIX), (world, FACT_MIX)):
        for step in range(20):
            for document in training_batch(seen, mix, 0, step):
                row, recalled = encode(tokenizer, document.spans), encode(tokenizer, document.recalled)
                assert unknown not in row.ids and len(recalled.ids) == len(row.ids)
                assert any(label != -100 for label in row.labels)
                texts.append("".join(text for text, _ in document.spans))
    joined = "\x00".join(texts)
    assert "(with answers) about" in joined and "human life expectancy" in joined
    assert any(text.count("Question:") == 11 for text in texts), "ten in-context pairs and the question"
    assert any(text.count("Answer:") == 6 and "A. " in text for text in texts), "five shots and the question"


def test_a_training_batch_is_a_function_of_seed_and_step(world):
    assert training_batch(world, FACT_MIX, 0, 3) == training_batch(world, FACT_MIX, 0, 3)
    assert training_batch(world, FACT_MIX, 0, 3) != training_batch(world, FACT_MIX, 0, 4)


def test_where_a_letter_is_sought_its_value_is_recalled(world):
    for document in training_batch(world, FACT_MIX, 0, 0):
        letters = [number for number, (text, scored) in enumerate(document.spans) if scored and text.strip() in LETTERS]
        for number in letters:
            prompt = document.spans[number - 1][0]
            options = dict(re.findall(r"^([A-D])\. (\w+)$", prompt, re.MULTILINE))
            letter, value = document.spans[number][0].strip(), document.recalled[number][0]
            assert options[letter] == value


def test_tokenizer_round_trip(world, tokenizer):
    text = next(iter(all_texts(world)))
    assert tokenizer("A")["input_ids"] == tokenizer(" A")["input_ids"]
    assert tokenizer.decode(tokenizer("Who opened the bridge ?")["input_ids"]) == "Who opened the bridge ?"
    assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]


def test_dense_twin_is_as_wide_as_the_active_experts():
    sparse, dense = make_model("qwen3_moe", 50, seed=0), make_model("qwen3", 50, seed=0)
    config = sparse.config
    assert dense.config.intermediate_size == config.num_experts_per_tok * config.moe_intermediate_size
    with pytest.raises(ValueError, match="unknown tiny family 'gpt'"):
        make_model("gpt", 50, seed=0)
