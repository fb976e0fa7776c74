"""What the command line says of an error that somebody's model raised: one line, and the traceback if asked for."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from ..passes.shared import RematError, Whose, causes_of, is_users, source_line, whose

DEBUG = "REMAT_DEBUG"
"""An environment variable: with it, errors come with their traceback."""

MAX_LENGTH = 400
"""How much of a message is printed; some hold whole tensors."""

_FROM_USER_CODE = "from user code:"
"""After this Dynamo's errors say where in the program they come from."""


class ProgramError(RematError):
    """What was to be explained raised an error of its own."""


def wants_traceback() -> bool:
    """True if errors are to come with their traceback."""
    return os.environ.get(DEBUG, "") not in ("", "0")


@contextmanager
def in_one_line(what: str, hint: str = "") -> Iterator[None]:
    """Make of an error that is not remat's own one that says in a line what was raised, and where."""
    fake_tensors = logging.getLogger("torch._subclasses.fake_tensor")  # prints a traceback for what is raised anyway
    level = fake_tensors.level
    try:
        if not wants_traceback():
            fake_tensors.setLevel(logging.CRITICAL)
        yield
    except RematError:
        raise
    except Exception as error:
        raise ProgramError(f"{what}: {described(error)}{hint}{_how_to_see_more()}") from error
    finally:
        fake_tensors.setLevel(level)


def _how_to_see_more() -> str:
    return "" if wants_traceback() else f" ({DEBUG}=1 prints the traceback)"


def described(error: Exception) -> str:
    """An error's type and message on one line, with the line of the program; what the program raised, not Dynamo."""
    raised = list(causes_of(error))[-1] if type(error).__module__.startswith("torch._dynamo") else error
    message = " ".join(str(raised).partition(_FROM_USER_CODE)[0].split())
    if len(message) > MAX_LENGTH:
        message = f"{message[:MAX_LENGTH]}…"
    source = _source(error)
    return f"{type(raised).__name__}: {message}".removesuffix(".").removesuffix(": ") + (
        f", at {source}" if source else ""
    )


def _source(error: Exception) -> str:
    """The line of the program that an error comes from; empty if it is not known."""
    _, found, where = str(error).partition(_FROM_USER_CODE)
    if found:
        return source_line(where)
    frames = traceback.extract_tb(error.__traceback__)
    # Remat's own lines lead to the program; what called remat is no part of it.
    own = [number for number, frame in enumerate(frames) if whose(frame.filename) is Whose.REMATS]
    below = frames[own[-1] + 1 :] if own else frames
    users = [frame for frame in below if is_users(frame.filename)]
    return f"{users[-1].filename}:{users[-1].lineno}" if users else ""
