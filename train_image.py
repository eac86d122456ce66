"""Train an image classifier: a DeiT-shaped model with MetaLA, in both directions, as the mixer.

    pip install torch numpy tqdm               # and pillow, to read JPEG and PNG files
    python train_image.py                      # ten kinds of shapes on a laptop: 94% in 3.5 minutes
    python train_image.py --predict a.png b.png                     # by the last run's checkpoint
    python train_image.py --preset cifar --dtype bfloat16 --compile      # downloads CIFAR-10; GPU
    torchrun --nproc_per_node=8 train_image.py --preset tiny --data-dir ~/imagenet \\
        --dtype bfloat16 --compile             # train/CLASS/* and val/CLASS/*, the paper's recipe

An image becomes a sequence: T patches, row by row, each a vector of width D, plus a learned
position. The blocks mix it, the mean of its T vectors is classified. Processes under torchrun
share each batch, and learn what one would alone.

A run leaves log.jsonl and checkpoint.pt in --out. Ctrl-C evaluates, saves and stops; the same
command with --resume continues as if nothing had happened.

Reading order: the data, then from `Classifier` down; the part in between can wait.
"""
import argparse
import contextlib
import functools
import gzip
import hashlib
import http.client
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import signal
import statistics
import tarfile
import time
import urllib.request
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from metala import MIXERS, Block

try:
    import fcntl
except ImportError:  # Windows has no flock: there, two runs in one folder go unnoticed
    fcntl = None

SCRIPT = "train_image"
RANK, LOCAL_RANK, WORLD = (int(os.environ.get(name, default)) for name, default in
                           (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))  # set by torchrun
LAPTOP = dict(data="shapes", size=32, patch=4, stem="conv", scan="rows", d_model=64, layers=3,
              heads=2, dropout=0.0, augment="none", flip=False, cutout=0.0, label_smoothing=0.0,
              epochs=2, batch=32, lr=3e-3, warmup=200, weight_decay=0.05, eval_every=400)
MNIST = LAPTOP | dict(data="mnist", size=28, augment="shift", label_smoothing=0.1, epochs=40,
                      batch=128, eval_every=500)
CIFAR = dict(data="cifar10", size=32, patch=2, stem="conv", scan="both", d_model=256, layers=7,
             heads=4, dropout=0.0, augment="shift", flip=True, cutout=0.25, label_smoothing=0.1,
             epochs=80, batch=256, lr=2e-3, warmup=1000, weight_decay=0.05, eval_every=1000)
TINY = dict(data="folder", size=224, patch=16, stem="patch", scan="rows", d_model=192, layers=12,
            heads=3, dropout=0.0, augment="crop", flip=True, cutout=0.0, label_smoothing=0.1,
            epochs=300, batch=2048, lr=2.4e-3, warmup=3000, weight_decay=0.05, eval_every=2500)
PRESETS = {"laptop": LAPTOP, "mnist": MNIST, "cifar": CIFAR, "tiny": TINY,  # tiny: 6.1M parameters
           "small": TINY | dict(d_model=384, heads=6)}                      # small: 23.7M


# ── Data: shapes, drawn ──────────────────────────────────────────────────────────────────────────
# A shape is a function of the plane, negative inside, about the distance to the outline near it.
# The union of two shapes is the minimum of both, the intersection their maximum. Each has area 1:
# what tells them apart is their form alone.

def disc(x, y, radius):
    return np.hypot(x, y) - radius


def box(x, y, half_width, half_height):
    return np.maximum(np.abs(x) - half_width, np.abs(y) - half_height)


def tips(x, y, n, slant, inner):
    """A polygon with n tips: slant 1 gives n straight sides, slant 2 at n = 5 the pentagram."""
    sector = 2 * np.pi / n
    angle = np.abs(np.mod(np.arctan2(y, x) + sector / 2, sector) - sector / 2)
    return np.hypot(x, y) * np.cos(angle - slant * np.pi / n) - inner


SHAPES = {
    "disc": lambda x, y: disc(x, y, 0.564),
    "ring": lambda x, y: np.abs(disc(x, y, 0.586)) - 0.136,
    "half": lambda x, y: np.maximum(disc(x, y + 0.34, 0.798), -y - 0.34),
    "moon": lambda x, y: np.maximum(disc(x - 0.317, y, 0.806), -disc(x - 0.774, y, 0.675)),
    "triangle": lambda x, y: tips(x, y, 3, 1, 0.439),
    "square": lambda x, y: tips(x, y, 4, 1, 0.5),
    "star": lambda x, y: tips(x, y, 5, 2, 0.292),
    "bar": lambda x, y: box(x, y, 1.05, 0.238),
    "cross": lambda x, y: np.minimum(box(x, y, 0.725, 0.2), box(x, y, 0.2, 0.725)),
    "arrow": lambda x, y: np.minimum(box(x + 0.504, y, 0.515, 0.175),
                                     tips(x - 0.267, y, 3, 1, 0.36)),
}


def draw_shapes(rng, n, S):
    """n images uint8 (n, 3, S, S), each with one shape on clutter, and the shapes' numbers (n,)."""
    labels = rng.integers(0, len(SHAPES), n)
    pixel = (np.arange(S, dtype=np.float32) + 0.5) / S                       # (S,)

    def uniform(low, high, *shape):
        return rng.uniform(low, high, (*shape, n, 1, 1)).astype(np.float32)

    def paint(colour, shape, low, high):
        """Paint a shape of random place, angle, and a size from low to high of the image's."""
        size, angle = uniform(low, high), uniform(0, 2 * np.pi)
        centre = 0.5 + uniform(-0.5, 0.5, 2) * (1 - 1.1 * size)
        x, y = (pixel - centre[0]) / size, (pixel[:, None] - centre[1]) / size
        x, y = np.cos(angle) * x + np.sin(angle) * y, np.cos(angle) * y - np.sin(angle) * x
        inside = np.clip(0.5 - shape(x, y) * size * S, 0, 1)                 # (n, S, S), soft edge
        np.add(images, inside * (colour - images), out=images)               # (3, n, S, S)

    def kind(x, y):
        distance = np.empty_like(x)
        for label, shape in enumerate(SHAPES.values()):
            rows = labels == label
            distance[rows] = shape(x[rows], y[rows])
        return distance

    ground = uniform(0, 1, 3)                                                # (3, n, 1, 1)
    images = ground + uniform(-0.2, 0.2, 3) * pixel + uniform(-0.2, 0.2, 3) * pixel[:, None]
    paint(uniform(0, 1, 3), lambda x, y: box(x, y, 0.5, 0.07), 0.4, 0.9)           # a stroke
    paint(uniform(0, 1, 3), lambda x, y: disc(x, y, 0.5), 0.08, 0.16)              # a dot
    paint((ground + uniform(0.3, 0.7, 3)) % 1, kind, 0.38, 0.58)                   # the shape
    images += 0.04 * rng.standard_normal(images.shape, dtype=np.float32)
    return (images.clip(0, 1) * 255).astype(np.uint8).swapaxes(0, 1), labels


# ── Data: files ──────────────────────────────────────────────────────────────────────────────────

MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_FILES = {"train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",  # MD5
               "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
               "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
               "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c"}
CIFAR_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
CIFAR_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()


def download(url, path, md5):
    """Fetch url to path with a progress bar; the file takes its name only if its hash is right."""
    part, digest = path.with_name(path.name + ".part"), hashlib.md5()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(url, timeout=30) as source, open(part, "wb") as file, \
                tqdm(total=int(source.headers["Content-Length"] or 0), unit="B", unit_scale=True,
                     desc=path.name) as bar:
            while block := source.read(1 << 20):
                file.write(block)
                digest.update(block)
                bar.update(len(block))
    except (OSError, http.client.HTTPException) as error:
        fail(f"could not download {url} ({error}); the file may also be put at {path} by hand")
    if digest.hexdigest() != md5:
        fail(f"{url}: the download has MD5 {digest.hexdigest()}, not {md5}; it was not used")
    part.replace(path)


def read_bytes(path):
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            return np.frombuffer(file.read(), np.uint8)
    except (OSError, EOFError, zlib.error) as error:
        fail(f"{path} cannot be read: {error}")


def read_mnist(folder):
    """IDX: 0, 0, 8 (bytes), the number of axes, then each axis' length as big-endian int32."""
    arrays = []
    for name, md5 in MNIST_FILES.items():
        path, axes = folder / name, 3 if "images" in name else 1
        if path.with_suffix("").exists():
            path = path.with_suffix("")
        elif not path.exists():
            download(MNIST_URL + name, path, md5)
        content, start = read_bytes(path), 4 + 4 * axes
        if len(content) < start or content[:4].tolist() != [0, 0, 8, axes]:
            fail(f"{path} starts with {bytes(content[:4]).hex(' ')}, not with 00 00 08 0{axes}")
        shape = content[4:start].view(">i4").tolist()
        if math.prod(shape) != len(content) - start:
            fail(f"{path} has {len(content) - start} values, but says {math.prod(shape)}")
        arrays.append(content[start:].reshape(shape))
    images, labels = ([np.repeat(x[:, None], 3, 1) for x in arrays[::2]], arrays[1::2])
    return list(zip(images, labels)), [str(digit) for digit in range(10)]  # grey as RGB


def read_cifar10(folder):
    """Records of 3073 bytes: the label, then 32 × 32 bytes each of red, green and blue."""
    archive, parts = folder.parent / "cifar-10-binary.tar.gz", []
    if not folder.exists():
        if not archive.exists():
            download(CIFAR_URL, archive, CIFAR_MD5)
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(folder.parent, filter="data")
        except (OSError, EOFError, tarfile.TarError) as error:
            fail(f"{archive} cannot be unpacked: {error}")
    for name in [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]:
        content = read_bytes(folder / name)
        if len(content) == 0 or len(content) % 3073:
            fail(f"{folder / name} has {len(content)} bytes, not a multiple of 3073: cut off?")
        parts.append(content.reshape(-1, 3073))
    return [(x[:, 1:].reshape(-1, 3, 32, 32), x[:, 0])
            for x in (np.concatenate(parts[:5]), parts[5])], CIFAR_CLASSES


class Arrays:
    """Images that fit into memory, kept on the device."""
    unreadable = ()

    def __init__(self, images, labels, device):
        self.images = torch.from_numpy(np.ascontiguousarray(images)).to(device)  # (N, 3, H, W)
        self.labels = torch.from_numpy(labels.astype(np.int64)).to(device)       # (N,)

    def __len__(self):
        return len(self.labels)

    def batches(self, rows):
        """For each array of row numbers: images, labels, and width / height, which is 1 here."""
        for row in rows:
            row = torch.from_numpy(row).to(self.images.device, non_blocking=True)
            yield self.images[row], self.labels[row], torch.ones(len(row), device=row.device)


class Files(torch.utils.data.Dataset):
    """Image files, decoded in worker processes and squeezed into squares of one size; `crop` undoes
    that, given width / height. An unreadable file is named once; its label, -100, is no class."""

    def __init__(self, paths, labels, args, device):
        if importlib.util.find_spec("PIL") is None and any(x.suffix != ".npy" for x in paths):
            fail("reading JPEG or PNG files needs Pillow: pip install pillow")
        self.paths, self.labels, self.side = paths, labels, args.size * 3 // 2
        self.workers, self.device, self.unreadable = args.workers, device, set()

    def __len__(self):
        return len(self.paths)

    @staticmethod
    def decode(path):
        """The pixels, uint8 (3, H, W), of what Pillow reads or of a .npy file (H, W, 3)."""
        if path.suffix == ".npy":
            return torch.from_numpy(np.load(path)).permute(2, 0, 1)
        from PIL import Image  # the only place that needs Pillow
        with Image.open(path) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)

    def __getitem__(self, i):
        try:
            image, size = self.decode(self.paths[i])[None], (self.side, self.side)
            square = F.interpolate(image, size, mode="bilinear", antialias=True)[0]
            aspect = image.shape[3] / image.shape[2]
            return i, square.expand(3, *size).byte(), self.labels[i], aspect
        except Exception:  # Pillow raises many kinds; all mean the same here
            return i, torch.zeros(3, self.side, self.side, dtype=torch.uint8), -100, 1.0

    def batches(self, rows):
        loader = torch.utils.data.DataLoader(
            self, batch_sampler=map(np.ndarray.tolist, rows), num_workers=self.workers,
            worker_init_fn=ignore_ctrl_c, pin_memory=self.device.type == "cuda",
            generator=torch.Generator())  # or it would draw from the global one
        for index, images, labels, aspect in loader:
            for i in set(index[labels < 0].tolist()) - self.unreadable:
                tqdm.write(f"unreadable, left out: {self.paths[i]}")
                self.unreadable.add(i)
            yield (x.to(self.device, non_blocking=True) for x in (images, labels, aspect.float()))


def ignore_ctrl_c(worker):
    """It reaches the workers too, but is the main process's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def read_folder(root, args, device):
    """Any tree train/CLASS/*, val/CLASS/*; the classes are the folders of train, by name."""
    classes = sorted(path.name for path in root.glob("train/*") if path.is_dir())
    sets = []
    for part in ("train", "val"):
        found = [(path, label) for label, name in enumerate(classes)
                 for path in sorted((root / part / name).glob("*"))]
        if not found:
            fail(f"--data-dir {root}: train/CLASS/* and val/CLASS/* are expected there; "
                 f"{root / part} has no files in the {len(classes)} classes of train")
        sets.append(Files(*zip(*found), args, device))
    return sets, classes


def load_data(args, device):
    """[training set, test set] and the names of the classes."""
    def synthetic(rng, n, size):
        return rng.integers(0, 256, (n, 3, size, size), np.uint8), rng.integers(0, 1000, n)

    def drawn(make, *counts):
        return [[np.concatenate(x) for x in zip(*(
            make(np.random.default_rng([args.seed, stream, i]), min(500, n - i), args.size)
            for i in range(0, n, 500)))] for stream, n in zip((TRAIN, TEST), counts)]

    if args.data == "folder":
        return read_folder(args.data_dir, args, device)
    if args.data == "mnist":
        sets, classes = read_mnist(args.data_dir / "mnist")
    elif args.data == "cifar10":
        sets, classes = read_cifar10(args.data_dir / "cifar-10-batches-bin")
    elif args.data == "shapes":
        sets, classes = drawn(draw_shapes, args.examples, args.test_examples), list(SHAPES)
    else:
        sets, classes = drawn(synthetic, args.batch, 64), [str(i) for i in range(1000)]
    for images, labels in sets:
        if len(images) != len(labels) or labels.max() >= len(classes):
            fail(f"--data {args.data}: {len(images)} images have {len(labels)} labels up to "
                 f"{labels.max()}; as many, and none above {len(classes) - 1}, are expected")
    return [Arrays(images, labels, device) for images, labels in sets], classes


# ── Shared by the four scripts: arguments, device, run folder, checkpoint, signals, optimiser ────

MAY_CHANGE = {"preset", "resume", "out", "device", "compile", "eval_every", "data_dir", "workers",
              "epochs", "test_sizes", "predict", "bench"}  # from a run to its resumption


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
    add("--steps", type=at_least(1), help="training steps, instead of --epochs")
    add("--batch", type=at_least(1), help="images per step, of all processes together")
    add("--lr", type=at_least(0, float), help="peak learning rate")
    add("--warmup", type=at_least(0), help="steps of linear warm-up, before a cosine to zero")
    add("--weight-decay", type=at_least(0, float), help="of AdamW, on matrices only")
    add("--eval-every", type=at_least(1), help="steps between evaluations (and checkpoints)")
    add("--seed", type=at_least(0), default=0, help="of weights, data and dropout")
    add("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"], help="where to run")
    add("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="autocast's")
    add("--compile", action="store_true", help="torch.compile the model")
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
        progress, script=SCRIPT, args={**vars(args), "out": str(args.out),
                                       "data_dir": str(args.data_dir), "predict": None},
        model=model.state_dict(), optimizer=optimizer.state_dict(), scaler=scaler.state_dict(),
        rng=torch.get_rng_state(),
        cuda_rng=torch.cuda.get_rng_state() if torch.cuda.is_available() else None)
    temporary = args.out / "checkpoint.pt.tmp"
    with open(temporary, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, args.out / "checkpoint.pt")


def read_checkpoint(path):
    """What `save_checkpoint` wrote."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        made_by = saved["script"]
    except FileNotFoundError:
        fail(f"there is no {path}: --out names the folder of an earlier run")
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
    if RANK == 0 and log.exists():  # a kill may have torn its last line, or come before its save
        lines = [line for line in log.read_text().splitlines(True) if line.endswith("\n")]
        log.write_text("".join(x for x in lines if json.loads(x).get("step", -1) < saved["step"]))
    return saved


def write_log(args, **line):
    """Append one JSON line; the first of a file follows one with the arguments and versions."""
    path = args.out / "log.jsonl"
    lines = [line]
    if not path.exists():
        versions = dict(python=platform.python_version(), torch=torch.__version__)
        lines.insert(0, dict(args=vars(args), processes=WORLD, **versions))
    with open(path, "a") as file:
        file.writelines(json.dumps(line, default=str) + "\n" for line in lines)


def make_optimizer(model, args):
    """AdamW. Only weight matrices and filters decay, not what is added: positions and biases."""
    groups = {True: [], False: []}
    for p in model.parameters():
        groups[p.ndim > 1 and p is not model.position].append(p)
    return torch.optim.AdamW([dict(params=groups[True], weight_decay=args.weight_decay),
                              dict(params=groups[False], weight_decay=0.0)],
                             betas=(0.9, 0.98), fused=True)


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


def gather(value):
    """What each process gives. They wait here for each other, but not for their GPUs."""
    values = [value] * WORLD
    if WORLD > 1:
        dist.all_gather_object(values, value)
    return values


# ── Plain PyTorch from here on: model, augmentation, evaluation, training ────────────────────────

TRAIN, TEST, ORDER, AUGMENT = range(4)  # random streams: each is seeded with [seed, stream, index]


def conv_stem(d_model, patch):
    """3 × 3 filters, each but the first halving the image, in place of one linear map a patch."""
    halvings = patch.bit_length() - 1
    if patch != 2 ** halvings:
        raise ValueError(f"--stem conv needs a power of two as --patch, not {patch}")
    widths = [max(1, d_model >> (halvings - i)) for i in range(halvings + 1)]
    layers = [nn.Conv2d(3, widths[0], 3, padding=1)]
    for a, b in zip(widths, widths[1:]):
        layers += [nn.GroupNorm(1, a), nn.SiLU(), nn.Conv2d(a, b, 3, stride=2, padding=1)]
    return nn.Sequential(*layers)


class Classifier(nn.Module):
    """Images uint8 (B, 3, H, W) in, logits (B, K) out, for images of any size."""

    def __init__(self, args, n_classes):
        super().__init__()
        D, grid = args.d_model, args.size // args.patch
        if grid * args.patch != args.size:
            raise ValueError(f"--size {args.size} is not a multiple of --patch {args.patch}")
        self.stem = (conv_stem(D, args.patch) if args.stem == "conv"
                     else nn.Conv2d(3, D, args.patch, stride=args.patch))
        self.position = nn.Parameter(0.02 * torch.randn(1, D, grid, grid))
        self.blocks = nn.ModuleList(
            Block(D, args.heads, args.mixer, d_ff=3 * D, dropout=args.dropout, bidirectional=True,
                  conv_size=args.conv) for _ in range(args.layers))
        self.head = nn.Linear(D, n_classes)
        nn.init.normal_(self.head.weight, std=D ** -0.5)
        self.columns = args.scan == "both"

    def forward(self, images):
        x = self.stem(images.float() / 64 - 2)     # most data have a mean of 120, a deviation of 60
        h, w = x.shape[2:]                                                   # (B, D, h, w)
        position = self.position
        if position.shape[2:] != (h, w):
            position = F.interpolate(position, (h, w), mode="bicubic", antialias=True)
        x = (x + position).flatten(2).transpose(1, 2)                        # (B, T = h·w, D)
        for i, block in enumerate(self.blocks):
            if i > 0 and self.columns:             # rows become columns, and columns rows again
                x = x.unflatten(1, (h, w)).transpose(1, 2).flatten(1, 2)     # (B, T, D)
                h, w = w, h
            x, _ = block(x)
        x = F.rms_norm(x.float(), x.shape[-1:], eps=1e-6)                    # (B, T, D)
        return self.head(x.mean(1))                                          # (B, K)


def prepare(args, device, n_classes):
    """Model, optimiser and scaler, fresh."""
    torch.manual_seed(args.seed)
    try:
        model = Classifier(args, n_classes).to(device)
    except (ValueError, TypeError) as error:
        fail(error)
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")
    return model, make_optimizer(model, args), scaler


# Augmentation chooses a box in each image: centre x, y, width, height, as parts of the image's. So
# what was squeezed into a square comes out in its own proportions. A negative width mirrors.

def centre_box(args, aspect):
    """For evaluation: the middle square; 7/8 of it for `folder`, as is the custom on ImageNet."""
    part, half = 0.875 if args.data == "folder" else 1.0, torch.full_like(aspect, 0.5)
    return torch.stack([half, half, part * (1 / aspect).clamp(max=1), part * aspect.clamp(max=1)])


def random_box(args, aspect, u):
    """For training, from random numbers u (B, 5), uniform on 0 … 1."""
    if args.augment == "crop":       # 8-100 % of the area, from 3:4 to 4:3, anywhere inside
        area, shape = 0.08 + 0.92 * u[:, 0], (4 / 3) ** (2 * u[:, 1] - 1)
        w, h = (z.sqrt().clamp(max=1) for z in (area * shape / aspect, area / shape * aspect))
        x, y = w / 2 + (1 - w) * u[:, 2], h / 2 + (1 - h) * u[:, 3]
    else:                            # all, moved by whole pixels, by up to an eighth of the size
        reach = args.size // 8 if args.augment == "shift" else 0
        x, y, w, h = centre_box(args, aspect)
        x, y = (z + (((2 * reach + 1) * v).floor() - reach) / args.size
                for z, v in ((x, u[:, 2]), (y, u[:, 3])))
    return torch.stack([x, y, torch.where((u[:, 4] < 0.5) & args.flip, -w, w), h])


def crop(images, box, size):
    """The boxes (4, B), resampled to size × size; beyond its edges an image is mirrored."""
    x, y, w, h = box[:, :, None, None]                                       # (B, 1, 1)
    at = (torch.arange(size, device=images.device) + 0.5) / size - 0.5       # (size,)
    where = torch.stack(torch.broadcast_tensors(x + w * at, y + h * at[:, None]), -1)
    cut = F.grid_sample(images.float(), 2 * where - 1, padding_mode="reflection",
                        align_corners=False)                                 # (B, 3, size, size)
    return cut.round().byte()


def cutout(images, side, u):
    """Grey out a square, its side a part of the image's, its centre u (B, 2) anywhere."""
    at = (torch.arange(images.shape[-1], device=images.device) + 0.5) / images.shape[-1]
    x, y = ((z[:, None] - at).abs() < side / 2 for z in u.T)                 # (B, size)
    return images.masked_fill((y[:, :, None] & x[:, None, :])[:, None], 128)


def augment(args, images, aspect, step):
    """The random numbers of the whole batch follow from the step; this process takes its own."""
    u = np.random.default_rng([args.seed, AUGMENT, step]).random((args.batch, 7), np.float32)
    u = torch.from_numpy(u[RANK::WORLD]).to(images.device, non_blocking=True)
    return cutout(crop(images, random_box(args, aspect, u), args.size), args.cutout, u[:, 5:])


def order(args, n, start):
    """The row numbers of each batch from step `start` on, for ever: they follow from the seed."""
    per_epoch = n // args.batch
    for epoch in itertools.count(start // per_epoch):
        rows = np.random.default_rng([args.seed, ORDER, epoch]).permutation(n)
        for i in range(start % per_epoch, per_epoch):
            yield rows[i * args.batch:(i + 1) * args.batch][RANK::WORLD]
        start = 0


@torch.no_grad()
def evaluate(model, data, args, device, n_classes, size):
    """Metrics, and the confusion table (K, K): rows are the truth, columns the answers."""
    model.eval()
    sums, table = torch.zeros(2, device=device), torch.zeros(n_classes ** 2, device=device)
    rows = np.arange(RANK, len(data), WORLD)
    share = args.batch // WORLD
    chunks = (rows[i:i + share] for i in range(0, len(rows), share))
    for images, labels, aspect in data.batches(chunks):
        with autocast(args, device):
            logits = model(crop(images, centre_box(args, aspect), size)).float()     # (B, K)
        best = logits.topk(min(5, n_classes)).indices                                # (B, 5)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        sums += torch.stack([loss, (best == labels[:, None]).sum()])
        table.index_add_(0, labels.clamp(min=0) * n_classes + best[:, 0], (labels >= 0).float())
    model.train()
    (loss, top5), table = (sum(gather(x.cpu().double())) for x in (sums, table))
    if (n := table.sum()) == 0:
        fail("none of the test images could be read")
    table = table.view(n_classes, n_classes)
    metrics = dict(loss=loss / n, accuracy=table.trace() / n)
    metrics |= dict(top5=top5 / n) if n_classes >= 100 else {}
    return {name: value.item() for name, value in metrics.items()}, table


def train(args, device):
    """One run, from the data to the final table."""
    if LOCAL_RANK > 0:
        gather("the first process of this host has found or downloaded its files")
    (data, test), classes = load_data(args, device)
    if LOCAL_RANK == 0:
        gather("so have I")
    if not WORLD <= args.batch <= len(data) or args.batch % WORLD:
        fail(f"--batch {args.batch}: expected a multiple of {WORLD}, up to {len(data)} (all data)")
    args.steps = args.steps or args.epochs * (len(data) // args.batch)
    model, optimizer, scaler = prepare(args, device, len(classes))
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(data):,} training and "
        f"{len(test):,} test images in {len(classes)} classes")

    progress = functools.partial(tqdm, total=args.steps, desc=args.mixer, unit="step")
    with run_folder(args), caught_signals() as caught, progress(disable=RANK > 0) as bar:
        run = dict(step=0, best=0.0, seconds=0.0, train_loss=None, images_per_second=0.0)
        if args.resume:
            saved = load_checkpoint(args, model, optimizer, scaler)
            run = {name: saved[name] for name in run}
            bar.initial = bar.n = run["step"]
        forward = nn.parallel.DistributedDataParallel(model) if WORLD > 1 else model
        forward = torch.compile(forward) if args.compile else forward
        batches = data.batches(order(args, len(data), run["step"]))
        began, recent, rates = time.perf_counter() - run["seconds"], [], []
        for step in range(run["step"], args.steps + 1):
            last = step == args.steps
            stop = max(gather(caught[0] if caught else 0))
            pause = last or step % args.eval_every == 0 or stop > 0
            if recent and (pause or step % 10 == 0):  # seldom: reading a loss waits for the GPU
                losses = gather(torch.stack(recent).mean().item())
                run["train_loss"] = check_finite(statistics.mean(losses), step)
                rates.append(len(recent) * args.batch / (time.perf_counter() - mark))
                run["images_per_second"] = statistics.median(rates)  # compilation is an outlier
                recent.clear()
                bar.set_postfix(loss=f"{run['train_loss']:.3f}", best=f"{run['best']:.1%}",
                                refresh=False)
            if pause:
                run.update(step=step, seconds=time.perf_counter() - began)
                if stop != signal.SIGTERM:  # which is in a hurry
                    metrics, table = evaluate(model, test, args, device, len(classes), args.size)
                    check_finite(metrics["loss"], step)
                    run["best"] = max(run["best"], metrics["accuracy"])
                    if RANK == 0:
                        write_log(args, **run, **metrics)
                if RANK == 0:
                    save_checkpoint(args, model, optimizer, scaler, classes=classes, **run)
                if last or stop:
                    break

            if not recent:
                mark = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args)
            images, labels, aspect = next(batches)     # (B, 3, H, W), (B,), (B,)
            images = augment(args, images, aspect, step)                     # (B, 3, size, size)
            with autocast(args, device):
                logits = forward(images)                                     # (B, K)
            loss = F.cross_entropy(logits.float(), labels, reduction="sum",  # unreadable: 0
                                   label_smoothing=args.label_smoothing) / len(labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            recent.append(loss.detach())
            bar.update()

    if stop:
        say(f"stopped after {step} steps, best accuracy {run['best']:.1%}; --resume continues")
        raise SystemExit(128 + stop)
    if len(classes) <= 16:
        print_table(table, classes)
    say(f"test accuracy {metrics['accuracy']:.2%} after {step} steps, {run['seconds']:.0f} s; "
        f"{run['images_per_second']:.0f} images/s in training" +
        (f"; among the first five: {metrics['top5']:.2%}" if "top5" in metrics else ""))
    for name, part in (("training", data), ("test", test)):
        names = sorted(str(part.paths[i]) for i in set().union(*gather(set(part.unreadable))))
        if names:
            say(f"{len(names)} unreadable {name} images were left out:", *names[:10])
    result = metrics | dict(steps=step, seconds=run["seconds"], best=run["best"],
                            images_per_second=run["images_per_second"])
    for size in args.test_sizes:
        metrics, _ = evaluate(model, test, args, device, len(classes), size)
        result[f"accuracy_{size}"] = metrics["accuracy"]
        say(f"test accuracy at size {size}: {metrics['accuracy']:.2%}")
    return result


def print_table(table, classes):
    """Rows: what it is; columns: what it was taken for."""
    width = max(map(len, classes))
    say(" " * width, *(name[:5].rjust(5) for name in classes))
    for name, row in zip(classes, table.int().tolist()):
        say(name.rjust(width), *(str(n or "·").rjust(5) for n in row))


@torch.no_grad()
def predict(args, device):
    """Print the likeliest classes of each file, by the checkpoint in --out."""
    saved = read_checkpoint(args.out / "checkpoint.pt")
    trained, classes = argparse.Namespace(**saved["args"] | dict(workers=0)), saved["classes"]
    model, _, _ = prepare(trained, device, len(classes))
    model.load_state_dict(saved["model"])
    files, answers = Files(args.predict, [0] * len(args.predict), trained, device), {}
    for path, (image, label, aspect) in zip(
            args.predict, files.batches(np.arange(len(files))[:, None])):
        if label >= 0:
            with autocast(trained, device):
                logits = model.eval()(crop(image, centre_box(trained, aspect), trained.size))
            p, which = logits[0].float().softmax(-1).topk(min(3, len(classes)))
            say(f"{path}:", ", ".join(f"{classes[k]} {x:.1%}" for k, x in zip(which, p)))
            answers[str(path)] = classes[which[0]]
    if files.unreadable:
        fail(f"{len(files.unreadable)} of {len(files)} files could not be read as images")
    return answers


def bench(args, device):
    """Images/s in training by image size, about the same number of tokens a step. Attention comes
    as it is in DeiT, without a convolution."""
    rate = {}
    sizes = args.bench or [224, 512, 1024]
    for size in sizes:
        for mixer in ("metala", "attention"):
            one = argparse.Namespace(**vars(args) | dict(
                data="synthetic", size=size, mixer=mixer, conv=args.conv * (mixer == "metala"),
                batch=max(WORLD, args.batch * args.size ** 2 // size ** 2 // WORLD * WORLD),
                steps=args.steps or 60, resume=False, out=args.out / f"{mixer}-{size}"))
            rate[mixer, size] = train(one, device)["images_per_second"]
            torch._dynamo.reset()
    for size in sizes:
        say(f"{size} × {size}, {(size // args.patch) ** 2} tokens: metala "
            f"{rate['metala', size]:.0f} images/s, attention {rate['attention', size]:.0f}, "
            f"ratio {rate['metala', size] / rate['attention', size]:.2f}")
    return {f"{mixer}_{size}": value for (mixer, size), value in rate.items()}


def main(argv=None):
    parser = common_flags()
    add = parser.add_argument
    add("--data", choices=["shapes", "mnist", "cifar10", "folder", "synthetic"], help="data set")
    add("--data-dir", type=Path, default="data", help="holds train/CLASS/* and val/CLASS/*, or "
        "mnist/* and cifar-10-batches-bin/*, which are downloaded if missing")
    add("--examples", type=at_least(1), default=30_000, help="training images of shapes")
    add("--test-examples", type=at_least(1), default=2000, help="test images of shapes")
    add("--workers", type=at_least(0), default=8, help="processes that decode image files")
    add("--size", type=at_least(1), help="height and width that images are brought to")
    add("--patch", type=at_least(1), help="height and width of a patch, which is one token")
    add("--stem", choices=["patch", "conv"], help="what makes a token of a patch: see conv_stem")
    add("--scan", choices=["rows", "both"], help="tokens by rows, or in turn by columns")
    add("--conv", type=at_least(0), default=3, help="width of every mixer's convolution; 0: none")
    add("--dropout", type=at_least(0, float), help="in every block")
    add("--epochs", type=at_least(1), help="passes over the training images")
    add("--augment", choices=["none", "shift", "crop"], help="see random_box")
    add("--flip", action=argparse.BooleanOptionalAction, help="mirror half of the images")
    add("--cutout", type=at_least(0, float), help="side of a greyed-out square, in images")
    add("--label-smoothing", type=at_least(0, float), help="share of the target spread evenly")
    add("--test-sizes", type=at_least(1), nargs="*", default=[], metavar="SIZE",
        help="image sizes at which to test once more at the end")
    add("--predict", type=Path, nargs="+", metavar="FILE", help="classify images, train nothing")
    add("--bench", type=at_least(1), nargs="*", metavar="SIZE",
        help="training speed against attention at these image sizes; 224 512 1024 if none is given")
    args = parse(parser, argv)
    device = choose_device(args)
    if args.predict:
        return predict(args, device)
    try:
        with processes(device):
            return train(args, device) if args.bench is None else bench(args, device)
    except FloatingPointError as error:
        fail(error)


if __name__ == "__main__":
    main()
