"""The benchmarks' own instruments, against peaks worked out by hand."""

import pytest
import torch
from support import measure
from support.measure import MemoryEvent, MemoryLog, Timings

COUNTERS = ("dispatch", "allocator")
NUM = 1000
ROW = 4 * NUM  # bytes of one float32 row
SCALAR = 4


@pytest.fixture
def weight():
    return torch.nn.Parameter(torch.linspace(0.1, 0.9, NUM))


@pytest.fixture
def row():
    return torch.linspace(1.0, 2.0, NUM)


def eager_peak(forward, parameters, counter):
    with measure.fixed_threads(1):
        return measure.activation_peak(forward, parameters, counter=counter)


@pytest.mark.parametrize("counter", COUNTERS)
def test_chain_peak_is_what_hand_counting_gives(weight, row, counter):
    """At the peak these are alive: w*x (saved for sin), its cosine, the gradient made of it, the loss, its gradient."""
    peak = eager_peak(lambda: (weight * row).sin().sum(), [weight], counter)
    assert peak.activation_bytes == 3 * ROW + 2 * SCALAR


@pytest.mark.parametrize("counter", COUNTERS)
def test_forward_end_is_what_forward_saved_and_the_loss(weight, row, counter):
    peak = eager_peak(lambda: (weight * row).sin().sum(), [weight], counter)
    assert peak.forward_end_bytes == ROW + SCALAR


@pytest.mark.parametrize("counter", COUNTERS)
def test_gradients_are_reported_apart(weight, row, counter):
    """Summing w*x keeps only the loss and its gradient; the row-sized gradient of w is the step's result."""
    peak = eager_peak(lambda: (weight * row).sum(), [weight], counter)
    assert peak.gradient_bytes == ROW
    assert peak.activation_bytes == ROW + SCALAR  # forward: w*x and the loss, before w*x dies
    assert peak.with_gradients_bytes == max(ROW + SCALAR, ROW + 2 * SCALAR)


@pytest.mark.parametrize("counter", COUNTERS)
def test_every_saved_link_of_a_long_chain_counts(weight, row, counter):
    """Exp saves its result: after four of them four rows and the loss are kept; what went in is dead."""

    def forward():
        h = weight * row
        for _ in range(4):
            h = h.neg().exp()
        return h.sum()

    peak = eager_peak(forward, [weight], counter)
    assert peak.forward_end_bytes == 4 * ROW + SCALAR


@pytest.mark.parametrize("counter", COUNTERS)
def test_views_count_once_with_their_base(weight, row, counter):
    def forward():
        h = (weight * row).sin()
        return (h.view(10, -1).t() * 1.0).sum() + h[:5].sum()

    def forward_without_views():
        h = (weight * row).sin()
        return (h * 1.0).sum() + h.sum()

    with_views = eager_peak(forward, [weight], counter)
    without = eager_peak(forward_without_views, [weight], counter)
    assert with_views.forward_end_bytes == without.forward_end_bytes


@pytest.mark.parametrize("counter", COUNTERS)
def test_parameters_and_inputs_are_not_counted(weight, row, counter):
    """Their views and in-place changes are not counted either."""
    state = torch.zeros(NUM)

    def forward():
        state.add_(1.0)
        return (weight.view(10, -1) * row.view(10, -1)).sum() + state.view(-1)[0] * 0.0

    peak = eager_peak(forward, [weight], counter)
    assert peak.forward_end_bytes <= 4 * SCALAR


@pytest.mark.parametrize("counter", COUNTERS)
def test_a_parameter_used_twice_has_one_gradient(weight, row, counter):
    peak = eager_peak(lambda: (weight * row).sum() + (weight * 3.0).sum(), [weight, weight], counter)
    assert peak.gradient_bytes == ROW


def test_both_counters_agree_on_a_compiled_chain(weight, row):
    """One instrument per engine is only fair if they read alike where both can."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda: (weight * row).sin().exp().sum(), backend="aot_eager")
    by_dispatch = eager_peak(compiled, [weight], "dispatch")
    by_allocator = eager_peak(compiled, [weight], "allocator")
    slack = 64 * by_allocator.num_allocations  # an allocator may round every block up
    assert abs(by_dispatch.activation_bytes - by_allocator.activation_bytes) <= slack
    assert by_dispatch.activation_bytes >= 2 * ROW


def test_gradients_start_as_none_and_are_gone_afterwards(weight, row):
    weight.grad = torch.ones(NUM)
    seen = []

    def forward():
        seen.append(weight.grad)
        return (weight * row).sum()

    eager_peak(forward, [weight], "allocator")
    assert seen == [None, None]
    assert weight.grad is None


def test_storage_allocated_in_forward_counts_even_if_it_ends_as_a_gradient():
    """A compiler may write a gradient into a dead activation; that must not hide the activation."""
    log = MemoryLog((MemoryEvent(1, 100), MemoryEvent(2, 10)), backward_start=1, gradient_bytes={1: 100, 2: 10})
    assert measure.summarise(log).activation_bytes == 100


def test_only_the_gradients_share_of_a_larger_storage_is_left_out():
    log = MemoryLog((MemoryEvent(1, 100),), backward_start=0, gradient_bytes={1: 30})
    assert measure.summarise(log).activation_bytes == 70


def test_dying_storage_makes_room():
    events = (MemoryEvent(1, 100), MemoryEvent(1, -100), MemoryEvent(2, 60), MemoryEvent(3, 50))
    peak = measure.summarise(MemoryLog(events, backward_start=3, gradient_bytes={}))
    assert (peak.activation_bytes, peak.forward_end_bytes) == (110, 60)


def test_dispatch_counter_refuses_what_it_cannot_see(weight, row):
    class HiddenProduct(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w.sum()

        @staticmethod
        def backward(ctx, grad):
            with torch.utils._python_dispatch._disable_current_modes():
                return torch.ones(NUM)

    with pytest.raises(RuntimeError, match='counter="allocator"'):
        eager_peak(lambda: HiddenProduct.apply(weight), [weight], "dispatch")


def test_rounds_run_every_step_once_and_rotate_the_first():
    calls = []
    steps = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    measure.interleaved_times(steps, rounds=3, warm_up=1)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"


def test_ratios_compare_medians_and_rounds():
    wall = {"new": (1.0, 4.0, 9.0), "old": (2.0, 2.0, 3.0)}
    timings = Timings(wall=wall, cpu=wall)
    assert timings.ratio_of_medians("new", "old") == 2.0
    assert timings.median_of_ratios("new", "old") == 2.0
    assert timings.cpu_median_of_ratios("old", "new") == 0.5


def test_timing_needs_a_round():
    with pytest.raises(ValueError, match="rounds=0"):
        measure.interleaved_times({"a": lambda: None}, rounds=0)


def test_threads_are_fixed_while_timing_and_restored():
    before = torch.get_num_threads()
    seen = []
    measure.interleaved_times({"a": lambda: seen.append(torch.get_num_threads())}, rounds=1, warm_up=0, threads=1)
    assert (seen, torch.get_num_threads()) == ([1], before)
