"""Runs of pytest with the plugin, each in a separate process."""

from __future__ import annotations

import os
from typing import Any

import pytest

from ..forks import fork as fork
from ..forks import fork_anywhere as fork_anywhere

HEADER = """
import jax
import jax.numpy as jnp
import pytest

S = jax.ShapeDtypeStruct
PARAMS, X = S((256, 256), jnp.float32), S((64, 256), jnp.float32)


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def step(w, x):
    return w - 0.1 * jax.grad(loss)(w, x)


"""


@pytest.fixture
def run(pytester: pytest.Pytester, fork: Any) -> Any:
    """Run pytest with the plugin on a test file, in a separate process: JAX cannot be imported twice in one."""

    def run(body: str, *arguments: str, name: str = "test_user") -> pytest.RunResult:
        pytester.makepyfile(**{name: HEADER + body})
        flags = ("-p", "lowtide_pytest", "-p", "no:cacheprovider", "--strict-markers", "-W", "error", "-rs")
        # The server has imported jaxtyping, which has a plugin of pytest: pytest warns that it cannot rewrite it.
        rewritten = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
        process = fork("pytest", *flags, *rewritten, *arguments, flags=os.environ["XLA_FLAGS"], folder=pytester.path)
        return pytest.RunResult(process.wait(), process.text.splitlines(), [], 0)

    return run
