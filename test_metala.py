"""The specification of this repository, as tests in reading order.

    python -m pytest                            everything, a few minutes on one CPU core
    python -m pytest -k "padding and metala"    those whose names have these words
    python -m pytest -x --durations=10          stop at the first failure; name the slowest

One definition (`definition` below, the recurrence written out word for word) is what every form,
layer, state and gradient of metala.py is compared with. Inputs are signed, axes have different
lengths, gradients come from random cotangents on every output, the final state included, and
section 8 plants bugs to show that the comparison can fail.
"""

import argparse
import functools
import gzip
import hashlib
import importlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import types
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which reads it then

import numpy as np
import pytest
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import kernel
import metala
import train_image
import train_lm
import train_lra
import train_mqar
from metala import MIXERS, Block, LanguageModel, MetaLA, attention_map, linear_attention

torch.set_num_threads(1)  # all is small here
torch.backends.cuda.matmul.allow_tf32 = False

# Tolerances on |x - ref| / |ref| (see `compare`), ref in float64: float64, float32, 16 bits; and a
# whole model under 16-bit autocast: one rounding per matmul, stacked
F64, F32, LOW, AUTOCAST = 1e-10, 1e-5, 1e-2, 5e-2
TAU = 16.0
SIXTEEN_BITS = [torch.bfloat16, torch.float16]
forms = pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise"])
mixers = pytest.mark.parametrize("mixer", list(MIXERS))

@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)

def definition(q, v, g, state=None, k=None):
    """S_t = diag(exp g_t) S_{t-1} + k_tᵀ v_t,  o_t = Dk^-½ q_t S_t, one token after the other."""
    k, o = -torch.expm1(g) if k is None else k, []
    S = q.new_zeros(len(q), *q.shape[2:], v.shape[-1]) if state is None else state
    for t in range(q.shape[1]):
        S = g[:, t].exp()[..., None] * S + k[:, t, :, :, None] * v[:, t, :, None, :]
        o.append((q[:, t, :, None, :] @ S)[..., 0, :] * q.shape[-1] ** -0.5)
    return torch.stack(o, 1), S

def form_of(form, chunk_size=16):
    return lambda q, v, g, state=None, k=None: linear_attention(q, k, v, g, state, form, chunk_size)

def backwards(fn):
    """fn from the last step to the first."""
    def reversed_fn(state=None, **x):
        o, S = fn(**{name: t.flip(1) for name, t in x.items()}, state=state)
        return o.flip(1), S
    return reversed_fn

def from_logits(fn, tau=TAU):
    return lambda q, a, v, state=None: fn(q=q, v=v, g=F.logsigmoid(a) / tau, state=state)

def draw(B=2, T=77, H=3, Dk=5, Dv=7, dtype=torch.float64):
    """q, k, v, g, state: signed; decays from nearly 0 to nearly 1, so that none can be ignored;
    q and v are not contiguous."""
    q, k, v = torch.randn(T, B, H, Dk), torch.randn(B, T, H, Dk), torch.randn(H, B, Dv, T)
    q, v = q.transpose(0, 1), v.permute(1, 3, 0, 2)
    g, state = F.logsigmoid(2 + 2 * torch.randn(B, T, H, Dk)), torch.randn(B, H, Dk, Dv)
    return cast(dict(q=q, k=k, v=v, g=g, state=state), dtype)

def cast(tensors, dtype):
    """All to dtype, but a state, as everywhere, to no less than float32."""
    wide = torch.promote_types(dtype, torch.float32)
    return {name: t.to(wide if name == "state" else dtype) for name, t in tensors.items()}

def run(fn, tensors, parameters={}):
    """fn(**tensors) -> (o, S, ...), and every gradient under random cotangents on all outputs, as
    {"o", "S1", ..., "dq", ...}. The cotangents are bfloat16 numbers: the same in every dtype."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    outputs = fn(**leaves)
    draws = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(o.shape, generator=draws).bfloat16().to(o) for o in outputs]
    wrt = {**leaves, **parameters}
    grads = torch.autograd.grad(outputs, list(wrt.values()), cotangents)
    result = {f"S{i}" if i else "o": o.detach() for i, o in enumerate(outputs)}
    result |= {f"d{name}": grad for name, grad in zip(wrt, grads)}
    return result | ({"q*dq": tensors["q"] * result["dq"]} if "q" in tensors else {})

def compare(got, ref, tol, floor=0.0):
    """|got - ref| <= tol * max(|ref|, floor) for every tensor; the message has name, max and ratio.

    dg = q*dq - k*dk + ... subtracts terms of the size of q*dq, which bounds |ref| below there."""
    assert got.keys() == ref.keys(), f"{sorted(got)} is not {sorted(ref)}"
    got, ref, wrong = cast(got, torch.float64), cast(ref, torch.float64), []
    for name, want in ref.items():
        assert got[name].shape == want.shape, f"{name}: {got[name].shape}, expected {want.shape}"
        size, error = max(want.norm(), floor), got[name] - want
        if name in ("dg", "da") and "q*dq" in ref:
            size = max(size, ref["q*dq"].norm() / (TAU if name == "da" else 1))
        if not error.norm() <= tol * size:  # a NaN fails as well
            wrong.append(f"{name}: max {error.abs().max():.1e}, ratio {error.norm() / size:.1e}")
    assert not wrong, f"above {tol:.0e}: " + "; ".join(wrong)

def close(got, ref, tol=F64):
    compare({"it": got}, {"it": ref}, tol)

def check(fn, tensors, reference, tol, floor=0.0):
    """fn against the reference in float64: outputs, states, gradients."""
    compare(run(fn, tensors), run(reference, cast(tensors, torch.float64)), tol, floor)

# ── 1  The recurrence by hand ────────────────────────────────────────────────────────────────────

def row(*numbers):
    """One row of numbers per token -> (1, T, 1, width)."""
    return torch.tensor(numbers, dtype=torch.float64)[None, :, None, :]

@forms
def test_two_steps_by_hand_give_these_numbers(form):
    x = dict(q=row([1, 1, 1, 1], [2, 1, 0, -1]), k=row([1, 0, 2, 0], [0, 1, 0, -1]),
             g=row([.5, .5, .25, 1], [.5, 1, .25, 1]).log())
    assert attention_map(**x).tolist() == [[[[1.5, 0.0], [0.5, 1.0]]]]
    o, S = linear_attention(**x, v=row([1, -1], [2, 4]), form=form)
    # S_1 = k_1ᵀ v_1, o_1 = ½ (3, -3): the scale is 4^-½
    # S_2 = diag(α_2) S_1 + k_2ᵀ v_2, o_2 = ½ (2 (.5, -.5) + (2, 4) + (2, 4))
    close(o, row([1.5, -1.5], [2.5, 3.5]))
    close(S[0, 0], torch.tensor([[.5, -.5], [2, 4], [.5, -.5], [-2, -4]]))

# ── 2  Equal forms: outputs, final state and all gradients ───────────────────────────────────────

@pytest.mark.parametrize("missing", ["nothing", "k", "state"])
@pytest.mark.parametrize(  # B, T, H, Dk, Dv
    "shape", [(2, 77, 3, 5, 7), (1, 1, 2, 4, 3), (3, 64, 2, 6, 9), (2, 129, 4, 3, 8)], ids=str)
@forms
def test_every_form_equals_the_definition(form, shape, missing):
    x = draw(*shape)
    x.pop(missing, None)
    check(form_of(form), x, definition, F64)

def test_the_map_times_v_is_the_output():
    q, k, v, g, _ = draw().values()
    A = attention_map(q, k, g)
    assert A.shape == (2, 3, 77, 77) and (A.triu(1) == 0).all()
    close(torch.einsum("bhts,bshv->bthv", A, v), definition(q, v, g, k=k)[0])

@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@forms
def test_sixteen_bit_inputs_keep_a_float32_state_and_give_their_own_dtype_back(form, dtype):
    x = draw(dtype=dtype)
    for g in (x["g"], x["g"].float()):  # decays in float32 are welcome
        o, S = linear_attention(**x | {"g": g}, form=form)
        assert (o.dtype, S.dtype) == (dtype, torch.float32)
    check(form_of(form), x, definition, LOW)

@forms
def test_autocast_does_not_reach_into_the_operator(form):
    fn = torch.autocast("cpu", torch.bfloat16)(form_of(form))
    check(fn, draw(dtype=torch.float32), definition, F32)

def test_auto_works_without_the_kernel_and_asking_for_it_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernel", None)  # importing it now raises ImportError
    for T, form in ((1, "recurrent"), (70, "chunkwise")):
        x = draw(T=T, dtype=torch.float32)
        compare(run(form_of("auto"), x), run(form_of(form), x), tol=0.0)
    with pytest.raises(ImportError, match="kernel.py"):
        linear_attention(**x, form="triton")

@forms
def test_reverse_runs_every_form_from_the_last_step_to_the_first(form):
    check(functools.partial(linear_attention, form=form, reverse=True), draw(),
          backwards(definition), F64)

# ── 3  Chunks are invisible; pieces equal the whole ──────────────────────────────────────────────

@pytest.mark.parametrize("chunk_size", [1, 2, 4, 16, 64, 128, 256])
def test_the_chunk_size_is_invisible(chunk_size):
    check(form_of("chunkwise", chunk_size), draw(T=131), definition, F64)

@forms
def test_pieces_with_the_state_passed_on_equal_one_call(form):
    def in_pieces(state, **x):
        outputs = []
        for piece in zip(*(t.split([1, 40, 3, 33], 1) for t in x.values())):
            o, state = form_of(form)(**dict(zip(x, piece)), state=state)
            outputs.append(o)
        return torch.cat(outputs, 1), state
    check(in_pieces, draw(), definition, F64)

# ── 4  Causality ─────────────────────────────────────────────────────────────────────────────────

@forms
def test_a_change_at_token_t_leaves_all_earlier_outputs_alone(form):
    x, other, t = draw(), draw(), 37
    changed = {name: torch.cat([x[name][:, :t], other[name][:, t:]], 1) for name in "qkvg"}
    o, o2 = (form_of(form)(**z)[0] for z in (x, x | changed))
    difference = (o - o2).abs().amax((0, 2, 3))
    assert (difference[:t] <= (0 if form == "recurrent" else 1e-12)).all()
    assert (difference[t:] > 1e-6).all()

# ── 5  Gradients ─────────────────────────────────────────────────────────────────────────────────

def test_chunkwise_passes_gradcheck():
    x = [t.requires_grad_() for t in draw(2, 6, 1, 3, 5).values()]
    assert torch.autograd.gradcheck(lambda *x: linear_attention(*x, "chunkwise", 4), x)

def test_the_analytic_gradients_of_decay_and_logit():
    # dg_t = q_t dq_t - k_t dk_t + dg_{t+1}, and behind the last token rowsum(S_T * dS_T);
    # with the key tied, k = 1 - α and g = log σ(a) / τ:  da = (dg - dk α) σ(-a) / τ
    x, a = draw(), 3 * torch.randn(2, 77, 3, 5).double()
    g = F.logsigmoid(a) / TAU
    x |= dict(g=g, k=1 - g.exp(), add=0 * x["state"])
    def separate(add, **x):
        o, S = form_of("chunkwise")(**x)
        return o, S + add  # so that the gradient of `add` is dS_T
    r = run(separate, x)
    sums = (x["q"] * r["dq"] - x["k"] * r["dk"]).flip(1).cumsum(1).flip(1)
    close(sums + (r["S1"] * r["dadd"]).sum(-1)[:, None], r["dg"])
    tied = run(from_logits(form_of("chunkwise")), dict(q=x["q"], a=a, v=x["v"], state=x["state"]))
    close((r["dg"] - r["dk"] * g.exp()) * torch.sigmoid(-a) / TAU, tied["da"])

# ── 6  Edges: every finite gate logit is legal ───────────────────────────────────────────────────

LOGITS = {  # of a standard normal n
    "N(0, 1)": lambda n: n, "N(8, 4)": lambda n: 8 + 4 * n, "N(-8, 4)": lambda n: 4 * n - 8,
    "N(-30, 10)": lambda n: 10 * n - 30, "1e4": lambda n: 0*n + 1e4, "-1e4": lambda n: 0*n - 1e4,
    "±1e4": lambda n: 1e4 * n.sign(), "mixed": lambda n: n.where(n.abs() < 0.7, 1e4 * n.sign())}
logits_and_tau = pytest.mark.parametrize(
    "logits, tau", [(logits, tau) for logits in LOGITS for tau in (16.0, 1.0)])

def draw_logits(logits="N(0, 1)", dtype=torch.float32, **sizes):
    """q, a, v, state: the gates as logits, the key one minus the decay."""
    x = draw(**sizes, dtype=torch.float32)
    a = LOGITS[logits](torch.randn_like(x["k"]))
    return cast(dict(q=x["q"], a=a, v=x["v"], state=x["state"]), dtype)

@logits_and_tau
@forms
def test_float32_is_finite_and_right_at_logits_of(logits, form, tau):
    check(from_logits(form_of(form, 64), tau), draw_logits(logits, T=131),
          from_logits(definition, tau), F32, floor=1e-2)  # some gradients are exactly 0

@pytest.mark.parametrize("g", [-torch.inf, -1e4 / TAU], ids=["α = 0", "logit -1e4"])
@pytest.mark.parametrize("missing", ["nothing", "k"])
@forms
def test_a_closed_gate_forgets_all_that_came_before_so_it_keeps_documents_apart(form, missing, g):
    x = draw(T=21)
    x.pop(missing, None)
    x["g"][:, 4] = g
    got, late = run(form_of(form), x), {name: t[:, 4:] for name, t in x.items() if name != "state"}
    assert all(t.isfinite().all() for t in got.values())
    o, S = definition(**late)
    compare(dict(o=got["o"][:, 4:], S=got["S1"]), dict(o=o, S=S), F64)

# ── 7  The kernel ────────────────────────────────────────────────────────────────────────────────
#
# On the CPU the kernels run interpreted, where 16-bit products are float32; on a GPU they run as
# they are, in every shipped configuration.

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
KERNEL = {torch.float32: 1e-4, torch.bfloat16: LOW, torch.float16: LOW}
SIZES = dict(B=2, T=150, H=3) if GPU else dict(B=1, T=40, H=1)
if GPU:
    SHAPES = [(2, T, 3, 64, 128) for T in (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 300, 2049)]
    SHAPES += [(2, 150, 3, *widths) for widths in (
        (5, 7), (24, 40), (64, 16), (16, 32), (64, 128), (100, 130), (128, 64), (128, 128),
        (200, 256), (256, 256))]
else:  # chunks are 32 steps long, but 64 in 16 bits if Dk is over 32
    SHAPES = [(1, 1, 2, 5, 7), (2, 17, 3, 5, 7), (1, 65, 2, 5, 7), (1, 64, 1, 24, 40),
              (1, 65, 1, 64, 16), (1, 33, 1, 70, 9)]
gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
dtypes = pytest.mark.parametrize("dtype", KERNEL if GPU else [torch.float32], ids=str)

def to_device(tensors):
    return {name: t.to(DEVICE) for name, t in tensors.items()}

def inputs(logits="N(0, 1)", dtype=torch.float32, **sizes):
    return to_device(draw_logits(logits, dtype, **SIZES | sizes))

def on_kernel(q, a, v, state=None, tau=TAU):
    return kernel.metala_attention(q, a, v, tau, state)

def check_kernel(x, fn=on_kernel, reference=from_logits(definition)):
    check(fn, x, reference, KERNEL[x["q"].dtype], floor=1e-2)

@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", KERNEL, ids=str)
def test_the_kernel_equals_the_definition_at_lengths_and_widths(dtype, shape):
    check_kernel(inputs(dtype=dtype, **dict(zip(("B", "T", "H", "Dk", "Dv"), shape))))

@logits_and_tau
@dtypes
def test_the_kernel_is_finite_and_right_at_logits_of(logits, tau, dtype):
    check_kernel(inputs(logits, dtype), functools.partial(on_kernel, tau=tau),
                 from_logits(definition, tau))

@pytest.mark.parametrize("name", ["q", "a", "v"])
def test_a_nan_reaches_what_depends_on_it_and_no_other_head_or_sequence(name):
    x = inputs(B=2, T=40, H=2)
    x[name][0, 5, 1, 2] = torch.nan
    for tensor in x.values():
        tensor.requires_grad_()
    o, S = on_kernel(**x)
    assert o[0, 5, 1].isnan().any() and S[0, 1].isnan().any() == (name != "q")
    assert all(y.isfinite().all() for y in (o[1], S[1], o[0, :, 0], S[0, 0]))
    (o.sum() + S.sum()).backward()
    assert all(x[n].grad[0, :, 1].isnan().any() for n in "qav" if n != name)
    assert name != "a" or x["a"].grad[0, 5, 1, 2].isnan()

def test_gates_that_are_all_nan_leave_what_came_before_right():
    x = inputs(T=96, Dk=16)  # a tile without padding
    x["a"][0, 20] = torch.nan
    o, _ = on_kernel(**x)
    close(o[:1, :20], from_logits(definition)(**cast(x, torch.float64))[0][:1, :20], 1e-4)
    assert o[0, 20:].isnan().any()
    x["k"], x["g"] = x["q"].cos(), -x.pop("a").abs()
    assert run(form_of("triton"), x)["dq"][0, 20:].isnan().any()

@pytest.mark.parametrize("scale", [0.02, 1.0, 20.0], ids=["slow", "fast", "closed"])
@pytest.mark.parametrize("missing", ["nothing", "k"])
@dtypes
def test_the_kernel_computes_the_general_form(missing, scale, dtype):
    x = to_device(draw(**SIZES, dtype=dtype))
    x["g"] = scale * x["g"].float()
    x.pop(missing, None)
    check_kernel(x, form_of("triton"), definition)

@pytest.mark.parametrize("T", [1, 64, 150] if GPU else [1, 64, 70])
@pytest.mark.parametrize(
    "widths", [(24, 40), (64, 128), (128, 64)] if GPU else [(5, 7), (24, 40)], ids=str)
@pytest.mark.parametrize("logits", ["N(0, 1)", "mixed"])
@dtypes
def test_the_kernel_runs_backwards_in_time(dtype, logits, widths, T):
    x = inputs(logits, dtype, **SIZES | dict(T=T, Dk=widths[0], Dv=widths[1]))
    check_kernel(x, functools.partial(kernel.metala_attention, reverse=True),
                 backwards(from_logits(definition)))
    x["k"], x["g"] = x["q"].cos(), x.pop("a").float().clamp(max=-0.01)
    check_kernel(x, functools.partial(kernel.linear_attention, reverse=True),
                 backwards(definition))

@pytest.mark.parametrize("T, programs, segments", [(160, 1, 1), (160, 2, 3), (577, 256, 19)])
def test_the_number_of_segments_is_invisible(T, programs, segments, monkeypatch):
    plans = []
    monkeypatch.setattr(kernel, "PROGRAMS", programs)
    monkeypatch.setattr(
        kernel, "cached_plan", lambda *a: plans.append(kernel.Plan(*a)) or plans[-1])
    check(on_kernel, inputs(B=1, T=T, H=1), from_logits(definition), 1e-4 if GPU else F32)
    assert [plan.n_seg for plan in plans] == [segments] * 2  # forward, backward

@pytest.mark.parametrize("programs, reverse", [(1, False), (256, True)], ids=str)
@dtypes
def test_states_that_are_not_kept_are_found_again_bit_by_bit(dtype, programs, reverse, monkeypatch):
    monkeypatch.setattr(kernel, "PROGRAMS", programs)  # 1: one segment, 256: as many as chunks
    monkeypatch.setattr(kernel, "KEEP_STATES", True)
    monkeypatch.setattr(kernel, "cached_plan", kernel.Plan)
    x, kept = inputs("mixed", dtype, B=1, T=300 if GPU else 80, H=1), []
    def call(q, a, v, state):
        o, S = kernel.metala_attention(q, a, v, TAU, state, reverse)
        kept.append([t.shape for t in o.grad_fn.saved_tensors if t is not None])
        return o, S
    with_states = run(call, x)
    monkeypatch.setattr(kernel, "KEEP_STATES", False)
    compare(run(call, x), with_states, tol=0.0)
    assert kept[0] != kept[1]

@pytest.mark.parametrize("i", [0, 1], ids=["o", "S"])
def test_the_kernel_takes_no_state_and_the_gradient_of_one_output_alone(i):
    x = inputs()
    del x["state"]
    def only(fn):
        return lambda **x: (fn(**x)[i], x["q"].sum())  # S does not depend on q
    check_kernel(x, only(on_kernel), only(from_logits(definition)))

@torch.no_grad()
def test_a_step_of_the_kernel_equals_a_call_and_only_in_place_overwrites_the_state():
    x = inputs(T=1)
    S, before = x["state"], x["state"].clone()
    o, S1 = from_logits(definition)(**cast(x, torch.float64))
    for in_place in (False, True):
        got = kernel.metala_attention(x["q"], x["a"], x["v"], TAU, S, in_place=in_place)
        compare(dict(o=got[0], S=got[1]), dict(o=o, S=S1), F32)
        assert (got[1] is S) == in_place and torch.equal(S, before) != in_place

def test_the_kernel_is_deterministic_and_reads_nothing_that_it_did_not_write(monkeypatch):
    x, empty = inputs("mixed"), torch.empty
    first_time = run(on_kernel, x)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    compare(run(on_kernel, x), first_time, tol=0.0)

def operator(q, a, v, state):
    return kernel.forward_op(q, None, v, a, state, TAU, False, True)[:2]

def shifted(fn):
    """fn, but all that it takes and gives, forward and backward, starts at an odd element, where
    a version that was compiled for multiples of 16 bytes must not be launched."""
    def shift(t):
        t = torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)
        assert t.is_contiguous() and t.data_ptr() % 16
        return t
    return lambda **x: [shift(t) for t in fn(**{name: shift(t) for name, t in x.items()})]

WAYS = {"the operator that torch.compile sees": operator,
        "compiled code without a graph break":
            lambda **x: torch.compile(on_kernel, fullgraph=True, backend="aot_eager")(**x),
        "tensors that are not aligned": shifted(on_kernel)}

@pytest.mark.parametrize("way", WAYS)
@dtypes
def test_the_kernel_gives_the_numbers_of_an_eager_call_through(way, dtype):
    x = inputs(T=33, dtype=dtype)
    eager = run(on_kernel, x)
    compare(run(WAYS[way], x), eager, 1e-6)

def test_the_kernel_is_three_good_custom_operators():
    x = {name: t.contiguous().requires_grad_() for name, t in inputs(T=5).items()}
    q, a, v, S = x.values()
    for state, keep in ((None, True), (S, False)):
        torch.library.opcheck(kernel.forward_op, (q, None, v, a, state, TAU, False, keep))
    q, a, v, S = (t.detach() for t in (q, a, v, S))
    for keep in (False, True):
        *_, states = kernel.forward_op(q, a, v, -a.abs(), S, 0.0, False, keep)
        torch.library.opcheck(kernel.backward_op,
                              (v, S, q, a, v, -a.abs(), S, states, 0.0, False, True))
    q, a, v = (t[:, :1].contiguous() for t in (q, a, v))
    for state, out in ((None, S.clone()), (S, S), (S, S.clone())):
        torch.library.opcheck(kernel.step_op, (q, None, v, a, state, out, TAU))

@pytest.mark.parametrize("fn", [on_kernel, operator])
def test_a_second_derivative_is_an_error(fn):
    x = {name: t.requires_grad_() for name, t in inputs(T=5).items()}
    dq, = torch.autograd.grad(fn(**x)[0].sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.grad(dq.sum() + x["v"].sum(), x["v"])

def test_what_autograd_cannot_know_is_an_error_rather_than_a_wrong_gradient():
    x = inputs(T=5)
    with torch.autograd.forward_ad.dual_level():
        q = torch.autograd.forward_ad.make_dual(x["q"], x["q"])
        with pytest.raises(RuntimeError, match="forward mode AD"):
            on_kernel(**x | {"q": q})
    q, a, v, S = (t.contiguous().requires_grad_() for t in x.values())
    w, S = S.clone().detach().requires_grad_(), S.detach()
    y = (w * S).sum()
    with torch.no_grad():
        kernel.metala_attention(q[:, :1], a[:, :1], v[:, :1], TAU, S, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()

@pytest.mark.parametrize("scale", [1e-10, 1e10])
@dtypes
def test_the_kernel_keeps_its_precision_for_values_of_the_size_of(scale, dtype):
    x = inputs("N(-8, 4)", torch.float32 if dtype == torch.float16 else dtype)
    x = {name: t if name == "a" else scale * t for name, t in x.items()}
    check(on_kernel, x, from_logits(definition), KERNEL[x["q"].dtype])

@pytest.mark.parametrize("how, precision", [("set_float32_matmul_precision", "high"),
                                            ("fp32_precision", "tf32")])
def test_the_kernel_obeys_both_of_torchs_switches_for_tf32(how, precision, monkeypatch):
    plans, matmul = [], torch.backends.cuda.matmul
    monkeypatch.setattr(
        kernel, "cached_plan", lambda *a: plans.append(kernel.Plan(*a)) or plans[-1])
    try:
        if how == "fp32_precision":
            matmul.fp32_precision = precision
        else:
            torch.set_float32_matmul_precision(precision)
        with torch.no_grad():
            on_kernel(**inputs())
    finally:
        torch.set_float32_matmul_precision("highest")
    assert plans[0].tiles["PRECISION"] == "tf32"

@gpu
def test_tf32_is_used_exactly_when_torch_allows_it(monkeypatch):
    x = inputs(B=1, T=300, H=2, Dk=64, Dv=128)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    got = run(on_kernel, x)
    monkeypatch.undo()
    want = run(from_logits(definition), cast(x, torch.float64))
    compare(got, want, 2e-3, floor=1e-2)
    with pytest.raises(AssertionError):
        compare(got, want, F32)

@gpu
def test_more_than_65535_heads_and_more_than_2_to_the_31_elements():
    check_kernel(inputs(B=350, T=3, H=200, dtype=torch.bfloat16))
    T, tail = 2 ** 20 + 100, 600  # · 32 heads · 64 > 2^31; the gates forget all but the tail
    q, a, v = (torch.randn(1, T, 32, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    a = a - 4
    o, S = on_kernel(q, a, v)
    o2, S2 = on_kernel(q[:, -tail:], a[:, -tail:], v[:, -tail:])
    compare(dict(o=o[:, -100:], S=S), dict(o=o2[:, -100:], S=S2), LOW)

@gpu
@mixers
def test_every_mixer_gives_on_the_gpu_what_it_gives_on_the_cpu(mixer):
    model, tokens = LanguageModel(50, 64, 2, 2, mixer), torch.randint(50, (3, 90))
    def results():
        x = tokens.to(model.head.weight.device)
        y, text = model(x)[0], model.generate(x[:, :7], 9, temperature=0)
        grads = torch.autograd.grad(y.square().mean(), list(model.parameters()))
        return y.cpu(), text.cpu(), {i: grad.cpu() for i, grad in enumerate(grads)}
    want, text, grads = results()
    model.to(DEVICE)
    got, same_text, same_grads = results()
    close(got, want, 1e-3)
    compare(same_grads, grads, 1e-2)
    assert torch.equal(same_text, text)

@gpu
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_a_compiled_model_under_autocast_trains_on_the_gpu(dtype):
    model = LanguageModel(50, 128, 2, 2).to(DEVICE)
    tokens = torch.randint(50, (2, 100), device=DEVICE)
    want, _ = model(tokens)
    with torch.autocast("cuda", dtype):
        got, _ = torch.compile(model, fullgraph=True)(tokens)
    got.float().square().mean().backward()
    close(got.float(), want, AUTOCAST)
    assert all(p.grad.isfinite().all() for p in model.parameters())

# ── 8  Sensitivity: planted bugs must fail, even at the loosest tolerance of an operator ─────────

BUGS = {  # what the bug makes of the inputs, or, from x, of the outputs (o, S)
    "nothing": {},
    "one key channel has the wrong sign": dict(k=lambda k: k * torch.tensor([1, 1, -1, 1, 1])),
    "two heads of q are swapped": dict(q=lambda q: q[:, :, [1, 0, 2]]),
    "the sequences share one v": dict(v=lambda v: v[:1].expand_as(v)),
    "one token does not decay": dict(g=lambda g: g.index_fill(1, torch.tensor(10), 0.0)),
    "the logits have the wrong sign": dict(g=lambda g: torch.log(-torch.expm1(g))),
    "the state is ignored": dict(state=lambda S: 0 * S),
    "the state's gradient is cut": dict(state=lambda S: S.detach() + 0 * S),
    "the decay's gradient is a token late": dict(
        g=lambda g: (g - g.roll(1, 1)).detach() + g.roll(1, 1)),
    "the diagonal is dropped": lambda x, o, S: (
        o - 5 ** -0.5 * (x["q"] * x["k"]).sum(-1, keepdim=True) * x["v"], S),
    "the scale is missing": lambda x, o, S: (o * 5 ** 0.5, S),
    "the final state decays once more": lambda x, o, S: (o, S * x["g"][:, -1].exp()[..., None]),
    "one output is not a number": lambda x, o, S: (o.where(o < o.max(), torch.nan), S),
}

@pytest.mark.parametrize("bug", BUGS)
def test_the_comparison_catches(bug):
    def broken(**x):
        if callable(BUGS[bug]):
            return BUGS[bug](x, *definition(**x))
        return definition(**{name: BUGS[bug].get(name, lambda t: t)(t) for name, t in x.items()})
    x = draw(T=21)
    if bug == "nothing":
        return check(broken, x, definition, F64)
    with pytest.raises(AssertionError, match="above 1e-02"):
        check(broken, x, definition, LOW, floor=1e-2)

# ── 9  The paper's claims (Definition 4.1, Propositions A2.1-A2.3), by construction ──────────────

def test_c0_the_work_grows_linearly_with_time():
    def work(form, T):
        with FlopCounterMode(display=False) as count:
            form_of(form, 64)(**draw(1, T, 1, 4, 6, torch.float32))
        return count.get_total_flops()
    assert work("chunkwise", 1024) == 4 * work("chunkwise", 256) > 0
    assert work("parallel", 1024) > 12 * work("parallel", 256)

def write(alpha, k=None, form="recurrent"):
    """The rows of the state hold v_1 ... v_5; one token arrives with this decay and key."""
    rows, v = torch.randn(1, 1, 5, 7).double(), torch.randn(1, 1, 1, 7).double()
    q, k = row([1] * 5), None if k is None else row(k)
    _, S = linear_attention(q, k, v, row(alpha).log(), rows, form)
    return rows[0, 0], v[0, 0, 0], S[0, 0]

@forms
def test_c1_a_token_can_overwrite_one_row_exactly_and_leave_the_others(form):
    rows, v, S = write(alpha=[0, 1, 1, 1, 1], form=form)  # k = 1 - α = [1, 0, 0, 0, 0]
    assert torch.equal(S, torch.cat([v[None], rows[1:]]))

@pytest.mark.parametrize("alpha, k, want", [
    ([1] * 5, [1, 0, 0, 0, 0], lambda rows, v: [rows[:1] + v, rows[1:]]),  # only adds
    ([.5] * 5, [1, 0, 0, 0, 0], lambda rows, v: [rows[:1] / 2 + v, rows[1:] / 2]),
    ([0, 1, 1, 1, 1], [1] * 5, lambda rows, v: [v[None], rows[1:] + v])],  # the paper's proof
    ids=["without decay", "with a fixed decay", "with a key of one"])
def test_c1_is_out_of_reach(alpha, k, want):
    rows, v, S = write(alpha, k)
    close(S, torch.cat(want(rows, v)))

def softmax_map(n):
    later = torch.ones(n, n).triu(1).bool()
    return torch.randn(n, n).double().masked_fill(later, -torch.inf).softmax(-1), later

@forms
def test_c2_any_causal_softmax_map_is_reproduced_with_one_channel_per_row(form):
    (P, later), v = softmax_map(9), torch.randn(1, 9, 1, 5).double()
    sums = P.cumsum(-1)  # row t: S_1 ... S_n, α_j = S_{j-1} / S_j up to t and 1 after
    alpha = torch.where(later, 1.0, (sums - P) / sums)
    alpha[:, 0] = 0
    q, g = 3 * torch.eye(9).double()[None, :, None], alpha.T.log()[None, :, None]  # 3 = √Dk
    close(linear_attention(q, None, v, g, form=form)[0][0, :, 0], P @ v[0, :, 0])
    close(attention_map(q, None, g.clamp(min=-20))[0, 0], P, 1e-8)  # -20 stands for α = 0

@pytest.mark.parametrize("decay", [1.0, 0.9, 0.5, 0.1])
def test_c3_with_keys_any_fixed_decay_gives_the_same_map_so_one_of_the_two_is_redundant(decay):
    (P, _), t = softmax_map(9), torch.arange(9).double()
    k = (P / decay ** (t[:, None] - t).clamp(min=0)).T[None, :, None]
    q, g = 3 * torch.eye(9).double()[None, :, None], torch.full_like(k, decay).log()
    close(attention_map(q, k, g)[0, 0], P)
    assert k.max() >= P[-1, 0] / decay ** 8  # what a fixed decay costs: keys without bound

# ── 10  The layer, and every other mixer through the same interface ──────────────────────────────

D, H, V = 24, 3, 13  # model width, heads (MetaLA's are 4 and 8 wide), vocabulary
KINDS = [{"conv_size": 0}, {"conv_size": 4}, {"conv_size": 3, "bidirectional": True}]

def scatter(module):
    """Random weights everywhere (self-augmentation starts at zero), large enough to be heard."""
    for p in module.parameters():
        nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return module.double()

def layer_of(mixer="metala", **options):
    layer = scatter(MIXERS[mixer](D, H, **options))
    return layer, dict(layer.named_parameters())

def sequence(B, T):
    return torch.randn(B, T, D).double()

def padded(side, lengths, T):
    """(B, T), True at real tokens; with padding in the middle, they are at both ends."""
    n, t = torch.tensor(lengths)[:, None], torch.arange(T)
    ahead = {"left": 0 * n, "middle": n // 2, "right": n}[side]  # of the padding
    return (t < ahead) | (t >= T - n + ahead)

def stream(module, x, pieces, state=None):
    outputs = []
    for piece in x.split(pieces, 1):
        y, state = module(piece, None, state)
        outputs.append(y)
    return torch.cat(outputs, 1), state

def seen(y, state, layer, more):
    """y, and what can be seen of the state: the y of more tokens after it, and its tensors
    (but for attention's cache, which holds padding too)."""
    if layer.bidirectional:
        return y,
    return y, layer(more, state=state)[0], *(() if type(layer) == MIXERS["attention"] else state)

def written_out(mixer, w, x, heads=H, tau=TAU, both=False):
    """A layer's y: the mixer's row of the paper's Table 1 on the layer's weights w."""
    def project(name, heads=heads):
        return (x @ w[name + ".weight"].T + w.get(name + ".bias", 0)).unflatten(-1, (heads, -1))
    if "conv.weight" in w:
        size, T = w["conv.weight"].shape[-1], x.shape[1]
        before = size // 2 if both else size - 1
        x = F.pad(x, (0, 0, before, size - 1 - before))
        x = F.silu(sum(x[:, j:j + T] * w["conv.weight"][:, 0, j] for j in range(size)))
    q, a, k, v, r = (project(f"{n}_proj") if f"{n}_proj.weight" in w else None for n in "qakvr")
    if mixer == "attention":  # rotary positions are complex phases
        t, half = torch.arange(x.shape[1]), x.shape[-1] // heads // 2
        turn = torch.exp(1j * t[:, None, None] * 10000.0 ** (-torch.arange(half) / half))
        q, k = (torch.complex(*z.chunk(2, -1)) * turn for z in (q, k))
        A = torch.einsum("bthc,bshc->bhts", q, k.conj()).real * (2 * half) ** -0.5
        A = A if both else A.masked_fill(t > t[:, None], -torch.inf)
        return torch.einsum("bhts,bshv->bthv", A.softmax(-1), v).flatten(2) @ w["o_proj.weight"].T
    if mixer == "linear":
        q, k, alpha = 1 + F.elu(q), 1 + F.elu(k), torch.ones_like(q)
    if mixer == "retnet":
        alpha = (1 - 2.0 ** (-5 - torch.arange(heads)))[:, None].expand_as(q)
    if mixer == "gla":
        a = x @ w["a_proj.0.weight"].T @ w["a_proj.1.weight"].T + w["a_proj.1.bias"]
        alpha = torch.sigmoid(a).unflatten(-1, (heads, -1)) ** (1 / 16)
    if mixer == "ssm":
        step, v = F.softplus(project("dt_proj")), x.unflatten(-1, (heads, -1))
        q, k = project("c_proj", 1).expand(-1, -1, heads, -1), step * project("b_proj", 1)
        alpha = torch.exp(-w["log_A"].exp()[:, None] * step).expand_as(k)
    if mixer == "hgrn":  # every channel is a head of its own with q = 1
        alpha, v = (z.flatten(2)[..., None] for z in (torch.sigmoid(a), F.silu(v)))
        q = torch.ones_like(v)
    if mixer == "metala":
        alpha = torch.sigmoid(a) ** (1 / tau)
    k = 1 - alpha if k is None else k
    o, _ = definition(q, v, alpha.log(), k=k)
    if both:
        o = o + definition(*(z.flip(1) for z in (q, v, alpha.log())), k=k.flip(1))[0].flip(1)
    if "w_aug" in w:
        scalar = (q * w["w_aug"].unflatten(0, (heads, -1)) * k).sum(-1, keepdim=True)
        o = o + torch.sigmoid(scalar * v)
    o = o.reshape(*x.shape[:2], heads, -1)
    o = F.layer_norm(o, o.shape[-1:], eps=1e-5) * (1 if r is None else F.silu(r))
    return o.flatten(2) @ w["o_proj.weight"].T

@pytest.mark.parametrize("mixer, options", [*(("metala", options) for options in (
    {}, {"conv_size": 2}, {"conv_size": 0}, {"self_augment": False}, {"use_key": True},
    {"tau": 4.0}, {"d_key": 6, "d_value": 18}, {"bidirectional": True, "conv_size": 5},
    {"bidirectional": True, "conv_size": 0, "use_key": True})),
    *((mixer, options) for mixer in MIXERS if mixer != "metala" for options in KINDS)], ids=str)
def test_the_layer_equals_its_transcription_whatever_is_switched(mixer, options):
    (layer, own), x = layer_of(mixer, **options), {"x": sequence(2, 21)}
    def transcription(x):
        return written_out(mixer, own, x, H, options.get("tau", TAU), layer.bidirectional),
    compare(run(lambda x: layer(x)[:1], x, own), run(transcription, x, own),
            F64 if mixer == "metala" else F32)

def test_self_augmentation_starts_silent():
    # w_aug = 0 adds σ(0) = ½ everywhere, and the norm without bias removes it
    layer, plain, x = MetaLA(D, H), MetaLA(D, H, self_augment=False), torch.randn(2, 21, D)
    assert plain.load_state_dict(layer.state_dict(), strict=False).unexpected_keys == ["w_aug"]
    close(layer(x)[0], plain(x)[0], F32)

def test_a_fresh_narrow_layer_is_heard():
    # with the release's N(0, 0.02) o would be far below the norm's eps at this width
    assert MetaLA(64, 2)(torch.randn(4, 32, 64))[0].std() > 0.05

def test_metalas_state_is_the_convolutions_window_and_one_matrix_per_head():
    x, (layer, _) = sequence(2, 11), layer_of()
    conv, S = layer(x)[1]
    close(conv, x[:, -3:])
    assert S.shape == (2, H, 4, 8) and S.dtype == torch.float64
    assert layer.bfloat16()(x.bfloat16())[1][1].dtype == torch.float32

@pytest.mark.parametrize("pieces", [[4, 1, 6], 1], ids=str)
@pytest.mark.parametrize("options", KINDS[:2], ids=str)
@mixers
def test_the_whole_equals_pieces_equals_token_by_token_gradients_included(mixer, options, pieces):
    (layer, own), x, more = layer_of(mixer, **options), {"x": sequence(2, 11)}, sequence(2, 3)
    compare(run(lambda x: seen(*stream(layer, x, pieces), layer, more), x, own),
            run(lambda x: seen(*layer(x), layer, more), x, own), F64)

@mixers
def test_a_state_is_never_modified_and_can_be_reordered_detached_and_used_twice(mixer):
    (layer, _), x, more = layer_of(mixer, conv_size=4), sequence(3, 7), sequence(4, 2)
    index, state = torch.tensor([2, 0, 0, 1]), layer(x)[1]
    before = [t.clone() for t in state]
    for _ in range(2):
        y, _ = layer(more, state=[t[index].detach() for t in state])
        close(y, layer(more, state=layer(x[index])[1])[0])
        layer(more[:3], state=state)
        assert all(torch.equal(t, kept) for t, kept in zip(state, before, strict=True))

@pytest.mark.parametrize("side, fresh", [  # fresh: without a state from before
    ("left", True), ("middle", True), ("right", True), ("right", False)])
@pytest.mark.parametrize("options", KINDS, ids=str)
@mixers
def test_padding_is_as_if_it_were_not_there_whatever_it_holds(mixer, options, side, fresh):
    (layer, own), x, more = layer_of(mixer, **options), sequence(4, 9), sequence(4, 2)
    mask, first = padded(side, [4, 9, 1, 0], 9), layer(sequence(4, 5))[1] or ()
    state = None if fresh else [t.detach() for t in first] or None
    start = state or [torch.zeros_like(t) for t in first]
    def together(x):
        return seen(*layer(x, mask, state), layer, more)
    def row_by_row(x, cut):  # padded, or with the padding cut out and put in again as zeros
        rows = []
        for i in range(4):
            one, at, end = slice(i, i + 1), mask[i].nonzero()[:, 0], [t[i:i + 1] for t in start]
            if not cut:
                y, end = layer(x[one], mask[one], end or None)
            else:
                y, end = layer(x[one, at], None, end or None) if len(at) else (x[one, at], end)
                y = y.new_zeros(1, 9, D).index_copy(1, at, y)
            rows.append(seen(y, end, layer, more[one]))
        return [torch.cat(parts) for parts in zip(*rows)]
    got = run(together, {"x": x}, own)
    junk = torch.where(mask[..., None], x, 1e30 * sequence(4, 9))
    compare(run(together, {"x": junk}, own), got, tol=0.0)
    for cut in [False] if side == "middle" else [False, True]:
        compare(got, run(lambda x: row_by_row(x, cut), {"x": x}, own), F64)
    assert (got["dx"][~mask] == 0).all() and (got["dx"][mask] != 0).any(-1).all()
    for i, t in enumerate(start):  # the row of padding alone keeps its state to the bit
        assert mixer == "attention" or torch.equal(got[f"S{i + 2}"][3], t[3])

@mixers
def test_each_mixer_has_the_parameters_of_its_formula(mixer):
    d, heads, low, n = 48, 3, 16, 16  # n: the SSM's state size, low: the rank of GLA's gate
    formula = {"metala": 4 * d * d + d + d // 2,  # q, a: d·d/2 each; v, r, o: d·d; b_r; w_aug
               "attention": 4 * d * d, "linear": 4 * d * d,  # q, k, v, o
               "retnet": 5 * d * d,  # and r
               "gla": 4 * d * d + d + low * d + low * d // 2 + d // 2,
               "ssm": 2 * d * d + 2 * n * d + d * heads + 2 * heads,  # r, o; B, C; Δ with bias; A
               "hgrn": 4 * d * d + 2 * d}[mixer]  # v, a, r, o; two biases
    def size(**options):
        return sum(p.numel() for p in MIXERS[mixer](d, heads, **options).parameters())
    assert size() == formula + (4 * d if mixer == "metala" else 0)  # its convolution by default
    assert size(conv_size=0) == formula and size(conv_size=5) == formula + 5 * d
    assert size(conv_size=0, bidirectional=True) == formula  # one set of projections
    if mixer == "metala":
        assert size(conv_size=0, use_key=True) == formula + d * d // 2
        assert size(conv_size=0, self_augment=False) == formula - d // 2

def test_the_ssm_starts_with_the_time_steps_and_decays_of_mamba():
    ssm, x = MIXERS["ssm"](48, 3), torch.zeros(1, 1, 48)
    _, _, _, g, _ = ssm.inputs(x)                                            # (1, 1, H, Dk)
    step, A = torch.tensor([0.001, 0.01, 0.1]), torch.tensor([1, 8.5, 16])
    close(g[0, 0], (-step * A)[:, None].expand_as(g[0, 0]), F32)

# ── 11  The language model, its blocks and backbone inside ───────────────────────────────────────

def model_of(mixer="metala", **options):
    return scatter(LanguageModel(V, D, 2, H, mixer=mixer, **options))

@pytest.mark.parametrize("lengths", [[6, 6, 6], [3, 6, 1]], ids=str)
@mixers
def test_each_prompt_of_a_batch_is_read_and_greedily_continued_as_if_alone(mixer, lengths):
    model, prompt, mask = model_of(mixer), torch.randint(V, (3, 6)), padded("left", lengths, 6)
    mask = None if mask.all() else mask
    read, tokens = model(prompt, mask)[0], model.generate(prompt, 5, temperature=0, mask=mask)
    assert tokens.shape == (3, 11) and torch.equal(tokens[:, :6], prompt)
    for i, n in enumerate(lengths):
        text = tokens[i:i + 1, 6 - n:]
        logits, _ = model(text)
        close(read[i, 6 - n:], logits[0, :n])
        close(stream(model, text, [n, 4, 1])[0], logits)
        assert torch.equal(logits[:, n - 1:-1].argmax(-1), text[:, n:])

def test_sampling_uses_the_global_generator_and_top_k_restricts_it():
    model, prompt = model_of(), torch.randint(V, (8, 3))
    def sample(seed, **options):
        torch.manual_seed(seed)
        return model.generate(prompt, 6, **options)
    assert torch.equal(sample(1), sample(1)) and not torch.equal(sample(1), sample(2))
    assert torch.equal(sample(1, top_k=1), model.generate(prompt, 6, temperature=0))
    tokens = sample(1, temperature=5.0, top_k=3)
    best = model(tokens)[0][:, 2:-1].topk(3).indices
    assert (best == tokens[:, 3:, None]).any(-1).all()
    assert len(sample(1, temperature=100.0)[:, 3:].unique()) > 10  # nearly uniform over 13
    assert torch.equal(sample(1, top_k=10**6), sample(1))

def test_generation_leaves_dropout_out_and_restores_the_training_flag():
    model, prompt = model_of(dropout=0.5), torch.randint(V, (2, 5))
    quiet = model.eval().generate(prompt, 6, temperature=0)
    assert not model.training
    model.train()
    assert torch.equal(model.generate(prompt, 6, temperature=0), quiet)
    assert all(module.training for module in model.modules())
    assert not torch.equal(model(prompt)[0], model(prompt)[0])  # and here it acts

@pytest.mark.parametrize("vocabulary, d, heads, tie, expected", [
    (50432, 1024, 8, True, 360_058_880), (50432, 2048, 16, True, 1_336_680_448),
    (50432, 2048, 16, False, 1_439_965_184), (32000, 1024, 8, False, 373_952_512)])
def test_the_papers_sizes_are_360M_1_34B_1_44B_and_the_releases_374M(
        vocabulary, d, heads, tie, expected):
    with torch.device("meta"):
        model = LanguageModel(vocabulary, d, 24, heads, tie=tie)
    assert sum(p.numel() for p in model.parameters()) == expected

RELEASED = {  # a layer's tensors in the released checkpoints: our name, and the shape at d = 16
    "q_proj.weight": ("q_proj.weight", (8, 16)), "k_gate.weight": ("a_proj.weight", (8, 16)),
    "v_proj.weight": ("v_proj.weight", (16, 16)), "out_proj.weight": ("o_proj.weight", (16, 16)),
    "g_proj.weight": ("r_proj.weight", (16, 16)), "g_proj.bias": ("r_proj.bias", (16,)),
    "aug_balance": ("w_aug", (8,)), "conv1d.weight": ("conv.weight", (16, 1, 4))}

def released_weights():
    shapes = {"model.embed_tokens.weight": (V, 16), "lm_head.weight": (V, 16)}
    for i in (0, 1):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.token_mixer.{name}": shape for name, (_, shape) in RELEASED.items()}
        shapes |= {f"{layer}.channel_mixer.l{j}.weight": shape
                   for j, shape in ((1, (20, 16)), (2, (20, 16)), (3, (16, 20)))}
    return {name: torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}

def released_model(w, tokens, heads):
    def norm(x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    x = w["model.embed_tokens.weight"][tokens]
    for layer in ("model.layers.0", "model.layers.1"):
        mixer = {ours: w[f"{layer}.token_mixer.{name}"] for name, (ours, _) in RELEASED.items()}
        x = x + written_out("metala", mixer, norm(x), heads)
        l1, l2, l3 = (w[f"{layer}.channel_mixer.l{j}.weight"].T for j in (1, 2, 3))
        x = x + (F.silu(norm(x) @ l1) * (norm(x) @ l2)) @ l3
    return norm(x) @ w["lm_head.weight"].T

def test_load_official_gives_the_logits_of_the_released_design():
    w, tokens = released_weights(), torch.randint(V, (2, 21))
    logits, _ = LanguageModel.load_official(w, n_heads=4)(tokens)
    close(logits, released_model(cast(w, torch.float64), tokens, 4), F32)
    with pytest.raises(AssertionError):  # the heads are not in the shapes, but they matter
        close(LanguageModel.load_official(w, n_heads=2)(tokens)[0], logits, LOW)

@pytest.mark.parametrize("name", list(released_weights()))
def test_load_official_names_a_missing_surplus_or_misshapen_tensor(name):
    w = released_weights()
    tensor, rest = w[name], {other: t for other, t in w.items() if other != name}
    longer = {name: torch.cat([tensor, tensor[:1]])}  # the one that it contradicts is named
    for bad, words in ((w | {name + "_scale": torch.ones(1)}, re.escape(name + "_scale")),
                       (rest, re.escape(name)), (rest | {name: tensor[None]}, re.escape(name)),
                       (rest | longer, r"model\.|lm_head")):
        with pytest.raises(ValueError, match=words):
            LanguageModel.load_official(bad, n_heads=4)

def training_step(model, tokens, dtype=torch.float32):
    """Logits, gradients and the first layer's memory S in a training step under autocast."""
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        logits, states = model(tokens)
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return {"logits": logits.detach(), "S": states[0][1].detach(), **dict(enumerate(grads))}

@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@mixers
def test_autocast_stays_near_float32(mixer, dtype):
    model, tokens = model_of(mixer).float(), torch.randint(V, (2, 21))
    got = training_step(model, tokens, dtype)
    assert all(t.isfinite().all() and t.any() for t in got.values())
    close(got["logits"], model(tokens)[0], AUTOCAST)
    assert mixer == "attention" or got["S"].dtype == torch.float32

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@mixers
def test_the_model_compiles_without_a_graph_break(mixer, dtype):
    torch.compiler.reset()
    model, tokens = model_of(mixer).float(), torch.randint(V, (2, 21))
    backend = "aot_eager" if mixer == "metala" else "eager"  # traces the backward pass as well
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    compare(training_step(compiled, tokens, dtype), training_step(model, tokens, dtype),
            F32 if dtype == torch.float32 else AUTOCAST)

# ── 12  Bad arguments: one clear error that repeats what was given ───────────────────────────────

def operator_on(form="chunkwise", chunk_size=16, **changes):
    return linear_attention(**draw(2, 5, 3, 4, 6, torch.float32) | changes, form=form,
                            chunk_size=chunk_size)

BAD = {  # call: what the message must mention
    "MetaLA(24, 4, d_key=6)": "d_key.*6",
    "MetaLA(24, 0)": "n_heads.*0",
    "MetaLA(24, 4, conv_size=-1)": "conv_size.*-1",
    "MetaLA(24, 4, bidirectional=True)": "conv_size.*4",
    "MetaLA(24, 4, tau=0.0)": "tau.*0",
    "MIXERS['gla'](24, 4, tau=-1.0)": "tau.*-1",
    "kernel.metala_attention(*3 * [zeros(1, 2, 3, 4)], tau=1e-7)": "tau.*1e-07",
    "kernel.linear_attention(*4 * [zeros(1, 1, 2**21 + 1, 4)])": "2097153",
    "Block(24, 4, mixer='mamba')": "mamba",
    "operator_on('quadratic')": "quadratic",
    "operator_on('triton', **draw(2, 5, 3, 4, 6))": "float64",
    "operator_on(chunk_size=0)": "chunk_size.*0",
    "operator_on(chunk_size=48)": "chunk_size.*48",
    "operator_on(q=zeros(2, 5, 4))": r"q.*\(2, 5, 4\)",
    "operator_on(q=zeros(2, 0, 3, 4))": r"q.*\(2, 0, 3, 4\)",
    "operator_on(**draw(0, 5, 3, 4, 6))": r"q.*\(0, 5, 3, 4\)",
    "operator_on(v=zeros(2, 5, 3, 0))": r"v.*\(2, 5, 3, 0\)",
    "operator_on(q=zeros(2, 5, 3, 4).long())": "q.*int64",
    "operator_on(k=zeros(1, 5, 3, 4))": r"k.*\(1, 5, 3, 4\)",  # no broadcasting
    "operator_on(g=zeros(2, 5, 3, 1))": r"g.*\(2, 5, 3, 1\)",
    "operator_on(state=zeros(2, 3, 6, 4))": r"state.*\(2, 3, 6, 4\)",
    "operator_on(v=zeros(2, 5, 3, 6).double())": "v.*float64",
    "operator_on(g=zeros(2, 5, 3, 4).half())": "g.*float16",
    "attention_map(*[zeros(2, 5, 4)] * 3)": r"\(2, 5, 4\)",
    "layer(zeros(2, 24))": r"\(2, 24\)",
    "layer(zeros(2, 5, 25))": r"\(2, 5, 25\)",
    "layer(x.double())": "float64.*float32",
    "layer(x, mask=zeros(2, 4).bool())": r"mask.*\(2, 4\)",
    "layer(x, mask=zeros(2, 5))": "mask.*float32",
    "layer(x, state=layer(zeros(3, 5, 24))[1])": "state.*3",
    "layer(x, state=MIXERS['retnet'](24, 3)(x)[1])": "state",
    "both_ways(x, state=layer(x)[1])": "bidirectional",
    "model(prompt, states=model(prompt)[1][:1])": "2.*1",
    "model(prompt[0])": r"\(3,\)",
    "model(prompt.float())": "float32",
    "model.generate(prompt[:, :0], 2)": r"\(2, 0\)",
    "model.generate(prompt, -2)": "-2",
    "model.generate(prompt, 2, temperature=-1.0)": "-1",
    "model.generate(prompt, 2, top_k=0)": "top_k.*0",
    "model.generate(prompt, 2, mask=padded('right', [1, 3], 3))": "left",
    "LanguageModel(13, 24, 2, 3, bidirectional=True, conv_size=3).generate(prompt, 2)":
        "bidirectional",
    "LanguageModel.load_official(released_weights(), 3)": "n_heads = 3",
}

@pytest.mark.parametrize("call", BAD)
def test_one_clear_error_for(call):
    names = dict(zeros=torch.zeros, x=torch.zeros(2, 5, 24), layer=MetaLA(24, 3),
                 both_ways=MetaLA(24, 3, conv_size=3, bidirectional=True),
                 model=LanguageModel(13, 24, 2, 3), prompt=torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises((ValueError, TypeError), match=BAD[call]) as caught:
        eval(call, globals() | names)
    assert len(str(caught.value)) < 300

def test_auto_leaves_what_the_kernel_does_not_serve_to_pytorch(monkeypatch):
    monkeypatch.setattr(metala, "HAS_KERNEL", True)
    x, wider = (types.SimpleNamespace(is_cuda=True, dtype=torch.float16, device="cuda",
                                      shape=(2, 5, 3, width)) for width in (256, 257))
    for major, served in (7, False), (8, True), (12, True):
        monkeypatch.setattr(torch.cuda, "get_device_properties",
                            lambda device: types.SimpleNamespace(major=major))
        assert metala.runs_on_kernel(x, x) == served and not metala.runs_on_kernel(x, wider)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not metala.runs_on_kernel(x, x)

# ── 13  The scripts ──────────────────────────────────────────────────────────────────────────────

LRA_DATA = tempfile.TemporaryDirectory()  # the data that its toy runs share

# Each script's flags for 7 steps of 8 sequences, evaluated every second step
TOY = {"train_mqar": "--length 16 --pairs 2 --vocab 16 --test-examples 24 --until 2 --dropout 0.2 "
                     "--layers 1 --d-model 16 --heads 2 --batch 8 --steps 7 --warmup 2 "
                     "--eval-every 2",
       "train_lm": "--length 16 --val-windows 12 --d-ff 24 --layers 1 --d-model 16 --heads 2 "
                   "--batch 8 --steps 7 --warmup 2 --eval-every 2",
       "train_lra": f"--data-dir {LRA_DATA.name} --length 24 --shortest 3 --examples 400 "
                    "--dropout 0.2 --layers 1 --d-model 16 --heads 2 --batch 8 --steps 7 "
                    "--warmup 2 --eval-every 2",
       "train_image": "--size 16 --examples 64 --test-examples 24 --augment shift --flip "
                      "--cutout 0.3 --dropout 0.2 --layers 1 --d-model 16 --heads 2 --batch 8 "
                      "--steps 7 --warmup 2 --eval-every 2"}
scripts = pytest.mark.parametrize("script", TOY)
IMAGES = train_image.PRESETS["tiny"] | dict(size=32, d_model=16, heads=2, layers=1, mixer="metala",
                                            conv=3, option=[])

def start(script, out, flags="", resume=False):
    argv = [*TOY[script].split(), "--device", "cpu", "--out", str(out), *flags.split()]
    return importlib.import_module(script).main(argv + ["--resume"] * resume)

def after_step(monkeypatch, n, action):
    """Call action(model's parameters) once the n-th optimiser step from now on is done."""
    step, done = torch.optim.AdamW.step, []
    def counted(self, *args, **kwargs):
        step(self, *args, **kwargs)
        done.append(None)
        if len(done) == n:
            action([p for group in self.param_groups for p in group["params"]])
    monkeypatch.setattr(torch.optim.AdamW, "step", counted)

def saved(out):
    return torch.load(out / "checkpoint.pt", weights_only=True)

def log_of(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]

@scripts
def test_a_run_returns_its_metrics_and_leaves_log_and_checkpoint(script, tmp_path):
    result, (head, *lines) = start(script, tmp_path), log_of(tmp_path)
    assert result["steps"] == saved(tmp_path)["step"] == 7 and result["seconds"] > 0
    assert head["args"]["batch"] == 8 and head["torch"] == torch.__version__
    assert [line["step"] for line in lines] == [0, 2, 4, 6, 7]
    assert lines[-1]["loss"] == result["loss"]

MODULES = [train_mqar, train_lm, train_lra, train_image]

def test_the_scripts_share_text_and_so_what_is_tested_of_one_holds_for_all():
    for name in ("learning_rate", "check_finite", "at_least", "name_and_value", "autocast"):
        assert len({inspect.getsource(getattr(module, name)) for module in MODULES}) == 1, name

def test_the_learning_rate_climbs_a_line_and_comes_down_half_a_cosine():
    args = argparse.Namespace(lr=2.0, warmup=4, steps=12)
    rates = torch.tensor([train_lm.learning_rate(step, args) for step in range(13)])
    close(rates[:5], torch.tensor([0.5, 1.0, 1.5, 2.0, 2.0]))
    close(rates[4:], 1 + (torch.arange(9) * torch.pi / 8).cos(), F32)

@scripts
def test_every_step_has_its_learning_rate_clipped_gradients_and_dropout_which_rests_in_evaluation(
        script, tmp_path, monkeypatch):
    rates, norms, modes, step = [], [], set(), torch.optim.AdamW.step
    clip, forward = torch.nn.utils.clip_grad_norm_, Block.forward
    def spy_step(self, *args, **kwargs):
        rates.append({float(group["lr"]) for group in self.param_groups})
        return step(self, *args, **kwargs)
    def spy_forward(self, *args, **kwargs):
        modes.add((torch.is_grad_enabled(), self.training))
        return forward(self, *args, **kwargs)
    monkeypatch.setattr(torch.optim.AdamW, "step", spy_step)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_",
                        lambda p, most: norms.append(most) or clip(p, most))
    monkeypatch.setattr(Block, "forward", spy_forward)
    start(script, tmp_path)
    args = argparse.Namespace(**log_of(tmp_path)[0]["args"])
    close(torch.tensor([max(rate) for rate in rates]),
          torch.tensor([train_lm.learning_rate(i, args) for i in range(7)]), F32)
    assert norms == 7 * [1.0] and {len(rate) for rate in rates} == {1}
    assert modes == {(True, True), (False, False)}

@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.SCRIPT)
def test_matrices_and_filters_decay_and_nothing_else(module):
    model = LanguageModel(11, 16, 1, 2)
    if module is train_image:
        model = train_image.Classifier(argparse.Namespace(**IMAGES), 5)
    optimizer = module.make_optimizer(
        model, argparse.Namespace(lr=1.0, weight_decay=0.3, beta2=0.9))
    decay, plain = optimizer.param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in decay["params"]} == {
        name for name, p in model.named_parameters()
        if p.ndim > 1 and name not in ("embed.weight", "position")}
    assert (decay["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    beta2 = {train_lm: 0.9, train_image: 0.98}.get(module, 0.999)
    assert decay["betas"] == plain["betas"] == (0.9, beta2)
    assert len(decay["params"]) + len(plain["params"]) == len(names)

@pytest.mark.parametrize("number, n", [  # every second step is evaluated anyway
    (signal.SIGINT, 3), (signal.SIGINT, 4), (signal.SIGTERM, 3)], ids=str)
@scripts
def test_a_run_stopped_by_a_signal_and_resumed_equals_an_uninterrupted_one(
        script, number, n, tmp_path, monkeypatch):
    whole, out = start(script, tmp_path / "whole"), tmp_path / "stopped"
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        after_step(patch, n, lambda _: signal.raise_signal(number))
        start(script, out)
    assert stop.value.code == 128 + number and saved(out)["step"] == n
    planned = [line for line in log_of(out)[1:] if line["step"] % 2 == 0]
    assert saved(out)["best"] == planned[-1]["best"]  # a signal selects no model
    resumed = start(script, out, resume=True)
    assert all(resumed[name] == whole[name] for name in whole
               if name not in ("seconds", "images_per_second", "tokens_per_second"))
    one, other = saved(tmp_path / "whole"), saved(out)
    for kind in ("model", "optimizer"):
        torch.testing.assert_close(other[kind], one[kind], rtol=0, atol=0)
    assert [(line["step"], line["loss"]) for line in log_of(out)[1:] if line["step"] != 3] == \
        [(line["step"], line["loss"]) for line in log_of(tmp_path / "whole")[1:]]

@scripts
def test_a_gpu_without_bfloat16_is_named_before_anything_is_written(script, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    with pytest.raises(SystemExit, match="bfloat16.*float16"):
        start(script, tmp_path / "out", "--device cuda --dtype bfloat16")
    assert not (tmp_path / "out").exists()

@scripts
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(
        script, tmp_path, monkeypatch):
    after_step(monkeypatch, 3, lambda parameters: [p.detach().fill_(torch.nan) for p in parameters])
    with pytest.raises(SystemExit, match="nan"):
        start(script, tmp_path)
    assert saved(tmp_path)["step"] == 2
    assert all(t.isfinite().all() for t in saved(tmp_path)["model"].values())

@scripts
def test_an_earlier_run_is_moved_aside_and_a_running_one_is_left_in_peace(script, tmp_path):
    fcntl = pytest.importorskip("fcntl")
    start(script, tmp_path)
    first = (tmp_path / "checkpoint.pt").read_bytes()
    start(script, tmp_path, "--seed 1")
    assert [path.read_bytes() for path in tmp_path.glob("checkpoint.old.*")] == [first]
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="another run"):
            start(script, tmp_path)

MISTAKES = {"--resume --lr 0.5": "--lr.*0.5", "--resume --batch 9": "--batch.*9",
            "--heads 3": "n_heads = 3", "--mixer mamba": "mamba", "--batch none": "none",
            "--d-model 0": "--d-model.*0", "--lr nan": "nan", "--preset huge": "huge",
            "--wat": "--wat", "--option tau": "tau is not NAME=VALUE", "--option no=1": "no",
            "--device tpu": "tpu", "--out /dev/null/x": "/dev/null"}
OWN_MISTAKES = {"train_mqar": {
    "--pairs 5": "20.*16", "--pairs 4 --vocab 8": "vocab.*8", "--task needle --pairs 8": "17.*16",
    "--task copy --pairs 9": "18.*16", "--task phonebook --pairs 3": "21.*16",
    "--examples 4": "4", "--tau 0": "tau", "--test-lengths 7": "test-lengths.*7"},
    "train_lm": {
        "--data no.txt": "no.txt", "--length 100000000": "100000000", "--beta2 1": "beta2.*1",
        "--micro-batch 3": "8.*3", "--preset 360m": "train.bin", "--sample a": "best.pt",
        "--sample a --model no.pt": "no.pt", "--eval-length 1k,x": "eval-length.*1k,x"},
    "train_lra": {
        "--preset pathx --length 99": "99.*1024", "--preset text --generate": "text",
        "--conv x": "x", "--shortest 23": "24.*23", "--examples 100 --batch 200": "200.*96",
        "--bench foo": "foo",
        "--conv 4 --bidirectional": "conv_size.*4", "--preset image --no-generate": "cifar-10"},
    "train_image": {
        "--batch 100": "100.*64", "--size 18": "18.*4", "--size 18 --patch 3": "two.*3",
        "--data folder --data-dir no": "no.*train/CLASS", "--predict a.png": "checkpoint.pt",
        "--data mnist --data-dir /dev/null": "/dev/null/mnist", "--conv 4": "conv_size.*4",
        "--test-sizes 2": "2.*4"}}

@pytest.mark.parametrize("script, flags, words", [
    (script, flags, words) for script in TOY
    for flags, words in (MISTAKES | OWN_MISTAKES.get(script, {})).items()])
def test_a_mistake_on_the_command_line_is_one_line_that_repeats_it(script, flags, words, tmp_path):
    if "--resume" in flags:
        start(script, tmp_path)
    with pytest.raises(SystemExit, match=words) as stop:
        start(script, tmp_path, flags)
    assert stop.value.code.startswith(script + ": ") and "\n" not in stop.value.code

@scripts
def test_a_missing_truncated_or_foreign_checkpoint_is_one_clear_line(script, tmp_path):
    path = tmp_path / "checkpoint.pt"
    def resume(words):
        with pytest.raises(SystemExit, match=words) as stop:
            start(script, tmp_path, resume=True)
        assert "checkpoint.pt" in stop.value.code and "\n" not in stop.value.code
    resume("no ")
    start(script, tmp_path)
    whole, saved_weights = path.read_bytes(), saved(tmp_path)["model"]
    path.write_bytes(whole[:len(whole) // 2])
    resume("damaged")
    weights = max(saved_weights.values(), key=torch.numel).numpy().tobytes()
    path.write_bytes(whole.replace(weights, weights[:-1] + bytes([weights[-1] ^ 1])))
    resume("damaged")
    torch.save({"weights": torch.zeros(3)}, path)
    resume("not a checkpoint")

# train_mqar.py

def examples(n, T, N, vocab=64, filler="zero", task="mqar"):
    return train_mqar.TASKS[task](np.random.default_rng(0), n, T, N, vocab, filler)

def test_recall_is_tested_on_examples_of_its_own_at_the_lengths_asked(tmp_path, monkeypatch):
    make, made = train_mqar.make_examples, set()
    monkeypatch.setattr(train_mqar, "make_examples", lambda args, device, stream, index, n, T: (
        made.add((stream, T)) or make(args, device, stream, index, n, T)))
    start("train_mqar", tmp_path, "--test-lengths 20 24")
    assert made == {(train_mqar.TRAIN, 16), *((train_mqar.TEST, T) for T in (16, 20, 24))}

@pytest.mark.parametrize("filler", ["zero", "random"])
@pytest.mark.parametrize("T, N, vocab", [(32, 8, 18), (64, 5, 64), (20, 1, 8)])
def test_mqar_is_pairs_then_each_key_once_more_with_its_value_as_the_answer(T, N, vocab, filler):
    x = examples(300, T, N, vocab, filler)
    keys, values, i = x.tokens[:, :2 * N:2], x.tokens[:, 1:2 * N:2], np.arange(300)[:, None]
    assert x.tokens.shape == (300, T) and x.where.shape == x.answer.shape == (300, N)
    assert ((1 <= keys) & (keys < vocab // 2)).all()
    assert ((vocab // 2 <= values) & (values < vocab)).all()
    for drawn in (keys, values, x.where):
        assert (np.diff(np.sort(drawn, 1)) > 0).all()  # without replacement
    assert (x.where % 2 == 0).all() and (x.where >= 2 * N).all() and (x.where < T).all()
    assert (x.tokens[i, x.where] == keys).all() and (x.answer == values).all()
    assert (x.distance == x.where - 2 * np.arange(N)).all()
    other = np.ones_like(x.tokens, bool)
    other[:, :2 * N] = other[i, x.where] = False
    rest = x.tokens[other]
    assert (rest == 0).all() if filler == "zero" else len(np.unique(rest)) > vocab // 2

def test_mqar_draws_its_gaps_by_the_power_law_and_its_keys_evenly():
    x = examples(40_000, 24, 2, vocab=8)
    weight = (1 + np.arange(10)) ** -0.99
    share = np.bincount((x.where[:, 0] - 4) // 2, minlength=10) / 40_000
    assert np.abs(share - weight / weight.sum()).max() < 0.01
    keys = x.tokens[:, 0] * 4 + x.tokens[:, 2]  # 6 ordered pairs out of 1, 2, 3
    assert np.abs(np.bincount(keys)[[6, 7, 9, 11, 13, 14]] / 40_000 - 1 / 6).max() < 0.01

def test_needle_hides_a_passkey_after_a_marker_and_asks_for_it_at_the_end():
    x, i = examples(300, 32, 3, task="needle", filler="random"), np.arange(300)[:, None]
    hidden = x.where + 1 - x.distance
    assert (x.where == [29, 30, 31]).all() and (x.tokens[i, hidden] == x.answer).all()
    assert (x.tokens[:, 30:] == x.answer[:, :2]).all() and (x.answer >= 32).all()
    assert (x.tokens[i, hidden[:, :1] - 1] == 1).all() and (x.tokens[:, 29] == 2).all()
    assert set(np.unique(hidden[:, 0] - 1)) == set(range(26))  # every depth

@pytest.mark.parametrize("filler", ["zero", "random"])
def test_copy_scatters_its_tokens_and_asks_for_all_in_order(filler):
    x, i = examples(300, 32, 3, task="copy", filler=filler), np.arange(300)[:, None]
    places = x.where + 1 - x.distance
    assert (x.where == [29, 30, 31]).all() and (np.diff(places) > 0).all()
    assert (x.tokens[i, places] == x.answer).all() and (x.answer >= 32).all()
    assert (x.tokens[:, 29] == 2).all() and (x.tokens[:, 30:] == x.answer[:, :2]).all()
    assert (x.tokens[:, :29] >= 32).sum() == 900  # and nothing else looks like content
    assert set(np.unique(places)) == set(range(29))  # every place

@pytest.mark.parametrize("filler", ["zero", "random"])
def test_phonebook_asks_for_the_numbers_of_four_names(filler):
    x, i = examples(300, 64, 6, task="phonebook", filler=filler), np.arange(300)[:, None]
    answer, given = x.answer.reshape(300, 4, 3), x.tokens[:, 52:].reshape(300, 4, 3)
    places = (x.where + 1 - x.distance).reshape(300, 4, 3)
    assert (x.where == np.arange(52, 64)).all() and (given[:, :, 1:] == answer[:, :, :2]).all()
    assert (x.tokens[i, places.reshape(300, 12)] == x.answer).all() and (x.answer >= 32).all()
    assert (np.diff(places) == 1).all()  # a number is in one piece, and follows its name
    assert (x.tokens[i, places[:, :, 0] - 1] == given[:, :, 0]).all()
    directory = np.sort(x.tokens[:, :52])  # filler, then 6 names, then 18 tokens of numbers
    assert (directory[:, :28] < 16).all() and (directory[:, 34:] >= 32).all()
    assert ((16 <= directory[:, 28:34]) & (directory[:, 28:34] < 32)).all()

tasks = pytest.mark.parametrize("task", train_mqar.TASKS)

@tasks
def test_examples_depend_on_the_seed_alone_and_training_never_meets_the_test(task):
    def made(seed, stream, index):
        args = argparse.Namespace(seed=seed, task=task, pairs=4, vocab=64, filler="zero")
        return train_mqar.make_examples(args, "cpu", stream, index, 500, 32).tokens
    train = made(0, train_mqar.TRAIN, 0)
    assert torch.equal(train, made(0, train_mqar.TRAIN, 0))
    for other in ((0, train_mqar.TRAIN, 1), (1, train_mqar.TRAIN, 0), (0, train_mqar.TEST, 0)):
        assert (train[:, None] != made(*other)).any(-1).all()

@tasks
def test_recall_is_learned_at_toy_size(task, tmp_path):
    result = start("train_mqar", tmp_path, f"--task {task} --d-model 32 --layers 2 --batch 64 "
                   "--steps 300 --lr 1e-2 --warmup 20 --eval-every 25 --dropout 0 --until 0.9 "
                   "--test-examples 200" + " --option use_key=true" * (task == "phonebook"))
    assert result["accuracy"] >= 0.9

@pytest.mark.parametrize("flags", [*(f"--mixer {mixer} --show-map" for mixer in MIXERS),
                                   "--dtype bfloat16", "--dtype float16", "--examples 20",
                                   "--no-tie --conv 0", "--tau 4 --option self_augment=false"])
def test_mqar_runs_with(flags, tmp_path):
    result = start("train_mqar", tmp_path, flags + " --steps 3")
    assert 0 <= result["accuracy"] <= 1 and np.isfinite(result["loss"]) and result["steps"] == 3

def test_more_test_lengths_are_in_the_metrics_and_in_the_log(tmp_path):
    result = start("train_mqar", tmp_path, "--test-lengths 32 64")
    assert all(0 <= result[name] <= 1 == (log_of(tmp_path)[-1][name] == result[name])
               for name in ("accuracy_32", "accuracy_64"))

def test_the_sweep_returns_the_best_of_its_runs(tmp_path):
    result = start("train_mqar", tmp_path, "--steps 3 --sweep 1e-3 1e-2")
    best = {lr: max(line["accuracy"] for line in log_of(tmp_path / f"lr-{lr:g}")[1:])
            for lr in (1e-3, 1e-2)}
    assert result["best"] == best[result["lr"]] == max(best.values())

def test_a_hopeless_run_is_given_up_after_the_patience_and_the_sweep_goes_on(tmp_path, capsys):
    start("train_mqar", tmp_path, "--patience 2 --sweep 1e-9 1e-8")
    assert capsys.readouterr().out.count("4 steps: given up") == 2

@mixers
def test_the_map_that_is_shown_is_what_the_mixer_weighs_its_values_with(mixer):
    layer, x, seen = MIXERS[mixer](12, 2, conv_size=2), torch.randn(1, 9, 12), []
    A = train_mqar.layer_map(layer, x)
    assert A.shape == (2, 9, 9) and (A.triu(1) == 0).all()
    z, _ = layer.conv(x, None, None)
    if mixer == "attention":
        o = (A @ layer.v_proj(z).view(9, 2, 6).transpose(0, 1)).transpose(0, 1)
        close(layer.o_proj(o.flatten(1)), layer(x)[0][0], F32)
    else:
        q, k, v, gate, _ = layer.inputs(z)
        v = torch.randn(1, 9, 2, 1).expand(-1, -1, -1, 6) if mixer == "hgrn" else v
        o = layer.operator(q, k, v, gate, None)[0][0].transpose(0, 1)
        o = o.sum(-1, keepdim=True) * 6 ** -0.5 if mixer == "hgrn" else o  # of its channels' maps
        close(A @ v[0, :, :, :o.shape[-1]].transpose(0, 1), o, F32)

@pytest.mark.parametrize("A, entropy, gap", [
    (torch.eye(4), 0, 0), (torch.eye(4)[[0] * 4], 0, 1), (torch.ones(4, 4), 2, 1),
    (torch.tensor([3.0, -1, 2, -5]).diag(), 0, 0)],
    ids=["each at itself", "all at the first", "at all alike", "whatever scale and sign"])
def test_entropy_and_gap_of_a_map_that_looks(A, entropy, gap):
    measured = train_mqar.concentration(A[None], torch.arange(4))
    torch.testing.assert_close(torch.tensor(measured), torch.tensor([[entropy], [gap]]).float())

def test_a_finished_runs_map_is_shown_without_training_on(tmp_path):
    start("train_mqar", tmp_path)
    before = saved(tmp_path)["model"]
    result = start("train_mqar", tmp_path, "--show-map", resume=True)
    torch.testing.assert_close(saved(tmp_path)["model"], before, rtol=0, atol=0)
    (entropy,), (gap,) = result["entropy"], result["gap"]  # one layer of two heads
    assert all(0 <= bits <= 4 for bits in entropy) and all(0 <= x <= 1 for x in gap)
    assert log_of(tmp_path)[-1]["entropy"] == [list(entropy)]

def test_embeddings_for_a_gpu_are_embeddings():
    weight = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, 7, (3, 11)) * (torch.rand(3, 11) < 0.5)
    def of(fn):
        x = fn(weight, tokens)
        return dict(x=x.detach(), dw=torch.autograd.grad(x.sin().sum(), weight)[0])
    compare(of(train_mqar.embed), of(lambda w, tokens: w[tokens]), F64)

@gpu
@pytest.mark.parametrize("flags", ["", "--mixer attention", "--dtype bfloat16"])
@pytest.mark.parametrize("script", ["train_mqar", "train_lra", "train_image"])
def test_a_recorded_step_trains_as_a_plain_one(script, flags, tmp_path):
    flags += f" --device cuda --dropout 0 --steps 40 --eval-every 10 --out {tmp_path}"
    plain, recorded = (importlib.import_module(script).main(
        [*TOY[script].split(), *flags.split(), *more]) for more in ([], ["--compile"]))
    assert plain["loss"] == pytest.approx(recorded["loss"], rel=0.1 if "bf" in flags else 1e-2)

# train_lra.py

WORKED = {"[MAX 4 3 [MIN 2 3 ] 1 0 ]": 4, "[SM 9 8 7 [MED 1 2 ] ]": 5, "[MED 1 4 9 2 ]": 3,
          "[MED 8 [SM 9 9 9 ] 3 [MAX 0 2 ] 9 ]": 7, "[MIN [SM 5 5 ] [MED 9 8 ] 7 ]": 0,
          "[SM [MAX 2 9 ] [MED 3 6 ] [MIN 7 [SM 8 6 ] ] 5 ]": 2}
LISTOPS = "Source\tTarget\r\n" + "".join(f"{source}\t{y}\r\n" for source, y in WORKED.items())
RED = b"\x01" + 1024 * b"\xff" + 2048 * b"\0"  # a CIFAR-10 record
AAN = b"1.0\t7\t8\tb'a \"b'\tb'c'\n0.0\t7\t9\tb'a'\tb'd'\n"
FILES = {  # a tiny set in each official layout
    "listops": {f"basic_{split}.tsv": LISTOPS.encode() for split in ("train", "val", "test")},
    "text": {f"{split}/{name}/{i:02}_{rating}.txt": f"{name} {i}é<br />".encode() for i in range(12)
             for split in ("train", "test") for name, rating in (("neg", 2), ("pos", 9))},
    "retrieval": {f"new_aan_pairs.{split}.tsv": AAN for split in ("train", "eval", "test")},
    "image": {name: RED + b"\x09" + bytes(3072) for name in train_lra.TASKS["image"].files}}

def lay_out(task, data_dir, files={}):
    for name, content in (FILES[task] | files).items():
        path = data_dir / train_lra.TASKS[task].folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

def lra(task, data_dir, flags=""):
    length = "" if task == "image" else "--length 64"
    return train_lra.main(f"--preset {task} {length} --data-dir {data_dir} --layers 1 --d-model 8 "
                          f"--heads 2 --steps 2 --batch 2 --device cpu --out {data_dir}/run "
                          f"{flags}".split())

def parsed(task, tmp_path, files={}):
    """The rows (split, label, documents) of a tiny set."""
    lay_out(task, tmp_path, files)
    args, kind = argparse.Namespace(length=64, data_dir=tmp_path), train_lra.TASKS[task]
    return [(split, float(label), *documents)
            for _, split, label, documents in kind.read(train_lra.find_files(args, kind), args)]

def value_of(tokens):
    text = " ".join(list(train_lra.TOKEN)[token] for token in tokens)
    while "[" in text:  # the innermost brackets become their values
        text = re.sub(r"(\[\w+) ([\d ]+) \]", lambda m: str(train_lra.OPERATORS[m[1]](
            [int(digit) for digit in m[2].split()])), text)
    return int(text)

def test_generated_listops_follow_the_published_rules():
    args = argparse.Namespace(shortest=500, length=2000)
    trees = train_lra.listops_block(args, 0)
    assert all(500 < len(tree) < 2000 and value_of(tree) == value for value, tree in trees)
    assert np.abs(np.bincount([tree[0] for _, tree in trees])[10:] / 200 - 0.25).max() < 0.1
    assert abs(np.mean([len(tree) for _, tree in trees]) - 1040) < 100  # of 6,000 trees
    assert trees == train_lra.listops_block(args, 0)

def test_official_files_are_read_as_they_are_and_listops_have_the_worked_answers(tmp_path):
    printed = b"Source\tTarget\n( ( ( ( ( [MED 1 ) 4 ) 9 ) 2 ) ] )\t3\n"
    rows = parsed("listops", tmp_path, {"basic_val.tsv": printed})
    assert [row[0] for row in rows] == 6 * [0] + [1] + 6 * [2] and rows[6][1:] == rows[2][1:]
    assert all(value_of(document) == label for _, label, document in rows)
    text = parsed("text", tmp_path)
    assert [row[:2] for row in text[10:14]] == [(0, 0), (1, 0), (0, 1), (0, 1)] and len(text) == 48
    assert text[2] == (0, 0, "neg 2é<br />".encode())
    assert text[47] == (2, 1, "pos 11é<br />".encode())
    assert parsed("retrieval", tmp_path)[2] == (1, 1, b"b'a \"b'", b"b'c'")
    image = parsed("image", tmp_path)
    assert image[:2] == [(0, 1, 1024 * b"\x4c"), (0, 9, bytes(1024))]
    assert [row[0] for row in image] == 9 * [0] + [1] + 2 * [2]

@pytest.mark.parametrize("task, name, content, words", [
    ("listops", "basic_val.tsv", "Source\tTarget\n[MAX 1 ]\t1\n[MAX 1 2 ]\n",
     "val.tsv:3: Source TAB"),
    ("listops", "basic_val.tsv", "Source\tTarget\n[AVG 1 2 ]\t2\n", r"val.tsv:2: .*\[0\] tokens"),
    ("listops", "basic_val.tsv", "Source\tTarget\n[MAX 1 2 ]\t12\n", "val.tsv:2: .*label 12"),
    ("text", "test/pos/03_9.txt", "", r"03_9.txt: .*\[0\] tokens"),
    ("retrieval", "new_aan_pairs.eval.tsv", "1\t2\t3\ttext\n",
     r"eval.tsv:1: .*id, text, text .*\[4\]"),
    ("image", "data_batch_3.bin", 3072 * "x", "data_batch_3.bin: 3072 bytes"),
    ("image", "test_batch.bin", "\x17" + 3072 * "x", "test_batch.bin: record 0: .*label 23")])
def test_a_bad_file_is_one_line_with_its_place(task, name, content, words, tmp_path):
    lay_out(task, tmp_path, {name: content.encode()})
    with pytest.raises(SystemExit, match=words) as stop:
        lra(task, tmp_path)
    assert "\n" not in stop.value.code and not list((tmp_path / "cache").iterdir())

@pytest.mark.parametrize("task", FILES)
def test_missing_data_are_named_with_their_source_then_parsed_once(task, tmp_path, monkeypatch):
    url, size = train_lra.TASKS[task].archive
    with pytest.raises(SystemExit, match=f"{url}.*{size}.*tar xzf"):
        lra(task, tmp_path)
    lay_out(task, tmp_path)
    first = lra(task, tmp_path)
    monkeypatch.setitem(train_lra.TASKS, task, train_lra.TASKS[task]._replace(read=lambda *_: None))
    again = lra(task, tmp_path, "--mixer attention --dtype bfloat16")
    assert first["majority"] == again["majority"] and 0 <= again["test_accuracy"] <= 1

def test_pathfinder_pngs_are_read_and_unreadable_ones_named(tmp_path, capsys):
    image = pytest.importorskip("PIL.Image")
    paths = [tmp_path / "metadata", tmp_path / "imgs/0"]
    for path in paths:
        path.mkdir(parents=True)
    (paths[0] / "0.npy").write_text("".join(f"imgs/0 {i}.png {i} {i % 2} 1.0\n" for i in range(10)))
    for i in range(10):
        image.fromarray(np.full((32, 32), i, np.uint8)).save(paths[1] / f"{i}.png")
    (paths[1] / "3.png").write_bytes(b"")
    rows = list(train_lra.read_pathfinder(paths, argparse.Namespace(length=1024)))
    assert rows[4][2:] == ("1", [1024 * b"\5"])
    assert sorted(row[1] for row in rows) == 7 * [0] + [1, 2]
    assert re.search("left out 1 of 10 .*3.png", capsys.readouterr().out)

def test_generated_pathfinder_is_balanced_and_has_no_shortcut():
    args = argparse.Namespace(length=32 * 32)
    made = [image for job in range(3) for image in train_lra.pathfinder_block(args, job)]
    label, dots = np.array([row[0] for row in made]), np.array([row[2] for row in made])
    pixels = np.array([np.frombuffer(row[1], np.uint8) for row in made]) / 255        # (600, 1024)
    assert abs(label.mean() - 0.5) < 0.05 and len(np.unique(pixels, axis=0)) == 600
    for clue in (abs(dots[:, 0] - dots[:, 1]), pixels.mean(1)):
        right = [((clue > x) == label).mean() for x in np.quantile(clue, np.linspace(0, 1, 50))]
        assert max(*right, 1 - min(right)) < 0.55
    x, y, right = pixels - pixels.mean(0), 2 * label - 1, []
    for test in np.arange(600) % 3 == np.arange(3)[:, None]:  # three folds
        weight = np.linalg.solve(x[~test].T @ x[~test] + 100 * np.eye(1024), x[~test].T @ y[~test])
        right.append(((x[test] @ weight > 0) == (y[test] > 0)).mean())
    assert np.mean(right) < 0.55

def test_path_x_images_are_made_too(monkeypatch):
    monkeypatch.setattr(train_lra, "BLOCK", 1)
    (label, pixels, _), = train_lra.pathfinder_block(argparse.Namespace(length=128 * 128), 0)
    assert label in (0, 1) and len(pixels) == 128 * 128

@pytest.mark.parametrize("task", ["listops", "retrieval"])  # one direction, both
@mixers
def test_padding_changes_no_logit(mixer, task):
    kind = train_lra.TASKS[task]
    args = argparse.Namespace(**train_lra.PRESETS[task] | dict(d_model=16, mixer=mixer, option=[]))
    model, length = train_lra.Classifier(args, kind).eval(), np.array([5, 17, 40, 1])
    length = length.reshape(-1, kind.documents)
    tokens = np.random.default_rng(0).integers(15, size=(*length.shape, 200), dtype=np.uint8)
    data = train_lra.Data(tokens, length, 0 * length[:, 0], 0 * length[:, 0], torch.device("cpu"))
    def logits(*rows, T):
        return model(*data.batch(torch.tensor(rows), T)[:2])
    together = logits(*range(len(length)), T=200)
    for row, width in enumerate(length.max(1)):
        torch.testing.assert_close(logits(row, T=width)[0], together[row])

def test_lra_tests_once_and_the_model_that_validation_selects(tmp_path, monkeypatch):
    accuracy, seen = iter([0.1, 0.2, 0.9, 0.3, 0.4]), []
    def evaluate(model, data, split, args):
        seen.append((split, [p.detach().clone() for p in model.parameters()]))
        return 1.0, next(accuracy) if split == train_lra.VAL else 0.5
    monkeypatch.setattr(train_lra, "evaluate", evaluate)
    result = start("train_lra", tmp_path)
    assert [split for split, _ in seen] == 5 * [train_lra.VAL] + [train_lra.TEST]
    assert all(map(torch.equal, seen[2][1], seen[5][1]))
    assert not all(map(torch.equal, seen[4][1], seen[5][1]))
    assert (result["val_accuracy"], result["test_accuracy"]) == (0.9, 0.5)

@pytest.mark.parametrize("task", ["text", "image", "retrieval"])
def test_the_sequence_classifier_reads_each_document_and_averages_its_features(task):
    kind = train_lra.TASKS[task]
    args = argparse.Namespace(
        **train_lra.PRESETS[task] | dict(d_model=16, mixer="metala", option=[]))
    model, tokens = train_lra.Classifier(args, kind).eval(), torch.randint(
        256, (3 * kind.documents, 9), dtype=torch.uint8)
    x = (model.embed.weight[tokens.long()] if kind.vocab else
         (tokens[..., None] / 127.5 - 1) * model.embed.weight[:, 0] + model.embed.bias)
    x = model.body(x)[0].sum(1) / 9                                          # (B·P, D)
    if kind.documents == 2:
        x = torch.stack([torch.cat([u, v, u - v, u * v]) for u, v in zip(x[::2], x[1::2])])
    close(model(tokens, None), model.head(x), F32)

def test_batches_hold_similar_lengths_and_an_epoch_every_example():
    length = np.arange(1, 101)
    data = train_lra.Data(np.zeros((100, 1, 100), np.uint8), length[:, None], length, 0 * length,
                          torch.device("cpu"))
    batch = train_lra.training_batches(argparse.Namespace(batch=10, seed=0), data)
    epochs = [[batch(step) for step in range(n, n + 10)] for n in (0, 10)]
    for epoch in epochs:
        assert sorted(row for rows, _ in epoch for row in rows.tolist()) == list(range(100))
        assert all(rows.max() < T <= rows.max() + 8 and T - rows.min() < 20 for rows, T in epoch)
    assert epochs[0][0][0].tolist() != epochs[1][0][0].tolist()

@pytest.mark.parametrize("preset", train_lra.PRESETS)
def test_a_step_of_each_preset(preset, monkeypatch):
    monkeypatch.setattr(train_lra, "BENCH_SECONDS", 0)
    length = "" if "path" in preset or preset == "image" else "--length 40 --shortest 0"
    assert train_lra.main(f"--preset {preset} {length} --layers 1 --d-model 8 --heads 2 --batch 1 "
                          "--device cpu --bench metala".split())["metala"] > 0

# train_lm.py

def lm_data(data, folder=None):
    args = argparse.Namespace(data=str(data), data_dir=folder, vocab_size=50)
    tokens, held_out = train_lm.load_data(args)
    return [tokens[:held_out].tobytes(), tokens[held_out:].tobytes()]

def ids(*tokens, n=400):
    return np.array([*tokens, *[1] * (n - len(tokens))], "<u2").tobytes()

def test_lm_reads_a_file_a_folder_or_ids_and_holds_the_end_out(tmp_path):
    for i in range(11):
        (tmp_path / f"{i:02}").write_bytes(bytes([i] * 10))
    assert lm_data(tmp_path / "07") == [b"\7" * 9, b"\7"]
    assert list(map(set, lm_data(tmp_path))) == [set(range(9)), {9, 10}]
    (tmp_path / "train.bin").write_bytes(ids(n=30))
    assert list(map(len, lm_data(tmp_path / "train.bin"))) == [54, 6]

@pytest.mark.parametrize("content, words", [
    (b"", "empty"), (ids() + b"x", "at 800,"), (ids(1, 50), "token 50 at byte 2 .*50"),
    (ids(n=360) + ids(77, n=40), "token 77 at byte 720 .*50"), (ids(n=9), "16.* 8 tokens")])
def test_lm_data_that_is_not_ids_is_one_line_with_file_and_place(content, words, tmp_path):
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(SystemExit, match="x.bin.*" + words + "|" + words + ".*x.bin"):
        start("train_lm", tmp_path, f"--data {tmp_path / 'x.bin'} --vocab-size 50")

def test_lm_downloads_a_known_set_once_and_checks_it(tmp_path, monkeypatch):
    source, sha256 = tmp_path / "source", hashlib.sha256(bytes(50)).hexdigest()
    monkeypatch.setitem(train_lm.KNOWN, "zeros", (source.as_uri(), "cached", sha256))
    source.write_bytes(bytes(50))
    for _ in range(2):
        assert lm_data("zeros", tmp_path / "a" / "b") == [bytes(45), bytes(5)]
        source.unlink(missing_ok=True)
    (tmp_path / "a" / "b" / "cached").write_bytes(bytes(49))
    with pytest.raises(SystemExit, match=f"cached.*SHA-256.*{sha256}"):
        lm_data("zeros", tmp_path / "a" / "b")

@pytest.mark.parametrize("flags", ["--micro-batch 2", "--recompute", "--dtype bfloat16"])
def test_lm_accumulating_recomputing_or_rounding_gives_the_same_curve(flags, tmp_path):
    plain, other = start("train_lm", tmp_path / "a"), start("train_lm", tmp_path / "b", flags)
    assert abs(plain["loss"] - other["loss"]) < (3e-2 if "bfloat" in flags else 1e-5)

def test_lm_compiles_all_blocks_as_one_graph_and_the_loss_as_another(tmp_path, monkeypatch):
    counters, compiler = torch._dynamo.utils.counters, torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compiler(f, backend="aot_eager", **how))
    torch.compiler.reset()
    counters.clear()
    compiled = start("train_lm", tmp_path / "a", "--mixer attention --layers 3 --compile")
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    plain = start("train_lm", tmp_path / "b", "--mixer attention --layers 3")
    assert abs(compiled["loss"] - plain["loss"]) < 1e-5

def test_lm_learns_to_name_the_next_token_from_the_training_part_alone(tmp_path, monkeypatch):
    model, rows = LanguageModel(11, 16, 1, 2), torch.randint(11, (3, 9))
    loss = train_lm.TrainingLoss(model, argparse.Namespace(compile=False, recompute=False))(rows)
    log_p = model(rows[:, :-1])[0].log_softmax(-1)
    close(loss, -log_p.gather(2, rows[:, 1:, None]).mean(), F32)

    windows, drawn = train_lm.windows, []
    monkeypatch.setattr(train_lm, "windows", lambda tokens, starts, length, *more: drawn.append(
        (torch.is_grad_enabled(), starts)) or windows(tokens, starts, length, *more))
    (tmp_path / "text").write_bytes(bytes(range(100)) * 5)
    start("train_lm", tmp_path, f"--data {tmp_path / 'text'} --steps 40")
    seen = {mode: np.concatenate([x for grad, x in drawn if grad == mode]) for mode in (0, 1)}
    assert 0 <= seen[1].min() < 20 and 400 < seen[1].max() + 16 <= 450 <= seen[0].min()
    assert len({tuple(x) for grad, x in drawn if grad}) == 40

def test_lm_keeps_the_best_model_and_counts_bits(tmp_path, monkeypatch):
    losses, drop = iter([3.0, 1.0, 2.0, 4.0, 5.0]), set()
    monkeypatch.setattr(train_lm, "evaluate", lambda *args: torch.tensor(next(losses)))
    init = Block.__init__
    monkeypatch.setattr(Block, "__init__",
                        lambda *a, **k: init(*a, **k) or drop.add(a[0].dropout.p))
    result = start("train_lm", tmp_path, "--dropout 0.3")
    assert torch.load(tmp_path / "best.pt", weights_only=True)["step"] == 2 and drop == {0.3}
    assert (result["best"], result["bits_per_byte"]) == (1.0, 5.0 / np.log(2))

@pytest.mark.parametrize("script", ["train_lm", "train_image"])
def test_two_processes_continue_a_run_of_one_and_the_reverse(script, tmp_path, monkeypatch):
    flags, out = "--dropout 0", tmp_path / "out"
    if script == "train_image":
        flags += " --batch 2 --test-examples 3"  # not as many for the one as for the other
    whole = start(script, tmp_path / "whole", flags)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        after_step(patch, 3, lambda _: signal.raise_signal(signal.SIGTERM))
        start(script, out, flags)
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                    "--nproc_per_node=2", HERE / f"{script}.py", *TOY[script].split(),
                    *flags.split(), "--device", "cpu", "--out", out, "--resume"], check=True)
    for line, same in zip(log_of(out)[1:], log_of(tmp_path / "whole")[1:], strict=True):
        assert line["step"] == same["step"] and abs(line["loss"] - same["loss"]) < 1e-4
    assert abs(start(script, out, flags, resume=True)["loss"] - whole["loss"]) < 1e-4

def test_lm_processes_wait_for_the_one_that_downloads(tmp_path):
    (tmp_path / "slow.py").write_text(
        f"import sys, time\nsys.path.insert(0, {str(HERE)!r})\nimport train_lm\n"
        "def download(path, *known):\n    time.sleep(2)\n    path.write_bytes(4000 * b'ab')\n"
        "train_lm.download = download\ntrain_lm.main(sys.argv[1:])\n")
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                    "--nproc_per_node=2", tmp_path / "slow.py", *TOY["train_lm"].split(), "--data",
                    "shakespeare", "--data-dir", tmp_path, "--device", "cpu", "--out",
                    tmp_path / "out"], check=True)

def safetensors(weights):
    ends = np.cumsum([x.nbytes for x in weights.values()]).tolist()
    header = json.dumps({name: dict(dtype="F32", shape=x.shape, data_offsets=[end - x.nbytes, end])
                         for end, (name, x) in zip(ends, weights.items())}).encode()
    numbers = b"".join(x.numpy().tobytes() for x in weights.values())
    return len(header).to_bytes(8, "little") + header + numbers

@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_lm_samples_from_a_released_folder_and_names_what_it_does_not_know(name, tmp_path, capsys):
    weights = released_weights()
    torch.save(weights, tmp_path / name)
    if name == "model.safetensors":
        (tmp_path / name).write_bytes(safetensors(weights))
    def sample(**config):
        (tmp_path / "config.json").write_text(json.dumps(dict(decoder_attention_heads=2) | config))
        start("train_lm", tmp_path, f"--model {tmp_path} --sample 3 --tokens 6 --temperature 0")
        return list(map(int, capsys.readouterr().out.splitlines()[-1].split()))
    model = LanguageModel.load_official(weights, n_heads=2)
    want = model.generate(torch.tensor([[3]]), 6, temperature=0)[0].tolist()
    assert sample(no_scale_embedding=True, glu_act="swish") == want
    for key, value in (("no_scale_embedding", False), ("norm_type", "layer"), ("glu_act", "none")):
        with pytest.raises(SystemExit, match=f"config.json.*{key}.*{value}"):
            sample(**{key: value})
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-40])
    with pytest.raises(SystemExit, match=name):
        sample()

def test_lm_streams_what_generate_gives_and_knows_the_loss_at_any_length(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_bytes(np.random.default_rng(0).integers(97, 123, 21_000).astype("u1").tobytes())
    start("train_lm", tmp_path, f"--data {text}")
    model = LanguageModel(256, 16, 1, 2, d_ff=24)
    model.load_state_dict(torch.load(tmp_path / "best.pt", weights_only=True)["model"])
    start("train_lm", tmp_path, "--sample ab --tokens 9 --temperature 0")
    want = model.generate(torch.tensor([[97, 98]]), 9, temperature=0)[0].tolist()
    shown = bytes(want).decode("utf-8", "replace").strip()
    assert capsys.readouterr().out.strip().endswith(shown)
    found = start("train_lm", tmp_path, "--eval-length 1500,2048")
    tokens = torch.tensor(list(text.read_bytes()[-2100:][:2049]))           # the part held out
    loss = F.cross_entropy(model(tokens[None, :-1])[0][0], tokens[1:], reduction="none")
    assert abs(found["1500-2048"] - loss[1500:].mean().item()) < 1e-5

def test_lm_bench_measures_the_mixer_and_attention(tmp_path):
    rows = start("train_lm", tmp_path, "--bench 16,80")["rows"]
    assert [row["mixer"] for row in rows] == ["metala", "metala", "attention", "attention"]
    constant, same, cache, longer = (row["state MiB"] for row in rows)
    assert constant == same and cache < longer

# train_image.py

def test_shapes_have_equal_area_and_no_linear_statistic_of_colour_or_area_tells_them_apart():
    at = np.linspace(-2, 2, 400)
    for shape in train_image.SHAPES.values():
        assert abs((shape(at[None], at[:, None] + 0 * at) < 0).mean() * 16 - 1) < 0.02
    images, labels = train_image.draw_shapes(np.random.default_rng(0), 4000, 32)
    assert images.dtype == np.uint8 and images.shape == (4000, 3, 32, 32)
    x = images.reshape(4000, 3, -1) / 255
    edge = np.median(images[..., [0, -1], :].reshape(4000, 3, -1) / 255, -1, keepdims=True)
    area = [(np.abs(x - edge).max(1) > level).mean(1) for level in (0.1, 0.2, 0.3, 0.4)]
    facts = np.c_[x.mean(2), x.std(2), edge[..., 0], np.stack(area, 1), np.ones(4000)]
    fit = np.linalg.lstsq(facts[:3000], np.eye(10)[labels[:3000]], rcond=None)[0]
    assert ((facts[3000:] @ fit).argmax(1) == labels[3000:]).mean() < 0.3

def idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()

DIGITS = [np.random.default_rng(0).integers(0, 10, shape, np.uint8)
          for shape in ((6, 28, 28), 6, (3, 28, 28), 3)]
RECORDS = np.random.default_rng(0).integers(0, 10, (6, 2, 3073), np.uint8)
CIFAR = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]

def image_data(folder, data, **changes):
    """Write official files, some changed, and load them."""
    (folder / "mnist").mkdir()
    for name, array in zip(train_image.MNIST_FILES, DIGITS):
        (folder / "mnist" / name).write_bytes(gzip.compress(idx(array)))
    (folder / "cifar-10-batches-bin").mkdir()
    for name, record in zip(CIFAR, RECORDS):
        (folder / "cifar-10-batches-bin" / name).write_bytes(record.tobytes())
    for name, content in changes.items():
        next(folder.glob(f"*/{name}*")).write_bytes(content)
    args = argparse.Namespace(data_dir=str(folder), data=data)
    return train_image.load_data(args, torch.device("cpu"))

def test_mnist_is_read_as_it_is(tmp_path):
    image_data(tmp_path, "mnist")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(idx(DIGITS[3]))  # unpacked: as good
    args = argparse.Namespace(data_dir=tmp_path, data="mnist")
    sets, classes = train_image.load_data(args, "cpu")
    for part, images, labels in zip(sets, DIGITS[::2], DIGITS[1::2]):
        assert (part.tensors[0].numpy() == images[:, None]).all() and len(classes) == 10
        assert (part.tensors[1].numpy() == labels).all() and part.tensors[0].shape[1] == 3

def test_cifar10_is_read_as_it_is_and_unpacked_if_need_be(tmp_path):
    (train, test), classes = image_data(tmp_path, "cifar10")
    assert (train.tensors[1].numpy() == RECORDS[:5, :, 0].ravel()).all() and len(classes) == 10
    assert test.tensors[0][1, 2, 0, 5] == RECORDS[5, 1, 1 + 2048 + 5]
    folder = tmp_path / "cifar-10-batches-bin"
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as tar:
        tar.add(folder, folder.name)
    shutil.rmtree(folder)
    args = argparse.Namespace(data_dir=tmp_path, data="cifar10")
    (again, _), _ = train_image.load_data(args, "cpu")
    assert torch.equal(again.tensors[0], train.tensors[0])

@pytest.mark.parametrize("data, name, content, words", [
    ("mnist", "train-images", gzip.compress(idx(DIGITS[0]))[:-90], "train-images"),
    ("mnist", "train-images", gzip.compress(b""), "train-images.*00 00 08"),
    ("mnist", "train-images", gzip.compress(idx(DIGITS[1])), r"\(6,\)"),
    ("mnist", "train-images", b"\x1f\x8b", "train-images"),
    ("mnist", "train-images", gzip.compress(idx(DIGITS[0][:5])), r"\(5, 3.* labels \(6,\)"),
    ("cifar10", "data_batch_2", RECORDS[1].tobytes()[:-1], "batch_2.bin.*6145.*3073"),
    ("cifar10", "test_batch", b"", r"\(0, 3, 32, 32\)"),
    ("cifar10", "data_batch_2", b"\x0a" + RECORDS[1].tobytes()[1:], "up to 10")],
    ids="a_cut_file nothing labels_for_images no_archive too_few a_cut_record empty label".split())
def test_a_broken_image_set_is_one_line(data, name, content, words, tmp_path):
    with pytest.raises(SystemExit, match=words) as stop:
        image_data(tmp_path, data, **{name: content})
    assert "\n" not in stop.value.code

def test_a_download_is_used_only_with_the_right_hash(tmp_path):
    (tmp_path / "source").write_bytes(bytes(50))
    url, path = (tmp_path / "source").as_uri(), tmp_path / "new" / "file"
    with pytest.raises(SystemExit, match="0" * 32):
        train_image.read(path, bytes, url, "0" * 32)
    assert not path.exists()
    assert train_image.read(path, bytes, url, hashlib.sha256(bytes(50)).hexdigest()) == bytes(50)

@pytest.mark.parametrize("kind, hole", [("none", 0), ("shift", 0.4), ("crop", 0)])
def test_augmentation_keeps_shape_and_dtype_and_is_made_of_the_images_own_pixels(kind, hole):
    args = argparse.Namespace(augment=kind, flip=kind != "none", cutout=hole, size=16)
    images = torch.randint(0, 256, (32, 3, 16, 16), dtype=torch.uint8)
    out = train_image.augment(args, images, torch.rand(32, 7))
    assert out.shape == images.shape and out.dtype == torch.uint8
    assert torch.equal(out, images) == (kind == "none")
    for image, cut in zip(images.numpy(), out.numpy()) if kind == "shift" else []:
        wide = np.pad(image, ((0, 0), (2, 2), (2, 2)), "symmetric")
        moved = [w[:, y:y + 16, x:x + 16] for w in (wide, wide[..., ::-1])
                 for y in range(5) for x in range(5)]
        assert max((cut == m).mean() for m in moved) > 0.8 - 0.41 ** 2 and (cut == 128).any()

def test_shift_moves_by_every_distance_and_mirrors_half():
    args = argparse.Namespace(augment="shift", flip=True, cutout=0.0, size=16)
    image = torch.randint(0, 256, (3, 16, 16), dtype=torch.uint8)
    out = train_image.augment(args, image.expand(900, -1, -1, -1), torch.rand(900, 7)).numpy()
    wide = np.pad(image.numpy(), ((0, 0), (2, 2), (2, 2)), "symmetric")
    moved = [wide[:, y:y + 16, x:x + 16][..., ::way] for way in (1, -1)
             for y in range(5) for x in range(5)]
    found = [next(i for i, m in enumerate(moved) if (m == o).all()) for o in out]
    assert set(found) == set(range(50)) and abs(np.mean(np.array(found) < 25) - 0.5) < 0.1

def test_crop_takes_8_to_100_percent_of_the_area_from_inside_the_image():
    args = argparse.Namespace(augment="crop", flip=False, cutout=0.0, size=64)
    ramp = (4 * torch.arange(64, dtype=torch.uint8)).expand(64, 64)
    images = torch.stack([ramp, ramp.T, ramp]).expand(500, -1, -1, -1)
    out = train_image.augment(args, images, torch.rand(500, 7)).float()
    x, y = out[:, 0], out[:, 1].mT                         # what grows along the last axis
    assert (x.diff() >= 0).all() and (y.diff() >= 0).all()  # no mirror image from outside
    w, h = ((z[:, 0, -1] - z[:, 0, 0]) / 252 for z in (x, y))
    assert (w * h).min() < 0.12 and (w * h).max() > 0.9 and (w / h).max() < 1.4 > (h / w).max()
    assert (w / h).max() > 1.25 and (h / w).max() > 1.25

@pytest.mark.parametrize("suffix", [".npy", ".png"])
def test_a_folder_is_learned_classified_and_what_cannot_be_read_is_named(suffix, tmp_path, capsys):
    rng = np.random.default_rng(0)
    for folder in ("train/a", "train/b", "val/a", "val/b"):  # b is brighter
        (tmp_path / folder).mkdir(parents=True)
        for i in range(8):
            pixels = rng.integers(0, 99, (20, 9, 3), np.uint8) + np.uint8(99 * ("b" in folder))
            if suffix == ".npy":
                np.save(tmp_path / folder / f"{i}.npy", pixels)
            else:
                pytest.importorskip("PIL.Image").fromarray(pixels).save(
                    tmp_path / folder / f"{i}.png")
    broken, *files = [tmp_path / "val" / name / f"{i}{suffix}" for name, i in ("a0", "b1", "a1")]
    broken.write_bytes(b"broken")
    flags = f"--data folder --data-dir {tmp_path} --workers 0 --cutout 0 --dropout 0 --lr 3e-3 "
    result = start("train_image", tmp_path / "out", flags + "--steps 25 --test-sizes 24")
    assert result["accuracy"] == 1 and result["accuracy_24"] > 0.5
    assert f"1 unreadable test images were left out: {broken}" in capsys.readouterr().out
    answers = start("train_image", tmp_path / "out", "--predict " + " ".join(map(str, files)))
    assert answers == {str(files[0]): "b", str(files[1]): "a"}
    with pytest.raises(SystemExit, match="1 of 1 files"):
        start("train_image", tmp_path / "out", f"--predict {broken}")
    with pytest.raises(SystemExit, match="no.png: no such file"):
        start("train_image", tmp_path / "out", f"--predict {files[0]} {tmp_path}/no.png")

@pytest.mark.parametrize("flags", [
    *(f"--preset {preset} --data synthetic --size 32" for preset in train_image.PRESETS),
    *(f"--mixer {mixer}" for mixer in MIXERS), "--dtype float16"])
def test_image_runs_with(flags, tmp_path):
    result = start("train_image", tmp_path, flags + " --steps 2")
    assert 0 <= result["accuracy"] <= 1 and np.isfinite(result["loss"]) and result["steps"] == 2

def test_label_smoothing_spreads_that_much_of_the_target_evenly(tmp_path):
    loss = [start("train_image", tmp_path / str(share), f"--steps 1 --lr 0 --label-smoothing {share}"
                  )["train_loss"] for share in (0, 0.25, 1)]
    assert abs(loss[0] - loss[2]) > 1e-3 and abs(loss[1] - 0.75 * loss[0] - 0.25 * loss[2]) < 1e-5

def test_the_image_classifier_averages_what_the_blocks_make_of_all_patches():
    model, images = train_image.Classifier(argparse.Namespace(**IMAGES), 5), torch.randint(
        256, (2, 3, 32, 32), dtype=torch.uint8)
    patches = (images / 64 - 2).unfold(2, 16, 16).unfold(3, 16, 16)          # (B, 3, 2, 2, 16, 16)
    x = torch.einsum("bchwij,dcij->bhwd", patches, model.stem.weight) + model.stem.bias
    x = (x + model.position[0].permute(1, 2, 0)).flatten(1, 2)               # (B, 4, D)
    close(model(images), model.head(model.body(x)[0].sum(1) / 4), F32)
    assert all(block.mixer.bidirectional for block in model.body.blocks)

@pytest.mark.parametrize("preset, classes, low, high", [
    ("tiny", 1000, 5.98e6, 6.22e6), ("small", 1000, 23.2e6, 24.2e6), ("cifar", 10, 0, 6.5e6)])
def test_image_models_have_the_papers_sizes(preset, classes, low, high):
    args = argparse.Namespace(**train_image.PRESETS[preset], mixer="metala", conv=3, option=[])
    assert low <= sum(p.numel() for p in train_image.Classifier(args, classes).parameters()) <= high

# ── 14  The README: its Python runs, its commands name files and flags that exist ────────────────

def readme_blocks(*languages):
    text = (HERE / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S)
    return [code for language, code in blocks if language in languages]

def test_the_readmes_python_blocks_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks, namespace = readme_blocks("python"), {"__name__": "readme"}
    assert blocks
    for code in blocks:
        exec(compile(code, "README.md", "exec"), namespace)

def test_the_demo_shows_the_forms_agree_and_that_the_new_replaces_the_old(capsys):
    metala.demo()
    text = capsys.readouterr().out
    assert re.search(r"chunkwise +output \de-1[456], state \de-1[456]", text)
    _, softmax, _, forgetful = map(float, re.findall(r"\d\.\d", text.splitlines()[-1]))
    assert softmax < 5.5 and forgetful > 6.5  # a=3 … a=7 … a?

def test_the_readme_quotes_code_and_names_tests_that_exist():
    text = (HERE / "README.md").read_text(encoding="utf-8")
    quotes = re.findall(r"^```python quote\n# (\S+)\n(.*?)^```", text, re.M | re.S)
    assert quotes
    for file, code in quotes:
        assert code in (HERE / file).read_text(encoding="utf-8"), f"{file} has no longer:\n{code}"
    for name in re.findall(r"\btest_\w+(?!\w*\.py)", text):
        assert name in globals(), name

def test_the_readmes_commands_name_existing_files_and_flags(capsys):
    text = (HERE / "README.md").read_text(encoding="utf-8")
    spans = re.findall(r"`(?:python )?(\w+\.py(?: [^`]*)?)`", text)
    blocks = "\n".join([*readme_blocks("bash"), *spans]).replace("\\\n", " ")
    found = re.findall(r"(\w+\.py)\b([^\n;&|#]*)", blocks)
    assert len(found) > len(spans) > 10
    for script, arguments in found:
        assert (HERE / script).is_file(), script
        if script.startswith("train_"):
            with pytest.raises(SystemExit) as stop:
                importlib.import_module(script[:-3]).main(["--help"])
            assert not stop.value.code
            offered = capsys.readouterr().out
            for flag in re.findall(r"--[\w-]+", arguments):
                assert re.search(rf"{flag}(?![\w-])", offered), f"{script} has no {flag}"
