"""Real programs for TPUs and H100s, of this project's twins: see programs/compile_programs.py."""

import lzma
from pathlib import Path

import pytest
from jax.sharding import AbstractMesh

from shared.config import Config, ModelConfig
from shared.placement.traffic import predicted_traffic, traffic_totals
from tests.twinstep.communication.programs.compile_programs import PROGRAMS
from twinstep.communication.account import totals
from twinstep.communication.compiled import read_program
from twinstep.communication.entries import Collective
from twinstep.communication.hlo import HloModule, Program, attributes
from twinstep.communication.loops import Value, noted_trip_count, trip_count

FOLDER = Path(__file__).parent / "programs"
RECORDED = {
    "gpu_fsdp_auto": {"all_gather fsdp": 1132800, "all_reduce fsdp": 141388, "reduce_scatter fsdp": 4732928},
    "gpu_fsdp_explicit": {"all_gather fsdp": 608000, "all_reduce fsdp": 10252, "reduce_scatter fsdp": 4864000},
    "tpu_fsdp_auto": {"all_gather fsdp": 589824, "all_reduce fsdp": 174156, "reduce_scatter fsdp": 4718592},
    "tpu_fsdp_explicit": {"all_gather fsdp": 327680, "all_reduce fsdp": 432140, "reduce_scatter fsdp": 4456448},
    "tpu_hsdp_auto": {
        "all_gather fsdp": 1214976, "all_reduce data": 1757184,
        "all_reduce fsdp": 831556, "reduce_scatter fsdp": 4063232,
    },
    "tpu_hsdp_explicit": {
        "all_gather fsdp": 655360, "all_reduce data": 1228800,
        "all_reduce fsdp": 958468, "reduce_scatter fsdp": 3932160,
    },
}  # fmt: skip
"""Input bytes of each device. On TPUs gathers travel in bfloat16; `data` of hsdp is two slices."""


def program(name: str) -> bytes:
    return lzma.decompress((FOLDER / f"{name}.pb.xz").read_bytes())


def read(name: str) -> list[Collective]:
    sizes = PROGRAMS[name.split("_")[1]]
    return read_program(program(name), AbstractMesh(tuple(sizes.values()), tuple(sizes)))


def test_all_stored_programs_are_tested():
    assert {path.name.removesuffix(".pb.xz") for path in FOLDER.glob("*.xz")} == set(RECORDED)


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_read(name: str):
    """Kinds, axes and bytes; every loop's length is known, and its two layers run what stands in it twice."""
    found = read(name)
    assert {" ".join((k, *axes)): total.least for (k, axes), total in totals(found).items()} == RECORDED[name]
    assert {c.count for c in found} == {1, 2}
    loops = [i for i in Program(program(name)).instructions.values() if i.opcode == "while"]
    turns = {trip_count(Program(program(name)), Value(loop)) for loop in loops}
    assert 2 in turns <= {1, 2}  # a GPU's compiler takes one turn out of a loop
    assert {noted_trip_count(loop) for loop in loops} == (turns if name.startswith("gpu") else {None})


def test_a_gpu_sends_what_the_strategy_table_predicts():
    """The formula knows nothing of the program: groups, types, asynchronous pairs and loops are all read rightly."""
    model = ModelConfig(layers=2, d_model=256, heads=4, d_ff=512, seq_len=128, unroll=1, remat=False)
    predicted = predicted_traffic(Config(model=model, batch=8, strategy="fsdp"), {"fsdp": 8}, "explicit")
    assert predicted is not None
    assert totals(read("gpu_fsdp_explicit")) == traffic_totals(predicted)


def test_what_runs_beside_a_tpus_computation_is_counted_once():
    """A chain of fusions is one collective: as many as there are starts, of more that stand in the program."""
    instructions = Program(program("tpu_fsdp_explicit")).instructions.values()
    chained = [i for i in instructions if "chain_id" in attributes(i)]
    starts = [i for i in instructions if i.custom_call_target == "AsyncCollectiveStart"]
    alone = [i for i in instructions if i.opcode.startswith(("all-", "reduce-scatter")) and i not in chained]
    assert len(chained) > 2 * len(starts) > 0
    assert len(read("tpu_fsdp_explicit")) == len(starts) + len(alone)


@pytest.mark.parametrize("name", ["gpu_fsdp_explicit", "tpu_fsdp_explicit"])
def test_lines_and_types(name: str):
    scattered = [c for c in read(name) if c.kind == "reduce_scatter"]
    assert {c.source.split(":")[0] for c in scattered} == {"explicit_shardmap/fsdp.py"}
    assert {operand.dtype for c in scattered for operand in c.operands} == {"float32"}
    gathered = {operand.dtype for c in read(name) if c.kind == "all_gather" for operand in c.operands}
    assert ("bfloat16" in gathered) == name.startswith("tpu")


def test_a_start_and_its_done_are_one():
    """In both forms: a pair of opcodes, and a computation that async-start, async-update and async-done all name."""
    array = {"element_type": 11, "dimensions": [16]}
    groups = {"collective_device_list": {"replica_groups": [{"replica_ids": range(8)}]}}
    parameter = {"id": 1, "opcode": "parameter", "name": "x", "shape": array}
    pair = [
        {"id": 2, "opcode": "all-gather-start", "operand_ids": [1], **groups},
        {"id": 3, "opcode": "all-gather-done", "operand_ids": [2], **groups},
        *({"id": n, "opcode": f"async-{part}", "operand_ids": [1], "called_computation_ids": [20]}
          for n, part in enumerate(("start", "update", "done"), 4)),
        {"id": 7, "opcode": "send", "operand_ids": [1], "source_target_pairs": [{"source": 0, "target": 1}]},
        {"id": 8, "opcode": "send-done"},
        {"id": 9, "opcode": "recv"},
        {"id": 10, "opcode": "recv-done"},
    ]  # fmt: skip
    inside = [{**parameter, "id": 11}, {"id": 12, "opcode": "reduce-scatter", "operand_ids": [11], **groups}]
    computations = [
        {"id": 20, "instructions": inside, "root_id": 12},
        {"id": 21, "instructions": [parameter, *pair], "root_id": 3},
    ]
    module = HloModule(computations=computations, entry_computation_id=21)
    found = read_program(module.SerializeToString(), AbstractMesh((8,), ("data",)))
    assert [(c.kind, c.axes, c.participants, c.bytes) for c in found] == [
        ("all_gather", ("data",), 8, 64),
        ("reduce_scatter", ("data",), 8, 64),
        ("send", (), 2, 64),
    ]
    with pytest.raises(ValueError, match="names no computation to begin with"):
        read_program(b"", AbstractMesh((8,), ("data",)))
