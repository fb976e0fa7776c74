"""Random state: what a region's forward could draw from, kept cheaply and put back for its recomputation.

Torch's generators are read in every region, Python's and NumPy's by `global_generators`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from remat.eager.state.generators import restore_state, state_of
from remat.eager.state.global_generators import NUMPY, PYTHON
from remat.passes.torch_private import Generator, tree_leaves

_cpu_generator = torch.default_generator


class RngSnapshot:
    """The random state at a region's entry; what the forward did not touch is dropped at its end."""

    __slots__ = ("cpu", "devices", "generators", "numpy", "python")

    def __init__(self, devices: Iterable[torch.device], generators: Sequence[Any]) -> None:
        self.cpu = _cpu_generator.get_state()
        self.python, self.numpy = PYTHON.state(), NUMPY.state()
        self.devices = [(d, device_module(d.type).get_rng_state(d)) for d in devices] if devices else []
        self.generators = [(g, state_of(g)) for g in generators] if generators else []

    def seal(self) -> None:
        """Forget Python's and NumPy's state if the forward left them alone."""
        if self.python is PYTHON.state():
            self.python = None
        if self.numpy is NUMPY.state():
            self.numpy = None

    def add_generator(self, generator: Generator) -> None:
        """Remember an explicit generator that is about to be drawn from, unless it is known already."""
        if not self._knows(generator):
            self.generators.append((generator, state_of(generator)))

    def covers(self, generator: Generator) -> bool:
        """True if a recomputation starts from the state that a generator had."""
        defaults = getattr(device_module(generator.device.type), "default_generators", ())  # of an accelerator
        is_default = any(_are_same(generator, default) for default in (_cpu_generator, *defaults))
        return is_default or self._knows(generator)

    def _knows(self, generator: Generator) -> bool:
        return any(_are_same(generator, known) for known, _ in self.generators)


def _are_same(left: Any, right: Any) -> bool:
    """True for one generator of torch's, which the dispatcher may hand out as another Python object."""
    return left is right or (isinstance(right, Generator) and left._cdata == right._cdata)  # type: ignore[attr-defined]


def swap_in(snapshot: RngSnapshot) -> RngSnapshot:
    """Put a snapshot's state in force and return what was there, to be handed to `put_back`."""
    current = RngSnapshot.__new__(RngSnapshot)
    current.cpu = _cpu_generator.get_state()
    current.python = None if snapshot.python is None else PYTHON.state()
    current.numpy = None if snapshot.numpy is None else NUMPY.state()
    current.devices = [(d, device_module(d.type).get_rng_state(d)) for d, _ in snapshot.devices]
    current.generators = [(g, state_of(g)) for g, _ in snapshot.generators]
    put_back(snapshot)
    return current


def put_back(snapshot: RngSnapshot) -> None:
    """Put a snapshot's state in force."""
    _cpu_generator.set_state(snapshot.cpu)
    if snapshot.python is not None:
        PYTHON.restore(snapshot.python)
    if snapshot.numpy is not None:
        NUMPY.restore(snapshot.numpy)
    for device, state in snapshot.devices:
        device_module(device.type).set_rng_state(state, device)
    for generator, state in snapshot.generators:
        restore_state(generator, state)


@contextmanager
def replayed(snapshot: RngSnapshot | None) -> Iterator[None]:
    """Run a block with a snapshot's random state, then put the surrounding one back; None changes nothing."""
    if snapshot is None:
        yield
        return
    surrounding = swap_in(snapshot)
    try:
        yield
    finally:
        put_back(surrounding)


@dataclass(frozen=True, slots=True)
class OpRngState:
    """The state that one random op of a region started from."""

    device: torch.device
    state: torch.Tensor
    generator: Any = None
    """An explicit generator; None for the device's default one."""

    @staticmethod
    def capture(device: torch.device) -> OpRngState:
        """Read the default generator of a device."""
        if device.type == "cpu":
            return OpRngState(device, _cpu_generator.get_state())
        return OpRngState(device, device_module(device.type).get_rng_state(device))

    @staticmethod
    def capture_generator(generator: Any) -> OpRngState:
        """Read an explicit generator."""
        return OpRngState(torch.device("cpu"), state_of(generator), generator)

    def restore(self) -> None:
        """Let the next draw start from here."""
        if self.generator is not None:
            restore_state(self.generator, self.state)
        elif self.device.type == "cpu":
            _cpu_generator.set_state(self.state)
        else:
            device_module(self.device.type).set_rng_state(self.state, self.device)


def device_module(device_type: str) -> Any:
    """Return torch's module for a device type, say `torch.cuda`."""
    return torch.device("meta") if device_type == "meta" else getattr(torch, device_type)


class DefaultDeviceType:
    """The device type whose random state is kept when no argument says which: the accelerator, or the CPU."""

    _default_device_type: str | None = None

    @staticmethod
    def set_device_type(device: str = "cuda") -> None:
        """Fix the default device type."""
        DefaultDeviceType._default_device_type = device

    @staticmethod
    def get_device_type() -> str:
        """Return the device type that was set, else the machine's accelerator, else the CPU."""
        if DefaultDeviceType._default_device_type is None:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            DefaultDeviceType._default_device_type = accelerator.type if accelerator is not None else "cpu"
        return DefaultDeviceType._default_device_type


def accelerator_devices(args: Iterable[Any]) -> Iterable[torch.device]:
    """Return the devices, other than the CPU, of the tensors among some arguments, each once, in order."""
    devices: dict[torch.device, None] | None = None
    for arg in args:
        if isinstance(arg, torch.Tensor):
            if not arg.is_cpu and arg.device.type != "meta":
                devices = devices or {}
                devices[arg.device] = None
        elif isinstance(arg, (list, tuple, dict)):
            devices = devices or {}
            leaves = tree_leaves(arg)
            devices.update(dict.fromkeys(accelerator_devices(x for x in leaves if isinstance(x, torch.Tensor))))
    return devices or ()


def get_device_states(*args: Any) -> tuple[list[int], list[torch.Tensor]]:
    """Return index and random state of the accelerator of every tensor argument, in the arguments' order."""
    ids = [
        arg.get_device()
        for arg in tree_leaves(args)
        if isinstance(arg, torch.Tensor) and arg.device.type not in {"cpu", "meta"}
    ]
    if not ids:
        return [], []
    module = device_module(infer_device_type(*args))
    states = []
    for device_id in ids:
        with module.device(device_id):
            states.append(module.get_rng_state())
    return ids, states


def set_device_states(
    devices: Iterable[int], states: Iterable[torch.Tensor], *, device_type: str | None = None
) -> None:
    """Put random states, as `get_device_states` returned them, back on their devices."""
    device_type = device_type if device_type is not None else DefaultDeviceType.get_device_type()
    if device_type == "meta":
        return
    module = device_module(device_type)
    for device, state in zip(devices, states, strict=False):
        with module.device(device):
            module.set_rng_state(state)


def infer_device_type(*args: Any) -> str:
    """Return the one device type besides the CPU among the tensors of some arguments, or the default."""
    types = list(
        dict.fromkeys(
            leaf.device.type
            for leaf in tree_leaves(args)
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"
        )
    )
    if not types:
        return DefaultDeviceType.get_device_type()
    return "cuda" if "cuda" in types else types[0]
