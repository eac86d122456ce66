"""Train a small model on associative recall (MQAR), or on finding a passkey hidden in filler.

    pip install torch numpy tqdm
    python train_mqar.py                       # MetaLA, on a laptop: 99% recall after 300 steps
    python train_mqar.py --mixer attention     # 200 steps; or another name in metala.MIXERS
    python train_mqar.py --task needle         # a passkey, hidden once, asked for at the end
    python train_mqar.py --preset hard --d-model 128 --sweep      # the paper's hardest, on a GPU

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
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from metala import MIXERS, LanguageModel

try:
    import fcntl
except ImportError:  # Windows has no flock: there, two runs in one folder go unnoticed
    fcntl = None

SCRIPT = "train_mqar"
LAPTOP = dict(length=64, pairs=8, vocab=256, examples=0, test_examples=500, d_model=64, layers=2,
              heads=2, tie=True, dropout=0.0, steps=800, batch=64, lr=5e-3, warmup=100,
              weight_decay=0.1, eval_every=50)


def paper(length, pairs, batch):
    """The paper's settings, which are Zoology's: 64 epochs over the same 100,000 examples."""
    epoch = 100_000 // batch
    return dict(length=length, pairs=pairs, vocab=8192, examples=100_000, test_examples=3000,
                tie=True, dropout=0.1, steps=64 * epoch, batch=batch, lr=2.2e-3, warmup=epoch,
                eval_every=epoch)


PRESETS = {"laptop": LAPTOP, "64": paper(64, 4, 512), "128": paper(128, 8, 512),
           "256": paper(256, 16, 256), "512": paper(512, 64, 128), "hard": paper(512, 80, 128)}
SWEEP = [1e-4, 4.6e-4, 2.2e-3, 1e-2]  # logspace(-4, -2, 4)


# ── The tasks: each makes n examples at once, and draws from the generator it is given only ──────

class Examples(NamedTuple):
    """T tokens with N questions each. Loss and accuracy see the questions and nothing else."""
    tokens: np.ndarray    # (n, T)
    where: np.ndarray     # (n, N)  positions at which the model must answer
    answer: np.ndarray    # (n, N)  the token that it must predict there
    distance: np.ndarray  # (n, N)  how far back the question's key stands


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
    half, gaps = vocab // 2, (T - 2 * N) // 2
    if 4 * N > T:
        raise ValueError(f"{N} pairs and their queries need --length {4 * N} or more, not {T}")
    if half - 1 < N:
        raise ValueError(f"{N} different keys need --vocab {2 * N + 2} or more, not {vocab}")
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
    HIDE, ASK = 1, 2
    digits = min(max(16, 2 * N), vocab // 2)
    if 2 * N + 1 > T:
        raise ValueError(f"a passkey of {N} tokens needs --length {2 * N + 1} or more, not {T}")
    if vocab < max(2 * N, 8):
        raise ValueError(f"a passkey of {N} needs --vocab {max(2 * N, 8)} or more, not {vocab}")
    tokens = background(rng, n, T, 3, vocab - digits, filler)                # (n, T)
    passkey = distinct(rng, n, N, vocab - digits, vocab)                     # (n, N)
    depth = rng.integers(0, T - 2 * N, size=(n, 1))                          # (n, 1)
    hidden = depth + 1 + np.arange(N)                                        # (n, N)
    where = np.broadcast_to(np.arange(T - N, T), (n, N))
    np.put_along_axis(tokens, depth, HIDE, axis=1)
    np.put_along_axis(tokens, hidden, passkey, axis=1)
    tokens[:, T - N], tokens[:, T - N + 1:] = ASK, passkey[:, :-1]
    return Examples(tokens, where, passkey, where + 1 - hidden)


TASKS = {"mqar": mqar, "needle": needle}


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

MAY_CHANGE = {"preset", "resume", "out", "device", "compile", "eval_every", "until",
              "test_lengths"}  # from a run to its resumption


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


def common_flags():
    """A parser with the flags that mean the same in every script."""
    parser = argparse.ArgumentParser(
        SCRIPT, description=__doc__.splitlines()[0], allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--preset", default="laptop", choices=PRESETS, help="values for the flags not given")
    add("--mixer", default="metala", choices=MIXERS, help="token mixer")
    add("--d-model", type=at_least(1), help="model width D")
    add("--layers", type=at_least(1, high=1000), help="number of blocks")
    add("--heads", type=at_least(1), help="number of heads H")
    add("--steps", type=at_least(1), help="training steps")
    add("--batch", type=at_least(1), help="sequences per step")
    add("--lr", type=at_least(0, float), help="peak learning rate")
    add("--warmup", type=at_least(0), help="steps of linear warm-up, before a cosine to zero")
    add("--weight-decay", type=at_least(0, float), help="of AdamW, on matrices only")
    add("--eval-every", type=at_least(1), help="steps between evaluations (and checkpoints)")
    add("--seed", type=at_least(0, high=2**63 - 1), default=0, help="of weights, data and dropout")
    add("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"], help="where to run")
    add("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="autocast's")
    add("--compile", action="store_true", help="torch.compile the training step")
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
            if fcntl:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not args.resume:
                old = next(n for n in range(1, 10**9) if not list(args.out.glob(f"*.old.{n}.*")))
                for path in [*args.out.glob("log.jsonl"), *args.out.glob("checkpoint.pt")]:
                    print("kept:", path.rename(path.with_suffix(f".old.{old}{path.suffix}")))
            yield
    except BlockingIOError:
        fail(f"another run is using {args.out}: wait for it, or give another --out")
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
        model=model.state_dict(), optimizer=optimizer.state_dict(), scaler=scaler.state_dict(),
        rng=torch.get_rng_state(),
        cuda_rng=torch.cuda.get_rng_state() if torch.cuda.is_available() else None)
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
        saved = torch.load(path, map_location="cpu", weights_only=True)
        step, made_by = saved["step"], saved["script"]
    except Exception:  # torch.load raises many kinds; all mean the same to the user
        fail(f"--resume: {path} is truncated, or not a checkpoint")
    if made_by != SCRIPT:
        fail(f"--resume: {path} was made by {made_by}")
    for name, value in vars(args).items():
        if name not in MAY_CHANGE and value != saved["args"].get(name):
            flag = "--" + name.replace("_", "-")
            fail(f"--resume: {flag} was {saved['args'].get(name)} in {path}, and is {value} now")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scaler.load_state_dict(saved["scaler"])
    torch.set_rng_state(saved["rng"])
    if saved["cuda_rng"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda_rng"])
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
    """AdamW. Only weight matrices decay: the embedding of a rare token would just fade away."""
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

TRAIN, TEST, ORDER = 0, 1, 2  # random streams: every generator is seeded with [seed, stream, index]


def make_examples(args, device, stream, index, n, length):
    """Examples as tensors on the device: a pure function of (seed, stream, index)."""
    rng = np.random.default_rng([args.seed, stream, index])
    try:
        made = TASKS[args.task](rng, n, length, args.pairs, args.vocab, args.filler)
    except ValueError as error:
        fail(error)
    return Examples(*(torch.from_numpy(np.array(x, np.int64)).to(device) for x in made))


def training_batches(args, device):
    """A function of the step alone, so that a resumed run continues the same data."""
    if args.examples == 0:  # fresh examples in every step
        return lambda step: make_examples(args, device, TRAIN, step, args.batch, args.length)
    if args.batch > args.examples:
        fail(f"--batch {args.batch} is more than the {args.examples} --examples")
    data = make_examples(args, device, TRAIN, 0, args.examples, args.length)
    per_epoch = args.examples // args.batch

    @functools.lru_cache(1)
    def order(epoch):
        return np.random.default_rng([args.seed, ORDER, epoch]).permutation(args.examples)

    def batch(step):
        epoch, i = divmod(step, per_epoch)
        rows = torch.from_numpy(order(epoch)[i * args.batch:(i + 1) * args.batch]).to(device)
        return Examples(*(x[rows] for x in data))
    return batch


def build_model(args):
    """In the paper's MQAR, MetaLA's and GLA's queries and keys are as wide as the model."""
    wide = dict(d_key=args.d_model, d_value=args.d_model)
    options = dict(conv_size=args.conv, **(wide if args.mixer in ("metala", "gla") else {}))
    try:
        model = LanguageModel(args.vocab, args.d_model, args.layers, args.heads, args.mixer,
                              d_ff=2 * args.d_model, tie=args.tie, **options | dict(args.option))
    except (ValueError, TypeError, RuntimeError) as error:  # Runtime: too large for memory
        fail(error)
    model.drop.p = args.dropout  # after the embedding and nowhere else
    return model


def answer_logits(model, tokens, where):
    """Logits at the questions only: at all positions they would cost more than the model."""
    x, _ = model.features(tokens)                                            # (B, T, D)
    return model.head(x.take_along_dim(where[..., None], 1)).float()         # (B, N, vocab)


@torch.no_grad()
def evaluate(model, examples, args):
    """The mean loss, the accuracy, and which answers are right: (n, N) bool."""
    model.eval()
    loss, right = 0.0, []
    for tokens, where, answer, _ in zip(*(x.split(args.batch) for x in examples)):
        with autocast(args, tokens.device):
            logits = answer_logits(model, tokens, where)                     # (B, N, vocab)
        loss += F.cross_entropy(logits.flatten(0, 1), answer.flatten(), reduction="sum")
        right.append(logits.argmax(-1) == answer)
    model.train()
    right = torch.cat(right)                                                 # (n, N)
    return loss.item() / right.numel(), right.float().mean().item(), right


def train(args, device):
    """One run, from --lr to a row of the final table."""
    torch.manual_seed(args.seed)
    model = build_model(args).to(device)
    optimizer = make_optimizer(model, args)
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")
    forward = torch.compile(answer_logits) if args.compile else answer_logits
    test, *longer = (make_examples(args, device, TEST, index, args.test_examples, length)
                     for index, length in enumerate([args.length, *args.test_lengths]))
    batch = training_batches(args, device)

    progress = functools.partial(tqdm, total=args.steps, desc=args.mixer, unit="step")
    with run_folder(args), caught_signals() as caught, progress() as bar:
        run = dict(step=0, best=0.0, seconds=0.0, train_loss=None)
        if args.resume:
            saved = load_checkpoint(args, model, optimizer, scaler)
            run = {name: saved[name] for name in run}
            bar.initial = bar.n = run["step"]
        began, recent = time.perf_counter() - run["seconds"], []
        for step in range(run["step"], args.steps + 1):
            last = step == args.steps
            pause = last or step % args.eval_every == 0 or bool(caught)
            if recent and (pause or step % 10 == 0):  # seldom: reading a loss waits for the GPU
                run["train_loss"] = check_finite(torch.stack(recent).mean().item(), step)
                recent.clear()
                bar.set_postfix_str(f"loss {run['train_loss']:.3f}, best {run['best']:.1%}")
            if pause:
                run.update(step=step, seconds=time.perf_counter() - began)
                if signal.SIGTERM not in caught:  # which is in a hurry
                    loss, accuracy, right = evaluate(model, test, args)
                    run["best"] = max(run["best"], accuracy)
                    write_log(args, **run, loss=check_finite(loss, step), accuracy=accuracy)
                save_checkpoint(args, model, optimizer, scaler, **run)
                if last or caught or accuracy >= args.until:
                    break

            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args)
            tokens, where, answer, _ = batch(step)                  # (B, T), (B, N), (B, N)
            with autocast(args, device):
                logits = forward(model, tokens, where)                       # (B, N, vocab)
            batch_loss = F.cross_entropy(logits.flatten(0, 1), answer.flatten())
            optimizer.zero_grad()
            scaler.scale(batch_loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            recent.append(batch_loss.detach())
            bar.update()

    if caught:
        print(f"stopped after {step} steps, best accuracy {run['best']:.1%}; --resume continues")
        raise SystemExit(128 + caught[0])
    print(f"{step} steps" + (f": {args.until:.0%} reached" if accuracy >= args.until else ""))
    report(args, run, model, accuracy, right, test)
    result = dict(accuracy=accuracy, loss=loss, steps=step, seconds=run["seconds"],
                  best=run["best"])
    for length, examples in zip(args.test_lengths, longer):
        _, result[f"accuracy_{length}"], _ = evaluate(model, examples, args)
        print(f"accuracy at length {length}: {result[f'accuracy_{length}']:.1%}")
    return result


@torch.no_grad()
def report(args, run, model, accuracy, right, test):
    """The final table. State: how many numbers one sequence of this length leaves behind."""
    _, states = model.features(test.tokens[:1])
    state = sum(x.numel() for layer in states for x in layer if x.is_floating_point())
    parameters = sum(p.numel() for p in model.parameters())
    row = dict(mixer=args.mixer, d=args.d_model, parameters=f"{parameters:,}", state=f"{state:,}",
               lr=f"{args.lr:g}", seconds=f"{run['seconds']:.0f}", recall=f"{accuracy:.1%}")
    edges = [0] + [2**i for i in range(3, 20) if 2**i < args.length] + [args.length]
    for low, high in zip(edges, edges[1:]):
        inside = right[(low < test.distance) & (test.distance <= high)]
        row[f"{low + 1}–{high}"] = f"{inside.float().mean().item():.1%}" if len(inside) else "none"
    widths = [max(map(len, map(str, column))) for column in row.items()]
    for line in (row.keys(), row.values()):
        print("  ".join(str(x).rjust(width) for x, width in zip(line, widths)))
    print("The last columns: recall by the distance from a query back to its key.")


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


def name_and_value(text):
    """An argparse type for --option."""
    name, value = text.split("=")
    return name, json.loads(value)


def main(argv=None):
    parser = common_flags()
    add = parser.add_argument
    add("--task", default="mqar", choices=TASKS, help="drawn in the docstring of its function")
    add("--length", type=at_least(1), help="tokens per example T")
    add("--pairs", type=at_least(1), help="questions N: key-value pairs, or tokens of the passkey")
    add("--vocab", type=at_least(4), help="vocabulary size")
    add("--filler", default="zero", choices=["zero", "random"], help="the other tokens")
    add("--examples", type=at_least(0), help="training set size; 0 makes every batch afresh")
    add("--test-examples", type=at_least(1), help="test set size")
    add("--test-lengths", type=at_least(1), nargs="*", default=[], metavar="T",
        help="lengths at which to test once more at the end")
    add("--until", type=at_least(0, float), default=0.99, help="stop at this test accuracy")
    add("--dropout", type=at_least(0, float, high=1), help="after the embedding")
    add("--tie", action=argparse.BooleanOptionalAction, help="share embedding and head weights")
    add("--conv", type=at_least(0), default=2, help="width of every mixer's convolution; 0: none")
    add("--option", type=name_and_value, nargs="*", default=[], metavar="NAME=VALUE",
        help="more arguments of the mixer, such as tau=4 self_augment=false")
    add("--sweep", type=at_least(0, float), nargs="*", metavar="LR",
        help=f"a run per learning rate; {SWEEP} if none is given")
    args = parse(parser, argv)
    device = choose_device(args)
    try:
        return train(args, device) if args.sweep is None else sweep(args, device)
    except (FloatingPointError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        fail(str(error).partition("\n")[0])


if __name__ == "__main__":
    main()
