"""A weight that a program rounds, and multiplies in a wider dtype, is rounded with an adapter or in few bits, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lowtide as lt
from lowtide.adapters.lora import LoRAKernel
from lowtide.core import map_with_paths

KEY, HALF, WIDE = jax.random.key(0), jnp.bfloat16, jnp.float32


def drawn(*shape: int, seed: int = 0) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def _convolved(x: Any, w: Any, **options: Any) -> Any:
    return jax.lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"), **options)


def _scanned(x: Any, w: Any, **options: Any) -> Any:
    return jax.lax.scan(lambda h, one: (h + jnp.matmul(x, one, **options), None), jnp.zeros((3, 64)), w)[0]


PRODUCTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[..., Any]]] = {
    "a matrix": ((3, 64), (64, 8), jnp.matmul),
    "a matrix [out, in]": ((3, 64), (8, 64), lambda x, w, **options: jnp.matmul(x, w.T, **options)),
    "heads": ((3, 64), (64, 2, 4), lambda x, w, **options: jnp.einsum("bi,ihk->bhk", x, w, **options)),
    "a convolution": ((3, 7, 8), (3, 8, 4), _convolved),
    "a stack": ((3, 64), (2, 64, 64), _scanned),
    "a batch": ((3, 2, 64), (2, 64, 8), lambda x, w, **options: jnp.einsum("bei,eio->beo", x, w, **options)),
}
"""Shapes of x and w, and what is done with both."""


def program(product: Callable[..., Any], of_x: Any) -> Callable[..., Any]:
    """A product with the rounded weight, summed and given in float32."""
    options = {"preferred_element_type": WIDE} if of_x == HALF else {}
    return lambda w, x: product(x.astype(of_x), w["w"].astype(HALF), **options)


def summed(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda model, x: jnp.sum(jnp.sin(fn(model, x)))


def rounded(model: Any) -> Any:
    """W + s B A of a model with adapters, of which W is rounded."""
    node = model["w"]
    stack = node.num_stacked if isinstance(node, LoRAKernel) else node.ndim - 2
    product: Callable[..., Any] = lambda b, a: jnp.tensordot(b, a, 1)  # noqa: E731
    for _ in range(stack):
        product = jax.vmap(product)
    delta = product(node.lora_b, node.lora_a)
    return {"w": node.weight.astype(HALF).astype(WIDE) + node.scaling * delta}


# Every product once, and both dtypes of x for one; JAX convolves operands of one dtype.
DTYPES = {"heads": WIDE, "a stack": WIDE}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("case", "of_x"), [*((case, DTYPES.get(case, HALF)) for case in PRODUCTS), ("a matrix", WIDE)])
def test_the_base_is_rounded_and_factors_are_not(case: str, of_x: Any) -> None:
    of, shape, product = PRODUCTS[case]
    fn, x, base = program(product, of_x), drawn(*of), {"w": drawn(*shape, seed=1) / 8}
    model = lt.lora.add(base, lt.lora.Config(rank=2, alpha=3.0, targets="w"), key=KEY, fn=fn, args=(x,))
    plain = lambda model, x: product(x.astype(of_x).astype(WIDE), rounded(model)["w"])  # noqa: E731
    np.testing.assert_allclose(lt.adapted(fn)(model, x), plain(model, x), rtol=1e-5, atol=1e-5)  # B is zero
    model = map_with_paths(lambda path, leaf: drawn(*leaf.shape) / 8 if "lora_" in path else leaf, model)
    found, expected = (
        jax.jit(lt.value_and_grad(summed(each), "**/lora_*"))(model, x) for each in (lt.adapted(fn), plain)
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("kind", ["int8", "nf4", "LoRA on int8", "DoRA", "(IA)³", "VeRA"])
def test_so_is_that_of_other_kinds(kind: str) -> None:
    of, shape, product = PRODUCTS["a matrix [out, in]"]
    x, base = drawn(*of), {"w": drawn(*shape, seed=1) / 8}
    if kind.endswith(("int8", "nf4")):
        base = lt.quantize(base, "w", kind[-4:].strip())
    configs: dict[str, Any] = {
        "LoRA on int8": lt.lora.Config(rank=2, targets="w"),
        "DoRA": lt.lora.Config(rank=2, targets="w", dora=True),
        "(IA)³": lt.lora.IA3Config(targets="w", feedforward=()),
        "VeRA": lt.lora.VeRAConfig(rank=2, targets="w"),
    }
    model = lt.lora.add(base, configs[kind], key=KEY) if kind in configs else base
    dense = lt.dequantize(base) if kind.endswith(("int8", "nf4")) else base
    for of_x in (HALF, WIDE):
        fn = program(product, of_x)
        # DoRA's magnitudes are the norms of the weight that was not rounded.
        bound = 2e-3 if kind == "DoRA" else 1e-5
        np.testing.assert_allclose(jax.jit(lt.adapted(fn))(model, x), fn(dense, x), rtol=bound, atol=bound)


def test_the_rounded_weight_does_not_wait_for_the_backward_pass() -> None:
    fn = program(jnp.matmul, WIDE)
    model = lt.lora.add({"w": drawn(64, 8)}, lt.lora.Config(rank=2, targets="w"), key=KEY)
    _, back = jax.vjp(
        lambda b: lt.adapted(fn)({"w": dataclasses.replace(model["w"], lora_b=b)}, drawn(3, 64)), _b(model)
    )
    assert HALF not in {leaf.dtype for leaf in jax.tree.leaves(back)}


def _b(model: Any) -> Any:
    return model["w"].lora_b


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("wider", [True, False])
def test_layers_of_flax_in_mixed_precision_begin_as_the_base(wider: bool) -> None:
    options: Any = {"preferred_element_type": WIDE} if wider else {}
    layer = nnx.Linear(64, 8, dtype=HALF, param_dtype=WIDE, rngs=nnx.Rngs(0), **options)
    graph, state = nnx.split(layer)
    params, x = nnx.to_pure_dict(state), drawn(3, 64)

    def fn(params: Any, x: Any) -> Any:
        own = nnx.state(nnx.merge(graph, state))
        nnx.replace_by_pure_dict(own, params)
        return nnx.merge(graph, own)(x)

    with jax.numpy_rank_promotion("allow"):
        model = lt.lora.add(params, lt.lora.Config(rank=2, targets="kernel"), key=KEY, fn=fn, args=(x,))
        found, expected = lt.adapted(fn)(model, x), fn(params, x)
    assert found.dtype == expected.dtype == (WIDE if wider else HALF)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 if wider else 0)
