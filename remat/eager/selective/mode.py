"""The dispatch mode that the two halves of a selective region are made from."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from remat.eager.selective import op_watch
from remat.eager.selective.op_watch import Handled
from remat.passes.torch_private import TorchDispatchMode, pop_mode, push_mode

if TYPE_CHECKING:
    from typing_extensions import Self


class SelectiveMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What recorder and replayer share: they step aside inside inner regions, which have their own policy."""

    supports_higher_order_operators = True  # each is one op
    num_suspensions = 0
    watched: Handled | None = None  # the ops that this is entered for, one by one; None if it is entered for all
    num_kernels = 0  # of the watch, when the forward began
    is_asked_above = False  # whether ops whose result is only kept are told to `run_kept`, from above autograd
    _flags: tuple[bool, bool]
    _was_watching: bool

    def __init__(self) -> None:
        """Do nothing: torch's own sets up only what its `__enter__` needs."""

    def __enter__(self) -> Self:
        self._flags = push_mode(self)
        return self

    def __exit__(self, *exception: object) -> None:
        pop_mode(self._flags)

    def enter_for(self, handled: Handled | None, is_again: bool) -> None:
        """Enter for some ops, one by one, or for all where that cannot be."""
        was_watching = None if handled is None else op_watch.start(is_again)
        if was_watching is None:
            self._flags = push_mode(self)
        else:
            self._was_watching, self.watched = was_watching, handled

    def leave(self) -> None:
        """Undo what `enter_for` did."""
        if self.watched is None:
            pop_mode(self._flags)
        else:
            self.watched = None
            op_watch.stop(self._was_watching)

    def run_kept(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Run an op whose result is kept, from above autograd.

        It is counted by the call, and not by what arrives here as a mode: that may be something else or nothing, or
        the same once more, for autocast, forward-mode derivatives and the like, which work on the way down.
        """
        raise NotImplementedError

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
