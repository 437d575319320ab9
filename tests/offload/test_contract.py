"""What a layerwise step takes for a stack, a batch and an optimizer, at the edges; what it refuses, by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import ConfigError, SelectionError, StructureError, linear
from lowtide.offload import Clip, _streaming, layerwise_step

WIDTH = 8
HOST = {"layers": "host", "outer": "host", "opt_state": "host", "inputs": "host"}


def normal(at: int, *shape: int) -> jax.Array:
    return jnp.asarray(0.3 * np.random.default_rng(at).normal(size=shape), jnp.float32)


def stack(**functions: Any) -> lt.LayerStack:
    plain: dict[str, Any] = {
        "first": lambda outer, batch: batch["x"] @ outer["embed"],
        "block": lambda layer, h, batch: h + jnp.tanh(h @ layer["w"]),
        "last": lambda outer, h, batch: (jnp.mean((h @ outer["head"] - batch["y"]) ** 2), {}),
    }
    return lt.LayerStack(**{**plain, **functions})


def parameters() -> tuple[Any, Any]:
    return {"embed": normal(0, 4, WIDTH), "head": normal(1, WIDTH, 4)}, {"w": normal(2, 3, WIDTH, WIDTH)}


def batch(**more: Any) -> dict[str, Any]:
    return {"x": normal(3, 4, 4), "y": normal(4, 4, 4), **more}


def trained(stack: lt.LayerStack, tx: Any, outer: Any, layers: Any, data: Any, **options: Any) -> Any:
    """Parameters and losses after two layerwise steps."""
    step = layerwise_step(stack, tx, place=HOST, **options)
    state, frozen = step.init(*jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), (outer, layers)))
    jitted, losses = jax.jit(step, donate_argnums=0), []
    for _ in range(2):
        state, metrics = jitted(state, frozen, data)
        losses.append(float(metrics["loss"]))
    return step.parameters(state, frozen), losses


def expected(stack: lt.LayerStack, tx: Any, outer: Any, layers: Any, data: Any) -> Any:
    """The same by plain differentiation, with the optimizer on each layer's tree and on each outer leaf."""
    tx = optax.with_extra_args_support(tx)
    trees = [jax.tree.map(lambda leaf, i=i: leaf[i], layers) for i in range(lt.core.num_layers(layers))]
    leaves, treedef = jax.tree.flatten(outer)
    params = [*trees, *leaves]

    def loss_fn(params: Any) -> Any:
        stacked = jax.tree.map(lambda *leaf: jnp.stack(leaf), *params[: len(trees)])
        return stack.apply(treedef.unflatten(params[len(trees) :]), stacked, data)[0]

    @jax.jit
    def step(params: Any, states: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params)
        made = [tx.update(g, s, p, value=loss) for g, s, p in zip(grads, states, params, strict=True)]
        new = [optax.apply_updates(p, updates) for p, (updates, _) in zip(params, made, strict=True)]
        return new, [state for _, state in made], loss

    states, losses = [tx.init(p) for p in params], []
    for _ in range(2):
        params, states, loss = step(params, states)
        losses.append(float(loss))
    stacked = jax.tree.map(lambda *leaf: jnp.stack(leaf), *params[: len(trees)])
    return (treedef.unflatten(params[len(trees) :]), stacked), losses


def assert_equal_training(stack: lt.LayerStack, tx: Any, outer: Any, layers: Any, data: Any, **options: Any) -> None:
    ours, theirs = (
        trained(stack, tx, outer, layers, data, **options),
        expected(stack, tx, outer, layers, data),
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), ours, theirs)


# --- optimizers ----------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Any] = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": lambda: optax.lamb(1e-2),
    "bfloat16 momentum": lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "schedule": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1e-2, 0, 5)),
    "every second step": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "plateau": lambda: optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau()),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["adafactor", "bfloat16 momentum", "every second step"])
def test_optimizers_see_each_layer_as_a_tree_of_its_own(name: str) -> None:
    assert_equal_training(stack(), OPTIMIZERS[name](), *parameters(), batch())


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "tx",
    [optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9), optax.sm3(1e-2)],
    ids=["adafactor", "sm3"],
)
def test_blocks_of_a_layer_meet_statistics_of_its_rows_and_columns(tx: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(_streaming, "_SMALL_PART", 8)
    outer, layers = {"embed": normal(0, 4, 128), "head": normal(1, 128, 4)}, {"w": normal(2, 2, 128, 128)}
    assert_equal_training(stack(), tx, outer, layers, batch(), chunk_bytes=16 * 1024)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lamb", "muon", "plateau", "schedule"])
def test_more_optimizers_see_each_layer_as_a_tree_of_its_own(name: str) -> None:
    assert_equal_training(stack(), OPTIMIZERS[name](), *parameters(), batch())


# --- stacks and batches --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_activations_may_hold_integers_masks_and_scalars() -> None:
    rich = stack(
        first=lambda outer, batch: {
            "h": batch["x"] @ outer["embed"],
            "mask": batch["x"][:, :1] > 0,
            "depth": jnp.int32(1),
            "penalty": jnp.float32(0),
        },
        block=lambda layer, h, batch: {
            **h,
            "h": h["h"] + jnp.where(h["mask"], jnp.tanh(h["h"] @ layer["w"]), 0.0) / h["depth"].astype(jnp.float32),
            "depth": h["depth"] + 1,
            "penalty": h["penalty"] + jnp.mean(h["h"] ** 2),
        },
        last=lambda outer, h, batch: (jnp.mean((h["h"] @ outer["head"] - batch["y"]) ** 2) + 0.1 * h["penalty"], {}),
    )
    for count in (1, 2):
        assert_equal_training(rich, optax.adam(1e-2), *parameters(), batch(), num_microbatches=count)


@pytest.mark.slow
def test_leaves_may_be_scalars_of_odd_names_and_shapes() -> None:
    odd = stack(
        first=lambda outer, batch: batch["x"] @ outer["e m*[b]"] * outer["scale"],
        block=lambda layer, h, batch: h + jnp.tanh(h @ layer["w.1 {x}"]) * layer["gain"],
        last=lambda outer, h, batch: (jnp.mean(h**2), {}),
    )
    outer = {"e m*[b]": normal(0, 4, 7), "scale": jnp.float32(1), "none": None}
    layers = {"w.1 {x}": normal(1, 5, 7, 7), "gain": jnp.ones(5)}
    assert_equal_training(odd, optax.adam(1e-2), outer, layers, batch(), num_microbatches=2)


@pytest.mark.slow
def test_one_layer_and_no_outer_leaves_are_a_stack() -> None:
    bare = stack(first=lambda outer, batch: batch["h"], last=lambda outer, h, batch: (jnp.mean(h**2), {}))
    assert_equal_training(bare, optax.adam(1e-2), {}, {"w": normal(0, 1, WIDTH, WIDTH)}, {"h": normal(1, 4, WIDTH)})


@pytest.mark.slow
def test_a_batch_that_is_not_split_may_hold_scalars() -> None:
    scaled = stack(last=lambda outer, h, batch: (batch["scale"] * jnp.mean((h @ outer["head"] - batch["y"]) ** 2), {}))
    assert_equal_training(scaled, optax.adam(1e-2), *parameters(), batch(scale=jnp.float32(2)))


@pytest.mark.slow
def test_frozen_keys_integers_and_python_numbers_are_only_read() -> None:
    def block(layer: Any, h: Any, batch: Any) -> Any:
        keep = jax.random.bernoulli(layer["key"], 0.5, h.shape).astype(h.dtype)
        return h + jnp.tanh(h @ layer["w"]) * keep * layer["on"].astype(h.dtype)

    outer, layers = parameters()
    layers = {**layers, "key": jax.random.split(jax.random.key(0), 3), "on": jnp.array([1, 0, 1])}
    model = stack(block=block, first=lambda outer, batch: batch["x"] @ outer["embed"] * outer["scale"])
    (_, after), losses = trained(
        model, optax.adam(1e-2), {**outer, "scale": 1.0}, layers, batch(), wrt=["**/w", "outer/**"]
    )
    assert losses[1] < losses[0]
    changed = np.asarray(after["w"]) != np.asarray(layers["w"])
    assert changed.any(axis=(1, 2)).tolist() == [True, False, True]  # as the integers switch them


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("running", [(), ("head",)])
@pytest.mark.parametrize("weight", ["some", "none"])
def test_a_microbatch_of_weight_zero_contributes_nothing_whatever_its_loss(weight: str, running: Any) -> None:
    """A mean over no tokens is 0/0, forward and backward."""

    def last(outer: Any, h: Any, batch: Any) -> Any:
        errors = jnp.sum((linear(h, outer["head"]) - batch["y"]) ** 2, axis=1)
        return jnp.sum(errors * batch["mask"]) / jnp.sum(batch["mask"]), {"tokens": jnp.sum(batch["mask"])}

    mask = jnp.array([1.0, 1.0, 0.0, 0.0]) * (weight == "some")
    options = {"num_microbatches": 2, "weight": lambda part: jnp.sum(part["mask"])}
    given = {"embed": normal(0, 4, WIDTH), "head": normal(1, 4, WIDTH)}, parameters()[1]
    ours = trained(stack(last=last, running=running), optax.adam(1e-2), *given, batch(mask=mask), **options)
    theirs = expected(stack(last=last), optax.adam(1e-2), *given, batch(mask=mask))
    if weight == "none":
        theirs = given, [0.0, 0.0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), ours, theirs)


@pytest.mark.filterwarnings("ignore::lowtide.core.PlacementWarning")  # small leaves are no whole tiles
def test_state_that_an_update_only_reads_stays_where_it_is() -> None:
    """An anchor that parameters are pulled to."""

    def update(updates: Any, state: Any, params: Any) -> Any:
        return jax.tree.map(lambda u, p, a: -0.1 * u - 0.01 * (p - a), updates, params, state), state

    anchored = optax.GradientTransformation(lambda params: jax.tree.map(jnp.array, params), update)
    ours = trained(stack(), anchored, *parameters(), batch(), chunk_bytes=64)
    theirs = expected(stack(), anchored, *parameters(), batch())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("place", [{}, HOST])
def test_whole_numbers_among_the_outer_leaves_are_only_read(place: Any) -> None:
    outer, layers = parameters()
    first = {"first": lambda outer, batch: outer["times"] * (batch["x"] @ outer["embed"])}
    step = layerwise_step(stack(**first), optax.adam(1e-2), wrt=["**", "!outer/times"], place=place)
    state, frozen = step.init({**outer, "times": 2}, layers)
    _, metrics = jax.jit(step)(state, frozen, batch())
    assert np.isfinite(metrics["loss"])


# --- gradients that are not finite ---------------------------------------------------------------------------------


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("clip", [None, Clip(max_norm=0.1), Clip(max_norm=0.1, mode="previous")])
def test_a_batch_without_a_finite_loss_leaves_everything_as_it_is(clip: Any) -> None:
    step = layerwise_step(stack(), optax.adam(1e-2), clip=clip, on_nan="skip")
    jitted, (start, frozen) = jax.jit(step), step.init(*parameters())
    state, _ = jitted(start, frozen, batch())
    skipped, metrics = jitted(state, frozen, jax.tree.map(lambda leaf: leaf.at[0].set(jnp.nan), batch()))
    assert np.isnan(metrics["loss"]) and np.isnan(metrics["grad_norm"])
    assert int(skipped.step) == 2
    jax.tree.map(np.testing.assert_array_equal, *(dataclasses.replace(s, step=0) for s in (skipped, state)))


def test_gradients_that_are_not_finite_from_a_layer_on_do_not_reach_parameters_or_state() -> None:
    def block(layer: Any, h: Any, batch: Any) -> Any:  # the gradient of sqrt at 0, times 0, in the first layer alone
        return h + jnp.tanh(h @ layer["w"]) + layer["on"] * jnp.sqrt(layer["on"] * h**2)

    outer, layers = parameters()
    layers = {**layers, "on": jnp.array([0.0, 1.0, 1.0])}
    step = layerwise_step(stack(block=block), optax.adam(1e-2))  # updates that are not finite are skipped by default
    state, frozen = step.init(outer, layers)
    new, metrics = jax.jit(step)(state, frozen, batch())
    assert np.isfinite(metrics["loss"]) and not np.isfinite(metrics["grad_norm"])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new))
    changed = np.asarray(new.layers["w"]) != np.asarray(layers["w"])
    assert changed.any(axis=(1, 2)).tolist() == [False, True, True]


# --- refusals ------------------------------------------------------------------------------------------------------


def test_a_head_under_vmap_cannot_continue_a_running_gradient() -> None:
    """`jax.vmap` would add the total once for each sequence."""

    def last(outer: Any, h: Any, batch: Any) -> Any:
        return jnp.mean(jax.vmap(lambda h: linear(h, outer["head"]))(h) ** 2), {}

    step = layerwise_step(stack(last=last, running=("head",)), optax.adam(1e-2), num_microbatches=2)
    state, frozen = step.init({"embed": normal(0, 4, WIDTH), "head": normal(1, 4, WIDTH)}, parameters()[1])
    with pytest.raises(StructureError, match=r"(?s)running gradient cannot be computed under jax.vmap.*hint: "):
        jax.jit(step).trace(state, frozen, batch())


def test_running_patterns_that_name_nothing_are_refused() -> None:
    with pytest.raises(SelectionError, match=r"(?s)running matches no outer leaf: 'haed'.*embed, head.*hint: "):
        layerwise_step(stack(running=("haed",)), optax.adam(1e-2)).init(*parameters())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"clip": 1.0}, r"clip must be a lowtide\.offload\.Clip or None, not 1\.0\nhint: pass clip=Clip"),
        ({"num_microbatches": 2.0}, r"num_microbatches must be an integer of at least 1, not 2\.0\nhint: "),
        ({"tx": "adam"}, r"must be an optax\.GradientTransformation, not 'adam'\nhint: pass for instance optax"),
        ({"tx": lt.offload.optimizer(optax.adam(1e-2))}, r"(?s)wrapped by lt.offload.optimizer.*hint: pass the inner"),
        ({"place": "host"}, r"place must be a mapping of parts to memories, not 'host'\nhint: pass place="),
        ({"on_nan": "abort"}, r"on_nan must be \"ignore\" or \"skip\", not 'abort'\nhint: "),
        ({"chunk_bytes": 1.5}, r"chunk_bytes must be an integer of at least 1, not 1\.5\nhint:"),
    ],
)
def test_arguments_of_other_types_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        layerwise_step(stack(), **{"tx": optax.adam(1e-2), **options})


def test_labels_by_path_are_those_of_a_plain_step() -> None:
    def labels(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: "train" if "layers" in str(path) else "freeze", tree)

    tx = optax.multi_transform({"train": optax.adam(1e-2), "freeze": optax.set_to_zero()}, labels)
    (outer, layers), _ = trained(stack(), tx, *parameters(), batch())
    params = dict(zip(("outer", "layers"), parameters(), strict=True))
    opt = tx.init(params)

    @jax.jit
    def step(params: Any, opt: Any) -> Any:
        grads = jax.grad(lambda p: stack().apply(p["outer"], p["layers"], batch())[0])(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt

    for _ in range(2):
        params, opt = step(params, opt)
    np.testing.assert_allclose(layers["w"], params["layers"]["w"], rtol=1e-6, atol=1e-6)
    assert not np.array_equal(layers["w"], parameters()[1]["w"])
    jax.tree.map(np.testing.assert_array_equal, outer, parameters()[0])


def test_arguments_in_another_order_are_refused() -> None:
    step = layerwise_step(stack(), optax.adam(1e-2))
    state, frozen = step.init(*parameters())
    for arguments in ((state, batch(), frozen), (*parameters(), batch())):
        with pytest.raises(
            StructureError, match=r"as step\(state, frozen, batch\), not step\(\w+, \w+, \.\.\.\)\nhint:"
        ):
            jax.jit(step).trace(*arguments)


def test_metrics_that_the_step_reports_itself_are_refused() -> None:
    last = {"last": lambda outer, h, batch: (jnp.mean(h @ outer["head"]), {"grad_norm": jnp.sum(h)})}
    step = layerwise_step(stack(**last), optax.adam(1e-2))
    with pytest.raises(StructureError, match=r"(?s)metric named grad_norm.*hint: rename"):
        jax.jit(step).trace(*step.init(*parameters()), batch())


def test_a_weight_that_is_no_number_is_refused() -> None:
    step = layerwise_step(stack(), optax.adam(1e-2), num_microbatches=2, weight=lambda part: part["x"][:, 0])
    with pytest.raises(StructureError, match=r"(?s)microbatch is not a number.*got: shape \[2\].*hint: sum"):
        jax.jit(step).trace(*step.init(*parameters()), batch())


@pytest.mark.parametrize("opt_state", ["host", "device"])
def test_state_that_changes_its_dtype_is_refused_by_name(opt_state: str) -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state)

    tx = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)
    step = layerwise_step(stack(), tx, place={"opt_state": opt_state})
    with pytest.raises(StructureError, match=r"(?s)changes the shape or dtype.*float32.*bfloat16.*hint: "):
        jax.jit(step).trace(*step.init(*parameters()), batch())


def test_leaves_without_gradients_are_refused() -> None:
    outer, layers = parameters()
    with pytest.raises(SelectionError, match=r'(?s)layers/order: .*int32.*hint: .*"!layers/order"'):
        layerwise_step(stack(), optax.adam(1e-2)).init(outer, {**layers, "order": jnp.arange(3)})


@pytest.mark.parametrize("path", ["outer/head", "layers/w", "batch/x"])
def test_meshes_with_explicit_axes_are_refused(path: str) -> None:
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    outer, layers = parameters()
    trees: Any = {"outer": outer, "layers": layers, "batch": batch()}
    tree, name = path.split("/")
    trees[tree][name] = jax.device_put(trees[tree][name], jax.NamedSharding(mesh, jax.P()))
    step = layerwise_step(stack(), optax.adam(1e-2))
    with pytest.raises(ConfigError, match=rf"{path}: its mesh has explicit axes \(fsdp\).*\nhint: .*Auto"):
        jax.eval_shape(step, *step.init(trees["outer"], trees["layers"]), trees["batch"])


def test_outer_leaves_of_one_path_are_refused() -> None:
    outer, layers = parameters()
    with pytest.raises(StructureError, match=r"2 leaves have the path outer/a/b\nhint: rename"):
        layerwise_step(stack(), optax.adam(1e-2)).init({**outer, "a/b": outer["head"], "a": {"b": 1.0}}, layers)


@pytest.mark.parametrize(
    ("tx", "text"),
    [
        (optax.noisy_sgd(1e-2, key=0), r"(?s)draws random numbers: its state .*key.*hint: .*lt\.offload\.optimizer"),
        (optax.lbfgs(1e-2), r"(?s)cannot be called with.*hint: .*line search"),
        (optax.contrib.sophia(1e-2), r"(?s)cannot be called with.*hint: "),
        (optax.contrib.galore(1e-2), r"(?s)cannot be called with.*hint: "),
        (
            optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2)),
            r"(?s)update of layer 0: w also depends on the gradient of layer 1: w.*hint: remove clipping",
        ),
        (
            optax.apply_if_finite(optax.sgd(1e-2), 3),
            r"(?s)layer 0: w also depends on the gradient of layer 1: w.*apply_if_finite.*hint: .*on_nan=\"skip\"",
        ),
        (
            optax.polyak_sgd(1.0),
            r"(?s)layer 0: w also depends on the gradient of layer 1: w.*the loss and the norm.*polyak_sgd.*hint: ",
        ),
        (optax.contrib.dadapt_adamw(1.0), r"(?s)update of layer 0: w also depends on the gradient of layer 1: w"),
    ],
)
def test_optimizers_that_cannot_run_in_the_backward_pass_are_refused(tx: Any, text: str) -> None:
    with pytest.raises(StructureError, match=text):
        layerwise_step(stack(), tx).init(*parameters())


@pytest.mark.parametrize(
    ("functions", "text"),
    [
        (
            {"block": lambda layer, h, batch: (h @ layer["w"]).astype(jnp.bfloat16)},
            r"(?s)activations: a block returns a shape.*expected: float32\[4, 8\].*got: bfloat16.*hint: .*cast",
        ),
        (
            {
                "last": lambda outer, h, batch: (
                    jnp.sum(linear(batch["x"], outer["head"]) * h + linear(batch["y"], outer["head"])),
                    {},
                ),
                "running": ("head",),
            },
            r"(?s)outer/head: last does not use it exactly once.*hint: .*LayerStack\.running",
        ),
        (
            {"last": lambda outer, h, batch: (jnp.sum(h @ outer["head"]), {}), "running": ("head",)},
            r"(?s)leaf of LayerStack\.running in another operation: head.*hint: .*LayerStack\.running",
        ),
    ],
)
def test_functions_that_return_something_else_are_refused(functions: Any, text: str) -> None:
    step = layerwise_step(stack(**functions), optax.adam(1e-2))
    state, frozen = step.init(*parameters())
    with pytest.raises(StructureError, match=text):
        jax.jit(step).trace(state, frozen, batch())
