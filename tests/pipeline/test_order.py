"""On a CPU, whose devices start what has its arguments, what is sent and the passes depend on each other."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import P
from jax.sharding import Mesh, NamedSharding

from lowtide.core import LayerStack
from lowtide.pipeline import schedule, value_and_grad

COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(")
PERMUTE = " collective-permute("
STACK = LayerStack(
    first=lambda outer, batch: batch["x"] @ outer,
    block=lambda layer, h, batch: h + jnp.tanh(h @ layer["up"]) @ layer["down"],
    last=lambda outer, h, batch: (jnp.mean((h @ outer.T - batch["x"]) ** 2), {}),
)


def computations(text: str) -> dict[str, dict[str, str]]:
    """Of a program's text the operations by name, by computation."""
    found: dict[str, dict[str, str]] = {}
    current: dict[str, str] = {}
    for line in text.splitlines():
        if begin := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            current = found[begin[1]] = {}
        elif one := re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (.*)$", line):
            current[one[1]] = f" {one[2]}"
    return found


def before(operations: dict[str, str]) -> dict[str, set[str]]:
    """All that an operation needs, directly or not; text is in the order of what is needed."""
    found: dict[str, set[str]] = {}
    for name, text in operations.items():
        operands = [other for other in re.findall(r"%([\w.\-]+)", text) if other in found]
        found[name] = set(operands).union(*(found[other] for other in operands))
    return found


def unordered(text: str) -> list[tuple[str, str]]:
    """Permutes, and loops with collectives beside them, of which neither needs the other."""
    inside = computations(text)

    def has_collectives(name: str) -> bool:
        called = (part for one in inside[name].values() for part in re.findall(r"(?:body|calls)=%([\w.\-]+)", one))
        return any(COLLECTIVE.search(one) for one in inside[name].values()) or any(map(has_collectives, called))

    pairs = []
    for operations in inside.values():
        permutes = [name for name, one in operations.items() if PERMUTE in one]
        bodies = {name: re.search(r" while\(.*body=%([\w.\-]+)", one) for name, one in operations.items()}
        passes = [name for name, body in bodies.items() if body and has_collectives(body[1])] if permutes else []
        needed = before(operations) if permutes else {}
        pairs += [(a, b) for a in permutes for b in passes if a not in needed[b] and b not in needed[a]]
    return pairs


def program(name: str) -> str:
    mesh = Mesh([[jax.devices()[2 * rank + part] for part in range(2)] for rank in range(2)], ("stage", "fsdp"))

    def shape(*dims: int, spec: Any) -> Any:
        return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, spec))

    layers = {"up": shape(4, 16, 32, spec=P("stage", None, "fsdp")), "down": shape(4, 32, 16, spec=P("stage", "fsdp"))}
    pipeline = value_and_grad(STACK, schedule(name, num_stages=2, num_microbatches=4), mesh=mesh)
    outer, batch = shape(16, 16, spec=P("fsdp")), {"x": shape(16, 16, spec=P("fsdp"))}
    return jax.jit(pipeline).lower(outer, layers, batch).compile().as_text()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["auto", "zb-h1"])
def test_no_pass_with_collectives_may_be_started_beside_what_is_sent(name: str) -> None:
    text = program(name)
    assert text.count(PERMUTE) >= 2 and unordered(text) == []


@pytest.mark.slow
def test_one_that_may_be_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.pipeline.program._executor._after", lambda came, state, name: state)
    assert unordered(program("auto"))
