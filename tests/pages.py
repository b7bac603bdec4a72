"""The README and the pages of docs/, as tests read them: blocks of code, links, headings; and how what they show is run."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import unicodedata
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_PARSER = MarkdownIt("commonmark").enable("table")
_MARK = "\x1e"
"""Stands before the output of each step."""


@dataclass(frozen=True)
class Block:
    """A fenced block: `mark` is the comment right before it, such as "exact" in `<!-- exact -->`."""

    language: str
    text: str
    line: int
    mark: str = ""


@dataclass(frozen=True)
class Step:
    """A command line of a console block, or a program, with what the page shows of its output ("": nothing is shown)."""

    text: str
    is_program: bool = False
    shown: str = ""


@dataclass(frozen=True)
class Page:
    path: Path
    text: str = field(repr=False)

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def _tokens(self):
        return _PARSER.parse(self.text)

    @cached_property
    def blocks(self) -> list[Block]:
        found, mark = [], ""
        for token in self._tokens:
            if token.type == "fence":
                found.append(Block(token.info, token.content, token.map[0] + 1, mark))
            comment = re.fullmatch(r"<!-- ([\w ]+) -->\n?", token.content) if token.type == "html_block" else None
            mark = comment[1] if comment else ""
        return found

    def code(self, language: str) -> list[str]:
        return [block.text for block in self.blocks if block.language == language]

    @cached_property
    def steps(self) -> list[Step]:
        """What can be run of the page, in its order. Only output that is "exact", or what a program "prints", is given as `shown`."""
        steps: list[Step] = []
        for block in self.blocks:
            if block.language == "console":
                steps += [step if block.mark == "exact" else replace(step, shown="") for step in _commands(block.text)]
            elif block.language == "python":
                steps.append(Step(block.text, is_program=True))
            elif block.mark == "prints":
                steps[-1] = replace(steps[-1], shown=block.text)
        return steps

    @cached_property
    def links(self) -> list[str]:
        inner = [child for token in self._tokens for child in token.children or ()]
        return [str(each.attrs["href" if each.type == "link_open" else "src"]) for each in inner if each.type in ("link_open", "image")]

    @cached_property
    def prose(self) -> list[str]:
        """Inline code."""
        return [child.content for token in self._tokens for child in token.children or () if child.type == "code_inline"]

    @cached_property
    def anchors(self) -> set[str]:
        """Names by which a heading is reached both where GitHub shows the page and on the site."""
        heads = [after.children for token, after in zip(self._tokens, self._tokens[1:], strict=False) if token.type == "heading_open"]
        texts = ["".join(child.content for child in children or ()) for children in heads]
        return {_github(text) for text in texts} & {_site(text) for text in texts}


def _github(text: str) -> str:
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def _site(text: str) -> str:
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def _commands(text: str) -> list[Step]:
    """`$ ` begins a command, `> ` right behind it goes on with it, and the rest is what it gives."""
    steps: list[Step] = []
    is_command = False
    for line in text.splitlines():
        if line.startswith("$ "):
            steps.append(Step(line[2:]))
        elif is_command and line.startswith("> "):
            steps[-1] = replace(steps[-1], text=f"{steps[-1].text}\n{line[2:]}")
        else:
            steps[-1] = replace(steps[-1], shown=f"{steps[-1].shown}{line}\n")
        is_command = line.startswith("$ ") or (is_command and line.startswith("> "))
    return steps


@cache
def pages() -> dict[str, Page]:
    """All of them, by name."""
    files = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    read = [Page(file, file.read_text(encoding="utf-8")) for file in files]
    return {page.name: page for page in read}


def unlike(shown: str, got: str) -> str:
    """Why an output is not what a page shows, or "". A `…` there stands for anything; empty lines and spaces at ends do not count."""
    wanted, given = ("\n".join(line.rstrip() for line in text.splitlines() if line.strip()) for text in (shown, got))
    pattern = ".*?".join(map(re.escape, wanted.split("…")))
    return "" if re.fullmatch(pattern, given, re.DOTALL) else f"the page shows\n{wanted}\nand it gives\n{given}"


# --- running


def workplace(folder: Path) -> Path:
    """A folder that looks like a clone of this repository to commands, and that they may write into."""
    for name in ("examples", "localrag", "docs", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def environment(home: Path, models: Path) -> dict[str, str]:
    given = {name: value for name, value in os.environ.items() if not name.startswith("LOCALRAG_")}
    return given | {
        "LOCALRAG_HOME": str(home),
        "LOCALRAG_MODELS": str(models),
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "100",
    }


def run_in_shell(steps: list[Step], folder: Path, env: dict[str, str]) -> list[tuple[int, str]]:
    """The exit code and the output (both streams as one) of each step, in one shell."""
    (folder / "bin").mkdir()
    for name, what in (("localrag", "-P -m localrag"), ("python3", "-P")):  # not the copy of localrag that lies there
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {what} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    lines = ["rc=0"]
    for number, step in enumerate(steps):
        file = folder / "bin" / f"program{number}.py"
        if step.is_program:
            file.write_text(step.text, encoding="utf-8")
        lines += [
            f"printf '\\n{_MARK}\\n'; (exit $rc)",
            f"python3 {shlex.quote(str(file))}" if step.is_program else step.text,
            f"rc=$?; printf '\\n{_MARK}%d\\n' $rc",
        ]
    env = env | {"PATH": f"{folder / 'bin'}{os.pathsep}{env['PATH']}"}
    script = folder / "bin" / "page.sh"
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return _outputs(["bash", str(script)], folder, env)


_IN_ONE_PROCESS = """
import json, os, sys, traceback
from localrag.cli import main
for words, piped, program in json.load(sys.stdin):
    end = os.open(piped or os.devnull, os.O_RDONLY)  # what a shell would make standard input
    os.dup2(end, 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    print("\\n\\x1e", flush=True)
    try:
        code = exec(program, {"__name__": "__main__"}) or 0 if program else main(words)
    except Exception:
        traceback.print_exc()
        code = 1
    print(f"\\n\\x1e{code}", flush=True)
"""


def run_in_one_process(steps: list[Step], folder: Path, env: dict[str, str]) -> list[tuple[int, str]]:
    """The same, of `localrag ...`, `cat FILE | localrag ...` and programs, in one process."""
    given = []
    for step in steps:
        words = [] if step.is_program else shlex.split(step.text)
        piped = None
        if words[:1] == ["cat"]:
            assert words[2] == "|", step.text
            piped, words = words[1], words[3:]
        assert step.is_program or words[0] == "localrag", step.text
        given.append((words[1:], piped, step.text if step.is_program else ""))
    return _outputs([sys.executable, "-P", "-c", _IN_ONE_PROCESS], folder, env, json.dumps(given))


def _outputs(command: list[str], folder: Path, env: dict[str, str], given: str = "") -> list[tuple[int, str]]:
    done = subprocess.run(
        command, cwd=folder, env=env, input=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280, check=False
    )
    found = re.findall(rf"\n{_MARK}\n(.*?)\n{_MARK}(-?\d+)\n", done.stdout, re.DOTALL)
    return [(int(code), text) for text, code in found] or [(done.returncode or 1, done.stdout)]


def check(steps: list[Step], found: list[tuple[int, str]]) -> None:
    """Each step ends well, unless an error is what the page shows, and gives what is shown of it."""
    for number, (step, (code, output)) in enumerate(zip(steps, found, strict=False)):
        following = steps[number + 1 : number + 2]
        is_asked = bool(following) and following[0].text == "echo $?"
        assert code == 0 or is_asked or step.shown.startswith(("Error:", '{"error"')), f"{step.text}\nexit code {code}\n{output[-2000:]}"
        assert not step.shown or not (why := unlike(step.shown, output)), f"{step.text}\n{why}"
    assert len(found) == len(steps), found[-1]
