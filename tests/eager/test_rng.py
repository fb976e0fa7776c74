"""Random numbers inside a region are drawn again as they were, whoever draws them."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch
from support.eager_testing import REGIONS, plain, selective
from torch import nn

from remat.eager import CheckpointError
from remat.eager.state.global_generators import NUMPY, PYTHON, GlobalGenerator
from remat.regions.region import checkpoint_region

every_region = pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)

DRAWS = {
    "random.random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
    "random.shuffle": lambda: float(random.sample(range(100), 3)[0]),
    "numpy.rand": np.random.rand,
    "numpy.randn": np.random.randn,
    "numpy.permutation": lambda: float(np.random.permutation(50)[0]),
    "torch.rand": lambda: torch.rand(()),
}


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def state_of_all():
    return random.getstate(), str(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()


def run(call, odd_start):
    seed_all(5)
    if odd_start:  # leaves a spare normal number behind, which the next call takes without moving the generator
        np.random.randn()
        random.gauss(0, 1)
    x = torch.linspace(0.1, 1, 4, requires_grad=True)
    out = call(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    return grad, state_of_all()


@every_region
@pytest.mark.parametrize("odd_start", [False, True])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_global_generators_are_replayed_and_left_where_the_forward_left_them(region, draw, odd_start):
    def function(x):
        return ((x * draw()).sin() * draw()).exp()

    grad, state = run(lambda x: region(function, x), odd_start)
    expected, expected_state = run(function, odd_start)
    assert torch.equal(grad, expected)
    assert state == expected_state


@every_region
@pytest.mark.parametrize("where", ["closure", "argument", "keyword", "module", "global"])
def test_explicit_generators_are_replayed(region, where):
    generator = torch.Generator()

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = generator

        def forward(self, x):
            return (x * torch.rand(4, generator=self.generator)).sin()

    def draw(x, generator):
        return (x * torch.rand(4, generator=generator)).sin()

    calls = {
        "closure": lambda run, x: run(lambda x: draw(x, generator), x),
        "argument": lambda run, x: run(draw, x, generator),
        "keyword": lambda run, x: run(draw, x, generator=generator),
        "module": lambda run, x: run(Noisy(), x),
        "global": lambda run, x: run(draws_from_a_global, x),
    }
    used = global_generator if where == "global" else generator

    def result(run):
        used.manual_seed(7)
        x = torch.linspace(0.1, 1, 4, requires_grad=True)
        (grad,) = torch.autograd.grad(calls[where](run, x).exp().sum(), x)
        return grad, used.get_state()

    grad, state = result(region)
    expected, expected_state = result(lambda f, *a, **k: f(*a, **k))
    assert torch.equal(grad, expected)
    assert torch.equal(state, expected_state)


global_generator = torch.Generator()


def draws_from_a_global(x):
    return (x * torch.rand(4, generator=global_generator)).sin()


def test_a_hidden_generator_is_found_by_a_policys_mode():
    class Holder:
        generator = torch.Generator()

    def function(x):
        return (x * torch.rand(4, generator=Holder.generator)).sin()

    x = torch.linspace(0.1, 1, 4, requires_grad=True)
    region = checkpoint_region(policy=[torch.ops.aten.mm.default])(function)
    Holder.generator.manual_seed(1)
    (grad,) = torch.autograd.grad(region(x).sum(), x)
    Holder.generator.manual_seed(1)
    assert torch.equal(grad, torch.autograd.grad(function(x).sum(), x)[0])


def hidden(generator):
    """Keep a generator where looking finds nothing: in the frame of a running Python generator."""
    while True:
        yield generator


def test_a_generator_that_cannot_be_found_is_refused_with_a_way_out():
    source = hidden(torch.Generator())

    def function(x):
        return (x * torch.rand(4, generator=next(source))).sin()

    x = torch.linspace(0.1, 1, 4, requires_grad=True)
    out = plain(function, x)
    pattern = r"region .*function draws from a torch.Generator \(aten.rand.generator at .*test_rng.py:\d+\).*argument"
    with pytest.raises(CheckpointError, match=pattern):
        out.sum().backward()
    checkpoint_region(preserve_rng_state=False)(function)(x).sum().backward()


def test_the_default_generator_may_be_named():
    x = torch.linspace(0.1, 1, 4, requires_grad=True)

    def function(x):
        return (x * torch.rand(4, generator=torch.default_generator)).sin()

    torch.manual_seed(1)
    (grad,) = torch.autograd.grad(plain(function, x).sum(), x)
    torch.manual_seed(1)
    assert torch.equal(grad, torch.autograd.grad(function(x).sum(), x)[0])


def seed_numpy(generator, seed):
    generator.bit_generator.state = np.random.PCG64(seed).state


SOURCES = {
    "torch": (torch.Generator(), torch.Generator.manual_seed, lambda g: torch.rand(4, generator=g)),
    "python": (random.Random(), random.Random.seed, lambda g: torch.tensor([g.random() for _ in range(4)])),
    "numpy": (np.random.default_rng(), seed_numpy, lambda g: torch.from_numpy(g.random(4)).float()),
    "numpy, old": (np.random.RandomState(), np.random.RandomState.seed, lambda g: torch.from_numpy(g.rand(4)).float()),
}


class HasGenerator:
    generator = None


def draws_from_an_object_in_a_global(x, draw):
    return (x * draw(in_a_global.generator)).sin()


def draws_from_a_class(x, draw):
    return (x * draw(HasGenerator.generator)).sin()


in_a_global = HasGenerator()


def ways_to_get_at(generator, draw):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = generator

        def forward(self, x):
            return (x * draw(self.generator)).sin()

    replaced = nn.Sequential(Noisy())
    in_a_global.generator = HasGenerator.generator = generator
    held = HasGenerator()
    held.generator = generator
    drawn = lambda x, g: (x * draw(g)).sin()  # noqa: E731

    def after_replacement(run, x):
        replaced[0].generator = torch.Generator()
        run(replaced.requires_grad_)  # the tree is walked with the old one
        replaced[0].generator = generator
        return run(replaced, x)

    return {
        "closure": lambda run, x: run(lambda x: drawn(x, generator), x),
        "argument": lambda run, x: run(drawn, x, generator),
        "keyword": lambda run, x: run(drawn, x, g=generator),
        "list": lambda run, x: run(lambda x, gs: drawn(x, gs[0]), x, [generator]),
        "module": lambda run, x: run(Noisy(), x),
        "inner module": lambda run, x: run(nn.Sequential(nn.Identity(), Noisy()), x),
        "module argument": lambda run, x: run(lambda m, x: m(x), Noisy(), x),
        "replaced": after_replacement,
        "object": lambda run, x: run(lambda x: drawn(x, held.generator), x),
        "global object": lambda run, x: run(draws_from_an_object_in_a_global, x, draw),
        "class": lambda run, x: run(draws_from_a_class, x, draw),
    }


@pytest.mark.parametrize("name", ["plain", "save_all", "recompute_all"])
@pytest.mark.parametrize("where", ways_to_get_at(None, None))
@pytest.mark.parametrize("source", SOURCES)
def test_generators_of_every_library_are_replayed(source, where, name):
    generator, seed, draw = SOURCES[source]

    def result(run):
        seed(generator, 7)
        x = torch.linspace(0.1, 1, 4, requires_grad=True)
        (grad,) = torch.autograd.grad(ways_to_get_at(generator, draw)[where](run, x).exp().sum(), x)
        return grad, draw(generator)

    grad, following = result(REGIONS[name])
    expected, expected_following = result(lambda f, *a, **k: f(*a, **k))
    assert torch.equal(grad, expected)
    assert torch.equal(following, expected_following)


def test_a_bound_method_of_a_generator_is_replayed():
    draw = np.random.default_rng(3).standard_normal

    def run(region):
        seed_numpy(draw.__self__, 3)
        x = torch.linspace(0.1, 1, 4, requires_grad=True)
        return torch.autograd.grad(region(lambda x: (x * draw()).sin().exp(), x).sum(), x)[0]

    assert torch.equal(run(plain), run(lambda f, x: f(x)))


@pytest.mark.parametrize("saved", [0, 1, 2])
def test_saving_one_draw_from_an_explicit_generator_does_not_shift_the_others(saved):
    generator = torch.Generator()
    seen = []

    def policy(ctx, op, *args, **kwargs):
        if op is torch.ops.aten.rand.generator:
            seen.append(op)
            return len(seen) - 1 == saved
        return False

    def function(x):
        for _ in range(3):
            x = (x * torch.rand(4, generator=generator)).sin()
        return x

    def run(region):
        generator.manual_seed(7)
        x = torch.linspace(0.1, 1, 4, requires_grad=True)
        inner = lambda x: region(function, x)  # noqa: E731
        out = plain(lambda x: (inner(x) * torch.rand(4, generator=generator)).exp(), x)
        return torch.autograd.grad(out.sum(), x)[0]

    assert torch.equal(run(functools.partial(selective, policy)), run(lambda f, x: f(x)))


@every_region
def test_backward_does_not_move_the_surrounding_random_state(region):
    out = region(lambda x: nn.functional.dropout(x.sin(), 0.5).exp(), torch.randn(8, requires_grad=True))
    before = state_of_all()
    out.sum().backward()
    assert state_of_all() == before


@pytest.mark.parametrize("use", ["checkpoint", "region"])
def test_without_preserve_rng_state_the_recomputation_draws_on(use):
    drawn = []

    def function(x):
        drawn.append(torch.rand(16))
        return (x * drawn[-1]).sin()

    x = torch.randn(16, requires_grad=True)
    torch.manual_seed(0)
    if use == "checkpoint":
        out = plain(function, x, preserve_rng_state=False)
    else:
        out = checkpoint_region(preserve_rng_state=False)(function)(x)
    out.sum().backward()
    torch.manual_seed(0)
    assert torch.equal(drawn[0], torch.rand(16))
    assert torch.equal(drawn[1], torch.rand(16))


def test_a_raising_recomputation_leaves_the_random_state_alone():
    from remat.regions.region import is_recomputing

    def function(x):
        if is_recomputing():
            torch.rand(3)
            raise ValueError("again")
        return x.sin()

    out = plain(function, torch.ones(2, requires_grad=True))
    before = state_of_all()
    with pytest.raises(ValueError, match="again"):
        out.sum().backward()
    assert state_of_all() == before


GLOBAL_DRAWS = {
    "python": (PYTHON, [lambda: random.gauss(0, 1), random.random, lambda: random.getrandbits(64)]),
    "numpy": (NUMPY, [np.random.randn, np.random.rand, lambda: np.random.randint(1 << 30)]),
}
each_global_generator = pytest.mark.parametrize(("generator", "draws"), GLOBAL_DRAWS.values(), ids=GLOBAL_DRAWS)


class TestStateOfGlobalGenerators:
    """Python's and NumPy's generators are asked for their state only where their memory says that it is another."""

    @each_global_generator
    def test_memory_is_looked_at_on_this_interpreter(self, generator, draws):
        assert generator._look() is not None
        assert generator.state() is generator.state()

    @each_global_generator
    @pytest.mark.parametrize("num_before", [0, 1, 2, 623, 624, 700])
    def test_it_changes_with_each_draw_and_comes_back(self, generator, draws, num_before):
        seed_all(3)
        for _ in range(num_before):
            draws[0]()
        for draw in draws:
            state = generator.state()
            expected = draw(), draw()
            assert generator.state() is not state
            generator.restore(state)
            assert (draw(), draw()) == expected

    @each_global_generator
    def test_a_spare_normal_number_is_part_of_it(self, generator, draws):
        seed_all(3)
        draws[0]()
        with_spare = generator.state()
        expected = draws[0]()
        assert generator.state() is not with_spare
        generator.restore(with_spare)
        assert draws[0]() == expected

    def test_seeding_is_seen(self):
        for generator in (PYTHON, NUMPY):
            seed_all(3)
            before = generator.state()
            seed_all(4)
            assert generator.state() is not before

    @pytest.mark.parametrize("make", [np.random.PCG64, np.random.MT19937])
    def test_another_bit_generator_of_numpys_is_asked_each_time(self, make):
        old = np.random.get_bit_generator()
        np.random.set_bit_generator(make(3))
        try:
            state = NUMPY.state()
            expected = np.random.rand()
            assert NUMPY.state() is not state
            NUMPY.restore(state)
            assert np.random.rand() == expected
        finally:
            np.random.set_bit_generator(old)

    def test_a_generator_that_shows_nothing_is_asked_each_time(self):
        blind = GlobalGenerator(lambda: None, random.getstate, random.setstate)
        state = blind.state()
        expected = random.random()
        blind.restore(state)
        assert random.random() == expected
        assert blind.state() is not blind.state()

    def test_a_draw_of_another_thread_while_it_is_read_is_seen(self):
        draws = iter([random.random, lambda: None])

        def read():
            state = random.getstate()
            next(draws)()
            return state

        generator = GlobalGenerator(PYTHON._look, read, random.setstate)
        assert generator.state() == random.getstate()
