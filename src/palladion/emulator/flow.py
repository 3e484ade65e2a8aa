"""Control flow of a function: basic blocks, how they end, and an order in which lanes that diverge meet again.

Lanes need no reconvergence stack. Of the groups of lanes of a CTA the machine always runs the one that is furthest
behind, and groups that come to the same block become one (the "thread frontiers" of Diamos et al., MICRO 2011). That
needs an order of blocks in which the blocks after a loop come after the whole loop, and a join after both branches:
a weak topological order (Bourdoncle, 1993), made here by strongly connected components, recursively.

An instruction that may park begins and ends a block of its own, and one that needs whole warps begins a block, so that
the machine decides at beginnings of blocks only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from palladion.emulator.ptx import Function, Instruction, Label, Register, Symbol, Vector
from palladion.emulator.registry import Operation

_GATHERS = {None: 0, "warp": 1, "warpgroup": 2}


@dataclass
class Block:
    """A basic block.

    Attributes:
      body: its instructions without the one that ends it.
      ends: "jump", "branch", "exit", "return", "call" or "switch".
      last: the instruction that ends it, if there is one.
      guard: of a branch: predicate register, and whether it is negated.
      targets: blocks that follow: [next], [taken, not taken], [after the call], or all of a switch.
      gather: whose lanes have to be together before it begins: None, "warp" or "warpgroup".
      position: place in the order in which groups run.
    """

    index: int
    body: list[Instruction] = field(default_factory=list)
    ends: str = "jump"
    last: Instruction | None = None
    guard: tuple[Register, bool] | None = None
    targets: list[int] = field(default_factory=list)
    gather: str | None = None
    position: int = 0


_ENDS = {"exit": "exit", "ret": "return", "trap": "trap"}


def blocks_of(function: Function, find: Callable[[tuple[str, ...]], Operation | None]) -> list[Block]:
    """The blocks of a function; block 0 is its entry.

    Arguments:
      find: gives the operation of the words of an opcode, or None.
    """
    blocks = [Block(0)]
    labels: dict[str, int] = {}
    loose: list[tuple[Block, list[str | int]]] = []  # where each block goes, labels to be looked up
    open_block = True  # whether the last block still lacks an end

    def begin() -> Block:
        nonlocal open_block
        if open_block and not blocks[-1].body and blocks[-1].gather is None:
            return blocks[-1]
        block = Block(len(blocks))
        if open_block:
            end(blocks[-1], "jump", [block.index])
        blocks.append(block)
        open_block = True
        return block

    def end(block: Block, how: str, targets: list[str | int], last: Instruction | None = None) -> None:
        nonlocal open_block
        block.ends, block.last = how, last
        loose.append((block, targets))
        open_block = False

    for item in function.body or []:
        if isinstance(item, Label):
            labels[item.name] = begin().index
            continue
        if not open_block:
            begin()
        block, name = blocks[-1], item.name
        op = find(item.parts) if name not in ("bra", "brx", "call") and name not in _ENDS else None
        alone = name in _ENDS or name in ("call", "brx") or (op is not None and op.may_park(item))
        if op is not None and item.guard is not None and op.gathers(item) is not None:
            alone = True  # warps whose guard is false must not be seen by an operation of whole warps
        if item.guard is not None and alone:
            # lanes whose guard is false go around it
            around = len(blocks) + 1
            block.guard = item.guard
            end(block, "branch", [len(blocks), around])
            blocks.append(Block(len(blocks)))
            open_block = True
            item = Instruction(item.opcode, item.operands, None, item.line, item.text, item.loc)
            block = blocks[-1]
        if name == "bra":
            target = item.operands[0]
            assert isinstance(target, Label)
            if item.guard is None:
                end(block, "jump", [target.name], item)
            else:
                block.guard = item.guard
                end(block, "branch", [target.name, len(blocks)], item)
        elif name in _ENDS:
            end(block, _ENDS[name], [], item)
        elif name == "call":
            end(block, "call", [len(blocks)], item)
        elif name == "brx":
            listed = item.operands[-1]
            assert isinstance(listed, Vector)
            end(block, "switch", [o.name for o in listed.items if isinstance(o, Label | Symbol)], item)
        elif alone:
            block = begin()
            assert op is not None
            block.gather = op.gathers(item)
            block.body.append(item)
            end(block, "jump", [len(blocks)])
        else:
            wanted = op.gathers(item) if op is not None else None
            if _GATHERS[wanted] > _GATHERS[block.gather]:
                block = begin()
                block.gather = wanted
            block.body.append(item)
    if open_block:
        end(blocks[-1], "return", [])
    elif any(t == len(blocks) for _, targets in loose for t in targets):
        blocks.append(Block(len(blocks), ends="return"))
    for block, targets in loose:
        block.targets = [labels[t] if isinstance(t, str) else t for t in targets]
    for position, index in enumerate(weak_topological_order([b.targets for b in blocks])):
        blocks[index].position = position
    return blocks


def weak_topological_order(successors: list[list[int]]) -> list[int]:
    """All nodes, in an order where what follows a cycle comes after all of it, at every depth of nesting.

    Arguments:
      successors: of each node; node 0 is the entry.
    """
    order: list[int] = []

    def visit(nodes: set[int], entry: int) -> None:
        for component in _components(nodes, successors, entry):
            if len(component) == 1:
                order.extend(component)
                continue
            # the loop's head is the node of it that is reached first; without it the rest is ordered again
            head = component[0]
            order.append(head)
            rest = set(component) - {head}
            starts = [t for t in successors[head] if t in rest]
            visit(rest, starts[0] if starts else min(rest))

    visit(set(range(len(successors))), 0)
    return order


def _components(nodes: set[int], successors: list[list[int]], entry: int) -> list[list[int]]:
    """Strongly connected components in topological order, each beginning with the node reached first (Tarjan)."""
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[list[int]] = []
    for root in [entry, *sorted(nodes - {entry})]:
        if root in number:
            continue
        work = [(root, iter(successors[root]))]
        number[root] = low[root] = len(number)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, rest = work[-1]
            for target in rest:
                if target not in nodes:
                    continue
                if target not in number:
                    number[target] = low[target] = len(number)
                    stack.append(target)
                    on_stack.add(target)
                    work.append((target, iter(successors[target])))
                    break
                if target in on_stack:
                    low[node] = min(low[node], number[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == number[node]:
                    at = stack.index(node)
                    component = stack[at:]
                    del stack[at:]
                    on_stack.difference_update(component)
                    found.append(component)
    return found[::-1]
