"""Metrics files: lines of JSON that survive kills and are appended to."""

import json
import math
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console

from shared.training.loop import Record
from shared.training.reporter import Reporter, open_output


def test_a_line_that_a_kill_left_unfinished_is_dropped(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    with open_output(path, "--metrics", append=True) as file:
        print('{"step": 2}', file=file)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 2}\n'
    with open_output(path, "--metrics") as file:
        print("{}", file=file)
    assert path.read_text() == "{}\n"
    for content in ("", '{"no end'):
        path.write_text(content)
        open_output(path, "--metrics", append=True).close()
        assert path.read_text() == ""
    for append in (True, False):
        path.write_bytes(b"\xff a text, given by mistake")
        with pytest.raises(ValueError, match="is not a file of JSON lines, and --metrics would overwrite it"):
            open_output(path, "--metrics", append=append)
        assert path.read_bytes() == b"\xff a text, given by mistake"
    open_output(tmp_path / "other", "--metrics", append=True).close()
    with pytest.raises(ValueError, match=r"cannot write .*; give --metrics a path in a folder that exists"):
        open_output(tmp_path / "missing" / "metrics", "--metrics", append=True)


def test_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with ExitStack() as stack, open_output(tmp_path / "metrics", "--metrics") as file:
        reporter = Reporter(stack, Console(soft_wrap=True), file, 101, 200)
        for step in range(101, 201):
            reporter(Record(step, 1.0, math.e, math.inf, 9.0, None if step == 101 else 1234.5))
        reporter.validation(200, 2.0, 7)
    *steps, validation = [json.loads(line) for line in (tmp_path / "metrics").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(101, 201))
    assert steps[0]["gradient_norm"] is None  # JSON has no infinity
    assert validation == {
        "step": 200, "validation_loss": 2.0, "validation_perplexity": math.exp(2), "windows": 7,
    }  # fmt: skip
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "step 101  loss 1.0000  perplexity 2.72  gradient norm inf"
    assert [int(line.split()[1]) for line in shown] == [101, *range(120, 201, 20), 200]
    assert shown[-2].endswith("1,234 tokens/s")
    assert shown[-1] == "step 200  validation loss 2.0000  perplexity 7.39  over 7 windows"
