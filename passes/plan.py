"""The plan: what happens to every forward value that backward needs, why, and what it costs. Immutable."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from .constraints import Reason
from .source import source_line as source_line

FORMAT = 1
"""Version of the JSON form; a reader refuses what it does not know."""


class Action(Enum):
    """How a forward value reaches backward."""

    SAVE = "save"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one forward value that backward needs, and why."""

    value: str
    op: str
    action: Action
    reason: Reason
    num_bytes: int
    save_seconds: float
    """What keeping it adds to the step, as far as the cost model knows."""
    recompute_seconds: float
    """What running it again in backward adds to the step."""
    source: str
    """The line of the user's program, `file:line`; empty if it is not known."""
    module: str
    """The module path, `layers.3.mlp`; empty if it is not known."""
    region: str = ""
    """The region path, `decoder/mlp#2`; empty outside regions."""
    policy: str = ""
    """What the region's policy answered, `MUST_SAVE`; empty outside regions."""
    name: str = ""
    """What `remat.name` called the value; empty for most."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All decisions of one joint graph, in graph order."""

    decisions: tuple[Decision, ...]
    num_nodes: int
    """Nodes of the joint graph that the plan was made for."""
    key: str
    """Options and versions under which it was made."""

    @property
    def saved(self) -> tuple[Decision, ...]:
        """The values that are kept."""
        return tuple(d for d in self.decisions if d.action is Action.SAVE)

    @property
    def recomputed(self) -> tuple[Decision, ...]:
        """The values that are computed again."""
        return tuple(d for d in self.decisions if d.action is Action.RECOMPUTE)

    @property
    def offloaded(self) -> tuple[Decision, ...]:
        """The values that wait in host memory."""
        return tuple(d for d in self.decisions if d.action is Action.OFFLOAD)

    @property
    def saved_bytes(self) -> int:
        """Bytes kept from forward to backward, inputs and parameters not counted."""
        return sum(d.num_bytes for d in self.saved)

    @property
    def recompute_seconds(self) -> float:
        """What all recomputation adds to the step, as far as the cost model knows."""
        return sum(d.recompute_seconds for d in self.recomputed)

    def to_json(self) -> str:
        """The plan as JSON text, one decision a line, fit for diffs."""
        rows = ",\n    ".join(json.dumps(_decision_to_dict(d)) for d in self.decisions)
        return (
            f'{{\n  "format": {FORMAT},\n  "key": {json.dumps(self.key)},\n  "num_nodes": {self.num_nodes},\n'
            f'  "decisions": [\n    {rows}\n  ]\n}}\n'
        )

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        if not isinstance(data, dict) or "format" not in data:
            raise ValueError("this is no plan: a plan is a JSON object that says its format")
        if data["format"] != FORMAT:
            raise ValueError(f"this plan has format {data['format']!r}; this version of remat reads format {FORMAT}")
        try:
            decisions = tuple(_decision_from_dict(d) for d in data["decisions"])
            return Plan(decisions, num_nodes=data["num_nodes"], key=data["key"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"this plan is damaged: {error}") from error

    def summary(self, top: int = 10) -> str:
        """A dozen lines for a terminal: totals, then the largest saved values."""
        largest = sorted(self.saved, key=lambda d: -d.num_bytes)[:top]
        lines = [
            f"joint graph of {self.num_nodes} nodes: backward needs {len(self.decisions)} forward values",
            f"  saved       {len(self.saved):6}  {mebibytes(self.saved_bytes)}",
            f"  recomputed  {len(self.recomputed):6}  {mebibytes(sum(d.num_bytes for d in self.recomputed))}"
            f"  for {1e3 * self.recompute_seconds:.2f} ms (estimated)",
        ]
        if self.offloaded:
            num_bytes = sum(d.num_bytes for d in self.offloaded)
            lines.append(f"  offloaded   {len(self.offloaded):6}  {mebibytes(num_bytes)}")
        if largest:
            lines.append("largest saved values:")
            width = max(len(d.value) for d in largest)
            lines += [
                f"  {d.value:{width}}  {mebibytes(d.num_bytes)}  {d.reason.value}  {d.source}".rstrip() for d in largest
            ]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.summary()


def mebibytes(num_bytes: int) -> str:
    """Bytes for people: `1.25 MiB`, right-aligned."""
    return f"{num_bytes / 2**20:9.2f} MiB"


def _decision_to_dict(decision: Decision) -> dict[str, Any]:
    return {**asdict(decision), "action": decision.action.name, "reason": decision.reason.name}


def _decision_from_dict(data: dict[str, Any]) -> Decision:
    return Decision(**{**data, "action": Action[data["action"]], "reason": Reason[data["reason"]]})


def module_path(nn_module_stack: dict[str, Any] | None) -> str:
    """The innermost module's path in the user's model, `layers.3.mlp`."""
    if not nn_module_stack:
        return ""
    path, *_ = list(nn_module_stack.values())[-1]
    # Dynamo writes `L['self'].layers.3.mlp` for what it reaches from a local, `G['model'].mlp` from a global.
    return re.sub(r"^L\['\w+'\]\.?|^G\['(\w+)'\]", r"\1", str(path))
