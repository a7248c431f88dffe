"""`python -m bench compare`: are the two twins the same step, what do they send, and what does that cost?

For 1, 2, 4 and 8 devices, as far as there are devices: the largest difference of loss, logits, gradients and updated
parameters between the single-device step, the auto twin and the explicit twin, in float32 and float64; the
collectives of both; and the time of both beside that of the explicit step without communication.

The proof takes a small model with everything switched on that can go wrong: dropout, a mask that leaves one device
without a counted token, clipping, and SGD with learning rate 1, whose update is the gradient (Adam would hide a wrong
scale). The time is that of the configuration given, by default the training command's.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from rich.console import Console

from bench import DEVICE_COUNTS, TWINS, device_counts
from bench.report import draw_placement, print_report
from bench.timing import CONTESTANTS, contestant, in_turns, ratio
from shared import runtime, single_device
from shared.collectives import Collective
from shared.config import Config, InputError, ModelConfig, OptimizerConfig, check, validate
from shared.data import Batch, Dataset
from shared.equivalence import Report, compare_results, work_behind
from shared.placement import find_strategy, make_mesh
from shared.state import TrainState, abstract_state, initial_state

DTYPES = ("float32", "float64")

FAST_COMPILATION = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options for the proof, which runs each program once. Timed steps are compiled in full."""


@dataclass(frozen=True)
class CompareCommand:
    """Compare the two twins: equality, collectives, and time, for 1, 2, 4 and 8 devices."""

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)
    rounds: int = 8
    """Rounds in which all steps are timed in turns."""
    json: Path | None = None
    """File for all that was found, as JSON."""


@dataclass(frozen=True)
class Row:
    """What was found on one number of devices."""

    devices: int
    proofs: dict[str, dict[str, Report]]
    """Type of computation, then pair of steps (`single / auto`, ...), to their comparison."""
    predicted_bytes: int
    """Bytes that each device puts into collectives, by the strategy table's formula."""
    collectives: dict[str, list[Collective]]
    """Contestant to the collectives of its timed step."""
    seconds: dict[str, float]
    """Contestant to seconds per step."""
    explicit_over_auto: float
    communication_share: dict[str, float]
    """Twin to the share of its step that it would save if sending cost nothing; can come out below 0 by noise."""

    @property
    def equal(self) -> bool:
        return all(report.equal for pairs in self.proofs.values() for report in pairs.values())


def proof_config(dtype: str, strategy: str) -> Config:
    """The small model with everything switched on."""
    return Config(
        model=ModelConfig(
            layers=2, width=32, heads=4, hidden=64, window=16, dropout=0.1, remat=False, dtype=dtype, param_dtype=dtype
        ),
        optimizer=OptimizerConfig(optimizer="sgd", learning_rate=1, schedule="constant", warmup=0, clip=1),
        batch=16,
        strategy=strategy,
    )


def proof_batch(config: Config) -> Batch:
    """Random tokens, each counted with probability 0.7, but none in the first two rows: all of device 0's share on 8."""
    random = np.random.default_rng(config.seed)
    text = random.integers(0, config.model.vocabulary, config.batch * config.model.window + 1).astype(np.uint8)
    batch = Dataset(text, config.model.window, config.batch).cut(np.arange(config.batch))
    weights = (random.random(batch.tokens.shape) < 0.7).astype(np.float32)
    weights[:2] = 0
    return dataclasses.replace(batch, weights=weights)


def observe(step: Any, state: TrainState, batch: Batch, copy: Callable[[TrainState], TrainState]) -> dict[str, Any]:
    """Everything that a step computes from a state and a batch, for comparison."""

    def run(function: Any, *arguments: Any) -> Any:
        return function.lower(*arguments).compile(compiler_options=FAST_COMPILATION)(*arguments)

    loss, gradients, tokens = run(step.loss_and_grads, state, batch)
    logits = run(step.logits, state, batch.tokens)
    after, metrics = run(step.train_step, copy(state), batch)
    return {
        "loss": {"mean": loss, "tokens": tokens, **metrics},
        "logits": logits,
        "gradients": gradients,
        "parameters": after.params,
    }


def prove(counts: Sequence[int], dtype: str, strategy: str, say: Callable[[str], None]) -> dict[int, dict[str, Report]]:
    """Compare single-device step and twins on each number of devices: count, then pair, to report."""
    config = proof_config(dtype, strategy)
    batch = proof_batch(config)
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
        work = work_behind(abstract_state(config), batch)
        state = initial_state(config, jax.random.key(config.seed))
        say(f"proving {dtype} on one device, without a mesh")
        single = observe(single_device.build(config), state, batch, lambda state: state)
        found = {}
        for devices in counts:
            results = {"single": single}
            for name, build in TWINS.items():
                say(f"proving {dtype}: {name} on {devices}")
                twin = build(config, make_mesh(strategy, devices))
                results[name] = observe(twin, twin.place_state(state), twin.place_batch(batch), twin.place_state)
            found[devices] = {
                f"{one} / {other}": compare_results(results[one], results[other], work)
                for one, other in itertools.combinations(results, 2)
            }
    return found


def measure(config: Config, counts: Sequence[int], rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Time all contestants on each number of devices, all in turns: the measured fields of each Row."""
    contestants = {}
    for devices, name in itertools.product(counts, CONTESTANTS):
        if devices == 1 and name == "compute only":
            continue  # one device sends nothing anyway
        say(f"compiling the timed step: {name} on {devices}")
        contestants[devices, name] = contestant(name, config, devices)
    say(f"timing {len(contestants)} steps in turns")
    seconds = in_turns(contestants, rounds)
    found = []
    for devices in counts:
        own = {name: seconds[devices, name] for name in CONTESTANTS if (devices, name) in seconds}
        bare = own.get("compute only")
        found.append(
            {
                "collectives": {name: contestants[devices, name].sends for name in own},
                "seconds": {name: float(np.median(values)) for name, values in own.items()},
                "explicit_over_auto": ratio(own["explicit"], own["auto"]),
                "communication_share": {
                    name: 0.0 if bare is None else 1 - ratio(bare, own[name]) for name in TWINS
                },
            }
        )
    return found


def predicted_bytes(config: Config, devices: int) -> int:
    """Bytes that each device puts into collectives in one step, by the strategy table."""
    strategy = find_strategy(config.strategy)
    gradients = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract_state(config).params))
    scalar = max(4, np.dtype(jax.numpy.dtype(config.model.dtype)).itemsize)
    return sum(traffic.bytes for traffic in strategy.traffic(gradients, scalar, strategy.degrees(devices)))


def run(command: CompareCommand) -> int:
    """Compare, print, and return the exit code: 0 if every row is equal within the tolerance, 1 if one is not."""
    config = command.config
    validate(config)
    check(command.rounds >= 1, f"rounds is {command.rounds}; give at least 1")
    found = runtime.start(DEVICE_COUNTS[-1])
    console = Console(highlight=False, soft_wrap=True, width=None if Console().is_terminal else 120)
    counts = device_counts(found.devices)
    check(config.batch % counts[-1] == 0, f"batch={config.batch} cannot be split over {counts[-1]} devices; give a multiple")
    file = open_json(command.json)

    with console.status("starting") as status:
        say = functools.partial(progress, console, status)
        proofs = {dtype: prove(counts, dtype, config.strategy, say) for dtype in DTYPES}
        measured = measure(config, counts, command.rounds, say)
    rows = [
        Row(devices, {dtype: proofs[dtype][devices] for dtype in DTYPES}, predicted_bytes(config, devices), **values)
        for devices, values in zip(counts, measured, strict=True)
    ]
    console.print(found.describe())
    draw_placement(console, config, counts[-1])
    print_report(console, rows, config, proof_config("float32", config.strategy))
    if file:
        with file:
            json.dump(as_data(rows, found, config), file, indent=2)
    return 0 if all(row.equal for row in rows) else 1


def progress(console: Console, status: Any, message: str) -> None:
    """Say what is going on: in place on a terminal, as lines elsewhere."""
    if console.is_terminal:
        status.update(message)
    else:
        print(message, flush=True)


def open_json(path: Path | None) -> Any:
    """The file, opened before any long work."""
    try:
        return path.open("w") if path else None
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; give --json a path in a folder that exists") from None


def as_data(rows: Sequence[Row], found: runtime.Runtime, config: Config) -> dict[str, Any]:
    """The report as JSON-ready data."""

    def proof(report: Report) -> dict[str, Any]:
        groups = dict.fromkeys(leaf.group for leaf in report.leaves)
        return {
            "equal": report.equal,
            "problems": report.problems,
            "worst": {group: dataclasses.asdict(report.worst(group)) for group in groups},
        }

    return {
        "runtime": dataclasses.asdict(found),
        "config": dataclasses.asdict(config),
        "equal": all(row.equal for row in rows),
        "rows": [
            {
                "devices": row.devices,
                "equal": row.equal,
                "proofs": {
                    dtype: {pair: proof(report) for pair, report in pairs.items()} for dtype, pairs in row.proofs.items()
                },
                "predicted_bytes": row.predicted_bytes,
                "collectives": {
                    name: [dataclasses.asdict(collective) for collective in sends]
                    for name, sends in row.collectives.items()
                },
                "seconds": row.seconds,
                "explicit_over_auto": row.explicit_over_auto,
                "communication_share": row.communication_share,
            }
            for row in rows
        ],
    }
