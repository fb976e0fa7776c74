"""A policy, asked about the ops and names of one forward, and what is said if its answer cannot be followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ...passes.shared import (
    CheckpointPolicy,
    PolicyError,
    PolicyFunction,
    SelectiveCheckpointContext,
    checked_answer,
    current_module_path,
    policy_name,
    running_line,
)
from ..types import OpFacts


class Labelled(Protocol):
    """A region that has a name for messages; empty where nobody knows which it is."""

    @property
    def label(self) -> str:
        """The name."""


class Asker:
    """A policy and what it remembers of this forward."""

    __slots__ = ("_answer_for", "_policy", "_region", "_state")

    def __init__(self, policy: PolicyFunction, region: Labelled) -> None:
        self._policy, self._region = policy, region
        self._answer_for: Callable[[Any], CheckpointPolicy] | None = getattr(policy, "answer_for", None)
        self._state: dict[Any, Any] | None = None  # the policy's, for this call of the region

    def ask(self, func: Any, out: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
        """Return the policy's answer for an op that has run."""
        if self._answer_for is not None:
            return self._answer_for(func)
        return self.ask_about_value(func, out, args, kwargs)

    def ask_about_value(self, func: Any, out: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
        """Return the policy's answer for this very call, whether it goes by the op alone or not."""
        context = SelectiveCheckpointContext(is_recompute=False, op_output=out)
        if self._state is None:
            self._state = {}
        context.state = self._state
        try:
            answer = self._policy(context, func, *args, **(kwargs or {}))
        except Exception as error:
            raise PolicyError(
                f"the policy {policy_name(self._policy)} raised {type(error).__name__} when asked about {func}: "
                f"{error}{self._place()}"
            ) from error
        if type(answer) is CheckpointPolicy:
            return answer
        return checked_answer(answer, self._policy, func, self._place)

    def must_run_once(self, facts: OpFacts, what: Any) -> PolicyError:
        """Return the error for MUST_RECOMPUTE of an op that runs once."""
        return PolicyError(
            f"the policy {policy_name(self._policy)} says MUST_RECOMPUTE for {what}, {facts.runs_once}, which runs "
            f"once. Return PREFER_RECOMPUTE for it, or take it out of the region.{self._place()}"
        )

    def contradiction(self, op: Any, name: str) -> PolicyError:
        """Return the error for an op that must be kept and one of whose results must not."""
        return PolicyError(
            f"the policy {policy_name(self._policy)} says MUST_SAVE for {op} and MUST_RECOMPUTE for {name!r}, one of "
            f"its results, but an op with several is kept or run again whole. Return PREFER_SAVE for the op, or no "
            f"MUST_RECOMPUTE for the name.{self._place()}"
        )

    def _place(self) -> str:
        """Say for a message which region this is, which module of it is running, and on which line."""
        region = f"in {self._region.label}, " if self._region.label else ""
        path = current_module_path()
        return f" ({region}{f'module {path}, ' if path else ''}{running_line()})"
