"""What the dispatch modes of the engine have in common, the two halves of a selective region and the guards."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from remat.passes.torch_private import TorchDispatchMode, pop_mode, push_mode

if TYPE_CHECKING:
    from typing_extensions import Self


class EngineMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that lets compilers be; those of policies step aside in inner regions, which have their own."""

    supports_higher_order_operators = True  # each is one op
    num_suspensions = 0
    _flags: tuple[bool, bool]

    def __init__(self) -> None:
        """Do nothing: torch's own sets up only what its `__enter__` needs."""

    def __enter__(self) -> Self:
        self._flags = push_mode(self)
        return self

    def __exit__(self, *exception: object) -> None:
        pop_mode(self._flags)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do without torch's wrapper that keeps compilers out of a mode: a region has done that."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code inside a region be one op to the policy, instead of forbidding it."""
        return True


_supports_compiled_code = False


def support_compiled_code() -> None:
    """Tell torch's op for compiled blocks about our modes, once compiled code can exist at all."""
    global _supports_compiled_code
    if not _supports_compiled_code and "torch._higher_order_ops.wrap" in sys.modules:
        from remat.passes.torch_private import redirect_compiled_code_to

        for mode in EngineMode.__subclasses__():
            redirect_compiled_code_to(mode)
        _supports_compiled_code = True
