"""What chunks of KDA are to the states they meet: everything but the state, all chunks of all sequences at a time.

With S the state [V, K] at a chunk's start, G_i the decay from there through token i and T the inverse below:
u = U - W S^T, o = (Q S^T + M u) K^-0.5, and the next state is keep * S + u^T N, where W = T (beta exp G k), U = T (beta v),
Q = exp G q, N = exp(G_end - G) k, M = q k exp(G_i - G_j) for j <= i (k3_architecture §2.6).
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3hal.backends.triton.kernels._kda import convolve_rows, log_decay


@triton.jit
def _nearest_tf32(x):
    """fp32 rounded to the 11 bits that a tf32 product takes: left to the hardware, the others are cut off, and each
    state would shrink by 7e-4."""
    bits = x.to(tl.int32, bitcast=True) + 0x1000
    return (bits & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def dot(a, b, NARROW: tl.constexpr, PRECISION: tl.constexpr):
    """A product with fp32 sums, of operands rounded to `NARROW`; in fp32 they are as exact as `PRECISION`."""
    if NARROW == tl.float32 and PRECISION == "tf32":
        return tl.dot(_nearest_tf32(a), _nearest_tf32(b), input_precision=PRECISION)
    else:
        return tl.dot(a.to(NARROW), b.to(NARROW), input_precision=PRECISION)


@triton.jit
def sequence_of(place, starts, count, CHUNK: tl.constexpr):
    """The sequence whose chunks include place `place`: those of sequence n begin at starts[n] // CHUNK + n, which
    leaves room for each of them."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // CHUNK + middle <= place:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _block_sums(g, SIZE: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr):
    """Sums of g over blocks of `SIZE` tokens as [pairs, 2, DIM]."""
    return tl.reshape(tl.sum(tl.reshape(g, [CHUNK // SIZE, SIZE, DIM]), 1), [CHUNK // (2 * SIZE), 2, DIM])


@triton.jit
def _joined(g, from_start, to_end, SIZE: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr):
    """Decays from the start and to the end of blocks of 2 SIZE tokens, from those of blocks of SIZE."""
    sums = _block_sums(g, SIZE, CHUNK, DIM)
    half = tl.arange(0, 2)[None, :, None]
    lower = tl.sum(tl.where(half == 0, sums, 0.0), 1)[:, None, None, :]
    upper = tl.sum(tl.where(half == 1, sums, 0.0), 1)[:, None, None, :]
    half = half[:, :, :, None]
    pairs: tl.constexpr = [CHUNK // (2 * SIZE), 2, SIZE, DIM]
    from_start = tl.reshape(from_start, pairs) + tl.where(half == 1, lower, 0.0)
    to_end = tl.reshape(to_end, pairs) + tl.where(half == 0, upper, 0.0)
    return tl.reshape(from_start, [CHUNK, DIM]), tl.reshape(to_end, [CHUNK, DIM])


@triton.jit
def _in_blocks(q, k, g, BASE: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr):
    """Decays from the start and to the end of blocks of BASE tokens, and the products of q and k with k within them.

    A block's products are taken from its middle, as far as decay goes: for a gate bounded at -10 a token no factor
    leaves fp32's range in 16 tokens. Blocks of one token need no bound.
    """
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    if BASE == 1:
        on_keys = tl.zeros([CHUNK, CHUNK], tl.float32)
        return g, tl.zeros([CHUNK, DIM], tl.float32), on_keys, tl.where(i == j, tl.sum(q * k, 1)[:, None], 0.0)
    else:
        blocks = tl.reshape(g, [CHUNK // BASE, BASE, DIM])
        sums = tl.sum(blocks, 1)[:, None, :]
        from_start = tl.cumsum(blocks, 1)
        to_end = tl.reshape(sums - from_start, [CHUNK, DIM])
        middle = tl.reshape(from_start - 0.5 * sums, [CHUNK, DIM])
        columns = tl.trans(k * tl.exp2(-middle))
        grown = tl.exp2(middle)
        same = i // BASE == j // BASE
        # A row of the result may hang on this one product alone, however small, and is normalised.
        own = tl.where(i == j, tl.sum(q * k, 1)[:, None], 0.0)
        on_keys = tl.where(same & (i > j), dot(k * grown, columns, tl.float32, PRECISION), 0.0)
        q_on_keys = tl.where(same & (i > j), dot(q * grown, columns, tl.float32, PRECISION), own)
        return tl.reshape(from_start, [CHUNK, DIM]), to_end, on_keys, q_on_keys


@triton.jit
def _met(
    q, k, g, BASE: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The decays from a chunk's start through each token and from it to the end, both [C, K] in base 2, and k_i . k_j
    for j < i and q_i . k_j for j <= i times the decay between them, [C, C].

    Blocks double in size: the upper half of a block meets its lower half, and the decay between two tokens splits at
    the boundary into two factors <= 1. Nothing overflows, and no difference of large sums is taken.
    """
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    from_start, to_end, on_keys, q_on_keys = _in_blocks(q, k, g, BASE, CHUNK, DIM, PRECISION)
    levels: tl.constexpr = CHUNK // BASE
    for level in tl.static_range(6):
        size: tl.constexpr = BASE << level
        if (1 << level) < levels:
            late = tl.where(i // size % 2 == 1, tl.exp2(from_start), 0.0)
            columns = tl.trans(tl.where(i // size % 2 == 0, k * tl.exp2(to_end), 0.0))
            near = i // (2 * size) == j // (2 * size)
            on_keys += tl.where(near, dot(k * late, columns, NARROW, PRECISION), 0.0)
            q_on_keys += tl.where(near, dot(q * late, columns, NARROW, PRECISION), 0.0)
            from_start, to_end = _joined(g, from_start, to_end, size, CHUNK, DIM)
    return from_start, to_end, on_keys, q_on_keys


@triton.jit
def _inverse(a, CHUNK: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + a)^-1 of a strictly lower triangle: of blocks of two by those of one, and so on."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    done = tl.where(i == j, 1.0, 0.0) - tl.where((i // 2 == j // 2) & (i > j), a, 0.0)
    for level in tl.static_range(1, 6):
        size: tl.constexpr = 1 << level
        if size < CHUNK:
            below = (i // (2 * size) == j // (2 * size)) & (i // size > j // size)
            right = dot(tl.where(below, a, 0.0), done, NARROW, PRECISION)
            done -= dot(done, right, NARROW, PRECISION)
    return done


@triton.jit
def chunk_products(
    q, k, v, g, beta, taps, rate, dt_bias, conv_state, slots, starts, known,
    w_out, u_out, q_out, n_out, m_out, keep_out,
    q_stride, k_stride, v_stride, g_stride, beta_stride, conv_stride, count, heads, lower_bound,
    FUSED: tl.constexpr, BOUNDED: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr,
    BASE: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of one head. `FUSED` takes qkv in q, raw gates in g and logits in beta."""
    h, place = tl.program_id(0), tl.program_id(1)
    n = sequence_of(place, starts, count, CHUNK)
    start, end, slot = tl.load(starts + n), tl.load(starts + n + 1), tl.load(slots + n).to(tl.int64)
    first = start + (place - start // CHUNK - n) * CHUNK
    if (first < end) & (slot != 0):
        at, rows = tl.arange(0, DIM), (first + tl.arange(0, CHUNK)).to(tl.int64)
        live = rows < end
        mine = rows[:, None] * g_stride + h * DIM + at[None, :]
        strength = tl.load(beta + rows * beta_stride + h, live, 0.0).to(tl.float32)
        if FUSED:
            bias = tl.load(dt_bias + h * DIM + at)[None, :]
            decay = log_decay(tl.load(g + mine, live[:, None], 0.0), bias, tl.load(rate + h), lower_bound, BOUNDED)
            decay = tl.where(live[:, None], decay, 0.0)
            strength = tl.where(live, tl.sigmoid(strength), 0.0)
            history, has, channels = conv_state + slot * conv_stride, tl.load(known + n).to(tl.int32), 3 * heads * DIM
            keys = convolve_rows(
                q, q_stride, history, has, taps, (heads + h) * DIM + at, rows, start, end, channels, WIDTH
            )
            queries = convolve_rows(q, q_stride, history, has, taps, h * DIM + at, rows, start, end, channels, WIDTH)
        else:
            decay = tl.load(g + mine, live[:, None], 0.0)
            own = h * DIM + at[None, :]
            keys = tl.load(k + rows[:, None] * k_stride + own, live[:, None], 0.0).to(tl.float32)
            queries = tl.load(q + rows[:, None] * q_stride + own, live[:, None], 0.0).to(tl.float32)
        decay *= 1.4426950408889634
        keys *= tl.rsqrt(tl.sum(keys * keys, 1) + 1e-6)[:, None]
        queries *= tl.rsqrt(tl.sum(queries * queries, 1) + 1e-6)[:, None]
        from_start, to_end, on_keys, q_on_keys = _met(queries, keys, decay, BASE, CHUNK, DIM, NARROW, PRECISION)
        out = (place.to(tl.int64) * heads + h) * CHUNK
        row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
        tile = out * DIM + row * DIM + at[None, :]
        tl.store(m_out + out * CHUNK + row * CHUNK + column, q_on_keys.to(m_out.dtype.element_ty))
        tl.store(n_out + tile, (keys * tl.exp2(to_end)).to(n_out.dtype.element_ty))
        grown = tl.exp2(from_start)
        tl.store(q_out + tile, (queries * grown).to(q_out.dtype.element_ty))
        tl.store(keep_out + out // CHUNK * DIM + at, tl.exp2(tl.sum(decay, 0)))
        inverse = _inverse(on_keys * strength[:, None], CHUNK, NARROW, PRECISION)
        met = dot(inverse, keys * grown * strength[:, None], NARROW, PRECISION)
        tl.store(w_out + tile, met.to(w_out.dtype.element_ty))
        if FUSED:
            values = convolve_rows(
                q, q_stride, history, has, taps, (2 * heads + h) * DIM + at, rows, start, end, channels, WIDTH
            )
        else:
            values = tl.load(v + rows[:, None] * v_stride + h * DIM + at[None, :], live[:, None], 0.0).to(tl.float32)
        tl.store(u_out + tile, dot(inverse * strength[None, :], values, tl.float32, PRECISION))
