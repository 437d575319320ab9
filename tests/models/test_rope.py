"""Rotary frequencies where a document is as long as those of pretraining, and one token longer."""

import dataclasses
import typing
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from lowtide.core import ConfigError
from lowtide.models import DecoderConfig, RopeScaling
from lowtide.models._config import ROPE_FIELDS, RopeType
from lowtide.models._rope import frequencies

CONFIG = DecoderConfig(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8
)


def test_longer_documents_than_those_of_pretraining_have_the_long_factors():
    short, long = (1.0, 1.0, 2.0, 2.0), (4.0, 4.0, 8.0, 8.0)
    scaling = RopeScaling(
        rope_type="longrope", factor=4.0, original_max_position_embeddings=16, short_factor=short, long_factor=long
    )
    config = dataclasses.replace(CONFIG, rope_scaling=scaling)
    plain, _ = frequencies(CONFIG, None)
    found, _ = frequencies(config, jnp.array([[1, 16, 17]]))
    np.testing.assert_allclose(found[0], [plain / np.array(each) for each in (short, short, long)], rtol=1e-6)


def test_the_base_grows_from_the_first_token_beyond_the_context():
    config = dataclasses.replace(
        CONFIG, max_position_embeddings=16, rope_scaling=RopeScaling(rope_type="dynamic", factor=2.0)
    )
    plain, _ = frequencies(CONFIG, None)
    found, _ = frequencies(config, jnp.array([[1, 16, 17]]))
    np.testing.assert_allclose(found[0, :2], [plain, plain], rtol=1e-6)
    assert (np.asarray(found)[0, 2, 1:] < np.asarray(plain)[1:]).all()


def test_an_unknown_type_of_scaling_is_one_error() -> None:
    assert typing.get_args(RopeType) == tuple(ROPE_FIELDS)
    known = '"linear", "dynamic", "llama3", "yarn", "longrope" or "proportional"'
    unknown: Any
    for unknown, hint in (("yarm", 'hint: did you mean "yarn"?'), ("default", ""), (None, "")):
        with pytest.raises(
            ConfigError, match=f"rope_type of RoPE scaling must be {known}, not {unknown!r}(.|\n)*{hint}"
        ):
            RopeScaling(rope_type=unknown, factor=2.0)
    with pytest.raises(ConfigError, match="rope_type of RoPE scaling"):
        dataclasses.replace(RopeScaling(rope_type="linear", factor=2.0), rope_type=unknown)
