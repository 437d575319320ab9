"""The core runs without the extras; what needs one says which."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lowtide.core import ConfigError, require_extra

BLOCKED = ("grain", "jinja2", "orbax", "pydantic", "regex", "safetensors", "tensorstore", "tokenizers", "tomli_w")
PROGRAM = f"""
import importlib.abc, os, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import jax, jax.numpy as jnp, optax
import lowtide as lt
from lowtide.cli import main

def loss_fn(model, batch):
    return jnp.mean((batch @ model["w"].T) ** 2)

model = {{"w": jnp.ones((4, 4))}}
batch = jnp.ones((2, 4))
print("fitted", lt.memory.analyze(jax.grad(loss_fn), model, batch).device_bytes > 0)
adapted = lt.lora.add(model, lt.lora.Config(rank=2, targets="w"), key=jax.random.key(0))
adapted_loss = lambda model, batch: jnp.mean((model["w"] @ batch.T) ** 2)
trainer = lt.Trainer(adapted, adapted_loss, optax.sgd(0.1), wrt="**/lora_*")
trainer.fit([batch, batch], num_steps=2)
print("trained", trainer.state.step)
def error(call):
    try:
        call()
    except lt.LowtideError as error:
        print(str(error).splitlines()[-1])

error(lambda: lt.models)
error(lambda: lt.lora.save(adapted, "adapter"))
error(lambda: lt.Trainer(model, loss_fn, optax.sgd(0.1), checkpoint_dir="run").fit([batch], num_steps=1))
error(lambda: lt.train.array_data({{"x": batch}}, batch_size=1))
error(lambda: lt.finetune.Finetune)
error(lambda: lt.finetune.data)
open("text.txt", "w").write("the tide")
open("x.safetensors", "wb").write(bytes(64))
for command in ("finetune --steps 1 --out run", "merge --adapter a --out b", "inspect .", "inspect x.safetensors",
                "evaluate --data text.txt", "generate --prompt text", "generate --prompts text.txt"):
    print("status", main(command.split()), file=sys.stderr)
"""


@pytest.mark.processes
def test_the_core_runs_without_the_extras(tmp_path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    train, finetune = (f'hint: pip install "lowtide[{extra}]"' for extra in ("train", "finetune"))
    lines = done.stdout.splitlines()
    assert lines == ["fitted True", "trained 2", finetune, finetune, train, train, finetune, finetune], done.stderr
    assert done.stderr.count(finetune) == done.stderr.count("status 2") == 7, done.stderr


def test_the_error_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.core._extras._MODULES", {"train": ("grain", "no_such.module", "no_such_module")})
    with pytest.raises(ConfigError, match=r"needs no_such\.module, no_such_module, .*\n.*lowtide\[train\]"):
        require_extra.__wrapped__("train")
