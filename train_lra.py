"""Train a classifier of long sequences: the six tasks of the Long Range Arena (LRA).

    pip install torch numpy tqdm
    python train_lra.py                              # short ListOps on a laptop: 48% in 4 minutes
    python train_lra.py --preset listops --generate  # the paper's settings, on a GPU; likewise
                                                     # pathfinder and pathx
    python train_lra.py --preset text                # IMDB, from --data-dir; also retrieval, image
    python train_lra.py --preset text --bench        # training steps/s, MetaLA against attention

Data are read in their official layouts; where they are missing, the script says where to get them.
ListOps comes with its published generator, Pathfinder with one like the published. Everything is
parsed once, into <data-dir>/cache. --steps shortens a preset, its warm-up in proportion. The best
validation accuracy selects the model; the test set is read once, at the end.

A run leaves log.jsonl and checkpoint.pt in --out. Ctrl-C evaluates, saves and stops; the same
command with --resume continues as if nothing had happened.

Reading order: the tasks, then from `Classifier` down; the part in between can wait.
"""
import argparse
import collections
import contextlib
import functools
import itertools
import json
import math
import multiprocessing
import os
import platform
import random
import shutil
import signal
import time
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
          bidirectional, **more):
    """The paper's settings; its "head size 4" is read as 4 heads. Convolution: 4 as in the release,
    but 5 where both sides are seen, which needs an odd size."""
    return dict(task=task, length=length, layers=layers, d_model=d_model, d_ff=d_ff, heads=4,
                dropout=dropout, lr=lr, batch=batch, weight_decay=weight_decay, warmup=warmup,
                steps=steps, bidirectional=bidirectional, conv=5 if bidirectional else 4,
                eval_every=1000) | more


#                     length layers  d  d_ff drop    lr batch decay warm-up   steps  both directions
PRESETS = {
    "laptop": paper("listops", 128, 3, 64, 128, 0, 2e-3, 32, 0.01, 100, 2000, False,
                    generate=True, shortest=20, examples=50_000, eval_every=250),
    "listops": paper("listops", 2000, 6, 32, 64, 0, 5e-4, 128, 0.01, 5000, 50_000, False,
                     shortest=500, examples=100_000),
    "text": paper("text", 4096, 4, 128, 256, 0.1, 4e-3, 64, 0, 10_000, 50_000, False),
    "retrieval": paper("retrieval", 4000, 2, 256, 512, 0.1, 8e-4, 128, 1e-4, 312, 50_000, True),
    "image": paper("image", 1024, 6, 512, 512, 0, 3e-3, 128, 0, 30_000, 50_000, True),
    "pathfinder": paper("pathfinder", 1024, 6, 128, 128, 0, 2e-3, 256, 0, 50_000, 500_000, True,
                        examples=200_000),
    "pathx": paper("pathx", 16_384, 6, 32, 32, 0, 7.5e-4, 256, 0, 15_000, 500_000, True,
                   examples=200_000)}


# ── The tasks. A reader or generator yields examples: (split, label, one or two documents) ───────
#
# A document is a `bytes`: one token per byte, whatever the task. No token stands for padding: the
# documents keep their lengths, and a batch is padded and masked when it is put together.

TRAIN, VAL, TEST = range(3)  # the splits


def example(where, split, label, classes, *documents):
    """The last step of every reader of files: a bad label or an empty document ends the script."""
    try:
        label = float(label)
        if label not in range(classes) or not all(documents):
            raise ValueError
    except ValueError:
        fail(f"{where}: a label of 0–{classes - 1} and text expected, not label {label} and "
             f"{' + '.join(str(len(d)) for d in documents)} tokens")
    return split, int(label), documents


def by_number(path):
    """A sort key: 9_10.txt before 10_9.txt."""
    number = path.name.partition("_")[0]
    return len(number), number


def in_parallel(function, jobs):
    """function(job) for each job, in their order, on all cores."""
    workers = min(len(jobs), os.cpu_count() or 1, 32)
    if workers < 2:
        yield from map(function, jobs)
        return
    ignore_ctrl_c = (signal.SIGINT, signal.SIG_IGN)  # the parent process answers it
    with multiprocessing.Pool(workers, signal.signal, ignore_ctrl_c) as pool:
        yield from tqdm(pool.imap(function, jobs), total=len(jobs), desc="data", unit="block")


# ListOps: [MAX 4 3 [MIN 2 3 ] 1 0 ] has the value 4; ten classes.

def median(values):
    values = sorted(values)
    return (values[(len(values) - 1) // 2] + values[len(values) // 2]) // 2  # rounded down


OPERATORS = {"[MIN": min, "[MAX": max, "[MED": median, "[SM": lambda values: sum(values) % 10}
SYMBOLS = [*"0123456789", *OPERATORS, "]"]
APPLY = list(OPERATORS.values())


def read_listops(paths, args):
    """Lines `Source TAB Target` after a header. Source's parentheses only repeat the brackets."""
    token = {symbol: i for i, symbol in enumerate(SYMBOLS)}
    for split, path in enumerate(paths):
        with open(path, encoding="utf-8", errors="replace") as file:
            if not next(file, "").startswith("Source"):
                fail(f"{path}:1: a header, Source and Target, expected")
            for number, line in enumerate(file, 2):
                where = f"{path}:{number}"
                try:
                    source, target = line.rstrip("\n").split("\t")
                    words = source.replace("(", " ").replace(")", " ").split()
                    tokens = bytes(token[word] for word in words)
                except ValueError:
                    fail(f"{where}: two columns expected, Source and Target, not {line[:60]!r}")
                except KeyError as error:
                    fail(f"{where}: {error} is not a symbol of ListOps")
                yield example(where, split, target, 10, tokens[:args.length])


class TooLong(Exception):
    """This tree will be rejected: no need to finish it."""


def grow_tree(uniform, depth, limit, tokens):
    """Append a random tree's tokens to `tokens` and return its value: the published rules."""
    if depth == 10 or uniform() > 0.25:
        tokens.append(int(10 * uniform()))
        return tokens[-1]
    place = len(tokens)
    tokens.append(0)  # the operator, drawn after its arguments
    values = []
    for _ in range(2 + int(9 * uniform())):
        values.append(grow_tree(uniform, depth + 1, limit, tokens))
        if len(tokens) >= limit:
            raise TooLong
    operator = int(4 * uniform())
    tokens[place] = 10 + operator
    tokens.append(len(SYMBOLS) - 1)
    return APPLY[operator](values)


def listops_block(shortest, limit, job, count=500):
    """{tokens: value} of `count` different trees, longer than `shortest`, shorter than `limit`."""
    uniform, trees = random.Random(job).random, {}
    while len(trees) < count:
        tokens = bytearray()
        with contextlib.suppress(TooLong):
            value = grow_tree(uniform, 1, limit, tokens)
            if shortest < len(tokens) < limit:
                trees[bytes(tokens)] = value
    return trees


def generate_listops(args):
    """--examples different trees, 96% : 2% : 2%, always the same ones, on any number of cores."""
    trees, jobs = {}, 0
    while len(trees) < args.examples:
        more = math.ceil((args.examples - len(trees)) / 500)  # a second round replaces duplicates
        make = functools.partial(listops_block, args.shortest, args.length)
        for block in in_parallel(make, range(jobs, jobs + more)):
            trees |= block
        jobs += more
    for i, (tokens, value) in enumerate(itertools.islice(trees.items(), args.examples)):
        yield min(TEST, max(0, 50 * i // args.examples - 47)), value, (tokens,)


# Text (IMDB reviews: is the reviewer pleased?) and Retrieval (AAN: does one paper cite the other?)

def read_text(paths, args):
    """One review per file, named <id>_<rating>.txt. No validation split is published: here it is
    the last tenth of each class by id, because the reviews of one film are neighbours."""
    for i, folder in enumerate(paths):
        label, files = i % 2, sorted(folder.glob("*_*.txt"), key=by_number)
        for k, path in enumerate(files):
            split = TEST if i >= 2 else VAL if k >= 0.9 * len(files) else TRAIN
            yield example(path, split, label, 2, path.read_bytes()[:args.length])


def read_retrieval(paths, args):
    """Rows of five columns without header or quoting: label, two ids, two texts. The texts look
    like Python literals, b'…' with escapes; the published loader takes them as they are, too."""
    for split, path in enumerate(paths):
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                columns = line.rstrip(b"\r\n").split(b"\t")
                if len(columns) != 5:
                    fail(f"{path}:{number}: 5 columns expected, not {len(columns)}")
                label, texts = columns[0].decode(errors="replace"), columns[3:]
                texts = (text[:args.length] for text in texts)
                yield example(f"{path}:{number}", split, label, 2, *texts)


# Image: CIFAR-10 in grey, a pixel after the other.

def read_image(paths, args):
    """Records of 3073 bytes: the label, then 1024 red, green and blue values. The last 5,000 of the
    50,000 training images are the validation split."""
    for i, path in enumerate(paths):
        data = np.fromfile(path, np.uint8)
        if len(data) == 0 or len(data) % 3073:
            fail(f"{path}: {len(data)} bytes are not a multiple of 3073: truncated?")
        data = data.reshape(-1, 3073)
        red, green, blue = data[:, 1:].reshape(-1, 3, 1024).astype(np.uint32).swapaxes(0, 1)
        grey = ((19595 * red + 38470 * green + 7471 * blue + 32768) >> 16).astype(np.uint8)
        for k, (label, pixels) in enumerate(zip(data[:, 0], grey)):
            split = TEST if i == 5 else VAL if i == 4 and k >= len(data) / 2 else TRAIN
            yield example(f"{path}: record {k}", split, label, 10, pixels.tobytes())


# Pathfinder: do the two dots lie on the same dashed curve? 32 × 32 pixels; Path-X has 128 × 128.

def decode_png(paths):
    """The pixels of each image, None for one that cannot be read."""
    try:
        from PIL import Image
    except ImportError:
        return None
    images = []
    for path in paths:
        try:
            with Image.open(path) as image:
                images.append(np.asarray(image.convert("L")).tobytes())
        except (OSError, SyntaxError, ValueError):  # what Pillow raises for a broken file
            images.append(None)
    return images


def read_pathfinder(paths, args):
    """metadata/<N>.npy, which are text: folder, file, index, label, … of one image per line.
    Unreadable images are left out, and counted. Of every ten images, one is for validation and one
    for the test: the release has no split of its own."""
    metadata, rows = paths[0], []
    for path in sorted(metadata.glob("*.npy"), key=by_number):
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
            columns = line.split()
            if len(columns) < 4:
                fail(f"{path}:{number}: folder, file, index and label expected, not {line[:60]!r}")
            rows.append((f"{path}:{number}", metadata.parent / columns[0] / columns[1], columns[3]))
    blocks = [rows[i:i + 1000] for i in range(0, len(rows), 1000)]
    bad = []
    decoded = in_parallel(decode_png, [[path for _, path, _ in block] for block in blocks])
    for block, images in zip(blocks, decoded):
        if images is None:
            fail("reading PNG files needs Pillow: pip install pillow")
        for k, ((where, path, label), pixels) in enumerate(zip(block, images)):
            if pixels is None or len(pixels) != args.length:
                bad.append(path)
            else:
                yield example(where, max(TRAIN, k % 10 - 7), label, 2, pixels)
    if bad:
        print(f"left out {len(bad)} of {len(rows)} images, empty, unreadable or not of "
              f"{args.length} pixels: {', '.join(map(str, bad[:5]))}{', …' * (len(bad) > 5)}")


class Scene(NamedTuple):
    """The measures of a Pathfinder image, in pixels, except for `bend` and `snakes`."""
    size: int
    dash: float       # length of a dash
    gap: float        # half of the gap between two dashes of a curve
    clear: float      # how far a dash stays from all others
    thickness: float
    bend: float       # a curve turns by up to 90° / bend from dash to dash
    snakes: int       # tries to add a short curve of 4 dashes; the two long ones have 14 each
    apart: float      # between the starts of the two long curves
    dot: float        # radius


SCENES = {32 * 32: Scene(32, 2.4, 0.8, 2.0, 0.6, 1.0, 10, 7.0, 1.5),
          128 * 128: Scene(128, 5.0, 2.5, 4.5, 1.5, 1.8, 10, 20.0, 3.0)}


def direction(angle):
    return np.stack([np.sin(angle), np.cos(angle)], -1)


def next_dash(rng, scene, pivot, heading, others):
    """One more dash for each of n curves, from its pivot (n, 2): of 13 turns one that stays clear
    of the points `others` (n, P, 2), likely a gentle one with room for three dashes ahead of it.

    Returns the dash as three points (n, 3, 2), the next pivot and heading, and (n,) if it fits.
    """
    n, stride = len(pivot), scene.dash + 2 * scene.gap
    turn = (np.arange(13) + rng.random((n, 1)) - 6.5) / 13 * np.pi / scene.bend       # (n, 13)
    angle = heading[:, None] + turn
    step = direction(angle)                                                         # (n, 13, 2)
    dash = np.linspace(scene.gap, scene.gap + scene.dash, 3)
    reach = np.append(dash, stride * np.linspace(1, 3, 6))                          # (9,)
    way = (pivot[:, None, None] + step[:, :, None] * reach[:, None]).astype(np.float32)
    at = way.reshape(n, 13 * 9, 2)
    square = ((at ** 2).sum(-1)[..., None] + (others ** 2).sum(-1)[:, None]
              - 2 * at @ others.swapaxes(1, 2))                                     # (n, 117, P)
    free = square.min(-1, initial=np.inf) > scene.clear ** 2
    free &= ((at > 1) & (at < scene.size - 1)).all(-1)
    free = free.reshape(n, 13, 9)
    room = free[..., 3:].cumprod(-1).mean(-1)                                       # (n, 13)
    weight = np.cos(scene.bend * turn) ** 2 * free[..., :3].all(-1) * (1e-3 + room ** 4)
    total = weight.cumsum(1)
    i, pick = np.arange(n), (total > rng.random((n, 1)) * total[:, -1:]).argmax(1)  # (n,)
    return way[i, pick, :3], pivot + stride * step[i, pick], angle[i, pick], total[:, -1] > 0


def draw_curves(rng, n, scene):
    """Two long curves and some snakes for n images; those in which the curves fit: (≤ n, M, 3, 2).
    Dash i < 28 belongs to the long curve i % 2."""
    start, turn = rng.uniform(2 * scene.apart, scene.size - 2 * scene.apart, (n, 2)), 2 * np.pi
    other = start + scene.apart * direction(rng.uniform(0, turn, n))
    curves = [(start, rng.uniform(0, turn, n)), (other, rng.uniform(0, turn, n))]
    ink = np.empty((n, 0, 2), np.float32)
    for i in range(28):
        others = np.delete(ink, np.s_[-6:-3], 1)  # a curve's own last dash is not in its way
        dash, *curves[i % 2], fits = next_dash(rng, scene, *curves[i % 2], others)
        ink = np.concatenate([ink, dash], 1)[fits]                                  # (n, P, 2)
        curves = [[x[fits] for x in curve] for curve in curves]
    n = len(ink)
    for _ in range(scene.snakes):
        pivot, heading = rng.uniform(0, scene.size, (n, 2)), rng.uniform(0, turn, n)
        snake, all_fit = [], True
        for _ in range(4):
            others = np.concatenate([ink, *snake[:-1]], 1)
            dash, pivot, heading, fits = next_dash(rng, scene, pivot, heading, others)
            snake, all_fit = [*snake, dash], all_fit & fits
        snake = np.concatenate(snake, 1)                                            # (n, 12, 2)
        # A snake that does not fit becomes a copy of dashes that are there already.
        ink = np.concatenate([ink, np.where(all_fit[:, None, None], snake, ink[:, :12])], 1)
    return ink.reshape(n, ink.shape[1] // 3, 3, 2)


def paint(dashes, dots, scene):
    """White on black: dashes (n, M, 3, 2) and dots (n, 2, 2) become (n, size, size) uint8."""
    n, fine = len(dashes), 4 * scene.size  # painted four times as large, then averaged
    image = np.zeros((n, fine, fine), bool)
    def put(points):                                                                # (n, …, 2)
        cell = (4 * points).astype(int).reshape(n, -1, 2).clip(0, fine - 1)         # (n, P, 2)
        image[np.arange(n)[:, None], cell[..., 0], cell[..., 1]] = True
    start, along = dashes[:, :, 0], dashes[:, :, 2] - dashes[:, :, 0]               # (n, M, 2)
    start, along = start[:, :, None, None], along[:, :, None, None]
    across = along[..., ::-1] * [1, -1] * scene.thickness / scene.dash
    put(start + along * np.linspace(0, 1, 24)[:, None, None]
        + across * np.linspace(-0.5, 0.5, 7)[:, None])
    r = np.arange(-scene.dot, scene.dot + 0.1, 0.25)
    square = np.stack(np.meshgrid(r, r), -1).reshape(-1, 2)
    put(dots[:, :, None] + square[np.hypot(*square.T) <= scene.dot])
    mean = image.reshape(n, scene.size, 4, scene.size, 4).mean((2, 4))
    return (255 * mean).round().astype(np.uint8)


def pathfinder_block(length, job, count=200):
    """`count` images of `length` pixels: a list of (label, pixels, dots).

    Only the second dot depends on the label: it is at the far end of the curve on which the first
    dot is, or of the other curve. Whichever of the two has been rarer at its distance is taken, so
    that the distance between the dots says nothing.
    """
    rng, scene = np.random.default_rng([length, job]), SCENES[length]
    made, surplus = [], collections.Counter()
    while len(made) < count:
        dashes = draw_curves(rng, 64, scene)
        if not len(dashes):  # one attempt in thousands
            continue
        labels, dots = [], []
        for dash, one in zip(dashes, rng.integers(2, size=len(dashes))):
            start, same, other = dash[one, 0], dash[26 + one, 2], dash[27 - one, 2]
            near_same, near_other = (int(math.dist(start, end) * 32 / scene.size)
                                     for end in (same, other))
            label = int(surplus[near_same] + surplus[near_other] < rng.choice([0, 1]))
            surplus[near_same if label else near_other] += 2 * label - 1
            labels.append(label)
            dots.append([start, same if label else other])
        images = paint(dashes, np.reshape(dots, (-1, 2, 2)), scene)
        made += [(label, image.tobytes(), dot) for label, image, dot in zip(labels, images, dots)]
    return made[:count]


def generate_pathfinder(args):
    """--examples images, 80% : 10% : 10%, always the same ones, on any number of cores."""
    make = functools.partial(pathfinder_block, args.length)
    blocks = in_parallel(make, range(math.ceil(args.examples / 200)))
    images = itertools.islice(itertools.chain.from_iterable(blocks), args.examples)
    for i, (label, pixels, _) in enumerate(images):
        yield max(TRAIN, i % 10 - 7), label, (pixels,)


class Task(NamedTuple):
    classes: int
    vocab: int            # 0: tokens are brightnesses, numbers rather than symbols
    documents: int
    folder: str           # below --data-dir
    files: list           # in it, all of them needed
    read: Callable        # (paths of these files, args) → examples
    archive: tuple        # where to get them: URL; size and hash
    generate: Callable = None


LRA = ("https://storage.googleapis.com/long-range-arena/lra_release.gz",
       "8.23 GB, no hash published")
TASKS = {
    "listops": Task(10, len(SYMBOLS), 1, "listops-1000",
                    ["basic_train.tsv", "basic_val.tsv", "basic_test.tsv"],
                    read_listops, LRA, generate_listops),
    "text": Task(2, 256, 1, "aclImdb", ["train/neg", "train/pos", "test/neg", "test/pos"],
                 read_text, ("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
                             "84,125,825 bytes, md5 7c2ac02c03563afcf9b574c7e56c153a")),
    "retrieval": Task(2, 256, 2, "tsv_data", [f"new_aan_pairs.{split}.tsv"
                                              for split in ("train", "eval", "test")],
                      read_retrieval, LRA),
    "image": Task(10, 0, 1, "cifar-10-batches-bin",
                  [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"], read_image,
                  ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                   "170,052,171 bytes, md5 c32a1d4ab5d03f1284b67883e8d87530")),
    "pathfinder": Task(2, 0, 1, "pathfinder32/curv_contour_length_14", ["metadata", "imgs"],
                       read_pathfinder, LRA, generate_pathfinder),
    "pathx": Task(2, 0, 1, "pathfinder128/curv_contour_length_14", ["metadata", "imgs"],
                  read_pathfinder, LRA, generate_pathfinder)}


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
         + ("; or make a set of the same kind: --generate" if task.generate else ""))


def prepare(args):
    """The folder of parsed arrays for this task, made on the first call and found by later ones."""
    task = TASKS[args.task]
    if args.generate:
        if not task.generate:
            fail(f"--generate: there is no generator for {args.task}, only files")
        parts = [args.task, "generated", args.length, args.shortest, args.examples]
        rows = task.generate(args)
    else:
        paths = find_files(args, task)
        stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        parts = [args.task, args.length, f"{zlib.crc32(repr(stats).encode()):08x}"]
        rows = task.read(paths, args)
    name = "-".join(str(part) for part in parts if part is not None)
    caches = args.data_dir / "cache", args.out / "cache"  # the second if --data-dir is read-only
    for cache in caches:
        if (cache / name).exists():
            return cache / name
    for cache in caches:
        with contextlib.suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
            lock = open(cache / f"{name}.lock", "w")
            break
    else:
        fail(f"can write a cache neither to {args.data_dir} nor to {args.out}")
    with lock:
        if fcntl:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second run waits for the first one's data
        if not (cache / name).exists():  # still
            print(f"preparing {cache / name} (once)")
            shutil.rmtree(cache / f"{name}.tmp", ignore_errors=True)
            try:
                write_arrays(cache / f"{name}.tmp", rows)
            except OSError as error:  # a file that cannot be read, a full disk
                fail(error)
            os.replace(cache / f"{name}.tmp", cache / name)
    return cache / name


def write_arrays(folder, rows):
    """All documents one after the other in one file; where each starts; labels and splits."""
    folder.mkdir()
    start, labels, splits = [0], [], []
    with open(folder / "tokens.bin", "wb") as file:
        for split, label, documents in rows:
            for document in documents:
                file.write(document)
                start.append(start[-1] + len(document))
            labels.append(label)
            splits.append(split)
    for name, values in dict(start=start, label=labels, split=splits).items():
        np.save(folder / f"{name}.npy", np.array(values, np.int64))


# ── Shared by the four scripts: arguments, device, run folder, checkpoint, signals, optimiser ────

MAY_CHANGE = {"preset", "resume", "out", "device", "compile", "eval_every",
              "data_dir", "accumulate"}  # from a run to its resumption


def fail(message):
    """A user's mistake ends the script with one line and exit status 1."""
    raise SystemExit(f"{SCRIPT}: {message}")


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
    add("--warmup", type=at_least(0),
        help="steps of linear warm-up, before a cosine to zero; a preset's scales with --steps")
    add("--weight-decay", type=at_least(0, float), help="of AdamW, on matrices only")
    add("--eval-every", type=at_least(1), help="steps between evaluations (and checkpoints)")
    add("--seed", type=at_least(0), default=0, help="of weights, data and dropout")
    add("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"], help="where to run")
    add("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="autocast's")
    add("--compile", action="store_true", help="torch.compile the training step")
    add("--out", type=Path, default=f"runs/{SCRIPT}", help="run folder")
    add("--resume", action="store_true", help="continue the run in --out; same flags otherwise")
    return parser


def parse(parser, argv):
    """A preset only changes defaults, so a flag given by hand always wins."""
    parser.set_defaults(**PRESETS["laptop"])
    preset = PRESETS[parser.parse_args(argv).preset]
    parser.set_defaults(**dict.fromkeys(PRESETS["laptop"]) | preset | dict(warmup=None))
    args = parser.parse_args(argv)
    if args.warmup is None:
        args.warmup = preset["warmup"] * args.steps // preset["steps"]
    return args


def choose_device(args):
    """The device of --device; printed with the dtype and the reason."""
    there = dict(cpu=True, cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available())
    name, reason = args.device, "as asked"
    if name == "auto":
        name, reason = ("cuda", "found") if there["cuda"] else ("cpu", "no CUDA device found")
    if not there[name]:
        fail(f"--device {name}: not on this machine, or not in this build of torch")
    print(f"device {name} ({reason}), dtype {args.dtype}")
    return torch.device(name)


def autocast(args, device):
    """16-bit matrix products if --dtype asks for them; nothing for float32."""
    dtype = getattr(torch, args.dtype)
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


@contextlib.contextmanager
def run_folder(args):
    """Create --out and hold its lock: one run per folder. Earlier results are moved aside."""
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
            for path in filter(Path.exists, [args.out / "log.jsonl", args.out / "checkpoint.pt"]):
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


def save_checkpoint(args, model, optimizer, scaler, **progress):
    """All that an exact resumption needs. Killed at any moment, one whole checkpoint remains."""
    content = dict(
        progress, script=SCRIPT,
        args={**vars(args), "out": str(args.out), "data_dir": str(args.data_dir)},
        model=model.state_dict(), optimizer=optimizer.state_dict(), scaler=scaler.state_dict(),
        rng=torch.get_rng_state(),
        cuda_rng=torch.cuda.get_rng_state() if torch.cuda.is_available() else None)
    temporary = args.out / "checkpoint.pt.tmp"
    with open(temporary, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, args.out / "checkpoint.pt")


def load_checkpoint(args, model, optimizer, scaler):
    """Put back what `save_checkpoint` saved, and return it; cut the log back to that step."""
    path, log = args.out / "checkpoint.pt", args.out / "log.jsonl"
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        step, made_by = saved["step"], saved["script"]
    except FileNotFoundError:
        fail(f"--resume: there is no {path}")
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
        lines = [line for line in log.read_text().splitlines(True) if line.endswith("\n")]
        log.write_text("".join(x for x in lines if json.loads(x).get("step", -1) < step))
    return saved


def write_log(args, **line):
    """Append one JSON line; the first of a file follows one with the arguments and versions."""
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

BENCH_SECONDS = 5
ORDER = 3  # a random stream: every generator is seeded with [seed, stream, index]


class Data(NamedTuple):
    """N examples of P documents each. Documents lie in `tokens` one after the other."""
    tokens: torch.Tensor   # (all tokens,) uint8; on the device if it has room for them
    start: torch.Tensor    # (N, P)
    length: torch.Tensor   # (N, P)
    label: torch.Tensor    # (N,)
    longest: np.ndarray    # (N,)  the longer document's length, where reading it costs no GPU sync
    splits: list           # the examples of each split
    padded: bool           # whether lengths differ


def load(folder, args, device):
    """Memory-mapped arrays, copied to the GPU where they take less than half of its free memory."""
    start, label, split = (np.load(folder / f"{name}.npy") for name in ("start", "label", "split"))
    splits = [np.flatnonzero(split == s) for s in (TRAIN, VAL, TEST)]
    sizes = [len(rows) for rows in splits]
    print("{:,} training, {:,} validation, {:,} test examples".format(*sizes))
    if min(sizes) == 0 or sizes[0] < args.batch:
        fail(f"--batch {args.batch}: too few examples, {' + '.join(map(str, sizes))}")
    tokens = torch.from_numpy(np.memmap(folder / "tokens.bin", np.uint8, "c"))
    return arrange(tokens, start, label, splits, TASKS[args.task].documents, device)


def arrange(tokens, start, label, splits, documents, device):
    if device.type != "cuda" or len(tokens) < torch.cuda.mem_get_info()[0] / 2:
        tokens = tokens.to(device)
    length = np.diff(start).reshape(-1, documents)
    start = start[:-1].reshape(-1, documents)
    there = (torch.from_numpy(x).to(tokens.device) for x in (start, length, label))
    return Data(tokens, *there, length.max(1), splits, bool((length != length[0, 0]).any()))


def take(data, rows, args, device):
    """Some examples as a batch: tokens (B·P, T), mask (B·P, T) or None, labels (B,).

    T is the longest document's length, rounded up to one of 16 lengths, for the sake of --compile.
    """
    unit = math.ceil(args.length / 16)
    T = min(args.length, math.ceil(data.longest[rows].max() / unit) * unit)
    rows = torch.from_numpy(rows).to(data.tokens.device, non_blocking=True)
    t = torch.arange(T, device=data.tokens.device)
    start, length = data.start[rows].view(-1, 1), data.length[rows].view(-1, 1)    # (B·P, 1)
    mask = t < length                                                              # (B·P, T)
    tokens = data.tokens[torch.where(mask, start + t, start)]
    batch = tokens, mask if data.padded else None, data.label[rows]
    return [x if x is None else x.to(device, non_blocking=True) for x in batch]


def training_batches(args, data):
    """step → rows of its batch: a function of the step alone, so that a resumed run continues.

    Where lengths differ, a batch is made of similar ones: every 50 batches' worth of the shuffled
    epoch is sorted by length before it is cut, and then all batches are shuffled. On IMDB, an
    epoch then has 1.13 times its real tokens, and 3.08 times without this.
    """
    rows = data.splits[TRAIN]
    per_epoch = len(rows) // args.batch

    @functools.lru_cache(1)
    def order(epoch):
        rng = np.random.default_rng([args.seed, ORDER, epoch])
        shuffled = rng.permutation(rows)[:per_epoch * args.batch]
        if not data.padded:
            return shuffled.reshape(per_epoch, args.batch)
        runs = np.split(shuffled, range(50 * args.batch, len(shuffled), 50 * args.batch))
        runs = [run[np.argsort(data.longest[run], kind="stable")] for run in runs]
        return rng.permutation(np.concatenate(runs).reshape(per_epoch, args.batch))

    return lambda step: order(step // per_epoch)[step % per_epoch]


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
                             conv_size=args.conv, bidirectional=args.bidirectional,
                             **dict(args.option))
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
    try:
        return Classifier(args, TASKS[args.task]).to(device)
    except (ValueError, TypeError) as error:
        fail(error)


@torch.no_grad()
def evaluate(model, data, split, args, device):
    """The mean loss and the accuracy on a split."""
    model.eval()
    rows = data.splits[split]
    rows = rows[np.argsort(data.longest[rows], kind="stable")]
    loss = right = 0
    for part in np.array_split(rows, math.ceil(len(rows) * args.accumulate / args.batch)):
        tokens, mask, label = take(data, part, args, device)
        with autocast(args, device):
            logits = model(tokens, mask)                                           # (B, classes)
        loss += F.cross_entropy(logits, label, reduction="sum")
        right += (logits.argmax(-1) == label).sum()
    model.train()
    return loss.item() / len(rows), right.item() / len(rows)


def training_step(forward, model, optimizer, scaler, data, rows, args, device):
    """One optimiser step on the examples `rows`, in --accumulate parts. The loss, on the device."""
    optimizer.zero_grad()
    losses = []
    for part in np.array_split(rows, args.accumulate):
        tokens, mask, label = take(data, part, args, device)
        with autocast(args, device):
            logits = forward(tokens, mask)                                         # (B, classes)
        loss = F.cross_entropy(logits, label) * (len(part) / len(rows))
        scaler.scale(loss).backward()
        losses.append(loss.detach())
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return torch.stack(losses).sum()


def train(args, device):
    """One run, from the data to the final table."""
    data = load(prepare(args), args, device)
    torch.manual_seed(args.seed)
    model = build_model(args, device)
    optimizer = make_optimizer(model, args)
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")
    forward = torch.compile(model) if args.compile else model

    progress = functools.partial(tqdm, total=args.steps, desc=args.mixer, unit="step")
    with run_folder(args), caught_signals() as caught, progress() as bar:
        run, best_model = dict(step=0, best=-1.0, seconds=0.0, train_loss=None), None
        if args.resume:
            saved = load_checkpoint(args, model, optimizer, scaler)
            run, best_model = {name: saved[name] for name in run}, saved["best_model"]
            bar.initial = bar.n = run["step"]
        batch = training_batches(args, data)
        began, recent = time.perf_counter() - run["seconds"], []
        for step in range(run["step"], args.steps + 1):
            last = step == args.steps
            planned = last or step % args.eval_every == 0
            pause = planned or bool(caught)
            if recent and (pause or step % 10 == 0):  # seldom: reading a loss waits for the GPU
                run["train_loss"] = check_finite(torch.stack(recent).mean().item(), step)
                recent.clear()
                bar.set_postfix(loss=f"{run['train_loss']:.3f}", best=f"{run['best']:.1%}",
                                refresh=False)
            if pause:
                run.update(step=step, seconds=time.perf_counter() - began)
                hurry, line = signal.SIGTERM in caught, {}
                if not hurry:
                    loss, accuracy = evaluate(model, data, VAL, args, device)
                    line.update(loss=check_finite(loss, step), accuracy=accuracy)
                    if planned and accuracy > run["best"]:  # so Ctrl-C has no say in the selection
                        run["best"] = accuracy
                        best_model = {name: x.clone() for name, x in model.state_dict().items()}
                save_checkpoint(args, model, optimizer, scaler, **run, best_model=best_model)
                if last and not caught:
                    model.load_state_dict(best_model)
                    _, line["test_accuracy"] = evaluate(model, data, TEST, args, device)
                if not hurry:
                    write_log(args, **run, **line)
                if last or caught:
                    break

            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args)
            recent.append(training_step(forward, model, optimizer, scaler, data, batch(step), args,
                                        device))
            bar.update()

    if caught:
        print(f"stopped after {step} steps, best accuracy {run['best']:.1%}; --resume continues")
        raise SystemExit(128 + caught[0])
    result = dict(val_accuracy=run["best"], test_accuracy=line["test_accuracy"], loss=loss,
                  steps=step, seconds=run["seconds"], **baselines(data, args))
    report(result, args, model)
    return result


def baselines(data, args):
    """Test accuracy of the most frequent label in training; on ListOps also of the most frequent
    one after the same first token, the root operator: MIN gives 0, MAX 9, and so on."""
    label = data.label.cpu().numpy()
    first = data.tokens[data.start[:, 0]].cpu().numpy()
    rules = dict(majority=np.zeros_like(first))
    if args.task == "listops":
        rules["root_operator"] = first
    train, test = data.splits[TRAIN], data.splits[TEST]
    scores = {}
    for name, clue in rules.items():
        count = np.zeros((256, 10), int)
        np.add.at(count, (clue[train], label[train]), 1)
        scores[name] = float((count.argmax(1)[clue[test]] == label[test]).mean())
    return scores


def report(result, args, model):
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{args.task}, {result['steps']:,} steps, {result['seconds']:.0f} s, {parameters:,} "
          f"parameters; the best model on the validation split, on the test set:")
    rows = {f"{args.mixer}, d {args.d_model}": result["test_accuracy"],
            "majority class": result["majority"]}
    if "root_operator" in result:
        rows["root operator alone"] = result["root_operator"]
    for name, accuracy in rows.items():
        print(f"  {name:24}{accuracy:7.1%}")


def bench(args, device):
    """Training steps per second of each mixer in --bench, on random documents of full length: there
    attention needs no mask, and so gets its fastest kernel."""
    P = TASKS[args.task].documents
    rng, n = np.random.default_rng(args.seed), args.batch
    tokens = rng.integers(TASKS[args.task].vocab or 256, size=n * P * args.length, dtype=np.uint8)
    data = arrange(torch.from_numpy(tokens), np.arange(n * P + 1) * args.length,
                   rng.integers(TASKS[args.task].classes, size=n), [np.arange(n)], P, device)
    rates = {}
    for args.mixer in args.bench:
        model = build_model(args, device)
        optimizer, forward = make_optimizer(model, args), model
        if args.compile:
            forward = torch.compile(model)
        scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")
        def step():
            return training_step(forward, model, optimizer, scaler, data, data.splits[TRAIN], args,
                                 device)
        try:
            for _ in range(3):  # compilation and the like
                step().item()
            began, steps, seconds = time.perf_counter(), 0, 0.0
            while seconds < BENCH_SECONDS:
                loss = [step() for _ in range(max(1, steps))][-1].item()  # waits for the GPU
                steps, seconds = steps + max(1, steps), time.perf_counter() - began
        except torch.OutOfMemoryError:
            print(f"{args.mixer:10} out of memory: raise --accumulate")
            continue
        rates[args.mixer] = steps / seconds
        print(f"{args.mixer:10} {steps / seconds:9.3f} steps/s, {args.batch} × {P} × {args.length} "
              f"tokens each; {args.steps:,} steps take {args.steps * seconds / steps / 3600:.1f} h")
    if len(rates) == 2:
        (one, fast), (other, slow) = rates.items()
        print(f"{one} is {fast / slow:.2f} times as fast as {other}")
    return rates


def name_and_value(text):
    """An argparse type for --option."""
    name, value = text.split("=")
    return name, json.loads(value)


def main(argv=None):
    parser = common_flags()
    add = parser.add_argument
    add("--data-dir", type=Path, default=Path("data"), help="has the files; gets the cache of them")
    add("--generate", action=argparse.BooleanOptionalAction, help="make ListOps or Pathfinder data")
    add("--examples", type=at_least(100), help="how many to make, for all splits together")
    add("--length", type=at_least(1), help="tokens that are read of a document; pixels of an image")
    add("--shortest", type=at_least(0), help="generated ListOps are longer than this")
    add("--d-ff", type=at_least(1), help="width of the GLU")
    add("--dropout", type=at_least(0, float), help="after embedding, mixer and GLU")
    add("--conv", type=at_least(0), help="width of every mixer's convolution; 0: none")
    add("--bidirectional", action=argparse.BooleanOptionalAction, help="see both sides of a token")
    add("--option", type=name_and_value, nargs="*", default=[], metavar="NAME=VALUE",
        help="more arguments of the mixer, such as tau=4 self_augment=false")
    add("--accumulate", type=at_least(1), default=1, help="parts of a batch, to save memory")
    add("--bench", nargs="*", choices=MIXERS, metavar="MIXER",
        help="only measure training steps/s of these mixers; of metala and attention if none given")
    args = parse(parser, argv)
    if args.task in ("pathfinder", "pathx") and args.length not in SCENES:
        fail(f"--length {args.length}: Pathfinder has {' or '.join(map(str, SCENES))} pixels")
    if args.accumulate > args.batch:
        fail(f"--accumulate {args.accumulate} is more than --batch {args.batch}")
    device = choose_device(args)
    try:
        if args.bench is not None:
            args.bench = args.bench or ["metala", "attention"]
            return bench(args, device)
        return train(args, device)
    except FloatingPointError as error:
        fail(error)
    except KeyboardInterrupt:  # while the data were prepared: training catches it by itself
        raise SystemExit(130)


if __name__ == "__main__":
    main()
