"""Seeded damage to GGUF files: python -m benchmarks.attack.fuzz_gguf --rounds 200 --save FILE.json

So many damaged copies of a small file are opened and decoded whole, restored and converted. Each either works or ends
in an error of ours with exit code 3 or 4 (5 where numbers became NaN), within a minute, with nothing published. It ends
in exit code 1 with the seed of whatever else happens.
"""

import json
import os
import random
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import common

sys.path.insert(0, str(common.TESTS))

from gguf_files import write_gguf  # after the path to the helpers of the tests

import lpconv.gguf.read  # noqa: F401  # which takes long on a busy machine
from lpconv.convert.decode import decode_checkpoint
from lpconv.convert.run import convert
from lpconv.errors import LpconvError
from lpconv.forms.reader import StoredTensors
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent

_PATIENCE_S, _TABLES = 60, 2500  # bytes of metadata and of the table of tensors


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """One to three changes, nearly all of them to the tables in front of the data."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(min(_TABLES if rng.random() < 0.9 else len(data), len(data)))
        kind = rng.randrange(5)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at : at + 4] = rng.choice([0, 1, 2, 2**31, 2**32 - 1]).to_bytes(4, "little")
        elif kind == 2:
            data[at : at + 8] = rng.choice([0, 2**40, 2**63, 2**64 - 1]).to_bytes(8, "little")
        elif kind == 3:
            del data[at : at + rng.randint(1, 16)]
        else:
            data = data[: max(at, 1)]
    return bytes(data)


def _late(*_: object) -> NoReturn:
    raise TimeoutError("no end within a minute")


def attempt(name: str, file: Path, out: Path) -> str:
    """What a call ends in, in a word."""
    signal.alarm(_PATIENCE_S)
    try:
        if name == "decode":
            with StoredTensors.open(file) as stored:
                for tensor in stored.forms:
                    stored.tensor(tensor)
        elif name == "restore":
            decode_checkpoint(file, out, dtype=None, force=False, progress=Silent())
        else:
            convert(str(file), out, ConvertOptions(method="unit", format="fp16", verify="weights"))
    except LpconvError as e:
        if e.exit_code not in (3, 4, 5) or out.exists():
            raise RuntimeError(f"exit {e.exit_code}, published: {out.exists()}") from e
        return f"exit {e.exit_code}"
    finally:
        signal.alarm(0)
    return "works"


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="that of the first round")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _late)
    outcomes: dict[str, Counter[str]] = {n: Counter() for n in ("decode", "restore", "convert")}
    faults: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        raw = write_gguf(Path(folder) / "sound").read_bytes()
        for seed in range(options.seed, options.seed + options.rounds):
            file = Path(folder) / f"{seed}.gguf"
            file.write_bytes(damaged(raw, random.Random(seed)))
            for name, counts in outcomes.items():
                try:
                    counts[attempt(name, file, Path(folder) / f"{seed}-{name}")] += 1
                except Exception as e:  # what is looked for
                    faults.append({"seed": seed, "call": name, "error": repr(e)})
                    print(f"seed {seed}, {name}:", "".join(traceback.format_exception(e)[-3:]), file=sys.stderr)
            file.unlink()
    found = {"rounds": options.rounds, "outcomes": {n: dict(c) for n, c in outcomes.items()}, "faults": faults}
    print(json.dumps(found))
    common.save(found, options.out)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
