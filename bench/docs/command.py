"""`python -m bench docs`: write every printed output and quoted source in the pages, or check that they are current.

A page names what produces a passage in an HTML comment, which a code host does not show; cog (cogapp) runs it and
writes the passage between the comment and its end mark:

    <!-- [[[cog run("python -m bench ledger --devices 8", begin="one training step") ]]] -->
    <!-- [[[end]]] -->

The functions that a page may call are the methods of `Passages` (passages.py).
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from bench.docs.passages import ROOT, Commands, Passages
from shared.config import check


@dataclass(frozen=True)
class DocsCommand:
    """Write the outputs and quoted sources of the pages, or check them."""

    pages: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Pages to process; by default README.md, CONTRIBUTING.md and docs/*.md."""
    check: bool = False
    """Write nothing. Fail if a passage that is the same in every run differs; report how far others have drifted."""
    commands: Commands = "all"
    """Which are run: all, those that are done in half a minute, or none, and only quoted sources are looked at."""


def all_pages() -> list[Path]:
    """The pages of the repository in reading order, relative to its root."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page.relative_to(ROOT) for page in pages]


def process(page: Path, passages: Passages, *, write: bool) -> tuple[int, str]:
    """Process one page. Returns cog's exit code (0: done, or current) and what it printed."""
    from cogapp import Cog

    printed = io.StringIO()
    cog = Cog()
    cog.set_output(printed, printed)
    functions: dict[str, Any] = cog.options.defines
    functions.update(passages.functions(cog.cogmodule))
    arguments = ["-r"] if write else ["--check", "--diff"]
    code = cog.main(["cog", *arguments, "--verbosity=1", str(ROOT / page)])
    return code, printed.getvalue().replace(f"{ROOT}/", "")


def run(command: DocsCommand) -> int:
    """Process the pages; return 0 if all passages could be made and, with --check, those that must be are current."""
    pages = command.pages or all_pages()
    for page in pages:
        check((ROOT / page).is_file(), f"{page} is not a page of this repository; give a path from its root")
    failed = []
    with Passages(write=not command.check, commands=command.commands) as passages:
        for page in pages:
            code, printed = process(page, passages, write=not command.check)
            print(printed, end="", flush=True)
            if code:
                failed.append(str(page))
        print(f"{passages.made} passages of {len(pages)} pages made, {passages.left} left as they were")
    if failed:
        print(f"not current: {', '.join(failed)}; run `make docs`" if command.check else f"failed: {', '.join(failed)}")
    return 1 if failed else 0
