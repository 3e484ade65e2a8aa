"""Random programs of branches, loops, calls and exchanges, in CUDA on the emulator and in Python thread by thread.

One generator writes each program twice: as CUDA C++ for NVRTC and as Python. Exchanges (shuffles, votes, shared
memory behind a barrier) stand where all threads come; there the Python program is a generator that yields what
its thread offers and goes on with what it gets.
"""

import random

import numpy as np
import pytest

from emulator.running import run

MASK = 0xFFFFFFFF
THREADS = 96


class Program:
    """Writes one program in both languages."""

    def __init__(self, seed):
        self.r = random.Random(seed)
        self.c, self.py, self.loops = [], [], 0
        self.depth = 0
        for _ in range(self.r.randint(2, 4)):
            self.statement(2, loop=False)
            if self.r.random() < 0.7:
                self.exchange()
        self.statement(3, loop=False)

    def add(self, c, py):
        pad = "  " * self.depth
        self.c += [pad + line for line in ([c] if c else [])]
        self.py += [pad + line for line in ([py] if py else [])]

    def value(self, depth=2):
        """An expression of unsigned 32-bit numbers: (C, Python)."""
        r = self.r
        if depth == 0 or r.random() < 0.25:
            if r.random() < 0.7:
                name = r.choice("abcd")
                return name, name
            n = r.choice([1, 2, 3, 5, 31, 255, 65537, 0x80000000, r.getrandbits(32)])
            return f"{n}u", str(n)
        (x, px), (y, py) = self.value(depth - 1), self.value(depth - 1)
        op = r.choice(["+", "-", "*", "^", "&", "|", "<<", ">>", "/", "%", "max", "sar", "sel"])
        if op in ("<<", ">>"):
            return f"({x} {op} ({y} & 31u))", f"(({px} {op} ({py} & 31)) & M)"
        if op in ("/", "%"):
            return f"({x} {op} ({y} | 1u))", f"({px} {op * 2 if op == '/' else op} ({py} | 1))"
        if op == "max":
            return f"max({x}, {y})", f"max({px}, {py})"
        if op == "sar":
            return f"(unsigned)((int){x} >> ({y} & 7u))", f"((signed({px}) >> ({py} & 7)) & M)"
        if op == "sel":
            (c, pc) = self.condition(0)
            return f"({c} ? {x} : {y})", f"({px} if {pc} else {py})"
        return f"({x} {op} {y})", f"(({px} {op} {py}) & M)"

    def condition(self, depth=1):
        r = self.r
        (x, px), (y, py) = self.value(depth), self.value(depth)
        kind = r.choice(["<", "signed", "bit", "thread", "warp"])
        if kind == "<":
            return f"({x} < {y})", f"({px} < {py})"
        if kind == "signed":
            return f"((int){x} >= (int){y})", f"(signed({px}) >= signed({py}))"
        if kind == "bit":
            n = r.randrange(8)
            return f"(({x} >> {n}) & 1u)", f"(({px} >> {n}) & 1)"
        n = r.randrange(THREADS)
        if kind == "thread":
            return f"(t % 32u < {n % 33}u)", f"(t % 32 < {n % 33})"
        return f"(t > {n}u)", f"(t > {n})"

    def statement(self, depth, loop):
        r = self.r
        kind = r.choice(["set", "set", "if", "if", "loop", "leave", "call"]) if depth else "set"
        if kind == "set" or (kind == "leave" and not loop):
            name, (c, py) = r.choice("abcd"), self.value(3)
            self.add(f"{name} = {c};", f"{name} = {py}")
        elif kind == "call":
            name, (c, py) = r.choice("abcd"), self.value(1)
            self.add(f"{name} = {name}_of({c}, t);".replace(f"{name}_of", "chase"), f"{name} = chase({py}, t)")
        elif kind == "leave":
            c, py = self.condition()
            word = r.choice(["break", "continue"])
            self.add(f"if ({c}) {word};", f"if {py}: {word}")
        elif kind == "if":
            c, py = self.condition()
            self.add(f"if ({c}) {{", f"if {py}:")
            self.block(depth - 1, loop)
            if r.random() < 0.5:
                self.add("} else {", "else:")
                self.block(depth - 1, loop)
            self.add("}", "")
        else:
            self.loops += 1
            k, (c, py) = self.loops, self.value(1)
            most = r.choice([3, 7])
            self.add(f"#pragma unroll 1\nfor (unsigned i{k} = 0; i{k} < ({c} & {most}u); i{k}++) {{", f"i{k} = -1\n")
            pad = "  " * self.depth
            # the bound is computed anew each time, as in C
            self.py[-1] = f"{pad}i{k} = -1"
            self.py += [f"{pad}while True:", f"{pad}  i{k} += 1", f"{pad}  if not i{k} < ({py} & {most}): break"]
            self.block(depth - 1, True)
            self.add("}", "")

    def block(self, depth, loop):
        self.depth += 1
        for _ in range(self.r.randint(1, 3)):
            self.statement(depth, loop)
        self.depth -= 1

    def exchange(self):
        r = self.r
        name, (c, py) = r.choice("abcd"), self.value(1)
        kind = r.choice(["xor", "down", "ballot", "shared", "sum"])
        n = r.randrange(1, 32)
        text = {
            "xor": f"{name} = __shfl_xor_sync(0xffffffffu, {c}, {n});",
            "down": f"{name} = __shfl_down_sync(0xffffffffu, {c}, {n});",
            "ballot": f"{name} = __ballot_sync(0xffffffffu, {c} & 1u);",
            "shared": f"buf[t] = {c}; __syncthreads(); {name} = buf[(t + {n}u) % {THREADS}u]; __syncthreads();",
            "sum": f"{name} = __reduce_add_sync(0xffffffffu, {c});",
        }[kind]
        self.add(text, f"{name} = yield ({kind!r}, {n}, {py})")

    def cuda(self):
        return f"""
__device__ __noinline__ unsigned chase(unsigned x, unsigned t) {{
  unsigned steps = 0;
  while (x > 5u && steps < (t & 15u)) {{ x = x & 1u ? x / 3u : x >> 1; if (x == 77u) return 123u; steps++; }}
  return steps > 3u ? chase(x & 1023u, t >> 1) + 1u : x * 2u + steps;
}}
extern "C" __global__ void k(const unsigned* in, unsigned* out) {{
  __shared__ unsigned buf[{THREADS}];
  unsigned t = threadIdx.x, a = in[t], b = t * 77u, c = in[t] >> 7, d = 1u;
{chr(10).join("  " + line for line in self.c)}
  out[4 * t] = a; out[4 * t + 1] = b; out[4 * t + 2] = c; out[4 * t + 3] = d;
}}"""

    def python(self):
        body = "\n".join("  " + line for line in self.py)
        return f"def thread(t, a, b, c, d):\n{body}\n  return (a, b, c, d)\n  yield"


def signed(x):
    return x - (1 << 32) if x >> 31 else x


def chase(x, t):
    steps = 0
    while x > 5 and steps < (t & 15):
        x = x // 3 if x & 1 else x >> 1
        if x == 77:
            return 123
        steps += 1
    return (chase(x & 1023, t >> 1) + 1) & MASK if steps > 3 else (x * 2 + steps) & MASK


def exchanged(kind, n, values):
    """What each thread gets of what all of them offer."""
    found = []
    for t in range(THREADS):
        warp = values[t // 32 * 32 : t // 32 * 32 + 32]
        lane = t % 32
        if kind == "xor":
            found.append(warp[lane ^ n])
        elif kind == "down":
            found.append(warp[lane + n] if lane + n < 32 else warp[lane])
        elif kind == "ballot":
            found.append(sum((v & 1) << k for k, v in enumerate(warp)))
        elif kind == "shared":
            found.append(values[(t + n) % THREADS])
        else:
            found.append(sum(warp) & MASK)
    return found


def in_python(program, x):
    names = {"M": MASK, "signed": signed, "chase": chase}
    exec(program.python(), names)
    threads = [names["thread"](t, int(x[t]), t * 77, int(x[t]) >> 7, 1) for t in range(THREADS)]
    given = [None] * THREADS
    results = [None] * THREADS
    while results[0] is None:
        offers = []
        for t, thread in enumerate(threads):
            try:
                offers.append(thread.send(given[t]))
            except StopIteration as end:
                results[t] = end.value
        if offers:
            assert len(offers) == THREADS
            given = exchanged(offers[0][0], offers[0][1], [v & MASK for _, _, v in offers])
    return np.array(results, "u8").astype("u4").reshape(-1)


def check(seed):
    program = Program(seed)
    x = np.random.default_rng(seed).integers(0, 1 << 32, THREADS, dtype="u4")
    _, got = run(program.cuda(), "k", 1, THREADS, [x, np.zeros(4 * THREADS, "u4")])
    np.testing.assert_array_equal(got, in_python(program, x), err_msg=program.cuda())


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed):
    check(seed)
