"""One process of a distributed run, as the tests of `test_distributed.py` start it.

    python distributed_worker.py '{"out": ..., "num_steps": ..., ...}'

It writes its results to ``<out>-<process>.json``. A run of one process takes as many devices as its mesh has.
"""

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowtide as lt
from lowtide.distributed import _processes
from lowtide.train import Callback, JsonlLogger, ShardingRules, array_data, make_mesh

ARGS = json.loads(sys.argv[1])
_processes._SHARED_SECONDS = ARGS.get("patience", _processes._SHARED_SECONDS)
if ARGS["count"] > 1:
    jax.distributed.initialize(
        f"localhost:{ARGS['port']}",
        ARGS["count"],
        ARGS["process"],
        heartbeat_timeout_seconds=ARGS.get("heartbeat", 20),
        shutdown_timeout_seconds=10,
    )


class Misbehave(Callback):
    """Callback that kills, fails, stops or terminates one process at a step."""

    def on_step_end(self, trainer, step):
        print(f"step {step}", flush=True)
        if ARGS.get("at") != step or ARGS["process"] != ARGS.get("who", ARGS["count"] - 1):
            return
        if ARGS["how"] == "kill":
            os.kill(os.getpid(), 9)
        if ARGS["how"] == "raise":
            raise ZeroDivisionError("in one process")
        if ARGS["how"] == "stop":
            trainer.stop()
        if ARGS["how"] == "terminate":
            os.kill(os.getpid(), 15)


def restore_in_turn(trainer):
    """Restore, and print the warnings about damaged checkpoints."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step = trainer.restore()
    print("\n".join(str(warning.message) for warning in seen), flush=True)
    return step


def small(key):
    """Return two matrices, and batches for them to reproduce."""
    one, other, rows = jax.random.split(key, 3)
    model = {"up_proj": jax.random.normal(one, (16, 32)), "down_proj": jax.random.normal(other, (32, 16))}
    return model, {"x": np.asarray(jax.random.normal(rows, (64, 16)))}


def small_loss(model, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ model["up_proj"]) @ model["down_proj"] - batch["x"]) ** 2)


STACK = lt.LayerStack(
    first=lambda outer, batch: batch["x"] @ outer["in"],
    block=lambda layer, h, batch: h + jnp.tanh(h @ layer["w"]),
    last=lambda outer, h, batch: (jnp.mean((h - batch["x"]) ** 2), {}),
)


def layers(key):
    """Return two layers of `STACK`, and batches for them to reproduce."""
    outer, inner, rows = jax.random.split(key, 3)
    model = {
        "outer": {"in": jax.random.normal(outer, (16, 16))},
        "layers": {"w": jax.random.normal(inner, (2, 16, 16))},
    }
    return model, {"x": np.asarray(jax.random.normal(rows, (64, 16)))}


def stack_loss(model, batch):
    return STACK.apply(model["outer"], model["layers"], batch)


def decoder(key):
    """Return a decoder, and batches of tokens."""
    config = lt.models.DecoderConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        tie_embeddings=False,
        eos_token_id=0,
    )
    tokens = np.random.default_rng(0).integers(0, 64, (64, 17)).astype(np.int32)
    return lt.models.init(config, key=key), {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


MAKE, LOSS = {
    "decoder": (decoder, lt.models.loss),
    "small": (small, small_loss),
    "layers": (layers, stack_loss),
}[ARGS["kind"]]


def make_trainer(model, rules):
    how = {"num_microbatches": ARGS.get("microbatches", 1 + (ARGS.get("odd") == "settings") * ARGS["process"])}
    loss = LOSS
    if "stage" in ARGS:
        schedule = lt.pipeline.schedule(ARGS["schedule"], num_stages=ARGS["stages"], num_microbatches=4)
        is_decoder = ARGS["kind"] == "decoder"
        how = {"pipeline": schedule if is_decoder else lt.pipeline.value_and_grad(STACK, schedule, mesh=rules.mesh)}
        loss = None
    return lt.Trainer(
        model,
        loss,
        optax.adamw(1e-2),
        wrt="**/lora_*" if ARGS.get("adapters") else None,
        sharding=rules,
        **how,
        checkpoint_dir=ARGS["checkpoints"] + str(ARGS["process"] if ARGS.get("odd") == "folder" else ""),
    )


def restored(trainer):
    step = trainer.restore() if "damaged" not in ARGS else restore_in_turn(trainer)
    if ARGS.get("adapters"):
        trainer.step = step or 0  # a new array: copies and checkpoints read it, too
    return step


def budget(model, rules, batch):
    """Return a fraction of the bytes that a step needs by default; each process has another fraction."""
    if "room" not in ARGS:
        return None
    return int(make_trainer(model, rules).preflight(batch).device_bytes * ARGS["room"][ARGS["process"]])


def end_late():
    """Delay the signal that ends this process until the other one has exited."""
    raise_signal = signal.raise_signal

    def later(number):
        time.sleep(2)
        raise_signal(number)

    signal.raise_signal = later


def main():
    if ARGS.get("late") == ARGS["process"]:
        end_late()
    model, arrays = MAKE(jax.random.key(0))
    if ARGS.get("odd") == "weights":
        model, _ = MAKE(jax.random.key(ARGS["process"]))
    rules = ShardingRules(
        mesh=make_mesh(
            stage=ARGS.get("stage"),
            fsdp=ARGS["fsdp"],
            tensor=ARGS["tensor"],
            devices=jax.devices()[: ARGS.get("stage", 1) * ARGS["fsdp"] * ARGS["tensor"]]
            if ARGS["count"] == 1
            else None,
        ),
        min_bytes=0,
        local_batches=ARGS.get("local", False),
        timeout_seconds=ARGS.get("timeout", 60),
    )
    if ARGS.get("damaged") == ARGS["process"]:
        for path in Path(ARGS["checkpoints"]).glob("6/state/**/*"):
            if path.is_file():
                path.write_bytes(b"")
    if ARGS.get("adapters"):
        model = lt.lora.add(rules.place(model), lt.lora.Config(rank=2, targets="*"), key=jax.random.key(1))
    trainer = make_trainer(model, rules)
    if rules.local_batches:
        shard, count = rules.data_shard
        whole = array_data(arrays, 16, seed=0)

        def rows(batch):
            size = 16 // count
            return jax.tree.map(lambda leaf: leaf[shard * size : (shard + 1) * size], batch)

        data = [rows(whole[step % len(whole)]) for step in range(ARGS["num_steps"])]
    else:
        data = array_data(arrays, 16, seed=0).repeat()
    if ARGS.get("odd") == "data" and ARGS["process"]:
        data = [jax.tree.map(lambda leaf: leaf[:8], data[0])] * 99
    trainer.budget_bytes = budget(model, rules, data[0])
    resumed = restored(trainer)
    num_steps = ARGS["num_steps"] + (ARGS.get("odd") == "steps") * ARGS["process"]
    callbacks = [Misbehave(), JsonlLogger(ARGS["out"] + ".jsonl")]
    if ARGS.get("odd") == "callbacks" and ARGS["process"]:
        callbacks.append(None)
    records = trainer.fit(
        data,
        num_steps=num_steps,
        eval_data=[data[0]] * (1 + (ARGS.get("odd") == "evaluation") * ARGS["process"]),
        checkpoint_every=ARGS.get("every", 2),
        progress=False,
        callbacks=callbacks,
    )
    losses = [record["loss"] for record in records if "loss" in record]
    if ARGS["kind"] != "decoder":
        Path(f"{ARGS['out']}-{ARGS['process']}.json").write_text(json.dumps({"resumed": resumed, "losses": losses}))
        return
    weight = trainer.model.layers["attn"]["q_proj"]["weight"]
    predicted = trainer.predict([data[0]], lambda model, batch: lt.models.logits(model, batch["tokens"]).mean(-1))
    whole = rules.gather(trainer.state.trainable)
    with open(f"{ARGS['out']}-{ARGS['process']}.json", "w") as file:
        json.dump(
            {
                "resumed": resumed,
                "step": trainer.step,
                "limit": trainer.stages and trainer.stages.limit_bytes,
                "losses": losses,
                "eval": [record["eval_loss"] for record in records if "eval_loss" in record],
                "spec": str(weight.sharding.spec),
                "local_bytes": sum(shard.data.nbytes for shard in weight.addressable_shards[:1]),
                "bytes": weight.nbytes,
                "moments": str(trainer.state.opt_state[0].mu.layers["attn"]["q_proj"]["weight"].sharding.spec),
                "predicted": np.asarray(predicted).tolist(),
                "sum": float(sum(np.abs(np.asarray(leaf)).sum(dtype=np.float64) for leaf in jax.tree.leaves(whole))),
            },
            file,
        )


main()
