"""What is known of an operator, in one table.

Facts come from three places, in this order: the operator's schema (does it write, does it alias), its tags
(is it random, is it pointwise), and the name lists below for what neither of them says. Everything else in `passes`
asks `facts_of(target)`; no other module compares operator names.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch

from .torch_private import HigherOrderOperator, OpOverload, effectful_operators, functional_operators


class Kind(Enum):
    """How an operator spends its time; the cost models price by kind."""

    FREE = "no work at run time"
    POINTWISE = "element by element, fused into its readers"
    TRANSCENDENTAL = "element by element, bound by arithmetic"
    GATHER = "element by element with indirect reads"
    REDUCTION = "reads more than it writes; ends a fusion"
    MATMUL = "matrix product, convolution or attention"
    RANDOM = "draws random numbers"
    OTHER = "unknown, runs as a kernel of its own"


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What the planner may assume of one operator."""

    kind: Kind
    is_view: bool = False
    """The result shares its input's storage."""
    is_random: bool = False
    """Draws from a generator: recomputing needs the generator's state of forward."""
    draws_seed: bool = False
    """Draws the seed that later ops expand: the seed itself is what recomputation replays."""
    is_collective: bool = False
    is_effectful: bool = False
    """Does something that running twice would do twice."""
    is_mutating: bool = False
    """Writes to one of its arguments."""
    is_discrete: bool = False
    """Chooses among elements (top-k, argmax, sort): a last-bit difference gives another result."""
    reads_data: bool = False
    """Turns tensor data into a Python number or a shape."""
    is_uninitialized: bool = False
    """Returns memory with nothing in it yet: two results are two buffers, however alike the calls."""
    has_body: bool = False
    """A higher-order operator: its arguments include graphs, whose facts count too."""

    is_unknown: bool = False
    """A higher-order operator of which nobody said what it does."""

    @property
    def is_pure(self) -> bool:
        """Running it again with the same inputs gives the same result and nothing else."""
        return not (
            self.is_random
            or self.draws_seed
            or self.is_collective
            or self.is_effectful
            or self.is_mutating
            or self.reads_data
            or self.is_unknown
        )


# Names are overload packets ("aten::mm" is every overload of it).
_MATMULS = frozenset(
    [
        "aten::mm",
        "aten::bmm",
        "aten::addmm",
        "aten::baddbmm",
        "aten::addbmm",
        "aten::addmv",
        "aten::mv",
        "aten::dot",
        "aten::vdot",
        "aten::_scaled_mm",
        "aten::_int_mm",
        "aten::_addmm_activation",
        "aten::matmul",
        "aten::linear",
        "aten::convolution",
        "aten::_convolution",
        "aten::convolution_backward",
        "aten::mkldnn_convolution",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_scaled_dot_product_attention_math",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_grouped_mm",
        "aten::_trilinear",
        "aten::_cdist_forward",
        "aten::grid_sampler_2d",
    ]
)
_REDUCTIONS = frozenset(
    [
        "aten::sum",
        "aten::mean",
        "aten::var",
        "aten::var_mean",
        "aten::std",
        "aten::std_mean",
        "aten::amax",
        "aten::amin",
        "aten::max",
        "aten::min",
        "aten::prod",
        "aten::any",
        "aten::all",
        "aten::norm",
        "aten::linalg_vector_norm",
        "aten::logsumexp",
        "aten::_softmax",
        "aten::_log_softmax",
        "aten::native_layer_norm",
        "aten::native_group_norm",
        "aten::native_batch_norm",
        "aten::_native_batch_norm_legit",
        "aten::_native_batch_norm_legit_functional",
        "aten::_native_batch_norm_legit_no_training",
        "aten::batch_norm_with_update",
        "aten::_batch_norm_with_update",
        "aten::_batch_norm_with_update_functional",
        "aten::_fused_rms_norm",
        "aten::cudnn_batch_norm",
        "aten::nll_loss_forward",
        "aten::nll_loss2d_forward",
        "aten::cumsum",
        "aten::cumprod",
        "aten::logcumsumexp",
        "aten::count_nonzero",
        "aten::avg_pool2d",
        "aten::avg_pool3d",
        "aten::_adaptive_avg_pool2d",
        "aten::_adaptive_avg_pool3d",
        "aten::aminmax",
        "aten::mse_loss",
        "aten::l1_loss",
        "prims::sum",
        "prims::amax",
        "prims::amin",
        "prims::prod",
        "prims::var",
        "prims::xor_sum",
    ]
)
_TRANSCENDENTALS = frozenset(
    [
        "aten::exp",
        "aten::exp2",
        "aten::expm1",
        "aten::log",
        "aten::log2",
        "aten::log10",
        "aten::log1p",
        "aten::sin",
        "aten::cos",
        "aten::tan",
        "aten::asin",
        "aten::acos",
        "aten::atan",
        "aten::atan2",
        "aten::sinh",
        "aten::cosh",
        "aten::tanh",
        "aten::asinh",
        "aten::acosh",
        "aten::atanh",
        "aten::erf",
        "aten::erfc",
        "aten::erfinv",
        "aten::sigmoid",
        "aten::gelu",
        "aten::silu",
        "aten::mish",
        "aten::softplus",
        "aten::elu",
        "aten::log_sigmoid_forward",
        "aten::lgamma",
        "aten::digamma",
        "aten::logit",
        "aten::xlogy",
        "aten::special_erfcx",
        "aten::special_log_ndtr",
        "aten::special_ndtri",
    ]
)
_GATHERS = frozenset(
    [
        "aten::index",
        "aten::_unsafe_index",
        "aten::index_select",
        "aten::gather",
        "aten::embedding",
        "aten::take",
        "aten::take_along_dim",
        "aten::scatter",
        "aten::scatter_add",
        "aten::scatter_reduce",
        "aten::index_put",
        "aten::_unsafe_index_put",
        "aten::index_add",
        "aten::index_copy",
        "aten::index_fill",
        "aten::masked_scatter",
        "aten::upsample_nearest2d",
        "aten::upsample_bilinear2d",
        "aten::roll",
        "aten::flip",
    ]
)
# Pointwise by nature though torch does not tag them so; all of them become part of a fused loop.
_UNTAGGED_POINTWISE = frozenset(
    [
        "aten::where",
        "aten::clone",
        "aten::_to_copy",
        "aten::full",
        "aten::full_like",
        "aten::ones",
        "aten::ones_like",
        "aten::zeros",
        "aten::zeros_like",
        "aten::empty_like",
        "aten::arange",
        "aten::scalar_tensor",
        "aten::cat",
        "aten::stack",
        "aten::constant_pad_nd",
        "aten::tril",
        "aten::triu",
        "aten::copy",
        "aten::lift_fresh_copy",
        "aten::repeat",
        "aten::masked_fill",
        "aten::select_scatter",
        "aten::slice_scatter",
        "aten::as_strided_scatter",
        "aten::diagonal_scatter",
        "aten::new_zeros",
        "aten::new_ones",
        "aten::new_full",
        "aten::new_empty",
        "aten::empty",
        "aten::empty_strided",
        "aten::new_empty_strided",
        "aten::eye",
        "aten::one_hot",
        "aten::expand_copy",
        "aten::view_copy",
        "aten::permute_copy",
        "aten::glu",
        "aten::contiguous",
        "aten::reshape",
        "aten::native_dropout_backward",
        "prims::iota",
        "prims::convert_element_type",
        "prims::broadcast_in_dim",
        "prims::device_put",
        "prims::inductor_lookup_seed",
        "prims::fma",
    ]
)
_UNINITIALIZED = frozenset(
    ["aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"]
)
_DISCRETE = frozenset(
    [
        "aten::topk",
        "aten::sort",
        "aten::argsort",
        "aten::argmax",
        "aten::argmin",
        "aten::msort",
        "aten::kthvalue",
        "aten::mode",
        "aten::median",
        "aten::nanmedian",
        "aten::max_pool2d_with_indices",
        "aten::max_pool3d_with_indices",
        "aten::adaptive_max_pool2d",
        "aten::adaptive_max_pool3d",
        "aten::fractional_max_pool2d",
        "aten::fractional_max_pool3d",
        "aten::_low_memory_max_pool_with_offsets",
        "prims::_low_memory_max_pool_with_offsets",
        "aten::cummax",
        "aten::cummin",
        "aten::searchsorted",
        "aten::bucketize",
        "aten::unique_consecutive",
        "aten::unique_dim",
        "aten::_unique2",
        "aten::histc",
        "aten::bincount",
        "aten::segment_reduce",
    ]
)
# `max(dim)` and `min(dim)` also return where; without a dim they return only a value.
_DISCRETE_OVERLOADS = frozenset(["aten::max.dim", "aten::min.dim", "aten::max.names_dim", "aten::min.names_dim"])
_READS_DATA = frozenset(
    [
        "aten::_local_scalar_dense",
        "aten::item",
        "aten::nonzero",
        "aten::nonzero_static",
        "aten::masked_select",
        "aten::equal",
        "aten::is_nonzero",
        "aten::repeat_interleave",
        "aten::sym_constrain_range",
        "aten::sym_constrain_range_for_size",
        "aten::_assert_async",
        "aten::_assert_scalar",
        "aten::_functional_assert_async",
    ]
)
_SEEDS = frozenset(["prims::inductor_seed", "prims::inductor_seeds", "prims::philox_rand", "prims::rand_eager_offsets"])
# Pure functions of the seed they are given, whatever their tags say.
_SEEDED = frozenset(
    [
        "prims::inductor_random",
        "prims::inductor_randint",
        "prims::inductor_lookup_seed",
        "prims::inductor_force_stride_order",
    ]
)
# Its kernel returns its input's storage although the schema does not say so.
_SILENT_VIEWS = frozenset(["aten::_unsafe_view", "aten::_reshape_alias"])
_COLLECTIVE_NAMESPACES = frozenset(
    ["_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "_dtensor"]
)
_EFFECTFUL_NAMESPACES = frozenset(["fsdp", "inductor", "streams", "ao", "rngprims"])


@cache
def facts_of(target: Any) -> OpFacts:
    """Look up what is known of the target of a call_function node."""
    if target is operator.getitem:
        return OpFacts(Kind.FREE)
    if isinstance(target, OpOverload):
        return _overload_facts(target)
    if isinstance(target, HigherOrderOperator):
        return OpFacts(
            Kind.OTHER,
            has_body=True,
            is_effectful=target in effectful_operators(),
            is_unknown=target not in effectful_operators() and target not in functional_operators(),
        )
    # Arithmetic on symbolic sizes: Python operators, math and torch.sym_* functions.
    return OpFacts(Kind.FREE)


def _overload_facts(op: OpOverload[..., Any]) -> OpFacts:
    name = op._schema.name
    is_random = torch.Tag.nondeterministic_seeded in op.tags and name not in _SEEDED and name not in _SEEDS
    is_view = _returns_view(op)
    return OpFacts(
        kind=Kind.FREE if is_view else Kind.RANDOM if is_random else _kind_of(op, name),
        is_view=is_view,
        is_random=is_random,
        draws_seed=name in _SEEDS,
        is_collective=op.namespace in _COLLECTIVE_NAMESPACES,
        is_effectful=op.namespace in _EFFECTFUL_NAMESPACES,
        is_mutating=op._schema.is_mutable,
        is_discrete=name in _DISCRETE or f"{name}.{op._overloadname}" in _DISCRETE_OVERLOADS,
        is_uninitialized=name in _UNINITIALIZED,
        reads_data=name in _READS_DATA or torch.Tag.data_dependent_output in op.tags,
    )


def _returns_view(op: OpOverload[..., Any]) -> bool:
    if op._schema.name in _SILENT_VIEWS:
        return True
    returns = op._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _kind_of(op: OpOverload[..., Any], name: str) -> Kind:
    for names, kind in (
        (_MATMULS, Kind.MATMUL),
        (_REDUCTIONS, Kind.REDUCTION),
        (_TRANSCENDENTALS, Kind.TRANSCENDENTAL),
        (_GATHERS, Kind.GATHER),
        (_UNTAGGED_POINTWISE, Kind.POINTWISE),
    ):
        if name in names:
            return kind
    if name in _SEEDED:
        return Kind.RANDOM
    if torch.Tag.pointwise in op.tags:
        return Kind.POINTWISE
    if torch.Tag.reduction in op.tags:
        return Kind.REDUCTION
    return Kind.OTHER
