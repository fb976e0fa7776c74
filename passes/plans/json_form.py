"""Plans as JSON, and back: every field has its type, and a digest tells whether a plan is as it was saved."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from typing import Any, TypeVar

from ..shared import Damaged, read, refused, shown, stored
from .contents import Decision, PlanContents

P = TypeVar("P", bound=PlanContents)

FORMAT = 1
"""Version of the JSON form; a reader refuses any other."""

DIGEST_LENGTH = 32
"""Characters of a digest: it tells edits and damage, and guards against nobody."""


def plan_to_json(plan: PlanContents) -> str:
    """A plan as JSON text, one decision a line, fit for diffs."""
    data = {"format": FORMAT, "digest": digest_of(plan), **_content(plan)}
    rows = (f"  {json.dumps(name)}: {_json_rows(value)}" for name, value in data.items())
    return "{\n" + ",\n".join(rows) + "\n}\n"


def digest_of(plan: PlanContents) -> str:
    """A short text that is another one for every other plan."""
    text = json.dumps(_content(plan), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


def _content(plan: PlanContents) -> dict[str, Any]:
    return {**stored(plan), "decisions": [_decision_to_dict(d) for d in plan.decisions]}


def read_plans(kind: type[P], text: str, file: str) -> tuple[P, ...]:
    """Read a plan, or all plans of a report; `file` is where the text comes from."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is no plan: {error}") from error
    if not isinstance(data, dict) or "format" not in data:
        raise ValueError("this is no plan: a plan is a JSON object that says its format")
    if "graphs" not in data:
        return (_checked_plan(kind, data, "", file),)
    try:
        found = [graph["plan"] for graph in data["graphs"]]
    except (KeyError, TypeError) as error:
        raise ValueError("this is no plan, and no report that holds plans") from error
    return tuple(_checked_plan(kind, plan, f"graphs[{number}].plan.", file) for number, plan in enumerate(found))


def _checked_plan(kind: type[P], data: Any, path: str, file: str) -> P:
    """A plan all of whose fields have their types, and that is as it was saved.

    `path` is what the names of fields begin with in its file.
    """
    if not isinstance(data, dict):
        raise ValueError(f"this plan is damaged: {refused(path.removesuffix('.'), data, 'an object with fields')}")
    number = data.get("format")
    if isinstance(number, bool) or number != FORMAT:
        raise ValueError(f"this plan has format {shown(number)}; this version of remat reads format {FORMAT}")
    try:
        plan = read(kind, {name: value for name, value in data.items() if name not in ("format", "digest")})
        _check_digest(plan, data.get("digest"))
    except Damaged as error:
        raise ValueError(f"this plan is damaged: {path}{error}") from error
    return replace(plan, file=file)


def _check_digest(plan: PlanContents, stated: object) -> None:
    found = digest_of(plan)
    if stated != found:
        raise Damaged(
            f"digest is {shown(stated)}, but that of what the plan holds is {found!r}: it was edited or damaged "
            "after it was saved.\nMake the plan anew; or, if you meant the edit, write the second digest in place of "
            "the first. What the plan does is checked again when it is applied."
        )


def _json_rows(value: Any) -> str:
    """JSON text of one field; long lists have a line per item."""
    if not isinstance(value, (list, tuple)) or not value:
        return json.dumps(value)
    return "[\n    " + ",\n    ".join(json.dumps(item) for item in value) + "\n  ]"


def _decision_to_dict(decision: Decision) -> dict[str, Any]:
    return {**asdict(decision), "action": decision.action.name, "reason": decision.reason.name}
