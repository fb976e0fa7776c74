"""The command `remat`: explain a model, look at stored plans, compare two of them, draw the frontier.

Exit codes: 0 fine; 1 a difference was found, or the budget cannot be met; 2 wrong usage, a file that cannot be read,
or a model that raises an error.
Results go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..compiled import no_frontier
from ..passes.shared import InfeasibleBudget, OptionError, RematError, form_of, parsed_file
from ..version import __version__
from .program_error import in_one_line, wants_traceback

OK, DIFFERENT, WRONG_USAGE = 0, 1, 2

DESCRIPTION = """\
See what remat decides for a training step: which forward values are kept for backward, which are computed again, why,
and what the memory peak will be. Nothing is trained: models are traced, and may be larger than this machine."""

MODEL_HELP = """\
what to explain:
  MODEL is pkg.mod:name or path/to/file.py:name. The name may be
    a module instance,
    a function or class that makes one when called without arguments, or
    a plain function of the inputs (then give --function).

where it is made (--device):
  meta (the default)  takes no memory; prices are those of a data-centre GPU, and ops that have kernels for real devices
                      only, such as fused attention, are taken apart
  fake:cpu            takes no memory; prices and kernels are those of this machine's CPU
  cpu                 a real model in real memory

inputs (--input):
  a comma list of tensors, dtype[sizes]: "f32[8,128]" or "f32[8,128], i64[8]"
    dtypes: f64 f32 f16 bf16 i64 i32 i16 i8 u8 bool; "i64[8,128]<32000" draws whole numbers below 32000
    keyword inputs: "input_ids=i64[1,128]<32000, labels=i64[1,128]<32000"
  or the name of a function that returns the inputs, pkg.mod:make_inputs: a tensor, a tuple, or a dictionary of
  keyword inputs.
  A result that is no tensor needs nothing special: what has a gradient is planned for.

errors:
  What a model raises is told in one line, with its type; REMAT_DEBUG=1 in the environment prints the traceback, too."""

EXPLAIN_EXAMPLES = """\
examples:
  remat explain torch.nn:Identity --input 'f32[4]'                     (fails: nothing in it has a gradient)
  remat explain mymodel:make_model --input 'f32[8,128]'                summary on the terminal
  remat explain mymodel:make_model --input 'i64[1,4096]<32000' --memory-budget 2GiB -o report.html
  remat explain mymodel:make_model --input mymodel:make_batch --why attn_out
  remat explain mymodel:make_model --input 'f32[8,128]' --json | jq .graphs[0].plan.peak

exit codes: 0 fine; 1 the budget cannot be met; 2 wrong usage, or the model raises an error"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parsed = _parser().parse_args(arguments)
    if not hasattr(parsed, "run"):
        _parser().print_help()
        return WRONG_USAGE
    run: Callable[[argparse.Namespace], int] = parsed.run
    try:
        return run(parsed)
    except InfeasibleBudget as error:
        return _fail(error, DIFFERENT)
    except (RematError, OSError, ValueError) as error:
        return _fail(error, WRONG_USAGE)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        return OK


def _fail(error: Exception, code: int) -> int:
    if wants_traceback():
        traceback.print_exception(error)
    print(f"remat: {_in_flags(str(error))}", file=sys.stderr)
    return code


def _in_flags(text: str) -> str:
    """An error's advice in terms of the command line: what is an option of Python is a flag here."""
    for said in ('set on_infeasible="minimum"', 'compile with on_infeasible="minimum"'):
        text = text.replace(said, "give --on-infeasible minimum")
    return text


# ------------------------------------------------------------------------------------------------------ arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="remat", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"remat {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command")
    _add_explain(commands)
    _add_show(commands)
    _add_diff(commands)
    _add_pareto(commands)
    return parser


def _add_command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, epilog: str) -> Any:
    made = commands.add_parser(
        name, help=text, description=text, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.set_defaults(run=run)
    return made


def _add_model(parser: Any) -> None:
    parser.add_argument("model", metavar="MODEL", help="pkg.mod:name or file.py:name; see below")
    parser.add_argument("--input", default="", metavar="INPUTS", help="example inputs; see below")
    parser.add_argument("--function", action="store_true", help="MODEL is the function to explain, not a maker")
    parser.add_argument("--device", default="meta", help="meta (default), fake:cpu, cpu; see below")
    parser.add_argument("--inner", default="inductor", help="what runs the graphs: inductor (default) or aot_eager")
    parser.add_argument("--cost-model", default="roofline", help="roofline (default), flops or profile")


def _add_explain(commands: Any) -> None:
    text = "trace a model, plan it, and say what becomes of every value"
    parser = _add_command(commands, "explain", _explain, text, f"{MODEL_HELP}\n\n{EXPLAIN_EXAMPLES}")
    _add_model(parser)
    parser.add_argument("--memory-budget", metavar="SIZE", help="bound on the activation peak: 2GiB, 500MB, 35%%")
    parser.add_argument(
        "--on-infeasible",
        choices=("error", "minimum"),
        default="error",
        help="a budget that no plan meets: an error (default), or the lowest plan, with a warning",
    )
    parser.add_argument("--dynamic", action="store_true", help="take the sizes of inputs for symbols")
    parser.add_argument(
        "--unbacked-hint", type=int, metavar="SIZE", help="how large sizes get that only the data tells"
    )
    parser.add_argument("--pareto", action="store_true", help="also compute the frontier, for the page")
    parser.add_argument("--why", metavar="VALUE", help="say why one value, by node or by remat.name, got its decision")
    _add_output(parser, "write the report: .html, .json, .txt, .svg or .dot")


def _add_output(parser: Any, text: str) -> None:
    parser.add_argument("-o", "--output", action="append", default=[], metavar="FILE", help=f"{text}; may be repeated")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_show(commands: Any) -> None:
    parser = _add_command(
        commands,
        "show",
        _show,
        "print a plan or report that was stored as JSON, or turn a report into another form",
        "examples:\n  remat show plans/rank0-graph000-4711.json\n  remat show report.json -o report.html\n"
        "  remat show report.json --why attn_out\n  remat show report.json --full | less\n"
        "  remat show plan.json --set s1=8192",
    )
    parser.add_argument("file", help="a file that `dump`, Plan.save or Report.save wrote")
    parser.add_argument("--why", metavar="VALUE", help="say why one value got its decision (reports only)")
    parser.add_argument("--full", action="store_true", help="every graph line by line (reports only)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SYMBOL=SIZE",
        help="show bytes and peak at another size of a plan with dynamic shapes; may be repeated",
    )
    _add_output(parser, "write the report in another form: .html, .json, .txt, .svg or .dot")


def _add_diff(commands: Any) -> None:
    parser = _add_command(
        commands,
        "diff",
        _diff,
        "compare two stored plans or reports: what changed, and what it costs",
        "exit codes: 0 the decisions are the same; 1 they differ; 2 a file cannot be read\n\n"
        "examples:\n  remat diff before.json after.json\n  remat diff --json before.json after.json",
    )
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_pareto(commands: Any) -> None:
    text = "find how much time a training step takes for how much memory"
    epilog = f"{MODEL_HELP}\n\nexample:\n  remat pareto mymodel:make_model --input 'f32[8,128]' -o frontier.svg"
    parser = _add_command(commands, "pareto", _pareto, text, epilog)
    _add_model(parser)
    parser.add_argument("--num-budgets", type=int, default=16, help="how many budgets are tried (default: 16)")
    _add_output(parser, "write the frontier: .svg, .html, .json (with all plans) or .txt")


# ------------------------------------------------------------------------------------------------------- commands


def _explain(asked: argparse.Namespace) -> int:
    from ..report import FORMS, explain, pareto

    _check_output(asked, FORMS)
    options = {"inner": asked.inner, "cost_model": asked.cost_model}
    sizes = {"unbacked_hint": asked.unbacked_hint, "dynamic": asked.dynamic}
    bound = {"memory_budget": _budget(asked.memory_budget), "on_infeasible": asked.on_infeasible}
    with _loaded(asked) as (model, args, kwargs):
        report = explain(model, *args, progress=True, **bound, **options, **sizes, **kwargs)
        if asked.pareto:
            report = replace(report, pareto=pareto(model, *args, progress=True, **options, **kwargs))
    return _hand_over(report, asked, report.why(asked.why) if asked.why else None)


def _check_output(asked: argparse.Namespace, forms: Sequence[str]) -> None:
    """Refuse files that cannot be written before anything takes time."""
    for file in asked.output:
        form_of(file, forms)


@contextmanager
def _loaded(asked: argparse.Namespace) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The model and its inputs, on the device where they are asked for; what they raise is told in a line."""
    from .spec import load_model, make_inputs, placed

    hint = "" if asked.input else "; --input says with which inputs it is called"
    with placed(asked.device) as device, in_one_line(asked.model, hint):
        model = load_model(asked.model, device, is_function=asked.function)
        yield model, *make_inputs(asked.input, device)


def _budget(text: str | None) -> Any:
    """A budget as Python takes it: a bare number is bytes if it is whole, a fraction if it is not."""
    for kind in (int, float):
        try:
            return text if text is None else kind(text)
        except ValueError:
            continue
    return text


def _hand_over(report: Any, asked: argparse.Namespace, why: Any, *, full: bool = False) -> int:
    """Write the files that were asked for, and print."""
    for file in asked.output:
        report.save(file)
        print(f"remat: wrote {file}", file=sys.stderr)
    if asked.json:
        print(report.to_json(), end="")
    elif why is not None:
        print(why)
    elif not asked.output:
        print(report.to_text() if full else report)
    return OK


def _show(asked: argparse.Namespace) -> int:
    from ..passes.plans import Plan
    from ..report import FORMS, Report

    _check_output(asked, FORMS)
    text = parsed_file(asked.file, lambda text: no_frontier(text, asked.file))
    if asked.set:
        return _show_at(asked)
    if not _is_report(text):
        plan = Plan.load(asked.file)
        if asked.why or asked.full or asked.output:
            raise OptionError(f"{asked.file} holds a plan without its graph; --why, --full and -o need a report")
        print(plan.to_json() if asked.json else plan)
        return OK
    report = Report.load(asked.file)
    return _hand_over(report, asked, report.why(asked.why) if asked.why else None, full=asked.full)


def _show_at(asked: argparse.Namespace) -> int:
    """Show the plans of a file at other sizes."""
    from ..passes.plans import plans_at
    from ..report import load_plans

    if asked.why or asked.full or asked.output:
        raise OptionError("--set shows plans at other sizes; --why, --full and -o are for the sizes of the example")
    plans = plans_at(load_plans(asked.file), dict(_sizes(asked.set)))
    if asked.json:
        texts = [plan.to_json() for plan in plans]
        print(texts[0] if len(texts) == 1 else "[\n" + ",\n".join(texts) + "]\n", end="")
    else:
        print("\n\n".join(str(plan) for plan in plans))
    return OK


def _sizes(given: Sequence[str]) -> Iterator[tuple[str, int]]:
    for text in given:
        name, equals, size = text.partition("=")
        if not equals or not name or not size.strip().lstrip("-").isdecimal():
            raise OptionError(f"--set {text}: expected SYMBOL=SIZE, such as s1=8192")
        yield name.strip(), int(size)


def _is_report(text: str) -> bool:
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        return False
    return isinstance(data, dict) and "graphs" in data


def _diff(asked: argparse.Namespace) -> int:
    from ..report import compare, load_plans

    found = compare(load_plans(asked.before), load_plans(asked.after))
    print(found.to_json() if asked.json else found)
    return DIFFERENT if found.is_different else OK


def _pareto(asked: argparse.Namespace) -> int:
    from ..report import FRONTIER_FORMS, pareto

    _check_output(asked, FRONTIER_FORMS)
    options = {"inner": asked.inner, "cost_model": asked.cost_model, "num_budgets": asked.num_budgets}
    with _loaded(asked) as (model, args, kwargs):
        frontier = pareto(model, *args, progress=True, **options, **kwargs)
    return _hand_over(frontier, asked, None)


if __name__ == "__main__":
    sys.exit(main())
