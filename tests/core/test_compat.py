"""The parts of the compatibility layer that no other test reaches."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide.core import ConfigError, _compat

CONFIG = "a description"
SKIP = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


@pytest.mark.parametrize("is_gpu_here", [False, True])
@pytest.mark.parametrize("num_failures", [0, 1, 2])
def test_plugin_is_registered_without_its_check_of_libraries(
    monkeypatch: pytest.MonkeyPatch, is_gpu_here: bool, num_failures: int
) -> None:
    from jax._src import hardware_utils
    from jax.experimental import topologies

    jax.devices()  # else what JAX runs on would be settled here, with the plugin of this machine
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


def test_another_function_computes_what_only_one_tpu_would_by_a_kernel() -> None:
    """With the derivatives and the results of that function, mapped and not."""

    def kernel(x: Any, y: Any) -> Any:
        return {"out": x * 0, "ids": y}

    def plain(x: Any, y: Any) -> Any:
        return {"out": jnp.sin(x) * y, "ids": y}

    def out(x: Any, y: Any) -> Any:
        return _compat.on_one_device(kernel, plain, x, y)["out"]

    x, y = jnp.linspace(0.1, 1, 6).reshape(2, 3), jnp.arange(3)
    np.testing.assert_allclose(out(x[0], y), jnp.sin(x[0]) * y, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.vmap(out, (0, None)))(x, y), jnp.sin(x) * y[None], rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(out(x, y)))(x[0]), jnp.cos(x[0]) * y, rtol=1e-6)
    needed = functools.partial(_compat.on_one_device, kernel, plain, needed="it has to be the kernel")
    with pytest.raises(ConfigError, match=r"it has to be the kernel(.|\n)*hint:"):
        jax.jit(needed)(x[0], y)


def test_how_many_devices_a_program_is_for() -> None:
    one, several = SimpleNamespace(num_devices=1), SimpleNamespace(num_devices=4)
    assert _compat._is_for_one_device(one) and not _compat._is_for_one_device(several)
    mesh = SimpleNamespace(shape={"data": 2, "tensor": 1}, manual_axes=())
    assert _compat._is_for_one_device(SimpleNamespace(mesh=mesh, manual_axes=frozenset({"data"})))
    assert not _compat._is_for_one_device(SimpleNamespace(mesh=mesh, manual_axes=frozenset()))
    assert not _compat._is_for_one_device(SimpleNamespace())
