"""What the original model says of documents: kept in memory or on disk, the same; whose it is, and of what."""

import os
import shutil
import time
from threading import Thread

import pytest
import torch

from conftest import random_batch, small_model
from gripmoe.constraints import original_files
from gripmoe.constraints.original import OriginalCache, OriginalSets
from gripmoe.constraints.original_files import OriginalStore
from gripmoe.io.locks import take_lock
from gripmoe.moe import MoEModel
from gripmoe.moe.states import final_hidden_states

DOCUMENTS = [random_batch(rows=3, length=6 + seed, seed=seed) for seed in range(3)]


def files_in(folder):
    return list(folder.glob("*.safetensors"))


@pytest.fixture
def asked():
    """A function of a model, and how often it was asked."""
    model, calls = MoEModel(small_model()), []
    return calls, lambda batch: calls.append(1) or final_hidden_states(model, batch)


def test_what_lies_on_disk_is_what_lay_in_memory(tmp_path, asked):
    calls, function = asked
    memory, disk = OriginalCache(), OriginalCache(OriginalStore(tmp_path, "a", memory=0))
    for cache in (memory, disk):
        cache.fill(DOCUMENTS, function, "states")
    assert len(calls) == 2 * len(DOCUMENTS) and len(files_in(tmp_path)) == 1
    mixed = random_batch(rows=3, length=7, seed=1).inputs  # documents of the second batch
    hidden = {**mixed, "attention_mask": mixed["attention_mask"].clone()}
    hidden["attention_mask"][1] = 0
    for inputs in (*(batch.inputs for batch in DOCUMENTS), hidden):
        assert torch.equal(disk.of(**inputs), memory.of(**inputs)) and memory.of(**inputs).abs().sum() > 0
    with pytest.raises(KeyError, match="no original output for a document"):
        disk.of(**random_batch(seed=9).inputs)


def test_a_file_serves_the_same_question_and_no_other(tmp_path, asked):
    calls, function = asked

    def passes(model="a", documents=DOCUMENTS, what="states"):
        calls.clear()
        OriginalCache(OriginalStore(tmp_path, model, memory=0)).fill(documents, function, what)
        return len(calls)

    every = len(DOCUMENTS)
    assert passes() == every and passes() == 1, "one pass says what is to be found"
    assert passes(model="b") == every, "another model"
    assert passes(what="other states") == every
    assert passes(documents=[*DOCUMENTS[:2], random_batch(seed=7)]) == every
    assert len(files_in(tmp_path)) == 4


def test_what_another_model_or_other_code_has_kept_is_removed(tmp_path, asked):
    """And what a killed run has left half-written; what another run asks of the same model stays."""
    for model, documents in (("before", DOCUMENTS), ("now", DOCUMENTS), ("now", DOCUMENTS[:1])):
        OriginalCache(OriginalStore(tmp_path, model, memory=0)).fill(documents, asked[1], "states")
    now = OriginalStore(tmp_path, "now", memory=0)
    kept = {now.file("states", documents) for documents in (DOCUMENTS, DOCUMENTS[:1])}
    half = tmp_path / f".{now.file('states', DOCUMENTS).name}.1.tmp"
    half.touch()
    assert len(files_in(tmp_path)) == 3
    now.remove_stale()
    assert set(files_in(tmp_path)) == kept and not half.exists()


def test_what_a_run_reads_or_writes_is_not_removed(tmp_path, asked):
    """Until it ends: a run that began with other code goes on with it."""
    before, now = (OriginalStore(tmp_path, model, memory=0) for model in ("before", "now"))
    cache = OriginalCache(before)
    cache.fill(DOCUMENTS, asked[1], "states")
    name = before.file("states", DOCUMENTS[:1]).name
    half = tmp_path / f".{name}.1.tmp"
    half.touch()
    with (tmp_path / f".{name}.lock").open("a") as lock:
        assert take_lock(lock, tmp_path)
        now.remove_stale()
        assert len(files_in(tmp_path)) == 1 and half.exists()
        assert cache.of(**DOCUMENTS[0].inputs).abs().sum() > 0
    del cache
    now.remove_stale()
    assert not files_in(tmp_path) and not half.exists()


def test_what_another_run_makes_is_waited_for_and_made_if_it_dies(tmp_path, asked, monkeypatch):
    """The control is the run that was not disturbed: it asks about every batch."""
    calls, function = asked
    looks = []
    monkeypatch.setattr(original_files, "WAIT", 0.01)
    monkeypatch.setattr(original_files, "take_lock", lambda *of, **how: looks.append(of) or take_lock(*of, **how))
    made = OriginalStore(tmp_path / "made", "a", memory=0)
    OriginalCache(made).fill(DOCUMENTS, function, "states")
    for dies in (False, True):
        store = OriginalStore(tmp_path / f"{dies}", "a", memory=0)
        file, cache = store.file("states", DOCUMENTS), OriginalCache(store)
        store.folder.mkdir()
        half = store.folder / f".{file.name}.1.tmp"
        half.touch()
        calls.clear()
        looks.clear()
        with (store.folder / f".{file.name}.lock").open("a") as lock:
            assert take_lock(lock, store.folder)
            waiting = Thread(target=cache.fill, args=(DOCUMENTS, function, "states"))
            waiting.start()
            while waiting.is_alive() and len(looks) < 3:
                time.sleep(0.01)
            assert waiting.is_alive() and len(calls) == 1 and half.exists(), "one pass says what is to be found"
            if not dies:
                os.replace(shutil.copy(made.file("states", DOCUMENTS), tmp_path / "whole"), file)
        waiting.join()
        assert len(calls) == (len(DOCUMENTS) if dies else 1) and half.exists() != dies
        again = OriginalCache(made)
        again.fill(DOCUMENTS, function, "states")
        for batch in DOCUMENTS:
            assert torch.equal(cache.of(**batch.inputs), again.of(**batch.inputs))


def test_what_fits_into_memory_stays_there(tmp_path, asked):
    tokens = sum(int(batch.attention_mask.sum()) for batch in DOCUMENTS)
    size = tokens * 32 * 4
    for memory, files in ((size, 0), (size - 1, 1)):
        OriginalCache(OriginalStore(tmp_path, "a", memory)).fill(DOCUMENTS, asked[1], "states")
        assert len(files_in(tmp_path)) == files


def test_replayed_sets_from_disk(tmp_path):
    moe = MoEModel(small_model())
    in_memory = OriginalSets(moe, DOCUMENTS)
    moe.originals = OriginalStore(tmp_path, "a", memory=0)
    on_disk = OriginalSets(moe, DOCUMENTS)
    for layer, sets in in_memory.of(**DOCUMENTS[1].inputs).items():
        assert torch.equal(on_disk.of(**DOCUMENTS[1].inputs)[layer], sets)
