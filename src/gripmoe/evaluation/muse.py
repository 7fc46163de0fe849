"""MUSE's criteria (Shi et al. 2024): verbatim memorisation (C1), knowledge memorisation (C2 on forget, C4 on retain
data) and privacy leakage (C3).

C1, C2 and C4 are mean ROUGE-L F1, without a stemmer, times 100. C3 is PrivLeak with MUSE's sign: negative is
under-unlearning, positive over-unlearning (the paper states the reverse).
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from gripmoe.data.documents import Row, collate, encode_all, length_buckets
from gripmoe.data.muse import CONTEXT
from gripmoe.data.prompt_formats import knowmem_prompt
from gripmoe.io import distributed
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_jsonl
from gripmoe.moe.modes import evaluating

RECITED_TOKENS = 128
ANSWER_TOKENS = 32
END_OF_ANSWER = re.compile(r"\n|Question *:")  # some tokenizers decode spaces between tokens
MIN_K = (20, 40)  # per cent; 40 is what PrivLeak uses
KEYS = {
    "knowmem": ("part", "split", "question", "answer"),
    "verbmem": ("split", "prompt", "gt"),
    "privleak": ("part", "text"),
}  # keys of the rows of each file, beside `id`
PROMPT_TOKENS_PER_PASS = 8000  # padded, of prompts without continuations; half as many of scored texts
MAX_SCORED_TOKENS = 2048  # of a text in membership inference


@dataclass(frozen=True)
class News:
    """Items of a news benchmark, each with an `id`. A `knowmem` pair has a `part` (forget, retain) and a `split` (dev,
    test, context). A `verbmem` prompt has its true continuation `gt` and a `split`. A `privleak` text has a `part`
    (forget, retain, holdout)."""

    knowmem: list[dict]
    verbmem: list[dict]
    privleak: list[dict]

    @classmethod
    def load(cls, folder: Path) -> News:
        """Raises ConfigError, naming file and line, for a row that lacks a key."""
        return cls(**{name: read_jsonl(folder / f"{name}.jsonl", "id", *keys) for name, keys in KEYS.items()})

    def pairs(self, part: str, split: str) -> list[dict]:
        return [pair for pair in self.knowmem if pair["part"] == part and pair["split"] == split]

    def prompts(self, split: str) -> list[dict]:
        return [row for row in self.verbmem if row["split"] == split]


def rouge_l(generated: str, reference: str) -> float:
    """ROUGE-L F1 between 0 and 1, without a stemmer."""
    return _scorer().score(target=reference, prediction=generated)["rougeL"].fmeasure


@cache
def _scorer():
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=False)


def continuations(
    model, tokenizer, prompts: Sequence[str], max_new_tokens: int, *, unfinished: bool = True
) -> list[str]:
    """Greedy continuations of the prompts. Batches are padded on the left and give the same text as single prompts.
    Without `unfinished`, a text that `max_new_tokens` cuts is empty."""
    written = _continued(model, tokenizer, prompts, max_new_tokens)
    ends = _ends(model, tokenizer)
    return [
        tokenizer.decode(ids, skip_special_tokens=True)
        if unfinished or len(ids) < max_new_tokens or ids[-1] in ends
        else ""
        for ids in written
    ]


@torch.no_grad()
def _continued(model, tokenizer, prompts: Sequence[str], max_new_tokens: int) -> list[list[int]]:
    """The tokens of the continuations. Texts that end before others of their batch are padded."""
    rows = encode_all(tokenizer, ((str(number), [(prompt, False)]) for number, prompt in enumerate(prompts)))
    continued = {}
    with evaluating(model), _greedy(model):
        for bucket in length_buckets(rows, PROMPT_TOKENS_PER_PASS):
            padded = tokenizer.pad(
                {"input_ids": [row.ids for row in bucket]}, padding_side="left", return_tensors="pt"
            ).to(model.device)
            written = model.generate(
                input_ids=padded["input_ids"],
                attention_mask=padded["attention_mask"],
                max_new_tokens=max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
                # A process that has finished must keep serving the layers that others share with it.
                synced_gpus=distributed.processes() > 1,
            )
            for row, ids in zip(bucket, written[:, padded["input_ids"].shape[1] :], strict=True):
                continued[row.id] = ids.tolist()
    return [continued[row.id] for row in rows]


@contextmanager
def _greedy(model) -> Iterator[None]:
    """Within the block, texts are continued greedily, whatever a chat model's own generation settings say."""
    own = model.generation_config
    model.generation_config = type(own)(eos_token_id=own.eos_token_id)
    try:
        yield
    finally:
        model.generation_config = own


def _ends(model, tokenizer) -> set[int | None]:
    """The tokens that end a text, and the one that fills the row after it."""
    ends = model.generation_config.eos_token_id
    return {tokenizer.pad_token_id, *(ends if isinstance(ends, list) else [ends])}


def verbatim_memory(model, tokenizer, rows: Sequence[dict]) -> dict[str, float]:
    """C1, by id: compares continuations with the first tokens of the true ones. As in the benchmark, the BOS is one of
    these tokens, and special tokens are removed from both texts. A continuation is cut where the true one ends, so a
    model that recites a text and goes on has recited it."""
    true = [tokenizer(row["gt"])["input_ids"][:RECITED_TOKENS] for row in rows]
    longest = max(map(len, true), default=0)
    written = _continued(model, tokenizer, [row["prompt"] for row in rows], longest)
    cut = [ids[: len(reference)] for ids, reference in zip(written, true, strict=True)]
    return _scored(rows, *(tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in (cut, true)))


def knowledge_memory(model, tokenizer, pairs: Sequence[dict], context: Sequence[dict]) -> dict[str, float]:
    """C2 and C4, by id: answers after ten solved questions."""
    solved = [(pair["question"], pair["answer"]) for pair in context]
    prompts = [knowmem_prompt(solved, pair["question"]) for pair in pairs]
    written = [answer_of(text) for text in continuations(model, tokenizer, prompts, ANSWER_TOKENS)]
    return _scored(pairs, written, [pair["answer"] for pair in pairs])


def answer_of(text: str) -> str:
    """The first line, up to the next question. MUSE cuts at a blank line: a model that has lost the form of the prompt
    writes its answer, a line break and other words, and would seem to know little."""
    return END_OF_ANSWER.split(text.lstrip(), maxsplit=1)[0]


def _scored(rows: Sequence[dict], written: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    pairs = zip(rows, written, references, strict=True)
    return {row["id"]: 100 * rouge_l(text, reference) for row, text, reference in pairs}


def mean_score(scores: Mapping[str, float]) -> float:
    return fmean(scores.values()) if scores else float("nan")


@torch.no_grad()
def membership_scores(model, tokenizer, texts: Sequence[str], names: Sequence[str] = ()) -> dict[str, list[float]]:
    """Membership scores, higher for a text that looks more like training data: Min-K (mean of the lowest K % of token
    log-probabilities), Min-K++ at 20 % (standardised over the vocabulary at each token), mean log-probability ("loss"),
    and this mean divided by the zlib size of the text.

    A text is cut after MAX_SCORED_TOKENS, for zlib too (as in open-unlearning; MUSE itself does not cut). Raises
    ConfigError, with the text's name, for a text without a token to score.
    """
    rows = encode_all(tokenizer, ((str(i), [(text, True)]) for i, text in enumerate(texts)), MAX_SCORED_TOKENS)
    for row, name in zip(rows, names or [f"text {row.id}" for row in rows], strict=True):
        if len(row.ids) < 2:
            raise ConfigError(
                f"{name} has {len(row.ids)} tokens, of which none can be scored: remove the row, or give it more text"
            )
    scores: dict[str, dict[str, float]] = {}
    with evaluating(model):
        for bucket in length_buckets(rows, PROMPT_TOKENS_PER_PASS // 2):
            batch = collate(bucket, tokenizer.pad_token_id).to(model.device)
            logits = model(**batch.inputs).logits[:, :-1].float()
            for row, row_logits in zip(bucket, logits, strict=True):
                is_cut = len(row.ids) == MAX_SCORED_TOKENS
                text = tokenizer.decode(row.ids, skip_special_tokens=True) if is_cut else texts[int(row.id)]
                scores[row.id] = _row_scores(row, row_logits[: len(row.ids) - 1], text)
    return {name: [scores[row.id][name] for row in rows] for name in scores[rows[0].id]}


def _row_scores(row: Row, logits_TV: Tensor, text: str) -> dict[str, float]:
    logprobs_TV = logits_TV.log_softmax(dim=-1)
    token_T = torch.tensor(row.ids[1:], device=logits_TV.device)
    logprob_T = logprobs_TV.gather(1, token_T[:, None])[:, 0]
    probs_TV = logprobs_TV.exp()
    mean_T = (probs_TV * logprobs_TV).sum(dim=-1)
    deviation_T = ((probs_TV * logprobs_TV.square()).sum(dim=-1) - mean_T.square()).clamp_min(1e-12).sqrt()
    named = {f"min_{percent}": lowest_mean(logprob_T, percent) for percent in MIN_K}
    named["min_plus_20"] = lowest_mean((logprob_T - mean_T) / deviation_T, 20)
    named["loss"] = logprob_T.mean().item()
    named["zlib"] = named["loss"] / len(zlib.compress(text.encode()))
    return named


def lowest_mean(values_T: Tensor, percent: int) -> float:
    """Mean of the lowest `percent` of the values, but of one value at least."""
    return values_T.sort().values[: max(1, len(values_T) * percent // 100)].mean().item()


def auc(holdout: Sequence[float], forget: Sequence[float]) -> float:
    """Probability that a text which the model never saw looks more like training data than a forget text: about 0 for
    a model that remembers, 0.5 for one that saw neither. NaN if a score is not finite."""
    from sklearn.metrics import roc_auc_score

    if not all(map(math.isfinite, (*holdout, *forget))):
        return float("nan")
    return float(roc_auc_score([1] * len(holdout) + [0] * len(forget), [*holdout, *forget]))


def leakage(model, tokenizer, rows: Sequence[dict], source: str = "privleak.jsonl") -> dict[str, float]:
    """`auc_<score>` of every membership score, forget against holdout texts. Raises ConfigError, naming `source`, for a
    part without texts, and for a text without a token to score."""

    def scores(part: str) -> dict[str, list[float]]:
        of_part = [row for row in rows if row["part"] == part]
        if not of_part:
            raise ConfigError(f"{source}: no text is of the part {part!r}; add some")
        names = [f"{source}: the text of {row['id']!r}" for row in of_part]
        return membership_scores(model, tokenizer, [row["text"] for row in of_part], names)

    holdout, forget = scores("holdout"), scores("forget")
    return {f"auc_{name}": auc(holdout[name], forget[name]) for name in holdout}


def privacy_leakage(measured_auc: float, retrained_auc: float) -> float:
    """C3 in per cent: the Min-40 % AUC relative to that of the retrained model. NaN if either is not a number."""
    if not math.isfinite(measured_auc) or not retrained_auc > 0:
        return float("nan")
    return 100 * (measured_auc - retrained_auc) / retrained_auc


def news_scores(model, tokenizer, news: News, split: str, *, retain: bool = True) -> dict[str, dict[str, float]]:
    """C1, C2 and (with `retain`) C4 of a split, by id: `verbmem`, `knowmem_forget`, `knowmem_retain`."""
    scores = {"verbmem": verbatim_memory(model, tokenizer, news.prompts(split))}
    for part in ("forget", "retain") if retain else ("forget",):
        pairs, context = news.pairs(part, split), news.pairs(part, CONTEXT)
        scores[f"knowmem_{part}"] = knowledge_memory(model, tokenizer, pairs, context)
    return scores
