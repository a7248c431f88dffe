"""Batches that do not fit the configuration are refused, not trained on."""

import dataclasses

import jax
import numpy as np
import pytest

from shared.data.batches import Batch, Dataset
from shared.placement import placing
from shared.placement.layout import layout
from shared.placement.mesh import make_mesh
from tests.small import small_config

CONFIG = dataclasses.replace(small_config(), batch=8)
TEXT = np.arange(200, dtype=np.uint8)


def rows(numbers: slice) -> Batch:
    return Dataset(TEXT, CONFIG.model.seq_len, CONFIG.batch)(0, numbers)


def place(batch: Batch) -> Batch:
    return placing.place_batch(layout(CONFIG, make_mesh("data_parallel", 1)), batch, CONFIG.batch)


def test_a_batch_of_the_configured_size_is_placed():
    assert place(rows(slice(0, 8))).tokens.shape[0] == 8


@pytest.mark.parametrize("numbers", [slice(0, 4), slice(4, 8)])
def test_half_a_batch_is_refused(numbers: slice):
    with pytest.raises(ValueError, match=r"^the batch has 4 rows, but the configuration says batch=8; give 8 rows$"):
        place(rows(numbers))


def test_a_batch_whose_arrays_differ_in_length_is_refused():
    with pytest.raises(ValueError, match=r"different numbers of rows \(\[4, 8\]\)"):
        place(dataclasses.replace(rows(slice(0, 8)), weights=rows(slice(0, 4)).weights))


def test_one_of_several_processes_must_give_the_rows_of_its_own_devices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(placing, "local_rows", lambda places, size: slice(4, 8))
    with pytest.raises(ValueError, match="has rows 0 to 3, but this process needs 4 to 7 of batch=8"):
        place(rows(slice(0, 4)))
