"""The command completion: print a shell's completion script, and complete names of models, embedders, budgets, councils and indexes.

Importing a command's module takes a third of a second, too long for a key press. To complete a name, a small substitute command with
just that parameter is used instead. Names are read without validating their file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from localrag.errors import LocalragError
from localrag.kb.names import list_kbs
from localrag.settings import OPTIONS, Settings

Complete = Callable[[click.Context, click.Parameter, str], list[str]]
_MAX_BYTES = 1 << 20


def _tables(ctx: click.Context, *keys: str) -> list[str]:
    """Return the table names under these keys in all models.toml files in use, including the one of --models."""
    models_file = ctx.params.get("models_file")
    try:
        files = Settings.from_env(models_file=Path(models_file) if models_file else None).layered_models_files()
    except LocalragError:
        return []
    layers = [_read(file) for file in files]
    return [str(name) for key in keys for tables in layers if isinstance(table := tables.get(key), dict) for name in table]


def _read(file: Path) -> dict[str, Any]:
    """Return the tables of a file; {} if it cannot be read, so that names from other files still complete."""
    try:
        with file.open("rb") as data:
            return tomllib.loads(data.read(_MAX_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}


def _starting(names: Sequence[str], incomplete: str) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete) and name.isprintable()]


def models(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    return _starting([*_tables(ctx, "models"), "echo"], incomplete)


def embedders(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    return _starting(_tables(ctx, "embedders"), incomplete)


def entries(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    return _starting(_tables(ctx, "models", "embedders", "rerankers"), incomplete)


def rerankers(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    return _starting(["llm", *_tables(ctx, "rerankers")], incomplete)


def budgets(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    return _starting(_tables(ctx, "budgets"), incomplete)


def councils(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    return _starting([*_tables(ctx, "councils"), "default"], incomplete)


def kbs(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    try:
        return _starting(list_kbs(Settings.from_env().kb_dir), incomplete)
    except (OSError, LocalragError):
        return []


def settings(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    return _starting(list(OPTIONS), incomplete)


_OPTIONS: dict[str, Complete] = {
    "--kb": kbs,
    "-k": kbs,
    "--model": models,
    "-m": models,
    "--embedder": embedders,
    "--rerank": rerankers,
    "--budget": budgets,
    "--council": councils,
}
_ARGUMENTS: dict[tuple[str, str], Complete] = {
    **{("kb", name): kbs for name in ("show", "verify", "export", "feedback", "remove", "rename")},
    **{("config", name): settings for name in ("get", "set", "unset")},
    **{("models", name): entries for name in ("pull", "verify")},
    **{("models", name): models for name in ("show", "optimize")},
}


def name_completer(args: Sequence[str]) -> click.Command | None:
    """Return a substitute command that completes the name after these words; None if the real command must complete it."""
    if args[-1] in _OPTIONS and (args[0], args[-1]) not in (("report", "--council"), ("search", "-k")):  # a run ID, a number
        parameter: click.Parameter = click.Option([args[-1], "wanted"], multiple=True, shell_complete=_OPTIONS[args[-1]])
    elif tuple(args[:2]) in _ARGUMENTS and not any(word.startswith("-") for word in args[2:]):
        parameter = click.Argument(["wanted"], nargs=-1, shell_complete=_ARGUMENTS[args[0], args[1]])
    else:
        return None
    return click.Command(args[0], params=[parameter, click.Option(["--models", "models_file"])], add_help_option=False)


_SHELLS = ("bash", "zsh", "fish")


@click.command("completion", short_help="Print a shell completion script.")
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print a completion script for SHELL. It completes commands, options and the names of models, knowledge bases and councils.

    \b
      localrag completion bash >> ~/.bashrc
      localrag completion zsh >> ~/.zshrc
      localrag completion fish > ~/.config/fish/completions/localrag.fish
    """
    from click.shell_completion import get_completion_class  # noqa: PLC0415  # only here

    kind = get_completion_class(shell)
    assert kind is not None, "one of click's own"
    script = kind(ctx.find_root().command, {}, "localrag", "_LOCALRAG_COMPLETE")
    click.echo(script.source_template % script.source_vars())  # click's `source` would start bash to check its version
