"""The step on one page, in both forms, is the single-device step, and sends one all-reduce."""

import difflib
import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import auto_sharding.minimal
import explicit_shardmap.minimal
from bench import DEVICE_COUNTS
from bench.proof.programs import computing_in
from bench.proof.prove import proof_state, rounding_scales, run_single
from shared.config import Config
from shared.data.batches import Batch
from shared.model.transformer import Transformer
from tests.runs import COMPILED_ONCE
from tests.small import small_config
from twinstep import collectives
from twinstep.communication.compiled import compile_readable
from twinstep.communication.entries import Collective
from twinstep.equivalence.compare import Report, compare_results
from twinstep.equivalence.tolerance import work_behind

ROOT = Path(__file__).parents[2]
MINIMAL: dict[str, Any] = {"auto": auto_sharding.minimal, "explicit": explicit_shardmap.minimal}
FILES = [ROOT / twin / "minimal.py" for twin in ("auto_sharding", "explicit_shardmap")]


def recorded_sgd() -> optax.GradientTransformation:
    """SGD with learning rate 1, whose state is the gradients that it was given: Adam would hide a wrong scale."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(np.zeros_like, params),
        lambda gradients, state, params=None: (jax.tree.map(lambda leaf: -leaf, gradients), gradients),
    )


def proof_config(dtype: Any) -> Config:
    """SGD with learning rate 1 for the single-device step too, without clipping."""
    sgd = {"optimizer": "sgd", "learning_rate": 1.0, "schedule": "constant", "clip": 0.0}
    return small_config(dtype=dtype, param_dtype=dtype, **sgd)


def tokens_batch() -> Batch:
    """Random tokens, all of them counted."""
    tokens = np.random.default_rng(0).integers(0, 256, (8, 9)).astype(np.int32)
    return Batch(tokens[:, :-1], tokens[:, 1:], np.ones((8, 8), np.float32), np.arange(8, dtype=np.uint32))


@functools.cache
def oracle() -> dict[str, Any]:
    """What the single-device step gives in float64."""
    config = proof_config("float64")
    found = run_single(config, proof_state(config), tokens_batch())
    return {**found, "loss": found["loss"]["train_step"]}


@functools.cache
def scales(dtype: Any) -> dict[str, float]:
    """How far rounding in this type moves each leaf of the single-device step."""
    config, batch = proof_config(dtype), tokens_batch()
    state = proof_state(config)
    return rounding_scales(config, state, batch, run_single(config, state, batch))


def prepared(twin: str, dtype: Any, devices: int) -> tuple[Any, tuple[Any, ...], Any]:
    """The step, its arguments as placed, and the model's structure."""
    config = proof_config(dtype)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Transformer(config.model, rngs=nnx.Rngs(0))))
    mesh = Mesh(jax.devices()[:devices], ("data",))
    params = proof_state(config).params
    replicated, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    placed = jax.device_put((params, recorded_sgd().init(params)), replicated)
    step = MINIMAL[twin].compiled_step(graphdef, recorded_sgd(), mesh)
    return step, (*placed, jax.device_put(tokens_batch(), rows)), graphdef


def logits_of(twin: str, graphdef: Any, params: Any, tokens: Any) -> Any:
    """The model's logits under the placement that the twin's step has."""

    def logits(params: Any, tokens: Any) -> Any:
        return nnx.merge(graphdef, params)(tokens)

    specs, mesh = (PartitionSpec(), PartitionSpec("data")), tokens.sharding.mesh
    if twin == "explicit":
        return jax.jit(jax.shard_map(logits, mesh=mesh, in_specs=specs, out_specs=specs[1]))(params, tokens)
    placed = tuple(NamedSharding(mesh, spec) for spec in specs)
    return jax.jit(logits, in_shardings=placed, out_shardings=placed[1])(params, tokens)


def observed(twin: str, dtype: Any, devices: int) -> tuple[Report, list[Collective], int]:
    """The step compared with the oracle, its collectives, and the bytes of all gradients and the loss."""
    with computing_in(dtype):
        step, arguments, graphdef = prepared(twin, dtype, devices)
        params, _, batch = arguments
        program = compile_readable(step, *arguments)
        after, gradients, loss = jax.block_until_ready(program(*arguments))
        logits = jax.block_until_ready(logits_of(twin, graphdef, params, batch.tokens))
        found = {"loss": loss, "logits": logits, "gradients": gradients, "parameters": after}
        if dtype == "float64":  # elsewhere the rounding of the stored parameters would be most of it
            found["update"] = jax.tree.map(np.subtract, *jax.device_get((after, params)))
        true = jax.tree.map(lambda leaf: leaf.astype(dtype), {name: oracle()[name] for name in found})
        report = compare_results(true, found, work_behind(params, batch), dtype=dtype, moved=scales(dtype))
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) + loss.nbytes
        return report, collectives(program, mesh=batch.tokens.sharding.mesh), size


def assert_one_all_reduce(sent: list[Collective], devices: int, size: int) -> None:
    """Over `data`, of the gradients and the loss; on one device nothing."""
    expected = [("all_reduce", ("data",), devices, 1, size)] if devices > 1 else []
    assert [(one.kind, one.axes, one.participants, one.count, one.bytes) for one in sent] == expected


@pytest.mark.parametrize("devices", DEVICE_COUNTS)
@pytest.mark.parametrize("twin", MINIMAL)
def test_it_is_the_single_device_step_and_sends_one_all_reduce(twin: str, devices: int):
    """Loss, logits, gradients, parameters and their update, of every leaf and on every device, within 1e-12."""
    report, sent, size = observed(twin, "float64", devices)
    assert report.equal, report
    assert {leaf.group for leaf in report.leaves} == {"loss", "logits", "gradients", "parameters", "update"}
    assert_one_all_reduce(sent, devices, size)


@pytest.mark.parametrize("twin", MINIMAL)
def test_in_float32_with_all_of_xlas_optimisations(twin: str):
    """As it is really compiled; the other tests leave out XLA's expensive passes."""
    try:
        jax.config.update("jax_disable_most_optimizations", False)
        report, sent, size = observed(twin, "float32", DEVICE_COUNTS[-1])
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
    assert report.equal, report
    assert_one_all_reduce(sent, DEVICE_COUNTS[-1], size)


WRONG_FORMS = {
    "without pcast": ("pcast", lambda tree, axis, to: tree, "8 times the reference"),
    "with psum for pmean": ("pmean", lax.psum, "8 times the reference"),
}


@pytest.mark.parametrize("form", WRONG_FORMS)
def test_a_wrong_form_is_rejected(form: str, monkeypatch: pytest.MonkeyPatch):
    name, replacement, hint = WRONG_FORMS[form]
    monkeypatch.setattr(lax, name, replacement)
    found, _, _ = observed("explicit", "float64", 8)
    assert not found.equal
    assert hint in str(found)
    wrong = {leaf.group for leaf in found.leaves if not leaf.equal}
    assert "gradients" in wrong
    assert ("loss" in wrong) == (name == "pmean")  # without pcast the loss is right all the same


def test_without_pmean_it_does_not_trace(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lax, "pmean", lambda tree, axis: tree)
    step, arguments, _ = prepared("explicit", "float32", 8)
    with pytest.raises(ValueError, match="out_specs"):
        step.lower(*arguments)


@pytest.mark.parametrize("twin", MINIMAL)
def test_it_compiles_once(twin: str):
    step, (params, state, batch), _ = prepared(twin, "float32", 4)
    for _ in range(3):
        params, state, _ = jax.block_until_ready(step(params, state, batch))
    assert step._cache_size() == 1


def test_it_trains_on_text_and_both_print_the_same():
    environment = {**COMPILED_ONCE, "JAX_PLATFORMS": "cpu", "PATH": ""}
    printed = [
        subprocess.run(
            [sys.executable, "-m", f"{file.parent.name}.minimal"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=180,
            check=True,
        ).stdout
        for file in FILES
    ]
    assert printed[0] == printed[1]
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss (\d\.\d{3})$", printed[0], re.MULTILINE)]
    assert len(losses) == len(printed[0].splitlines()) == 20
    assert losses[-1] < losses[9] < losses[4] < losses[0]


def test_each_is_one_page_and_their_diff_is_about_placement_and_communication():
    auto, explicit = (file.read_text().splitlines() for file in FILES)
    assert max(len(auto), len(explicit)) <= 50
    changed = [line for line in difflib.ndiff(auto, explicit) if line.startswith(("- ", "+ "))]
    about = re.compile(r"communication|lax|value_and_grad|PartitionSpec|jax\.jit")
    assert len(changed) <= 12, "\n".join(changed)
    assert all(about.search(line) for line in changed), "\n".join(changed)
    assert '    return lax.pmean((loss, grads), "data")' in explicit
