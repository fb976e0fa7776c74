"""`remat.integrations` against the installed releases of the libraries it is for."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.eager_testing import OpCounter
from torch import nn

import remat
from remat.integrations import torchtitan
from remat.regions.region import RegionCall

pytestmark = [
    # Dynamo looks at the gradient of every input.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

TOKENS = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(left) == len(right) > 0
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_remat_imports_none_of_the_libraries() -> None:
    names = ["transformers", "accelerate", "lightning", "remat.integrations"]
    code = (
        f"import sys, remat, remat.wrappers\nfound = [m for m in {names} if m in sys.modules]\nassert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- Transformers ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attention_dropout=0.1,
    )
    return transformers.LlamaForCausalLM(config).train()


def llama_step(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    return gradients(model)


@pytest.mark.parametrize(
    ("options", "num_runs"),
    [
        ({}, 6),
        ({"policy": remat.policies.save_matmuls()}, 6),
        ({"every_n_layers": 3}, 4),
        ({"memory_budget": 0.9}, 6),
    ],
    ids=["bare", "policy", "every_third", "budget"],
)
def test_enabled_layers_are_regions(llama, options, num_runs) -> None:
    from remat.integrations.transformers import enable

    model, plain = copy.deepcopy(llama), copy.deepcopy(llama)
    names = enable(model, **options)
    assert "model.layers.0" in names
    assert isinstance(model.model.layers[0]._gradient_checkpointing_func, RegionCall)
    expected = llama_step(plain)
    with OpCounter() as counter:
        result = llama_step(copy.deepcopy(model)) if "memory_budget" not in options else expected
    assert_same(result, expected)
    if "memory_budget" in options:  # planned with the compiler, which stays away while somebody looks at ops
        assert_same(llama_step(model), expected)
    else:
        assert counter["silu.default"] == num_runs
    switch_off = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    switch_off()
    with OpCounter() as counter:
        llama_step(model)
    assert counter["silu.default"] == 3


def test_enabled_model_is_compiled_with_its_regions(llama, tmp_path) -> None:
    from remat.integrations.transformers import enable

    model, plain = copy.deepcopy(llama), copy.deepcopy(llama)
    enable(model, policy=remat.policies.save_matmuls())
    model.compile(backend="remat", options={"inner": "aot_eager", "dump": str(tmp_path)}, fullgraph=True)
    torch.testing.assert_close(llama_step(model), llama_step(plain))
    (plan,) = (remat.Plan.load(path) for path in tmp_path.glob("*.json"))
    assert {f"model.layers.{i}" for i in range(3)} <= {decision.region for decision in plan.decisions}


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = TOKENS[index % 2]
        return {"input_ids": tokens, "labels": tokens}


def train(model: nn.Module, folder: Any, callbacks: list[Any], **arguments: Any) -> dict[str, torch.Tensor]:
    from transformers import Trainer, TrainingArguments

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trainer's own
        settings = TrainingArguments(
            output_dir=str(folder),
            max_steps=2,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
            seed=3,
            **arguments,
        )
        Trainer(model=model, args=settings, train_dataset=Tokens(), callbacks=callbacks).train()
    return model.state_dict()


@pytest.mark.parametrize(
    "options",
    [{}, {"policy": remat.policies.save_matmuls()}, {"compile": {"inner": "aot_eager", "memory_budget": 0.6}}],
    ids=["bare", "policy", "compiled"],
)
def test_trainer_trains_alike_with_the_callback(llama, options, tmp_path) -> None:
    from remat.integrations.transformers import RematCallback

    pytest.importorskip("accelerate")
    model, plain = copy.deepcopy(llama), copy.deepcopy(llama)
    for part in (model, plain):
        part.config.attention_dropout = 0.0
        for layer in part.model.layers:
            layer.self_attn.attention_dropout = 0.0
    expected = train(plain, tmp_path, [])
    result = train(model, tmp_path, [RematCallback(**options)], gradient_checkpointing=not options)
    assert list(result) == list(expected)
    if "compile" in options:
        torch.testing.assert_close(result, expected)
    else:
        assert_same([*result.values()], [*expected.values()])
        assert isinstance(model.model.layers[0]._gradient_checkpointing_func, RegionCall)


def test_wrong_option_is_refused_when_the_callback_is_made() -> None:
    pytest.importorskip("transformers")
    from remat.integrations.transformers import RematCallback

    with pytest.raises(remat.OptionError, match="no option 'polcy'"):
        RematCallback(polcy=None)


# --- Accelerate --------------------------------------------------------------------------------------------------


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4)))


def net_step(model: nn.Module, backward: Any = None) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(torch.randn(8, 16)).square().sum()
    backward(loss) if backward is not None else loss.backward()
    return gradients(model)


@pytest.mark.parametrize("regional", [False, True], ids=["whole", "regional"])
def test_accelerator_compiles_with_the_plugin(regional) -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from remat.integrations.accelerate import dynamo_plugin

    options = {"inner": "aot_eager", "memory_budget": 0.9}
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, dynamo_plugin=dynamo_plugin(use_regional_compilation=regional, **options))
    plain = make_net()
    model = accelerator.prepare(make_net())
    with remat_compilations() as compiled:
        result = net_step(model, accelerator.backward)
    assert compiled
    assert_same(result, net_step(plain))
    assert list(accelerator.unwrap_model(model, keep_torch_compile=False).state_dict()) == list(plain.state_dict())
    AcceleratorState._reset_state(reset_partial_state=True)


class remat_compilations:
    """Notes every graph that remat splits."""

    def __enter__(self) -> list[Any]:
        from remat.compiled.partitioner import Partitioner

        self._call, found = Partitioner.__call__, []

        def noting(partitioner: Any, *args: Any, **kwargs: Any) -> Any:
            found.append(partitioner)
            return self._call(partitioner, *args, **kwargs)

        Partitioner.__call__ = noting  # type: ignore[method-assign]
        return found

    def __exit__(self, *_: object) -> None:
        from remat.compiled.partitioner import Partitioner

        Partitioner.__call__ = self._call  # type: ignore[method-assign]


def test_wrong_option_is_refused_when_the_plugin_is_made() -> None:
    pytest.importorskip("accelerate")
    from remat.integrations.accelerate import dynamo_plugin

    with pytest.raises(remat.OptionError, match="memory_budget"):
        dynamo_plugin(memory_budget=-1)


# --- Lightning ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::Warning")  # the trainer's own, about workers, loggers and the like
def test_lightning_fits_alike_with_the_callback(tmp_path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from remat.integrations.lightning import RematCallback

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.net(batch[0]).square().sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    def fit(callbacks: list[Any]) -> tuple[Task, int]:
        torch.manual_seed(2)
        task, data = Task(), torch.utils.data.TensorDataset(torch.randn(4, 16))
        trainer = lightning.Trainer(
            max_steps=2,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            callbacks=callbacks,
        )
        with OpCounter() as counter:
            trainer.fit(task, torch.utils.data.DataLoader(data, batch_size=2))
        return task, counter["tanh.default"]

    plain, num_plain = fit([])
    callback = RematCallback("net.*", policy=remat.policies.recompute_all())
    fitted, num_fitted = fit([callback])
    assert (num_plain, num_fitted) == (8, 16)
    assert_same([*fitted.state_dict().values()], [*plain.state_dict().values()])
    assert len(remat.remove(fitted)) == 0 and callback.applied is None, "the regions are gone after fitting"


# --- torchtitan --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.gate, self.up = nn.Linear(16, 16, bias=False), nn.Linear(16, 4, bias=False), nn.Linear(4, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.q(x.sin()).view(2, 4, 1, 16)
        h = nn.functional.scaled_dot_product_attention(h, h, h).view(8, 16)
        return x + self.up(self.gate(h).sigmoid()).exp().tanh()


class Titan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


FORCED = "per_op_sac_force_recompute_mm_shapes_by_fqns"
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu.default"


@pytest.mark.parametrize(
    ("config", "num_marked", "counts"),
    [
        ({"mode": "none"}, 0, {"sin.default": 4, "mm.default": 31, ATTENTION: 4}),
        ({"mode": "full", "early_stop": False}, 4, {"sin.default": 8, "mm.default": 39, ATTENTION: 8}),
        ({"mode": "selective", "selective_ac_option": "2"}, 2, {"sin.default": 6, ATTENTION: 6}),
        ({"mode": "selective", "selective_ac_option": 4}, 1, {"sin.default": 5, ATTENTION: 5}),
        ({"mode": "selective", "selective_ac_option": "op"}, 4, {"sin.default": 8, "mm.default": 35, ATTENTION: 4}),
        ({"mode": "selective", FORCED: ["gate"]}, 4, {"sin.default": 8, "mm.default": 39, ATTENTION: 4}),
    ],
    ids=["none", "full", "every_2", "every_4", "op", "forced"],
)
def test_settings_of_torchtitan_do_what_they_say(config, num_marked, counts) -> None:
    model = Titan()
    assert len(torchtitan.apply_ac(model, SimpleNamespace(**config))) == num_marked
    with OpCounter() as counter:
        result = titan_step(model)
    assert {op: counter[op] for op in counts} == counts
    assert_same(result, titan_step(Titan()))
    assert list(model.state_dict()) == list(Titan().state_dict())


class SelectiveAC:
    """Settings are told by their class since torchtitan 0.3, and users derive their own from it."""

    @dataclass
    class Config:
        force_recompute_mm_shapes_by_fqns: tuple[str, ...] = ("moe.router.gate",)


class OwnAC(SelectiveAC):
    @dataclass
    class Config(SelectiveAC.Config):
        pass


class FullAC:
    @dataclass
    class Config:
        preserve_rng_state: bool = True
        determinism_check: str = "default"
        debug: bool = False


class MemoryBudgetAC:
    @dataclass
    class Config:
        memory_budget: float = 1.0


BY_CLASS = [
    (None, 0, {"sin.default": 4, ATTENTION: 4}),
    (FullAC.Config(), 4, {"sin.default": 8, ATTENTION: 8}),
    (SelectiveAC.Config(), 4, {"sin.default": 8, "mm.default": 35, ATTENTION: 4}),
    (OwnAC.Config(("gate",)), 4, {"sin.default": 8, "mm.default": 39, ATTENTION: 4}),
]


@pytest.mark.parametrize(("config", "num_marked", "counts"), BY_CLASS)
def test_settings_that_are_told_by_their_class_do_what_they_say(config, num_marked, counts) -> None:
    model = Titan()
    assert len(torchtitan.apply_ac(model, config)) == num_marked
    with OpCounter() as counter:
        result = titan_step(model)
    assert {op: counter[op] for op in counts} == counts
    assert_same(result, titan_step(Titan()))


def test_stand_ins_are_named_as_the_classes_of_torchtitan_are() -> None:
    installed = pytest.importorskip(
        "torchtitan.distributed.activation_checkpoint", reason="torchtitan brings forty packages of its own"
    )
    for stand_in in (FullAC, SelectiveAC, MemoryBudgetAC):
        config = getattr(installed, stand_in.__name__).Config
        assert config.__qualname__ == stand_in.Config.__qualname__
        assert {field.name for field in fields(stand_in.Config)} <= {field.name for field in fields(config)}
        torchtitan.apply_ac(Titan(), config())


def titan_step(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(torch.randn(8, 16)).sum().backward()
    return gradients(model)


@pytest.mark.parametrize("config", [SimpleNamespace(mode="memory_budget", memory_budget=1.0), MemoryBudgetAC.Config()])
def test_budget_of_torchtitan_is_one_for_each_block(config) -> None:
    model = Titan()
    applied = torchtitan.apply_ac(model, config)
    assert applied.names == tuple(f"layers.{i}" for i in range(4))
    assert_same(titan_step(model), titan_step(Titan()))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mode": "everything"}, "no mode 'everything'; it has 'none', 'full', 'selective', 'memory_budget'"),
        ({"mode": "selective", "selective_ac_option": "0"}, "selective_ac_option='0': expected 'op'"),
        ({"mode": "memory_budget", "memory_budget": 0.0}, "memory_budget"),
    ],
)
def test_settings_that_mean_nothing_are_refused(config, message) -> None:
    with pytest.raises(remat.OptionError, match=message):
        torchtitan.apply_ac(Titan(), SimpleNamespace(**config))
