"""What the twins' compiled steps send: as predicted, as recorded, as written in the source."""

import dataclasses
import functools
import math

import jax
import pytest
from jax import lax

from bench import TWINS
from bench.proof.prove import proof_config
from bench.timing.compute_only import compile_compute_only
from shared.config import Config
from shared.placement.mesh import make_mesh
from shared.placement.strategies import STRATEGIES, degrees_of
from shared.placement.traffic import predicted_traffic, traffic_totals
from twinstep import collectives, traced_collectives
from twinstep.communication.account import Key, Total, total_runs, totals
from twinstep.communication.entries import Collective


@functools.cache
def compiled(config: Config, name: str, devices: int) -> list[Collective]:
    """The collectives of a compiled training step of a twin."""
    twin = TWINS[name](config, make_mesh(config.strategy, devices, config.mesh))
    return collectives(twin.train_step, *twin.shapes(), mesh=twin.mesh)


def sent(config: Config, name: str, devices: int) -> dict[Key, Total]:
    """Input bytes of a compiled step of a twin, by kind and axes."""
    found, sizes = compiled(config, name, devices), degrees_of(config, devices)
    assert all(c.count is not None for c in found)
    assert all(c.participants == math.prod(sizes[axis] for axis in c.axes) for c in found if c.axes)
    return totals(found)


def expected(config: Config, name: str, devices: int) -> dict[Key, Total]:
    """What the strategy table predicts."""
    predicted = predicted_traffic(config, degrees_of(config, devices), name)
    assert predicted is not None
    return traffic_totals(predicted)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_sends_what_the_strategy_table_predicts(strategy: str):
    """Kinds, axes and bytes, exactly: a careless edit or a new compiler that adds a gather is seen."""
    config = proof_config("float32", strategy)
    assert sent(config, "explicit", 8) == expected(config, "explicit", 8)


@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        pytest.param("fsdp", "", marks=pytest.mark.slow),
        pytest.param("sequence_parallel", "data=2,context=2,tensor=2", marks=pytest.mark.slow),
        ("ulysses", "fsdp=2,context=2,tensor=2"),
    ],
)
def test_in_a_loop_that_computes_again_too(strategy: str, mesh: str):
    """Under rematerialisation the backward pass gathers and reduces again, but only what it needs."""
    config = proof_config("float32", strategy)
    config = dataclasses.replace(
        config, mesh=mesh, model=dataclasses.replace(config.model, remat=True, unroll=1, layers=3)
    )
    assert sent(config, "explicit", 8) == expected(config, "explicit", 8)


@pytest.mark.parametrize("name", TWINS)
def test_microbatches_are_reduced_once(name: str):
    """Not in every turn of their loop: one all-reduce, of as many bytes as without them."""
    config = dataclasses.replace(proof_config("float32", "data_parallel"), microbatches=2)
    (found,) = compiled(config, name, 8)
    assert (found.kind, found.count) == ("all_reduce", 1)
    assert totals([found]) == expected(config, name, 8)


def test_microbatches_gather_parameters_anew():
    """Kept gathered for the whole loop, they would take the memory that fsdp is there to save."""
    config = dataclasses.replace(proof_config("float32", "fsdp"), microbatches=2)
    assert sent(config, "explicit", 8) == expected(config, "explicit", 8)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_auto_twin_sends_what_is_predicted_where_it_is(strategy: str):
    config = proof_config("float32", strategy)
    predicted = predicted_traffic(config, STRATEGIES[strategy].mesh_shape(8), "auto")
    assert (predicted is not None) == (strategy in ("data_parallel", "tensor_parallel", "ulysses"))
    if predicted is not None:
        assert sent(config, "auto", 8) == expected(config, "auto", 8)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data_parallel", "tensor_parallel", "ulysses"])
def test_the_auto_twin_in_a_loop_that_computes_again_too(strategy: str):
    config = proof_config("float32", strategy)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, remat=True, unroll=1, layers=3))
    assert sent(config, "auto", 4) == expected(config, "auto", 4)


def test_constraints_close_gaps_of_the_auto_twin():
    """What docs/strategies.md says it sends: gathers as the explicit twin, and no array that changes how it is split.

    Where the explicit twin has a reduce-scatter, XLA's CPU backend has an all-reduce, of which a part is used.
    """
    config = proof_config("float32", "sequence_parallel")
    ours, theirs = sent(config, "auto", 8), sent(config, "explicit", 8)
    assert set(ours) == {("all_gather", ("tensor",)), ("all_reduce", ("tensor",))}
    assert ours["all_gather", ("tensor",)] == theirs["all_gather", ("tensor",)]
    assert set(sent(proof_config("float32", "fsdp"), "auto", 8)) == {
        ("all_gather", ("fsdp",)),
        ("all_reduce", ("fsdp",)),
    }


RECORDED = {
    "zero_1": {"all_gather data": 16992, "all_reduce data": 103500, "all_to_all data": 4096},
    "fsdp": {"all_gather fsdp": 25136, "all_reduce fsdp": 136268},
    "hsdp": {
        "all_gather fsdp": 50272, "all_reduce data": 24576, "all_reduce data fsdp": 37896, "all_reduce fsdp": 98372,
    },
    "sequence_parallel": {"all_gather tensor": 36864, "all_reduce tensor": 465068},
    "context_parallel": {"all_gather context": 16384, "all_reduce context": 266760},
    "fsdp_context_tensor": {
        "all_gather context": 20480, "all_gather fsdp": 63680, "all_reduce context": 90248, "all_reduce fsdp": 81356,
        "all_reduce tensor": 107308, "all_to_all context": 16384, "collective_permute": 8192,
    },
}  # fmt: skip
"""What the auto twin's partitioner makes of strategies for which no formula is known, with jax 0.10.2 to 0.12."""


@pytest.mark.parametrize("strategy", RECORDED)
def test_the_auto_twin_sends_what_it_did(strategy: str):
    """Not predicted but recorded: a new compiler, or a constraint lost, that changes it is seen."""
    found = sent(proof_config("float32", strategy), "auto", 8)
    assert {" ".join((kind, *axes)): total.least for (kind, axes), total in found.items() if total.exact} == RECORDED[
        strategy
    ]


def test_the_explicit_twin_communicates_where_its_source_says():
    config = proof_config("float32", "data_parallel")
    sources = {c.source.split(":")[0] for c in compiled(config, "explicit", 8)}
    assert sources == {"explicit_shardmap/data_parallel.py"}


def test_the_auto_twins_collectives_say_where_they_come_from():
    """Of each array that the partitioner sends: the line in the model, and the part of the model."""
    config = proof_config("float32", "data_parallel")
    (found,) = compiled(config, "auto", 8)
    scopes = {operand.scope for operand in found.operands}
    assert scopes == {"", "embedding", "blocks.attention", "blocks.feed_forward", "output"}
    assert {operand.source.split(":")[0] for operand in found.operands} == {
        "shared/model/transformer.py",
        "shared/model/loss.py",
    }
    assert sum(operand.bytes for operand in found.operands if operand.scope == "output") == 4 * (256 * 32 + 2 * 32)


def test_one_device_sends_nothing():
    config = proof_config("float32", "data_parallel")
    for build in TWINS.values():
        twin = build(config, make_mesh(config.strategy, 1))
        assert collectives(twin.train_step, *twin.shapes(), mesh=twin.mesh) == []


@pytest.mark.parametrize("strategy", ["data_parallel", "zero_1", "fsdp_context_tensor", "sequence_parallel", "ulysses"])
def test_the_compute_only_twin_sends_nothing_and_leaves_jax_as_it_was(strategy: str):
    before = lax.pmean, lax.psum, lax.pcast, jax.shard_map
    twin, step = compile_compute_only(proof_config("float32", strategy), jax.device_count())
    assert collectives(step, mesh=twin.mesh) == []
    assert (lax.pmean, lax.psum, lax.pcast, jax.shard_map) == before


def test_both_twins_can_be_lowered_without_arrays():
    """From shapes alone, as for a mesh whose devices do not exist here."""
    config = proof_config("float32", "data_parallel")
    for build in TWINS.values():
        twin = build(config, make_mesh(config.strategy, 8))
        state, batch = twin.shapes()
        assert twin.logits.lower(state, batch.tokens).out_info.shape == (16, 16, 256)
        assert twin.loss_and_grads.lower(state, batch).out_info[0].shape == ()
        assert twin.train_step.lower(state, batch).out_info[0].step.shape == ()


def test_in_a_loop_over_layers_the_auto_twin_reduces_in_every_turn():
    """What the README says of deep models: as many bytes, but not as many collectives."""
    config = proof_config("float32", "data_parallel")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, unroll=1))
    runs = {}
    for name in TWINS:
        found = compiled(config, name, 8)
        runs[name] = total_runs(found).least
        assert totals(found) == expected(config, name, 8)
    assert runs == {"auto": 1 + config.model.layers, "explicit": 1}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_compiled_program_does_what_the_source_says(strategy: str):
    """In the explicit twin: the same kinds, axes, bytes and lines. The auto twin's source names no collective."""
    config = proof_config("float32", strategy)
    mesh = make_mesh(strategy, 8)
    twin = TWINS["explicit"](config, mesh)
    written = traced_collectives(twin.train_step, *twin.shapes())
    found = compiled(config, "explicit", 8)
    assert totals(written) == totals(found) != {}
    assert {c.source for c in found} <= {c.source for c in written}
    assert all(c.source.startswith("explicit_shardmap/") for c in written)
    auto = TWINS["auto"](config, mesh)
    assert traced_collectives(auto.train_step, *auto.shapes(), mesh=mesh) == []
