"""Train an image classifier: a DeiT-shaped model with MetaLA, in both directions, as the mixer.

    pip install torch numpy tqdm               # and pillow, to read JPEG and PNG files
    python train_image.py                      # ten kinds of shapes on a laptop: 95% in 3.5 minutes
    python train_image.py --predict a.png b.png                     # by the last run's checkpoint
    python train_image.py --preset cifar --dtype bfloat16 --compile      # downloads CIFAR-10; GPU
    torchrun --nproc_per_node=8 train_image.py --preset tiny --data-dir ~/imagenet \\
        --dtype bfloat16 --compile             # train/CLASS/* and val/CLASS/*, the paper's recipe
    python train_image.py --preset tiny --data synthetic --size 512 --batch 384 --steps 60 \\
        --eval-every 20 --dtype bfloat16 --compile         # noise, to measure images a second

An image becomes a sequence: T patches, row by row, each a vector of width D, plus a learned
position. The blocks mix it, the mean of its T vectors is classified. A run leaves log.jsonl and
checkpoint.pt in --out. Ctrl-C evaluates, saves and stops; the same command with --resume continues
as if nothing had happened. Reading order: the data, then from `Classifier` down; the part in
between can wait.
"""
import argparse
import contextlib
import functools
import gzip
import importlib.util
import io
import itertools
import json
import math
import os
import re
import signal
import tarfile
import time
import warnings
import zipfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from metala import MIXERS, Backbone

try:
    import fcntl
except ImportError:  # Windows has no flock: there, two runs in one folder go unnoticed
    fcntl = None

SCRIPT = "train_image"
RANK, LOCAL_RANK, WORLD = (int(os.environ.get(name, default)) for name, default in
                           (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))  # set by torchrun
LAPTOP = dict(data="shapes", size=32, patch=4, stem="conv", d_model=64, layers=3, heads=2,
              dropout=0.0, augment="none", flip=False, cutout=0.0, label_smoothing=0.0, epochs=2,
              batch=32, lr=3e-3, warmup=200, weight_decay=0.05, eval_every=400)
MNIST = LAPTOP | dict(data="mnist", size=28, augment="shift", label_smoothing=0.1, epochs=40,
                      batch=256, eval_every=200)
CIFAR = dict(data="cifar10", size=32, patch=2, stem="conv", d_model=256, layers=7, heads=4,
             dropout=0.1, augment="shift", flip=True, cutout=0.375, label_smoothing=0.1, epochs=120,
             batch=512, lr=2e-3, warmup=500, weight_decay=0.1, eval_every=1000)
TINY = dict(data="folder", size=224, patch=16, stem="patch", d_model=192, layers=12, heads=3,
            dropout=0.0, augment="crop", flip=True, cutout=0.0, label_smoothing=0.1, epochs=300,
            batch=2048, lr=2.4e-3, warmup=3000, weight_decay=0.05, eval_every=2500)
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
MNIST_FILES = {"train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea37026",  # of SHA-256
               "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cc",
               "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e3",
               "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd"}
CIFAR_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR_SHA = "c4a38c50a1bc5f3a1c5537f2155ab9d6"
CIFAR_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()


def read(path, parse, url="", sha=""):
    """What `parse` makes of a file's bytes, without the .gz. A missing file is downloaded, and
    takes its name only if its SHA-256 begins as it should."""
    try:
        if url and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, path, sha)
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            return parse(np.frombuffer(file.read(), np.uint8))
    except Exception as error:  # of the disk, the network, a hash, the format: many kinds
        fail(f"{path} cannot be read{' or downloaded from ' * bool(url)}{url}: {error}")


def idx(content):
    """0, 0, 8 (bytes), the number of axes, each axis' length as big-endian int32, the bytes."""
    if content[:3].tolist() != [0, 0, 8]:
        raise ValueError(f"it starts with {bytes(content[:3]).hex(' ')}, not with 00 00 08")
    start = 4 + 4 * int(content[3])
    return content[start:].reshape(content[4:start].view(">i4"))


def read_mnist(folder):
    arrays = []
    for name, sha in MNIST_FILES.items():
        path, plain = folder / name, folder / name.removesuffix(".gz")
        arrays.append(read(plain if plain.exists() else path, idx, MNIST_URL + name, sha))
    images = [np.stack([x] * 3, 1) for x in arrays[::2]]  # grey as RGB
    return list(zip(images, arrays[1::2])), [str(digit) for digit in range(10)]


def read_cifar10(folder):
    """Records of 3073 bytes: the label, then 32 × 32 bytes each of red, green and blue."""
    def unpack(content):
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            tar.extractall(folder.parent, filter="data")

    if not folder.exists():
        read(folder.parent / "cifar-10-binary.tar.gz", unpack, CIFAR_URL, CIFAR_SHA)
    *train, test = (read(folder / name, lambda content: content.reshape(-1, 3073)) for name in
                    [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"])
    return [(x[:, 1:].reshape(-1, 3, 32, 32), x[:, 0])
            for x in (np.concatenate(train), test)], CIFAR_CLASSES


class Files(torch.utils.data.Dataset):
    """Image files, squeezed into squares, half as large again as what is cut out of them. What
    cannot be read has the label -100, which is no class."""

    def __init__(self, paths, labels, args):
        if importlib.util.find_spec("PIL") is None and any(x.suffix != ".npy" for x in paths):
            fail("reading JPEG or PNG files needs Pillow: pip install pillow")
        self.paths, self.labels, self.side, self.bad = paths, labels, args.size * 3 // 2, set()

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        path, image, label = self.paths[i], torch.zeros(1, 3, self.side, self.side), self.labels[i]
        try:
            if path.suffix == ".npy":
                pixels = np.load(path)                                       # (H, W, 3)
            else:
                from PIL import Image  # the only place that needs Pillow
                with Image.open(path) as file:
                    pixels = np.array(file.convert("RGB"))
            image += resized(torch.from_numpy(pixels).permute(2, 0, 1)[None], self.side)
        except Exception:  # Pillow raises many kinds; all mean the same here
            label = -100
        return image[0].byte(), label, i


def batches(data, rows, args, device):
    """Images and labels, on the device, for each array of row numbers. Files are decoded in worker
    processes; what cannot be read is named once."""
    if not isinstance(data, Files):
        yield from (data[torch.from_numpy(row).to(device, non_blocking=True)] for row in rows)
        return
    loader = torch.utils.data.DataLoader(
        data, batch_sampler=map(np.ndarray.tolist, rows), num_workers=args.workers,
        worker_init_fn=ignore_ctrl_c, pin_memory=device.type == "cuda",
        generator=torch.Generator())  # or it would draw from the global one
    for images, labels, index in loader:
        for i in set(index[labels < 0].tolist()) - data.bad:
            tqdm.write(f"unreadable, left out: {data.paths[i]}")
            data.bad.add(i)
        yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def ignore_ctrl_c(worker):
    """It reaches the workers too, but is the main process's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def resized(images, size):
    """Images uint8 (B, 3, H, W) as (B, 3, size, size)."""
    if images.shape[2:] == (size, size):
        return images
    images = F.interpolate(images.float(), (size, size), mode="bilinear", antialias=True)
    return images.round().byte()


def read_folder(root, args):
    """Any tree train/CLASS/*, val/CLASS/*; the classes are the folders of train, by name."""
    classes, sets = sorted(path.name for path in root.glob("train/*") if path.is_dir()), []
    for part in ("train", "val"):
        found = [(path, label) for label, name in enumerate(classes)
                 for path in sorted((root / part / name).glob("*"))]
        if not found:
            fail(f"--data-dir {root}: train/CLASS/* and val/CLASS/* are expected there; "
                 f"{root / part} has no files in the {len(classes)} classes of train")
        sets.append(Files(*zip(*found), args))
    return sets, classes


def load_data(args, device):
    """[training set, test set] and the names of the classes. What fits stays on the device."""
    folder = Path(args.data_dir)
    if args.data == "folder":
        return read_folder(folder, args)
    if args.data == "mnist":
        sets, classes = read_mnist(folder / "mnist")
    elif args.data == "cifar10":
        sets, classes = read_cifar10(folder / "cifar-10-batches-bin")
    elif args.data == "shapes":
        sets = [[np.concatenate(x) for x in zip(*(
            draw_shapes(np.random.default_rng([args.seed, stream, i]), min(500, n - i), args.size)
            for i in range(0, n, 500)))]
                for stream, n in ((TRAIN, args.examples), (TEST, args.test_examples))]
        classes = list(SHAPES)
    else:
        rng, classes = np.random.default_rng(args.seed), [str(i) for i in range(1000)]
        sets = [(rng.integers(0, 256, (n, 3, args.size, args.size), np.uint8),
                 rng.integers(0, 1000, n)) for n in (args.batch, 64)]
    for images, labels in sets:
        if not 0 < len(images) == labels.size or images.ndim != 4 or labels.max() >= len(classes):
            fail(f"--data {args.data}: images {images.shape} have labels {labels.shape} up to "
                 f"{labels.max(initial=0)}; as many, and none above {len(classes) - 1}, expected")
    return [torch.utils.data.TensorDataset(
        torch.from_numpy(np.ascontiguousarray(images)).to(device),           # (N, 3, H, W)
        torch.from_numpy(labels.astype(np.int64)).to(device))                # (N,)
            for images, labels in sets], classes


# ── Shared by the four scripts: arguments, device, run folder, checkpoint, signals, optimiser ────

MAY_CHANGE = {"preset", "resume", "out", "device", "compile", "eval_every", "data_dir", "workers",
              "epochs", "test_sizes", "predict"}  # from a run to its resumption


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
    add("--steps", type=at_least(1), help="training steps, instead of --epochs")
    add("--batch", type=at_least(1), help="images per step, of all processes together")
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
                names = "log.jsonl", "checkpoint.pt"
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


def save_checkpoint(args, model, optimizer, scaler, **progress):
    """All that an exact resumption needs. Killed at any moment, one whole checkpoint remains."""
    if RANK > 0:
        return
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


# ── Plain PyTorch from here on: model, augmentation, evaluation, training ────────────────────────

# Random streams: each is seeded with [seed, stream, index]
TRAIN, TEST, ORDER, AUGMENT, DROPOUT = range(5)


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
        self.body = Backbone(D, args.layers, args.heads, args.mixer, 3 * D, args.dropout,
                             **dict(bidirectional=True, conv_size=args.conv) | dict(args.option))
        self.head = nn.Linear(D, n_classes)
        nn.init.normal_(self.head.weight, std=D ** -0.5)

    def embed(self, images):
        x = self.stem(images.float() / 64 - 2)     # most data have a mean of 120, a deviation of 60
        position = self.position                                             # (1, D, h, w)
        if position.shape[2:] != x.shape[2:]:
            position = F.interpolate(position, x.shape[2:], mode="bicubic", antialias=True)
        return (x + position).flatten(2).transpose(1, 2).contiguous()        # (B, T = h·w, D)

    def forward(self, images):
        x, _ = self.body(self.embed(images))                                 # (B, T, D)
        return self.head(x.mean(1))                                          # (B, K)


def augment(args, images, u):
    """Each image is cut out anew, as random numbers u (B, 7), uniform on 0 … 1, say."""
    area, shape, x, y, mirror, *hole = u.T                     # each (B,)
    if args.augment == "crop":      # 8-100 % of the area, from 3:4 to 4:3, anywhere inside
        area, shape = 0.08 + 0.92 * area, (4 / 3) ** (2 * shape - 1)
        w, h = (area * shape).sqrt().clamp(max=1), (area / shape).sqrt().clamp(max=1)
        x, y = (1 - w) * (2 * x - 1), (1 - h) * (2 * y - 1)
    else:                           # all, moved by whole pixels, by up to an eighth of the size
        reach = args.size // 8 if args.augment == "shift" else 0
        w = h = torch.ones_like(x)
        x, y = (2 / args.size * (((2 * reach + 1) * z).floor() - reach) for z in (x, y))
    w, zero = torch.where((mirror < 0.5) & args.flip, -w, w), torch.zeros_like(x)
    theta = torch.stack([w, zero, x, zero, h, y], 1).view(-1, 2, 3)
    where = F.affine_grid(theta, [len(u), 3, args.size, args.size], align_corners=False)
    images = F.grid_sample(images.float(), where, padding_mode="reflection", align_corners=False)
    at = (torch.arange(args.size, device=u.device) + 0.5) / args.size
    column, row = ((z[:, None] - at).abs() < args.cutout / 2 for z in hole)  # (B, size)
    return images.round().byte().masked_fill((row[:, :, None] & column[:, None])[:, None], 128)


def order(args, n, start):
    """The row numbers of each batch from step `start` on, for ever: they follow from the seed."""
    for step in itertools.count(start):
        epoch, i = divmod(step, n // args.batch)
        if i == 0 or step == start:
            rows = np.random.default_rng([args.seed, ORDER, epoch]).permutation(n)
        yield rows[i * args.batch:(i + 1) * args.batch][RANK::WORLD]


@torch.no_grad()
def evaluate(model, data, args, device, n_classes, size):
    """Metrics, and the confusion table (K, K): rows are the truth, columns the answers."""
    model.eval()
    sums, table = torch.zeros(4, device=device), torch.zeros(n_classes, n_classes, device=device)
    mine, B = np.arange(RANK, len(data), WORLD), args.batch // WORLD
    rows = (mine[i:i + B] for i in range(0, len(mine), B))
    for images, labels in batches(data, rows, args, device):
        with autocast(args, device), torch.compiler.set_stance("force_eager"):
            logits = model(resized(images, size)).float()   # (B, K), and any B: not to be compiled
        best, known = logits.topk(min(5, n_classes)).indices, labels >= 0    # (B, 5), (B,)
        right = best == labels[:, None]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        sums += torch.stack([loss, known.sum(), right[:, 0].sum(), right.sum()])
        table.index_put_((labels.clamp(min=0), best[:, 0]), known.float(), accumulate=True)
    model.train()
    loss, n, top1, top5 = total(*sums.tolist())
    if n == 0:
        fail("none of the test images could be read")
    metrics = dict(loss=loss / n, accuracy=top1 / n)
    return metrics | (dict(top5=top5 / n) if n_classes >= 100 else {}), table


def training_step(model, optimizer, scaler, args, device):
    """A function that trains on a batch, its learning rate and the sum of its losses: both on the
    device, so that the host never waits. With --compile on one GPU a step is one launch."""
    if args.compile:  # block by block: equal blocks share one compilation of a few seconds
        torch._dynamo.config.optimize_ddp = False  # it would cut the blocks up once more
        model.embed = torch.compile(model.embed)
        for block in model.body.blocks:
            block.compile()
    forward = nn.parallel.DistributedDataParallel(model) if WORLD > 1 else model
    record = args.compile and device.type == "cuda" and WORLD == 1
    lr, losses = torch.zeros((), device=device), torch.zeros((), device=device)
    for group in optimizer.param_groups:
        group.update(lr=lr, capturable=record)

    def step(images, labels, u):
        images = augment(args, images, u)                                    # (B, 3, size, size)
        with autocast(args, device):
            logits = forward(images)                                         # (B, K)
        loss = F.cross_entropy(logits.float(), labels, reduction="sum",      # unreadable: 0
                               label_smoothing=args.label_smoothing) / len(labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(),
                                  capture_error_mode="thread_local"):  # loaders have threads
                step(*memory)
        for old, new in zip(memory, batch):
            old.copy_(new)
        graph.replay()
    return call


def train(args, device):
    """One run, from the data to the final table."""
    if LOCAL_RANK > 0:
        total(0)  # wait: the first process of this host may have to download its files
    (data, test), classes = load_data(args, device)
    if LOCAL_RANK == 0:
        total(0)
    if args.batch > len(data) or args.batch % WORLD:
        fail(f"--batch {args.batch}: expected a multiple of {WORLD}, up to {len(data)} (all data)")
    args.steps = args.steps or args.epochs * (len(data) // args.batch)
    torch.manual_seed(args.seed)
    try:
        model = Classifier(args, len(classes)).to(device)
    except (ValueError, TypeError, RuntimeError) as error:  # Runtime: too large for memory
        fail(error)
    optimizer = make_optimizer(model, args)
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(data):,} training and "
        f"{len(test):,} test images in {len(classes)} classes")

    progress = functools.partial(tqdm, total=args.steps, desc=args.mixer, unit="step")
    with run_folder(args), caught_signals() as caught, progress(disable=RANK > 0) as bar:
        run = dict(step=0, best=0.0, seconds=0.0, train_loss=None, images_per_second=None)
        if args.resume:
            saved = load_checkpoint(args, model, optimizer, scaler)
            run = {name: saved[name] for name in run}
            bar.initial = bar.n = run["step"]
        train_step, lr, losses = training_step(model, optimizer, scaler, args, device)
        start = before = run["step"]
        loader = batches(data, order(args, len(data), start), args, device)
        resumed = time.perf_counter()
        began = resumed - run["seconds"]
        for step in range(start, args.steps + 1):
            interrupted, terminated = total(signal.SIGINT in caught, signal.SIGTERM in caught)
            stop = interrupted or terminated
            planned = step == args.steps or step % args.eval_every == 0
            if planned or stop:
                if step > before:  # reading the losses waits for the GPU, so here only
                    mean, = total(losses.item() / (step - before) / WORLD)
                    run["train_loss"] = check_finite(mean, step)
                    losses.zero_()
                now = time.perf_counter()
                if before > start:  # the first steps compile: they say nothing about speed
                    run["images_per_second"] = round((step - before) * args.batch / (now - resumed))
                run.update(step=step, seconds=now - began)
                if not terminated:  # which is in a hurry
                    metrics, table = evaluate(model, test, args, device, len(classes), args.size)
                    check_finite(metrics["loss"], step)
                    if planned:  # Ctrl-C does not select
                        run["best"] = max(run["best"], metrics["accuracy"])
                    write_log(args, **run, **metrics)
                    bar.set_postfix_str(f"loss {metrics['loss']:.3f}, best {run['best']:.1%}")
                save_checkpoint(args, model, optimizer, scaler, classes=classes, **run)
                if step == args.steps or stop:
                    break
                before, resumed = step, time.perf_counter()
            lr.fill_(learning_rate(step, args))
            seed = np.random.default_rng([args.seed, DROPOUT, step]).integers(2**40)
            torch.manual_seed(seed + RANK)
            u = np.random.default_rng([args.seed, AUGMENT, step]).random((args.batch, 7), "f")
            u = torch.from_numpy(u[RANK::WORLD]).to(device, non_blocking=True)
            train_step(*next(loader), u)
            bar.update()
    if stop:
        leave()
        now = "" if terminated else f"{metrics['accuracy']:.1%} now, "
        say(f"stopped after {step} steps, accuracy {now}{run['best']:.1%} at best; "
            "--resume continues")
        raise SystemExit(128 + (signal.SIGINT if interrupted else signal.SIGTERM))
    return report(args, run | metrics, table, model, data, test, classes)


def report(args, result, table, model, data, test, classes):
    """The confusion table, the metrics, what could not be read, the accuracy at other sizes."""
    if len(classes) <= 16:
        width = max(map(len, classes))
        say("taken for".rjust(width), *(name[:5].rjust(5) for name in classes))
        for name, row in zip(classes, np.reshape(total(*table.flatten().tolist()), table.shape)):
            say(name.rjust(width), *(f"{n:.0f}".rjust(5) if n else "    ·" for n in row))
    say(f"test accuracy {result['accuracy']:.2%}" +
        (f" ({result['top5']:.2%} among the first five)" if "top5" in result else "") +
        f" after {result['step']} steps, {result['seconds']:.0f} s; "
        f"{result['images_per_second'] or 'no'} images/s in training")
    for name, part in (("training", data), ("test", test)) if args.data == "folder" else ():
        bad = [part.bad] * WORLD
        if WORLD > 1:
            dist.all_gather_object(bad, part.bad)
        if names := [str(part.paths[i]) for i in sorted(set().union(*bad))]:
            say(f"{len(names)} unreadable {name} images were left out:", *names[:10])
    for size in args.test_sizes:
        metrics, _ = evaluate(model, test, args, table.device, len(classes), size)
        result[f"accuracy_{size}"] = metrics["accuracy"]
        say(f"test accuracy at size {size}: {metrics['accuracy']:.2%}")
    return result | dict(steps=result["step"])


@torch.no_grad()
def predict(args, device):
    """Print the likeliest classes of each file, by the checkpoint in --out."""
    saved = read_checkpoint(args.out / "checkpoint.pt")
    for path in args.predict:
        if not path.is_file():
            fail(f"--predict {path}: no such file")
    now = dict(workers=0, dtype=args.dtype)
    trained = argparse.Namespace(**vars(args) | saved["args"] | now)
    classes = saved["classes"]
    model = Classifier(trained, len(classes)).to(device).eval()
    model.load_state_dict(saved["model"])
    files, answers = Files(args.predict, [0] * len(args.predict), trained), {}
    one_by_one = batches(files, np.arange(len(files))[:, None], trained, device)
    for path, (image, label) in zip(args.predict, one_by_one):
        if label >= 0:
            with autocast(trained, device):
                logits = model(resized(image, trained.size))                 # (1, K)
            p, which = logits[0].float().softmax(-1).topk(min(3, len(classes)))
            say(f"{path}:", ", ".join(f"{classes[k]} {x:.1%}" for k, x in zip(which, p)))
            answers[str(path)] = classes[which[0]]
    if files.bad:
        fail(f"{len(files.bad)} of {len(files)} files could not be read as images")
    return answers


def main(argv=None):
    parser = common_flags()
    add = parser.add_argument
    add("--data", choices=["shapes", "mnist", "cifar10", "folder", "synthetic"], help="data set")
    add("--data-dir", default="data", help="holds train/CLASS/* and val/CLASS/*, or mnist/* and "
        "cifar-10-batches-bin/*, which are downloaded if missing")
    add("--examples", type=at_least(1), default=30_000, help="training images of shapes")
    add("--test-examples", type=at_least(1), default=2000, help="test images of shapes")
    add("--workers", type=at_least(0), default=8, help="processes that decode image files")
    add("--size", type=at_least(1), help="height and width that images are brought to")
    add("--patch", type=at_least(1), help="height and width of a patch, which is one token")
    add("--stem", choices=["patch", "conv"], help="what makes a token of a patch: see conv_stem")
    add("--conv", type=at_least(0), default=3, help="width of every mixer's convolution; 0: none")
    add("--dropout", type=at_least(0, float, high=1), help="in every block")
    add("--epochs", type=at_least(1), help="passes over the training images")
    add("--augment", choices=["none", "shift", "crop"], help="see `augment`")
    add("--flip", action=argparse.BooleanOptionalAction, help="mirror half of the images")
    add("--cutout", type=at_least(0, float), help="side of a greyed-out square, in images")
    add("--label-smoothing", type=at_least(0, float, high=1), help="of the target, spread evenly")
    add("--test-sizes", type=at_least(1), nargs="*", default=[], metavar="SIZE",
        help="image sizes at which to test once more at the end")
    add("--predict", type=Path, nargs="+", metavar="FILE", help="classify images, train nothing")
    args = parse(parser, argv)
    device = choose_device(args)
    if args.predict and WORLD > 1:
        fail("torchrun is for training only")
    if min(args.test_sizes, default=args.patch) < args.patch:
        fail(f"--test-sizes {min(args.test_sizes)}: smaller than a --patch of {args.patch}")
    try:
        if args.predict:
            return predict(args, device)
        if WORLD > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        result = train(args, device)
        leave()
        return result
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
