"""A trivial way to pass a benchmark: erase the words of the forget documents, and no fact.

A model whose words belong to no domain loses what it is to retain as well. So this is a control of the benchmark, not a
method.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gripmoe.data.documents import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ERASED_WORDS = 60


@torch.no_grad()
def erase_words(model: PreTrainedModel, forget: Sequence[Row], retain: Sequence[Row], fresh_Vd: Tensor) -> None:
    """Replaces the embeddings of the ERASED_WORDS tokens that are more frequent in `forget` than in `retain` by those
    of `fresh_Vd`, (V, d), random ones."""
    words = words_of(forget, retain)
    model.get_input_embeddings().weight[words] = fresh_Vd[words]


def words_of(forget: Sequence[Row], retain: Sequence[Row]) -> list[int]:
    """The tokens whose share of all tokens in the forget documents exceeds that in the retain documents most."""
    counts = [Counter(token for row in rows for token in row.ids) for rows in (forget, retain)]
    totals = [count.total() for count in counts]

    def excess(token: int) -> float:
        in_forget, in_retain = (count[token] / total for count, total in zip(counts, totals, strict=True))
        return in_forget - in_retain

    return sorted(counts[0], key=excess, reverse=True)[:ERASED_WORDS]


def fresh_embeddings(model: PreTrainedModel) -> Tensor:
    """Random embeddings as large as the model's, (V, d)."""
    weight_Vd = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    return weight_Vd.detach().std().cpu() * torch.randn(weight_Vd.shape, generator=generator)
