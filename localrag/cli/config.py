"""The command config: show, set and remove the defaults of options."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localrag.cli import options, render
from localrag.cli.terminal import emit, note
from localrag.errors import ConfigError, UsageError
from localrag.files import atomic_write, file_error, locked, make_private_folder
from localrag.kb.names import list_kbs, name_of, shown
from localrag.settings import (
    CONFIG_FILE,
    OPTIONS,
    PROJECT_FILE,
    Settings,
    Value,
    check_option,
    defaults,
    expanded,
    read_defaults,
    shipped_file,
)
from localrag.text.sanitize import safe

if TYPE_CHECKING:
    from localrag.catalog import Catalog

_HEAD = "# Defaults of localrag's options. To change them: localrag config set NAME VALUE\n"
_BUILT_IN = re.compile(r"\[default: (.*)\]$")
_FROM_HELP = {"kb": "none", "ctx": "as the model and the memory allow", "budget": "default", "context-ratio": "the budget's value, 0.5"}
_LOCK_WAIT_S = 10

project_option = click.option("--project", is_flag=True, help=f"Use ./{PROJECT_FILE}, for commands that run in this folder.")


@click.group("config")
def config_command() -> None:
    """Show or set the defaults of options, so that you need not repeat them.

    \b
      localrag config set kb notes
      localrag config set max-tokens 256
      localrag ask "Which soil do roses like?"

    The first of these that sets an option wins: the command line; an environment variable such as LOCALRAG_KB or LOCALRAG_MAX_TOKENS;
    localrag.toml in the current folder; config.toml in localrag's home. Chats that are continued keep their own model and knowledge bases.
    """


@config_command.command("list")
@options.models_file
@options.as_json
def list_command(settings: Settings, as_json: bool) -> None:
    """Show every setting, its value, and where the value comes from."""
    rows = _rows(settings)
    if as_json:
        emit({"settings": rows})
        return
    render.table(("Setting", "Value", "From"), [(row["name"], _text(row), _origin(row)) for row in rows])
    note("An option on the command line wins over all of these. To change one: localrag config set NAME VALUE")


@config_command.command("get")
@click.argument("name")
@options.models_file
@options.as_json
def get_command(name: str, settings: Settings, as_json: bool) -> None:
    """Print the value of the setting NAME, one line for each knowledge base."""
    _check(name)
    row = next(row for row in _rows(settings) if row["name"] == name)
    if as_json:
        emit(row)
    elif (value := row["value"]) is not None:
        for each in value if isinstance(value, list) else [value]:
            click.echo(safe(str(each)))
    else:
        note(f"{name} is not set. Built in: {_text(row)}.")


@config_command.command("set")
@click.argument("name")
@click.argument("values", metavar="VALUE", nargs=-1, required=True)
@project_option
@options.models_file
@options.as_json
def set_command(name: str, values: tuple[str, ...], project: bool, settings: Settings, as_json: bool) -> None:
    """Set the default of the option NAME. Only kb takes several values.

    \b
      localrag config set kb notes
      localrag config set kb notes handbook --project
      localrag config set model qwen3-4b
    """
    _check(name)
    value = _checked(name, values, settings, is_project=project)
    file = _file(settings, is_project=project)
    _change(file, {name: value})
    if as_json:
        emit({"name": name, "value": _shown(name, value), "file": str(file)})
        return
    note(f"Set {name} to {_words(_shown(name, value))} in {safe(str(file))}.")
    if (now := defaults(settings.home)[name]).place != str(file):
        note(f"Here, {safe(now.place)} sets it to {_words(_shown(name, now.value))}, which wins.")


@config_command.command("unset")
@click.argument("names", metavar="NAME", nargs=-1, required=True)
@project_option
@options.models_file
@options.as_json
def unset_command(names: tuple[str, ...], project: bool, settings: Settings, as_json: bool) -> None:
    """Remove the settings NAME…, so that their built-in values or those of another file count."""
    for name in names:
        _check(name)
    file = _file(settings, is_project=project)
    present = [name for name in dict.fromkeys(names) if name in read_defaults(file)]
    if present:
        _change(file, dict.fromkeys(present))
    if as_json:
        emit({"removed": present, "file": str(file)})
        return
    for name in dict.fromkeys(names):
        note(f"Removed {name} from {safe(str(file))}." if name in present else f"{name} is not set in {safe(str(file))}.")


def _check(name: str) -> None:
    """UsageError for an unknown setting."""
    try:
        check_option(name)
    except ConfigError as error:
        raise UsageError(error.message, hint=error.hint, **error.numbers) from None


def rename_in_config(settings: Settings, old: str, new: str) -> Path | None:
    """Rename a knowledge base in the defaults of the home. Return the file if that changed it."""
    file = settings.home / CONFIG_FILE
    kbs = read_defaults(file).get("kb", ())
    if not isinstance(kbs, tuple) or old not in kbs:
        return None
    _change(file, {"kb": tuple(new if each == old else each for each in kbs)})
    return file


# --- values ---


def _rows(settings: Settings) -> list[dict[str, object]]:
    """Return name, value, origin and place of every setting; None stands for a built-in value that depends on the model or the question."""
    values = defaults(settings.home)
    rows: list[dict[str, object]] = []
    for name in OPTIONS:
        if (default := values.get(name)) is not None:
            rows.append({"name": name, "value": _shown(name, default.value), "from": default.origin, "place": default.place})
        elif name == "model":
            rows.append(_model_row(settings))
        else:
            rows.append({"name": name, "value": _built_in(name), "from": "built in", "place": None})
    return rows


def _model_row(settings: Settings) -> dict[str, object]:
    from localrag.catalog.schema import read  # noqa: PLC0415  # weight

    files = settings.layered_models_files()
    model = read(*files).default_model
    place = next((file for file in files if read(*dict.fromkeys((file, shipped_file()))).default_model == model), files[-1])
    return {"name": "model", "value": model, "from": "models.toml", "place": str(place.absolute())}


def _option(name: str) -> click.Option:
    """Return the option of `ask` with this name. It checks the values of a setting."""
    from localrag.cli.ask import ask_command  # noqa: PLC0415  # weight

    return next(each for each in ask_command.params if isinstance(each, click.Option) and f"--{name}" in each.opts)


def _built_in(name: str) -> object:
    value = _option(name).default
    return value if isinstance(value, str | int | float) and not isinstance(value, bool) else [] if name == "kb" else None


def _checked(name: str, values: Sequence[str], settings: Settings, *, is_project: bool) -> Value:
    """Return the value to store. Raises what the option itself would, and ModelNotFoundError or ConfigError for an unknown name."""
    if name == "kb":
        for each in values:
            name_of(each)
            if is_project and "://" in each:
                raise UsageError(
                    f"{PROJECT_FILE} cannot name a knowledge base on a server.", hint="Set it in the home: leave out --project."
                )
            if each == shown(each) and each not in list_kbs(settings.kb_dir) and "://" not in each:
                note(f"There is no knowledge base {each!r} yet. To create it: localrag index FOLDER --kb {each}")
            if "://" in each and each != shown(each):
                note("The password is not stored. Give it as libpq expects it: in PGPASSWORD or in ~/.pgpass.")
        return tuple(map(shown, values))
    if len(values) > 1:
        raise UsageError(f"{name} takes one value, not {len(values)}.", hint="Quote a value that contains spaces.")
    (text,) = values
    option = _option(name)
    value = option.type.convert(text, option, click.get_current_context())
    if name == "model":
        return _model(text, settings, is_project=is_project)
    if name == "budget":
        _catalog(settings).budget(text)
    return value if isinstance(value, int | float) else str(value)


def _model(text: str, settings: Settings, *, is_project: bool) -> str:
    """Check the name or path of a model. A path is stored absolute for the home, so that it counts in every folder."""
    if text == "echo":
        return text
    spec = _catalog(settings).model(text)
    return text if spec.name in _catalog(settings).models or is_project else str(expanded(Path(text)).absolute())


def _catalog(settings: Settings) -> Catalog:
    from localrag.catalog import Catalog  # noqa: PLC0415  # weight

    return Catalog.load(settings)


def _shown(name: str, value: Value) -> object:
    """Return a value for people and scripts, without the password of an address."""
    if name == "kb":
        return [shown(each) for each in (value if isinstance(value, tuple) else (str(value),))]
    return list(value) if isinstance(value, tuple) else value


def _words(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return safe(", ".join(map(str, value)) if isinstance(value, list) else str(value))


def _text(row: Mapping[str, object]) -> str:
    """Return the value of a row as text, or else what the option's help calls its default."""
    name, value = str(row["name"]), row["value"]
    if value not in (None, []):
        return _words(value)
    if name in _FROM_HELP:
        return _FROM_HELP[name]
    match = _BUILT_IN.search(_option(name).help or "")
    return match[1] if match else ""


def _origin(row: Mapping[str, object]) -> str:
    place = row["place"]
    return str(row["from"]) if place is None else f"{row['from']}: {safe(str(place))}"


# --- files ---


def _file(settings: Settings, *, is_project: bool) -> Path:
    return Path(PROJECT_FILE).absolute() if is_project else settings.home / CONFIG_FILE


def _change(file: Path, changes: Mapping[str, Value | None]) -> None:
    """Set values in a file, or remove those that are None. Comments and other lines stay. Raises ConfigError."""
    try:
        if file.name == CONFIG_FILE:
            make_private_folder(file.parent)
            with locked(file.parent / ".config.lock", wait_s=_LOCK_WAIT_S):
                _rewrite(file, changes)
        else:
            _rewrite(file, changes)
    except TimeoutError:
        raise ConfigError(f"{file} is being changed by another process.", hint="Try again.", file=str(file)) from None
    except OSError as error:
        cause = file_error(error, file, hint="Check its permissions.")
        raise ConfigError(f"{file} cannot be written: {cause.reason}.", hint=cause.hint, **cause.numbers) from None


def _rewrite(file: Path, changes: Mapping[str, Value | None]) -> None:
    before = read_defaults(file)
    wanted = {name: value for name, value in {**before, **changes}.items() if value is not None}
    text = ""
    with suppress(FileNotFoundError):
        text = file.read_text(encoding="utf-8")
    edited = _edited(text or _HEAD, changes)
    with atomic_write(file) as out:
        out.write((edited if _parsed(edited) == wanted else _HEAD + "".join(map(_line, wanted, wanted.values()))).encode())


def _edited(text: str, changes: Mapping[str, Value | None]) -> str:
    """Return a file's text with the lines of these settings replaced, removed or added at the end."""
    if not text.endswith("\n"):
        text += "\n"
    for name, value in changes.items():
        line = "" if value is None else _line(name, value)
        text, count = re.subn(rf"^[ \t]*{re.escape(name)}[ \t]*=.*\n", lambda _, line=line: line, text, flags=re.MULTILINE)  # type: ignore[misc]
        text += "" if count else line
    return text


def _parsed(text: str) -> dict[str, Value] | None:
    """Return the settings in a text; None if it is not valid TOML, as when only the first line of a list was replaced."""
    import tomllib  # noqa: PLC0415  # only to write

    try:
        table = tomllib.loads(text)
    except ValueError:
        return None
    return {name: tuple(value) if isinstance(value, list) else (value,) if name == "kb" else value for name, value in table.items()}


def _line(name: str, value: Value) -> str:
    """Return a line of TOML. A JSON string without control characters is a TOML string."""
    return f"{name} = {json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)}\n"
