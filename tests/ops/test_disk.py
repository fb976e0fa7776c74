"""Offloading to a file: what comes back, what it takes of memory, and what is left behind."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.eager_testing import OpCounter
from torch import nn

import remat
from remat.passes.ops import disk
from remat.passes.ops.disk import DiskTensor, arena_of
from remat.wrappers import checkpoint_wrapper, offload_wrapper

FILE_SYSTEM_OF = disk._file_system_of
POLICIES = {
    "offload_all": remat.policies.offload_all(),
    "offload_names": remat.policies.offload_names("h"),
    "function": lambda ctx, op, *args, **kwargs: remat.CheckpointPolicy.PREFER_CPU_OFFLOAD,
}


@pytest.fixture(autouse=True)
def any_folder_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tests' folder be in memory, which is warned of."""
    monkeypatch.setattr(disk, "_file_system_of", lambda path: "")


def file_bytes(folder: Path) -> int:
    gc.collect()
    return arena_of(str(folder)).file_bytes


def in_subprocess(code: str, folder: Path, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert not check or done.returncode == 0, done.stderr
    return done


# --- one tensor --------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
DTYPES += [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype, tmp_path) -> None:
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (20_480,), dtype=torch.uint8)
    tensor = bits.view(dtype)
    found = DiskTensor(tensor, str(tmp_path)).read()
    assert found.dtype == dtype and torch.equal(found.view(torch.uint8), bits)


LAYOUTS = {
    "transposed": lambda: torch.randn(64, 80).t(),
    "permuted": lambda: torch.randn(8, 16, 32).permute(2, 0, 1),
    "expanded": lambda: torch.randn(64, 1).expand(64, 100_000),
    "sliced": lambda: torch.randn(64, 300)[:, 100:200],
    "column": lambda: torch.randn(2000, 300)[:, 7],
    "offset": lambda: torch.randn(10_000)[5:8000],
    "overlapping": lambda: torch.randn(5000).unfold(0, 100, 1),
    "conjugate": lambda: torch.randn(64, 64, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(64, 64, dtype=torch.complex64).conj().imag,
    "scalar view": lambda: torch.randn(5000)[3].expand(2000),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_comes_back_with_its_strides(make, tmp_path) -> None:
    tensor = make()
    found = DiskTensor(tensor, str(tmp_path)).read()
    assert torch.equal(found, tensor)
    assert found.stride() == tensor.stride() and found.is_conj() == tensor.is_conj()


def test_expanded_tensor_takes_what_it_holds(tmp_path) -> None:
    kept = DiskTensor(torch.randn(64, 1).expand(64, 1_000_000), str(tmp_path))
    assert 0 < file_bytes(tmp_path) <= 4096
    assert kept is not None


def test_write_to_what_came_back_changes_nobody_elses(tmp_path) -> None:
    tensor = torch.randn(5000)
    stored = DiskTensor(tensor, str(tmp_path))
    first = stored.read()
    first.add_(1)
    assert torch.equal(stored.read(), tensor) and torch.equal(first, tensor + 1)


def test_range_is_free_once_neither_handle_nor_tensor_needs_it(tmp_path) -> None:
    tensor = torch.randn(5000)
    stored = DiskTensor(tensor, str(tmp_path))
    view = stored.read()[10:20]
    del stored
    others = [DiskTensor(torch.zeros(5000), str(tmp_path)) for _ in range(3)]
    assert torch.equal(view, tensor[10:20]), "its bytes were given to somebody else"
    assert file_bytes(tmp_path) > 0
    del view, others
    assert file_bytes(tmp_path) == 0


def test_freed_ranges_are_used_again(tmp_path) -> None:
    stored = [DiskTensor(torch.randn(5000), str(tmp_path)) for _ in range(4)]
    size = file_bytes(tmp_path)
    del stored[1:3]
    stored.append(DiskTensor(torch.randn(10_000), str(tmp_path)))
    assert file_bytes(tmp_path) == size
    stored.clear()
    assert file_bytes(tmp_path) == 0


@pytest.mark.parametrize(
    ("tensor", "goes"),
    [
        (torch.zeros(0), False),
        (torch.zeros(3), False),
        (torch.zeros(5000), True),
        (torch.zeros(5000, device="meta"), False),
        (torch.eye(100).to_sparse(), False),
        (torch._efficientzerotensor((80, 64)), False),
    ],
    ids=["empty", "small", "large", "meta", "sparse", "zeros without memory"],
)
def test_what_goes_to_a_file(tensor, goes) -> None:
    assert disk.goes_to_disk(tensor) is goes


# --- steps -------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 64)
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = remat.name(self.first(x), "h")
        a, b = h.chunk(2, dim=-1)
        h = torch.cat([a.sin() * b, b.transpose(0, 1).contiguous().t().exp()], dim=-1)
        return self.norm(self.second(nn.functional.dropout(h, 0.2))).relu_() * x[:, :1]


def run_step(model: nn.Module, call: Any = None, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(80, 64, dtype=dtype, requires_grad=True)
    model.to(dtype).zero_grad()
    out = (model if call is None else call)(x)
    out.sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_wrapper_gives_the_same_step_and_leaves_nothing(dtype, tmp_path) -> None:
    model = offload_wrapper(Net(), offload="disk", offload_folder=tmp_path)
    assert_same(run_step(model, dtype=dtype), run_step(Net(), dtype=dtype))
    assert file_bytes(tmp_path) == 0 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "engine"),
    # What inductor is given is what aot_eager is given, so one of them is enough.
    [*((name, engine) for name in POLICIES for engine in ("eager", "aot_eager")), ("offload_names", "inductor")],
)
def test_policy_gives_the_same_step_and_leaves_nothing(name, engine, tmp_path) -> None:
    def step(**options: Any) -> list[torch.Tensor]:
        model = Net()
        remat.apply(model, "", policy=POLICIES[name], **options)
        call = None if engine == "eager" else torch.compile(model, backend="remat", options={"inner": engine})
        return run_step(model, call)

    assert_same(step(offload="disk", offload_folder=tmp_path), step())
    assert file_bytes(tmp_path) == 0 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("engine", ["eager", "aot_eager", "inductor"])
def test_named_value_is_in_the_file_between_forward_and_backward(engine, tmp_path) -> None:
    model = Net()
    remat.apply(model, "", policy=remat.policies.offload_names("h"), offload="disk", offload_folder=tmp_path)
    call = model if engine == "eager" else torch.compile(model, backend="remat", options={"inner": engine})
    out = call(torch.randn(80, 64, requires_grad=True))
    assert file_bytes(tmp_path) == 8 * 4096, "80 x 96 floats, in whole pages"
    out.sum().backward()
    del out
    assert file_bytes(tmp_path) == 0


@pytest.mark.parametrize("engine", ["eager", "aot_eager"])
def test_observed_peak_leaves_out_what_is_on_disk(engine, tmp_path) -> None:
    def peak(**options: Any) -> int:
        model = nn.Sequential(*(nn.Tanh() for _ in range(8)))
        remat.apply(model, "", policy=remat.policies.offload_all(), **options)
        call = model
        if engine != "eager":
            call = torch.compile(model, backend="remat", options={"inner": engine})
        x = torch.randn(80, 64, requires_grad=True)
        return remat.observe(lambda: call(x).sum()).measured.forward_end_bytes

    assert peak() >= 8 * 80 * 64 * 4
    assert peak(offload="disk", offload_folder=tmp_path) <= 2 * 80 * 64 * 4


def test_offloaded_values_are_not_computed_again(tmp_path) -> None:
    model = Net()
    remat.apply(model, "", policy=remat.policies.offload_all(), offload="disk", offload_folder=tmp_path)
    with OpCounter() as counter:
        run_step(model)
    assert counter["sin.default"] == 1 and counter["exp.default"] == 1


def test_parameters_and_buffers_are_never_moved(tmp_path) -> None:
    model = offload_wrapper(nn.Linear(256, 256), offload="disk", offload_folder=tmp_path)
    out = model(torch.randn(2, 256))  # saves the weight's transpose, and an input below a page
    assert file_bytes(tmp_path) == 0
    outside = nn.Parameter(torch.randn(2, 2048))
    scaled = offload_wrapper(nn.Identity(), offload="disk", offload_folder=tmp_path)
    scaled.get_submodule("_checkpoint_wrapped_module").forward = lambda x: (x * outside).sin() * outside.view(-1)[0]
    out = scaled(torch.ones(2, 2048))
    assert file_bytes(tmp_path) == 3 * 4 * 4096, "the inputs of products and of the sine, not the parameter"
    out.sum().backward()


def test_tensor_saved_by_several_ops_is_written_once(tmp_path) -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() + x.cos() + x.tanh().detach() + x * 2

    x = torch.randn(100, 100, requires_grad=True)
    out = offload_wrapper(Branches(), offload="disk", offload_folder=tmp_path)(x)
    assert file_bytes(tmp_path) == 10 * 4096
    out.sum().backward()


def test_several_backwards_and_double_backward(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Softplus())
    wrapped = offload_wrapper(model, offload="disk", offload_folder=tmp_path)
    x = torch.randn(80, 64, requires_grad=True)

    def grads(call: nn.Module) -> list[torch.Tensor]:
        out = call(x)
        (first,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(again.square().sum(), x)
        return [first, again.detach(), second]

    assert_same(grads(wrapped), grads(model))
    assert file_bytes(tmp_path) == 0


def test_change_in_place_between_forward_and_backward_raises_as_without(tmp_path) -> None:
    x = torch.randn(80, 64, requires_grad=True)
    for call in (nn.Sigmoid(), offload_wrapper(nn.Sigmoid(), offload="disk", offload_folder=tmp_path)):
        out = call(x)
        with torch.no_grad():
            out.view(-1)[:1].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    untouched = torch.nn.Sigmoid()
    out = offload_wrapper(untouched, offload="disk", offload_folder=tmp_path)(x)
    (out * 2).add_(1).sum().backward()


def test_change_in_place_raises_where_nothing_is_moved() -> None:
    out = offload_wrapper(nn.Sigmoid())(torch.randn(3, requires_grad=True))
    with torch.no_grad():
        out.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_subclasses_pass_through(tmp_path) -> None:
    class Marked(torch.Tensor):
        pass

    x = torch.randn(80, 64, requires_grad=True)
    out = offload_wrapper(nn.Tanh(), offload="disk", offload_folder=tmp_path)(x.as_subclass(Marked))
    assert type(out) is Marked
    out.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.tanh().sum(), x)[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's forward mode scripts its formulas
def test_tangents_pass_through(tmp_path) -> None:
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(torch.randn(80, 64), torch.ones(80, 64))
        out = offload_wrapper(nn.Linear(64, 64), offload="disk", offload_folder=tmp_path)(x)
        assert torch.autograd.forward_ad.unpack_dual(out).tangent is not None


def test_several_threads_share_the_file(tmp_path) -> None:
    plain = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid())
    wrapped = offload_wrapper(plain, offload="disk", offload_folder=tmp_path)
    inputs = [torch.randn(80, 64, requires_grad=True) for _ in range(4)]
    found: dict[int, list[torch.Tensor]] = {index: [] for index in range(4)}

    def run(index: int) -> None:
        for _ in range(5):
            found[index] += torch.autograd.grad(wrapped(inputs[index]).sum(), inputs[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, x in enumerate(inputs):
        assert_same(found[index], list(torch.autograd.grad(plain(x).sum(), x)) * 5)
    assert file_bytes(tmp_path) == 0


def test_recomputation_of_what_is_around_an_offload_wrapper(tmp_path) -> None:
    inner = Net()
    around = checkpoint_wrapper(offload_wrapper(inner, offload="disk", offload_folder=tmp_path))
    inside = offload_wrapper(checkpoint_wrapper(Net()), offload="disk", offload_folder=tmp_path)
    expected = run_step(Net())
    assert_same(run_step(around), expected)
    assert_same(run_step(inside), expected)
    assert file_bytes(tmp_path) == 0


def test_arguments_of_a_region_wait_in_the_file(tmp_path) -> None:
    layers = nn.Sequential(
        *(
            offload_wrapper(
                checkpoint_wrapper(nn.Sequential(nn.Linear(64, 64), nn.Tanh())), offload="disk", offload_folder=tmp_path
            )
            for _ in range(4)
        )
    )
    out = layers(torch.randn(80, 64, requires_grad=True))
    assert file_bytes(tmp_path) == 4 * 5 * 4096, "one input of 80 x 64 floats per layer"
    out.sum().backward()


# --- what can go wrong -------------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("backward fails")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_step_that_fails_leaves_nothing(where, tmp_path) -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x).sin()
            if where == "forward":
                raise ValueError("forward fails")
            return Fails.apply(h).cos()

    model = offload_wrapper(Failing(), offload="disk", offload_folder=tmp_path)
    with pytest.raises(ValueError, match=f"{where} fails"):
        model(torch.randn(80, 64)).sum().backward()
    assert file_bytes(tmp_path) == 0 and list(tmp_path.iterdir()) == []


def test_process_that_is_killed_leaves_nothing(tmp_path) -> None:
    code = """
        import os, signal, sys, torch
        from remat.wrappers import offload_wrapper
        model = offload_wrapper(torch.nn.Tanh(), offload="disk", offload_folder=sys.argv[1])
        out = model(torch.randn(1000, 1000, requires_grad=True))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert in_subprocess(code, tmp_path, check=False).returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_disk_that_is_full_is_an_error_with_folder_and_bytes(tmp_path, monkeypatch) -> None:
    class Full:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = offload_wrapper(nn.Tanh(), offload="disk", offload_folder=tmp_path)
    x = torch.randn(80, 64, requires_grad=True)
    kept = model(x)
    arena = arena_of(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(arena, "_file", Full(arena._file))
        with pytest.raises(remat.OffloadError) as caught:
            model(x)
    assert f"20480 bytes could not be written to {tmp_path} (No space left on device)" in str(caught.value)
    assert "holds 20480 bytes" in str(caught.value)
    kept.sum().backward()
    model(x).sum().backward()
    del kept
    assert torch.equal(x.grad, 2 * torch.autograd.grad(x.tanh().sum(), x)[0]) and file_bytes(tmp_path) == 0


def test_limit_of_the_system_is_met_with_the_same_error(tmp_path) -> None:
    code = """
        import resource, sys, torch, remat
        from remat.wrappers import offload_wrapper
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        model = offload_wrapper(torch.nn.Tanh(), offload="disk", offload_folder=sys.argv[1])
        try:
            model(torch.randn(1000, 1000, requires_grad=True))
        except remat.OffloadError as error:
            print(error)
    """
    text = in_subprocess(code, tmp_path).stdout
    assert f"4000000 bytes could not be written to {tmp_path} (File too large)" in text


def test_folder_is_made_or_refused_by_name(tmp_path) -> None:
    x = torch.randn(80, 64, requires_grad=True)
    new = tmp_path / "a" / "b"
    offload_wrapper(nn.Tanh(), offload="disk", offload_folder=new)(x)
    assert new.is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(remat.OffloadError, match=r"no file can be made in .*file.*Give an offload_folder"):
        offload_wrapper(nn.Tanh(), offload="disk", offload_folder=tmp_path / "file")(x)


@pytest.mark.skipif(not Path("/proc/self/mounts").exists(), reason="file systems are read from /proc")
def test_file_system_of_a_folder_is_found() -> None:
    assert FILE_SYSTEM_OF("/proc/self") == "proc"


def test_folder_in_memory_is_warned_of(monkeypatch) -> None:
    monkeypatch.setattr(disk, "_file_system_of", lambda path: "tmpfs")
    with pytest.warns(UserWarning, match="/somewhere lies on a tmpfs, which is memory itself"):
        disk._warn_if_in_memory("/somewhere")


def test_region_without_a_policy_has_nothing_to_offload() -> None:
    with pytest.raises(remat.OptionError, match="this region has no policy"):
        remat.checkpoint_region(offload="disk", offload_folder="x")


def test_forked_child_leaves_its_parents_file_alone(tmp_path) -> None:
    code = """
        import gc, os, sys, torch, warnings
        from remat.passes.ops.disk import DiskTensor, arena_of
        tensor = torch.randn(5000)
        stored = DiskTensor(tensor, sys.argv[1])
        pid = os.fork()
        if pid == 0:
            del stored
            gc.collect()
            other = DiskTensor(torch.zeros(5000), sys.argv[1])
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert torch.equal(stored.read(), tensor)
    """
    in_subprocess(code, tmp_path)


RSS = """
    import sys, torch
    from torch import nn
    import remat
    from remat.wrappers import offload_wrapper
    torch.set_num_threads(1)

    def resident_mib():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 / 2**20

    def taken_mib(engine, options):
        model = nn.Sequential(*(nn.Tanh() for _ in range(7)))
        if engine == "hooks":
            model = offload_wrapper(model, **options)
        else:
            remat.apply(model, "", policy=remat.policies.offload_all(), **options)
        call = model
        if engine == "compiled":
            call = torch.compile(model, backend="remat", options={"inner": "aot_eager"})
        x = torch.randn(32768, 256, requires_grad=True)
        if engine == "compiled":
            call(x)  # compilers take memory, too
        before = resident_mib()
        out = call(x)
        taken = resident_mib() - before
        out.sum().backward()
        assert torch.equal(x.grad, reference(x))
        return taken

    def reference(x):
        out = x
        for _ in range(7):
            out = out.tanh()
        return torch.autograd.grad(out.sum(), x)[0]

    engine = sys.argv[2]
    disk = {"offload": "disk", "offload_folder": sys.argv[1]}
    print(taken_mib(engine, disk), taken_mib(engine, {}))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("engine", ["hooks", "eager", "compiled"])
def test_resident_memory_after_forward_is_lower(engine, tmp_path) -> None:
    """Seven layers save 32 MiB each."""
    command = [sys.executable, "-c", textwrap.dedent(RSS), str(tmp_path), engine]
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    on_disk, in_memory = (float(text) for text in done.stdout.split())
    assert in_memory > 200, (on_disk, in_memory)
    assert on_disk < 80, (on_disk, in_memory)  # the result itself, and what the allocator has not given back
