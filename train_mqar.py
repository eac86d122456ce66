"""Train a small model on associative recall (MQAR) or one of three other tasks of remembering.

    pip install torch numpy tqdm
    python train_mqar.py                       # MetaLA, on a laptop: 99% recall after 350 steps
    python train_mqar.py --mixer attention     # 200 steps; or another name in metala.MIXERS
    python train_mqar.py --task needle         # a passkey, hidden once, asked for at the end
    python train_mqar.py --task copy --length 32 --steps 1200 --test-lengths 64 128
    python train_mqar.py --task phonebook --length 32 --pairs 4 --vocab 64 --lr 1e-2 --steps 1200
    python train_mqar.py --resume --show-map   # draws and measures the first run's maps
    python train_mqar.py --preset hard --d-model 128 --dtype bfloat16 --compile     # on a GPU

(Needle takes 600 steps to 99%, that copy 900, that phonebook 750: about two minutes each.)
A run leaves log.jsonl and checkpoint.pt in --out. Ctrl-C evaluates, saves and stops; the same
command with --resume continues as if nothing had happened. Reading order: the tasks, then from
`build_model` down; the part in between can wait.
"""
import argparse
import contextlib
import functools
import io
import json
import math
import os
import signal
import time
import warnings
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from metala import MIXERS, LanguageModel, attention_map, rms_norm

try:
    import fcntl
except ImportError:  # Windows has no flock: there, two runs in one folder go unnoticed
    fcntl = None

SCRIPT = "train_mqar"
LAPTOP = dict(length=64, pairs=8, vocab=256, examples=0, test_examples=500, d_model=64, layers=2,
              heads=2, tau=16.0, tie=True, dropout=0.0, steps=800, batch=64, lr=5e-3, warmup=100,
              weight_decay=0.1, eval_every=50, patience=0)


def paper(length, pairs, batch):
    """The paper's settings, which are Zoology's: 64 epochs over the same 100,000 examples."""
    epoch = 100_000 // batch
    return dict(length=length, pairs=pairs, vocab=8192, examples=100_000, test_examples=3000,
                tie=True, dropout=0.1, steps=64 * epoch, batch=batch, lr=2.2e-3, warmup=epoch,
                eval_every=epoch, patience=8)


# Our recipe: dropout blurs the keys and only delays recall; without it 16 epochs do. 80 pairs need
# a memory that writes little at a time: a large τ.
HARD = paper(512, 80, 128) | dict(steps=16 * (100_000 // 128), dropout=0.0, tau=64.0)
PRESETS = {"laptop": LAPTOP, "64": paper(64, 4, 512), "128": paper(128, 8, 512),
           "256": paper(256, 16, 256), "512": paper(512, 64, 128), "hard": HARD}
SWEEP = [1e-4, 4.6e-4, 2.2e-3, 1e-2]  # logspace(-4, -2, 4)


# ── The tasks: each makes n examples at once, and draws from the generator it is given only ──────

class Examples(NamedTuple):
    """T tokens with M questions each. Loss and accuracy see the questions and nothing else."""
    tokens: np.ndarray    # (n, T)
    where: np.ndarray     # (n, M)  positions at which the model must answer
    answer: np.ndarray    # (n, M)  the token that it must predict there
    distance: np.ndarray  # (n, M)  how far back the token stands that the answer came after


def mqar(rng, n, T, N, vocab, filler):
    """Multi-query associative recall, laid out as in Zoology: N pairs, then each key once more.

        position    0    1    2    3    4    5    6    7    8    9   10   11
        key        17        90
        value          203       131
        query                                    90                  17
        filler                             0    0         0    0    0         0
        answer                                  131                 203

    Keys come from the lower half of the vocabulary, values from the upper half. Query i stands at
    2N + 2·gap_i, where gap = 0, 1, 2, … is drawn with weight (gap + 1)^-0.99 and without repeats.
    """
    need(f"{N} pairs and their queries", 4 * N, T, 2 * N + 2, vocab)
    half, gaps = vocab // 2, (T - 2 * N) // 2
    keys, values = distinct(rng, n, N, 1, half), distinct(rng, n, N, half, vocab)

    # An exponential race is a weighted draw without repeats: the first N to arrive, in order.
    weight = np.arange(1, gaps + 1, dtype=np.float32) ** -0.99
    arrival = rng.standard_exponential((n, gaps), dtype=np.float32) / weight
    where = 2 * N + 2 * np.argsort(arrival, axis=1)[:, :N]                   # (n, N)

    tokens = background(rng, n, T, 0, vocab, filler)                         # (n, T)
    tokens[:, 0:2 * N:2], tokens[:, 1:2 * N:2] = keys, values
    np.put_along_axis(tokens, where, keys, axis=1)
    return Examples(tokens, where, values, where - np.arange(0, 2 * N, 2))


def needle(rng, n, T, N, vocab, filler):
    """A passkey of N tokens, hidden behind a marker at a random depth, asked for at the end.

        position    0    1    2    3    4    5    6    7    8    9   10   11
        filler      0    0    0                        0    0
        passkey                  HIDE  247  240  251
        question                                                ASK  247  240
        answer                                                  247  240  251

    Its tokens are different digits: the last 16 of the vocabulary, or 2N if more, at most half.
    """
    need(f"a passkey of {N} tokens", 2 * N + 1, T, max(2 * N, 8), vocab)
    digits = min(max(16, 2 * N), vocab // 2)
    tokens = background(rng, n, T, 3, vocab - digits, filler)                # (n, T)
    passkey = distinct(rng, n, N, vocab - digits, vocab)                     # (n, N)
    block = np.pad(passkey, ((0, 0), (1, 0)), constant_values=HIDE)[:, None]  # (n, 1, 1 + N)
    places = scatter(rng, tokens, block, T - N)                              # (n, 1, 1 + N)
    return ask(tokens, ASK, block[:, :, 1:], places[:, :, 1:])


def copy(rng, n, T, N, vocab, filler):
    """Selective copying: N tokens scattered in filler, to be reproduced in order at the end.

        position    0    1    2    3    4    5    6    7    8    9   10   11
        filler      0         0    0         0         0    0
        content         201                 147       230
        question                                                ASK  201  147
        answer                                                  201  147  230

    Content tokens are different, from the upper half of the vocabulary.
    """
    need(f"{N} tokens and their copy", 2 * N, T, max(2 * N, 8), vocab)
    tokens = background(rng, n, T, 3, vocab // 2, filler)                    # (n, T)
    content = distinct(rng, n, N, vocab // 2, vocab)                         # (n, N)
    places = scatter(rng, tokens, content[:, :, None], T - N)                # (n, N, 1)
    return ask(tokens, ASK, content[:, None], places.swapaxes(1, 2))


def phonebook(rng, n, T, N, vocab, filler):
    """A directory of N names with numbers of three tokens; 4 (or N) are looked up at the end.

        position    0    1    2    3    4    5    6    7    8    9   10   11   12   13   14
        filler      0                        0                        0    0
        name            71                       99
        number              247  140  203            251  129  146
        question                                                               99  251  129
        answer                                                                 251  129  146

    Names come from the vocabulary's second quarter, numbers from its upper half, no token twice.
    """
    Q, quarter, half = min(N, 4), vocab // 4, vocab // 2
    need(f"{N} entries and {Q} questions", 4 * N + 3 * Q, T, max(6 * N, 16), vocab)
    tokens = background(rng, n, T, 3, quarter, filler)                       # (n, T)
    names = distinct(rng, n, N, quarter, half).reshape(n, N, 1)
    numbers = distinct(rng, n, 3 * N, half, vocab).reshape(n, N, 3)
    entries = np.concatenate([names, numbers], 2)                            # (n, N, 4)
    places = scatter(rng, tokens, entries, T - 3 * Q)                        # (n, N, 4)
    asked = distinct(rng, n, Q, 0, N)[:, :, None]                            # (n, Q, 1)
    entries, places = (np.take_along_axis(x, asked, 1) for x in (entries, places))
    return ask(tokens, entries[:, :, :1], entries[:, :, 1:], places[:, :, 1:])


TASKS = {"mqar": mqar, "needle": needle, "copy": copy, "phonebook": phonebook}
HIDE, ASK = 1, 2


def ask(tokens, cue, answer, places):
    """Puts Q questions at the end, each a cue and then the answer but for its last token.
    cue: (n, Q, 1) or a token. answer, places: (n, Q, L), the tokens and where they stand."""
    n, Q, L = answer.shape
    question = np.concatenate([np.broadcast_to(cue, (n, Q, 1)), answer[:, :, :-1]], 2)
    tokens[:, -Q * L:] = question.reshape(n, -1)
    where = np.broadcast_to(np.arange(-Q * L, 0) + tokens.shape[1], (n, Q * L))
    return Examples(tokens, where, answer.reshape(n, -1), where + 1 - places.reshape(n, -1))


def need(what, length, T, least, vocab):
    for flag, low, given in (("--length (or --test-lengths)", length, T),
                             ("--vocab", least, vocab)):
        if given < low:
            fail(f"{what} need {flag} {low} or more, not {given}")


def scatter(rng, tokens, blocks, room):
    """Puts blocks (n, N, L) in random places of the first `room`, in order. → places (n, N, L)"""
    n, N, L = blocks.shape
    spare = np.sort(rng.integers(0, room - N * L + 1, size=(n, N)), axis=1)
    places = spare[:, :, None] + np.arange(N * L).reshape(N, L)              # (n, N, L)
    np.put_along_axis(tokens, places.reshape(n, -1), blocks.reshape(n, -1), axis=1)
    return places


def distinct(rng, n, count, low, high):
    """`count` different numbers from low … high-1 for each of n rows, in random order.

    Floyd's algorithm on all rows at once: each step draws from one number more than the step
    before, and takes that new number if the draw is already in the row. A shuffle gives the order.
    """
    picks = np.empty((count, n), dtype=np.int32)
    for i, top in enumerate(range(high - low - count, high - low)):
        draw = rng.integers(0, top + 1, size=n, dtype=np.int32)
        picks[i] = np.where((picks[:i] == draw).any(axis=0), top, draw)
    return low + rng.permuted(picks, axis=0).T                               # (n, count)


def background(rng, n, T, low, high, filler):
    """What stands where a task puts nothing: token 0, or random tokens from low … high-1."""
    if filler == "zero":
        return np.zeros((n, T), dtype=np.int32)
    return rng.integers(low, high, size=(n, T), dtype=np.int32)


# ── Shared by the four scripts: arguments, device, run folder, checkpoint, signals, optimiser ────

MAY_CHANGE = {"preset", "resume", "out", "device", "compile", "eval_every", "until", "patience",
              "test_lengths", "show_map"}  # from a run to its resumption


def fail(message):
    """A user's mistake ends the script with one line and exit status 1."""
    raise SystemExit(f"{SCRIPT}: {message}")


def at_least(low, kind=int, high=2**31 - 1):
    """An argparse type: a number from `low` to `high`."""
    def number(text):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not a number from {low} to {high}")
        return value
    return number


def name_and_value(text):
    """An argparse type for --option."""
    try:
        name, value = text.split("=")
        return name, json.loads(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE with a JSON value")


def common_flags():
    """A parser with the flags that mean the same in every script."""
    parser = argparse.ArgumentParser(
        SCRIPT, description=__doc__.splitlines()[0], allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--preset", default="laptop", choices=PRESETS, help="values for the flags not given")
    add("--mixer", default="metala", choices=MIXERS, help="token mixer")
    add("--option", type=name_and_value, nargs="*", default=[], metavar="NAME=VALUE",
        help="more arguments of the mixer, such as tau=4 self_augment=false")
    add("--d-model", type=at_least(1), help="model width D")
    add("--layers", type=at_least(1, high=1000), help="number of blocks")
    add("--heads", type=at_least(1), help="number of heads H")
    add("--steps", type=at_least(1), help="training steps")
    add("--batch", type=at_least(1), help="sequences per step")
    add("--lr", type=at_least(0, float), help="peak learning rate")
    add("--warmup", type=at_least(0), help="steps of linear warm-up, before a cosine to zero")
    add("--weight-decay", type=at_least(0, float), help="of AdamW, on matrices and filters")
    add("--eval-every", type=at_least(1), help="steps between evaluations (and checkpoints)")
    add("--seed", type=at_least(0, high=2**63 - 1), default=0, help="of weights, data and dropout")
    add("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"], help="where to run")
    add("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="autocast's")
    add("--compile", action="store_true", help="torch.compile; on CUDA also one graph per step")
    add("--out", type=Path, default=f"runs/{SCRIPT}", help="run folder")
    add("--resume", action="store_true", help="continue the run in --out; same flags otherwise")
    return parser


def parse(parser, argv):
    """A preset only changes defaults, so a flag given by hand always wins."""
    parser.set_defaults(**LAPTOP)
    parser.set_defaults(**PRESETS[parser.parse_args(argv).preset])
    return parser.parse_args(argv)


def choose_device(args):
    """The device of --device; printed with the dtype and the reason."""
    there = dict(cpu=True, cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available())
    auto = ("cuda", "found") if there["cuda"] else ("cpu", "no CUDA device found")
    name, reason = auto if args.device == "auto" else (args.device, "as asked")
    if not there[name]:
        fail(f"--device {name}: not on this machine, or not in this build of torch")
    if (name == "cuda" and args.dtype == "bfloat16"
            and not torch.cuda.is_bf16_supported(including_emulation=False)):
        fail("--dtype bfloat16: this GPU has none; float16 and float32 work")
    print(f"device {name} ({reason}), dtype {args.dtype}")
    return torch.device(name)


def autocast(args, device):
    """16-bit matrix products if --dtype asks for them; nothing for float32."""
    return torch.autocast(device.type, getattr(torch, args.dtype), args.dtype != "float32")


@contextlib.contextmanager
def run_folder(args):
    """Create --out and hold its lock: one run per folder. Earlier results are moved aside."""
    try:
        if args.resume and not (args.out / "checkpoint.pt").exists():
            fail(f"--resume: there is no {args.out / 'checkpoint.pt'}")
        args.out.mkdir(parents=True, exist_ok=True)
        with open(args.out / ".lock", "w") as lock:
            try:
                if fcntl:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fail(f"another run is using {args.out}: wait for it, or give another --out")
            if not args.resume:
                old = next(n for n in range(1, 10**9) if not list(args.out.glob(f"*.old.{n}.*")))
                names = "log.jsonl", "checkpoint.pt"
                for path in filter(Path.exists, (args.out / name for name in names)):
                    print("kept:", path.rename(path.with_suffix(f".old.{old}{path.suffix}")))
            yield
    except OSError as error:  # of the run itself too: a full disk, say
        fail(f"--out {args.out}: {error}")


@contextlib.contextmanager
def caught_signals():
    """A list that receives SIGINT or SIGTERM, for the loop to look at. A second one kills."""
    def catch(number, frame):
        caught.append(number)
        signal.signal(number, before[number])
    caught = []
    before = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def save_checkpoint(args, model, optimizer, scaler, **progress):
    """All that an exact resumption needs. Killed at any moment, one whole checkpoint remains."""
    content = dict(
        progress, script=SCRIPT, args={**vars(args), "out": str(args.out)},
        model=model.state_dict(), optimizer=optimizer.state_dict(), scaler=scaler.state_dict())
    temporary, buffer = args.out / "checkpoint.pt.tmp", io.BytesIO()
    torch.save(content, buffer)  # not to the file: a full disk would be a RuntimeError
    with open(temporary, "wb") as file:
        file.write(buffer.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, args.out / "checkpoint.pt")


def load_checkpoint(args, model, optimizer, scaler):
    """Put back what `save_checkpoint` saved, and return it; cut the log back to that step."""
    path, log = args.out / "checkpoint.pt", args.out / "log.jsonl"
    try:
        if zipfile.ZipFile(path).testzip():  # torch.load does not look at checksums
            raise ValueError
        saved = torch.load(path, map_location="cpu", weights_only=True)
        step, made_by = saved["step"], saved["script"]
    except Exception:  # torch.load raises many kinds; all mean the same to the user
        fail(f"--resume: {path} is damaged, or not a checkpoint")
    if made_by != SCRIPT:
        fail(f"--resume: {path} was made by {made_by}")
    changed = [f"--{name.replace('_', '-')} was {saved['args'].get(name)}, and is {value} now"
               for name, value in vars(args).items()
               if name not in MAY_CHANGE and value != saved["args"].get(name)]
    if changed:
        fail(f"--resume: in {path} {'; '.join(changed)}")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scaler.load_state_dict(saved["scaler"])
    if log.exists():  # a kill may have torn its last line, or come between log and checkpoint
        try:
            lines = [line for line in log.read_text().splitlines(True) if line.endswith("\n")]
            log.write_text("".join(x for x in lines if json.loads(x).get("step", -1) < step))
        except (ValueError, AttributeError, TypeError):
            fail(f"--resume: {log} has a line that is not a log's: remove it")
    return saved


def write_log(args, **line):
    """Append one JSON line; the first of a file follows one with the arguments and versions."""
    path = args.out / "log.jsonl"
    head = dict(args=vars(args), torch=torch.__version__, numpy=np.__version__)
    lines = [line] if path.exists() else [head, line]
    with open(path, "a") as file:
        file.writelines(json.dumps(line, default=str) + "\n" for line in lines)


def make_optimizer(model, args):
    """AdamW. Matrices and filters decay; the embedding of a rare token would just fade away."""
    embeddings = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    groups = {True: [], False: []}
    for p in model.parameters():
        groups[p.ndim > 1 and p not in embeddings].append(p)
    return torch.optim.AdamW([dict(params=groups[True], weight_decay=args.weight_decay),
                              dict(params=groups[False], weight_decay=0.0)], fused=True)


def learning_rate(step, args):
    """Linear warm-up to --lr over --warmup steps, then half a cosine down to zero at --steps."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    return args.lr * (1 + math.cos(math.pi * (step - args.warmup) / (args.steps - args.warmup))) / 2


def check_finite(loss, step):
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss} at step {step}; the last good checkpoint is "
                                 "kept; a lower --lr or another --dtype may help")
    return loss


# ── Plain PyTorch from here on: data on the device, model, evaluation, training ──────────────────

TRAIN, TEST, ORDER, DROPOUT = range(4)  # random streams: each is seeded with [seed, stream, index]


def make_examples(args, device, stream, index, n, length):
    """Examples as tensors on the device: a pure function of (seed, stream, index)."""
    rng = np.random.default_rng([args.seed, stream, index])
    made = TASKS[args.task](rng, n, length, args.pairs, args.vocab, args.filler)
    return Examples(*(torch.from_numpy(np.array(x, np.int64)).to(device) for x in made))


def training_batches(args, device):
    """A function of the step alone, so that a resumed run continues the same data."""
    if args.examples == 0:  # fresh examples in every step
        return lambda step: make_examples(args, device, TRAIN, step, args.batch, args.length)[:3]
    if args.batch > args.examples:
        fail(f"--batch {args.batch} is more than the {args.examples} --examples")
    tokens, where, answer, _ = make_examples(args, device, TRAIN, 0, args.examples, args.length)

    @functools.lru_cache(1)
    def order(epoch):
        rng = np.random.default_rng([args.seed, ORDER, epoch])
        return torch.from_numpy(rng.permutation(args.examples)).to(device)

    def batch(step):
        epoch, i = divmod(step, args.examples // args.batch)
        rows = order(epoch)[i * args.batch:(i + 1) * args.batch]
        return tokens[rows], where[rows], answer[rows]
    return batch


def build_model(args):
    """In the paper's MQAR, MetaLA's and GLA's queries and keys are as wide as the model."""
    options = dict(conv_size=args.conv)
    if args.mixer in ("metala", "gla"):
        options |= dict(d_key=args.d_model, d_value=args.d_model, tau=args.tau)
    try:
        model = LanguageModel(args.vocab, args.d_model, args.layers, args.heads, args.mixer,
                              d_ff=2 * args.d_model, tie=args.tie, **options | dict(args.option))
    except (ValueError, TypeError, RuntimeError) as error:  # Runtime: too large for memory
        fail(error)
    model.drop.p = args.dropout  # after the embedding and nowhere else
    return model


def embed(weight, tokens):
    """weight[tokens], for a GPU. Most tokens are filler, 0, and the gradients of equal tokens wait
    for each other there: so row 0 is taken by itself, and the filler's places get other rows."""
    others = torch.arange(tokens.numel(), device=tokens.device) % len(weight)
    others = torch.where(tokens == 0, others.view(tokens.shape), tokens)     # (B, T)
    return torch.where((tokens == 0)[..., None], weight[0], F.embedding(others, weight))


def answer_logits(model, tokens, where):
    """Logits at the questions only: at all positions they would cost more than the model."""
    x = embed(model.embed.weight, tokens) if tokens.is_cuda else model.embed(tokens)
    x, _ = model.body(model.drop(x))                                         # (B, T, D)
    return model.head(x.take_along_dim(where[..., None], 1)).float()         # (B, M, vocab)


@torch.no_grad()
def evaluate(model, examples, args):
    """The mean loss, the accuracy, and which answers are right: (n, M) bool."""
    model.eval()
    loss, right = 0.0, []
    for tokens, where, answer, _ in zip(*(x.split(args.batch) for x in examples)):
        with autocast(args, tokens.device):
            logits = answer_logits(model, tokens, where)                     # (B, M, vocab)
        loss += F.cross_entropy(logits.flatten(0, 1), answer.flatten(), reduction="sum")
        right.append(logits.argmax(-1) == answer)
    model.train()
    right = torch.cat(right)                                                 # (n, M)
    return loss.item() / right.numel(), right.float().mean().item(), right


def training_step(model, optimizer, scaler, args, device):
    """A function that trains on a batch, its learning rate and the sum of its losses: both on the
    device, so that the host never waits. With --compile on CUDA a step is one launch."""
    record = args.compile and device.type == "cuda"
    lr, losses = torch.zeros((), device=device), torch.zeros((), device=device)
    for group in optimizer.param_groups:
        group.update(lr=lr, capturable=record)

    @functools.partial(torch.compile, disable=not args.compile)
    def loss_of(tokens, where, answer):                             # (B, T), (B, M), (B, M)
        logits = answer_logits(model, tokens, where)                         # (B, M, vocab)
        return F.cross_entropy(logits.flatten(0, 1), answer.flatten())

    def step(*batch):
        with autocast(args, device):
            loss = loss_of(*batch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.add_(loss.detach())
    return recorded(step) if record else step, lr, losses


def recorded(step):
    """`step` as a CUDA graph, hundreds of kernels started at once. Three calls run as they are, to
    compile and to allocate; the next is recorded. A recording always reads the same memory, so
    that from then on a call copies its arguments there."""
    torch.cuda.synchronize()
    torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be recorded
    warnings.filterwarnings("ignore", ".*capturable=True")  # the first calls need it as well
    graph, warmup, memory = torch.cuda.CUDAGraph(), iter(range(3)), []

    def call(*batch):
        if next(warmup, None) is not None:
            return step(*batch)
        if not memory:
            memory.extend(x.clone() for x in batch)
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                step(*memory)
        for old, new in zip(memory, batch):
            old.copy_(new)
        graph.replay()
    return call


def train(args, device):
    """One run, from --lr to a row of the final table."""
    torch.manual_seed(args.seed)
    model = build_model(args).to(device)
    optimizer = make_optimizer(model, args)
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")
    test, *longer = (make_examples(args, device, TEST, index, args.test_examples, length)
                     for index, length in enumerate([args.length, *args.test_lengths]))
    batch = training_batches(args, device)

    progress = functools.partial(tqdm, total=args.steps, desc=args.mixer, unit="step")
    with run_folder(args), caught_signals() as caught, progress() as bar:
        run = dict(step=0, best=0.0, seconds=0.0, train_loss=None, tokens_per_second=None)
        if args.resume:
            saved = load_checkpoint(args, model, optimizer, scaler)
            run = {name: saved[name] for name in run}
            bar.initial = bar.n = run["step"]
        train_step, lr, losses = training_step(model, optimizer, scaler, args, device)
        start = before = run["step"]
        resumed, verdict = time.perf_counter(), ""
        began = resumed - run["seconds"]
        for step in range(start, args.steps + 1):
            planned = step == args.steps or step % args.eval_every == 0
            if planned or caught:
                if step > before:  # reading the losses waits for the GPU, so here only
                    run["train_loss"] = check_finite(losses.item() / (step - before), step)
                    losses.zero_()
                now = time.perf_counter()
                if before > start:  # the first steps compile: they say nothing about speed
                    tokens = (step - before) * args.batch * args.length
                    run["tokens_per_second"] = round(tokens / (now - resumed))
                run.update(step=step, seconds=now - began)
                if signal.SIGTERM not in caught:  # which is in a hurry
                    loss, accuracy, right = evaluate(model, test, args)
                    if planned:  # Ctrl-C does not select
                        run["best"] = max(run["best"], accuracy)
                    write_log(args, **run, loss=check_finite(loss, step), accuracy=accuracy)
                    bar.set_postfix_str(f"loss {loss:.3f}, best {run['best']:.1%}")
                    if planned and accuracy >= args.until:
                        verdict = f": {100 * args.until:g}% reached"
                    elif (planned and 0 < args.patience * args.eval_every <= step
                          and run["best"] < 2 / max(args.pairs, 4)):
                        verdict = f": given up at {run['best']:.1%} (--patience {args.patience})"
                save_checkpoint(args, model, optimizer, scaler, **run)
                if step == args.steps or caught or verdict:
                    break
                before, resumed = step, time.perf_counter()
            lr.fill_(learning_rate(step, args))
            torch.manual_seed(np.random.default_rng([args.seed, DROPOUT, step]).integers(2**40))
            train_step(*batch(step))
            bar.update()
        bar.close()
        if caught:
            now = "" if signal.SIGTERM in caught else f"{accuracy:.1%} now, "
            print(f"stopped after {step} steps, accuracy {now}{run['best']:.1%} at best; "
                  "--resume continues")
            raise SystemExit(128 + caught[0])

        more = {f"accuracy_{length}": evaluate(model, examples, args)[1]
                for length, examples in zip(args.test_lengths, longer)}
        model.eval()
        print(f"{step} steps{verdict}")
        report(args, run, model, accuracy, right, test, more)
        if args.show_map:
            more |= show_map(model, test)
        if more:
            write_log(args, step=step, **more)
        if caught:  # during the report
            raise SystemExit(128 + caught[0])
    return dict(run, steps=step, loss=loss, accuracy=accuracy, **more)


@torch.no_grad()
def report(args, run, model, accuracy, right, test, more):
    """The final table. State: how many numbers one sequence of this length leaves behind."""
    with autocast(args, test.tokens.device):
        _, states = model.features(test.tokens[:1])
    state = sum(x.numel() for layer in states for x in layer if x.is_floating_point())
    parameters = sum(p.numel() for p in model.parameters())
    row = dict(mixer=args.mixer, d=args.d_model, parameters=f"{parameters:,}", state=f"{state:,}",
               lr=f"{args.lr:g}", seconds=f"{run['seconds']:.0f}", recall=f"{accuracy:.1%}")
    row["tokens/s"] = f"{run['tokens_per_second'] or 0:,}"
    edges = [0] + [2**i for i in range(3, 20) if 2**i < args.length] + [args.length]
    for low, high in zip(edges, edges[1:]):
        inside = right[(low < test.distance) & (test.distance <= high)]
        row[f"{low + 1}–{high}"] = f"{inside.float().mean().item():.1%}" if len(inside) else "none"
    row |= {f"T = {length}": f"{more[f'accuracy_{length}']:.1%}" for length in args.test_lengths}
    widths = [max(map(len, map(str, column))) for column in row.items()]
    for line in (row.keys(), row.values()):
        print("  ".join(str(x).rjust(width) for x, width in zip(line, widths)))
    print("1–8 and so on: recall by the distance from a question back to its key; T: at a length.")


def layer_map(mixer, x):
    """The map A (H, T, T) by which a mixer weighs its values, o = A v, for an input (1, T, D)."""
    x, _ = mixer.conv(x, None, None)                                         # (1, T, D)
    if isinstance(mixer, MIXERS["attention"]):
        t = torch.arange(x.shape[1], device=x.device)
        q, k = (mixer.rotate(z, t[None]).transpose(1, 2)
                for z in mixer.heads(x, mixer.q_proj, mixer.k_proj))         # (1, H, T, Dk)
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5                 # (1, H, T, T)
        return scores.masked_fill(t[:, None] < t, -math.inf).softmax(-1)[0]
    q, k, _, g, _ = mixer.inputs(x)
    if isinstance(mixer, MIXERS["metala"]):
        g = mixer.log_decay(g)
    return attention_map(torch.ones_like(g) if q is None else q, k, g)[0]    # hgrn's q is 1


def concentration(A, rows):
    """How concentrated maps A (H, T, T) are: entropy and gap of every head. P is |A| with rows
    scaled to sum 1, because a linear mixer's norm undoes the scale of its rows.

    entropy   −Σ_s P_ts log₂ P_ts in bits, averaged over `rows`. 0: each looks at one token only;
              log₂ (t + 1): row t looks at all that it sees alike.
    gap       1 − σ₂ / σ₁, the largest singular values of P. 0: rows look at different tokens;
              1: all at the same. (The eigenvalues of a causal map are just its diagonal.)
    """
    P = F.normalize(A.abs(), p=1, dim=-1)                                    # (H, T, T)
    bits = torch.special.entr(P).sum(-1) / math.log(2)                       # (H, T)
    sigma = torch.linalg.svdvals(P)                                          # (H, T)
    return bits[:, rows].mean(1).tolist(), (1 - sigma[:, 1] / sigma[:, 0]).tolist()


@torch.no_grad()
def show_map(model, test):
    """Draws the map of every head for the first test example; returns how concentrated they are."""
    x, measures = model.embed(test.tokens[:1]), []                           # (1, T, D)
    for layer, block in enumerate(model.body.blocks):
        A = layer_map(block.mixer, rms_norm(x))                              # (H, T, T)
        measures.append(concentration(A, test.where[0]))
        for head, (entropy, gap) in enumerate(zip(*measures[-1])):
            print(f"layer {layer}, head {head}: entropy {entropy:.2f} bits, gap {gap:.3f}")
        shade = A.abs() / A.abs().amax(-1, keepdim=True)
        shade = (4 * F.adaptive_max_pool2d(shade, (12, 24))).round().int()
        for row in shade[:4].unbind(1):                                      # (≤ 4 heads, 24)
            print(*("".join(" ░▒▓█"[i] for i in head) for head in row), sep=" | ")
        x, _ = block(x)
    return dict(zip(("entropy", "gap"), zip(*measures)))


def sweep(args, device):
    """One run per learning rate, each in a folder of its own. The best one's result."""
    results = {}
    for lr in args.sweep or SWEEP:
        out = args.out / f"lr-{lr:g}"
        resume = args.resume and (out / "checkpoint.pt").exists()
        one = argparse.Namespace(**vars(args) | dict(lr=lr, out=out, resume=resume, sweep=None))
        try:
            results[lr] = train(one, device)
        except FloatingPointError as error:
            print(f"lr {lr:g}: {error}")
    if not results:
        fail("no learning rate of the sweep kept the loss finite")
    best = max(results, key=lambda lr: results[lr]["best"])
    print(f"best of the sweep: {results[best]['best']:.1%} test accuracy at lr {best:g}")
    return results[best] | dict(lr=best)


def main(argv=None):
    parser = common_flags()
    add = parser.add_argument
    add("--task", default="mqar", choices=TASKS, help="drawn in the docstring of its function")
    add("--length", type=at_least(1), help="tokens per example T")
    add("--pairs", type=at_least(1), help="N: key-value pairs, tokens to find or copy, entries")
    add("--vocab", type=at_least(4), help="vocabulary size")
    add("--filler", default="zero", choices=["zero", "random"], help="the other tokens")
    add("--examples", type=at_least(0), help="training set size; 0 makes every batch afresh")
    add("--test-examples", type=at_least(1), help="test set size")
    add("--test-lengths", type=at_least(1), nargs="*", default=[], metavar="T",
        help="test at these lengths too at the end")
    add("--until", type=at_least(0, float), default=0.99, help="stop at this test accuracy")
    add("--patience", type=at_least(0), help="evaluations after which a run that never passed "
        "2/N (N at least 4), twice a guess among the example's answers, is given up; 0: never")
    add("--show-map", action="store_true", help="draw and measure one example's map at the end")
    add("--dropout", type=at_least(0, float, high=1), help="after the embedding")
    add("--tie", action=argparse.BooleanOptionalAction, help="share embedding and head weights")
    add("--conv", type=at_least(0), default=2, help="width of every mixer's convolution; 0: none")
    add("--tau", type=at_least(0, float), help="τ of metala and gla: α = σ(a)^(1/τ)")
    add("--sweep", type=at_least(0, float), nargs="*", metavar="LR",
        help=f"a run per learning rate; {SWEEP} if none is given")
    args = parse(parser, argv)
    device = choose_device(args)
    try:
        return train(args, device) if args.sweep is None else sweep(args, device)
    except KeyboardInterrupt:  # while data are prepared: training catches it by itself
        raise SystemExit(130)
    except (FloatingPointError, MemoryError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        fail(str(error).partition("\n")[0])


if __name__ == "__main__":
    main()
