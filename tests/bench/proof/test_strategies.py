"""Every strategy and mixture is the single-device step: both twins, everything switched on that can go wrong."""

import dataclasses

import pytest

from bench import DEVICE_COUNTS
from bench.proof.prove import proof_config
from shared.config import Config, DType
from shared.placement.layout import layout
from shared.placement.mesh import make_mesh
from shared.placement.strategies import STRATEGIES, read_mesh
from tests.bench.proof.test_equality import assert_proved, changed
from tests.small import small_config

MOST = DEVICE_COUNTS[-1]
ROWS = [name for name in STRATEGIES if name != "data_parallel"]  # that is in tests/bench/proof/test_equality.py
MIXTURES = [
    ("fsdp", "data=2,fsdp=2,tensor=2"),
    ("sequence_parallel", "data=2,context=2,tensor=2"),
    ("ulysses", "fsdp=2,context=2,tensor=2"),
    ("zero_1", "data=4,tensor=2"),
]


def meshed(strategy: str, mesh: str) -> Config:
    return dataclasses.replace(proof_config("float64", strategy), mesh=mesh)


@pytest.mark.parametrize("strategy", ROWS)
def test_everything_switched_on(strategy: str):
    """Loss, metrics, logits, gradients and update in float64, with dropout, an empty device, and active clipping."""
    assert_proved(proof_config("float64", strategy), [MOST])


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "counts"), [("float64", [2, 4]), ("float32", [MOST])])
@pytest.mark.parametrize("strategy", ROWS)
def test_on_fewer_devices_and_in_float32(strategy: str, dtype: DType, counts: list[int]):
    assert_proved(proof_config(dtype, strategy), counts)


@pytest.mark.parametrize("strategy", ["fsdp_context_tensor"])
def test_in_float32(strategy: str):
    assert_proved(proof_config("float32", strategy), [MOST])


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("tensor_parallel", marks=pytest.mark.slow)])
def test_computed_again_in_a_loop(strategy: str):
    """Gathers and reductions stand in the body of a loop, and run again in the backward pass."""
    assert_proved(changed(proof_config("float64", strategy), remat=True, layers=3, unroll=1), [MOST])


@pytest.mark.parametrize(("strategy", "mesh"), MIXTURES[:1])
def test_mixtures(strategy: str, mesh: str):
    assert_proved(meshed(strategy, mesh), [MOST])


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "mesh"), MIXTURES[1:])
def test_more_mixtures(strategy: str, mesh: str):
    assert_proved(meshed(strategy, mesh), [MOST])


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "mesh"), MIXTURES)
def test_mixtures_computed_again_in_a_loop(strategy: str, mesh: str):
    assert_proved(changed(meshed(strategy, mesh), remat=True, layers=3, unroll=1), [MOST])


@pytest.mark.parametrize(
    ("strategy", "changes", "message"),
    [
        ("fsdp", {"d_model": 20}, "d_model=20 cannot be split evenly over the 8 devices of fsdp; give a multiple of 8"),
        ("zero_1", {"d_model": 20}, "d_model=20 cannot be split evenly over the 8 devices of data"),
        ("tensor_parallel", {}, "heads=2 cannot be split evenly over the 8 devices of tensor"),
        ("tensor_parallel", {"heads": 8, "d_ff": 20}, "d_ff=20 cannot be split evenly over the 8 devices of ten"),
        ("tensor_parallel", {"heads": 8, "vocabulary": 12}, "vocabulary=12 cannot be split evenly over the 8 devices"),
        (
            "sequence_parallel",
            {"heads": 8, "seq_len": 12},
            "seq_len=12 cannot be split evenly over the 8 devices of ten",
        ),
        ("context_parallel", {"seq_len": 12}, "seq_len=12 cannot be split evenly over the 8 devices of context"),
        ("ulysses", {}, "heads=2 cannot be split evenly over the 8 devices of context"),
        ("ulysses", {"mesh": "context=4,tensor=2"}, "heads=2 .* 8 devices of context x tensor; give"),
        ("fsdp", {"batch": 12}, "batch=12 cannot be split evenly over 8 devices; give a multiple of 8"),
        ("fsdp", {"batch": 8, "microbatches": 2}, "batch=8 cannot be split into 2 microbatches on each of 8 devices"),
        ("fsdp", {"microbatches": 0}, "microbatches is 0; give at least 1"),
    ],
)
def test_sizes_that_do_not_divide(strategy: str, changes: dict, message: str):
    """One line with the value and the remedy, before any work."""
    config = small_config(strategy=strategy, **changes)
    with pytest.raises(ValueError, match=message):
        layout(config, make_mesh(strategy, MOST, config.mesh))


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("data=2,tensor=2", "mesh=data=2,tensor=2 is for 4 devices, but there are 8; .* or --devices 4"),
        ("data=2,rows=4", "an axis 'rows'; give axes of data, fsdp, context, tensor"),
        ("data=2,data=4", "has data twice"),
        ("data=two", "gives data the degree 'two'"),
        ("data=0", "gives data the degree '0'"),
        ("data", "gives data the degree ''"),
    ],
)
def test_meshes_that_cannot_be(mesh: str, message: str):
    with pytest.raises(ValueError, match=message):
        read_mesh(mesh, 8)


def test_a_mesh_is_read_in_the_order_of_the_axes():
    assert list(read_mesh("tensor=2, data=4", 8).items()) == [("data", 4), ("tensor", 2)]


def test_another_mesh_than_the_one_asked_for_is_refused():
    with pytest.raises(ValueError, match="mesh=data=8 is configured, but the mesh is"):
        layout(small_config(strategy="fsdp", mesh="data=8"), make_mesh("fsdp", MOST))


@pytest.mark.parametrize("strategy", ["data_parallel", "fsdp_context_tensor"])
def test_microbatches_are_the_batch(strategy: str):
    """With dropout, and with other numbers of counted tokens in each: sums and counts are added up, divided once."""
    assert_proved(dataclasses.replace(proof_config("float64", strategy), microbatches=2), [MOST])
