"""What is written is checked: what README and docs show runs, links lead somewhere, and what follows from the code is fresh."""

import functools
import importlib
import inspect
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from functools import cache

import click
import pytest

from docgen import FOLDER, PAGES
from localrag.catalog import Catalog
from localrag.cli import cli
from localrag.session import Session
from localrag.session.answer import Bypass
from localrag.settings import Settings
from localrag.types import ToolCall
from tests.homes import know_attention
from tests.isolation import without_network
from tests.pages import DOCS, ROOT, Step, check, environment, pages, run_in_one_process, run_in_shell, unlike, workplace

WITH_MODEL = (
    "README.md",
    "docs/tutorial.md",
    "docs/explanation/text-is-not-markup.md",
    "docs/how-to/air-gap.md",
    "docs/how-to/quality.md",
)
"""Pages that ask the default model. All others are run with models.toml of `tiny_catalogue`, and ask nothing but the echo."""
WITHOUT_MODEL = tuple(name for name, page in pages().items() if page.steps and name not in WITH_MODEL and name != "docs/how-to/server.md")
NOT_RUN_HERE = {
    ("README.md", "sh"): "below, where a network namespace is to be had",
    ("docs/tutorial.md", "sh"): "it makes an environment and compiles llama.cpp; scripts/test, which runs this test, begins with it",
    ("docs/how-to/server.md", "sh"): "tests/model/test_server_real.py; the lines of llm, which is no package of ours, were tried by hand",
    ("docs/how-to/server.md", "python"): "tests/model/test_server_real.py",
    ("docs/how-to/server.md", "json"): "tests/server/test_errors.py",
    ("docs/how-to/server.md", "yaml"): "the configuration of llm, which was tried by hand",
    ("docs/how-to/quality.md", "json"): "lines of a file of questions: tests/grading reads such",
    ("docs/how-to/mcp.md", "json"): "the configuration of another program: tests/mcp_server",
    ("docs/how-to/postgresql.md", "sh"): "tests/kb/test_postgres.py",
    ("docs/how-to/gpu.md", "sh"): "compiling for a GPU; there was none",
    ("docs/how-to/air-gap.md", "sh"): "minutes of packing and compiling: tests/bundle does it with a small wheel; the namespace: below",
    ("docs/how-to/big-models.md", "sh"): "a download of gigabytes",
    ("docs/how-to/documents.md", "sh"): "installs another program, downloads a reranker",
}
"""Blocks that the tests of whole pages do not run: what runs them, or why nothing does."""
INDEXING = Step("localrag index examples/handbook --kb handbook")
RUN = {"console", "python", "toml", "text"}
PLAIN = re.compile(r'(cat \S+ \| )?localrag ([^|<>&;$`*"\n]|"[^$`"\n]*")*')
"""A command line that needs no shell."""
FOREIGN_OPTIONS = {"--no-stream", "--schema", "--no-index", "--find-links", "--force-reinstall", "--no-deps", "--no-binary", "--wheel-dir"}
FOREIGN_OPTIONS |= {"--no-cache-dir", "--require-hashes"}
FOREIGN_OPTIONS |= {"--map-root-user", "--net", "--indent", "--document-tokens", "--members", "--help", "--reuse-chunks"}
FOREIGN_OPTIONS |= {"--seeded", "--each", "--rounds", "--conversations", "--mutants"}
"""Of other programs, and one that was tried and left out."""


def _steps(name: str) -> list[Step]:
    """What is run of a page, after the knowledge base that it takes for granted was made."""
    page = pages()[name]
    is_made = any(step.text.startswith(INDEXING.text) for step in page.steps)
    first = [INDEXING] if "--kb handbook" in page.text and not is_made else []
    return first + [step for step in page.steps if step.text not in ("scripts/demo", "scripts/test")]


@pytest.mark.parametrize("name", WITHOUT_MODEL)
def test_commands_and_programs_run_and_give_what_is_shown(name, tiny_catalogue, tmp_path):
    """All of a page in one process, if it needs no shell: a process for each command takes longer than the commands."""
    steps = _steps(name)
    run = run_in_one_process if all(step.is_program or PLAIN.fullmatch(step.text) for step in steps) else run_in_shell
    check(steps, run(steps, workplace(tmp_path), environment(tmp_path / "home", tiny_catalogue)))


@pytest.mark.model
@pytest.mark.parametrize("name", WITH_MODEL)
def test_commands_and_programs_that_ask_the_default_model_run(name, request, tmp_path):
    """All of a page in one process. The README's use the default embedder too; the others would each index the handbook with it again."""
    if name == "README.md":
        models = request.getfixturevalue("catalogue")
        shutil.copytree(request.getfixturevalue("converted")[0].home, tmp_path / "home")
    else:
        models = request.getfixturevalue("quick_catalogue")
        know_attention(tmp_path / "home")
    steps = _steps(name)
    check(steps, run_in_one_process(steps, workplace(tmp_path), environment(tmp_path / "home", models)))


@pytest.mark.model
def test_what_is_shown_in_a_network_namespace_answers_in_one(quick_catalogue, tmp_path):
    prefix = shlex.join(without_network())
    shown = {line for page in pages().values() for text in page.code("sh") for line in text.splitlines() if line.startswith("unshare ")}
    (command,) = shown  # of the README and of docs/how-to/air-gap.md
    assert command.startswith(f"{prefix} localrag ask ")
    know_attention(tmp_path / "home")
    steps = [INDEXING, Step(f"{command} --max-tokens 8")]
    found = run_in_shell(steps, workplace(tmp_path), environment(tmp_path / "home", quick_catalogue))
    check(steps, found)
    assert "Sources" in found[1][1]


def test_every_block_is_run_or_it_is_said_why_not():
    shown = {(name, block.language) for name, page in pages().items() for block in page.blocks}
    assert {each for each in shown if each[1] not in RUN} == {each for each in NOT_RUN_HERE if each[1] not in RUN}
    assert set(NOT_RUN_HERE) <= shown
    named = {file for why in NOT_RUN_HERE.values() for file in re.findall(r"tests/[\w/.]*\w", why)}
    assert [file for file in named if not (ROOT / file).exists()] == []
    assert all(name in pages() for name in WITH_MODEL)
    for name, page in pages().items():
        assert not [line for text in page.code("text") for line in text.splitlines() if line.startswith("$ ")], name


def test_the_output_that_is_shown_is_compared_with_what_comes():
    assert unlike("a … c\n\nd", "a b c\nd  \n") == ""
    assert "and it gives" in unlike("a c", "a b c")
    assert "and it gives" in unlike("a …", "b a")


@pytest.mark.parametrize("name", [name for name, page in pages().items() if page.code("toml")])
def test_tables_of_models_toml_are_taken(name, tmp_path):
    """All of a page as one file."""
    file = tmp_path / "models.toml"
    file.write_text("\n".join(pages()[name].code("toml")), encoding="utf-8")
    Catalog.load(Settings(home=tmp_path, models_file=file))


@pytest.mark.parametrize("name", pages())
def test_every_link_leads_somewhere(name):
    page = pages()[name]
    for link in page.links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        file = (page.path.parent / path).resolve() if path else page.path
        assert file.exists(), link
        assert name == "README.md" or file.is_relative_to(DOCS), f"{link} is not on the site"
        if anchor:
            assert anchor in pages()[file.relative_to(ROOT).as_posix()].anchors, link


def test_every_page_of_docs_that_something_names_is_there():
    folders = ("localrag", "scripts", "examples", "benchmarks", "docgen")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in {".py", ".toml", ".html", ".md", ""}]
    texts = [file.read_text(encoding="utf-8") for file in (*files, ROOT / "models.toml", ROOT / "pyproject.toml") if file.is_file()]
    named = {name for text in texts for name in re.findall(r"(?<![\w/])docs/[\w/-]+\.md", text)}
    assert {"docs/explanation/budget.md", "docs/how-to/council.md"} <= named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("name", PAGES)
def test_pages_that_follow_from_the_code_are_fresh(name):
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), "run scripts/reference"


@cache
def _options() -> set[str]:
    """Every option of every command."""
    found: set[str] = set()

    def look(command: click.Command, context: click.Context) -> None:
        found.update(option for param in command.params for option in (*param.opts, *param.secondary_opts))
        for name in command.list_commands(context) if isinstance(command, click.Group) else ():
            child = command.get_command(context, name)
            look(child, click.Context(child, parent=context))

    look(cli, click.Context(cli))
    return found


@pytest.mark.parametrize("name", pages())
def test_every_option_that_is_named_is_there(name):
    page = pages()[name]
    said = [*page.prose, *page.code("console"), *(text for text in page.code("sh") if "localrag" in text)]
    named = {option for text in said for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)}
    assert named - _options() - FOREIGN_OPTIONS == set()


def test_every_file_of_a_tree_is_there():
    trees = [(name, tree) for name, page in pages().items() for tree in page.code("text") if tree.startswith("localrag/\n")]
    assert [name for name, _ in trees] == ["README.md", "docs/explanation/architecture.md"]
    for _, tree in trees:
        folders: list[str] = []
        for line in tree.splitlines():
            depth, name = len(line) - len(line.lstrip()), line.split()[0]
            folders = [*folders[: depth // 2], name]
            assert (ROOT / "".join(folders)).exists(), "".join(folders)


def _in_short(function):
    """The signature of a function: positional parameters with their types, and the names of the others."""
    parameters = inspect.signature(function).parameters.values()
    named = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    typed = [f"{each.name}: {each.annotation}" for each in parameters if each.kind is not each.KEYWORD_ONLY and each.name != "self"]
    returns = inspect.signature(function).return_annotation
    return f"({', '.join([*typed, *(['*', *named] if named else [])])}) -> {returns}"


def test_the_pipeline_s_signatures_are_the_real_ones():
    (block,) = [text for text in pages()["docs/explanation/architecture.md"].code("text") if text.startswith("localrag/session/")]
    module, checked = None, 0
    for line in block.splitlines():
        if not line.startswith(" "):
            module = importlib.import_module(line.removesuffix(".py").replace("/", "."))
            continue
        name, _, rest = line.strip().partition("(")
        function = functools.reduce(getattr, name.split("."), module)
        shown = _in_short(function).replace(" = SINGLE", "")
        assert f"({rest}" == shown, name
        checked += 1
    assert checked > 10


def test_the_layers_that_are_shown_are_those_that_are_enforced():
    (block,) = [text for text in pages()["docs/explanation/architecture.md"].code("text") if text.startswith("cli ")]
    shown = [re.split(r"\s{3,}", line)[0] for line in block.splitlines()]
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    assert shown == [each for each in contract["layers"] if each != "(__main__)"]


def test_the_reading_list_is_short_and_there():
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    files = re.findall(r"^\| `(localrag/[\w/.]+)`", page, re.MULTILINE)
    assert 0 < len(files) <= 12
    assert all((ROOT / each).is_file() for each in files)


def test_every_script_that_is_named_is_there():
    named = {script for page in pages().values() for script in re.findall(r"\bscripts/\w+", page.text)}
    assert {"scripts/demo", "scripts/test", "scripts/bench"} <= named
    assert all((ROOT / name).is_file() for name in named)


def test_the_script_for_benches_lists_all_of_them():
    files = (ROOT / "benchmarks").glob("*.py")
    benches = {"proof", *(file.stem for file in files if "ArgumentParser(" in file.read_text(encoding="utf-8"))}
    done = subprocess.run(["bash", "scripts/bench", "--help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    taken = (ROOT / "scripts" / "bench").read_text(encoding="utf-8").partition("case ")[2]
    assert benches - set(re.findall(r"\w+", done.stdout)) == set()
    assert benches - set(re.findall(r"\w+", taken)) == set()


def test_the_site_is_built_without_a_warning_and_takes_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    files = [*(tmp_path / "site").rglob("*.html")]
    assert len(files) >= len(pages()) - 1
    for file in files:
        html = file.read_text(encoding="utf-8")
        taken = re.findall(r"<(?:script|img|iframe|source|audio|video)\b[^>]*\bsrc=[\"']?([^\"'\s>]+)", html)
        taken += re.findall(r"<link\b(?![^>]*rel=[\"']?canonical)[^>]*\bhref=[\"']?([^\"'\s>]+)", html)
        assert [each for each in taken if re.match(r"(https?:)?//", each)] == [], file
    for sheet in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_the_fields_of_an_answer_are_those_that_are_told(home):
    told = re.findall(r"^\| `(\w+)` \|", pages()["docs/reference/output.md"].text.partition("## Errors")[0], re.MULTILINE)
    with Session.open("echo") as session:
        answer = replace(session.ask("How?"), reasoning="Hm.", warnings=("Look.",), bypass=Bypass.NOTHING_FOUND, quotes=())
        answer = replace(answer, tool_calls=(ToolCall("clock"),))
    assert {*answer.to_dict(), "memory", "rewriting"} == set(told)
