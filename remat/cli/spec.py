"""What a command line may say of models and inputs: `pkg.mod:make_model`, `f32[8,128], i64[8]<10`."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ..passes.shared import OptionError
from ..passes.torch_private import fake_mode

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}

_TENSOR = re.compile(
    r"\s*(?:(?P<name>\w+)\s*=\s*)?(?P<dtype>[a-z]+\d*)\s*\[(?P<sizes>[\d\s,]*)\]\s*(?:<\s*(?P<below>\d+))?\s*"
)


FAKE = "fake:"
"""Before a device: tensors say that they are there, and take no memory."""


@contextmanager
def placed(device: str) -> Iterator[str]:
    """Let everything be made on a device; yields the device's own name."""
    name = device.removeprefix(FAKE)
    try:
        torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"--device {device!r}: expected meta, cpu, fake:cpu or another device of torch") from error
    if not device.startswith(FAKE):
        _check_device(device)
    with fake_mode() if device.startswith(FAKE) else nullcontext():
        yield name


def _check_device(device: str) -> None:
    """Refuse a device that torch knows of and this machine does not have."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise OptionError(
            f"--device {device!r}: torch cannot use it here ({reason}); expected meta, fake:cpu, cpu or a device that "
            "this machine has"
        ) from error


def load(text: str) -> Any:
    """Import what `pkg.mod:name` or `path/to/file.py:name` names; the name may have dots."""
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise OptionError(f"{text!r}: expected pkg.mod:name or path/to/file.py:name")
    module = _module(place, text)
    for part in name.split("."):
        if not hasattr(module, part):
            raise OptionError(f"{text!r}: {getattr(module, '__name__', place)} has no {part!r}")
        module = getattr(module, part)
    return module


def _module(place: str, text: str) -> Any:
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None or not Path(place).is_file():
            raise OptionError(f"{text!r}: there is no file {place}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: models are often in the folder one works in
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and place.startswith(error.name):
            raise OptionError(f"{text!r}: there is no module {error.name!r} on the path") from error
        raise


def load_model(text: str, device: str, *, is_function: bool) -> Callable[..., Any]:
    """The module or function to explain; a maker is called, on the device."""
    found = load(text)
    if isinstance(found, torch.nn.Module) or is_function:
        return found  # type: ignore[no-any-return]
    if not callable(found):
        raise OptionError(f"{text!r} is a {type(found).__name__}; expected a model, or what makes one")
    with torch.device(device):
        try:
            made = found()
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                raise  # it was called, and what it does is wrong
            raise OptionError(
                f"{text!r} cannot be called without arguments ({error}); write a function that makes the model, "
                "or give --function if this is the function to explain"
            ) from error
    if not callable(made):
        raise OptionError(f"{text!r} made a {type(made).__name__}, which is no model; give --function?")
    return made  # type: ignore[no-any-return]


def make_inputs(text: str, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs."""
    if not text.strip():
        return (), {}
    if "[" not in text:
        return _called(text, device)
    args: list[torch.Tensor] = []
    kwargs: dict[str, torch.Tensor] = {}
    at = 0
    while at < len(text):
        match = _TENSOR.match(text, at)
        end = match.end() if match is not None else at
        if match is None or (end < len(text) and text[end] != ","):
            raise OptionError(
                f'--input {text!r}: {text[at:].strip()!r} is no tensor; expected dtype[sizes] such as "f32[8,128]" or '
                f'"i64[8,128]<32000", dtypes {", ".join(DTYPES)}, or pkg.mod:function'
            )
        tensor = _tensor(match, text, device)
        if match["name"]:
            kwargs[match["name"]] = tensor
        elif kwargs:
            raise OptionError(f"--input {text!r}: inputs without a name come before those with one")
        else:
            args.append(tensor)
        at = end + 1
    return tuple(args), kwargs


def _tensor(match: re.Match[str], text: str, device: str) -> torch.Tensor:
    dtype = DTYPES.get(match["dtype"])
    if dtype is None:
        raise OptionError(f"--input {text!r}: unknown dtype {match['dtype']!r}; expected {', '.join(DTYPES)}")
    sizes = [int(size) for size in match["sizes"].split(",") if size.strip()]
    if dtype.is_floating_point:
        if match["below"] is not None:
            raise OptionError(f"--input {text!r}: `<{match['below']}` is for whole numbers, not for {match['dtype']}")
        return torch.randn(sizes, device=device).to(dtype)
    below = 2 if match["below"] is None else int(match["below"])
    return torch.randint(0, max(below, 1), sizes, device=device).to(dtype)


def _called(text: str, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    function = load(text)
    if not callable(function):
        raise OptionError(f"--input {text!r} is a {type(function).__name__}; expected a function that returns inputs")
    with torch.device(device):
        made = function()
    if isinstance(made, dict):
        return (), made
    return (tuple(made), {}) if isinstance(made, (tuple, list)) else ((made,), {})
