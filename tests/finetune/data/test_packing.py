import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.finetune.data import best_fit
from lowtide.finetune.data._encode import Store
from lowtide.finetune.data._pack import IGNORE, Rows, RowSource, cut_documents

SEQ_LEN = 16
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def _store(lengths, seed=0):
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.arange(1, offsets[-1] + 1, dtype=np.int32)  # each once, so that it says where it is from
    learned = rng.integers(0, 2, offsets[-1]).astype(np.uint8)
    return Store(tokens=tokens, learned=learned, offsets=offsets, kind="text", num_blank=0, digest="")


@given(LENGTHS, st.sampled_from(["cut", "split", "drop"]), st.booleans())
def test_every_token_is_in_one_row_and_labels_stay_in_their_document(lengths, too_long, is_packed):
    store = _store(lengths)
    pieces = cut_documents(store.lengths, np.arange(len(lengths)), SEQ_LEN, too_long)
    count = len(pieces.length)
    rows = best_fit(pieces.length, SEQ_LEN) if is_packed else Rows(np.arange(count), np.arange(count + 1))
    source = RowSource(store, pieces, rows, SEQ_LEN)
    seen: list[int] = []
    for i in range(len(source)):
        row = source[i]
        assert all(value.shape == (SEQ_LEN,) and value.dtype == np.int32 for value in row.values())
        tokens, labels, segments = row["tokens"], row["labels"], row["segment_ids"]
        is_padding = segments == 0
        assert not is_padding[: np.count_nonzero(segments)].any()
        assert (tokens[is_padding] == 0).all()
        assert (labels[is_padding] == IGNORE).all()
        for segment in range(1, segments.max(initial=0) + 1):
            here = np.flatnonzero(segments == segment)
            own = tokens[here]
            assert (np.diff(own) == 1).all()  # in order, without a gap
            assert np.searchsorted(store.offsets, own[0], "left") == np.searchsorted(store.offsets, own[-1], "left")
            assert (row["positions"][here] == np.arange(len(here))).all()
            assert labels[here[-1]] == IGNORE
            wanted = np.where(store.learned[own[1:] - 1], own[1:], IGNORE)
            assert (labels[here[:-1]] == wanted).all()
            seen += own.tolist()
    assert len(seen) == len(set(seen)) == store.offsets[-1] - pieces.num_cut_tokens
    long = sum(length > SEQ_LEN for length in lengths)
    assert (pieces.num_cut, pieces.num_dropped) == ((0, long) if too_long == "drop" else (long, 0))
    if too_long == "cut":
        assert pieces.num_cut_tokens == sum(max(length - SEQ_LEN, 0) for length in lengths)


@given(st.lists(st.integers(1, SEQ_LEN), min_size=1, max_size=80))
def test_rows_are_not_overfull_and_no_two_would_fit_into_one(lengths):
    lengths = np.asarray(lengths)
    rows = best_fit(lengths, SEQ_LEN)
    full = [lengths[rows.order[a:b]].sum() for a, b in zip(rows.offsets, rows.offsets[1:], strict=False)]
    assert sorted(rows.order) == list(range(len(lengths)))
    assert max(full) <= SEQ_LEN
    assert sum(sorted(full)[:2]) > SEQ_LEN or len(full) == 1


@pytest.mark.parametrize("seq_len", [1024, 4096])
def test_rows_of_log_normal_documents_are_97_percent_full(seq_len):
    lengths = np.random.default_rng(0).lognormal(5.5, 0.9, 20_000).astype(np.int64) + 1
    lengths = np.minimum(lengths, seq_len)
    assert lengths.sum() / (len(best_fit(lengths, seq_len)) * seq_len) >= 0.97
