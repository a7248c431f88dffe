"""The pages: their links lead somewhere, and every command in the README is run, by CI or by what writes the page."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
GENERATED = re.compile(r"<!-- \[\[\[cog.*?\]\]\] -->.*?<!-- \[\[\[end\]\]\] -->", re.DOTALL)
PASSAGE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The fragments that a code host gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", PASSAGE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    text = PASSAGE.sub("", page.read_text())
    for target, fragment in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name}: {target}"
        if fragment:
            assert fragment in anchors(path), f"{page.name}: {target}#{fragment}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_a_page_exist(page: Path):
    """Paths such as `shared/model/loss.py` in prose."""
    prose = PASSAGE.sub("", GENERATED.sub("", page.read_text()))
    folders = "auto_sharding|explicit_shardmap|shared|bench|twinstep|tests"
    for name in re.findall(rf"(?<![\w/-])(?:{folders})/[\w/]+\.\w+", prose):
        assert (ROOT / name).is_file(), f"{page.name}: {name}"


@pytest.fixture(scope="module")
def run_by_ci(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The commands that .ci/run runs in a folder where `make` and the interpreters only note how they are called."""
    folder = tmp_path_factory.mktemp("ci")
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    log, tools = folder / "log", folder / "tools"
    tools.mkdir()
    note = f'#!/bin/sh\necho "$(basename "$0") $*" >> {log}\n'
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    (tools / f"python{version}").symlink_to(sys.executable)
    for name in ("make", "slurmctld", f"../.venv-{version}/bin/python"):
        path = tools / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(note)
        path.chmod(0o755)
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(folder)}
    subprocess.run([folder / ".ci" / "run"], env=os.environ | environment, check=True, timeout=60)
    return log.read_text().splitlines()


def test_every_command_in_the_readme_is_run(run_by_ci: list[str]):
    """Those that `make docs` writes are run as it does, in CI too; the others are targets of `make` that CI calls."""
    text = (ROOT / "README.md").read_text()
    by_hand = "\n".join(PASSAGE.findall(GENERATED.sub("", text)))
    commands = re.findall(r"^(?:\$ )?((?:make|pip|python|diff|\S+/python) .*)$", by_hand, re.MULTILINE)
    assert "make test" in commands
    for command in commands:
        program, target, *_ = command.split()
        if program != "pip":  # tests/project/test_wheel.py installs the package
            assert program == "make", f"{command}: write it with runs(...) or run(...)"
            written = f'run("make {target}"' in text  # by `make docs`, which shows what it prints
            assert written or any(line.startswith(f"make {target} ") for line in run_by_ci), command
    assert any(re.match(r"make docs .*--check", line) for line in run_by_ci), "CI does not check the pages"
