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
import json
import math
import os
import platform
import re
import signal
import sysconfig
import time
import urllib.request
import zipfile
from pathlib import Path
from typing import NamedTuple

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
              heads=4, d_ff=320, tie=False, dropout=0.0, steps=1200, batch=8, micro_batch=0, lr=3e-3,
              warmup=100, beta2=0.99, weight_decay=0.1, eval_every=300, dtype="float32",
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


class Text(NamedTuple):
    tokens: np.ndarray  # (N,)  uint8 for bytes, uint16 for ids
    name: str           # the file, for error messages
    first: int = 0      # the place of tokens[0] in that file


def load_data(args):
    """The text to train on, and the text to validate with: the last 10%, or what is usual.

    Bytes set --vocab-size to 256."""
    if LOCAL_RANK == 0 and args.data in KNOWN:
        download(args)
    total()  # the other processes of this host wait here for the file
    path = Path(args.data)
    if args.data in KNOWN:
        path = Path(args.data_dir, KNOWN[args.data][1])
    elif args.data == "builtin":
        path = Path(sysconfig.get_paths()["stdlib"])
    elif (path / "train.bin").is_file():
        path = path / "train.bin"
    if path.suffix != ".bin":
        args.vocab_size = 256
    try:
        if path.is_dir():
            return read_folder(path, only_python=args.data == "builtin")
        whole = open_file(path)
        if path.name == "train.bin" and path.with_name("val.bin").is_file():
            return whole, open_file(path.with_name("val.bin"))
    except OSError as error:
        fail(f"--data {args.data}: {error.filename}: {error.strerror}")
    cut, end = len(whole.tokens) * 9 // 10, len(whole.tokens)
    if args.data == "enwik8":
        end = 95_000_000  # what comes after is its test set
    return whole._replace(tokens=whole.tokens[:cut]), Text(whole.tokens[cut:end], whole.name, cut)


def open_file(path):
    """A file as bytes; if it ends in .bin as 16-bit ids, little-endian as nanoGPT writes them."""
    dtype, size = np.dtype("<u2" if path.suffix == ".bin" else "u1"), path.stat().st_size
    if size == 0:
        fail(f"{path} is empty")
    if size % dtype.itemsize:
        fail(f"{path}: its last byte, at {size - 1}, is half a token; each has 2 bytes")
    return Text(np.memmap(path, dtype, "r"), str(path))


def read_folder(root, only_python):
    """The bytes of all files, by path; the last 10% of the files are for validation."""
    def joined(files):
        return Text(np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8), str(root))
    skip = {"site-packages", "dist-packages", "test", "tests"} if only_python else set()
    files = []
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name[0] != "." and name not in skip]
        files += [Path(folder, name) for name in names
                  if name[0] != "." and (name.endswith(".py") or not only_python)]
    files.sort()
    cut = len(files) * 9 // 10
    if cut == 0:
        fail(f"{root} has too few files ({len(files)}) to train on some and validate with others")
    return joined(files[:cut]), joined(files[cut:])


def download(args):
    """See that a known set lies under --data-dir, whole and unchanged."""
    url, name, sha256 = KNOWN[args.data]
    path = Path(args.data_dir, name)
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f"{name}.{RANK}.tmp")
            with urllib.request.urlopen(url, timeout=60) as source, open(temporary, "wb") as file:
                size = int(source.headers["Content-Length"] or 0) or None
                with tqdm(total=size, desc=name, unit="B", unit_scale=True) as bar:
                    while block := source.read(1 << 16):
                        file.write(block)
                        bar.update(len(block))
            if url.endswith(".zip"):
                with zipfile.ZipFile(temporary) as archive:
                    content = archive.read(name)
                temporary.write_bytes(content)
            os.replace(temporary, path)
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, zipfile.BadZipFile) as error:
        fail(f"--data {args.data}: {error} (from {url}; or put the file there yourself: {path})")
    if found != sha256:
        fail(f"{path}: SHA-256 is {found}, expected {sha256}; remove the file to download it again")


def check_ids(text, begin, end, args):
    """Every token must be in the vocabulary; an id on the GPU that is not would be a riddle."""
    tokens = text.tokens[begin:end]
    if tokens.max() >= args.vocab_size:
        at = begin + int((tokens >= args.vocab_size).argmax())
        fail(f"{text.name}: token {text.tokens[at]} at byte "
             f"{(text.first + at) * text.tokens.itemsize} is not below --vocab-size "
             f"{args.vocab_size}")


def windows(text, starts, length, args, device):
    """Windows of length + 1 tokens from each of `starts`: inputs, and the same moved by one."""
    for i in starts:
        check_ids(text, i, i + length + 1, args)
    rows = np.stack([text.tokens[i:i + length + 1] for i in starts])         # (B, T + 1)
    rows = torch.from_numpy(rows.astype(np.int64))
    return (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)


# ── Shared by the four scripts: arguments, device, run folder, checkpoint, signals, optimiser ────

MAY_CHANGE = {"preset", "resume", "out", "device", "compile", "eval_every", "data_dir",
              "micro_batch", "recompute", "model", "sample", "tokens", "temperature", "top_k",
              "eval_length", "bench"}  # from a run to its resumption


def fail(message):
    """A user's mistake ends the script with one line and exit status 1."""
    raise SystemExit(f"{SCRIPT}: {message}" if LOCAL_RANK == 0 else 1)  # once a host, not N times


def say(*words):
    """Print, once in all."""
    if RANK == 0:
        print(*words, flush=True)


def at_least(low, kind=int):
    """An argparse type: a finite number, `low` or more."""
    def number(text):
        value = kind(text)
        if not low <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number from {low} up")
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
    add("--layers", type=at_least(1), help="number of blocks")
    add("--heads", type=at_least(1), help="number of heads H")
    add("--steps", type=at_least(1), help="training steps")
    add("--batch", type=at_least(1), help="sequences per step")
    add("--lr", type=at_least(0, float), help="peak learning rate")
    add("--warmup", type=at_least(0), help="steps of linear warm-up, before a cosine to zero")
    add("--weight-decay", type=at_least(0, float), help="of AdamW, on matrices only")
    add("--eval-every", type=at_least(1), help="steps between evaluations (and checkpoints)")
    add("--seed", type=at_least(0), default=0, help="of weights, data and dropout")
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
    name, reason = args.device, "as asked"
    if name == "auto":
        name, reason = ("cuda", "found") if there["cuda"] else ("cpu", "no CUDA device found")
    if not there[name]:
        fail(f"--device {name}: not on this machine, or not in this build of torch")
    if name == "cuda" and LOCAL_RANK >= torch.cuda.device_count():
        fail(f"process {LOCAL_RANK} of this host has no GPU: it has {torch.cuda.device_count()}")
    say(f"device {name} ({reason}), dtype {args.dtype}, {WORLD} process{'es' * (WORLD > 1)}")
    if name == "cuda":
        torch.cuda.set_device(LOCAL_RANK)
        return torch.device(name, LOCAL_RANK)
    return torch.device(name)


def autocast(args, device):
    """16-bit matrix products if --dtype asks for them; nothing for float32."""
    dtype = getattr(torch, args.dtype)
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


@contextlib.contextmanager
def run_folder(args):
    """Create --out and hold its lock: one run per folder. Earlier results are moved aside."""
    if RANK > 0:  # all writing is done by process 0
        yield
        return
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        lock = open(args.out / ".lock", "w")
        if fcntl:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"another run is using {args.out}: wait for it, or give another --out")
    except OSError as error:
        fail(f"--out {args.out}: {error.strerror}")
    with lock:
        if not args.resume:
            old = next(n for n in range(1, 10**9) if not list(args.out.glob(f"*.old.{n}.*")))
            names = "log.jsonl", "checkpoint.pt", "best.pt"
            for path in filter(Path.exists, (args.out / name for name in names)):
                print("kept:", path.rename(path.with_suffix(f".old.{old}{path.suffix}")))
        yield


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


def save_checkpoint(args, model, optimizer, scaler, is_best, **progress):
    """All that an exact resumption needs. Killed at any moment, one whole checkpoint remains."""
    if RANK > 0:
        return
    content = dict(
        progress, script=SCRIPT, args={**vars(args), "out": str(args.out)},
        model=model.state_dict(), optimizer=optimizer.state_dict(), scaler=scaler.state_dict(),
        rng=torch.get_rng_state(),
        cuda_rng=torch.cuda.get_rng_state() if torch.cuda.is_available() else None)
    files = {"checkpoint.pt": content}
    if is_best:
        weights = {name: content[name] for name in ("script", "step", "args", "model")}
        files = {"best.pt": weights, **files}
    for name, x in files.items():
        temporary = args.out / (name + ".tmp")
        with open(temporary, "wb") as file:
            torch.save(x, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, args.out / name)


def read_checkpoint(path):
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        step, made_by = saved["step"], saved["script"]
    except FileNotFoundError:
        fail(f"there is no {path}")
    except Exception:  # torch.load raises many kinds; all mean the same to the user
        fail(f"{path} is truncated, or not a checkpoint")
    if made_by != SCRIPT:
        fail(f"{path} was made by {made_by}")
    return saved


def load_checkpoint(args, model, optimizer, scaler):
    """Put back what `save_checkpoint` saved, and return it; cut the log back to that step."""
    path, log = args.out / "checkpoint.pt", args.out / "log.jsonl"
    saved = read_checkpoint(path)
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
    if log.exists() and RANK == 0:  # a kill may have torn its last line, or come before a save
        lines = [line for line in log.read_text().splitlines(True) if line.endswith("\n")]
        log.write_text("".join(x for x in lines if json.loads(x).get("step", -1) < saved["step"]))
    return saved


def write_log(args, **line):
    """Append one JSON line; the first of a file follows one with the arguments and versions."""
    if RANK > 0:
        return
    path = args.out / "log.jsonl"
    lines = [line]
    if not path.exists():
        versions = dict(python=platform.python_version(), torch=torch.__version__)
        lines.insert(0, dict(args=vars(args), **versions))
    with open(path, "a") as file:
        file.writelines(json.dumps(line, default=str) + "\n" for line in lines)


def make_optimizer(model, args):
    """AdamW. Only weight matrices decay: the embedding of a rare token would just fade away."""
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


@contextlib.contextmanager
def processes(device):
    """Join the other processes of torchrun, if there are any; end with them."""
    if WORLD == 1:
        yield
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    except RuntimeError as error:
        if not re.search("by peer|Broken pipe|DistBackendError", repr(error)):
            raise
        raise SystemExit(f"{SCRIPT}: process {RANK} stops, for another one of this job has died; "
                         "--resume continues from the last checkpoint") from None
    dist.destroy_process_group()


def total(*numbers):
    """Their sums over all processes, which wait here for each other, but not for their GPUs."""
    if WORLD == 1:
        return numbers
    sums = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.tolist()


# ── Plain PyTorch from here on: model, evaluation, training ──────────────────────────────────────

PEAK = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}  # 16-bit FLOP a second


def build_model(args):
    try:
        return LanguageModel(args.vocab_size, args.d_model, args.layers, args.heads, args.mixer,
                             args.d_ff, args.dropout, args.tie, **dict(args.option))
    except (ValueError, TypeError) as error:
        fail(error)


def run_block(block, x):
    return block(x)[0]                                                       # (B, T, D)


def mean_loss(head, x, targets):
    return F.cross_entropy(head(x).float().flatten(0, 1), targets.flatten())


class TrainingLoss(torch.nn.Module):
    """Windows (B, T + 1) in, the mean of -log p(next token) out: what every step minimises.

    --compile works block by block: equal blocks share one compilation of a few seconds, and with
    several processes the gradients of one block travel while those of the next are computed.
    --recompute keeps a block's input only, and runs the block again when its gradients are due.
    """

    def __init__(self, model, args):
        super().__init__()
        self.model, self.run_block, self.mean_loss = model, run_block, mean_loss
        if args.compile:
            torch._dynamo.config.optimize_ddp = False  # it would cut the blocks up once more
            self.run_block, self.mean_loss = torch.compile(run_block), torch.compile(mean_loss)
        if args.recompute:
            self.run_block = functools.partial(checkpoint, self.run_block, use_reentrant=False)

    def forward(self, rows):
        x = self.model.drop(self.model.embed(rows[:, :-1]))                  # (B, T, D)
        for block in self.model.body.blocks:
            x = self.run_block(block, x)
        return self.mean_loss(self.model.head, rms_norm(x), rows[:, 1:])


def flops_per_token(model, args):
    """Forward and backward: 6 per weight, and 6 per layer, channel and position that attention
    looks back at. (Embedding is a lookup; the work on a linear state, some 3%, is left out.)"""
    weights = sum(p.numel() for p in model.parameters())
    if not args.tie:
        weights -= model.embed.weight.numel()
    return 6 * (weights + (args.mixer == "attention") * args.layers * args.length * args.d_model)


def per_pass(args):
    """Sequences that one process puts through the model at once."""
    share = args.batch // WORLD
    return min(args.micro_batch or share, share)


def in_words(loss, args):
    bits = f" = {loss / math.log(2):.4f} bits per byte" if args.vocab_size == 256 else ""
    return f"{loss:.4f}{bits}"


def losses(model, rows, args, states=None):
    """-log p of each next token (B, T) for windows (B, T + 1), and the states after them."""
    with autocast(args, rows.device):
        x, states = model.features(rows[:, :-1], states=states)              # (B, T, D)
        logits = model.head(x).float()                                       # (B, T, vocab)
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return loss.view(len(rows), -1), states


@torch.no_grad()
def evaluate(model, text, args, device):
    """The mean loss over windows that do not overlap, each from an empty state: all of them, or
    --val-windows spread evenly. Each process takes its share."""
    count = (len(text.tokens) - 1) // args.length
    chosen = np.linspace(0, count - 1, min(args.val_windows or count, count)).astype(int)
    chosen, size = args.length * chosen[RANK::WORLD], per_pass(args)
    model.eval()
    loss, tokens = 0.0, 0
    for i in range(0, len(chosen), size):
        rows = windows(text, chosen[i:i + size], args.length, args, device)  # (B, T + 1)
        loss += losses(model, rows, args)[0].sum().item()
        tokens += rows[:, 1:].numel()
    model.train()
    loss, tokens = total(loss, tokens)
    return loss / tokens


def update(training_loss, optimizer, scaler, rows, args):
    """One optimiser step on this process's windows (B, T + 1). Returns their loss, on the device.

    Gradients add up over the passes, and are averaged over the processes in the last of them."""
    optimizer.zero_grad()
    loss, parts = 0.0, rows.split(per_pass(args))
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


def train(args, device):
    text, held_out = load_data(args)
    for part in (text, held_out):
        if len(part.tokens) <= args.length:
            fail(f"--length {args.length} needs more than the {len(part.tokens)} tokens that "
                 f"{part.name} has for {'training' if part is text else 'validation'}")
        check_ids(part, 0, 2**27, args)  # the beginning now, the rest as it is drawn
    if args.batch % WORLD or args.batch // WORLD % per_pass(args):
        fail(f"--batch {args.batch} cannot be shared by {WORLD} process{'es' * (WORLD > 1)}, "
             f"--micro-batch {args.micro_batch} at once")
    torch.manual_seed(args.seed)
    model = build_model(args).to(device)
    optimizer = make_optimizer(model, args)
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")
    say(f"{args.mixer}, {sum(p.numel() for p in model.parameters()):,} parameters; "
        f"{len(text.tokens):,} tokens to train on, {len(held_out.tokens):,} to validate with")

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = WORLD * next((PEAK[name] for name in PEAK if name in gpu), math.inf)
    share = args.batch // WORLD
    mine = slice(RANK * share, (RANK + 1) * share)  # of the sequences of a step
    progress = functools.partial(tqdm, total=args.steps, desc=args.mixer, unit="step",
                                 disable=RANK > 0)
    with run_folder(args), caught_signals() as caught, progress() as bar:
        run = dict(step=0, best=math.inf, seconds=0.0, train_loss=None)
        if args.resume:
            saved = load_checkpoint(args, model, optimizer, scaler)
            run = {name: saved[name] for name in run}
            bar.initial = bar.n = run["step"]
        training_loss = TrainingLoss(model, args)
        if WORLD > 1:
            training_loss = DistributedDataParallel(training_loss, gradient_as_bucket_view=True)
        began, recent = time.perf_counter() - run["seconds"], []
        timed_steps, timed_seconds, mark, rate, speed = 0, 0.0, None, None, ""
        for step in range(run["step"], args.steps + 1):
            last = step == args.steps
            interrupted, terminated = total(signal.SIGINT in caught, signal.SIGTERM in caught)
            pause = last or step % args.eval_every == 0 or interrupted or terminated
            if recent and (pause or step % 10 == 0):  # seldom: reading a loss waits for the GPU
                run["train_loss"], = total(torch.stack(recent).mean().item() / WORLD)
                check_finite(run["train_loss"], step)
                if mark:  # so not in the first stretch, in which things are compiled
                    timed_steps += len(recent)
                    timed_seconds += time.perf_counter() - mark
                    rate = timed_steps * args.batch * args.length / timed_seconds
                    used = rate * flops_per_token(model, args) / peak
                    speed = f", {rate:,.0f} tokens/s" + (f", MFU {used:.1%}" if used else "")
                mark = time.perf_counter()
                recent.clear()
                bar.set_postfix_str(f"loss {run['train_loss']:.3f}, best {run['best']:.3f}{speed}",
                                    refresh=False)
            if pause:
                run.update(step=step, seconds=time.perf_counter() - began)
                is_best = False
                if not terminated:  # which is in a hurry
                    loss = check_finite(evaluate(model, held_out, args, device), step)
                    is_best = loss < run["best"]
                    run["best"] = min(run["best"], loss)
                    write_log(args, **run, loss=loss, tokens_per_second=rate)
                    bar.clear()
                    say(f"step {step}: validation loss {in_words(loss, args)}{speed}")
                save_checkpoint(args, model, optimizer, scaler, is_best, **run)
                if last or interrupted or terminated:
                    break
                mark = mark and time.perf_counter()

            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args)
            # Data and dropout are functions of seed and step, so that a resumed run goes on alike;
            # sequence i of a step is the same for any number of processes.
            rng = np.random.default_rng([args.seed, step])
            starts = rng.integers(len(text.tokens) - args.length, size=args.batch)[mine]
            torch.manual_seed(rng.integers(2**40) + RANK)
            rows = windows(text, starts, args.length, args, device)          # (B, T + 1)
            recent.append(update(training_loss, optimizer, scaler, rows, args))
            bar.update()

    if interrupted or terminated:
        say(f"stopped after {step} steps, best validation loss {run['best']:.4f}; "
            "--resume continues")
        raise SystemExit(128 + (signal.SIGINT if interrupted else signal.SIGTERM))
    say(f"{step} steps in {run['seconds']:.0f} s; the best validation loss is "
        f"{in_words(run['best'], args)}")
    if args.vocab_size == 256 and RANK == 0:
        print_stream(model, "\n", 300, args, device)
    return dict(loss=loss, val_loss=loss, best=run["best"], steps=step, seconds=run["seconds"],
                bits_per_byte=loss / math.log(2) if args.vocab_size == 256 else None)


# ── With a trained model: sampling, longer contexts ──────────────────────────────────────────────

def load_model(args, device):
    """A checkpoint of this script, or a folder that the paper's authors released. Returns the
    model and the arguments that it was trained with."""
    path = Path(args.model) if args.model else args.out / "best.pt"
    if path.is_dir() and (path / "config.json").exists():
        model = load_release(path)
        trained = dict(vars(args), vocab_size=model.embed.num_embeddings)
    else:
        if path.is_dir():
            path = path / "best.pt"
        saved = read_checkpoint(path)
        trained = {**vars(args), **saved["args"]}
        trained.update((name, getattr(args, name)) for name in MAY_CHANGE)
        model = build_model(argparse.Namespace(**trained))
        model.load_state_dict(saved["model"])
    return model.to(device).eval(), argparse.Namespace(**trained)


def load_release(folder):
    """config.json beside *.safetensors or pytorch_model*.bin, in one file or several."""
    weights, path = {}, folder / "config.json"
    try:
        config = json.loads(path.read_text())
        files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
        for path in files:
            weights |= (read_safetensors(path) if path.suffix == ".safetensors" else
                        torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # of many kinds, each a file that is not what it should be
        reason = " ".join(str(error).split())[:200]
        fail(f"{path} cannot be read: {type(error).__name__}: {reason}")
    for name, known in (("no_scale_embedding", [True]), ("norm_type", ["simplermsnorm"]),
                        ("glu_act", ["silu", "swish"])):
        if config.get(name, known[0]) not in known:
            fail(f"{folder / 'config.json'}: {name} is {config[name]!r}, and only "
                 f"{' or '.join(map(repr, known))} is known here")
    try:
        return LanguageModel.load_official(weights, config.get("decoder_attention_heads", 8))
    except ValueError as error:
        fail(f"{folder}: {error}")


def read_safetensors(path):
    """The format: 8 bytes that say n, n bytes of JSON (each tensor's dtype, shape, and bytes from
    and to), then the numbers."""
    data = np.memmap(path, np.uint8, "c")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    if start > len(data):
        raise ValueError(f"it ends at byte {len(data)}, its header at byte {start}")
    tensors, dtypes = {}, dict(F64=torch.float64, F32=torch.float32, F16=torch.float16,
                               BF16=torch.bfloat16)
    for name, entry in json.loads(data[8:start].tobytes()).items():
        if name == "__metadata__":
            continue
        begin, end = (start + offset for offset in entry["data_offsets"])
        if end > len(data):
            raise ValueError(f"it ends at byte {len(data)}, {name} at byte {end}")
        numbers = torch.from_numpy(data[begin:end]).view(dtypes[entry["dtype"]])
        tensors[name] = numbers.view(entry["shape"])
    return tensors


@torch.no_grad()
def stream(model, prompt, count, args):
    """Yield `count` tokens after the prompt (T0,), one at a time, from states of a fixed size."""
    x, states = model.features(prompt[None])                                 # (1, T0, D)
    states = [block.mixer.reserve(state, count)
              for block, state in zip(model.body.blocks, states)]
    for _ in range(count):
        logits = model.head(x[:, -1]).float()                                # (1, vocab)
        if args.top_k:
            least = logits.topk(min(args.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        token = (torch.multinomial((logits / args.temperature).softmax(-1), 1)
                 if args.temperature else logits.argmax(-1, keepdim=True))   # (1, 1)
        yield token.item()
        x, states = model.features(token, states=states, in_place=True)


def print_stream(model, prompt, count, args, device):
    """Text in and out if the vocabulary is bytes, else ids. Ctrl-C ends it."""
    def shown(ids):
        return decoder.decode(bytes(ids)) if args.vocab_size == 256 else " ".join(map(str, ids))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a letter may take several bytes
    ids = list(prompt.encode("utf-8", "surrogateescape"))
    if args.vocab_size != 256:
        ids = [int(x) if x.isdecimal() else -1 for x in prompt.split()]
        if not all(0 <= x < args.vocab_size for x in ids):
            fail(f"--sample {prompt!r}: token ids from 0 to {args.vocab_size - 1} expected")
    between = "" if args.vocab_size == 256 else " "
    print(shown(ids), end=between)
    with contextlib.suppress(KeyboardInterrupt):
        for token in stream(model.eval(), torch.tensor(ids or [0], device=device), count, args):
            print(shown([token]), end=between, flush=True)
    print()


@torch.no_grad()
def evaluate_lengths(args, device):
    """The loss by position, in sequences as long as the longest of --eval-length."""
    model, args = load_model(args, device)
    _, text = load_data(args)
    edges = [0] + sorted(set(args.eval_length))
    count = min((len(text.tokens) - 1) // edges[-1], 32)
    if count == 0:
        fail(f"--eval-length {edges[-1]} is too long for the {len(text.tokens)} tokens of "
             f"{text.name}")
    loss = torch.zeros(edges[-1])                                            # by position
    starts = np.linspace(0, len(text.tokens) - 1 - edges[-1], count).astype(int)
    for i in range(0, count, 8):
        rows, states = windows(text, starts[i:i + 8], edges[-1], args, device), None
        for begin in tqdm(range(0, edges[-1], 1024), leave=False):  # the states carry over
            found, states = losses(model, rows[:, begin:begin + 1025], args, states)
            loss[begin:begin + 1024] += found.sum(0).cpu() / count
    result = {f"{low}-{high}": loss[low:high].mean().item() for low, high in zip(edges, edges[1:])}
    print(f"{count} sequences; trained at length {args.length}")
    for positions, mean in result.items():
        print(f"positions {positions:>13}: loss {in_words(mean, args)}")
    return result


# ── The benchmark: speed and memory of a mixer beside attention, with random weights and tokens ──

COLUMNS = ("mixer", "T", "training tokens/s", "peak GiB", "prompt ms", "tokens/s at batch 1",
           "tokens/s at batch 64", "state MiB")


def bench(args, device):
    """A row for each mixer and length T. A training step has the same number of tokens in all."""
    results = []
    print("  ".join(x.rjust(9) for x in COLUMNS))
    for mixer in dict.fromkeys([args.mixer, "attention"]):
        for T in args.bench or ([1024, 2048, 4096, 16384, 32768, 65536] if device.type == "cuda"
                                else [256, 1024, 4096]):
            batch = max(args.length * per_pass(args) // T, 1)
            one = argparse.Namespace(**vars(args) | dict(mixer=mixer, length=T, batch=batch,
                                                         micro_batch=0))
            row = dict.fromkeys(COLUMNS, "OOM") | dict(mixer=mixer, T=T)
            for measure in (bench_training, bench_prompt, functools.partial(bench_decoding, B=1),
                            functools.partial(bench_decoding, B=64)):
                with contextlib.suppress(torch.OutOfMemoryError):
                    row |= measure(one, device)
                if args.compile:
                    torch.compiler.reset()  # else the next length would be compiled for any length
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            for title, x in row.items():
                if isinstance(x, float):
                    x = f"{x:,.0f}" if x >= 1000 else f"{x:.4g}"
                print(str(x).rjust(max(len(title), 9)), end="  ")
            print(flush=True)
            results.append(row)
    return dict(rows=results)


def bench_training(args, device):
    model = build_model(args).to(device)
    optimizer, training_loss = make_optimizer(model, args), TrainingLoss(model, args)
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")
    rows = torch.randint(args.vocab_size, (args.batch, args.length + 1), device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = seconds_per_call(lambda: update(training_loss, optimizer, scaler, rows, args), device)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else "-"
    return {"training tokens/s": args.batch * args.length / seconds, "peak GiB": peak}


@torch.no_grad()
def bench_prompt(args, device):
    """From a prompt of T tokens to the logits after it."""
    model = build_model(args).to(device, getattr(torch, args.dtype)).eval()
    prompt = torch.randint(args.vocab_size, (1, args.length), device=device)
    return {"prompt ms": 1e3 * seconds_per_call(
        lambda: model.head(model.features(prompt)[0][:, -1]), device)}


@torch.no_grad()
def bench_decoding(args, device, B):
    """Token after token for B sequences, with room for T tokens in the cache (attention reads all
    of it in each step; a linear state has no room to make). On a GPU the step is a CUDA graph."""
    model = build_model(args).to(device, getattr(torch, args.dtype)).eval()
    token = torch.randint(args.vocab_size, (B, 1), device=device)
    states = [[x.clone() for x in block.mixer.reserve(state, max(args.length, 64) - 1)]
              for block, state in zip(model.body.blocks, model.features(token)[1])]

    def step():
        x, after = model.features(token, states=states, in_place=True)       # (B, 1, D)
        token.copy_(model.head(x[:, -1]).argmax(-1, keepdim=True))
        for old, new in zip(states, after):  # a graph looks for its inputs where they were
            for one, other in zip(old, new):
                if one is not other:
                    one.copy_(other)

    call = step
    if device.type == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):  # capturing wants a warm-up, and that aside
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        call = graph.replay
    seconds = seconds_per_call(call, device, calls=50)
    size = sum(x.nbytes for state in states for x in state) / B / 2**20
    return {f"tokens/s at batch {B}": B / seconds, "state MiB": size}


def seconds_per_call(call, device, calls=10):
    """The mean after three calls that warm up."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for i in range(-3, calls):
        if i == 0:
            wait()
            began = time.perf_counter()
        call()
    wait()
    return (time.perf_counter() - began) / calls


# ── The command line ─────────────────────────────────────────────────────────────────────────────

def lengths(text):
    """An argparse type: 1k,4k is 1024 and 4096."""
    return [at_least(1)(x.removesuffix("k")) * (1024 if x.endswith("k") else 1)
            for x in text.split(",")]


def name_and_value(text):
    """An argparse type for --option."""
    name, value = text.split("=")
    return name, json.loads(value)


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
    add("--dropout", type=at_least(0, float), help="after the embedding, the mixer and the GLU")
    add("--tie", action=argparse.BooleanOptionalAction, help="share embedding and head weights")
    add("--option", type=name_and_value, nargs="*", default=[], metavar="NAME=VALUE",
        help="more arguments of the mixer, such as tau=4 conv_size=4")
    add("--beta2", type=at_least(0, float), help="of AdamW: its memory for squared gradients")
    add("--recompute", action=argparse.BooleanOptionalAction,
        help="activation checkpointing: less memory, a third more work")
    add("--model", help="for the two below: a checkpoint, or a folder of the authors' release "
        "(default: best.pt in --out)")
    add("--sample", metavar="PROMPT", help="stream text that continues PROMPT (of .bin data: ids)")
    add("--eval-length", type=lengths, metavar="T,T,…", help="loss by position; 1k,4k,16k,64k")
    add("--tokens", type=at_least(1), default=500, help="of --sample")
    add("--temperature", type=at_least(0, float), default=0.8, help="of --sample; 0: the likeliest")
    add("--top-k", type=at_least(0), default=0, help="of --sample: among the k likeliest; 0: all")
    add("--bench", type=lengths, nargs="?", const=[], metavar="T,T,…", help="a table of speed and "
        "memory, beside attention's")
    args = parse(parser, argv)
    device = choose_device(args)
    if WORLD > 1 and (args.bench is not None or args.eval_length or args.sample is not None):
        fail("torchrun is for training only")
    if args.bench is not None:
        return bench(args, device)
    if args.eval_length:
        return evaluate_lengths(args, device)
    if args.sample is not None:
        torch.manual_seed(args.seed)
        model, args = load_model(args, device)
        return print_stream(model, args.sample, args.tokens, args, device)
    with processes(device):
        try:
            return train(args, device)
        except FloatingPointError as error:
            fail(error)


if __name__ == "__main__":
    main()
