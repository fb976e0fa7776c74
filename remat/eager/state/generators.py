"""Explicit generators of random numbers, torch's, Python's and NumPy's: what they are, and their state."""

from __future__ import annotations

import random
from typing import Any

from remat.passes.torch_private import Generator

_NUMPY_NAMES = ("Generator", "RandomState")


def is_generator_class(cls: type) -> bool:
    """True for a class of generators whose state can be read and set."""
    if issubclass(cls, Generator):
        return True
    if issubclass(cls, random.Random):
        return not issubclass(cls, random.SystemRandom)
    return any(_is_numpys(base) for base in cls.__mro__)


def _is_numpys(cls: type) -> bool:  # by name, since NumPy may not be there
    return cls.__module__.startswith("numpy.random") and cls.__name__ in _NUMPY_NAMES


def state_of(generator: Any) -> Any:
    """Return a copy of a generator's state."""
    if isinstance(generator, Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def restore_state(generator: Any, state: Any) -> None:
    """Let a generator go on from a state."""
    if isinstance(generator, Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
