"""What the nodes of a joint graph say of the region they were traced in: the `node.meta` keys, and all access to them.

A forward node says it under its own key. A backward node says only to which region its formula belongs: AOTAutograd
copies the `custom` entry of the forward op it differentiates. Beside these stand the two tags that torch's own
partitioners read, so that they honour a region too.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from ..ops import facts_of
from ..torch_private import statically_equal

POLICY_TAG = "recompute"
"""`node.meta` key of the policy's answer; torch's region carriers write it too."""

REGION_TAG = "ac_graph_id"
"""`node.meta` key of the number of the outermost region that a node was traced in; torch's carriers write it too."""

OWN_TAG = "remat_region"
"""`node.meta` key of a node's `RegionTag`; inside the `custom` entry also that of backward nodes."""

NAME_TAG = "remat_name"
"""`node.meta` key of the name that the program gave a value."""

PORT_TAG = "remat_port"
"""`node.meta` key of a stand-in for a value that leaves its region: what the outside reads."""

_CUSTOM = "custom"
"""`node.meta` key of the dictionary that AOTAutograd copies from forward to backward nodes."""


@dataclass(frozen=True, slots=True)
class RegionBudget:
    """A bound on what one call of a region may have allocated at any moment."""

    path: str
    """The region call that it bounds."""
    text: str
    """The user's words, for messages."""
    fraction: float | None = None
    """Of the region's share without recomputation."""
    num_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RegionTag:
    """The region of one node."""

    path: str
    """Names from the outermost region inwards, `decoder/mlp#2`: the second `mlp` that this `decoder` called."""
    number: int
    """Tells calls of outermost regions apart."""
    policy: str
    """The policy's name and line; empty for a region without one."""
    preserve_rng_state: bool = True
    """Whether a recomputed random op draws what it drew in forward."""
    budgets: tuple[RegionBudget, ...] = ()
    """The budgets of this region and of those around it, outermost first."""
    disk_folder: str | None = None
    """Where values go that the policy offloads; None for host memory."""


def tag(node: fx.Node, region: RegionTag, answer: CheckpointPolicy) -> None:
    """Say of a forward node in which region it was traced, and what the policy answered."""
    node.meta[OWN_TAG] = region
    node.meta[POLICY_TAG] = answer
    node.meta[REGION_TAG] = region.number
    node.meta[_CUSTOM] = {**(node.meta.get(_CUSTOM) or {}), OWN_TAG: region}


def views(node: fx.Node) -> Iterator[fx.Node]:
    """A value and what it is a view of, as far as that was computed."""
    yield node
    while _is_view(node) and node.all_input_nodes[0].op == "call_function":
        node = node.all_input_nodes[0]
        yield node


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return facts_of(node.all_input_nodes[0].target).is_view
    return facts_of(node.target).is_view


def whole_views(node: fx.Node) -> Iterator[fx.Node]:
    """A value however it is viewed: the node, what it is a view of all of, and so on."""
    chain = views(node)
    part = next(chain)
    yield part
    for base in chain:
        if not _has_all_of(base, part):
            return
        yield base
        part = base


def _has_all_of(base: fx.Node, view: fx.Node) -> bool:
    """True if a view shows every element of its base."""
    whole, part = base.meta.get("val"), view.meta.get("val")
    if not isinstance(whole, torch.Tensor) or not isinstance(part, torch.Tensor):
        return False
    return statically_equal(whole.numel(), part.numel()) and whole.dtype == part.dtype


def untag(node: fx.Node) -> None:
    """Take a node out of its region."""
    for key in (OWN_TAG, POLICY_TAG, REGION_TAG, NAME_TAG):
        node.meta.pop(key, None)
    custom = node.meta.get(_CUSTOM)
    if custom and OWN_TAG in custom:
        node.meta[_CUSTOM] = {key: value for key, value in custom.items() if key != OWN_TAG}


def region_of(node: fx.Node) -> RegionTag | None:
    """The region a forward node was traced in."""
    found: RegionTag | None = node.meta.get(OWN_TAG)
    return found


def region_of_formula(node: fx.Node) -> RegionTag | None:
    """The region a node belongs to, as forward op or as part of such an op's backward formula."""
    found: RegionTag | None = node.meta.get(OWN_TAG) or (node.meta.get(_CUSTOM) or {}).get(OWN_TAG)
    return found


def budgets_around(node: fx.Node) -> tuple[RegionBudget, ...]:
    """The region budgets that a node's memory counts for, as forward op or as part of a backward formula."""
    region = region_of_formula(node)
    return () if region is None else region.budgets


def policy_of(node: fx.Node) -> CheckpointPolicy | None:
    """The policy a node was traced under; the parts of a tuple go with the op that made it."""
    policy: CheckpointPolicy | None = node.meta.get(POLICY_TAG)
    if policy is None and node.target is operator.getitem:
        return policy_of(node.all_input_nodes[0])
    return policy


def preserves_rng_state(node: fx.Node) -> bool:
    """False for a node of a region that lets a recomputed random op draw other numbers."""
    region = region_of(node)
    return region is None or region.preserve_rng_state


def name_of(node: fx.Node) -> str:
    """The name that the program gave a value, or nothing."""
    name: str = node.meta.get(NAME_TAG, "")
    return name


def region_fields(node: fx.Node) -> dict[str, str]:
    """Region path, policy and name of a node, as a decision reports them."""
    region, policy = region_of_formula(node), node.meta.get(POLICY_TAG)
    return {
        "region": "" if region is None else region.path,
        "policy": "" if policy is None else policy.name,
        "name": name_of(node),
    }


def is_port(node: fx.Node) -> bool:
    """True for the stand-in of a value that leaves its region."""
    return PORT_TAG in node.meta


def repair_tags(nodes: Iterable[fx.Node]) -> None:
    """Give nodes that a compiler's pass has made the region back that torch's own tags still name."""
    known: dict[int, RegionTag] = {}
    lost: list[fx.Node] = []
    for node in nodes:
        region = region_of(node)
        if region is not None:
            known.setdefault(region.number, region)
        elif REGION_TAG in node.meta and node.meta.get(POLICY_TAG) is not None:
            lost.append(node)
    for node in lost:
        region = known.get(node.meta[REGION_TAG])
        if region is not None:
            tag(node, region, node.meta[POLICY_TAG])
