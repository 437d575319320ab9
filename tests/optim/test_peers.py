"""AdamW in 8 bits beside bitsandbytes': the parameters after its own test's number of steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowtide.optim import low_precision

pytestmark = pytest.mark.peers
STEPS = 50


def ours(tx: Any, begin: Any, grads: list[Any]) -> Any:
    params = {"w": jnp.asarray(begin)}
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any, grad: Any) -> Any:
        updates, state = tx.update({"w": grad}, state, params)
        return optax.apply_updates(params, updates), state

    for grad in grads:
        params, state = step(params, state, grad)
    return np.asarray(params["w"], np.float64)


@pytest.mark.filterwarnings("ignore")
def test_after_fifty_steps_parameters_are_as_near_to_float32_as_those_of_bitsandbytes() -> None:
    torch = pytest.importorskip("torch")
    bitsandbytes = pytest.importorskip("bitsandbytes")
    rng = np.random.default_rng(0)
    begin = (rng.normal(size=(256, 512)) / 10).astype(np.float32)
    grads = [(rng.normal(size=begin.shape) / 100).astype(np.float32) for _ in range(STEPS)]

    def theirs(kind: Any) -> Any:
        param = torch.nn.Parameter(torch.tensor(begin.copy()))
        tx = kind([param], lr=1e-3, weight_decay=1e-2)
        for grad in grads:
            param.grad = torch.tensor(grad)
            tx.step()
        return param.detach().double().numpy()

    adamw = optax.adamw(1e-3, weight_decay=1e-2)
    wide = ours(adamw, begin, grads)
    np.testing.assert_allclose(wide, theirs(torch.optim.AdamW), atol=1e-5)
    error = {name: np.abs(ours(low_precision(adamw, name), begin, grads) - wide) for name in ("8bit", "companded")}
    peer = np.abs(theirs(bitsandbytes.optim.AdamW8bit) - wide).mean()
    assert error["8bit"].mean() <= min(1.7e-4, 1.05 * peer), (error["8bit"].mean(), peer)
    assert error["companded"].mean() <= 1e-4
    # As a part of what parameters are; without those at 0, of which anything is far.
    large = np.abs(wide) > 0.05
    assert (error["8bit"][large] / np.abs(wide[large])).mean() <= 1.6e-3
