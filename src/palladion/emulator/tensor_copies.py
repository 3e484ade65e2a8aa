"""Tensor copies: `cp.async.bulk.tensor`, its reductions and prefetches, and edits of tensor maps on the device.

Loads put a box of a tensor into shared memory of one or several CTAs, swizzled, with what lies outside the tensor
filled; stores and reductions take it back and leave out what lies outside. Tile mode, gather4 and scatter4;
im2col and interleaved layouts are not emulated. Facts file 2.3 to 2.7 and 5.5.
"""

import numpy as np

from palladion.emulator import engine
from palladion.emulator.bulk import lanes_of
from palladion.emulator.map_bytes import replace_field, unpack
from palladion.emulator.reductions import allowed, reduce_bytes
from palladion.emulator.registry import operation
from palladion.emulator.swizzle import swizzle_address
from palladion.emulator.tensor_map import TensorMap, TensorMapError, broken_rule
from palladion.emulator.tiles import Tile, TileError, converted, fill_pattern, tile


def read_map(group, address: int, lane: int, what: str) -> TensorMap:
    """The tensor map at a generic address, checked to be one, and to be visible if the device edited it."""
    if address % 64:
        group.fault("misaligned", f"{what}: tensor map address {address:#x} is not a multiple of 64 bytes", lane=lane)
    found = unpack(group.view("generic", address, 128))
    if found is None:
        raise group.fault(
            "illegal-shape",
            f"{what}: the 128 bytes at {address:#x} are not a tensor map; pass one as a const __grid_constant__ "
            "parameter, or its address",
            lane=lane,
        )
    edited = group.machine.slot("edited maps", dict)
    if address in edited and group.cta.index not in edited[address]:
        group.fault(
            "missing-fence",
            f"{what}: the tensor map at {address:#x} was edited on the device, and this CTA has not executed "
            "fence.proxy.tensormap::generic.acquire on it",
            lane=lane,
        )
    if wrong := broken_rule(found, arch_number(group)):
        group.fault("illegal-shape", f"{what}: the tensor map breaks a rule: {wrong}", lane=lane)
    return found


def arch_number(group) -> int:
    """Ten times the compute capability of the emulated device."""
    return int("".join(c for c in str(group.machine.arch) if c.isdigit()))


def _tile(group, instr, tensor_map, coordinates, lane, what) -> Tile:
    if any(part.startswith("im2col") for part in instr.parts):
        group.fault("illegal-shape", f"{what}: im2col copies are not emulated", lane=lane)
    gather = instr.has("tile::gather4") or instr.has("tile::scatter4")
    dimensions = int(next(part for part in instr.parts if part in ("1d", "2d", "3d", "4d", "5d"))[0])
    wanted = 5 if gather else dimensions
    if len(coordinates) != wanted:
        group.fault("illegal-shape", f"{what}: {len(coordinates)} coordinates where there must be {wanted}", lane=lane)
    try:
        return tile(tensor_map, coordinates, gather)
    except TileError as error:
        raise group.fault(error.kind, f"{what}: {error}", lane=lane) from None


def _window(group, t: Tile, write: bool = False):
    """A view of the global bytes from the first to the last that the tile has inside, and indices in it."""
    if not t.inside.any():
        return None, None
    inside = t.source[t.inside]
    low, high = int(inside.min()), int(inside.max()) + 1
    return group.view("global", low, high - low, write=write), inside - low


def _offsets(cta, offset: int, t: Tile, tensor_map: TensorMap) -> np.ndarray:
    """Where in a CTA's shared memory the tile's bytes are, swizzled."""
    return swizzle_address(offset + t.offset, tensor_map.swizzle)


def _spread(group, cta, offset, t, tensor_map, lane, what):
    # A swizzle only permutes within its period, which the tile's last bytes may be moved past.
    where = _offsets(cta, offset, t, tensor_map)
    engine.check_room(group, cta, 0, int(where.max()) + 1, lane, what)
    return where


@operation("cp.async.bulk.tensor")
def cp_async_bulk_tensor(group, instr, first, second, *extra) -> None:
    """`cp.async.bulk.tensor.Nd…`: a load if the destination is shared memory, else a store."""
    for lane, at in lanes_of(group):
        if isinstance(second, tuple):
            address, coordinates = second
            arguments = [tuple(at(c) for c in x) if isinstance(x, tuple) else at(x) for x in extra]
            _load(group, instr, lane, at(first), at(address), [_signed(at(c)) for c in coordinates], arguments)
        else:
            address, coordinates = first
            _store(group, instr, lane, at(address), [_signed(at(c)) for c in coordinates], at(second), None)


def _signed(value: int) -> int:
    return (value & 0xFFFFFFFF) - ((value & 0x80000000) << 1)


def _load(group, instr, lane, target, map_address, coordinates, extra) -> None:
    mbarrier, *rest = extra
    what = f"{'.'.join(instr.parts[:5])} load at ({', '.join(map(str, coordinates))})"
    m = read_map(group, map_address, lane, what)
    t = _tile(group, instr, m, coordinates, lane, what)
    named = [
        n for n, has in (("mask", instr.has("multicast::cluster")), ("policy", instr.has("L2::cache_hint"))) if has
    ]
    options = dict(zip(named, rest))
    own = "shared::cta" in instr.parts
    cta, offset = engine.shared_span(group, target, t.size, 128, lane, what, own=own)
    view, index = _window(group, t)
    count = 4 * m.row_bytes if instr.has("tile::gather4") else m.box_bytes
    pair = instr.has("cta_group::2")
    if "mask" in options:
        targets = engine.multicast_targets(group, options["mask"], lane, what)
    else:
        targets = [cta]
    holder, at = group.locate_shared(mbarrier)
    ranks = [_signalled(one.rank, holder.rank, pair) if "mask" in options else holder.rank for one in targets]
    if "mask" not in options and (holder.rank | pair) != (cta.rank | pair):
        group.fault(
            "barrier-remote",
            f"{what}: the mbarrier is of CTA {holder.rank} and the destination of CTA {cta.rank}; they must be in "
            f"one {'pair of CTAs' if pair else 'CTA'}",
            lane=lane,
        )
    ctas = group.cluster.ctas
    signals = [engine.signal_at(group, ctas[rank], at, lane) for rank in ranks]
    places = [(one, _spread(group, one, offset, t, m, lane, what)) for one in targets]

    def fetch():
        data = np.broadcast_to(fill_pattern(m, t.inside.shape[1]), t.inside.shape).copy()
        if view is not None:
            data[t.inside] = view[index]
        return converted(m, data, load=True)

    engine.load(group, lane, what, fetch, places, signals, count)


def _signalled(target: int, holder: int, pair: bool) -> int:
    """The CTA whose barrier hears of a multicast's bytes for CTA `target`: itself, or with cta_group::2 the one
    of its pair that has the parity of the CTA named in the instruction."""
    return (target & ~1) | (holder & 1) if pair else target


def _store(group, instr, lane, map_address, coordinates, source, reduction) -> None:
    what = f"{'.'.join(instr.parts[: 6 if reduction else 5])} store at ({', '.join(map(str, coordinates))})"
    m = read_map(group, map_address, lane, what)
    t = _tile(group, instr, m, coordinates, lane, what)
    starts = coordinates[:1] if instr.has("tile::scatter4") else coordinates
    if min(starts) < 0:
        group.fault("out-of-bounds", f"{what}: a store's first coordinates must not be negative", lane=lane)
    if m.swizzle.flip or m.element == 14:
        group.fault(
            "illegal-shape", f"{what}: {m.type.name} with swizzle {m.swizzle.name} is for loads only", lane=lane
        )
    if reduction and not allowed(reduction, m.type.name):
        group.fault("illegal-shape", f"{what}: no reduction .{reduction} of {m.type.name}", lane=lane)
    cta, offset = engine.shared_span(group, source, t.size, 128, lane, what, own=True)
    where = _spread(group, cta, offset, t, m, lane, what)
    view, index = _window(group, t, write=True)

    def put(data):
        if view is None:
            return
        new = converted(m, data, load=False)[t.inside]
        view[index] = reduce_bytes(reduction, m.type.name, view[index], new) if reduction else new

    engine.store(group, lane, what, where, put)


@operation("cp.reduce.async.bulk.tensor")
def cp_reduce_async_bulk_tensor(group, instr, target, source, *policy) -> None:
    """`cp.reduce.async.bulk.tensor.Nd.global.shared::cta.OP….bulk_group [tm, {c…}], [src];`"""
    name = next(part for part in instr.parts if part in ("add", "min", "max", "inc", "dec", "and", "or", "xor"))
    address, coordinates = target
    for lane, at in lanes_of(group):
        _store(group, instr, lane, at(address), [_signed(at(c)) for c in coordinates], at(source), name)


@operation("cp.async.bulk.prefetch.tensor")
def prefetch_tensor(group, instr, source, *policy) -> None:
    """`cp.async.bulk.prefetch.tensor…`: a hint, whose map and coordinates are checked all the same."""
    address, coordinates = source
    for lane, at in lanes_of(group):
        what = "cp.async.bulk.prefetch.tensor"
        m = read_map(group, at(address), lane, what)
        _tile(group, instr, m, [_signed(at(c)) for c in coordinates], lane, what)


@operation("prefetch.tensormap", "prefetch.param.tensormap", "prefetch.const.tensormap")
def prefetch_map(group, instr, address) -> None:
    """`prefetch{.space}.tensormap [a];`: a hint, but the address must be a map's."""
    for lane, at in lanes_of(group):
        read_map(group, at(address), lane, "prefetch.tensormap")


# ----------------------------------------------------------------------------------------- maps made on the device


@operation("tensormap.replace")
def tensormap_replace(group, instr, address, *values) -> None:
    """`tensormap.replace.tile.FIELD{.global|.shared::cta}.b1024.TYPE [a]{, ord}, value;`"""
    field, space = instr.parts[3], instr.space()
    for lane, at in lanes_of(group):
        blob = group.view(space, at(address), 128, align=64, write=True)
        *ordinal, value = values
        try:
            blob[:] = np.frombuffer(replace_field(blob, field, at(ordinal[0]) if ordinal else 0, at(value)), np.uint8)
        except TensorMapError as error:
            group.fault("illegal-shape", str(error), lane=lane)
        if space not in ("shared", "shared::cta"):
            _edited(group, at(address))


def _edited(group, address: int) -> None:
    group.machine.slot("edited maps", dict)[address] = set()


@operation("tensormap.cp_fenceproxy", collective="warp")
def cp_fenceproxy(group, instr, target, source, size) -> None:
    """`tensormap.cp_fenceproxy….sync.aligned [dst], [src], 128;`: a warp copies a map to global memory."""
    for lane in group.active_indices()[::32].tolist():
        to, frm = int(group.array(target)[lane]), int(group.array(source)[lane])
        if int(size) != 128:
            group.fault("illegal-shape", f"tensormap.cp_fenceproxy of {int(size)} bytes; a map has 128", lane=lane)
        data = group.view("shared", frm, 128, align=128).copy()
        group.view("global", to, 128, align=128, write=True)[:] = data
        _edited(group, to)
