"""Memory that a kernel takes from the allocator while it runs, beside its results.

Known for attention on the CPU, which multiplies a block of queries with a block of keys at a time and has room for the
products, per thread. Forward has one product, its maxima and sums, and the results of the block; backward two products;
in half precision the products are there once more, rounded. Backward has a sum for all threads, and copies the gradient
if that is laid out head by head. What the library of matrix products takes for itself depends on the processor, and is
not counted.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from ..sizes import Sizes
from ..torch_private import expression_of, sympy_functions

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
KEYS_PER_BLOCK = 512


def workspace_of(node: fx.Node, sizes: Sizes) -> Any:
    """Bytes that a node takes while it runs, as a number or an expression of size symbols; 0 if nothing is known."""
    if node.target is ATTENTION:
        query, key, *_ = _tensors(node)
        return _forward_bytes(query, key)
    if node.target is ATTENTION_BACKWARD:
        gradient, query, key, *_ = _tensors(node)
        copied = 0 if _is_laid_out_row_by_row(gradient, sizes) else _num_bytes(gradient)
        return _backward_bytes(query, key) + copied
    return 0


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [arg.meta["val"] for arg in node.args if isinstance(arg, fx.Node)]


def _forward_bytes(query: torch.Tensor, key: torch.Tensor) -> Any:
    rows, head_size = _queries_per_block(_size(query, 2)), _size(query, 3)
    product = rows * _least(KEYS_PER_BLOCK, _size(key, 2))
    exact = _exact_bytes(query) * (product + 2 * rows + rows * head_size)
    return torch.get_num_threads() * (exact + _rounded_bytes(query) * product)


def _backward_bytes(query: torch.Tensor, key: torch.Tensor) -> Any:
    rows = _queries_per_block(_size(query, 2))
    products = 2 * rows * _least(KEYS_PER_BLOCK, _size(key, 2))
    per_thread = (_exact_bytes(query) + _rounded_bytes(query)) * products
    return torch.get_num_threads() * per_thread + _exact_bytes(query) * rows


def _queries_per_block(length: Any) -> Any:
    """32 of a short sequence, 64 from 192 on, 256 from 768 on."""
    return _least(32, length) + 32 * _least(1, _part(length, 192)) + 192 * _least(1, _part(length, 768))


def _exact_bytes(tensor: torch.Tensor) -> int:
    """What a sum of products takes, per element."""
    return max(4, tensor.element_size())


def _rounded_bytes(tensor: torch.Tensor) -> int:
    """What a product takes that is rounded for the next one, per element."""
    return tensor.element_size() if tensor.element_size() < 4 else 0


def _is_laid_out_row_by_row(gradient: torch.Tensor, sizes: Sizes) -> bool:
    """True if the heads of one position lie side by side, as the kernel wants them."""
    spec = sizes.spec_of(gradient)
    _, heads, length, head_size = spec.shape
    return spec.stride == (length * heads * head_size, head_size, heads * head_size, 1)


def _num_bytes(tensor: torch.Tensor) -> Any:
    product: Any = tensor.element_size()
    for dim in range(tensor.dim()):
        product = product * _size(tensor, dim)
    return product


def _size(tensor: torch.Tensor, dim: int) -> Any:
    size: int | torch.SymInt = tensor.shape[dim]
    return size if isinstance(size, int) else expression_of(size)


def _least(number: int, size: Any) -> Any:
    return min(number, size) if isinstance(size, int) else sympy_functions()["Min"](number, size)


def _part(size: Any, number: int) -> Any:
    return size // number if isinstance(size, int) else sympy_functions()["FloorDiv"](size, number)
