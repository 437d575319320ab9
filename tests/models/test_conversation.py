"""Conversations: each turn gets the tokens of a fresh start, reads only what is new, and compiles nothing."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from lowtide import models
from lowtide.core import ConfigError, NonFiniteError
from lowtide.models import Sampling, _generation

KEY = jax.random.key(3)


@pytest.fixture
def model(tiny_model_dir: str) -> Any:
    return models.load(tiny_model_dir)


def turns(rng: np.random.Generator, sizes: list[int]) -> list[list[int]]:
    return [rng.integers(1, 300, size).tolist() for size in sizes]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(temperature=0.9, repetition_penalty=1.3)])
def test_a_turn_gets_the_tokens_of_a_fresh_start(
    model: Any, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_generation, "_FEWEST_COLUMNS", 64)
    conversation, text = models.Conversation(model), list[int]()
    for turn in turns(np.random.default_rng(0), [9, 30, 1, 70]):  # the last ones need a longer cache
        text += turn
        answer = list(conversation.stream(text, 8, key=KEY, sampling=sampling))
        assert answer == list(models.stream(model, text, 8, key=KEY, sampling=sampling)) and len(answer) == 8
        text += answer
    changed = [*text[:20], 5, *text[40:]]  # as of a template that leaves out earlier thoughts
    answer = conversation.stream(changed, 8, key=KEY, sampling=sampling)
    assert list(answer) == list(models.stream(model, changed, 8, key=KEY, sampling=sampling))


def test_what_is_read_already_is_not_read_again_and_nothing_is_compiled(
    model: Any, monkeypatch: pytest.MonkeyPatch, compilations: Any
) -> None:
    sizes, read = list[int](), _generation._read_chunk

    def counted(*args: Any) -> Any:
        sizes.append(args[1].shape[1])
        return read(*args)

    monkeypatch.setattr(_generation, "_read_chunk", counted)
    conversation = models.Conversation(model)
    text = list(range(1, 75))
    answer = conversation.stream(text, 6, key=KEY, end_tokens=[299])
    assert next(answer) is not None
    answer.close()  # a text ended it
    text += [7, 8, 9, 10, 11, 12, 13, 14, 15]
    _ = list(conversation.stream(text, 5, key=KEY))
    assert sizes == [64, 8, 1, 1, 8, 1]
    with compilations.none():
        _ = list(conversation.stream([*text, *range(20, 30)], 4, key=KEY))
    assert sizes[6:] == [8, 1, 1]


def test_end_tokens_and_mistakes(model: Any) -> None:
    conversation = models.Conversation(model)
    first = next(conversation.stream([1, 2, 3], 3, key=KEY, sampling=Sampling(temperature=0.0)))
    again = conversation.stream([1, 2, 3], 3, key=KEY, sampling=Sampling(temperature=0.0), end_tokens=[first])
    assert list(again) == []
    with pytest.raises(ConfigError, match="not in the vocabulary"):
        conversation.stream([300], 1, key=KEY)
    broken = jax.tree.map(lambda leaf: leaf * float("nan"), model)
    with pytest.raises(NonFiniteError):
        next(models.Conversation(broken).stream([1], 1, key=KEY))
