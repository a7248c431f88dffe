"""The proof that the twins are the same step: everything that a step computes, compared with the truth.

The truth is the oracle: the single-device step in float64. The proof takes a small model with everything switched on
that can go wrong: dropout, a mask that leaves one device without a counted token, clipping, and SGD with learning rate
1, whose update is the gradient (Adam would hide a wrong scale). docs/proof.md explains the tiers; the tests prove the
same with this file, and bench/mutants/bugs.py tries it on steps that are wrong.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bench import DEVICE_COUNTS, TWINS
from bench.proof.programs import Programs, compiled, compiled_together, computing_in
from bench.proof.suspects import context_suspects, suspects, tensor_suspects
from shared import single_device
from shared.config import Config, DType, ModelConfig, OptimizerConfig, without_placement
from shared.data.batches import Batch, Dataset
from shared.model.state import TrainState, abstract_state, initial_state
from shared.model.transformer import Seams
from shared.placement.mesh import make_mesh
from shared.placement.strategies import find_strategy, read_degrees
from shared.runtime.keys import random_key
from twinstep.equivalence.compare import compare_results
from twinstep.equivalence.hints import Suspect
from twinstep.equivalence.leaves import named_results
from twinstep.equivalence.perturbation import DRAWS, moved, nudged_tree
from twinstep.equivalence.report import Report
from twinstep.equivalence.tolerance import work_behind

BFLOAT16_FACTOR = 5e-4
"""How far from 1 a factor common to all gradients of the two twins may be in bfloat16, where a single leaf may be off
by more than 0.001. Half of that 0.001, since a gradient wrong by a factor of 1.001 has to be seen."""


def proof_heads(strategy: str, mesh: str) -> int:
    """4, or the degree that shards heads on 8 devices or this mesh: float32's limits depend on the number of heads."""
    row = find_strategy(strategy)
    degrees = read_degrees(mesh) if mesh else row.mesh_shape(DEVICE_COUNTS[-1])
    return max(4, math.prod(degrees.get(axis, 1) for axis in row.divisibility()["heads"]))


def proof_config(dtype: DType, strategy: str, mesh: str = "") -> Config:
    """The small model with everything switched on that can go wrong; bfloat16 keeps its parameters in float32."""
    return Config(
        model=ModelConfig(
            layers=2,
            d_model=32,
            heads=proof_heads(strategy, mesh),
            d_ff=64,
            seq_len=16,
            dropout=0.1,
            remat=False,
            dtype=dtype,
            param_dtype="float32" if dtype == "bfloat16" else dtype,
        ),
        optimizer=OptimizerConfig(optimizer="sgd", learning_rate=1, schedule="constant", warmup=0, clip=1),
        batch=16,
        strategy=strategy,
        mesh=mesh,
    )


def proof_dataset(config: Config) -> Dataset:
    """Random bytes, of two batches."""
    text = np.random.default_rng(config.seed).integers(
        0, config.model.vocabulary, 2 * config.batch * config.model.seq_len + 1
    )
    return Dataset(text.astype(np.uint8), config.model.seq_len, config.batch)


def proof_batch(config: Config) -> Batch:
    """Random tokens, each counted with probability 0.7, but none in the first two rows, device 0's share on 8."""
    batch = proof_dataset(config).cut(np.arange(config.batch))
    weights = (np.random.default_rng(config.seed + 1).random(batch.tokens.shape) < 0.7).astype(np.float32)
    weights[: max(config.batch // 8, 1)] = 0
    return dataclasses.replace(batch, weights=weights)


def proof_state(config: Config) -> TrainState:
    """The state to begin with, on the host: the same numbers in every type, drawn in float32."""
    with jax.enable_x64(False):
        single = dataclasses.replace(config.model, dtype="float32", param_dtype="float32")
        drawn = jax.device_get(initial_state(dataclasses.replace(config, model=single), random_key(config.seed)))
    with computing_in(config.model.dtype):
        return jax.tree.map(cast_like, drawn, abstract_state(config))


def cast_like(leaf: Any, like: Any) -> Any:
    """The leaf in the other's type."""
    return leaf if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key) else np.asarray(leaf, like.dtype)


@dataclass(frozen=True)
class Truth:
    """What a step of this configuration has to give, and where it begins."""

    config: Config
    state: TrainState
    batch: Batch
    results: Mapping[str, Any]
    """Of the `oracle`, in the types of the configuration, and of the `single`-device step in those types (in float64
    that is the oracle)."""
    moved: Mapping[str, float]
    """How far each leaf of the single-device step moves with one unit in the last place of the parameters."""

    def compare(self, results: Mapping[str, Any], pair: tuple[str, str], **options: Any) -> Report:
        """Two of these results, by the rule for this configuration."""
        one, other = (results[name] for name in pair)
        work = work_behind(self.state.params, self.batch)
        return compare_results(one, other, work, dtype=self.config.model.dtype, moved=self.moved, **options)

    def suspects(self, mesh: Mesh) -> list[Suspect]:
        """What may have gone wrong on this mesh."""

        def alone(batch: Batch, seams: Seams = Seams(), change: Callable[[Any], Any] = lambda params: params) -> Any:
            state = dataclasses.replace(self.state, params=change(self.state.params))
            return run_single(self.config, state, batch, seams)

        rows = find_strategy(self.config.strategy).batch_devices(mesh.shape)
        before = proof_dataset(self.config)(1)
        return [
            *suspects(self.config, self.state, self.batch, rows, alone, before),
            *context_suspects(self.batch, mesh.shape.get("context", 1), alone),
            *tensor_suspects(self.batch, mesh.shape.get("tensor", 1), alone),
        ]


def truth(config: Config) -> Truth:
    """Run the single-device step in float64, and in the configuration's own type."""
    exact = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="float64", param_dtype="float64"))
    batch = proof_batch(config)
    oracle = run_single(exact, proof_state(exact), batch)
    state = proof_state(config)
    single = oracle if config == exact else run_single(config, state, batch)
    scales = rounding_scales(config, state, batch, single)
    if config == exact:
        return Truth(config, state, batch, {"oracle": oracle}, scales)
    rounded = jax.tree.map(cast_like, {group: oracle[group] for group in single}, single)
    return Truth(config, state, batch, {"oracle": rounded, "single": single}, scales)


def rounding_scales(config: Config, state: TrainState, batch: Batch, results: Mapping[str, Any]) -> dict[str, float]:
    """How far each leaf of the results moves with one unit in the last place of the parameters. Compiles nothing."""
    draws = []
    for seed in range(DRAWS):
        with computing_in(config.model.dtype):
            params = nudged_tree(state.params, seed, config.model.dtype)
        draws.append(named_results(run_single(config, dataclasses.replace(state, params=params), batch)))
    return moved(named_results(results), draws)


def run_single(config: Config, state: TrainState, batch: Batch, seams: Seams = Seams()) -> dict[str, Any]:
    """Everything that the single-device step computes, on the host, in the groups of `Programs.observe`."""
    with computing_in(config.model.dtype):
        programs = single_programs(without_placement(config), seams)
        return jax.device_get(programs.observe(state, batch, lambda state: state))


@functools.lru_cache(maxsize=8)
def single_programs(config: Config, seams: Seams) -> Programs:
    """The single-device step, compiled once for all strategies and batches."""
    return compiled_together(single_device.build(config, seams), proof_state(config), proof_batch(config))


def prove(
    config: Config,
    counts: Sequence[int],
    say: Callable[[str], None] = lambda message: None,
    compile: Callable[[Any, TrainState, Batch], Programs] | None = None,
) -> dict[int, dict[str, Report]]:
    """Compare oracle, single-device step, auto twin and explicit twin on each number of devices.

    Returns for each number of devices the reports of the pairs (`oracle / single`, `oracle / auto`, ...,
    `auto / explicit`), with the groups of `Programs.observe`; and of each twin with itself run again (`auto / again`),
    in which no bit may differ. compile: `compiled`, unless another, as `compiled_together`, is given to save time.
    """
    say(f"proving {config.model.dtype}: one device, without a mesh, in float64")
    true = truth(config)
    found = {}
    with computing_in(config.model.dtype):
        for devices in counts:
            results = dict(true.results)
            again = {}
            for name, build in TWINS.items():
                say(f"proving {config.model.dtype}: {name} on {devices}")
                twin = build(config, make_mesh(config.strategy, devices, config.mesh))
                state, batch = twin.place_state(true.state), twin.place_batch(true.batch)
                programs = (compile or compiled)(twin, state, batch)
                results[name], again[name] = (programs.observe(state, batch, twin.place_state) for _ in range(2))
            likely = true.suspects(twin.mesh)
            found[devices] = {
                " / ".join(pair): true.compare(
                    results,
                    pair,
                    suspects=likely,
                    factor=BFLOAT16_FACTOR
                    if pair == ("auto", "explicit") and config.model.dtype == "bfloat16"
                    else None,
                )
                for pair in itertools.combinations(results, 2)
            }
            for name, second in again.items():
                found[devices][f"{name} / again"] = true.compare(
                    {"first": results[name], "second": second}, ("first", "second"), relative=0
                )
    return found
