"""Train a classifier of long sequences: the six tasks of the Long Range Arena (LRA).

    pip install torch numpy tqdm
    python train_lra.py                              # short ListOps on a laptop: 45% in 3 minutes
    python train_lra.py --preset listops --generate  # the paper's settings, on a GPU; likewise
                                                     # pathfinder and pathx
    python train_lra.py --preset text                # IMDB, from --data-dir; also retrieval, image
    python train_lra.py --preset text --bench        # training steps/s, MetaLA against attention

On a GPU add --compile --dtype bfloat16. Data are read in their official layouts; where they are
missing, the script says where to get them. ListOps comes with its published generator, Pathfinder
with one like the published. All is parsed once, into <data-dir>/cache. --steps shortens a preset,
its warm-up in proportion. Validation accuracy selects the model; the test set is read once.

A run leaves log.jsonl and checkpoint.pt in --out. Ctrl-C evaluates, saves and stops; the same
command with --resume continues as if nothing had happened. Reading order: the tasks, then from
`Data` down; the part in between can wait.
"""
import argparse
import collections
import contextlib
import functools
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import time
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from metala import MIXERS, Backbone

try:
    import fcntl
except ImportError:  # Windows has no flock: there, two runs in one folder go unnoticed
    fcntl = None

SCRIPT = "train_lra"


def paper(task, length, layers, d_model, d_ff, dropout, lr, batch, weight_decay, warmup, steps,
          **more):
    """The paper's settings; its "head size 4" is read as 4 heads. Convolution: 4 as in the release,
    but 5 where both sides are seen, which needs an odd size."""
    return dict(task=task, length=length, layers=layers, d_model=d_model, d_ff=d_ff, heads=4,
                dropout=dropout, lr=lr, batch=batch, weight_decay=weight_decay, warmup=warmup,
                steps=steps, eval_every=1000, bidirectional=False, conv=4, generate=False,
                shortest=500, examples=100_000) | more


BOTH = dict(bidirectional=True, conv=5, examples=200_000)
#                         length layers d  d_ff drop   lr batch decay warm-up steps
LAPTOP = paper("listops", 128, 3, 64, 128, 0.0, 2e-3, 32, 0.01, 100, 2000,
               generate=True, shortest=20, examples=50_000, eval_every=250)
PRESETS = {
    "laptop": LAPTOP,
    "listops": paper("listops", 2000, 6, 32, 64, 0.0, 5e-4, 128, 0.01, 5000, 50_000),
    "text": paper("text", 4096, 4, 128, 256, 0.1, 4e-3, 64, 0.0, 10_000, 50_000),
    "retrieval": paper("retrieval", 4000, 2, 256, 512, 0.1, 8e-4, 128, 1e-4, 312, 50_000, **BOTH),
    "image": paper("image", 1024, 6, 512, 512, 0.0, 3e-3, 128, 0.0, 30_000, 50_000, **BOTH),
    "pathfinder": paper("pathfinder", 1024, 6, 128, 128, 0.0, 2e-3, 256, 0.0, 50_000, 500_000,
                        **BOTH),
    "pathx": paper("pathx", 16_384, 6, 32, 32, 0.0, 7.5e-4, 256, 0.0, 15_000, 500_000, **BOTH)}


# ── The tasks. A document is a `bytes`, one token per byte. Readers of files yield (place, split,
#    label, documents), makers of data return blocks of (label, document). ────────────────────────

TRAIN, VAL, TEST = range(3)  # the splits
BLOCK = 200


def generate(args, task):
    """--examples examples, always the same ones, made on all cores. Of every task.every in a row,
    the last two are for validation and test."""
    jobs, make = math.ceil(args.examples / BLOCK), functools.partial(task.make_block, args)
    ignore_ctrl_c = (signal.SIGINT, signal.SIG_IGN)  # the parent process answers it
    with multiprocessing.Pool(min(jobs, os.cpu_count()), signal.signal, ignore_ctrl_c) as pool:
        blocks = tqdm(pool.imap(make, range(jobs)), total=jobs, desc="data", unit="block")
        examples = itertools.islice(itertools.chain.from_iterable(blocks), args.examples)
        for i, (label, document, *_) in enumerate(examples):
            yield "", max(TRAIN, i % task.every - task.every + 3), label, [document]


# ListOps: [MAX 4 3 [MIN 2 3 ] 1 0 ] has the value 4; ten classes.

OPERATORS = {"[MIN": min, "[MAX": max, "[MED": lambda values: int(statistics.median(values)),
             "[SM": lambda values: sum(values) % 10}
TOKEN = {symbol: i for i, symbol in enumerate([*"0123456789", *OPERATORS, "]"])}


def read_listops(paths, args):
    """Lines `Source TAB Target`. Source's parentheses only repeat the brackets."""
    for split, path in enumerate(paths):
        with open(path, encoding="utf-8", errors="replace") as file:
            for i, line in enumerate(file, 1):
                source, _, target = line.rstrip("\n").partition("\t")
                words = source.replace("(", " ").replace(")", " ").split()
                if i > 1 or words != ["Source"]:
                    tokens = [TOKEN.get(word) for word in words]
                    yield f"{path}:{i}", split, target, [b"" if None in tokens else bytes(tokens)]


def grow_tree(uniform, depth, limit, tokens):
    """Append a random tree's tokens to `tokens` and return its value: the published rules. Past
    `limit`, where the tree is going to be rejected, only leaves follow."""
    if depth == 10 or len(tokens) >= limit or uniform() > 0.25:
        tokens.append(int(10 * uniform()))
        return tokens[-1]
    place = len(tokens)
    tokens.append(0)  # the operator, drawn after its arguments
    values = [grow_tree(uniform, depth + 1, limit, tokens) for _ in range(2 + int(9 * uniform()))]
    symbol = list(OPERATORS)[int(4 * uniform())]
    tokens[place] = TOKEN[symbol]
    tokens.append(TOKEN["]"])
    return OPERATORS[symbol](values)


def listops_block(args, job):
    """(value, tokens) of trees longer than --shortest and shorter than --length."""
    uniform, made = random.Random(job).random, []
    while len(made) < BLOCK:
        tokens = bytearray()
        value = grow_tree(uniform, 1, args.length, tokens)
        if args.shortest < len(tokens) < args.length:
            made.append((value, bytes(tokens)))
    return made


# Text (IMDB reviews: is the reviewer pleased?) and Retrieval (AAN: does one paper cite the other?)

def read_text(paths, args):
    """One review per file, named <id>_<rating>.txt. No validation split is published: here it is
    the last tenth of each class by name, because the reviews of one film have neighbouring ids."""
    for i, folder in enumerate(paths):
        files = sorted(folder.glob("*_*.txt"))
        for k, path in enumerate(files):
            split = TEST if i >= 2 else VAL if k >= 0.9 * len(files) else TRAIN
            yield path, split, i % 2, [path.read_bytes()]


def read_retrieval(paths, args):
    """Rows of five columns without header or quoting: label, two ids, two texts. The texts look
    like Python literals, b'…' with escapes; the published loader takes them as they are, too."""
    for split, path in enumerate(paths):
        with open(path, "rb") as file:
            for i, line in enumerate(file, 1):
                label, *columns = line.rstrip(b"\r\n").split(b"\t")
                yield f"{path}:{i}", split, label.decode(errors="replace"), columns[2:]


# Image: CIFAR-10 in grey, a pixel after the other.

def read_image(paths, args):
    """Records of 3073 bytes: the label, then 1024 red, green and blue values. The last 5,000 of the
    50,000 training images are the validation split."""
    for i, path in enumerate(paths):
        data = np.fromfile(path, np.uint8)
        if len(data) == 0 or len(data) % 3073:
            fail(f"{path}: {len(data)} bytes are not a multiple of 3073: truncated?")
        data = data.reshape(-1, 3073)
        grey = np.dot([0.299, 0.587, 0.114], data[:, 1:].reshape(-1, 3, 1024))      # (n, 1024)
        for k, pixels in enumerate(grey.round().astype(np.uint8)):
            split = TEST if i == 5 else VAL if i == 4 and k >= len(data) / 2 else TRAIN
            yield f"{path}: record {k}", split, data[k, 0], [pixels.tobytes()]


# Pathfinder: do the two dots lie on the same dashed curve? 32 × 32 pixels; Path-X has 128 × 128.

def read_pathfinder(paths, args):
    """metadata/<N>.npy, which are text: folder, file, index, label, … of one image per line.
    Unreadable images are left out, and counted. Of every ten images, one is for validation and one
    for the test: the release has no split of its own."""
    try:
        from PIL import Image
    except ImportError:
        fail("reading PNG files needs Pillow: pip install pillow")
    total, bad = 0, []
    for path in sorted(paths[0].glob("*.npy")):
        for i, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
            folder, name, _, label, *_ = [*line.split(), "", "", "", ""]
            file, total = paths[0].parent / folder / name, total + 1
            try:
                with Image.open(file) as image:
                    pixels = image.convert("L").tobytes()
            except (OSError, SyntaxError, ValueError):  # what Pillow raises for a broken file
                pixels = b""
            if len(pixels) == args.length or not label:
                yield f"{path}:{i}", max(TRAIN, total % 10 - 7), label, [pixels]
            else:
                bad.append(str(file))
    if bad:
        print(f"left out {len(bad)} of {total} images, empty, unreadable or not of {args.length} "
              f"pixels: {', '.join(bad[:5])}{', …' * (len(bad) > 5)}")


# In pixels: the size of the image; the length of a dash; half the gap between two dashes of a
# curve; how far a dash stays from other curves; its thickness; bend, which lets a curve turn by up
# to 90° / bend from dash to dash; how far apart the two long curves start; the radius of a dot.
Scene = collections.namedtuple("Scene", "size dash gap clear thickness bend apart dot")
SCENES = {32 * 32: Scene(32, 2.4, 0.8, 2.0, 0.6, 1.0, 7.0, 1.5),
          128 * 128: Scene(128, 5.0, 2.5, 4.5, 1.5, 1.8, 20.0, 3.0)}


def cells(points, image):
    """Where points, complex numbers, fall in an image with four cells to a pixel, along each axis.
    What is outside falls on the border."""
    return tuple((4 * x).astype(int).clip(0, len(image) - 1) for x in (points.real, points.imag))


def stamp(image, points, radius):
    """Set the cells within `radius` of the points."""
    r = np.arange(-radius, radius + 0.1, 0.25)
    disc = r[:, None] + 1j * r
    image[cells(points[:, None] + disc[abs(disc) <= radius], image)] = True


def grow_curve(rng, scene, taken, pivot, dashes):
    """Three points a dash, of as many dashes as fit into what is not `taken`, and take it.

    Each takes one of 13 turns, likely a gentle one with room for three more dashes ahead of it."""
    heading, curve = rng.uniform(0, 2 * np.pi), np.empty(0, complex)
    stride = scene.dash + 2 * scene.gap
    reach = np.append(np.linspace(scene.gap, scene.gap + scene.dash, 3),
                      stride * np.linspace(1, 3, 6))                                # (9,)
    for _ in range(dashes):
        turn = (np.arange(13) + rng.random() - 6.5) / 13 * np.pi / scene.bend       # (13,)
        step = np.exp(1j * (heading + turn))
        way = pivot + step[:, None] * reach                                         # (13, 9)
        free = ~taken[cells(way, taken)]
        room = free[:, 3:].cumprod(1).mean(1)                                       # (13,)
        weight = np.cos(scene.bend * turn) ** 2 * free[:, :3].all(1) * (1e-3 + room ** 4)
        if not weight.any():
            break
        i = (weight.cumsum() > rng.random() * weight.sum()).argmax()
        stamp(taken, curve[-3:], scene.clear)  # later: its last dash is not in a curve's way
        curve = np.append(curve, way[i, :3])
        pivot, heading = pivot + stride * step[i], heading + turn[i]
    stamp(taken, curve[-3:], scene.clear)
    return curve


def pathfinder_block(args, job):
    """(label, pixels, dots): two long curves, some short ones, two dots at ends of the long ones.

    Only the second dot depends on the label: it is at the far end of the curve on which the first
    dot is, or of the other curve. Whichever of the two has been rarer at its distance is taken, so
    that the distance between the dots says nothing.
    """
    rng, scene = np.random.default_rng([args.length, job]), SCENES[args.length]
    made, surplus = [], collections.Counter()
    while len(made) < BLOCK:
        image = np.zeros((4 * scene.size, 4 * scene.size), bool)
        taken = np.pad(image[8:, 8:], 4, constant_values=True)  # but for a border
        middle, *starts = rng.uniform(0, scene.size, (11, 2)) @ [1, 1j]
        middle = (scene.size * (1 + 1j) + middle) / 3
        side = scene.apart / 2 * np.exp(2j * np.pi * rng.random())
        curves = [grow_curve(rng, scene, taken, middle + side, 14)]
        if len(curves[0]) == 42:
            curves.append(grow_curve(rng, scene, taken, middle - side, 14))
        if len(curves[-1]) < 42:
            continue
        curves += [grow_curve(rng, scene, taken, start, 4) for start in starts]
        one = rng.integers(2)
        start, ends = curves[one][0], (curves[1 - one][-1], curves[one][-1])
        near = [int(abs(start - end) * 32 / scene.size) for end in ends]
        label = int(surplus[near[0]] + surplus[near[1]] < rng.integers(2))
        surplus[near[label]] += 2 * label - 1
        dash, dots = np.concatenate(curves).reshape(-1, 3), np.array([start, ends[label]])
        line = dash[:, :1] + (dash[:, 2:] - dash[:, :1]) * np.linspace(0, 1, 24)    # (dashes, 24)
        stamp(image, line.ravel(), scene.thickness / 2)
        stamp(image, dots, scene.dot)
        grey = 255 * image.reshape(scene.size, 4, scene.size, 4).mean((1, 3))
        made.append((label, grey.round().astype(np.uint8).tobytes(), dots))
    return made


# Where the tasks' files are, what is in them, and where to get them

class Task(NamedTuple):
    classes: int
    vocab: int            # 0: tokens are brightnesses, numbers rather than symbols
    documents: int        # of an example
    folder: str           # below --data-dir
    files: list           # in it, all of them needed
    read: Callable        # (paths of these files, args) → examples
    row: str              # an example in a file
    archive: tuple        # URL; size and hash
    make_block: Callable = None
    every: int = 10       # one of so many generated examples is for validation, one for test


LRA = ("https://storage.googleapis.com/long-range-arena/lra_release.gz",
       "8.23 GB, no hash published")
IMDB = ("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
        "84,125,825 bytes, md5 7c2ac02c03563afcf9b574c7e56c153a")
CIFAR = ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
         "170,052,171 bytes, md5 c32a1d4ab5d03f1284b67883e8d87530")
CURVES = (["metadata", "imgs"], read_pathfinder, "folder, file, index, label 0–1, …", LRA,
          pathfinder_block)
TASKS = {
    "listops": Task(10, len(TOKEN), 1, "listops-1000",
                    [f"basic_{split}.tsv" for split in ("train", "val", "test")], read_listops,
                    "Source TAB Target, its value 0–9,", LRA, listops_block, 50),
    "text": Task(2, 256, 1, "aclImdb", ["train/neg", "train/pos", "test/neg", "test/pos"],
                 read_text, "a review", IMDB),
    "retrieval": Task(2, 256, 2, "tsv_data",
                      [f"new_aan_pairs.{split}.tsv" for split in ("train", "eval", "test")],
                      read_retrieval, "label 0–1, id, id, text, text with TABs between", LRA),
    "image": Task(10, 0, 1, "cifar-10-batches-bin",
                  [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"], read_image,
                  "label 0–9 and pixels", CIFAR),
    "pathfinder": Task(2, 0, 1, "pathfinder32/curv_contour_length_14", *CURVES),
    "pathx": Task(2, 0, 1, "pathfinder128/curv_contour_length_14", *CURVES)}


def find_files(args, task):
    """The paths of the task's files. The LRA archive unpacks into a folder within a folder, and the
    outer one holds stray copies: the inner one comes first."""
    for root in ("lra_release/lra_release", "lra_release", "."):
        paths = [args.data_dir / root / task.folder / name for name in task.files]
        if all(path.exists() for path in paths):
            return paths
    url, size = task.archive
    fail(f"no {args.data_dir / task.folder} with {', '.join(task.files)} (nor under lra_release "
         f"there). Get {url} ({size}) and unpack it: mkdir -p {args.data_dir} && "
         f"tar xzf {url.rsplit('/')[-1]} -C {args.data_dir}"
         + ("; or make a set of the same kind: --generate" if task.make_block else ""))


def write_examples(folder, rows, args, task):
    """tokens.bin: every document, filled up to --length; index.npz: lengths, labels, splits, and
    tokens.bin's checksum."""
    value = {f"{i}{point}": i for i in range(task.classes) for point in ("", ".0")}
    lengths, labels, splits, crc = [], [], [], 0
    with open(folder / "tokens.bin", "wb") as file:
        for place, split, label, documents in rows:
            length = [len(document[:args.length]) for document in documents]
            if str(label) not in value or len(length) != task.documents or 0 in length:
                fail(f"{place}: {task.row} expected, not label {label} and {length} tokens")
            row = b"".join(x[:args.length].ljust(args.length, b"\0") for x in documents)
            file.write(row)
            crc = zlib.crc32(row, crc)
            lengths.append(length)
            labels.append(value[str(label)])
            splits.append(split)
    if not labels:
        fail(f"no examples: {task.row} expected in {', '.join(task.files)}")
    np.savez(folder / "index.npz", length=lengths, label=labels, split=splits, crc=crc)


# ── Shared by the four scripts: arguments, device, run folder, checkpoint, signals, optimiser ────

MAY_CHANGE = {"preset", "resume", "out", "device", "compile", "eval_every",
              "data_dir"}  # from a run to its resumption


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
    add("--warmup", type=at_least(0),
        help="steps of linear warm-up, before a cosine to zero; a preset's scales with --steps")
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
    preset = PRESETS[parser.parse_args(argv).preset]
    parser.set_defaults(**preset | dict(warmup=None))
    args = parser.parse_args(argv)
    if args.warmup is None:
        args.warmup = preset["warmup"] * args.steps // preset["steps"]
    return args


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
        progress, script=SCRIPT, args={**vars(args), "out": str(args.out), "data_dir": ""},
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

BENCH_SECONDS = 3
ORDER, DROPOUT = 3, 4  # random streams: each is seeded with [seed, stream, epoch or step]


class Data:
    """N examples of P documents, each filled up to L tokens: all on the device."""

    def __init__(self, tokens, length, label, split, device, widths=16):
        self.tokens, self.length, self.label = (                                   # (N, P, L),
            torch.from_numpy(x).to(device) for x in (tokens, length, label))       # (N, P), (N,)
        self.splits = [np.flatnonzero(split == s) for s in (TRAIN, VAL, TEST)]
        self.padded = bool((length < tokens.shape[2]).any())
        # A batch is as wide as its widest example. Few different widths T occur.
        unit = 8 * math.ceil(tokens.shape[2] / (8 * widths))
        self.width = np.minimum(-(-length.max(1) // unit) * unit, tokens.shape[2])  # (N,)

    def batch(self, rows, T):
        """tokens (B·P, T), mask (B·P, T) or None, labels (B,)"""
        tokens = self.tokens[rows, :, :T].flatten(0, 1)
        length = self.length[rows].view(-1, 1)                                     # (B·P, 1)
        mask = torch.arange(T, device=tokens.device) < length if self.padded else None
        return tokens, mask, self.label[rows]


def load_data(args, device):
    """The examples of --task, parsed or generated on the first call, memory-mapped ever after."""
    task, cache = TASKS[args.task], args.data_dir / "cache"
    if args.generate:
        rows, source = generate(args, task), (args.shortest, args.examples)
    else:
        paths = find_files(args, task)
        stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        rows, source = task.read(paths, args), stats
    folder = cache / f"{args.task}-{args.length}-{zlib.crc32(repr(source).encode()):08x}"
    if not folder.exists():
        print(f"preparing {folder} (once)")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            write_examples(Path(temporary), rows, args, task)
            with contextlib.suppress(OSError):  # another run was faster
                os.rename(temporary, folder)
    try:
        tokens = np.memmap(folder / "tokens.bin", np.uint8, "c")
        index = dict(np.load(folder / "index.npz"))
        if zlib.crc32(tokens) != index.pop("crc"):
            raise ValueError("wrong checksum")
    except Exception as error:  # of many kinds
        fail(f"{folder} is damaged ({error}): remove it, and it will be made again")
    widths = 1 if args.compile and device.type != "cuda" else 16  # there, each T compiles anew
    data = Data(tokens.reshape(-1, task.documents, args.length), **index, device=device,
                widths=widths)
    sizes = [len(rows) for rows in data.splits]
    print("{:,} training, {:,} validation, {:,} test examples".format(*sizes))
    if min(sizes) == 0 or sizes[0] < args.batch:
        fail(f"--batch {args.batch}: too few examples, {' + '.join(map(str, sizes))}")
    return data


def training_batches(args, data):
    """step → rows, T of its batch: a function of the step alone, so that a resumed run continues.

    A batch is made of documents of similar length: every 50 batches' worth of the shuffled epoch is
    sorted by length, then all batches are shuffled. On IMDB, an epoch then has 1.13 times its real
    tokens, and 3.08 times without this.
    """
    B, per_epoch = args.batch, len(data.splits[TRAIN]) // args.batch

    @functools.lru_cache(1)
    def batches(epoch):
        rng = np.random.default_rng([args.seed, ORDER, epoch])
        rows = rng.permutation(data.splits[TRAIN])[:per_epoch * B]
        by_width = np.lexsort((data.width[rows], np.arange(len(rows)) // (50 * B)))
        rows = rng.permutation(rows[by_width].reshape(per_epoch, B))
        widths = data.width[rows].max(1).tolist()
        return list(zip(torch.from_numpy(rows).to(data.label.device), widths))
    return lambda step: batches(step // per_epoch)[step % per_epoch]


class Classifier(nn.Module):
    """Tokens → embeddings → metala.Backbone → mean over real tokens → logits.

    Brightnesses are embedded by a linear map of one number. Two documents are read by the same
    backbone, each by itself, and compared as [u, v, u − v, u · v].
    """

    def __init__(self, args, task):
        super().__init__()
        D, self.task = args.d_model, task
        self.embed = nn.Embedding(task.vocab, D) if task.vocab else nn.Linear(1, D)
        self.drop = nn.Dropout(args.dropout)
        self.body = Backbone(D, args.layers, args.heads, args.mixer, args.d_ff, args.dropout,
                             **dict(conv_size=args.conv, bidirectional=args.bidirectional)
                             | dict(args.option))
        self.head = nn.Linear(D, task.classes) if task.documents == 1 else nn.Sequential(
            nn.Linear(4 * D, D), nn.SiLU(), nn.Linear(D, task.classes))

    def forward(self, tokens, mask):
        tokens = tokens.int() if self.task.vocab else tokens[..., None] / 127.5 - 1
        x, _ = self.body(self.drop(self.embed(tokens)), mask)                      # (B·P, T, D)
        if mask is None:
            x = x.mean(1, dtype=torch.float32)                                     # (B·P, D)
        else:
            x = x.masked_fill(~mask[..., None], 0.0).sum(1, dtype=torch.float32)
            x = x / mask.sum(1, keepdim=True)
        if self.task.documents == 2:
            u, v = x.unflatten(0, (-1, 2)).unbind(1)                               # (B, D)
            x = torch.cat([u, v, u - v, u * v], -1)                                # (B, 4D)
        return self.head(x).float()                                                # (B, classes)


def build_model(args, device):
    torch.manual_seed(args.seed)
    try:
        return Classifier(args, TASKS[args.task]).to(device)
    except (ValueError, TypeError, RuntimeError) as error:  # Runtime: too large for memory
        fail(error)


@torch.no_grad()
def evaluate(model, data, split, args):
    """The mean loss and the accuracy on a split."""
    model.eval()
    rows, loss, right, device = data.splits[split], 0, 0, data.label.device
    rows = rows[np.argsort(data.width[rows], kind="stable")]
    for part in np.array_split(rows, math.ceil(len(rows) / args.batch)):
        *batch, label = data.batch(torch.from_numpy(part).to(device), data.width[part].max())
        with autocast(args, device), torch.compiler.set_stance("force_eager"):
            logits = model(*batch)                  # (B, classes), and any B: not to be compiled
        loss += F.cross_entropy(logits, label, reduction="sum")
        right += (logits.argmax(-1) == label).sum()
    model.train()
    return loss.item() / len(rows), right.item() / len(rows)


def training_step(model, optimizer, scaler, data, args):
    """A function that trains on a batch, its learning rate and the sum of its losses: both on the
    device, so that the host never waits. With --compile on CUDA a step is one launch."""
    device = data.label.device
    if args.compile:  # block by block: equal blocks share one compilation of a few seconds
        for block in model.body.blocks:
            block.compile(dynamic=bool(data.width.min() < data.width.max()))  # and so do all T
    record = args.compile and device.type == "cuda"
    lr, losses = torch.zeros((), device=device), torch.zeros((), device=device)
    for group in optimizer.param_groups:
        group.update(lr=lr, capturable=record)

    def step(rows, T):
        *batch, label = data.batch(rows, T)
        with autocast(args, device):
            loss = F.cross_entropy(model(*batch), label)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.add_(loss.detach())
    if record:
        step = recorded(step, torch.zeros(args.batch, dtype=torch.int64, device=device))
    return step, lr, losses


def recorded(step, memory):
    """`step` as CUDA graphs, one for each T: hundreds of kernels started at once. Three calls run
    as they are, to compile and to allocate; the next is recorded. A recording always reads the same
    memory, so that from then on a call copies its rows there."""
    torch.cuda.synchronize()
    torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be recorded
    warnings.filterwarnings("ignore", ".*capturable=True")  # the first calls need it as well
    graphs, calls, pool = {}, collections.Counter(), torch.cuda.graph_pool_handle()

    def call(rows, T):
        calls[T] += 1
        if calls[T] <= 3:
            return step(rows, T)
        if T not in graphs:
            graphs[T] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[T], pool, torch.cuda.current_stream()):
                step(memory, T)
        memory.copy_(rows)
        graphs[T].replay()
    return call


def train(args, device):
    """One run, from the data to the final table."""
    data = load_data(args, device)
    model, batch = build_model(args, device), training_batches(args, data)
    optimizer = make_optimizer(model, args)
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")

    progress = functools.partial(tqdm, total=args.steps, desc=args.mixer, unit="step")
    with run_folder(args), caught_signals() as caught, progress() as bar:
        run = dict(step=0, best=-1.0, seconds=0.0, train_loss=None, steps_per_second=None)
        best_model = None
        if args.resume:
            saved = load_checkpoint(args, model, optimizer, scaler)
            run, best_model = {name: saved[name] for name in run}, saved["best_model"]
            bar.initial = bar.n = run["step"]
        train_step, lr, losses = training_step(model, optimizer, scaler, data, args)
        start = before = run["step"]
        resumed = time.perf_counter()
        began = resumed - run["seconds"]
        for step in range(start, args.steps + 1):
            last, planned = step == args.steps, step % args.eval_every == 0
            if last or planned or caught:
                if step > before:  # reading the losses waits for the GPU, so here only
                    run["train_loss"] = check_finite(losses.item() / (step - before), step)
                    losses.zero_()
                now, line = time.perf_counter(), {}
                if before > start:  # the first steps compile: they say nothing about speed
                    run["steps_per_second"] = (step - before) / (now - resumed)
                run.update(step=step, seconds=now - began)
                if signal.SIGTERM not in caught:  # which is in a hurry
                    loss, accuracy = evaluate(model, data, VAL, args)
                    line.update(loss=check_finite(loss, step), accuracy=accuracy)
                    if (last or planned) and accuracy > run["best"]:  # Ctrl-C does not select
                        run["best"] = accuracy
                        best_model = {name: x.clone() for name, x in model.state_dict().items()}
                    bar.set_postfix_str(f"loss {loss:.3f}, best {run['best']:.1%}")
                save_checkpoint(args, model, optimizer, scaler, **run, best_model=best_model)
                if last and not caught:
                    model.load_state_dict(best_model)
                    _, line["test_accuracy"] = evaluate(model, data, TEST, args)
                if line:
                    write_log(args, **run, **line)
                if last or caught:
                    break
                before, resumed = step, time.perf_counter()
            lr.fill_(learning_rate(step, args))
            torch.manual_seed(np.random.default_rng([args.seed, DROPOUT, step]).integers(2**40))
            train_step(*batch(step))
            bar.update()
    if caught:
        now = "" if signal.SIGTERM in caught else f"{accuracy:.1%} now, "
        print(f"stopped after {step} steps, accuracy {now}{run['best']:.1%} at best; "
              "--resume continues")
        raise SystemExit(128 + caught[0])

    parameters = sum(p.numel() for p in model.parameters())
    print(f"{args.task}, {step:,} steps, {run['seconds']:.0f} s, {parameters:,} parameters. "
          "The best on the validation split, on the test set:")
    rules, test = baselines(args, data), line["test_accuracy"]
    for name, accuracy in {f"{args.mixer}, d {args.d_model}": test, **rules}.items():
        print(f"  {name:24}{accuracy:7.1%}")
    return dict(val_accuracy=run["best"], test_accuracy=test, loss=loss, steps=step,
                seconds=run["seconds"], **rules)


def baselines(args, data):
    """Test accuracy of the most frequent label in training; on ListOps also of the most frequent
    one after the same first token, the root operator: MIN gives 0, MAX 9, and so on."""
    label, first = data.label.cpu().numpy(), data.tokens[:, 0, 0].cpu().numpy()
    train, test, scores = data.splits[TRAIN], data.splits[TEST], {}
    for name, clue in {"majority": 0 * first, "root_operator": first}.items():
        count = np.zeros((256, 10), int)
        np.add.at(count, (clue[train], label[train]), 1)
        scores[name] = float((count.argmax(1)[clue[test]] == label[test]).mean())
        if args.task != "listops":
            break
    return scores


def bench(args, device):
    """Training steps per second of each mixer in --bench, on random documents of full length: there
    attention needs no mask, and so gets its fastest kernel."""
    task, rates, rng = TASKS[args.task], {}, np.random.default_rng(args.seed)
    B, P, L = args.batch, task.documents, args.length
    data = Data(rng.integers(task.vocab or 256, size=(B, P, L), dtype=np.uint8),
                np.full((B, P), L), rng.integers(task.classes, size=B), np.zeros(B), device)
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")
    for args.mixer in args.bench:
        model = build_model(args, device)
        optimizer = make_optimizer(model, args)
        train_step, lr, losses = training_step(model, optimizer, scaler, data, args)
        for seconds in (0, BENCH_SECONDS):  # first it compiles and warms up
            began, steps = time.perf_counter(), 0
            while steps < 5 or time.perf_counter() - began < seconds:
                for _ in range(5):
                    train_step(torch.arange(B, device=device), L)
                steps += 5
                losses.item()  # waits for the GPU
            rate = rates[args.mixer] = steps / (time.perf_counter() - began)
        print(f"{args.mixer:10}{rate:9.3f} steps/s of {B} × {P} × {L} tokens; {args.steps:,} steps "
              f"take {args.steps / rate / 3600:.1f} h")
    if len(rates) == 2:
        (one, fast), (other, slow) = rates.items()
        print(f"{one} is {fast / slow:.2f} times as fast as {other}")
    return rates


def main(argv=None):
    parser = common_flags()
    add = parser.add_argument
    add("--data-dir", type=Path, default="data", help="has the files; gets a cache of them")
    add("--generate", action=argparse.BooleanOptionalAction, help="make ListOps or Pathfinder data")
    add("--examples", type=at_least(100), help="how many to make, for all splits together")
    add("--length", type=at_least(1), help="tokens that are read of a document; pixels of an image")
    add("--shortest", type=at_least(0), help="generated ListOps are longer than this")
    add("--d-ff", type=at_least(1), help="width of the GLU")
    add("--dropout", type=at_least(0, float, high=1), help="after embedding, mixer and GLU")
    add("--conv", type=at_least(0), help="width of every mixer's convolution; 0: none")
    add("--bidirectional", action=argparse.BooleanOptionalAction, help="see both sides of a token")
    add("--bench", nargs="*", choices=MIXERS, metavar="MIXER",
        help="only measure training steps/s of these mixers; of metala and attention if none given")
    args = parse(parser, argv)
    if args.generate and not TASKS[args.task].make_block:
        fail(f"--generate: there is no generator for {args.task}, only files")
    if args.task.startswith("path") and args.length not in SCENES:
        fail(f"--length {args.length}: Pathfinder has {' or '.join(map(str, SCENES))} pixels")
    if args.task == "listops" and args.generate and args.length < max(5, args.shortest + 2):
        fail(f"--length {args.length}: no ListOps are shorter, but longer than {args.shortest}")
    device = choose_device(args)
    try:
        if args.bench is None:
            return train(args, device)
        args.bench = args.bench or ["metala", "attention"]
        return bench(args, device)
    except KeyboardInterrupt:  # while data were prepared: training catches it by itself
        raise SystemExit(130)
    except (FloatingPointError, MemoryError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        fail(str(error).partition("\n")[0])


if __name__ == "__main__":
    main()
