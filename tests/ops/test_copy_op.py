"""Copies lie in memory like what they are copies of, whatever the strides, and share nothing with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode

from remat.passes.ops.copy_op import copied_alike, copy_alike_op

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda x: x,
    "turned": lambda x: x.mT,
    "columns left out": lambda x: x[:, ::2],
    "rows left out": lambda x: x[1::3],
    "part": lambda x: x[2:5, 3:7].mT,
    "expanded": lambda x: x[:, :1].expand(-1, 4),
    "expanded twice": lambda x: x[1, 2].expand(3, 4),
    "windows": lambda x: x.unfold(1, 3, 1),
    "nothing": lambda x: x[:0, ::2],
    "number": lambda x: x[1, 1],
    "one row": lambda x: x.as_strided((1, 8), (3, 1)),
    "conjugated": lambda x: torch.complex(x, x).conj()[:, ::2],
    "negated": lambda x: torch.complex(x, x).conj().imag[:, ::2],
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@every_layout
def test_copy_has_the_strides_and_elements_of_the_original_and_memory_of_its_own(layout: str) -> None:
    x = LAYOUTS[layout](torch.randn(6, 8))
    for copy in (copied_alike(x), copy_alike_op()(x)):
        assert copy.stride() == x.stride()
        assert torch.equal(copy, x)
        assert copy.dtype is x.dtype
        if x.numel():
            assert copy.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@every_layout
def test_copy_that_another_device_makes_lies_alike_too(layout: str) -> None:
    x = LAYOUTS[layout](torch.randn(6, 8))
    made: list[torch.Tensor] = []

    def there(tensor: torch.Tensor) -> torch.Tensor:
        made.append(torch.empty_like(tensor).copy_(tensor))  # as a copy to another device: without gaps
        return made[-1]

    copy = copied_alike(x, there)
    assert copy.stride() == x.stride()
    assert torch.equal(copy, x)
    if x.numel():
        assert copy.untyped_storage().data_ptr() == made[-1].untyped_storage().data_ptr()


@every_layout
def test_copy_is_traced_as_it_is_made(layout: str) -> None:
    x = LAYOUTS[layout](torch.randn(6, 8))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = copy_alike_op()(mode.from_tensor(x))
    assert fake.stride() == copy_alike_op()(x).stride()
    assert fake.shape == x.shape


def test_sum_of_a_copy_has_the_bits_of_the_sum_of_the_original() -> None:
    """Which the usual copy has not."""
    x = torch.randn(65, 258, generator=torch.Generator().manual_seed(0))[:, ::2]
    assert copied_alike(x).sum() == x.sum() != x.clone().sum()
