"""The parts of the compatibility layer that no other test reaches."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex

from lowtide.core import _compat

CONFIG = "a description"
SKIP = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


def test_the_parts_of_a_scan_are_counted() -> None:
    def fn(a: Any, b: Any, init: Any, xs: Any) -> Any:
        return jax.lax.scan(lambda carry, x: (carry * a + x @ b, None), init, xs)[0]

    def counts(fn: Any) -> list[tuple[int, int]]:
        eqns = jax.make_jaxpr(fn)(jnp.ones(2), jnp.ones((3, 2)), jnp.ones(2), jnp.ones((5, 3))).jaxpr.eqns
        return [_compat.scan_counts(eqn.params) for eqn in eqns if eqn.primitive.name == "scan"]

    assert counts(fn) == [(2, 1)]
    # Forward and transposed; the latter carries the cotangent, and in the gradient of a, which both read, its total.
    assert counts(jax.grad(lambda *args: fn(*args).sum(), argnums=2)) == [(2, 1), (1, 1)]


def test_calls_of_traced_functions_are_looked_through() -> None:
    def names(jaxpr: Any) -> list[str]:
        inner = [(eqn, eqn.params.get(_compat.CALLS.get(eqn.primitive.name, ""))) for eqn in jaxpr.eqns]
        return [
            name
            for eqn, held in inner
            for name in ([eqn.primitive.name] if held is None else names(getattr(held, "jaxpr", held)))
        ]

    @jax.custom_vjp
    def twice(x: Any) -> Any:
        return 2 * x

    twice.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))
    cubed = jax.custom_jvp(lambda x: x**3)
    cubed.defjvp(lambda primals, tangents: (primals[0] ** 3, 3 * primals[0] ** 2 * tangents[0]))
    traced = jax.jit(jnp.sin).trace(jnp.ones(3))  # called in another function, an `eval_jaxpr` from JAX 0.11 on
    jaxpr = jax.make_jaxpr(lambda x: traced(jax.checkpoint(jnp.cos)(twice(cubed(jax.jit(jnp.exp)(x))))))(jnp.ones(3))
    assert names(jaxpr.jaxpr) == ["exp", "integer_pow", "mul", "cos", "sin"]


@pytest.mark.parametrize("traced_before", [False, True], ids=["inside", "outside"])
@pytest.mark.parametrize("is_new", [False, True], ids=["classic", "remat3"])
def test_recomputation_and_names_are_read_in_one_way(is_new: bool, traced_before: bool) -> None:
    from jax._src import config

    def primitives(jaxpr: Any) -> list[str]:
        inner = [jex.jaxprs_in_params(eqn.params) for eqn in jaxpr.eqns]
        return [
            name
            for eqn, held in zip(jaxpr.eqns, inner, strict=True)
            for name in (eqn.primitive.name, *(deeper for one in held for deeper in primitives(one)))
        ]

    def checkpointed() -> Any:
        policy = jax.checkpoint_policies.save_only_these_names("sine", "other")
        return jax.checkpoint(lambda x: checkpoint_name(jnp.sin(x), "sine") ** 2, policy=policy)

    with config.remat3(is_new):
        made = checkpointed()

        def fn(x: Any) -> Any:
            return jax.lax.scan(lambda h, _: (made(h) if traced_before else checkpointed()(h), None), x, length=2)[0]

        closed, shapes = _compat.make_jaxpr(fn)(jnp.ones(3))
        found = primitives(closed.jaxpr)
        assert {"remat2", "checkpoint"}.intersection(found), "the class of recomputation"
        assert "name" in found
        (scan,) = (eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan")
        (body,) = jex.jaxprs_in_params(scan.params)
        (remat,) = (eqn for eqn in body.eqns if eqn.primitive.name in ("remat2", "checkpoint"))
        assert _compat.policy_names(remat.params["policy"]) == {"sine", "other"}
        assert shapes.shape == (3,)
        x = jnp.linspace(0.1, 1.0, 3)
        gradient = jax.grad(lambda x: jex.jaxpr_as_fun(closed)(x)[0].sum())(x)
        assert jnp.allclose(gradient, jax.grad(lambda x: (jnp.sin(jnp.sin(x) ** 2) ** 2).sum())(x), rtol=1e-5)


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def only_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose toolkits, wheels and PATH lie below `tmp_path`."""
    which = shutil.which

    def below(name: str, path: str | None = None) -> str | None:
        folders = (os.environ["PATH"] if path is None else path).split(os.pathsep)
        return which(name, path=os.pathsep.join(f for f in folders if f.startswith(str(tmp_path))) or "/nowhere")

    def find_spec(name: str) -> Any:
        folders = [str(f) for f in tmp_path.glob(f"*/{name}")]
        return SimpleNamespace(submodule_search_locations=folders) if folders else None

    monkeypatch.setattr(shutil, "which", below)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_cuda_data_dir={tmp_path}/toolkit --xla_dump_to=x")
    return tmp_path


def test_ptxas_is_found_where_xla_looks(only_below: Path) -> None:
    path = os.environ["PATH"]
    assert _compat.find_ptxas() is None
    (only_below / "site" / "jax_plugins").mkdir(parents=True)
    wheel = executable(only_below / "site" / "nvidia" / "cu13" / "bin" / "ptxas")
    assert _compat.find_ptxas() == str(wheel)
    toolkit = executable(only_below / "toolkit" / "bin" / "ptxas")
    assert _compat.find_ptxas() == str(toolkit)
    on_path = executable(only_below / "bin" / "ptxas")
    assert _compat.find_ptxas() == str(on_path)
    assert os.environ["PATH"] == path


def test_ptxas_that_xla_would_miss_is_put_on_path(only_below: Path) -> None:
    path = os.environ["PATH"]
    (only_below / "site" / "jax_plugins").mkdir(parents=True)
    wheel = executable(only_below / "user" / "nvidia" / "cuda_nvcc" / "bin" / "ptxas")
    for _ in range(2):
        assert _compat.find_ptxas() == str(wheel)
        assert os.environ["PATH"] == f"{path}{os.pathsep}{wheel.parent}"


@pytest.mark.parametrize("is_gpu_here", [False, True])
@pytest.mark.parametrize("num_failures", [0, 1, 2])
def test_plugin_is_registered_without_its_check_of_libraries(
    monkeypatch: pytest.MonkeyPatch, is_gpu_here: bool, num_failures: int
) -> None:
    from jax._src import hardware_utils
    from jax.experimental import topologies

    calls = list[tuple[str, bool]]()

    def describe(**options: Any) -> Any:
        assert options == {"platform": "cuda", "topology_name": "any", "target_config": CONFIG, "topology": "1x2x8"}
        calls.append(("describe", SKIP in os.environ))
        if len([call for call in calls if call[0] == "describe"]) <= num_failures:
            raise NotImplementedError("topology not implemented for cuda")
        return SimpleNamespace(devices=("device",))

    plugin = SimpleNamespace(initialize=lambda: calls.append(("initialize", SKIP in os.environ)))
    monkeypatch.delenv(SKIP, raising=False)
    monkeypatch.setattr(hardware_utils, "has_visible_nvidia_gpu", lambda: is_gpu_here)
    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "jax_plugins.xla_cuda13")
    monkeypatch.setattr(importlib, "import_module", lambda name: plugin)
    expected: list[tuple[str, bool]] = [("describe", False)] if is_gpu_here else []
    if not is_gpu_here or num_failures:
        expected.append(("describe", True))
    if num_failures - int(is_gpu_here) > 0:
        expected += [("initialize", True), ("describe", True)]
    if num_failures == 2 and not is_gpu_here:
        with pytest.raises(NotImplementedError):
            _compat.gpu_topology_devices(CONFIG, partitions=1, hosts=2, devices=8)
    else:
        assert _compat.gpu_topology_devices(CONFIG, partitions=1, hosts=2, devices=8) == ["device"]
    assert calls == expected
    assert SKIP not in os.environ


def test_skipping_the_check_keeps_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SKIP, "yes")
    with _compat._no_cuda_check():
        assert os.environ[SKIP] == "1"
    assert os.environ[SKIP] == "yes"
