"""Comparison and measurement of the two twins."""

import auto_sharding
import explicit_shardmap

TWINS = {"auto": auto_sharding.build, "explicit": explicit_shardmap.build}
DEVICE_COUNTS = (1, 2, 4, 8)


def device_counts(devices: int) -> list[int]:
    """The device counts to compare, of those that this machine has devices for."""
    return [count for count in DEVICE_COUNTS if count <= devices]
