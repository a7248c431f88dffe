"""The pages are checked: a broken quote or output fails, a drifted time is reported, and what is slow is left alone."""

from pathlib import Path

import pytest

pytest.importorskip("cogapp")

from bench.docs.command import all_pages, process
from bench.docs.drift import drift
from bench.docs.passages import Commands, Passages, cut_out

QUOTE = '<!-- [[[cog source("shared/model/loss.py", "sums_to_means") ]]] -->\n<!-- [[[end]]] -->\n'
PROGRAM = '```python\nprint("size", 6 * 7)\n```\n\n<!-- [[[cog program({}) ]]] -->\n<!-- [[[end]]] -->\n'


def checked(page: Path, commands: Commands = "all") -> tuple[int, str]:
    with Passages(write=False, commands=commands) as passages:
        return process(page, passages, write=False)


def written(page: Path, text: str) -> str:
    page.write_text(text)
    with Passages(write=True) as passages:
        assert process(page, passages, write=True)[0] == 0
    return page.read_text()


def test_a_quote_is_current_until_one_of_its_letters_changes(tmp_path: Path):
    page = tmp_path / "page.md"
    text = written(page, QUOTE)
    assert "def sums_to_means(" in text
    assert checked(page) == (0, "")
    page.write_text(text.replace("total / count", "total * count"))
    code, printed = checked(page)
    assert code != 0
    assert "+    return jax.tree.map(lambda total: (total / count)" in printed


def test_an_output_is_current_until_it_is_another(tmp_path: Path):
    page = tmp_path / "page.md"
    text = written(page, PROGRAM.format(""))
    assert "\n```\nsize 42\n```\n" in text
    page.write_text(text.replace("size 42", "size 41"))
    assert checked(page)[0] != 0
    assert checked(page, "none") == (0, "")


def test_a_passage_that_varies_is_reported_and_does_not_fail(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(written(page, PROGRAM.format("varies=True")).replace("size 42", "size 84"))
    code, printed = checked(page)
    assert code == 0
    assert "drifted: 1 of 1 numbers differ, the largest by 50%" in printed


def test_a_slow_passage_is_left_alone_unless_all_are_asked_for(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(written(page, PROGRAM.format("slow=True")).replace("size 42", "size 84"))
    assert checked(page, "quick") == (0, "")
    assert checked(page)[0] != 0


def test_what_cannot_be_quoted_is_an_error(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(QUOTE.replace("sums_to_means", "no_such_function"))
    code, printed = checked(page)
    assert code != 0
    assert "shared/model/loss.py has no no_such_function; it has" in printed


def test_a_command_that_fails_is_an_error(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text('<!-- [[[cog runs("python -m no_such_module") ]]] -->\n<!-- [[[end]]] -->\n')
    code, printed = checked(page)
    assert code != 0
    assert "python -m no_such_module ended with exit code 1" in printed


def test_settings_of_the_make_that_checks_do_not_reach_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MAKEFLAGS", " -- ARGS=--check")
    monkeypatch.setenv("ARGS", "--check")
    page = tmp_path / "page.md"
    page.write_text('<!-- [[[cog run("make --dry-run compare") ]]] -->\n<!-- [[[end]]] -->\n')
    code, printed = checked(page)
    assert "-m bench compare" in printed, (code, printed)
    assert "--check" not in printed


def test_a_command_can_be_killed_after_a_line(tmp_path: Path):
    page = tmp_path / "page.md"
    command = "python -c 'for step in range(10**9): print(step)'"
    page.write_text(f'<!-- [[[cog run("{command}", killed_after="^2$") ]]] -->\n<!-- [[[end]]] -->\n')
    assert "\n0\n1\n2\nKilled\n```" in written(page, page.read_text())
    page.write_text(page.read_text().replace("10**9", "2"))
    code, printed = checked(page)
    assert code != 0
    assert "ended before it printed '^2$'" in printed


@pytest.mark.parametrize(
    ("old", "new", "report"),
    [
        ("12.5 ms", "12.5 ms", ""),
        ("1,000 b  2.5 ms", "1,000 b 2.0 ms", "1 of 2 numbers differ, the largest by 20%"),
        ("a 1\nb 2", "a 1\nc 2", "1 of 2 lines differ, in their words too"),
    ],
)
def test_drift(old: str, new: str, report: str):
    assert drift(old, new) == report


def test_a_cut_that_leaves_nothing_is_an_error():
    assert cut_out("a\nb  \nc", begin="b", end="c") == "b"
    with pytest.raises(ValueError, match="nothing is left"):
        cut_out("a\nb", begin="x")


def test_the_quoted_sources_of_all_pages_are_current():
    """Outputs are checked by `make docs-check`, since commands take minutes."""
    with Passages(write=False, commands="none") as passages:
        for page in all_pages():
            code, printed = process(page, passages, write=False)
            assert code == 0, printed
        assert passages.made >= 10
