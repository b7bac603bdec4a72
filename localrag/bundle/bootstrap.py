"""Installs this bundle on a machine that has Python and nothing else: python3 BUNDLE.zip [FOLDER].

This file is the __main__ of a bundle: it uses the standard library alone, and Python 3.7 still reads it as far as the line that says
which one is needed. It makes a virtual environment in FOLDER from the bundle's wheels, then has localrag itself restore models and
knowledge bases (localrag unbundle). Nothing here uses the network.
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

MANIFEST, WHEELS = "manifest.json", "wheels/"
CONFIGURATION, ENGINE, INTERRUPTED = 3, 7, 130  # exit codes, as localrag's own
PIECE_BYTES = 1 << 20
BYTE_CODE = 1.15  # what is installed grows by it


class RefusedError(Exception):
    """What cannot be done, the way out, and the exit code."""

    def __init__(self, message: str, hint: str, code: int = CONFIGURATION) -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code


def main() -> int:
    """What the zip is run as; gives the exit code."""
    bundle = Path(sys.argv[0]).absolute()
    parser = argparse.ArgumentParser(prog=f"python3 {bundle.name}", description="Install localrag from this bundle, without a network.")
    parser.add_argument("folder", nargs="?", default="localrag", metavar="FOLDER", help="where to install it (default: ./localrag)")
    parser.add_argument("--force", action="store_true", help="replace models and knowledge bases that are there and differ")
    parser.add_argument("--no-try", action="store_true", help="do not ask the model anything at the end")
    options = parser.parse_args()
    try:
        return install(bundle, Path(options.folder).absolute(), force=options.force, tries=not options.no_try)
    except RefusedError as error:
        return tell(str(error), error.hint, error.code)
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError) as error:
        return tell(f"The bundle is damaged: {error}.", "Copy it again, and whole.", CONFIGURATION)
    except OSError as error:
        return tell(f"{error.filename or options.folder}: {error.strerror or error}.", "Check the disk and permissions.", CONFIGURATION)
    except KeyboardInterrupt:
        return tell("Interrupted.", "Run it again.", INTERRUPTED)


def install(bundle: Path, folder: Path, *, force: bool, tries: bool) -> int:
    """A virtual environment in `folder`, localrag in it, and what it works with in its home."""
    with zipfile.ZipFile(bundle) as archive:
        manifest = json.loads(archive.read(MANIFEST).decode("utf-8"))
        wheels = fitting_wheels(manifest)
        check_folder(folder, manifest, wheels)
        is_new = not (folder / "pyvenv.cfg").exists()
        try:
            python = make_environment(folder)
            install_wheels(archive, manifest, wheels, python, again=not is_new)
        except BaseException:
            if is_new:  # it was not there or empty, so nothing in it is anybody's
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


def fitting_wheels(manifest: dict[str, Any]) -> list[str]:
    """The names of the wheels, if they are for this Python and machine."""
    if manifest.get("format") != "localrag bundle" or manifest.get("version") != 1:
        raise RefusedError("This is no bundle that this starter knows.", "Make it again with localrag bundle.")
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    wanted = manifest["python"]
    if sys.version_info < (3, 11) or (wanted and (wanted, manifest["python_tag"]) != (here, sys.implementation.cache_tag)):
        raise RefusedError(
            f"This bundle is for Python {manifest['python_tag'] or '3.11 or newer'}, and this is {sys.implementation.cache_tag}.",
            f"Run it with python{wanted or '3.11'}{f', or make one with Python {here}' if sys.version_info >= (3, 11) else ''}.",
        )
    there = f"{manifest['system']} on {manifest['machine']}"
    if wanted and there != f"{platform.system()} on {platform.machine()}":
        raise RefusedError(
            f"This bundle is for {there}, and this is {platform.system()} on {platform.machine()}.", "Make one on a machine like this one."
        )
    wheels = sorted(name for name in manifest["files"] if name.startswith(WHEELS))
    if not wheels:
        raise RefusedError("This bundle holds no wheels.", "It is for a machine that has localrag: localrag unbundle FILE.")
    return wheels


def check_folder(folder: Path, manifest: dict[str, Any], wheels: list[str]) -> None:
    """That `folder` is not there, is empty, or is an environment; and that there is room."""
    if folder.exists() and not (folder / "pyvenv.cfg").exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RefusedError(f"{folder} is there, and is no virtual environment.", "Name another folder, or move that one away.")
    place = next(each for each in (folder, *folder.parents) if each.is_dir())
    needed = manifest["installed_bytes"] * BYTE_CODE + sum(manifest["files"][name]["num_bytes"] for name in wheels)
    free = shutil.disk_usage(str(place)).free
    if needed > free:
        raise RefusedError(f"It takes {needed / 1e6:.0f} MB, and {place} has {free / 1e6:.0f} free.", "Name a folder on another disk.")


def make_environment(folder: Path) -> Path:
    """The Python of a virtual environment there, which is made if need be."""
    python = folder / "Scripts" / "python.exe" if os.name == "nt" else folder / "bin" / "python"
    if not (folder / "pyvenv.cfg").exists() or not python.exists():
        say(f"Making a virtual environment in {folder}")
        made = subprocess.run(
            [sys.executable, "-I", "-m", "venv", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        if made.returncode:
            lines = [line.strip() for line in made.stdout.decode("utf-8", "replace").splitlines() if line.strip()]
            hint = "Debian and Ubuntu have venv in a package of its own, python3-venv."
            raise RefusedError(f"No virtual environment can be made: {' '.join(lines)[:300] or 'no reason is given'}", hint)
    return python


def install_wheels(archive: zipfile.ZipFile, manifest: dict[str, Any], wheels: list[str], python: Path, *, again: bool) -> None:
    """All wheels, compared with the manifest, installed by the environment's own pip; the files of wheels are gone afterwards.

    `again` replaces what is there also where it has the same version: it can be another build of it.
    """
    place = Path(tempfile.mkdtemp(prefix=".wheels-", dir=str(python.parents[1])))
    try:
        say(f"Checking {len(wheels)} wheels")
        for name in wheels:
            unpack(archive, name, manifest["files"][name], place / name.split("/")[-1])
        extras = f"[{','.join(manifest['extras'])}]" if manifest["extras"] else ""
        say("Installing them, which takes a minute or two")
        command = [str(python), "-I", "-m", "pip", "--isolated", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
        command += ["--no-index", "--find-links", str(place), *(["--force-reinstall"] if again else []), f"localrag{extras}"]
        if run(command):
            raise RefusedError("The wheels could not be installed.", "What pip says stands above.")
    finally:
        shutil.rmtree(str(place), ignore_errors=True)


def unpack(archive: zipfile.ZipFile, name: str, content: dict[str, Any], target: Path) -> None:
    """One file of the bundle, which has to be the one that the manifest speaks of."""
    digest, left = hashlib.sha256(), content["num_bytes"]
    with archive.open(name) as source, target.open("xb") as out:
        while left >= 0:
            piece = source.read(PIECE_BYTES)
            if not piece:
                break
            left -= len(piece)
            digest.update(piece)
            out.write(piece)
    if left or digest.hexdigest() != content["sha256"]:
        raise RefusedError(f"The bundle is damaged: {name} is not what was packed.", "Copy it again, and whole.")


def try_model(python: Path) -> None:
    """One token of the default model. llama.cpp is often compiled for one processor, and dies on an older one."""
    say("Trying the model")
    command = [str(python), "-I", "-m", "localrag", "ask", "Hi", "--max-tokens", "1", "--ctx", "256", "--no-keep"]
    tried = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if tried.returncode < 0:  # a signal
        raise RefusedError(
            f"Everything is installed, but llama.cpp dies on this processor (signal {-tried.returncode}).",
            "Make the bundle on a machine with a processor like this one, or with a build for any: CMAKE_ARGS=-DGGML_NATIVE=OFF.",
            ENGINE,
        )
    if tried.returncode:
        raise RefusedError(
            "Everything is installed, but the model does not answer.", tried.stderr.decode("utf-8", "replace").strip(), ENGINE
        )


def run(command: list[Any]) -> int:
    """A command whose talk is this one's."""
    return subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, check=False).returncode


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def tell(message: str, hint: str, code: int) -> int:
    say(f"Error: {message}\n  {hint}")
    return code


if __name__ == "__main__":
    sys.exit(main())
