"""Several adapters of one base: what is switched is neither copied nor compiled again, and comes off as it went on."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide as lt
from lowtide import lora, models
from lowtide.core import ConfigError, NonFiniteError, StructureError, map_with_paths
from tests.models.kinds import KINDS

KEY = jax.random.key(0)
TOKENS = jax.random.randint(KEY, (2, 9), 0, 96)
LOGITS = jax.jit(models.logits)
BASE = models.init(KINDS["qwen2"], key=KEY)
CONFIGS: dict[str, Any] = {
    "LoRA": lora.Config(rank=2, targets="**/*_proj"),
    "rsLoRA of a layer": lora.Config(rank=2, targets="**/*_proj", rslora=True, layers=[1]),
    "DoRA": lora.Config(rank=2, targets="**/*_proj", dora=True),
    "PiSSA": lora.Config(rank=2, targets="**/{q,up}_proj", init="pissa"),
    "a head that trains whole": lora.Config(rank=2, targets="**/q_proj", modules_to_save=["outer/lm_head", "**/norm"]),
    "(IA)³": lora.IA3Config(targets="**/*_proj", feedforward="**/down_proj"),
    "VeRA": lora.VeRAConfig(rank=4, targets="**/*_proj"),
}


def adapted(seed: int, kind: str = "LoRA", base: Any = BASE) -> Any:
    random = np.random.default_rng(seed)

    def drawn(path: str, leaf: Any) -> Any:
        if "/lora_" not in path:
            return leaf
        old = np.abs(leaf) if "scale" in path else np.asarray(leaf)
        return jnp.asarray(old + 0.2 * random.normal(size=leaf.shape), leaf.dtype)

    return map_with_paths(drawn, lora.add(base, CONFIGS[kind], key=KEY))


@pytest.mark.sentinel
@pytest.mark.slow
def test_switching_copies_nothing_and_compiles_nothing(compilations: Any) -> None:
    whole = {name: adapted(seed) for seed, name in enumerate(("one", "two"))}
    adapters = {name: lora.split(model)[0] for name, model in whole.items()}
    assert all("lora_" in path for path, _ in lt.core.leaves_with_paths(adapters))
    logits = jax.jit(lambda base, adapter: models.logits(lora.attach(base, adapter), TOKENS))
    wanted = {name: LOGITS(model, TOKENS) for name, model in whole.items()}
    first = logits(BASE, adapters["one"])
    said = models.generate(lora.attach(BASE, adapters["one"]), TOKENS[0], 3, key=KEY)
    with compilations.none():
        second = logits(BASE, adapters["two"])
        models.generate(lora.attach(BASE, adapters["two"]), TOKENS[0], 3, key=KEY)
        again = models.generate(lora.attach(BASE, adapters["one"]), TOKENS[0], 3, key=KEY)
    np.testing.assert_allclose(first, wanted["one"], atol=1e-5)
    np.testing.assert_allclose(second, wanted["two"], atol=1e-5)
    np.testing.assert_array_equal(said, again)
    assert np.abs(np.asarray(first) - np.asarray(second)).max() > 1e-2
    attached = lora.attach(BASE, adapters["two"])
    assert attached.layers["attn"]["q_proj"]["weight"].weight is BASE.layers["attn"]["q_proj"]["weight"]
    assert jax.tree.structure(lora.split(attached)) == jax.tree.structure((adapters["two"], BASE))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_what_is_merged_comes_off_again(kind: str) -> None:
    model = adapted(1, kind)
    adapter, base = lora.split(model)
    merged = lora.merge(lora.attach(base, adapter))
    np.testing.assert_array_equal(LOGITS(lora.attach(base, adapter), TOKENS), LOGITS(model, TOKENS))
    refused = {
        "DoRA": r"attn/\w+/weight: DoRA cannot",
        "a head that trains whole": r"weight: an array that trained as a whole cannot",
    }
    if kind in refused:
        with pytest.raises(StructureError, match=rf"{refused[kind]} be unmerged(.|\n)*hint:"):
            lora.unmerge(merged, adapter)
        return
    moved, old = (np.asarray(each.layers["attn"]["q_proj"]["weight"]) for each in (merged, BASE))
    assert np.abs(moved - old).max() > 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), lora.unmerge(merged, adapter), BASE)


@pytest.mark.slow
def test_a_convolution_of_equinox_keeps_several_and_a_quantised_base_too() -> None:
    conv, x = eqx.nn.Conv2d(3, 5, 3, key=KEY), jnp.asarray(np.random.default_rng(0).normal(size=(3, 8, 8)), jnp.float32)
    fn = jax.jit(lt.adapted(lambda conv, x: jnp.sum(conv(x) ** 2)))
    model = lora.add(conv, lora.Config(rank=2, targets="weight"), key=KEY, fn=fn, args=(x,))
    model = map_with_paths(lambda path, leaf: leaf + 0.1 if "lora_" in path else leaf, model)
    adapter, base = lora.split(model)
    assert fn(lora.attach(base, adapter), x) == fn(model, x)
    np.testing.assert_allclose(lora.unmerge(lora.merge(model), adapter).weight, conv.weight, atol=1e-6)
    with pytest.raises(StructureError, match=r"weight: the adapter does not fit the base"):
        lora.attach(eqx.tree_at(lambda conv: conv.weight, base, jnp.ones((5, 3, 3, 2))), adapter)
    quantised = lt.quantize(BASE, "**/*_proj", format="int8")
    model = adapted(1, base=quantised)
    again = lora.attach(quantised, lora.split(model)[0])
    np.testing.assert_array_equal(LOGITS(again, TOKENS), LOGITS(model, TOKENS))


@pytest.mark.slow
def test_sums_are_of_one_base_and_of_kernels_alike() -> None:
    first, second = adapted(0), adapted(1)
    copied = jax.tree.map(jnp.copy, second)
    same, ours = (LOGITS(lora.combine([first, each], [0.5, 2.0]), TOKENS) for each in (copied, second))
    np.testing.assert_array_equal(same, ours)
    moved = map_with_paths(lambda path, leaf: leaf + 1 if path == "layers/mlp/up_proj/weight/weight" else leaf, second)
    with pytest.raises(StructureError, match=r"up_proj/weight: the models have different bases(.|\n)*values"):
        lora.combine([first, moved])
    wider = {"w": jnp.ones((4, 2, 4))}
    config, x = lora.Config(rank=2, targets="w"), jnp.ones((3, 4))
    rows = lora.add(wider, config, key=KEY, fn=lambda p, x: jnp.einsum("bi,ihk->bhk", x, p["w"]), args=(x,))
    columns = lora.add(wider, config, key=KEY, fn=lambda p, x: jnp.einsum("bk,ihk->bih", x, p["w"]), args=(x,))
    with pytest.raises(StructureError, match=r"w: these adapters split the axes .*\n.*1 axes of rows and 2 of col"):
        lora.combine([rows, columns])
    net = lora.add(eqx.nn.MLP(3, 2, 4, 1, key=KEY), lora.Config(rank=2, targets="layers/*/weight"), key=KEY)
    np.testing.assert_allclose(lora.combine([net, net])(jnp.ones(3)), net(jnp.ones(3)), rtol=1e-5)  # holds functions


def two(first: Any, second: Any | None = None, *targets: str, **options: Any) -> list[Any]:
    """Adapters that are no zeros on two bases, each of other targets."""
    made = list[Any]()
    for base, target in zip((first, first if second is None else second), targets or ("w", "w"), strict=True):
        model = lora.add(base, lora.Config(rank=2, alpha=2.0, targets=target), key=KEY, **options)
        draw = lambda path, leaf: jax.random.normal(KEY, leaf.shape) if "lora_" in path else leaf  # noqa: E731
        made.append(map_with_paths(draw, model))
    return made


def with_other(**changed: Any) -> list[Any]:
    base = {"w": jnp.ones((4, 8)), "table": jnp.ones((9, 8)), "mean": jnp.zeros(3), "count": jnp.uint32(0)}
    return two(base, {**base, **changed})


def test_sums_below_a_transformation_of_bases_that_are_known() -> None:
    first, second = two({"w": jnp.ones((4, 8))}, {"w": jnp.ones((4, 8))})
    other = {"w": dataclasses.replace(second["w"], weight=jnp.zeros((4, 8)))}
    run = lambda model, by: lora.merge(lora.combine([first, model], [by, 0.5]))["w"]  # noqa: E731
    expected = 1.0 + 2.5 * np.asarray(first["w"].lora_b @ first["w"].lora_a)
    np.testing.assert_allclose(jax.jit(lambda by: run(second, by))(2.0), expected, rtol=1e-5)
    assert jax.eval_shape(lambda by: run(second, by), 2.0).shape == (4, 8)
    with pytest.raises(StructureError, match=r"w: the models have different bases(.|\n)*other values"):
        jax.eval_shape(lambda by: run(other, by), 2.0)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_what_is_no_weight_and_nan_do_not_tell_bases_apart(kind: Any) -> None:
    damaged = kind(np.full((4, 8), np.nan, np.float32))
    assert lora.combine(two({"w": damaged}, {"w": jnp.array(damaged)}))["w"].rank == 4
    both = lora.combine(with_other(mean=jnp.ones(3), count=jnp.uint32(5)))
    assert both["count"] == 0 and not both["mean"].any()


def test_bases_are_told_apart_by_what_differs() -> None:
    table, half = jnp.zeros((9, 8)), jnp.ones((4, 8), jnp.bfloat16)
    few = lt.quantize({"w": jnp.ones((4, 8))}, "w", "int8")["w"]
    for changed, path, said in (
        ({"table": table}, "table", "other values"),
        ({"w": half}, "w", r"expected: .*float32\[4, 8\]\n  got: bfloat16\[4, 8\]"),
        ({"w": few}, "w", r"got: float32\[4, 8\] as a QuantizedWeight int8"),
        ({"mean": jnp.zeros(4)}, "mean", r"got: float32\[4\]"),
    ):
        with pytest.raises(StructureError, match=rf"{path}: the models have different bases(.|\n)*{said}(.|\n)*attach"):
            lora.combine(with_other(**changed))


def test_sums_of_different_weights_of_a_quantised_base() -> None:
    base = lt.quantize({name: jax.random.normal(KEY, (4, 64)) for name in "ab"}, "*", "int8")
    first, second = two(base, None, "a", "b")
    both = lora.merge(lt.dequantize(lora.combine([first, second], [1.0, 0.5])))
    dense = lt.dequantize(base)
    for name, model, by in (("a", first, 1.0), ("b", second, 0.5)):
        delta = by * np.asarray(model[name].lora_b @ model[name].lora_a)
        np.testing.assert_allclose(both[name], dense[name] + delta, rtol=1e-5, atol=1e-5)


def test_halves_and_kinds_that_do_not_add_up_are_refused_by_path() -> None:
    fn, ids = (lambda p, ids: p["w"][ids]), jnp.arange(3)
    models = two({"w": jnp.ones((9, 8))})
    tables = two({"w": jnp.ones((9, 8))}, fn=fn, args=(ids,))
    with pytest.raises(
        StructureError, match=r"w: adapters of different kinds cannot be added(.|\n)*LoRA and LoRA of a kernel"
    ):
        lora.combine([models[0], tables[0]])
    for given in (models, tables):
        halves = [lt.partition(model, "**/lora_b")[0] for model in given]
        with pytest.raises(StructureError, match=r"w: the adapter has no lora_a\n(.|\n)*lt.combine"):
            lora.combine(halves)
    magnitudes = lora.add({"w": jnp.ones((9, 8))}, lora.Config(rank=2, targets="w", dora=True), key=KEY)
    with pytest.raises(StructureError, match=r"w: an adapter of the kind DoRA is not a sum"):
        lora.combine([magnitudes, magnitudes])


def test_sums_take_what_can_be_listed_and_weights_that_are_numbers() -> None:
    models = two({"w": jnp.ones((4, 8))})
    listed, once = lora.combine(models, [1.0, 0.5]), lora.combine(iter(models), iter([1.0, 0.5]))
    jax.tree.map(np.testing.assert_array_equal, listed, once)
    weights: Any
    for weights in (["a", "b"], [None, 1], [np.ones(2), 1.0], 1.0, [KEY, KEY]):
        with pytest.raises(ConfigError, match=r"the models and their weights do not match"):
            lora.combine(models, weights)
    wrong: Any
    for wrong in (dict(enumerate(models)), "ab"):
        with pytest.raises(ConfigError, match=r"models must be a list, .*, not a (dict|str)"):
            lora.combine(wrong)


def test_what_does_not_fit_is_refused_by_path() -> None:
    adapter, base = lora.split(adapted(0))
    with pytest.raises(StructureError, match=r"k_proj/weight: already has an adapter"):
        lora.attach(lora.attach(base, adapter), adapter)
    other = models.init(KINDS["llama"], key=KEY)
    with pytest.raises(StructureError, match=r"the adapter does not belong to this base"):
        lora.attach(other, adapter)
    narrow = jax.tree.map(lambda leaf: leaf[..., :-1] if leaf.ndim == 3 else leaf, base)
    with pytest.raises(StructureError, match=r"layers/attn/k_proj/weight: the adapter does not fit"):
        lora.attach(narrow, adapter)
    with pytest.raises(StructureError, match=r"the tree has no adapter"):
        lora.attach({"w": jnp.ones((2, 2))}, {"w": None})
    with pytest.raises(StructureError, match=r"no adapter to remove"):
        lora.split(base)
    damaged = map_with_paths(lambda path, leaf: leaf.at[0].set(np.nan) if "v_proj" in path else leaf, adapter)
    with pytest.raises(NonFiniteError, match=r"layers/attn/v_proj/weight: the merged weight has values"):
        lora.merge(lora.attach(base, damaged))
    assert np.isfinite(LOGITS(base, TOKENS)).all()
