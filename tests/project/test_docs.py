"""The pages on strategies quote the sources as they stand."""

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("strategies", "fsdp", "tensor_parallel", "context_parallel", "pmap")


@pytest.mark.parametrize("page", PAGES)
def test_quotes_stand_in_the_sources(page: str):
    """Every block of Python stands so, but for blank lines and indentation, in the file named before it."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    quoted = re.findall(r"`([\w/]+\.py)`:\n\n```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(quoted) == text.count("```python") >= 2
    for file, block in quoted:
        source, lines = (re.sub(r"\n(?:[ ]*\n)+", "\n", text) for text in ((ROOT / file).read_text(), block))
        assert any(textwrap.indent(lines, indent) in source for indent in ("", "    ")), f"{file}:\n{block}"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str):
    path = ROOT / "docs" / f"{page}.md"
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_every_page_of_a_strategy_shows_both_twins():
    for page in PAGES[1:4]:
        text = (ROOT / "docs" / f"{page}.md").read_text()
        for twin in ("auto_sharding", "explicit_shardmap"):
            assert f"`{twin}/{page}.py`:" in text


@pytest.mark.parametrize("page", ["README.md", "docs/ledger.md"])
def test_lines_that_ask_for_collectives_still_do(page: str):
    """Ledgers that are quoted name lines of the explicit twin; a collective has to stand there."""
    quoted = re.findall(r"(explicit_shardmap/\w+\.py):(\d+)", (ROOT / page).read_text())
    assert quoted
    for file, number in quoted:
        line = (ROOT / file).read_text().splitlines()[int(number) - 1]
        assert re.search(r"lax\.(pmean|psum|pmax|all_gather|psum_scatter|ppermute|all_to_all|pcast)", line), line
