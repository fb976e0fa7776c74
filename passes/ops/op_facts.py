"""What is known of an operator, in one table.

Facts come from three places, in this order: the operator's schema (does it write, does it alias), its tags
(is it random, is it pointwise), and the name lists below for what neither of them says. Everything else in `passes`
asks `facts_of(target)`; no other module compares operator names.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any

import torch

from ..torch_private import HigherOrderOperator, OpOverload, effectful_operators, functional_operators


class Kind(Enum):
    """How an operator spends its time; the cost models price by kind."""

    FREE = "no work at run time"
    POINTWISE = "element by element, fused into its readers"
    TRANSCENDENTAL = "element by element, some tens of instructions each"
    SLOW_TRANSCENDENTAL = "element by element, a hundred instructions each or more"
    GATHER = "element by element with indirect reads"
    REDUCTION = "reads more than it writes; ends a fusion"
    EXP_REDUCTION = "the same, with an exponential per element"
    SLOW_REDUCTION = "the same, in many passes where a kernel of its own does it"
    MATMUL = "matrix product, convolution or attention"
    RANDOM = "draws random numbers"
    OTHER = "unknown, runs as a kernel of its own"


FUSED_KINDS = frozenset(
    {
        Kind.POINTWISE,
        Kind.TRANSCENDENTAL,
        Kind.SLOW_TRANSCENDENTAL,
        Kind.GATHER,
        Kind.REDUCTION,
        Kind.EXP_REDUCTION,
        Kind.SLOW_REDUCTION,
        Kind.FREE,
    }
)
"""Ops that a compiler makes part of a loop; all others are kernels of their own, which read and write memory."""

INLINED_KINDS = FUSED_KINDS - {Kind.REDUCTION, Kind.EXP_REDUCTION, Kind.SLOW_REDUCTION}
"""Ops whose result a compiler computes again in every loop that reads it. A reduction ends a loop."""


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
    """Talks to other ranks."""
    is_wait: bool = False
    """Waits for a collective; before that, its argument is no value yet."""
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
    is_scatter: bool = False
    """Writes some elements of its result after others: compilers give it memory, whoever reads it."""
    copies_storage: bool = False
    """Its own kernel copies all of the storage that its first input is a view of."""
    holds_elements: bool = False
    """A sum that its own kernel returns in memory as large as its first input."""
    lays_out_anew: bool = False
    """Its own kernel lays out its result in another way than tracing says, unless its inputs lie row by row."""
    is_concatenation: bool = False
    """Puts its result together from several inputs."""
    is_exponential: bool = False
    """Computes an exponential: compilers do so once, even if several loops read the result."""
    is_convolution: bool = False
    """A convolution: compilers like its inputs in another layout than they come in."""
    has_body: bool = False
    """A higher-order operator: its arguments include graphs, whose facts count too."""

    is_unknown: bool = False
    """A higher-order operator of which nobody said what it does."""

    @property
    def runs_once(self) -> bool:
        """A second run would write, send or print a second time."""
        return self.is_mutating or self.is_collective or self.is_effectful

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


def _names(words: str) -> frozenset[str]:
    """Operators by name, every overload of each; those of other libraries than aten are written with theirs."""
    return frozenset(word if "::" in word else f"aten::{word}" for word in words.split())


MATMULS = _names(
    """
    mm bmm addmm baddbmm addbmm addmv mv dot vdot _scaled_mm _int_mm _addmm_activation matmul linear convolution
    _convolution convolution_backward mkldnn_convolution _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable
    _scaled_dot_product_attention_math _flash_attention_forward _efficient_attention_forward _grouped_mm _trilinear
    _cdist_forward grid_sampler_2d
    """
)
_CONVOLUTIONS = _names("convolution _convolution mkldnn_convolution")
_REDUCTIONS = _names(
    """
    sum mean var var_mean std std_mean amax amin max min prod any all norm linalg_vector_norm native_layer_norm
    native_group_norm _native_batch_norm_legit_no_training _fused_rms_norm cudnn_batch_norm nll_loss_forward
    nll_loss2d_forward cumsum cumprod logcumsumexp count_nonzero avg_pool2d avg_pool3d
    _adaptive_avg_pool2d _adaptive_avg_pool3d aminmax mse_loss l1_loss prims::sum prims::amax prims::amin
    prims::prod prims::var prims::xor_sum
    """
)
_EXP_REDUCTIONS = _names("logsumexp _softmax _log_softmax")
_SLOW_REDUCTIONS = _names(
    """
    native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional batch_norm_with_update
    _batch_norm_with_update _batch_norm_with_update_functional
    """
)
_TRANSCENDENTALS = _names(
    """
    exp exp2 expm1 log log2 log10 log1p sin cos erf erfc sigmoid gelu silu softplus elu log_sigmoid_forward logit
    xlogy
    """
)
_SLOW_TRANSCENDENTALS = _names(
    """
    tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh erfinv mish lgamma digamma polygamma special_erfcx
    special_log_ndtr special_ndtri pow igamma i0
    """
)
_GATHERS = _names(
    """
    index _unsafe_index index_select gather embedding take take_along_dim scatter scatter_add scatter_reduce
    index_put _unsafe_index_put index_add index_copy index_fill masked_scatter upsample_nearest2d
    upsample_bilinear2d roll flip
    """
)
# Pointwise by nature though torch does not tag them so; all of them become part of a fused loop.
_UNTAGGED_POINTWISE = _names(
    """
    where clone _to_copy full full_like ones ones_like zeros zeros_like empty_like arange scalar_tensor cat stack
    constant_pad_nd tril triu copy lift_fresh_copy repeat masked_fill select_scatter slice_scatter
    as_strided_scatter diagonal_scatter new_zeros new_ones new_full new_empty empty empty_strided new_empty_strided
    eye one_hot expand_copy view_copy permute_copy glu contiguous reshape native_dropout_backward prims::iota
    prims::convert_element_type prims::broadcast_in_dim prims::device_put prims::inductor_lookup_seed prims::fma
    """
)
_UNINITIALIZED = _names("empty empty_like empty_strided new_empty new_empty_strided")
_DISCRETE = _names(
    """
    topk sort argsort argmax argmin msort kthvalue mode median nanmedian max_pool2d_with_indices
    max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d
    prims::_low_memory_max_pool_with_offsets cummax cummin searchsorted bucketize
    unique_consecutive unique_dim _unique2 histc bincount segment_reduce
    """
)
# Nearly always a small whole exponent, which compilers turn into products.
_POINTWISE_OVERLOADS = frozenset(["aten::pow.Tensor_Scalar"])
# `max(dim)` and `min(dim)` also return where; without a dim they return only a value.
_DISCRETE_OVERLOADS = frozenset(["aten::max.dim", "aten::min.dim", "aten::max.names_dim", "aten::min.names_dim"])
_READS_DATA = _names(
    """
    _local_scalar_dense item nonzero nonzero_static masked_select equal is_nonzero repeat_interleave
    sym_constrain_range sym_constrain_range_for_size _assert_async _assert_scalar _functional_assert_async
    """
)
_SEEDS = _names(
    """
    prims::inductor_seed prims::inductor_seeds prims::philox_rand prims::rand_eager_offsets
    """
)
# Pure functions of the seed they are given, whatever their tags say.
_SEEDED = _names(
    """
    prims::inductor_random prims::inductor_randint prims::inductor_lookup_seed prims::inductor_force_stride_order
    """
)
_SCATTERS = _names("scatter scatter_add scatter_reduce index_put _unsafe_index_put index_add index_copy masked_scatter")
_CONCATENATIONS = _names("cat stack")
_EXPONENTIALS = _names("exp sigmoid silu")
# Their kernels return their input's storage although the schemas do not say so.
_SILENT_VIEWS = _names("_unsafe_view _reshape_alias unsafe_split unsafe_split_with_sizes unsafe_chunk")
# Their kernels copy all of the storage that their first input is a view of, run one by one.
_WHOLE_COPIES = _names("copy slice_scatter select_scatter diagonal_scatter as_strided_scatter")
# Their kernels write the loss of each element to memory, sum that up, and return the sum in the same memory.
_HOLDING_ELEMENTS = _names("mse_loss smooth_l1_loss binary_cross_entropy soft_margin_loss")
# What a sweep over all ops has found (`pytest -m slow tests/test_layouts.py`).
_LAYING_OUT_ANEW = _names(
    """
    binary_cross_entropy binary_cross_entropy_backward copysign.Tensor div.Tensor_mode floor_divide glu_backward
    hardswish_backward hardtanh_backward heaviside huber_loss_backward ldexp log_sigmoid_forward logaddexp logical_and
    logical_or logical_xor logit_backward mse_loss_backward native_dropout_backward pow.Scalar smooth_l1_loss_backward
    special_xlog1py xlogy
    """
)
# Libraries whose every op talks to other ranks, or acts on storages, streams or generators behind the graph's back.
COLLECTIVE_NAMESPACES = frozenset(
    ["_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "_dtensor", "symm_mem"]
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


def facts_of_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpFacts:
    """Look up what is known of a call, its arguments considered."""
    facts = facts_of(target)
    if facts.is_random and isinstance(target, OpOverload) and _drops_nothing(target, args, kwargs):
        return replace(facts, is_random=False)
    return facts


def _drops_nothing(op: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True for an attention op without dropout, which draws no numbers although it could."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            given: Any = kwargs.get("dropout_p", argument.default_value)
            return bool((args[position] if position < len(args) else given) == 0.0)
    return False


def is_matmul(op: Any) -> bool:
    """True for products of matrices, convolutions and attention, also where they draw random numbers."""
    return isinstance(op, OpOverload) and op._schema.name in MATMULS


def _overload_facts(op: OpOverload[..., Any]) -> OpFacts:
    name = op._schema.name
    is_random = torch.Tag.nondeterministic_seeded in op.tags and name not in _SEEDED and name not in _SEEDS
    is_view = _returns_view(op)
    return OpFacts(
        kind=Kind.FREE if is_view else _kind_of(op, name),
        is_view=is_view,
        is_random=is_random,
        draws_seed=name in _SEEDS,
        is_collective=op.namespace in COLLECTIVE_NAMESPACES,
        is_wait=op.namespace in COLLECTIVE_NAMESPACES and "wait_tensor" in name,
        is_effectful=op.namespace in _EFFECTFUL_NAMESPACES,
        is_mutating=op._schema.is_mutable,
        is_discrete=name in _DISCRETE or f"{name}.{op._overloadname}" in _DISCRETE_OVERLOADS,
        is_uninitialized=name in _UNINITIALIZED,
        is_scatter=name in _SCATTERS,
        copies_storage=name in _WHOLE_COPIES,
        holds_elements=name in _HOLDING_ELEMENTS,
        lays_out_anew=name in _LAYING_OUT_ANEW or f"{name}.{op._overloadname}" in _LAYING_OUT_ANEW,
        is_concatenation=name in _CONCATENATIONS,
        is_exponential=name in _EXPONENTIALS,
        is_convolution=name in _CONVOLUTIONS,
        reads_data=name in _READS_DATA or torch.Tag.data_dependent_output in op.tags,
    )


def _returns_view(op: OpOverload[..., Any]) -> bool:
    if op._schema.name in _SILENT_VIEWS:
        return True
    returns = op._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _kind_of(op: OpOverload[..., Any], name: str) -> Kind:
    if f"{name}.{op._overloadname}" in _POINTWISE_OVERLOADS:
        return Kind.POINTWISE
    for names, kind in (
        (MATMULS, Kind.MATMUL),
        (_REDUCTIONS, Kind.REDUCTION),
        (_EXP_REDUCTIONS, Kind.EXP_REDUCTION),
        (_SLOW_REDUCTIONS, Kind.SLOW_REDUCTION),
        (_TRANSCENDENTALS, Kind.TRANSCENDENTAL),
        (_SLOW_TRANSCENDENTALS, Kind.SLOW_TRANSCENDENTAL),
        (_GATHERS, Kind.GATHER),
        (_UNTAGGED_POINTWISE, Kind.POINTWISE),
    ):
        if name in names:
            return kind
    if name in _SEEDED or torch.Tag.nondeterministic_seeded in op.tags:
        return Kind.RANDOM
    if torch.Tag.pointwise in op.tags:
        return Kind.POINTWISE
    if torch.Tag.reduction in op.tags:
        return Kind.REDUCTION
    return Kind.OTHER
