"""Install this bundle on a machine that has only Python: python3 BUNDLE.zip [FOLDER].

This file is the __main__ of a bundle. It uses only the standard library, and Python 3.7 can still run it far enough to print which
Python it needs. It makes a virtual environment in FOLDER from the bundle's wheels; `localrag unbundle` then restores the models and
knowledge bases. It never uses the network.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

MANIFEST, WHEELS, LOCK = "manifest.json", "wheels/", "requirements.lock"
CONFIGURATION, ENGINE, INTERRUPTED = 3, 7, 130  # localrag's exit codes
BLOCK_BYTES = 1 << 20
BYTE_CODE = 1.15  # factor by which compiled byte code enlarges an installation


class RefusedError(Exception):
    """An installation that cannot proceed: the message, the way out, and the exit code."""

    def __init__(self, message: str, hint: str, code: int = CONFIGURATION) -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code


def main() -> int:
    """Run the bundle's command line and return its exit code."""
    bundle = Path(sys.argv[0]).absolute()
    parser = argparse.ArgumentParser(prog=f"python3 {bundle.name}", description="Install localrag from this bundle, without a network.")
    parser.add_argument("folder", nargs="?", default="localrag", metavar="FOLDER", help="where to install it (default: ./localrag)")
    parser.add_argument("--force", action="store_true", help="replace existing models and knowledge bases that differ")
    parser.add_argument("--no-try", action="store_true", help="skip the test question to the model")
    options = parser.parse_args()
    try:
        return install(bundle, Path(options.folder).absolute(), force=options.force, tries=not options.no_try)
    except RefusedError as error:
        return fail(str(error), error.hint, error.code)
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError) as error:
        return fail(f"The bundle is damaged: {error}.", "Copy it again.", CONFIGURATION)
    except OSError as error:
        return fail(f"{error.filename or options.folder}: {error.strerror or error}.", "Check the disk and permissions.", CONFIGURATION)
    except KeyboardInterrupt:
        return fail("Interrupted.", "Run it again.", INTERRUPTED)


def install(bundle: Path, folder: Path, *, force: bool, tries: bool) -> int:
    """Install localrag into a virtual environment in `folder`, and models and knowledge bases into its home. Returns the exit code."""
    with zipfile.ZipFile(bundle) as archive:
        manifest = json.loads(archive.read(MANIFEST).decode("utf-8"))
        check_platform(manifest)
        check_folder(folder, manifest)
        is_new = not (folder / "pyvenv.cfg").exists()
        try:
            python = make_environment(folder)
            install_wheels(archive, manifest, python, again=not is_new)
        except BaseException:
            if is_new:  # the folder did not exist or was empty, so everything in it is ours
                shutil.rmtree(folder, ignore_errors=True)
            raise
    say("Restoring models and knowledge bases")
    code = run([python, "-I", "-m", "localrag", "unbundle", bundle, *(["--force"] if force else [])])
    if code:
        return code
    if manifest.get("default_model") and tries:
        try_model(python)
    bases = [thing["name"] for thing in manifest["things"] if thing["kind"] == "kb"]
    say(f"Ready. Ask with:\n  {python.with_name('localrag')} ask QUESTION{' --kb ' + bases[0] if bases else ''}")
    return 0


def check_platform(manifest: dict[str, Any]) -> None:
    """Check that the bundle has wheels, and that they are for this Python, system and processor."""
    if manifest.get("format") != "localrag bundle" or manifest.get("version") != 1:
        raise RefusedError("This script cannot read this bundle.", "Make it again with localrag bundle.")
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    python_version = manifest["python"]
    if sys.version_info < (3, 11) or (python_version and (python_version, manifest["python_tag"]) != (here, sys.implementation.cache_tag)):
        raise RefusedError(
            f"This bundle is for Python {manifest['python_tag'] or '3.11 or newer'}, but this is {sys.implementation.cache_tag}.",
            f"Run it with python{python_version or '3.11'}{f', or make one with Python {here}' if sys.version_info >= (3, 11) else ''}.",
        )
    there = f"{manifest['system']} on {manifest['machine']}"
    if python_version and there != f"{platform.system()} on {platform.machine()}":
        raise RefusedError(
            f"This bundle is for {there}, but this is {platform.system()} on {platform.machine()}.", "Make one on a machine like this one."
        )
    if not wheel_files(manifest):
        raise RefusedError("This bundle has no wheels.", "On a machine that has localrag, run: localrag unbundle FILE.")


def wheel_files(manifest: dict[str, Any]) -> list[str]:
    """Return the names of the wheels and their lock file in the bundle."""
    return sorted(name for name in manifest["files"] if name.startswith(WHEELS))


def check_folder(folder: Path, manifest: dict[str, Any]) -> None:
    """Check that `folder` is missing, empty or a virtual environment, and that its disk has space for the installation."""
    if folder.exists() and not (folder / "pyvenv.cfg").exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RefusedError(f"{folder} exists and is not a virtual environment.", "Name another folder, or move that one away.")
    disk = next(each for each in (folder, *folder.parents) if each.is_dir())
    needed = manifest["installed_bytes"] * BYTE_CODE + sum(manifest["files"][name]["num_bytes"] for name in wheel_files(manifest))
    free = shutil.disk_usage(str(disk)).free
    if needed > free:
        raise RefusedError(
            f"The installation needs {needed / 1e6:.0f} MB, but {disk} has {free / 1e6:.0f} MB free.", "Name a folder on another disk."
        )


def make_environment(folder: Path) -> Path:
    """Return the Python of the virtual environment in `folder`, which is made if it does not exist."""
    python = folder / "Scripts" / "python.exe" if os.name == "nt" else folder / "bin" / "python"
    if not (folder / "pyvenv.cfg").exists() or not python.exists():
        say(f"Making a virtual environment in {folder}")
        result = subprocess.run(
            [sys.executable, "-I", "-m", "venv", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        if result.returncode:
            lines = [line.strip() for line in result.stdout.decode("utf-8", "replace").splitlines() if line.strip()]
            raise RefusedError(
                f"Python could not make a virtual environment: {' '.join(lines)[:300] or 'it gives no reason'}",
                "On Debian and Ubuntu, install the package python3-venv.",
            )
    return python


def install_wheels(archive: zipfile.ZipFile, manifest: dict[str, Any], python: Path, *, again: bool) -> None:
    """Check the wheels against the manifest and install them with the environment's own pip, as their lock file says if there is one.

    `again` reinstalls even packages of the same version: the bundle may have another build of them.
    """
    names = wheel_files(manifest)
    folder = Path(tempfile.mkdtemp(prefix=".wheels-", dir=str(python.parents[1])))
    try:
        say(f"Checking {sum(name.endswith('.whl') for name in names)} wheels")
        for name in names:
            unpack(archive, name, manifest["files"][name], folder / name.split("/")[-1])
        say("Installing them; this takes a minute or two")
        command = [str(python), "-I", "-m", "pip", "--isolated", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
        command += ["--no-index", "--find-links", str(folder), *(["--force-reinstall"] if again else [])]
        if WHEELS + LOCK in names:
            command += ["--require-hashes", "--requirement", str(folder / LOCK)]
        else:
            command.append("localrag" + (f"[{','.join(manifest['extras'])}]" if manifest["extras"] else ""))
        if run(command):
            raise RefusedError("pip could not install the wheels.", "Its message is above.")
    finally:
        shutil.rmtree(str(folder), ignore_errors=True)


def unpack(archive: zipfile.ZipFile, name: str, content: dict[str, Any], target: Path) -> None:
    """Write one file of the bundle to `target`, and check its size and sha256 against the manifest."""
    digest, remaining_bytes = hashlib.sha256(), content["num_bytes"]
    with archive.open(name) as source, target.open("xb") as out:
        while remaining_bytes >= 0:
            block = source.read(BLOCK_BYTES)
            if not block:
                break
            remaining_bytes -= len(block)
            digest.update(block)
            out.write(block)
    if remaining_bytes or digest.hexdigest() != content["sha256"]:
        raise RefusedError(f"The bundle is damaged: {name} differs from what was packed.", "Copy it again.")


def try_model(python: Path) -> None:
    """Ask the default model for one token: llama.cpp is often compiled for one processor, and crashes on an older one."""
    say("Trying the model")
    command = [str(python), "-I", "-m", "localrag", "ask", "Hi", "--max-tokens", "1", "--ctx", "256", "--no-keep"]
    tried = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if tried.returncode < 0:  # a signal
        raise RefusedError(
            f"Everything is installed, but llama.cpp crashes on this processor (signal {-tried.returncode}).",
            "Make the bundle on a machine with a similar processor, or compile llama.cpp for any: CMAKE_ARGS=-DGGML_NATIVE=OFF.",
            ENGINE,
        )
    if tried.returncode:
        raise RefusedError(
            "Everything is installed, but the model does not answer.", tried.stderr.decode("utf-8", "replace").strip(), ENGINE
        )


def run(command: list[Any]) -> int:
    """Run a command that prints to this terminal; returns its exit code."""
    return subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, check=False).returncode


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def fail(message: str, hint: str, code: int) -> int:
    say(f"Error: {message}\n  {hint}")
    return code


if __name__ == "__main__":
    sys.exit(main())
