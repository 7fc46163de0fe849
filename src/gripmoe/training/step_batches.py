"""The documents of each step of unlearning, for every process and pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gripmoe.config.training import Training
from gripmoe.data.corpora import Corpora, epoch_rows
from gripmoe.data.documents import IGNORED, Batch, Row, collate, length_buckets
from gripmoe.io import distributed
from gripmoe.io.errors import ConfigError


@dataclass(frozen=True)
class StepBatches:
    """Batches of both corpora; each is a function of seed, step and number of the pass alone."""

    corpora: Corpora
    training: Training
    seed: int
    device: torch.device

    def check(self, scope: dict[int, list[int]] | None) -> None:
        processes = distributed.processes()
        if scope and processes > 1:
            raise ConfigError(
                "`experts: top_attributed` trains one expert, which processes cannot share: start one process"
            )
        for kind in ("forget", "retain"):
            name, size, rows = f"{kind}_batch_size", self.size(kind), getattr(self.corpora, kind)
            if size > len(rows):
                own, passes = size // (processes * self.training.gradient_accumulation), self._passes
                raise ConfigError(
                    f"{name} {own} in {passes} exceeds the {len(rows)} documents of the {kind} corpus; lower it"
                )

    @property
    def _passes(self) -> str:
        processes, accumulated = distributed.processes(), self.training.gradient_accumulation
        return f"{processes} process{'es' * (processes > 1)} of {accumulated} pass{'es' * (accumulated > 1)}"

    def __str__(self) -> str:
        return f"{self.size('forget')} forget and {self.size('retain')} retain documents a step, in {self._passes}"

    def of(self, kind: str, step: int, number: int = 0) -> Batch:
        """The rows that this process has in a pass of a step. Losses weight passes by their tokens, so that a step is
        the same however its documents are shared out."""
        rows, passes = self._rows(kind, step), distributed.processes() * self.training.gradient_accumulation
        own = rows[distributed.rank() :: distributed.processes()][number :: self.training.gradient_accumulation]
        batch = collate(own, self.corpora.pad_id)
        batch.scored_per_pass = sum(label != IGNORED for row in rows for label in row.labels[1:]) / passes
        batch.tokens_per_pass = sum(len(row.ids) for row in rows) / passes
        return batch.to(self.device)

    def used(self, kind: str) -> list[Batch]:
        """All documents that some step draws, by length, and then as in the corpus: so runs of every seed share what is
        stored of the same documents."""
        drawn = {row.id for step in range(self.training.max_steps) for row in self._rows(kind, step)}
        buckets = length_buckets([row for row in getattr(self.corpora, kind) if row.id in drawn])
        return [collate(bucket, self.corpora.pad_id).to(self.device) for bucket in buckets]

    def _rows(self, kind: str, step: int) -> list[Row]:
        return epoch_rows(getattr(self.corpora, kind), self.size(kind), self.seed, step)

    def size(self, kind: str) -> int:
        """Documents of a step: the effective batch size."""
        passes = distributed.processes() * self.training.gradient_accumulation
        return passes * getattr(self.training, f"{kind}_batch_size")
