"""Waiting for files to change. The only file that imports watchfiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from localrag.errors import KnowledgeBaseError

QUIET_MS = 600
"""Changes that follow each other within this time are one."""


def changes(paths: Sequence[Path], *, but: Path) -> Iterator[int]:
    """The number of changed files below `paths`, whenever some changed; what lies below `but` does not count. KeyboardInterrupt ends it.

    It first gives 0, or what has changed by then, once it listens: what changed before that was not heard.
    """
    from watchfiles import watch  # noqa: PLC0415  # an extension module, wanted only here

    own, wanted = but.resolve(), [path.resolve() for path in paths]
    only_files = not any(path.is_dir() for path in wanted)
    # An editor saves by putting another file in place, which a watch of the old one does not hear of: its folder does. Beside a folder,
    # which is watched with all below it, that costs watching all below that one too.
    watched = {path if path.is_dir() else path.parent for path in wanted}

    def counts(_change: object, name: str) -> bool:
        path = Path(name)
        return not path.is_relative_to(own) and any(path.is_relative_to(each) for each in wanted)

    heard = watch(
        *sorted(watched),
        watch_filter=counts,
        step=QUIET_MS,
        debounce=10 * QUIET_MS,
        rust_timeout=QUIET_MS,
        yield_on_timeout=True,
        recursive=not only_files,
        ignore_permission_denied=True,
    )
    listens = False
    while True:
        try:
            found = next(heard)
        except (RuntimeError, OSError) as error:  # the system has no more room for watches
            raise KnowledgeBaseError(
                f"Changes cannot be watched for: {error}.",
                hint="Raise fs.inotify.max_user_watches and max_user_instances, or leave --watch out.",
            ) from error
        if found or not listens:
            listens = True
            yield len(found)
