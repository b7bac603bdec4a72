"""What llama.cpp can compute on besides the processor: the GPUs that the installed build knows and finds."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass

from localrag.engine.llama_lib import library

_GPU_TYPES = (1, 2)  # ggml_backend_dev_type: a GPU with memory of its own, and one that shares the machine's


@dataclass(frozen=True, slots=True)
class GpuDevice:
    name: str
    description: str
    free_bytes: int
    total_bytes: int

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def gpu_devices() -> list[GpuDevice]:
    """The GPUs of this build with their memory now; none where it was built for the processor alone. EngineError without llama.cpp."""
    lib = library()
    if not lib.llama_supports_gpu_offload():
        return []
    try:
        ggml = lib._lib  # noqa: SLF001  # llama-cpp-python binds no device function; the handle finds those of the libraries it needs
        count, get, kind = ggml.ggml_backend_dev_count, ggml.ggml_backend_dev_get, ggml.ggml_backend_dev_type
        name, description, memory = ggml.ggml_backend_dev_name, ggml.ggml_backend_dev_description, ggml.ggml_backend_dev_memory
    except AttributeError:  # another system's loader, or a build of other names
        return []
    count.restype, kind.restype, memory.restype = ctypes.c_size_t, ctypes.c_int, None
    get.restype, name.restype, description.restype = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p
    get.argtypes = [ctypes.c_size_t]
    for function in (kind, name, description):
        function.argtypes = [ctypes.c_void_p]
    memory.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)]
    found = []
    for index in range(count()):
        device = get(index)
        if kind(device) in _GPU_TYPES:
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            memory(device, ctypes.byref(free), ctypes.byref(total))
            found.append(GpuDevice(_text(name(device)), _text(description(device)), free.value, total.value))
    return found


def gpu_bytes_free() -> int:
    """Free memory of all GPUs together, between which llama.cpp splits a model."""
    return sum(device.free_bytes for device in gpu_devices())


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8", "replace")
