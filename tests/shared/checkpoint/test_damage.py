"""Damaged checkpoints: nothing is restored that was not saved."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from shared.checkpoint.manifest import saved_steps
from shared.checkpoint.reader import verify
from shared.cli.main import main
from shared.twin import Twin
from tests.runs import TWINS, losses, train
from tests.shared.checkpoint.saved import arrays, assert_same, build, newest, save_steps


def data_files(step: Path) -> list[Path]:
    """The files with the arrays' bytes, the largest first."""
    return sorted((step / "state" / "ocdbt.process_0" / "d").iterdir(), key=lambda path: -path.stat().st_size)


def flip(path: Path, *places: float) -> None:
    """Flip a bit at these places, as shares of the file."""
    data = bytearray(path.read_bytes())
    for place in places:
        data[int(place * len(data))] ^= 4
    path.write_bytes(data)


def rewrite(step: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """The same arrays, written anew by Orbax with one of them changed."""
    handler = ocp.PyTreeCheckpointer()
    tree = handler.restore(step / "state")
    tree["params.output.kernel"] = change(np.asarray(tree["params.output.kernel"]))
    shutil.rmtree(step / "state")
    handler.save(step / "state", tree)


def edit_manifest(step: Path) -> None:
    """Another learning rate, in a file that is still good JSON."""
    path = step / "manifest" / "metadata"
    data = json.loads(path.read_text())
    data["config"]["optimizer"]["learning_rate"] = 1.0
    path.write_text(json.dumps(data))


def halve(step: Path) -> None:
    """As after a kill during the removal of an old step."""
    for number, path in enumerate(sorted(path for path in step.rglob("*") if path.is_file())):
        if number % 2:
            path.unlink()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped bit in the middle of the data": lambda step: flip(data_files(step)[0], 0.5),
    "flipped bit near its beginning": lambda step: flip(data_files(step)[0], 0.1),
    "truncated file": lambda step: data_files(step)[0].write_bytes(data_files(step)[0].read_bytes()[:1000]),
    "missing file": lambda step: data_files(step)[0].unlink(),
    "missing manifest": lambda step: (step / "manifest" / "metadata").unlink(),
    "edited manifest": edit_manifest,
    "truncated manifest": lambda step: (step / "manifest" / "metadata").write_text('{"format": 1, "st'),
    "flipped bit in the manifest": lambda step: flip(step / "manifest" / "metadata", 0.5),
    "wrong type": lambda step: rewrite(step, lambda array: array.astype(np.float16)),
    "wrong type with the same bits": lambda step: rewrite(step, lambda array: array.view(np.int32)),
    "wrong shape with the same bits": lambda step: rewrite(step, lambda array: array.reshape(-1)),
    "another step's arrays": lambda step: [
        shutil.rmtree(step / "state"),
        shutil.copytree(step.parent / "1" / "state", step / "state"),
    ],
    "empty folder": lambda step: [shutil.rmtree(step), step.mkdir()],
    "half of the files": halve,
}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Twin, list[dict[str, np.ndarray]]]:
    folder = tmp_path_factory.mktemp("two_steps")
    twin = build("auto_sharding", 2)
    return folder, twin, save_steps(folder, twin, 2)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_leads_to_the_previous_good_step(
    damage: str, two_steps: tuple[Path, Twin, list[dict[str, np.ndarray]]], tmp_path: Path
):
    """With a warning that names the step and the reason; and to one error where no step is good."""
    original, twin, kept = two_steps
    folder = tmp_path / "copy"
    shutil.copytree(original, folder)
    DAMAGES[damage](folder / "2")
    assert verify(folder, 2).problem
    warnings: list[str] = []
    state, step = newest(folder, twin, warnings.append)
    assert step == 1
    assert_same(arrays(state), kept[0])
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: skipping step 2: ")
    assert len(warnings[0]) > len("warning: skipping step 2: ") + 10
    assert "\n" not in warnings[0]
    shutil.rmtree(folder / "1")
    with pytest.raises(ValueError, match=r"no step in .* can be restored \(step 2: "):
        newest(folder, twin, warnings.append)


def test_a_run_saves_a_damaged_step_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train(tmp_path, "--steps", 6, "--devices", 2, "--checkpoint-every", 2, "--keep", 9) == 0
    before = losses(tmp_path)
    folder = tmp_path / "checkpoints"
    for step in ("4", "6"):
        flip(data_files(folder / step)[0], 0.1, 0.3, 0.5, 0.7)
    (folder / "7.orbax-checkpoint-tmp").mkdir()  # what a kill in the middle of a save leaves
    assert train(tmp_path, "--steps", 6, "--devices", 2, "--checkpoint-every", 2, "--keep", 9, "--resume") == 0
    printed = capsys.readouterr().out
    assert "warning: skipping step 6: " in printed
    assert "warning: skipping step 4: " in printed
    assert "resuming from step 2" in printed
    np.testing.assert_array_equal(losses(tmp_path), before)
    assert saved_steps(folder) == [6, 4, 2]
    assert all(not verify(folder, step).problem for step in (2, 4, 6))
    assert len(list((folder / "damaged").iterdir())) == 2  # moved, not removed


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save_steps(tmp_path, build("explicit_shardmap", 2), 2)
    main(TWINS["auto_sharding"], "auto_sharding", ["inspect", str(tmp_path)])
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[1:3]] == ["1", "2"]
    assert [line.split()[-1] for line in printed.splitlines()[1:3]] == ["yes", "yes"]
    assert "configuration of step 1, 2:\nmodel.layers=2, model.d_model=16" in printed
    flip(data_files(tmp_path / "2")[0], 0.5)
    with pytest.raises(SystemExit) as ended:
        main(TWINS["auto_sharding"], "auto_sharding", ["inspect", str(tmp_path)])
    assert ended.value.code == 1
    assert "NO: " in capsys.readouterr().out.splitlines()[2]


def test_other_names_are_no_steps(tmp_path: Path):
    for name in ("25", "025", "25.orbax-checkpoint-tmp", "damaged"):
        (tmp_path / name).mkdir()
    (tmp_path / "99").touch()
    assert saved_steps(tmp_path) == [25]
    assert saved_steps(tmp_path / "missing") == []
