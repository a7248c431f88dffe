"""Planted bugs: mistakes that people make, each a small change to a twin's source, and what the check has to say.

An edit names the right lines, as they stand in the twin's file, and the wrong ones in their place; it fails if the
right ones are no longer there. Wrong steps are traced without `shard_map`'s own checks where these would refuse them:
what is tried here is the comparison by itself.
"""

import dataclasses
import importlib
import shutil
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from shared import placement
from shared.placement import Strategy
from shared.state import TrainState
from shared.twin import Twin

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Edit:
    """One change to a twin's file."""

    file: str
    right: str
    wrong: str


@dataclass(frozen=True)
class Bug:
    """One row of the table."""

    name: str
    twin: str
    """`auto` or `explicit`."""
    says: str
    """What the message must say of the cause, as a regular expression."""
    leaf: str = r"gradients\.\S+"
    """What leaf the message must name, as a regular expression."""
    edits: tuple[Edit, ...] = ()
    devices: int = 2
    """The smallest number on which it can show."""
    wrap: Callable[[Twin], Twin] = lambda twin: twin
    """A change to how the twin is used, for what is no part of its source."""
    strategy: str = "data_parallel"


UNCHECKED = Edit("step.py", "partial(jax.shard_map, mesh=mesh)", "partial(jax.shard_map, mesh=mesh, check_vma=False)")
REDUCTION = "return split(lax.pmean(join(local, size), axes), like=local, size=size)"
AVERAGED = "sums, tokens = data_parallel.average(plan, (jax.value_and_grad(local_sum)(params), tokens))"
DIVIDED = "loss, gradients = divided(sums, tokens)"
NORM = "norm = optax.tree.norm(gradients)"
KEYS = "keys_b = example_keys(state, batch.rows)"
FORWARD = "plan.forward(params, batch.tokens, keys_b)"


def after(line: str, *added: str) -> str:
    """The line with others below it."""
    return "\n    ".join([line, *added])


class Forgetful(Twin):
    """A twin whose resumed state has lost the optimizer's count, on which the learning rate depends."""

    def place_state(self, state: TrainState) -> TrainState:
        zero = jax.tree.map(
            lambda leaf: np.zeros_like(leaf) if np.issubdtype(leaf.dtype, np.integer) else leaf, state.optimizer
        )
        return super().place_state(dataclasses.replace(state, optimizer=zero))


class Stale(Twin):
    """A twin whose last device keeps the rows of the batch before."""

    def place_batch(self, batch: Any) -> Any:
        from bench.proof import proof_dataset

        before = proof_dataset(self.plan.config)(1)
        kept = self.plan.config.batch // self.mesh.size
        return super().place_batch(
            jax.tree.map(lambda new, old: np.concatenate([new[:-kept], old[-kept:]]), batch, before)
        )


def used_as(kind: type[Twin]) -> Callable[[Twin], Twin]:
    return lambda twin: kind(**{field.name: getattr(twin, field.name) for field in dataclasses.fields(twin)})


BUGS = (
    Bug(
        "no pmean",
        "explicit",
        edits=(UNCHECKED, Edit("data_parallel.py", REDUCTION, "return local")),
        says="a reduction over data is missing",
    ),
    Bug(
        "psum for pmean",
        "explicit",
        edits=(
            Edit(
                "step.py",
                AVERAGED,
                "sums, tokens = lax.psum(jax.value_and_grad(local_sum)(params), axes), lax.pmean(tokens, axes)",
            ),
        ),
        says="gradients: 2 times the reference .*, on 2 devices along data: .*summed where the mean is meant",
    ),
    Bug(
        "reduced twice",
        "explicit",
        edits=(
            Edit(
                "step.py",
                DIVIDED,
                after(DIVIDED, 'gradients = lax.psum(lax.pcast(gradients, axes, to="varying"), axes)'),
            ),
        ),
        says="gradients: 2 times the reference .*, on 2 devices along data: reduced twice",
    ),
    Bug(
        "pcast forgotten",
        "explicit",
        edits=(Edit("step.py", 'params = lax.pcast(state.params, axes, to="varying")', "params = state.params"),),
        says="gradients: 2 times the reference .*, on 2 devices along data: reduced twice.*pcast",
    ),
    Bug(
        "mean of means under a mask",
        "explicit",
        edits=(
            Edit(
                "step.py",
                after(AVERAGED, DIVIDED),
                "sums = divided(jax.value_and_grad(local_sum)(params), tokens)\n"
                "    (loss, gradients), tokens = data_parallel.average(plan, (sums, tokens))",
            ),
        ),
        says="gradients.*: exactly what comes of averaging the devices' own means",
    ),
    Bug(
        "clipping by the local norm",
        "explicit",
        edits=(
            UNCHECKED,
            Edit(
                "step.py",
                NORM,
                after(
                    "def own(params):",
                    "    logits_bTV = plan.forward(params, batch.tokens, example_keys(state, batch.rows))",
                    "    return summed_loss(logits_bTV, batch.targets, batch.weights)",
                    "local = jax.grad(own)(lax.pcast(state.params, 'data', to='varying'))",
                    "norm = optax.tree.norm(local) / counted_tokens(batch.weights, plan.config.model.dtype)",
                ),
            ),
        ),
        says="parameters.*: exactly what comes of clipping by the norm of the first device's own gradients",
        leaf="metrics.gradient_norm",
    ),
    Bug(
        "clipping before the reduction",
        "explicit",
        edits=(
            Edit(
                "step.py",
                after(AVERAGED, DIVIDED),
                "tokens = lax.pmean(tokens, axes)\n"
                "    loss, gradients = divided(jax.value_and_grad(local_sum)(params), tokens)\n"
                "    gradients = clip(gradients, optax.tree.norm(gradients), plan.config.optimizer.clip)\n"
                "    loss, gradients = data_parallel.average(plan, (loss, gradients))",
            ),
        ),
        says="gradients.*: exactly what comes of clipping on each device before the reduction",
    ),
    Bug(
        "one dropout mask on every device",
        "explicit",
        edits=(
            Edit("step.py", KEYS, "keys_b = example_keys(state, jax.numpy.arange(batch.rows.size, dtype='uint32'))"),
        ),
        says="gradients.*: exactly what comes of giving every device the same dropout masks",
    ),
    Bug(
        "a shifted batch shard",
        "explicit",
        edits=(
            Edit(
                "step.py",
                FORWARD,
                "plan.forward(params, lax.ppermute(batch.tokens, axes, [(1, 0), (0, 1)]), keys_b)",
            ),
        ),
        says="gradients.*: exactly what comes of a shift: each device takes the tokens of the next",
    ),
    Bug(
        "a stale batch shard",
        "explicit",
        wrap=used_as(Stale),
        says="gradients.*: exactly what comes of a stale shard: device 1 has the rows of the step before",
    ),
    Bug(
        "a wrong learning-rate step after resuming",
        "explicit",
        wrap=used_as(Forgetful),
        says="learning_rate: exactly what comes of beginning the learning-rate schedule again",
        leaf="learning_rate.step 5",
    ),
    Bug(
        "a leaf left out of the reduction",
        "explicit",
        edits=(
            UNCHECKED,
            Edit(
                "step.py",
                after(AVERAGED, DIVIDED),
                after(
                    "local = jax.value_and_grad(local_sum)(params)",
                    "sums, count = data_parallel.average(plan, (local, tokens))",
                    DIVIDED.replace("tokens", "count"),
                    'gradients["output"]["kernel"] = divided(local[1]["output"]["kernel"], tokens)',
                    "tokens = count",
                ),
            ),
        ),
        leaf="gradients.output.kernel",
        says=r"gradients.output.kernel: the copies .* differ .*: a reduction over data is missing",
    ),
    Bug(
        "a reduction over the wrong axis",
        "explicit",
        edits=(UNCHECKED, Edit("data_parallel.py", REDUCTION, REDUCTION.replace("axes)", "axes[:1])"))),
        devices=4,
        strategy="two axes",
        says=r"a reduction over data is missing|a reduction over data \(along replica they agree\) is missing",
    ),
    Bug(
        "a reduction in bfloat16",
        "explicit",
        edits=(
            Edit(
                "data_parallel.py",
                REDUCTION,
                "short = jax.tree.map(lambda leaf: leaf.astype('bfloat16'), join(local, size))\n"
                "    long = jax.tree.map(lambda leaf: leaf.astype('float32'), lax.pmean(short, axes))\n"
                "    return split(long, like=local, size=size)",
            ),
            Edit("data_parallel.py", "from jax import lax", "import jax\nfrom jax import lax"),
        ),
        says="gradients: errors of about .* as rounding to bfloat16",
    ),
    Bug(
        "parameters that drift apart",
        "explicit",
        edits=(
            UNCHECKED,
            Edit(
                "step.py",
                "gradients = clip(gradients, norm, plan.config.optimizer.clip)",
                after(
                    "gradients = clip(gradients, norm, plan.config.optimizer.clip)",
                    'drift = 1 + 1e-3 * lax.axis_index("data")',
                    "gradients = jax.tree.map(lambda leaf: leaf * drift, gradients)",
                ),
            ),
        ),
        says=r"parameters\.\S+: the copies .* differ",
        leaf=r"parameters\.\S+",
    ),
    Bug(
        "masked tokens counted",
        "auto",
        edits=(Edit("step.py", "counted_tokens(batch.weights,", "counted_tokens(0 * batch.weights + 1,"),),
        devices=1,
        says="gradients.*: exactly what comes of dividing by all tokens",
    ),
    Bug(
        "each leaf clipped by itself",
        "auto",
        edits=(
            Edit(
                "step.py",
                "gradients = clip(gradients, norm, plan.config.optimizer.clip)",
                "gradients = jax.tree.map(\n"
                "        lambda leaf: clip(leaf, optax.tree.norm(leaf), plan.config.optimizer.clip), gradients\n    )",
            ),
        ),
        devices=1,
        says="parameters.*: exactly what comes of clipping each leaf by its own norm",
        leaf=r"parameters\.\S+",
    ),
    Bug(
        "the same dropout masks for each half",
        "auto",
        edits=(
            Edit(
                "step.py", "example_keys(state, batch.rows)", "example_keys(state, batch.rows % (batch.rows.size // 2))"
            ),
        ),
        says="gradients.*: exactly what comes of giving every device the same dropout masks",
    ),
)

TWO_AXES = Strategy(
    summary="rows over two axes",
    degrees=lambda devices: {"replica": devices // 2, "data": 2},
    batch=P(("replica", "data")),
    parameters=(),
    traffic=lambda config, degrees, twin: [],
)
"""Only here: data parallelism over two axes, of which one can be forgotten."""


@contextmanager
def planted(bug: Bug) -> Generator[Callable[..., Twin]]:
    """The `build` of a twin with the bug in it. Raises ValueError if the lines to change are not in its source."""
    package = {"auto": "auto_sharding", "explicit": "explicit_shardmap"}[bug.twin]
    with TemporaryDirectory() as folder, mock.patch.dict(placement.STRATEGIES, {"two axes": TWO_AXES}):
        shutil.copytree(ROOT / package, Path(folder) / package)
        for edit in bug.edits:
            path = Path(folder) / package / edit.file
            source = path.read_text()
            if source.count(edit.right) != 1:
                raise ValueError(f"{bug.name}: {package}/{edit.file} no longer has, once: {edit.right}")
            path.write_text(source.replace(edit.right, edit.wrong))
        with imported_from(folder, package) as module:
            yield lambda *arguments: bug.wrap(module.build(*arguments))


@contextmanager
def imported_from(folder: str, package: str) -> Generator[Any]:
    """The package as it is in another folder; afterwards its name means again what it meant before."""

    def ours() -> Mapping[str, Any]:
        return {name: module for name, module in sys.modules.items() if name.split(".")[0] == package}

    before = ours()
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module(package)
    finally:
        sys.path.remove(folder)
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)
