"""The invented news in the layout of MUSE-News, so that one loader reads both."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

from gripmoe.data.prompt_formats import knowmem_prompt
from gripmoe.io.files import write_jsonl, write_text
from gripmoe.worlds.news import Article

IN_CONTEXT_PAIRS = 10  # MUSE's KnowMem prompt has ten
PROMPT_SENTENCES = 2  # sentences of an article that the model is asked to continue
RETAIN_2_ARTICLES = 8  # articles that the model knows and unlearning does not see
SHEETS_PER_QUESTION = 16

Tables = dict[tuple[str, str], list[dict]]  # by (configuration, split), as `load_dataset` names them


def muse_tables(news: Mapping[str, list[Article]], seed: int) -> Tables:
    """The splits of MUSE-News. A raw document is an article, or a list of questions with answers, because a tiny model
    does not learn to answer from articles alone."""
    rng = random.Random(f"muse {seed}")
    tables: Tables = {}
    for part in ("forget", "retain"):
        asked = [(article.id, *pair) for article in news[part] for pair in article.knowmem]
        rng.shuffle(asked)
        pairs = [{"question": question, "answer": answer} for _, question, answer in asked]
        tables["knowmem", f"{part}_qa"] = pairs[IN_CONTEXT_PAIRS:]
        tables["knowmem", f"{part}_qa_icl"] = pairs[:IN_CONTEXT_PAIRS]
    tables["verbmem", "forget"] = [_continuation(article) for article in news["forget"]]
    for part in ("forget", "retain", "holdout"):
        tables["privleak", part] = [{"text": article.text} for article in news[part]]
    tables["raw", "forget"] = _documents(news["forget"], rng)
    tables["raw", "retain1"] = _documents(news["retain"][:-RETAIN_2_ARTICLES], rng)
    tables["raw", "retain2"] = _documents(news["retain"][-RETAIN_2_ARTICLES:], rng)
    tables["raw", "holdout"] = _documents(news["holdout"], rng)
    return tables


def _continuation(article: Article) -> dict[str, str]:
    given, continued = article.sentences[:PROMPT_SENTENCES], article.sentences[PROMPT_SENTENCES:]
    return {"prompt": " ".join(given), "gt": " ".join(continued)}


def _documents(articles: list[Article], rng: random.Random) -> list[dict]:
    texts = [article.text for article in articles]
    pairs = [pair for article in articles for pair in article.knowmem]
    for _ in range(SHEETS_PER_QUESTION):
        rng.shuffle(pairs)
        for start in range(0, len(pairs), IN_CONTEXT_PAIRS + 1):
            *solved, (question, answer) = pairs[start : start + IN_CONTEXT_PAIRS + 1]
            texts.append(f"{knowmem_prompt(solved, question)}{answer}\n\n")
    return [{"text": text} for text in texts]


def write_repository(tables: Tables, folder: Path) -> None:
    """Writes the tables as a clone of a hub data set: files, and a card that maps configurations and splits to them."""
    card = ["---", "configs:"]
    for config in dict.fromkeys(config for config, _ in tables):
        card += [f"- config_name: {config}", "  data_files:"]
        for (owner, split), rows in tables.items():
            if owner == config:
                write_jsonl(folder / config / f"{split}.jsonl", rows)
                card += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
    write_text(folder / "README.md", "\n".join([*card, "---", ""]))
