"""Compile small training steps of both twins for TPUs and GPUs that are not here, and keep what the reader reads of
them.

In an environment with the checkout's requirements and `libtpu`, or `jax-cuda13-plugin` and `jax-cuda13-pjrt`:

    python -m tests.twinstep.communication.programs.compile_programs tpu
    python -m tests.twinstep.communication.programs.compile_programs gpu

Each program becomes a file beside this one, of a few kilobytes: the fields of `twinstep.communication.hlo`, with file
names from the checkout on, compressed. Compiled with jax 0.12.0.1 and libtpu 0.0.52.
"""

import lzma
import os
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[3]
TPU = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_HOSTNAMES": "localhost"}
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""An H100 as XLA's compiler sees it."""
BETWEEN = ("all-", "reduce-scatter", "collective-", "ragged-all-", "send", "recv", "async-")
"""How opcodes begin of which everything is kept."""
STRUCTURE = ("parameter", "tuple", "get-tuple-element", "while", "conditional", "copy", "bitcast")
"""Opcodes through which a loop's count is followed."""
PROGRAMS = {
    "fsdp": {"fsdp": 8},
    "hsdp": {"data": 2, "fsdp": 4},
}
"""Strategy to mesh; `data` of hsdp is two slices of TPUs."""
ON = {"tpu": ("fsdp", "hsdp"), "gpu": ("fsdp",)}
"""Platform to strategies."""


def devices(platform: str, slices: int) -> list[Any]:
    """Eight devices that are not here."""
    from jax.experimental import topologies

    if platform == "gpu":
        found = topologies.get_topology_desc(
            platform="cuda", topology_name="h100", target_config=H100, topology=f"{slices}x1x{8 // slices}"
        )
    elif slices == 1:
        found = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    else:
        found = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2", num_slices=slices)
    return list(found.devices)


def stored(serialized: bytes) -> bytes:
    """A program with what is read of it alone, and no path of this machine, compressed."""
    from twinstep.communication.hlo import HloModule

    module = HloModule.FromString(serialized)
    module.DiscardUnknownFields()
    names = module.stack_frame_index.file_names
    names[:] = [portable(name) for name in names]
    for instruction in (i for c in module.computations for i in c.instructions):
        instruction.metadata.source_file = portable(instruction.metadata.source_file)
        if instruction.opcode != "while":
            instruction.backend_config = b""
    prune(module)
    return lzma.compress(module.SerializeToString(deterministic=True), preset=9)


def prune(module: Any) -> None:
    """Take out what the reader never looks at: all work on arrays that is neither a collective nor enters one."""
    everything = [i for c in module.computations for i in c.instructions]
    collectives = [i for i in everything if i.opcode.startswith(BETWEEN)]
    entering = {number for i in collectives for number in i.operand_ids}
    roots = {c.root_id for c in module.computations}
    inside = {c.id: list(c.instructions) for c in module.computations}

    def communicates(computation: int) -> bool:
        return any(
            i.opcode.startswith(BETWEEN) or any(communicates(called) for called in i.called_computation_ids)
            for i in inside[computation]
        )

    def needed(i: Any) -> bool:
        structure = i.opcode in STRUCTURE or (i.opcode == "custom-call" and i.custom_call_target.startswith("Async"))
        scalar = not i.shape.dimensions and not i.shape.tuple_shapes
        calls = i.opcode in ("fusion", "call") and any(communicates(called) for called in i.called_computation_ids)
        return structure or scalar or calls or i.id in roots | entering or i.opcode.startswith(BETWEEN)

    around = [
        i for i in everything if i.opcode in ("fusion", "call") and any(map(communicates, i.called_computation_ids))
    ]
    entering |= {number for i in around for number in i.operand_ids}
    kept = {i.id for i in everything if needed(i)}
    for i in everything:
        array = i.shape.dimensions or (i.shape.tuple_shapes and i.id not in roots)
        if array and i.opcode in ("fusion", "call") and i not in around:
            i.ClearField("called_computation_ids")
        if i.opcode in STRUCTURE and i.shape.tuple_shapes:
            i.ClearField("shape")
        if i.id not in entering and not i.opcode.startswith(BETWEEN) and not i.called_computation_ids:
            i.ClearField("metadata")
    called = {module.entry_computation_id}
    called |= {number for i in everything if i.id in kept for number in i.called_computation_ids}
    for number in reversed(range(len(module.computations))):
        computation = module.computations[number]
        if computation.id not in called:
            del module.computations[number]
            continue
        for place in reversed(range(len(computation.instructions))):
            if computation.instructions[place].id not in kept:
                del computation.instructions[place]
    for sequence in module.schedule.sequences:
        sequence.value.instruction_ids[:] = [number for number in sequence.value.instruction_ids if number in kept]


def portable(name: str) -> str:
    """A file's path from the checkout or from `site-packages` on; Python's own files count as installed ones."""
    path = Path(name)
    if not name or not path.is_absolute():
        return name
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    installed = "site-packages" in path.parts
    return str(Path(*path.parts[path.parts.index("site-packages") :])) if installed else f"site-packages/{path.name}"


def main(platform: str) -> None:
    os.environ.update(TPU | {"JAX_PLATFORMS": "cpu"})
    import numpy as np
    from jax.sharding import AxisType, Mesh

    from bench import TWINS
    from shared.config import Config, ModelConfig

    for strategy in ON[platform]:
        sizes = PROGRAMS[strategy]
        found = devices(platform, 2 if strategy == "hsdp" else 1)
        mesh = Mesh(
            np.array(found).reshape(tuple(sizes.values())), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
        )
        model = ModelConfig(layers=2, d_model=256, heads=4, d_ff=512, seq_len=128, unroll=1, remat=False)
        config = Config(model=model, batch=8, strategy=strategy, mesh=",".join(f"{a}={n}" for a, n in sizes.items()))
        for name, build in TWINS.items():
            twin = build(config, mesh)
            compiled = twin.train_step.lower(*twin.shapes()).compile()
            (module,) = compiled.runtime_executable().hlo_modules()
            file = FOLDER / f"{platform}_{strategy}_{name}.pb.xz"
            file.write_bytes(stored(module.as_serialized_hlo_module_proto()))
            print(len(module.as_serialized_hlo_module_proto()), file.name, file.stat().st_size, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
