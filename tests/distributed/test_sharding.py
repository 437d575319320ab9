"""Rules by path, batches over devices, and runs on eight of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import ConfigError, DataError, SelectionError, StructureError
from lowtide.train import ShardingRules, array_data, make_mesh

P = jax.P


def mesh(**sizes):
    return make_mesh(**({"fsdp": 4, "tensor": 2} | sizes))


def test_a_mesh_takes_all_devices():
    assert dict(make_mesh().shape) == {"data": 1, "fsdp": 8, "tensor": 1}
    assert dict(make_mesh(data=-1, fsdp=2, tensor=2).shape) == {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize("sizes", [{"fsdp": 3}, {"data": -1, "fsdp": -1}, {"tensor": 0}, {"tensor": 3}, {"fsdp": -2}])
def test_a_mesh_of_another_number_of_devices_is_refused(sizes):
    text = (
        "an integer of at least -1, not -2" if sizes == {"fsdp": -2} else "do not multiply to the number of devices, 8"
    )
    with pytest.raises(ConfigError, match=rf"(?s){text}.*hint: (pass|use 1 or more, or) -1"):
        make_mesh(**sizes)


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        ("layers/attn/q_proj/weight", (2, 64, 32), P(None, "tensor", "fsdp")),
        ("layers/attn/o_proj/weight", (2, 64, 32), P(None, "fsdp", "tensor")),
        ("layers/mlp/gate_up_proj/weight", (2, 64, 32), P(None, "tensor", "fsdp")),
        ("layers/attn/q_proj/weight/weight", (2, 64, 32), P(None, "tensor", "fsdp")),
        ("block_0/fc1/kernel", (32, 64), P("fsdp", "tensor")),
        ("outer/embed/weight", (64, 32), P("tensor", "fsdp")),
        ("anything", (32, 64), P(None, "fsdp")),
        ("anything", (6, 64), P(None, "fsdp")),
        ("anything", (64, 6), P("fsdp")),
        ("conv", (3, 3, 16, 8), P(None, None, "fsdp")),
        ("odd", (7, 9), P()),
        ("norm/weight", (32,), P("fsdp")),
        ("scalar", (), P()),
    ],
)
def test_leaves_without_a_rule(path, shape, spec):
    assert ShardingRules(mesh=mesh(), min_bytes=0).spec(path, shape) == spec


def test_small_leaves_are_replicated_and_rules_come_first():
    rules = ShardingRules(mesh=mesh(), rules={r".*/small": P("data"), r"w.*": P(("fsdp", "tensor"))})
    assert rules.spec("norm/weight", (32,)) == P()
    assert rules.spec("a/small", (32,)) == P("data")
    assert rules.spec("w1", (32, 8)) == P(("fsdp", "tensor"))


def test_bad_rules_are_errors():
    with pytest.raises(ConfigError, match=r"(?s)the rule 'w': the mesh has no axis 'model'.*hint: use one of data"):
        ShardingRules(mesh=mesh(), rules={"w": P("model")})
    with pytest.raises(ConfigError, match=r"(?s)batch_axes: the mesh has no axis 'batch'.*hint:"):
        ShardingRules(mesh=mesh(), batch_axes=("batch",))
    with pytest.raises(ConfigError, match=r"(?s)axes that shard batches are unknown.*hint: .*batch_axes=\('x',\)"):
        ShardingRules(mesh=jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)))
    with pytest.raises(ConfigError, match=r"(?s)explicit or manual axes.*hint: .*make_mesh"):
        ShardingRules(mesh=jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,)))
    rules = ShardingRules(mesh=mesh(), rules={"w": P("fsdp"), "v": P(None, "tensor")})
    with pytest.raises(
        StructureError, match=r"(?s)w: the rule 'w', .*shard the shape \[6, 2\].*multiple of 4 at axis 0"
    ):
        rules.spec("w", (6, 2))
    with pytest.raises(StructureError, match=r"(?s)v: the rule 'v'.*hint: change the rule"):
        rules.spec("v", (8,))
    with pytest.raises(
        SelectionError, match=r"(?s)the sharding rule 'v' matches no leaf.*such as w.*hint: begin it with"
    ):
        rules.place({"w": jnp.ones((8, 2))})


def test_batches_that_cannot_be_divided_are_errors():
    rules = ShardingRules(mesh=mesh())
    message = r"(?s)batch leaf x: .*expected: a multiple of 4 \(fsdp 4\).*got: 6 rows.*hint: choose"
    with pytest.raises(DataError, match=message):
        rules.batch({"x": np.ones((6, 2))})
    with pytest.raises(DataError, match=r"(?s)multiple of 8 \(fsdp 4 × 2 microbatches\).*got: 12 rows"):
        rules.batch({"x": np.ones((12, 2))}, num_microbatches=2)
    placed = rules.batch({"x": np.ones((8, 2)), "scale": np.float32(2)})
    assert placed["x"].sharding.spec == P(("data", "fsdp")) and placed["scale"].sharding.is_fully_replicated
    assert rules.data_shard == (0, 1)


def config():
    return lt.models.DecoderConfig(
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


def data():
    tokens = np.random.default_rng(0).integers(0, 64, (64, 17)).astype(np.int32)
    return array_data({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}, 16)


def losses(records):
    return [record["loss"] for record in records if "loss" in record]


def decoder_trainer(**options):
    model = lt.models.init(config(), key=jax.random.key(0))
    return lt.Trainer(model, lt.models.loss, optax.adamw(1e-2), num_microbatches=2, **options)


@pytest.mark.slow
def test_the_decoder_trains_as_on_one_device():
    """Along three axes; along each alone, and without microbatches, a smaller model does below."""
    alone = decoder_trainer()
    expected = losses(alone.fit(data(), num_epochs=1, eval_data=data()))
    ours = decoder_trainer(sharding=ShardingRules(mesh=mesh(data=2, fsdp=2), min_bytes=0))
    found = losses(ours.fit(data(), num_epochs=1, eval_data=data()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    weight = ours.model.layers["mlp"]["up_proj"]["weight"]
    first = ours.state.opt_state[0].mu.layers["mlp"]["up_proj"]["weight"]
    parts = ours.sharding.mesh.shape["fsdp"] * ours.sharding.mesh.shape["tensor"]
    for leaf in (weight, first):
        assert leaf.addressable_shards[0].data.nbytes * parts == leaf.nbytes
    np.testing.assert_allclose(ours.evaluate(data())["loss"], alone.evaluate(data())["loss"], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_adapters_over_a_sharded_base_leave_it_where_it_is():
    model = lt.models.init(config(), key=jax.random.key(0))
    model = lt.lora.add(model, lt.lora.Config(rank=4), key=jax.random.key(1))
    rules = ShardingRules(mesh=mesh(), min_bytes=2**10)
    trainer = lt.Trainer(model, lt.models.loss, optax.adamw(1e-2), wrt="**/lora_*", sharding=rules)
    before = jax.tree.leaves(trainer.frozen)
    trainer.fit(data(), num_epochs=1)
    assert all(a is b and not a.is_deleted() for a, b in zip(before, jax.tree.leaves(trainer.frozen), strict=True))
    base = trainer.model.layers["attn"]["q_proj"]["weight"].weight
    assert base.sharding.spec == P(None, "tensor", "fsdp")


@pytest.mark.slow
def test_a_checkpoint_is_restored_onto_another_mesh(tmp_path):
    def loss_fn(model, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ model["up_proj"]) @ model["down_proj"] - batch["x"]) ** 2)

    def data():
        return array_data({"x": np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)}, 16)

    def trainer(directory=tmp_path, **sizes):
        keys = jax.random.split(jax.random.key(0))
        shapes = {"up_proj": (16, 32), "down_proj": (32, 16)}
        model = {name: 0.2 * jax.random.normal(key, shapes[name]) for name, key in zip(shapes, keys, strict=True)}
        rules = ShardingRules(mesh=mesh(**sizes), min_bytes=0) if sizes else None
        return lt.Trainer(model, loss_fn, optax.adamw(1e-2), checkpoint_dir=directory, sharding=rules)

    expected = losses(trainer(None).fit(data().repeat(), num_steps=8))
    first = trainer(fsdp=4, tensor=2)
    first.fit(data(), num_steps=3)
    assert len({leaf.sharding.spec for leaf in jax.tree.leaves(first.model)}) == 2
    found = []
    for until, sizes in [(5, {"fsdp": 8, "tensor": 1}), (6, {"data": 4, "fsdp": 2, "tensor": 1}), (8, {})]:
        ours = trainer(**sizes)
        ours.restore()
        found += losses(ours.fit(data().repeat(), num_steps=until))
    np.testing.assert_allclose(found, expected[3:], rtol=0, atol=1e-5)


def test_two_paths_of_one_array_are_still_refused():
    w = jnp.ones((8, 8))
    with pytest.raises(SelectionError, match="a and b are the same array"):
        lt.Trainer(
            {"a": w, "b": w}, lambda m, x: jnp.sum(m["a"] @ m["b"]), optax.sgd(1.0), sharding=ShardingRules(mesh=mesh())
        )


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_a_device_holds_its_part_of_the_state(tpu_device):
    """Compiled for four chips: the arguments are a quarter, and every donated buffer is reused."""
    from lowtide.core import _compat

    devices = _compat.tpu_topology_devices("v5e:2x2")
    rules = ShardingRules(mesh=make_mesh(fsdp=4, devices=devices))
    width = 1024
    params = {name: jax.ShapeDtypeStruct((width, width), jnp.float32) for name in ("a", "b")}
    params = {name: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=rules.of(name, s)) for name, s in params.items()}
    batch = rules.batch_shapes(jax.ShapeDtypeStruct((64, width), jnp.float32))
    tx = optax.adam(1e-3)
    opt_state = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        jax.eval_shape(tx.init, params),
        lt.offload.state_shardings(tx, params),
    )

    def train(params, opt_state, batch):
        grads = jax.grad(lambda p: jnp.mean((jax.nn.relu(batch @ p["a"]) @ p["b"]) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    report = lt.memory.analyze(
        train, params, opt_state, batch, target="v5e:2x2", roles={"state": (0, 1)}, donate_argnums=(0, 1)
    )
    assert report.by_role["state"] <= 6 * width * width + 2**16


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.usefixtures("little_optimized")
def test_a_step_on_a_mesh_is_compiled_for_a_target_that_is_not_there():
    model = lt.models.init(config(), key=jax.random.key(0))
    rules = ShardingRules(mesh=mesh(), min_bytes=0)
    trainer = lt.Trainer(model, lt.models.loss, optax.adam(1e-2), sharding=rules, num_microbatches=2)
    here, there = trainer.memory(data()[0]), trainer.memory(data()[0], target="v5e:2x4")
    assert there.target.chip == "v5e" and here.target.chip == "cpu"
    assert there.by_role["trainable"] > 0 and there.by_role["outputs"] < 8192  # the state is donated


def test_a_mesh_has_a_stage_axis_where_it_is_asked_for():
    assert dict(make_mesh(stage=2, tensor=2).shape) == {"stage": 2, "data": 1, "fsdp": 2, "tensor": 2}
    assert dict(make_mesh(stage=-1, fsdp=2).shape) == {"stage": 4, "data": 1, "fsdp": 2, "tensor": 1}
    rules = ShardingRules(mesh=make_mesh(stage=2))
    assert rules.spec("layers/mlp/up_proj/weight", (4, 256, 128)) == P("stage", "tensor", "fsdp")
    assert rules.spec("layers/norm/weight", (4, 16)) == P("stage")
    assert rules.spec("layers/norm/weight", (3, 16)) == P()
    assert rules.spec("outer/norm/weight", (4, 16)) == P()


def test_a_batch_may_be_filled_again_while_its_step_runs():
    """On a CPU a placed batch would share NumPy's buffer."""
    rules = ShardingRules(mesh=make_mesh(fsdp=8))
    memory = np.zeros(4 * 64 * 64 + 64, np.uint8)
    aligned = memory[-memory.ctypes.data % 64 :][: 4 * 64 * 64].view(np.float32).reshape(64, 64)
    aligned[:] = 1.0
    placed = rules.batch(aligned)
    aligned[:] = 7.0
    np.testing.assert_array_equal(np.asarray(placed), np.ones((64, 64)))


def test_a_batch_that_cannot_be_divided_is_evaluated_on_every_device():
    def trainer(**options):
        model = {"w": jnp.arange(8.0)}
        return lt.Trainer(model, lambda m, x: jnp.mean((x @ m["w"]) ** 2), optax.sgd(0.1), **options)

    ours = trainer(sharding=ShardingRules(mesh=mesh(), min_bytes=0))
    batches = [np.ones((8, 8), np.float32), np.full((3, 8), 2, np.float32)]
    assert ours.evaluate(batches) == trainer().evaluate(batches)
    assert ours.predict(batches, lambda m, x: x @ m["w"]).shape == (11,)
    with pytest.raises(DataError, match=r"(?s)its rows cannot be sharded.*got: 3 rows"):
        ours.fit(batches[1:], num_steps=1, progress=False)


@pytest.mark.slow
def test_python_numbers_in_a_model_stay_numbers():
    model = {"w": jnp.ones((8, 8)), "scale": 2.0, "n": 3}
    trainer = lt.Trainer(
        model,
        lambda m, x: jnp.mean(x @ m["w"]) * m["scale"] * m["n"],
        optax.sgd(0.1),
        wrt="w",
        sharding=ShardingRules(mesh=mesh(), min_bytes=0),
    )
    assert trainer.fit([np.ones((8, 8), np.float32)], num_steps=1, progress=False)[0]["loss"] == 48.0


def test_rules_hold_for_what_is_on_the_mesh_already():
    rules = ShardingRules(mesh=mesh(), rules={"w": P("fsdp")})
    whole = jax.device_put(jnp.ones((8, 2)), rules.replicated())
    assert rules.place({"w": whole})["w"].sharding.spec == P("fsdp")
    assert ShardingRules(mesh=mesh(), min_bytes=0).place({"w": whole})["w"] is whole


def test_arrays_at_two_paths_of_different_rules_are_refused():
    w = jnp.ones((64, 32))
    with pytest.raises(SelectionError, match="are the same array"):
        lt.Trainer(
            {"embed": {"weight": w}, "head": w},
            lambda m, x: jnp.sum(x @ m["head"] @ m["embed"]["weight"].T),
            optax.sgd(0.1),
            sharding=ShardingRules(mesh=mesh(), min_bytes=0),
        )


@pytest.mark.parametrize("rule", [{"*": P()}, {"w": ("fsdp",)}, {"w": P(P.UNCONSTRAINED)}])
def test_what_is_no_rule_is_refused(rule):
    with pytest.raises(ConfigError, match=r"(?s)the sharding rule .* (is not a regular|has an invalid).*hint:"):
        ShardingRules(mesh=mesh(), rules=rule)


def test_the_copy_on_the_host_holds_each_part_once():
    from lowtide.train.checkpoint._snapshots import HostSnapshot

    rules = ShardingRules(mesh=make_mesh(data=8, fsdp=1))
    snapshot = HostSnapshot({"w": jax.device_put(jnp.ones((64, 64)), rules.replicated())})
    buffers = {id(value): value.nbytes for leaf in snapshot._arrays for _, value in leaf._shards}
    assert sum(buffers.values()) == 64 * 64 * 4
    np.testing.assert_array_equal(snapshot.restore()["w"], np.ones((64, 64)))


@pytest.mark.slow
def test_keys_in_the_state_survive_a_checkpoint(tmp_path):
    def loss_fn(model, x):
        key, now = jax.random.split(model["key"])
        return jnp.mean(x * model["w"]) + 0 * jax.random.uniform(now), {}, {**model, "key": key}

    def trainer():
        model = {"w": jnp.ones(()), "key": jax.random.key(0)}
        return lt.Trainer(model, loss_fn, optax.sgd(0.1), wrt="w", mutable="key", checkpoint_dir=tmp_path)

    data = [np.ones(4, np.float32)] * 4
    first = trainer()
    first.fit(data, num_steps=2, progress=False)
    second = trainer()
    assert second.restore() == 2
    assert jax.random.key_data(second.model["key"]).tolist() == jax.random.key_data(first.model["key"]).tolist()
    second.fit(data, num_steps=4, progress=False)


@pytest.mark.slow
def test_activations_between_layers_are_divided_where_weights_are():
    """Else XLA gathers activations, and every device computes all rows."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4}
    model = lt.models.init(lt.models.DecoderConfig(vocab_size=256, head_dim=32, **sizes), key=jax.random.key(0))
    tokens = np.zeros((32, 64), np.int32)

    def temporaries(**axes):
        rules = ShardingRules(mesh=make_mesh(**axes), min_bytes=0)
        trainer = lt.Trainer(model, lt.models.loss, optax.adamw(1e-3), sharding=rules)
        return trainer.memory({"tokens": tokens, "labels": tokens}).by_role["temporaries"]

    assert temporaries(data=2, fsdp=4) <= 1.1 * temporaries(data=8, fsdp=1)


def test_the_other_axis_may_be_the_rest():
    assert dict(make_mesh(data=-1).shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert dict(make_mesh(tensor=-1, fsdp=2).shape) == {"data": 1, "fsdp": 2, "tensor": 4}


def test_constraining_leaves_alone_what_cannot_be_divided():
    rules = ShardingRules(mesh=make_mesh())
    found = jax.jit(rules.constrain)({"rows": jnp.ones((16, 2)), "odd": jnp.ones(3), "one": jnp.ones(())})
    assert found["rows"].addressable_shards[0].data.shape == (2, 2)
    assert found["odd"].sharding.is_fully_replicated
