"""Donation: what the executable did not reuse is named, with its bytes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lowtide.core import DonationError
from lowtide.hlo._executable import aliased_parameters
from lowtide.memory import UndonatedLeaf, check_donation, target, undonated

UNUSABLE = "ignore:Some donated buffers were not usable:UserWarning"


def compiled_for(fn: Any, *args: Any, donate: Any = 0, keep_unused: bool = True, name: str = "cpu") -> Any:
    device = target(name).devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device)

    def shape(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or sharding)

    jitted = jax.jit(fn, donate_argnums=donate, keep_unused=keep_unused)
    return jitted.trace(*jax.tree.map(shape, args)).lower().compile()


def shape(*dims: int, dtype: Any = jnp.float32, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)


TARGETS = ["cpu", pytest.param("v5e", marks=pytest.mark.tpu_aot)]


@pytest.mark.parametrize("name", TARGETS)
def test_reused_buffers_pass(name: str) -> None:
    state = {"mu": shape(8, 128), "params": {"w": shape(1000, 3), "empty": shape(0, 3)}}
    compiled = compiled_for(lambda s, x: (jax.tree.map(lambda v: v + x, s), x), state, shape(), name=name)
    assert undonated(compiled) == ()
    check_donation(compiled)


@pytest.mark.filterwarnings(UNUSABLE)
@pytest.mark.parametrize("name", TARGETS)
def test_a_changed_dtype_is_named_with_its_compiled_bytes(name: str) -> None:
    def step(state: Any, x: Any) -> Any:
        return {"mu": (state["mu"] * x).astype(jnp.bfloat16), "w": state["w"] + x}

    compiled = compiled_for(step, {"mu": shape(1000, 3), "w": shape(1000, 2)}, shape(), name=name)
    num_bytes = 12_000 if name == "cpu" else 4 * 1024 * 4
    assert undonated(compiled, arg_names=["state"]) == (
        UndonatedLeaf(path="state/mu", num_bytes=num_bytes, is_read=True),
    )
    with pytest.raises(
        DonationError, match=r"LT007\] 0/mu: donated, but no output reuses[\s\S]*1 donated leaves \(1"
    ) as e:
        check_donation(compiled)
    assert "hint: return an updated value" in str(e.value)


@pytest.mark.filterwarnings(UNUSABLE)
@pytest.mark.parametrize("keep_unused", [True, False])
def test_a_leaf_that_is_not_read_counts_and_numbering_stays_right(keep_unused: bool) -> None:
    def step(state: Any, x: Any) -> Any:
        return {"b": state["b"] * x, "c": state["c"].astype(jnp.bfloat16)}

    state = {"a": shape(5), "b": shape(6), "c": shape(7, 2)}
    compiled = compiled_for(step, state, shape(), keep_unused=keep_unused)
    assert undonated(compiled) == (
        UndonatedLeaf(path="0/a", num_bytes=20, is_read=keep_unused),
        UndonatedLeaf(path="0/c", num_bytes=56, is_read=True),
    )
    with pytest.raises(DonationError, match=r"0/c: donated.*\n.*2 donated leaves \(76 B\).*0/c \(56 B\), 0/a \(20 B"):
        check_donation(compiled)


@pytest.mark.filterwarnings(UNUSABLE)
def test_of_two_equal_leaves_with_one_output_one_is_named() -> None:
    compiled = compiled_for(lambda s: {"b": s["a"] + s["b"]}, {"a": shape(9), "b": shape(9)})
    assert [leaf.num_bytes for leaf in undonated(compiled)] == [36]


def test_nothing_donated_is_an_error() -> None:
    compiled = compiled_for(lambda w: w * 2, shape(3), donate=())
    with pytest.raises(
        DonationError, match=r"no donated argument[\s\S]*1 argument leaves, none donated[\s\S]*hint: jit"
    ):
        check_donation(compiled)
    empty = compiled_for(lambda state, w: w * 2, {}, shape(3))
    with pytest.raises(DonationError, match="no donated argument"):
        check_donation(empty)


@pytest.mark.filterwarnings(UNUSABLE)
def test_nothing_reused_leaves_no_alias_in_the_program() -> None:
    compiled = compiled_for(lambda w: jnp.sum(w), shape(3))
    assert "input_output_alias" not in compiled.as_text().splitlines()[0]
    with pytest.raises(DonationError, match=r"\] 0: donated, but no output reuses its buffer"):
        check_donation(compiled)


def test_donation_on_a_mesh() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    step = jax.jit(lambda s, x: s + x, donate_argnums=0, out_shardings=sharded)
    compiled = step.trace(shape(8, 2, sharding=sharded), shape(8, 2, sharding=sharded)).lower().compile()
    check_donation(compiled)


def test_hoisted_constants_and_keywords_do_not_shift_the_numbering() -> None:
    constant = np.arange(7.0, dtype=np.float32)
    with jax.enable_x64(False):
        step = jax.jit(lambda x, *, state: {"w": state["w"] * x + constant}, donate_argnames="state", keep_unused=True)
        compiled = step.trace(shape(7), state={"w": shape(7)}).lower().compile()
    check_donation(compiled)


@pytest.mark.tpu_aot
def test_a_program_with_one_tuple_parameter() -> None:
    rest = [shape(8, 128)] * 2100
    compiled = compiled_for(lambda rest, w: rest[7] * w, rest, shape(8, 128), donate=1, name="v5e")
    assert "entry_computation_layout={((" in compiled.as_text().split("\n", 1)[0]
    check_donation(compiled)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[3]{0})->f32[3]{0}}", set()),
        ("HloModule f, input_output_alias={ {}: (0, {}, may-alias) }, x={()->f32[]}", {(0, ())}),
        (
            "HloModule f, input_output_alias={ {0}: (2, {}, may-alias), {1, 0}: (0, {3, 1}, must-alias) }, "
            "buffer_donor={ (1, {}) }",
            {(2, ()), (0, (3, 1))},
        ),
        ("HloModule f, input_output_alias={ {0}: (2, {})", set()),
        ("", set()),
    ],
)
def test_alias_headers(header: str, expected: set[Any]) -> None:
    assert aliased_parameters(header) == expected


class Unprintable:
    """A compiled program whose text XLA cannot print."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)

    def as_text(self) -> str:
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure")


@pytest.mark.filterwarnings(UNUSABLE)
def test_a_program_whose_text_cannot_be_printed_is_judged_by_its_total() -> None:
    check_donation(Unprintable(compiled_for(lambda a, b: a + b, shape(64, 128), shape(64, 128))))
    unused = compiled_for(lambda a, b: jnp.sum(a + b), shape(64, 128), shape(64, 128))
    with pytest.raises(DonationError, match="0"):
        check_donation(Unprintable(unused))
