"""The three global generators on the CPU, torch's, Python's and NumPy's, read cheaply.

Reading their state by public calls takes long beside a small region: 12 microseconds for Python's, 43 for NumPy's, and
four calls with copies of 5 KB for torch's. So their state words are compared in place with the last copy taken, those
of all three at once; a region that draws from none copies nothing. Where the layout of that memory is not what a probe
expects, the slow public calls are used.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol

import torch

_NUM_WORDS = 624  # of a Mersenne twister
_NUM_MARK_BYTES = 32  # of those, looked at to see whether a generator has moved
_cpu_generator = torch.default_generator


class _GlobalGenerator(Protocol):
    """A library's global generator on the CPU: `peek` is cheap, and equal for two equal states."""

    def peek(self) -> Any: ...
    def restore(self, state: Any) -> None: ...


class _NoGenerator:
    """Stands for the generator of a library that is not installed."""

    mark = gauss = b""
    bit_generator = _bit_generator = None

    @property
    def state(self) -> _NoGenerator:
        return self

    def peek(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        assert state is None, "there is nothing to restore"


class _PythonBySlowCalls:
    """Python's `random`, by its public functions."""

    def peek(self) -> Any:
        return random.getstate()

    def restore(self, state: Any) -> None:
        random.setstate(state)


class _PythonByMemory:
    """Python's `random`, by comparing the words of its C object with the last copy."""

    def __init__(self, instance: random.Random) -> None:
        words = (ctypes.c_ubyte * (4 + 4 * _NUM_WORDS)).from_address(id(instance) + object.__basicsize__)
        self.instance = instance
        self._live = memoryview(words).cast("B")
        # A draw moves the index, which comes first; a new batch of words changes the first of them.
        self.mark = self._live[:_NUM_MARK_BYTES]
        self._last = b""

    def peek(self) -> tuple[bytes, float | None]:
        last = self._last
        if self.mark.tobytes() != last[:_NUM_MARK_BYTES]:  # one copy for all regions between two draws
            last = self._last = self._live.tobytes()
        return last, self.instance.gauss_next  # type: ignore[attr-defined]

    def restore(self, state: tuple[bytes, float | None]) -> None:
        words = memoryview(state[0]).cast("I").tolist()
        self.instance.setstate((random.Random.VERSION, (*words[1:], words[0]), state[1]))


def _python_generator() -> _GlobalGenerator:
    """Return the quick reader if this interpreter lays its generator out as expected."""
    instance = random._inst
    if sys.implementation.name == "cpython" and _python_layout_is_known():
        return _PythonByMemory(instance)
    return _PythonBySlowCalls()


def _python_layout_is_known() -> bool:
    probe = random.Random(20240607)
    probe.random()
    if random.Random.__basicsize__ < object.__basicsize__ + 4 + 4 * _NUM_WORDS:
        return False
    words = memoryview(_PythonByMemory(probe)._live.tobytes()).cast("I").tolist()
    return bool((*words[1:], words[0]) == probe.getstate()[1])


class _NumpyBySlowCalls:
    """NumPy's global generator, by its public functions."""

    def peek(self) -> Any:
        import numpy as np

        return repr(np.random.get_state(legacy=False)), np.random.get_state(legacy=False)

    def restore(self, state: Any) -> None:
        import numpy as np

        np.random.set_state(state[1])


class _NumpyByMemory:
    """NumPy's global Mersenne twister and its spare normal number, by comparing memory with the last copy."""

    def __init__(self, state: Any, gauss_offset: int) -> None:
        bit_generator = state._bit_generator
        address = bit_generator.ctypes.state_address
        self.state = state
        self.bit_generator = bit_generator  # keeps the memory below alive
        self._words = memoryview((ctypes.c_ubyte * (4 * _NUM_WORDS + 4)).from_address(address)).cast("B")
        self.gauss = memoryview((ctypes.c_ubyte * 16).from_address(id(state) + gauss_offset)).cast("B")
        # A draw moves the position, which comes last; a new batch of words changes the last of them.
        self.mark = self._words[-_NUM_MARK_BYTES:]
        self._last = b""

    def peek(self) -> Any:
        if self.state._bit_generator is not self.bit_generator:
            return _NumpyBySlowCalls().peek()
        last = self._last
        if self.mark.tobytes() != last[-_NUM_MARK_BYTES:]:  # one copy for all regions between two draws
            last = self._last = self._words.tobytes()
        return last, self.gauss.tobytes()

    def restore(self, state: Any) -> None:
        if not isinstance(state[0], bytes):
            _NumpyBySlowCalls().restore(state)
            return
        import numpy as np

        words = np.frombuffer(state[0], dtype=np.uint32)
        has_gauss = int(np.frombuffer(state[1], dtype=np.int32)[0])
        gauss = float(np.frombuffer(state[1], dtype=np.float64)[1])
        np.random.set_state(("MT19937", words[:_NUM_WORDS], int(words[_NUM_WORDS]), has_gauss, gauss))


class _TorchBySlowCalls:
    """torch's default CPU generator, by its public functions."""

    def peek(self) -> Any:
        state = _cpu_generator.get_state()
        return bytes(state.tolist()), b"", state

    def restore(self, state: Any) -> None:
        _cpu_generator.set_state(state[2])


class _TorchByMemory:
    """A CPU generator of torch's, by comparing the memory of its Mersenne twister with the last copy."""

    def __init__(self, generator: torch.Generator) -> None:
        words = (ctypes.c_ubyte * _NUM_TORCH_BYTES).from_address(generator._cdata + _TORCH_ENGINE_OFFSET)  # type: ignore[attr-defined]
        live = memoryview(words).cast("B")
        self._generator = generator
        # A draw moves the position, which comes with the seed before the words; a new batch of words changes the first
        # of them. Behind the words are the spare normal numbers.
        self.mark, self.spares = live[:_NUM_TORCH_MARK_BYTES], live[_TORCH_WORDS_END:]
        self._last: tuple[bytes, bytes, torch.Tensor | None] = (b"", b"", None)

    def peek(self) -> Any:
        mark, spares, last = self.mark.tobytes(), self.spares.tobytes(), self._last
        while mark != last[0] or spares != last[1]:  # one copy for all regions between two draws
            last = (mark, spares, self._generator.get_state())
            mark, spares = self.mark.tobytes(), self.spares.tobytes()  # again: another thread may draw meanwhile
        self._last = last
        return last

    def restore(self, state: Any) -> None:
        self._generator.set_state(state[2])


# The memory of a CPU generator: seed, position, words, spare normal numbers (a float, then a double).
_TORCH_ENGINE_OFFSET, _NUM_TORCH_MARK_BYTES, _TORCH_WORDS_END, _NUM_TORCH_BYTES = 80, 52, 2516, 2540


def _torch_generator() -> _GlobalGenerator:
    """Return the quick reader if torch lays its CPU generators out as expected."""
    is_known = sys.implementation.name == "cpython" and sys.byteorder == "little" and _torch_layout_is_known()
    return _TorchByMemory(_cpu_generator) if is_known else _TorchBySlowCalls()


def _torch_layout_is_known() -> bool:
    """True if a probe's memory shows its public state, and how that moves with draws of each kind."""
    probe = torch.Generator().manual_seed(20240607)
    torch.rand(3, generator=probe)
    state, memory = bytes(probe.get_state().tolist()), _torch_memory(probe)
    seed, left, _, position = struct.unpack_from("<QiiQ", state)
    words = memoryview(state)[24 : 24 + 8 * _NUM_WORDS].cast("Q").tolist()
    found_seed, found_left, _, found_position = struct.unpack_from("<QiiI", memory)
    if (found_seed, found_left, found_position) != (seed, left, position):
        return False
    if memoryview(memory)[20:_TORCH_WORDS_END].cast("I").tolist() != words:
        return False
    torch.randn(1, generator=probe, dtype=torch.float64)  # leaves a spare number behind
    spare = bytes(probe.get_state().tolist())[24 + 8 * _NUM_WORDS + 8 :][:8]
    return _torch_memory(probe)[_TORCH_WORDS_END + 12 :][:9] == spare + b"\x01"


def _torch_memory(generator: torch.Generator) -> bytes:
    return ctypes.string_at(generator._cdata + _TORCH_ENGINE_OFFSET, _NUM_TORCH_BYTES)  # type: ignore[attr-defined]


def _numpy_gauss_offset(random_state_type: Any) -> int | None:
    """Find where a RandomState keeps its spare normal number, by planting one; None if it cannot be found."""
    import numpy as np

    probe, planted = random_state_type(7), 0.123456789012345678
    words = probe.get_state(legacy=False)["state"]["key"]
    probe.set_state(("MT19937", words, 5, 1, planted))
    memory = ctypes.string_at(id(probe), random_state_type.__basicsize__)
    at = memory.find(np.float64(planted).tobytes()) - 8
    if at < 0 or memory.count(np.float64(planted).tobytes()) != 1:
        return None
    reader = _NumpyByMemory(probe, at)
    key, (has_gauss, _) = np.frombuffer(reader.peek()[0], dtype=np.uint32), reader.peek()[1][:2]
    is_known = bool((key[:_NUM_WORDS] == words).all()) and int(key[_NUM_WORDS]) == 5 and has_gauss == 1
    return at if is_known else None


def _numpy_generator() -> _GlobalGenerator:
    """Return the quick reader if NumPy lays its global generator out as expected."""
    if find_spec("numpy") is None:
        return _NoGenerator()
    import numpy as np

    state = np.random.mtrand._rand
    if type(state._bit_generator).__name__ == "MT19937" and sys.implementation.name == "cpython":
        offset = _numpy_gauss_offset(type(state))
        if offset is not None:
            return _NumpyByMemory(state, offset)
    return _NumpyBySlowCalls()


_torch = _torch_generator()
_python = _python_generator()
_numpy = _numpy_generator()


class GlobalState:
    """The state of the three global generators at one moment; one object stands for all moments between two draws.

    None in place of Python's or NumPy's says that theirs is to be left alone.
    """

    __slots__ = ("cpu", "gauss", "mark", "numpy", "of_torch", "python")

    cpu: Any
    python: Any
    numpy: Any
    mark: bytes
    """What the memory of all three looked like, as far as a draw changes it."""
    gauss: Any
    """Python's spare normal number."""
    of_torch: GlobalState
    """The same without Python's and NumPy's."""

    def __init__(self, cpu: Any, python: Any = None, numpy: Any = None) -> None:
        self.cpu, self.python, self.numpy = cpu, python, numpy
        self.mark, self.gauss = b"", None

    def limited(self, *, python: bool, numpy: bool) -> GlobalState:
        """Return the same without Python's or NumPy's."""
        if not python and not numpy:
            return self.of_torch
        return GlobalState(self.cpu, self.python if python else None, self.numpy if numpy else None)


def _read_state() -> GlobalState:
    """Read the generators one by one."""
    state = GlobalState(_torch.peek(), _python.peek(), _numpy.peek())
    state.of_torch = GlobalState(state.cpu)
    return state


def _reader_by_memory(
    cpu: _TorchByMemory, python: _PythonByMemory, numpy: _NumpyByMemory | _NoGenerator
) -> Callable[[], GlobalState]:
    """Return what reads all three at once, by one copy of the bytes that a draw from any of them changes."""
    look = functools.partial(b"".join, (cpu.mark, cpu.spares, python.mark, numpy.mark, numpy.gauss))
    python_generator: Any = python.instance
    numpy_generator, bit_generator = numpy.state, numpy.bit_generator
    newest = _read_state()

    def read() -> GlobalState:
        nonlocal newest
        state = newest
        while True:
            mark, gauss = look(), python_generator.gauss_next
            if numpy_generator._bit_generator is not bit_generator:
                return _read_state()
            if mark == state.mark and gauss is state.gauss:
                newest = state
                return state
            state = _read_state()  # and look again: another thread may draw meanwhile
            state.mark, state.gauss = mark, gauss

    return read


def _reader_of_all() -> Callable[[], GlobalState]:
    """Return what reads the state of all global generators in the quickest way there is."""
    is_quick = isinstance(_torch, _TorchByMemory) and isinstance(_python, _PythonByMemory)
    if is_quick and isinstance(_numpy, (_NumpyByMemory, _NoGenerator)):
        return _reader_by_memory(_torch, _python, _numpy)  # type: ignore[arg-type]
    return _read_state


global_state = _reader_of_all()


def put_back_globals(wanted: GlobalState, now: GlobalState) -> None:
    """Let the generators go on from a state, given the one that they are in."""
    if now.cpu is not wanted.cpu and now.cpu[:2] != wanted.cpu[:2]:  # the same object between two draws
        _torch.restore(wanted.cpu)
    if wanted.python is not None:
        _python.restore(wanted.python)
    if wanted.numpy is not None:
        _numpy.restore(wanted.numpy)


def is_drawn_from(before: Any, after: Any) -> bool:
    """True for two states of Python's or NumPy's generator that are not the same."""
    if before is after:
        return False
    # What NumPy's public calls return is compared as text: its parts are arrays, which answer one by one.
    return bool(before[0] != after[0] or (type(before[0]) is not str and before != after))
