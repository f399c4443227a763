"""Write bench.npz: standardised MNIST and 1000 devices of 500 rows (half of them of one major class)."""

import argparse
import io
import os

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

DEVICES, MAJOR, MINOR, CLASSES = 1000, 250, 250, 10


def read(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Images of a parquet file as float32 [n, 784] in 0..255, and their labels as int64 [n]."""
    table = pq.read_table(path, columns=["image", "label"])
    images = [np.asarray(Image.open(io.BytesIO(cell["bytes"]))) for cell in table["image"].to_pylist()]
    return np.stack(images).reshape(len(images), -1).astype(np.float32), table["label"].to_numpy().astype(np.int64)


def device_rows(labels: np.ndarray, device: int, rng: np.random.Generator) -> np.ndarray:
    """250 rows of class device % 10; 250 spread over the 9 others (27 or 28 each), without repetition."""
    major = device % CLASSES
    counts = {major: MAJOR}
    others = rng.permutation([c for c in range(CLASSES) if c != major])
    for i, c in enumerate(others):
        counts[int(c)] = MINOR // len(others) + (i < MINOR % len(others))
    chosen = [rng.choice(np.flatnonzero(labels == c), n, replace=False) for c, n in sorted(counts.items())]
    return rng.permutation(np.concatenate(chosen)).astype(np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--source",
        default=os.path.join(os.environ.get("FEDCLUSTER_DATA", "."), "mnist"),
        help="folder of train.parquet, test.parquet",
    )
    parser.add_argument("--out", default="bench.npz")
    args = parser.parse_args()
    x_train, y_train = read(f"{args.source}/train.parquet")
    x_test, y_test = read(f"{args.source}/test.parquet")
    x_train, x_test = x_train / np.float32(255), x_test / np.float32(255)
    mean, std = np.float32(x_train.mean(dtype=np.float64)), np.float32(x_train.std(dtype=np.float64))
    rng = np.random.default_rng(0)
    rows = np.stack([device_rows(y_train, k, rng) for k in range(DEVICES)])
    np.savez(
        args.out,
        x_train=(x_train - mean) / std,
        y_train=y_train,
        x_test=(x_test - mean) / std,
        y_test=y_test,
        rows=rows,
    )
    print(f"{args.out}: train {x_train.shape}, test {x_test.shape}, rows {rows.shape}, mean {mean:.4f}, std {std:.4f}")


if __name__ == "__main__":
    main()
