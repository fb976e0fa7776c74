"""Several backwards that share one recomputation of each region."""

from __future__ import annotations

from remat.passes.torch_private import get_graph_exec_group, set_graph_exec_group


class GraphExecGroup:
    """Let the backwards inside recompute each region once; no two of them may need the same activation."""

    def __enter__(self) -> GraphExecGroup:
        current = get_graph_exec_group()
        if current is not None:
            raise RuntimeError(f"GraphExecGroup contexts cannot be nested. Already inside group {current}")
        set_graph_exec_group(self)  # type: ignore[arg-type]
        return self

    def __exit__(self, *exception: object) -> None:
        set_graph_exec_group(None)
