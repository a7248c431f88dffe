"""Several steps in a row: losses, learning rates and parameters of both twins beside the single-device step's.

Half-way, the state is taken to the host and placed anew, as a resumed run does. Under SGD without clipping a wrong
gradient changes the next loss in proportion. Under Adam it does not (each gradient is divided by its own size, so a
factor of 8 changes 20 losses by 4e-6), and rounding in a gradient whose true value is zero becomes a full step: so
Adam's trajectory is a smoke test, of losses alone, by a tolerance that proves nothing.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from bench import TWINS
from bench.proof.programs import computing_in
from bench.proof.prove import proof_config, proof_state
from shared import single_device
from shared.config import Config, OptimizerConfig
from shared.data.batches import Dataset
from shared.model.state import TrainState
from shared.placement.mesh import make_mesh
from shared.runtime.compilation import fast_compilation
from twinstep.equivalence.compare import compare_results
from twinstep.equivalence.hints import Suspect
from twinstep.equivalence.leaves import named_results, norm
from twinstep.equivalence.perturbation import DRAWS, moved, nudged_tree
from twinstep.equivalence.report import Report
from twinstep.equivalence.tolerance import Work, tolerance, work_behind

STEPS, HALF = 8, 4
SMOKE = 0.01
"""Relative difference of losses that Adam's trajectory is allowed."""
OPTIMIZERS = {
    "sgd": OptimizerConfig(optimizer="sgd", learning_rate=0.2, warmup=3, clip=0),
    "adamw": OptimizerConfig(optimizer="adamw", learning_rate=3e-3, warmup=3, clip=1),
}


def trajectory_config(optimizer: str, strategy: str, mesh: str = "") -> Config:
    """The proof's model with one block, at a learning rate that changes with every step."""
    config = proof_config("float32", strategy, mesh)
    model = dataclasses.replace(config.model, layers=1)
    return dataclasses.replace(config, model=model, optimizer=OPTIMIZERS[optimizer], steps=STEPS)


def compiled_once(step: Any) -> Callable[[TrainState, Any], Any]:
    """The jitted step, compiled fast at its first call; the same program at each call after it."""
    programs: list[Any] = []

    def run(state: TrainState, batch: Any) -> Any:
        if not programs:
            programs.append(step.lower(state, batch).compile(compiler_options=fast_compilation()))
        return jax.block_until_ready(programs[0](state, batch))

    return run


def trajectory(
    run: Callable[[TrainState, Any], Any],
    config: Config,
    place: Callable[[Any], TrainState] = lambda state: state,
    place_batch: Callable = lambda batch: batch,
    start: TrainState | None = None,
) -> dict[str, Any]:
    """Loss and learning rate (length of the update over that of the gradient) of each step, and the last parameters.

    run: a step. start: `proof_state`, unless another is given.
    """
    text = np.random.default_rng(0).integers(0, 8, 2000).astype(np.uint8)  # few values: there is something to learn
    dataset = Dataset(text, config.model.seq_len, config.batch)
    state = place(start or proof_state(config))
    found: dict[str, Any] = {"loss": {}, "learning_rate": {}}
    for number in range(STEPS):
        if number == HALF:
            state = place(jax.device_get(state))
        batch = place_batch(dataset(number))
        before = jax.device_get(state.params)
        state, metrics = run(state, batch)
        name = f"step {number + 1}"
        found["loss"][name] = metrics["loss"]
        update = [
            new - old for new, old in zip(*map(jax.tree.leaves, (jax.device_get(state.params), before)), strict=True)
        ]
        length = np.sqrt(sum(norm(leaf) ** 2 for leaf in update))
        found["learning_rate"][name] = np.float32(length / metrics["gradient_norm"])
    return {**found, "parameters": state.params}


@dataclasses.dataclass(frozen=True)
class Course:
    """The single-device step's trajectory, and how far it moves with one unit in the last place at its start."""

    results: Mapping[str, Any]
    moved: Mapping[str, float]


def single_course(config: Config) -> Course:
    """The single-device step's trajectory; its scales of rounding take runs of the same program."""
    run, start = compiled_once(single_device.build(config).train_step), proof_state(config)
    results = trajectory(run, config)
    if config.optimizer.optimizer == "adamw":  # no rule is stated for it
        return Course(results, {})
    starts = [dataclasses.replace(start, params=nudged_tree(start.params, seed)) for seed in range(DRAWS)]
    draws = [named_results(trajectory(run, config, start=nudged)) for nudged in starts]
    return Course(results, moved(named_results(results), draws))


def compare_trajectories(config: Config, course: Course, found: Mapping[str, Any]) -> Report:
    """By the float32 rule for SGD, to which each step may add its own rounding; only a smoke test for AdamW."""
    expected = course.results
    if config.optimizer.optimizer == "adamw":
        return compare_results({"loss": expected["loss"]}, {"loss": found["loss"]}, Work(1, 1), relative=SMOKE)
    work = work_behind(proof_state(config).params, np.zeros((config.batch, config.model.seq_len)))
    rates = list(expected["learning_rate"].values())
    again = dict(zip(expected["learning_rate"], rates[:HALF] + rates[: STEPS - HALF], strict=True))
    forgotten = Suspect(
        f"beginning the learning-rate schedule again when the run is resumed, after step {HALF}: the optimizer's count "
        "is part of the state",
        lambda: {"learning_rate": again},
    )
    own = STEPS * tolerance("float32", work)
    return compare_results(expected, found, work, relative=own, moved=course.moved, suspects=[forgotten])


def trajectories(optimizer: str, strategy: str, devices: int, mesh: str = "") -> dict[str, Report]:
    """The single-device step's trajectory beside each twin's: `single / auto` and `single / explicit`."""
    config = trajectory_config(optimizer, strategy, mesh)
    with computing_in("float32"):
        single = single_course(config)
        found = {}
        for name, build in TWINS.items():
            twin = build(config, make_mesh(strategy, devices, mesh))
            other = trajectory(compiled_once(twin.train_step), config, twin.place_state, twin.place_batch)
            found[f"single / {name}"] = compare_trajectories(config, single, other)
    return found
