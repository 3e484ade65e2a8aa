"""What a kernel may call: functions of jax.numpy, jax.nn, jax.lax and jax.scipy by name, with the operands to try.

A function takes `x` and `y` of one shape, `n` (small nonnegative integers of that shape) and `m` (a bool of that
shape). `cases(dtype, shape)` gives those that JAX itself accepts for such operands.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.scipy.special as special
import numpy as np
from jax import lax, nn

FLOAT_UNARY = """
    exp exp2 expm1 log log1p log2 log10 sqrt cbrt sin cos tan sinh cosh tanh arcsin arccos arctan arcsinh arccosh
    arctanh reciprocal square rint trunc fix floor ceil round sinc deg2rad rad2deg degrees radians isfinite isinf isnan
    isneginf isposinf signbit nan_to_num frexp modf spacing i0 angle
""".split()
ANY_UNARY = """
    abs absolute fabs negative positive sign conj real imag iscomplex isreal logical_not cumsum cumprod ravel transpose
    flip fliplr flipud rot90 zeros_like ones_like sort argsort atleast_1d atleast_2d atleast_3d sum prod max min mean
    argmax argmin any all count_nonzero ptp cumulative_sum diff ediff1d trace diag diagonal tril triu nansum nanprod
    nanmax nanmin nancumsum nanargmax var std median squeeze matrix_transpose bitwise_not invert bitwise_count
    nanmean nanstd average vander trim_zeros
""".split()
BINARY = """
    add subtract multiply divide true_divide floor_divide remainder mod fmod divmod power float_power maximum minimum
    fmax fmin arctan2 hypot logaddexp logaddexp2 copysign nextafter heaviside equal not_equal less less_equal greater
    greater_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor gcd lcm isclose allclose
    array_equal outer kron inner vdot dot cross append stack hstack vstack dstack column_stack convolve correlate
    polyadd polymul polyval left_shift right_shift polysub
""".split()
NN = """
    relu relu6 sigmoid softplus sparse_plus sparse_sigmoid soft_sign silu swish log_sigmoid leaky_relu hard_sigmoid
    hard_silu hard_tanh elu celu selu gelu glu squareplus mish identity softmax log_softmax logsumexp standardize
    logmeanexp
""".split()
SPECIAL = """
    erf erfc erfinv gammaln digamma expit logit entr xlogy xlog1py i0 i0e i1 i1e ndtr log_ndtr ndtri zeta betaln
    gammainc gammaincc betainc gamma factorial rel_entr kl_div bernoulli polygamma hyp1f1 sici spence expi exp1
""".split()
LAX_UNARY = """
    abs neg sign floor ceil round exp exp2 log logistic rsqrt sqrt cbrt tanh square is_finite lgamma digamma erf erf_inv
    bessel_i0e bessel_i1e population_count clz bitwise_not sort cumsum cumprod cummax cummin cumlogsumexp
""".split()
LAX_BINARY = """
    add sub mul div rem max min pow nextafter atan2 eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor shift_left
    shift_right_logical shift_right_arithmetic igamma igammac complex mulhi zeta
""".split()


def _methods(x, y, n, m):
    i = n.reshape(-1)[:4] % x.shape[0]
    last = x.shape[-1]
    flat, rows = x.reshape(-1), x.reshape(x.shape[0], -1)
    return {
        "index static": lambda: x[0],
        "index negative": lambda: x[-1],
        "index steps": lambda: x[::2],
        "index reversed": lambda: x[::-1],
        "index array": lambda: x[i],
        "index array negative": lambda: x[-i],
        "index pairs": lambda: rows[i, i % rows.shape[1]],
        "index clip": lambda: jnp.take(x, i * 3, axis=0, mode="clip"),
        "index wrap": lambda: jnp.take(x, i * 3, axis=0, mode="wrap"),
        "index fill": lambda: jnp.take(x, i * 3, axis=0, mode="fill", fill_value=1),
        "index new axis": lambda: x[None, ..., None],
        "index dynamic": lambda: x[i[0]],
        "at set": lambda: x.at[0].set(y[-1]),
        "at add": lambda: x.at[i].add(y[i]),
        "at mul": lambda: x.at[i].mul(2),
        "at max": lambda: x.at[i].max(y[i]),
        "at min": lambda: x.at[i].min(y[i]),
        "at get fill": lambda: x.at[i + 2].get(mode="fill", fill_value=0),
        "at drop": lambda: x.at[i * 3].set(1, mode="drop"),
        "at slice": lambda: x.at[1:].set(0),
        "at apply": lambda: x.at[0].apply(jnp.negative),
        "take_along_axis": lambda: jnp.take_along_axis(x, n.astype(jnp.int32) % last, axis=-1),
        "put_along_axis": lambda: jnp.put_along_axis(x, jnp.argmax(x, -1, keepdims=True), 0, axis=-1, inplace=False),
        "where": lambda: jnp.where(m, x, y),
        "where scalar": lambda: jnp.where(m, x, 1),
        "select": lambda: jnp.select([x < y, x > y], [x, y], 0),
        "piecewise": lambda: jnp.piecewise(x, [x < 0, x > 1], [lambda v: -v, lambda v: v * 2, 1]),
        "choose": lambda: jnp.choose(n.astype(jnp.int32) % 2, [x, y], mode="clip"),
        "clip": lambda: jnp.clip(x, 0, 2),
        "lax.clamp": lambda: lax.clamp(x.dtype.type(0), x, x.dtype.type(2)),
        "pad": lambda: jnp.pad(x, 2),
        "pad edge": lambda: jnp.pad(x, 1, mode="edge"),
        "pad wrap": lambda: jnp.pad(x, 1, mode="wrap"),
        "pad reflect": lambda: jnp.pad(x, (0, 1), mode="symmetric"),
        "lax.pad gaps": lambda: lax.pad(flat, x.dtype.type(0), [(1, -1, 2)]),
        "roll": lambda: jnp.roll(x, 2, axis=0),
        "roll dynamic": lambda: jnp.roll(x, i[0], axis=-1),
        "repeat": lambda: jnp.repeat(x, 3, axis=0),
        "repeat counts": lambda: jnp.repeat(flat, n.reshape(-1), total_repeat_length=7),
        "tile": lambda: jnp.tile(x, 2),
        "concatenate": lambda: jnp.concatenate([x, y]),
        "array_split": lambda: jnp.array_split(x, 2),
        "split": lambda: jnp.split(flat, [1, 2]),
        "broadcast": lambda: jnp.broadcast_to(x, (2, *x.shape)),
        "moveaxis": lambda: jnp.moveaxis(rows, 0, 1),
        "swapaxes": lambda: jnp.swapaxes(rows, 0, 1),
        "einsum": lambda: jnp.einsum("ij,kj->ik", rows, y.reshape(rows.shape)),
        "einsum batch": lambda: jnp.einsum("ij,ij->i", rows, y.reshape(rows.shape)),
        "einsum sum": lambda: jnp.einsum("ij->j", rows),
        "tensordot": lambda: jnp.tensordot(rows, y.reshape(rows.shape), axes=[[0], [0]]),
        "matmul": lambda: rows @ y.reshape(rows.shape).T,
        "matvec": lambda: rows @ y.reshape(rows.shape)[0],
        "vecdot": lambda: jnp.vecdot(x, y),
        "linalg.norm": lambda: jnp.linalg.norm(x),
        "linalg.norm inf": lambda: jnp.linalg.norm(flat, np.inf),
        "matrix_power": lambda: jnp.linalg.matrix_power(rows[:1, :1], 3),
        "interp": lambda: jnp.interp(x, jnp.arange(4.0), jnp.sin(jnp.arange(4.0))),
        "searchsorted": lambda: jnp.searchsorted(jnp.sort(flat), y),
        "searchsorted right": lambda: jnp.searchsorted(jnp.sort(flat), y, side="right", method="compare_all"),
        "searchsorted sort": lambda: jnp.searchsorted(jnp.sort(flat), y, method="sort"),
        "digitize": lambda: jnp.digitize(x, jnp.arange(3)),
        "histogram": lambda: jnp.histogram(x, bins=4, range=(-2, 2))[0],
        "bincount": lambda: jnp.bincount(n.reshape(-1).astype(jnp.int32), length=5),
        "unique sized": lambda: jnp.unique(x, size=4, fill_value=0),
        "nonzero sized": lambda: jnp.nonzero(x, size=4, fill_value=0),
        "argwhere sized": lambda: jnp.argwhere(x > 0, size=3, fill_value=0),
        "isin": lambda: jnp.isin(x, y),
        "lexsort": lambda: jnp.lexsort((flat, y.reshape(-1))),
        "sort descending": lambda: jnp.sort(x, descending=True),
        "partition": lambda: jnp.sort(jnp.partition(flat, 0)),
        "percentile": lambda: jnp.percentile(x, 30),
        "quantile axis": lambda: jnp.quantile(x, jnp.arange(1, 3) * 0.2, axis=0),
        "cov": lambda: jnp.cov(rows),
        "corrcoef": lambda: jnp.corrcoef(rows),
        "gradient": lambda: jnp.gradient(flat),
        "trapezoid": lambda: jnp.trapezoid(x),
        "unwrap": lambda: jnp.unwrap(flat),
        "top_k": lambda: lax.top_k(x, 1),
        "approx_max_k": lambda: lax.approx_max_k(x, 1),
        "approx_min_k": lambda: lax.approx_min_k(x, 1),
        "one_hot": lambda: nn.one_hot(n.astype(jnp.int32), 4),
        "softmax axis": lambda: nn.softmax(rows, axis=0),
        "softmax where": lambda: nn.softmax(x, where=m, initial=0.0),
        "logsumexp b": lambda: nn.logsumexp(x, b=y),
        "dot_product_attention": lambda: nn.dot_product_attention(
            rows[None, :, None], y.reshape(rows.shape)[None, :, None], rows[None, :, None]
        ),
        "sum where": lambda: jnp.sum(x, where=m),
        "max initial": lambda: jnp.max(x, initial=0, where=m),
        "mean keepdims": lambda: jnp.mean(rows, axis=1, keepdims=True),
        "sum of axes": lambda: jnp.sum(rows[None], axis=(0, 2)),
        "cumsum reverse": lambda: lax.cumsum(x, reverse=True),
        "cummax axis": lambda: lax.cummax(rows, axis=1),
        "associative_scan": lambda: lax.associative_scan(jnp.add, x),
        "associative_scan max": lambda: lax.associative_scan(jnp.maximum, rows, axis=1, reverse=True),
        "lax.scan": lambda: lax.scan(lambda c, v: (c + v, c * 2), jnp.zeros_like(x[0]), x),
        "lax.map": lambda: lax.map(lambda v: v * 2, x),
        "fori_loop": lambda: lax.fori_loop(0, 3, lambda k, v: v + y, x),
        "while_loop": lambda: lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, c[1] + c[1]), (0, x)),
        "cond": lambda: lax.cond(i[0] > 1, jnp.negative, jnp.abs, x),
        "switch": lambda: lax.switch(i[0], [jnp.abs, jnp.negative, lambda v: v], x),
        "vmap": lambda: jax.vmap(lambda v: jnp.cumsum(v) * 2)(rows),
        "lax.reduce": lambda: lax.reduce(x, x.dtype.type(0), lax.bitwise_or if x.dtype != bool and
                                         jnp.issubdtype(x.dtype, jnp.integer) else lax.add, (0,)),
        "reduce_window sum": lambda: lax.reduce_window(rows, x.dtype.type(0), lax.add, (2, 2), (1, 2), "SAME"),
        "reduce_window max": lambda: lax.reduce_window(rows, x.dtype.type(0), lax.max, (2, 1), (1, 1), "VALID"),
        "max_pool": lambda: lax.reduce_window(rows, x.dtype.type(0), lax.max, (2, 2), (2, 2), "SAME"),
        "conv": lambda: lax.conv(rows[None, None], y.reshape(rows.shape)[None, None, :2, :2], (1, 1), "SAME"),
        "conv dilated": lambda: lax.conv_general_dilated(
            rows[None, None], y.reshape(rows.shape)[None, None, :2, :2], (2, 1), [(1, 2), (0, 1)], (1, 2), (2, 1)
        ),
        "conv transposed": lambda: lax.conv_transpose(
            rows[None, :, :, None], y.reshape(rows.shape)[:2, :2, None, None], (2, 2), "SAME"
        ),
        "dynamic_slice": lambda: lax.dynamic_slice(flat, (i[0],), (1,)),
        "dynamic_update_slice": lambda: lax.dynamic_update_slice(flat, y.reshape(-1)[:1], (i[0],)),
        "bitcast": lambda: lax.bitcast_convert_type(x, jnp.dtype(f"uint{x.dtype.itemsize * 8}")),
        "bitcast bytes": lambda: lax.bitcast_convert_type(x, jnp.uint8),
        "view": lambda: x.view(jnp.dtype(f"int{x.dtype.itemsize * 8}")),
        "reduce_precision": lambda: lax.reduce_precision(x, 5, 7),
        "stop_gradient": lambda: lax.stop_gradient(x),
        "grad": lambda: jax.grad(lambda v: jnp.sum(jnp.tanh(v) * v))(x),
        "jvp": lambda: jax.jvp(jnp.sin, (x,), (y,)),
        "hessian": lambda: jax.hessian(lambda v: jnp.sum(v**3))(flat[:3]),
        "astype int8": lambda: x.astype(jnp.int8),
        "astype bf16": lambda: x.astype(jnp.bfloat16),
        "astype bool": lambda: x.astype(jnp.bool_),
        "astype uint16": lambda: jnp.abs(x).astype(jnp.uint16),
        "random.uniform": lambda: jax.random.uniform(jax.random.key(3), x.shape),
        "random.normal": lambda: jax.random.normal(jax.random.key(3), x.shape),
        "random.bernoulli": lambda: jax.random.bernoulli(jax.random.key(3), 0.4, x.shape),
        "random.randint": lambda: jax.random.randint(jax.random.key(3), x.shape, 0, 9),
        "random.categorical": lambda: jax.random.categorical(jax.random.key(3), rows),
        "random.permutation": lambda: jax.random.permutation(jax.random.key(3), x),
        "random.choice": lambda: jax.random.choice(jax.random.key(3), flat, (3,)),
        "random.exponential": lambda: jax.random.exponential(jax.random.key(3), x.shape),
        "random.truncated_normal": lambda: jax.random.truncated_normal(jax.random.key(3), -1, 1, x.shape),
        "random.gamma": lambda: jax.random.gamma(jax.random.key(3), 1.5, (3,)),
        "random.laplace": lambda: jax.random.laplace(jax.random.key(3), x.shape),
        "random.rademacher": lambda: jax.random.rademacher(jax.random.key(3), x.shape),
        "random.split": lambda: jax.random.key_data(jax.random.split(jax.random.key(3), 3)),
        "meshgrid": lambda: jnp.meshgrid(flat[:3], y.reshape(-1)[:2]),
        "linspace": lambda: jnp.linspace(0, flat[0], 5),
        "arange": lambda: jnp.arange(7) + x.sum(),
        "eye": lambda: jnp.eye(3) + x.sum(),
        "tri": lambda: jnp.tri(3, 4) + x.sum(),
        "indices": lambda: jnp.stack(jnp.indices(x.shape)),
        "unravel_index": lambda: jnp.unravel_index(i, (2, 5)),
        "ravel_multi_index": lambda: jnp.ravel_multi_index((i % 2, i % 3), (2, 3), mode="clip"),
        "packbits": lambda: jnp.packbits(m),
        "unpackbits": lambda: jnp.unpackbits(n.reshape(-1).astype(jnp.uint8)),
        "apply_along_axis": lambda: jnp.apply_along_axis(jnp.cumsum, 0, x),
        "block": lambda: jnp.block([[rows, rows], [rows, rows]]),
        "insert": lambda: jnp.insert(flat, 1, 5),
        "delete": lambda: jnp.delete(flat, 0),
        "resize": lambda: jnp.resize(x, (3, 4)),
        "compress": lambda: jnp.compress(jnp.arange(3) != 1, flat, size=2, fill_value=0),
        "segment_sum": lambda: jax.ops.segment_sum(flat, n.reshape(-1).astype(jnp.int32), 5),
        "optimization_barrier": lambda: lax.optimization_barrier((x, y)),
        "checkpoint": lambda: jax.checkpoint(jnp.tanh)(x),
        "custom_jvp": lambda: nn.relu(x) + nn.silu(x),
        "lax.dot precision": lambda: lax.dot(rows, y.reshape(rows.shape).T, precision="highest"),
        "lax.dot preferred": lambda: lax.dot(rows, y.reshape(rows.shape).T, preferred_element_type=jnp.float32),
    }  # fmt: skip


def functions(x, y, n, m):
    """All functions of the survey on these operands, by name, as thunks."""
    table = dict(_methods(x, y, n, m))
    for module, prefix, names, two in (
        (jnp, "jnp", FLOAT_UNARY + ANY_UNARY, False), (jnp, "jnp", BINARY, True), (nn, "nn", NN, False),
        (lax, "lax", LAX_UNARY, False), (lax, "lax", LAX_BINARY, True),
    ):  # fmt: skip
        for name in names:
            if (function := getattr(module, name, None)) is not None:
                if name in ("stack", "hstack", "vstack", "dstack", "column_stack"):
                    table[f"{prefix}.{name}"] = lambda f=function: f([x, y])
                else:
                    table[f"{prefix}.{name}"] = (lambda f=function: f(x, y)) if two else (lambda f=function: f(x))
    for name in SPECIAL:
        if (function := getattr(special, name, None)) is not None:
            table[f"special.{name}"] = _special(name, function, x, y, n)
    return table


def _special(name, function, x, y, n):
    """A function of jax.scipy.special at arguments in its domain."""
    a, b = lambda: jnp.abs(x) + 0.5, lambda: jnp.abs(y) + 0.5
    part = lambda: a() / (a() + b())
    return {
        "zeta": lambda: function(a() + 1, b()),
        "polygamma": lambda: function(n.astype(x.dtype), a()),
        "betainc": lambda: function(a(), b(), part()),
        "bernoulli": lambda: function(5),
        "hyp1f1": lambda: function(a(), b(), x),
        "gammainc": lambda: function(a(), b()),
        "gammaincc": lambda: function(a(), b()),
        "betaln": lambda: function(a(), b()),
        "logit": lambda: function(part()),
        "ndtri": lambda: function(part()),
        "xlogy": lambda: function(x, b()),
        "xlog1py": lambda: function(x, b()),
        "rel_entr": lambda: function(a(), b()),
        "kl_div": lambda: function(a(), b()),
        "erfinv": lambda: function(jnp.tanh(x)),
    }.get(name, lambda: function(x))


def operands(dtype, shape, seed=0):
    """x, y, n, m as NumPy arrays."""
    rng = np.random.default_rng(seed)
    if jnp.issubdtype(dtype, jnp.floating):
        x, y = (rng.standard_normal(shape) * 1.5 for _ in range(2))
    elif dtype == np.bool_:
        x, y = (rng.integers(0, 2, shape) for _ in range(2))
    else:
        low = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -4
        x, y = (rng.integers(low, 6, shape) for _ in range(2))
    n, m = rng.integers(0, 4, shape).astype(np.int32), rng.integers(0, 2, shape).astype(bool)
    return np.asarray(x).astype(dtype), np.asarray(y).astype(dtype), n, m


def cases(dtype, shape):
    """The functions that JAX itself takes for such operands: name -> types of what they give."""
    given = operands(dtype, shape)

    def everything(x, y, n, m):
        results = {}
        for name, function in functions(x, y, n, m).items():
            try:
                results[name] = jax.tree.leaves(function())
            except Exception:  # JAX refuses it for these operands
                continue
        return results

    return {name: outs for name, outs in jax.eval_shape(everything, *given).items() if outs}
