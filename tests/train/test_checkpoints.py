"""What checkpoints and copies on the host hold, and what happens when they cannot be written or read."""

import json
import pathlib
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import ConfigError, OutputError, SelectionError, StateError, StructureError
from lowtide.distributed import _processes
from lowtide.train import Callback

DATA = [np.full(4, step, np.float32) for step in range(10)]


def loss_fn(model, x):
    return jnp.mean((model["w"] - x) ** 2)


def trainer(**options):
    return lt.Trainer({"w": jnp.zeros(4)}, loss_fn, optax.sgd(0.1), **options)


def fit(ours, num_steps, **options):
    return ours.fit(DATA, num_steps=num_steps, progress=False, **options)


def nnx_trainer(**options):
    from flax import nnx

    from lowtide.ext.nnx import Bridge

    module = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    return module, lt.Trainer(Bridge(module), lambda m, x: jnp.mean(m(x[None]) ** 2), optax.sgd(0.01), **options)


def edit(module, value):
    module.kernel[...] = jnp.full((4, 1), value)


@pytest.mark.slow
def test_what_a_callback_changes_in_an_object_is_in_the_checkpoint_of_that_step(tmp_path):
    module, ours = nnx_trainer(checkpoint_dir=tmp_path, max_to_keep=9)

    class Edits(Callback):
        def on_step_end(self, trainer, step):
            if step in (2, 4):
                edit(trainer.model, 7.0 + step)

    fit(ours, 4, checkpoint_every=2, callbacks=[Edits()])
    assert module.kernel[...][0, 0] == 11.0
    for step, value in [(2, 9.0), (4, 11.0)]:
        assert ours.restore(step=step) == step
        assert module.kernel[...].tolist() == [[value]] * 4


def test_what_is_changed_between_two_fits_is_saved_and_rolled_back_to(tmp_path):
    module, ours = nnx_trainer(checkpoint_dir=tmp_path)
    edit(module, 3.0)
    ours.save()
    edit(module, 4.0)
    assert ours.restore() == 0 and module.kernel[...][0, 0] == 3.0

    module, ours = nnx_trainer(on_nan="roll_back")
    edit(module, 5.0)
    bad = [np.full(4, np.nan, np.float32)]
    with pytest.warns(UserWarning, match="step 1: loss is not finite, so the weights of step 0 were restored"):
        ours.fit(bad * 2, num_steps=1, progress=False)
    assert module.kernel[...].tolist() == [[5.0]] * 4


@pytest.mark.slow
def test_the_copy_is_taken_where_there_is_no_checkpoint_of_the_step(tmp_path):
    ours = trainer(checkpoint_dir=tmp_path, on_nan="roll_back")
    fit(ours, 1)
    ours.update({"w": jnp.full(4, 50.0)})
    bad = [*DATA[:1], np.full(4, np.nan, np.float32)]
    with pytest.warns(UserWarning, match="the weights of step 1 were restored"):
        ours.fit(bad, num_steps=2, progress=False)
    assert ours.model["w"].tolist() == [50.0] * 4


def test_what_is_no_fault_of_the_checkpoint_does_not_set_it_aside(tmp_path, monkeypatch):
    ours = trainer(checkpoint_dir=tmp_path)
    fit(ours, 1)

    def fail(*args, **kwargs):
        raise PermissionError("planted")

    monkeypatch.setattr(type(ours.checkpoints), "restore", fail)
    with pytest.raises(PermissionError, match="planted"):
        ours.restore()
    monkeypatch.undo()
    assert ours.restore() == 1 and ours.step == 1


def test_saving_an_earlier_step_than_the_newest_is_an_error(tmp_path):
    ours = trainer(checkpoint_dir=tmp_path, max_to_keep=9)
    fit(ours, 4, checkpoint_every=2)
    ours.restore(step=2)
    with pytest.raises(OutputError, match="holds a checkpoint of step 4|step 3 was not saved"):
        fit(ours, 3)
    ours.state = jax.tree.map(lambda x: x + 1 if x.dtype == jnp.int32 else x, ours.state)
    with pytest.raises(OutputError, match=r"(?s)step 3 was not saved, because step 4.*hint: .*another checkpoint_dir"):
        ours.save()


def test_a_folder_that_cannot_be_written_to_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"(?s)no checkpoint can be written there.*hint: choose a checkpoint_dir"):
        trainer(checkpoint_dir=tmp_path / "file")


def test_a_callback_whose_state_is_no_json_is_told(tmp_path):
    class Odd(Callback):
        def state(self):
            return {"now": object()}

    ours = trainer(checkpoint_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)cannot be saved as JSON: .*hint:"):
        fit(ours, 2, callbacks=[Odd()])
    assert ours.step == 2


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    class Odd(Callback):
        def state(self):
            return {"now": object()}

    ours = trainer(checkpoint_dir=tmp_path, max_to_keep=1)
    fit(ours, 2)
    before = ours.model["w"].tolist()
    ours.update({"w": jnp.full(4, 7.0)})

    def full(*args, **kwargs):
        assert "2" in names(tmp_path)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ocp.Checkpointer, "save", full)
    with pytest.raises(OutputError, match=r"(?s)could not be written.*No space left.*hint: free some space"):
        ours.save()
    monkeypatch.undo()
    again = trainer(checkpoint_dir=tmp_path)
    assert again.restore() == 2 and again.model["w"].tolist() == before
    assert ours.save() and names(tmp_path) == ["2"]
    ours.update({"w": jnp.full(4, 8.0)})
    with pytest.raises(ConfigError, match="cannot be saved"):
        fit(ours, 2, callbacks=[Odd()])
    assert again.restore() == 2 and again.model["w"].tolist() == [7.0] * 4


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize(
    ("owner", "name", "number", "held"),
    [
        (pathlib.Path, "rename", 1, 0.0),
        (pathlib.Path, "rename", 2, 7.0),
        (shutil, "rmtree", 1, 7.0),
    ],
)
def test_a_run_that_ends_while_it_replaces_a_checkpoint_leaves_one(
    owner, name, number, held, is_new, tmp_path, monkeypatch
):
    ours = trainer(checkpoint_dir=tmp_path)
    ours.save()
    ours.checkpoints.wait()
    ours.update({"w": jnp.full(4, 7.0)})
    real, calls = getattr(owner, name), []

    def end(path, *args, **kwargs):
        calls.append(path)
        if len(calls) == number:
            raise KeyboardInterrupt
        return real(path, *args, **kwargs)

    monkeypatch.setattr(owner, name, end)
    with pytest.raises(KeyboardInterrupt):
        ours.save()
    monkeypatch.undo()
    if is_new:
        ours = trainer(checkpoint_dir=tmp_path)
        assert ours.restore() == 0 and ours.model["w"].tolist() == [held] * 4
    ours.update({"w": jnp.full(4, 8.0)})
    assert ours.save() and names(tmp_path) == ["0"]
    ours.update({"w": jnp.full(4, 9.0)})
    assert ours.restore() == 0 and ours.model["w"].tolist() == [8.0] * 4


def test_what_another_run_is_writing_is_left_to_it(tmp_path):
    half = tmp_path / "6.orbax-checkpoint-tmp"

    class Other(Callback):
        def on_step_end(self, trainer, step):
            (tmp_path / "5").mkdir(exist_ok=True)
            half.mkdir(exist_ok=True)

    with pytest.raises(OutputError, match="another run writes checkpoints here"):
        fit(trainer(checkpoint_dir=tmp_path), 1, callbacks=[Other()])
    assert half.is_dir()


def test_a_kill_during_a_deletion_leaves_no_half_of_a_checkpoint(tmp_path, monkeypatch):
    """Under its name it was no checkpoint of ours any more, and refused."""
    with monkeypatch.context() as patch:
        patch.setattr(
            shutil, "rmtree", lambda folder, *_: (pathlib.Path(folder) / "checksums.json").unlink(missing_ok=True)
        )
        with pytest.warns(UserWarning, match=r"old-checkpoints: old checkpoints cannot be deleted: 1.*\nhint:"):
            fit(trainer(checkpoint_dir=tmp_path), 5, checkpoint_every=1)
        assert names(tmp_path) == [".old-checkpoints", "4", "5"]
    ours = trainer(checkpoint_dir=tmp_path)
    assert ours.restore() == 5
    assert names(tmp_path) == [".old-checkpoints", "4", "5"]  # who reads deletes nothing
    fit(ours, 8, checkpoint_every=1)
    assert names(tmp_path) == ["7", "8"]


def test_files_by_which_killed_processes_looked_for_one_another_are_deleted(tmp_path):
    (tmp_path / ".shared-0123").touch()
    fit(trainer(checkpoint_dir=tmp_path), 1)
    assert names(tmp_path) == ["1"]


def test_a_folder_that_the_first_process_cannot_write_to_is_told_to_the_others(tmp_path, monkeypatch):
    said = []

    def exchange(topic, text, seconds):
        said.append(json.loads(text))
        return [text, text]

    monkeypatch.setattr(_processes, "exchange", exchange)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write"):
        _processes.check_shared_folder(types.SimpleNamespace(count=2, is_first=True), tmp_path / "file")
    assert "cannot write" in said[-1]["error"]


def test_damaged_evaluations_are_a_warning(tmp_path):
    (tmp_path / "evaluations.json").write_text("{")
    with pytest.warns(UserWarning, match=r"(?s)evaluations.json is damaged.*hint:"):
        trainer(checkpoint_dir=tmp_path, best="eval_loss")


def test_arrays_that_another_trainer_consumed_are_told():
    model = {"w": jnp.zeros(4)}
    first, second = (lt.Trainer(model, loss_fn, optax.sgd(0.1)) for _ in range(2))
    fit(first, 1)
    with pytest.raises(StateError, match=r"(?s)w was consumed by another trainer.*hint: use the trainer's arrays"):
        fit(second, 1)
    with pytest.raises(StateError, match=r"(?s)w was consumed by another trainer.*hint: use the trainer's arrays"):
        lt.Trainer(model, loss_fn, optax.sgd(0.1))
    assert lt.Trainer(first.model, loss_fn, optax.sgd(0.1)).step == 0


def test_two_paths_of_one_array_are_refused_after_update_too():
    ours = lt.Trainer({"a": jnp.zeros(4), "b": jnp.ones(4)}, lambda m, x: jnp.sum(m["a"] + m["b"]), optax.sgd(0.1))
    w = jnp.ones(4)
    with pytest.raises(SelectionError, match="are the same array, and both are trainable"):
        ours.update({"a": w, "b": w})


def test_a_rollback_to_nothing_is_refused():
    with pytest.raises(ConfigError, match=r'(?s)on_nan="roll_back" has no copy to restore.*hint:'):
        trainer(on_nan="roll_back", rollback=False)


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"acc": jnp.ones(3)}, r"metric 'acc' must be a real scalar, not float32\[3\]"),
        ({"step": jnp.float32(1)}, "metric 'step' has a name that is reserved.*hint: rename"),
        ({"a": {"b": 1.0}}, "metric 'a' must be a real scalar, not dict"),
    ],
)
def test_metrics_that_cannot_be_recorded_are_errors(metrics, said):
    ours = lt.Trainer({"w": jnp.zeros(4)}, lambda m, x: (loss_fn(m, x), metrics), optax.sgd(0.1))
    with pytest.raises(StructureError, match=f"(?s){said}"):
        fit(ours, 1)


@pytest.mark.slow
def test_the_norm_of_half_precision_gradients_does_not_overflow():
    model = {str(i): jnp.zeros(4, jnp.float16) for i in range(100)}
    ours = lt.Trainer(
        model, lambda m, x: 100.0 * sum(jnp.sum(w * x[0].astype(w.dtype)) for w in m.values()), optax.sgd(0.1)
    )
    record = ours.fit([np.ones(4, np.float32)], num_steps=1, progress=False)[0]
    np.testing.assert_allclose(record["grad_norm"], 2000.0, rtol=1e-3)


def test_numbers_of_python_train():
    ours = lt.Trainer(
        {"w": 1.0, "v": np.float32(2.0)}, lambda m, x: jnp.mean((m["w"] + m["v"] - x) ** 2), optax.sgd(0.1)
    )
    assert fit(ours, 2)[1]["step"] == 2


def test_each_batch_of_an_evaluation_has_a_key_of_its_own():
    seen = []

    def loss(model, x, key):
        jax.debug.callback(lambda data: seen.append(tuple(np.asarray(data).tolist())), jax.random.key_data(key))
        return loss_fn(model, x)

    ours = lt.Trainer({"w": jnp.zeros(4)}, loss, optax.sgd(0.1))
    ours.evaluate(DATA[:3])
    fit(ours, 3)
    jax.effects_barrier()
    assert len(seen) == len(set(seen)) == 6


def test_json_has_what_was_saved(tmp_path):
    ours = trainer(checkpoint_dir=tmp_path)
    fit(ours, 2)
    assert json.dumps(ours.checkpoints.notes(2)["positions"])


def test_what_cannot_be_trained_with_is_refused_with_the_remedy():
    from flax import nnx

    module, _ = nnx_trainer()
    with pytest.raises(ConfigError, match=r"(?s)mutable object.*lowtide.ext.nnx.Bridge\(model\)"):
        lt.Trainer(module, loss_fn, optax.sgd(0.1))
    state = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    for pytree in (state, nnx.state(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Param)):
        lt.Trainer(pytree, lambda m, x: jnp.sum(m["bias"][...]) * jnp.mean(x), optax.sgd(0.1))
    for tx in (1e-3, "adam"):
        with pytest.raises(ConfigError, match=r"(?s)tx must be an Optax optimizer .*hint:"):
            lt.Trainer({"w": jnp.zeros(4)}, loss_fn, tx)
    with pytest.raises(ConfigError, match=r"(?s)loss_fn must be a function.*bridge.loss"):
        lt.Trainer({"w": jnp.zeros(4)}, "mse", optax.sgd(0.1))
    with pytest.raises(ConfigError, match=r"(?s)sharding must be a ShardingRules object.*hint:"):
        trainer(sharding=lt.train.make_mesh())
    for callback in (Callback, print):
        with pytest.raises(ConfigError, match=r"(?s)a callback must be an object of a subclass.*hint:"):
            fit(trainer(), 1, callbacks=[callback])


def test_a_model_that_is_returned_without_mutable_leaves_is_an_error():
    model = {"w": jnp.zeros(4), "stats": jnp.zeros(())}
    ours = lt.Trainer(model, lambda m, x: (loss_fn(m, x), {}, m), optax.sgd(0.1), wrt="w")
    with pytest.raises(
        StructureError, match=r"(?s)returns a model, but no leaf of it is declared mutable.*hint: .*mutable="
    ):
        fit(ours, 1)


@pytest.mark.parametrize("step", ["0", "7"])
def test_folders_of_others_are_neither_deleted_nor_renamed(tmp_path, step):
    """With the names of checkpoints they were: as old ones, or as damaged."""
    (tmp_path / step / "precious").mkdir(parents=True)
    with pytest.raises(OutputError, match=rf"(?s)/{step}: .*Lowtide did not write it.*hint: choose another"):
        trainer(checkpoint_dir=tmp_path)
    shutil.rmtree(tmp_path / step)
    ours = trainer(checkpoint_dir=tmp_path)
    (tmp_path / step).mkdir()
    with pytest.raises(OutputError, match="Lowtide did not write it"):
        fit(ours, 3)
    assert names(tmp_path) == [step]


def test_a_folder_is_a_path_that_is_meant(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert trainer(checkpoint_dir="~/runs").checkpoints.directory == tmp_path / "runs"
    monkeypatch.chdir(tmp_path)
    for address in ("gs://bucket/run", pathlib.Path("s3://bucket/run")):
        with pytest.raises(ConfigError, match="(?s)is a URL.*hint: mount the bucket"):
            trainer(checkpoint_dir=address)
    assert names(tmp_path) == ["runs"]
    with pytest.raises(OutputError, match="(?s)no checkpoint can be written there.*File name too long"):
        trainer(checkpoint_dir=tmp_path / ("a" * 300))


@pytest.mark.parametrize("number", [None, 1.5, 0])
def test_how_many_checkpoints_to_keep_is_a_number(tmp_path, number):
    with pytest.raises(ConfigError, match="max_to_keep must be an integer of at least 1, not "):
        trainer(checkpoint_dir=tmp_path, max_to_keep=number)


def noisy(model, x, key):
    return jnp.mean((model["w"] - x + jax.random.normal(key, x.shape)) ** 2)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("setting", [("jax_default_prng_impl", "rbg"), ("jax_threefry_partitionable", False)])
def test_other_random_numbers_than_before_are_told(tmp_path, setting):
    name, value = setting
    ours = lt.Trainer({"w": jnp.zeros(4)}, noisy, optax.sgd(0.1), checkpoint_dir=tmp_path)
    fit(ours, 2)
    assert ours.restore() == 2
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        with pytest.warns(UserWarning, match=f"drew its random numbers with {name}={before!r} until step 2"):
            assert ours.restore() == 2
    finally:
        jax.config.update(name, before)


def test_keys_of_another_kind_are_refused(tmp_path):
    def made(impl):
        model = {"w": jnp.zeros(4), "key": jax.random.key(0, impl=impl)}
        loss = lambda model, x: (loss_fn(model, x), {}, model)  # noqa: E731
        return lt.Trainer(model, loss, optax.sgd(0.1), wrt="w", mutable="key", checkpoint_dir=tmp_path)

    fit(made("rbg"), 1)
    assert made("rbg").restore() == 1
    with pytest.raises(StructureError, match=r"(?s)random keys of .*rbg.*, not of .*unsafe_rbg.*hint:"):
        made("unsafe_rbg").restore()
