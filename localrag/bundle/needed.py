"""Which distributions localrag needs here, by the requirements of what is installed and their markers."""

from __future__ import annotations

import json
from collections import deque
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from localrag.errors import BundleError

ROOT = "localrag"
_FOR_DEVELOPERS = frozenset({"bench", "dev", "docs"})
_WAY_OUT = "Mend the installation (pip check), or give ready wheels (--wheelhouse DIR) or none (--no-wheelhouse)."


def installed_extras() -> list[str]:
    """The extras of localrag whose requirements are all installed, but for those that only developers use."""
    root = _installed(ROOT)
    extras = [extra for extra in root.metadata.get_all("Provides-Extra", []) if extra not in _FOR_DEVELOPERS]
    return [extra for extra in extras if all(_is_met(each) for each in _requirements(root, {extra}) if "extra" in str(each.marker))]


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
