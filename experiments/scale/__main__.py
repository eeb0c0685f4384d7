"""One case of the experiment `scale` in a separate process, so that its memory can be measured. It reads a line of JSON
and prints its progress, and at last the figures. `experiments.scale.experiment` starts it.
"""

from __future__ import annotations

import gc
import json
import sys
import time

from pydantic import TypeAdapter

from experiments.scale.world import Case, simulate

_TELL_S = 0.5


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("experiments.scale is a part of `terrace experiment scale`, which starts it, and no command")
    case = TypeAdapter(Case).validate_json(sys.argv[1])
    gc.disable()  # of a run there are no circles of objects; looking for them would take an eighth of the time
    told = 0.0

    def tell(done: float) -> None:
        nonlocal told
        if time.monotonic() - told > _TELL_S:
            told = time.monotonic()
            sys.stdout.write(f"{done:.4f}\n")
            sys.stdout.flush()

    sys.stdout.write(json.dumps(simulate(case, tell)) + "\n")


if __name__ == "__main__":
    main()
