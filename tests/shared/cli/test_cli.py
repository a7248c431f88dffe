"""The command lines, as a user meets them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import auto_sharding
import explicit_shardmap
from shared.cli.main import COMMANDS, main, parse, parser_message
from shared.config import ModelConfig

ROOT = Path(__file__).parents[3]
SMALL = ["--layers", "1", "--d-model", "16", "--heads", "2", "--d-ff", "32", "--seq-len", "16", "--batch", "8"]
TWINS = {"auto_sharding": auto_sharding.build, "explicit_shardmap": explicit_shardmap.build}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, where nothing has started JAX yet."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_both_twins_train_and_print_the_same_losses(tmp_path: Path):
    """End to end, in processes of their own, with the CPU settings that users get."""
    printed, recorded = [], []
    for program in TWINS:
        path = tmp_path / f"{program}.jsonl"
        done = run(
            program, "train", *SMALL, "--steps", "10", "--devices", "4", "--validation", "0", "--metrics", str(path)
        )
        assert done.returncode == 0, done.stderr
        assert f"{program}: data_parallel over {{'data': 4}}" in done.stdout
        printed.append(re.findall(r"step .*perplexity \S+", done.stdout))
        head, *records = [json.loads(line) for line in path.read_text().splitlines()]
        recorded.append(records)
        assert head["program"] == program
        assert head["config"]["model"]["d_model"] == 16
        assert head["mesh"] == {"data": 4}
        assert head["device_kinds"] == ["cpu"]
        assert head["versions"].keys() == {"Python", "jax", "flax", "optax", "orbax-checkpoint"}
    assert len(printed[0]) == 10
    assert printed[0] == printed[1]
    assert [record["step"] for record in recorded[0]] == list(range(1, 11))
    losses = np.array([[record["loss"] for record in records] for records in recorded])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert losses[0, -1] < losses[0, 0]
    for record in recorded[0]:
        assert set(record) == {"step", "loss", "perplexity", "gradient_norm", "tokens", "tokens_per_second"}


def test_more_devices_than_exist():
    done = run("explicit_shardmap", "train", *SMALL, "--devices", "4", JAX_NUM_CPU_DEVICES="2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: 4 devices are needed, but there are 2 (cpu); give --devices 2 or fewer\n"


ERRORS = {
    "--batch 6 --devices 4": "batch=6 cannot be split evenly over 4 devices; give a multiple of 4",
    "--heads 3": "heads=3 does not divide d_model=128; give a d_model that is a multiple of 3",
    "--data {missing}": "No such file or directory; give --data the path of a text file",
    "--data {empty}": "is empty; give --data a file with some text in it",
    "--data {short}": "the text has 20 bytes, but a window of 128 needs 129; give a longer text or a smaller --seq-len",
    "--data {short} --corpus python-docs": "both name a text; give one of them",
    "--data {short} --window 4 --batch 8": "too few for a batch of 8; give a longer text, a smaller --batch",
    "--corpus bible": "no corpus is called 'bible'; choose one of: python-docs, tiny-shakespeare",
    "--devices 0": "devices is 0; give at least 1",
    "--strategy magic": "no strategy is called 'magic'; choose one of: data_parallel",
    "--mesh data=3 --devices 4": "mesh=data=3 is for 3 devices, but there are 4; give degrees whose product is 4",
    "--mesh rows=4 --devices 4": "has an axis 'rows'; give axes of data, fsdp, context, tensor, as in data=2,tensor=4",
    "--strategy tensor_parallel --devices 8": "heads=4 cannot be split evenly over the 8 devices of tensor; give",
    "--microbatches 3 --devices 4": "batch=16 cannot be split into 3 microbatches on each of 4 devices; give",
    "--steps 0": "steps is 0; give at least 1",
    "--layers 0": "layers is 0; give at least 1",
    "--seed -1": "seed is -1; give at least 0 and at most 4294967295",
    "--dropout 1": "dropout is 1.0; give a share from 0 up to",
    "--learning-rate 0": "learning_rate is 0.0; give at least 1e-30 and at most 1e+30",
    "--validation 2": "validation is 2.0; give a share",
    "--metrics {missing}/metrics.jsonl": "give --metrics a path in a folder that exists",
    "--checkpoint-dir {empty}": "is a file; give --checkpoint-dir a folder to write to",
    "--data {short} --window 4 --batch 4 --devices 4 --metrics {short}": "is not a file of JSON lines",
    "--resume": "--resume needs --checkpoint-dir DIR",
    "--checkpoint-every 0": "checkpoint_every is 0; give at least 1 and at most 1000000000",
    "--keep 0": "keep is 0; give at least 1 and",
    "--eval-every -1": "eval_every is -1; give at least 0 and",
    "--bucket-bytes -1": "bucket_bytes is -1; give at least 0 and",
    "--processes 2": "--coordinator, --processes and --process-id go together",
    "--vocabulary 512": "vocabulary is 512; give at least 1 and at most 256",
    "--weight-decay inf": "weight_decay is inf; give at least 0 and at most 1e+30",
    "--learning-rate nan": "learning_rate is nan; give at least 1e-30",
    "--clip inf": "clip is inf; give at least 0",
    "--steps 99999999999": "steps is 99999999999; give at least 1 and at most 1000000000",
    "--devices 99999999999": "devices is 99999999999; give at least 1 and at most 1000000",
    "--heartbeat 99999999999": "heartbeat is 99999999999; give at least 1 and at most 86400",
    "--vocabulary 64": "vocabulary=64 is too small for bytes up to",
    "--layers four": "Error parsing --layers: invalid literal for int() with base 10: 'four'; see python -m",
    "--optimizer lion": "invalid choice 'lion' for argument '--optimizer'. Expected one of ('adamw', 'sgd').",
    "--layer 3 --nonsense": "Unrecognized options",
}


@pytest.mark.parametrize("arguments", ERRORS)
def test_bad_input_ends_with_one_line_and_code_2(
    arguments: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Before any long work: none of these gets as far as building a state."""
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("twenty bytes of text")
    paths = {name: str(tmp_path / name) for name in ("missing", "empty", "short")}
    monkeypatch.setattr("shared.twin.initial_state", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(SystemExit) as ended:
        main(auto_sharding.build, "auto_sharding", ["train", *arguments.format(**paths).split()])
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert ERRORS[arguments] in printed.err
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert not printed.out


@pytest.mark.parametrize("program", TWINS)
def test_a_loss_that_is_no_number(program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "metrics.jsonl"
    options = f"--steps 20 --optimizer sgd --learning-rate 1e30 --warmup 0 --clip 0 --devices 2 --metrics {path}"
    with pytest.raises(SystemExit) as ended:
        main(TWINS[program], program, ["train", *SMALL, *options.split()])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert "try a lower --learning-rate" in printed
    assert printed.count("\n") == 1
    assert json.loads(path.read_text().splitlines()[1])["step"] == 1  # what was known before is kept


def test_help_names_flags(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(auto_sharding.build, "auto_sharding", ["train", "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for flag in (
        "--steps",
        "--data",
        "--corpus",
        "--metrics",
        "--devices",
        "--layers",
        "--d-model",
        "--d-ff",
        "--seq-len",
        "--clip",
        "--schedule",
        "--no-remat",
        "--resume",
        "--coordinator",
    ):
        assert flag in printed


def test_a_text_too_short_to_validate_on_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "text").write_bytes(b"0123456789" * 20)
    main(
        auto_sharding.build,
        "auto_sharding",
        ["train", *SMALL, "--steps", "1", "--data", str(tmp_path / "text"), "--validation", "0.05"],
    )
    assert "no validation: the part of the text held out for it is no longer than a window" in capsys.readouterr().out


def test_a_reader_that_has_enough_ends_the_program_quietly():
    command = f"{sys.executable} -m auto_sharding train --help | head -c 5; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert "space" not in done.stderr


def test_former_flags_are_aliases():
    """Saved commands name the sizes of the model as they were called before."""
    commands = {name: kind for name, (kind, _) in COMMANDS.items()}
    former, present = (
        parse(commands, "program", ["train", *flags.split()])
        for flags in ("--width 8 --hidden 16 --window 4", "--d-model 8 --d-ff 16 --seq-len 4")
    )
    assert former == present
    assert former.config.model == ModelConfig(d_model=8, d_ff=16, seq_len=4)


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        (
            "╭─ Parsing error ─╮\n│ invalid choice │\n│ 'x' │\n│ ─────── │\n│ see --help │\n╰───╯\n",
            "invalid choice 'x'",
        ),
        ("Parsing error\n-----\ninvalid choice\n'x'\n-----\nsee --help\n", "invalid choice 'x'"),
        ("a new release of the parser\nsays it plainly", "a new release of the parser says it plainly"),
        ("", "the arguments cannot be parsed"),
    ],
)
def test_the_message_is_found_in_what_the_parser_prints(printed: str, message: str):
    assert parser_message(printed) == message


def test_a_mesh_says_how_many_devices_to_simulate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Unless --devices does."""
    wanted = []
    monkeypatch.setattr("shared.runtime.startup.start", lambda devices, **_: (wanted.append(devices), 1 / 0))
    for flags in ("--mesh data=2,tensor=3", "--mesh data=8 --devices 2", ""):
        with pytest.raises(ZeroDivisionError):
            main(auto_sharding.build, "auto_sharding", ["train", *flags.split()])
    assert wanted == [6, 2, 4]
