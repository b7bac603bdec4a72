"""A network namespace without interfaces, for tests of what has to work without a network."""

import shutil
import subprocess

import pytest

_COMMAND = ["unshare", "--map-root-user", "--net"]


def without_network():
    """What runs the command behind it where there is no network. Skips where this system does not let a person have that."""
    if shutil.which(_COMMAND[0]) is None:
        pytest.skip("there is no unshare here")
    tried = subprocess.run([*_COMMAND, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no network namespace is to be had here: {tried.stderr.strip()[:200]}")
    return _COMMAND
