"""The dispatch mode that the two halves of a selective region are made from."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from remat.passes.torch_private import TorchDispatchMode, pop_mode, push_mode

if TYPE_CHECKING:
    from typing_extensions import Self


class SelectiveMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What recorder and replayer share: they step aside inside inner regions, which have their own policy."""

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

        for mode in SelectiveMode.__subclasses__():
            redirect_compiled_code_to(mode)
        _supports_compiled_code = True
