"""Ray Train: adapters trained on many hosts by `JaxTrainer`, restarted from the newest checkpoint when a worker dies.

    python ray_train.py --out /shared/runs/mine                                # two workers, divided along fsdp
    python ray_train.py --out /shared/runs/mine --workers 4 --pipeline 2       # two stages, fsdp over the rest
    python ray_train.py --out /shared/runs/mine --workers 4 --min-workers 2    # elastic: goes on with what is left

`RAY_ADDRESS` names the cluster; without it Ray starts one on this machine. `--out` has to be on a file system that all
workers see. For your model: change `model_and_data`, and `loss` and the pipeline in `make_trainer`. `pip install
"lowtide[ray]"` on every node.
"""

import argparse
import os
import socket
from pathlib import Path

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

# JAX and Lowtide are imported on the workers alone: the process that starts them takes no device away from them.


def join_the_other_workers():
    """Let JAX's processes find each other, where Ray has not done that; return whether it was done here.

    `JaxTrainer` starts `jax.distributed` on GPUs and TPUs before the training function, and on CPUs nothing.
    `JaxConfig(use_tpu=True)` beside `JAX_PLATFORMS=cpu` would start it there, too, but only for as long as Ray reads
    that variable first, and with JAX's patience of 100 s. To ask JAX is right on all three.
    """
    import jax
    from ray.train.collective import broadcast_from_rank_zero

    if jax.distributed.is_initialized():
        return False
    context, address = ray.train.get_context(), None
    if context.get_world_rank() == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            address = f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"
    jax.distributed.initialize(
        broadcast_from_rank_zero(address),
        context.get_world_size(),
        context.get_world_rank(),
        heartbeat_timeout_seconds=30,
        shutdown_timeout_seconds=30,
    )
    return True


def model_and_data(config, sharding=None):
    """Load the model embedded in Lowtide, with adapters, and batches of Python's language reference."""
    import jax

    import lowtide as lt
    from lowtide.finetune import read_documents, text_data

    folder = lt.models.base_path()
    # Each worker reads what its devices hold, and sees whole batches: the data is the same for any number of workers.
    model = lt.models.load(folder, dtype="float32", sharding=None if sharding is None else sharding.of)
    data = text_data(
        read_documents(None),
        lt.models.load_tokenizer(folder),
        seq_len=config["seq_len"],
        batch_size=config["batch_size"],
        seed=0,
        end_token=model.config.eos_token_id,
        vocab_size=model.config.vocab_size,
    )
    adapters = lt.lora.Config(rank=16, alpha=32, targets="layers/**/*_proj")
    return lt.lora.add(model, adapters, key=jax.random.key(0)), data.train


def make_trainer(config, model, sharding=None, checkpoint_dir=None):
    """Say what trains, and how it is shared; without `sharding` on one device."""
    import optax

    import lowtide as lt

    loss, how = lt.models.loss, {}
    if config["pipeline"]:  # the decoder brings its loss, with the stages that it is cut into
        parts = sharding.mesh.size // config["pipeline"]  # that the rows of a microbatch are divided into
        microbatches = config["batch_size"] // parts
        schedule = lt.pipeline.schedule(num_stages=config["pipeline"], num_microbatches=microbatches)
        loss, how = None, {"pipeline": schedule}
    return lt.Trainer(
        model,
        loss,
        optax.adamw(config["learning_rate"]),
        wrt="**/lora_*",
        weight=lambda batch: (batch["labels"] != -100).sum(),
        sharding=sharding,
        checkpoint_dir=checkpoint_dir,
        **how,
    )


def train_loop_per_worker(config):
    """Run on each worker, and again on each of the next ones when one has died."""
    is_ours = join_the_other_workers()
    import jax

    from lowtide.train import JsonlLogger, ShardingRules, make_mesh

    sharding = ShardingRules(mesh=make_mesh(stage=config["pipeline"]))  # fsdp takes what stages leave
    model, data = model_and_data(config, sharding)
    out = Path(config["out"])
    trainer = make_trainer(config, model, sharding, out / "checkpoints")
    restored = trainer.restore()  # the newest whole one, onto the mesh that there is now
    rank, shape = jax.process_index(), ", ".join(f"{name} {size}" for name, size in sharding.mesh.shape.items())
    print(f"worker {rank} of {jax.process_count()}, process {os.getpid()}: {shape}; goes on from step {restored or 0}")

    def report(record):
        # A barrier: all workers get here as often, for the trainer gives each of them every record.
        if record["step"] % config["report_every"] == 0:
            ray.train.report(dict(record))

    trainer.fit(
        data,
        num_steps=config["steps"],
        checkpoint_every=config["checkpoint_every"],
        callbacks=[JsonlLogger(out / "metrics.jsonl")],
        on_record=report,
        progress=False,
    )
    if is_ours:
        jax.distributed.shutdown()


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder of checkpoints and metrics.jsonl, seen by all workers")
    parser.add_argument("--workers", type=int, default=2, help="processes, each with devices of its own (2)")
    parser.add_argument("--min-workers", type=int, help="elastic: go on with as few as these when nodes are gone")
    parser.add_argument("--pipeline", type=int, metavar="N", help="cut the layers into N stages")
    parser.add_argument("--device", choices=["cpu", "gpu", "tpu"], default="cpu", help="what workers train on (cpu)")
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        help="devices of each worker (1); GPUs: one worker a host, with all of them, for each worker sees 0 to N-1",
    )
    parser.add_argument("--topology", help="of TPUs, such as 4x4")
    parser.add_argument("--accelerator-type", help="of TPUs, such as TPU-V6E")
    parser.add_argument("--max-failures", type=int, default=3, help="restarts before Ray gives up (3)")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (300)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences in a batch (8)")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens in a sequence (128)")
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="of AdamW (5e-3)")
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps between checkpoints (50)")
    parser.add_argument("--report-every", type=int, default=10, help="steps between reports to Ray (10)")
    args = parser.parse_args(argv)
    if args.pipeline is not None:
        devices = args.workers * args.devices
        if args.pipeline < 1 or devices % args.pipeline:
            parser.error(f"--pipeline {args.pipeline}: has to divide the {devices} devices (--workers × --devices)")
        parts = devices // args.pipeline
        if args.batch_size < 1 or args.batch_size % parts:
            parser.error(
                f"--batch-size {args.batch_size}: has to be a multiple of {parts}, "
                f"the parts that a stage's rows are divided into (--workers × --devices / --pipeline)"
            )
    return args


def environment_of(args):
    """Say what the workers find in their environment."""
    environment = {}
    if args.device == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"
        flags = [
            os.environ.get("XLA_FLAGS", ""),  # first: of a flag that is there twice the last one counts
            f"--xla_force_host_platform_device_count={args.devices}",
            # Collectives in one order on every device: else those of a pipeline with FSDP may wait for one another.
            "--xla_cpu_enable_concurrency_optimized_scheduler=false",
        ]
        environment["XLA_FLAGS"] = " ".join(flags).strip()
    elif args.device == "gpu":
        environment["JAX_PLATFORMS"] = "cuda,cpu"  # Ray looks for cuda in it
    return environment


def main():
    args = parse()
    kind = {"gpu": "GPU", "tpu": "TPU"}.get(args.device, "CPU")
    trainer = JaxTrainer(
        train_loop_per_worker,
        train_loop_config={**vars(args), "out": str(Path(args.out).resolve())},
        scaling_config=ScalingConfig(
            num_workers=(args.min_workers, args.workers) if args.min_workers else args.workers,
            use_gpu=args.device == "gpu",
            use_tpu=args.device == "tpu",
            topology=args.topology,
            accelerator_type=args.accelerator_type,
            resources_per_worker={kind: 1 if kind == "CPU" else args.devices},
        ),
        run_config=RunConfig(
            storage_path=str(Path(args.out).resolve() / "ray"),  # Ray's own records; checkpoints are Lowtide's
            failure_config=FailureConfig(max_failures=args.max_failures),
            worker_runtime_env={"env_vars": environment_of(args)},
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
