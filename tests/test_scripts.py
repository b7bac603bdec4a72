"""scripts/test and .ci/run: what they install, what they say of skipped tests, and when they fail."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser import NEEDS_CHROMIUM

ROOT = Path(__file__).parents[1]
TOOLS = ("bash", "env", "dirname", "mktemp", "grep", "sort", "uniq", "awk", "rm", "tail", "cat", "chmod", "touch")
TESTS = f"""
import shutil
import pytest

@pytest.mark.skipif(shutil.which("chromium") is None, reason={NEEDS_CHROMIUM!r})
@pytest.mark.parametrize("number", range(3))
def test_page(number): pass

@pytest.mark.model
def test_model(): pytest.skip("needs\\n a model")
"""
APT_THAT_INSTALLS = (
    'echo "$*" >>apt.log; case "$*" in *install*) cd bin; touch chromium chromedriver; chmod +x chromium chromedriver;; esac'
)
APT_THAT_FAILS = 'echo "E: Unable to fetch some archives"; exit 100'


@pytest.fixture
def checkout(tmp_path):
    """A checkout with these scripts and three tests that need Chromium, on a PATH that holds little else."""
    scripts, bin_ = tmp_path / "scripts", tmp_path / "bin"
    for folder in (scripts, bin_, tmp_path / "tests", tmp_path / ".ci", tmp_path / ".venv" / "bin"):
        folder.mkdir(parents=True)
    for name in ("scripts/test", "scripts/browser", ".ci/run", "tests/conftest.py"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tmp_path / name)
    for name in ("setup", "check"):
        program(scripts / name, "")
    for name in TOOLS:
        (bin_ / name).symlink_to(shutil.which(name))
    test = tmp_path / "scripts" / "test"
    test.write_text(re.sub(r"run -n \d", "run -n 1", test.read_text()))  # three tests need not wait for more workers
    program(tmp_path / ".venv" / "bin" / "python", f'exec {sys.executable} "$@"')
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  model\n")
    (tmp_path / "tests" / "test_all.py").write_text(TESTS)
    (tmp_path / "os-release").write_text("NAME=Debian\nID=debian\n")
    return tmp_path


def program(path: Path, text: str) -> None:
    path.write_text(f"#!{shutil.which('bash')}\n{text}\n")
    path.chmod(0o755)


def run(checkout, script, *args, user=0, apt=None):
    """The script's outcome on a machine with this user and this apt-get."""
    program(checkout / "bin" / "id", f"echo {user}")
    if apt is not None:
        program(checkout / "bin" / "apt-get", apt)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "SKIPPED_"))}
    env = {**kept, "PATH": str(checkout / "bin"), "OS_RELEASE": str(checkout / "os-release"), "PYTHONPATH": str(ROOT)}
    return subprocess.run([checkout / script, *args], cwd=checkout, env=env, capture_output=True, text=True, timeout=200, check=False)


def test_root_on_debian_installs_chromium_without_a_word(checkout):
    done = run(checkout, "scripts/browser", apt=APT_THAT_INSTALLS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    log = (checkout / "apt.log").read_text()
    assert "update" in log.splitlines()[0]
    assert log.rstrip().endswith("chromium chromium-driver")
    done = run(checkout, "scripts/browser", apt=APT_THAT_FAILS)
    assert done.returncode == 0, "it is there, so nothing is installed"


def test_what_keeps_chromium_from_being_installed_is_told(checkout):
    done = run(checkout, "scripts/browser", apt=APT_THAT_FAILS)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[0] == "E: Unable to fetch some archives"


@pytest.mark.parametrize(("user", "system", "apt"), [(1000, "ID=debian", ""), (0, "ID=ubuntu", ""), (0, "ID=debian", None)])
def test_elsewhere_nothing_is_installed(checkout, user, system, apt):
    (checkout / "os-release").write_text(f"{system}\n")
    done = run(checkout, "scripts/browser", user=user, apt=apt)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_the_last_line_names_what_was_skipped_and_how_to_have_it(checkout):
    done = run(checkout, "scripts/test", "-q", "tests", user=1000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"Skipped: 3 tests: {NEEDS_CHROMIUM}; 1 test: needs a model."


@pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="a source distribution holds no .ci")
def test_both_runs_are_summed_up_and_a_run_without_skips_says_nothing_of_them(checkout):
    done = run(checkout, ".ci/run", user=1000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"Skipped: 3 tests: {NEEDS_CHROMIUM}; 1 test: needs a model."
    done = run(checkout, "scripts/test", "-q", "tests", "-m", "not model", apt=APT_THAT_INSTALLS)
    assert "3 passed" in done.stdout.splitlines()[-1]


def test_a_failure_is_a_failure_and_the_skips_are_told_all_the_same(checkout):
    (checkout / "tests" / "test_bad.py").write_text("def test_bad(): assert False\n")
    done = run(checkout, "scripts/test", "-q", "tests", user=1000)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("Skipped: 3 tests: ")


@pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="a source distribution holds no .ci")
@pytest.mark.parametrize(("user", "apt", "status"), [(0, APT_THAT_INSTALLS, 0), (0, APT_THAT_FAILS, 1), (1000, APT_THAT_FAILS, 0)])
def test_ci_fails_where_the_tests_of_the_page_could_have_run_and_did_not(checkout, user, apt, status):
    program(checkout / "scripts" / "test", f"scripts/browser; [ -e bin/chromium ] || echo {shlex.quote(NEEDS_CHROMIUM)} >>$SKIPPED_TESTS")
    done = run(checkout, ".ci/run", user=user, apt=apt)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("could install Chromium" in done.stderr) == (status == 1)
