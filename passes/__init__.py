"""Pure graph work: a joint FX graph in, a plan and two FX graphs out. Nothing here knows decorators or global settings.

The rooms, in the order in which data flows through them; each imports only rooms above it:

    torch_private   the only imports of private torch; what differs between torch releases
    shared          words that both engines use: errors, policies, lines of source, files
    ops             operators: what is known of each, and those of our own
    graph           the joint graph: who computes what, which values may be kept or recomputed, and why not
    sizes           numbers for sizes that are symbols, and expressions of them
    rewrites        what is changed in the joint graph before it is planned
    prices          what it costs to keep a value, and to compute it again
    memory          orders of nodes, and what is alive when: the simulator that judges every plan
    search          from prices and memory to schedules: the minimum cut, blocks, chains, moves
    budgets         what users promise, which schedule keeps within it, and what is said if none does
    plans           the plan: data, JSON, stored plans; what a plan is made for
    ranges          for which sizes a plan holds
    write           from a plan to two graphs, and the check that they mean what the joint graph means
    inductor        all that is known of inductor: order of kernels, masks, the peak of what it has made

`pipeline.run` puts them together, on one screen. It is the only pipeline: compiling, explaining and drawing frontiers
all call it, and an `Observer` is shown what is planned.
"""
