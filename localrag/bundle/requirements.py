"""The distributions that localrag needs, pinned to the versions installed here, and their wheels: from pip or from a folder.

pip fetches or builds each wheel with its own cache and index settings. `requirements.lock` names every distribution with its version and
the sha256 of its wheel, so the other machine installs exactly these (pip's --require-hashes).
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from localrag.catalog import ByteProgress
from localrag.errors import BundleError

ROOT = "localrag"
_DEVELOPER_EXTRAS = frozenset({"bench", "dev", "docs"})
_CHECKOUT = Path(__file__).parents[2]
"""The folder that holds the running package: a clone's root, or site-packages."""
_REPAIR = "Repair the installation (pip check), or use wheels you have (--wheelhouse DIR) or none (--no-wheelhouse)."
_WHEELHOUSE = "Put a wheel of each package into a folder (pip wheel) and use --wheelhouse DIR, or include none (--no-wheelhouse)."
_INDEX = "Making a bundle needs the package index (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL), or wheels you have: --wheelhouse DIR."
_FETCHING = re.compile(r"(Collecting|Processing) ")
_BUILDING = re.compile(r"\s*Building wheel for (\S+)")
_MAX_REASON_CHARS = 300


@dataclass(frozen=True, slots=True)
class Wheels:
    """Wheel files for a bundle, and the extras of localrag that they satisfy.

    `lock` is the text of requirements.lock. It is empty for ready wheels: pip then chooses among them on the other machine.
    """

    files: tuple[Path, ...] = ()
    extras: tuple[str, ...] = ()
    lock: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @property
    def installed_bytes(self) -> int:
        """Their size when installed."""
        return sum(map(_unpacked_bytes, self.files))


def ready_wheels(folder: Path) -> Wheels:
    """Return the wheels in a folder. Raises BundleError if none of them is localrag's."""
    files = tuple(sorted(file for file in folder.glob("*.whl") if file.is_file()))
    if not any(file.name.startswith(f"{ROOT}-") for file in files):
        raise BundleError(
            f"{folder} holds {len(files)} wheels, but none of localrag.", hint=f"Add it: pip wheel --wheel-dir {folder} PATH-OF-LOCALRAG"
        )
    return Wheels(files, tuple(offered_extras(files)))


@contextmanager
def fetched_wheels(progress: ByteProgress) -> Iterator[Wheels]:
    """Have pip fetch localrag and all it needs, at the installed versions, into a temporary folder. Raises BundleError if pip fails."""
    extras = installed_extras()
    distributions = required(extras)
    with tempfile.TemporaryDirectory(prefix="localrag-wheels-") as folder:
        files = fetch(distributions, Path(folder), progress)
        yield Wheels(files, tuple(extras), lock(distributions, files))


def installed_extras() -> list[str]:
    """Return the extras of localrag whose requirements are all installed, except developer extras."""
    return _satisfied_extras(_installed(ROOT), _is_satisfied)


def offered_extras(wheels: Iterable[Path]) -> list[str]:
    """Return the extras of the newest localrag among the wheels whose requirements are all among the wheels, except developer extras."""
    wheels_of: dict[str, dict[Version, Path]] = {}
    for wheel in wheels:
        with suppress(InvalidWheelFilename):  # pip ignores it too
            name, version, *_ = parse_wheel_filename(wheel.name)
            wheels_of.setdefault(name, {})[version] = wheel

    def is_offered(requirement: Requirement) -> bool:
        versions = wheels_of.get(canonicalize_name(requirement.name), {})
        return any(requirement.specifier.contains(version, prereleases=True) for version in versions)

    if ROOT not in wheels_of:
        return []
    with _distribution_in(wheels_of[ROOT][max(wheels_of[ROOT])]) as root:
        return [] if root is None else _satisfied_extras(root, is_offered)


def required(extras: Sequence[str]) -> list[metadata.Distribution]:
    """Return localrag and all that it needs with these extras, sorted by name.

    Raises BundleError if a requirement is not installed, or is installed in a version that does not satisfy it.
    """
    distributions: dict[str, metadata.Distribution] = {ROOT: _installed(ROOT)}
    extras_of: dict[str, set[str]] = {ROOT: set(extras)}
    queue = deque([ROOT])
    while queue:
        name = queue.popleft()
        for requirement in _requirements(distributions[name], extras_of[name]):
            key = canonicalize_name(requirement.name)
            distribution = distributions.get(key) or _installed(requirement.name, by=name)
            if not _satisfies(distribution, requirement):
                raise BundleError(f"{name} needs {requirement}, but {distribution.version} is installed.", hint=_REPAIR)
            if key not in distributions or not requirement.extras <= extras_of[key]:
                distributions[key] = distribution
                extras_of.setdefault(key, set()).update(requirement.extras)
                queue.append(key)
    return [distributions[name] for name in sorted(distributions)]


def fetch(distributions: Sequence[metadata.Distribution], folder: Path, progress: ByteProgress) -> tuple[Path, ...]:
    """Have pip put a wheel of each distribution, and of nothing else, into `folder`. Raises BundleError with pip's reason if it cannot."""
    if find_spec("pip") is None:
        raise BundleError("pip is not installed here, so it cannot fetch wheels.", hint=f"python -m ensurepip. {_WHEELHOUSE}")
    pins = folder / "requirements.txt"
    pins.write_text("".join(f"{pin(each)}\n" for each in distributions), encoding="utf-8")
    num_fetched, stage = 0, "fetching wheels"

    def show(line: str) -> None:
        nonlocal num_fetched, stage
        if _FETCHING.match(line):
            num_fetched = min(num_fetched + 1, len(distributions))
        elif building := _BUILDING.match(line):
            stage = f"building {building[1]}"
        progress(stage, num_fetched, len(distributions))

    _run_pip("wheel", "--no-deps", "--progress-bar", "off", "--wheel-dir", str(folder), "--requirement", str(pins), on_line=show)
    return tuple(sorted(folder.glob("*.whl")))


def pin(distribution: metadata.Distribution) -> str:
    """Return the requirement by which pip finds this distribution again: NAME==VERSION, or NAME @ URL if it did not come from an index.

    localrag in a clone is built from the clone. Raises BundleError if the file or folder that it was installed from is gone.
    """
    url = _CHECKOUT.as_uri() if distribution.name == ROOT and _is_checkout(_CHECKOUT) else _direct_url(distribution)
    if url is None:
        return f"{distribution.name}=={distribution.version}"
    if url.startswith("file:") and not (path := Path(url2pathname(urlsplit(url).path))).exists():
        raise BundleError(f"{distribution.name} was installed from {path}, which no longer exists.", hint=_WHEELHOUSE)
    return f"{distribution.name} @ {url}"


def lock(distributions: Iterable[metadata.Distribution], wheels: Iterable[Path]) -> str:
    """Return requirements.lock: each distribution with its version and the sha256 of its wheel.

    Raises BundleError if a wheel is missing, has another version than is installed, or is of another program that is called localrag, too.
    """
    wheel_of = {parse_wheel_filename(wheel.name)[0]: wheel for wheel in wheels}
    lines = []
    for distribution in distributions:
        wheel = wheel_of.get(canonicalize_name(distribution.name))
        if wheel is None or parse_wheel_filename(wheel.name)[1] != Version(distribution.version):
            raise BundleError(
                f"{distribution.name}=={distribution.version} is installed, but pip returned {wheel.name if wheel else 'no wheel of it'}.",
                hint=f"Install localrag again, or use wheels you have. {_WHEELHOUSE}",
            )
        if distribution.name == ROOT and pin(distribution) == f"{ROOT}=={distribution.version}":
            _check_same_program(distribution, wheel)
        with wheel.open("rb") as file:
            lines.append(f"{distribution.name}=={distribution.version} --hash=sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}\n")
    return "".join(lines)


def _run_pip(*arguments: str, on_line: Callable[[str], None]) -> None:
    """Run pip and call `on_line` with each line it prints. Raises BundleError with pip's first error if it fails."""
    command = [sys.executable, "-P", "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
    error = line = ""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace"
    ) as pip:
        try:
            for line in pip.stdout or ():
                if line.startswith("ERROR: ") and not error:
                    error = line.removeprefix("ERROR: ")
                on_line(line)
        except BaseException:  # Ctrl-C reaches pip as well: let it remove its temporary files
            with suppress(subprocess.TimeoutExpired):
                pip.wait(timeout=5)
            pip.kill()
            raise
    if pip.returncode:
        reason = " ".join((error or line).split())[:_MAX_REASON_CHARS].rstrip(".") or f"exit code {pip.returncode}"
        raise BundleError(f"pip could not fetch the wheels: {reason}.", hint=_INDEX)


def _is_checkout(folder: Path) -> bool:
    """Whether a folder holds localrag's sources, from which pip can build it."""
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(project.get("project", {}).get("name") == ROOT)


def _direct_url(distribution: metadata.Distribution) -> str | None:
    """Return the URL that a distribution was installed from, as pip reads it; None if it came from an index (PEP 610)."""
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        url: str = origin["url"]
        if "vcs_info" in origin:
            url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
        return f"{url}#subdirectory={origin['subdirectory']}" if "subdirectory" in origin else url
    except (ValueError, KeyError, TypeError):
        return None


def _check_same_program(distribution: metadata.Distribution, wheel: Path) -> None:
    """Refuse a stranger's package: an index that never had this localrag may have another project of that name (dependency confusion)."""
    with _distribution_in(wheel) as candidate:
        if candidate is None or candidate.read_text("METADATA") != distribution.read_text("METADATA"):
            raise BundleError(f"The package index has another program named {ROOT}.", hint=_WHEELHOUSE)


@contextmanager
def _open_wheel(wheel: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except zipfile.BadZipFile:
        raise BundleError(f"{wheel} is not a valid wheel.", hint="Remove it from the folder, or download it again.") from None


@contextmanager
def _distribution_in(wheel: Path) -> Iterator[metadata.Distribution | None]:
    """Open the metadata in a wheel; None if it has none."""
    with _open_wheel(wheel) as archive:
        folder = next((name.rpartition("/")[0] for name in archive.namelist() if name.endswith(".dist-info/METADATA")), None)
        yield None if folder is None else metadata.PathDistribution(zipfile.Path(archive, f"{folder}/"))


def _unpacked_bytes(wheel: Path) -> int:
    with _open_wheel(wheel) as archive:
        return sum(entry.file_size for entry in archive.infolist())


def _installed(name: str, *, by: str = "") -> metadata.Distribution:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        reason = f"{by} needs {name}, which is not installed." if by else f"{name} runs from a folder; it is not installed."
        raise BundleError(reason, hint=_REPAIR) from None


def _satisfied_extras(root: metadata.Distribution, is_satisfied: Callable[[Requirement], bool]) -> list[str]:
    extras = [extra for extra in root.metadata.get_all("Provides-Extra", []) if extra not in _DEVELOPER_EXTRAS]
    return [extra for extra in extras if all(is_satisfied(each) for each in _requirements(root, {extra}) if "extra" in str(each.marker))]


def _requirements(distribution: metadata.Distribution, extras: set[str]) -> list[Requirement]:
    """Return what a distribution needs on this platform with these extras."""
    try:
        requirements = [Requirement(text) for text in distribution.requires or []]
    except InvalidRequirement as error:
        raise BundleError(f"The requirements of {distribution.name} are invalid: {error}.", hint=_REPAIR) from None
    environments = [{"extra": extra} for extra in sorted(extras)] or [{"extra": ""}]
    return [each for each in requirements if each.marker is None or any(each.marker.evaluate(dict(values)) for values in environments)]


def _is_satisfied(requirement: Requirement) -> bool:
    try:
        return _satisfies(metadata.distribution(requirement.name), requirement)
    except metadata.PackageNotFoundError:
        return False


def _satisfies(distribution: metadata.Distribution, requirement: Requirement) -> bool:
    return requirement.specifier.contains(distribution.version, prereleases=True)
