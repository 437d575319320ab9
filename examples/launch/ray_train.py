"""Train adapters on many hosts with Ray Train's `JaxTrainer`; after a failure it restarts from the newest checkpoint.

    python ray_train.py --out /shared/runs/mine                                # two workers, sharded along fsdp
    python ray_train.py --out /shared/runs/mine --workers 4 --pipeline 2       # two stages, fsdp within each
    python ray_train.py --out /shared/runs/mine --workers 4 --min-workers 2    # elastic: continues with 2 to 4 workers

`RAY_ADDRESS` names the cluster; without it Ray starts one on this machine. `--out` has to be on a file system that all
workers share. For your model: change `model_and_data`, and `loss` and the pipeline in `make_trainer`. On every node,
install Lowtide in a clone of its repository: `pip install ".[finetune,ray]"`.
"""

import argparse
import os
import socket
from pathlib import Path

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

# Only the workers import JAX and Lowtide. The process that starts them would otherwise occupy their devices.


def join_the_other_workers():
    """Connect JAX's processes if Ray has not done that; return whether this function did it.

    `JaxTrainer` starts `jax.distributed` before the training function on GPUs and TPUs, but not on CPUs.
    `JaxConfig(use_tpu=True)` with `JAX_PLATFORMS=cpu` would start it there, too. But that depends on the order in which
    Ray reads its settings, and keeps JAX's timeout of 100 s. A check of JAX's own state works on all three.
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
    # Each worker loads only the shards on its devices. It reads whole batches, so the data is the same for any number
    # of workers.
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
    """Make the trainer of the adapters; without `sharding` it uses one device."""
    import optax

    import lowtide as lt

    loss, how = lt.models.loss, {}
    if config["pipeline"]:  # the decoder's stack has its own loss
        parts = sharding.mesh.size // config["pipeline"]  # devices that share the rows of a microbatch
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
    """Train on one worker. Ray calls this on all workers, and after a failure again on all workers of a new group."""
    is_ours = join_the_other_workers()
    import jax

    from lowtide.train import JsonlLogger, ShardingRules, make_mesh

    sharding = ShardingRules(mesh=make_mesh(stage=config["pipeline"]))  # fsdp uses the remaining devices
    model, data = model_and_data(config, sharding)
    out = Path(config["out"])
    trainer = make_trainer(config, model, sharding, out / "checkpoints")
    restored = trainer.restore()  # the newest readable checkpoint, sharded on the current mesh
    rank, shape = jax.process_index(), ", ".join(f"{name} {size}" for name, size in sharding.mesh.shape.items())
    print(f"worker {rank} of {jax.process_count()}, process {os.getpid()}: {shape}; goes on from step {restored or 0}")

    def report(record):
        # `ray.train.report` is a barrier. All workers reach it equally often, because each receives every record.
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
    """Return the environment variables of the workers."""
    environment = {}
    if args.device == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"
        flags = [
            os.environ.get("XLA_FLAGS", ""),  # first, because the last occurrence of a flag counts
            f"--xla_force_host_platform_device_count={args.devices}",
            # Run collectives in one order on all devices: those of a pipeline with FSDP could otherwise deadlock.
            "--xla_cpu_enable_concurrency_optimized_scheduler=false",
        ]
        environment["XLA_FLAGS"] = " ".join(flags).strip()
    elif args.device == "gpu":
        environment["JAX_PLATFORMS"] = "cuda,cpu"  # Ray checks whether this contains cuda
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
            storage_path=str(Path(args.out).resolve() / "ray"),  # files of Ray; Lowtide writes the checkpoints
            failure_config=FailureConfig(max_failures=args.max_failures),
            worker_runtime_env={"env_vars": environment_of(args)},
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
