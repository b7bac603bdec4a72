"""Which distributions localrag needs here, by the requirements of what is installed and their markers."""

from __future__ import annotations

import json
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from localrag.errors import BundleError

ROOT = "localrag"
_FOR_DEVELOPERS = frozenset({"bench", "dev", "docs"})
_WAY_OUT = "Mend the installation (pip check), or give ready wheels (--wheelhouse DIR) or none (--no-wheelhouse)."


def installed_extras() -> list[str]:
    """The extras of localrag whose requirements are all installed, but for those that only developers use."""
    return _met_extras(_installed(ROOT), _is_met)


def offered_extras(wheels: Iterable[Path]) -> list[str]:
    """The same of ready wheels: the extras of the newest localrag among them whose requirements are all among them."""
    offered: dict[str, dict[Version, Path]] = {}
    for wheel in wheels:
        with suppress(InvalidWheelFilename):  # pip passes it over as well
            name, version, *_ = parse_wheel_filename(wheel.name)
            offered.setdefault(name, {})[version] = wheel

    def is_offered(requirement: Requirement) -> bool:
        versions = offered.get(canonicalize_name(requirement.name), {})
        return any(requirement.specifier.contains(version, prereleases=True) for version in versions)

    if ROOT not in offered:
        return []
    with opened_wheel(offered[ROOT][max(offered[ROOT])]) as archive:
        folder = next((name.rpartition("/")[0] for name in archive.namelist() if name.endswith(".dist-info/METADATA")), None)
        return [] if folder is None else _met_extras(metadata.PathDistribution(zipfile.Path(archive, f"{folder}/")), is_offered)


@contextmanager
def opened_wheel(wheel: Path) -> Iterator[zipfile.ZipFile]:
    """What a ready wheel holds. BundleError for one that is damaged."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except zipfile.BadZipFile:
        raise BundleError(f"{wheel} is no wheel, or is damaged.", hint="Take it out of the folder, or fetch it again.") from None


def needed(extras: list[str]) -> list[metadata.Distribution]:
    """localrag and all that it needs with these extras, by name. BundleError where one is not installed, or another version is wanted."""
    found: dict[str, metadata.Distribution] = {ROOT: _installed(ROOT)}
    asked: dict[str, set[str]] = {ROOT: set(extras)}
    queue = deque([ROOT])
    while queue:
        name = queue.popleft()
        for requirement in _requirements(found[name], asked[name]):
            key = canonicalize_name(requirement.name)
            distribution = found.get(key) or _installed(requirement.name, by=name)
            if not _fits(requirement, distribution):
                raise BundleError(f"{name} needs {requirement}, and {distribution.version} is installed.", hint=_WAY_OUT)
            if key not in found or not requirement.extras <= asked[key]:
                found[key] = distribution
                asked.setdefault(key, set()).update(requirement.extras)
                queue.append(key)
    return [found[name] for name in sorted(found)]


def is_editable(distribution: metadata.Distribution) -> bool:
    """Whether what is installed only points to a folder of sources."""
    try:
        url = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return False
    directory = url.get("dir_info") if isinstance(url, dict) else None
    return isinstance(directory, dict) and bool(directory.get("editable"))


def _installed(name: str, *, by: str = "") -> metadata.Distribution:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        needer = f"{by} needs {name}, which" if by else f"{name} runs from a folder and"
        raise BundleError(f"{needer} is not installed, so no wheelhouse can be made.", hint=_WAY_OUT) from None


def _met_extras(root: metadata.Distribution, is_met: Callable[[Requirement], bool]) -> list[str]:
    extras = [extra for extra in root.metadata.get_all("Provides-Extra", []) if extra not in _FOR_DEVELOPERS]
    return [extra for extra in extras if all(is_met(each) for each in _requirements(root, {extra}) if "extra" in str(each.marker))]


def _requirements(distribution: metadata.Distribution, extras: set[str]) -> list[Requirement]:
    """What it needs here, with these of its extras."""
    try:
        every = [Requirement(text) for text in distribution.requires or []]
    except InvalidRequirement as error:
        raise BundleError(f"What {distribution.name} needs cannot be read: {error}.", hint=_WAY_OUT) from None
    wanted = [{"extra": extra} for extra in sorted(extras)] or [{"extra": ""}]
    return [each for each in every if each.marker is None or any(each.marker.evaluate(dict(given)) for given in wanted)]


def _is_met(requirement: Requirement) -> bool:
    try:
        return _fits(requirement, metadata.distribution(requirement.name))
    except metadata.PackageNotFoundError:
        return False


def _fits(requirement: Requirement, distribution: metadata.Distribution) -> bool:
    return requirement.specifier.contains(distribution.version, prereleases=True)
