"""The constants that steer the searches, each with its reason, by how large a graph is.

A small graph has so few values and stages of backward that much can be tried; of a large one hardly more than a handful
of schedules can be simulated while somebody waits. No constant changes what is legal or what a schedule is said to
take: they only decide which schedules are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

LARGEST_TABLE = 2_500
"""Values times stages up to which a graph is small: forgetting everything everywhere can be tried."""

LONGEST_STEP = 3_333
"""Nodes in a step beyond which hardly any schedules can be looked at. With fewer than 12 tries (at 40,000 nodes
simulated) the local search was seen to leave memory unused on large graphs (T5), and not with twice as many (Llama)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How the searches go about graphs of one size."""

    # ------------------------------------------------------------------------------------------ the ladder of cuts

    num_cuts: int = 16
    """How many cuts are made at most at rising prices."""
    smallest_gap: float = 0.02
    """Gaps between neighbouring cuts below this part of the widest choice are not looked into."""
    dearest: float = 1e9
    """The last price, as a multiple of what moving a byte out and back costs: it keeps only what must be kept."""
    stages_tried: int = 3
    """For how many stages of backward the cut is made as if the peak were there."""
    as_high: float = 0.99
    """From what part of the peak on a stage of backward has the peak, too."""
    piled_up: float = 1.25
    """By what factor peaks rise again where cuts keep so little that what is recomputed piles up in backward; those at
    higher prices are no better."""
    guesses: int = 4
    """How often one guesses by proportion where the budget is met, before one halves what is left."""
    close: float | None = None
    """What part of a budget is enough: the rest is not worth the time it takes to look for it; None for no less than
    the nearest one."""

    # ------------------------------------------------------------------------------------------ the chain of blocks

    max_blocks: int = 64
    """More than these are merged: the planner over blocks takes cubic time."""
    few_blocks: int = 12
    """A stretch with more than this part of all bytes is split also where the crossing bytes stay as they are."""
    highest_hill: float = 8
    """A point is left out if more than this many times the bytes cross it that cross narrower points on both sides: who
    undoes what follows it has to hold what crosses, and may need that for nothing but recomputing."""
    min_content: float = 1.5
    """A block whose values are fewer bytes than this times what crosses its end is merged with its neighbour: keeping
    its input and recomputing it would save next to nothing."""
    grid_steps: int = 400
    """Resolution of memory; a budget is this many steps."""
    headroom: float = 1.25
    """How much more than the budget the chain planner may believe to have: it counts some memory that is free
    already."""
    levels_tried: int = 5
    """How many of the lowest levels of memory are tried in each round, and how many of the others: what the planner
    believes to be the lowest peak need not be the lowest one."""
    rounds_to_minimum: int = 4
    """How often the grid of the chain planner is refined in search of the lowest peak."""
    longest_plan: int | None = 3
    """How many times the graph's nodes backward may run in all: with more repetitions than that, planning and compiling
    take longer than anybody waits for. None for any number of them."""

    # ------------------------------------------------------------------------------------------ the local search

    nodes_simulated: int = 40_000
    """The effort for one budget; larger graphs are chains mostly, where others plan well. A node takes four
    microseconds."""
    nodes_in_region: int = 120_000
    """The effort for annealing what one region does to keep within its own budget, however large the graph is."""
    fewest_tries: int = 200
    """With fewer tries than these left, annealing finds nothing."""
    moves_drawn: int = 20
    """How many values are drawn before a random move is given up: of some there is nothing to change."""
    start_temperature: float = 3e-2
    """As a part of the forward's time. Not derived: tried on small graphs with known optima."""
    end_temperature: float = 3e-4
    """The same at the end of the search."""
    excess_price: float = 4.0
    """What exceeding the budget costs in the search: exceeding it by 1 % is as bad as 4 % of the forward's time."""
    excess_price_if_none_fits: float = 16.0
    """The same as long as nothing that fits has been found."""
    excess_share: float = 0.2
    """What exceeding it at one more moment costs, compared with the largest excess."""
    aimed_share: float = 0.5
    """How often a move is aimed at the peak while that exceeds the budget."""
    second_share: float = 0.3
    """How often two moves are made at once."""
    lower_by: float = 0.6
    """In search of the lowest peak, the part of the lowest one so far that is tried next."""
    rounds_to_lower: int = 3
    """How often that is done."""

    # ------------------------------------------------------------------------------------------ squeezing

    nodes_squeezed: int = 250_000
    """The effort for squeezing one plan: more than for a search within a budget, since most plans need no squeezing."""
    highest_moments: int = 6
    """How many of the highest moments a squeeze looks at before it gives up."""
    apart: int = 10
    """How far apart they are."""
    smallest_forgotten: float = 0.01
    """What part of the peak a value has to be for a squeeze to forget it."""
    cheap: float = 1e-3
    """What part of the forward's time is nothing: moves that cost less are told apart by the bytes that they free."""
    squeezed_to: tuple[float, ...] = (0.95, 0.9, 0.8)
    """In search of the lowest peak, the parts of the lowest one so far that a squeeze is to reach, one after the other:
    a peak made of a few large values goes down in large steps."""
    near: float = 1.15
    """By what factor plans may exceed a budget to be squeezed into it: equal layers change sides of a cut together, and
    a cut that needs 1 % too much may be a fifth faster than the next one that fits. In a graph of few values each of
    them is a large part of a budget."""
    near_misses: int = 2
    """How many of them are squeezed."""
    few_moves: int = 8
    """How many values a squeeze into a budget looks at before it forgets one of them."""

    # ------------------------------------------------------------------------------------------ regions

    first_multiple: float = 0.25
    """The first price per byte of a region that is over its limit, as a multiple of what moving a byte costs."""
    raised_by: float = 4.0
    """By what factor prices rise as long as the region does not fit."""
    num_raises: int = 12
    """How often they do: the last price keeps only what must be kept."""
    num_refinements: int = 5
    """How often a price that fits is brought closer to the highest one that does not."""
    small_part: int = 2
    """A region whose values are fewer than the graph's over this is searched by itself before the whole graph is."""


MIDDLE = Tuning()
"""What is neither small nor large."""

SMALL = replace(MIDDLE, nodes_simulated=120_000, longest_plan=None, near=1.5)
"""Annealing pays, and so does any number of repetitions."""

LARGE = replace(MIDDLE, num_cuts=8, close=0.99)
"""Near enough is good enough."""


def is_small(num_values: int, num_stages: int) -> bool:
    """Is a graph so small that much can be tried?"""
    return num_values * num_stages < LARGEST_TABLE


def is_long(num_nodes: int) -> bool:
    """Is a step so long that a search can hardly look at others?"""
    return num_nodes > LONGEST_STEP


def tuning_for(num_values: int, num_stages: int, num_nodes: int) -> Tuning:
    """How to go about a graph with so many values, stages of backward, and nodes in a step."""
    if is_long(num_nodes):
        return LARGE
    return SMALL if is_small(num_values, num_stages) else MIDDLE
