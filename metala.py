"""MetaLA: Meta Linear Attention (NeurIPS 2024, arXiv 2411.10741) in one readable file.

Softmax attention compares a token with every token before it, so a sequence of T tokens costs T².
Linear models keep a fixed-size matrix S instead, let it decay, write into it and read from it. The
paper asks which of the usual parts (query, key, value, decay) such a model needs, and answers:
query, value and decay. The key follows from the decay, k_t = 1 − α_t: a state row takes in exactly
as much as it forgets.

Read from top to bottom: the general form and its three computations (recurrent, parallel,
chunkwise), the MetaLA layer, six other mixers in the same letters, the network, and a demo:

    python metala.py

Glossary (the paper's letters; tensors are laid out batch, time, head, dim)

    B, T, H, D   batch, time steps, heads, model width         C, N   steps per chunk, chunks
    Dk, Dv       key and value width of one head               s      the scale Dk^-½
    q   (B, T, H, Dk)   query        what to read              a      gate logits before σ
    k   (B, T, H, Dk)   key          where to write            r      output gate
    v   (B, T, H, Dv)   value        what to write             τ      gate normaliser, 16
    α   (B, T, H, Dk)   decay        what to keep, in [0, 1]   g      log α ≤ 0 (Λ_t = diag(α_t))
    S   (B, H, Dk, Dv)  state        the memory                w_aug  self-augmentation weights
    A   (B, H, T, T)    LinAttMap    the attention map that a linear model implies
"""
import functools
import importlib.util
import math

import torch
import torch.nn.functional as F
from torch import nn

HAS_KERNEL = all(importlib.util.find_spec(name) for name in ("triton", "kernel"))


# ── 1  The general form ──────────────────────────────────────────────────────────────────────────
#
#     S_t = diag(α_t) S_{t-1} + k_tᵀ v_t          o_t = s · q_t S_t         (row vectors, s = Dk^-½)
#
# Softmax and HGRN aside, every mixer below is a choice of (q, k, v, α). The three functions compute
# the same (o, S_T) from the same arguments; each is the reference for the next. Here q comes scaled
# by s.

def recurrent(q, k, v, g, S):
    """The definition: one step after the other. O(T) work, but T of them in sequence."""
    o = []
    for q_t, k_t, v_t, g_t in zip(*(x.unbind(1) for x in (q, k, v, g))):  # (B, H, Dk), v_t: Dv
        S = g_t.exp()[..., None] * S + k_t[..., None] * v_t[..., None, :]      # (B, H, Dk, Dv)
        o.append((q_t[..., None, :] @ S).squeeze(-2))                          # (B, H, Dv)
    return torch.stack(o, 1), S                                                # (B, T, H, Dv)


def parallel(q, k, v, g, S):
    """All steps at once through the T × T map: o = A v. O(T²) work, nothing in sequence.

        A[t, i] = Σ_c q_tc k_ic W[t, i, c]      W[t, i] = α_{i+1} ⋯ α_t, or 0 for i > t

    W is what is left at step t of a write at step i. The textbook way, log W = G_t − G_i with
    G = cumsum(g), cancels; exp(G_t) · exp(−G_i) even overflows. Here each column i sums from its
    own start, so that no number is larger than the result.
    """
    q, k, v, g = (x.transpose(1, 2) for x in (q, k, v, g))                     # (B, H, T, ·)
    t = torch.arange(g.shape[2], device=g.device)
    ahead = (t[:, None] - t)[..., None]                                        # (T, T, 1), t − i
    W = torch.where(ahead > 0, g[:, :, :, None], 0.0).cumsum(2)                # (B, H, T, T, Dk)
    W = W.masked_fill(ahead < 0, -math.inf).exp()
    A = torch.einsum("bhtc,bhic,bhtic->bhti", q, k, W)                         # (B, H, T, T)
    P = g.cumsum(2).exp()                                                      # (B, H, T, Dk)
    o = A @ v + (q * P) @ S                                                    # (B, H, T, Dv)
    S = P[:, :, -1, :, None] * S + (k * W[:, :, -1]).transpose(-1, -2) @ v     # (B, H, Dk, Dv)
    return o.transpose(1, 2), S                                                # (B, T, H, Dv)


def chunkwise(q, k, v, g, S, C=64):
    """Inside chunks of C steps the parallel form, across chunks the recurrent one. O(T·C) work.

    1 map     the chunk's own map A; q̃ = q ⊙ (decay since the chunk began, this step's α included),
              k̃ = k ⊙ (decay until it ends, this step's α excluded), and P, the whole chunk's decay
    2 update  what the chunk writes:        U = k̃ᵀ v
    3 state   from chunk to chunk:          S' = diag(P) S + U
    4 output  own writes and older ones:    o = A v + q̃ S

    Step 1 doubles the block size h from 1 to C. Two neighbours, l(eft) and r(ight), become one:

        A = [ A_l         0   ]     q̃ = [ q̃_l       ]     k̃ = [ k̃_l ⊙ P_r ]     P = P_l ⊙ P_r
            [ q̃_r k̃_lᵀ   A_r ]         [ q̃_r ⊙ P_l ]         [ k̃_r       ]

    Every factor is a product of decays, so ≤ 1: nothing can overflow, whatever the gates do.
    """
    T = q.shape[1]
    def chunks(x):
        x = F.pad(x, (0, 0, 0, 0, 0, -T % C))   # padding with g = 0, k = 0 leaves the state alone
        return x.unflatten(1, (-1, C)).permute(0, 3, 1, 2, 4)                  # (B, H, N, C, d)
    q, k, v, P = chunks(q), chunks(k), chunks(v), chunks(g).exp()

    h, A = 1, (q * k).sum(-1)[..., None, None]                            # (B, H, N, C/h, h, h)
    q, k, P = (q * P)[..., None, :], k[..., None, :], P[..., None, :]     # (B, H, N, C/h, h, Dk)
    while h < C:                                                          # P: (B, H, N, C/h, 1, Dk)
        (A_l, A_r), (q_l, q_r), (k_l, k_r), (P_l, P_r) = (
            x.unflatten(3, (-1, 2)).unbind(4) for x in (A, q, k, P))
        A_rl = q_r @ k_l.transpose(-1, -2)                                # (B, H, N, C/2h, h, h)
        A = torch.cat([F.pad(A_l, (0, h)), torch.cat([A_rl, A_r], -1)], -2)
        q = torch.cat([q_l, q_r * P_l], -2)                               # (B, H, N, C/2h, 2h, Dk)
        k = torch.cat([k_l * P_r, k_r], -2)
        P = P_l * P_r
        h *= 2
    A, q, k, P = (x.squeeze(3) for x in (A, q, k, P))   # (B, H, N, C, C or Dk), P: (B, H, N, 1, Dk)

    U = k.transpose(-1, -2) @ v                                                # (B, H, N, Dk, Dv)
    starts = []
    for P_n, U_n in zip(P.transpose(-1, -2).unbind(2), U.unbind(2)):
        starts.append(S)
        S = P_n * S + U_n                                                      # (B, H, Dk, Dv)
    o = A @ v + q @ torch.stack(starts, 2)                                     # (B, H, N, C, Dv)
    return o.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :T], S                    # (B, T, H, Dv)


def linear_attention(q, k, v, g, state=None, form="auto", chunk_size=64, reverse=False):
    """o_t = s · q_t S_t with S_t = diag(exp g_t) S_{t-1} + k_tᵀ v_t (paper Eq. 6; s = Dk^-½).

    q, k, g: (B, T, H, Dk), v: (B, T, H, Dv), T ≥ 1, no broadcasting. k = None: k = 1 − exp(g).
    q, k, v share a floating dtype; g ≤ 0 has it too or float32, and may be −∞.
    state: (B, H, Dk, Dv), float64 for float64 inputs, else float32; None = zeros. Never modified.
    form: "recurrent" | "parallel" | "chunkwise" | "triton", or "auto": triton where it serves (see
    `runs_on_kernel`), else recurrent at T = 1, else chunkwise.
    chunk_size: C of "chunkwise", a power of two. reverse: from the last step to the first.

    Returns o (B, T, H, Dv) in q's dtype and the final state. Raises ValueError for shapes, devices,
    an unknown form or chunk size, q that is not floating, TypeError for dtypes that do not fit it,
    ImportError if "triton" is not there.
    """
    forms = {"recurrent": recurrent, "parallel": parallel,
             "chunkwise": functools.partial(chunkwise, C=chunk_size)}
    check_operands(q, k, v, g, state)
    if form not in ("auto", "triton", *forms):
        raise ValueError(f"form must be one of auto, triton, {', '.join(forms)}, not {form!r}")
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size must be a power of two, not {chunk_size}")
    if form == "auto":
        form = "triton" if runs_on_kernel(q, v) else "recurrent" if q.shape[1] == 1 else "chunkwise"
    if form == "triton":
        return import_kernel().linear_attention(q, k, v, g, state, reverse)

    dtype, acc = q.dtype, accumulator(q)
    q, v, g = q.to(acc) * q.shape[-1] ** -0.5, v.to(acc), g.to(acc)
    k = -torch.expm1(g) if k is None else k.to(acc)     # 1 − exp(g) would cancel where α is near 1
    if state is None:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])    # (B, H, Dk, Dv)
    with torch.autocast(q.device.type, enabled=False):  # or it would turn the products to 16 bits
        q, k, v, g = (x.flip(1) if reverse else x for x in (q, k, v, g))
        o, state = forms[form](q, k, v, g, state)
    return (o.flip(1) if reverse else o).to(dtype), state


def attention_map(q, k, g):
    """The map A (B, H, T, T) with A v = o: what a linear mixer weighs the values with.

    It is what comes out when v is the identity matrix. Arguments as for `linear_attention`;
    O(T² Dk) memory, so for looking at, not for training.
    """
    check_operands(q, k, q, g, None)
    B, T, H, _ = q.shape
    one_hot = torch.eye(T, dtype=q.dtype, device=q.device)[None, :, None].expand(B, T, H, T)
    return linear_attention(q, k, one_hot, g, form="parallel")[0].transpose(1, 2)


def accumulator(x):
    """The dtype of states, decays and sums: float64 for float64 inputs, float32 otherwise."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def check_operands(q, k, v, g, state):
    """Raises ValueError or TypeError naming the first of q, k, v, g, state that does not fit."""
    if q.dim() != 4 or 0 in q.shape or not q.is_floating_point():
        raise ValueError(f"q must be floats (B, T, H, Dk), not {q.dtype} {tuple(q.shape)}")
    B, T, H, Dk = q.shape
    Dv = max(v.shape[-1], 1) if v.dim() else 1
    for name, x, shape, *dtypes in (
            ("k", k, (B, T, H, Dk), q.dtype), ("v", v, (B, T, H, Dv), q.dtype),
            ("g", g, (B, T, H, Dk), q.dtype, torch.float32),
            ("state", state, (B, H, Dk, Dv), accumulator(q))):
        if x is None and name in ("k", "state"):
            continue
        if x.shape != shape:
            raise ValueError(f"{name} must be {shape} to fit q and v, not {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}")
        if x.dtype not in dtypes:
            raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, not {x.dtype}")


def runs_on_kernel(q, v):
    """Whether "auto" takes the Triton kernel: kernel.py and Triton are there, the GPU is an NVIDIA
    A100 or later, heads are at most 256 wide, and no tensor is float64."""
    return (HAS_KERNEL and q.is_cuda and torch.version.hip is None and q.dtype != torch.float64
            and max(q.shape[-1], v.shape[-1]) <= 256
            and torch.cuda.get_device_properties(q.device).major >= 8)


def import_kernel():
    """Only when it is needed: without Triton, everything else in this file still works."""
    try:
        import kernel
    except ImportError as error:
        raise ImportError("form='triton' needs the package triton, and kernel.py beside metala.py "
                          f"({error})")
    return kernel


# ── 2  The parts around it ───────────────────────────────────────────────────────────────────────

class ShortConv(nn.Module):
    """Depthwise convolution over time, then SiLU: x_t ← SiLU(Σ_i w_i ⊙ x_{t-K+1+i}).

    Causal, or centred with `bidirectional` (odd size). Its state is the last K − 1 inputs,
    (B, K − 1, D). Written as K delayed products, which torch.compile fuses into one pass.
    """
    def __init__(self, d_model, size, bidirectional):
        super().__init__()
        if size < 0 or (bidirectional and size and size % 2 == 0):
            raise ValueError(f"conv_size must be ≥ 0, and odd when bidirectional, not {size}")
        self.size, self.bidirectional = size, bidirectional
        if size:
            bound = size ** -0.5
            self.weight = nn.Parameter(torch.empty(d_model, 1, size).uniform_(-bound, bound))

    def forward(self, x, mask, state):
        (B, T, D), K = x.shape, self.size
        if K == 0:
            return x, x[:, :0]
        before = x.new_zeros(B, K - 1, D) if state is None else state.to(x.dtype)
        padded = torch.cat([before, x], 1)                                     # (B, K − 1 + T, D)
        # Without a state x alone will do, and torch.compile keeps no copy of it for the gradient.
        x = x if state is None else padded
        if mask is None:
            state = padded[:, T:]                                              # (B, K − 1, D)
        else:                               # the K − 1 inputs up to the last real token
            last = (mask * torch.arange(1, T + 1, device=x.device)).amax(1)    # (B,); 0: none real
            at = last[:, None] + torch.arange(K - 1, device=x.device)          # (B, K − 1)
            state = padded.gather(1, at[..., None].expand(-1, -1, D))          # (B, K − 1, D)
        w, n, ahead = self.weight.to(x.dtype), x.shape[1], K // 2 if self.bidirectional else 0
        t = torch.arange(n, device=x.device)[:, None]
        def delayed(i):                     # x_{t-i}, zero before the first and after the last
            return torch.where((i <= t) & (t < n + i), x.roll(i, 1), 0.0)
        y = sum(delayed(i - ahead) * w[:, 0, K - 1 - i] for i in range(K))     # (B, n, D)
        return F.silu(y[:, n - T:]), state


def project(d_in, d_out, bias=False):
    """A linear map with weights of deviation d_in^-½: 0.022 at the paper's larger width, where the
    release has 0.02, and at small widths enough for the signal to stand out from the norm's eps."""
    layer = nn.Linear(d_in, d_out, bias=bias)
    nn.init.normal_(layer.weight, std=d_in ** -0.5)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def positive(tau):
    if not tau > 0:
        raise ValueError(f"tau must be positive, not {tau}")
    return tau


def rms_norm(x):
    """x / √(mean x² + 1e-6), in float32 for 16-bit inputs, without weights, as in the release."""
    return F.rms_norm(x.to(accumulator(x)), x.shape[-1:], eps=1e-6).to(x.dtype)


class Mixer(nn.Module):
    """What all mixers share: the convolution, padding, states. A subclass says in `mix` how x
    (B, T, D) and its memory, the state but for the convolution's, become y and a new memory.

    `layer(x, mask=None, state=None)`: x (B, T, D); mask (B, T) bool, True = real token; state as
    returned by an earlier call. Returns y (B, T, D) and the new state, a tuple of batch-first
    tensors (None when bidirectional). Padding leaves the state as it is, and y is 0 there; pad on
    the right behind a state, and on either side of a whole sequence: to the convolution padding is
    zeros. With `in_place` the call may overwrite the state that it was given, which comes from
    `reserve`: for loops that never look back. Raises ValueError for shapes of x, mask or state,
    TypeError for an x that has not the weights' dtype outside autocast.
    """
    def __init__(self, d_model, n_heads, d_key, d_value, conv_size, bidirectional):
        super().__init__()
        for name, width in (("d_model", d_model), ("d_key", d_key), ("d_value", d_value)):
            if n_heads < 1 or width < 1 or width % n_heads:
                raise ValueError(f"{name} = {width} is not a multiple of n_heads = {n_heads}")
        self.d_model, self.n_heads, self.bidirectional = d_model, n_heads, bidirectional
        self.conv = ShortConv(d_model, conv_size, bidirectional)
        self.o_proj = project(d_value, d_model)
        self.memory = [(n_heads, d_key // n_heads, d_value // n_heads)]     # S, a sequence's shapes

    def heads(self, x, *projections):
        return (f(x).unflatten(-1, (self.n_heads, -1)) for f in projections)   # each (B, T, H, d)

    def forward(self, x, mask=None, state=None, in_place=False):
        self.check(x, mask, state)
        conv, memory = (None, None) if state is None else (state[0], state[1:])
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0.0)
        x, conv = self.conv(x, mask, conv)                                     # (B, T, D)
        y, memory = self.mix(x, mask, memory, in_place)                        # (B, T, D)
        if mask is not None:
            y = y.masked_fill(~mask[..., None], 0.0)
        return y, None if self.bidirectional else (conv, *memory)

    def check(self, x, mask, state):
        D = self.d_model
        if not (x.dim() == 3 and x.shape[1] and x.shape[2] == D and x.is_floating_point()):
            raise ValueError(f"x must be floats (B, T ≥ 1, {D}), not {x.dtype} {tuple(x.shape)}")
        dtype = self.o_proj.weight.dtype
        if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"x is {x.dtype}, but the layer's weights are {dtype}")
        if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:2]):
            raise ValueError(f"mask must be bool {tuple(x.shape[:2])}, "
                             f"not {mask.dtype} {tuple(mask.shape)}")
        if state is not None and self.bidirectional:
            raise ValueError("a bidirectional layer sees whole sequences: it takes no state")
        if state is not None:
            want = [(max(self.conv.size - 1, 0), D), *self.memory]
            want, have = [(len(x), *shape) for shape in want], [tuple(z.shape) for z in state]
            if list(map(len, have)) != list(map(len, want)) or not all(
                    w in ("L", h) for w, h in zip(sum(want, ()), sum(have, ()))):
                raise ValueError(f"the state of this layer is tensors of shapes {want}, not {have}")

    def reserve(self, state, steps):
        """The state with room for `steps` more in-place steps: a linear state never grows."""
        return state


class LinearMixer(Mixer):
    """What all linear mixers share. A subclass says in `inputs` how it makes q, k (or None: 1 − α),
    v and the gate, mostly (B, T, H, ·), and the output gate r (B, T, H·Dv) or 1.

        x = SiLU(conv(x))  →  q, k, v, gate, r  →  o = linear attention  →  y = (r ⊙ norm(o)) W_o

    At padding α = 1 and k = 0, so that the state passes through untouched.
    """
    open_gate = 0.0         # the gate that keeps everything: g = 0, α = 1

    def operator(self, q, k, v, gate, S, reverse=False, in_place=False):
        return linear_attention(q, k, v, gate, S, reverse=reverse)

    def augment(self, o, q, k, v, gate):
        return o

    def mix(self, x, mask, memory, in_place):
        q, k, v, gate, r = self.inputs(x)
        if mask is not None:
            gate = gate.masked_fill(~mask[..., None, None], self.open_gate)
            k = k if k is None else k.masked_fill(~mask[..., None, None], 0.0)
        S, = memory or (None,)
        o, S = self.operator(q, k, v, gate, S, in_place=in_place)              # (B, T, H, Dv)
        if self.bidirectional:
            o = o + self.operator(q, k, v, gate, None, reverse=True)[0]
        o = self.augment(o, q, k, v, gate)
        o = F.layer_norm(o.to(accumulator(o)), o.shape[-1:], eps=1e-5)         # each head by itself
        return self.o_proj(r * o.to(v.dtype).flatten(2)), (S,)                 # (B, T, D)


# ── 3  MetaLA ────────────────────────────────────────────────────────────────────────────────────

class MetaLA(LinearMixer):
    """The MetaLA layer (paper Sec. 4, Eqs. 12-16; order of operations as in the authors' release).

        x = SiLU(conv(x))                                       short convolution, kernel 4
        q = x W_q    a = x W_a    v = x W_v    r = SiLU(x W_r + b_r)
        α = σ(a)^(1/τ)    k = 1 − α                             the decay gives the key
        S_t = diag(α_t) S_{t-1} + k_tᵀ v_t    o_t = s · q_t S_t
        o += σ((q · (w_aug ⊙ k)) v)             self-augmentation: the token's own value once more
        y = (r ⊙ norm(o)) W_o

    d_model: width D. n_heads: H. d_key, d_value: total widths H·Dk (default D/2) and H·Dv (default
    D), multiples of H. conv_size: 0 leaves convolution and SiLU out. tau: τ > 0. self_augment: the
    σ(…) term. use_key: a key of its own, k = x W_k (the paper's "w/ key" ablation). bidirectional:
    convolution centred (an odd conv_size), the operator run in both directions over the same q, a,
    v and added; for images, not for generation. 4D² parameters (4.5D² with key) + D·conv_size + D +
    D/2. The state is (conv (B, conv_size − 1, D), S (B, H, Dk, Dv)).

    Call and mask: see Mixer. a = −1e4 at a document's first token resets the state (README).
    Raises ValueError for widths that H does not divide, τ ≤ 0, a conv_size that is negative, or
    even if bidirectional.
    """
    open_gate = 1e4         # σ(1e4) = 1 exactly, in every dtype

    def __init__(self, d_model, n_heads=8, d_key=None, d_value=None, conv_size=4, tau=16.0,
                 self_augment=True, use_key=False, bidirectional=False):
        d_key = d_model // 2 if d_key is None else d_key
        d_value = d_model if d_value is None else d_value
        super().__init__(d_model, n_heads, d_key, d_value, conv_size, bidirectional)
        self.tau = positive(tau)
        self.q_proj, self.a_proj = project(d_model, d_key), project(d_model, d_key)
        self.k_proj = project(d_model, d_key) if use_key else None
        self.v_proj = project(d_model, d_value)
        self.r_proj = project(d_model, d_value, bias=True)
        self.w_aug = nn.Parameter(torch.zeros(d_key)) if self_augment else None

    def inputs(self, x):
        q, v, a = self.heads(x, self.q_proj, self.v_proj, self.a_proj)
        k, = (None,) if self.k_proj is None else self.heads(x, self.k_proj)
        return q, k, v, a, F.silu(self.r_proj(x))

    def log_decay(self, a):
        return F.logsigmoid(a.to(accumulator(a))) / self.tau                   # g = log α

    def operator(self, q, k, v, a, S, reverse=False, in_place=False):
        if k is None and runs_on_kernel(q, v):  # the kernel forms α and k in registers, from logits
            return import_kernel().metala_attention(q, a, v, self.tau, S, reverse, in_place)
        return linear_attention(q, k, v, self.log_decay(a), S, reverse=reverse)

    def augment(self, o, q, k, v, a):
        if self.w_aug is None:
            return o
        k = -torch.expm1(self.log_decay(a)) if k is None else k
        w = self.w_aug.view(self.n_heads, -1)                                  # (H, Dk)
        return o + torch.sigmoid((q * w * k).sum(-1, keepdim=True) * v)        # (B, T, H, Dv)


# ── 4  The other families, in the same letters (paper Tables 1, A1-A3) ───────────────────────────

class Linear(LinearMixer):
    """Linear attention: q = φ(x W_q), k = φ(x W_k), φ = 1 + elu, α = 1, r = 1. It adds and never
    forgets. The per-head norm stands in for the denominator Σ_s q·k_s. 4D² parameters."""
    def __init__(self, d_model, n_heads=8, conv_size=0, bidirectional=False):
        super().__init__(d_model, n_heads, d_model, d_model, conv_size, bidirectional)
        self.q_proj, self.k_proj, self.v_proj = (project(d_model, d_model) for _ in range(3))

    def inputs(self, x):
        q, k, v = self.heads(x, self.q_proj, self.k_proj, self.v_proj)
        return 1 + F.elu(q), 1 + F.elu(k), v, torch.zeros_like(q), 1.0


class RetNet(LinearMixer):
    """RetNet: α = 1 − 2^(−5−h), fixed for head h = 0 … H − 1 (its rotation left out),
    r = SiLU(x W_r). 5D² parameters."""
    def __init__(self, d_model, n_heads=8, conv_size=0, bidirectional=False):
        super().__init__(d_model, n_heads, d_model, d_model, conv_size, bidirectional)
        self.q_proj, self.k_proj, self.v_proj, self.r_proj = (
            project(d_model, d_model) for _ in range(4))

    def inputs(self, x):
        q, k, v = self.heads(x, self.q_proj, self.k_proj, self.v_proj)
        h = torch.arange(self.n_heads, device=x.device)
        g = torch.log1p(-torch.exp2(-5.0 - h))[:, None].to(q.dtype)            # (H, 1)
        return q, k, v, g.expand_as(q), F.silu(self.r_proj(x))


class GLA(LinearMixer):
    """Gated linear attention: α = σ(x W¹ W² + b)^(1/τ) with W¹W² of rank 16, a key of its own,
    r = SiLU(x W_r + b_r). d_k = D/2, d_v = D: 4D² + 25.5D parameters."""
    def __init__(self, d_model, n_heads=8, d_key=None, d_value=None, conv_size=0, tau=16.0,
                 bidirectional=False):
        d_key = d_model // 2 if d_key is None else d_key
        d_value = d_model if d_value is None else d_value
        super().__init__(d_model, n_heads, d_key, d_value, conv_size, bidirectional)
        self.q_proj, self.k_proj, self.v_proj = (
            project(d_model, d) for d in (d_key, d_key, d_value))
        self.a_proj = nn.Sequential(project(d_model, 16), project(16, d_key, bias=True))
        self.tau = positive(tau)
        self.r_proj = project(d_model, d_value, bias=True)

    def inputs(self, x):
        q, k, v, a = self.heads(x, self.q_proj, self.k_proj, self.v_proj, self.a_proj)
        return q, k, v, F.logsigmoid(a.to(accumulator(a))) / self.tau, F.silu(self.r_proj(x))


class SSM(LinearMixer):
    """A selective state space model with Mamba-2's scalar decay per head: q = x W_C, v = x,
    k = Δ·x W_B, α = exp(Δ A), Δ = softplus(x W_Δ + b), A < 0 learned per head; r = SiLU(x W_r), as
    in Mamba's block. Dk = d_state, W_B and W_C for all heads: 2D² + D(2Dk + H) + 2H parameters."""
    def __init__(self, d_model, n_heads=8, d_state=16, conv_size=0, bidirectional=False):
        super().__init__(d_model, n_heads, d_state * n_heads, d_model, conv_size, bidirectional)
        self.c_proj, self.b_proj = project(d_model, d_state), project(d_model, d_state)
        self.dt_proj = project(d_model, n_heads, bias=True)
        self.r_proj = project(d_model, d_model)
        self.log_A = nn.Parameter(torch.linspace(1.0, 16.0, n_heads).log())
        with torch.no_grad():       # time steps Δ from 0.001 to 0.1 over the heads, as Mamba starts
            self.dt_proj.bias.copy_(torch.logspace(-3, -1, n_heads).expm1().log())

    def inputs(self, x):
        dt = F.softplus(self.dt_proj(x).to(accumulator(x)))[..., None]         # (B, T, H, 1)
        q = self.c_proj(x)[:, :, None].expand(-1, -1, self.n_heads, -1)        # (B, T, H, Dk)
        k = dt.to(q.dtype) * self.b_proj(x)[:, :, None]                        # (B, T, H, Dk)
        g = (-self.log_A.exp()[:, None] * dt).expand_as(q)                     # (B, T, H, Dk)
        v = x.to(q.dtype).unflatten(-1, (self.n_heads, -1))                    # (B, T, H, D/H)
        return q, k, v, g, F.silu(self.r_proj(x))


class HGRN(LinearMixer):
    """HGRN, a gated linear RNN with input gate 1 − α: q = 1, v = SiLU(x W_v), α = σ(x W_a + b),
    r = SiLU(x W_r + b_r). The state is a vector, h_t = α_t ⊙ h_{t-1} + (1 − α_t) ⊙ v_t,
    (B, H, D/H). 4D² + 2D parameters."""
    def __init__(self, d_model, n_heads=8, conv_size=0, bidirectional=False):
        super().__init__(d_model, n_heads, d_model, d_model, conv_size, bidirectional)
        self.memory = [(n_heads, d_model // n_heads)]                          # h
        self.a_proj, self.r_proj = (project(d_model, d_model, bias=True) for _ in range(2))
        self.v_proj = project(d_model, d_model)

    def inputs(self, x):
        v, a = self.heads(x, self.v_proj, self.a_proj)
        return None, None, F.silu(v), F.logsigmoid(a.to(accumulator(a))), F.silu(self.r_proj(x))

    def operator(self, q, k, v, g, h, reverse=False, in_place=False):
        """log₂ T sweeps; after each, entry t holds the sum over twice as many steps up to t."""
        if reverse:
            o, h = self.operator(q, k, v.flip(1), g.flip(1), h)
            return o.flip(1), h
        dtype, v, alpha = v.dtype, -torch.expm1(g) * v, g.exp()                # (B, T, H, d)
        if h is not None:
            v = torch.cat([v[:, :1] + alpha[:, :1] * h[:, None], v[:, 1:]], 1)
        span = 1
        while span < v.shape[1]:
            v = torch.cat([v[:, :span], v[:, span:] + alpha[:, span:] * v[:, :-span]], 1)
            alpha = torch.cat([alpha[:, :span], alpha[:, span:] * alpha[:, :-span]], 1)
            span *= 2
        return v.to(dtype), v[:, -1]                                           # h: (B, H, d)


class Attention(Mixer):
    """Softmax attention, o_t = softmax(s · q_t Kᵀ) V, with rotary positions. Quadratic, and its
    memory is a KV cache. 4D² parameters.

    A token's position is the number of real tokens before it, so that padding and streaming are
    exact. The state is (conv, K (B, L, H, d), V, real (B, L) bool, used (B,)): L places, of which
    the first `used` hold a token, real or padding.
    """
    def __init__(self, d_model, n_heads=8, conv_size=0, bidirectional=False):
        super().__init__(d_model, n_heads, d_model, d_model, conv_size, bidirectional)
        head = d_model // n_heads
        if head % 2:
            raise ValueError(f"d_model = {d_model} and n_heads = {n_heads} make heads {head} wide: "
                             "rotary positions need an even width")
        self.memory = [("L", n_heads, head), ("L", n_heads, head), ("L",), ()]
        self.q_proj, self.k_proj, self.v_proj = (project(d_model, d_model) for _ in range(3))

    @staticmethod
    def rotate(x, position):
        """Turns the pair (x_i, x_{i+d/2}) by the angle position · 10000^(−2i/d)."""
        half = x.shape[-1] // 2
        i = torch.arange(2 * half, device=x.device)                            # (d,)
        frequency = torch.exp((i % half) * (-math.log(10000.0) / half))
        angle = (position[..., None].float() * frequency)[:, :, None]          # (B, T, 1, d)
        sin = torch.where(i < half, -angle.sin(), angle.sin())
        return x * angle.cos().to(x.dtype) + x.roll(half, -1) * sin.to(x.dtype)

    def mix(self, x, mask, memory, in_place):
        *cache, used = memory or (None,)                                       # cache: K, V, real
        q, k, v = self.heads(x, self.q_proj, self.k_proj, self.v_proj)         # (B, T, H, d)
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        at = torch.arange(x.shape[1], device=x.device)                         # places in the cache
        position = (real.cumsum(1) - 1).clamp(min=0)                           # (B, T)
        if cache:
            at = at + (used[0] if in_place else cache[0].shape[1])
            position = position + cache[2].sum(1, keepdim=True)
        q, new = self.rotate(q, position), (self.rotate(k, position), v, real)
        if in_place:                                            # into places that were reserved
            new = (old.index_copy_(1, at, z) for old, z in zip(cache, new))
        elif cache:
            new = (torch.cat([old, z], 1) for old, z in zip(cache, new))
        K, V, real = new                                                       # (B, L, …)

        allowed = None
        if cache or mask is not None:       # a key must be real and not later; and each token sees
            place = torch.arange(K.shape[1], device=x.device)   # itself, or softmax would be 0 / 0
            allowed = real[:, None] | (place == at[:, None])                   # (B, T, L)
            if not self.bidirectional:
                allowed = allowed & (place <= at[:, None])
            allowed = allowed[:, None]                                         # (B, 1, T, L)
        o = F.scaled_dot_product_attention(                                    # (B, H, T, d)
            *(z.transpose(1, 2) for z in (q, K, V)), attn_mask=allowed,
            is_causal=allowed is None and not self.bidirectional)
        y = self.o_proj(o.transpose(1, 2).flatten(2))                          # (B, T, D)
        return y, (K, V, real, (at[-1:] + 1).expand(len(x)))

    def reserve(self, state, steps):
        """A copy of the cache with `steps` empty places, for in-place steps."""
        conv, K, V, real, used = state
        K, V = (F.pad(z, (0, 0, 0, 0, 0, steps)) for z in (K, V))
        return conv, K, V, F.pad(real, (0, steps)), used


MIXERS = {"attention": Attention, "linear": Linear, "retnet": RetNet, "gla": GLA, "ssm": SSM,
          "hgrn": HGRN, "metala": MetaLA}


# ── 5  The network ───────────────────────────────────────────────────────────────────────────────

class GLU(nn.Module):
    """GLU(x) = (SiLU(x W₁) ⊙ x W₂) W₃, the channel mixer. 3 · d_model · d_ff parameters."""
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w1, self.w2 = project(d_model, d_ff), project(d_model, d_ff)
        self.w3 = project(d_ff, d_model)

    def forward(self, x):
        return self.w3(F.silu(self.w1(x)) * self.w2(x))


class Block(nn.Module):
    """x += mixer(norm(x)), x += GLU(norm(x)), dropout after each: block(x, mask, state) → x, state.

    mixer: a name in MIXERS, the options go to its class. d_ff: GLU width, by default 2.75 · d_model
    rounded up to a multiple of 8, which gives the release's 2816 at 1024. Raises ValueError for an
    unknown mixer.
    """
    def __init__(self, d_model, n_heads, mixer="metala", d_ff=None, dropout=0.0, **mixer_options):
        super().__init__()
        if mixer not in MIXERS:
            raise ValueError(f"mixer must be one of {', '.join(MIXERS)}, not {mixer!r}")
        self.mixer = MIXERS[mixer](d_model, n_heads, **mixer_options)
        self.glu = GLU(d_model, math.ceil(2.75 * d_model / 8) * 8 if d_ff is None else d_ff)
        self.dropout = nn.Dropout(dropout)
        with torch.no_grad():   # a new block says little, so that the embeddings reach every layer:
            # recall (train_mqar) is learned in half the steps, and fewer seeds get stuck
            for output in (self.mixer.o_proj, self.glu.w3):
                output.weight.mul_(0.01)

    def forward(self, x, mask=None, state=None, in_place=False):
        y, state = self.mixer(rms_norm(x), mask, state, in_place)
        x = x + self.dropout(y)
        return x + self.dropout(self.glu(rms_norm(x))), state


class Backbone(nn.Module):
    """n_layers blocks and a final norm: body(x, mask, states) → features (B, T, D), new states."""
    def __init__(self, d_model, n_layers, n_heads, mixer="metala", d_ff=None, dropout=0.0,
                 **mixer_options):
        super().__init__()
        self.blocks = nn.ModuleList(Block(d_model, n_heads, mixer, d_ff, dropout, **mixer_options)
                                    for _ in range(n_layers))

    def forward(self, x, mask=None, states=None, in_place=False):
        states = [None] * len(self.blocks) if states is None else states
        if len(states) != len(self.blocks):
            raise ValueError(f"{len(self.blocks)} layers need as many states, not {len(states)}")
        new_states = []
        for block, state in zip(self.blocks, states):
            x, state = block(x, mask, state, in_place)
            new_states.append(state)
        return rms_norm(x), new_states


class LanguageModel(nn.Module):
    """model(tokens, mask=None, states=None) → logits, states: (B, T) in, (B, T, vocab_size) out.

    tie: the head shares the embedding's weights. Other arguments: Block. Embeddings start as
    N(0, 1/d_model).
    """
    def __init__(self, vocab_size, d_model, n_layers, n_heads, mixer="metala", d_ff=None,
                 dropout=0.0, tie=False, **mixer_options):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)
        nn.init.normal_(self.embed.weight, std=d_model ** -0.5)
        self.drop = nn.Dropout(dropout)
        self.body = Backbone(d_model, n_layers, n_heads, mixer, d_ff, dropout, **mixer_options)
        self.head = project(d_model, vocab_size)
        if tie:
            self.head.weight = self.embed.weight

    def features(self, tokens, mask=None, states=None, in_place=False):
        """All but the head: normed features (B, T, D) and states, for logits at few places."""
        if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"tokens must be integers (B, T), "
                             f"not {tokens.dtype} {tuple(tokens.shape)}")
        return self.body(self.drop(self.embed(tokens)), mask, states, in_place)

    def forward(self, tokens, mask=None, states=None):
        x, states = self.features(tokens, mask, states)
        return self.head(x), states

    @torch.no_grad()
    def generate(self, prompt, max_new_tokens, temperature=1.0, top_k=None, mask=None):
        """Continues prompt (B, T0 ≥ 1) by max_new_tokens; returns both, (B, T0 + max_new_tokens).

        Prompts of unequal length are padded on the left, mask (B, T0) True at real tokens.
        temperature 0 takes the likeliest token; top_k draws among the k likeliest. Draws come from
        torch's global generator. Memory and time per token stay constant, except for attention's
        cache. Raises ValueError for arguments out of range and for a bidirectional model.
        """
        if prompt.dim() != 2 or prompt.shape[1] < 1:
            raise ValueError(f"prompt must be (B, T0 ≥ 1), not {tuple(prompt.shape)}")
        if max_new_tokens < 0 or not temperature >= 0 or (top_k is not None and top_k < 1):
            raise ValueError("max_new_tokens ≥ 0, temperature ≥ 0 and top_k ≥ 1 expected, not "
                             f"{max_new_tokens}, {temperature}, {top_k}")
        if mask is not None and not (mask.shape == prompt.shape and mask[:, -1].all()):
            raise ValueError("mask must have the prompt's shape and be True in its last column: "
                             "pad prompts on the left")
        if any(block.mixer.bidirectional for block in self.body.blocks):
            raise ValueError("a bidirectional model sees whole sequences: it cannot generate")
        training = self.training
        self.eval()
        try:
            tokens = prompt
            if max_new_tokens:
                x, states = self.features(prompt, mask)
                states = [block.mixer.reserve(state, max_new_tokens)
                          for block, state in zip(self.body.blocks, states)]
            for i in range(max_new_tokens):
                logits = self.head(x[:, -1]).float()                           # (B, vocab_size)
                if top_k is not None:
                    least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                    logits = logits.masked_fill(logits < least, -math.inf)
                if temperature == 0:
                    token = logits.argmax(-1, keepdim=True)                    # (B, 1)
                else:
                    token = torch.multinomial((logits / temperature).softmax(-1), 1)
                tokens = torch.cat([tokens, token], 1)                         # (B, T0 + i + 1)
                if i + 1 < max_new_tokens:
                    x, states = self.features(token, states=states, in_place=True)
            return tokens
        finally:
            self.train(training)

    @classmethod
    def load_official(cls, state_dict, n_heads):
        """The model of a checkpoint released by the authors; names are translated, nothing else.

        n_heads is not in the shapes: a checkpoint folder's config.json calls it
        decoder_attention_heads. Raises ValueError naming a missing, surplus or misshapen tensor, or
        widths that n_heads does not divide.
        """
        released = {"embed.": "model.embed_tokens.", "head.": "lm_head.", "w_aug": "aug_balance",
                    "body.blocks": "model.layers", "mixer": "token_mixer", "a_proj": "k_gate",
                    "r_proj": "g_proj", "o_proj": "out_proj", "conv.": "conv1d.",
                    "glu.w": "channel_mixer.l"}
        def shape(name):
            if name not in state_dict:
                raise ValueError(f"official checkpoint: tensor {name} is missing")
            return tuple(state_dict[name].shape)
        sizes = shape("model.embed_tokens.weight")                             # (vocab_size, D)
        layers = {name.split(".")[2] for name in state_dict if name.startswith("model.layers.")}
        d_ff, *_ = *shape("model.layers.0.channel_mixer.l1.weight"), 0
        *_, kernel = 0, *shape("model.layers.0.token_mixer.conv1d.weight")
        if len(sizes) != 2:
            raise ValueError(f"official checkpoint: model.embed_tokens.weight is {sizes}, "
                             "expected (vocab_size, d_model)")
        try:
            model = cls(*sizes, len(layers), n_heads, d_ff=d_ff, conv_size=kernel)
        except ValueError as error:
            raise ValueError(f"official checkpoint: {error}")
        tensors, surplus = {}, set(state_dict)
        for ours, parameter in model.named_parameters():
            theirs = functools.reduce(lambda x, names: x.replace(*names), released.items(), ours)
            if shape(theirs) != tuple(parameter.shape):
                raise ValueError(f"official checkpoint: {theirs} is {shape(theirs)}, "
                                 f"expected {tuple(parameter.shape)}")
            tensors[ours] = state_dict[theirs]
            surplus.discard(theirs)
        if surplus:
            raise ValueError(f"official checkpoint: tensor {min(surplus)} is not part of the model")
        model.load_state_dict(tensors)
        return model


# ── 6  A demo ────────────────────────────────────────────────────────────────────────────────────

def demo():
    """The forms agree; the state beside a KV cache; one map of each kind."""
    torch.manual_seed(0)
    q, a, v = (torch.randn(2, 200, 4, d, dtype=torch.float64) for d in (16, 16, 32))
    g = F.logsigmoid(a) / 16
    o, S = linear_attention(q, None, v, g, form="recurrent")
    print("One operator, three computations. Largest difference from the loop over 200 steps:")
    for form in ("parallel", "chunkwise"):
        o2, S2 = linear_attention(q, None, v, g, form=form)
        print(f"  {form:10} output {(o - o2).abs().max():.0e}, state {(S - S2).abs().max():.0e}")

    print("\nWhat one layer of width 1024 remembers of a sequence, in numbers:")
    size = sum(z.numel() for z in MetaLA(1024)(torch.randn(1, 5, 1024))[1])
    for n in (1_000, 10_000, 100_000):
        print(f"  after {n:7,} tokens   MetaLA {size:,}   KV cache {2 * 1024 * n:11,}")

    # A memory of letters: each token's query is its letter's channel. A write's key is that channel
    # in softmax; in MetaLA a write closes the channel's gate, so that α ≈ 0 and k = 1 − α ≈ 1.
    tokens = "a=3 b=5 c=1 b=8 a? d=2 b? a=7 c=4 a? c? d? b? a?".split()
    letter = F.one_hot(torch.tensor(["abcd".index(token[0]) for token in tokens]), 4).float()
    writes = torch.tensor([token[1] == "=" for token in tokens])[:, None]
    value = torch.tensor([float(token[2:] or 0) for token in tokens])
    scores = 9 * letter @ (letter * writes).T * 4 ** -0.5                      # (T, T)
    softmax = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf).softmax(-1)
    g = F.logsigmoid(torch.where(letter.bool() & writes, -100.0, 2.0)) / 16    # (T, 4)
    metala = attention_map(2 * letter[None, :, None], None, g[None, :, None])[0, 0]
    print("\nEach token writes (a=3) or reads (a?) a letter. Whom does it look at, how evenly\n"
          "(entropy in bits), and what comes out? Softmax averages all that was ever written to\n"
          "the letter; MetaLA forgets as much as it takes in, so the new replaces the old.\n")
    width = 2 * len(tokens)
    print(f"       {'softmax':{width}}  bits  out     {'MetaLA':{width}}  bits  out")
    for token, *rows in zip(tokens, softmax, metala):
        print(f"  {token:5}" + "     ".join(heat(row, value) for row in rows))


def heat(row, value):
    """A row of a map as shades, its entropy as a distribution, and what it makes of the values."""
    shades = "".join(2 * " ░▒▓█"[i] for i in (4 * row / row.max()).round().int())
    entropy = torch.special.entr(row / row.sum()).sum() / math.log(2)
    return f"{shades}  {entropy:4.1f} {row @ value:4.1f}"


if __name__ == "__main__":
    demo()
