"""A checkpoint saved before the fields of the configuration were renamed: restored, trained on, generated from."""

import tarfile
from pathlib import Path

import numpy as np
import pytest

from shared.checkpoint.manifest import read_manifest
from shared.cli.main import main
from tests.runs import TWINS, recorded_losses

ARCHIVE = Path(__file__).with_name("before_2026_12.tgz")
"""Step 4 of a run on one device with `--strategy mixture` and the flags below, on the text below."""
TEXT = "".join(f"line {number} of a text that is always there\n" for number in range(300))
SIZES = "--schedule constant --layers 1 --heads 4 --batch 8 --steps 8 --devices 8"
FLAGS = {
    "former": f"--strategy mixture --width 8 --hidden 16 --window 16 {SIZES}",
    "present": f"--strategy fsdp_context_tensor --d-model 8 --d-ff 16 --seq-len 16 {SIZES}",
}
LOSSES = {5: 5.920153617858887, 6: 5.731637001037598, 7: 5.679860591888428, 8: 5.763968467712402}
"""Of the steps after the checkpoint, as the code that saved it computed them on 8 devices (explicit twin)."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "text").write_text(TEXT)
    return tmp_path / "ck"


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("twin", TWINS)
def test_training_continues_with_the_losses_of_the_code_that_saved_it(twin: str, flags: str, folder: Path):
    metrics = folder.parent / "metrics"
    paths = ["--data", folder.parent / "text", "--metrics", metrics, "--checkpoint-dir", folder, "--resume"]
    main(TWINS[twin], twin, ["train", *FLAGS[flags].split(), *map(str, paths)])
    assert recorded_losses(metrics) == pytest.approx(LOSSES, rel=2e-6)


def test_its_manifest_has_the_present_names(folder: Path):
    config = read_manifest(folder / "4").config
    assert (config.model.d_model, config.model.d_ff, config.model.seq_len) == (8, 16, 16)
    assert config.strategy == "fsdp_context_tensor"


def test_generate_and_inspect(folder: Path, capsys: pytest.CaptureFixture[str]):
    main(TWINS["auto_sharding"], "auto_sharding", ["inspect", str(folder)])
    _, row, _, heading, described, *_ = capsys.readouterr().out.splitlines()
    assert row.split()[0] == "4"
    assert row.split()[-1] == "yes"
    assert heading == "configuration of step 4:"
    assert "model.d_model=8" in described
    arguments = ["--checkpoint-dir", str(folder), "--prompt", "line", "--tokens", "4", "--temperature", "0"]
    main(TWINS["auto_sharding"], "auto_sharding", ["generate", *arguments])
    assert np.all([character.isprintable() or character.isspace() for character in capsys.readouterr().out])
