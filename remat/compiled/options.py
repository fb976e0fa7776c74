"""The options of `torch.compile(backend="remat", options=...)`: parsed once into a frozen object, then passed down."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_origin

import torch.fx as fx

from ..passes.budgets import Budget, parse_budget
from ..passes.plans import Plan, plans_from_json
from ..passes.prices import OpCall
from ..passes.shared import OptionError
from ..passes.torch_private import inductor_mode_options, inductor_option_names, inductor_option_type

Inner = str | Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
CostFunction = Callable[[OpCall], float]

INNERS = ("inductor", "aot_eager")
LOGS = ("plan",)
COST_MODELS = ("roofline", "flops", "profile")
RANKS = ("agree", "check", "alone")


@dataclass(frozen=True, slots=True)
class Options:
    """What remat was asked to do."""

    inner: Inner = "inductor"
    """What compiles the two graphs."""
    cost_model: str | CostFunction = "roofline"
    """How recomputation is priced."""
    budget: Budget | None = None
    """A bound on the activation peak."""
    take_minimum: bool = False
    """Where a budget cannot be met, take the lowest plan."""
    unbacked_hint: int | None = None
    """What a size stands for that only the data tells, where nothing bounds it."""
    plans: tuple[Plan, ...] = ()
    """Plans made earlier that are to be applied."""
    ranks: str = "agree"
    """What holds between the ranks of a job: they use one plan per graph, must find the same one, or plan alone."""
    dump: str | None = None
    """A folder that gets every graph's plan."""
    logs: tuple[str, ...] = ()
    """What is printed while compiling; from the environment, as torch's own logs are."""
    inductor: Mapping[str, Any] = field(default_factory=dict)
    """Settings handed on to inductor."""

    @staticmethod
    def parse(options: Mapping[str, Any] | None = None, mode: str | None = None) -> Options:
        """Check user input; whatever is wrong with it is an OptionError that says what is allowed."""
        given = _checked_names(options)
        inner = _inner(given.pop("inner", "inductor"))
        own = Options.parse_own({name: given.pop(name) for name in PLAN_OPTIONS if name in given})
        return replace(own, inner=inner, inductor={**_mode(mode, inner), **_inductor(given, inner)})

    @property
    def fuses(self) -> bool:
        """What runs the graphs fuses ops."""
        return self.inner == "inductor"

    @property
    def overwrites(self) -> bool:
        """What runs the graphs is our own, so that it can be told to write results over what is not read any more."""
        return self.inner == "aot_eager"

    @staticmethod
    def parse_own(options: Mapping[str, Any]) -> Options:
        """Check the options that a partition function takes: all but the inner compiler's."""
        given = _checked_names(options)
        cost_model = _cost_model(given.pop("cost_model", "roofline"))
        dump = _dump(given.pop("dump", None))
        on_infeasible = given.pop("on_infeasible", "error")
        budget = parse_budget(given.pop("memory_budget", None), on_infeasible)
        unbacked_hint = _unbacked_hint(given.pop("unbacked_hint", None))
        plans = _plans(given.pop("plan", None))
        ranks = given.pop("ranks", "agree")
        if ranks not in RANKS:
            raise OptionError(f"ranks={ranks!r}: expected {_listed(RANKS)}")
        if plans and budget is not None:
            raise OptionError("plan and memory_budget: a stored plan has its own peak; give one or the other")
        for name in given:
            raise OptionError(f"unknown option {name!r}: a partitioner has {_listed(PLAN_OPTIONS)}")
        take_minimum = on_infeasible == "minimum"
        return Options(
            cost_model=cost_model,
            budget=budget,
            take_minimum=take_minimum,
            unbacked_hint=unbacked_hint,
            plans=plans,
            ranks=ranks,
            dump=dump,
            logs=_logs(),
        )


PLAN_OPTIONS = ("memory_budget", "on_infeasible", "cost_model", "unbacked_hint", "plan", "ranks", "dump")
OWN_OPTIONS = ("inner", *PLAN_OPTIONS)


def _checked_names(options: Any) -> dict[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise OptionError(f"options={options!r}: expected a dictionary from option names to values")
    return dict(options)


def _inner(value: Any) -> Inner:
    if value in INNERS if isinstance(value, str) else callable(value):
        return value  # type: ignore[no-any-return]
    raise OptionError(
        f"inner={value!r}: expected {_listed(INNERS)}, or a callable backend that takes (graph_module, example_inputs)"
    )


def _cost_model(value: Any) -> str | CostFunction:
    if value in COST_MODELS if isinstance(value, str) else callable(value):
        return value  # type: ignore[no-any-return]
    raise OptionError(
        f"cost_model={value!r}: expected {_listed(COST_MODELS)}, or a callable that takes an OpCall and returns seconds"
    )


def _unbacked_hint(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise OptionError(
        f"unbacked_hint={value!r}: expected None, or a whole number from 1: how large sizes get that only data tells"
    )


def _dump(value: Any) -> str | None:
    name = "dump"
    if value is None:
        name, value = "REMAT_DUMP", os.environ.get("REMAT_DUMP") or None
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise OptionError(f"dump={value!r}: expected None or the path of a folder")
    folder = Path(os.fsdecode(value)).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"{name}={os.fsdecode(value)!r}: this folder cannot be made ({error.strerror})") from error
    return str(folder)


def _logs() -> tuple[str, ...]:
    names = tuple(name.strip() for name in os.environ.get("REMAT_LOGS", "").split(",") if name.strip())
    for name in names:
        if name not in LOGS:
            raise OptionError(f"REMAT_LOGS={os.environ['REMAT_LOGS']!r}: {name!r} is no log; expected {_listed(LOGS)}")
    return names


def _plans(value: Any) -> tuple[Plan, ...]:
    """Stored plans: one, or several for a model that is compiled in several graphs."""
    if value is None:
        return ()
    items = value if isinstance(value, (list, tuple)) else (value,)
    plans = tuple(plan for item in items for plan in _plan(item))
    if not plans:
        raise OptionError(f"plan={value!r} holds no plan; to plan afresh leave the option out, or say None")
    return plans


def _plan(value: Any) -> tuple[Plan, ...]:
    if isinstance(value, Plan):
        return (value,)
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise OptionError(
            f"plan={value!r}: expected a Plan, the path of a plan that Plan.save wrote, or a list of them"
        )
    try:
        text = no_frontier(Path(value).read_text(encoding="utf-8"), value)
        return plans_from_json(text, os.fspath(value))
    except (OSError, ValueError) as error:
        raise OptionError(f"plan={os.fspath(value)!r} cannot be read: {error}") from error


def _mode(mode: Any, inner: Inner) -> dict[str, Any]:
    if mode is None or mode == "default":
        return {}
    modes = inductor_mode_options()
    if not isinstance(mode, str) or mode not in modes:
        raise OptionError(f"mode={mode!r}: expected {_listed(modes)}")
    if inner != "inductor":
        raise OptionError(f"mode={mode!r} is a setting of inductor, but inner={inner!r}; leave it out")
    return dict(modes[mode])


def _inductor(given: Mapping[str, Any], inner: Inner) -> dict[str, Any]:
    """What is left over belongs to inductor, or is a mistake."""
    if not given:
        return {}
    known = inductor_option_names()
    settings = {}
    for name, value in given.items():
        setting = name.replace("-", "_")
        if setting == "custom_partitioner_fn":
            raise OptionError(
                "option 'custom_partitioner_fn': remat is the partitioner; use backend='inductor' to set another one"
            )
        if setting not in known:
            raise OptionError(_unknown(name, known))
        if inner != "inductor":
            raise OptionError(f"option {name!r} is a setting of inductor, but inner={inner!r}; leave it out")
        expected = inductor_option_type(setting)
        if get_origin(expected) is None and isinstance(expected, type) and not isinstance(value, expected):
            raise OptionError(f"option {name!r} of inductor is a {expected.__name__}, got {value!r}")
        settings[setting] = value
    return settings


def _unknown(name: str, inductor_names: frozenset[str]) -> str:
    near = difflib.get_close_matches(name, [*OWN_OPTIONS, *sorted(inductor_names)], n=3)
    hint = f" Did you mean {_listed(near)}?" if near else ""
    return (
        f"unknown option {name!r}: remat has {_listed(OWN_OPTIONS)}; anything else must be an option of inductor.{hint}"
    )


def _listed(names: Any) -> str:
    quoted = [repr(n) for n in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def no_frontier(text: str, path: str | os.PathLike[str]) -> str:
    """The text of a file; an error that says how to take a plan out of it if that is a frontier."""
    if _is_frontier(text):
        raise ValueError(
            "this is a frontier that `pareto` wrote, not a plan: each of its points has a plan. Take one by "
            f'remat.Pareto.load({os.fspath(path)!r}).points[0].plan.save("plan.json"); points begin with the '
            "fastest"
        )
    return text


def _is_frontier(text: str) -> bool:
    if '"graph_break"' not in text:
        return False
    try:
        data = json.loads(text)
    except ValueError:
        return False  # whoever reads it says what is wrong with it
    return isinstance(data, dict) and "graph_break" in data
