"""LoRA on a tree: parity with dense weights, dtypes, recompilation, compiled bytes, bad input."""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide.adapters import lora
from lowtide.core import (
    ConfigError,
    SelectionError,
    StructureError,
    combine,
    leaves_with_paths,
    linear,
    partition,
    tree_bytes,
    value_and_grad,
)
from lowtide.core._compat import tpu_topology_devices

KEY = jax.random.key(0)
MATRIX_BYTES = 4096 * 4096 * 4


def normal(seed, shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32).astype(dtype))


def flat_model(dtype=jnp.float32):
    return {"q_proj": {"weight": normal(1, (12, 8), dtype)}, "head": {"weight": normal(2, (5, 12), dtype)}}


def flat_loss(model, x):
    hidden = jnp.tanh(linear(x, model["q_proj"]["weight"]))
    return jnp.mean(linear(hidden, model["head"]["weight"]).astype(jnp.float32) ** 2)


def stacked_model(dtype=jnp.float32, num_layers=3, dim=8):
    weight = np.random.default_rng(3).normal(size=(num_layers, dim, dim)).astype(np.float32) / np.float32(dim**0.5)
    attn = {"q_proj": {"weight": jnp.asarray(weight.astype(dtype))}}
    return {"layers": {"attn": attn, "norm": {"weight": jnp.ones((num_layers, dim), dtype)}}}


def stacked_loss(model, x):
    def body(h, layer):
        return jnp.tanh(linear(h, layer["attn"]["q_proj"]["weight"])) * layer["norm"]["weight"].astype(h.dtype)[
            None
        ], None

    return jnp.mean(jax.lax.scan(body, x, model["layers"])[0].astype(jnp.float32) ** 2)


def with_random_b(model, seed=7):
    """The model with adapters that do something: B is zero after `add`."""

    def fill(path, leaf):
        is_b = path[-1] == jax.tree_util.GetAttrKey("lora_b")
        return jnp.asarray(np.float32(0.3) * np.asarray(normal(seed, leaf.shape))) if is_b else leaf

    return jax.tree_util.tree_map_with_path(fill, model)


def is_node(node):
    return isinstance(node, lora.LoRAWeight)


def dense(model):
    """Plain JAX: every adapted weight multiplied out in float32."""
    return jax.tree.map(
        lambda n: n.weight.astype(jnp.float32) + n.scaling * (n.lora_b @ n.lora_a) if is_node(n) else n,
        model,
        is_leaf=is_node,
    )


def matrix(node):
    """The same of one node, in NumPy."""
    weight, a, b = (np.asarray(leaf, np.float32) for leaf in (node.weight, node.lora_a, node.lora_b))
    return weight + node.scaling * (b @ a)


CASES = {
    "flat": (flat_model, flat_loss, ("q_proj", "head/weight")),
    "stacked": (stacked_model, stacked_loss, "**/{q,v}_proj"),
}


def build(case, dtype=jnp.float32, rank=2, alpha=6.0):
    make, loss_fn, targets = CASES[case]
    if case == "stacked":
        targets = "**/q_proj"
    return with_random_b(lora.add(make(dtype), lora.Config(rank=rank, alpha=alpha, targets=targets), key=KEY)), loss_fn


class TestParity:
    @pytest.mark.slow_after(1)
    @pytest.mark.parametrize(("case", "jit"), [("flat", False), ("stacked", True)])
    def test_value_and_gradients_equal_those_of_the_dense_weight(self, case, jit):
        model, loss_fn = build(case)
        x = normal(9, (4, 8))
        grad_fn = value_and_grad(loss_fn, wrt="**/lora_*")
        loss, grads = (jax.jit(grad_fn) if jit else grad_fn)(model, x)
        trainable, frozen = partition(model, "**/lora_*")
        want, want_grads = jax.jit(jax.value_and_grad(lambda t: loss_fn(dense(combine(t, frozen)), x)))(trainable)
        np.testing.assert_allclose(loss, want, rtol=1e-5)
        assert jax.tree.structure(grads) == jax.tree.structure(want_grads) == jax.tree.structure(trainable)
        jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6), grads, want_grads)

    @pytest.mark.slow_after(1)
    @pytest.mark.parametrize("case", CASES)
    def test_gradient_of_the_base_equals_that_of_the_dense_weight(self, case):
        model, loss_fn = build(case)
        x = normal(9, (4, 8))
        path = "q_proj/weight/weight" if case == "flat" else "layers/attn/q_proj/weight/weight"
        _, grads = jax.jit(value_and_grad(loss_fn, wrt=path))(model, x)
        trainable, frozen = partition(model, path)
        want = jax.jit(jax.grad(lambda t: loss_fn(dense(combine(t, frozen)), x)))(trainable)
        jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6), grads, want)

    def test_vmap_over_stacked_weights(self):
        model, _ = build("stacked")
        node = model["layers"]["attn"]["q_proj"]["weight"]
        x = normal(9, (3, 4, 8))
        got = jax.jit(jax.vmap(linear))(x, node)
        want = np.einsum("lbi,loi->lbo", x, matrix(node))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("case", CASES)
    def test_a_fresh_adapter_changes_nothing(self, case):
        make, loss_fn, _ = CASES[case]
        model = lora.add(make(), lora.Config(rank=2, targets="**/q_proj"), key=KEY)
        loss_fn = jax.jit(loss_fn)
        assert loss_fn(model, normal(9, (4, 8))) == loss_fn(make(), normal(9, (4, 8)))

    @pytest.mark.parametrize("shape", [(8,), (2, 3, 8)])
    def test_any_number_of_batch_axes(self, shape):
        model, _ = build("flat")
        x = normal(9, shape)
        got = jax.jit(linear)(x, model["q_proj"]["weight"])
        np.testing.assert_allclose(got, np.asarray(x) @ matrix(model["q_proj"]["weight"]).T, rtol=1e-4, atol=1e-5)

    def test_the_base_may_be_any_linear_weight(self):
        @jax.tree_util.register_dataclass
        @dataclasses.dataclass(frozen=True)
        class Doubled:
            half: jax.Array

            def linear(self, x):
                return 2 * linear(x, self.half)

        shapes = ((2, 8), (12, 2), (12, 8), (4, 8))
        a, b, w, x = (np.asarray(normal(seed, shape)) for seed, shape in enumerate(shapes))
        node = lora.LoRAWeight(Doubled(jnp.asarray(w / 2)), jnp.asarray(a), jnp.asarray(b), alpha=3.0)
        np.testing.assert_allclose(jax.jit(linear)(x, node), x @ (w + 1.5 * b @ a).T, rtol=1e-4, atol=1e-5)


# A stack is scanned over weights of any dtype: each dtype once.
@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("case", "base", "compute"),
    [("flat", base, compute) for base in (jnp.float32, jnp.bfloat16) for compute in (jnp.float32, jnp.bfloat16)]
    + [("stacked", jnp.bfloat16, jnp.float32)],
)
def test_dtypes(case, base, compute):
    model, loss_fn = build(case, base)
    x = normal(9, (4, 8), compute)
    adapters, frozen = partition(model, "**/lora_*")
    assert {leaf.dtype for leaf in jax.tree.leaves(adapters)} == {jnp.dtype(jnp.float32)}
    assert {leaf.dtype for leaf in jax.tree.leaves(frozen)} == {jnp.dtype(base)}
    node = (
        model["q_proj"]["weight"]
        if case == "flat"
        else jax.tree.map(lambda leaf: np.asarray(leaf)[0], model)["layers"]["attn"]["q_proj"]["weight"]
    )
    assert jax.eval_shape(linear, x, node).dtype == compute
    loss, grads = jax.jit(value_and_grad(loss_fn, wrt="**/lora_*"))(model, x)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    exact = jax.value_and_grad(lambda t: loss_fn(dense(combine(t, frozen)), x.astype(jnp.float32)))
    want, want_grads = jax.jit(exact)(adapters)
    tolerance = 1e-4 if compute == jnp.float32 else 0.1
    np.testing.assert_allclose(loss, want, rtol=tolerance)
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(want_grads))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance * scale), grads, want_grads)


class TestTree:
    def test_the_glob_selects_exactly_the_adapters(self):
        model, _ = build("stacked")
        assert [path for path, _ in leaves_with_paths(model)] == [
            "layers/attn/q_proj/weight/weight",
            "layers/attn/q_proj/weight/lora_a",
            "layers/attn/q_proj/weight/lora_b",
            "layers/norm/weight",
        ]
        trainable, frozen = partition(model, "**/lora_*")
        assert tree_bytes(trainable) == 3 * 2 * (8 + 8) * 4
        assert jax.tree.structure(combine(trainable, frozen)) == jax.tree.structure(model)

    @pytest.mark.parametrize("leaf", [None, object(), "text", jax.ShapeDtypeStruct((2, 2), jnp.float32)])
    def test_the_node_holds_anything(self, leaf):
        node = lora.LoRAWeight(leaf, leaf, leaf, alpha=1.0)
        leaves, treedef = jax.tree.flatten(node, is_leaf=lambda x: x is None)
        assert leaves[:3] == [leaf] * 3 and leaves[3:] == [None] * 5
        assert treedef.unflatten(leaves) == node

    def test_base_weights_are_not_copied(self):
        base = flat_model()
        model = lora.add(base, lora.Config(rank=2, targets="q_proj"), key=KEY)
        assert model["q_proj"]["weight"].weight is base["q_proj"]["weight"]
        assert model["head"]["weight"] is base["head"]["weight"]

    def test_a_weight_may_be_an_array_of_any_name(self):
        model = lora.add({"wq": jnp.ones((4, 4))}, lora.Config(rank=2, targets="wq"), key=KEY)
        assert is_node(model["wq"])

    def test_exclusion(self):
        model = lora.add(flat_model(), lora.Config(rank=2, targets=["**", "!head", "!head/**"]), key=KEY)
        assert is_node(model["q_proj"]["weight"])
        assert not is_node(model["head"]["weight"])

    @pytest.mark.slow
    def test_an_equinox_module_keeps_its_type(self):
        mlp = eqx.nn.MLP(4, 4, 8, 1, key=KEY)
        model = lora.add(mlp, lora.Config(rank=2, targets="layers/*"), key=KEY)
        assert type(model) is eqx.nn.MLP
        assert all(is_node(layer.weight) for layer in model.layers)
        merged = lora.merge(model)
        np.testing.assert_array_equal(merged(jnp.ones(4)), mlp(jnp.ones(4)))

    def test_shapes_give_abstract_adapters(self):
        shapes = jax.eval_shape(stacked_model)
        model = lora.add(shapes, lora.Config(rank=2, targets="**/q_proj"), key=KEY)
        concrete = lora.add(stacked_model(), lora.Config(rank=2, targets="**/q_proj"), key=KEY)
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model))
        assert jax.eval_shape(lambda: concrete) == model
        assert jax.eval_shape(lora.merge, model) == lora.merge(model) == shapes

    @pytest.mark.slow
    def test_add_under_jit(self):
        config = lora.Config(rank=2, targets="**/q_proj")
        got = jax.jit(lambda model: lora.add(model, config, key=KEY))(stacked_model())
        jax.tree.map(np.testing.assert_array_equal, got, lora.add(stacked_model(), config, key=KEY))

    @pytest.mark.slow
    def test_merge_keeps_a_sharded_layer_axis(self):
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("layers",))
        sharding = jax.sharding.NamedSharding(mesh, jax.P("layers"))
        weight = jax.device_put(normal(1, (8, 4, 4)), sharding)
        model = with_random_b(lora.add({"w": weight}, lora.Config(rank=2, targets="w"), key=KEY))
        merged = lora.merge(model)["w"]
        assert merged.sharding == sharding
        np.testing.assert_allclose(merged, matrix(model["w"]), rtol=1e-5, atol=1e-6)

    @pytest.mark.slow_after(1)
    @pytest.mark.parametrize("abstract", [False, True])
    def test_adapters_follow_the_sharding_of_the_weight(self, abstract):
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
        sharding = jax.sharding.NamedSharding(mesh, jax.P(None, "model", "data"))
        weight = jax.device_put(jnp.zeros((3, 8, 8)), sharding)
        if abstract:
            weight = jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=sharding)
        node = lora.add({"w": weight}, lora.Config(rank=2, targets="w"), key=KEY)["w"]
        assert node.lora_a.sharding.spec == jax.P(None, None, "data")
        assert node.lora_b.sharding.spec == jax.P(None, "model", None)
        if not abstract:
            assert lora.merge({"w": node})["w"].sharding == sharding


class TestInit:
    @pytest.mark.slow
    def test_a_is_uniform_within_the_bound_and_b_zero(self):
        node = lora.add({"w": jnp.ones((64, 256))}, lora.Config(rank=16, targets="w"), key=KEY)["w"]
        bound = 256**-0.5
        assert np.abs(node.lora_a).max() <= bound
        np.testing.assert_allclose(np.std(node.lora_a), bound / 3**0.5, rtol=0.03)
        assert not np.any(node.lora_b)

    def test_draws_depend_on_the_path_not_on_the_other_targets(self):
        model = {"a": {"weight": jnp.ones((8, 8))}, "b": {"weight": jnp.ones((8, 8))}}
        both = lora.add(model, lora.Config(rank=2, targets=["a", "b"]), key=KEY)
        one = lora.add(model, lora.Config(rank=2, targets="b"), key=KEY)
        np.testing.assert_array_equal(both["b"]["weight"].lora_a, one["b"]["weight"].lora_a)
        assert not np.array_equal(both["a"]["weight"].lora_a, both["b"]["weight"].lora_a)

    def test_layers_differ(self):
        node = lora.add(stacked_model(), lora.Config(rank=2, targets="**/q_proj"), key=KEY)["layers"]["attn"]["q_proj"]
        first, second, _ = np.asarray(node["weight"].lora_a)
        assert not np.array_equal(first, second)


class TestMerge:
    @pytest.mark.slow_after(2)
    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_merge_rounds_the_float32_sum_once(self, case, dtype):
        model, loss_fn = build(case, dtype)
        merged = lora.merge(model)
        assert jax.tree.structure(merged) == jax.tree.structure(CASES[case][0](dtype))
        want = jax.tree.map(lambda node: matrix(node) if is_node(node) else node, model, is_leaf=is_node)
        tolerance = 1e-5 if dtype == jnp.float32 else 1e-2  # one unit in the last place where float32 sums differ

        def assert_close(one, other):
            other = np.asarray(other).astype(one.dtype).astype(np.float32)
            np.testing.assert_allclose(np.asarray(one, np.float32), other, rtol=tolerance, atol=1e-6)

        jax.tree.map(assert_close, merged, want)
        if dtype == jnp.float32:
            x, loss_fn = normal(9, (4, 8)), jax.jit(loss_fn)
            np.testing.assert_allclose(loss_fn(merged, x), loss_fn(model, x), rtol=1e-5)

    def test_nothing_to_merge(self):
        with pytest.raises(StructureError, match=r"no adapter to merge(.|\n)*hint: .*already merged"):
            lora.merge(flat_model())

    def test_half_of_a_partition(self):
        trainable, frozen = partition(build("flat")[0], "**/lora_*")
        with pytest.raises(StructureError, match=r"head/weight: the adapter has no weight(.|\n)*hint: .*lt.combine"):
            lora.merge(trainable)
        with pytest.raises(StructureError, match=r"no lora_a and no lora_b"):
            lora.merge(frozen)

    def test_a_base_that_is_no_array(self):
        inner = lora.LoRAWeight(jnp.ones((4, 4)), jnp.ones((1, 4)), jnp.ones((4, 1)), alpha=1.0)
        outer = lora.LoRAWeight(inner, inner.lora_a, inner.lora_b, alpha=1.0)
        with pytest.raises(StructureError, match=r"w: cannot merge into a LoRAWeight(.|\n)*hint: "):
            lora.merge({"w": outer})


@pytest.mark.slow
def test_no_recompilation_on_the_second_call(compilations):
    model, loss_fn = build("stacked")
    step = jax.jit(value_and_grad(loss_fn, wrt="**/lora_*"))
    x = normal(9, (4, 8))
    _, grads = jax.block_until_ready(step(model, x))
    trainable, frozen = partition(model, "**/lora_*")
    updated = jax.block_until_ready(combine(jax.tree.map(lambda p, g: p - g, trainable, grads), frozen))
    lora.merge(model)
    with compilations.none():
        jax.block_until_ready(step(updated, x))
        lora.merge(updated)


def compile_for(fn, *args, tpu=False):
    if tpu:
        mesh = jax.sharding.Mesh(np.array(tpu_topology_devices("v5e:2x2")[:1]), ("device",))
        sharding = jax.sharding.NamedSharding(mesh, jax.P())
        args = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), args)
    traced = (fn if hasattr(fn, "trace") else jax.jit(fn)).trace(*args)
    return (traced.lower(lowering_platforms=("tpu",)) if tpu else traced.lower()).compile()


def compiled_bytes(fn, *args, tpu=False):
    """Output and temporary bytes of a compiled program."""
    stats = compile_for(fn, *args, tpu=tpu).memory_analysis()
    return stats.output_size_in_bytes, stats.temp_size_in_bytes


def single_loss(model, x):
    return jnp.mean(linear(x, model["q_proj"]["weight"]).astype(jnp.float32) ** 2)


def abstract_single(dtype):
    return {"q_proj": {"weight": jax.ShapeDtypeStruct((4096, 4096), dtype)}}


def abstract_stack(dtype, num_layers=4):
    weight = jax.ShapeDtypeStruct((num_layers, 4096, 4096), dtype)
    norm = jax.ShapeDtypeStruct((num_layers, 4096), dtype)
    return {"layers": {"attn": {"q_proj": {"weight": weight}}, "norm": {"weight": norm}}}


class TestBytes:
    """Compiled bytes of loss and gradients for the adapters of [4096, 4096] weights, rank 16, 64 tokens."""

    config = lora.Config(rank=16, targets="**/q_proj")

    @pytest.mark.slow_after(1)
    @pytest.mark.parametrize("tpu", [False, pytest.param(True, marks=pytest.mark.tpu_aot)], ids=["cpu", "v5e"])
    def test_one_weight(self, tpu):
        model = lora.add(abstract_single(jnp.float32), self.config, key=KEY)
        x = jax.ShapeDtypeStruct((64, 4096), jnp.float32)
        out, temp = compiled_bytes(value_and_grad(single_loss, wrt="**/lora_*"), model, x, tpu=tpu)
        assert out <= tree_bytes(partition(model, "**/lora_*")[0]) + 4096  # the loss, and a tile around it
        assert temp < MATRIX_BYTES / 16  # activations: 64 tokens are 1 MiB
        if not tpu:  # the same measure sees W + BA when somebody multiplies it out; a TPU fuses that of one weight
            naive = value_and_grad(lambda m, x: single_loss(dense(m), x), wrt="**/lora_*")
            assert compiled_bytes(naive, model, x)[1] >= MATRIX_BYTES

    @pytest.mark.slow
    def test_a_scanned_stack_on_cpu(self):
        """XLA copies the layer's slice out of the stack; the adapter adds no second array of its size."""
        base = abstract_stack(jnp.float32)
        model = lora.add(base, self.config, key=KEY)
        x = jax.ShapeDtypeStruct((64, 4096), jnp.float32)
        out, temp = compiled_bytes(value_and_grad(stacked_loss, wrt="**/lora_*"), model, x)
        _, dense_temp = compiled_bytes(lambda x, m: jax.grad(lambda x: stacked_loss(m, x))(x), x, base)
        assert out <= tree_bytes(partition(model, "**/lora_*")[0]) + 4096
        assert temp < 1.5 * MATRIX_BYTES
        assert temp < dense_temp + MATRIX_BYTES / 4

    @pytest.mark.slow
    @pytest.mark.tpu_aot
    @pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
    def test_a_scanned_stack_on_a_tpu(self, dora):
        """bfloat16 weights: of float32 ones XLA makes a bfloat16 copy ahead of the loop, with or without adapters."""
        config = dataclasses.replace(self.config, dora=dora)
        model = lora.add(abstract_stack(jnp.bfloat16), config, key=KEY)
        x = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16)
        out, temp = compiled_bytes(value_and_grad(stacked_loss, wrt="**/lora_*"), model, x, tpu=True)
        assert out <= tree_bytes(partition(model, "**/lora_*")[0]) + 4096
        assert temp < MATRIX_BYTES / 16

    @pytest.mark.slow_after(2)
    @pytest.mark.parametrize(
        ("dtype", "tpu"),
        [(jnp.float32, False), (jnp.bfloat16, False), pytest.param(jnp.bfloat16, True, marks=pytest.mark.tpu_aot)],
    )
    def test_merging_a_stack_needs_one_layer_in_float32(self, dtype, tpu):
        from lowtide.adapters.lora._model import _fold_layer

        node = lora.add(abstract_stack(dtype), self.config, key=KEY)["layers"]["attn"]["q_proj"]["weight"]
        layer = jax.ShapeDtypeStruct((), jnp.int32)
        args = (node.weight, (layer,), node)
        stats = compile_for(_fold_layer, *args, tpu=tpu).memory_analysis()
        assert stats.output_size_in_bytes == stats.alias_size_in_bytes == tree_bytes(node.weight)
        assert stats.temp_size_in_bytes < 1.1 * MATRIX_BYTES


class TestBadInput:
    @pytest.mark.parametrize("rank", [0, -1, 2.0, True, "8"])
    def test_rank(self, rank):
        with pytest.raises(ConfigError, match=r"rank must be an integer of at least 1, not .*\nhint: use"):
            lora.Config(rank=rank)

    @pytest.mark.parametrize("alpha", [0, -1.0, float("nan"), float("inf"), None, True])
    def test_alpha(self, alpha):
        with pytest.raises(ConfigError, match=r"alpha must be a finite number above 0, not .*\nhint: .*twice the rank"):
            lora.Config(alpha=alpha)

    @pytest.mark.parametrize("targets", ["", [], [""], [3]])
    def test_targets(self, targets):
        with pytest.raises(ConfigError, match=r"targets must be at least one glob or .*, not .*\nhint: "):
            lora.Config(targets=targets)

    def test_config_is_hashable_and_keyword_only(self):
        assert hash(lora.Config(targets=["a", "b"])) == hash(lora.Config(targets=("a", "b")))
        with pytest.raises(TypeError):
            lora.Config(16)

    @pytest.mark.parametrize(
        ("targets", "hint"),
        [
            ("**/q_prj", "near misses: .*q_proj"),
            ("q_proj", r"did you mean '\*\*/q_proj'"),
            (["**/q_proj", "**/up_proj"], ""),
        ],
    )
    def test_a_target_that_matches_nothing(self, targets, hint):
        with pytest.raises(SelectionError, match=rf"matches nothing(.|\n)*layers/attn/q_proj(.|\n)*hint: .*{hint}"):
            lora.add(stacked_model(), lora.Config(rank=2, targets=targets), key=KEY)

    def test_rank_above_the_smaller_side(self):
        with pytest.raises(ConfigError, match=r"rank of q_proj/weight must be .* from 1 to 8, not 9\nhint: lower"):
            lora.add(flat_model(), lora.Config(rank=9, targets="q_proj"), key=KEY)

    @pytest.mark.parametrize(
        "weight", [jnp.ones(4), jnp.ones((4, 4), jnp.int8), jnp.ones((2, 2, 4, 4)), jnp.ones((4, 4), jnp.complex64)]
    )
    def test_a_target_that_is_no_matrix(self, weight):
        with pytest.raises(
            StructureError, match=r"norm/weight: is not a weight matrix(.|\n)*got: .*\[(.|\n)*hint: .*!norm"
        ):
            lora.add({"norm": {"weight": weight}}, lora.Config(rank=2, targets="norm"), key=KEY)

    def test_a_target_with_an_adapter(self):
        model = lora.add(flat_model(), lora.Config(rank=2, targets="q_proj"), key=KEY)
        with pytest.raises(
            StructureError, match=r"q_proj/weight: already has an adapter of rank 2(.|\n)*hint: .*merge"
        ):
            lora.add(model, lora.Config(rank=2, targets="q_proj"), key=KEY)
        both = lora.add(model, lora.Config(rank=4, targets="head"), key=KEY)
        assert (both["q_proj"]["weight"].rank, both["head"]["weight"].rank) == (2, 4)
