"""Time every command to its first output and to its end, for errors and for results, each in its own process.

    python -m benchmarks.speed.startup [--before TREE] [--rounds 5] [--only WORDS …] [--out FILE]

`first` is the time of the first byte on stdout or stderr, `end` the end of the process, `cpu` its user and system time,
the most reliable figure on a busy machine. Commands marked `without network` may ask the hub, at an address that does
not answer; all others are offline. With `--before`, the folder of another lpconv, both alternate. Modules are compiled
before the first round.
"""

import dataclasses
import json
import os
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import common
from lpconv.cli.main import COMMANDS

_OUT = "{new}"  # a folder that does not exist
_ASKING = ", without network"
_NOWHERE = "http://192.0.2.1"  # reserved for documentation, RFC 5737
_OFFLINE = {"HF_HUB_OFFLINE": "1"}
_LOST = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": _NOWHERE}

# Errors that need only the arguments or a look at a file, then those of names on the hub without a network.
ERRORS = (
    "convert demo --method units", "convert demo --gate snr>1", "convert nosuch", "convert demo -o done",
    "finetune demo --data none.txt", "finetune demo --data a.csv --text-column txet", "finetune demo --gate los<=1",
    "finetune demo --log-to foo", "bench nosuch", "bench --mode trian", "bench cut", "bench demo --save /proc/x",
    "probe demo --data none.txt", "advise demo --budget quallity=1", "advise nosuch", "export onnx nosuch -o x",
    "restore nosuch -o x", "verify nosuch", "batch none.yaml", "report nosuch", "inspect nosuch", "init nosuch -o x",
    "doctor --alias", "demo --outputs x", "convert me/model",
    "finetune demo --data me/data", f"convert me/model{_ASKING}", f"finetune demo --data me/data{_ASKING}",
    f"advise me/model{_ASKING}", f"bench me/model{_ASKING}", f"init me/model --reinit -o x{_ASKING}",
)  # fmt: skip
RESULTS = (
    "--help", "", "doctor", "doctor --aliases", "inspect demo", "inspect done", "report done", "report done other",
    "convert demo --dry-run", "convert demo --verify none -o {new}", "convert demo -o {new}", "verify done",
    "verify done --against demo --level weights", "restore done -o {new}", "probe demo -o {new} --steps 1",
    "export onnx done -o {new}", "demo -o {new}",
    "init demo --reinit --width 64 --layers 1 -o {new}", "batch jobs.yaml",
    "batch jobs.yaml --dry-run", "advise demo -o {new} --budget minutes=1",
    "finetune demo --recipe fp32 --steps 1 --seq-len 32 --batch-size 2 --eval-batches 1 --twin none -o {new}",
    "bench demo --format bf16 --compile off --min-iters 1 --min-time 0 --rounds 1 --launches 1 --seq-len 32",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run of a command by the lpconv in `tree`, "before" or "after"."""

    command: str
    tree: str
    exit_code: int
    first_s: float
    end_s: float
    cpu_s: float


def measure(command: str, tree: Path, folder: Path, *, label: str) -> Measurement:
    """Run a command of the lpconv in `tree` once, in `folder`."""
    new = Path(tempfile.mkdtemp(dir=folder)) / "new"
    arguments = command.removesuffix(_ASKING).split()
    words = [sys.executable, "-m", "lpconv", *(str(new) if w == _OUT else w for w in arguments)]
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment = inherited | {"PYTHONPATH": str(tree)} | (_LOST if command.endswith(_ASKING) else _OFFLINE)
    started = time.perf_counter()
    process = subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    first_s = _first_output(process)
    _, status, usage = os.wait4(process.pid, 0)
    end_s = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    return Measurement(
        command=command,
        tree=label,
        exit_code=process.returncode,
        first_s=min(first_s - started, end_s),
        end_s=end_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
    )


def _first_output(process: "subprocess.Popen[bytes]") -> float:
    """Time of the first output; reads everything, so that the process can end."""
    first = None
    assert process.stdout is not None
    assert process.stderr is not None
    with selectors.DefaultSelector() as streams, process.stdout, process.stderr:
        for stream in (process.stdout, process.stderr):
            streams.register(stream, selectors.EVENT_READ)
        while streams.get_map():
            for key, _ in streams.select():
                if os.read(key.fd, 2**16):
                    first = first or time.perf_counter()
                else:
                    streams.unregister(key.fileobj)
    return first or time.perf_counter()


def table(measurements: Sequence[Measurement]) -> str:
    """A Markdown table: one row per command, medians over rounds, with the range of CPU times."""
    trees = list(dict.fromkeys(m.tree for m in measurements))
    columns = [f"{t}: {what}" for t in trees for what in ("first, s", "end, s", "CPU, s")]
    rows = []
    for command in dict.fromkeys(m.command for m in measurements):
        of_command = [m for m in measurements if m.command == command]
        cells = [c for t in trees for c in _cells([m for m in of_command if m.tree == t])]
        rows.append((f"`lpconv {command.replace(_OUT, 'out')}`", str(of_command[-1].exit_code), *cells))
    return common.markdown(("command", "exit", *columns), rows)


def _cells(runs: Sequence[Measurement]) -> Iterator[str]:
    cpu = [m.cpu_s for m in runs]
    yield f"{statistics.median(m.first_s for m in runs):.2f}"
    yield f"{statistics.median(m.end_s for m in runs):.2f}"
    yield f"{statistics.median(cpu):.2f} ({min(cpu):.2f}–{max(cpu):.2f})"


def _prepared(folder: Path) -> None:
    (folder / "a.csv").write_text("text,label\nx,1\n", encoding="utf-8")
    job = {"id": "one", "model": "demo", "output": "job", "verify": "none", "force": True}
    (folder / "jobs.yaml").write_text(json.dumps({"version": 1, "jobs": [job]}), encoding="utf-8")
    made = {"done": "none", "other": "none", "layout": "none --layout compressed-tensors"}
    for name, level in {"cut": "none", **made}.items():
        done = measure(f"convert demo --format e4m3fn --verify {level} -o {name}", common.ROOT, folder, label="")
        assert done.exit_code == 0, done
    weights = folder / "cut/model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--before", type=Path, help="folder of another lpconv", metavar="TREE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[""], help="how the commands begin", metavar="WORDS")
    args = parser.parse_args()
    for timed in (ERRORS, RESULTS):
        if untimed := set(COMMANDS) - {c.split()[0] for c in timed if c}:
            parser.error(f"ERRORS and RESULTS lack {', '.join(sorted(untimed))}")
    trees = {"before": args.before.resolve()} if args.before else {}
    trees["after"] = common.ROOT
    commands = [c for c in (*ERRORS, *RESULTS) if c.startswith(tuple(args.only))]
    measurements: list[Measurement] = []
    loads: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _prepared(folder)
        _round(commands, trees, folder)  # compiles modules
        loads.append(round(os.getloadavg()[0], 1))
        for _ in range(args.rounds):
            measurements += _round(commands, trees, folder)
            loads.append(round(os.getloadavg()[0], 1))
            _save(loads, measurements, args.out)
    print(table(measurements), end="")


def _round(commands: Sequence[str], trees: Mapping[str, Path], folder: Path) -> list[Measurement]:
    return [measure(c, tree, folder, label=label) for c in commands for label, tree in trees.items()]


def _save(loads: Sequence[float], measurements: Sequence[Measurement], out: Path | None) -> None:
    """Write the result so far, after every round."""
    document = {
        "schema_version": 1,
        "command": common.command(),
        "machine": common.machine(),
        "load_averages": loads,
        "measurements": [dataclasses.asdict(m) for m in measurements],
    }
    common.save(document, out)


if __name__ == "__main__":
    main()
