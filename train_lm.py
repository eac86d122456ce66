"""Train a language model: on this Python's own library, on Shakespeare, or on a cluster.

    pip install torch numpy tqdm
    python train_lm.py                        # on a laptop, 4 minutes: 2 bits per byte, a sample
    python train_lm.py --sample "def " --tokens 2000            # stream more of it
    python train_lm.py --eval-length 256,1k,4k,16k              # its loss far beyond 256 bytes
    python train_lm.py --mixer attention                        # or any other in metala.MIXERS
    python train_lm.py --preset shakespeare --compile           # nanoGPT's setting, for a GPU
    python train_lm.py --preset 360m --vocab-size 32000 --no-tie --compile --bench
    torchrun --nproc_per_node=8 train_lm.py --preset 1.4b --data FOLDER/train.bin --compile

A run leaves log.jsonl, checkpoint.pt and best.pt in --out. Ctrl-C evaluates, saves and stops; the
same command with --resume continues as if nothing had happened, on any number of processes: a
step's data depend on the seed and the step alone. Hosts must share the folder --out.

Reading order: the data, then from `build_model` down; the part in between can wait.
"""
import argparse
import codecs
import contextlib
import functools
import hashlib
import io
import json
import math
import os
import re
import signal
import sysconfig
import time
import zipfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from metala import MIXERS, LanguageModel, rms_norm

try:
    import fcntl
except ImportError:  # Windows has no flock: there, two runs in one folder go unnoticed
    fcntl = None

SCRIPT = "train_lm"
RANK, LOCAL_RANK, WORLD = (int(os.environ.get(name, default)) for name, default in
                           (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))  # set by torchrun

# A tied head would start by predicting each token after itself: new blocks change little.
LAPTOP = dict(data="builtin", vocab_size=256, length=256, val_windows=200, d_model=128, layers=4,
              heads=4, d_ff=320, tie=False, dropout=0.0, steps=1200, batch=8, micro_batch=0,
              lr=3e-3, warmup=100, beta2=0.99, weight_decay=0.1, eval_every=300, dtype="float32",
              recompute=False)
# nanoGPT's baby setting. It overfits before step 2,000, so the cosine ends soon after that.
SHAKESPEARE = LAPTOP | dict(data="shakespeare", val_windows=0, d_model=384, layers=6, heads=6,
                            d_ff=1000, dropout=0.2, steps=2500, batch=64, lr=1e-3, eval_every=125,
                            dtype="bfloat16")
# The paper's: length 2048, half a million tokens a step, 15 billion in all. 300 billion below.
SMALL = LAPTOP | dict(data="data/train.bin", vocab_size=50432, length=2048, val_windows=2048,
                      d_model=1024, layers=24, heads=8, d_ff=2816, tie=True, steps=28_610,
                      batch=256, micro_batch=16, lr=3e-4, warmup=1000, beta2=0.95, eval_every=500,
                      dtype="bfloat16")
LARGE = SMALL | dict(d_model=2048, heads=16, d_ff=5632, steps=143_051, batch=1024, micro_batch=8,
                     lr=2e-4, recompute=True)
PRESETS = {"laptop": LAPTOP, "shakespeare": SHAKESPEARE, "360m": SMALL, "1.4b": LARGE}


# ── The data: tokens in one long row, mapped into memory rather than read where they are one file ─

KNOWN = {  # name: where it is, the file's name under --data-dir, the file's SHA-256
    "shakespeare": (
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "tinyshakespeare.txt", "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
    "enwik8": (
        "http://mattmahoney.net/dc/enwik8.zip",
        "enwik8", "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8")}


def load_data(args):
    """All tokens in one row, and where the part that is held out begins: at 90%, in a folder of its
    files. A file is mapped into memory, not read. Bytes set --vocab-size to 256."""
    path = Path(sysconfig.get_paths()["stdlib"] if args.data == "builtin" else args.data)
    if args.data in KNOWN:
        path = Path(args.data_dir, KNOWN[args.data][1])
        if LOCAL_RANK == 0:
            download(path, *KNOWN[args.data])
        total(0)  # the other processes of this host wait here for the file
    dtype = np.dtype("<u2" if path.suffix == ".bin" else "u1")
    args.vocab_size = args.vocab_size if path.suffix == ".bin" else 256
    try:
        if path.is_dir():
            return read_folder(path, only_python=args.data == "builtin")
        size = path.stat().st_size
        if size == 0 or size % dtype.itemsize:
            fail(f"--data {path}: " + ("the file is empty" if size == 0 else
                 f"its last byte, at {size - 1}, is half a token; each has 2 bytes"))
        tokens = np.memmap(path, dtype, "r")                                 # (N,)
    except OSError as error:
        fail(f"--data {path}: {error.strerror}")
    end = 95_000_000 if args.data == "enwik8" else None  # what comes after is its test set
    return tokens[:end], len(tokens) * 9 // 10


def download(path, url, name, sha256):
    """See that a known set lies there, whole and unchanged."""
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            fetched = path.with_name(name + ".fetched")
            torch.hub.download_url_to_file(url, fetched)
            if url.endswith(".zip"):
                fetched.write_bytes(zipfile.ZipFile(fetched).read(name))
            os.replace(fetched, path)
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        fail(f"{error} (from {url}; or put the file there yourself: {path})")
    if found != sha256:
        fail(f"{path}: SHA-256 is {found}, expected {sha256}; remove the file to download it again")


def read_folder(root, only_python):
    """The bytes of all files, by path."""
    skip = {"site-packages", "dist-packages", "test", "tests"} if only_python else ()
    files = sorted(file for file in root.rglob("*.py" if only_python else "*")
                   if file.is_file() and not any(part[0] == "." or part in skip
                                                 for part in file.relative_to(root).parts))
    contents = [file.read_bytes() for file in files]
    cut = sum(map(len, contents[:len(files) * 9 // 10]))
    return np.frombuffer(b"".join(contents), np.uint8), cut


def check_ids(tokens, begin, end, args):
    """Every token must be in the vocabulary; an id on the GPU that is not would be a riddle."""
    for at in begin + np.flatnonzero(tokens[begin:end] >= args.vocab_size)[:1]:
        fail(f"--data {args.data}: token {tokens[at]} at byte {at * tokens.itemsize} is not below "
             f"--vocab-size {args.vocab_size}")


def windows(tokens, starts, length, args, device):
    """Windows of length + 1 tokens from each of `starts`: inputs, and the same moved by one."""
    rows = np.asarray(tokens[starts[:, None] + np.arange(length + 1)], np.int64)  # (B, T + 1)
    if rows.max() >= args.vocab_size:
        for start in starts:
            check_ids(tokens, start, start + length + 1, args)
    rows = torch.from_numpy(rows)
    return (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)


# ── Shared by the four scripts: arguments, device, run folder, checkpoint, signals, optimiser ────

MAY_CHANGE = {"preset", "resume", "out", "device", "compile", "eval_every", "data_dir",
              "micro_batch", "recompute", "model", "sample", "tokens", "temperature", "eval_length",
              "bench"}  # from a run to its resumption


def fail(message):
    """A user's mistake ends the script with one line and exit status 1."""
    alone = LOCAL_RANK > 0 and not dist.is_initialized()  # before that, all have the same to say
    raise SystemExit(1 if alone else f"{SCRIPT}: {message}")


def say(*words):
    """Print, once in all."""
    if RANK == 0:
        print(*words, flush=True)


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
    add("--batch", type=at_least(1), help="sequences per step, of all processes together")
    add("--lr", type=at_least(0, float), help="peak learning rate")
    add("--warmup", type=at_least(0), help="steps of linear warm-up, before a cosine to zero")
    add("--weight-decay", type=at_least(0, float), help="of AdamW, on matrices and filters")
    add("--eval-every", type=at_least(1), help="steps between evaluations (and checkpoints)")
    add("--seed", type=at_least(0, high=2**63 - 1), default=0, help="of weights, data and dropout")
    add("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"], help="where to run")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="autocast's")
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
    if (name == "cuda" and args.dtype == "bfloat16"
            and not torch.cuda.is_bf16_supported(including_emulation=False)):
        fail("--dtype bfloat16: this GPU has none; float16 and float32 work")
    if name == "cuda" and LOCAL_RANK >= torch.cuda.device_count():
        fail(f"process {LOCAL_RANK} of this host has no GPU: it has {torch.cuda.device_count()}")
    say(f"device {name} ({reason}), dtype {args.dtype}, {WORLD} process{'es' * (WORLD > 1)}")
    if name == "cuda":
        torch.cuda.set_device(LOCAL_RANK)
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
        if RANK > 0:  # all writing is done by process 0
            yield
            return
        args.out.mkdir(parents=True, exist_ok=True)
        with open(args.out / ".lock", "w") as lock:
            try:
                if fcntl:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fail(f"another run is using {args.out}: wait for it, or give another --out")
            if not args.resume:
                old = next(n for n in range(1, 10**9) if not list(args.out.glob(f"*.old.{n}.*")))
                names = "log.jsonl", "checkpoint.pt", "best.pt"
                for path in filter(Path.exists, (args.out / name for name in names)):
                    print("kept:", path.rename(path.with_suffix(f".old.{old}{path.suffix}")))
            yield
    except OSError as error:  # of the run itself too: a full disk, say
        fail(f"--out {args.out}: {error}")


@contextlib.contextmanager
def caught_signals():
    """A list that receives SIGINT or SIGTERM, for the loop to look at. A second one kills, in a
    single process."""
    def catch(number, frame):
        caught.append(number)
        if WORLD == 1:  # torchrun may send a process what it has got already
            signal.signal(number, before[number])
    caught = []
    before = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def save_checkpoint(args, model, optimizer, scaler, is_best, **progress):
    """All that an exact resumption needs; the best weights in a file of their own. Killed at any
    moment, one whole checkpoint remains."""
    if RANK > 0:
        return
    content = dict(
        progress, script=SCRIPT, args={**vars(args), "out": str(args.out)},
        model=model.state_dict(), optimizer=optimizer.state_dict(), scaler=scaler.state_dict())
    weights = {name: content[name] for name in ("script", "step", "args", "model")}
    for name, x in [("best.pt", weights)] * is_best + [("checkpoint.pt", content)]:
        temporary, buffer = args.out / f"{name}.tmp", io.BytesIO()
        torch.save(x, buffer)  # not to the file: a full disk would be a RuntimeError
        with open(temporary, "wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, args.out / name)


def read_checkpoint(path):
    try:
        if zipfile.ZipFile(path).testzip():  # torch.load does not look at checksums
            raise ValueError
        saved = torch.load(path, map_location="cpu", weights_only=True)
        made_by, _, _ = saved["script"], saved["step"], saved["args"]
    except FileNotFoundError:
        fail(f"there is no {path}")
    except Exception:  # torch.load raises many kinds; all mean the same to the user
        fail(f"{path} is damaged, or not a checkpoint")
    if made_by != SCRIPT:
        fail(f"{path} was made by {made_by}")
    return saved


def load_checkpoint(args, model, optimizer, scaler):
    """Put back what `save_checkpoint` saved, and return it; cut the log back to that step."""
    path, log = args.out / "checkpoint.pt", args.out / "log.jsonl"
    saved = read_checkpoint(path)
    changed = [f"--{name.replace('_', '-')} was {saved['args'].get(name)}, and is {value} now"
               for name, value in vars(args).items()
               if name not in MAY_CHANGE and value != saved["args"].get(name)]
    if changed:
        fail(f"--resume: in {path} {'; '.join(changed)}")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scaler.load_state_dict(saved["scaler"])
    if log.exists() and RANK == 0:  # a kill may have torn its last line, or come before a save
        try:
            lines = [line for line in log.read_text().splitlines(True) if line.endswith("\n")]
            kept = [line for line in lines if json.loads(line).get("step", -1) < saved["step"]]
            log.write_text("".join(kept))
        except (ValueError, AttributeError, TypeError):
            fail(f"--resume: {log} has a line that is not a log's: remove it")
    return saved


def write_log(args, **line):
    """Append one JSON line; the first of a file follows one with the arguments and versions."""
    if RANK > 0:
        return
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
                              dict(params=groups[False], weight_decay=0.0)],
                             betas=(0.9, args.beta2), fused=True)


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


def total(*numbers):
    """Their sums over all processes, which wait here for each other, but not for their GPUs."""
    if WORLD == 1:
        return numbers
    sums = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.tolist()


def leave():
    """End with the other processes. The barrier gives torch's threads the time to drop their last
    tensors: after Python's end that would crash them."""
    if WORLD > 1:
        dist.barrier()
        dist.destroy_process_group()


# ── Plain PyTorch from here on: model, evaluation, training ──────────────────────────────────────

PEAK = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}  # 16-bit FLOP a second


def build_model(args):
    try:
        return LanguageModel(args.vocab_size, args.d_model, args.layers, args.heads, args.mixer,
                             args.d_ff, args.dropout, args.tie, **dict(args.option))
    except (ValueError, TypeError, RuntimeError) as error:  # Runtime: too large for memory
        fail(error)


class TrainingLoss(torch.nn.Module):
    """Windows (B, T + 1) in, the mean of -log p(next token) out: what every step minimises.

    --compile works block by block: equal blocks share one compilation of a few seconds, and with
    several processes the gradients of one block travel while those of the next are computed. The
    float32 logits then exist in registers only. --recompute keeps nothing of a block but its
    input, and runs the block again when its gradients are due.
    """

    def __init__(self, model, args):
        super().__init__()
        self.model = model
        if args.compile:
            torch._dynamo.config.optimize_ddp = False  # it would cut the blocks up once more
            # Save what products and the kernel made, compute again what is cheap. It moves fewer
            # bytes, and takes two fifths off what a block of MetaLA saves for the backward pass.
            for cheap in "used_far_apart", "long_fusible_chains", "materialized_backward":
                setattr(torch._functorch.config, f"ban_recompute_{cheap}", False)
            self.run_block, self.mean_loss = (
                torch.compile(f, dynamic=False) for f in (self.run_block, self.mean_loss))
        if args.recompute:
            self.run_block = functools.partial(checkpoint, self.run_block, use_reentrant=False)

    @staticmethod
    def run_block(block, x):
        return block(x)[0]                                                   # (B, T, D)

    @staticmethod
    def mean_loss(head, x, targets):
        return F.cross_entropy(head(rms_norm(x)).float().flatten(0, 1), targets.flatten())

    def forward(self, rows):
        x = self.model.drop(self.model.embed(rows[:, :-1]))                  # (B, T, D)
        for block in self.model.body.blocks:
            x = self.run_block(block, x)
        return self.mean_loss(self.model.head, x, rows[:, 1:])


def update(training_loss, optimizer, scaler, rows, args):
    """One optimiser step on this process's windows (B, T + 1). Returns their loss, on the device.

    Gradients add up over the passes, and are averaged over the processes in the last of them."""
    optimizer.zero_grad()
    loss, parts = 0.0, rows.split(args.micro_batch)
    for part in parts:
        waits = WORLD > 1 and part is not parts[-1]
        with training_loss.no_sync() if waits else contextlib.nullcontext():
            with autocast(args, rows.device):
                part_loss = training_loss(part) / len(parts)
            scaler.scale(part_loss).backward()
        loss += part_loss.detach()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(training_loss.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss


@torch.no_grad()
def evaluate(model, tokens, begin, length, most, args, device):
    """-log p by position, (length,): the mean over at most so many windows (0: all) that do not
    overlap, spread evenly from `begin` on. Each process takes its share of them."""
    count = (len(tokens) - begin - 1) // length
    starts = begin + length * np.linspace(0, count - 1, min(most or count, count)).astype(int)
    mine, loss = starts[RANK::WORLD], torch.zeros(length, dtype=torch.float64)
    size = max(args.micro_batch * args.length // length, 1)  # as many tokens at once as in training
    model.eval()
    for i in range(0, len(mine), size):
        rows = windows(tokens, mine[i:i + size], length, args, device)       # (B, T + 1)
        with autocast(args, device):
            logits = model(rows[:, :-1])[0].float().flatten(0, 1)            # (B T, vocab)
        found = F.cross_entropy(logits, rows[:, 1:].flatten(), reduction="none")
        loss += found.view(-1, length).sum(0).cpu()
    model.train()
    return np.array(total(*loss.tolist())) / len(starts)


def in_words(loss, args):
    bits = f" = {loss / math.log(2):.4f} bits per byte" if args.vocab_size == 256 else ""
    return f"{loss:.4f}{bits}"


def train(args, device):
    tokens, held_out = load_data(args)
    for use, begin, end in ("training", 0, held_out), ("validation", held_out, len(tokens)):
        if end - begin <= args.length:
            fail(f"--length {args.length} needs more than the {end - begin} tokens that --data "
                 f"{args.data} has for {use}")
        check_ids(tokens, begin, begin + 2**27, args)  # the rest as it is drawn
    if args.batch % (WORLD * args.micro_batch):
        fail(f"--batch {args.batch} is not a multiple of {WORLD} process{'es' * (WORLD > 1)} times "
             f"--micro-batch {args.micro_batch}")
    torch.manual_seed(args.seed)
    model = build_model(args).to(device)
    optimizer, training_loss = make_optimizer(model, args), TrainingLoss(model, args)
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")
    if WORLD > 1:
        training_loss = DistributedDataParallel(training_loss, gradient_as_bucket_view=True)
    parameters = sum(p.numel() for p in model.parameters())
    say(f"{args.mixer}, {parameters:,} parameters; {held_out:,} tokens to train on, "
        f"{len(tokens) - held_out:,} to validate with")

    # FLOP of a token: 6 per weight that multiplies, forward and backward together, and 6 per layer,
    # channel and position that attention looks back at (a linear state's, some 3%, are left out).
    looked_up = 0 if args.tie else model.embed.weight.numel()
    flop = 6 * (parameters - looked_up
                + (args.mixer == "attention") * args.layers * args.length * args.d_model)
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else ""
    peak = WORLD * next((PEAK[name] for name in PEAK if name in gpu), math.inf)
    with (run_folder(args), caught_signals() as caught,
          tqdm(total=args.steps, desc=args.mixer, unit="step", disable=RANK > 0) as bar):
        run = dict(step=0, best=math.inf, seconds=0.0, train_loss=None)
        if args.resume:
            saved = load_checkpoint(args, model, optimizer, scaler)
            run = {name: saved[name] for name in run}
            bar.initial = bar.n = run["step"]
        began, recent = time.perf_counter() - run["seconds"], []
        mark, timed_steps, timed_seconds, rate = None, 0, 0.0, 0.0
        for step in range(run["step"], args.steps + 1):
            last = step == args.steps
            interrupted, terminated = total(signal.SIGINT in caught, signal.SIGTERM in caught)
            planned = last or step % args.eval_every == 0
            pause = planned or interrupted or terminated
            if recent and (pause or step % 10 == 0):  # seldom: reading a loss waits for the GPU
                run["train_loss"], = total(torch.stack(recent).mean().item() / WORLD)
                check_finite(run["train_loss"], step)
                if mark:  # so not in the first stretch, in which things are compiled
                    timed_steps += len(recent)
                    timed_seconds += time.perf_counter() - mark
                    rate = timed_steps * args.batch * args.length / timed_seconds
                mark = time.perf_counter()
                recent.clear()
                used = f", MFU {rate * flop / peak:.1%}" if peak < math.inf else ""
                bar.set_postfix_str(f"loss {run['train_loss']:.3f}, best {run['best']:.3f}, "
                                    f"{rate:,.0f} tokens/s{used}", refresh=False)
            if pause:
                run.update(step=step, seconds=time.perf_counter() - began)
                is_best = False
                if not terminated:  # which is in a hurry
                    found = evaluate(model, tokens, held_out, args.length, args.val_windows, args,
                                     device)
                    loss = check_finite(float(found.mean()), step)
                    is_best = planned and loss < run["best"]  # Ctrl-C does not select
                    run["best"] = loss if is_best else run["best"]
                    write_log(args, **run, loss=loss, tokens_per_second=rate or None)
                save_checkpoint(args, model, optimizer, scaler, is_best, **run)
                if last or interrupted or terminated:
                    break
                mark = mark and time.perf_counter()

            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args)
            # Data and dropout are functions of seed and step, so that a resumed run goes on alike;
            # sequence i of a step is the same for any number of processes.
            rng = np.random.default_rng([args.seed, step])
            starts = rng.integers(held_out - args.length, size=args.batch)[RANK::WORLD]
            torch.manual_seed(rng.integers(2**40) + RANK)
            rows = windows(tokens, starts, args.length, args, device)        # (B, T + 1)
            recent.append(update(training_loss, optimizer, scaler, rows, args))
            bar.update()

    leave()
    if interrupted or terminated:
        now = "" if terminated else f"{loss:.4f} now, "
        say(f"stopped after {step} steps, loss {now}{run['best']:.4f} at best; --resume continues")
        raise SystemExit(128 + (signal.SIGINT if interrupted else signal.SIGTERM))
    say(f"{step} steps in {run['seconds']:.0f} s; validation loss {in_words(loss, args)}, "
        f"at best {in_words(run['best'], args)}")
    if args.vocab_size == 256 and RANK == 0:
        torch.manual_seed(args.seed)
        stream(model, "\n", 300, args, device)
    return dict(loss=loss, val_loss=loss, best=run["best"], steps=step, seconds=run["seconds"],
                bits_per_byte=loss / math.log(2) if args.vocab_size == 256 else None)


# ── With a trained model: sampling, longer contexts ──────────────────────────────────────────────

def load_model(args, device):
    """A checkpoint of this script, or a folder that the paper's authors released: config.json
    beside *.safetensors or pytorch_model*.bin. Returns the model and its training's arguments."""
    path, weights = Path(args.model or args.out), {}
    if not (path / "config.json").exists():
        saved = read_checkpoint(path if path.is_file() else path / "best.pt")
        now = {name: value for name, value in vars(args).items() if name in MAY_CHANGE | {"dtype"}}
        args = argparse.Namespace(**vars(args) | saved["args"] | now)
        model = build_model(args)
        model.load_state_dict(saved["model"])
        return model.to(device), args
    try:
        files = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
        path = path / "config.json"
        config = json.loads(path.read_text())
        for name, known in (("no_scale_embedding", [True]), ("norm_type", ["simplermsnorm"]),
                            ("glu_act", ["silu", "swish"])):
            if config.get(name, known[0]) not in known:
                raise ValueError(f"{name} is {config[name]!r}, not {' or '.join(map(str, known))}")
        for path in files:
            weights |= (read_safetensors(path) if path.suffix == ".safetensors" else
                        torch.load(path, map_location="cpu", weights_only=True))
        model = LanguageModel.load_official(weights, config.get("decoder_attention_heads", 8))
    except Exception as error:  # of many kinds, each a file that is not what it should be
        fail(f"{path}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    args.vocab_size = model.embed.num_embeddings
    return model.to(device), args


def read_safetensors(path):
    """The format: 8 bytes that say n, n bytes of JSON (each tensor's dtype, shape, and bytes from
    and to), then the numbers."""
    data = np.memmap(path, np.uint8, "c")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    entries = json.loads(data[8:start].tobytes())
    entries.pop("__metadata__", None)
    dtypes = dict(F64=torch.float64, F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16)
    return {name: torch.from_numpy(data[start:][slice(*entry["data_offsets"])])
            .view(dtypes[entry["dtype"]]).view(entry["shape"]) for name, entry in entries.items()}


@torch.no_grad()
def stream(model, prompt, count, args, device):
    """Print the prompt and `count` tokens after it, each as soon as it is drawn, from states of a
    fixed size. Text in and out if the vocabulary is bytes, else ids. Ctrl-C ends it."""
    def show(ids):
        text = decoder.decode(bytes(ids)) if as_bytes else "".join(f"{x} " for x in ids)
        print(text, end="", flush=True)
    as_bytes = args.vocab_size == 256
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a letter may take several bytes
    ids = (list(prompt.encode("utf-8", "surrogateescape")) if as_bytes else
           [int(x) if x.isdecimal() else -1 for x in prompt.split()])
    if not all(0 <= x < args.vocab_size for x in ids):
        fail(f"--sample {prompt!r}: token ids from 0 to {args.vocab_size - 1} expected")
    show(ids)
    with contextlib.suppress(KeyboardInterrupt):
        x, states = model.eval().features(torch.tensor([ids or [0]], device=device))  # (1, T0, D)
        states = [block.mixer.reserve(state, count)
                  for block, state in zip(model.body.blocks, states)]
        for _ in range(count):
            logits = model.head(x[:, -1]).float()                            # (1, vocab)
            if not logits.isfinite().all():
                fail("the model's logits are not finite: are its weights damaged?")
            token = (torch.multinomial((logits / args.temperature).softmax(-1), 1)
                     if args.temperature else logits.argmax(-1, keepdim=True))  # (1, 1)
            show([token.item()])
            x, states = model.features(token, states=states, in_place=True)
    print()


def evaluate_lengths(args, device):
    """The loss by position, in sequences as long as the longest of --eval-length."""
    model, args = load_model(args, device)
    tokens, held_out = load_data(args)
    edges = [0] + sorted(set(args.eval_length))
    if len(tokens) - held_out <= edges[-1]:
        fail(f"--eval-length {edges[-1]} needs more than the {len(tokens) - held_out} tokens that "
             f"--data {args.data} has for validation")
    loss = evaluate(model, tokens, held_out, edges[-1], 32, args, device)
    result = {f"{low}-{high}": loss[low:high].mean() for low, high in zip(edges, edges[1:])}
    for positions, mean in result.items():
        print(f"positions {positions:>13}: loss {in_words(mean, args)}")
    return result


# ── The benchmark: speed and memory of a mixer beside attention, with random weights and tokens ──

def bench(args, device):
    """A row for each mixer and length T, nan where memory does not suffice. A training step has
    the same number of tokens at every T."""
    rows = []
    for mixer in dict.fromkeys([args.mixer, "attention"]):
        for T in args.bench or ([2048, 16384, 32768] if device.type == "cuda" else [256, 1024]):
            batch = max(args.length * args.micro_batch // T, 1)
            changed = dict(mixer=mixer, length=T, batch=batch, micro_batch=batch)
            row = measure(argparse.Namespace(**vars(args) | changed), device)
            rows.append(dict(mixer=mixer, T=T) | row)
            if len(rows) == 1:
                print("    mixer       T", *row, sep="  ")
            print(f"{mixer:>9}  {T:6}", *(f"{x:{len(title)},.{2 * (x < 100)}f}"
                                          for title, x in row.items()), sep="  ", flush=True)
    return dict(rows=rows)


def measure(args, device):
    """One row: a training step; a prompt of T tokens; decoding with room for T in the cache, of
    which attention reads all in every step, while a linear state has no room to make."""
    def seconds(call):
        """The median of groups of calls, after a group that warms up."""
        wait, times = getattr(torch, device.type).synchronize, []
        for _ in range(6):
            wait()
            began = time.perf_counter()
            for _ in range(3):
                call()
            wait()
            times.append((time.perf_counter() - began) / 3)
        return float(np.median(times[1:]))

    row = dict.fromkeys(("training tokens/s", "peak GiB", "prompt ms", "tokens/s at batch 1",
                         "tokens/s at batch 64", "state MiB"), math.nan)
    unless_full = functools.partial(contextlib.suppress, torch.OutOfMemoryError)
    with torch.device(device):
        model = build_model(args)
    tokens = torch.randint(args.vocab_size, (args.batch, args.length + 1), device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with unless_full():
        optimizer, training_loss = make_optimizer(model, args), TrainingLoss(model, args)
        scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")
        row["training tokens/s"] = args.batch * args.length / seconds(
            lambda: update(training_loss, optimizer, scaler, tokens, args))
        if device.type == "cuda":
            row["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    torch.compiler.reset()  # or other lengths would count as recompilations, of which 8 are allowed
    optimizer = training_loss = None
    model.to(getattr(torch, args.dtype)).eval().zero_grad()
    with torch.no_grad(), unless_full():
        row["prompt ms"] = 1e3 * seconds(
            lambda: model.head(model.features(tokens[:1, :-1])[0][:, -1]))
        for B in (1, 64):
            step, row["state MiB"] = decoding(model, tokens[0, :1].repeat(B, 1), args.length)
            row[f"tokens/s at batch {B}"] = B / seconds(step)
    return row


def decoding(model, token, room):
    """A call that turns the tokens (B, 1) into the next ones, and the size of a sequence's states.
    On a GPU it is a CUDA graph, which looks for its inputs where they were."""
    states = [[x.clone() for x in block.mixer.reserve(state, max(room, 64) - 1)]
              for block, state in zip(model.body.blocks, model.features(token)[1])]

    def step():
        x, after = model.features(token, states=states, in_place=True)       # (B, 1, D)
        token.copy_(model.head(x[:, -1]).argmax(-1, keepdim=True))
        for old, new in zip(sum(states, []), (x for state in after for x in state)):
            if old is not new:
                old.copy_(new)
    if token.is_cuda:
        step()  # capturing wants a warm-up
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    return (graph.replay if token.is_cuda else step,
            sum(x.nbytes for x in sum(states, [])) / len(token) / 2**20)


# ── The command line ─────────────────────────────────────────────────────────────────────────────

def lengths(text):
    """An argparse type: 1k,4k is 1024 and 4096."""
    try:
        return [at_least(1)(x.removesuffix("k")) * (1024 if x.endswith("k") else 1)
                for x in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a list of lengths such as 256,4k")


def main(argv=None):
    parser = common_flags()
    add = parser.add_argument
    add("--data", help="builtin, shakespeare, enwik8, a text file, a folder of them, or 16-bit ids "
        "(.bin, as nanoGPT writes them)")
    add("--data-dir", default="data", help="where the known sets lie, or are downloaded to")
    add("--vocab-size", type=at_least(2), help="of .bin data; bytes are 256")
    add("--length", type=at_least(1), help="tokens per training sequence T")
    add("--val-windows", type=at_least(0), help="validate on so many; 0: all")
    add("--micro-batch", type=at_least(0), help="sequences at once, on each process; gradients add "
        "up until --batch is reached; 0: all of a process's")
    add("--d-ff", type=at_least(1), help="width of the GLU")
    add("--dropout", type=at_least(0, float, high=1), help="after embedding, mixer and GLU")
    add("--tie", action=argparse.BooleanOptionalAction, help="share embedding and head weights")
    add("--beta2", type=at_least(0, float, high=0.9999),
        help="of AdamW: memory for squared gradients")
    add("--recompute", action=argparse.BooleanOptionalAction,
        help="activation checkpointing: less memory, a third more work")
    add("--model", help="for the two below: a checkpoint, or a folder of the authors' release "
        "(default: best.pt in --out)")
    add("--sample", metavar="PROMPT", help="train nothing: stream text that continues PROMPT "
        "(of .bin data: ids)")
    add("--eval-length", type=lengths, metavar="T,T,…", help="train nothing: loss by position, on "
        "the data that it was trained with; 1k,4k,16k,64k")
    add("--tokens", type=at_least(1), default=500, help="of --sample")
    add("--temperature", type=at_least(0, float), default=0.8, help="of --sample; 0: the likeliest")
    add("--bench", type=lengths, nargs="?", const=[], metavar="T,T,…", help="a table of speed and "
        "memory, beside attention's")
    args = parse(parser, argv)
    args.micro_batch = max(1, min(args.micro_batch or args.batch, args.batch // WORLD))
    device = choose_device(args)
    if WORLD > 1 and (args.bench is not None or args.eval_length or args.sample is not None):
        fail("torchrun is for training only")
    try:
        if args.bench is not None:
            return bench(args, device)
        if args.eval_length:
            return evaluate_lengths(args, device)
        if args.sample is not None:
            torch.manual_seed(args.seed)
            model, args = load_model(args, device)
            return stream(model, args.sample, args.tokens, args, device)
        if WORLD > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        return train(args, device)
    except KeyboardInterrupt:  # while data are prepared: training catches it by itself
        raise SystemExit(130)
    except (FloatingPointError, MemoryError, OSError, RuntimeError) as error:
        if WORLD > 1 and re.search("by peer|Broken pipe|DistBackendError", repr(error)):
            fail(f"process {RANK} stops, for another one of this job has died; --resume continues "
                 "from the last checkpoint")
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        fail(str(error).partition("\n")[0])


if __name__ == "__main__":
    main()
