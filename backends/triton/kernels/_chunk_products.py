"""What chunks of KDA are to the states they meet: everything but the state, all chunks of all sequences at a time.

With S the state [V, K] at a chunk's start, G_i the decay from there through token i and T the inverse below:
u = U - W S^T, o = (Q S^T + M u) K^-0.5, and the next state is keep * S + u^T N, where W = T (beta exp G k),
U = T (beta v), Q = exp G q, N = exp(G_end - G) k, M = q k exp(G_i - G_j) for j <= i (k3_architecture §2.6).
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3hal.backends.triton.kernels._kda import convolve_rows, log_decay
from k3hal.backends.triton.kernels.programs import jit_for_any


@triton.jit
def dot(a, b, HOW: tl.constexpr):
    """A product with fp32 sums. `exact`: of fp32 operands. `triple`: of operands that are sums of two in tf32, which
    keep 21 bits. `half`: of operands rounded to half precision, for what is at most about 1. `tf32`: of any size, to 11
    bits. `split`: of any size, each operand as the sum of two in bfloat16, which keeps 16 bits."""
    if HOW == "exact":
        return tl.dot(a, b, input_precision="ieee")
    elif HOW == "triple":
        return tl.dot(a, b, input_precision="tf32x3")
    elif HOW == "tf32":
        return tl.dot(_nearest(a), _nearest(b), input_precision="tf32")
    elif HOW == "half":
        return tl.dot(a.to(tl.float16), b.to(tl.float16))
    else:
        high, low = split(a)
        b_high, b_low = split(b)
        return tl.dot(high, b_high, tl.dot(high, b_low, tl.dot(low, b_high)))


@triton.jit
def _nearest(x):
    """Ready for a product in tf32, of which the hardware cuts off what it has no room for."""
    return (x.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)


@triton.jit
def split(x):
    """fp32 as the sum of two in bfloat16."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def store_operand(out, size, at, x, HOW: tl.constexpr):
    """Store an operand in the type of `out`; where it is split, what rounding leaves lies `size` further on."""
    high = x.to(out.dtype.element_ty)
    tl.store(out + at, high)
    if HOW == "split":
        tl.store(out + size + at, (x - high.to(tl.float32)).to(out.dtype.element_ty))


@triton.jit
def dot_stored(stored, size, at, b, FLIPPED: tl.constexpr, HOW: tl.constexpr):
    """A product with a stored operand [at], or with its transpose; it goes from memory to the multiplier as it is.
    `rounded` has it in bfloat16 alone."""
    high = tl.load(stored + at)
    high = tl.trans(high) if FLIPPED else high
    if HOW == "exact":
        return tl.dot(high, b, input_precision="ieee")
    elif HOW == "triple":
        return tl.dot(high, b, input_precision="tf32x3")
    else:
        b_high, b_low = split(b)
        rest = tl.dot(high, b_low)
        if HOW == "split":
            low = tl.load(stored + size + at)
            rest = tl.dot(tl.trans(low) if FLIPPED else low, b_high, rest)
        return tl.dot(high, b_high, rest)


@triton.jit
def sequence_of(place, starts, count, CHUNK):
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
def _sums(from_start, SIZE: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr):
    """Sums over whole blocks of SIZE tokens, [blocks, DIM]: their last decay from the start, which is the least."""
    return tl.min(tl.reshape(from_start, [CHUNK // SIZE, SIZE, DIM]), 1)


@triton.jit
def _half_sums(from_start, HALF: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr):
    """For each block of 2 SIZE tokens the sum over its half `HALF`, at the tokens of the other half; else 0."""
    sums = tl.reshape(_sums(from_start, SIZE, CHUNK, DIM), [CHUNK // (2 * SIZE), 2, DIM])
    half = tl.arange(0, 2)[None, :, None]
    one = tl.sum(tl.where(half == HALF, sums, 0.0), 1)[:, None, None, :]
    other = tl.where(half[:, :, :, None] == HALF, 0.0, one)
    return tl.reshape(tl.broadcast_to(other, [CHUNK // (2 * SIZE), 2, SIZE, DIM]), [CHUNK, DIM])


@triton.jit
def _to_end(from_start, SIZE: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr):
    """Decays after each token to the end of its block, as differences: for gates of limited strength."""
    blocks = tl.reshape(from_start, [CHUNK // SIZE, SIZE, DIM])
    return tl.reshape(_sums(from_start, SIZE, CHUNK, DIM)[:, None, :] - blocks, [CHUNK, DIM])


@triton.jit
def _decay_in_blocks(g, BASE: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr):
    """Decays from the start of blocks of BASE tokens."""
    if BASE == 1:
        return g
    else:
        return tl.reshape(tl.cumsum(tl.reshape(g, [CHUNK // BASE, BASE, DIM]), 1), [CHUNK, DIM])


@triton.jit
def _in_blocks(q, k, from_start, BASE: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr):
    """The products of q and k with the k before them within blocks of BASE tokens.

    A block's products are taken from its middle, as far as decay goes: for a gate bounded at -10 a token no factor
    leaves fp32's range in 16 tokens. Blocks of one token need no bound.
    """
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    if BASE == 1:
        zero = tl.zeros([CHUNK, CHUNK], tl.float32)
        return zero, zero
    else:
        blocks = tl.reshape(from_start, [CHUNK // BASE, BASE, DIM])
        middle = tl.reshape(blocks - 0.5 * tl.min(blocks, 1)[:, None, :], [CHUNK, DIM])
        columns = tl.trans(k * tl.exp2(-middle))
        grown = tl.exp2(middle)
        before = (i // BASE == j // BASE) & (i > j)
        on_keys = tl.where(before, dot(k * grown, columns, WIDE), 0.0)
        return on_keys, tl.where(before, dot(q * grown, columns, WIDE), 0.0)


@triton.jit
def _meet(
    q, k, from_start, to_end, on_keys, q_on_keys, SIZE: tl.constexpr, CHUNK: tl.constexpr, NARROW: tl.constexpr
):  # fmt: skip
    """The upper halves of blocks of 2 SIZE tokens meet the lower ones."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    columns = tl.trans(tl.where(i // SIZE % 2 == 0, k * tl.exp2(to_end), 0.0))
    late = tl.where(i // SIZE % 2 == 1, tl.exp2(from_start), 0.0)
    near = i // (2 * SIZE) == j // (2 * SIZE)
    on_keys += tl.where(near, dot(k * late, columns, NARROW), 0.0)
    q_on_keys += tl.where(near, dot(q * late, columns, NARROW), 0.0)
    return on_keys, q_on_keys


@triton.jit
def _met(
    q, k, g, BASE: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr, NARROW: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """The decays from a chunk's start through each token and from it to the end, both [C, DIM] in base 2, and
    k_i . k_j and q_i . k_j for j < i times the decay between them, [C, C].

    Blocks double in size: the upper half of a block meets its lower half, and the decay between two tokens splits at
    the boundary into two factors <= 1. Nothing overflows, and from blocks of one on no difference of sums is taken.
    """
    from_start = _decay_in_blocks(g, BASE, CHUNK, DIM)
    on_keys, q_on_keys = _in_blocks(q, k, from_start, BASE, CHUNK, DIM, WIDE)
    to_end = tl.zeros([CHUNK, DIM], tl.float32)
    for level in tl.static_range(6):
        if (BASE << level) < CHUNK:
            if BASE > 1:
                to_end = _to_end(from_start, BASE << level, CHUNK, DIM)
            on_keys, q_on_keys = _meet(
                q, k, from_start, to_end, on_keys, q_on_keys, BASE << level, CHUNK, NARROW
            )  # fmt: skip
            if BASE == 1:
                to_end += _half_sums(from_start, 1, BASE << level, CHUNK, DIM)
            from_start += _half_sums(from_start, 0, BASE << level, CHUNK, DIM)
    if BASE > 1:
        to_end = _to_end(from_start, CHUNK, CHUNK, DIM)
    return from_start, to_end, on_keys, q_on_keys


@triton.jit
def _decay_from_start(g, BASE: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr):
    """The first result of `_met`, to the bit."""
    from_start = _decay_in_blocks(g, BASE, CHUNK, DIM)
    for level in tl.static_range(6):
        if (BASE << level) < CHUNK:
            from_start += _half_sums(from_start, 0, BASE << level, CHUNK, DIM)
    return from_start


@triton.jit
def _joinedunit_inverse(a, done, SIZE: tl.constexpr, CHUNK: tl.constexpr, HOW: tl.constexpr):
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    below = (i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE > j // SIZE)
    return done - dot(done, dot(tl.where(below, a, 0.0), done, HOW), HOW)


@triton.jit
def unit_inverse(a, CHUNK: tl.constexpr, NARROW: tl.constexpr, WIDE: tl.constexpr):
    """(1 + a)^-1 of a strictly lower triangle: of blocks of two by those of one, and so on."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    done = tl.where(i == j, 1.0, 0.0) - tl.where((i // 2 == j // 2) & (i > j), a, 0.0)
    for level in tl.static_range(1, 6):
        if (1 << level) < CHUNK:
            done = _joinedunit_inverse(a, done, 1 << level, CHUNK, NARROW if level < 4 else WIDE)
    return done


@triton.jit
def _rows(
    x, x_stride, history, has, taps, at, rows, start, end, channels,
    FUSED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    if FUSED:
        return convolve_rows(x, x_stride, history, has, taps, at, rows, start, end, channels, WIDTH)
    else:
        return tl.load(x + rows[:, None] * x_stride + at[None, :], (rows < end)[:, None], 0.0).to(tl.float32)


@triton.jit
def _decays(
    g, g_stride, rate, dt_bias, at, h, rows, end, lower_bound,
    FUSED: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """In base 2; zero from `end` on."""
    live = (rows < end)[:, None]
    g = tl.load(g + rows[:, None] * g_stride + at[None, :], live, 0.0)
    if FUSED:
        g = log_decay(g, tl.load(dt_bias + at)[None, :], tl.load(rate + h), lower_bound, BOUNDED)
        g = tl.where(live, g, 0.0)
    return g * 1.4426950408889634


@jit_for_any("count")
def chunk_products(
    q, k, v, g, beta, taps, rate, dt_bias, conv_state, slots, starts, known,
    w_out, u_out, q_out, n_out, m_out, keep_out,
    q_stride, k_stride, v_stride, g_stride, beta_stride, conv_stride, count, heads, lower_bound,
    FUSED: tl.constexpr, BOUNDED: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr,
    CHUNK: tl.constexpr, BASE: tl.constexpr, NARROW: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One chunk of one head, PART of its channels at a time. `FUSED` takes qkv in q, raw gates in g, logits in beta."""
    h, place = tl.program_id(0), tl.program_id(1)
    n = sequence_of(place, starts, count, CHUNK)
    start, end, slot = tl.load(starts + n), tl.load(starts + n + 1), tl.load(slots + n).to(tl.int64)
    first = start + (place - start // CHUNK - n) * CHUNK
    if (first < end) & (slot != 0):
        rows = (first + tl.arange(0, CHUNK)).to(tl.int64)
        strength = tl.load(beta + rows * beta_stride + h, rows < end, 0.0).to(tl.float32)
        history, has, channels = conv_state, 0, 0
        k_first, v_first = h * DIM, h * DIM
        if FUSED:
            strength = tl.where(rows < end, tl.sigmoid(strength), 0.0)
            history, has, channels = conv_state + slot * conv_stride, tl.load(known + n).to(tl.int32), 3 * heads * DIM
            k_first, v_first = (heads + h) * DIM, (2 * heads + h) * DIM
        q_squares, k_squares, own = (
            tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
        )  # fmt: skip
        for part in range(0, DIM, PART):
            at = part + tl.arange(0, PART)
            keys = _rows(
                k, k_stride, history, has, taps, k_first + at, rows, start, end, channels, FUSED, WIDTH
            )  # fmt: skip
            asks = _rows(
                q, q_stride, history, has, taps, h * DIM + at, rows, start, end, channels, FUSED, WIDTH
            )  # fmt: skip
            q_squares += tl.sum(asks * asks, 1)
            k_squares += tl.sum(keys * keys, 1)
            own += tl.sum(asks * keys, 1)
        k_scale, q_scale = tl.rsqrt(k_squares + 1e-6), tl.rsqrt(q_squares + 1e-6)
        row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
        out = (place.to(tl.int64) * heads + h) * CHUNK
        size = tl.num_programs(1).to(tl.int64) * heads * CHUNK
        on_keys = tl.zeros([CHUNK, CHUNK], tl.float32)
        # A row of the result may hang on its own product alone, however small, and is normalised: it is exact.
        q_on_keys = tl.where(row == column, (own * k_scale * q_scale)[:, None], 0.0)
        for part in range(0, DIM, PART):
            at = part + tl.arange(0, PART)
            tile = out * DIM + row * DIM + at[None, :]
            keys = k_scale[:, None] * _rows(
                k, k_stride, history, has, taps, k_first + at, rows, start, end, channels, FUSED, WIDTH
            )  # fmt: skip
            asks = q_scale[:, None] * _rows(
                q, q_stride, history, has, taps, h * DIM + at, rows, start, end, channels, FUSED, WIDTH
            )  # fmt: skip
            decay = _decays(g, g_stride, rate, dt_bias, h * DIM + at, h, rows, end, lower_bound, FUSED, BOUNDED)
            from_start, to_end, more, q_more = _met(asks, keys, decay, BASE, CHUNK, PART, NARROW, WIDE)
            on_keys += more
            q_on_keys += q_more
            store_operand(n_out, size * DIM, tile, keys * tl.exp2(to_end), WIDE)
            store_operand(q_out, size * DIM, tile, asks * tl.exp2(from_start), "rounded")
            tl.store(keep_out + out // CHUNK * DIM + at, tl.exp2(tl.min(from_start, 0)))
        store_operand(m_out, size * CHUNK, out * CHUNK + row * CHUNK + column, q_on_keys, "rounded")
        inverse = unit_inverse(on_keys * strength[:, None], CHUNK, NARROW, WIDE) * strength[None, :]
        for part in range(0, DIM, PART):
            at = part + tl.arange(0, PART)
            tile = out * DIM + row * DIM + at[None, :]
            keys = k_scale[:, None] * _rows(
                k, k_stride, history, has, taps, k_first + at, rows, start, end, channels, FUSED, WIDTH
            )  # fmt: skip
            decay = _decays(g, g_stride, rate, dt_bias, h * DIM + at, h, rows, end, lower_bound, FUSED, BOUNDED)
            grown = tl.exp2(_decay_from_start(decay, BASE, CHUNK, PART))
            store_operand(w_out, size * DIM, tile, dot(inverse, keys * grown, NARROW), WIDE)
            values = _rows(
                v, v_stride, history, has, taps, v_first + at, rows, start, end, channels, FUSED, WIDTH
            )  # fmt: skip
            tl.store(u_out + tile, dot(inverse, values, WIDE))
