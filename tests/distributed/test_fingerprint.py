"""A model has one fingerprint, in whatever order a pipeline keeps its layers."""

import jax.numpy as jnp
import numpy as np

from lowtide.distributed import fingerprint


def test_the_order_of_layers_and_padding_do_not_count_and_each_layer_does():
    layers = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32)
    tree = lambda rows: {"outer": jnp.ones(3), "layers": {"w": jnp.asarray(rows)}}  # noqa: E731
    arrangement = [2, -1, 0, 3, 1]
    rows = np.stack([layers[layer] if layer >= 0 else np.zeros((3, 5), np.float32) for layer in arrangement])
    assert fingerprint(tree(rows), arrangement) == fingerprint(tree(layers))
    for layer in range(4):
        other = layers.copy()
        other[layer, 0, 0] += 1
        rows = np.stack([other[at] if at >= 0 else np.zeros((3, 5), np.float32) for at in arrangement])
        assert fingerprint(tree(rows), arrangement) == fingerprint(tree(other)) != fingerprint(tree(layers))
