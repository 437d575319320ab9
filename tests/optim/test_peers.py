"""AdamW in 8 bits compared with bitsandbytes: parameters after 50 steps, as in bitsandbytes' tests."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowtide.optim import low_precision
from tests.peers import Peer, thin

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
def test_after_fifty_steps_parameters_are_as_near_to_float32_as_those_of_bitsandbytes(peer: Peer) -> None:
    rng = np.random.default_rng(0)
    begin = (rng.normal(size=(256, 512)) / 10).astype(np.float32)
    grads = [(rng.normal(size=begin.shape) / 100).astype(np.float32) for _ in range(STEPS)]

    def compute() -> dict[str, Any]:
        import bitsandbytes
        import torch

        def run(kind: Any) -> np.ndarray:
            param = torch.nn.Parameter(torch.tensor(begin.copy()))
            tx = kind([param], lr=1e-3, weight_decay=1e-2)
            for grad in grads:
                param.grad = torch.tensor(grad)
                tx.step()
            return param.detach().double().numpy()

        wide = run(torch.optim.AdamW)
        error = np.abs(run(bitsandbytes.optim.AdamW8bit) - wide).mean()
        # Rounded down, because its kernel differs a little between processors.
        error = float(np.floor(error * 1e6) / 1e6)
        return {"parameters": thin(wide.astype(np.float32), 31), "mean error in 8 bits": error}

    want = peer.answer("adamw", compute, {"begin": begin, "first": grads[0], "last": grads[-1], "steps": STEPS})
    adamw = optax.adamw(1e-3, weight_decay=1e-2)
    wide = ours(adamw, begin, grads)
    np.testing.assert_allclose(thin(wide, 31), want["parameters"], atol=1e-5)
    error = {name: np.abs(ours(low_precision(adamw, name), begin, grads) - wide) for name in ("8bit", "companded")}
    limit = min(1.7e-4, 1.05 * want["mean error in 8 bits"])
    assert error["8bit"].mean() <= limit, (error["8bit"].mean(), limit)
    assert error["companded"].mean() <= 1e-4
    # Relative to the parameters, without those near 0.
    large = np.abs(wide) > 0.05
    assert (error["8bit"][large] / np.abs(wide[large])).mean() <= 1.6e-3
