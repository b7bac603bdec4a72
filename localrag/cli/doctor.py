"""doctor: what this machine can run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import click

from localrag.cli import display, findings, options
from localrag.cli.text import emit, note
from localrag.errors import EngineError
from localrag.settings import Settings


@click.command("doctor")
@options.models_file
@options.as_json
def doctor_command(settings: Settings, as_json: bool) -> None:
    """Say what this machine can run: memory, threads, GPU, llama.cpp's build, models and whether they fit. No weights are loaded."""
    from localrag.engine.threads import ThreadGovernor  # noqa: PLC0415  # weight

    governor = ThreadGovernor()  # what others do meanwhile
    llama = findings.told(findings.llama_facts)
    facts: dict[str, object] = {
        "llama_cpp": llama,
        "gpus": findings.told(findings.gpu_hints),
        "attention": findings.told(findings.attention_facts, settings.home),
        "speeds": findings.told(findings.speed_facts, settings.home),
        "home": findings.told(findings.home_facts, settings),
        "catalogue": findings.told(findings.catalogue_facts, settings, gpu="error" not in llama and bool(llama["gpu_devices"])),
    }
    facts = {"machine": findings.told(findings.machine_facts, governor), **facts}
    if as_json:
        emit(facts)
    else:
        _show(facts)
    if "error" in llama:
        if not as_json:
            note("llama.cpp cannot be loaded here: no model can run until it is.")
        raise click.exceptions.Exit(EngineError.exit_code)


def _show(facts: Mapping[str, object]) -> None:
    """Two tables: the machine and what is installed, then the catalogue."""
    sections = {name: _mapping(value) for name, value in facts.items()}
    rows: list[tuple[str, str]] = []
    for name, lines in (
        ("machine", _machine_lines),
        ("llama_cpp", _llama_lines),
        ("gpus", _gpu_lines),
        ("attention", _attention_lines),
        ("speeds", _speed_lines),
        ("home", _home_lines),
    ):
        title = name.replace("_", ".")
        rows += [(title, _unknown(sections[name]))] if "error" in sections[name] else lines(sections[name])
    catalogue = sections["catalogue"]
    rows.append(("models.toml", _unknown(catalogue) if "error" in catalogue else str(catalogue["file"])))
    rows += [] if "error" in catalogue else _two_model_lines(_mapping(catalogue["two_models"]))
    display.table(("What", "Found"), rows)
    if "error" in catalogue:
        return
    click.echo()
    columns = ("Name", "Size", "Trained", "KV/token", "Window", "Needs", "Free", "State")
    models = [_model_row(name, _mapping(model)) for name, model in _mapping(catalogue["models"]).items()]
    others = [
        _other_row(name, _mapping(found), thing)
        for thing in ("embedder", "reranker")
        for name, found in _mapping(catalogue[f"{thing}s"]).items()
    ]
    display.table(columns, [*models, *others], right=columns[1:-1])
    for name, found in _mapping(catalogue["embedders"]).items():
        if questions := _mapping(found).get("questions"):
            click.echo(f"\n{name} embeds questions by {questions}")


def _machine_lines(found: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    yield "processor", str(found["cpu"])
    yield "cores", f"{found['physical_cores']} physical, {found['allowed_cpus']} logical allowed, {found['usable_cores']} used"
    yield "busy now", f"{found['busy_cores']} cores by other programs: {found['num_threads']} threads"
    yield "memory", f"{_size_of(found['available_bytes'])} free of {_size_of(found['memory_bytes'])}"


def _llama_lines(found: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    features = found["features"]
    yield "llama-cpp-python", f"{found['version']} ({', '.join(features) if isinstance(features, list) else ''})"
    devices = found["gpu_devices"]
    if isinstance(devices, list) and devices:
        for device in devices:
            yield "GPU", f"{device['description']}: {_size_of(device['free_bytes'])} free of {_size_of(device['total_bytes'])}"
    else:
        yield "GPU", "none is found by this build" if found["supports_gpu"] else "this build has no GPU support"


def _gpu_lines(found: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for vendor, command in found.items():
        yield f"{vendor} GPU here", f"a build for it: {command}"


def _attention_lines(found: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    if found:
        yield "attention", f"{found['kernel']} (flash {found['flash_s']} s, plain {found['plain_s']} s)"
    else:
        yield "attention", "not measured yet: the first answer does it"


def _speed_lines(found: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name, each in found.items():
        speed = _mapping(each)
        yield "speed", f"{name}: {speed['prefill_tokens_per_s']} tokens/s in, {speed['decode_tokens_per_s']} out"
    if not found:
        yield "speed", "not measured yet: the first answer does it"


def _home_lines(found: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    yield "home", f"{found['path']}{'' if found['exists'] else ' (not there yet)'}"
    for name, each in _mapping(found["parts"]).items():
        size = _mapping(each)
        limit = f", at most {_size_of(size['max_bytes'])}" if "max_bytes" in size else ""
        yield f"  {name}", _unknown(size) if "error" in size else _size_of(size["bytes"]) + limit


def _two_model_lines(found: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    if "error" in found:
        yield "two models", _unknown(found)
    elif found:
        names, how = found["models"], "fit at once" if found["together"] else "take turns, and each turn loads one"
        needs = f"{_size_of(found['needed_bytes'])} of {_size_of(found['available_bytes'])} free"
        on_gpu = f"; on the GPU {_size_of(found['gpu_bytes'])} of {_size_of(found['gpu_available_bytes'])}" if found["gpu_bytes"] else ""
        yield "two models", f"{' and '.join(names) if isinstance(names, list) else ''} {how} ({needs}{on_gpu})"


def _model_row(name: str, found: Mapping[str, object]) -> tuple[str, ...]:
    if "error" in found:
        return (name, *[""] * 6, _unknown(found))
    plan = _mapping(found["plan"])
    state = "fits" if plan["fits"] else "does not fit"
    if not plan["fits"] and found["nearest_n_ctx"]:
        state += f"; a window of {found['nearest_n_ctx']} tokens does"
    if found["sliding_window"]:
        state += f"; layers slide over {found['sliding_window']} tokens, kept in full"
    if found["prompts_go_on_from"] != "any border":
        state += "; a prompt goes on from another's last border only"
    numbers = (_size_of(found["size_bytes"]), str(found["n_ctx_train"]), _size_of(found["kv_bytes_per_token"]), str(found["n_ctx"]))
    return (name, *numbers, _size_of(plan["needed"]), _size_of(plan["available"]), state)


def _other_row(name: str, found: Mapping[str, object], thing: str) -> tuple[str, ...]:
    if "error" in found:
        return (name, *[""] * 6, _unknown(found))
    return (name, _size_of(found["size_bytes"]), *[""] * 5, f"{thing}, here")


def _unknown(found: Mapping[str, object]) -> str:
    hint = found.get("hint")
    return f"{found['error']}{f' ({hint})' if hint else ''}"


def _size_of(num_bytes: object) -> str:
    return display.size(num_bytes) if isinstance(num_bytes, int) else "unknown"


def _mapping(value: object) -> Mapping[str, object]:
    assert isinstance(value, Mapping)
    return value
