"""Pure graph work: a joint FX graph in, a plan and two FX graphs out. In data-flow order:

    dropout         taken apart where ops run one by one, so that its mask can be kept alone
    losses          copied out of the memory of what they sum up, where ops run one by one
    gradients       laid out like their parameters as soon as they are there, not at the end of backward
    ports           a stand-in for what leaves a region, which the outside reads (region_tag: what nodes say of regions)
    joint_graph     who computes what, on which side it may run, what backward needs
    constraints     what may be saved, what may be recomputed, and why not
    symbols         a number for every size that is a symbol, and bytes as polynomials of them
    cost            seconds to recompute, seconds to keep (op_call: what a cost depends on, uses: who reads the result)
    choose          the flow problem, its cheapest cut (min_cut), the plan with a reason per value (plan; keeping:
                    what would go if one value more were kept, which tells what is done for a budget only)
                    with budgets: budget plans for the graph's, region_budget for those of regions (shares: what they
                    bound, share_planner: how they are met)
                    with symbols: ranges plans for a range of sizes (peaks: the peak as an expression, unknown_sizes:
                    what no budget is planned with), validity says for which sizes a budget holds
    schedule        the order of backward, each recomputation just before its first reader (backward_order: of its own
                    nodes)
    extract         forward and backward as graphs; rng replays random ops; overwrite leaves results
                    in memory that is of no use any more
    verify          plans and graphs checked against the rules, always
    offload         saved values that wait in host memory, or in a file (disk: the file, disk_op: the op that fills it)
    masks           saved masks that wait as bytes, which vectorised loops read and write faster
    stored          plans made earlier, applied again (stored_check: each does what it says)
    partition       the pipeline above, on one screen
    kernels         the peak of what a compiler has made of it, to be compared with the budget (inductor_kernels: read
                    off inductor, fusion: what it is told so that the plan's order stays)

Shared by all: op_facts (what is known of operators), expressions (of sizes, as text), policy, name_op, source (where a
node comes from), readable (bytes and times for people), errors, fields (of stored data, checked; plan_claims: those of
plans against each other), fingerprint (cache keys), torch_private (every private import). Nothing here knows
decorators, `torch.compile` or global settings.
"""
