"""The backend as users meet it: found by name, strict about its options, usable without torch.compile's help."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor
import torch._inductor.config
from functorch.compile import aot_function, make_boxed_func, nop
from support.harness import recompute_is_free, recompute_is_ruinous
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.custom_graph_pass import CustomGraphPass

import remat
from remat.compiled.options import Options
from remat.passes.shared.errors import OptionError


def program(x: torch.Tensor) -> torch.Tensor:
    return (x.sin().exp() * x).tanh()


def gradient_of(compiled: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    compiled(x).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.fixture
def expected_gradient() -> torch.Tensor:
    return gradient_of(program)


def run_python(code: str, **environment: str) -> str:
    """Run code in a new interpreter and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- found by name -----------------------------------------------------------------------------------------------


def test_backend_is_found_with_nothing_imported_but_torch() -> None:
    code = """
import sys, torch
assert "remat" in torch._dynamo.list_backends()
assert "remat" not in sys.modules
compiled = torch.compile(lambda x: x.sin().exp(), backend="remat", options={"inner": "aot_eager"})
x = torch.ones(3, requires_grad=True)
compiled(x).sum().backward()
torch.testing.assert_close(x.grad, x.cos() * x.sin().exp())
assert "remat.backend" in sys.modules
"""
    run_python(code)


def test_importing_remat_does_not_load_the_compilers() -> None:
    code = """
import sys, remat
print([name for name in ("torch._dynamo", "torch._inductor", "networkx", "scipy") if name in sys.modules])
"""
    assert run_python(code).strip() == "[]"


# --- options -----------------------------------------------------------------------------------------------------

OWN = "'inner', 'memory_budget', 'on_infeasible', 'cost_model', 'unbacked_hint', 'plan', 'ranks' or 'dump'"

WRONG_OPTIONS = [
    (
        {"memory_bugdet": 0.5},
        f"unknown option 'memory_bugdet': remat has {OWN}; anything else must be an option of inductor. "
        "Did you mean 'memory_budget'?",
    ),
    (
        {"inner": "tvm"},
        "inner='tvm': expected 'inductor' or 'aot_eager', or a callable backend that takes "
        "(graph_module, example_inputs)",
    ),
    (
        {"inner": None},
        "inner=None: expected 'inductor' or 'aot_eager', or a callable backend that takes "
        "(graph_module, example_inputs)",
    ),
    (
        {"cost_model": "guess"},
        "cost_model='guess': expected 'roofline', 'flops' or 'profile', or a callable that takes an OpCall and "
        "returns seconds",
    ),
    (
        {"cost_model": 3.0},
        "cost_model=3.0: expected 'roofline', 'flops' or 'profile', or a callable that takes an OpCall and "
        "returns seconds",
    ),
    ({"dump": 7}, "dump=7: expected None or the path of a folder"),
    ({"max_autotune": "yes"}, "option 'max_autotune' of inductor is a bool, got 'yes'"),
    (
        {"inner": "aot_eager", "max_autotune": True},
        "option 'max_autotune' is a setting of inductor, but inner='aot_eager'; leave it out",
    ),
    (
        {"custom_partitioner_fn": None},
        "option 'custom_partitioner_fn': remat is the partitioner; use backend='inductor' to set another one",
    ),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS, ids=lambda value: str(value)[:40])
def test_wrong_option_says_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse(options)
    assert str(caught.value) == message


def test_wrong_option_reaches_the_user_of_torch_compile() -> None:
    compiled = torch.compile(program, backend="remat", options={"memory_bugdet": 0.5})
    with pytest.raises(BackendCompilerFailed, match="unknown option 'memory_bugdet'") as caught:
        compiled(torch.ones(3, requires_grad=True))
    assert isinstance(caught.value.inner_exception, OptionError)


def test_options_that_are_no_dictionary_are_refused() -> None:
    with pytest.raises(OptionError, match="expected a dictionary from option names to values"):
        Options.parse(["inner"])  # type: ignore[arg-type]


def test_partitioner_refuses_what_belongs_to_the_backend() -> None:
    with pytest.raises(OptionError) as caught:
        remat.partitioner(max_autotune=True)
    assert str(caught.value) == (
        "unknown option 'max_autotune': a partitioner has "
        "'memory_budget', 'on_infeasible', 'cost_model', 'unbacked_hint', 'plan', 'ranks' or 'dump'"
    )


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (-1.0, "the cost model returned -1.0 for aten.sin.default; a price is a number of seconds from 0 to 1e+09"),
        (
            float("nan"),
            "the cost model returned nan for aten.sin.default; a price is a number of seconds from 0 to 1e+09",
        ),
        (
            float("inf"),
            "the cost model returned inf for aten.sin.default; a price is a number of seconds from 0 to 1e+09",
        ),
        ("long", "the cost model returned 'long' for aten.sin.default; it must return seconds as a number"),
    ],
)
def test_cost_model_that_returns_no_price_is_refused(seconds: Any, message: str) -> None:
    compiled = torch.compile(
        program, backend="remat", options={"inner": "aot_eager", "cost_model": lambda call: seconds}
    )
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(torch.ones(3, requires_grad=True))
    assert isinstance(caught.value.inner_exception, OptionError)
    assert str(caught.value.inner_exception) == message


def test_option_of_inductor_reaches_inductor() -> None:
    seen: list[bool] = []

    class Spy(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            seen.append(torch._inductor.config.epilogue_fusion)

        def uuid(self) -> str:
            return "spy"

    options = {"epilogue_fusion": False, "joint_custom_post_pass": Spy()}
    gradient_of(torch.compile(program, backend="remat", options=options))
    assert seen == [False]
    assert torch._inductor.config.epilogue_fusion


# --- modes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_mode_works_as_with_inductor(mode: str, expected_gradient: torch.Tensor) -> None:
    torch.testing.assert_close(gradient_of(torch.compile(program, backend="remat", mode=mode)), expected_gradient)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_mode_means_the_settings_that_inductor_gives_it(mode: str) -> None:
    assert Options.parse(None, mode).inductor == torch._inductor.list_mode_options(mode)


def test_unknown_mode_says_what_is_allowed() -> None:
    compiled = torch.compile(program, backend="remat", mode="fastest")
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(torch.ones(3, requires_grad=True))
    listed = ", ".join(repr(mode) for mode in torch._inductor.list_mode_options())
    message = str(caught.value.inner_exception)
    assert message.startswith("mode='fastest': expected ")
    assert message.removeprefix("mode='fastest': expected ").replace(" or ", ", ") == listed


def test_mode_without_inductor_is_refused() -> None:
    with pytest.raises(OptionError, match="is a setting of inductor, but inner='aot_eager'; leave it out"):
        Options.parse({"inner": "aot_eager"}, "max-autotune")


# --- inner compilers ---------------------------------------------------------------------------------------------


class Recorder:
    """A compiler that runs graphs as they are and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(gm)
        return make_boxed_func(gm.forward)


def num_calls(gm: torch.fx.GraphModule, op: Any) -> int:
    return sum(node.target is op for node in gm.graph.nodes)


def test_inner_may_be_a_callable_that_gets_both_graphs(expected_gradient: torch.Tensor) -> None:
    recorder = Recorder()
    compiled = torch.compile(program, backend="remat", options={"inner": recorder, "cost_model": recompute_is_free})
    torch.testing.assert_close(gradient_of(compiled), expected_gradient)
    forward, backward = recorder.graphs
    assert num_calls(forward, torch.ops.aten.tanh.default) == 1
    assert num_calls(backward, torch.ops.aten.tanh.default) == 1


def test_inner_may_return_a_plain_function(expected_gradient: torch.Tensor) -> None:
    compiled = torch.compile(program, backend="remat", options={"inner": lambda gm, example_inputs: gm.forward})
    torch.testing.assert_close(gradient_of(compiled), expected_gradient)


def test_inner_callable_gets_one_graph_for_inference() -> None:
    recorder = Recorder()
    compiled = torch.compile(program, backend="remat", options={"inner": recorder})
    x = torch.ones(3)
    torch.testing.assert_close(compiled(x), program(x))
    assert len(recorder.graphs) == 1


@pytest.mark.parametrize("cost_model", ["roofline", "flops", "profile"])
def test_every_named_cost_model_gives_the_right_gradient(cost_model: str, expected_gradient: torch.Tensor) -> None:
    compiled = torch.compile(program, backend="remat", options={"inner": "aot_eager", "cost_model": cost_model})
    torch.testing.assert_close(gradient_of(compiled), expected_gradient)


def test_price_of_recomputing_decides_between_saving_and_recomputing() -> None:
    num_recomputed = {}
    for cost_model in (recompute_is_free, recompute_is_ruinous):
        torch._dynamo.reset()
        recorder = Recorder()
        gradient_of(torch.compile(program, backend="remat", options={"inner": recorder, "cost_model": cost_model}))
        num_recomputed[cost_model] = num_calls(recorder.graphs[1], torch.ops.aten.exp.default)
    assert num_recomputed == {recompute_is_free: 1, recompute_is_ruinous: 0}


# --- without backend="remat" -------------------------------------------------------------------------------------


def test_partitioner_works_with_aot_autograd(expected_gradient: torch.Tensor) -> None:
    backend = aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=remat.partitioner())
    torch.testing.assert_close(gradient_of(torch.compile(program, backend=backend)), expected_gradient)


def test_partitioner_works_with_aot_function(expected_gradient: torch.Tensor) -> None:
    recorder = Recorder()
    compiled = aot_function(
        program,
        fw_compiler=nop,
        bw_compiler=recorder,
        partition_fn=remat.partitioner(cost_model=recompute_is_free),
    )
    torch.testing.assert_close(gradient_of(compiled), expected_gradient)
    assert num_calls(recorder.graphs[0], torch.ops.aten.exp.default) == 1


def test_partitioner_works_as_inductors_custom_partitioner(tmp_path: Path, expected_gradient: torch.Tensor) -> None:
    with torch._inductor.config.patch(custom_partitioner_fn=remat.partitioner(dump=tmp_path)):
        torch.testing.assert_close(gradient_of(torch.compile(program, backend="inductor")), expected_gradient)
    assert len(list(tmp_path.glob("*.json"))) == 1


# --- dumps and reproducibility -----------------------------------------------------------------------------------


def test_dump_folder_gets_one_plan_for_each_graph(tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    compiled = torch.compile(program, backend="remat", options={"inner": "aot_eager", "dump": folder})
    gradient_of(compiled)
    (path,) = folder.glob("*.json")
    plan = remat.Plan.from_json(path.read_text())
    assert {decision.op for decision in plan.decisions} & {"aten.sin.default", "aten.exp.default"}


def test_environment_asks_for_dumps_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_DUMP", str(tmp_path))
    gradient_of(torch.compile(program, backend="remat", options={"inner": "aot_eager"}))
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_plans_are_the_same_in_every_process(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """
import sys, torch
torch.set_num_threads(1)
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
compiled = torch.compile(layer, backend="remat", options={"inner": "aot_eager", "dump": sys.argv[1]})
compiled(torch.randn(2, 6, 16)).sum().backward()
"""
    )
    plans = []
    for seed in ("0", "1"):
        folder = tmp_path / seed
        command = [sys.executable, str(script), str(folder)]
        environment = {**os.environ, "PYTHONHASHSEED": seed, "XDG_CACHE_HOME": str(tmp_path / "constants")}
        subprocess.run(command, env=environment, check=True, capture_output=True)
        plans.append([json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))])
    assert plans[0]
    assert plans[0] == plans[1]
