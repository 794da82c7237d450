"""What chunks of KDA are to the states they meet, in half precision: the convolution, the gate and all products.

For bfloat16 and a gate bounded at -10 a token or nearer. The terms are those of `_chunk_products`; each chunk's U is
stored over a power of two near its largest value, Q and M times `READ_SCALE`, so that none leaves half precision's
range. What is rounded is at most about 1 and keeps 11 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3hal.backends.triton.kernels._chunk_products import dot, sequence_of, split, unit_inverse
from k3hal.backends.triton.kernels._kda import convolve_chunk, sigmoid
from k3hal.backends.triton.kernels.programs import jit_for_any

READ_SCALE: tl.constexpr = tl.constexpr(256.0)


@triton.jit
def binade(x):
    """The power of two at or below x > 0, as exponent bits; of what is next to zero 2^-100."""
    bits = tl.maximum(x, 7.888609052210118e-31).to(tl.int32, bitcast=True) & 0x7F800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _per_block(x, SIZE: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr):
    """[blocks, DIM] at each of a block's SIZE tokens."""
    wide = tl.broadcast_to(x[:, None, :], [CHUNK // SIZE, SIZE, DIM])
    return tl.reshape(wide, [CHUNK, DIM])


@triton.jit
def _of_half(x, half, HALF: tl.constexpr):
    return tl.sum(tl.where(half == HALF, x, 0.0), 1)


@triton.jit
def _beside(x, half, HALF: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr):
    """[pairs, DIM] at the tokens of the half `HALF` of each pair of blocks, one elsewhere."""
    both = tl.where(half[:, :, :, None] == HALF, x[:, None, None, :], 1.0)
    return tl.reshape(tl.broadcast_to(both, [CHUNK // (2 * SIZE), 2, SIZE, DIM]), [CHUNK, DIM])


@triton.jit
def _met(q, k, g, BASE: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr):
    """The decays from a chunk's start through each token and from it to the end, [C, DIM], that over the chunk,
    [1, DIM], and k_i . k_j and q_i . k_j for j < i times the decay between them, [C, C]. `g` is in base 2.

    Within blocks of BASE tokens products are taken from the middle of the decay: no factor leaves fp32's range. Then
    the later half of each pair of blocks meets the earlier one at their boundary, with factors of at most one.
    """
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    blocks = tl.cumsum(tl.reshape(g, [CHUNK // BASE, BASE, DIM]), 1)
    half_sum = 0.5 * tl.min(blocks, 1)
    middle = tl.reshape(blocks - half_sum[:, None, :], [CHUNK, DIM])
    grown, shrunk = tl.exp2(middle), tl.exp2(-middle)
    before = (i // BASE == j // BASE) & (i > j)
    columns = tl.trans(k * shrunk)
    on_keys = tl.where(before, dot(k * grown, columns, WIDE), 0.0)
    q_on_keys = tl.where(before, dot(q * grown, columns, WIDE), 0.0)
    root = tl.exp2(half_sum)
    from_middle = _per_block(root, BASE, CHUNK, DIM)
    late, early = grown * from_middle, shrunk * from_middle
    decay = root * root
    for level in tl.static_range(3):
        if (BASE << level) < CHUNK:
            SIZE: tl.constexpr = BASE << level
            meets = (i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE > j // SIZE)
            columns = tl.trans((k * early).to(tl.float16))
            on_keys += tl.where(meets, tl.dot((k * late).to(tl.float16), columns), 0.0)
            q_on_keys += tl.where(meets, tl.dot((q * late).to(tl.float16), columns), 0.0)
            half = tl.arange(0, 2)[None, :, None]
            pairs = tl.reshape(decay, [CHUNK // (2 * SIZE), 2, DIM])
            first, second = _of_half(pairs, half, 0), _of_half(pairs, half, 1)
            late *= _beside(first, half, 1, SIZE, CHUNK, DIM)
            early *= _beside(second, half, 0, SIZE, CHUNK, DIM)
            decay = first * second
    return late, early, decay, on_keys, q_on_keys


@jit_for_any("count")
def chunk_operands(
    qkv, raw_gate, beta_logits, taps, rate, dt_bias, conv_state, slots, starts, known,
    w_out, u_out, q_out, n_out, m_out, keep_out, size_out,
    qkv_stride, gate_stride, beta_stride, conv_stride, count, heads, lower_bound,
    WIDTH: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr, BASE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One chunk of one head. U is stored as [V, C], its binade in `size_out` [H, places]."""
    h, place = tl.program_id(0), tl.program_id(1)
    n = sequence_of(place, starts, count, CHUNK)
    start, end, slot = tl.load(starts + n), tl.load(starts + n + 1), tl.load(slots + n).to(tl.int64)
    first = start + (place - start // CHUNK - n) * CHUNK
    if (first < end) & (slot != 0):
        at, row, column = tl.arange(0, DIM), tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
        rows = (first + tl.arange(0, CHUNK)).to(tl.int64)
        live, channels = rows < end, 3 * heads * DIM
        history, has = conv_state + slot * conv_stride, tl.load(known + n).to(tl.int32)
        raw = tl.load(raw_gate + rows[:, None] * gate_stride + (h * DIM + at)[None, :], live[:, None], 0.0)
        strength = tl.load(beta_logits + rows * beta_stride + h, live, 0.0).to(tl.float32)
        strength = tl.where(live, sigmoid(strength), 0.0)
        keys = convolve_chunk(
            qkv, qkv_stride, history, has, taps, (heads + h) * DIM + at, first, rows, start, end, channels, WIDTH
        ).to(tl.float32)  # fmt: skip
        asks = convolve_chunk(
            qkv, qkv_stride, history, has, taps, h * DIM + at, first, rows, start, end, channels, WIDTH
        ).to(tl.float32)  # fmt: skip
        k_scale = tl.rsqrt(tl.sum(keys * keys, 1) + 1e-6)
        q_scale = tl.rsqrt(tl.sum(asks * asks, 1) + 1e-6)
        own = tl.sum(asks * keys, 1) * k_scale * q_scale
        keys *= k_scale[:, None]
        asks *= q_scale[:, None]
        raw = raw.to(tl.float32) + tl.load(dt_bias + h * DIM + at)[None, :]
        g = tl.where(live[:, None], (lower_bound * 1.4426950408889634) * sigmoid(tl.load(rate + h) * raw), 0.0)
        late, early, decay, on_keys, q_on_keys = _met(asks, keys, g, BASE, CHUNK, DIM, WIDE)
        out = place.to(tl.int64) * heads + h
        tile = out * CHUNK * DIM + row * DIM + at[None, :]
        tl.store(n_out + tile, (keys * early).to(tl.float16))
        tl.store(q_out + tile, (asks * late * READ_SCALE).to(tl.float16))
        tl.store(keep_out + out * DIM + tl.arange(0, 1)[:, None] * DIM + at[None, :], decay)
        # A row of the result may hang on its own product alone, however small, and is normalised: it is exact.
        q_on_keys += tl.where(row == column, own[:, None], 0.0)
        tl.store(m_out + out * CHUNK * CHUNK + row * CHUNK + column, (q_on_keys * READ_SCALE).to(tl.float16))
        inverse = unit_inverse(on_keys * strength[:, None], CHUNK, "half", "split") * strength[None, :]
        tl.store(w_out + tile, tl.dot(inverse.to(tl.float16), (keys * late).to(tl.float16)).to(tl.float16))
        values = convolve_chunk(
            qkv, qkv_stride, history, has, taps, (2 * heads + h) * DIM + at, first, rows, start, end, channels, WIDTH
        )  # fmt: skip
        high, low = split(inverse)
        # The convolution's result is rounded to bfloat16, so that this product loses nothing of it.
        u = tl.dot(high, values, tl.dot(low, values))
        size = binade(tl.max(tl.max(tl.abs(u), 1), 0))
        tl.store(size_out + h * tl.num_programs(1) + place, size)
        turned = out * CHUNK * DIM + at[:, None] * CHUNK + column
        tl.store(u_out + turned, tl.trans(u * (READ_SCALE / size)).to(tl.float16))
