"""Retain data in the forms in which people have them: the same tokens count, or an error says what to give."""

import copy
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import DataCollatorWithFlattening, DataCollatorWithPadding

import gripmoe
from conftest import random_batch, small_model
from gripmoe.data.batches import batches_of
from gripmoe.data.documents import attention_mask_of
from gripmoe.moe import MoEModel
from pretended_devices import FIRST, HOST, PretendedDevices, device_of

datasets = pytest.importorskip("datasets")
LENGTHS = (7, 5, 9)


@pytest.fixture
def texts(tokenizer):
    words = [tokenizer.decode([n]) for n in range(8, 40)]
    return [" ".join(words[start : start + length]) for start, length in enumerate(LENGTHS)]


def documents_in(batches):
    return sorted(
        row[keep.bool()].tolist()
        for batch in batches
        for row, keep in zip(batch.input_ids, batch.attention_mask, strict=True)
    )


def padded(tokenizer, texts, side="right"):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = side
    return dict(tokenizer(texts, return_tensors="pt", padding=True))


def packed(tokenizer, texts):
    """The documents as one row, and what may say where each begins."""
    rows = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
    ends = torch.tensor([0, *map(len, rows)]).cumsum(0)
    segment = torch.cat([torch.full((len(row),), n) for n, row in enumerate(rows)])[None]
    causal = torch.ones(1, 1, segment.shape[1], segment.shape[1]).tril().bool()
    blocks = causal & (segment[:, None, :, None] == segment[:, None, None, :])
    hints = {
        "positions": {"position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None]},
        "ends": {"cu_seq_lens_q": ends.int(), "cu_seq_lens_k": ends.int(), "max_length_q": 9, "max_length_k": 9},
        "numbers": {"seq_idx": segment},
        "segment_mask": {"attention_mask": segment + 1},
        "blocks": {"attention_mask": blocks},
        "additive_blocks": {"attention_mask": torch.where(blocks, 0.0, -1e9)},
    }
    return {name: {"input_ids": torch.cat(rows)[None], **hint} for name, hint in hints.items()}


def packed_row(tokenizer, texts):
    """As TRL packs."""
    documents = tokenizer(texts)["input_ids"]
    return {"input_ids": sum(documents, []), "seq_lengths": list(map(len, documents))}


class Repeating(Dataset):
    """Its length alone says where it ends."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number % len(self)]


FORMS = {
    "one batch": lambda t, texts: padded(t, texts),
    "batches": lambda t, texts: [padded(t, texts)],
    "left": lambda t, texts: [padded(t, texts, "left")],
    "encoding": lambda t, texts: t(texts, return_tensors="pt", padding=True),
    "arrays": lambda t, texts: [{name: value.numpy() for name, value in padded(t, texts).items()}],
    "lists": lambda t, texts: [{name: value.tolist() for name, value in padded(t, texts).items()}],
    "generator": lambda t, texts: (padded(t, [text]) for text in texts),
    "tensors": lambda t, texts: [padded(t, [text])["input_ids"] for text in texts],
    "texts": lambda t, texts: texts,
    "generator of texts": lambda t, texts: iter(texts),
    "text column": lambda t, texts: datasets.Dataset.from_dict({"text": texts}),
    "ids column": lambda t, texts: datasets.Dataset.from_dict(dict(t(texts))),
    "padded column": lambda t, texts: datasets.Dataset.from_dict({k: v.tolist() for k, v in padded(t, texts).items()}),
    "tensor column": lambda t, texts: datasets.Dataset.from_dict(dict(t(texts))).with_format("torch"),
    "rows": lambda t, texts: [{"input_ids": t(text)["input_ids"]} for text in texts],
    "map-style dataset": lambda t, texts: Repeating([{"input_ids": t(text)["input_ids"]} for text in texts]),
    "map-style dataset of texts": lambda t, texts: Repeating(texts),
    "packed column": lambda t, texts: datasets.Dataset.from_list([packed_row(t, texts)]),
    "packed batch": lambda t, texts: [{name: [value] for name, value in packed_row(t, texts).items()}],
    "stream": lambda t, texts: datasets.Dataset.from_dict(dict(t(texts))).to_iterable_dataset(),
    "text rows": lambda t, texts: [{"text": text} for text in texts],
    "text stream": lambda t, texts: datasets.IterableDataset.from_generator(lambda: ({"text": x} for x in texts)),
    "loader": lambda t, texts: DataLoader(
        datasets.Dataset.from_dict(dict(t(texts))), batch_size=2, collate_fn=DataCollatorWithPadding(t)
    ),
    "flattened": lambda t, texts: DataLoader(
        [{"input_ids": t(text)["input_ids"]} for text in texts], batch_size=3, collate_fn=DataCollatorWithFlattening()
    ),
    **{
        f"packed, {name}": lambda t, texts, name=name: [packed(t, texts)[name]]
        for name in ("positions", "ends", "numbers", "segment_mask", "blocks", "additive_blocks")
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_the_same_documents_in_every_form(form, tokenizer, texts):
    expected = sorted(tokenizer(text)["input_ids"] for text in texts)
    with warnings.catch_warnings(action="error"):
        batches = batches_of(FORMS[form](tokenizer, texts), "retain", tokenizer=tokenizer)
    assert documents_in(batches) == expected


@pytest.mark.parametrize("hint", ["numbers", "positions", "segment_mask"])
def test_padding_between_packed_documents_does_not_join_them(hint, tokenizer, texts):
    """As where each document is padded to a multiple. The control: a document with a hole in it stays one."""
    width, rows = 24, [tokenizer(text)["input_ids"] for text in texts]
    mask = torch.tensor([[number < len(row) for row in rows for number in range(width)]])
    segment = torch.arange(len(rows)).repeat_interleave(width)[None]
    batch = {
        "input_ids": torch.tensor([[token for row in rows for token in [*row, *[0] * width][:width]]]),
        "attention_mask": mask.long(),
        **{
            "numbers": {"seq_idx": segment},
            "positions": {"position_ids": torch.arange(width).repeat(len(rows))[None]},
            "segment_mask": {"attention_mask": (segment + 1) * mask},
        }[hint],
    }
    assert documents_in(batches_of(batch, "retain")) == sorted(rows)
    with pytest.raises(ValueError, match="documents are packed into a row"):
        attention_mask_of(batch)
    whole = {"input_ids": torch.tensor([rows[0]]), "attention_mask": torch.ones(1, len(rows[0])).long()}
    whole["attention_mask"][0, 2] = 0
    for positions in (torch.arange(len(rows[0]))[None], whole["attention_mask"].cumsum(-1) - 1):
        (document,) = documents_in(batches_of(whole | {"position_ids": positions}, "retain"))
        assert document == [*rows[0][:2], *rows[0][3:]]


@pytest.mark.parametrize("form", ["padded", "positions", "segment_mask", "blocks"])
def test_masks_on_another_device_than_the_tokens(form, tokenizer, texts):
    given = padded(tokenizer, texts) if form == "padded" else packed(tokenizer, texts)[form]
    given = {"attention_mask": torch.ones_like(given["input_ids"])} | given
    found = []
    for where in (FIRST, HOST):
        with PretendedDevices():
            placed = {name: tensor.to(FIRST if name == "input_ids" else where) for name, tensor in given.items()}
            found.append(documents_in(batches_of(placed, "retain")))
            if form == "padded":
                assert device_of(attention_mask_of(placed)) == FIRST
    assert found[0] == found[1] == sorted(tokenizer(text)["input_ids"] for text in texts)


def test_document_numbers_are_no_mask(tokenizer):
    """Of a row with one document, whose number is 2: the first token does not count."""
    ids = torch.tensor([tokenizer("A fact about the port .")["input_ids"]])
    (batch,) = batches_of({"input_ids": ids, "attention_mask": torch.full_like(ids, 2)}, "retain")
    assert set(batch.attention_mask.flatten().tolist()) == {1}


def test_the_name_of_a_file_is_no_text(tokenizer):
    with pytest.raises(ValueError, match="`retain` is 'here/retain.jsonl', which seems the name of a file"):
        batches_of("here/retain.jsonl", "retain", tokenizer=tokenizer)


@pytest.mark.parametrize("form", ["left", "loader", "packed, ends", "texts"])
def test_routers_see_the_same_tokens(form, tokenizer, texts):
    """The control: the packed row without what says where documents begin."""

    def counted(retain):
        model = small_model(vocabulary_size=len(tokenizer))
        batches = batches_of(retain, "retain", model, tokenizer)
        seen = MoEModel(model).trace(batches)[0].x_Nd
        return seen[seen.sum(dim=1).sort().indices]

    torch.testing.assert_close(counted(FORMS[form](tokenizer, texts)), counted([padded(tokenizer, texts)]))
    joined = counted([{"input_ids": packed(tokenizer, texts)["ends"]["input_ids"]}])
    assert len(joined) > len(counted([padded(tokenizer, texts)])), "the control"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_without_a_mask_warns(side, tokenizer, texts):
    ids = {"input_ids": padded(tokenizer, texts, side)["input_ids"]}
    for known in (tokenizer, None):
        with pytest.warns(UserWarning, match=r"retain\[0\] has no `attention_mask`, and rows begin or end"):
            batches_of(ids, "retain", tokenizer=known)


IDS = random_batch().input_ids
ERRORS = {
    "none": (None, "`retain` is None: give batches"),
    "number": (3, "`retain` is 3: give batches"),
    "list of none": ([None], r"retain\[0\] is a NoneType: give batches"),
    "null ids": ([{"input_ids": None}], r"retain\[0\]: `input_ids` must be a tensor, .*; this is None"),
    "ragged": ([{"input_ids": [[5, 6], [7]]}], r"`input_ids` must be a tensor, .*; this is a list"),
    "mixed axes": (
        [{"input_ids": IDS[0]}, {"input_ids": IDS}],
        r"retain\[0\]: `input_ids` must be a tensor, .*; this is of shape \(12,\)",
    ),
    "an empty text": ([{"input_ids": [5, 6]}, {"input_ids": []}], r"retain\[1\] is empty: .* has the shape \(1, 0\)"),
    "floats": ([{"input_ids": IDS.float()}], "`input_ids` are token numbers, and these are torch.float32"),
    "no rows": ([{"input_ids": IDS[:0]}], r"retain\[0\] is empty: `input_ids` has the shape \(0, 12\)"),
    "no positions": ([{"input_ids": IDS[:, :0]}], r"retain\[0\] is empty: `input_ids` has the shape \(4, 0\)"),
    "vocabulary": ([{"input_ids": IDS + 64}], r"retain\[0\]: the token \d+ is not in the model's vocabulary of 64"),
    "mask": (
        [{"input_ids": IDS, "attention_mask": torch.ones(4, 11)}],
        r"retain\[0\]: attention_mask must be .* this is a tensor of shape \(4, 11\)",
    ),
    "ends": (
        [{"input_ids": IDS, "cu_seq_lens_q": torch.tensor([0, 9])}],
        r"retain\[0\]: `cu_seq_lens_q` ends at 9, and there are 48 tokens",
    ),
    "not causal": (
        [{"input_ids": IDS, "attention_mask": torch.ones(4, 1, 12, 12).bool()}],
        r"retain\[0\]: a 4-D attention_mask must be causal",
    ),
    "texts": (["some text"], "`retain` holds texts, and `tokenizer` is None: give the model's tokenizer"),
    "columns": (datasets.Dataset.from_dict({"question": ["a"]}), "`retain` has the columns question: give `input_ids`"),
    "nothing": ([], "nothing to trace: no batches were given"),
    "single tokens": ([{"input_ids": torch.tensor([[5], [6]])}], "no retain token counts: padding does not"),
    "all padding": (
        [{"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.zeros(2, 3)}],
        "no retain token counts: padding does not",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_is_no_retain_data_is_named(case):
    retain, message = ERRORS[case]
    model = small_model()
    with pytest.raises(ValueError, match=message):
        gripmoe.constrain(model, torch.optim.SGD(model.parameters(), lr=0.1), retain)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("method", ["seuf", "forget_side", "combined"])
@pytest.mark.parametrize("case", ["single tokens", "all padding"])
def test_forget_data_without_a_token_that_counts_is_named(case, method):
    """Where the method looks at it, which a frozen router does not: the control."""
    model, (forget, message) = small_model(), ERRORS[case]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message.replace("retain", "forget")):
        gripmoe.constrain(model, optimizer, [random_batch()], forget=forget, method=method)
    assert not any(module._forward_hooks for module in model.modules())
    gripmoe.constrain(model, optimizer, [random_batch()], forget=forget, method="frozen_router").close()


def test_what_has_no_tokens_is_an_error_with_a_remedy(tokenizer):
    model = small_model()
    chats = [{"messages": [{"role": "user", "content": "who ?"}]}]
    for data in (chats, datasets.Dataset.from_list(chats)):
        with pytest.raises((KeyError, ValueError), match="of conversations, apply the chat template first"):
            batches_of(data, "retain", tokenizer=tokenizer)
    splits = datasets.DatasetDict(train=datasets.Dataset.from_list([{"text": "a"}]))
    with pytest.raises(KeyError, match="only train: .*; of these splits give one"):
        batches_of(splits, "retain", tokenizer=tokenizer)
    with pytest.raises(KeyError, match=r"retain\[0\] has no `input_ids`, only ids"):
        gripmoe.constrain(model, torch.optim.SGD(model.parameters(), lr=0.1), [{"ids": IDS}])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": 3}, "`method` is 3: give the name of a method or a gripmoe.config.methods.Method"),
        ({"method": None}, "`method` is None: give the name"),
        ({"method": {"constraint": "frozen"}}, "`method` is {'constraint': 'frozen'}: give the name"),
        ({"loss_bound": "x"}, "`loss_bound` is 'x'"),
        ({"loss_bound": float("nan")}, "`loss_bound` is nan"),
        ({"loss_bound": -1.0}, "`loss_bound` is -1.0: give a retain loss above 0"),
        ({"seed": "s"}, "`seed` is 's'"),
        ({"replay": 1}, "`replay` is 1"),
        ({"original": "x"}, "`original` is a str: give a copy of the model"),
        ({"forget": None}, "`forget` is None: give batches"),
        ({"forget": ["text"]}, "`forget` holds texts, and `tokenizer` is None: give"),
        ({"forget": ["text"], "tokenizer": "gpt2"}, "`forget` holds texts, and `tokenizer` is 'gpt2': give"),
    ],
)
def test_a_wrong_argument_is_named(settings, message):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        gripmoe.constrain(model, optimizer, [random_batch()], **settings)
    if "holds texts" not in message:  # which the trainer's own tokenizer reads
        with pytest.raises(ValueError, match=message):
            gripmoe.trainer_callback([random_batch()], **settings)


@pytest.mark.parametrize("hint", ["positions", "ends", "numbers", "segment_mask", "blocks"])
def test_a_marked_pass_with_packed_documents_is_refused(hint, tokenizer, texts):
    """The control: the same row without what says where documents begin."""
    batch = packed(tokenizer, texts)[hint]
    with pytest.raises(ValueError, match="documents are packed into a row|attention_mask must be a tensor"):
        attention_mask_of(batch)
    assert attention_mask_of({"input_ids": batch["input_ids"]}).all()


def test_a_marked_pass_with_padding_and_no_mask_warns():
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    batch = random_batch()  # padded with 0
    with gripmoe.constrain(model, optimizer, [batch], method="expert_specific_minibatch") as handle:
        with pytest.warns(UserWarning, match=r"a pass within `with handle.retain\(\):` has no `attention_mask`"):
            with handle.retain():
                model(input_ids=batch.input_ids)
        with warnings.catch_warnings(action="error"), handle.retain():
            model(**batch.inputs)


def test_a_handle_refuses_a_packed_row_in_training(tokenizer, texts):
    model = small_model(vocabulary_size=len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    batch = packed(tokenizer, texts)["ends"]
    with gripmoe.constrain(model, optimizer, [batch], method="expert_specific_minibatch") as handle:
        with pytest.raises(ValueError, match="documents are packed into a row .`cu_seq_lens_q`.: give each document"):
            with handle.retain():
                model(**batch)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_tokens_may_be_narrow_integers(dtype):
    """As files of tokens hold them."""
    model = small_model()
    given = ({"input_ids": ids, "attention_mask": torch.ones_like(IDS)} for ids in (IDS, IDS.to(dtype)))
    (wide,), (narrow,) = (batches_of(batch, "retain", model) for batch in given)
    assert torch.equal(narrow.input_ids, wide.input_ids) and narrow.input_ids.dtype == torch.int64


def test_a_table_is_refused(tokenizer, texts):
    """Its iterator gives the names of its columns."""
    model = small_model()
    table = pytest.importorskip("pandas").DataFrame({"text": texts, "source of text": texts})
    with pytest.raises(ValueError, match="`retain` is a DataFrame: give its texts, such as"):
        gripmoe.constrain(model, torch.optim.SGD(model.parameters()), table, tokenizer=tokenizer)
