"""Registers that a wgmma still writes, followed through a function: a use before the wait is a fault.

The PTX manual forbids to read the accumulator of a wgmma before the `wgmma.wait_group` that covers it. This goes over
the blocks of a function once and keeps, for each place, which registers are in flight on *every* path to it, by group:
not committed yet, or committed 0, 1, 2… groups ago. A `mov` carries that over to its target, as compilers put copies
anywhere. Where paths meet only what is in flight on all of them remains, so that there are no false alarms.

State: a tuple of sets of registers; the first is of products not committed, the next of the latest group, and so on.
"""

from __future__ import annotations

from typing import Any

from palladion.emulator.ptx import Immediate, Instruction, Register, Vector

Sets = tuple[frozenset[str], ...]
_MOST = 8  # groups told apart; older ones count as one


def check(group: Any) -> None:
    """Raises "wgmma-in-flight" if the function that the group executes uses a register in flight. Once a function."""
    code = group.frame.code
    seen: dict[int, Any] = group.machine.slot("wgmma registers", dict)
    if id(code) not in seen:
        seen[id(code)] = (code, first_use(code.blocks))
    found = seen[id(code)][1]
    if found is not None:
        instr, name = found
        group.fault(
            "wgmma-in-flight",
            f"register {name}, which a wgmma still writes, is used at PTX line {instr.line} ({instr.text}) before "
            "wgmma.wait_group",
            hint="Execute wgmma.commit_group and wgmma.wait_group before the accumulator is used.",
        )


def first_use(blocks: list[Any]) -> tuple[Instruction, str] | None:
    """The first instruction that uses a register in flight on every path to it, and the register."""
    entry: dict[int, Sets] = {0: (frozenset(),)}
    work = [0]
    while work:
        index = work.pop()
        state, _ = _through(blocks[index], entry[index])
        for target in blocks[index].targets:
            new = state if target not in entry else _meet(entry[target], state)
            if entry.get(target) != new:
                entry[target] = new
                work.append(target)
    uses = [use for index in sorted(entry) if (use := _through(blocks[index], entry[index])[1]) is not None]
    return min(uses, key=lambda use: use[0].line, default=None)


def _meet(a: Sets, b: Sets) -> Sets:
    """In flight on both paths, and of the two ages the older: what one path's wait covers is over."""
    both = frozenset().union(*a) & frozenset().union(*b)
    size = max(len(a), len(b))
    age = {name: max(_age(a, name), _age(b, name)) for name in both}
    return tuple(frozenset(n for n in both if age[n] == k) for k in range(size))


def _age(state: Sets, name: str) -> int:
    return next(k for k, names in enumerate(state) if name in names)


def _without(state: Sets, names: set[str]) -> Sets:
    return tuple(s - names for s in state)


def _through(block: Any, state: Sets) -> tuple[Sets, tuple[Instruction, str] | None]:
    """The state after a block, and the first use of a register in flight in it."""
    use: tuple[Instruction, str] | None = None
    for instr in block.body:
        head = ".".join(instr.parts[:2])
        if head == "wgmma.mma_async":
            used, written = _names(instr.operands[1:]), _names(instr.operands[:1])
            state = _without(state, written)
            state = (state[0] | written, *state[1:])
        elif head == "wgmma.commit_group":
            state = (frozenset(), *state)
            if len(state) > _MOST:
                state = (*state[: _MOST - 1], frozenset().union(*state[_MOST - 1 :]))
            continue
        elif head == "wgmma.wait_group":
            operand = instr.operands[0]
            pending = int(operand.value) if isinstance(operand, Immediate) else 0
            state = state[: 1 + pending]
            continue
        elif not any(state):
            continue
        elif instr.parts[0] == "mov" and all(isinstance(o, Register) for o in instr.operands) and instr.guard is None:
            target, source = (o.name for o in instr.operands)  # type: ignore[union-attr]
            found = [k for k, names in enumerate(state) if source in names]
            state = _without(state, {target})
            if found:
                state = tuple(s | {target} if k == found[0] else s for k, s in enumerate(state))
            continue
        else:
            out = _written(instr)
            used, written = _names(instr.operands[out:]), _names(instr.operands[:out])
            flying = used & frozenset().union(*state)
            if flying and use is None:
                use = (instr, min(flying))
            state = _without(state, written)
            continue
        flying = used & (frozenset().union(*state) - written)
        if flying and use is None:
            use = (instr, min(flying))
    return state, use


def _written(instr: Instruction) -> int:
    from palladion.emulator.liveness import parts_of  # needs all operations, of which this is one

    return parts_of(instr)[2]


def _names(operands: Any) -> set[str]:
    """Registers in operands, of addresses and vectors too."""
    out: set[str] = set()
    for operand in operands:
        if isinstance(operand, Register):
            out.add(operand.name)
        elif isinstance(operand, Vector):
            out |= _names(operand.items)
        else:
            for part in ("value", "base", "more", "first", "second"):
                inner = getattr(operand, part, None)
                if inner is not None and not isinstance(inner, (int, float, str)):
                    out |= _names(inner if isinstance(inner, tuple) else (inner,))
    return out
