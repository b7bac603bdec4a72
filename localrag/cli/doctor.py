"""The command doctor: show what this machine can run, and what localrag stores."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localrag.catalog import Catalog
from localrag.cli import options, render
from localrag.cli.terminal import emit, note
from localrag.errors import EngineError, LocalragError
from localrag.settings import Settings
from localrag.text.tokens import PrefixedEmbedder
from localrag.types import ModelSpec

if TYPE_CHECKING:
    from localrag.engine.memory import MemoryPlan
    from localrag.engine.threads import ThreadGovernor


_BUILD = 'CMAKE_ARGS="{}" pip install --force-reinstall --no-deps --no-binary llama-cpp-python llama-cpp-python'
_GPUS = {
    "0x10de": ("NVIDIA", "-DGGML_CUDA=on"),
    "0x1002": ("AMD", "-DGGML_HIP=on"),
    "0x8086": ("Intel", "-DGGML_VULKAN=on"),
}
"""PCI vendor ID → (vendor, CMake option of llama.cpp for its GPUs)."""
_FEATURES = (
    "AVX",
    "AVX2",
    "AVX_VNNI",
    "AVX512",
    "AVX512_VNNI",
    "AVX512_BF16",
    "AMX_INT8",
    "NEON",
    "SVE",
    "MATMUL_INT8",
    "REPACK",
    "OPENMP",
)


def collect(find: Callable[..., dict[str, object]], *args: object, **kwargs: object) -> dict[str, object]:
    """Return the result of `find`, or {"error": one line} if it fails."""
    try:
        return find(*args, **kwargs)
    except LocalragError as error:
        return {"error": error.message, "hint": error.hint}
    except Exception as error:  # noqa: BLE001  # a doctor reports what is broken, whatever it is
        return {"error": f"{type(error).__name__}: {error}"}


def machine_facts(governor: ThreadGovernor) -> dict[str, object]:
    """Return the processor, cores and memory. `busy_cores` is the load of other processes during the check."""
    import psutil  # noqa: PLC0415  # weight

    from localrag.engine import memory, threads  # noqa: PLC0415  # weight

    num_threads = governor.measure()
    return {
        "cpu": _cpu_name(),
        "physical_cores": psutil.cpu_count(logical=False),
        "allowed_cpus": len(threads.allowed_cpus()),
        "usable_cores": governor.num_cores,
        "busy_cores": round(governor.busy_cores, 2),
        "num_threads": num_threads,
        "memory_bytes": psutil.virtual_memory().total,
        "available_bytes": memory.available_memory(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor() or "unknown")


def llama_facts() -> dict[str, object]:
    """Return llama-cpp-python's version, its CPU features and the GPUs that it finds."""
    from localrag.engine.llama_lib import library  # noqa: PLC0415  # weight
    from localrag.engine.memory import gpu_devices  # noqa: PLC0415  # weight

    lib = library()
    info = lib.llama_print_system_info().decode("utf-8", "replace").strip(" |")
    words = {word.strip(" :").split(" : ")[-1] for word in info.split("|")}
    return {
        "version": importlib.metadata.version("llama-cpp-python"),
        "system_info": info,
        "features": [name for name in _FEATURES if f"{name} = 1" in words],
        "supports_gpu": bool(lib.llama_supports_gpu_offload()),
        "gpu_devices": [device.to_dict() for device in gpu_devices()],
    }


def _gpu_bytes(facts: Mapping[str, object]) -> int:
    """Return the free memory of all GPUs among facts of llama.cpp; 0 if there are none, or if it cannot be loaded."""
    devices = facts.get("gpu_devices")
    return sum(int(device["free_bytes"]) for device in devices) if isinstance(devices, list) else 0


def gpu_hints(root: Path = Path("/")) -> dict[str, object]:
    """Return the vendors of GPUs that the system's files show, each with the command that builds llama-cpp-python for it."""
    commands: dict[str, str] = {}
    if (root / "proc/driver/nvidia/version").exists() or (root / "dev/nvidia0").exists():
        commands["NVIDIA"] = _BUILD.format(_GPUS["0x10de"][1])
    for file in sorted((root / "sys/class/drm").glob("card*/device/vendor")):
        vendor = _GPUS.get(file.read_text(encoding="ascii", errors="replace").strip())
        if vendor is not None:
            commands[vendor[0]] = _BUILD.format(vendor[1])
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        commands["Apple"] = _BUILD.format("-DGGML_METAL=on")
    return dict(commands)


def attention_facts(home: Path) -> dict[str, object]:
    """Return the faster attention kernel and both times in seconds; {} if not measured yet."""
    file = home / "attention.json"
    if not file.exists():
        return {}
    record = json.loads(file.read_text(encoding="utf-8"))
    return {"kernel": "flash" if record["flash_attention"] else "plain", "flash_s": record["flash_s"], "plain_s": record["plain_s"]}


def speed_facts(home: Path) -> dict[str, object]:
    """Return the measured prefill and decode speed of each model file, in tokens per second at the start of a window."""
    from localrag.engine.speed import Speed  # noqa: PLC0415  # weight

    file = home / "speeds.json"
    if not file.exists():
        return {}
    learned: dict[str, object] = {}
    for key, record in json.loads(file.read_text(encoding="utf-8")).items():
        speed = Speed()
        speed.restore(record)
        name = key.partition("; ")[0].rsplit(" ", 3)[0]
        learned[name] = {"prefill_tokens_per_s": round(speed.prefill_tokens_per_s), "decode_tokens_per_s": round(speed.decode_tokens_per_s)}
    return learned


_FACTS = ("speeds.json", "machine.json", "attention.json", "answerability.json", "verified.json", "pulled.json")


def home_facts(settings: Settings) -> dict[str, object]:
    """Return localrag's home and the disk usage of its parts, in bytes."""
    home = settings.home
    if home.exists():
        next(home.iterdir(), None)  # fail once if the home is a file or unreadable, not once for each part
    parts = {"models": settings.models_dir, "kb": settings.kb_dir, "embedders": settings.embedders_dir}
    parts |= {name: home / name for name in ("eval", "prefixes", "journal.sqlite", *_FACTS)}
    sizes = {name: collect(_size, path) for name, path in parts.items()}
    sizes["prefixes"]["max_bytes"] = settings.prefix_bytes
    return {"path": str(home), "exists": home.exists(), "parts": sizes}


def _size(path: Path) -> dict[str, object]:
    """Return the size of a file or of a folder's contents in bytes; 0 if the path does not exist."""
    if path.is_file():
        return {"bytes": path.stat().st_size}

    def raise_it(error: OSError) -> None:
        raise error

    total = 0
    for folder, _, names in os.walk(path, onerror=raise_it if path.exists() else None):
        total += sum((Path(folder) / name).lstat().st_size for name in names)
    return {"bytes": total}


def catalogue_facts(settings: Settings, *, gpu_bytes: int = 0) -> dict[str, object]:
    """Return whether each model, embedder and reranker of models.toml is present and how much memory it needs; and whether two models
    fit at once. The GPUs have `gpu_bytes` of free memory.
    """
    catalog = Catalog.load(settings)
    flash = collect(attention_facts, settings.home).get("kernel") == "flash"
    plans: dict[str, MemoryPlan] = {}
    models = {spec.name: collect(_model_facts, catalog, spec, plans, flash=flash, gpu_bytes=gpu_bytes) for spec in catalog.models.values()}
    return {
        "file": str(catalog.file.absolute()),
        "files": [str(file.absolute()) for file in catalog.files],
        "models": models,
        "two_models": collect(_two_models, plans, catalog.default_model),
        "embedders": {spec.name: collect(_embedder_facts, catalog, spec, settings) for spec in catalog.embedders.values()},
        "rerankers": {spec.name: collect(_reranker_facts, catalog, spec, settings) for spec in catalog.rerankers.values()},
    }


def _two_models(plans: dict[str, MemoryPlan], default: str | None) -> dict[str, object]:
    """Return whether the default model and the largest other present model fit at once with the windows shown; {} for fewer models."""
    from localrag.engine.memory import fit_together  # noqa: PLC0415  # weight

    largest_first = sorted(plans, key=lambda name: -plans[name].weights_bytes)
    names = sorted(largest_first, key=lambda name: name != default)[:2]
    if len(names) < 2:
        return {}
    one, other = pair = [plans[name] for name in names]
    available, on_gpu = min(one.available, other.available), min(one.gpu_available, other.gpu_available)
    return {
        "models": names,
        "together": fit_together(pair, available_bytes=available, gpu_available_bytes=on_gpu),
        "needed_bytes": one.needed + other.needed,
        "available_bytes": available,
        "gpu_bytes": one.gpu_bytes + other.gpu_bytes,
        "gpu_available_bytes": on_gpu,
    }


def _model_facts(catalog: Catalog, spec: ModelSpec, plans: dict[str, MemoryPlan], *, flash: bool, gpu_bytes: int) -> dict[str, object]:
    """Return facts from a model's file and its memory plan. Adds the plan, for the window that fits, to `plans`."""
    from localrag.engine.gguf import read_header  # noqa: PLC0415  # weight
    from localrag.engine.memory import Situation, nearest, plan  # noqa: PLC0415  # weight

    info = read_header(catalog.locate(spec))
    n_ctx = min(spec.n_ctx or info.n_ctx_train, info.n_ctx_train)
    gpu_layers, situation = (info.num_layers + 1 if gpu_bytes else 0), Situation(gpu_available_bytes=gpu_bytes)
    planned = functools.partial(plan, info, flash_attention=flash, gpu_layers=gpu_layers, situation=situation)
    memory_plan = planned(n_ctx)
    fitting = n_ctx if memory_plan.fits else nearest(info, flash_attention=flash, gpu_layers=gpu_layers, situation=situation)
    near = min(n_ctx, fitting)
    plans[spec.name] = memory_plan if near in {0, n_ctx} else planned(near)
    return {
        "size_bytes": info.file_size,
        "quantization": info.quantization,
        "n_ctx_train": info.n_ctx_train,
        "kv_bytes_per_token": info.kv_bytes_per_token,
        "sliding_window": info.sliding_window,
        "prompts_go_on_from": "a checkpoint" if info.state_bytes else "the last border" if info.sliding_window else "any border",
        "n_ctx": n_ctx,
        "nearest_n_ctx": near,
        "plan": memory_plan.to_dict(),
    }


def _embedder_facts(catalog: Catalog, spec: ModelSpec, settings: Settings) -> dict[str, object]:
    """Return an embedder's path and size, and which backend embeds questions."""
    from localrag.engine.query_embedder import OF_GGUF, query_path  # noqa: PLC0415  # weight
    from localrag.session import open_embedder  # noqa: PLC0415  # weight

    path = catalog.locate(spec)
    questions = OF_GGUF
    if not path.is_file():  # opening a file would load it
        embedder = open_embedder(settings, spec.name)
        questions = query_path(embedder.original if isinstance(embedder, PrefixedEmbedder) else embedder, settings)
    return {"path": str(path), "size_bytes": _size(path)["bytes"], "questions": questions}


def _reranker_facts(catalog: Catalog, spec: ModelSpec, settings: Settings) -> dict[str, object]:
    """Return a reranker's path and size, and which backend scores passages."""
    from localrag.engine.rerank import OF_GGUF, scoring_path  # noqa: PLC0415  # weight
    from localrag.kb.embedder import CrossEncoderReranker  # noqa: PLC0415  # weight

    path = catalog.locate(spec)
    scores = OF_GGUF if path.is_file() else scoring_path(CrossEncoderReranker(path, sha256=spec.sha256), settings)
    return {"path": str(path), "size_bytes": _size(path)["bytes"], "scores": scores}


@click.command("doctor")
@options.models_file
@options.as_json
def doctor_command(settings: Settings, as_json: bool) -> None:
    """Show memory, threads, GPUs, llama.cpp's build, and which models fit on this machine. Loads no weights."""
    facts = all_facts(settings)
    if as_json:
        emit(facts)
    else:
        show(facts)
    if "error" in _mapping(facts["llama_cpp"]):
        if not as_json:
            note("llama.cpp cannot be loaded, so no model can run.")
        raise click.exceptions.Exit(EngineError.exit_code)


def all_facts(settings: Settings, llama: Callable[[], dict[str, object]] = llama_facts) -> dict[str, object]:
    """Return what `doctor` knows, by section. `llama` gives the facts of llama.cpp, with the GPUs for which models are planned."""
    from localrag.engine.threads import ThreadGovernor  # noqa: PLC0415  # weight

    governor = ThreadGovernor()  # starts measuring the load of other processes
    found = collect(llama)
    facts: dict[str, object] = {
        "llama_cpp": found,
        "gpus": collect(gpu_hints),
        "attention": collect(attention_facts, settings.home),
        "speeds": collect(speed_facts, settings.home),
        "home": collect(home_facts, settings),
        "catalogue": collect(catalogue_facts, settings, gpu_bytes=_gpu_bytes(found)),
    }
    return {"machine": collect(machine_facts, governor), **facts}


def show(facts: Mapping[str, object]) -> None:
    """Print two tables: the machine and its software, then the models."""
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
    rows += [("models.toml", _unknown(catalogue))] if "error" in catalogue else _file_lines(catalogue["files"])
    rows += [] if "error" in catalogue else _two_model_lines(_mapping(catalogue["two_models"]))
    render.table(("What", "Found"), rows)
    if "error" in catalogue:
        return
    click.echo()
    columns = ("Name", "Size", "Trained", "KV/token", "Window", "Needs", "Free", "State")
    models = [_model_row(name, _mapping(model)) for name, model in _mapping(catalogue["models"]).items()]
    others = [
        _other_row(name, _mapping(entry), thing)
        for thing in ("embedder", "reranker")
        for name, entry in _mapping(catalogue[f"{thing}s"]).items()
    ]
    render.table(columns, [*models, *others], right=columns[1:-1])
    for name, entry in _mapping(catalogue["embedders"]).items():
        if questions := _mapping(entry).get("questions"):
            click.echo(f"\n{name} embeds questions with {questions}")
    for name, entry in _mapping(catalogue["rerankers"]).items():
        if scores := _mapping(entry).get("scores"):
            click.echo(f"\n{name} scores passages with {scores}")


def _machine_lines(facts: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    yield "processor", str(facts["cpu"])
    yield "cores", f"{facts['physical_cores']} physical, {facts['allowed_cpus']} logical allowed, {facts['usable_cores']} used"
    yield "busy now", f"{facts['busy_cores']} cores in use by other programs; localrag uses {facts['num_threads']} threads"
    yield "memory", f"{_size_of(facts['available_bytes'])} free of {_size_of(facts['memory_bytes'])}"


def _llama_lines(facts: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    features = facts["features"]
    yield "llama-cpp-python", f"{facts['version']} ({', '.join(features) if isinstance(features, list) else ''})"
    devices = facts["gpu_devices"]
    if isinstance(devices, list) and devices:
        for device in devices:
            yield "GPU", f"{device['description']}: {_size_of(device['free_bytes'])} free of {_size_of(device['total_bytes'])}"
    else:
        yield "GPU", "none found" if facts["supports_gpu"] else "this build has no GPU support"


def _gpu_lines(facts: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for vendor, command in facts.items():
        yield f"{vendor} GPU found", f"to build for it: {command}"


def _attention_lines(facts: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    if facts:
        yield "attention", f"{facts['kernel']} (flash {facts['flash_s']} s, plain {facts['plain_s']} s)"
    else:
        yield "attention", "not measured yet; the first answer measures it"


def _speed_lines(facts: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name, each in facts.items():
        speed = _mapping(each)
        yield "speed", f"{name}: prefill {speed['prefill_tokens_per_s']} tokens/s, decode {speed['decode_tokens_per_s']} tokens/s"
    if not facts:
        yield "speed", "not measured yet; the first answer measures it"


def _home_lines(facts: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    yield "home", f"{facts['path']}{'' if facts['exists'] else ' (not created yet)'}"
    for name, each in _mapping(facts["parts"]).items():
        size = _mapping(each)
        limit = f", at most {_size_of(size['max_bytes'])}" if "max_bytes" in size else ""
        yield f"  {name}", _unknown(size) if "error" in size else _size_of(size["bytes"]) + limit


def _file_lines(files: object) -> Iterator[tuple[str, str]]:
    """Yield the models.toml files in use, highest priority first."""
    assert isinstance(files, list)
    for index, file in enumerate(files):
        yield ("  over" if index else "models.toml"), str(file)


def _two_model_lines(facts: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    if "error" in facts:
        yield "two models", _unknown(facts)
    elif facts:
        names, how = facts["models"], "fit at once" if facts["together"] else "do not fit at once; they are loaded in turn"
        needs = f"{_size_of(facts['needed_bytes'])} of {_size_of(facts['available_bytes'])} free"
        on_gpu = f"; on the GPU {_size_of(facts['gpu_bytes'])} of {_size_of(facts['gpu_available_bytes'])}" if facts["gpu_bytes"] else ""
        yield "two models", f"{' and '.join(names) if isinstance(names, list) else ''} {how} ({needs}{on_gpu})"


def _model_row(name: str, facts: Mapping[str, object]) -> tuple[str, ...]:
    if "error" in facts:
        return (name, *[""] * 6, _unknown(facts))
    plan = _mapping(facts["plan"])
    state = "fits" if plan["fits"] else "does not fit"
    if not plan["fits"] and facts["nearest_n_ctx"]:
        state += f"; a window of {facts['nearest_n_ctx']} tokens fits"
    if plan["gpu_layers"]:
        state += f"; on the GPU {_size_of(plan['gpu_bytes'])} of {_size_of(plan['gpu_available'])}"
    if facts["sliding_window"]:
        state += f"; attention slides over {facts['sliding_window']} tokens, KV cache kept in full"
    if facts["prompts_go_on_from"] == "the last border":
        state += "; prompts resume only from the last cache breakpoint"
    elif facts["prompts_go_on_from"] == "a checkpoint":
        state += "; recurrent layers, prompts resume at checkpoints"
    numbers = (_size_of(facts["size_bytes"]), str(facts["n_ctx_train"]), _size_of(facts["kv_bytes_per_token"]), str(facts["n_ctx"]))
    return (name, *numbers, _size_of(plan["needed"]), _size_of(plan["available"]), state)


def _other_row(name: str, facts: Mapping[str, object], thing: str) -> tuple[str, ...]:
    if "error" in facts:
        return (name, *[""] * 6, _unknown(facts))
    return (name, _size_of(facts["size_bytes"]), *[""] * 5, f"{thing}, present")


def _unknown(facts: Mapping[str, object]) -> str:
    hint = facts.get("hint")
    return f"{facts['error']}{f' ({hint})' if hint else ''}"


def _size_of(num_bytes: object) -> str:
    return render.size(num_bytes) if isinstance(num_bytes, int) else "unknown"


def _mapping(value: object) -> Mapping[str, object]:
    assert isinstance(value, Mapping)
    return value
