"""CUDA's runtime, driver and runtime compiler, as far as copies need them, called through ctypes.

Through ctypes and not through cuda-bindings: an engine's torch has brought these libraries already
and no package more is needed, the batched copy takes arrays of numpy as they are (the binding takes
a Python list of each), and calls release the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_void_p
from pathlib import Path
from typing import Any

from objectcache.gpu.device import DeviceFailed
from objectcache_schemas.errors import Unavailable

HOST_REGISTER_PORTABLE = 1
HOST_REGISTER_MAPPED = 2
STREAM_NON_BLOCKING = 1
EVENT_BLOCKING_SYNC = 1
EVENT_DISABLE_TIMING = 2
COPY_HOST_TO_DEVICE = 1
COPY_DEVICE_TO_HOST = 2
WAIT_GREATER_OR_EQUAL = 0
BATCH_SOURCE_IN_STREAM_ORDER = 1
BATCH_SOURCE_IN_ANY_ORDER = 3
BATCH_BESIDE_COMPUTING = 1  # cudaMemcpyFlagPreferOverlapWithCompute
KERNELS_USE_HOST_ADDRESSES = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem
_PEER_ALREADY_ENABLED = 704
_PCI_ADDRESS_BYTES = 32
_COMPUTE_CAPABILITY_MAJOR = 75
_COMPUTE_CAPABILITY_MINOR = 76
_BATCHED_SINCE = 12080
_BATCHED_WITHOUT_INDEX_SINCE = 13000  # of the piece that failed

_NAME_BYTES = 256

_POINTERS = POINTER(c_void_p)
# name: argument types; all return an int
_RUNTIME: dict[str, list[Any]] = {
    "cudaRuntimeGetVersion": [POINTER(c_int)],
    "cudaGetDeviceCount": [POINTER(c_int)],
    "cudaDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cudaDeviceGetPCIBusId": [c_char_p, c_int, c_int],
    "cudaGetDevice": [POINTER(c_int)],
    "cudaSetDevice": [c_int],
    "cudaFree": [c_void_p],
    "cudaMalloc": [_POINTERS, c_size_t],
    "cudaHostAlloc": [_POINTERS, c_size_t, c_uint],
    "cudaFreeHost": [c_void_p],
    "cudaHostRegister": [c_void_p, c_size_t, c_uint],
    "cudaHostUnregister": [c_void_p],
    "cudaMemcpy": [c_void_p, c_void_p, c_size_t, c_int],
    "cudaMemcpyAsync": [c_void_p, c_void_p, c_size_t, c_int, c_void_p],
    "cudaMemcpy2DAsync": [
        *(c_void_p, c_size_t, c_void_p, c_size_t, c_size_t, c_size_t, c_int, c_void_p)
    ],
    "cudaDeviceCanAccessPeer": [POINTER(c_int), c_int, c_int],
    "cudaDeviceEnablePeerAccess": [c_int, c_uint],
    "cudaMemcpyPeerAsync": [c_void_p, c_int, c_void_p, c_int, c_size_t, c_void_p],
    "cudaGetLastError": [],
    "cudaStreamCreateWithFlags": [_POINTERS, c_uint],
    "cudaStreamDestroy": [c_void_p],
    "cudaStreamSynchronize": [c_void_p],
    "cudaStreamWaitEvent": [c_void_p, c_void_p, c_uint],
    "cudaEventCreateWithFlags": [_POINTERS, c_uint],
    "cudaEventRecord": [c_void_p, c_void_p],
    "cudaEventSynchronize": [c_void_p],
    "cudaEventDestroy": [c_void_p],
}
_DRIVER: dict[str, list[Any]] = {
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetName": [c_char_p, c_int, c_int],
    "cuModuleLoadData": [_POINTERS, c_char_p],
    "cuModuleGetFunction": [_POINTERS, c_void_p, c_char_p],
    "cuLaunchKernel": [c_void_p, *([c_uint] * 7), c_void_p, _POINTERS, _POINTERS],
    "cuStreamWaitValue32_v2": [c_void_p, c_void_p, c_uint32, c_uint],
    "cuStreamWriteValue32_v2": [c_void_p, c_void_p, c_uint32, c_uint],
}
_COMPILER: dict[str, list[Any]] = {
    "nvrtcCreateProgram": [_POINTERS, c_char_p, c_char_p, c_int, _POINTERS, _POINTERS],
    "nvrtcCompileProgram": [c_void_p, c_int, POINTER(c_char_p)],
    "nvrtcGetCUBINSize": [c_void_p, POINTER(c_size_t)],
    "nvrtcGetCUBIN": [c_void_p, c_char_p],
    "nvrtcDestroyProgram": [_POINTERS],
}


class _MemoryLocation(Structure):
    _fields_ = (("kind", c_int), ("number", c_int))


class _BatchAttributes(Structure):
    _fields_ = (
        ("source_order", c_int),
        ("source_hint", _MemoryLocation),
        ("target_hint", _MemoryLocation),
        ("flags", c_uint),
    )


class CudaLibrary:
    """The runtime of the newest CUDA that is installed, and the driver. Raises `Unavailable`."""

    def __init__(self) -> None:
        self._runtime = _Library("cudart", ("13", "12"), _RUNTIME)
        self._driver = _Library("cuda", ("1",), _DRIVER)
        version = c_int()
        self.call("cudaRuntimeGetVersion", byref(version))
        self.version = version.value
        self.copies_batches = self.version >= _BATCHED_SINCE
        if self.copies_batches:
            self._runtime.declare("cudaMemcpyBatchAsync", self._batch_arguments())

    def call(self, name: str, *arguments: Any) -> None:
        """Call the runtime."""
        if code := self._runtime.functions[name](*arguments):
            raise DeviceFailed(f"{name}: CUDA error {code}")

    def drive(self, name: str, *arguments: Any) -> None:
        """Call the driver."""
        if code := self._driver.functions[name](*arguments):
            raise DeviceFailed(f"{name}: CUDA driver error {code}")

    def device_count(self) -> int:
        """Devices that there are."""
        count = c_int()
        self.call("cudaGetDeviceCount", byref(count))
        return count.value

    def pci_address(self, device: int) -> str:
        """Of a device: "0000:1B:00.0"."""
        address = ctypes.create_string_buffer(_PCI_ADDRESS_BYTES)
        self.call("cudaDeviceGetPCIBusId", address, len(address), device)
        return address.value.decode()

    def name(self, device: int) -> str:
        """Of what a device is: "NVIDIA H100 80GB HBM3". The device has a context."""
        handle, name = c_int(), ctypes.create_string_buffer(_NAME_BYTES)
        self.drive("cuDeviceGet", byref(handle), device)
        self.drive("cuDeviceGetName", name, len(name), handle)
        return name.value.decode(errors="replace")

    def current_device(self) -> int:
        """The calling thread's."""
        number = c_int()
        self.call("cudaGetDevice", byref(number))
        return number.value

    def reach_peer(self, device: int, peer: int) -> None:
        """Let a device, which is the current one, reach another's memory over NVLink or PCIe. A
        device reaches itself. Raises `Unavailable` where the two are no peers.
        """
        if device == peer:
            return
        can = c_int()
        self.call("cudaDeviceCanAccessPeer", byref(can), device, peer)
        if not can.value:
            raise Unavailable(f"CUDA device {device} cannot reach device {peer} as a peer")
        code = self._runtime.functions["cudaDeviceEnablePeerAccess"](peer, 0)
        if code == _PEER_ALREADY_ENABLED:
            self._runtime.functions["cudaGetLastError"]()  # which the next launch would report
        elif code:
            raise Unavailable(f"cudaDeviceEnablePeerAccess: CUDA error {code}")

    def created(self, name: str, *arguments: Any) -> int:
        """The handle or address that a call of the runtime makes."""
        made = c_void_p()
        self.call(name, byref(made), *arguments)
        return made.value or 0

    def copy_batch(
        self, targets: Any, sources: Any, sizes: Any, source_order: int, stream: int
    ) -> None:
        """Copy many runs of bytes by one call: uint64[n] each."""
        attributes = _BatchAttributes(source_order, flags=BATCH_BESIDE_COMPUTING)
        begins_at = c_size_t(0)
        failed = [c_size_t()] if self.version < _BATCHED_WITHOUT_INDEX_SINCE else []
        self.call(
            "cudaMemcpyBatchAsync",
            *(column.ctypes.data for column in (targets, sources, sizes)),
            len(sizes),
            byref(attributes),
            byref(begins_at),
            1,
            *(byref(number) for number in failed),
            stream,
        )

    def _batch_arguments(self) -> list[Any]:
        lists, attributes = [c_void_p, c_void_p, c_void_p, c_size_t], [c_void_p, c_void_p, c_size_t]
        failed = [c_void_p] if self.version < _BATCHED_WITHOUT_INDEX_SINCE else []
        return [*lists, *attributes, *failed, c_void_p]

    def kernel(self, source: str, name: str, device: int) -> int:
        """Compile a kernel for a device, which is the current one, and load it."""
        binary = compiled(source, self._architecture(device))
        module, function = c_void_p(), c_void_p()
        self.drive("cuModuleLoadData", byref(module), binary)
        self.drive("cuModuleGetFunction", byref(function), module, name.encode())
        return function.value or 0

    def attribute(self, attribute: int, device: int) -> int:
        """A number that says what a device can do."""
        number = c_int()
        self.call("cudaDeviceGetAttribute", byref(number), attribute, device)
        return number.value

    def _architecture(self, device: int) -> str:
        major = self.attribute(_COMPUTE_CAPABILITY_MAJOR, device)
        return f"sm_{major}{self.attribute(_COMPUTE_CAPABILITY_MINOR, device)}"


def compiled(source: str, architecture: str) -> bytes:
    """The machine code of CUDA C++, by NVRTC. Raises `Unavailable` where there is none."""
    compiler = _Library("nvrtc", ("13", "12"), _COMPILER).functions

    def call(name: str, *arguments: Any) -> None:
        if code := compiler[name](*arguments):
            raise Unavailable(f"{name}: NVRTC error {code}")

    program, length = c_void_p(), c_size_t()
    call("nvrtcCreateProgram", byref(program), source.encode(), b"copy.cu", 0, None, None)
    try:
        options = (c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
        call("nvrtcCompileProgram", program, len(options), options)
        call("nvrtcGetCUBINSize", program, byref(length))
        binary = ctypes.create_string_buffer(length.value)
        call("nvrtcGetCUBIN", program, binary)
    finally:
        compiler["nvrtcDestroyProgram"](byref(program))
    return binary.raw


class _Library:
    """A shared library: the one that the process has loaded, or that a package or the system has.

    Raises `Unavailable` where there is none.
    """

    def __init__(self, name: str, versions: tuple[str, ...], functions: dict[str, Any]) -> None:
        self._library = _loaded(name, versions)
        self.functions: dict[str, Any] = {}
        for function, arguments in functions.items():
            self.declare(function, arguments)

    def declare(self, function: str, arguments: list[Any]) -> None:
        try:
            found = self._library[function]
        except AttributeError as error:
            raise Unavailable(f"this CUDA has no {function}") from error
        found.argtypes, found.restype = arguments, c_int
        self.functions[function] = found


def _loaded(name: str, versions: tuple[str, ...]) -> ctypes.CDLL:
    for version in versions:
        file = f"lib{name}.so.{version}"
        for place in [file, *_in_packages(file)]:
            try:
                return ctypes.CDLL(place)
            except OSError:
                continue
    raise Unavailable(f"no lib{name}.so of CUDA {' or '.join(versions)} on this machine")


def _in_packages(file: str) -> list[str]:
    """Where NVIDIA's packages have it, as torch brings them."""
    found = importlib.util.find_spec("nvidia")
    places = found.submodule_search_locations if found is not None else None
    return [str(path) for place in places or [] for path in Path(place).glob(f"*/lib/{file}")]
