"""Checkpoints: a resumed run is the run that never stopped, and nothing is restored that was not saved."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from shared.checkpoint.manifest import Manifest, flat, misfits, read_manifest, saved_steps, text_hash
from shared.checkpoint.reader import restore, verify
from shared.checkpoint.writer import Writer
from shared.cli.main import main
from shared.cli.preparation import check_fit
from shared.model.state import live_model
from tests.runs import TEXT, TWINS, losses, train
from tests.shared.checkpoint.saved import arrays, assert_same, build, dataset, newest, save_steps
from tests.small import small_config

NAMES = list(TWINS)


@pytest.mark.parametrize("name", NAMES)
def test_weights_restored_into_a_fresh_model_give_the_same_logits(name: str, tmp_path: Path):
    """The seed of this project, by hand: save with Orbax, restore into a fresh NNX model, compare logits bitwise."""
    twin = build(name, 4)
    tokens = twin.place_batch(dataset(twin.plan.config)(0)).tokens
    (_,) = save_steps(tmp_path, twin, 1)
    state = twin.init(jax.random.key(0))
    state, _ = twin.train_step(state, twin.place_batch(dataset(twin.plan.config)(0)))
    before = np.asarray(twin.logits(state, tokens))
    fresh = twin.init(jax.random.key(1))
    assert np.abs(np.asarray(twin.logits(fresh, tokens)) - before).max() > 0.01
    restored = newest(tmp_path, twin)[0]
    np.testing.assert_array_equal(np.asarray(twin.logits(restored, tokens)), before)
    model = live_model(twin.plan.config, restored)
    np.testing.assert_allclose(np.asarray(model(tokens)), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_roundtrip_command(name: str, capsys: pytest.CaptureFixture[str]):
    main(TWINS[name], name, ["roundtrip", "--layers", "1", "--d-model", "16", "--d-ff", "16", "--devices", "2"])
    printed = capsys.readouterr().out
    assert "logits after restoring:  equal, bit for bit" in printed


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_what_is_restored_is_what_was_saved(param_dtype: str, tmp_path: Path):
    """Every array, though the device memory it was saved from was written over while the save went on."""
    twin = build("explicit_shardmap", 4, small_config(param_dtype=param_dtype))
    kept = save_steps(tmp_path, twin, 3)
    for step, expected in enumerate(kept, 1):
        found = verify(tmp_path, step)
        assert not found.problem
        assert found.manifest is not None
        assert_same(arrays(restore(tmp_path, found.manifest, twin)), expected)


def test_float64(float64: None, tmp_path: Path):
    twin = build("auto_sharding", 2, small_config(dtype="float64", param_dtype="float64"))
    (expected,) = save_steps(tmp_path, twin, 1)
    assert_same(arrays(newest(tmp_path, twin)[0]), expected)


def test_only_the_newest_are_kept(tmp_path: Path):
    save_steps(tmp_path, build("auto_sharding", 1), 4, keep=2)
    assert saved_steps(tmp_path) == [4, 3]


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one_bit_for_bit(name: str, tmp_path: Path):
    """With dropout and AdamW: parameters, optimizer state, step, data position and random keys are all restored."""
    assert train(tmp_path / "whole", "--steps", 12, "--devices", 4, twin=name) == 0
    for stop, resume in ((4, []), (8, ["--resume"]), (12, ["--resume"])):
        options = ["--steps", 12, "--devices", 4, "--checkpoint-every", stop, *resume]
        interrupted = tmp_path / "parts"
        if stop == 12:
            assert train(interrupted, *options, twin=name) == 0
        else:
            with pytest.MonkeyPatch.context() as patch:  # a signal, without the signal
                patch.setattr(
                    "shared.runtime.processes.StopSignals.__call__", lambda self, done, stop=stop: done == stop
                )
                train(interrupted, *options, twin=name)
    np.testing.assert_array_equal(losses(tmp_path / "parts"), losses(tmp_path / "whole"))


def test_a_run_moves_between_devices_and_twins(tmp_path: Path):
    """8, 4, 2, 1 and 8 devices, the twin changing each time: float32 losses as on 8 devices throughout.

    Under SGD, whose trajectories show a wrong gradient; the tolerance is that of sums in another order, over 15 steps.
    """
    options = ["--steps", 15, "--optimizer", "sgd", "--learning-rate", 0.1, "--dropout", 0.1]
    assert train(tmp_path / "whole", *options, "--devices", 8) == 0
    for leg, devices in enumerate((8, 4, 2, 1, 8)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "shared.runtime.processes.StopSignals.__call__",
                lambda self, done, leg=leg: done == 3 * (leg + 1),
            )
            train(tmp_path / "legs", *options, "--devices", devices, "--resume", twin=NAMES[leg % 2])
    np.testing.assert_allclose(losses(tmp_path / "legs"), losses(tmp_path / "whole"), rtol=2e-6)
    assert len(losses(tmp_path / "legs")) == 15


def test_a_run_moves_between_strategies(tmp_path: Path):
    """A run resumes under other strategies, with the losses of a run that never moved."""
    options = ["--steps", 8, "--optimizer", "sgd", "--learning-rate", 0.1, "--dropout", 0.1]
    assert train(tmp_path / "whole", *options, "--devices", 4) == 0
    legs = (
        ["--strategy", "fsdp", "--devices", 8],
        ["--mesh", "context=2,tensor=2", "--devices", 4],
        ["--strategy", "zero_1", "--devices", 2, "--microbatches", 2],
        ["--strategy", "sequence_parallel", "--mesh", "data=2,fsdp=2,tensor=2", "--devices", 8],
    )
    for number, leg in enumerate(legs):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "shared.runtime.processes.StopSignals.__call__",
                lambda self, done, n=number: done == 2 * (n + 1),
            )
            train(tmp_path / "legs", *options, *leg, "--resume", twin=NAMES[number % 2])
    np.testing.assert_allclose(losses(tmp_path / "legs"), losses(tmp_path / "whole"), rtol=2e-6)
    assert len(losses(tmp_path / "legs")) == 8


def test_a_configuration_that_does_not_fit_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train(tmp_path, "--steps", 2, "--devices", 2) == 0
    with pytest.raises(ValueError, match="does not fit") as refused:
        train(tmp_path, "--steps", 3, "--devices", 2, "--d-ff", 16, "--seed", 1, "--resume")
    for field in ("model.d_ff (saved 32, requested 16)", "seed (saved 0, requested 1)", "steps (saved 2, requested 3)"):
        assert field in str(refused.value)
    assert "d_model" not in str(refused.value)
    with pytest.raises(ValueError, match=r"training text \(saved .*, requested "):
        train(tmp_path, "--steps", 2, "--devices", 2, "--resume", text=b"!" + TEXT)
    with pytest.raises(ValueError, match="holds checkpoints already, the newest of step 2; give --resume"):
        train(tmp_path, "--steps", 2, "--devices", 2)
    capsys.readouterr()
    assert train(tmp_path, "--steps", 2, "--devices", 2, "--resume") == 0
    assert "step 2 of 2 is done already; nothing is left to train" in capsys.readouterr().out


def test_what_does_not_fit_is_named_with_its_own_remedy():
    """Not the number of steps where others differ, and not another text where only another share is held out."""
    text, folder = np.frombuffer(TEXT, np.uint8), Path("checkpoints")
    saved = Manifest(5, small_config(schedule="cosine"), text_hash(text[:900]), "a test", {})
    fits = dataclasses.replace(saved, step=0)
    check_fit(folder, saved, fits, text)
    for changes, expected in (
        ({"config": small_config(schedule="cosine", seed=1)}, r"seed \(saved 0, requested 1\); give what .*-dir$"),
        ({"config": small_config(schedule="cosine", steps=9)}, r"steps .*--steps is free with --schedule constant\)$"),
        ({"text": text_hash(text[:1700])}, r"on the first 900 bytes .* on the first 1700; give the same --validation"),
    ):
        with pytest.raises(ValueError, match=expected):
            check_fit(folder, saved, dataclasses.replace(fits, **changes), text)
    with pytest.raises(ValueError, match=r"training text \(saved .*, 900 bytes, requested .*, 1799 bytes\)"):
        check_fit(folder, saved, dataclasses.replace(fits, text=text_hash(text[1:])), text[1:])


def test_how_a_step_is_computed_may_change():
    """What does not change the step itself is free; every other field is not, so that a new one is not forgotten."""
    config = small_config(schedule="cosine")
    manifest = Manifest(1, config, "text, 9 bytes", "a test", {})
    free = {"strategy", "mesh", "microbatches", "model.remat", "model.unroll", "bucket_bytes"}
    for name, value in flat(config).items():
        part, _, inner = name.rpartition(".")
        other = not value if isinstance(value, bool) else value + 1 if isinstance(value, (int, float)) else "other"
        changed = dataclasses.replace(
            config, **({part: dataclasses.replace(getattr(config, part), **{inner: other})} if part else {name: other})
        )
        found = misfits(manifest, changed, "text, 9 bytes")
        assert (found == []) == (name in free), name
        assert all(line.startswith(f"{name} (saved {value}, requested {other})") for line in found)
    constant = small_config(schedule="constant")
    longer = dataclasses.replace(constant, steps=99)
    assert misfits(Manifest(1, constant, "text, 9 bytes", "a test", {}), longer, "text, 9 bytes") == []


def test_a_state_that_is_not_finite_is_not_saved(tmp_path: Path):
    """With --keep 1 it would push out the last good one."""
    twin = build("auto_sharding", 2)
    state = twin.init(jax.random.key(0))
    manifest = Manifest(0, twin.plan.config, "text, 9 bytes", "a test", {})
    with Writer(tmp_path, 1, manifest) as writer:
        writer.save(1, state)
        broken = dataclasses.replace(state, params=jax.tree.map(lambda leaf: leaf / 0 * 0, state.params))
        with pytest.raises(
            ValueError, match=r"the state after step 2 has numbers in params\.\S+.* that are not finite"
        ):
            writer.save(2, broken)
    assert saved_steps(tmp_path) == [1]


def test_a_folder_that_cannot_be_written_to(tmp_path: Path):
    (tmp_path / "file").touch()
    writer = Writer(tmp_path / "file" / "below", 1, Manifest(0, small_config(), "text, 9 bytes", "a test", {}))
    with pytest.raises(ValueError, match=r"cannot write checkpoints to .*file.*; give --checkpoint-dir a folder"):
        writer.__enter__()


def test_a_checkpoint_knows_the_type_of_its_key(tmp_path: Path):
    """Keys of another type have other numbers, or as many: either is refused, not reinterpreted."""
    twin = build("auto_sharding", 1)
    save_steps(tmp_path, twin, 1)
    manifest = read_manifest(tmp_path / "1")
    assert manifest.key_type == "threefry2x32"
    with pytest.raises(ValueError, match="its random key is of type rbg, and steps are computed with threefry2x32"):
        restore(tmp_path, dataclasses.replace(manifest, key_type="rbg"), twin)


def test_training_does_not_depend_on_the_default_type_of_keys(tmp_path: Path):
    """With dropout, under `rbg`, the twins would draw other masks."""
    found = []
    for number, default in enumerate(("threefry2x32", "rbg")):
        jax.config.update("jax_default_prng_impl", default)
        try:
            train(tmp_path / str(number), "--steps", 1, "--devices", 1)
        finally:
            jax.config.update("jax_default_prng_impl", "threefry2x32")
        found.append(losses(tmp_path / str(number)))
    np.testing.assert_array_equal(*found)
