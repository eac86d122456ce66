"""MetaLA's operator as one chunkwise Triton kernel file, forward and backward.

    S_t = diag(α_t) S_{t-1} + k_tᵀ v_t        o_t = s · q_t S_t        α = σ(a)^(1/τ),  k = 1 − α,  s = Dk^-½

`metala.chunkwise` computes the same in PyTorch, with the same steps. Here everything that can be formed from
the logits a is formed in registers: neither α nor log α nor k ever reaches memory.

The derivation. Write g = log α, and inside a chunk of C steps b_i = g_1 + … + g_i, with the total b_C. All
products of decays inside a chunk split at one reference r (Dk numbers a chunk) into two factors:

    q̃_i = s q_i ⊙ e^{b_i − r}      k̃_j = k_j ⊙ e^{(b_C − r) − b_j}      Ŝ = e^r ⊙ S      (rows of S are scaled)

With r = b_C / 2 both exponents stay within ± |b_C| / 2, and every formula becomes a product of matrices:

    1 map      A = tril(q̃ k̃ᵀ)
    2 update   S' = e^{b_C} ⊙ S + e^r ⊙ (k̃ᵀ v)                    S before the chunk, S' after it
    3 output   o = A v + q̃ Ŝ
    4 grads    P = tril(do vᵀ),  dŜ' = e^r ⊙ dS'                   dS' = ∂/∂S', from the chunks after
               dq = s e^{b − r} ⊙ (P k̃ + do Ŝᵀ)          dk = e^{(b_C − r) − b} ⊙ (Pᵀ q̃ + v dŜ'ᵀ)
               dv = Aᵀ do + k̃ dŜ'                        dS = e^r ⊙ Z,  Z = e^{b_C − r} ⊙ dS' + q̃ᵀ do
    5 decays   dg_t = e − Σ_{i<t} (q_i ⊙ dq_i − k_i ⊙ dk_i),  e = rowsum(Ŝ ⊙ Z) = rowsum(S ⊙ dS)
               da = (dg − dk ⊙ α) σ(−a) / τ                        through k = 1 − α and the logit

Step 5 in words: dg_t collects every (read i ≥ t, write j < t) pair, which all pass through step t. e counts
those that pass the chunk's start; walking on, a read leaves the sum and a write enters it. The terms cancel
almost entirely when gates close, so they are summed from the same rounded factors q̃, k̃, P that made dq and dk.

No input can overflow. A chunk that forgets more than e^-100 in some channel takes r = 0, whose exponents are
all ≤ 0, and finds A, P k̃ and Pᵀ q̃ column by column, from W_i = α_{j+1} ⋯ α_i, a product of numbers ≤ 1. Gates
are clamped at log α ≥ −40, far below what float32 can tell from 0.

Parallel over time as well as over heads: a sequence is cut into a few segments of whole chunks.

    states    every segment but the last: what it alone writes, U, and its decay        (parallel)
    scan      the state after each segment, from the Us                                 (short, sequential)
    output    every segment: from its first state, chunk by chunk, steps 1-3             (parallel)

Backward runs the same states and scan over (q, do) from the end, then steps 4-5 chunk by chunk. In memory:
q, a, v, o and their gradients once each, one Dk × Dv state a segment, and, for training, Ŝ at each chunk's
start in 16 bits: 1 / (C / Dk) of the size of v. A sequence short enough has one segment and one launch.

    python kernel.py        checks the kernel and prints a benchmark (needs a CUDA GPU)
"""
import contextlib
import math
import os

import torch
import triton
import triton.language as tl

LOG_ALPHA_MIN = tl.constexpr(-40.0)
FAST_LIMIT = tl.constexpr(-100.0)       # log decay of a chunk down to which one reference serves


# ── Parts ────────────────────────────────────────────────────────────────────────────────────────────────────
#
# Memory of q, a, k, g: (B, T, H, Dk), of v, o: (B, T, H, Dv), contiguous. A pointer is moved to its (b, h) once,
# in 64 bits; from there one time step is H·D elements further on.

@triton.jit
def at_head(ptr, i_b, i_h, T, H, D):
    return ptr + (i_b * T * H + i_h) * D


@triton.jit
def load(ptr, t0, T, row, c0, D, C: tl.constexpr, BD: tl.constexpr):
    """Steps t0 … t0 + C − 1, columns c0 … c0 + BD − 1, zero outside (T, D). → (C, BD)"""
    t, c = tl.arange(0, C), c0 + tl.arange(0, BD)
    ptr += t0.to(tl.int64) * row
    return tl.load(ptr + t[:, None] * row + c[None, :], mask=(t0 + t < T)[:, None] & (c < D)[None, :], other=0.0)


@triton.jit
def store(ptr, x, t0, T, row, c0, D, C: tl.constexpr, BD: tl.constexpr):
    t, c = tl.arange(0, C), c0 + tl.arange(0, BD)
    ptr += t0.to(tl.int64) * row
    tl.store(ptr + t[:, None] * row + c[None, :], x, mask=(t0 + t < T)[:, None] & (c < D)[None, :])


@triton.jit
def state_tile(Dk, Dv, c0, BK: tl.constexpr, BV: tl.constexpr):
    """Offsets and mask of columns c0 … c0 + BV − 1 of a state (Dk, Dv)."""
    r, c = tl.arange(0, BK), c0 + tl.arange(0, BV)
    return r[:, None] * Dv + c[None, :], (r < Dk)[:, None] & (c < Dv)[None, :]


@triton.jit
def log_alpha(x, inv_tau, LOGITS: tl.constexpr):
    """g = log σ(x) / τ from logits, or x itself. log(1 + e) = 2 artanh(e / (2 + e)) as a series: 2e-7 relative
    even where 1 + e rounds to 1."""
    x = x.to(tl.float32)
    if LOGITS:
        e = tl.exp(-tl.abs(x))
        z = e / (2.0 + e)                                                      # ≤ 1/3
        y = z * z
        series = 1 + y * (1 / 3 + y * (1 / 5 + y * (1 / 7 + y * (1 / 9 + y * (1 / 11 + y * (1 / 13))))))
        x = (tl.minimum(x, 0.0) - 2.0 * z * series) * inv_tau
    return tl.maximum(x, LOG_ALPHA_MIN)


@triton.jit
def one_minus_exp(g):
    """k = 1 − e^g = −expm1(g), to 2e-7 relative near 0 too."""
    near = -g * (1 + g * (1 / 2 + g * (1 / 6 + g * (1 / 24 + g * (1 / 120)))))
    return tl.where(g > -0.25, near, 1.0 - tl.exp(g))


@triton.jit
def decays_and_keys(g_ptr, k_ptr, t0, T, H, Dk, inv_tau, LOGITS: tl.constexpr, KEY: tl.constexpr,
                    C: tl.constexpr, BK: tl.constexpr):
    """g and k (C, BK) in float32; beyond the sequence g = 0 and k = 0, so the state stays as it is."""
    t, c = t0 + tl.arange(0, C), tl.arange(0, BK)
    g = log_alpha(load(g_ptr, t0, T, H * Dk, 0, Dk, C, BK), inv_tau, LOGITS)
    g = tl.where((t < T)[:, None] & (c < Dk)[None, :], g, 0.0)
    if KEY:
        k = load(k_ptr, t0, T, H * Dk, 0, Dk, C, BK).to(tl.float32)
    else:
        k = one_minus_exp(g)
    return g, k


@triton.jit
def row_of(ptr, t, T, row, D, BD: tl.constexpr):
    """One step's row (BD,) in float32, zeros beyond the sequence."""
    c = tl.arange(0, BD)
    return tl.load(ptr + t.to(tl.int64) * row + c, mask=c < tl.where(t < T, D, 0), other=0.0).to(tl.float32)


@triton.jit
def exact_map(q, g_ptr, k_ptr, t0, T, H, Dk, inv_tau, LOGITS: tl.constexpr, KEY: tl.constexpr,
              C: tl.constexpr, BK: tl.constexpr):
    """Step 1 for chunks that forget too much for one reference: column j of A is Σ_c q_c k_jc W_c.

    From the last column to the first, W_i = α_{j+1} ⋯ α_i for i > j, 1 for i = j, 0 before.
    """
    i = tl.arange(0, C)
    A = tl.zeros([C, C], tl.float32)
    W = tl.zeros([C, BK], tl.float32)
    alpha = tl.zeros([BK], tl.float32)
    for n in range(C):
        j = C - 1 - n
        W = tl.where((i == j)[:, None], 1.0, W * alpha[None, :])
        g_j = log_alpha(row_of(g_ptr, t0 + j, T, H * Dk, Dk, BK), inv_tau, LOGITS)
        k_j = row_of(k_ptr, t0 + j, T, H * Dk, Dk, BK) if KEY else one_minus_exp(g_j)
        A += tl.where((i == j)[None, :], tl.sum(q * W * k_j[None, :], 1)[:, None], 0.0)
        alpha = tl.exp(g_j)
    return A


@triton.jit
def exact_grads(q, P, g_ptr, k_ptr, t0, T, H, Dk, inv_tau, LOGITS: tl.constexpr, KEY: tl.constexpr,
                C: tl.constexpr, BK: tl.constexpr):
    """Step 4 for the same chunks: Aᵀ, and what dq and dk get from inside the chunk."""
    i = tl.arange(0, C)
    At = tl.zeros([C, C], tl.float32)
    dq = tl.zeros([C, BK], tl.float32)
    dk = tl.zeros([C, BK], tl.float32)
    W = tl.zeros([C, BK], tl.float32)
    alpha = tl.zeros([BK], tl.float32)
    for n in range(C):
        j = C - 1 - n
        W = tl.where((i == j)[:, None], 1.0, W * alpha[None, :])
        g_j = log_alpha(row_of(g_ptr, t0 + j, T, H * Dk, Dk, BK), inv_tau, LOGITS)
        k_j = row_of(k_ptr, t0 + j, T, H * Dk, Dk, BK) if KEY else one_minus_exp(g_j)
        P_j = tl.sum(tl.where((i == j)[None, :], P, 0.0), 1)                   # (C,), column j
        At += tl.where((i == j)[:, None], tl.sum(q * W * k_j[None, :], 1)[None, :], 0.0)
        dq += P_j[:, None] * k_j[None, :] * W
        dk += tl.where((i == j)[:, None], tl.sum(P_j[:, None] * q * W, 0)[None, :], 0.0)
        alpha = tl.exp(g_j)
    return At, dq, dk


# ── Kernels ──────────────────────────────────────────────────────────────────────────────────────────────────

@triton.jit
def states_kernel(x_ptr, y_ptr, g_ptr, U_ptr, D_ptr, T, H, Dk, Dv, n_seg, per_seg, inv_tau, scale,
                  FORWARD: tl.constexpr, LOGITS: tl.constexpr, KEY: tl.constexpr, OP: tl.constexpr,
                  PRECISION: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """What one segment alone adds to the state after it, or to the state's gradient before it.

        forward    U = Σ_j (k_j ⊙ e^{g_{j+1} + … + g_end})ᵀ v_j       x = k, y = v, from the last step to the first
        backward   U = Σ_i (s q_i ⊙ e^{g_1 + … + g_i})ᵀ do_i          x = q, y = do, from the first to the last

    and the segment's whole decay D. One program: one segment of one head, BV columns.
    """
    n_v = tl.cdiv(Dv, BV)
    i_v, rest = tl.program_id(0) % n_v, (tl.program_id(0) // n_v).to(tl.int64)
    i_m, i_bh = rest % (n_seg - 1), rest // (n_seg - 1)
    i_b, i_h = i_bh // H, i_bh % H
    x_ptr, g_ptr = at_head(x_ptr, i_b, i_h, T, H, Dk), at_head(g_ptr, i_b, i_h, T, H, Dk)
    y_ptr = at_head(y_ptr, i_b, i_h, T, H, Dv)
    first = (i_m if FORWARD else i_m + 1) * per_seg
    count = tl.minimum(per_seg, tl.cdiv(T, C) - first)

    U = tl.zeros([BK, BV], tl.float32)
    passed = tl.zeros([BK], tl.float32)                 # log decay between this chunk and the segment's end or start
    for n in range(count):
        t0 = (first + (count - 1 - n if FORWARD else n)) * C
        g, x = decays_and_keys(g_ptr, x_ptr, t0, T, H, Dk, inv_tau, LOGITS, KEY or not FORWARD, C, BK)
        if FORWARD:
            x = x * tl.exp(tl.cumsum(g, 0, reverse=True) - g + passed[None, :])
        else:
            x = x * scale * tl.exp(tl.cumsum(g, 0) + passed[None, :])
        y = load(y_ptr, t0, T, H * Dv, i_v * BV, Dv, C, BV).to(OP)
        U = tl.dot(tl.trans(x.to(OP)), y, U, input_precision=PRECISION)
        passed += tl.sum(g, 0)

    tile, mask = state_tile(Dk, Dv, i_v * BV, BK, BV)
    slot = i_bh * (n_seg - 1) + i_m
    tl.store(U_ptr + slot * Dk * Dv + tile, U, mask=mask)
    c = tl.arange(0, BK)
    tl.store(D_ptr + slot * Dk + c, passed, mask=c < Dk)


@triton.jit
def scan_kernel(U_ptr, D_ptr, init_ptr, Dk, Dv, n, FORWARD: tl.constexpr, INIT: tl.constexpr,
                ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """U_i ← e^{D_i} ⊙ U_{i-1} + U_i in place over n segments (from the last to the first when backward), U_{-1}
    being init or zero. One program: BLOCK elements of one head's state, ROWS segments at a time."""
    n_block = tl.cdiv(Dk * Dv, BLOCK)
    i_bh = (tl.program_id(0) // n_block).to(tl.int64)
    e = (tl.program_id(0) % n_block) * BLOCK + tl.arange(0, BLOCK)
    S = tl.zeros([BLOCK], tl.float32)
    if INIT:
        S = tl.load(init_ptr + i_bh * Dk * Dv + e, mask=e < Dk * Dv, other=0.0)
    i = tl.arange(0, ROWS)
    for i0 in range(0, n, ROWS):
        slot = i_bh * n + (i0 + i if FORWARD else n - 1 - i0 - i)
        mask = (i0 + i < n)[:, None] & (e < Dk * Dv)[None, :]
        U = tl.load(U_ptr + slot[:, None] * Dk * Dv + e[None, :], mask=mask, other=0.0)        # (ROWS, BLOCK)
        D = tl.exp(tl.load(D_ptr + slot[:, None] * Dk + (e // Dv)[None, :], mask=mask, other=0.0))
        D, U = tl.associative_scan((D, U), 0, then)
        U += D * S[None, :]
        tl.store(U_ptr + slot[:, None] * Dk * Dv + e[None, :], U, mask=mask)
        S = tl.sum(tl.where((i == ROWS - 1)[:, None], U, 0.0), 0)


@triton.jit
def then(D1, U1, D2, U2):
    """Decay and update of one segment, then of the next: S → D2 (D1 S + U1) + U2."""
    return D1 * D2, U1 * D2 + U2


@triton.jit
def output_kernel(q_ptr, k_ptr, v_ptr, g_ptr, init_ptr, seg_ptr, o_ptr, final_ptr, save_ptr,
                  T, H, Dk, Dv, n_seg, per_seg, inv_tau, scale,
                  INIT: tl.constexpr, SAVE: tl.constexpr, LOGITS: tl.constexpr, KEY: tl.constexpr, OP: tl.constexpr,
                  PRECISION: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Steps 1-3. Reads q, k or nothing, v, g or a, the state before the segment; writes o, the final state, and Ŝ
    of each chunk when SAVE. One program: one segment of one head, BV columns; it keeps S in registers."""
    n_v = tl.cdiv(Dv, BV)
    i_v, rest = tl.program_id(0) % n_v, (tl.program_id(0) // n_v).to(tl.int64)
    i_seg, i_bh = rest % n_seg, rest // n_seg
    i_b, i_h = i_bh // H, i_bh % H
    q_ptr, k_ptr = at_head(q_ptr, i_b, i_h, T, H, Dk), at_head(k_ptr, i_b, i_h, T, H, Dk)
    g_ptr = at_head(g_ptr, i_b, i_h, T, H, Dk)
    v_ptr, o_ptr = at_head(v_ptr, i_b, i_h, T, H, Dv), at_head(o_ptr, i_b, i_h, T, H, Dv)
    n_chunk = tl.cdiv(T, C)
    first = i_seg * per_seg
    count = tl.minimum(per_seg, n_chunk - first)
    tile, mask = state_tile(Dk, Dv, i_v * BV, BK, BV)
    i = tl.arange(0, C)

    S = tl.zeros([BK, BV], tl.float32)
    if i_seg > 0:
        S = tl.load(seg_ptr + (i_bh * (n_seg - 1) + i_seg - 1) * Dk * Dv + tile, mask=mask, other=0.0)
    elif INIT:
        S = tl.load(init_ptr + i_bh * Dk * Dv + tile, mask=mask, other=0.0)
    for n in range(count):
        t0 = (first + n) * C
        g, k = decays_and_keys(g_ptr, k_ptr, t0, T, H, Dk, inv_tau, LOGITS, KEY, C, BK)
        q = load(q_ptr, t0, T, H * Dk, 0, Dk, C, BK).to(tl.float32) * scale
        v = load(v_ptr, t0, T, H * Dv, i_v * BV, Dv, C, BV).to(OP)
        b, total = tl.cumsum(g, 0), tl.sum(g, 0)
        fast = tl.min(total, 0) > FAST_LIMIT
        r = tl.where(fast, 0.5 * total, 0.0)                                   # (BK,)
        q_t = (q * tl.exp(b - r[None, :])).to(OP)                              # q̃ (C, BK)
        k_t = (k * tl.exp((total - r)[None, :] - b)).to(OP)                    # k̃ (C, BK)
        if fast:
            A = tl.dot(q_t, tl.trans(k_t), input_precision=PRECISION)          # 1 (C, C)
            A = tl.where(i[:, None] >= i[None, :], A, 0.0)
        else:
            k_t = (k * tl.exp(tl.cumsum(g, 0, reverse=True) - g)).to(OP)       # no b_C − b_j: it would cancel
            A = exact_map(q, g_ptr, k_ptr, t0, T, H, Dk, inv_tau, LOGITS, KEY, C, BK)
        S_hat = (S * tl.exp(r)[:, None]).to(OP)                                # Ŝ (BK, BV)
        if SAVE:
            tl.store(save_ptr + (i_bh * n_chunk + first + n) * Dk * Dv + tile, S_hat, mask=mask)
        o = tl.dot(q_t, S_hat, input_precision=PRECISION)                      # 3 (C, BV)
        o = tl.dot(A.to(OP), v, o, input_precision=PRECISION)
        store(o_ptr, o, t0, T, H * Dv, i_v * BV, Dv, C, BV)
        U = tl.dot(tl.trans(k_t), v, input_precision=PRECISION)                # 2 (BK, BV)
        S = S * tl.exp(total)[:, None] + U * tl.exp(r)[:, None]
    if i_seg == n_seg - 1:
        tl.store(final_ptr + i_bh * Dk * Dv + tile, S, mask=mask)


@triton.jit
def gradient_kernel(q_ptr, k_ptr, v_ptr, g_ptr, save_ptr, do_ptr, dfinal_ptr, seg_ptr,
                    dq_ptr, dk_ptr, dv_ptr, dg_ptr, dinit_ptr, part, T, H, Dk, Dv, n_seg, per_seg, inv_tau, scale,
                    DFINAL: tl.constexpr, DINIT: tl.constexpr, LOGITS: tl.constexpr, KEY: tl.constexpr,
                    OP: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Steps 4-5, from the segment's last chunk to its first. One program: one segment of one head, BV columns; it
    keeps dS in registers. With several column blocks each writes its share of dq, dk, dg, `part` elements apart:
    all three are sums over the columns of v."""
    n_v = tl.cdiv(Dv, BV)
    i_v, rest = tl.program_id(0) % n_v, (tl.program_id(0) // n_v).to(tl.int64)
    i_seg, i_bh = rest % n_seg, rest // n_seg
    i_b, i_h = i_bh // H, i_bh % H
    q_ptr, k_ptr = at_head(q_ptr, i_b, i_h, T, H, Dk), at_head(k_ptr, i_b, i_h, T, H, Dk)
    g_ptr = at_head(g_ptr, i_b, i_h, T, H, Dk)
    v_ptr, do_ptr = at_head(v_ptr, i_b, i_h, T, H, Dv), at_head(do_ptr, i_b, i_h, T, H, Dv)
    dq_ptr, dk_ptr = at_head(dq_ptr, i_b, i_h, T, H, Dk) + i_v * part, at_head(dk_ptr, i_b, i_h, T, H, Dk) + i_v * part
    dg_ptr, dv_ptr = at_head(dg_ptr, i_b, i_h, T, H, Dk) + i_v * part, at_head(dv_ptr, i_b, i_h, T, H, Dv)
    n_chunk = tl.cdiv(T, C)
    first = i_seg * per_seg
    count = tl.minimum(per_seg, n_chunk - first)
    tile, mask = state_tile(Dk, Dv, i_v * BV, BK, BV)
    i = tl.arange(0, C)
    causal, causal_t = i[:, None] >= i[None, :], i[:, None] <= i[None, :]

    dS = tl.zeros([BK, BV], tl.float32)
    if i_seg < n_seg - 1:
        dS = tl.load(seg_ptr + (i_bh * (n_seg - 1) + i_seg) * Dk * Dv + tile, mask=mask, other=0.0)
    elif DFINAL:
        dS = tl.load(dfinal_ptr + i_bh * Dk * Dv + tile, mask=mask, other=0.0)
    for n in range(count):
        chunk = first + count - 1 - n
        t0 = chunk * C
        g, k = decays_and_keys(g_ptr, k_ptr, t0, T, H, Dk, inv_tau, LOGITS, KEY, C, BK)
        q = load(q_ptr, t0, T, H * Dk, 0, Dk, C, BK).to(tl.float32) * scale
        v = load(v_ptr, t0, T, H * Dv, i_v * BV, Dv, C, BV).to(OP)
        do = load(do_ptr, t0, T, H * Dv, i_v * BV, Dv, C, BV).to(OP)
        S_hat = tl.load(save_ptr + (i_bh * n_chunk + chunk) * Dk * Dv + tile, mask=mask, other=0.0)
        b, total = tl.cumsum(g, 0), tl.sum(g, 0)
        fast = tl.min(total, 0) > FAST_LIMIT
        r = tl.where(fast, 0.5 * total, 0.0)
        to_q, to_k = tl.exp(b - r[None, :]), tl.exp((total - r)[None, :] - b)  # (C, BK)
        if not fast:
            to_k = tl.exp(tl.cumsum(g, 0, reverse=True) - g)
        q_t, k_t = (q * to_q).to(OP), (k * to_k).to(OP)                        # q̃, k̃ (C, BK)
        P = tl.where(causal, tl.dot(do, tl.trans(v), input_precision=PRECISION), 0.0)          # (C, C)
        if fast:
            At = tl.where(causal_t, tl.dot(k_t, tl.trans(q_t), input_precision=PRECISION), 0.0)
            Pt = tl.where(causal_t, tl.dot(v, tl.trans(do), input_precision=PRECISION), 0.0)
            dq = tl.dot(P.to(OP), k_t, input_precision=PRECISION)              # (C, BK), still without to_q
            dk = tl.dot(Pt.to(OP), q_t, input_precision=PRECISION)
            z = q_t.to(tl.float32) * dq - k_t.to(tl.float32) * dk
            dq, dk = dq * to_q, dk * to_k
        else:
            At, dq, dk = exact_grads(q, P, g_ptr, k_ptr, t0, T, H, Dk, inv_tau, LOGITS, KEY, C, BK)
            z = q * dq - k * dk
        dS_hat = (dS * tl.exp(r)[:, None]).to(OP)                              # dŜ' (BK, BV)
        read = tl.dot(do, tl.trans(S_hat), input_precision=PRECISION)          # (C, BK)
        write = tl.dot(v, tl.trans(dS_hat), input_precision=PRECISION)
        z += q_t.to(tl.float32) * read - k_t.to(tl.float32) * write
        dq += read * to_q
        dk += write * to_k
        dv = tl.dot(k_t, dS_hat, input_precision=PRECISION)                    # (C, BV)
        dv = tl.dot(At.to(OP), do, dv, input_precision=PRECISION)
        store(dv_ptr, dv, t0, T, H * Dv, i_v * BV, Dv, C, BV)
        Z = dS * tl.exp(total - r)[:, None] + tl.dot(tl.trans(q_t), do, input_precision=PRECISION)
        dS = Z * tl.exp(r)[:, None]
        e = tl.sum(S_hat.to(tl.float32) * Z, 1)                                # (BK,)
        dg = e[None, :] - (tl.cumsum(z, 0) - z)                                # 5 (C, BK)

        if not KEY:
            dg -= dk * tl.exp(g)
        if LOGITS:
            a = load(g_ptr, t0, T, H * Dk, 0, Dk, C, BK).to(tl.float32)
            small = tl.exp(-tl.abs(a))
            dg *= tl.where(a > 0, small, 1.0) / (1.0 + small) * inv_tau        # σ(−a) / τ
        dg = tl.where(g > LOG_ALPHA_MIN, dg, 0.0)
        store(dq_ptr, dq * scale, t0, T, H * Dk, 0, Dk, C, BK)
        store(dg_ptr, dg, t0, T, H * Dk, 0, Dk, C, BK)
        if KEY:
            store(dk_ptr, dk, t0, T, H * Dk, 0, Dk, C, BK)
    if DINIT:
        if i_seg == 0:
            tl.store(dinit_ptr + i_bh * Dk * Dv + tile, dS, mask=mask)


@triton.jit
def step_kernel(q_ptr, k_ptr, v_ptr, g_ptr, S_ptr, o_ptr, out_ptr, H, Dk, Dv, inv_tau, scale,
                INIT: tl.constexpr, LOGITS: tl.constexpr, KEY: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """One token: S' = diag(α) S + kᵀ v, o = s q S'. One program: BV columns of one head's state, read and written once."""
    n_v = tl.cdiv(Dv, BV)
    i_v, i_bh = tl.program_id(0) % n_v, (tl.program_id(0) // n_v).to(tl.int64)
    c, d = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    tile, mask = state_tile(Dk, Dv, i_v * BV, BK, BV)
    g = log_alpha(tl.load(g_ptr + i_bh * Dk + c, mask=c < Dk, other=0.0), inv_tau, LOGITS)
    q = tl.load(q_ptr + i_bh * Dk + c, mask=c < Dk, other=0.0).to(tl.float32) * scale
    k = tl.load(k_ptr + i_bh * Dk + c, mask=c < Dk, other=0.0).to(tl.float32) if KEY else one_minus_exp(g)
    v = tl.load(v_ptr + i_bh * Dv + d, mask=d < Dv, other=0.0).to(tl.float32)
    S = k[:, None] * v[None, :]
    if INIT:
        S += tl.exp(g)[:, None] * tl.load(S_ptr + i_bh * Dk * Dv + tile, mask=mask, other=0.0)
    tl.store(out_ptr + i_bh * Dk * Dv + tile, S, mask=mask)
    tl.store(o_ptr + i_bh * Dv + d, tl.sum(q[:, None] * S, 0), mask=d < Dv)


# ── Launches ─────────────────────────────────────────────────────────────────────────────────────────────────

# (16-bit inputs, key width up to) → C, columns of v a program, warps of output and states, warps of gradient
CONFIGS = {(True, 64): (64, 128, 4, 8), (True, 128): (64, 64, 8, 8), (True, 256): (32, 32, 8, 8),
           (False, 64): (32, 64, 4, 8), (False, 128): (32, 32, 8, 8), (False, 256): (16, 16, 8, 8)}
PROGRAMS = 512          # cut sequences into segments until there are about as many programs


class Plan:
    """Everything about a call that follows from its shapes: block sizes, segments, dtypes, launch arguments."""

    def __init__(self, q, k, v, logits):
        self.B, self.T, self.H, self.Dk = q.shape
        self.Dv = v.shape[-1]
        half = q.dtype != torch.float32
        self.BK = max(16, triton.next_power_of_2(self.Dk))
        width = next(width for bits, width in CONFIGS if bits == half and self.BK <= width)
        self.C, BV, self.warps, self.grad_warps = CONFIGS[half, width]
        self.BV = min(BV, max(16, triton.next_power_of_2(self.Dv)))
        self.n_v = triton.cdiv(self.Dv, self.BV)
        self.heads = self.B * self.H
        self.n_chunk = triton.cdiv(self.T, self.C)
        wanted = triton.cdiv(PROGRAMS, self.heads * self.n_v)
        self.per_seg = triton.cdiv(self.n_chunk, min(wanted, self.n_chunk))
        self.n_seg = triton.cdiv(self.n_chunk, self.per_seg)
        interpreted = not q.is_cuda
        # 16-bit factors are bfloat16: float16 could not hold e^50. The interpreter's dot gets bfloat16 wrong.
        self.op_dtype = torch.bfloat16 if half and not interpreted else torch.float32
        self.shared = dict(LOGITS=logits, KEY=k is not None, OP=tl.bfloat16 if half and not interpreted else tl.float32,
                           PRECISION="tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
                           C=self.C, BK=self.BK, BV=self.BV)

    def sizes(self, inv_tau):
        return self.T, self.H, self.Dk, self.Dv, self.n_seg, self.per_seg, inv_tau, self.Dk ** -0.5

    def boundary_states(self, x, y, g, init, inv_tau, forward):
        """The state after each segment but the last (forward), or its gradient before each but the first."""
        n = self.n_seg - 1
        U = torch.empty(self.heads, n, self.Dk, self.Dv, device=g.device, dtype=torch.float32)
        if n:
            D = torch.empty(self.heads, n, self.Dk, device=g.device, dtype=torch.float32)
            states_kernel[(self.heads * n * self.n_v,)](
                x, y, g, U, D, *self.sizes(inv_tau), FORWARD=forward, **self.shared, num_warps=self.warps)
            rows, block = min(16, triton.next_power_of_2(n)), 256
            scan_kernel[(self.heads * triton.cdiv(self.Dk * self.Dv, block),)](
                U, D, init if init is not None else U, self.Dk, self.Dv, n, FORWARD=forward, INIT=init is not None,
                ROWS=rows, BLOCK=block, num_warps=4)
        return U


def on_device(x):
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


# tau = 0 says that g holds log α itself rather than logits

@torch.library.custom_op("metala::forward", mutates_args=())
def forward_op(q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor, g: torch.Tensor, state: torch.Tensor | None,
               tau: float, save: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v, g, state = (x if x is None else x.contiguous() for x in (q, k, v, g, state))
    plan, inv_tau = Plan(q, k, v, tau > 0), 1 / tau if tau > 0 else 1.0
    o, final, saved = forward_fake(q, k, v, g, state, tau, save)
    with on_device(q):
        seg = plan.boundary_states(k if k is not None else g, v, g, state, inv_tau, forward=True)
        output_kernel[(plan.heads * plan.n_seg * plan.n_v,)](
            q, k if k is not None else g, v, g, state if state is not None else final, seg, o, final, saved,
            *plan.sizes(inv_tau), INIT=state is not None, SAVE=save, **plan.shared, num_warps=plan.warps)
    return o, final, saved


@forward_op.register_fake
def forward_fake(q, k, v, g, state, tau, save):
    plan = Plan(q, k, v, tau > 0)
    o = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    final = torch.empty(plan.B, plan.H, plan.Dk, plan.Dv, dtype=torch.float32, device=q.device)
    chunks = plan.n_chunk if save else 0
    saved = torch.empty(plan.heads, chunks, plan.Dk, plan.Dv, dtype=plan.op_dtype, device=q.device)
    return o, final, saved


@torch.library.custom_op("metala::backward", mutates_args=())
def backward_op(do: torch.Tensor, dfinal: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor | None,
                v: torch.Tensor, g: torch.Tensor, saved: torch.Tensor, tau: float, dinit_wanted: bool
                ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    do, dfinal, q, k, v, g = (x if x is None else x.contiguous() for x in (do, dfinal, q, k, v, g))
    plan, inv_tau = Plan(q, k, v, tau > 0), 1 / tau if tau > 0 else 1.0
    dq, dk, dv, dg, dinit = backward_fake(do, dfinal, q, k, v, g, saved, tau, dinit_wanted)
    grads = [dq, dk, dg]
    if plan.n_v > 1:
        grads = [torch.empty(plan.n_v, *x.shape, dtype=torch.float32, device=x.device) for x in grads]
    with on_device(q):
        seg = plan.boundary_states(q, do, g, dfinal, inv_tau, forward=False)
        gradient_kernel[(plan.heads * plan.n_seg * plan.n_v,)](
            q, k if k is not None else g, v, g, saved, do, dfinal if dfinal is not None else dinit, seg,
            grads[0], grads[1], dv, grads[2], dinit, q.numel(), *plan.sizes(inv_tau),
            DFINAL=dfinal is not None, DINIT=dinit_wanted, **plan.shared, num_warps=plan.grad_warps)
        if plan.n_v > 1:
            dq, dk, dg = (torch.sum(x, 0, dtype=torch.float32).to(y.dtype) for x, y in zip(grads, (dq, dk, dg)))
    return dq, dk, dv, dg, dinit


@backward_op.register_fake
def backward_fake(do, dfinal, q, k, v, g, saved, tau, dinit_wanted):
    dk = torch.empty_like(k) if k is not None else q.new_empty(0)
    shape = (q.shape[0], q.shape[2], q.shape[3], v.shape[3]) if dinit_wanted else (0,)
    dinit = torch.empty(shape, dtype=torch.float32, device=q.device)
    return torch.empty_like(q), dk, torch.empty_like(v), torch.empty_like(g), dinit


def setup_context(ctx, inputs, output):
    q, k, v, g, state, ctx.tau, _ = inputs
    ctx.save_for_backward(q, k, v, g, output[2])
    ctx.dinit_wanted = state is not None and state.requires_grad
    ctx.set_materialize_grads(False)


def backward(ctx, do, dfinal, _):
    q, k, v, g, saved = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(v)
    dq, dk, dv, dg, dinit = backward_op(do, dfinal, q, k, v, g, saved, ctx.tau, ctx.dinit_wanted)
    return dq, dk if k is not None else None, dv, dg, dinit if ctx.dinit_wanted else None, None, None


forward_op.register_autograd(backward, setup_context=setup_context)


@torch.library.custom_op("metala::step", mutates_args=("out",))
def step_op(q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor, g: torch.Tensor, state: torch.Tensor | None,
            out: torch.Tensor, tau: float) -> torch.Tensor:
    q, k, v, g, state = (x if x is None else x.contiguous() for x in (q, k, v, g, state))
    B, _, H, Dk = q.shape
    Dv, o = v.shape[-1], torch.empty_like(v)
    BK, BV = max(16, triton.next_power_of_2(Dk)), min(32, triton.next_power_of_2(Dv))
    with on_device(q):
        step_kernel[(B * H * triton.cdiv(Dv, BV),)](
            q, k if k is not None else g, v, g, state if state is not None else out, o, out, H, Dk, Dv,
            1 / tau if tau > 0 else 1.0, Dk ** -0.5, INIT=state is not None, LOGITS=tau > 0, KEY=k is not None,
            BK=BK, BV=BV, num_warps=4)
    return o


@step_op.register_fake
def step_fake(q, k, v, g, state, out, tau):
    return torch.empty_like(v)


def run(q, k, v, g, state, tau, in_place):
    """Checks what the kernels need beyond metala.check_operands' shapes, then takes the step or the chunks."""
    if not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"the Triton kernel needs CUDA tensors (or TRITON_INTERPRET=1), not {q.device}")
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"the Triton kernel takes float32, bfloat16 and float16, not {q.dtype}")
    if max(q.shape[-1], v.shape[-1]) > 256:
        raise ValueError(f"the Triton kernel takes Dk, Dv ≤ 256, not {q.shape[-1]} and {v.shape[-1]}")
    grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, g, state))
    if q.shape[1] == 1 and not grad:
        shape = (q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        out = state if in_place and state is not None else torch.empty(shape, dtype=torch.float32, device=q.device)
        return step_op(q, k, v, g, state, out, tau), out
    return forward_op(q, k, v, g, state, tau, grad)[:2]


def metala_attention(q, a, v, tau=16.0, state=None, in_place=False):
    """MetaLA's operator from gate logits: α = σ(a)^(1/τ), k = 1 − α, formed in registers.

    q, a: (B, T, H, Dk), v: (B, T, H, Dv), of one dtype (float32, bfloat16, float16; a may also be float32),
    Dk, Dv ≤ 256, T ≥ 1, on CUDA or, with TRITON_INTERPRET=1, on the CPU. state: (B, H, Dk, Dv) float32 or None.
    Returns o (B, T, H, Dv) and the final state; differentiable in q, a, v and state. in_place: a single step
    without gradients overwrites `state`. Raises ValueError (shapes, devices, tau) and TypeError (dtypes).
    """
    from metala import check_operands
    if not tau > 0:
        raise ValueError(f"tau must be positive, not {tau}")
    check_operands(q, None, v, a, state)
    return run(q, None, v, a, state, float(tau), in_place)


def linear_attention(q, k, v, g, state=None):
    """The general form: as metala_attention, with log decays g ≤ 0 (clamped at −40) in place of logits and a key.

    k: (B, T, H, Dk), or None for k = 1 − exp(g). Differentiable in all of them.
    """
    from metala import check_operands
    check_operands(q, k, v, g, state)
    return run(q, k, v, g, state, 0.0, False)
