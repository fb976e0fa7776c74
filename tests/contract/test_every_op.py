"""Every differentiable op torch can sample, between two pointwise ops: remat changes no output and no gradient.

`pytest -m slow tests/contract/test_every_op.py` runs them all and ends with a table of what ran and what did not, and
why. The default run takes a fixed sample of them.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo.config
from support.harness import (
    Engine,
    Make,
    Program,
    Record,
    assert_records_agree,
    detached_copy,
    identity,
    recompute_is_free,
    take_step,
)
from torch.utils._pytree import tree_leaves, tree_map

with warnings.catch_warnings():
    # The table of ops builds samples of deprecated ops while it is imported.
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_methods_invocations
    from torch.testing._internal.common_methods_invocations import op_db

# Hundreds of ops warn about themselves (deprecation, complex casts, beta state); what they say is not under test.
pytestmark = pytest.mark.filterwarnings("ignore")

NUM_SAMPLES = 2
SAMPLED_FROM = 12

# One or two of each kind: matmul, reduction, norm, convolution, attention, random, view, multi-output, complex,
# discrete, indexing, data-dependent shape, in-place variant.
DEFAULT_OPS = {
    "addmm", "as_strided", "baddbmm", "bernoulli", "clamp", "cumprod", "einsum", "fft.rfft", "index_put", "linalg.svd",
    "masked_select", "max.reduction_with_dim", "nn.functional.batch_norm", "nn.functional.conv2d",
    "nn.functional.cross_entropy", "nn.functional.dropout", "nn.functional.embedding", "nn.functional.layer_norm",
    "nn.functional.rrelu", "nn.functional.scaled_dot_product_attention", "scatter_add", "sort", "split", "topk",
    "unbind", "var_mean", "view_as_complex", "where",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One op of torch's table, called as a function or in place."""

    info: Any
    is_inplace: bool = False

    @property
    def name(self) -> str:
        """The op's name with its variant, as pytest shows it."""
        variant = f".{self.info.variant_test_name}" if self.info.variant_test_name else ""
        return f"{self.info.name}{variant}{'(in place)' if self.is_inplace else ''}"

    @property
    def op(self) -> Program:
        """The callable under test."""
        return self.info.get_inplace() if self.is_inplace else self.info.get_op()

    @property
    def dtype(self) -> torch.dtype:
        """The most precise type the op has a gradient for."""
        supported = self.info.supported_backward_dtypes("cpu")
        ranked = (torch.float64, torch.float32, torch.complex128, torch.complex64, torch.bfloat16, torch.float16)
        return next(dtype for dtype in ranked if dtype in supported)


def has_gradient(info: Any) -> bool:
    return info.supports_autograd and bool(info.supported_backward_dtypes("cpu"))


NUM_WITHOUT_GRADIENT = sum(not has_gradient(info) for info in op_db)
CASES = [Case(info) for info in op_db if has_gradient(info)]
CASES += [Case(info, is_inplace=True) for info in op_db if has_gradient(info) and info.get_inplace() is not None]


def _is_default(case: Case) -> bool:
    full_name = case.name.removesuffix("(in place)")
    return full_name in DEFAULT_OPS and not (case.is_inplace and full_name != "clamp")


every_case = pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[pytest.mark.slow]) for case in CASES]
)
sample_of_cases = pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name) for case in CASES if _is_default(case)]
)


def compose(op: Program) -> Program:
    """Put the op between pointwise ones, so that there are intermediates to save or recompute around it."""

    def program(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = tree_map(_before, (args, kwargs))
        return tree_map(_after, op(*args, **kwargs))

    return program


def _before(value: Any) -> Any:
    # Leaves every value as it is: many ops take only positive or symmetric or otherwise chosen inputs.
    return value * 1.0 if isinstance(value, torch.Tensor) and value.requires_grad else value


def _after(value: Any) -> Any:
    # Backward needs the factor, so it needs the op's output or has to run the op again.
    return value * value if isinstance(value, torch.Tensor) and _is_continuous(value) else value


def _is_continuous(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def make_steps(case: Case) -> list[Make]:
    """Take the first and a middle one of the op's samples."""
    torch.manual_seed(0)
    samples = list(itertools.islice(case.info.sample_inputs("cpu", case.dtype, requires_grad=True), SAMPLED_FROM))
    if case.is_inplace:
        samples = [sample for sample in samples if not sample.broadcasts_input and torch.is_tensor(sample.input)]
    samples = [sample for sample in samples if any(_requires_grad(leaf) for leaf in tree_leaves(_arguments(sample)))]
    picked = samples[:: max(1, len(samples) // NUM_SAMPLES)][:NUM_SAMPLES]
    return [_make_step(case, sample) for sample in picked]


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (sample.input, *sample.args), sample.kwargs


def _make_step(case: Case, sample: Any) -> Make:
    process = sample.output_process_fn_grad

    def op(*args: Any, **kwargs: Any) -> Any:
        return process(case.op(*args, **kwargs))

    return lambda: (compose(op), detached_copy(_arguments(sample)))


class Unrunnable(Exception):
    """The step fails without remat, so there is nothing to compare with."""


def reference_step(make: Make) -> tuple[Record, bool]:
    """Run the step with torch's own aot_eager; say whether it went into one graph."""
    try:
        take_step(identity, make)
    except Exception as error:
        raise Unrunnable(f"eager raises {_one_line(error)}") from error
    for fullgraph in (True, False):
        try:
            return take_step(_compile_without_remat(fullgraph), make), fullgraph
        except Exception as error:  # noqa: BLE001  whatever torch raises is its own limit here
            reason = f"torch's aot_eager raises {_one_line(error)}"
    raise Unrunnable(reason)


def _compile_without_remat(fullgraph: bool) -> Callable[[Program], Program]:
    return functools.partial(Engine("aot_eager").compile_without_remat, fullgraph=fullgraph)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"


def assert_agrees(make: Make, expected: Record, fullgraph: bool) -> None:
    """Fail unless remat's steps, at the usual price of recomputing and at none, equal the reference bit for bit."""
    for cost_model in ("roofline", recompute_is_free):
        engine = Engine("aot_eager", cost_model)
        ours = take_step(functools.partial(engine.compile, fullgraph=fullgraph), make)
        assert_records_agree(ours, expected, exact=True)


def is_deterministic(make: Make, fullgraph: bool) -> bool:
    """Whether torch's own aot_eager gives the same step twice."""
    first, second = (take_step(_compile_without_remat(fullgraph), make) for _ in range(2))
    try:
        assert_records_agree(first, second, exact=True)
    except AssertionError:
        return False
    return True


def check(case: Case, record_property: Callable[[str, Any], None]) -> None:
    """Compare every sample of an op with and without remat, and note how it went for the table."""
    num_steps, num_broken, reasons = 0, 0, []
    for make in make_steps(case):
        try:
            expected, fullgraph = reference_step(make)
        except Unrunnable as unrunnable:
            reasons.append(str(unrunnable))
            continue
        try:
            assert_agrees(make, expected, fullgraph)
        except AssertionError:
            if is_deterministic(make, fullgraph):
                raise
            reasons.append("torch's aot_eager gives another result each time")
            continue
        num_steps += 1
        num_broken += not fullgraph
    record_property(
        "every_op",
        {
            "op": case.name,
            "num_steps": num_steps,
            "num_broken": num_broken,
            "reasons": reasons,
            "num_without_gradient": NUM_WITHOUT_GRADIENT,
        },
    )
    if not num_steps:
        pytest.skip(reasons[0] if reasons else "the table has no differentiable sample of it for the CPU")


@pytest.fixture(autouse=True)
def random_ops_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call random ops as they are: the table wraps them in a change of seed, which no graph can hold."""
    monkeypatch.setattr(common_methods_invocations, "wrapper_set_seed", lambda op, *args, **kwargs: op(*args, **kwargs))


@pytest.fixture(autouse=True)
def data_dependent_graphs() -> Iterator[None]:
    """Capture sizes that depend on data: a graph break there would keep the op out of the graphs under test."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


@every_case
def test_op_gives_the_same_outputs_and_gradients(case: Case, record_property: Callable[[str, Any], None]) -> None:
    check(case, record_property)


@sample_of_cases
def test_sampled_op_gives_the_same_outputs_and_gradients(
    case: Case, record_property: Callable[[str, Any], None]
) -> None:
    check(case, record_property)


def test_default_sample_has_every_op_it_names() -> None:
    assert {case.name for case in CASES if _is_default(case) and not case.is_inplace} == DEFAULT_OPS
