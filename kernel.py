"""MetaLA's operator as one chunkwise Triton kernel file, forward and backward.

    S_t = diag(α_t) S_{t-1} + k_tᵀ v_t    o_t = s · q_t S_t    α = σ(a)^(1/τ), k = 1 − α, s = Dk^-½

`metala.chunkwise` computes the same in PyTorch. Here α, log α and k are formed from the logits a in
float32 registers; what reaches memory, for the length of one pass, are the factors q̃, k̃, F below.

The derivation. Inside a chunk of C steps let b_i = log α_1 + … + log α_i. A read at i finds a write
at j ≤ i faded by e^{b_i − b_j}, which splits into a factor of the read and one of the write:

    F_i = e^{b_i}     R_j = e^{−b_j}     q̃_i = s q_i ⊙ F_i     k̃_j = k_j ⊙ R_j

so that every step becomes a product of matrices. S is the state before the chunk, S' after it; dX
is the gradient of the loss with respect to X:

    1 factors  q̃, k̃, F, and e^{b_C}, the decay of the whole chunk
    2 states   S'  = e^{b_C} ⊙ (S + k̃ᵀ v)                        from the first chunk to the last
               dS″ = e^{b_C} ⊙ dS',   dS = dS″ + q̃ᵀ do           from the last chunk to the first
    3 output   o = A v + q̃ S,   A = tril(q̃ k̃ᵀ)
    4 grads    P = tril(do vᵀ)    dq = s F ⊙ (P k̃ + do Sᵀ)    dk = R ⊙ (Pᵀ q̃ + v dS″ᵀ)
               dv = Aᵀ do + k̃ dS″
    5 gates    dg_t = e − Σ_{i<t} (q_i ⊙ dq_i − k_i ⊙ dk_i),   e = rowsum(S ⊙ dS)
               da = (dg − dk ⊙ α) σ(−a) / τ                       through k = 1 − α and the logit

Step 5 in words: dg_t, the gradient of log α_t, collects every pair of a read i ≥ t and a write
j < t, which all pass through step t. e counts those that pass the chunk's start; walking on, a read
leaves the sum and a write enters it. Where gates close these terms cancel almost entirely, so they
are summed from the same rounded q̃, k̃ and P that made dq and dk, and start afresh in every chunk.

No gate makes a number overflow. R could: so a channel that a chunk fades below 2^-90 is steep, and
counts R from the chunk's end, R_j = e^{b_C − b_j} ≤ 1, and its k̃ meets no further e^{b_C}: in step
2 S' = e^{b_C} ⊙ S + k̃ᵀ v, and dS' in place of dS″. This serves all that passes the chunk's edges.
The pairs inside a chunk with a steep channel are left out of A and P and added by two kernels of
their own, column by column, from W_i = α_{j+1} ⋯ α_i, a product of numbers ≤ 1; where every chunk
is mild their programs leave at once. log α is clamped at −40: e^-40 is nothing beside 1 in float32.
What is left of float32's range, 2^37, is for q, v and do: they may be as large as 1e10, and as
small as 1e-10.

Parallel over time as well as over heads: steps 1, 4 and 5 take every chunk by itself. One kernel
walks through the chunks for steps 2 and 3, with the state in registers. Where batch and heads are
too few to fill a GPU, it cuts the sequence into segments: a first walk finds what each segment
alone adds, a short scan turns that into the state at every segment's edge.

Memory. q, a, v, o and their gradients once each; for training the state of every chunk, in 16 bits
if the inputs are, Dk (rounded up to a tile) / C of the size of v. (With KEEP_STATES = False none are
kept, and the backward pass finds them again.) q̃, k̃ and, backward, F and dS″ live for one pass;
there q̃, k̃, dS″ lie, where they fit, in the memory that dq, da and dv are going to fill.

    python kernel.py        prints a benchmark (needs a CUDA GPU)
"""
import contextlib
import functools
import math
import os

import torch
import triton
import triton.language as tl

# Decays are kept as log₂ α, because 2^x is one instruction.
LOG2_E = tl.constexpr(math.log2(math.e))
LOG2_MIN = tl.constexpr(-58.0)          # the least log₂ α: e^-40
STEEP = tl.constexpr(-90.0)             # log₂ decay over a chunk below which a channel is steep


# ── Parts ─────────────────────────────────────────────────────────────────────────────────────────
#
# Memory of q, k, g, q̃, k̃, F: (B, T, H, Dk), of v, o: (B, T, H, Dv), of the chunks' states: as v,
# with BK rows a chunk; all contiguous. g is a where LOGITS, else log α; k is read where KEY, else
# it is 1 − α. The offset of (b, h) is taken once, in 64 bits; from there one time step is hop·D
# elements further on: H·D, or −H·D where time is reversed.

@triton.jit
def at_head(i_b, i_h, T, H, D, REVERSE: tl.constexpr):
    """Offset of (b, h) in (B, T, H, D): of its first step, or the last where time is reversed."""
    return ((i_b * T + (T - 1 if REVERSE else 0)) * H + i_h) * D


@triton.jit
def load(ptr, t0, T, row, c0, D, C: tl.constexpr, BD: tl.constexpr, other=0.0):
    """Steps t0 … t0 + C − 1, columns c0 … c0 + BD − 1, `other` outside (T, D). → (C, BD)"""
    t, c = tl.arange(0, C), c0 + tl.arange(0, BD)
    ptr += t0.to(tl.int64) * row
    return tl.load(ptr + t[:, None] * row + c[None, :],
                   mask=(t0 + t < T)[:, None] & (c < D)[None, :], other=other)


@triton.jit
def store(ptr, x, t0, T, row, c0, D, C: tl.constexpr, BD: tl.constexpr):
    t, c = tl.arange(0, C), c0 + tl.arange(0, BD)
    ptr += t0.to(tl.int64) * row
    tl.store(ptr + t[:, None] * row + c[None, :], x,
             mask=(t0 + t < T)[:, None] & (c < D)[None, :])


@triton.jit
def state_tile(Dk, Dv, c0, BK: tl.constexpr, BV: tl.constexpr):
    """Offsets and mask of columns c0 … c0 + BV − 1 of a state (Dk, Dv)."""
    r, c = tl.arange(0, BK), c0 + tl.arange(0, BV)
    return r[:, None] * Dv + c[None, :], (r < Dk)[:, None] & (c < Dv)[None, :]


@triton.jit
def log2_alpha(x, inv_tau, LOGITS: tl.constexpr):
    """log₂ α = log₂ σ(a) / τ from logits a, or from x = log α. With e = exp(−|a|) ≤ 1,

        log₂ σ(a) = min(a, 0) log₂ e − log₂(1 + e),      log₂(1 + e) / e by a polynomial of degree 7

    (minimax on [0, 1]): 3e-7 relative, also where 1 + e rounds to 1 and a plain log would return 0.
    """
    x = x.to(tl.float32) * LOG2_E
    if LOGITS:
        e = tl.exp2(-tl.abs(x))
        p = 0.0636078419 + e * -0.0123194592
        p = 0.25600967 + e * (-0.155351803 + e * p)
        p = 1.44269476 + e * (-0.721310088 + e * (0.480063694 + e * (-0.35339481 + e * p)))
        x = (tl.minimum(x, 0.0) - e * p) * inv_tau
    return tl.maximum(x, LOG2_MIN, tl.PropagateNan.ALL)


@triton.jit
def key_of(g):
    """k = 1 − α = 1 − 2^g. Near g = 0 the difference cancels; there it is the series of −expm1(x),
    x = g ln 2."""
    x = g / LOG2_E
    return tl.where(g > -0.1, -x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24)))), 1.0 - tl.exp2(g))


@triton.jit
def slope(a):
    """σ(−a), the derivative of log σ(a), exact to float32 on both sides."""
    e = tl.exp2(-tl.abs(a) * LOG2_E)
    return tl.where(a > 0, e, 1.0) / (1.0 + e)


@triton.jit
def sums(M, x, OP: tl.constexpr):
    """M x for a 0/1 matrix M (C, C): sums over time, cheaper on the tensor cores than as a scan. In
    16 bits x is split in two halves, which keeps 17 bits of each term."""
    if OP == tl.bfloat16:
        high = x.to(OP)
        total = tl.dot(M, (x - high.to(tl.float32)).to(OP), tl.dot(M, high))
    else:
        total = tl.dot(M, x, input_precision="ieee")
    return total


@triton.jit
def decays_and_keys(g_ptr, k_ptr, t0, T, row, c0, D, inv_tau, LOGITS: tl.constexpr,
                    KEY: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """log₂ α and k, (C, BD) each in float32. Beyond the sequence α = 1, k = 0: S stays as it is."""
    g = log2_alpha(load(g_ptr, t0, T, row, c0, D, C, BD, 1e4 if LOGITS else 0.0), inv_tau, LOGITS)
    return g, load(k_ptr, t0, T, row, c0, D, C, BD).to(tl.float32) if KEY else key_of(g)


@triton.jit
def gate_row(g_ptr, k_ptr, t, T, row, Dk, inv_tau, LOGITS: tl.constexpr, KEY: tl.constexpr,
             BK: tl.constexpr):
    """decays_and_keys of one step t: log₂ α and k, (BK,) each in float32."""
    c = tl.arange(0, BK)
    at, mask = t.to(tl.int64) * row + c, c < tl.where(t < T, Dk, 0)
    g = log2_alpha(tl.load(g_ptr + at, mask=mask, other=1e4 if LOGITS else 0.0), inv_tau, LOGITS)
    return g, tl.load(k_ptr + at, mask=mask, other=0.0).to(tl.float32) if KEY else key_of(g)


# ── Kernels ───────────────────────────────────────────────────────────────────────────────────────

@triton.jit
def decays_kernel(q_ptr, k_ptr, g_ptr, qF_ptr, kR_ptr, F_ptr, total_ptr, T, W, inv_tau, scale,
                  REVERSE: tl.constexpr, WRITE_F: tl.constexpr, LOGITS: tl.constexpr,
                  KEY: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, BW: tl.constexpr):
    """Step 1: q̃ = s q ⊙ F, k̃ = k ⊙ R, for the backward pass s F too, and total = b_C in log₂.

    The channels of all heads lie side by side, W = H·Dk in all. One program: one chunk, BW
    channels, ROWS steps at a time, in one warp, so that a thread has 16 bytes of a row and prefix
    sums stay within the warp.
    """
    n_chunk, n_w = tl.cdiv(T, C), tl.cdiv(W, BW)
    i_w, i_c = tl.program_id(0) % n_w, tl.program_id(0) // n_w % n_chunk
    i_b = (tl.program_id(0) // (n_w * n_chunk)).to(tl.int64)
    at, row = at_head(i_b, 0, T, 1, W, REVERSE), -W if REVERSE else W
    q_ptr, k_ptr, g_ptr, qF_ptr, kR_ptr, F_ptr = (
        q_ptr + at, k_ptr + at, g_ptr + at, qF_ptr + at, kR_ptr + at, F_ptr + at)
    t0, c0, c = i_c * C, i_w * BW, i_w * BW + tl.arange(0, BW)

    total = tl.zeros([BW], tl.float32)
    for n in tl.range(0, C, ROWS, num_stages=3):            # loads run two rounds ahead
        t = t0 + n
        g, k = decays_and_keys(g_ptr, k_ptr, t, T, row, c0, W, inv_tau, LOGITS, KEY, ROWS, BW)
        q = load(q_ptr, t, T, row, c0, W, ROWS, BW).to(tl.float32)               # (ROWS, BW)
        b = total[None, :] + tl.cumsum(g, 0)
        total += tl.sum(g, 0)
        F = scale * tl.exp2(b)
        store(qF_ptr, q * F, t, T, row, c0, W, ROWS, BW)
        store(kR_ptr, k * tl.exp2(-tl.maximum(b, STEEP)), t, T, row, c0, W, ROWS, BW)
        if WRITE_F:
            store(F_ptr, F, t, T, row, c0, W, ROWS, BW)
    tl.store(total_ptr + (i_b * n_chunk + i_c) * W + c, total, mask=c < W)

    steep = total < STEEP               # R would overflow: it counts from the chunk's end instead
    if tl.max(steep.to(tl.int32), 0) > 0:
        later = tl.zeros([BW], tl.float32)
        for n in range(ROWS, C + ROWS, ROWS):
            t = t0 + C - n
            g, k = decays_and_keys(g_ptr, k_ptr, t, T, row, c0, W, inv_tau, LOGITS, KEY, ROWS, BW)
            to_end = later[None, :] + tl.cumsum(g, 0, reverse=True) - g
            later += tl.sum(g, 0)
            b = total[None, :] - to_end
            R = tl.exp2(tl.where(steep[None, :], to_end, -b))
            store(kR_ptr, k * R, t, T, row, c0, W, ROWS, BW)
            if WRITE_F:                 # −R marks the steps where F is as good as 0
                store(F_ptr, tl.where(b < STEEP, -R, scale * tl.exp2(b)), t, T, row, c0, W,
                      ROWS, BW)


@triton.jit
def chunk_decay(total_ptr, i, c0, Dk, BK: tl.constexpr, SK: tl.constexpr):
    """For channels c0 … c0 + SK − 1 of (batch, chunk, head) number i: e^{b_C}; the factor, e^{b_C}
    or 1, that turns k̃ into what the chunk's end sees of k; and whether the chunk is mild: none of
    its channels is steep."""
    c, part = tl.arange(0, BK), c0 + tl.arange(0, SK)
    steep = tl.load(total_ptr + i * Dk + c, mask=c < Dk, other=0.0) < STEEP     # not if NaN
    mild = tl.max(steep.to(tl.int32), 0) == 0
    total = tl.load(total_ptr + i * Dk + part, mask=part < Dk, other=0.0)
    decay = tl.exp2(total)
    return decay, tl.where(total < STEEP, 1.0, decay), mild


@triton.jit
def causal(x, mild, C: tl.constexpr):
    """tril(x) of a map (C, C), or nothing of it where the exact kernels take over."""
    i, j = tl.arange(0, C), tl.arange(0, C) + tl.where(mild, 0, C)
    return tl.where(i[:, None] >= j[None, :], x, 0.0)


@triton.jit
def causal_t(x, mild, C: tl.constexpr):
    """triu(x), likewise, for the transposed maps Aᵀ and Pᵀ."""
    i, j = tl.arange(0, C) + tl.where(mild, 0, C), tl.arange(0, C)
    return tl.where(i[:, None] <= j[None, :], x, 0.0)


@triton.jit
def walk_kernel(r_ptr, w_ptr, y_ptr, total_ptr, seg_ptr, decay_ptr, init_ptr, all_ptr, last_ptr,
                o_ptr, T, H, Dk, Dv, n_seg, per_seg, REVERSE: tl.constexpr, FORWARD: tl.constexpr,
                SEGMENT: tl.constexpr, STORE: tl.constexpr, OUT: tl.constexpr, INIT: tl.constexpr,
                LAST: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
                C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Steps 2 and 3: the state from chunk to chunk, or its gradient, inside one segment, and what
    is read from it.

        forward    r = q̃, w = k̃, y = v    S  ← e^{b_C} ⊙ (S + wᵀ y)    o  = tril(r wᵀ) y + r S
        backward   r = k̃, w = q̃, y = do   dS ← e^{b_C} ⊙ dS' + wᵀ y    dv = triu(r wᵀ) y + r dS″

    With SEGMENT it starts from zero and leaves what the segment alone adds, and its decay. Else it
    starts from the state at the segment's edge and leaves, with OUT, o or dv; with STORE every
    chunk's S or dS″ (dS' in steep channels); and the last of all. The names S and o stand
    for dS and dv when backward. One program: one segment of one head, BV columns, in registers.
    """
    n_v, n = tl.cdiv(Dv, BV), n_seg - 1 if SEGMENT else n_seg
    i_v, rest = tl.program_id(0) % n_v, (tl.program_id(0) // n_v).to(tl.int64)
    i_seg, i_bh = rest % n, rest // n
    if SEGMENT and not FORWARD:
        i_seg += 1                      # the first segment has nobody to pass its gradient to
    i_b, i_h, n_chunk = i_bh // H, i_bh % H, tl.cdiv(T, C)
    at_k, at_v = at_head(i_b, i_h, T, H, Dk, REVERSE), at_head(i_b, i_h, T, H, Dv, REVERSE)
    at_S, hop = at_head(i_b, i_h, n_chunk * BK, H, Dv, REVERSE), -H if REVERSE else H
    first = i_seg * per_seg
    count = tl.minimum(per_seg, n_chunk - first)
    tile, mask = state_tile(Dk, Dv, i_v * BV, BK, BV)
    edge = i_bh * (n_seg - 1) + (i_seg - 1 if FORWARD else i_seg)              # neighbour's slot

    S = tl.zeros([BK, BV], tl.float32)
    if not SEGMENT:
        if i_seg > 0 if FORWARD else i_seg < n_seg - 1:
            S = tl.load(seg_ptr + edge * Dk * Dv + tile, mask=mask, other=0.0)
        elif INIT:
            S = tl.load(init_ptr + i_bh * Dk * Dv + tile, mask=mask, other=0.0)
    D = tl.full([BK], 1.0, tl.float32)
    for j in range(count):
        chunk = first + (j if FORWARD else count - 1 - j)
        t0 = chunk * C
        decay, end, mild = chunk_decay(total_ptr, (i_b * n_chunk + chunk) * H + i_h, 0, Dk, BK, BK)
        w = load(w_ptr + at_k, t0, T, hop * Dk, 0, Dk, C, BK)                    # (C, BK)
        y = load(y_ptr + at_v, t0, T, hop * Dv, i_v * BV, Dv, C, BV).to(OP)      # (C, BV)
        if not FORWARD:
            S *= end[:, None]                                                  # dS″
        if STORE:
            store(all_ptr + at_S, S, chunk * BK, n_chunk * BK, hop * Dv, i_v * BV, Dv, BK, BV)
        if OUT:
            r = load(r_ptr + at_k, t0, T, hop * Dk, 0, Dk, C, BK)                # (C, BK)
            A = tl.dot(r, tl.trans(w), input_precision=PRECISION)              # (C, C)
            A = causal(A, mild, C) if FORWARD else causal_t(A, mild, C)
            o = tl.dot(r, S.to(OP), input_precision=PRECISION)
            o = tl.dot(A.to(OP), y, o, input_precision=PRECISION)              # (C, BV)
            store(o_ptr + at_v, o, t0, T, hop * Dv, i_v * BV, Dv, C, BV)
        # e^{b_C} / end is 1 but in steep channels, and spares a product of its own
        S = tl.dot(tl.trans(w), y, S * (decay / end)[:, None], input_precision=PRECISION)
        if FORWARD:
            S *= end[:, None]
        D *= decay
    if SEGMENT:
        slot = i_bh * (n_seg - 1) + (i_seg if FORWARD else i_seg - 1)
        tl.store(seg_ptr + slot * Dk * Dv + tile, S, mask=mask)
        c = tl.arange(0, BK)
        tl.store(decay_ptr + slot * Dk + c, D, mask=c < Dk)
    elif LAST:
        if i_seg == (n_seg - 1 if FORWARD else 0):
            tl.store(last_ptr + i_bh * Dk * Dv + tile, S, mask=mask)


@triton.jit
def scan_kernel(U_ptr, D_ptr, init_ptr, Dk, Dv, n, FORWARD: tl.constexpr, INIT: tl.constexpr,
                ROWS: tl.constexpr, BV: tl.constexpr):
    """Step 2 between segments: U_i ← D_i ⊙ U_{i-1} + U_i in place over n segments (from the last to
    the first when backward), U_{-1} being init or zero; U_i is what segment i alone adds, D_i its
    decay. One program: one channel of one head's state, ROWS segments at a time."""
    i_bh, channel = (tl.program_id(0) // Dk).to(tl.int64), tl.program_id(0) % Dk
    c, i = tl.arange(0, BV), tl.arange(0, ROWS)
    S = tl.zeros([BV], tl.float32)
    if INIT:
        S = tl.load(init_ptr + (i_bh * Dk + channel) * Dv + c, mask=c < Dv, other=0.0)
    for i0 in range(0, n, ROWS):
        row = (i_bh * n + (i0 + i if FORWARD else n - 1 - i0 - i)) * Dk + channel
        mask = (i0 + i < n)[:, None] & (c < Dv)[None, :]
        U = tl.load(U_ptr + row[:, None] * Dv + c[None, :], mask=mask, other=0.0)  # (ROWS, BV)
        D = tl.load(D_ptr + row, mask=i0 + i < n, other=1.0)[:, None] + tl.zeros_like(U)
        D, U = tl.associative_scan((D, U), 0, then)
        U += D * S[None, :]
        tl.store(U_ptr + row[:, None] * Dv + c[None, :], U, mask=mask)
        S = tl.sum(tl.where((i == ROWS - 1)[:, None], U, 0.0), 0)


@triton.jit
def then(D1, U1, D2, U2):
    """Decay and update of one segment, then of the next: S → D2 (D1 S + U1) + U2."""
    return D1 * D2, U1 * D2 + U2


@triton.jit
def gradient_kernel(q_ptr, k_ptr, F_ptr, v_ptr, g_ptr, do_ptr, total_ptr, S_ptr, dS_ptr,
                    dq_ptr, dk_ptr, dv_ptr, dg_ptr, T, H, Dk, Dv, inv_tau, scale,
                    REVERSE: tl.constexpr, LOGITS: tl.constexpr, KEY: tl.constexpr,
                    OP: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
                    BV: tl.constexpr, SK: tl.constexpr, N_V: tl.constexpr, DV: tl.constexpr):
    """Steps 4 and 5: dq, dk, dg or da, with DV also dv. One program: one chunk of one head, SK
    channels.

    The name dS stands for dS″ (dS' in steep channels). q̃, k̃ and, with DV, dS″ may lie in the
    memory of dq, dg and dv: what is read here is what is overwritten here, afterwards.
    """
    n_chunk, n_k = tl.cdiv(T, C), tl.cdiv(Dk, SK)
    i_k, rest = tl.program_id(0) % n_k, (tl.program_id(0) // n_k).to(tl.int64)
    i_c, i_bh = rest % n_chunk, rest // n_chunk
    i_b, i_h = i_bh // H, i_bh % H
    at_k, at_v = at_head(i_b, i_h, T, H, Dk, REVERSE), at_head(i_b, i_h, T, H, Dv, REVERSE)
    at_S, hop = at_head(i_b, i_h, n_chunk * BK, H, Dv, REVERSE), -H if REVERSE else H
    c0 = i_k * SK
    t0, s0, i = (i_c * C).to(tl.int32), (i_c * BK + c0).to(tl.int32), tl.arange(0, C)
    c = tl.arange(0, SK)
    decay, end, mild = chunk_decay(total_ptr, (i_b * n_chunk + i_c) * H + i_h, c0, Dk, BK, SK)

    q = load(q_ptr + at_k, t0, T, hop * Dk, c0, Dk, C, SK)                       # q̃ (C, SK)
    k = load(k_ptr + at_k, t0, T, hop * Dk, c0, Dk, C, SK)                       # k̃ (C, SK)
    P = tl.zeros([C, C], tl.float32)
    dq = tl.zeros([C, SK], tl.float32)
    dk = tl.zeros([C, SK], tl.float32)
    # rowsum(S ⊙ dS″), what passes the whole chunk
    through = tl.zeros([SK], tl.float32)
    for j in tl.static_range(N_V):
        # All loads first: nothing moves a load up across a store or a barrier, so that each would
        # cost its full latency.
        do = load(do_ptr + at_v, t0, T, hop * Dv, j * BV, Dv, C, BV).to(OP)
        dS = load(dS_ptr + at_S, s0, n_chunk * BK, hop * Dv, j * BV, Dv, SK, BV)
        v = load(v_ptr + at_v, t0, T, hop * Dv, j * BV, Dv, C, BV).to(OP)
        S = load(S_ptr + at_S, s0, n_chunk * BK, hop * Dv, j * BV, Dv, SK, BV)
        if DV:
            At = causal_t(tl.dot(k, tl.trans(q), input_precision=PRECISION), mild, C)
            dv = tl.dot(k, dS, input_precision=PRECISION)
            dv = tl.dot(At.to(OP), do, dv, input_precision=PRECISION)          # (C, BV)
            tl.debug_barrier()                      # all have read dS″ before dv takes its place
            store(dv_ptr + at_v, dv, t0, T, hop * Dv, j * BV, Dv, C, BV)
        # the diagonal of a product of matrices: cheaper than to unpack both and multiply
        SdS = tl.dot(S, tl.trans(dS), input_precision=PRECISION)               # (SK, SK)
        through += tl.sum(tl.where(c[:, None] == c[None, :], SdS, 0.0), 1)
        P = tl.dot(do, tl.trans(v), P, input_precision=PRECISION)              # (C, C)
        dq = tl.dot(do, tl.trans(S), dq, input_precision=PRECISION)            # (C, SK), lacks s F
        dk = tl.dot(v, tl.trans(dS), dk, input_precision=PRECISION)            # (C, SK), lacks R
    F = load(F_ptr + at_k, t0, T, hop * Dk, c0, Dk, C, SK, 1.0)                  # s F, or −R
    x = load(g_ptr + at_k, t0, T, hop * Dk, c0, Dk, C, SK)
    P = causal(P, mild, C).to(OP)

    e = through * (decay / end) + tl.sum(q.to(tl.float32) * dq, 0)             # rowsum(S ⊙ dS)
    dq = tl.dot(P, k, dq, input_precision=PRECISION)
    dk = tl.dot(tl.trans(P), q, dk, input_precision=PRECISION)
    y = k.to(tl.float32) * dk                                                  # k ⊙ dk
    dg = e[None, :] - sums((i[:, None] > i[None, :]).to(OP),
                           q.to(tl.float32) * dq - y, OP)                      # step 5 (C, SK)
    F, x = F.to(tl.float32), x.to(tl.float32)
    dq *= tl.maximum(F, 0.0, tl.PropagateNan.ALL)
    root = tl.rsqrt(tl.abs(F))          # its square is 1 / s F, at a third of a division's cost
    dk *= tl.where(F > 0, (decay / end * scale)[None, :] * root * root, -F)
    if not KEY:
        dg += y - dk                                                           # − dk ⊙ α
    if LOGITS:
        dg *= slope(x) * inv_tau
    dg = tl.where(x <= LOG2_MIN / LOG2_E / inv_tau, 0.0, dg)                   # 0 where clamped
    store(dq_ptr + at_k, dq, t0, T, hop * Dk, c0, Dk, C, SK)
    store(dg_ptr + at_k, dg, t0, T, hop * Dk, c0, Dk, C, SK)
    if KEY:
        store(dk_ptr + at_k, dk, t0, T, hop * Dk, c0, Dk, C, SK)


@triton.jit
def exact_output_kernel(q_ptr, k_ptr, v_ptr, g_ptr, total_ptr, o_ptr, T, H, Dk, Dv, n_items,
                        inv_tau, scale, REVERSE: tl.constexpr, LOGITS: tl.constexpr,
                        KEY: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
                        C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr):
    """Step 3 for the pairs inside the chunks that are not mild: adds A v to their o.

    A comes column by column, from the last to the first: A_ij = s Σ_c q_ic k_jc W_ic with
    W_i = α_{j+1} ⋯ α_i. One program: GROUP of the chunks of all heads; if all are mild it leaves at
    once.
    """
    n_chunk = tl.cdiv(T, C)
    i, c, group = tl.arange(0, C), tl.arange(0, BK), tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    totals = tl.load(total_ptr + group.to(tl.int64)[:, None] * Dk + c[None, :],
                     mask=(group < n_items)[:, None] & (c < Dk)[None, :], other=0.0)  # (GROUP, BK)
    if tl.min(tl.min(totals, 1), 0) >= STEEP:
        return
    first = tl.program_id(0) * GROUP
    for item in range(first, tl.minimum(first + GROUP, n_items)):
        _, _, mild = chunk_decay(total_ptr + first.to(tl.int64) * Dk, item - first, 0, Dk, BK, BK)
        if not mild:
            i_h, t0, i_b = item % H, item // H % n_chunk * C, (item // H // n_chunk).to(tl.int64)
            at_k, at_v = at_head(i_b, i_h, T, H, Dk, REVERSE), at_head(i_b, i_h, T, H, Dv, REVERSE)
            hop = -H if REVERSE else H
            q = load(q_ptr + at_k, t0, T, hop * Dk, 0, Dk, C, BK).to(tl.float32) * scale
            A = tl.zeros([C, C], tl.float32)
            W = tl.zeros([C, BK], tl.float32)
            alpha = tl.zeros([BK], tl.float32)
            for n in range(C):
                j = C - 1 - n
                W = tl.where((i == j)[:, None], 1.0, W * alpha[None, :])
                g_j, k_j = gate_row(g_ptr + at_k, k_ptr + at_k, t0 + j, T, hop * Dk, Dk, inv_tau,
                                    LOGITS, KEY, BK)
                A += tl.where((i == j)[None, :], tl.sum(q * W * k_j[None, :], 1)[:, None], 0.0)
                alpha = tl.exp2(g_j)
            for c0 in range(0, Dv, BV):
                v = load(v_ptr + at_v, t0, T, hop * Dv, c0, Dv, C, BV).to(OP)
                o = load(o_ptr + at_v, t0, T, hop * Dv, c0, Dv, C, BV).to(tl.float32)
                o = tl.dot(A.to(OP), v, o, input_precision=PRECISION)
                store(o_ptr + at_v, o, t0, T, hop * Dv, c0, Dv, C, BV)


@triton.jit
def exact_gradient_kernel(q_ptr, k_ptr, v_ptr, g_ptr, total_ptr, do_ptr,
                          dq_ptr, dk_ptr, dv_ptr, dg_ptr, T, H, Dk, Dv, n_items, inv_tau, scale,
                          REVERSE: tl.constexpr, LOGITS: tl.constexpr, KEY: tl.constexpr,
                          OP: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
                          BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr):
    """Steps 4 and 5 for the same pairs (read i ≥ write j): adds what they give to dq, dk, dv and dg
    or da. One program: as in exact_output_kernel."""
    n_chunk = tl.cdiv(T, C)
    i, c, group = tl.arange(0, C), tl.arange(0, BK), tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    totals = tl.load(total_ptr + group.to(tl.int64)[:, None] * Dk + c[None, :],
                     mask=(group < n_items)[:, None] & (c < Dk)[None, :], other=0.0)  # (GROUP, BK)
    if tl.min(tl.min(totals, 1), 0) >= STEEP:
        return
    first = tl.program_id(0) * GROUP
    for item in range(first, tl.minimum(first + GROUP, n_items)):
        _, _, mild = chunk_decay(total_ptr + first.to(tl.int64) * Dk, item - first, 0, Dk, BK, BK)
        if not mild:
            i_h, t0, i_b = item % H, item // H % n_chunk * C, (item // H // n_chunk).to(tl.int64)
            at_k, at_v = at_head(i_b, i_h, T, H, Dk, REVERSE), at_head(i_b, i_h, T, H, Dv, REVERSE)
            hop = -H if REVERSE else H
            P = tl.zeros([C, C], tl.float32)
            for c0 in range(0, Dv, BV):
                v = load(v_ptr + at_v, t0, T, hop * Dv, c0, Dv, C, BV).to(OP)
                do = load(do_ptr + at_v, t0, T, hop * Dv, c0, Dv, C, BV).to(OP)
                P = tl.dot(do, tl.trans(v), P, input_precision=PRECISION)
            q = load(q_ptr + at_k, t0, T, hop * Dk, 0, Dk, C, BK).to(tl.float32) * scale
            At = tl.zeros([C, C], tl.float32)
            dq = tl.zeros([C, BK], tl.float32)
            dk = tl.zeros([C, BK], tl.float32)
            W = tl.zeros([C, BK], tl.float32)
            alpha = tl.zeros([BK], tl.float32)
            for n in range(C):
                j = C - 1 - n
                W = tl.where((i == j)[:, None], 1.0, W * alpha[None, :])
                g_j, k_j = gate_row(g_ptr + at_k, k_ptr + at_k, t0 + j, T, hop * Dk, Dk, inv_tau,
                                    LOGITS, KEY, BK)
                At += tl.where((i == j)[:, None], tl.sum(q * W * k_j[None, :], 1)[None, :], 0.0)
                pW = tl.sum(tl.where((i == j)[None, :], P, 0.0), 1)[:, None] * W    # P[:, j] ⊙ W
                dq += pW * k_j[None, :]
                dk += tl.where((i == j)[:, None], tl.sum(pW * q, 0)[None, :], 0.0)
                alpha = tl.exp2(g_j)
            for c0 in range(0, Dv, BV):
                do = load(do_ptr + at_v, t0, T, hop * Dv, c0, Dv, C, BV).to(OP)
                dv = load(dv_ptr + at_v, t0, T, hop * Dv, c0, Dv, C, BV).to(tl.float32)
                dv = tl.dot(At.to(OP), do, dv, input_precision=PRECISION)
                store(dv_ptr + at_v, dv, t0, T, hop * Dv, c0, Dv, C, BV)
            x = load(g_ptr + at_k, t0, T, hop * Dk, 0, Dk, C, BK, 1e4 if LOGITS else 0.0)
            g = log2_alpha(x, inv_tau, LOGITS)
            k = (load(k_ptr + at_k, t0, T, hop * Dk, 0, Dk, C, BK).to(tl.float32) if KEY else
                 key_of(g))
            dg = -sums((i[:, None] > i[None, :]).to(OP), q * dq - k * dk, OP)       # step 5, e = 0
            if not KEY:
                dg -= dk * tl.exp2(g)
            if LOGITS:
                dg *= slope(x.to(tl.float32)) * inv_tau
            dg = tl.where(g <= LOG2_MIN, 0.0, dg)
            dq = dq * scale + load(dq_ptr + at_k, t0, T, hop * Dk, 0, Dk, C, BK).to(tl.float32)
            store(dq_ptr + at_k, dq, t0, T, hop * Dk, 0, Dk, C, BK)
            dg += load(dg_ptr + at_k, t0, T, hop * Dk, 0, Dk, C, BK).to(tl.float32)
            store(dg_ptr + at_k, dg, t0, T, hop * Dk, 0, Dk, C, BK)
            if KEY:
                dk += load(dk_ptr + at_k, t0, T, hop * Dk, 0, Dk, C, BK).to(tl.float32)
                store(dk_ptr + at_k, dk, t0, T, hop * Dk, 0, Dk, C, BK)


@triton.jit
def step_kernel(q_ptr, k_ptr, v_ptr, g_ptr, S_ptr, o_ptr, out_ptr, H, Dk, Dv, inv_tau, scale,
                INIT: tl.constexpr, LOGITS: tl.constexpr, KEY: tl.constexpr,
                BK: tl.constexpr, BV: tl.constexpr):
    """One token, no chunk: S_t = diag(α) S_{t-1} + kᵀ v, o = s q S_t. One program: BV columns of
    one head's state, read and written once."""
    n_v = tl.cdiv(Dv, BV)
    i_v, i_bh = tl.program_id(0) % n_v, (tl.program_id(0) // n_v).to(tl.int64)
    c, d = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    tile, mask = state_tile(Dk, Dv, i_v * BV, BK, BV)
    g = log2_alpha(tl.load(g_ptr + i_bh * Dk + c, mask=c < Dk, other=0.0), inv_tau, LOGITS)
    q = tl.load(q_ptr + i_bh * Dk + c, mask=c < Dk, other=0.0).to(tl.float32) * scale
    k = tl.load(k_ptr + i_bh * Dk + c, mask=c < Dk, other=0.0).to(tl.float32) if KEY else key_of(g)
    v = tl.load(v_ptr + i_bh * Dv + d, mask=d < Dv, other=0.0).to(tl.float32)
    S = k[:, None] * v[None, :]
    if INIT:
        S += tl.exp2(g)[:, None] * tl.load(S_ptr + i_bh * Dk * Dv + tile, mask=mask, other=0.0)
    tl.store(out_ptr + i_bh * Dk * Dv + tile, S, mask=mask)
    tl.store(o_ptr + i_bh * Dv + d, tl.sum(q[:, None] * S, 0), mask=d < Dv)


# ── Launches ──────────────────────────────────────────────────────────────────────────────────────

# (16-bit inputs, key width up to) → C; columns of v a program, warps and stages of walk_kernel;
# channels and columns of v a program and warps of gradient_kernel
CONFIGS = {(True, 32): (32, (64, 2, 3), (32, 64, 2)),
           (True, 64): (64, (64, 4, 3), (64, 128, 4)), (True, 128): (64, (64, 4, 2), (64, 64, 4)),
           (True, 256): (32, (32, 8, 2), (64, 64, 8)), (False, 64): (32, (64, 4, 2), (64, 64, 8)),
           (False, 128): (32, (32, 8, 2), (64, 32, 8)), (False, 256): (16, (16, 8, 2), (64, 16, 8))}
PROGRAMS = 256          # of walk_kernel, at least; with fewer heads, segments make it twice as many
GROUP = 8               # chunks that one program of the exact kernels looks at
KEEP_STATES = True      # of all chunks, for the backward pass; False: less memory, more time


class Plan:
    """All that follows from the shapes of a call: block sizes, segments, dtypes, launch options."""

    def __init__(self, shape, Dv, dtype, g_dtype, device, key, tau, reverse, tf32):
        self.sizes = self.T, self.H, self.Dk, self.Dv = *shape[1:], Dv
        half, cuda, self.ready = dtype != torch.float32, device.type == "cuda", {}
        # Triton 3.6 compiles Hopper's products of four warps wrongly if a 16-bit tile is less than
        # 64 wide (wrong numbers, illegal addresses). Narrow heads take two warps, and with them the
        # products of older GPUs, as C = 32 does; all other tiles are 64 wide or more, or of 8 warps.
        least = 16 if not half else 32 if self.Dk <= 32 else 64
        self.BK = max(least, triton.next_power_of_2(self.Dk))
        width = next(width for bits, width in CONFIGS if bits == half and self.BK <= width)
        self.C, (BV, self.warps, self.stages), (SK, GV, self.grad_warps) = CONFIGS[half, width]
        self.BV, self.GV = (min(n, max(least, triton.next_power_of_2(Dv))) for n in (BV, GV))
        self.SK = min(SK, self.BK)
        # One program with all channels of a chunk can make dv too, and then dS″ may lie where dv
        # will: both fit exactly if BK = C. Wider heads get dv from walk_kernel.
        self.grad_dv = self.SK == self.BK
        self.lend = self.grad_dv and self.BK == self.C and self.T % self.C == 0
        self.n_v = triton.cdiv(Dv, self.BV)
        self.B, self.heads, self.n_chunk = shape[0], shape[0] * self.H, triton.cdiv(self.T, self.C)
        self.n_items = self.heads * self.n_chunk
        self.exact_warps = min(self.warps, 4)
        programs = self.heads * self.n_v
        wanted = 1 if programs >= PROGRAMS else triton.cdiv(2 * PROGRAMS, programs)
        self.per_seg = triton.cdiv(self.n_chunk, min(wanted, self.n_chunk))
        self.n_seg = triton.cdiv(self.n_chunk, self.per_seg)
        # 16-bit factors are bfloat16: float16 has no room for 2^90. (The interpreter's products of
        # bfloat16 are wrong; there they are float32.)
        self.op_dtype = torch.bfloat16 if half and cuda else torch.float32
        self.inv_tau, self.scale = 1 / tau if tau > 0 else 1.0, self.Dk ** -0.5
        self.gates, self.reverse = dict(LOGITS=tau > 0, KEY=key), reverse
        self.tiles = dict(OP=tl.bfloat16 if half and cuda else tl.float32,
                          PRECISION="tf32" if tf32 else "ieee", C=self.C, BK=self.BK, BV=self.BV)

    def like(self, x, reuse=None):
        """A tensor of factors shaped as x: in the memory of `reuse` if its elements fit."""
        if reuse is not None and reuse.element_size() == self.op_dtype.itemsize:
            return reuse.view(self.op_dtype)
        return empty(x.shape, x, self.op_dtype)

    def launch(self, kernel, programs, *args, num_warps, num_stages=3, **constants):
        """kernel[programs,](…). Triton looks at every argument of every launch (40 µs) to see which
        compiled version fits; here that follows from the plan and the constants, so that all but
        the first launch go straight to it."""
        if kernel is not scan_kernel:
            constants = dict(REVERSE=self.reverse, **constants)
        key = kernel, *constants.values()
        if ready := self.ready.get(key):
            ready[programs, 1, 1](*args, *constants.values())
        else:                           # None when interpreted
            self.ready[key] = kernel[programs,](*args, **constants, num_warps=num_warps,
                                                num_stages=num_stages)

    def decays(self, q, k, g, qF, kR, F=None):
        """Step 1: fills qF = q̃, kR = k̃ and, if wanted, F; returns every chunk's b_C in log₂."""
        W = self.H * self.Dk
        total = empty((self.B, self.n_chunk, W), g, torch.float32)
        BW = min(128, max(16, triton.next_power_of_2(W)))
        self.launch(decays_kernel, self.B * self.n_chunk * triton.cdiv(W, BW),
                    q, k if k is not None else g, g, qF, kR, F if F is not None else qF, total,
                    self.T, W, self.inv_tau, self.scale, WRITE_F=F is not None,
                    **self.gates, ROWS=4, C=self.C, BW=BW, num_warps=1)
        return total

    def walk(self, r, w, y, total, init, forward, states, last, o):
        """Steps 2 and 3: fills o or dv, `states` with every chunk's S or dS″, and `last`."""
        n = self.n_seg - 1
        seg = empty((self.heads, n, self.Dk, self.Dv), y, torch.float32) if n else total
        decay = empty((self.heads, n, self.Dk), y, torch.float32) if n else total
        # the kernel does not touch what is not there; a tensor that is stands for it
        args = (r, w, y, total, seg, decay,
                *(x if x is not None else total for x in (init, states, last, o)),
                *self.sizes, self.n_seg, self.per_seg)
        options = dict(FORWARD=forward, **self.tiles, num_warps=self.warps,
                       num_stages=min(self.stages, self.per_seg))
        if n:
            self.launch(walk_kernel, self.heads * n * self.n_v, *args, SEGMENT=True, STORE=False,
                        OUT=False, INIT=False, LAST=False, **options)
            self.launch(scan_kernel, self.heads * self.Dk, seg, decay, args[6], self.Dk, self.Dv, n,
                        FORWARD=forward, INIT=init is not None,
                        ROWS=min(16, triton.next_power_of_2(n)),
                        BV=triton.next_power_of_2(self.Dv), num_warps=1)
        self.launch(walk_kernel, self.heads * self.n_seg * self.n_v, *args, SEGMENT=False,
                    STORE=states is not None, OUT=o is not None, INIT=init is not None,
                    LAST=last is not None, **options)

    def room(self, x):
        """Room for a state of every chunk, laid out as v is: BK rows a chunk in place of C."""
        return empty((self.B, self.n_chunk * self.BK, self.H, self.Dv), x, self.op_dtype)


cached_plan = functools.lru_cache(1024)(Plan)       # not for symbolic shapes, which have no hash


def plan_of(q, k, v, g, tau, reverse, plan):
    return plan(q.shape, v.shape[-1], q.dtype, g.dtype, q.device, k is not None, tau, reverse,
                torch.backends.cuda.matmul.fp32_precision == "tf32")


def on_device(x):
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def empty(shape, x, dtype=None):
    return torch.empty(shape, dtype=dtype or x.dtype, device=x.device)


def aligned(x):
    """x in one piece that starts at a multiple of 16 bytes."""
    if x is None or x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


# tau = 0 says that g holds log α itself rather than logits

def forward_pass(q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor, g: torch.Tensor,
                 state: torch.Tensor | None, tau: float, reverse: bool, keep: bool
                 ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """o, the final state and, to keep for the backward pass, every chunk's state."""
    q, k, v, g, state = map(aligned, (q, k, v, g, state))
    plan = plan_of(q, k, v, g, tau, reverse, cached_plan)
    o, final, states = forward_outputs(plan, q, v, keep)
    with on_device(q):
        qF, kR = plan.like(q), plan.like(q)
        total = plan.decays(q, k, g, qF, kR)
        plan.walk(qF, kR, v, total, state, True, states if keep else None, final, o)
        plan.launch(exact_output_kernel, triton.cdiv(plan.n_items, GROUP),
                    q, k if k is not None else g, v, g, total, o, *plan.sizes, plan.n_items,
                    plan.inv_tau, plan.scale, **plan.gates, **plan.tiles, GROUP=GROUP,
                    num_warps=plan.exact_warps)
    return o, final, states


def forward_outputs(plan, q, v, keep):
    return (empty(v.shape, q), empty((plan.B, plan.H, plan.Dk, plan.Dv), q, torch.float32),
            plan.room(q) if keep else empty(0, q, plan.op_dtype))


def backward_pass(do: torch.Tensor, dfinal: torch.Tensor | None, q: torch.Tensor,
                  k: torch.Tensor | None, v: torch.Tensor, g: torch.Tensor,
                  state: torch.Tensor | None, S: torch.Tensor, tau: float, reverse: bool,
                  dinit_wanted: bool
                  ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv, dg or da, and the initial state's gradient; empty where there is none."""
    do, dfinal, q, k, v, g, state, S = map(aligned, (do, dfinal, q, k, v, g, state, S))
    plan = plan_of(q, k, v, g, tau, reverse, cached_plan)
    dq, dk, dv, dg, dinit = backward_outputs(plan, q, k, v, g, dinit_wanted)
    with on_device(q):
        # dq, dg and dv lend their memory to q̃, k̃ and dS″, which gradient_kernel reads first
        qF, kR, F = plan.like(q, dq), plan.like(q, dg), plan.like(q)
        total = plan.decays(q, k, g, qF, kR, F)
        if S.numel() == 0:      # none were kept
            S = plan.room(q)
            plan.walk(qF, kR, v, total, state, True, S, None, None)
        dS = plan.like(dv, dv) if plan.lend else plan.room(q)
        plan.walk(kR, qF, do, total, dfinal, False, dS, dinit if dinit_wanted else None,
                  None if plan.grad_dv else dv)
        plan.launch(gradient_kernel, plan.heads * plan.n_chunk * triton.cdiv(plan.Dk, plan.SK),
                    qF, kR, F, v, g, do, total, S, dS, dq, dk, dv, dg,
                    *plan.sizes, plan.inv_tau, plan.scale,
                    **plan.gates, **plan.tiles | dict(BV=plan.GV), SK=plan.SK,
                    N_V=triton.cdiv(plan.Dv, plan.GV), DV=plan.grad_dv, num_warps=plan.grad_warps)
        plan.launch(exact_gradient_kernel, triton.cdiv(plan.n_items, GROUP),
                    q, k if k is not None else g, v, g, total, do, dq, dk, dv, dg,
                    *plan.sizes, plan.n_items, plan.inv_tau, plan.scale,
                    **plan.gates, **plan.tiles, GROUP=GROUP,
                    num_warps=plan.exact_warps)
    return dq, dk, dv, dg, dinit


def backward_outputs(plan, q, k, v, g, dinit_wanted):
    dinit = (plan.B, plan.H, plan.Dk, plan.Dv) if dinit_wanted else 0
    return (empty(q.shape, q), empty(k.shape if k is not None else 0, q), empty(v.shape, q),
            empty(g.shape, g), empty(dinit, q, torch.float32))


def step(q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor, g: torch.Tensor,
         state: torch.Tensor | None, out: torch.Tensor, tau: float) -> torch.Tensor:
    """o of a single token; the new state goes into `out`, which may be `state`."""
    q, k, v, g, state = map(aligned, (q, k, v, g, state))
    B, _, H, Dk = q.shape
    Dv, o = v.shape[-1], empty(v.shape, v)
    BK, BV = max(16, triton.next_power_of_2(Dk)), min(32, triton.next_power_of_2(Dv))
    with on_device(q):
        step_kernel[(B * H * triton.cdiv(Dv, BV),)](
            q, k if k is not None else g, v, g, state if state is not None else out, o, out,
            H, Dk, Dv, 1 / tau if tau > 0 else 1.0, Dk ** -0.5,
            INIT=state is not None, LOGITS=tau > 0, KEY=k is not None, BK=BK, BV=BV, num_warps=4)
    return o


# The same as operators, which torch.compile takes as they are and whose shapes it can ask for.
forward_op = torch.library.custom_op("metala::forward", forward_pass, mutates_args=())
backward_op = torch.library.custom_op("metala::backward", backward_pass, mutates_args=())
step_op = torch.library.custom_op("metala::step", step, mutates_args=("out",))


@forward_op.register_fake
def _(q, k, v, g, state, tau, reverse, keep):
    return forward_outputs(plan_of(q, k, v, g, tau, reverse, Plan), q, v, keep)


@backward_op.register_fake
def _(do, dfinal, q, k, v, g, state, S, tau, reverse, dinit_wanted):
    return backward_outputs(plan_of(q, k, v, g, tau, reverse, Plan), q, k, v, g, dinit_wanted)


@step_op.register_fake
def _(q, k, v, g, state, out, tau):
    return empty(v.shape, v)


def setup_context(ctx, inputs, output):
    q, k, v, g, state, ctx.tau, ctx.reverse, keep = inputs
    ctx.save_for_backward(q, k, v, g, None if keep else state, output[2])
    ctx.dinit_wanted = state is not None and state.requires_grad
    ctx.set_materialize_grads(False)


def backward(how, ctx, do, dfinal, _):
    q, k, v, g, state, S = ctx.saved_tensors
    if do is None:
        do = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    dq, dk, dv, dg, dinit = how(do, dfinal, q, k, v, g, state, S, ctx.tau, ctx.reverse,
                                ctx.dinit_wanted)
    return (dq, dk if k is not None else None, dv, dg, dinit if ctx.dinit_wanted else None,
            None, None, None)


forward_op.register_autograd(functools.partial(backward, backward_op), setup_context=setup_context)


class Eager(torch.autograd.Function):
    """forward_op without the dispatcher, which takes longer (half a millisecond) than the GPU."""
    @staticmethod
    def forward(ctx, *inputs):
        output = forward_pass(*inputs)
        setup_context(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, *grads):          # backward_op makes a second derivative an error
        return backward(backward_op if torch.is_grad_enabled() else backward_pass, ctx, *grads)


def run(q, k, v, g, state, tau, reverse, in_place=False):
    """Checks what kernels need beyond metala.check_operands, then takes the step or the chunks."""
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"the Triton kernel takes float32, bfloat16 and float16, not {q.dtype}")
    if max(q.shape[-1], v.shape[-1]) > 256:
        raise ValueError("the Triton kernel takes Dk, Dv ≤ 256, "
                         f"not {q.shape[-1]} and {v.shape[-1]}")
    if q.shape[2] * max(q.shape[-1], v.shape[-1]) > 2**23:
        raise ValueError(f"the Triton kernel takes H·Dk, H·Dv ≤ 2^23, not H = {q.shape[2]}")
    if not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("the Triton kernel needs CUDA tensors (or TRITON_INTERPRET=1), "
                         f"not {q.device}")
    inputs = q, k, v, g, state
    grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    traced = torch.compiler.is_compiling() or any(
        x is not None and type(x) not in (torch.Tensor, torch.nn.Parameter) for x in inputs)
    if q.shape[1] == 1 and not grad:
        shape = (q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        reuse = in_place and state is not None and state.is_contiguous()
        out = state if reuse else empty(shape, q, torch.float32)
        o = (step_op if traced else step)(*inputs, out, tau)
        if reuse and not traced:
            torch.autograd.graph.increment_version(out)     # or autograd would trust what it kept
        return o, out
    how = forward_op if traced else Eager.apply
    return how(*inputs, tau, reverse, grad and KEEP_STATES)[:2]


def metala_attention(q, a, v, tau=16.0, state=None, reverse=False, in_place=False):
    """MetaLA's operator from gate logits: α = σ(a)^(1/τ), k = 1 − α, formed in registers.

    q, a: (B, T, H, Dk), v: (B, T, H, Dv), of one dtype (float32, bfloat16, float16; a may also be
    float32), Dk, Dv ≤ 256, T ≥ 1, on CUDA or, with TRITON_INTERPRET=1, on the CPU. state:
    (B, H, Dk, Dv) float32 or None. Returns o (B, T, H, Dv) and the final state; differentiable in
    q, a, v and state. reverse: from the last step to the first. in_place: a single step without
    gradients overwrites `state`. Raises ValueError (shapes, devices, tau) and TypeError (dtypes).
    """
    from metala import check_operands
    if not 1e-6 <= tau <= 1e6:
        raise ValueError(f"tau must be from 1e-6 to 1e6, not {tau}")
    check_operands(q, None, v, a, state)
    return run(q, None, v, a, state, float(tau), reverse, in_place)


def linear_attention(q, k, v, g, state=None, reverse=False):
    """The general form: as metala_attention, with log decays g ≤ 0 (clamped at −40) in place of the
    logits, and keys k: (B, T, H, Dk), or None for k = 1 − exp(g). Differentiable in all of them."""
    from metala import check_operands
    check_operands(q, k, v, g, state)
    return run(q, k, v, g, state, 0.0, reverse)


# ── Benchmark ─────────────────────────────────────────────────────────────────────────────────────

def measure(name, forward, inputs, floor=math.inf):
    """One line: medians of the forward pass, also as a multiple of `floor` ms, and of both passes,
    replayed as CUDA graphs, so that Python's launches do not count; both passes launched from
    Python; peak memory beyond the inputs."""
    do = torch.randn_like(forward())
    def both():
        torch.autograd.grad(forward(), inputs, do)
    both()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    peak = torch.cuda.max_memory_allocated() - before
    with torch.no_grad():
        once = triton.testing.do_bench_cudagraph(forward, return_mode="median")
    twice = triton.testing.do_bench_cudagraph(both, return_mode="median")
    eager = triton.testing.do_bench(both, return_mode="median")
    ratio = f"{once / floor:5.1f}" if floor < math.inf else ""
    print(f"  {name:24} forward {once:7.3f} {ratio}   both passes {twice:7.3f}   "
          f"from Python {eager:7.3f}   peak {peak >> 20:5} MiB", flush=True)


def benchmark_operator(B, T, H, Dk, Dv):
    import metala
    def draw(*d):
        return torch.randn(B, T, H, *d, device="cuda", dtype=torch.bfloat16).requires_grad_()
    q, a, v, wide = draw(Dk), draw(Dk), draw(Dv), draw(Dv)
    def log_decay():
        return torch.nn.functional.logsigmoid(a.float()) / 16
    def pytorch():
        return metala.linear_attention(q, None, v, log_decay(), form="chunkwise")[0]
    def softmax():
        return torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (wide, v, v)), is_causal=True).transpose(1, 2)
    floor = 2 * q.numel() * (2 + 2 * Dv / Dk) / 4.28e9      # bytes at 4.28 TB/s, an H200's, in ms
    print(f"\nB={B} T={T} H={H} Dk={Dk} Dv={Dv} bfloat16, medians in ms; to read q, a, v and write "
          f"o takes {floor:.3f}, which forward is a multiple of")
    measure("this kernel", lambda: metala_attention(q, a, v)[0], (q, a, v), floor)
    measure("PyTorch chunkwise", pytorch, (q, a, v), floor)
    measure("softmax (SDPA), width Dv", softmax, (wide, v), floor)
    try:
        from fla.ops.gla import chunk_gla
    except ImportError:
        return
    def peer():
        g = log_decay()
        return chunk_gla(q, -torch.expm1(g).to(q.dtype), v, g.to(q.dtype))[0]
    measure("fla chunk_gla", peer, (q, a, v), floor)


@torch.no_grad()
def benchmark_step(B, H, Dk, Dv):
    """Decoding, in place, over eight states in turn: more than the L2 cache holds."""
    q, a, v = (torch.randn(B, 1, H, d, device="cuda", dtype=torch.bfloat16) for d in (Dk, Dk, Dv))
    states = [torch.randn(B, H, Dk, Dv, device="cuda") for _ in range(8)]
    def steps():
        for S in states:
            metala_attention(q, a, v, state=S, in_place=True)
    once = triton.testing.do_bench_cudagraph(steps, return_mode="median") / len(states)
    print(f"\ndecoding: B={B} H={H} Dk={Dk} Dv={Dv}, a step takes {1e3 * once:.1f} µs, to read and "
          f"write the state {2 * states[0].nbytes / 4.28e6:.1f}")


def benchmark_layer(B, T, D, H):
    """The whole token mixer, compiled, under autocast."""
    import metala
    torch.compiler.reset()              # or the compiler gives up after eight layers
    x = torch.randn(B, T, D, device="cuda", requires_grad=True)
    print(f"\nlayer: B={B} T={T} D={D} H={H}, compiled, bfloat16 autocast")
    for name in ("metala", "attention"):
        layer = metala.MIXERS[name](D, H).cuda()
        compiled = torch.compile(layer)
        with torch.autocast("cuda", torch.bfloat16):
            measure(name, lambda: compiled(x)[0], (x, *layer.parameters()))


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("kernel: the benchmark needs a CUDA GPU; "
                         "without one, the tests run the kernel interpreted")
    for T in (512, 1024, 2048, 8192, 32768):
        benchmark_operator(32768 // T, T, 8, 64, 128)
    benchmark_operator(8, 2048, 16, 128, 128)
    benchmark_step(64, 8, 64, 128)
    for T in (2048, 8192, 32768):
        benchmark_layer(32768 // T, T, 1024, 8)
