"""`jax.lax.scan` over layers whose parameters stay in host memory, with one or two layers on the device at a time.

The whole loop is one differentiable operation. The forward pass keeps the carries (the input of each layer). The
backward pass visits the layers in reverse and recomputes one layer at a time with `jax.vjp`. It writes each slice of
the gradient in place into a stack on the host. The design relies on these properties (jax 0.10.2, libtpu 0.0.51):

- The gradient of a host leaf is a host value: JAX requires a cotangent to have the memory space of its primal.
- The stack of gradients is the loop's stacked output. XLA allocates it in host memory, without zeros on the device, and
  returns it from the program without a second copy.
- With `prefetch` the next slice is part of the carry, so its copy can overlap with the whole current layer. Without
  `prefetch`, a copy can overlap only with operations of its own layer that do not read the slice.

Limits. Reverse mode only, as for every `jax.custom_vjp`. With `prefetch`, each pass fetches one slice more than there
are layers: omitting the fetch in the last iteration would mean compiling the body twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ..core import (
    PlacementError,
    StructureError,
    Tree,
    check_choice,
    check_host_slices,
    closure_convert,
    combine,
    leaves_with_paths,
    memory_space,
    num_layers,
)
from ._host_memory import DEVICE, HOST, entry_shape, put, warn_of_tall_tiles, warn_without_host_memory


def scan(
    body: Callable[[Tree, Tree], tuple[Tree, Tree]],
    init: Tree,
    xs: Tree,
    *,
    prefetch: bool = True,
    inputs: Literal["device", "host"] = "device",
) -> tuple[Tree, Tree]:
    """Run `jax.lax.scan` with `xs` in host memory, layer by layer; the backward pass recomputes each layer.

    Args:
        body: ``body(carry, x) -> (carry, y)``, as for `jax.lax.scan`. It receives its slice in device memory. It may
            close over any values, including differentiated ones.
        init: initial carry, the input of the first layer.
        xs: stacked parameters, every leaf of shape ``[num_layers, ...]``. Leaves in host memory are streamed; leaves
            in device memory are indexed there. Leaves of shape ``[num_layers]`` move to the device before the loop.
        prefetch: whether to fetch the next slice while the current layer computes; it takes memory for one more slice.
        inputs: memory, ``"device"`` or ``"host"``, that keeps the input of each layer until the backward pass.

    Returns:
        ``(carry, ys)``, as `jax.lax.scan` returns them. Gradients with respect to host leaves of `xs` are on the host.

    Raises:
        StructureError: when `xs` has no leaf, or the leading axes of its leaves differ or are 0.
        PlacementError: when no leaf of `xs` is in host memory, or `body` computes with a value in host memory. Also on
            a GPU whose XLA reads slices of host memory at a wrong offset.
        ConfigError: for an unknown `inputs`.

    Warns:
        PlacementWarning: when traced for a compile-only device that has no host memory. Also for 8- and 4-bit leaves
            that a TPU's compiler copies whole; the warning names a libtpu option that prevents the copies.

    Memory:
        The device holds two slices of `xs` (one without `prefetch`), the residuals and gradient of one layer, and `ys`.
        When differentiated, it also holds num_layers carries, which ``inputs="host"`` moves to the host. The host holds
        `xs`, and as much again for its gradient.

    Examples:
        >>> from lowtide.offload import to_host
        >>> xs = to_host({"w": jnp.full((3, 2), 2.0)})
        >>> step = jax.jit(jax.grad(lambda xs, h: jnp.sum(scan(lambda h, x: (h * x["w"], None), h, xs)[0])))
        >>> grads = step(xs, jnp.ones(2))
        >>> grads["w"].sharding.memory_kind, float(grads["w"].sum())
        ('pinned_host', 24.0)

    References:
        JAX's tutorial "Memories and host offloading", which streams parameters without a custom gradient rule.
    """
    hint = 'pass inputs="host" to keep them in host memory until the backward pass'
    check_choice("inputs", inputs, ("device", "host"), hint=hint)
    length = num_layers(xs)
    leaves = leaves_with_paths(xs)
    if any(memory_space(leaf) == HOST for _, leaf in leaves):
        warn_of_tall_tiles(leaves)
    elif not warn_without_host_memory("scan", "the layers"):
        problem = f"{leaves[0][0]}: no leaf of xs is in host memory, so there is nothing to stream"
        listed = ", ".join(path for path, _ in leaves[:6]) + (", …" if len(leaves) > 6 else "")
        got = f"{len(leaves)} leaves in device memory: {listed}"
        hint = "place them with lt.offload.to_host before the jitted function is called, or use jax.lax.scan"
        raise PlacementError(problem, got=got, hint=hint)
    # XLA cannot slice a stack of scalars in a TPU's host memory, so such a stack is moved to the device whole.
    xs = jax.tree.map(lambda leaf: put(leaf, DEVICE) if jnp.ndim(leaf) == 1 else leaf, xs)
    init = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf), init)
    if not length:
        raise StructureError("scan has no layers", hint="use jax.lax.scan, which accepts 0 layers")
    try:
        closed = closure_convert(body, init, jax.tree.map(entry_shape, xs))
    except ValueError as error:
        if "memory_space of all inputs passed to" not in str(error):
            raise
        paths = [path for path, leaf in leaves_with_paths({"init": init}) if memory_space(leaf) == HOST]
        listed = ", ".join(paths[:8]) + (f", … ({len(paths) - 8} more)" if len(paths) > 8 else "")
        raise PlacementError(
            f"{listed or 'a captured value'}: the body of scan computes with a value in host memory",
            got=str(error).splitlines()[0],
            hint="move it with lt.offload.to_device inside the jitted function",
        ) from error
    structure = jax.tree.structure(closed.shapes)

    def pure(carry: Tree, x: Tree, *tracers: Any) -> tuple[Tree, Tree]:
        return structure.unflatten(closed(jax.tree.leaves((carry, x)), tracers))

    run = _differentiable(pure, prefetch=prefetch, inputs_on_host=inputs == "host")
    return run(init, xs, tuple(closed.tracers))


def _differentiable(body: Callable[..., Any], *, prefetch: bool, inputs_on_host: bool) -> Callable[..., Any]:
    @jax.custom_vjp
    def run(init: Tree, xs: Tree, closed: Tree) -> tuple[Tree, Tree]:
        return _stream(lambda carry, x: body(carry, x, *closed), init, xs, prefetch=prefetch)

    def forward(init: Tree, xs: Tree, closed: Tree) -> tuple[Any, Any]:
        def step(carry: Tree, x: Tree) -> tuple[Tree, Tree]:
            next_carry, y = body(carry, x, *closed)
            floating, rest = _split_inexact(carry)
            return next_carry, (y, put(floating, HOST) if inputs_on_host else floating, rest)

        carry, (ys, *saved) = _stream(step, init, xs, prefetch=prefetch)
        return (carry, ys), (saved, xs, closed)

    def backward(residuals: Any, cotangents: Any) -> Any:
        saved, xs, closed = residuals
        d_carry, d_ys = (_split_inexact(cotangent)[0] for cotangent in cotangents)
        floating_xs = _split_inexact(xs)[0]
        closed, closed_rest = _split_inexact(closed)

        def step(state: Tree, slices: Tree) -> tuple[Tree, Tree]:
            d_carry, d_closed = state
            (carry, carry_rest), x, d_y = slices
            x, x_rest = _split_inexact(x)

            def layer(carry: Tree, x: Tree, closed: Tree) -> Tree:
                captured = combine(closed, closed_rest)
                return _split_inexact(body(combine(carry, carry_rest), combine(x, x_rest), *captured))[0]

            # `jax.vjp` of one layer recomputes its forward pass, so residuals exist for one layer at a time.
            out, vjp = jax.vjp(layer, carry, x, closed)
            d_carry, d_x, d_layer_closed = vjp(jax.tree.map(_match_memory, (d_carry, d_y), out))
            return (d_carry, jax.tree.map(_add, d_closed, d_layer_closed)), jax.tree.map(
                _match_memory, d_x, floating_xs
            )

        # Gradients of captured values are sums over all layers, so they are part of the carry.
        zeros = jax.tree.map(lambda leaf: _match_memory(jnp.zeros(leaf.shape, leaf.dtype), leaf), closed)
        (d_init, d_closed), d_xs = _stream(step, (d_carry, zeros), (saved, xs, d_ys), prefetch=prefetch, reverse=True)
        return d_init, d_xs, d_closed

    run.defvjp(forward, backward)
    return run


def _stream(
    step: Callable[[Tree, Tree], tuple[Tree, Tree]], init: Tree, stacked: Tree, *, prefetch: bool, reverse: bool = False
) -> tuple[Tree, Tree]:
    """Run `jax.lax.scan` over slices of `stacked`; host leaves are moved to the device one slice at a time."""
    leaves, treedef = jax.tree.flatten(stacked)
    length = leaves[0].shape[0]
    if any(memory_space(leaf) == HOST for leaf in leaves):
        check_host_slices()

    def entry_at(leaf: Any, index: Any) -> Any:
        return jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)

    def fetch(index: Any) -> list[Any]:
        return [put(entry_at(leaf, index), DEVICE) if memory_space(leaf) == HOST else None for leaf in leaves]

    def body(state: Any, index: Any) -> Any:
        carry, prefetched = state
        next_entries = (
            fetch(jnp.maximum(index - 1, 0) if reverse else jnp.minimum(index + 1, length - 1)) if prefetch else []
        )
        entries = prefetched if prefetch else fetch(index)
        slices = [
            entry_at(leaf, index) if entry is None else entry for leaf, entry in zip(leaves, entries, strict=True)
        ]
        carry, out = step(carry, treedef.unflatten(slices))
        return (carry, next_entries), out

    first_entries = fetch(length - 1 if reverse else 0) if prefetch else []
    (carry, _), outs = jax.lax.scan(body, (init, first_entries), jnp.arange(length), reverse=reverse)
    return carry, outs


def _split_inexact(tree: Tree) -> tuple[Tree, Tree]:
    """Split a tree into inexact leaves, which have gradients, and all others; None replaces missing leaves."""
    floating = jax.tree.map(lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else None, tree)
    return floating, jax.tree.map(lambda leaf: None if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf, tree)


def _match_memory(value: Any, leaf: Any) -> Any:
    return put(value, memory_space(leaf))


def _add(total: Any, increment: Any) -> Any:
    return _match_memory(put(total, DEVICE) + put(increment, DEVICE), total)
