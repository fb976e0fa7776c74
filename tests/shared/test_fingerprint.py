"""A function's fingerprint changes with whatever changes its answers, and with nothing else."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

import torch

from remat.passes.shared.fingerprint import fingerprint

LIMIT = 10


def define(source: str, **namespace: object) -> Callable[..., object]:
    exec(source, namespace)
    return namespace["f"]  # type: ignore[return-value]


def test_same_source_has_the_same_fingerprint() -> None:
    source = "def f(x): return x * 2.0"
    assert fingerprint(define(source)) == fingerprint(define(source))


def test_constant_counts() -> None:
    assert fingerprint(define("def f(x): return x * 2.0")) != fingerprint(define("def f(x): return x * 3.0"))


def test_default_counts() -> None:
    assert fingerprint(define("def f(x, k=1): return x")) != fingerprint(define("def f(x, k=2): return x"))


def test_global_constant_counts() -> None:
    source = "def f(x): return x > LIMIT"
    assert fingerprint(define(source, LIMIT=1)) != fingerprint(define(source, LIMIT=2))


def test_called_function_counts() -> None:
    source = "def f(x): return g(x)"
    one, two = define("def f(x): return 1"), define("def f(x): return 2")
    assert fingerprint(define(source, g=one)) != fingerprint(define(source, g=two))


def test_closure_counts() -> None:
    def make(k: int) -> Callable[[int], int]:
        return lambda x: x + k

    assert fingerprint(make(1)) != fingerprint(make(2))
    assert fingerprint(make(1)) == fingerprint(make(1))


def test_inner_function_counts() -> None:
    one = define("def f(x):\n    def g(y): return y + 1\n    return g(x)")
    two = define("def f(x):\n    def g(y): return y + 2\n    return g(x)")
    assert fingerprint(one) != fingerprint(two)


def test_global_constant_of_a_comprehension_counts() -> None:
    source = "def f(x): return sum([LIMIT for _ in x])"
    assert fingerprint(define(source, LIMIT=1)) != fingerprint(define(source, LIMIT=2))


def test_partial_counts_by_its_arguments() -> None:
    f = define("def f(x, k): return x")
    assert fingerprint(functools.partial(f, k=1)) != fingerprint(functools.partial(f, k=2))
    assert fingerprint(functools.partial(f, k=1)) == fingerprint(functools.partial(f, k=1))


def test_recursive_function_has_a_stable_fingerprint() -> None:
    f = define("def f(n): return n and f(n - 1)")
    assert fingerprint(f) == fingerprint(f)


def test_operator_of_torch_counts_by_name() -> None:
    source = "def f(call): return call.target is torch.ops.aten.mm.default"
    other = "def f(call): return call.target is torch.ops.aten.bmm.default"
    assert fingerprint(define(source, torch=torch)) == fingerprint(define(source, torch=torch))
    assert fingerprint(define(source, torch=torch)) != fingerprint(define(other, torch=torch))


class Stateful:
    def __call__(self, call: object) -> float:
        return 0.0


def test_object_with_hidden_state_never_has_the_same_fingerprint() -> None:
    model = Stateful()
    assert fingerprint(model) != fingerprint(model)


def test_bound_builtin_never_has_the_same_fingerprint() -> None:
    prices = {"mm": 1.0}
    f = define("def f(call): return get(call)", get=prices.get)
    assert fingerprint(f) != fingerprint(f)


def test_empty_closure_cell_is_described() -> None:
    def make() -> Callable[[], object]:
        def f() -> object:
            return later

        before = fingerprint(f)
        later = 1
        assert fingerprint(f) != before, "a filled cell counts by its contents"
        return f

    assert fingerprint(make()) == fingerprint(make())


def test_list_that_contains_itself_is_described() -> None:
    items: list[object] = [1]
    items.append(items)
    f = define("def f(call): return items", items=items)
    assert fingerprint(f) == fingerprint(f)


def test_module_of_the_users_own_never_has_the_same_fingerprint() -> None:
    source = "def f(call): return prices.RATE"
    f = define(source, prices=types.ModuleType("prices"))
    assert fingerprint(f) != fingerprint(f)


def test_module_imported_inside_never_has_the_same_fingerprint() -> None:
    f = define("def f(call):\n    import prices\n    return prices.RATE")
    assert fingerprint(f) != fingerprint(f)


def test_attribute_of_the_function_counts() -> None:
    one, two = define("def f(call): return f.rate"), define("def f(call): return f.rate")
    one.rate, two.rate = 1.0, 2.0  # type: ignore[attr-defined]
    assert fingerprint(one) != fingerprint(two)
