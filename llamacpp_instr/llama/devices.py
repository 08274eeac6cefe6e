"""The devices of the loaded ggml, and which parts of a model go to which device.

Asking for a device that does not exist is a `UsageError` that says what to do: llama.cpp would load
the model on the CPU, or end the process.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.llama import native
from llamacpp_instr.llama.build import BACKENDS
from llamacpp_instr.llama.rpc import add_servers

KINDS = ("cpu", "gpu", "igpu", "accel", "meta")
"""`enum ggml_backend_dev_type`"""

TIMED = {
    "BLAS": "every op",
    "CPU": "every op",
    "CUDA": "every op, by CUPTI; the timing has never run on a GPU",
    "RPC": "every command to the server; its ops are in the server's own log",
    "Vulkan": "every op, by the device's time stamps",
}
"""by backend: what a log records of its work"""
NOT_TIMED = "when it gets work, and the waits for it; not its ops"

_POINTER, _TEXT, _SIZE = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
_GGML: native.Signatures = {
    "ggml_backend_dev_count": (_SIZE, []),
    "ggml_backend_dev_get": (_POINTER, [_SIZE]),
    "ggml_backend_dev_name": (_TEXT, [_POINTER]),
    "ggml_backend_dev_description": (_TEXT, [_POINTER]),
    "ggml_backend_dev_type": (ctypes.c_int, [_POINTER]),
    "ggml_backend_dev_backend_reg": (_POINTER, [_POINTER]),
    "ggml_backend_dev_buffer_type": (_POINTER, [_POINTER]),
    "ggml_backend_dev_memory": (None, [_POINTER, _POINTER, _POINTER]),
    "ggml_backend_reg_name": (_TEXT, [_POINTER]),
    "ggml_backend_buft_name": (_TEXT, [_POINTER]),
}


@dataclass(frozen=True)
class Device:
    """A device as ggml describes it."""

    handle: int
    name: str
    description: str
    kind: str
    """one of KINDS"""
    backend: str
    free_bytes: int
    """of its memory"""
    memory_bytes: int
    buffer_type: int
    buffer: str
    """the name of its buffers"""

    @property
    def takes_layers(self) -> bool:
        return self.kind in ("gpu", "igpu")

    def as_dict(self) -> dict[str, Any]:
        """What `instr doctor` says about it."""
        timed = TIMED.get(self.backend, NOT_TIMED)
        fields = ("name", "description", "kind", "backend", "free_bytes", "memory_bytes")
        return {**{name: getattr(self, name) for name in fields}, "timed": timed}


def devices() -> list[Device]:
    """The devices of this process, in ggml's order. Raises `NativeError` without the library."""
    ggml = native.declare(_GGML, native.import_llama_cpp().llama_cpp._lib)
    found = []
    for number in range(ggml.ggml_backend_dev_count()):
        handle = ggml.ggml_backend_dev_get(number)
        backend = ggml.ggml_backend_dev_backend_reg(handle)
        buffer_type = ggml.ggml_backend_dev_buffer_type(handle)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        ggml.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
        found.append(
            Device(
                handle=handle,
                name=ggml.ggml_backend_dev_name(handle).decode(errors="replace"),
                description=ggml.ggml_backend_dev_description(handle).decode(errors="replace"),
                kind=KINDS[ggml.ggml_backend_dev_type(handle)],
                backend=ggml.ggml_backend_reg_name(backend).decode(),
                free_bytes=free.value,
                memory_bytes=total.value,
                buffer_type=buffer_type,
                buffer=ggml.ggml_backend_buft_name(buffer_type).decode(),
            )
        )
    return found


def device_named(name: str) -> Device:
    """A device that takes layers. Raises `UsageError` if none has this name."""
    gpus = {of.name: of for of in devices() if of.takes_layers}
    if name not in gpus:
        raise UsageError(f"--device {name}: {_no_device(name, list(gpus))}")
    return gpus[name]


class _Override(ctypes.Structure):
    """`struct llama_model_tensor_buft_override`: include/llama.h."""

    _fields_ = (("pattern", _TEXT), ("buft", _POINTER))


@dataclass(frozen=True)
class Placement:
    """What goes to which device. The default is llama.cpp's: all layers, all devices."""

    gpu_layers: int | None = None
    """how many of the last layers, counting the output as one more; any larger number means all"""
    device: Sequence[str] = ()
    """names; `none` alone means no device at all"""
    tensor_split: Sequence[float] = ()
    """shares of the devices"""
    override_tensor: Sequence[str] = ()
    """PATTERN=BUFFER: tensors whose names match the regular expression"""
    rpc: Sequence[str] = ()
    """HOST:PORT of RPC servers, whose devices are added"""

    def check(self) -> None:
        """Raise `UsageError` for devices that this process does not have."""
        if self == ANYWHERE:
            return
        add_servers(self.rpc)
        there = devices()
        gpus = [of.name for of in there if of.takes_layers]
        for name in self._names():
            device_named(name)
        if self.gpu_layers and not gpus:
            raise UsageError(f"--gpu-layers {self.gpu_layers}: {_no_device('', gpus)}")
        used = [] if "none" in self.device else self._names() or gpus
        if self.tensor_split and len(self.tensor_split) != len(used):
            raise UsageError(
                f"--tensor-split has {len(self.tensor_split)} shares; the devices are: "
                f"{', '.join(used) or 'none'}"
            )
        self._overrides(there)

    def settings(self) -> dict[str, object]:
        """Fields of `llama_model_params`. What they point to must live as long as the model."""
        if self == ANYWHERE:
            return {}
        add_servers(self.rpc)
        there = devices()
        found: dict[str, object] = {}
        if self.gpu_layers is not None:
            found["n_gpu_layers"] = self.gpu_layers
        if self.device:
            handles = [of.handle for name in self._names() for of in there if of.name == name]
            ended = (_POINTER * (len(handles) + 1))(*handles)
            found["devices"] = ctypes.cast(ended, _POINTER)
        if self.tensor_split:
            most = int(native.import_llama_cpp().llama_cpp.llama_max_devices())
            found["tensor_split"] = (ctypes.c_float * most)(*self.tensor_split)
        if self.override_tensor:
            pairs = self._overrides(there)
            overrides = [_Override(pattern.encode(), of) for pattern, of in pairs]
            all_of_them = (_Override * (len(pairs) + 1))(*overrides)
            found["tensor_buft_overrides"] = ctypes.cast(all_of_them, _POINTER)
        return found

    def _names(self) -> list[str]:
        return [name for name in self.device if name != "none"]

    def _overrides(self, there: Sequence[Device]) -> list[tuple[str, int]]:
        """The patterns, and the types of their buffers."""
        buffers = {of.buffer: of.buffer_type for of in there}
        found = []
        for text in self.override_tensor:
            pattern, equal, buffer = text.rpartition("=")
            if not equal or not pattern:
                raise UsageError(f"--override-tensor {text!r} is not PATTERN=BUFFER")
            if buffer not in buffers:
                raise UsageError(
                    f"--override-tensor {text!r}: there is no buffer {buffer!r}, only "
                    f"{', '.join(buffers)}"
                )
            try:
                re.compile(pattern)
            except re.error as error:
                raise UsageError(f"--override-tensor {text!r}: {error}") from None
            found.append((pattern, buffers[buffer]))
        return found


ANYWHERE = Placement()
"""llama.cpp's own choice"""
ON_CPU = Placement(device=("none",))


def _no_device(name: str, gpus: Sequence[str]) -> str:
    """Why a device does not exist, and what to do."""
    backend = re.sub(r"\d+$", "", name).lower()
    is_built = any(of.lower().startswith(backend) for of in gpus)
    if backend == "rpc" and not is_built:
        return "there is no such device; --rpc HOST:PORT names its server"
    if gpus and (is_built or backend not in BACKENDS):
        return f"there is no such device, only {', '.join(gpus)}; see `instr doctor`"
    if backend in (built := _built_backends()):
        return f"{backend} is built and finds no such device here; see `instr doctor`"
    if not backend and built:
        return f"{' and '.join(built)} finds no device here; see `instr doctor`"
    named = [backend] if backend in ("vulkan", "cuda") else ["vulkan", "cuda"]
    builds = " or ".join(f"`instr build --backend {of}`" for of in named)
    return f"there is no such device; run {builds}, and see `instr doctor`"


def _built_backends() -> list[str]:
    """The BACKENDS that take layers and whose library this process has."""
    beside = Path(native.import_llama_cpp().llama_cpp._lib._name).parent.glob("libggml-*.*")
    paths = [*beside, Path(os.environ.get("GGML_BACKEND_PATH", ""))]
    found = {path.name.removeprefix("libggml-").partition(".")[0] for path in paths}
    return sorted(found & BACKENDS.keys() - {"blas", "rpc"})
