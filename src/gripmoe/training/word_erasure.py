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

ERASED_WORDS = 30  # with more, on base models that no table reports, retain accuracy falls as much as forget accuracy


@torch.no_grad()
def erase_words(
    model: PreTrainedModel,
    forget: Sequence[Row],
    retain: Sequence[Row],
    fresh_Vd: Tensor,
    count: int = ERASED_WORDS,
) -> None:
    """Replaces the embeddings of the `count` tokens that are typical of `forget`, beside `retain`, by those of
    `fresh_Vd`, (V, d), random ones."""
    words = words_of(forget, retain)[:count]
    model.get_input_embeddings().weight[words] = fresh_Vd[words]


def words_of(forget: Sequence[Row], retain: Sequence[Row]) -> list[int]:
    """The tokens of forget documents, the most typical first: their count there is the largest multiple of their count
    in retain documents. A difference of shares would rank the letters of answers first, which all questions need."""
    in_forget, in_retain = (Counter(token for row in rows for token in row.ids) for rows in (forget, retain))
    # A token that no retain document has counts as half of one there.
    return sorted(in_forget, key=lambda token: in_forget[token] / (in_retain[token] + 0.5), reverse=True)


def fresh_embeddings(model: PreTrainedModel) -> Tensor:
    """Random embeddings as large as the model's, (V, d)."""
    weight_Vd = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    return weight_Vd.detach().std().cpu() * torch.randn(weight_Vd.shape, generator=generator)
