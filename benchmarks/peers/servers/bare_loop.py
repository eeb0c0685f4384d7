"""The yardstick: ONNX Runtime called in a loop, on request bytes that lie ready, in the session that all servers use.

It reads lines "batch seconds" from standard input and answers each with a line "images/s median-ms-per-batch".
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time

import numpy as np
from common import SHAPE, decode, infer, open_session  # type: ignore[import-not-found]  # beside this file, which runs as a script

_PAYLOADS = 16


def main() -> None:
    session = open_session()
    random = np.random.default_rng(0)
    for line in sys.stdin:
        batch, seconds = line.split()
        bodies = [random.integers(0, 256, (int(batch), *SHAPE), np.uint8).tobytes() for _ in range(_PAYLOADS)]
        infer(session, decode(bodies[0])).argmax(axis=1)
        times: list[float] = []
        now = begin = time.perf_counter()
        for body in itertools.cycle(bodies):
            infer(session, decode(body)).argmax(axis=1)
            before, now = now, time.perf_counter()
            times.append(now - before)
            if now - begin >= float(seconds):
                break
        images_per_s = len(times) * int(batch) / (now - begin)
        sys.stdout.write(f"{images_per_s} {1000 * statistics.median(times)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
