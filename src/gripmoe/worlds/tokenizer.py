"""A word-level tokenizer: one token per word, digit run or punctuation mark; spaces carry no token."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose vocabulary is every word of `texts`, in order of first appearance.

    " A" and "A" are the same token, so the letter scored after "Answer:" is the token of the options.
    """
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n|\w+|[^\w\s]"), "isolated"),
            pre_tokenizers.Split(Regex(r"[ \t]+"), "removed"),
        ]
    )
    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, "\n"))}
    for text in texts:
        for word, _ in split.pre_tokenize_str(text):
            vocabulary.setdefault(word, len(vocabulary))
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
