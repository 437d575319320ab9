"""First values out of the weight itself: PiSSA, OLoRA, and LoftQ, which makes up for what quantisation lost.

With PiSSA and OLoRA the adapter begins as a part of the weight, which has to leave the weight for that. PEFT takes it
off the weight, and so has another base than before. Here the base stays, for other adapters and for files: the node
keeps the first factors, frozen, and takes their product off what it adds. So a saved adapter is B A - B0 A0, a plain
one of twice the rank, for the base as it was.

Sources: Meng et al., "PiSSA" (arXiv:2404.02948); Büyükakyüz, "OLoRA" (arXiv:2406.01775); Li et al., "LoftQ"
(arXiv:2310.08659). Known inefficiency: singular values are all computed, and a few are used.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ... import quant
from ...core import ConfigError, LinearWeight, StructureError, Tree, is_count
from ...core import memory_space as space_of
from ._adapter import placed
from ._config import Config
from ._sites import adapted_sites, replace
from ._weight import LoRAWeight

IN_THE_WEIGHT = ("pissa", "olora")
"""Words of `Config.init` whose factors are a part of the weight."""


def principal(weight: Any, rank: int, scaling: float, init: str) -> tuple[Array, Array]:
    """Return the factors A [*L, r, in] and B [*L, out, r] of the part of a weight that an adapter begins as.

    Args:
        weight: [*L, out, in], an array or one in few bits.
        rank: of the adapter.
        scaling: the factor of B A, so that ``scaling * B A`` is that part.
        init: "pissa" for the largest singular values, "olora" for the first columns of a QR decomposition.

    Memory:
        One matrix in float32 and its decomposition.
    """
    if len(weight.shape) == 2:
        return _of_matrix(weight, rank, scaling, init)
    each = [_of_matrix(_layer(weight, index), rank, scaling, init) for index in range(weight.shape[0])]
    return jnp.stack([a for a, _ in each]), jnp.stack([b for _, b in each])


def loftq(
    model: Tree, config: Config, format: str = "nf4", *, key: Array, num_steps: int = 1, block: int | None = None
) -> Tree:
    """Quantise weights and give them adapters that begin as what quantisation lost of them.

    In turn Q is the quantised W - s B A, and s B A the best approximation of W - Q of its rank.

    Args:
        model: whose targets are matrices in floating-point numbers.
        config: of LoRA, without DoRA; its `init` is "peft".
        format: of the quantised weights, as of `lowtide.quantize`.
        key: a JAX random key.
        num_steps: how often both are done. With 1, Q is the quantised W, so the base is that of `lowtide.quantize`, and
            the saved adapter belongs to that. With more, Q is another: keep it, or merge.
        block: as of `lowtide.quantize`.

    Returns:
        The model with a `LoRAWeight` on a `lowtide.QuantizedWeight` in place of each target.

    Raises:
        ConfigError: for DoRA, another `init`, a number of steps below 1, and a format that is unknown.
        StructureError: for a target that is quantised already; and as `add`.
        SelectionError: as `add`.

    Memory:
        The quantised weights and adapters; of one matrix three copies in float32, and its decomposition. The model's
        own weights stay until it is dropped.

    Examples:
        >>> from lowtide.adapters.lora import Config, loftq
        >>> w = jax.random.normal(jax.random.key(0), (32, 64))
        >>> node = loftq({"w": w}, Config(rank=4, targets="w"), "int4", key=jax.random.key(1))["w"]
        >>> lost = w - node.weight.dense()
        >>> bool(jnp.linalg.norm(lost - node.scaling * node.lora_b @ node.lora_a) < jnp.linalg.norm(lost))
        True

    References:
        Li et al., "LoftQ: LoRA-Fine-Tuning-Aware Quantization for Large Language Models" (arXiv:2310.08659).
    """
    from ._model import add

    if not is_count(num_steps, 1):
        raise ConfigError(
            f"num_steps: {num_steps!r} is no number of steps",
            expected="at least 1",
            got=repr(num_steps),
            hint="1 leaves the quantised weights as they are without adapters",
        )
    if config.dora or config.init != "peft":
        raise ConfigError(
            "LoftQ begins with factors of its own, of plain LoRA",
            expected='dora=False, init="peft"',
            got=f"dora={config.dora}, init={config.init!r}",
            hint="leave both out",
        )
    form = quant.format_named(format, block)
    before = {site.index for site in adapted_sites(model)}
    added = add(model, config, key=key)
    nodes: dict[int, Any] = {}
    for site in adapted_sites(added):
        node = site.node
        if site.index in before or not isinstance(node, LoRAWeight):
            continue
        if isinstance(node.weight, LinearWeight):
            raise StructureError(
                f"{site.path}: is quantised already, and what that lost is not known",
                expected="an array of floating-point numbers",
                got=type(node.weight).__name__,
                hint="give loftq the model as it was before lowtide.quantize",
            )
        nodes[site.index] = _started(node, form.name, block, num_steps)
    return replace(added, nodes)


def _started(node: LoRAWeight, form: str, block: int | None, num_steps: int) -> LoRAWeight:
    weight, rank = node.weight, node.rank
    if isinstance(weight, jax.ShapeDtypeStruct):
        made = jax.eval_shape(lambda w: quant.quantize({"w": w}, "w", form, block=block)["w"], weight)
        return dataclasses.replace(node, weight=made)

    def of_one(matrix: Any, is_on: bool) -> tuple[Any, Array, Array]:
        whole = _dense(matrix)
        lora_a, lora_b = jnp.zeros((rank, whole.shape[1])), jnp.zeros((whole.shape[0], rank))
        codes: Any = None
        for _ in range(num_steps if is_on else 1):
            rest = whole - node.scaling * jnp.matmul(lora_b, lora_a, precision=jax.lax.Precision.HIGHEST)
            codes = quant.quantize({"w": rest}, "w", form, block=block)["w"]
            if is_on:
                lora_a, lora_b = _pissa(whole - codes.dense(jnp.float32), rank, node.scaling)
        return dataclasses.replace(codes, weight_dtype=jnp.dtype(weight.dtype).name), lora_a, lora_b

    if weight.ndim == 2:
        codes, lora_a, lora_b = of_one(weight, True)
    else:
        on = [True] * len(weight) if node.layer_scale is None else [bool(scale) for scale in node.layer_scale]
        each = [of_one(weight[index], on[index]) for index in range(len(weight))]
        codes, lora_a, lora_b = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    return placed(dataclasses.replace(node, weight=codes, lora_a=lora_a, lora_b=lora_b))


def _layer(weight: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], weight)


def _dense(matrix: Any) -> Float[Array, "out in"]:
    """Return a matrix in float32, on the device."""
    dense: Any = matrix.dense(jnp.float32) if isinstance(matrix, LinearWeight) else matrix  # pyright: ignore
    if isinstance(dense, jax.Array) and not isinstance(dense, jax.core.Tracer):
        if space_of(dense) == jax.memory.Space.Host:
            dense = jax.device_put(dense, jax.memory.Space.Device)
    return jnp.asarray(dense, jnp.float32)


def _of_matrix(matrix: Any, rank: int, scaling: float, init: str) -> tuple[Array, Array]:
    return (_pissa if init == "pissa" else _olora)(_dense(matrix), rank, scaling)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _pissa(matrix: Float[Array, "out in"], rank: int, scaling: float) -> tuple[Array, Array]:
    u, s, vt = jnp.linalg.svd(matrix, full_matrices=False)
    root = jnp.sqrt(s[:rank] / scaling)
    return root[:, None] * vt[:rank], u[:, :rank] * root[None, :]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _olora(matrix: Float[Array, "out in"], rank: int, scaling: float) -> tuple[Array, Array]:
    # As in PEFT, what leaves the weight is `scaling` times this product.
    q, r = jnp.linalg.qr(matrix)
    return r[:rank], q[:, :rank]
